"""What a state_dict must look like to fit an optimizer, down to shapes and dtypes. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

VERSION = 1
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
_LBFGS_AFTER_A_STEP = ("d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad", "prev_loss")
# Settings that torch.optim came to have over the years; its __setstate__ fills them in for older checkpoints.
_LATE_SETTINGS = frozenset(
    {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable"} | {"foreach", "fused", "maximize", "nesterov"}
)

HOW_SAVED = "Pass what state_dict() of this class returned (of a saved checkpoint, the entry that holds it)."
_SAME_MODEL = "Load into a model with the dtypes that it was saved with."
_SAME_GROUPS = "Construct the optimizer over the parameters and groups that it was saved with."


def is_torch_class(optimizer: Optimizer) -> bool:
    """Whether this is a class of torch.optim itself: what it keeps is known. Subclasses may differ."""
    return getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)


def labels_of(optimizer: Optimizer, names: Sequence[str]) -> list[str]:
    """How messages call each parameter: place, and name if it has one of its own."""
    places = [
        f"group {g}, param {i}" for g, group in enumerate(optimizer.param_groups) for i in range(len(group["params"]))
    ]
    return [place if name == place else f"{place} ({name!r})" for place, name in zip(places, names, strict=True)]


def _type(value: object) -> str:
    return type(value).__name__


def lacks(where: str, keys: Sequence[str]) -> ValueError:
    """The error for missing keys."""
    return ValueError(f"{where} lacks {', '.join(map(repr, keys))}. {HOW_SAVED}")


def check_outside(sd: object) -> None:
    """Ours or a plain torch.optim one passes; other libraries' kinds are told by name."""
    if not isinstance(sd, Mapping):
        raise TypeError(f"state_dict must be a dict, got {_type(sd)}. {HOW_SAVED}")
    if {"scale", "growth_factor", "_growth_tracker"} <= set(sd):
        raise ValueError(
            "state_dict is of a torch.amp.GradScaler: it has a loss scale and no optimizer. Load the "
            "optimizer's own state_dict here, and set the scale with opt.loss_scale = state_dict['scale']."
        )
    if "optimizer_state_dict" in sd or "fp32_from_fp16" in sd:
        raise ValueError(
            "state_dict is of an FP16_Optimizer. Load it into a fp16opt.fp16_utils.FP16_Optimizer, which takes its "
            "masters and its scale; MixedPrecisionOptimizer.state_dict(that) is the same in the keys wanted here."
        )
    if any(isinstance(entry, Mapping) and {"loss_scale", "unskipped"} <= set(entry) for entry in sd.values()):
        raise ValueError(
            "state_dict is of apex.amp: it has loss scales and no optimizer. Load the optimizer's own "
            "state_dict here, and set opt.loss_scale = state_dict['loss_scaler0']['loss_scale']."
        )
    if "state" in sd and "param_groups" in sd and not any(key in sd for key in KEYS):
        return
    lacking = [key for key in KEYS if key not in sd]
    if lacking:
        found = sorted(map(repr, sd))
        more = "" if len(found) <= 8 else f" and {len(found) - 8} more"
        raise lacks(f"state_dict (with the keys {', '.join(found[:8]) or 'none'}{more})", lacking)
    if isinstance(sd["version"], bool) or not isinstance(sd["version"], int):
        raise TypeError(f"version must be an int, got {_type(sd['version'])}. {HOW_SAVED}")
    if sd["version"] != VERSION:
        raise ValueError(
            f"version must be {VERSION}, got {sd['version']}. Load it with the fp16opt release that wrote "
            "it, or a newer one."
        )


