"""FP16_Optimizer: apex.fp16_utils' wrapper, as names for what MixedPrecisionOptimizer does."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import scaling
from ..engine.arguments import make_scaler as default_scaler
from ..engine.config import GradAccumulation, OnModelWrite
from ..engine.diagnostics import Overflow, SkipLog
from ..engine.dtensors import raw_grads
from ..engine.missing_scale import WayToScale
from ..engine.passes import are_zero
from ..engine.ranks import Origin
from ..engine.stage import Checked, Unscaled
from ..optimizer import MixedPrecisionOptimizer
from .loss_scalers import LossScaler, make_scaler, view_of
from .saved_files import engine_scaler, engine_state, face_state

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer(MixedPrecisionOptimizer):
    """apex's FP16_Optimizer: FP32 masters and a loss scale around any ``torch.optim.Optimizer``.

    It is a :class:`fp16opt.MixedPrecisionOptimizer`, with the old names beside that one's. Skipped steps are logged
    ("fp16opt" logger) and the loss scale changes in ``step``, not in ``backward``; an overflow that no ``step``
    follows lowers it when gradients are next cleared. ``step(closure)`` evaluates again, at a lower scale, while
    gradients overflow; masters and their state are copied first.

    Args:
        init_optimizer: The optimizer to wrap, over the parameters of a model in FP16 (BF16, FP32, or mixed).
        static_loss_scale: Used unless ``dynamic_loss_scale``. None is apex's default, 1, of which FP16 weights are
            warned.
        dynamic_loss_scale: Lower the scale at overflows and raise it after a while without.
        dynamic_loss_args: Of init_scale (2**16), scale_factor (2), scale_window (2000), min_loss_scale (2**-14) and
            max_loss_scale (2**24); None as a limit means none.
        verbose: Log skipped steps.
        named_parameters, grad_accumulation, on_model_write: As for ``MixedPrecisionOptimizer``.

    Raises:
        TypeError, ValueError: As ``MixedPrecisionOptimizer``, and for unknown ``dynamic_loss_args``. The wrapped
            optimizer is unchanged then.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = FP16_Optimizer(torch.optim.SGD([weight], lr=0.5), dynamic_loss_scale=True)
        >>> optimizer.zero_grad()
        >>> optimizer.backward(weight.float().sum() / 4)
        >>> optimizer.clip_master_grads(10.0)
        tensor(0.3536)
        >>> optimizer.step()
        >>> weight.tolist(), optimizer.overflow, optimizer.loss_scale
        ([0.875, 0.875], False, 65536.0)
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float | None = None,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        grad_accumulation: GradAccumulation = "model",
        on_model_write: OnModelWrite = "refresh",
    ) -> None:
        scaler: scaling.LossScaler
        if dynamic_loss_scale:
            scaler = make_scaler(dynamic_loss_args)
        elif static_loss_scale is None:
            scaler = default_scaler(False, None, None)
        else:
            scaler = scaling.StaticLossScaler(static_loss_scale)
        super().__init__(
            init_optimizer,
            scaler=scaler,
            named_parameters=named_parameters,
            grad_accumulation=grad_accumulation,
            on_model_write=on_model_write,
            fused_step=False,  # the wrapped optimizer's own step, to the bit
            closure="reevaluate",  # apex repeated the closure while it overflowed, whatever the wrapped class
        )
        if not verbose:
            self.outcome.log = _Quiet(self.lines)

    def _way_to_scale(self) -> WayToScale:
        """As the wrapper's, in apex's words."""
        return WayToScale("FP16_Optimizer(optimizer, dynamic_loss_scale=True)", "static_loss_scale=1.0")

    # -- the old words -----------------------------------------------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """Whether the last gradients that came up to the masters held inf or nan. Reading may sync with the device."""
        check = self.step_state.stage.check
        return self.step_was_skipped if check is None else bool(check.found_inf)

    @property
    def loss_scaler(self) -> LossScaler:
        """The scaler under its old names (``cur_scale``, ``loss_scale``, ``dynamic``)."""
        return view_of(self.scaler)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether overflows change the loss scale."""
        return self.scaler.dynamic

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, masters in place of FP16 parameters. Set them to groups of the same ones."""
        return super().param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        now = [[id(param) for param in group["params"]] for group in self.optimizer.param_groups]
        if [[id(param) for param in group["params"]] for group in groups] != now:
            raise ValueError(
                "param_groups: expected groups with the same parameters as now (masters where there are masters), got "
                "others. Use add_param_group for new ones."
            )
        for group, new in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in new.items() if key != "params"})

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, keyed by master. May be set."""
        return super().state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """Per group, the model's 16-bit parameters that have masters."""
        return [[model for model, master in group if master.dtype != model.dtype] for group in self._grouped()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Per group, the masters of :attr:`fp16_groups`."""
        return [[master for model, master in group if master.dtype != model.dtype] for group in self._grouped()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """Per group, the masters of FP32 parameters: on the weights' memory, with true gradients of their own."""
        return [[master for model, master in group if master.dtype == model.dtype] for group in self._grouped()]

    def _grouped(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Per group, each (model parameter, master)."""
        pairs = zip(self.model_params(), self.master_params(), strict=True)
        return [list(itertools.islice(pairs, len(group["params"]))) for group in self.inner.param_groups]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        update_master_grads: bool = True,
        retain_graph: bool | None = False,
        *,
        create_graph: bool = False,
        inputs: Any = None,
        scaler: scaling.LossScaler | None = None,
    ) -> None:
        """Scale the loss, run autograd, and write the master gradients: as in apex they are there when it returns.

        Args:
            loss: One floating element.
            update_master_grads: False for all but the last of several losses. Under DDP's ``no_sync`` they wait for the
                backward that reduces them in any case.
            retain_graph: As for ``torch.Tensor.backward``.
            create_graph, inputs, scaler: As for ``MixedPrecisionOptimizer.backward``.
        """
        if self._were_cleared():
            self._count_unstepped_overflow()
        super().backward(
            loss,
            update_master_grads=False,
            retain_graph=retain_graph or None,
            create_graph=create_graph,
            inputs=inputs,
            scaler=scaler,
        )
        if update_master_grads and not self.step_state.waits_for_reduction():
            self.update_master_grads()

    def zero_grad(self, set_grads_to_None: bool = False, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Clear the model's and the masters' gradients.

        Args:
            set_grads_to_None: Set ``.grad`` to None instead of zeroing it.
            set_to_none: torch's name for the same; wins where given.
        """
        super().zero_grad(set_grads_to_None if set_to_none is None else set_to_none)

    def _were_cleared(self) -> bool:
        """Whether the model has set gradients that were checked to None or to zeros. Syncs where they were written."""
        stage = self.step_state.stage
        if type(stage) not in (Checked, Unscaled) or stage.is_sum:
            return False
        grads = raw_grads(self.params.models)
        return any(stage.stamp.compare(grads)) and are_zero(grads)

    def _count_unstepped_overflow(self) -> None:
        """A script may see ``overflow`` and clear the gradients without a step: that is a skipped step too.

        Otherwise the scale would never go down. An overflow for which a closure's evaluation lowered the scale already
        is not counted again.
        """
        check = self.step_state.stage.check
        if check is not None and bool(check.found_inf):
            self._record(check, skipped=True)
            self._after_step(check, skipped=True)

    def clip_master_grads(
        self,
        max_norm: float,
        norm_type: float = 2,
        error_if_nonfinite: bool = False,
        params: Iterable[Tensor] | Tensor | None = None,
    ) -> Tensor:
        """Clip the masters' gradients by their total norm, as ``MixedPrecisionOptimizer`` does.

        Returns:
            The norm before clipping: float32, 0-dim, on the device. -1 after an overflow. No host sync.
        """
        norm = super().clip_master_grads(max_norm, norm_type, error_if_nonfinite, params)
        check = self.step_state.stage.check
        return norm if check is None else torch.where(check.found_inf > 0, torch.full_like(norm, -1.0), norm)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The masters' gradients, unscaled, in a list per group; None after an overflow. Syncs with the device."""
        if self.overflow:
            text = "inspect_master_grad_data: gradients overflowed, so there is nothing to inspect."
            self.lines.say(logging.WARNING, text)
            return None
        return [
            [None if param.grad is None else param.grad.detach() for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """apex's keys, with plain types only: ``torch.load(weights_only=True)`` reads it back.

        Keys: ``loss_scaler`` (a dict), ``dynamic_loss_scale``, ``overflow``, ``first_closure_call_this_step``,
        ``optimizer_state_dict`` (the wrapped optimizer's own) and ``fp32_from_fp16`` (masters, a list per group).
        Tensors are references, as in torch.
        """
        sizes = [len(group["params"]) for group in self.inner.param_groups]
        state: dict[str, Any] = face_state(
            super().state_dict(compact=compact), sizes, self.scaler.dynamic, self.overflow
        )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, here or in apex, or a state_dict of ``MixedPrecisionOptimizer``'s.

        A file of apex's is read with ``load_apex_file``. Masters are written to the model. The loss scaler becomes what
        was saved, static or dynamic; without an entry ``loss_scaler`` it stays.

        Raises:
            TypeError, ValueError: Something does not fit; the optimizer is as it was.
        """
        scaler, present = self.scaler, self.scaler
        if isinstance(state_dict, Mapping) and not {"version", "state"} & set(state_dict):
            saved = state_dict.get("loss_scaler", present.state_dict())
            scaler = engine_scaler(saved).to(present.scale.device)
            copied = [[master.dtype != model.dtype for model, master in group] for group in self._grouped()]
            state_dict = engine_state(state_dict, copied, scaler.state_dict())
        if scaler.dynamic != present.dynamic:
            self.scaler = scaler
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.scaler = present
            raise


class _Quiet(SkipLog):
    """``verbose=False``."""

    def skipped(
        self,
        scaler: scaling.LossScaler,
        old: float,
        overflows: Sequence[Overflow],
        losses: Sequence[Tensor] = (),
        weights: Sequence[str] = (),
        origin: Origin | None = None,
    ) -> None:
        """Say nothing."""
