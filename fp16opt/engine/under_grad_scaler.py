"""Under a GradScaler: gradients that came by a plain backward, which a GradScaler unscales where it finds them.

A GradScaler reads ``optimizer.param_groups``, unscales the ``.grad`` of what it finds there in place, and calls
``optimizer.step()`` unless one was not finite. When it reads the gradients of masters these are made, still scaled, and
the model's 16-bit parameters share them from then on, so that clipping ``model.parameters()`` and clipping the masters
are the same. That its step was never called shows when other gradients come, or when somebody asks.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels import counters
from ..scaling import LossScaler
from .accumulation import Accumulation, Pending, Stage, Verdict
from .dtensors import version
from .gradients import Gradients
from .pairs import HALF_DTYPES, Pairs
from .sights import GRAD, Sight, store, stored

CAN_SHARE = hasattr(Tensor, "grad_dtype")  # torch before 2.10 wants a parameter's gradient in the parameter's dtype


class UnderGradScaler:
    """Follows what a GradScaler does, where the wrapper's own scale is 1 and stays so.

    Attributes:
        seen: the gradients that a GradScaler was shown, which no step has used.
    """

    def __init__(self, pairs: Pairs, gradients: Gradients, accumulation: Accumulation) -> None:
        self.pairs = pairs
        self.gradients = gradients
        self.accumulation = accumulation
        self.seen: Sight | None = None
        self._shared: list[int] = []
        self._neutral: tuple[LossScaler | None, int, bool] = (None, 0, False)
        self._evaluates = False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within, a closure makes and clears gradients inside of a step: none of them was left out."""
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False

    def serves(self, scaler: LossScaler) -> bool:
        """Whether a GradScaler's scale can be the only one. Syncs once for each value of the scale."""
        if scaler.dynamic:
            return False
        known, generation, neutral = self._neutral
        if known is not scaler or generation != scaler.generation:
            neutral = float(scaler.scale) == 1.0
            self._neutral = (scaler, scaler.generation, neutral)
        return neutral

    def _is_underway(self) -> bool:
        pending = self.accumulation.pending
        return self.accumulation.stage is not Stage.READY and pending is not None and pending.foreign

    # -- what it finds -----------------------------------------------------------------------------------------------

    def see(self) -> None:
        """``param_groups`` are read: remember gradients that came without the engine."""
        at_rest = self.accumulation.stage is Stage.READY and not self.accumulation.interrupted
        strange = self.accumulation.strange() if at_rest else []
        if not strange:
            return
        grads = self.gradients.of_model()
        for position in strange if self.pairs.has_own else ():
            grad = grads[position]
            if grad is not None and grad.is_sparse and self._is_raw(position, grad):
                grads[position] = grad.coalesce()  # now: who reads param_groups may keep the values that he finds
                store(self.pairs.models[position], grads[position])
        self.seen = Sight(grads)

    def _is_raw(self, position: int, grad: Tensor) -> bool:
        """Whether a sparse gradient is not coalesced, and is one that a GradScaler is shown as it is."""
        return self.pairs.are_own[position] and grad.dtype not in HALF_DTYPES and not grad.is_coalesced()

    def make(self, scaler: LossScaler) -> None:
        """A master's gradient is read: give all masters FP32 copies, which the model's parameters share.

        Raises:
            RuntimeError: This torch is too old for that.
        """
        if self._take(scaler) is not None:
            self.accumulation.read()  # no verdict: a GradScaler is about to write them, and a reader sends no message
            self._share()

    def unscale(self, scaler: LossScaler, inv_scale: Tensor) -> Tensor | None:
        """What :meth:`make` does, with gradients that are unscaled by the same pass, for a GradScaler of ours.

        Args:
            scaler: The wrapper's own.
            inv_scale: float32, 0-dim: 1 / the scale of the GradScaler.

        Returns:
            float32, 0-dim: 1.0 where a gradient is not finite, else 0.0; None where there are none that came without
            the engine. No host sync.

        Raises:
            RuntimeError: as :meth:`make`.
        """
        accumulation = self.accumulation
        at_rest = accumulation.stage is Stage.READY and not accumulation.interrupted
        pending = self._take(scaler) if at_rest else None
        if pending is None:
            return None
        one, pending.inv_scale = pending.inv_scale, inv_scale.to(pending.inv_scale.device)
        accumulation.update()
        pending.inv_scale = one  # what is in the model and the masters now is true
        self._share()
        ((_, found),) = accumulation.scalers()
        return found.clone()

    def _take(self, scaler: LossScaler) -> Pending | None:
        """Gradients that came without the engine are the accumulation's now; None where there are none."""
        if self.seen is None and not self.accumulation.strange():
            return None
        if not CAN_SHARE:
            raise RuntimeError(
                "a GradScaler can drive MixedPrecisionOptimizer from torch 2.10 on. Construct it with dynamic=True, "
                "and call opt.backward(loss) and opt.step() without a GradScaler."
            )
        return self.accumulation.take_foreign(scaler)

    def _share(self) -> None:
        self._shared = []
        made = counters.gradients(self.pairs.masters)
        for position, (model, grad) in enumerate(zip(self.pairs.models, made, strict=True)):
            if model.grad is not None and grad is not None and self.pairs.masters[position] is not model:
                model.grad_dtype = None
                GRAD.__set__(model, grad)
                self._shared.append(position)
        self.gradients.see()
        self.seen = self.gradients.sight

    def shares(self) -> bool:
        """Whether the model's parameters hold their masters' gradients as their own."""
        return bool(self._shared)

    def assign(self, model: Tensor, grad: Tensor | None) -> None:
        """The gradient of a parameter's master was set: it is the model's too, as when a GradScaler was shown it."""
        if model.grad is grad:
            return
        position = self.pairs.places[id(model)]
        if position not in self._shared:
            self._shared.append(position)
        model.grad_dtype = None
        store(model, grad)
        self.gradients.see()
        self.seen = self.gradients.sight

    # -- what became of it -------------------------------------------------------------------------------------------

    def renewed(self, scaler: LossScaler) -> Verdict | None:
        """:meth:`left_out`, where gradients of the model were cleared or made anew since. Else they are forgotten."""
        if self.seen is None or all(map(operator.is_, self.seen.grads, self.gradients.of_model())):
            return None
        if self._are_edited(self.seen):
            self.seen = Sight(self.gradients.of_model())
            return None
        left_out = self.left_out(scaler)
        if left_out is None:
            self.seen = None
            if self._is_underway():
                self.accumulation.forget()
        return left_out

    def _are_edited(self, seen: Sight) -> bool:
        """Whether the gradients are still those of one iteration, some of which were dropped or replaced by the user.

        Some are left then, or others came in FP32 in place of shared ones. Where 16-bit ones came in their place,
        autograd made them, unless what is left was not added to. Where model and masters shared them they do again.
        """
        now = self.gradients.of_model()
        shared = [grad for grad in (now[position] for position in self._shared) if grad is not None]
        left = [
            (a, then) for a, b, then in zip(now, seen.grads, seen.versions, strict=False) if a is b and a is not None
        ]
        if any(grad.dtype in HALF_DTYPES for grad in shared):
            left = [(grad, then) for grad, then in left if version(grad) == then]
            shared = []
        if not (shared or left):
            return False
        if self._is_underway() and self.gradients.made:
            self.gradients.are_shared()
        return True

    def left_out(self, scaler: LossScaler) -> Verdict | None:
        """Whether a step was never called because gradients were not finite: the verdict on them. Syncs."""
        stage = self.accumulation.stage
        if self.seen is None or self._evaluates or self.accumulation.interrupted:
            return None
        if not (stage is Stage.READY or self._is_underway()):
            return None
        shown = self.seen.grads + [None] * (len(self.pairs) - len(self.seen.grads))  # parameters may have come since
        as_it_is = list(self.pairs.are_own)  # whether a GradScaler reads what the model holds
        for position in self._shared:
            grad = shown[position]
            as_it_is[position] = grad is not None and grad.dtype not in HALF_DTYPES
        if stage is Stage.READY and not all(mine or grad is None for mine, grad in zip(as_it_is, shown, strict=True)):
            return None  # it would have read these from their masters
        if stage in (Stage.LOOKED, Stage.TAKEN):
            ((_, found),) = self.accumulation.scalers()
        else:
            made = stored(self.pairs.masters) if stage is Stage.SCALED else [None] * len(self.pairs)
            mine = as_it_is if stage is Stage.READY else self.pairs.are_own
            values = [seen if is_mine else grad for is_mine, seen, grad in zip(mine, shown, made, strict=True)]
            found = self.gradients.judge_apart(values, self.accumulation.device)
        return Verdict(found, [(scaler, found)]) if bool(found) else None

    def used(self) -> Sight | None:
        """The gradients that a GradScaler was shown and no step has used, in the versions in which it left them."""
        return None if self.seen is None else Sight(self.seen.grads)

    def stepped(self) -> None:
        """The gradients that were seen are used."""
        self.seen = None

    def withdraw(self, set_to_none: bool) -> None:
        """Gradients were cleared. Those that stay, as zeros, get their parameter's dtype again."""
        if not set_to_none:
            for position in self._shared:
                model = self.pairs.models[position]
                if model.grad is not None and model.grad.dtype != model.dtype:
                    store(model, torch.zeros_like(model))
        self._shared = []
        self.stepped()
