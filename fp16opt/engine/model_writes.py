"""Model weights written by something else than the optimizer: noticed before masters are stepped or saved.

Version counters show most writes. Those through ``.data`` show in a sample of the bits: every element of tensors up to
16,384, a lattice of one in about a thousand of larger ones. Where either has moved, the weight is compared with its
rounded master in full; equal bits are no write. A master that the user wrote wins over its weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels import backends
from ..kernels.calls import Entries
from . import errors
from .diagnostics import Lines, warn_cast, warn_model_write
from .dtensors import version, versions
from .masters import Masters
from .params import DeviceParams, ParamPair, ParamTable


def _strides(group: DeviceParams) -> list[tuple[int, ...] | None]:
    """Of the weights that have masters, by row."""
    return [None if model is None else model.stride() for model in group.apart_models]


class _Record:
    """What the weights of one device held when their masters were last written with them."""

    def __init__(self, group: DeviceParams) -> None:
        self.then = torch.zeros(len(group), dtype=torch.int64, device=group.device)
        self.now = torch.zeros_like(self.then)
        self.layout = -1
        self.strides = _strides(group)
        self.taken = torch.zeros(len(group), dtype=torch.int32, device=group.device)


class ModelWrites:
    """What the engine last wrote, and what other code has written since.

    Args:
        policy: ``on_model_write``, checked.
        lines: where writes are logged.

    Attributes:
        taken: how many writes masters have taken, counted once for each parameter and step. Those of
            :meth:`not_warned` are not in it yet.
        swapped: what the model holds instead of its weights, in words; "" where it holds these.
    """

    def __init__(self, params: ParamTable, masters: Masters, policy: str, lines: Lines) -> None:
        self.lines = lines
        self.params = params
        self.masters = masters
        self.policy = policy
        self.taken = 0
        self.swapped = ""
        self._warned: set[str] = set()
        self._written_masters: set[int] = set()
        self._unwarned = False
        self._times_taken = 0
        self._records: list[_Record] = []
        self._generation = -1
        self._unsampled: set[int] = set()  # positions of weights that were accepted, and are to be sampled together
        self.record()

    # -- what we wrote -----------------------------------------------------------------------------------------------

    def agree(self, rounded_all: bool, waits: bool) -> None:
        """After a step masters and model agree; so they do after hooks that wrote masters.

        Args:
            rounded_all: Whether the step wrote all masters into the model; else those that the user wrote are, now.
            waits: False defers warnings to the next sync.

        Syncs: where it waits.
        """
        if not rounded_all:
            self.round_written()
        self.record(masters_seen=not rounded_all)
        if waits:
            self.warn_now()
        else:
            self._unwarned = True

    def record(self, masters_seen: bool = False) -> None:
        """Weights and masters agree: what moves from here on was written by other code. No host sync.

        Args:
            masters_seen: Whether :meth:`see_masters` has just been asked.
        """
        if self._generation != self.params.generation or len(self._records) != len(self.params.devices):
            self._make_records()
        self._written_masters.clear()
        self._unsampled.clear()
        if not masters_seen:
            self._master_versions = versions(self.params.apart)
        readings = self._read_models()
        if self.policy != "ignore":
            for group, record, reading in zip(self.params.devices, self._records, readings, strict=True):
                self._sample(group, record.then, reading)
                if record.layout != self.params.layout:
                    record.layout, record.strides = self.params.layout, _strides(group)

    def follow_params(self) -> None:
        """Parameters or masters came or went. Writes to others that were not noticed yet stay to be noticed."""
        self.sample_accepted()
        kept = {
            id(pair.model): (
                pair.master,
                record.then[row].clone(),
                record.strides[row],
                self._model_versions[position],
                self._master_versions[position],
                position in self._written_masters,
            )
            for group, record in zip(self._groups, self._records, strict=True)
            for row, (position, pair) in enumerate(zip(group.positions, group.pairs, strict=True))
            if group.apart_models[row] is not None
        }
        self.record()
        for group, record in zip(self.params.devices, self._records, strict=True):
            for row, (position, pair) in enumerate(zip(group.positions, group.pairs, strict=True)):
                before = kept.get(id(pair.model))
                if before is None or before[0] is not pair.master:
                    continue
                _, record.then[row], record.strides[row], *counted, is_written = before
                self._model_versions[position], self._master_versions[position] = counted
                if is_written:
                    self._written_masters.add(position)

    def count_anew(self) -> None:
        """Tensors were copied, and their version counters are new. Masters that the user wrote before stay noted."""
        self._groups = list(self.params.devices)
        self._generation = self.params.generation
        self._master_versions = versions(self.params.apart)
        self._model_versions = versions(self.params.models)

    def _make_records(self) -> None:
        """Make empty records for the rows that there are now."""
        self._generation = self.params.generation
        self._groups = list(self.params.devices)
        self._records = [_Record(group) for group in self._groups]

    def _read_models(self) -> list[Any]:
        """Note the versions of all weights, and say by device what was read of them along with that."""
        readings = [group.read_models() for group in self.params.devices]
        self._model_versions = self._versions_of(readings)
        return readings

    def _versions_of(self, readings: list[Any]) -> list[int]:
        """Of all weights, in the order of the table, as they were read or, where they were not, as they are."""
        if len(readings) == 1 and readings[0] is not None and not self.params.has_dtensors:
            counted: list[int] = readings[0].counts
            return counted
        return versions(self.params.models)

    def _sample(self, group: DeviceParams, samples: Tensor, reading: Any = None) -> None:
        """Digests of a device's weights into ``samples``.

        Args:
            reading: of the weights, if it was just made.
        """
        if group.apart:
            kernels.multi_tensor_sample(group.rows(reading), samples, cache=group.caches["sample"])

    # -- masters that the user wrote ---------------------------------------------------------------------------------

    def see_masters(self) -> None:
        """Remember which masters the user, or a hook, has written, until they are rounded down."""
        if not self.params.any_apart:
            return
        now, then = versions(self.params.apart), self._master_versions
        if now != then:
            moved = [position for position, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
            self._written_masters.update(moved)
            self._master_versions = now

    def write_edited(self) -> None:
        """Where the user, or a hook, has written masters, the model follows, and both agree. No host sync."""
        self.see_masters()
        if not self._written_masters:
            return
        pairs = [self.params.all[position] for position in self._written_masters]
        with torch.no_grad():
            self.round_written()
            self.accept(pairs)
        self._written_masters.clear()

    def round_written(self) -> None:
        """Round down those masters. No host sync."""
        self.see_masters()
        for group in self.params.devices if self._written_masters else ():
            rows = [row for row, position in enumerate(group.positions) if position in self._written_masters]
            if rows:
                self.masters.round_down(group, rows)

    # -- weights that other code wrote ----------------------------------------------------------------------------

    def sync(self, waits: bool = True, weights: tuple[Any, ...] | None = None) -> None:
        """Follow the policy where weights hold other values than their masters.

        Args:
            weights: by device, what the call has read of them, if no code of the user's has run since.
            waits: False leaves the comparison to the device, where the policy is "refresh"; :meth:`warn_now` says what
                was taken.

        Raises:
            RuntimeError: the policy is "error" and a weight was written; or the model's weights are swapped.

        Syncs: where it waits.
        """
        if self.swapped:
            self.require_not_swapped("MixedPrecisionOptimizer")
        if self._unsampled:
            self.sample_accepted()
        if self.params.has_dtensors:
            self.params.find_pieces()
        if self.policy == "ignore" or not self.params.any_apart:
            return
        readings = [group.read_models() for group in self._groups] if weights is None else list(weights)
        counted = self._versions_of(readings)
        if self.policy == "refresh" and not waits and not self.masters.ties:
            self._take_on_device(counted)
        else:
            written: list[ParamPair] = []
            for group, record, reading in zip(self._groups, self._records, readings, strict=True):
                written += self._written(group, record, counted, reading)
            if written:
                self._follow_policy(written)
                counted = versions(self.params.models)
        self._model_versions = counted

    def _follow_policy(self, written: list[ParamPair]) -> None:
        if self.policy == "error":
            raise errors.MODEL_WRITTEN(names=self.params.describe(written))
        for pair in written:
            self.masters.take_up(pair)
        self.taken += len(written)
        self.accept(written)
        self._warn_taken(written)

    def _written(self, group: DeviceParams, record: _Record, counted: list[int], reading: Any) -> list[ParamPair]:
        self._sample(group, record.now, reading)
        sampled = None if backends.are_equal(record.now, record.then) else (record.now != record.then).tolist()
        if sampled is None and counted == self._model_versions:
            return []
        self.see_masters()
        by_counter = [counted[i] != self._model_versions[i] for i in group.positions]
        moved = [
            row
            for row in group.apart
            if (by_counter[row] or (sampled is not None and sampled[row]))
            and group.positions[row] not in self._written_masters
        ]
        pairs = [self.params.all[group.positions[row]] for row in moved]
        self.masters.mend(pairs)
        written = []
        for row, pair in zip(moved, pairs, strict=True):
            if self.masters.differs(pair, self._moved(group, record, row)):
                written.append(pair)
            else:  # the same values, perhaps laid out anew
                record.then[row], record.strides[row] = record.now[row], group.models[row].stride()
        return written

    def _moved(self, group: DeviceParams, record: _Record, row: int) -> bool:
        """Whether a weight's sample differs from the recorded one, in the layout in which that was taken."""
        weight, strides = group.models[row].detach(), record.strides[row]
        kernels.multi_tensor_sample([weight], record.now[row : row + 1])
        if strides is None or weight.stride() == strides:
            return not torch.equal(record.now[row], record.then[row])
        as_before = weight.new_empty_strided(weight.shape, strides).copy_(weight)
        found = torch.zeros_like(record.now[row : row + 1])
        kernels.multi_tensor_sample([as_before], found)
        return not torch.equal(found[0], record.then[row])

    def _take_on_device(self, counted: list[int]) -> None:
        """Compare and update on the device, without a sync. The next step rounds down what was taken."""
        self.see_masters()
        for group, record in zip(self._groups, self._records, strict=True):
            if not group.apart:
                continue
            self._sample(group, record.now)
            # Where a master is whole a weight of another version is compared in full, whatever the sample says.
            is_counted = self.masters.are_whole and counted != self._model_versions
            for row, position in enumerate(group.positions) if is_counted else ():
                if counted[position] != self._model_versions[position]:
                    torch.add(record.then[row], 1, out=record.now[row])
            masters: Entries = group.apart_masters
            if theirs := self._written_masters:
                pairs = zip(group.positions, masters, strict=True)
                masters = [None if position in theirs else master for position, master in pairs]
            self.masters.take_up_on_device(group, masters, record.now, record.then, record.taken)
            self._unwarned = True
        if any(kernels.backend(group.device) == "reference" for group in self._groups):  # which counts its writes
            self._master_versions = versions(self.params.apart)

    def accept(self, pairs: list[ParamPair]) -> None:
        """Masters were brought up to these weights: from here on they count as written by the engine."""
        for pair in pairs:
            self.accept_soon(pair)
        self.sample_accepted()

    def accept_soon(self, pair: ParamPair) -> None:
        """As :meth:`accept`, but :meth:`sample_accepted` takes the samples of many weights at once.

        Until then a ``.data`` write is taken for the engine's own.
        """
        position = pair.position
        self._master_versions[position] = version(pair.master) if pair.is_apart else -1
        self._model_versions[position] = version(pair.model)
        if self.policy != "ignore":
            self._unsampled.add(position)

    def expect(self, pair: ParamPair) -> None:
        """The engine is about to write this weight: what :meth:`sample_accepted` then samples is no write of others."""
        if self.policy != "ignore":
            self._unsampled.add(pair.position)

    def sample_accepted(self) -> None:
        """Sample the weights that were accepted since. No host sync."""
        for group, record in zip(self._groups, self._records, strict=True) if self._unsampled else ():
            weights = [
                weight.detach() if position in self._unsampled else None
                for position, weight in zip(group.positions, group.models, strict=True)
            ]
            if any(weight is not None for weight in weights):
                kernels.multi_tensor_sample(weights, record.then, cache=group.caches["accepted"])
            for row, weight in enumerate(weights):
                if weight is not None:
                    record.strides[row] = weight.stride()
        self._unsampled.clear()

    def doubt_accepted(self) -> None:
        """Others may have written weights that were accepted since: the next comparison reads all of their elements."""
        for position in self._unsampled:
            self._model_versions[position] = -1
        self._unsampled.clear()

    # -- weights that are put aside for a while ------------------------------------------------------------------------

    def swap(self, to: str) -> None:
        """From here on the model holds other values, which are no write. :meth:`sync` first.

        Args:
            to: these, in words.
        """
        self.swapped = to

    def restore(self, pairs: list[ParamPair]) -> None:
        """These weights, which were all that was swapped, hold again what they held."""
        self.swapped = ""
        self.accept([pair for pair in pairs if pair.is_apart])

    def require_not_swapped(self, who: str) -> None:
        """Raise ``RuntimeError`` where the model holds something else than its weights."""
        if self.swapped:
            raise errors.MODEL_SWAPPED(call=who, values=self.swapped)

    # -- in words ----------------------------------------------------------------------------------------------------

    def warn_now(self) -> None:
        """Warn of masters that did not fit into the model, and of what was taken on a device. Syncs."""
        self._unwarned = False
        if unfit := self.params.unfit():
            warn_cast(self.lines, unfit, self._warned)
        for group, record in zip(self._groups, self._records, strict=True):
            if group.is_host:
                continue
            flags_now = record.taken.clone()
            record.taken.zero_()  # before the wait: what is set meanwhile, by a replay say, is told next time
            if any(taken := flags_now.tolist()):
                self.taken += sum(map(bool, taken))
                self._warn_taken([pair for pair, bit in zip(group.pairs, taken, strict=True) if bit])

    def _warn_taken(self, pairs: list[ParamPair]) -> None:
        self._times_taken += 1
        names, models = [pair.name for pair in pairs], [pair.model for pair in pairs]
        warn_model_write(self.lines, names, self._times_taken, models)

    def not_warned(self) -> list[Tensor]:
        """By device: how many parameters' writes were taken there that :meth:`warn_now` has not told of. No sync."""
        groups = [] if not self._unwarned else zip(self._groups, self._records, strict=True)
        return [record.taken.ne(0).sum() for group, record in groups if not group.is_host]

    def warn_if_due(self) -> None:
        """:meth:`warn_now`, if something is untold. Syncs then."""
        if self._unwarned:
            self.warn_now()