def check_masters(saved: object, masters: Sequence[Tensor | None], labels: Sequence[str]) -> None:
    """A float32 tensor of the right shape for each master, and None for each parameter that is its own."""
    if not isinstance(saved, list | tuple):
        raise TypeError(f"masters must be a list, got {_type(saved)}. {HOW_SAVED}")
    if len(saved) != len(masters):
        raise ValueError(
            f"masters must have {len(masters)} entries, one for each parameter, got {len(saved)}. "
            "Construct the optimizer over the parameters that it was saved with."
        )
    for value, master, label in zip(saved, masters, labels, strict=True):
        if value is None and master is None:
            continue
        if value is None:
            raise ValueError(
                f"{label}: masters has None, but this parameter is 16-bit and needs a master. {_SAME_MODEL} If it was "
                "frozen when that was saved: set requires_grad=False before wrapping, load, and unfreeze it then."
            )
        if not isinstance(value, Tensor):
            raise TypeError(f"{label}: master must be a tensor, got {_type(value)}. {HOW_SAVED}")
        if master is None:
            raise ValueError(
                f"{label}: masters has a tensor, but this parameter is its own master. {_SAME_MODEL} If it is frozen "
                "here and was not when that was saved: set requires_grad=True before load_state_dict."
            )
        if value.dtype != torch.float32 or value.layout != torch.strided or value.is_meta:
            kind = f"{value.dtype} on {value.device}, {value.layout}"
            raise ValueError(f"{label}: master must be a dense float32 tensor, got {kind}. {HOW_SAVED}")
        if value.shape != master.shape:
            raise ValueError(
                f"{label}: master must have shape {list(master.shape)}, got {list(value.shape)}. "
                "Build the model as it was when the checkpoint was saved."
            )


def check_optimizer_state(sd: object, optimizer: Optimizer, labels: Sequence[str]) -> None:
    """Structure, settings and every parameter's state."""
    if not isinstance(sd, Mapping):
        raise TypeError(f"optimizer must be a dict, got {_type(sd)}. {HOW_SAVED}")
    lacking = [key for key in ("state", "param_groups") if key not in sd]
    if lacking:
        raise lacks("optimizer", lacking)
    if not isinstance(sd["state"], Mapping):
        raise TypeError(f"optimizer: state must be a dict, got {_type(sd['state'])}. {HOW_SAVED}")
    groups = sd["param_groups"]
    _check_groups(groups, optimizer)
    ids = [i for group in groups for i in group["params"]]
    by_id = dict(zip(ids, labels, strict=True))
    named_by_str = any(isinstance(i, str) for i in ids)
    for key in sd["state"]:
        # torch copies state under other keys as it is, and a few optimizers keep global state under a str
        if key not in by_id and (named_by_str or not isinstance(key, str)):
            raise ValueError(f"optimizer: state has the key {key!r}, but no parameter with that id. {HOW_SAVED}")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    by_param = dict(zip(ids, params, strict=True))
    for group in groups:
        entries = {i: sd["state"][i] for i in group["params"] if i in sd["state"]}
        for i, entry in entries.items():
            if not isinstance(entry, Mapping):
                raise TypeError(f"{by_id[i]}: state must be a dict, got {_type(entry)}. {HOW_SAVED}")
            _check_entry(entry, by_param[i], by_id[i], optimizer, group)
        _check_alike(entries, by_param, by_id)
    if is_torch_class(optimizer) and type(optimizer).__name__ == "Adagrad":
        missing = [by_id[i] for i in ids if not sd["state"].get(i)]
        if missing:  # the only class that makes its state when it is constructed, and never after
            raise ValueError(f"{missing[0]}: Adagrad has state for every parameter, got none. {HOW_SAVED}")


