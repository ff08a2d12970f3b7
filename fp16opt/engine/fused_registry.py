"""Which optimizer classes a fused kernel steps, with what their groups' settings and their state mean to it."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..kernels import Piece, backend, operations
from ..kernels.formulas import FORMULAS, Formula
from ..kernels.steps import NamedStep, named_step
from .params import ParamPair

GroupKeys = Mapping[str, "str | tuple[str, ...]"]


class CannotServe(Exception):
    """A gradient, a setting or optimizer state needs the wrapped optimizer's own step."""


def check_fp32_state(name: str, tensor: object, master: Tensor) -> None:
    """Raise :class:`CannotServe` unless this is FP32 state as torch keeps it. No sync."""
    if not isinstance(tensor, Tensor):
        raise CannotServe(f"the state of a parameter has no tensor {name!r}")
    if tensor.dtype != torch.float32 or (tensor.shape != master.shape and name != "step"):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CannotServe(f"state {name!r} is {dtype} of shape {tuple(tensor.shape)}")
    elsewhere = tensor.device != master.device and not (name == "step" and tensor.device.type == "cpu")
    spread = name != "step" and getattr(tensor, "placements", None) != getattr(master, "placements", None)
    if tensor.layout is not torch.strided or elsewhere or tensor.requires_grad or spread:
        raise CannotServe(f"state {name!r} is not a dense tensor on {master.device}")


@dataclass(frozen=True)
class FusedStepSpec:
    """What a fused step needs to know of an optimizer class.

    Attributes:
        numbers: settings of a group that must be numbers.
        options: from a group's settings to the kernel's. No sync: an lr that is a tensor stays one.
        state_names: from a group's settings to the names of the state tensors that its parameters need.
        make_state: fills the state of a parameter that has none: (state, settings, model parameter).
        step: gives the kernel's step: (names of the state that there is, whether there are models).
        fills_first: whether new state holds nothing before the first step, which fills it.
        check_state: raises :class:`CannotServe` unless the kernel takes a state tensor: (name, tensor, master).
        required: settings without which there is no step.
        defaults: settings that a class may lack, with the values that switch them off.
        group_keys: from a setting to the group's key for it, or keys for its parts, where the class is not torch's own.
        piece: which part of the whole parameter a rank's tensor is, where bits of its state depend on that; None where
            none do.
        must_be: values that options of a package's class must have, which the functor knows nothing of: attributes of
            the optimizer, or keys of its groups, in versions of the package that have them.
    """

    numbers: tuple[str, ...]
    options: Callable[[dict[str, Any]], Any]
    state_names: Callable[[dict[str, Any]], tuple[str, ...]]
    make_state: Callable[[dict[str, Any], dict[str, Any], Tensor], None]
    step: Callable[[Collection[str], bool], NamedStep]
    fills_first: bool
    check_state: Callable[[str, object, Tensor], None] = check_fp32_state
    required: tuple[str, ...] = ("lr",)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    group_keys: GroupKeys = field(default_factory=dict)
    piece: Callable[[Tensor], Piece | None] | None = None
    must_be: Mapping[str, Any] = field(default_factory=dict)

    needs_number: ClassVar = False
    """Whether steps round state by their number."""

    def spec_for(self, settings: dict[str, Any], model: Tensor) -> FusedStepSpec:
        """How a model's parameter of a group with these settings is stepped; alike on all ranks."""
        return self

    def deciding(self, settings: dict[str, Any]) -> tuple[Any, ...]:
        """What of a group's settings decides which state a step needs: a plan holds while this stays equal."""
        return self.state_names(settings)

    def convert(self, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
        """Bring the state of a model's parameter to the format in which it is kept. No host sync."""

    def convert_all(self, pairs: Iterable[ParamPair], optimizer: Optimizer) -> None:
        """Bring all of an optimizer's state to it. No host sync."""
        for pair in pairs:
            if pair.master in optimizer.state:
                self.convert(optimizer.state[pair.master], optimizer.param_groups[pair.group], pair.model)

    def keys_used(self) -> list[str]:
        """The keys that :meth:`settings` reads from a group of a class that is not torch's own."""
        return [part for key in self.group_keys.values() for part in ((key,) if isinstance(key, str) else key)]

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group's settings under the names that the functor's own class has for them."""
        if not self.group_keys:
            return group
        given = {
            name: group[key] if isinstance(key, str) else tuple(group[part] for part in key)
            for name, key in self.group_keys.items()
        }
        return {**self.defaults, **given}

    def optimizer_obstacle(self, optimizer: Optimizer) -> str:
        """Why the kernel can't step an optimizer of the class with its present options, in words; "" where it can."""
        for name, wanted in self.must_be.items():
            if getattr(optimizer, name, wanted) != wanted:
                return f"{type(optimizer).__name__} has {name}={getattr(optimizer, name)!r}"
        return ""

    def group_obstacle(self, group: dict[str, Any]) -> str:
        """Why the kernel can't step a group with its present settings, in words; "" where it can. No sync."""
        if group.get("differentiable"):
            return "differentiable=True"
        if group.get("capturable") and not all(map(steps_on_device, {param.device for param in group["params"]})):
            return "capturable=True"  # for a graph, which torch operations here could not be part of
        for name, wanted in self.must_be.items():
            if group.get(name, wanted) != wanted:
                return f"{name}={group[name]!r}"
        missing = [key for key in self.keys_used() if key not in group]
        if missing:
            return f"no {missing[0]!r}"
        settings = self.settings(group)
        lr = settings["lr"]
        if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.requires_grad):
            return "an lr that is a tensor of several elements or requires grad"
        for name in ("lr", *self.numbers):
            value = settings[name]
            if not isinstance(value, (int, float)) and not (name == "lr" and isinstance(value, Tensor)):
                return f"a {name} of type {type(value).__name__}"
        betas = settings.get("betas", ())
        for beta in betas:
            if not isinstance(beta, (int, float)):
                return f"a betas of type {type(beta).__name__}"
            if not 0.0 <= beta < 1.0:
                return f"betas of {betas}"
        return ""


