"""Model weights written by something else than the optimizer: noticed before masters are stepped or saved.

Version counters show most writes. Those through ``.data`` show in a sample of the bits: every element of tensors up to
16,384, a lattice of one in about a thousand of larger ones. Where either has moved, the weight is compared with its
rounded master in full; equal bits are no write. A master that the user wrote wins over its weight.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from .. import kernels
from ..kernels import backends, counters
from .diagnostics import warn_cast, warn_model_write
from .dtensors import version
from .masters import Masters
from .pairs import DeviceGroup, Pair, Pairs

POLICIES = ("refresh", "error", "ignore")

logger = logging.getLogger("fp16opt")


def _strides(group: DeviceGroup) -> list[tuple[int, ...] | None]:
    """Of the weights that have masters, by row."""
    return [None if model is None else model.stride() for model in group.copied_models]


class _Record:
    """What the weights of one device held when their masters were last written with them."""

    def __init__(self, group: DeviceGroup) -> None:
        self.then = torch.zeros(len(group), dtype=torch.int64, device=group.device)
        self.now = torch.zeros_like(self.then)
        self.layout = -1
        self.strides = _strides(group)
        self.taken = torch.zeros(len(group), dtype=torch.int32, device=group.device)


class ModelWrites:
    """What the engine last wrote, and what somebody else has written since.

    Args:
        policy: one of ``POLICIES``.

    Attributes:
        taken: how many writes masters have taken, a parameter and a step each, but for :meth:`untold` ones.
        lent: what the model holds instead of its weights, in words; "" where it holds these.
    """

    def __init__(self, pairs: Pairs, masters: Masters, policy: str) -> None:
        self.pairs = pairs
        self.masters = masters
        self.policy = policy
        self.taken = 0
        self.lent = ""
        self._warned: set[str] = set()
        self._written_masters: set[int] = set()
        self._untold = False
        self._records: list[_Record] = []
        self._generation = -1
        self._unsampled: set[int] = set()  # positions of weights that were accepted, and are to be sampled together
        self.record()

    # -- what we wrote -----------------------------------------------------------------------------------------------

    def agree(self, rounded_all: bool, waits: bool) -> None:
        """After a step masters and model agree; so they do after hooks that wrote masters.

        Args:
            rounded_all: Whether the step wrote all masters into the model; else those that somebody wrote are, now.
            waits: False leaves what is to be told to who looks at the device anyway.

        Syncs: where it waits.
        """
        if not rounded_all:
            self.see_masters()
            if self._written_masters:
                self._round_written()
        self.record(masters_seen=not rounded_all)
        if waits:
            self.tell()
        else:
            self._untold = True

    def record(self, masters_seen: bool = False) -> None:
        """Weights and masters agree: take both as they are for written by the engine. No host sync.

        Args:
            masters_seen: Whether :meth:`see_masters` has just been asked.
        """
        if self._generation != self.pairs.generation or len(self._records) != len(self.pairs.devices):
            self._follow()
        self._written_masters.clear()
        self._unsampled.clear()
        if not masters_seen:
            self._master_versions = self._versions(self.pairs.apart)
        self._model_versions = self._versions(self.pairs.models)
        if self.policy != "ignore":
            for group, record in zip(self.pairs.devices, self._records, strict=True):
                self._sample(group, record.then)
                if record.layout != self.pairs.layout:
                    record.layout, record.strides = self.pairs.layout, _strides(group)

    def grown(self) -> None:
        """Parameters or masters came. Writes to older ones that were not noticed yet stay to be noticed."""
        self.sample_accepted()
        model_versions, master_versions = self._model_versions, self._master_versions
        before = {
            position: (record.then[row].clone(), record.strides[row])
            for group, record in zip(self._groups, self._records, strict=True)
            for row, position in enumerate(group.positions)
            if group.copied_models[row] is not None
        }
        written = set(self._written_masters)
        self.record()
        self._written_masters = written
        for group, record in zip(self.pairs.devices, self._records, strict=True):
            for row, position in enumerate(group.positions):
                if position in before:
                    record.then[row], record.strides[row] = before[position]
                    self._model_versions[position] = model_versions[position]
                    self._master_versions[position] = master_versions[position]

    def count_anew(self) -> None:
        """Tensors were copied, and count their versions from the beginning. What was written before stays written."""
        self._groups = list(self.pairs.devices)
        self._generation = self.pairs.generation
        self._master_versions = self._versions(self.pairs.apart)
        self._model_versions = self._versions(self.pairs.models)

    def _follow(self) -> None:
        """Rows are new."""
        self._generation = self.pairs.generation
        self._groups = list(self.pairs.devices)
        self._records = [_Record(group) for group in self._groups]

    def _versions(self, tensors: list[Tensor] | list[Tensor | None]) -> list[int]:
        found = counters.versions(tensors)
        if found is None:  # pieces of DTensors count their own
            found = [-1 if tensor is None else version(tensor) for tensor in tensors]
        return found

    def _sample(self, group: DeviceGroup, samples: Tensor) -> None:
        """Digests of a device's weights into ``samples``."""
        if group.copied:
            kernels.multi_tensor_sample(group.copied_models, samples, tables=group.tables["sample"])

    # -- masters that the user wrote ---------------------------------------------------------------------------------

    def see_masters(self) -> None:
        """Remember which masters the user, or a hook, has written, until they are rounded down."""
        if not self.pairs.has_apart or counters.have_versions(self.pairs.apart, self._master_versions):
            return
        versions = self._versions(self.pairs.apart)
        now_and_then = enumerate(zip(versions, self._master_versions, strict=True))
        self._written_masters.update([position for position, (now, then) in now_and_then if now != then])
        self._master_versions = versions

    def _round_written(self) -> None:
        """Round down those masters."""
        for group in self.pairs.devices:
            rows = [row for row, position in enumerate(group.positions) if position in self._written_masters]
            if rows:
                self.masters.round_down(group, rows)

    # -- weights that somebody else wrote ----------------------------------------------------------------------------

    def notice(self, waits: bool = True) -> None:
        """Follow the policy where weights hold other values than their masters.

        Args:
            waits: False leaves the look to the device, where the policy is "refresh"; :meth:`tell` says what was taken.

        Raises:
            RuntimeError: the policy is "error" and a weight was written; or the model's weights are lent.

        Syncs: where it waits.
        """
        if self.lent:
            self.check_home("MixedPrecisionOptimizer")
        if self._unsampled:
            self.sample_accepted()
        if self.pairs.has_pieces:
            self.pairs.take_pieces()
        if self.policy == "ignore" or not self.pairs.has_apart:
            return
        versions = self._model_versions
        if not counters.have_versions(self.pairs.models, versions):
            versions = self._versions(self.pairs.models)
        if self.policy == "refresh" and not waits and not self.masters.ties:
            self._take_on_device(versions)
        else:
            written: list[Pair] = []
            for group, record in zip(self._groups, self._records, strict=True):
                written += self._written(group, record, versions)
            if written:
                self._follow_policy(written)
                versions = self._versions(self.pairs.models)
        self._model_versions = versions

    def _follow_policy(self, written: list[Pair]) -> None:
        if self.policy == "error":
            raise RuntimeError(
                f"the model's weights were written behind the optimizer: {self.pairs.describe(written)}. Call "
                'refresh_masters() after writing to the model, or use on_model_write="refresh".'
            )
        for pair in written:
            self.masters.take_up(pair)
        self.taken += len(written)
        self.accept(written)
        warn_model_write([pair.name for pair in written])

    def _written(self, group: DeviceGroup, record: _Record, versions: list[int]) -> list[Pair]:
        self._sample(group, record.now)
        sampled = None if backends.are_equal(record.now, record.then) else (record.now != record.then).tolist()
        if sampled is None and versions == self._model_versions:
            return []
        self.see_masters()
        counted = [versions[i] != self._model_versions[i] for i in group.positions]
        moved = [
            row
            for row in group.copied
            if (counted[row] or (sampled is not None and sampled[row]))
            and group.positions[row] not in self._written_masters
        ]
        pairs = [self.pairs.all[group.positions[row]] for row in moved]
        self.masters.mend(pairs)
        written = []
        for row, pair in zip(moved, pairs, strict=True):
            if self.masters.differs(pair, self._moved(group, record, row)):
                written.append(pair)
            else:  # the same values, perhaps laid out anew
                record.then[row], record.strides[row] = record.now[row], group.models[row].stride()
        return written

    def _moved(self, group: DeviceGroup, record: _Record, row: int) -> bool:
        """Whether a weight's sample differs from the recorded one, in the layout in which that was taken."""
        weight, strides = group.models[row].detach(), record.strides[row]
        kernels.multi_tensor_sample([weight], record.now[row : row + 1])
        if strides is None or weight.stride() == strides:
            return not torch.equal(record.now[row], record.then[row])
        as_before = weight.new_empty_strided(weight.shape, strides).copy_(weight)
        found = torch.zeros_like(record.now[row : row + 1])
        kernels.multi_tensor_sample([as_before], found)
        return not torch.equal(found[0], record.then[row])

    def _take_on_device(self, versions: list[int]) -> None:
        """Nobody looks whether there was anything to take. The next step rounds down what was."""
        self.see_masters()
        for group, record in zip(self._groups, self._records, strict=True):
            if not group.copied:
                continue
            self._sample(group, record.now)
            for row, position in enumerate(group.positions) if versions != self._model_versions else ():
                if versions[position] != self._model_versions[position]:  # compare in full, whatever the sample says
                    torch.add(record.then[row], 1, out=record.now[row])
            masters = group.copied_masters
            if theirs := self._written_masters:
                pairs = zip(group.positions, masters, strict=True)
                masters = [None if position in theirs else master for position, master in pairs]
            self.masters.take_up_on_device(group, masters, record.now, record.then, record.taken)
            self._untold = True
        if any(kernels.backend(group.device) == "reference" for group in self._groups):  # which counts its writes
            self._master_versions = self._versions(self.pairs.apart)

    def accept(self, pairs: list[Pair]) -> None:
        """Masters were brought up to these weights: from here on they count as written by the engine."""
        for pair in pairs:
            self.accept_soon(pair)
        self.sample_accepted()

    def accept_soon(self, pair: Pair) -> None:
        """As :meth:`accept`, but :meth:`sample_accepted` takes the samples of many weights at once.

        Until then what goes around versions passes for the engine's.
        """
        position = pair.device.positions[pair.row]
        self._master_versions[position] = -1 if self.pairs.are_own[position] else version(pair.master)
        self._model_versions[position] = version(pair.model)
        if self.policy != "ignore":
            self._unsampled.add(position)

    def sample_accepted(self) -> None:
        """Sample the weights that were accepted since. No host sync."""
        for group, record in zip(self._groups, self._records, strict=True) if self._unsampled else ():
            weights = [
                weight.detach() if position in self._unsampled else None
                for position, weight in zip(group.positions, group.models, strict=True)
            ]
            if any(weight is not None for weight in weights):
                kernels.multi_tensor_sample(weights, record.then, tables=group.tables["accepted"])
            for row, weight in enumerate(weights):
                if weight is not None:
                    record.strides[row] = weight.stride()
        self._unsampled.clear()

    def doubt_accepted(self) -> None:
        """Others may have written weights that were accepted since: the next look compares all of their elements."""
        for position in self._unsampled:
            self._model_versions[position] = -1
        self._unsampled.clear()

    # -- weights that are put aside for a while ------------------------------------------------------------------------

    def lend(self, to: str) -> None:
        """From here on the model holds other values, which are no write. :meth:`notice` first.

        Args:
            to: these, in words.
        """
        self.lent = to

    def take_back(self, pairs: list[Pair]) -> None:
        """These weights, which were all that was lent, hold again what they held."""
        self.lent = ""
        self.accept([pair for pair in pairs if pair.master is not pair.model])

    def check_home(self, who: str) -> None:
        """Raise ``RuntimeError`` where the model holds something else than its weights."""
        if self.lent:
            raise RuntimeError(
                f"{who} was called while the model holds {self.lent}: masters and weights don't belong together now. "
                "Leave the `with` block first."
            )

    # -- in words ----------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Warn of masters that did not fit into the model, and of what was taken on a device. Syncs."""
        self._untold = False
        if unfit := self.pairs.unfit():
            warn_cast(unfit, self._warned)
        for group, record in zip(self._groups, self._records, strict=True):
            if group.is_host:
                continue
            flags_now = record.taken.clone()
            record.taken.zero_()  # before the wait: what is set meanwhile, by a replay say, is told next time
            if any(taken := flags_now.tolist()):
                self.taken += sum(map(bool, taken))
                warn_model_write([self.pairs.names[i] for i, bit in zip(group.positions, taken, strict=True) if bit])

    def untold(self) -> list[Tensor]:
        """By device: how many parameters' writes were taken there that :meth:`tell` has not told of. No sync."""
        groups = [] if not self._untold else zip(self._groups, self._records, strict=True)
        return [record.taken.ne(0).sum() for group, record in groups if not group.is_host]

    def tell_if_due(self) -> None:
        """:meth:`tell`, if something is untold. Syncs then."""
        if self._untold:
            self.tell()