def _check_groups(groups: object, optimizer: Optimizer) -> None:
    if not isinstance(groups, list | tuple):
        raise TypeError(f"optimizer: param_groups must be a list, got {_type(groups)}. {HOW_SAVED}")
    wanted = optimizer.param_groups
    if len(groups) != len(wanted):
        raise ValueError(f"optimizer must have {len(wanted)} param_groups, got {len(groups)}. {_SAME_GROUPS}")
    seen: set[Any] = set()
    for number, (group, now) in enumerate(zip(groups, wanted, strict=True)):
        where = f"optimizer, group {number}"
        if not isinstance(group, Mapping):
            raise TypeError(f"{where} must be a dict, got {_type(group)}. {HOW_SAVED}")
        if not isinstance(group.get("params"), list | tuple):
            raise TypeError(f"{where}: params must be a list of ids, got {_type(group.get('params'))}. {HOW_SAVED}")
        ids = group["params"]
        if len(ids) != len(now["params"]):
            raise ValueError(f"{where} must have {len(now['params'])} params, got {len(ids)}. {_SAME_GROUPS}")
        for i in ids:
            if not isinstance(i, int | str):
                raise TypeError(f"{where}: params must hold numbers or names, got {_type(i)}. {HOW_SAVED}")
            if i in seen:
                raise ValueError(f"{where}: params has the id {i!r} twice. {HOW_SAVED}")
            seen.add(i)
        _check_settings(group, now, where, optimizer)


def _check_settings(group: Mapping[str, Any], now: Mapping[str, Any], where: str, optimizer: Optimizer) -> None:
    """Every setting is there, and of its default's kind (one-element tensors count as numbers)."""
    standard = is_torch_class(optimizer)
    if standard:
        lacking = sorted((set(optimizer.defaults) & set(now)) - set(group) - _LATE_SETTINGS)
        if lacking:
            raise lacks(where, lacking)
    for key, like in optimizer.defaults.items():  # what the group has now may be loaded, and of another kind
        if key not in group or key not in now:
            continue
        if not _fits(like, group[key], lenient=not standard):
            raise ValueError(f"{where}: {key} must be of the kind of {like!r}, got {group[key]!r}. {HOW_SAVED}")
    names = group.get("param_names")
    if names is not None and (not isinstance(names, list | tuple) or len(names) != len(group["params"])):
        raise ValueError(f"{where}: param_names must be a list of {len(group['params'])} names. {HOW_SAVED}")


def _fits(like: object, saved: object, lenient: bool) -> bool:
    """Whether ``saved`` is the kind of value that ``like`` is. One that is None or a flag tells little."""
    if like is None:
        return not isinstance(saved, Tensor)
    if isinstance(like, bool):
        return saved is None or isinstance(saved, int | float)
    if saved is None:
        return lenient
    if isinstance(like, Real | Tensor):
        if isinstance(saved, Tensor):
            return saved.numel() == 1 and not saved.is_complex() and not saved.is_meta
        if isinstance(saved, bool):  # torch takes weight_decay=False, and True for no number
            return lenient or (saved is False and float(like) == 0.0)
        if isinstance(saved, int):
            return abs(saved) < 2**63  # torch takes no other
        return isinstance(saved, Real) and not math.isnan(saved)
    if isinstance(like, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(like):
            return False
        return all(_fits(a, b, lenient=True) for a, b in zip(like, saved, strict=True))
    return not isinstance(like, str) or isinstance(saved, str)


def _check_entry(
    entry: Mapping[Any, Any], param: Tensor, label: str, optimizer: Optimizer, group: Mapping[str, Any]
) -> None:
    """One parameter's state. What torch.optim's classes keep is known; others may use any name."""
    standard = is_torch_class(optimizer)
    if standard and entry:
        name = type(optimizer).__name__
        keys = _ALWAYS.get(name, "").split()
        keys += [key for (cls, setting), key in _WITH_SETTING.items() if cls == name and group.get(setting)]
        lacking = [key for key in keys if key not in entry]
        if lacking:
            raise lacks(f"{label}: state", lacking)
    for key, value in entry.items():
        if _without_data(value):
            raise ValueError(f"{label}: {key} has a meta tensor, which holds no data. {HOW_SAVED}")
        if standard and key in _NUMBERS:
            _check_number(key, value, label)
        like = _like(key, value, param, optimizer, standard)
        if like is not None:
            _check_tensor(key, value, like, label)
    if standard and type(optimizer).__name__ == "LBFGS" and entry:
        _check_lbfgs(entry, group["history_size"], optimizer, label)


def _like(key: object, value: object, param: Tensor, optimizer: Optimizer, standard: bool) -> tuple[int, ...] | None:
    """The shape that state ``key`` must have; None where nothing is known."""
    shape = tuple(param.shape)
    if not standard:
        # a projected moment, say, has a shape of its own: what the live state shows is what must come
        live = optimizer.state[param].get(key) if param in optimizer.state else None
        return tuple(live.shape) if key in PER_ELEMENT and isinstance(live, Tensor) else None
    if key == "row_var" and shape:
        return (*shape[:-1], 1)
    if key == "col_var" and len(shape) > 1:
        return (*shape[:-2], 1, shape[-1])
    sgd = type(optimizer).__name__ == "SGD"
    if sgd and key == "momentum_buffer" and value is None:  # SGD takes that for a buffer not yet begun
        return None
    return shape if key in PER_ELEMENT else None


def _without_data(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_without_data, value))
    return isinstance(value, Tensor) and value.is_meta


