"""GradScaler: torch.amp.GradScaler's interface on this library's kernels and loss scaler."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .. import kernels
from ..engine import errors
from ..engine.arguments import check_number
from ..engine.diagnostics import Overflow, SkipLog, describe
from ..engine.modes.closures import Evaluation
from ..engine.outcome import check_consecutive, counters, note, room_for, update_scale
from ..engine.ranks import Origin
from ..engine.wrapped_step import found_inf_given, supports_found_inf
from ..kernels import backends
from ..optimizer import MixedPrecisionOptimizer
from ..scaling import LARGEST_SCALE, SMALLEST_SCALE, DynamicLossScaler
from .closures import ScaledReevaluations, split_closure
from .gradients import Found, OptimizerGradients, overflows

_EXTRAS = "fp16opt"  # the key of state_dict that torch's loader does not look at
_EXTRA_SETTINGS = ("min_scale", "max_scale", "hysteresis", "max_consecutive_skips")
_HEADROOM = ("policy", "headroom")  # there where it is not the doubling rule
_HOW_SAVED = "Pass a GradScaler's state_dict()."
_LOSSES = 64  # how many of an iteration's losses are remembered, for the log line of a skip
_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class _Rule(DynamicLossScaler):
    """DynamicLossScaler with factors in float64, in which torch.amp multiplies: 1.1 is no float32.

    The product is rounded to float32 where it is written to the scale.
    """

    _wide_factors = True

    def set_factors(self, growth_factor: float, backoff_factor: float) -> None:
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self._set_constants()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(scale, finite steps in a row): not copies, but what :meth:`update` writes."""
        return self._scale, self.growth_tracker


class _Record:
    """What became of one optimizer's steps.

    Attributes:
        gradients: The optimizer's.
        skipped: Whether its last step was skipped: decided, or the device's flag (float32, 0-dim). None where there was
            nothing to step.
    """

    def __init__(self) -> None:
        self.gradients = OptimizerGradients()
        self.skipped: bool | Tensor | None = None
        self._blamed: list[Found] = []
        self._reported: list[Overflow] = []
        self._kept: list[Tensor] = []
        self._last: Tensor | None = None

    def close(self, skipped: bool | None, reported: list[Overflow]) -> None:
        """A step was decided on the host. No sync.

        Args:
            reported: What a ``MixedPrecisionOptimizer`` reports itself.
        """
        self.skipped, self._reported, self._blamed = skipped, reported, []
        for places, stats in self.gradients.checked if skipped else ():
            self._blamed.append((places, stats.nonfinite.clone()))

    def close_on_device(self, found_inf: Tensor, counted: Tensor) -> None:
        """A step was decided on the device: count it if it was skipped. No sync.

        What is noted stays in one place, so that a CUDA graph that is replayed goes on writing there.
        """
        checked = self.gradients.checked
        flags = [stats.nonfinite for _, stats in checked]
        self._kept = room_for(flags, self._kept)
        if self._last is None or self._last.device != found_inf.device:
            self._last = torch.zeros((), dtype=torch.float32, device=found_inf.device)
        note(found_inf, flags, self._kept, self._last, counted)
        self.skipped, self._reported = self._last, []
        self._blamed = [(places, kept) for (places, _), kept in zip(checked, self._kept, strict=True)]

    def release(self) -> None:
        """Let go of the gradients."""
        # `checked` too: gradients that were cleared since they were unscaled are in no row.
        if self.gradients.rows or self.gradients.subclassed or self.gradients.checked:
            self.gradients.release()

    def report(self) -> list[Overflow]:
        """Which parameters had non-finite gradients if the last step was skipped, in param_groups order. Syncs."""
        if not self.skipped:
            return []
        found = [*self._reported, *overflows(self._blamed)]
        return sorted(found, key=lambda overflow: (overflow.group, overflow.index))


def _check_scale(scale: object) -> None:
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise ValueError(f"state_dict: 'scale' must be one number, got a tensor {list(scale.shape)}. {_HOW_SAVED}")
    if not isinstance(scale, Real | Tensor):
        raise TypeError(f"state_dict: 'scale' must be a number, got {type(scale).__name__}. {_HOW_SAVED}")


