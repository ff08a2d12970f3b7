"""Under a GradScaler: gradients that came by a plain backward, which a GradScaler unscales where it finds them.

A GradScaler reads ``optimizer.param_groups``, unscales the ``.grad`` of what it finds there in place, and calls
``optimizer.step()`` unless one was not finite. When it reads the gradients of masters these are made, still scaled, and
the model's 16-bit parameters share them from then on, so that clipping ``model.parameters()`` and clipping the masters
are the same. That its step was never called shows when other gradients come, or when somebody asks.
"""

from __future__ import annotations

from torch import Tensor

from ..kernels import counters
from ..kernels.counters import store
from ..scaling import LossScaler
from .accumulation import Accumulation, Stage, Verdict
from .gradients import Gradients, SharedGradients, Sight
from .pairs import HALF_DTYPES, Pairs

CAN_SHARE = hasattr(Tensor, "grad_dtype")  # torch before 2.10 wants a parameter's gradient in the parameter's dtype


class UnderGradScaler:
    """Follows what a GradScaler does, where the wrapper's own scale is 1 and stays so.

    Attributes:
        evaluates: whether a closure makes and clears gradients inside of a step: none of them was left out.
    """

    def __init__(self, pairs: Pairs, gradients: Gradients, accumulation: Accumulation, shared: SharedGradients) -> None:
        self.pairs = pairs
        self.gradients = gradients
        self.accumulation = accumulation
        self.shared = shared
        self._neutral: tuple[LossScaler | None, int, bool] = (None, 0, False)
        self.evaluates = False

    def serves(self, scaler: LossScaler) -> bool:
        """Whether a GradScaler's scale can be the only one. Syncs once for each value of the scale."""
        if scaler.dynamic:
            return False
        known, generation, neutral = self._neutral
        if known is not scaler or generation != scaler.generation:
            neutral = float(scaler.scale) == 1.0
            self._neutral = (scaler, scaler.generation, neutral)
        return neutral

    def is_underway(self) -> bool:
        """Whether gradients that came without the engine wait for a step."""
        pending = self.accumulation.pending
        return self.accumulation.stage is not Stage.READY and pending is not None and pending.foreign

    # -- what it finds -----------------------------------------------------------------------------------------------

    def see(self) -> None:
        """``param_groups`` are read: remember gradients that came without the engine."""
        at_rest = self.accumulation.stage is Stage.READY and not self.accumulation.interrupted
        strange = self.accumulation.strange() if at_rest else []
        if strange or self.shared.handed is not None:
            self.shared.shown = True
        if not strange:
            return
        grads = self.gradients.of_model()
        for position in strange if self.pairs.has_own else ():
            grad = grads[position]
            if grad is not None and grad.is_sparse and self._is_raw(position, grad):
                grads[position] = grad.coalesce()  # now: who reads param_groups may keep the values that he finds
                store(self.pairs.models[position], grads[position])
        self.shared.handed = Sight(grads)

    def _is_raw(self, position: int, grad: Tensor) -> bool:
        """Whether a sparse gradient is not coalesced, and is one that a GradScaler is shown as it is."""
        return self.pairs.are_own[position] and grad.dtype not in HALF_DTYPES and not grad.is_coalesced()

    def hand_over(self, scaler: LossScaler, inv_scale: Tensor | None = None) -> Tensor | None:
        """Make FP32 gradients of those that came without the engine, which the model's parameters share.

        Args:
            scaler: The wrapper's own.
            inv_scale: float32, 0-dim: 1 / the scale of a GradScaler of ours, for which they are unscaled by the same
                pass. None: they stay scaled, as torch's GradScaler is about to unscale them, or a reader wants to see.

        Returns:
            float32, 0-dim: 1.0 where an unscaled gradient is not finite, else 0.0; None where none was unscaled. No
            host sync.

        Raises:
            RuntimeError: This torch is too old for that.
        """
        accumulation = self.accumulation
        if accumulation.stage is not Stage.READY or accumulation.interrupted:
            return None
        if accumulation.replicas.local and accumulation.waits():
            return None
        if self.shared.handed is None and not accumulation.strange():
            self.shared.drop_gone()
            return None
        if not CAN_SHARE:
            raise RuntimeError(
                "a GradScaler can drive MixedPrecisionOptimizer from torch 2.10 on. Construct it with dynamic=True, "
                "and call opt.backward(loss) and opt.step() without a GradScaler."
            )
        found = accumulation.hand_over(scaler, inv_scale)
        self.shared.shown = self.shared.shown or inv_scale is not None
        return None if found is None else found.clone()

    # -- what became of it -------------------------------------------------------------------------------------------

    def renewed(self, scaler: LossScaler) -> Verdict | None:
        """:meth:`left_out`, where gradients of the model were cleared or made anew since. Else they are forgotten."""
        shared = self.shared
        if shared.handed is None or shared.are_there():
            return None
        if shared.are_edited():
            if self.is_underway() and self.gradients.made:
                shared.hold()
            shared.handed = Sight(self.gradients.of_model())
            return None
        left_out = self.left_out(scaler)
        if left_out is None:
            shared.forget()
            if self.is_underway():
                self.accumulation.forget()
        return left_out

    def left_out(self, scaler: LossScaler) -> Verdict | None:
        """Whether a step was never called because gradients were not finite: the verdict on them. Syncs.

        None where that was counted, too.
        """
        if not self.shared.shown or self.shared.counted is not None:
            return None  # the GradScaler may not have come yet: somebody has only read the masters' gradients
        stage = self.accumulation.stage
        if self.shared.handed is None or self.evaluates or self.accumulation.interrupted:
            return None
        if not (stage is Stage.READY or self.is_underway()):
            return None
        shown, are_read = self.shared.as_read()
        if stage is Stage.READY and not all(mine or grad is None for mine, grad in zip(are_read, shown, strict=True)):
            return None  # it would have read these from their masters
        if stage in (Stage.LOOKED, Stage.TAKEN):
            ((_, found),) = self.accumulation.scalers()
        else:
            made = counters.gradients(self.pairs.masters) if stage is Stage.SCALED else [None] * len(self.pairs)
            mine = are_read if stage is Stage.READY else self.pairs.are_own
            values = [seen if is_mine else grad for is_mine, seen, grad in zip(mine, shown, made, strict=True)]
            found = self.gradients.judge_apart(values, self.accumulation.device)
        return Verdict(found, [(scaler, found)]) if bool(found) else None

    def used(self) -> Sight | None:
        """The gradients that a GradScaler was handed and no step has used, in the versions in which it left them."""
        handed = self.shared.handed
        return None if handed is None else Sight(handed.grads)
