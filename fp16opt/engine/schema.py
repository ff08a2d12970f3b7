"""What a state_dict must look like to fit an optimizer, down to shapes and dtypes. Changes nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

VERSION = 2
READ = (1, VERSION)
"""Versions that load. 2 added the number of steps taken, and perhaps codes in place of FP32 state."""
KEYS = ("version", "optimizer", "masters", "scaler")

# State that torch.optim keeps with one number for every element of its parameter.
PER_ELEMENT = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta"}
    | {"grad_avg", "prev", "step_size", "sum", "ax", "variance"}
)
FACTORED = frozenset({"row_var", "col_var"})  # Adafactor's: one number for every row or column
# What a parameter's state holds after a step of each torch.optim class, whatever its settings.
_ALWAYS = {
    "Adadelta": "step square_avg acc_delta",
    "Adafactor": "step",
    "Adagrad": "step sum",
    "Adam": "step exp_avg exp_avg_sq",
    "AdamW": "step exp_avg exp_avg_sq",
    "Adamax": "step exp_avg exp_inf",
    "ASGD": "step eta mu ax",
    "LBFGS": "func_evals n_iter",
    "Muon": "momentum_buffer",
    "NAdam": "step mu_product exp_avg exp_avg_sq",
    "RAdam": "step exp_avg exp_avg_sq",
    "RMSprop": "step square_avg",
    "Rprop": "step prev step_size",
    "SparseAdam": "step exp_avg exp_avg_sq",
}
_WITH_SETTING = {
    ("Adam", "amsgrad"): "max_exp_avg_sq",
    ("AdamW", "amsgrad"): "max_exp_avg_sq",
    ("RMSprop", "momentum"): "momentum_buffer",
    ("RMSprop", "centered"): "grad_avg",
}
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product", "func_evals", "n_iter"})
# Settings that torch.optim came to have over the years; its __setstate__ fills them in for older checkpoints.
_LATE_SETTINGS = frozenset(
    {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable"} | {"foreach", "fused", "maximize", "nesterov"}
)
_FLAGS = _LATE_SETTINGS | {"centered"}  # True or False; 1 and 0 mean the same
_CHOSEN_BY_TORCH = frozenset({"foreach", "fused"})  # flags that may also be None
_MAY_BE_INF = frozenset({"d", "step_sizes", "t0"})  # bounds and a beginning: inf means that there is none

HOW_SAVED = "Pass what state_dict() of this class returned (of a saved checkpoint, the entry that holds it)."
_SAME_MODEL = "Load into a model with the dtypes that it was saved with."
_SAME_GROUPS = "Construct the optimizer over the parameters and groups that it was saved with."


def is_torch_class(optimizer: Optimizer) -> bool:
    """Whether this is a class of torch.optim itself: what it keeps is known. Subclasses may differ."""
    return getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)


def state_keys(optimizer: Optimizer) -> frozenset[str] | None:
    """What a parameter's state may hold, of torch.optim's own classes that keep tensors by name; None of others."""
    name = type(optimizer).__name__
    if not is_torch_class(optimizer) or name in ("Adafactor", "LBFGS"):
        return None
    sometimes = {key for (of, _), key in _WITH_SETTING.items() if of == name}
    return frozenset({*_ALWAYS.get(name, "momentum_buffer").split(), *sometimes})


def _type(value: object) -> str:
    return type(value).__name__


def lacks(where: str, keys: Sequence[str]) -> ValueError:
    """The error for missing keys."""
    return ValueError(f"{where} lacks {', '.join(map(repr, keys))}. {HOW_SAVED}")


def is_ours(sd: Mapping[Any, Any]) -> bool:
    """Whether a state_dict, whole or damaged, is one of ours rather than a wrapped optimizer's own."""
    return "masters" in sd or "scaler" in sd or {"version", "optimizer"} <= set(sd)


