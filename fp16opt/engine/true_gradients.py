"""TrueGradients: what a read, or a write, of a master's ``.grad`` does to the stage of a step."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..scaling import LossScaler
from . import errors
from .dtensors import raw_grad
from .gradients import StepState
from .ranks import refuse_torch_checkpointing
from .stage import BackwardScale, Check, GradientStamp, Interrupted, Ready, ScaledBy, Unscaled


class TrueGradients:
    """The :class:`~fp16opt.engine.masters.GradientOwner` of an optimizer's masters. Masters don't keep it alive."""

    def __init__(self, state: StepState) -> None:
        self._state = state

    def before_reading(self, position: int) -> None:
        """``.grad`` of a master is about to be read: true ones are made of all.

        Nothing is done while a step writes, and within autograd. A pre hook of the wrapped optimizer comes before that.

        Args:
            position: of its pair.
        """
        state = self._state
        if (state.step is not None and state.step.about_to_write) or torch._C._current_graph_task_id() != -1:
            return
        reader = sys._getframe(2)
        divides = reader.f_code.co_name == "_unscale_grads_"  # torch's GradScaler is about to
        stage = state.stage
        if type(stage) is Unscaled and not stage.stamp.is_empty and raw_grad(state.params.models[position]) is None:
            look = state.look()
            if state.waits_for_step() and (gone := stage.stamp.compare(look.grads)[1]):
                state.leave_alone(gone, look)
        elif type(stage) not in (Unscaled, Interrupted):
            with torch.inference_mode(False):
                self._make_readable(state, divides)
        stage = state.stage
        if type(stage) is Unscaled and stage.is_sum and not stage.is_asked:
            state.stage = stage = stage._replace(is_asked=True)
        if divides and type(stage) is Unscaled and stage.scale.by is not ScaledBy.ENGINE:
            self._hand_to_grad_scaler(state, stage, reader.f_back)

    def _make_readable(self, state: StepState, divides: bool) -> None:
        """Make true gradients, of those that are there for the coming step: plain ones that count, or are divided."""
        if state.waits_for_reduction():
            return
        look = state.look()
        if type(state.stage) is Ready:
            counts = state.stage.has_zeros(look.grads) or (state.has_new() and (divides or state.counts_plain()))
            if not (counts and state.is_one()):
                return
            state.take_external(look, state.own_scaler())
        state.bring_up(look, write=True)

    def _hand_to_grad_scaler(self, state: StepState, stage: Unscaled, asked_by: Any) -> None:
        """torch's GradScaler reads true gradients, to divide them where they lie.

        Raises:
            RuntimeError: a step that an exception has stopped has divided them already.
        """
        if stage.scale.by.is_told and asked_by is not None and asked_by.f_code.co_name == "unscale_":
            raise errors.UNSCALED_AFTER_A_STOP()
        if stage.scale.by is ScaledBy.USER:
            state.stage = stage._replace(scale=stage.scale._replace(by=ScaledBy.DIVIDED), is_measured=False)

    def before_setting(self, position: int, value: Tensor | None) -> None:
        """``.grad`` of a master is about to be set: the others are made true, so that the edit counts.

        Args:
            position: of its pair.
            value: what it is set to.

        Raises:
            RuntimeError: no gradients wait for a step, and the scale is not 1.
        """
        state = self._state
        if torch._C._current_graph_task_id() != -1 or (type(state.stage) is Ready and value is None):
            return
        if type(state.stage) is Ready:
            refuse_torch_checkpointing("optimizer state")
            scaler = state.own_scaler()
            if not state.is_one():
                raise errors.MASTER_GRADIENT_SET(scale=float(scaler.scale))
            look = state.look()
            is_new = state.has_new() or state.stage.has_zeros(look.grads)
            if not is_new or not state.take_external(look):
                self._take_none(state, scaler)
                return
        self.before_reading(position)

    def _take_none(self, state: StepState, scaler: LossScaler) -> None:
        """UNSCALED without any gradient: the user is about to give masters theirs."""
        state.gradients.release()
        state.gradients.forget_true()
        none = GradientStamp([None] * len(state.params))
        check = Check(((scaler, torch.zeros((), dtype=torch.float32, device=state.device)),))
        state.stage = Unscaled(BackwardScale.of(scaler, ScaledBy.USER), none, none, check)
