"""Ranks that hold the same masters: DDP reduces the gradients, so every rank finds the same in them without a message.

What is left to do: average FP32 sums that were folded under ``no_sync``, clear the memory of PowerSGD after a skip, and
compare the ranks' masters now and then.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .. import kernels
from ..engine import errors
from ..engine.dtensors import raw_grads
from ..engine.gradients import StepState
from ..engine.params import DeviceParams
from ..engine.ranks import Digest, Replicas, Sums
from ..engine.stage import GradientStamp
from .exchange import gather
from .settings import refuse_settings
from .waiting import explain, meet

_CHUNK = 2**25  # bytes of FP32 sums that are sent at a time
_VERDICTS = 8  # verdicts that travel with them; should more scalers have a part, the last one is theirs together


class Independent(Replicas):
    """The user said that gradients are not shared between ranks."""

    are_told = True


class Compared(Independent):
    """Ranks of one group, compared every so many steps.

    Args:
        group: the ranks.
        every: compare after this many calls of ``step``; 0: never.
    """

    alone = False

    def __init__(self, group: Any, every: int) -> None:
        self.group = group
        self.every = every
        self._steps = 0

    def after_step(self, skipped: bool | Tensor, digest: Callable[[], Digest]) -> None:
        """Count; every so often compare.

        Raises:
            RuntimeError: on every rank, where masters or scalers differ.
        """
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            verify(self.group, digest())


class Sharded(Compared):
    """Ranks over which one module's parameters are cut.

    Args:
        module: whose forward waits for the other ranks.
    """

    def __init__(self, module: Any, group: Any, every: int) -> None:
        super().__init__(group, every)
        self._hook = module.register_forward_hook(_after_forward, always_call=True)
        weakref.finalize(self, self._hook.remove)

    def detach(self) -> None:
        """Take the hook away."""
        self._hook.remove()


def _after_forward(_module: Any, _args: Any, output: Any) -> None:
    """A forward that has failed on a message says which ranks did other things."""
    if torch.compiler.is_compiling():
        return
    error = sys.exc_info()[1]
    if output is None and error is not None:
        explain(error, "a forward of the model")


class _Hook:
    """Tells the replicas of a forward. A copy or pickle of the module has one that tells no replica.

    Args:
        replicas: is not kept alive; None for a copy.
        method: of it.
    """

    def __init__(self, replicas: DdpReplicas | None, method: str) -> None:
        self._replicas = None if replicas is None else weakref.ref(replicas)
        self._method = method

    def __call__(self, _module: Any, _args: Any, _output: Any = None) -> None:
        replicas = None if self._replicas is None else self._replicas()
        if replicas is not None and torch.is_grad_enabled():
            getattr(replicas, self._method)()

    def __reduce__(self) -> Any:
        return _Hook, (None, self._method)


class DdpReplicas(Compared):
    """Ranks of a ``DistributedDataParallel`` module.

    Args:
        state: whose stamps follow where the module moves gradients into its buckets.

    Attributes:
        local: whether the last forward was made under ``no_sync``: its gradients stay on this rank.
    """

    def __init__(self, ddp: DistributedDataParallel, every: int, state: StepState) -> None:
        super().__init__(ddp.process_group, every)
        self.ddp = ddp
        self._state = weakref.ref(state)
        self._as_stamped = False
        self.local = False
        self.keeps = bool(ddp.find_unused_parameters)
        self._hooks = [
            ddp.register_forward_pre_hook(_Hook(self, "before_forward")),
            ddp.register_forward_hook(_Hook(self, "after_forward")),
        ]

    def detach(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def before_forward(self) -> None:
        """The module may be about to move gradients into new buckets, as it does once, after the first reduction."""
        if self.ddp._join_config.enable:
            raise RuntimeError(
                "Join([ddp]) trains on uneven inputs, where masters, step counts and scales of ranks drift apart. Even "
                "out the inputs, as DistributedSampler(drop_last=True) does. After a Join that is over make the "
                "DistributedDataParallel anew and attach it: torch leaves the old one in it."
            )
        state = self._state()
        self._as_stamped = self.ddp.gradient_as_bucket_view and state is not None and _is_as_stamped(state)

    def after_forward(self) -> None:
        """The reduction is prepared: what counts is whether that was under no_sync, not where the backward runs."""
        self.local = not self.ddp.require_backward_grad_sync
        state = self._state()
        if self._as_stamped and state is not None and state.stage.stamp is not None:
            # DDP has moved gradients into its buckets: the stamp is of those that are there now, which are the same.
            state.stage = state.stage._replace(stamp=GradientStamp.of(state.params.models))

    @property
    def needs_decision(self) -> bool:  # type: ignore[override]
        """Whether a compression hook keeps a memory that a skip must clear."""
        return bool(_memories(self.ddp))

    def after_step(self, skipped: bool | Tensor, digest: Callable[[], Digest]) -> None:
        """Clear what compression hooks remember of gradients that were not finite, then compare if it is time."""
        if skipped is True:
            for state in _memories(self.ddp):
                for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                    memory.clear()
        super().after_step(skipped, digest)

    def reduce(self, sums: Sums, verdicts: list[Tensor]) -> list[Tensor]:
        """Average this rank's FP32 sums over the ranks, in place.

        A parameter without a sum here takes part with zeros, and gets one if another rank has one.

        Args:
            verdicts: float32, 0-dim: what this rank found, for each scaler that had a part in the sums.

        Returns:
            The same over all ranks. Where only an average is not finite, all are 1.0.
        """
        tally = torch.zeros(_VERDICTS, dtype=torch.float32, device="cpu")
        for number, verdict in enumerate(verdicts):
            tally[min(number, _VERDICTS - 1)] += verdict.to(tally)
        found = torch.zeros((), dtype=torch.float32, device="cpu")
        with torch.no_grad():
            for device, mine in list(sums.sums_by_device()):
                kept = self._sum_over_ranks(sums, device, mine, tally)
                stats = kernels.GradStats.allocate(len(kept), device.device)
                share = torch.tensor(1.0 / dist.get_world_size(self.group), dtype=torch.float32, device=device.device)
                kernels.multi_tensor_unscale(kept, kept, share, stats)
                sums.averaged(device, stats)
                found = torch.maximum(found.to(stats.found_inf), stats.found_inf)
        if not tally.any():
            return [found] * len(verdicts)
        return [(tally[min(number, _VERDICTS - 1)] > 0).float() for number in range(len(verdicts))]

    def _sum_over_ranks(
        self, sums: Sums, device: DeviceParams, mine: list[Tensor | None], tally: Tensor
    ) -> list[Tensor | None]:
        """By row: the sums over the ranks, where they are kept.

        None where no rank has one. Whether some rank counted a verdict is put into ``tally`` on the way.
        """
        kept: list[Tensor | None] = [None] * len(mine)
        for rows in _chunks(device.masters):
            first = device.masters[rows[0]]
            pieces = []
            for row in rows:
                value = mine[row]
                pieces.append(torch.zeros_like(device.masters[row]).reshape(-1) if value is None else value.reshape(-1))
            # Behind the sums, whether this rank has them, and its verdicts: one message for all.
            present = torch.tensor(
                [float(mine[row] is not None) for row in rows], dtype=torch.float32, device=first.device
            )
            flat = torch.cat([part.to(first.dtype) for part in (*pieces, present, tally.to(first.device))])
            dist.all_reduce(flat, group=self.group)
            *values, there, verdicts = torch.split(flat, [*(len(p) for p in pieces), len(rows), len(tally)])
            tally.copy_(verdicts > 0)
            for row, value, is_there in zip(rows, values, there.tolist(), strict=True):
                if is_there:
                    kept[row] = sums.put_sum(device, row, value.view(device.masters[row].shape))
        return kept


class ScheduledDdp(DdpReplicas):
    """As a stage of a pipeline: its schedule makes every forward under ``no_sync``, and reduces in the last backward.

    So gradients count as reduced whenever they are taken.
    """

    def after_forward(self) -> None:
        """Whether the forward was made under ``no_sync`` says nothing here."""
        super().after_forward()
        self.local = False


def _is_as_stamped(state: StepState) -> bool:
    """Whether the stamps tell of no gradient that was written, replaced or set to None since."""
    stamped = (state.stage.stamp, state.params.models), (state.stage.true_stamp, state.params.masters)
    return all(stamp is None or not any(stamp.compare(raw_grads(tensors))) for stamp, tensors in stamped)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Places of tensors of one dtype that go into one message, alike on every rank."""
    chunk: list[int] = []
    size = 0
    for k, tensor in enumerate(tensors):
        if chunk and (size + tensor.nbytes > _CHUNK or tensor.dtype != tensors[chunk[0]].dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append(k)
        size += tensor.nbytes
    if chunk:
        yield chunk


def _memories(ddp: DistributedDataParallel) -> list[Any]:
    """States of PowerSGD among DDP's communication hooks, wrapped ones too."""
    states = [state for _, state in ddp._comm_hooks]  # torch tells of them nowhere else
    return [state for state in states if hasattr(state, "error_dict") and hasattr(state, "p_memory_dict")]


# -- comparing ranks -------------------------------------------------------------------------------------------------


def verify(group: Any, digest: Digest) -> None:
    """Compare masters, scaler and settings over the ranks: a few bytes a rank where they agree. Syncs.

    Args:
        group: the ranks.
        digest: what to compare.

    Raises:
        RuntimeError: on every rank, naming the first setting or parameter that differs; or a rank does not come to
            this within the time-out of the group.
    """
    contents = zip(digest.names, map(content_hash, digest.values), strict=True)
    pieces: dict[str, list[tuple[str, int]]] = {"": [*contents, ("the loss scaler", hash_of(digest.scaler))]}
    for piece, name, value in digest.copies:
        pieces.setdefault(piece, []).append((name, content_hash(value)))
    meet("a step with verify_ranks_every", group)  # else a rank that is elsewhere would take these for its own messages
    short = hash_of(repr(digest.settings)), {piece: hash_of(repr(hashes)) for piece, hashes in pieces.items()}
    everyone = gather(short, group)
    known: dict[str, int] = {}
    alike = all(one == everyone[0][0] for one, _ in everyone)
    if alike and all(known.setdefault(piece, one) == one for _, parts in everyone for piece, one in parts.items()):
        return
    _refuse_difference(dict(enumerate(gather((digest.settings, pieces), group))))


def _refuse_difference(told: dict[int, tuple[list[str], dict[str, list[tuple[str, int]]]]]) -> None:
    """Ranks differ, in settings or in hashes of pieces: raise with the first that does."""
    first = min(told)
    for rank, (lines, _) in told.items():
        refuse_settings(first, told[first][0], rank, lines, errors.MAY_DIFFER)
    known: dict[str, tuple[int, list[tuple[str, int]]]] = {}
    differing = []
    for rank, (_, parts) in told.items():
        for piece, hashes in parts.items():
            first, others = known.setdefault(piece, (rank, hashes))
            differing += [(mine[0], first, rank) for mine, one in zip(hashes, others, strict=True) if mine != one]
    name, first, rank = differing[0]
    raise RuntimeError(
        f"ranks drifted apart: {name} differs between rank {first} and rank {rank} "
        f"({len({n for n, _, _ in differing})} differ in all). Gradients were not reduced somewhere, or a rank wrote "
        "its weights. Load the last checkpoint on all ranks."
    )


_SLAB = 2**18  # elements at a time: their int64 copies stay in a core's cache
_MIX = (-7046029254386353131, -4658895280553007687)  # odd, 64 bits: SplitMix64's, which spread neighbouring indices


def content_hash(tensor: Tensor) -> int:
    """64 bits of a tensor's elements, in logical order; the same on every device.

    The bits of each element, as an integer, times an odd weight made of its index, are summed and wrap around. So a
    single element that differs always shows, and of several one case in 2**64 does not.

    Cost: a read of the tensor and some 2 ns an element on a core, in 8 MiB of memory.

    Args:
        tensor: dense, of 1, 2, 4 or 8 bytes an element, any strides.

    Example:
        >>> content_hash(torch.tensor([1.0, 2.0])) == content_hash(torch.tensor([2.0, 1.0]))
        False
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view({1: torch.int8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    weights = _weights(min(_SLAB, len(bits)), bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _SLAB):
        slab = bits[start : start + _SLAB]
        total = total * _MIX[0] + (slab.to(torch.int64) * weights[: len(slab)]).sum()
    return int(total)


def _weights(count: int, device: torch.device) -> Tensor:
    """int64, odd: a weight for each index, far from a line, on which the differences of neighbours could cancel."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MIX[0]
    mixed = (mixed ^ (mixed >> 30)) * _MIX[1]
    return (mixed ^ (mixed >> 27)) | 1


def hash_of(text: str) -> int:
    """64 bits of a text, alike in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