def check_outside(sd: object, any_form: bool = False) -> None:
    """Ours or a plain torch.optim one passes.

    Args:
        any_form: the wrapped optimizer has a ``load_state_dict`` of its own, which reads what it likes.
    """
    if not isinstance(sd, Mapping):
        raise TypeError(f"state_dict must be a dict, got {_type(sd)}. {HOW_SAVED}")
    plain = any_form or ("state" in sd and "param_groups" in sd and not any(key in sd for key in KEYS))
    if plain and not is_ours(sd):
        return
    lacking = [key for key in KEYS if key not in sd]
    if lacking:
        found = sorted(map(repr, sd))
        more = "" if len(found) <= 8 else f" and {len(found) - 8} more"
        raise lacks(f"state_dict (with the keys {', '.join(found[:8]) or 'none'}{more})", lacking)
    for name in ("version", "steps", "skipped_steps"):
        count = sd.get(name, 0)
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} must be an int, got {_type(count)}. {HOW_SAVED}")
        if not 0 <= count < 2**63:
            raise ValueError(f"{name} must be from 0, got {count}. {HOW_SAVED}")
    if sd["version"] not in READ:
        raise ValueError(
            f"version must be one of {', '.join(map(str, READ))}, got {sd['version']}. Load it with the fp16opt "
            "release that wrote it, or a newer one."
        )
    if sd["version"] > 1 and "steps" not in sd:
        raise lacks("state_dict", ["steps"])


def check_masters(saved: object, masters: Sequence[Tensor | None], names: Sequence[str]) -> None:
    """A float32 tensor of the right shape for each master, and None for each parameter that is its own."""
    if not isinstance(saved, list | tuple):
        raise TypeError(f"masters must be a list, got {_type(saved)}. {HOW_SAVED}")
    if len(saved) != len(masters):
        raise ValueError(
            f"masters must have {len(masters)} entries, one for each parameter, got {len(saved)}. "
            "Construct the optimizer over the parameters that it was saved with."
        )
    for value, master, name in zip(saved, masters, names, strict=True):
        if value is None and master is None:
            continue
        if value is None:
            raise ValueError(
                f"{name}: masters has None, but this parameter is 16-bit and needs a master. {_SAME_MODEL} If it was "
                'saved with master_weights="none": wrap it so here, too. If it was frozen then: set '
                "requires_grad=False before wrapping, load, and unfreeze it then."
            )
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: master must be a tensor, got {_type(value)}. {HOW_SAVED}")
        if master is None:
            raise ValueError(
                f"{name}: masters has a tensor, but this parameter is its own master. {_SAME_MODEL} With "
                'master_weights="none" here: wrap it with masters, as it was saved. If it is frozen '
                "here and was not when that was saved: set requires_grad=True before load_state_dict."
            )
        if value.dtype != torch.float32 or value.layout != torch.strided or value.is_meta:
            kind = f"{value.dtype} on {value.device}, {value.layout}"
            raise ValueError(f"{name}: master must be a dense float32 tensor, got {kind}. {HOW_SAVED}")
        if value.shape != master.shape:
            raise ValueError(
                f"{name}: master must have shape {list(master.shape)}, got {list(value.shape)}. "
                "Build the model as it was when the checkpoint was saved."
            )


def check_form(sd: Any) -> None:
    """The form that every state_dict of ``torch.optim.Optimizer`` has, whatever is in it."""
    if not isinstance(sd, Mapping):
        raise TypeError(f"optimizer must be a dict, got {_type(sd)}. {HOW_SAVED}")
    lacking = [key for key in ("state", "param_groups") if key not in sd]
    if lacking:
        raise lacks("optimizer", lacking)
    if not isinstance(sd["state"], Mapping):
        raise TypeError(f"optimizer: state must be a dict, got {_type(sd['state'])}. {HOW_SAVED}")
    if not isinstance(sd["param_groups"], list | tuple):
        raise TypeError(f"optimizer: param_groups must be a list, got {_type(sd['param_groups'])}. {HOW_SAVED}")
    seen: set[Any] = set()
    for number, group in enumerate(sd["param_groups"]):
        where = f"optimizer, group {number}"
        if not isinstance(group, Mapping):
            raise TypeError(f"{where} must be a dict, got {_type(group)}. {HOW_SAVED}")
        if not isinstance(group.get("params"), list | tuple):
            raise TypeError(f"{where}: params must be a list of ids, got {_type(group.get('params'))}. {HOW_SAVED}")
        for i in group["params"]:
            if not isinstance(i, int | str):
                raise TypeError(f"{where}: params must hold numbers or names, got {_type(i)}. {HOW_SAVED}")
            if i in seen:
                raise ValueError(f"{where}: params has the id {i!r} twice. {HOW_SAVED}")
            seen.add(i)


