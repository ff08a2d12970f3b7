"""The optimizer's state_dict: build it, and load one that fits or leave everything as it was.

``optimizer`` is the wrapped torch optimizer throughout: its param_groups hold FP32 masters where the model is
16-bit, and the model's own parameters elsewhere. ``masters`` lists the former in param_groups order, with
None for the latter.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..kernels import HALF_DTYPES
from ..scaling import LossScaler
from .dtensors import local
from .schema import (
    FACTORED,
    HOW_SAVED,
    PER_ELEMENT,
    VERSION,
    check_masters,
    check_optimizer_state,
    check_outside,
    is_ours,
    is_torch_class,
)
from .snapshot import Snapshot, copied


def build(
    optimizer: Optimizer, masters: Sequence[Tensor | None], scaler: LossScaler, steps: int, skipped: int
) -> dict[str, Any]:
    """The state_dict of a wrapped optimizer; ``torch.load(weights_only=True)`` reads it back.

    Like torch's, it refers to the live tensors: copy it (or save it) to keep this moment. Does not sync.

    Args:
        steps, skipped: how many were taken, and were not.

    Returns:
        ``version`` (2), ``optimizer`` (the wrapped optimizer's own), ``masters``, ``scaler``, ``steps`` and
        ``skipped_steps``, which older files lack.
    """
    _drop_empty_entries(optimizer)
    return {
        "version": VERSION,
        "optimizer": optimizer.state_dict(),
        "masters": [None if master is None else master.detach() for master in masters],
        "scaler": scaler.state_dict(),
        "steps": steps,
        "skipped_steps": skipped,
    }


def _drop_empty_entries(optimizer: Optimizer) -> None:
    """Reading ``state[model_param]``, where the master is the key, leaves an empty entry that torch can't save."""
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for key in [key for key, value in optimizer.state.items() if isinstance(key, Tensor) and value == {}]:
        if id(key) not in known:
            del optimizer.state[key]


def carry_state(optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    """Move ``optimizer.state[old]``, where there is one, to ``new``: a parameter's state to its master.

    Tensors are copied, so that the old ones, which the user may hold, stay as they are; FP16 and BF16 ones to FP32
    where the master is, and the parameter isn't.
    """
    if old in optimizer.state:
        optimizer.state[new] = _own(optimizer.state.pop(old), widens=old.dtype != new.dtype)


def check(
    state_dict: object,
    optimizer: Optimizer,
    masters: Sequence[Tensor | None],
    names: Sequence[str],
    scaler: LossScaler,
) -> None:
    """Raise unless ``state_dict`` fits, down to shapes and dtypes. Changes nothing.

    Args:
        state_dict: what `build` returned, or a plain state_dict of the wrapped optimizer's class (from FP32
            training, say): masters and scaler then stay as they are. Of torch.optim's own classes (no subclasses)
            settings and state are checked here; of others their ``load_state_dict`` judges them in :func:`load`.
        names: of the parameters, in param_groups order, for messages.

    Raises:
        TypeError, ValueError: names the item, what was wanted, what came and what to do.
    """
    check_outside(state_dict, any_form=_adapts(optimizer))
    given: Any = state_dict
    inner = given["optimizer"] if is_ours(given) else given
    if not isinstance(inner, Mapping):
        raise TypeError(f"optimizer must be a dict, got {type(inner).__name__}. {HOW_SAVED}")
    if not _adapts(optimizer):
        check_optimizer_state(inner, optimizer, names)
    if is_ours(given):
        check_masters(given["masters"], masters, names)
        scaler.check_state_dict(given["scaler"])


def load(
    state_dict: Mapping[str, Any],
    optimizer: Optimizer,
    names: Sequence[str],
    scaler: LossScaler,
    convert: Callable[[], None],
    finish: Callable[[], None],
    where: torch.device | None = None,
) -> None:
    """Load what was checked: all of it or nothing. Tensors are copied: training never edits the caller's dict. Syncs.

    The wrapped optimizer's own ``load_state_dict`` does its part, with its hooks. When it, one of them or
    ``convert`` raises, the error comes through and the optimizer (attributes, groups, state, those of optimizers
    inside it) and the scaler are as they were. An exception that comes later, Ctrl-C say, finds all of it loaded.

    Args:
        convert: brings what was loaded to the form in which it is kept. It writes no tensor that was there before.
        finish: writes the masters and what follows from them. It may be called twice.
        where: the device that loaded state goes to; None for its parameter's.
    """
    before = Snapshot(optimizer, copies_tensors=_runs_other_code(optimizer))
    scaler_before, ours, is_loaded = scaler.state_dict(), is_ours(state_dict), False
    try:
        _load_optimizer(optimizer, state_dict["optimizer"] if ours else state_dict, names, ours, where)
        if ours:
            scaler.load_state_dict(state_dict["scaler"])
        convert()
        is_loaded = True
        finish()
    except BaseException:
        if is_loaded:
            finish()
        else:
            before.restore()
            scaler.load_state_dict(scaler_before)
        raise


# -- loading -------------------------------------------------------------------------------------------------


def _load_optimizer(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    names: Sequence[str],
    keeps_dtypes: bool,
    where: torch.device | None,
) -> None:
    """The wrapped optimizer loads a copy of ``state_dict``, then its state gets back what torch's casts took.

    torch gives every state tensor the parameter's dtype. Two hooks of ours, the innermost ones, see what the
    user's hooks made of the dict, and put the state right before the user's hooks see that.

    Args:
        keeps_dtypes: whether state was saved over masters of the same dtypes as here. Else 16-bit state, which may be
            of 16-bit training, becomes FP32 where masters are, unless the class itself has put 16 bits back.
        where: the device that state goes to, and which torch's casts are to leave alone; None for its parameter's.
    """
    adapted = _adapts(optimizer)
    lists = [group["params"] for group in optimizer.param_groups]
    how = _How(is_torch_class(optimizer), keeps_dtypes, where)
    widens = not keeps_dtypes and not all(p.dtype in HALF_DTYPES for params in lists for p in params)
    final: dict[str, Any] = {}

    def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        if adapted:
            check_optimizer_state(given, optimizer, names)
            given = _own_dict(given, widens)
        final.update(given)
        return given if where is None else {**given, "state": {}}

    def put_right(_: Optimizer) -> None:
        if not final:
            return
        ids = [i for group in final["param_groups"] for i in group["params"]]
        params = [p for params in lists for p in params]
        for i, param in zip(ids, params, strict=True):
            saved = final["state"].get(i)
            loaded = optimizer.state.get(param) if where is None else saved
            if saved is not None and loaded is not None:
                right = _put_right(loaded, saved, param, how)
                if right is not optimizer.state.get(param):
                    optimizer.state[param] = right

    with contextlib.ExitStack() as hooks:
        if _hooks(optimizer, "pre") is not None:  # a class without tables of hooks doesn't call torch's loading
            hooks.callback(optimizer.register_load_state_dict_pre_hook(take).remove)
            hooks.callback(optimizer.register_load_state_dict_post_hook(put_right, prepend=True).remove)
        optimizer.load_state_dict(_own_dict(state_dict, widens))
    sizes, left = [len(params) for params in lists], [len(group["params"]) for group in optimizer.param_groups]
    if left != sizes:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__}.load_state_dict left groups of {left} params where {sizes} were. "
            "Construct the optimizer over the parameters and groups that it was saved with."
        )
    for group, params in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = params


