"""Whether the wrapper's arguments go with each other, and with the optimizer that is wrapped."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...scaling import LossScaler
from ..arguments import quoted
from ..config import Config
from ..dtensors import is_sharded, piece_of
from ..fused_registry import fused_spec_for
from ..fused_step import NO_MASTERS, groups_obstacle, optimizer_obstacle, params_obstacle
from ..params import HALF_DTYPES, name_of, numbered
from ..state_format import FullState, StateFormat
from . import state8
from .closures import closure_mode
from .release import SAID, refuse_ranks
from .split import check_plain


def make_state_format(config: Config, optimizer: Optimizer) -> StateFormat:
    """How an optimizer's state is kept."""
    spec = fused_spec_for(type(optimizer))
    return FullState(spec) if spec is None or config.optimizer_state == "fp32" else state8.EightBitState(spec)


# -- an optimizer that is about to be wrapped --------------------------------------------------------------------------


def check_optimizer(
    config: Config, optimizer: Optimizer, scaler: LossScaler, names: dict[int, str], is_zero: bool
) -> None:
    """Raise ``ValueError`` where arguments don't go with each other, or with an optimizer about to be wrapped.

    Args:
        optimizer: the one inside, where it is torch's ZeroRedundancyOptimizer.
        names: by id of a parameter.
        is_zero: whether it is.
    """
    if config.grad_accumulation == "fp32" and not config.makes_masters:
        raise ValueError(
            'grad_accumulation="fp32" does not go with master_weights="none": there is no place for FP32 '
            'sums. Use masters, or grad_accumulation="model".'
        )
    if config.splits:
        _check_split(config, optimizer, names)
    if config.gradient_release:
        _check_release(config, optimizer, scaler, is_zero)
    what = config.required_by or ("fused_step=True" if config.fused_step is True else "")
    if what:
        why = "fused_step=False" if config.fused_step is False else "" if config.makes_masters else NO_MASTERS
        if why := why or _obstacle(config, optimizer, names):
            raise ValueError(f"{what} needs the one-pass step, which can't be had: {why}. Use {_IN_ITS_PLACE[what]}.")
    if config.optimizer_state == "8bit":
        params = [name for group in _called(list(enumerate(optimizer.param_groups)), names) for name in group]
        state8.check_moments(optimizer.state_dict(), params)


_IN_ITS_PLACE = {
    'optimizer_state="8bit"': 'optimizer_state="fp32"',
    'master_weights="split"': 'master_weights="full"',
    'master_weights="split24"': 'master_weights="full"',
    "gradient_release=True": "gradient_release=False",
    "fused_step=True": "fused_step=False, the class's own step, or \"auto\", which takes that where a kernel can't",
}


def _obstacle(config: Config, optimizer: Optimizer, names: dict[int, str]) -> str:
    """Why no kernel can step an optimizer, in words; "" where one can."""
    spec = fused_spec_for(type(optimizer))
    if config.optimizer_state == "8bit" and not state8.has_eight_bits(spec):
        return f"{type(optimizer).__name__} is not exactly SGD, Adam or AdamW of torch.optim"
    groups = list(enumerate(optimizer.param_groups))
    params = [param for _, group in groups for param in group["params"]]
    reason = optimizer_obstacle(optimizer, params, [name for group in _called(groups, names) for name in group])
    if reason or spec is None:
        return reason
    return groups_obstacle(spec, make_state_format(config, optimizer), groups)


def _check_split(config: Config, optimizer: Optimizer, names: dict[int, str]) -> None:
    if config.on_model_write == "ignore":
        raise ValueError(
            f'on_model_write="ignore" does not go with master_weights="{config.master_weights}": the model\'s '
            'weights are part of the masters, so a write to them can\'t be ignored. Use "refresh" or "error".'
        )
    if closure_mode(config.closure, optimizer) == "reevaluate":
        raise ValueError(
            f'closure="reevaluate" does not go with master_weights="{config.master_weights}": the one-pass step '
            'evaluates no closure. Use master_weights="full".'
        )
    for number, group in enumerate(optimizer.param_groups):
        _check_plain(config, group, number, names)


def _check_plain(config: Config, group: dict[str, Any], number: int, names: dict[int, str]) -> None:
    for index, param in enumerate(group["params"]):
        if isinstance(param, Tensor) and param.dtype in HALF_DTYPES:
            where = f"group {number}, param {index}{quoted(name_of(group, index, param, names))}"
            check_plain(where, param, config.master_weights)
            if config.master_weights == "split24" and piece_of(param) is None:
                raise ValueError(
                    f'{where}: master_weights="split24" rounds by the place of an element in the whole tensor, and the '
                    "shards of this one can't be placed: they are cut along two dimensions behind the first, or "
                    'strided. Use master_weights="split", or another layout.'
                )


def _check_release(config: Config, optimizer: Optimizer, scaler: LossScaler, is_zero: bool) -> None:
    if config.grad_accumulation != "model":
        raise ValueError(
            f"{SAID} frees each gradient when it comes, so grad_accumulation={config.grad_accumulation!r} has "
            'nothing to add up. Use grad_accumulation="model" and one backward a step, or gradient_release=False.'
        )
    if scaler.dynamic:
        raise ValueError(
            f"{SAID} does not go with a dynamic loss scale (dynamic=True, or such a scaler): parameters are stepped "
            "before all gradients are known, and an overflow could not be undone. Use loss_scale=..., or "
            "gradient_release=False."
        )
    if config.closure == "reevaluate":
        raise ValueError(
            f'{SAID} does not go with closure="reevaluate": the backward of each evaluation would step parameters. Use '
            'closure="once", or gradient_release=False.'
        )
    refuse_ranks(ValueError)
    if is_zero or any(is_sharded(param) for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(
            f"{SAID} takes plain tensors and an optimizer that steps them, got "
            f"{'ZeroRedundancyOptimizer' if is_zero else 'DTensors'}. Use gradient_release=False on shards."
        )


# -- groups that are to come -------------------------------------------------------------------------------------------


def check_groups(
    config: Config, optimizer: Optimizer, groups: list[dict[str, Any]], first: int, names: dict[int, str]
) -> None:
    """Raise ``ValueError`` for groups, as they are to be, where only a fused step can step them, and it can't.

    Args:
        groups: defaults filled in; "params" are the model's.
        first: the number of the first of them.
    """
    spec = fused_spec_for(type(optimizer))
    if not config.required_by or spec is None:
        return
    state_format, each = make_state_format(config, optimizer), list(enumerate(groups, first))
    for (number, group), called in zip(each, _called(each, names), strict=True):
        reason = params_obstacle(group["params"], called) or groups_obstacle(spec, state_format, [(number, group)])
        if reason:
            raise ValueError(
                f"{config.required_by} needs the one-pass step, which group {number} can't have: {reason}. Change "
                f"that, or wrap the optimizer without {config.required_by}."
            )


def check_new_group(
    config: Config, optimizer: Optimizer, group: dict[str, Any], number: int, names: dict[int, str]
) -> None:
    """The same for a group that is to be added, without defaults; and whether its masters can be had."""
    check_groups(config, optimizer, [{**optimizer.defaults, **group}], number, names)
    if config.splits:
        _check_plain(config, group, number, names)


def _called(groups: list[tuple[int, dict[str, Any]]], names: dict[int, str]) -> list[list[str]]:
    """What messages call the parameters of groups with these numbers."""
    return [
        [name_of(group, i, param, names) or numbered(number, i) for i, param in enumerate(group["params"])]
        for number, group in groups
    ]
