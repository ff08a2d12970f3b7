"""The end of a step decided on the device: outcome, scale and statistics, in one launch where that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .kernels import decisions
from .scaling import LossScaler

if TYPE_CHECKING:
    from .optimizer import MixedPrecisionOptimizer


def follow(scaler: LossScaler, found_inf: Tensor) -> None:
    """``scaler.update(found_inf)``, in one call of compiled code where that can be. No host sync."""
    memory = scaler.memory()
    if memory is not None and decisions.follow(found_inf, memory):
        scaler.generation += memory.settings is not None  # a static scale stays what it was
    else:
        scaler.update(found_inf)


def note(found_inf: Tensor, flags: list[Tensor], kept: list[Tensor], last: Tensor, skipped: Tensor) -> None:
    """Copy the flags of a step, and its outcome to ``last``, and count it in ``skipped``. No host sync.

    Args:
        found_inf: float32, 0-dim.
        flags, kept: int32, by device.
        last, skipped: float32 and float64, 0-dim, on the device of ``found_inf``.
    """
    if len(flags) == 1 and flags[0].device == found_inf.device and decisions.are_compiled(found_inf.device):
        decisions.close_step(flags=flags[0], kept=kept[0], found_inf=found_inf, outcome=(last, skipped))
        return
    for one, copy in zip(flags, kept, strict=True):
        copy.copy_(one)
    last.copy_(found_inf)
    skipped.add_(found_inf)


def close(engine: MixedPrecisionOptimizer, skipped: bool | Tensor) -> bool | Tensor:
    """Note what became of a step, and have the scalers follow; nothing has been cleared yet.

    Args:
        engine: Whose step it was.
        skipped: Decided, or the device's flag (float32, 0-dim), which may lie in memory that is about to be cleared.

    Returns:
        ``skipped``, in memory that keeps its value until the next step. No host sync.
    """
    outcomes, grads = engine._outcomes, engine._grads
    verdicts = list(engine._steps.verdicts.values())
    if isinstance(skipped, bool):
        outcomes.record(skipped, grads)
        for scaler, found in verdicts:
            follow(scaler, found)
        return skipped
    flags = grads.flags_on_devices()
    kept, last, counted = outcomes.memory(flags, skipped.device)
    if not _are_compiled(engine, skipped):
        note(skipped, flags, kept, last, counted)
        for scaler, found in verdicts:
            follow(scaler, found)
        return last
    followed = _single_scaler(verdicts, skipped)
    memory = None if followed is None else followed.memory()
    if followed is None or memory is None:
        for scaler, found in verdicts:
            follow(scaler, found)
    else:
        followed.generation += memory.settings is not None
    settings = (None, None, None) if memory is None else memory
    for number, (shard, one, copy) in enumerate(zip(engine._params.shards, flags, kept, strict=True)):
        if number:
            decisions.close_step(stats=shard.stats, flags=one, kept=copy)
        else:
            decisions.close_step(
                stats=shard.stats,
                flags=one,
                kept=copy,
                found_inf=skipped,
                outcome=(last, counted),
                scaler=settings,
            )
    return last


def _are_compiled(engine: MixedPrecisionOptimizer, skipped: Tensor) -> bool:
    """Whether each device's statistics can be closed in one launch, and the first one's with everything else."""
    devices = [shard.device for shard in engine._params.shards]
    return bool(devices) and skipped.device == devices[0] and all(map(decisions.are_compiled, devices))


def _single_scaler(verdicts: list[tuple[LossScaler, Tensor]], skipped: Tensor) -> LossScaler | None:
    """The scaler that the same launch can bring up to date; None where there are several, or only it knows its rule."""
    if len(verdicts) != 1 or verdicts[0][1] is not skipped:
        return None
    memory = verdicts[0][0].memory()
    there = memory is not None and memory.trackers.device == skipped.device
    return verdicts[0][0] if there else None
