"""Models in place: cast their weights, cast what goes into ``forward`` and what comes out, FP32 state dicts."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import HALF_DTYPES
from ._amp_state import _amp_state
from .nested import cast_nested
from .policy import AmpError, Properties
from .subclassing import Reducible, combined, parts_of

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_WRAPPER_NAMES = ("apex.parallel",)


@dataclass(frozen=True)
class ForwardCasts:
    """What a model's ``forward`` does to its arguments and results; None: nothing.

    Attributes:
        inputs: dtype of floating arguments.
        outputs: dtype of floating results.
        keep: dtypes of arguments and results that stay: float64 where the model computes in it.
        casts: Whether functions cast their inputs inside (O1); None: as outside.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype | None
    keep: tuple[torch.dtype, ...]
    casts: bool | None


class AmpModule(Reducible):
    """What ``amp.initialize`` adds to a model's class. Copies and pickles of the model keep it."""

    _amp_forward: ForwardCasts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with its arguments and results cast as the opt level says."""
        plan = self.__dict__.get("_amp_forward")
        if plan is None:  # another instance of the same class, which was not given to initialize
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if plan.inputs is not None:
            args = tuple([cast_nested(arg, plan.inputs, plan.keep) for arg in args])
            kwargs = {name: cast_nested(arg, plan.inputs, plan.keep) for name, arg in kwargs.items()}
        casts = _amp_state.casts
        if plan.casts is None or not casts.active:
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        elif plan.casts:
            result = self._forward_with_casts(args, kwargs)
        else:
            with casts.disabled():
                result = super().forward(*args, **kwargs)  # type: ignore[misc]
        return result if plan.outputs is None else cast_nested(result, plan.outputs, plan.keep)

    def _forward_with_casts(self, args: Any, kwargs: Any) -> Any:
        """FP16 copies of weights live as long as this call: weights may be loaded or swapped between calls."""
        casts = _amp_state.casts
        casts.clear_cache()
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            casts.clear_cache()


def check_model(model: nn.Module, number: int, allow_half: bool) -> None:
    """Raise :class:`AmpError` or ``TypeError`` where ``model`` can't be initialised."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"models: expected a torch.nn.Module or a list of them, got {type(model).__name__}.")
    where = f"models: model {number} ({type(model).__name__})"
    if isinstance(model, AmpModule) and "_amp_forward" in model.__dict__:
        raise AmpError(f"{where} was passed to amp.initialize before. Initialize it once.")
    if isinstance(model, _WRAPPERS) or type(model).__module__.startswith(_WRAPPER_NAMES):
        raise AmpError(
            f"{where} is wrapped for parallel training already. Call amp.initialize on the bare model first, and wrap "
            "what it returns."
        )
    if allow_half:
        return
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.dtype in HALF_DTYPES:
                raise AmpError(
                    f"{where}: {kind} {name!r} is {str(tensor.dtype).removeprefix('torch.')}, expected float32. "
                    "Pass the model as it is, no .half() needed: amp casts what the opt_level asks for."
                )


def _stays_fp32(module: nn.Module, keep_batchnorm: bool, kinds: Sequence[type[nn.Module]]) -> bool:
    if not keep_batchnorm:
        return False
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return bool(module.affine)
    return isinstance(module, tuple(kinds))


def modules_to_cast(model: nn.Module, keep_batchnorm: bool, kinds: Sequence[type[nn.Module]]) -> Iterator[nn.Module]:
    """All modules of ``model`` but those that stay in FP32: affine batch norms, and trees of the classes ``kinds``."""
    seen: set[int] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if not _stays_fp32(module, keep_batchnorm, kinds):
            yield module
            pending.extend(module.children())


def _shared_with_fp32(model: nn.Module, cast: list[nn.Module]) -> set[int]:
    """Tensors of modules that stay in FP32: one that is tied to a module that is cast stays too."""
    ids = {id(module) for module in cast}
    kept = [module for module in model.modules() if id(module) not in ids]
    return {id(t) for module in kept for t in module.parameters(recurse=False)}


def cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm: bool, kinds: Sequence[type[nn.Module]]) -> None:
    """Cast FP32 and 16-bit parameters, their gradients, and buffers, in place. FP64 was chosen, and stays."""
    modules = list(modules_to_cast(model, keep_batchnorm, kinds))
    kept = _shared_with_fp32(model, modules)
    with torch.no_grad():
        for module in modules:
            for param in module._parameters.values():
                if param is not None and _is_cast(param, dtype) and id(param) not in kept:
                    grad, param.grad = param.grad, None
                    param.data = param.data.to(dtype)
                    param.grad = None if grad is None else grad.to(dtype)
            for name, buffer in module._buffers.items():
                if buffer is not None and _is_cast(buffer, dtype):
                    module._buffers[name] = buffer.to(dtype)
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _is_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype != dtype and tensor.dtype in (torch.float32, *HALF_DTYPES)


def fp32_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A state_dict hook: FP16 and BF16 tensors of ``module`` and what is below it leave as FP32 copies."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            if isinstance(value, nn.Parameter):
                continue  # keep_vars=True asks for the parameters themselves
            state[name] = value.float()


def prepare_model(model: nn.Module, properties: Properties, outputs: torch.dtype | None, kinds: Any) -> None:
    """Do to one checked model what the properties say."""
    dtype = properties.cast_model_type or None
    if dtype is not None:
        cast_model(model, dtype, bool(properties.keep_batchnorm_fp32), kinds)
        if dtype in HALF_DTYPES:
            for module in model.modules():
                module._register_state_dict_hook(fp32_state)  # type: ignore[no-untyped-call]
    wide = any(t.dtype == torch.float64 for t in (*model.parameters(), *model.buffers()))
    keep = (torch.float64,) if wide else ()
    if dtype is not None and outputs is None:
        outputs = torch.float32
    casts = True if properties.patch_torch_functions else None if dtype is None else False
    model.__dict__["_amp_forward"] = ForwardCasts(dtype, outputs, keep, casts)
    adopt_class(model)


def adopt_class(model: nn.Module) -> None:
    """Give ``model`` the class that casts in ``forward``; a ``forward`` that was set on the instance stays in force."""
    own = model.__dict__.pop("forward", None)
    base: Any = type(model)
    if parts_of(model) is None:
        if own is not None:
            base = types.new_class(base.__name__, (base,), {}, lambda ns: ns.update(_instance_forward(own, base)))
        cls: Any = combined(AmpModule, base)
        model.__class__ = cls


def _instance_forward(own: Any, base: Any) -> dict[str, Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
