"""state_dict and load_state_dict of the engine, with their hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import checkpoint, writes
from .fused import counters

if TYPE_CHECKING:
    from .optimizer import MixedPrecisionOptimizer


def save(engine: MixedPrecisionOptimizer) -> dict[str, Any]:
    """What ``MixedPrecisionOptimizer.state_dict`` does; its docstring says it."""
    for pre_hook in engine._optimizer_state_dict_pre_hooks.values():
        pre_hook(engine)
    writes.notice(engine._params, engine.on_model_write)
    built = checkpoint.build(engine.optimizer, engine._params.saved(), engine.scaler)
    built["optimizer"] = counters.saved(built["optimizer"])
    for post_hook in engine._optimizer_state_dict_post_hooks.values():
        changed = post_hook(engine, built)
        built = built if changed is None else changed
    return built


def load(engine: MixedPrecisionOptimizer, state_dict: dict[str, Any]) -> None:
    """What ``MixedPrecisionOptimizer.load_state_dict`` does; its docstring says it."""
    if isinstance(state_dict, dict):
        state_dict = dict(state_dict)
    for pre_hook in engine._optimizer_load_state_dict_pre_hooks.values():
        changed = pre_hook(engine, state_dict)
        state_dict = state_dict if changed is None else changed
    engine._follow_changes()
    params = engine._params
    masters = params.saved()
    plan = checkpoint.plan_load(
        state_dict, optimizer=engine.optimizer, masters=masters, names=params.names, scaler=engine.scaler
    )
    if not plan.has_masters:  # else weights that were loaded just before would be undone below
        writes.notice(params, engine.on_model_write)
        masters = params.saved()
        plan = checkpoint.plan_load(
            state_dict, optimizer=engine.optimizer, masters=masters, names=params.names, scaler=engine.scaler
        )
    plan.apply()
    params.take_loaded(masters)
    params.lay_out(engine.state)
    engine._steps.discard()
    engine._copy_down()
    for post_hook in engine._optimizer_load_state_dict_post_hooks.values():
        post_hook(engine)