def check_optimizer_state(sd: Any, optimizer: Optimizer, names: Sequence[str]) -> None:
    """Form, number of parameters and, for torch's own classes, settings and every parameter's state.

    Settings and state of other classes are theirs to judge: a subclass of Adam may keep what it likes.
    """
    check_form(sd)
    _check_sizes(sd["param_groups"], optimizer)
    if is_torch_class(optimizer):
        _check_content(sd, optimizer, names)


def _check_content(sd: Mapping[str, Any], optimizer: Optimizer, names: Sequence[str]) -> None:
    groups = sd["param_groups"]
    for number, group in enumerate(groups):
        _check_settings(group, f"optimizer, group {number}", optimizer)
    ids = [i for group in groups for i in group["params"]]
    named_by_str = any(isinstance(i, str) for i in ids)
    for key in sd["state"].keys() - set(ids):
        # torch copies state under other keys as it is, and a few optimizers keep global state under a str
        if named_by_str or not isinstance(key, str):
            raise ValueError(f"optimizer: state has the key {key!r}, but no parameter with that id. {HOW_SAVED}")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    held = [(i, group) for group in groups for i in group["params"]]
    for (i, group), param, name in zip(held, params, names, strict=True):
        _check_entry(sd["state"].get(i, {}), param, name, group, type(optimizer).__name__, params)