class GradScaler(torch.amp.GradScaler):
    """A drop-in replacement for ``torch.amp.GradScaler``.

    It is called like torch's and raises torch's errors, for calls in the wrong order and for FP16 weights that are
    stepped without masters. Beyond torch's it takes complex gradients, closures, and iterations without gradients; it
    has a floor under the scale; it says which parameters overflowed; and :meth:`unscale_` measures the norm that
    :meth:`clip_grad_norm_` needs. Gradients pass through the same kernels as those of
    :class:`fp16opt.MixedPrecisionOptimizer`, which a GradScaler can drive too.

    Args:
        device: Device type of the parameters, "cuda" or "cpu". As in torch, "cuda" where there is no GPU warns and
            disables the scaler.
        init_scale: The first scale, in [min_scale, max_scale].
        growth_factor: Over 1; multiplies the scale after ``growth_interval`` finite steps in a row.
        backoff_factor: Between 0 and 1; multiplies the scale in :meth:`update` after a non-finite gradient.
        growth_interval: Finite steps in a row before the scale grows.
        enabled: False: ``step`` is the optimizer's own, and all else does nothing.
        policy: "doubling", or "headroom": see :class:`fp16opt.DynamicLossScaler`.
        min_scale: The floor. The default is the lowest at which 1/scale is finite; torch goes on to 0. 2**-14 gets
            a run that met a streak of bad batches back much sooner.
        max_scale: The ceiling. The default is the highest power of two.
        hysteresis: The scale backs off at this many non-finite steps in a row and at each one after.
        max_consecutive_skips: :meth:`update` raises ``fp16opt.LossScaleError`` at this many in a row; None: never.
        allow_16bit_weights: True: FP16 parameters are stepped as they are, with a warning, and lose small updates.
            False refuses them where torch does: in :meth:`unscale_`, and in :meth:`step` but for torch's fused
            optimizers. BF16 parameters are warned of in either case.

    Raises:
        AssertionError: A factor is on the wrong side of 1 (torch's check).
        TypeError, ValueError: An argument is no number, out of range, not finite, or a bool.

    The scale follows torch's rule bit for bit inside the bounds (see ``DynamicLossScaler``). Unscaling multiplies
    by 1/scale, rounded to float32, once per element; with power-of-two scales it is exact.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        >>> scaler.unscale_(optimizer)
        >>> float(scaler.clip_grad_norm_(optimizer, max_norm=10.0))
        5.0
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.tolist(), scaler.step_was_skipped(optimizer)
        ([-0.5, -1.0], False)
    """

    _scalings: int = 0  # how often something was scaled
    _allow_16bit_weights: bool = False
    _steps_itself: bool = False  # unscaling for an optimizer of which torch does not ask the dtype
    _skips: int = 0
    _skips_counted: Tensor | None = None  # written in place, also by CUDA graphs that are replayed

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = SMALLEST_SCALE,
        max_scale: float = LARGEST_SCALE,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        policy: str = "doubling",
        allow_16bit_weights: bool = False,
    ) -> None:
        if not isinstance(allow_16bit_weights, bool):
            raise TypeError(f"allow_16bit_weights: expected True or False, got {type(allow_16bit_weights).__name__}.")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._allow_16bit_weights = allow_16bit_weights
        if self._enabled:
            self._rule = _Rule(
                *(init_scale, growth_factor, backoff_factor, growth_interval),
                *(hysteresis, min_scale, max_scale, max_consecutive_skips),
                policy=policy,
            )
            self._rule.set_factors(growth_factor, backoff_factor)
        self._forget()

    def _forget(self) -> None:
        """Start without what is tied to living optimizers and losses: at construction, and in a copy."""
        self._losses: deque[Tensor] = deque(maxlen=_LOSSES)
        self._records: WeakKeyDictionary[Any, _Record] = WeakKeyDictionary()
        self._warned: set[str] = set()
        self._log = SkipLog()

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self._rule!r})" if self._enabled else f"{name}(enabled=False)"

    # -- the scale, which torch's own methods read under torch's names -------------------------------------------------

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._rule.to(dev)
        self._show()
        self._scale = self._rule.scale  # for scale(), which asked

    def _show(self) -> None:
        """Let torch's methods see the scaler's own tensors: a CUDA graph reads and writes the present ones. No sync."""
        self._scale, self._growth_tracker = self._rule.tensors()

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale: a tensor, or an iterable of tensors and iterables.

        The product keeps the scale of now: a graph that is retained past :meth:`update` runs backward with it.

        Args:
            outputs: On any devices.

        Returns:
            As ``outputs``; the same object where the scaler is disabled. Does not sync.
        """
        if not self._enabled:
            return outputs
        self._scalings += 1
        if isinstance(outputs, Tensor) and outputs.numel() == 1:
            self._losses.append(outputs.detach())
        live = self._scale
        if live is not None:
            self._scale = live.clone()  # which the graph keeps
        try:
            return super().scale(outputs)
        finally:
            if live is not None:
                self._scale = live
            elif self._scale is not None:
                self._show()

    def _set(self, **settings: Any) -> None:
        """Change settings or trackers, through the loss scaler's own checks. Syncs."""
        state = {**self._rule.state_dict(), **settings}
        clean, interval = state["growth_tracker"], state["growth_interval"]
        if isinstance(interval, int) and interval > 0 and isinstance(clean, int | Tensor):
            # torch never grows again where the interval is set below the steps counted already; here the next one does.
            state["growth_tracker"] = min(int(clean), interval - 1)
        self._rule.load_state_dict(state)
        self._rule.set_factors(state["growth_factor"], state["backoff_factor"])
        if self._scale is None:
            self._init_growth_tracker = int(self._rule.growth_tracker)
        else:
            self._show()

    def _change(self, **settings: Any) -> None:
        """:meth:`_set` for a call, not for a dict: the error names the setting alone. Syncs."""
        try:
            self._set(**settings)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).removeprefix("scaler state: ")) from None

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, over 1. Syncs.

        Raises:
            TypeError, ValueError: It is no number, or not over 1.
        """
        self._change(growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, between 0 and 1. Syncs.

        Raises:
            TypeError, ValueError: It is no number, or out of range.
        """
        self._change(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many finite steps in a row make the scale grow, at least 1. Syncs.

        Where as many were counted already the next finite step makes it grow (under torch it would never grow again).

        Raises:
            TypeError, ValueError: It is no integer, or out of range.
        """
        self._change(growth_interval=new_interval)
        super().set_growth_interval(new_interval)

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.device.type != self._device:
                raise AssertionError(
                    f"new_scale: expected a number, or a tensor with one element on a {self._device} device that does "
                    f"not require grad, got shape {tuple(new_scale.shape)} on {new_scale.device}, requires_grad="
                    f"{new_scale.requires_grad}."
                )
            new_scale = float(new_scale)
        clean = self._rule.growth_tracker.clone()
        self._rule.set_scale(new_scale)
        self._rule.growth_tracker.copy_(clean)
        self._show()

    # -- unscaling and clipping ------------------------------------------------------------------------------------

    def _record_of(self, optimizer: Optimizer) -> _Record:
        if getattr(optimizer, "gradient_release", False):
            raise ValueError(
                "a GradScaler can't drive a MixedPrecisionOptimizer with gradient_release: its gradients are used "
                "before they could be unscaled. Use loss_scale=... of the wrapper and opt.backward(loss), or "
                "gradient_release=False."
            )
        found = self._records.get(optimizer)
        if found is None:
            found = self._records[optimizer] = _Record()
        return found

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, in place; check and measure them.

        One pass does all three. Call it once per optimizer and iteration, after all its backwards; :meth:`step` calls
        it if you don't. 16-bit sparse gradients are coalesced (in FP32), which replaces ``.grad``.

        Args:
            optimizer: Gradients may be float16 to float64 or complex, dense or sparse COO, on any devices.

        Raises:
            AssertionError: Nothing was scaled yet.
            RuntimeError: It was called for this optimizer before in this iteration, or after its ``step``.
            TypeError: A gradient has a dtype or layout that can't be served. No gradient was touched.
            ValueError: A gradient is FP16, which ``allow_16bit_weights`` would permit. As above.

        Syncs: never.
        """
        super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's hook, from which ``unscale_`` and torch's other methods get their flags."""
        self._record_of(optimizer)
        if isinstance(optimizer, MixedPrecisionOptimizer):
            found_by_it = optimizer.check_external(inv_scale)
            if found_by_it is None:
                return {}
            if self._rule.follows_norms:
                self._rule.see(optimizer.gradients.largest_norm(self._rule.growth_tracker.device))
            return {found_by_it.device: found_by_it}
        return self._unscale_in_place(optimizer, inv_scale, allow_fp16)

    def _unscale_in_place(
        self, optimizer: Optimizer, inv_scale: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = self._record_of(optimizer).gradients
        gradients.collect(optimizer, allow_fp16 or self._steps_itself or self._allow_16bit_weights)
        halves = gradients.halves()
        if halves:
            self._warn_once("no masters", errors.HALVES_UNDER_A_GRAD_SCALER.filled(names=describe(halves)))
        found = gradients.unscale(inv_scale)
        if self._rule.follows_norms:
            self._rule.see(gradients.largest_norm(self._rule.growth_tracker.device))
        return found

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, UserWarning, stacklevel=5)

    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the optimizer's gradients so that their total norm is at most ``max_norm``.

        They are unscaled first where :meth:`unscale_` was not called. The factor is that of
        ``torch.nn.utils.clip_grad_norm_``, max_norm / (norm + 1e-6), at most 1; at 1 no gradient memory is touched. The
        2-norm comes from the pass that unscaled, as exact as :func:`fp16opt.kernels.multi_tensor_l2norm` says. FP32
        gradients on the CPU that were not unscaled yet are unscaled and clipped in one write. Where an element is not
        finite gradients are not clipped: ``step`` skips.

        Args:
            optimizer: Its parameters' gradients are clipped together. Sparse ones are coalesced.
            max_norm: Not negative.
            norm_type: p of the norm, positive; ``math.inf`` for the largest magnitude.
            error_if_nonfinite: Raise instead of leaving a non-finite norm to ``step``. Syncs.

        Returns:
            The norm before clipping: float32, 0-dim; 0 where there are no gradients. No sync.

        Raises:
            TypeError, ValueError: ``max_norm`` or ``norm_type`` is no number, negative or nan.
            AssertionError: Nothing was scaled yet.
            RuntimeError: ``step`` was called for this optimizer before in this iteration; or the norm is not finite and
                ``error_if_nonfinite``.
        """
        max_norm = check_number("max_norm", max_norm)
        norm_type = check_number("norm_type", norm_type, above_zero=True)
        at_once = None
        if norm_type == 2.0 and not error_if_nonfinite:
            at_once = self._unscale_and_clip(optimizer, max_norm)
        if at_once is not None:
            return at_once
        try:
            return self._clip(optimizer, max_norm, norm_type, error_if_nonfinite)
        finally:
            if not self._enabled:  # no step and no update of this scaler will let go of them
                self._record_of(optimizer).release()

    def _clip(self, optimizer: Optimizer, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        found = self._found_for_clipping(optimizer)
        if isinstance(optimizer, MixedPrecisionOptimizer):
            return optimizer.clip_master_grads(max_norm, norm_type, error_if_nonfinite)
        gradients = self._record_of(optimizer).gradients
        gradients.collect(optimizer)
        if gradients.subclassed:
            params = list(gradients.params())
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        gradients.coalesce()
        device = gradients.device()
        wide = gradients.norm(norm_type, device)
        if error_if_nonfinite and not bool(wide.isfinite()):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {wide.item()}, so it can't be clipped. Leave "
                "error_if_nonfinite=False to have step() skip, or see overflow_report(optimizer) after it."
            )
        found = None if found is None else found.to(device)
        norm, factor = backends.decide_clip(wide, found, max_norm, only_finite=True)
        gradients.scale(factor)
        return norm

    def _unscale_and_clip(self, optimizer: Optimizer, max_norm: float) -> Tensor | None:
        """What :meth:`unscale_` and a clip do, in one write; the norm, or None where it must be done one by one."""
        if not self._enabled or self._scale is None or self._per_optimizer_states.get(id(optimizer), {}):
            return None  # unscaled or stepped already
        if isinstance(optimizer, MixedPrecisionOptimizer):
            return None  # its masters' gradients are made by one pass, and clipped by another
        gradients = self._record_of(optimizer).gradients
        gradients.collect(optimizer)
        clipped = gradients.unscale_and_clip(self._scale.double().reciprocal().float(), max_norm)
        if clipped is None:
            return None
        norm, found = clipped
        if self._rule.follows_norms:
            self._rule.see(gradients.largest_norm(self._rule.growth_tracker.device))
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.UNSCALED
        state["found_inf_per_device"] = {norm.device: found}
        return norm

    def _found_for_clipping(self, optimizer: Optimizer) -> Tensor | None:
        """The optimizer's flag, with its gradients unscaled; None where there is none."""
        if not self._enabled:
            return None
        self._check_scale_growth_tracker("clip_grad_norm_")
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        if stage is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step(). Call it before.")
        if stage is OptState.READY:
            self.unscale_(optimizer)
        return self._found(self._per_optimizer_states[id(optimizer)])

    def _found(self, *states: dict[str, Any]) -> Tensor | None:
        """float32, 0-dim, on the scale's device: 1.0 where one of the gradients is not finite; None: there are none.

        No sync.
        """
        device = self._check_scale_growth_tracker("step")[0].device
        flags: list[Tensor] = []
        for state in states:
            flags += state["found_inf_per_device"].values()
        if len(flags) > 1:
            return torch.stack([kernels.moved(flag, device) for flag in flags]).amax()
        return kernels.moved(flags[0], device) if flags else None

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, if :meth:`unscale_` did not, and step the optimizer unless one was not finite.

        Without any gradient it does nothing, and warns once.

        Args:
            optimizer: A torch optimizer, or one with ``param_groups`` and ``step``. Wrap the optimizer of a 16-bit
                model in ``fp16opt.MixedPrecisionOptimizer``.
            args, kwargs: Handed to ``optimizer.step``. A ``closure`` clears the gradients, computes the loss, calls
                ``scaler.scale(loss).backward()`` (and :meth:`unscale_` and :meth:`clip_grad_norm_` if you like), and
                returns the loss. Where an evaluation overflows, the scale backs off and it is evaluated again. At the
                floor parameters and state are put back, and the step counts as skipped. Costs a copy of both.

        Returns:
            What ``optimizer.step`` returned; None where it was skipped.

        Raises:
            AssertionError: Nothing was scaled yet.
            RuntimeError: It was called for this optimizer before, since the last :meth:`update`.
            TypeError, ValueError: As :meth:`unscale_`.

        Syncs: once where the decision is taken; not where torch's fused steps skip on the device.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = None
        if args or kwargs:
            closure, args, kwargs = split_closure(args, kwargs)
        if closure is None:
            self._check_scale_growth_tracker("step")
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if closure is not None:
            result, skipped = self._step_with(closure, optimizer, args, kwargs)
        elif _takes_the_scaler(optimizer):
            return super().step(optimizer, *args, **kwargs)
        else:
            result, skipped = self._step_once(optimizer, args, kwargs)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        self._record(optimizer, skipped)
        return result

    def _step_once(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, bool | Tensor | None]:
        """(what the optimizer returned, whether it was skipped: None where there was nothing to step)."""
        self._unscale_if_ready(optimizer)
        found = self._found(self._per_optimizer_states[id(optimizer)])
        if found is None:
            self._warn_no_gradients(optimizer)
            return None, None
        if isinstance(optimizer, MixedPrecisionOptimizer):
            return self._step_wrapper(optimizer, found, args, kwargs)
        if not kernels.is_host(found.device) and self._skips_on_device(optimizer):
            with found_inf_given(optimizer, found):
                return optimizer.step(*args, **kwargs), found
        if bool(found):
            return None, True
        return optimizer.step(*args, **kwargs), False

    def _unscale_if_ready(self, optimizer: Optimizer) -> None:
        """:meth:`unscale_` for a step; FP16 gradients are fine where torch's protocol leaves them to the optimizer."""
        if self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY:
            return
        self._steps_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        try:
            self.unscale_(optimizer)
        finally:
            self._steps_itself = False

    def _step_wrapper(
        self, optimizer: MixedPrecisionOptimizer, found: Tensor, args: Any, kwargs: Any
    ) -> tuple[Any, bool | Tensor | None]:
        """torch's protocol: the wrapper decides and counts, also a skip, of which :meth:`update` logs."""
        optimizer.outcome.log.grad_scaler_logs = True
        with found_inf_given(optimizer, found):
            result = optimizer.step(*args, **kwargs)
        return result, optimizer.outcome.last

    def _skips_on_device(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer can skip without a look at the flag, which would wait for a device."""
        devices = list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"])
        return self._rule.max_consecutive_skips is None and supports_found_inf(optimizer, devices)

    def _step_with(
        self, closure: Callable[[], Any], optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, bool | Tensor | None]:
        evaluations = ScaledReevaluations(lambda: self._evaluate(closure, optimizer), self._rule.back_off)
        try:
            if isinstance(optimizer, MixedPrecisionOptimizer):
                nothing = torch.zeros((), dtype=torch.float32, device=optimizer.device)
                return self._step_wrapper(optimizer, nothing, (evaluations.until_finite, *args), kwargs)
            stepped = evaluations.step(optimizer, lambda finite: optimizer.step(finite, *args, **kwargs))
        except BaseException:
            self._per_optimizer_states.pop(id(optimizer), None)
            raise
        return evaluations.returned if stepped else evaluations.loss, not stepped

    def _evaluate(self, closure: Callable[[], Any], optimizer: Optimizer) -> Evaluation:
        """Call the closure, and unscale the gradients where it did not. Syncs."""
        state, before = self._per_optimizer_states.pop(id(optimizer), None), self._scalings
        with torch.enable_grad():
            loss = closure()
        scaled = self._scalings != before
        if state is not None and not scaled:
            self._per_optimizer_states[id(optimizer)] = state  # of the gradients that were there before, and still are
        self._check_scale_growth_tracker("step")
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        found = self._found(self._per_optimizer_states[id(optimizer)])
        return Evaluation(loss, found is not None and bool(found), scaled)

    def _record(self, optimizer: Optimizer, skipped: bool | Tensor | None) -> None:
        record = self._records[optimizer]
        if isinstance(skipped, Tensor):
            if self._skips_counted is None:
                self._skips_counted = counters(skipped.device)[1]
            record.close_on_device(skipped, self._skips_counted)
        else:
            blamed: list[Overflow] = []
            if skipped and isinstance(optimizer, MixedPrecisionOptimizer):
                blamed = optimizer.overflow_report()
            record.close(skipped, blamed)
            self._skips += skipped is True
        record.release()
        if skipped is not False:
            # The scheduler of an optimizer that was not called would warn of a wrong order.
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def _warn_no_gradients(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        self._warn_once("no gradients", errors.NO_GRADIENTS_UNDER_A_GRAD_SCALER.filled(optimizer=name))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale, once per iteration, after all steps. Any overflow of any optimizer counts as one.

        Args:
            new_scale: Set the scale to this instead: a number, or a one-element tensor on the scaler's device type. The
                finite steps counted so far stay. Syncs where it is a tensor.

        Raises:
            AssertionError: Nothing was scaled, or no gradients were checked, since the last call; a tensor of the wrong
                kind.
            ValueError: ``new_scale`` is outside [min_scale, max_scale].
            fp16opt.LossScaleError: ``max_consecutive_skips`` iterations in a row were not finite. Names the parameters.

        Syncs: no, other than with ``max_consecutive_skips`` or where a step was skipped by decision of the host.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._set_scale(new_scale)
            self._next_iteration()
            return
        states = self._per_optimizer_states
        if not states:
            raise AssertionError(
                "No inf checks were recorded prior to update. Call step() for each optimizer before update()."
            )
        found = self._found(*states.values())
        skipped, stepped = [], False
        for optimizer, record in self._records.items():
            if id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.STEPPED:
                stepped |= record.skipped is False
                if record.skipped is True:
                    skipped.append(record)
        losses = list(self._losses)
        self._next_iteration()
        if found is None:
            return
        self._log.taken += stepped and not skipped
        is_told = bool(skipped) or (stepped and self._log.awaits_step)
        old = float(self._rule.scale) if is_told else 0.0
        update_scale(self._rule, found)
        report = [overflow for record in skipped for overflow in self._labelled(record)] if skipped else []
        origin = self._origin(skipped)
        if skipped:
            self._log.skipped(self._rule, old, report, losses, origin=origin)
        elif is_told:
            self._log.stepped(old)
        if self._rule.max_consecutive_skips is not None:
            check_consecutive([self._rule], report, origin)

    def _origin(self, skipped: list[_Record]) -> Origin | None:
        """Which ranks found something, where an optimizer's masters are spread over several."""
        wrappers = [
            one for one, its in self._records.items() if its in skipped and isinstance(one, MixedPrecisionOptimizer)
        ]
        return next((one.outcome.origin for one in wrappers if one.outcome.origin is not None), None)

    def _labelled(self, record: _Record) -> list[Overflow]:
        """What overflowed in one optimizer; where there are several, with its number among them and its class."""
        if len(self._records) < 2:
            return record.report()
        numbered = enumerate(self._records.items(), 1)
        whose = next(f"optimizer {n} ({type(one).__name__})" for n, (one, its) in numbered if its is record)
        return [overflow._replace(name=f"{whose}: {overflow.name}") for overflow in record.report()]

    def _next_iteration(self) -> None:
        self._losses.clear()
        for optimizer, record in self._records.items():
            if self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.STEPPED:  # else it has let go
                record.release()
        self._per_optimizer_states.clear()

    # -- state to read ---------------------------------------------------------------------------------------------

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last ``step`` of ``optimizer`` was skipped for non-finite gradients. May sync.

        False where it had nothing to step, or was never stepped by this scaler.
        """
        found = self._records.get(optimizer)
        return found is not None and bool(found.skipped)

    @property
    def skipped_steps(self) -> int:
        """Steps of any optimizer skipped since construction. May sync."""
        return self._skips + (0 if self._skips_counted is None else int(self._skips_counted))

    def overflow_report(self, optimizer: Optimizer) -> list[Overflow]:
        """Which of the optimizer's parameters had non-finite gradients when its last step was skipped. Syncs.

        Returns:
            In the order of its param_groups, named where the groups have names (torch's ``param_names``), else as
            'group 0, param 3'; empty where the step was not skipped.
        """
        found = self._records.get(optimizer)
        return [] if found is None else found.report()

    def step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """``scheduler.step(...)``, if the last step of its optimizer was taken: schedules count updates.

        torch's "lr_scheduler.step() before optimizer.step()" is not warned of, with this or without it.

        Args:
            scheduler: A ``torch.optim.lr_scheduler``; this scaler stepped its optimizer, or the wrapper of it.
            args, kwargs: Handed on (the metric of ``ReduceLROnPlateau``).

        Returns:
            Whether the scheduler moved.

        Raises:
            RuntimeError: This scaler has not stepped the scheduler's optimizer.

        Syncs: where the decision was taken on the device.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = torch.optim.SGD([weight], lr=1.0)
            >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
            >>> scaler = GradScaler("cpu")
            >>> scaler.scale(weight.sum() * float("inf")).backward()
            >>> scaler.step(optimizer); scaler.update()
            >>> scaler.step_scheduler(scheduler), optimizer.param_groups[0]["lr"]
            (False, 1.0)
        """
        if self._enabled:
            mine = scheduler.optimizer
            found = [one for o, one in self._records.items() if o is mine or getattr(o, "optimizer", None) is mine]
            if not found:
                raise RuntimeError(
                    f"step_scheduler: the optimizer of this {type(scheduler).__name__} has not been stepped by this "
                    "scaler. Call scaler.step(optimizer) and scaler.update() first."
                )
            if found[0].skipped is None or bool(found[0].skipped):
                return False
        scheduler.step(*args, **kwargs)
        return True

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and under "fp16opt", which torch's loader ignores, the settings that torch has not.

        Numbers and None only. Empty where the scaler is disabled. Call it after :meth:`update`. Syncs.
        """
        state = super().state_dict()
        if self._enabled:
            extras: dict[str, Any] = {name: getattr(self._rule, name) for name in _EXTRA_SETTINGS}
            state[_EXTRAS] = {**extras, "consecutive_skips": int(self._rule.consecutive_skips)}
            if self._rule.follows_norms:
                lately = self._rule.state_dict()["headroom"].tolist()
                state[_EXTRAS].update(policy=self._rule.policy, headroom=lately)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, here or in torch. Validated first. Does nothing where disabled.

        torch's own leaves the settings that torch has not as they are; a scale outside their bounds is moved to the
        nearer one, with a warning.

        Raises:
            RuntimeError: It is empty (saved by a disabled scaler).
            KeyError: One of torch's entries is missing.
            TypeError, ValueError: An entry is of the wrong type or out of range.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a dict, got {type(state_dict).__name__}.")
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        missing = [key for key in _TORCH_KEYS if key not in state_dict]
        if missing:
            raise KeyError(f"state_dict lacks {', '.join(map(repr, missing))}. {_HOW_SAVED}")
        extras = state_dict.get(_EXTRAS, {"consecutive_skips": 0})
        if not isinstance(extras, Mapping):
            raise TypeError(f"state_dict: {_EXTRAS!r} must be a dict, got {type(extras).__name__}. {_HOW_SAVED}")
        extras = {name: extras[name] for name in (*_EXTRA_SETTINGS, "consecutive_skips", *_HEADROOM) if name in extras}
        low, high = (extras.get(name, getattr(self._rule, name)) for name in ("min_scale", "max_scale"))
        scale = state_dict["scale"]
        _check_scale(scale)
        if _EXTRAS not in state_dict and scale > 0.0 and not low <= scale <= high:
            warnings.warn(
                f"the loaded scale {scale:g} is outside [min_scale, max_scale] = [{low:g}, {high:g}]; the nearer of "
                "them is taken.",
                stacklevel=2,
            )
            scale = min(max(scale, low), high)
        shared = {name: state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
        clean = state_dict["_growth_tracker"]
        self._set(**extras, **shared, init_scale=scale, scale=scale, growth_tracker=clean)
        self._init_scale = scale
        self._growth_factor, self._backoff_factor, self._growth_interval = shared.values()

    def __getstate__(self) -> dict[str, Any]:
        """As torch's: refuses in the middle of an iteration. What belongs to living optimizers stays behind."""
        state = super().__getstate__()
        for name in ("_records", "_warned", "_log", "_skips_counted", "_losses"):
            state.pop(name, None)
        if self._enabled:
            state["_rule"] = copy.deepcopy(self._rule).to("cpu")
        return {**state, "_skips": self.skipped_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


def _takes_the_scaler(optimizer: Optimizer) -> bool:
    """Whether it is a custom optimizer of torch's older protocol, whose step takes the scaler and calls it."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return "grad_scaler" in inspect.signature(optimizer.step).parameters
