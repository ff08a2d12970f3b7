"""Ranks that hold the same masters: DDP reduces the gradients, so every rank finds the same in them without a message.

What is left to do: average FP32 sums that were folded under ``no_sync``, clear the memory of PowerSGD after a skip, and
compare the ranks' masters now and then.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .. import kernels
from ..ranks import Replicas
from .exchange import gather
from .facts import digest

if TYPE_CHECKING:
    from ..gradients import MasterGrads
    from ..optimizer import MixedPrecisionOptimizer

_CHUNK = 2**25  # bytes of FP32 sums that are sent at a time
_VERDICTS = 8  # verdicts that travel with them; should more scalers have a part, the last one is theirs together


class Independent(Replicas):
    """The user said that gradients are not shared between ranks."""

    def check_folding(self) -> None:
        """Folding is fine: no reduction can be missed."""


class Compared(Independent):
    """Ranks of one group, compared every so many steps.

    Args:
        group: the ranks.
        every: compare after this many calls of ``step``; 0: never.
    """

    def __init__(self, group: Any, every: int) -> None:
        self.group = group
        self.every = every
        self._steps = 0

    def after_step(self, skipped: bool | Tensor, engine: MixedPrecisionOptimizer) -> None:
        """Count; every so often compare.

        Raises:
            RuntimeError: on every rank, where masters or scalers differ.
        """
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            verify(self.group, engine)


class DdpReplicas(Compared):
    """Ranks of a ``DistributedDataParallel`` module.

    Attributes:
        local: whether the last forward was made under ``no_sync``: its gradients stay on this rank.
    """

    def __init__(self, ddp: DistributedDataParallel, every: int) -> None:
        super().__init__(ddp.process_group, every)
        self.ddp = ddp
        self.local = False
        self.keeps = bool(ddp.find_unused_parameters)
        known = weakref.ref(self)

        def note(module: Any, _args: Any, _output: Any) -> None:
            replicas = known()
            if replicas is not None and torch.is_grad_enabled():
                replicas.local = not module.require_backward_grad_sync

        # DDP prepares the reduction in forward; what counts is whether that was under no_sync, not where backward runs.
        self._hook = ddp.register_forward_hook(note)

    def detach(self) -> None:
        """Take the hook away."""
        self._hook.remove()

    @property
    def needs_decision(self) -> bool:  # type: ignore[override]
        """Whether a compression hook keeps a memory that a skip must clear."""
        return bool(_memories(self.ddp))

    def after_step(self, skipped: bool | Tensor, engine: MixedPrecisionOptimizer) -> None:
        """Clear what compression hooks remember of gradients that were not finite, then compare if it is time."""
        if skipped is True:
            for state in _memories(self.ddp):
                for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                    memory.clear()
        super().after_step(skipped, engine)

    def shadow_step(self) -> None:
        """The other ranks step and this one has run out of data: answer their comparison, if it is time for one."""
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            verify(self.group, None)

    def reduce(self, grads: MasterGrads, verdicts: list[Tensor]) -> list[Tensor]:
        """Average this rank's FP32 sums over the ranks, in place.

        A parameter without a sum here takes part with zeros, and gets one if another rank has one.

        Args:
            verdicts: float32, 0-dim: what this rank found, for each scaler that had a part in the sums.

        Returns:
            The same over all ranks. Where only an average is not finite, all are 1.0.
        """
        tally = torch.zeros(_VERDICTS, dtype=torch.float32)
        for number, verdict in enumerate(verdicts):
            tally[min(number, _VERDICTS - 1)] += verdict.to(tally)
        found = torch.zeros(())
        with torch.no_grad():
            for number, shard in enumerate(grads.params.shards):
                kept = self._sum_over_ranks(_sums(grads, shard.index), shard.index, grads, tally)
                stats = kernels.GradStats.allocate(len(shard.index), shard.device)
                share = torch.tensor(1.0 / dist.get_world_size(self.group), device=shard.device)
                kernels.multi_tensor_unscale(kept, kept, share, stats)
                for i, value in zip(shard.index, kept, strict=True):
                    if value is not None and _is_half(grads, i):
                        _put_sum(grads, i, value)
                if grads.folded is not None:
                    grads.folded[number] |= stats.nonfinite
                found = torch.maximum(found.to(stats.found_inf), stats.found_inf)
        if not tally.any():
            return [found] * len(verdicts)
        return [(tally[min(number, _VERDICTS - 1)] > 0).float() for number in range(len(verdicts))]

    def _sum_over_ranks(
        self, sums: list[Tensor | None], index: list[int], grads: MasterGrads, tally: Tensor
    ) -> list[Tensor | None]:
        """The sums over the ranks, where they are kept or, if that is in 16 bits, in new FP32 memory.

        None where no rank has one. Whether some rank counted a verdict is put into ``tally`` on the way.
        """
        kept: list[Tensor | None] = [None] * len(index)
        for places in _chunks([grads.params.master[i] for i in index]):
            first = grads.params.master[index[places[0]]]
            dtype = torch.float32 if _is_half(grads, index[places[0]]) else first.dtype
            pieces = []
            for k in places:
                master, value = grads.params.master[index[k]], sums[k]
                pieces.append(torch.zeros_like(master).reshape(-1) if value is None else value.reshape(-1))
            # Behind the sums, whether this rank has them, and its verdicts: one message for all.
            present = torch.tensor([float(sums[k] is not None) for k in places], device=first.device)
            flat = torch.cat([part.to(dtype) for part in (*pieces, present, tally.to(first.device))])
            dist.all_reduce(flat, group=self.group)
            *values, there, verdicts = torch.split(flat, [*(len(p) for p in pieces), len(places), len(tally)])
            tally.copy_(verdicts > 0)
            for k, value, is_there in zip(places, values, there.tolist(), strict=True):
                if is_there:
                    value = value.view(grads.params.master[index[k]].shape)
                    kept[k] = value if _is_half(grads, index[k]) else _put_sum(grads, index[k], value)
        return kept


def _sums(grads: MasterGrads, index: list[int]) -> list[Tensor | None]:
    """FP32 sums folded so far, without what a backward has just left in parameters that are their own masters."""
    sums = [grads.held.get(i) if _is_fresh_own(grads, i) else grads.params.master[i].grad for i in index]
    for i, value in zip(index, sums, strict=True):
        if value is not None and value.layout is not torch.strided:
            raise TypeError(
                f"parameter {grads.params.names[i]!r}: expected a dense gradient, got {value.layout}: sparse gradients "
                "made under no_sync can't be averaged over ranks. Leave no_sync, or use sparse=False."
            )
    return sums


def _is_half(grads: MasterGrads, i: int) -> bool:
    """Whether sums of parameter ``i`` are kept in 16 bits, for want of a master."""
    return grads.params.master[i].dtype in kernels.HALF_DTYPES


def _put_sum(grads: MasterGrads, i: int, value: Tensor) -> Tensor:
    """Overwrite the sum of parameter ``i``, or begin one; returns the tensor that holds it."""
    master, held = grads.params.master[i], _is_fresh_own(grads, i)
    there = grads.held.get(i) if held else master.grad
    if there is None:
        there = grads._buffer(i)
        if held:
            grads.held[i] = there
        else:
            master.grad = there
    return there.copy_(value)


def _is_fresh_own(grads: MasterGrads, i: int) -> bool:
    return grads.own_is_fresh and grads.params.master[i] is grads.params.model[i]


def _chunks(tensors: list[Tensor]) -> Iterator[list[int]]:
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
    states = [state for _, state in ddp._comm_hooks]
    return [state for state in states if hasattr(state, "error_dict") and hasattr(state, "p_memory_dict")]


def verify(group: Any, engine: MixedPrecisionOptimizer | None) -> None:
    """Compare masters and scaler over the ranks: a few bytes a rank where they agree.

    Args:
        group: the ranks.
        engine: whose masters and scaler to compare; None on a rank that has run out of data and only listens.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs.
    """
    names, tensors, scaler = ([], [], "") if engine is None else digest(engine)
    hashes = (
        None if engine is None else [*zip(names, _hashes(tensors), strict=True), ("the loss scaler", hash_of(scaler))]
    )
    short = gather(None if hashes is None else hash_of(repr(hashes)), group)
    if len({value for value in short if value is not None}) <= 1:
        return
    there = {rank: values for rank, values in enumerate(gather(hashes, group)) if values is not None}
    first = min(there)
    differing = [
        (name, rank)
        for k, (name, value) in enumerate(there[first])
        for rank, values in there.items()
        if values[k] != (name, value)
    ]
    name, rank = differing[0]
    raise RuntimeError(
        f"ranks drifted apart: {name} differs between rank {first} and rank {rank} ({len({n for n, _ in differing})} "
        "differ in all). Gradients were not reduced somewhere, or a rank wrote its weights. Load the last checkpoint "
        "on all ranks."
    )


def _hashes(tensors: list[Tensor]) -> list[int]:
    """A content hash of every tensor, by the kernel that hashes 16-bit values."""
    found = []
    for tensor in tensors:
        halves = tensor.detach().reshape(-1).view(torch.float16)
        out = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        kernels.multi_tensor_hash([halves], out)
        found.append(int(out))
    return found


def hash_of(text: str) -> int:
    """64 bits of a text, alike in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