def _check_sizes(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
    wanted = optimizer.param_groups
    if len(groups) != len(wanted):
        raise ValueError(f"optimizer must have {len(wanted)} param_groups, got {len(groups)}. {_SAME_GROUPS}")
    for number, (group, now) in enumerate(zip(groups, wanted, strict=True)):
        theirs, ours = len(group["params"]), len(now["params"])
        if theirs != ours:
            raise ValueError(f"optimizer, group {number} must have {ours} params, got {theirs}. {_SAME_GROUPS}")


def _check_settings(group: Mapping[str, Any], where: str, optimizer: Optimizer) -> None:
    """Every setting is there, of its default's kind, and the class can be constructed with them."""
    lacking = sorted(set(optimizer.defaults) - set(group) - _LATE_SETTINGS)
    if lacking:
        raise lacks(where, lacking)
    cls = type(optimizer)
    parameters = inspect.signature(cls).parameters
    given = {}
    for key, like in optimizer.defaults.items():
        if key not in group or not (key in parameters or key in _FLAGS):  # what torch does not know it does not read
            continue
        saved = group[key]
        always = parameters[key].default if key in parameters else like
        if not _fits(key, like, always, saved):
            raise ValueError(f"{where}: {key} must be of the kind of {like!r}, got {saved!r}. {HOW_SAVED}")
        if key not in _FLAGS:
            given[key] = _plain(saved)
    try:  # the class knows its ranges
        cls([torch.zeros(1, 1, dtype=torch.float32, device="cpu")], **given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {cls.__name__} refuses what it was set to: {error}. {HOW_SAVED}") from error


def _fits(key: str, like: object, always: object, saved: Any) -> bool:
    """Whether ``saved`` is a value for the setting ``key``.

    Args:
        like: the optimizer's default.
        always: the default of the class: where it is None, None is a value.
    """
    if key in _FLAGS:
        return (saved is None and key in _CHOSEN_BY_TORCH) or (isinstance(saved, int) and saved in (0, 1))
    if saved is None:
        return like is None or always is None
    if isinstance(like, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(like):
            return False
        every = always if isinstance(always, list | tuple) and len(always) == len(like) else like
        return all(_fits(key, *three) for three in zip(like, every, saved, strict=True))
    if isinstance(saved, str):
        return like is None or isinstance(like, str)
    if isinstance(saved, bool):  # torch takes weight_decay=False, and True for no number
        return saved is False and isinstance(like, Real) and float(like) == 0.0
    number = _number(saved)
    if number is None or (key == "eps" and number < 0):  # Muon takes any
        return False
    return math.isfinite(number) or (key in _MAY_BE_INF and number == math.inf)


def _number(value: object) -> float | None:
    """The one real number that this is, in a tensor or not; None for what torch takes for none."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.layout != torch.strided or value.is_meta or value.dtype == torch.bool:
            return None
        value = value.item()
    if isinstance(value, int):
        return None if isinstance(value, bool) or abs(value) >= 2**63 else float(value)
    return float(value) if isinstance(value, Real) else None


def _plain(value: Any) -> Any:
    """``value`` with Python numbers for tensors: torch's constructors take few settings as tensors."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Tensor) else value


def _check_entry(
    entry: object, param: Tensor, name: str, group: Mapping[str, Any], cls: str, params: Sequence[Tensor]
) -> None:
    """One parameter's state: what torch.optim's classes keep is known."""
    if not isinstance(entry, Mapping):
        raise TypeError(f"{name}: state must be a dict, got {_type(entry)}. {HOW_SAVED}")
    needed = _ALWAYS.get(cls, "").split()
    needed += [key for (of, setting), key in _WITH_SETTING.items() if of == cls and group.get(setting)]
    if cls == "Adafactor":
        needed += ["row_var", "col_var"] if param.dim() > 1 else ["variance"]
    lacking = [key for key in needed if key not in entry]
    if lacking and (entry or cls == "Adagrad"):  # the only class that makes its state when it is constructed
        raise lacks(f"{name}: state", lacking)
    for key, value in entry.items():
        if key in _NUMBERS:
            number = _number(value)
            if number is None or not 0 <= number < math.inf:  # it counts steps, or shrinks with them
                raise ValueError(f"{name}: {key} must be one finite number from 0, got {value!r}. {HOW_SAVED}")
        like = _like(key, value, param.shape, cls)
        if like is not None:
            _check_tensor(key, value, like, name, may_be_sparse=key == "momentum_buffer")
    if cls == "LBFGS":  # it keeps vectors over all parameters laid end to end, alone and in lists
        size = sum(one.numel() for one in params)
        for key, value in entry.items():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Tensor) and one.dim():
                    _check_tensor(key, one, (size,), name)


def _like(key: object, value: object, shape: torch.Size, cls: str) -> tuple[int, ...] | None:
    """The shape that state ``key`` of torch's class ``cls`` must have; None where nothing is known.

    Args:
        shape: of the parameter.
    """
    if key == "row_var" and shape:
        return (*shape[:-1], 1)
    if key == "col_var" and len(shape) > 1:
        return (*shape[:-2], 1, shape[-1])
    if cls == "SGD" and key == "momentum_buffer" and value is None:  # SGD takes that for a buffer not yet begun
        return None
    return shape if key in PER_ELEMENT else None


def _check_tensor(key: object, value: object, shape: tuple[int, ...], name: str, may_be_sparse: bool = False) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {key} must be a tensor, got {_type(value)}. {HOW_SAVED}")
    if value.shape != shape:
        raise ValueError(
            f"{name}: {key} must have shape {list(shape)}, got {list(value.shape)}. "
            "Build the model as it was when the checkpoint was saved."
        )
    is_dense = value.layout == torch.strided or may_be_sparse  # as SGD's momentum of sparse gradients
    if not (value.is_floating_point() and is_dense):
        raise ValueError(
            f"{name}: {key} must be a dense floating tensor, got {value.dtype}, {value.layout}. {HOW_SAVED}"
        )