def _check_tensor(key: object, value: object, shape: tuple[int, ...], label: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{label}: {key} must be a tensor, got {_type(value)}. {HOW_SAVED}")
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{label}: {key} must have shape {list(shape)}, got {list(value.shape)}. "
            "Build the model as it was when the checkpoint was saved."
        )
    if not value.is_floating_point():
        raise ValueError(f"{label}: {key} must be a floating tensor, got {value.dtype}. {HOW_SAVED}")


def _check_number(key: object, value: object, label: str) -> None:
    if isinstance(value, Tensor):
        fits = value.numel() == 1 and not value.is_complex()
    else:
        fits = isinstance(value, int | float)
    if not fits:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else _type(value)
        raise ValueError(f"{label}: {key} must be one number, got {got}. {HOW_SAVED}")


def _check_lbfgs(entry: Mapping[Any, Any], history: int, optimizer: Optimizer, label: str) -> None:
    """LBFGS keeps vectors over all parameters laid end to end, in lists of equal length."""
    if not float(entry["n_iter"]) > 0:
        return
    lacking = [key for key in _LBFGS_AFTER_A_STEP if key not in entry]
    if lacking:
        raise lacks(f"{label}: state", lacking)
    dirs, steps, factors = (entry[key] for key in ("old_dirs", "old_stps", "ro"))
    lists = all(isinstance(one, list) and len(one) == len(dirs) for one in (dirs, steps, factors))
    if not lists or len(dirs) > history:
        raise ValueError(
            f"{label}: old_dirs, old_stps and ro must be lists of one length, at most {history}. {HOW_SAVED}"
        )
    if "al" in entry and not (isinstance(entry["al"], list) and len(entry["al"]) >= history):
        raise ValueError(f"{label}: al must be a list with room for {history} numbers. {HOW_SAVED}")
    size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    vectors = {
        "d": [entry["d"]],
        "prev_flat_grad": [entry["prev_flat_grad"]],
        "old_dirs": dirs,
        "old_stps": steps,
    }
    for key, values in vectors.items():
        for value in values:
            _check_tensor(key, value, (size,), label)
    for key, values in {"ro": factors, **{k: [entry[k]] for k in ("t", "H_diag", "prev_loss")}}.items():
        for value in values:
            _check_number(key, value, label)


def _check_alike(
    entries: Mapping[Any, Mapping[Any, Any]], params: Mapping[Any, Tensor], labels: Mapping[Any, str]
) -> None:
    """Parameters of one group and of as many dimensions have the same state, where they have any."""
    common: dict[int, dict[Any, Any]] = {}
    for i, entry in entries.items():
        if entry:
            keys = [key for key in entry if key == "step" or key in PER_ELEMENT]
            common.setdefault(params[i].dim(), {}).update(dict.fromkeys(keys, i))
    for i, entry in entries.items():
        for key, other in common.get(params[i].dim(), {}).items():
            if entry and key not in entry:
                raise ValueError(f"{labels[i]}: state lacks {key!r}, which {labels[other]} has. {HOW_SAVED}")
