"""Optimizers in place: with master weights the user's object becomes the engine's wrapper of one with its content."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.arguments import check_loss
from ..engine.missing_scale import WayToScale
from ..engine.stage import Check
from ..engine.wrapped_step import HOOKS
from ..optimizer import MixedPrecisionOptimizer
from .initialised import AmpLog, Initialised, Setup, is_initialised
from .plain import PlainOptimizer
from .policy import AmpError
from .scaler import LossScaler
from .subclassing import combined, parts_of

MASTERS = "fp16opt_masters"  # the key of an optimizer's state_dict that torch's own loader does not look at


class AmpOptimizer(Initialised, MixedPrecisionOptimizer):
    """What ``amp.initialize`` makes of an optimizer with master weights: the engine's wrapper of the user's.

    ``isinstance`` with the user's class holds, and attributes of the user's own are found.
    """

    def adopt(self, inner: Optimizer, setup: Setup, names: Iterable[tuple[str, Tensor]]) -> None:
        """Become the wrapper of ``inner``."""
        MixedPrecisionOptimizer.__init__(
            self,
            inner,
            loss_scale=1.0 if setup.means_no_scale else None,  # the engine's own; amp's scalers come with the losses
            named_parameters=names,
            fused_step=False,  # the user's own optimizer steps, to the bit
        )
        self.amp = setup
        self._attach()

    def _way_to_scale(self) -> WayToScale:
        """As the wrapper's, in amp's words."""
        scaled = "`with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`"
        return WayToScale('amp.initialize(..., loss_scale="dynamic")', "loss_scale=1.0", scaled)

    def _attach(self) -> None:
        self._delayed: set[int] = set()  # ids of scalers whose last backward was left as it is
        self.outcome.log = AmpLog(self.amp, self.lines)
        self.register_step_pre_hook(_refuse_closure)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("optimizer")
        if inner is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        mine = self.__dict__
        if "amp" in mine and name not in mine and name not in _OWN and name in mine["optimizer"].__dict__:
            setattr(mine["optimizer"], name, value)  # a setting of the user's optimizer
        else:
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "amp" in self.__dict__:
            self._attach()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def enter(self, loss: Tensor, scaler: LossScaler) -> Tensor:
        """``loss`` scaled. A backward follows."""
        if self.step_state.has_new():
            self.update_master_grads()  # a plain backward has left them, at scale 1
        check_loss(loss)
        scaled = self._scaled(loss, scaler)
        self._delayed.add(id(scaler))
        return scaled

    def abandon(self) -> None:
        """The backward raised: gradients are incomplete until they are cleared."""
        self.step_state.interrupt()

    def settle_gradients(self, scaler: LossScaler) -> Tensor:
        """Write the master gradients of the last backward. Returns whether *its* overflowed: float32, 0-dim."""
        self._delayed.discard(id(scaler))
        self.take_by_hand(scaler)  # if gradients were cleared inside of scale_loss, what was known of the scale is gone
        self.update_master_grads()
        found: Tensor = self.gradients.found_inf(self.device)
        return found

    def take_by_hand(self, scaler: LossScaler) -> None:
        """Gradients that are there were made of a loss that the caller multiplied by the scale of ``scaler``."""
        if self.step_state.has_new():
            self.step_state.take_external(self.step_state.look(), scaler)

    def blame(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Skip the next step where ``found_inf`` (float32, 0-dim): another optimizer of this backward overflowed."""
        self.step_state.blame(scaler, found_inf)

    @property
    def has_masters(self) -> bool:
        """Whether any parameter has a master beside it."""
        return self.params.any_apart

    def zero_grad(self, set_to_none: bool = True, **kwargs: Any) -> None:
        """Clear the model's and the masters' gradients and forget what was found in them."""
        set_to_none = kwargs.pop("set_grads_to_None", set_to_none)
        super().zero_grad(set_to_none, **kwargs)
        self._delayed.clear()

    def _count_given_up(self) -> None:
        """No-op: the scale has moved at the end of ``scale_loss``, as apex's did."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at any time, as under apex: gradients that wait for a step are taken anew, with the group's."""
        known = self.step_state.reopen()
        try:
            super().add_param_group(param_group)
        finally:
            if known is not None:
                self.update_master_grads()
                for scaler, found in known.found:  # another optimizer's overflow among them
                    self.step_state.blame(scaler, found)

    # -- the step ----------------------------------------------------------------------------------------------------

    def _record(self, check: Check, skipped: bool | Tensor) -> None:
        for scaler, found in check.found:
            if id(scaler) in self._delayed and isinstance(scaler, LossScaler):
                scaler.settle(found)  # no scale_loss of this step came to it
        self._delayed.clear()
        if skipped is True and isinstance(self.outcome.log, AmpLog):
            self.outcome.log.blamed = [id(scaler) for scaler, found in check.found if bool(found)]
        super()._record(check, skipped)
        self.__dict__["_opt_called"] = True  # what LR schedulers look for

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """The wrapped optimizer's own, and the FP32 masters under a key that torch's loader ignores."""
        built = super().state_dict(compact=compact)
        state: dict[str, Any] = dict(built["optimizer"])
        if self.has_masters:
            state[MASTERS] = built["masters"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or a state_dict of the plain optimizer (apex saved those).

        Without masters in it they take the model's values as they are at the next step.

        Raises:
            TypeError, ValueError: Something does not fit; the optimizer is as it was.
        """
        if isinstance(state_dict, dict) and MASTERS in state_dict and "version" not in state_dict:
            inner = {key: value for key, value in state_dict.items() if key != MASTERS}
            if self.has_masters:
                whole = {"version": 1, "optimizer": inner, "masters": state_dict[MASTERS]}
                state_dict = {**whole, "scaler": self.scaler.state_dict()}
            else:
                state_dict = inner
        super().load_state_dict(state_dict)

    # -- what scripts of old reach for -------------------------------------------------------------------------------

    def pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Per group, each (model parameter, master)."""
        pairs = zip(self.model_params(), self.master_params(), strict=True)
        return [list(itertools.islice(pairs, len(group["params"]))) for group in self.param_groups]

    def _master_params_to_model_params(self) -> None:
        """Write every master, rounded, into its model parameter."""
        self.write_masters()


_OWN = frozenset({*HOOKS, "param_groups", "state", "defaults", "step", "_opt_called"})


def _refuse_closure(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # torch puts the optimizer first
    if closure is not None and optimizer.has_masters:
        raise AmpError(
            "step(closure) does not go with master weights under amp. Call step() without a closure, or use "
            "fp16opt.MixedPrecisionOptimizer, whose step takes closures."
        )


def wrapped_in(optimizer: Any) -> Any:
    """The torch optimizer that is stepped by ``optimizer``: itself, or what a wrapper like LARC holds."""
    for _ in range(4):
        if isinstance(optimizer, Optimizer):
            return optimizer
        content = getattr(optimizer, "__dict__", {})
        inner = content.get("optim", content.get("optimizer"))
        if inner is None:
            return None
        optimizer = inner
    return None


def adopt(optimizer: Optimizer, setup: Setup, names: Iterable[tuple[str, Tensor]]) -> None:
    """Have amp train with ``optimizer``, which keeps its identity and its class's name.

    With master weights it becomes the engine's wrapper of an object that has its class and content. Without them it
    stays the optimizer of the model's own parameters, and its steps wait for what ``scale_loss`` finds. Where that is
    refused, everything is as it was.
    """
    cls = type(optimizer)
    content = dict(optimizer.__dict__)
    base: Any = cls
    try:
        if setup.master_weights:
            _wrap(optimizer, base, content, setup, names)
        else:
            optimizer.__class__ = combined(PlainOptimizer, base)
            optimizer.adopt(setup, names)  # type: ignore[attr-defined]
    except BaseException:
        optimizer.__dict__.clear()
        optimizer.__class__ = cls
        optimizer.__dict__.update(content)
        raise


def _wrap(
    optimizer: Optimizer, base: Any, content: dict[str, Any], setup: Setup, names: Iterable[tuple[str, Tensor]]
) -> None:
    inner = object.__new__(base)
    inner.__dict__.update(content)
    scheduled = inner.__dict__.pop("step", None)
    if scheduled is not None and not hasattr(scheduled, "_wrapped_by_lr_sched"):
        inner.__dict__["step"] = scheduled
        scheduled = None
    optimizer.__dict__.clear()
    optimizer.__class__ = combined(AmpOptimizer, base)
    optimizer.adopt(inner, setup, names)  # type: ignore[attr-defined]
    if scheduled is not None:
        _track_step(optimizer)


def _track_step(optimizer: Optimizer) -> None:
    """An LR scheduler that was made before looks for its mark on ``step`` and for ``_opt_called``."""
    reference = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        itself: Any = reference()
        itself._opt_called = True
        return type(itself).step(itself, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = step


def check_optimizer(optimizer: Any, number: int, known: set[int]) -> None:
    """Raise where ``optimizer`` can't be initialised. ``known``: ids of the models' parameters."""
    where = f"optimizers: optimizer {number} ({type(optimizer).__name__})"
    inner = wrapped_in(optimizer)
    if type(optimizer).__name__ == "FP16_Optimizer" or (
        isinstance(inner, MixedPrecisionOptimizer) and not isinstance(inner, AmpOptimizer)
    ):
        raise AmpError(
            f"{where} keeps masters of its own. Pass the torch optimizer inside it: amp makes the masters, or don't "
            "use amp with it."
        )
    if inner is None or not hasattr(optimizer, "param_groups"):  # LR schedulers hold an optimizer and are none
        raise TypeError(f"{where}: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if is_initialised(inner):
        raise AmpError(f"{where} was passed to amp.initialize before. Initialize it once.")
    params = [param for group in inner.param_groups for param in group["params"]]
    if known and not any(id(param) in known for param in params):
        raise AmpError(
            f"{where}: none of its {len(params)} parameters belongs to the models. Make the optimizer of the "
            "parameters of the models that you pass."
        )
    for place, param in enumerate(params):
        if param.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TypeError(
                f"{where}, param {place}: expected float16, bfloat16, float32 or float64, got "
                f"{str(param.dtype).removeprefix('torch.')}. Leave it out of the optimizer."
            )


__all__ = ["AmpOptimizer", "Setup", "adopt", "check_optimizer", "is_initialised", "parts_of", "wrapped_in"]
