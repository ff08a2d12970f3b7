"""The end of a step decided on the device: outcome, scale and statistics, in one launch where that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .kernels import decisions
from .scaling import LossScaler

if TYPE_CHECKING:
    from .optimizer import MixedPrecisionOptimizer


def close(engine: MixedPrecisionOptimizer, skipped: bool | Tensor) -> bool | Tensor:
    """Note what became of a step, and have the scalers follow; nothing has been cleared yet.

    Args:
        engine: Whose step it was.
        skipped: Decided, or the device's flag (float32, 0-dim), which may lie in memory that is about to be cleared.

    Returns:
        ``skipped``, in memory that keeps its value until the next step. No host sync.
    """
    outcomes, grads, verdicts = engine._outcomes, engine._grads, list(engine._steps.verdicts.values())
    if isinstance(skipped, Tensor) and _are_compiled(engine, skipped):
        return _close_on_device(engine, skipped)
    outcomes.record(skipped, grads)
    for scaler, found in verdicts:
        scaler.update(found)
    return skipped.clone() if isinstance(skipped, Tensor) else skipped


def _are_compiled(engine: MixedPrecisionOptimizer, skipped: Tensor) -> bool:
    shards = engine._params.shards
    devices = [shard.device for shard in shards]
    return bool(shards) and skipped.device == devices[0] and all(map(decisions.are_compiled, devices))


def _close_on_device(engine: MixedPrecisionOptimizer, skipped: Tensor) -> Tensor:
    """The first device's launch takes everything, those of other devices the flags and statistics that lie there."""
    outcomes, params, grads = engine._outcomes, engine._params, engine._grads
    verdicts = list(engine._steps.verdicts.values())
    followed = _single_scaler(verdicts, skipped)
    if followed is None:
        for scaler, found in verdicts:
            scaler.update(found)
    flags = grads.flags_on_devices()
    kept, outcome = outcomes.memory(flags, skipped.device)
    for number, shard in enumerate(params.shards):
        if number:
            decisions.close_step(shard.stats, flags[number], kept[number])
        else:
            memory = None if followed is None else followed.memory()
            settings = (None, None, None) if memory is None else memory
            decisions.close_step(shard.stats, flags[0], kept[0], found_inf=skipped, outcome=outcome, scaler=settings)
    if followed is not None:
        followed.generation += 1
    return outcome[0]


def _single_scaler(verdicts: list[tuple[LossScaler, Tensor]], skipped: Tensor) -> LossScaler | None:
    """The scaler that the launch can bring up to date along the way; None where each must do it itself."""
    if len(verdicts) != 1 or verdicts[0][1] is not skipped:
        return None
    memory = verdicts[0][0].memory()
    there = memory is not None and memory.trackers.device == skipped.device
    return verdicts[0][0] if there else None
