"""MixedPrecisionOptimizer: the engine's front door and its state machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import (
    buckets,
    checkpoint,
    clipping,
    closing,
    closures,
    diagnostics,
    driven,
    late,
    parallel,
    saving,
    streaming,
    waiting,
    wrapped,
    writes,
)
from .accumulation import Accumulation, State
from .arguments import check_choice, check_loss, check_scaler, make_scaler, named, open_group
from .diagnostics import Overflow
from .fused import FusedStep, check_fused_step
from .masters import MasterParams
from .outcomes import Outcomes, check_consecutive, warn_no_gradients
from .scaling import LossScaler
from .split import SplitParams

_ACCUMULATION, _MASTER_WEIGHTS = ("model", "fp32"), ("full", "none", "split")


class MixedPrecisionOptimizer(parallel.AcrossRanks, Optimizer):
    """Any ``torch.optim.Optimizer``, stepping FP32 masters of a model with FP16 or BF16 weights.

    It keeps an FP32 master of every FP16 and BF16 parameter, owns the loss scale, and moves gradients up and weights
    down with fused kernels. FP32 and FP64 parameters are their own masters. ``param_groups``, ``state`` and
    ``defaults`` are the wrapped optimizer's own; groups hold what it steps.

    Args:
        optimizer: The optimizer to wrap; its param_groups then hold masters. Its state is kept, in FP32. Parameters may
            mix float16, bfloat16, float32 and float64 and lie on any device.
        dynamic: Use ``DynamicLossScaler()``.
        loss_scale: A static scale, 1.0 when nothing else is given. Powers of two unscale exactly.
        scaler: A ``LossScaler`` of your own; one may serve several optimizers. Give one of these three at most.
        named_parameters: ``model.named_parameters()``, for names in messages. torch's own named param groups serve too.
        grad_accumulation: "model": micro-batches add up in the model's 16-bit gradients. "fp32": every ``backward``
            folds its gradients into FP32 and frees the 16-bit ones (4 more bytes a parameter between backwards).
        on_model_write: What to do where something else wrote the model's weights, noticed in ``step``, ``state_dict``
            and ``fp32_state_dict``: "refresh" takes what differs into the masters and logs a warning, "error" raises,
            "ignore" does not look.
        master_weights: "full": FP32 masters. "split": the 16-bit weight and a 16-bit remainder, 4 bytes in place of 6.
            "none": the optimizer steps 16-bit parameters, and loses small updates.
        fused_step: True: one kernel steps SGD, Adam or AdamW in a single pass; "auto": where it can (see ``repr``).

    Raises:
        TypeError: ``optimizer`` is no torch Optimizer, or wrapped already.
        ValueError: Two of dynamic, loss_scale and scaler are given; a value or a parameter's dtype can't be served.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        >>> opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=2.0**-13), loss_scale=128.0)
        >>> opt.backward(weight.float().sum())
        >>> opt.step()
        >>> weight[0].item(), next(opt.master_params())[0].item()
        (1.0, 0.9998779296875)
    """

    # Set where a GradScaler drives it (driven.py). Else Lightning would refuse to clip, and Accelerate miss skips.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        dynamic: bool = False,
        loss_scale: float | None = None,
        scaler: LossScaler | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        grad_accumulation: str = "model",
        on_model_write: str = "refresh",
        fused_step: bool | str = False,
        master_weights: str = "full",
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        if isinstance(optimizer, MixedPrecisionOptimizer):
            raise TypeError("optimizer: expected an optimizer that is not wrapped yet, got a MixedPrecisionOptimizer.")
        check_choice("grad_accumulation", grad_accumulation, _ACCUMULATION)
        check_choice("on_model_write", on_model_write, writes.POLICIES)
        check_choice("master_weights", master_weights, _MASTER_WEIGHTS)
        check_fused_step(fused_step, optimizer, master_weights)
        self._streamed = streaming.choose(master_weights, on_model_write, optimizer)
        self.scaler = make_scaler(dynamic, loss_scale, scaler)
        self.optimizer = optimizer
        self.master_weights = master_weights
        self.grad_accumulation = grad_accumulation
        self.on_model_write = on_model_write
        self._names = {id(param): name for name, param in named(named_parameters)}
        makes_masters = master_weights != "none"
        params_class = MasterParams if self._streamed is None else SplitParams
        self._holder = parallel.holder_of(optimizer)
        self._params = params_class(self._holder.param_groups, self._names, self._carry_state, makes_masters)
        self._params.watches = on_model_write != "ignore"
        for i in self._params.own if makes_masters else ():
            self._carry_state(self._params.model[i], self._params.model[i])
        self._fused = FusedStep(fused_step, optimizer, self._params)
        self._fused.fallback = None if self._streamed is None else self._streamed.fall_back
        self._device = parallel.device_of(self)
        self._make_gradients()
        self.scaler.to(self._device)
        self._outcomes = Outcomes()
        self._warned: set[str] = set()
        wrapped.make_hook_tables(self)
        self._patch_step_function()

    def _make_gradients(self) -> None:
        self._grads = waiting.make_grads(self._params, self._fused, self._streamed)
        self._steps = Accumulation(self._grads, self._device, self.grad_accumulation == "fp32", parallel.ranks_of(self))
        self._offers = driven.Offers()
        self._late = late.Late()

    def _carry_state(self, param: Tensor, master: Tensor) -> None:
        checkpoint.carry_state(self._holder, param, master)
        wrapped.remake_first_state(self._holder, master)

    # -- what a torch optimizer shows --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's param_groups: masters where there are masters, model parameters elsewhere."""
        driven.offer(self)
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, keyed by master; FP32."""
        return self._holder.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self._holder.defaults

    def __repr__(self) -> str:
        inner = repr(self.optimizer).replace("\n", "\n  ")
        return (
            f"{type(self).__name__}(\n  optimizer: {inner}\n  scaler: {self.scaler!r}\n"
            f"  parameters: {self._params.summary()}\n  grad_accumulation: {self.grad_accumulation!r}, "
            f"on_model_write: {self.on_model_write!r}, master_weights: {self.master_weights!r}\n"
            f"  step: {self._fused.describe()}\n)"
        )

    def __getstate__(self) -> dict[str, Any]:
        """All but hooks, a scheduler's patch of ``step``, and gradients (torch copies parameters without theirs)."""
        left_out = (*wrapped.HOOKS, "step", "_grads", "_steps", "_offers", "_late", "_names")
        kept = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return {**kept, "_wrapped_extras": wrapped.extras(self.optimizer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        extras = state.pop("_wrapped_extras")
        self.__dict__.update(state)
        for name, value in extras.items():
            self.optimizer.__dict__.setdefault(name, value)
        self._names = {}
        self._params.record_versions()  # copies of tensors count their versions anew
        self._make_gradients()
        wrapped.make_hook_tables(self)
        self._patch_step_function()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, like ``torch.optim.Optimizer.add_param_group``; its 16-bit parameters get masters.

        Raises:
            TypeError: It is no dict, or its params are no tensors, or a set.
            ValueError: A parameter is here already, or has a dtype that can't be served. Nothing is changed then.
        """
        parallel.refuse_on_zero(self, "add_param_group", "Add groups to it before it is wrapped.")
        self._params.verify()
        group, params, names = open_group(param_group)
        number = len(self.optimizer.param_groups)
        self._params.check_new_group({**group, "params": params}, number, names)
        parallel.check_new(self, params)
        if self._streamed is not None:
            self._streamed.certified.check_settings(self.optimizer, {**self.defaults, **buckets.settings_of(group)})
        self.optimizer.add_param_group(group)
        self._params.append_group(self.optimizer.param_groups[-1], number, {**self._names, **names}, self._carry_state)
        self._grads.grow()
        parallel.regroup(self)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor, *, scaler: LossScaler | None = None) -> Tensor:
        """``loss.float()`` times the loss scale. Call ``.backward()`` on it yourself.

        Args:
            loss: Floating, any shape, any device.
            scaler: Scale with this one instead of the optimizer's own.

        Returns:
            float32, of the loss's shape and device. No host sync.

        Raises:
            TypeError: The loss is not a floating tensor.
        """
        check_loss(loss)
        check_scaler(scaler)
        pending = self._steps.enter(self.scaler if scaler is None else scaler)
        return loss.float() * pending.scale.to(loss.device)

    def backward(
        self,
        loss: Tensor,
        *,
        update_master_grads: bool = True,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        scaler: LossScaler | None = None,
    ) -> None:
        """Scale the loss, run autograd, and bring the gradients up to the masters.

        Args:
            loss: One floating element, any device. An FP16 loss limits the scale to 2**15: its own gradient, the scale,
                enters the FP16 graph. End the model with ``.float()`` to lift that.
            update_master_grads: Call :meth:`update_master_grads` at the end. Pass False on all but the last of several
                backwards to save passes.
            retain_graph, create_graph, inputs: As for ``torch.Tensor.backward``.
            scaler: Scale with this one instead. Each backward of such a step is folded into FP32 master gradients with
                its own scale, each scaler is updated by what its own backwards gave, and any overflow skips the step.

        Raises:
            TypeError, ValueError: The loss is not one floating element.
            RuntimeError: An earlier backward was interrupted and its gradients are incomplete.

        Syncs: never (parameters' gradients stay on their devices).
        """
        check_loss(loss, scalar=True)
        check_scaler(scaler)
        state, pending = self._steps.state, self._steps.pending
        scaled = self.scale_loss(loss, scaler=scaler)
        present = self._grads.has_any()
        try:
            torch.autograd.backward(scaled, None, retain_graph, create_graph, inputs=inputs)
        except BaseException:
            self._steps.abandon(state, pending, present)
            raise
        if not (self._grads.has_any() or self._params.has_pieces):  # FSDP2 may add up gradients of its own first
            warn_no_gradients(self._params.names, self._warned)
        if update_master_grads and not self._steps.waits():
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Make master gradients anew from the model's: times 1/scale, in FP32, checked and measured in one pass.

        Uses the scale of the backward that made them; called with no backward before it, the scaler's present scale.
        Called again on the same model gradients it gives the same bits, and undoes a clip; gradients of parameters
        that are their own masters, and folded ones, are unscaled once and stay as they are. No host sync.

        Raises:
            RuntimeError: A parameter's dtype, shape or device was changed; or a backward was interrupted.
        """
        self._steps.check_complete()
        self._follow_changes()
        if self._steps.state is not State.READY:
            self._steps.unscale()
        elif self._grads.has_unconsumed():
            driven.measure(self)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all master gradients so that their total norm is at most ``max_norm``.

        The factor is torch's, max_norm / (norm + 1e-6), at most 1; at 1 no gradient memory is touched. The 2-norm
        comes from the pass that unscaled. Where an element is not finite all gradients stay: ``step`` skips. After
        ``backward(loss, update_master_grads=False)`` gradients are unscaled and clipped in one write.

        Args:
            max_norm: Not negative.
            norm_type: p of the norm, positive; ``math.inf`` for the largest magnitude.
            error_if_nonfinite: Raise instead of leaving a non-finite norm to ``step``. Syncs with the device.

        Returns:
            The norm before clipping: float32, 0-dim, on the device; 0 where there are no gradients. No host sync.

        Raises:
            TypeError, ValueError: ``max_norm`` or ``norm_type`` is no number, negative or nan.
            RuntimeError: The norm is not finite and ``error_if_nonfinite``.
        """
        return clipping.clip(self, max_norm, norm_type, error_if_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the model's and the masters' gradients and forget what was found in them.

        Args:
            set_to_none: Set ``.grad`` to None. The engine keeps the masters' gradient memory for the next step.
        """
        driven.withdraw(self, set_to_none)
        self._grads.zero(set_to_none)
        self._steps.discard(zeroed=not set_to_none)

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer on the masters and copy them to the model, unless a gradient was not finite.

        A skipped step leaves parameters, optimizer state and step counts as they were. Then the loss scale is updated.
        Without a backward before it there is nothing to do.

        Args:
            closure: Clears gradients, computes the loss, calls ``backward`` on this optimizer and returns the loss. The
                model holds the masters' values before each evaluation. One that overflows lowers the scale and is
                evaluated again; where the scale can't go lower everything is restored and one skip is counted.

        Returns:
            What the wrapped optimizer's ``step`` returns (the closure's loss, or None).

        Raises:
            LossScaleError: ``max_consecutive_skips`` steps in a row were not finite.
            RuntimeError: Gradients came by a plain ``loss.backward()`` while the scale is not 1; the model was written
                and ``on_model_write="error"``; parameters changed dtype, shape or device.

        Syncs: not on the CPU or where the step skips on the device itself (torch's fused ones, and CUDA's
        ``fused_step``); once elsewhere, where the decision is taken.
        """
        if closure is not None:
            return closures.step(self, closure)
        if not self._take_gradients():
            self._outcomes.record(False, self._grads)
            return None
        found = self._steps.found_inf()
        on_device = self._skips_on_device()
        if not on_device and bool(found):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else its scheduler warns of a wrong order
            self._finish(skipped=True)
            return None
        writes.notice(self._params, self.on_model_write, passed_by=True, waits=late.is_host(self._device))
        loss = self._run_wrapped(found if on_device else None)
        self._finish(skipped=found if on_device else False)
        return loss

    def _take_gradients(self) -> bool:
        """Bring the master gradients up to date. False where no backward left anything to use."""
        self._steps.check_complete()
        if self._steps.state is State.READY:
            if not self._grads.has_unconsumed():
                return False
            driven.take(self)
        if self._steps.state is not State.UNSCALED:
            self.update_master_grads()
        waiting.look_again(self._grads, self._steps)
        return True

    def _run_wrapped(self, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and copy them down. If the step was done before something raised, finish it all the same."""
        if self._streamed is not None and not self._fused.serves():
            return self._streamed.step(self, closure)
        before = self._params.counted_versions(self.optimizer.param_groups)
        try:
            loss = wrapped.run_step(self.optimizer, found_inf, closure, waiting.fused_step(self, found_inf))
        except wrapped.StepFailed as failed:
            if closure is None and (
                failed.completed or self._params.counted_versions(self.optimizer.param_groups) != before
            ):
                self._copy_down()
                self._finish(skipped=False)
            raise failed.error from None
        self._copy_down()
        return loss

    def _copy_down(self) -> None:
        self._fused.copy_down()
        if not late.is_host(self._device):  # looking would wait for the device
            self._late.tell(self._warned)
            self._late.ask(self._params)
        elif flags := self._params.copy_down_flags():
            diagnostics.warn_cast(flags, self._warned)

    def _finish(self, skipped: bool | Tensor) -> None:
        """After the decision: count, update the scalers (last, so that gradients met the scale of their backward)."""
        self._offers.made = {}
        old = float(self.scaler.scale) if skipped is True else 0.0
        scalers = [scaler for scaler, _ in self._steps.verdicts.values()]
        skipped = closing.close(self, skipped)
        self._steps.finish()
        self._steps.replicas.after_step(skipped, self)
        if skipped is True:
            report = self.overflow_report()
            self._outcomes.log.skipped(self.scaler, old, report)
            check_consecutive(scalers, report)
        elif skipped is False:
            self._outcomes.log.stepped()

    # -- state to read -----------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The scaler's present scale. Reading syncs with the device. Set it between steps only."""
        return float(self.scaler.scale)

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._steps.state is not State.READY:
            raise RuntimeError(
                "loss_scale was set between backward and step: gradients made with the old scale would be unscaled "
                "wrongly. Set it after step() or zero_grad()."
            )
        self.scaler.set_scale(value)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` was skipped for non-finite gradients. Reading may sync with the device."""
        driven.settle(self)
        return self._outcomes.last_was_skipped

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since construction. Reading may sync with the device."""
        driven.settle(self)
        return self._outcomes.skipped_steps

    def overflow_report(self) -> list[Overflow]:
        """Which parameters had non-finite gradients when the last step was skipped; empty when it was not. Syncs."""
        driven.settle(self)
        return self._outcomes.report(self._grads)

    def master_params(self) -> Iterator[Tensor]:
        """What the wrapped optimizer steps, in param_groups order: FP32 masters, and parameters that are their own."""
        return self._params.shown()

    def model_params(self) -> Iterator[Tensor]:
        """The model's parameters, in param_groups order; pairs with :meth:`master_params`."""
        return iter(list(self._params.model))

    # -- checkpoints and the model's own weights ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers, strings, lists and dicts: ``torch.load(weights_only=True)`` reads them back.

        Keys: ``version``, ``optimizer`` (the wrapped optimizer's own), ``masters`` (FP32, in param_groups order, None
        where a parameter is its own master), ``scaler``. Tensors are references, as in torch.
        """
        parallel.refuse_plain_state(self, "state_dict")
        return saving.save(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the wrapped class's own state_dict (from FP32 training).

        Everything is validated first. Masters are written to the model too, so model and optimizer may be loaded in
        either order. Tensors are copied. Gradients that wait for a step are dropped from it.

        Raises:
            TypeError, ValueError: Something does not fit; the optimizer is as it was.
        """
        parallel.refuse_plain_state(self, "load_state_dict")
        saving.load(self, state_dict)

    def fp32_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """``model.state_dict()`` with FP32 masters in place of 16-bit parameters, under all their names.

        Buffers and parameters without a master are the model's own. Tensors are references to the live ones.

        Raises:
            TypeError: ``model`` is no Module.
            ValueError: None of its parameters is in this optimizer.
        """
        self._params.check_model(model)
        writes.notice(self._params, self.on_model_write)
        return self._params.fp32_state(model)

    def refresh_masters(self) -> None:
        """Masters take the model parameters' values, for code that wrote the model in place. No host sync."""
        self._follow_changes()
        self._params.verify()
        self._params.refresh()

    # -- the state machine -------------------------------------------------------------------------------------------

    def _follow_changes(self) -> None:
        """Notice parameters that were changed, unfrozen, or added through the wrapped optimizer itself."""
        if self._streamed is not None:
            self._streamed.certified.check(self.optimizer)
        if self._params.follow(self._holder.param_groups, self._names, self._carry_state):
            self._grads.grow()
            parallel.regroup(self)

    def _skips_on_device(self) -> bool:
        """Whether the decision can stay on the device: elsewhere than on the CPU a look at it would wait."""
        return (
            not late.is_host(self._device)
            and (self._fused.skips_on_device() or (not self._streamed and wrapped.supports_found_inf(self.optimizer)))
            and not self._steps.replicas.needs_decision
            and all(scaler.max_consecutive_skips is None for scaler, _ in self._steps.verdicts.values())
        )