class _How(NamedTuple):
    """How loaded state is put right: is the class torch's own, are dtypes kept, and where does it go."""

    standard: bool
    keeps_dtypes: bool
    where: torch.device | None


def _put_right(loaded: Any, saved: Any, param: Tensor, how: _How, key: object = None) -> Any:
    """``loaded`` (after torch's casts) with the tensors of ``saved``; what is not a tensor in both stays."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if key == "step":  # torch's rule holds: on the host, or beside the parameter if fused or capturable
            return loaded
        if loaded is saved and saved.dtype == param.dtype and saved.stride() == param.stride():
            return loaded  # nothing was cast
        # torch's own classes need these in the parameter's dtype (FP64 state for an FP32 master, say)
        as_param = how.standard and (key in PER_ELEMENT or key in FACTORED)
        is_half = param.dtype in HALF_DTYPES
        if not saved.is_floating_point() or (how.keeps_dtypes and (is_half or not as_param)):
            dtype = saved.dtype
        elif as_param or is_half:
            dtype = param.dtype
        else:
            dtype = loaded.dtype if loaded.dtype in HALF_DTYPES else saved.dtype
        return _placed(saved, param, dtype, how.where)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        for k, value in loaded.items():
            if k in saved:
                loaded[k] = _put_right(value, saved[k], param, how, k)
        return loaded
    if type(loaded) is type(saved) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        values = [_put_right(a, b, param, how) for a, b in zip(loaded, saved, strict=True)]
        return _rebuilt(saved, values)
    return saved if isinstance(saved, str) else loaded  # torch makes a generator's repr of a str


def _placed(value: Tensor, param: Tensor, dtype: torch.dtype, where: torch.device | None) -> Tensor:
    """``value`` on the parameter's device; in its strides if shapes agree, as fused steps ignore strides."""
    value = value.to(device=where or param.device, dtype=dtype)
    alike = value.shape == param.shape and value.layout == param.layout == torch.strided
    if not alike or value.stride() == param.stride():
        return value
    if hasattr(local(value), "__tensor_flatten__"):  # such classes lay their inner tensors out as they need
        return value
    like = torch.empty_like(param, dtype=value.dtype, requires_grad=False, device=value.device)
    return value if like.stride() == value.stride() else like.copy_(value)


def _own(value: Any, widens: bool) -> Any:
    """A copy that shares no container and no tensor with ``value``; FP16 and BF16 tensors become FP32 if ``widens``."""
    if isinstance(value, Tensor):
        if not widens or value.dtype not in HALF_DTYPES:
            return copied(value)
        made = value.detach().to(torch.float32)
        return made if type(value) in (Tensor, torch.nn.Parameter) else copied(made)
    if isinstance(value, Mapping):
        return {key: _own(item, widens) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _rebuilt(value, [_own(item, widens) for item in value])
    return value


def _own_dict(state_dict: Mapping[str, Any], widens: bool) -> dict[str, Any]:
    return {key: _own(value, widens) if key == "state" else copy.deepcopy(value) for key, value in state_dict.items()}


def _rebuilt(like: Any, values: list[Any]) -> Any:
    """``values`` in a list, tuple or named tuple like ``like``."""
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


def _adapts(optimizer: Optimizer) -> bool:
    """Whether hooks or an override may turn a dict of another form into torch's: then it is checked later."""
    overridden = "load_state_dict" in vars(optimizer) or (
        type(optimizer).load_state_dict is not Optimizer.load_state_dict
    )
    return overridden or bool(_hooks(optimizer, "pre"))


def _runs_other_code(optimizer: Optimizer) -> bool:
    """Whether loading calls anything but torch's own code: it may write tensors in place before it raises."""
    return bool(_hooks(optimizer, "post")) or _adapts(optimizer) or not is_torch_class(optimizer)


def _hooks(optimizer: Optimizer, when: str) -> Mapping[int, Callable[..., Any]] | None:
    """The table of hooks ``when`` loading; None where a class never called ``Optimizer.__init__``, which makes it."""
    return vars(optimizer).get(f"_optimizer_load_state_dict_{when}_hooks")
