"""What a plain optimizer loads out of a wrapper's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..engine.modes.state8 import expanded
from ..engine.schema import HOW_SAVED, check_form, check_outside, is_ours


def optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What a plain optimizer of the wrapped class loads, out of a state_dict of `MixedPrecisionOptimizer`.

    For leaving: the model's weights in FP32 are ``opt.fp32_state_dict(model)``, and this is the optimizer's state over
    them. Does not sync.

    Args:
        state_dict: what ``state_dict()`` of a `MixedPrecisionOptimizer` returned, or a plain state_dict of torch.optim.

    Returns:
        ``{'state': ..., 'param_groups': ...}``, state in FP32 where the parameter was 16-bit; of a class with a
        state_dict of another form, that form. Not a copy: it is the entry of ``state_dict``, and a plain state_dict
        comes back as it is.

    Raises:
        TypeError: ``state_dict`` or a part of it is of another type.
        ValueError: it is neither of the two; names what is lacking.

    Example:
        >>> import fp16opt, torch
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5, momentum=0.9))
        >>> opt.backward(weight.float().sum())
        >>> opt.step()
        >>> plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        >>> plain.load_state_dict(fp16opt.optimizer_state(opt.state_dict()))
        >>> plain.state_dict()["state"][0]["momentum_buffer"], plain.param_groups[0]["lr"]
        (tensor([1., 1.]), 0.5)
    """
    state_dict = expanded(state_dict, ())
    check_outside(state_dict)
    found: Any = state_dict["optimizer"] if is_ours(state_dict) else state_dict
    if not isinstance(found, Mapping):
        raise TypeError(f"optimizer must be a dict, got {type(found).__name__}. {HOW_SAVED}")
    if found is state_dict or not found or "state" in found or "param_groups" in found:
        check_form(found)
    return cast("dict[str, Any]", found)
