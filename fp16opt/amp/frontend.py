"""``initialize``, and the checkpoints of loss scalers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ._amp_state import _amp_state, logger, rank, warn_or_err
from .handle import AmpHandle, NoOpHandle
from .initialised import Setup
from .models import check_model, prepare_model
from .optimizers import adopt, check_optimizer, wrapped_in
from .policy import O0, O1, O2, O3, AmpError, Properties, as_bool, opt_levels, resolve
from .scaler import LossScaler

__all__ = ["O0", "O1", "O2", "O3", "Properties", "initialize", "load_state_dict", "opt_levels", "state_dict"]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool | str = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
) -> Any:
    """Prepare models and optimizers for training at an opt level. They are changed in place, and returned.

    Args:
        models: A module or a list of them, in FP32. Wrap them for parallel training afterwards.
        optimizers: An optimizer or a list of them, of the models' parameters. What each has learnt is kept.
        enabled: False, or "False": everything is returned as it came.
        opt_level: Where the properties start from: "O0" plain FP32; "O1" functions cast their inputs; "O2" an FP16
            model with FP32 batch norm and master weights; "O3" FP16 throughout. See ``policy`` for the table.
        cast_model_type: dtype of weights and inputs; False: no cast.
        patch_torch_functions: Whether functions cast their inputs; O1's own.
        keep_batchnorm_fp32: Whether affine batch norms, and classes in ``_amp_state.fp32_modules``, stay FP32.
        master_weights: Whether 16-bit parameters get FP32 masters.
        loss_scale: A number, or "dynamic" (the default of O1 and O2).
        cast_model_outputs: dtype of what models return; the default is float32 where the model was cast.
        num_losses: How many scalers ``scale_loss(loss_id=...)`` chooses from. They are the process's, as in apex:
            optimizers of earlier calls use the new ones from now on.
        verbosity: 0: silent. 1: a line here, and skipped steps. 2: O1's casts.
        min_loss_scale, max_loss_scale: The limits of dynamic scales; None: 2**-14, and no ceiling.

    Returns:
        The same objects in the same form: a list for a list, one for one, the models alone without optimizers.

    Raises:
        AmpError: A refusal with its reason (a ``RuntimeError`` and a ``ValueError``). Nothing has been changed.
        TypeError: An argument is neither one of what was asked for nor a list of them.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> model.weight.dtype, optimizer.param_groups[0]["params"][0].dtype
        (torch.float16, torch.float32)
    """
    if not (as_bool("enabled", enabled) if isinstance(enabled, str) else enabled):
        return _disabled(models, optimizers)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    forgive = (lambda refused: warn_or_err(str(refused))) if _amp_state.hard_override else None
    properties = resolve(opt_level, overrides, forgive)
    model_list, optimizer_list = _as_list(models, "models", nn.Module), _as_list(optimizers, "optimizers", object)
    _check_verbosity(verbosity)
    _check(model_list, optimizer_list, cast_model_outputs)
    scalers = _make_scalers(properties.loss_scale, num_losses, min_loss_scale, max_loss_scale, optimizer_list)
    means_no_scale = loss_scale is not None and properties.loss_scale == 1.0
    _prepare(model_list, optimizer_list, properties, cast_model_outputs, verbosity, means_no_scale)
    _begin_session(properties, scalers, verbosity, min_loss_scale, max_loss_scale)
    if properties.patch_torch_functions:
        _amp_state.casts.activate(verbose=verbosity > 1)
        _amp_state.handle.watch(model_list)
    return _returned(models, optimizers)


def _check_verbosity(verbosity: object) -> None:
    if not isinstance(verbosity, int):
        raise TypeError(f"verbosity: expected 0, 1 or 2, got {verbosity!r}.")


def _prepare(
    models: list[nn.Module],
    optimizers: list[Any],
    properties: Properties,
    outputs: torch.dtype | None,
    verbosity: int,
    means_no_scale: bool,
) -> None:
    """Change models and optimizers that were found good."""
    casts = bool(properties.patch_torch_functions)
    setup = Setup(_amp_state.loss_scalers, bool(properties.master_weights), casts, verbosity, means_no_scale)
    for model in models:
        prepare_model(model, properties, outputs, _amp_state.fp32_modules)
    names = [pair for number, model in enumerate(models) for pair in _names(model, number, len(models))]
    for optimizer in optimizers:
        adopt(wrapped_in(optimizer), setup, names)


def _disabled(models: Any, optimizers: Any) -> Any:
    """What was initialised before keeps its own scalers; this pair is left as it is."""
    if not _amp_state.loss_scalers:
        _amp_state.opt_properties = Properties()
        _amp_state.handle = NoOpHandle()
    for optimizer in [] if optimizers is None else _as_list(optimizers, "optimizers", object):
        inner = wrapped_in(optimizer)
        if inner is not None:
            inner.__dict__["_amp_disabled"] = True
    return _returned(models, optimizers)


def _returned(models: Any, optimizers: Any) -> Any:
    return models if optimizers is None else (models, optimizers)


def _as_list(given: Any, what: str, kind: type) -> list[Any]:
    if given is None and what == "optimizers":
        return []
    if isinstance(given, list):
        return list(given)
    if isinstance(given, kind) and not isinstance(given, (tuple, set, dict, str)):
        return [given]
    wanted = "a torch.nn.Module" if what == "models" else "a torch.optim.Optimizer"
    raise TypeError(f"{what}: expected {wanted} or a list of them, got {type(given).__name__}.")


def _check(models: list[nn.Module], optimizers: list[Any], outputs: Any) -> None:
    if outputs is not None and not (isinstance(outputs, torch.dtype) and outputs.is_floating_point):
        raise TypeError(f"cast_model_outputs: expected a floating torch.dtype or None, got {outputs!r}.")
    for number, model in enumerate(models):
        _allowing(check_model, model, number, _amp_state.allow_incoming_model_not_fp32)
        if any(model is other for other in models[:number]):
            raise AmpError(f"models: model {number} is in the list twice.")
    if not torch.backends.cudnn.enabled:
        warn_or_err("amp needs torch.backends.cudnn.enabled = True.")
    known = {id(param) for model in models for param in model.parameters()}
    for number, optimizer in enumerate(optimizers):
        _allowing(check_optimizer, optimizer, number, known)
        if any(optimizer is other for other in optimizers[:number]):
            raise AmpError(f"optimizers: optimizer {number} is in the list twice.")


def _allowing(check: Any, *args: Any) -> None:
    """Under ``hard_override`` the refusals that can be lived with only warn."""
    try:
        check(*args)
    except AmpError as refused:
        if not _amp_state.hard_override or "before" in str(refused):
            raise
        warn_or_err(str(refused))


def _make_scalers(
    loss_scale: float | str, count: Any, floor: float | None, ceiling: float | None, optimizers: Sequence[Any]
) -> list[LossScaler]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise AmpError(f"num_losses: expected a whole number from 1 on, got {count!r}.")
    for name, value in (("min_loss_scale", floor), ("max_loss_scale", ceiling)):
        if value is not None and (not isinstance(value, (int, float)) or not 0 < value < math.inf):
            raise AmpError(f"{name}: expected a positive number or None, got {value!r}.")
    if floor is not None and ceiling is not None and floor > ceiling:
        raise AmpError(f"min_loss_scale: expected at most max_loss_scale, got {floor} and {ceiling}.")
    try:
        scalers = [LossScaler(loss_scale, min_loss_scale=floor, max_loss_scale=ceiling) for _ in range(count)]
    except (TypeError, ValueError) as error:
        raise AmpError(f"loss_scale: {error}") from None
    for optimizer in optimizers[:1]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for scaler in scalers if params else ():
            scaler.to(params[0].device)
    return scalers


def _names(model: nn.Module, number: int, count: int) -> list[tuple[str, Any]]:
    prefix = f"model {number}: " if count > 1 else ""
    return [(f"{prefix}{name}", param) for name, param in model.named_parameters()]


def _begin_session(
    properties: Properties, scalers: list[LossScaler], verbosity: int, floor: float | None, ceiling: float | None
) -> None:
    _amp_state.opt_properties = properties
    _amp_state.loss_scalers[:] = scalers  # in place: optimizers of earlier calls hold this list
    _amp_state.verbosity = verbosity
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = floor, ceiling
    if not isinstance(_amp_state.handle, AmpHandle):
        _amp_state.handle = AmpHandle(_amp_state.casts)
    if verbosity > 0 and rank() == 0:
        settings = ", ".join(f"{name}={value}" for name, value in properties.options.items() if name != "enabled")
        logger.info("%s %s", opt_levels[properties.opt_level].brief, settings)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scalers in use: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    Masters and optimizer state are in the optimizers' own. Empty where amp is not enabled. Syncs.

    Args:
        destination: A dict to add to; a new OrderedDict by default.
    """
    destination = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{number}"] = scaler.saved()
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what :func:`state_dict` gave, here or in apex. Scalers are matched by key.

    More or fewer entries than scalers are warned of; those in both are loaded.

    Raises:
        AmpError: Keys without 'loss_scaler', or an entry without its two numbers. Nothing has been changed.
        TypeError: It is no dict.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected a dict, got {type(state_dict).__name__}.")
    unexpected = [repr(key) for key in state_dict if "loss_scaler" not in str(key)]
    if unexpected:
        raise AmpError(
            f"state_dict: expected keys 'loss_scaler0' and so on, got {', '.join(unexpected)}. Pass what "
            "amp.state_dict() returned, not the whole checkpoint."
        )
    for key, entry in state_dict.items():
        _check_entry(key, entry)
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        logger.warning(
            "amp.load_state_dict: the checkpoint has %d loss scalers and this run has %d; those in both are loaded.",
            *(len(state_dict), len(scalers)),
        )
    for number, scaler in enumerate(scalers):
        entry = state_dict.get(f"loss_scaler{number}")
        if entry is not None:
            scaler.load_saved(entry)


def _check_entry(key: object, entry: Any) -> None:
    numbers = isinstance(entry, Mapping) and [entry.get("loss_scale"), entry.get("unskipped")]
    fits = numbers and all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)
    if not fits or not 0 < entry["loss_scale"] < math.inf or entry["unskipped"] < 0:
        raise AmpError(
            f"state_dict: entry {key!r}: expected {{'loss_scale': positive number, 'unskipped': count}}, got {entry!r}."
        )