def steps_on_device(device: torch.device) -> bool:
    """Whether the kernels that step parameters on ``device`` read step counters and the flag to skip there. No sync.

    Example:
        >>> steps_on_device(torch.device("meta"))
        False
    """
    return backend(device) == "cuda"


# -- which class has which ---------------------------------------------------------------------------------------------


def new_counter(settings: dict[str, Any], model: Tensor) -> Tensor:
    """A parameter's step counter at 0: where torch keeps it, or where the kernel wants it. No sync."""
    beside = settings.get("fused") or settings.get("capturable") or steps_on_device(model.device)
    return torch.zeros((), dtype=torch.float32, device=model.device if beside else torch.device("cpu"))


def _make_state(formula: Formula, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
    """As torch's own classes make it; what the first step fills is left uninitialised."""
    new = torch.empty_like if formula.fills_first else torch.zeros_like
    for name in formula.state_of(settings):
        if name == "step":
            state[name] = new_counter(settings, model)
        else:
            state[name] = new(model, dtype=torch.float32, requires_grad=False)


def _spec_of(name: str, formula: Formula) -> FusedStepSpec:
    return FusedStepSpec(
        formula.numbers(),
        formula.options_of,
        formula.state_of,
        functools.partial(_make_state, formula),
        functools.partial(named_step, name, formula),
        formula.fills_first,
        required=formula.wanted,
        defaults=formula.neutral,
    )


FUNCTORS = {name: _spec_of(name, formula) for name, formula in FORMULAS.items()}
"""The compiled functors, by the names that :func:`register_fused_step` takes."""

_SPECS: dict[type[Optimizer], FusedStepSpec] = {
    cls: FUNCTORS[name] for name, formula in FORMULAS.items() for cls in formula.classes
}

_MUST_BE: dict[str, dict[str, Any]] = {"lion_pytorch.Lion": {"decoupled_wd": False, "cautious_factor": 1.0}}

_PACKAGED = {
    tuple(path.split(".")): replace(FUNCTORS[name], group_keys=keys, must_be=_MUST_BE.get(path, {}))
    for name, formula in FORMULAS.items()
    for path, keys in formula.packaged.items()
}


def fused_spec_for(cls: type) -> FusedStepSpec | None:
    """The spec of exactly this class: one of torch.optim, of a known package, or registered; None for any other.

    Imports nothing: an optimizer of a package exists only where that package was imported.

    Example:
        >>> fused_spec_for(torch.optim.SGD) is FUNCTORS["sgd"], fused_spec_for(torch.optim.Adagrad) is None
        (True, True)
    """
    if cls in _SPECS:
        return _SPECS[cls]
    for (package, name), spec in _PACKAGED.items():
        module = sys.modules.get(package)
        if module is not None and getattr(module, name, None) is cls:
            return spec
    return None


def no_fused_step(cls: type) -> str:
    """That a class has no fused step, in words."""
    return f"{cls.__name__} is not exactly SGD, Adam or AdamW of torch.optim, Lion, or a registered class"


def register_fused_step(cls: type[Optimizer], functor: str, hyperparameters: GroupKeys) -> None:
    """Have optimizers of exactly this class stepped in one pass, by a kernel that is compiled already.

    For classes that step as SGD, Adam, AdamW or Lion do and are none of torch's: a copy of one, a subclass that logs.
    It holds for optimizers that are wrapped from now on, in this process; a subclass of ``cls`` is another class. The
    registration is trusted: nothing is tried when an optimizer is wrapped. :func:`fp16opt.certify` steps small tensors
    both ways and says where they differ (its check ``fused_step``).

    Args:
        cls: An optimizer class. It keeps its state in tensors under torch's names: "momentum_buffer"; "step",
            "exp_avg", "exp_avg_sq" and, with amsgrad, "max_exp_avg_sq"; Lion's "exp_avg". Those are FP32 and of the
            parameter's shape, "step" a float32 tensor of one element.
        functor: "sgd", "adam", "adamw" or "lion".
        hyperparameters: From the functor's settings to the keys of the class's param groups; for "betas" one key for
            both or a tuple of two keys. Settings that are left out are switched off:

            - "sgd": lr; momentum, dampening, weight_decay, nesterov, maximize.
            - "adam", "adamw": lr, betas, eps; weight_decay, amsgrad, maximize.
            - "lion": lr, betas; weight_decay, maximize.

    Raises:
        TypeError: ``cls`` is no optimizer class, or ``hyperparameters`` no mapping to keys.
        ValueError: There is no such functor or setting, one is missing, or the class has another fused step already.

    Example:
        >>> import torch
        >>> from fp16opt import MixedPrecisionOptimizer
        >>> class Logged(torch.optim.AdamW):
        ...     pass
        >>> same = {name: name for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
        >>> register_fused_step(Logged, "adamw", same)
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> "step: fused" in repr(MixedPrecisionOptimizer(Logged([weight]), fused_step=True))
        True
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        shown = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        raise TypeError(f"cls: expected a subclass of torch.optim.Optimizer, got {shown}.")
    if functor not in FUNCTORS:
        raise ValueError(f"functor: expected one of {', '.join(map(repr, FUNCTORS))}, got {functor!r}.")
    _check_keys(FUNCTORS[functor], functor, hyperparameters)
    spec = replace(FUNCTORS[functor], group_keys=dict(hyperparameters))
    known = fused_spec_for(cls)
    if known is not None and known != spec:
        raise ValueError(f"cls: {cls.__name__} has a fused step already, with other settings. Leave the call out.")
    _SPECS[cls] = spec


def register_one_pass(cls: type[Optimizer], functor: str, hyperparameters: GroupKeys) -> None:
    """The name that :func:`register_fused_step` had before version 0.2. Gives a ``DeprecationWarning``."""
    warnings.warn(
        "fp16opt.register_one_pass is called fp16opt.register_fused_step now, with the same arguments.",
        DeprecationWarning,
        stacklevel=2,
    )
    register_fused_step(cls, functor, hyperparameters)


def _check_keys(spec: FusedStepSpec, functor: str, hyperparameters: object) -> None:
    if not isinstance(hyperparameters, Mapping):
        kind = type(hyperparameters).__name__
        raise TypeError(f"hyperparameters: expected a dict from settings to keys of param groups, got {kind}.")
    known = dict.fromkeys((*spec.required, *spec.defaults))
    for name, key in hyperparameters.items():
        if name not in known:
            has = ", ".join(known)
            raise ValueError(f"hyperparameters: functor {functor!r} has {has}, and no {name!r}. Leave it out.")
        pair = name == "betas" and isinstance(key, tuple) and len(key) == 2
        if not (isinstance(key, str) or (pair and all(isinstance(part, str) for part in key))):
            expected = "a key of the class's param groups" + (", or a tuple of two" if name == "betas" else "")
            raise TypeError(f"hyperparameters[{name!r}]: expected {expected}, got {key!r}.")
    missing = [name for name in spec.required if name not in hyperparameters]
    if missing:
        needed = ", ".join(missing)
        raise ValueError(f"hyperparameters: functor {functor!r} needs {needed} too. Say which keys they have.")


# -- step counters -----------------------------------------------------------------------------------------------------
#
# torch keeps the counters of groups that are neither ``fused`` nor ``capturable`` on the host. Kernels that can skip
# count beside the parameters. torch's own steps accept such counters, but wait for each; so they go back to the host
# before torch's own step runs, and in checkpoints.


def counter_to_device(state: dict[str, Any], device: torch.device) -> None:
    """Move a parameter's step counter to ``device`` where kernels want it there. No sync."""
    step = state.get("step")
    if isinstance(step, Tensor) and step.device != device and steps_on_device(device):
        state["step"] = operations.moved(step, device)


def _stays_on_device(group: dict[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def _is_off_host(state: dict[str, Any] | None) -> bool:
    step = None if state is None else state.get("step")
    return isinstance(step, Tensor) and step.device.type != "cpu" and step.numel() == 1


def counters_to_host(optimizer: Optimizer) -> None:
    """Put an optimizer's step counters where torch keeps them, before its own step. Syncs where one was elsewhere."""
    for group in optimizer.param_groups:
        for state in [] if _stays_on_device(group) else [optimizer.state.get(param) for param in group["params"]]:
            if state is not None and _is_off_host(state):
                state["step"] = state["step"].cpu()


def counters_saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state_dict()`` with the step counters on the host; the optimizer keeps its own.

    Syncs where one was elsewhere.
    """
    states = dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        for key in [] if _stays_on_device(group) else group["params"]:
            if _is_off_host(states.get(key)):
                states[key] = {**states[key], "step": states[key]["step"].cpu()}
    return {**state_dict, "state": states}
