"""For timm: a scaler to call in the place of ``timm.utils.NativeScaler`` where the optimizer has FP32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine.missing_scale import WayToScale
from ..optimizer import MixedPrecisionOptimizer
from .optimizer_group import OptimizerGroup, check_not_released, masters_of, named_parameters, scaled_by_dtype


def with_masters(
    optimizer: Optimizer, model: nn.Module, **options: Any
) -> tuple[MixedPrecisionOptimizer, MasterScaler]:
    """``optimizer, loss_scaler = with_masters(optimizer, model)``: in the place of ``loss_scaler = NativeScaler()``.

    Call it once, when the optimizer was made and the model is on its device, and before a checkpoint is loaded.

    Args:
        optimizer: What ``create_optimizer_v2`` made. One that is wrapped already stays.
        model: Whose parameters it trains, for names in messages. A model that is under DDP by now is attached.
        **options: Of ``MixedPrecisionOptimizer``. Where the model has FP16 parameters ``dynamic=True``, unless they say
            otherwise.

    Returns:
        The ``MixedPrecisionOptimizer``, and what is called as a NativeScaler is.

    Raises:
        TypeError, ValueError: As ``MixedPrecisionOptimizer`` raises them; the optimizer trains nothing of the model.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1).half()
        >>> optimizer, loss_scaler = with_masters(torch.optim.SGD(model.parameters(), lr=0.5), model)
        >>> loss_scaler(model(torch.ones(1, 2).half()).float().sum() * 0.25, optimizer)
        >>> optimizer.step_was_skipped, optimizer.loss_scale
        (False, 65536.0)
    """
    names = named_parameters(model)
    settings = scaled_by_dtype(options, (param for _, param in names))
    way = WayToScale("with_masters(optimizer, model, dynamic=True)", "loss_scale=1.0", "loss_scaler(loss, optimizer)")
    group = OptimizerGroup([optimizer], names, settings, way)
    group.attach(model)
    return group.optimizers[0], MasterScaler()


class MasterScaler:
    """Called as ``timm.utils.NativeScaler`` is, with an optimizer that is a ``MixedPrecisionOptimizer``.

    The optimizer owns masters and loss scale, and ``optimizer.state_dict()`` has both; what is saved under
    ``state_dict_key`` beside it is the scale again, for tools that look there. timm itself is imported for
    ``clip_mode="agc"`` alone.

    Args:
        device: As NativeScaler's; not used, as the optimizer knows.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5), dynamic=True)
        >>> loss_scaler = MasterScaler()
        >>> loss_scaler(weight.float().sum() * 0.25, optimizer, clip_grad=1.0, parameters=[weight])
        >>> weight.tolist(), loss_scaler.state_dict()["type"]
        ([0.875, 0.875], 'dynamic')
    """

    state_dict_key = "amp_scaler"

    def __init__(self, device: Any = None) -> None:
        self._optimizer: MixedPrecisionOptimizer | None = None
        self._loaded: Mapping[str, Any] | None = None

    def __call__(
        self,
        loss: Tensor,
        optimizer: MixedPrecisionOptimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | Tensor | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Backward; and where ``need_update``, clip true gradients and step. An overflow is one skip.

        Args:
            loss: One floating element.
            clip_grad: What to clip to; None: nothing is clipped.
            clip_mode: "norm", "value" or "agc" (adaptive; against the masters' norms).
            parameters: The model's, whose gradients are clipped; None: all of the optimizer.
            create_graph: As for ``torch.Tensor.backward``.
            need_update: False in all micro-batches of a step but the last.

        Raises:
            TypeError: The optimizer is not wrapped.
            ValueError: Another ``clip_mode``; a parameter has a gradient and is not in the optimizer.
        """
        if not isinstance(optimizer, MixedPrecisionOptimizer):
            raise TypeError(
                f"optimizer: expected a MixedPrecisionOptimizer, got {type(optimizer).__name__}. Write optimizer, "
                "loss_scaler = with_masters(optimizer, model), from fp16opt.integrations.timm."
            )
        if clip_mode not in ("norm", "value", "agc"):
            raise ValueError(f"clip_mode: expected 'norm', 'value' or 'agc', got {clip_mode!r}.")
        self._take(optimizer)
        optimizer.backward(loss, create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            self._clip(optimizer, clip_grad, clip_mode, parameters)
        optimizer.step()

    def _take(self, optimizer: MixedPrecisionOptimizer) -> None:
        """Remember the optimizer; give it what was loaded before it was known."""
        self._optimizer = optimizer
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            _load(optimizer, loaded)

    def _clip(self, optimizer: MixedPrecisionOptimizer, to: float, mode: str, parameters: Any) -> None:
        if parameters is not None and not isinstance(parameters, Tensor):
            parameters = list(parameters)
        if mode == "norm":
            optimizer.clip_master_grads(to, params=parameters)
        elif mode == "value":
            optimizer.clip_master_values(to, params=parameters)
        else:
            check_not_released(optimizer, 'clip_mode="agc"')
            from timm.utils.agc import adaptive_clip_grad

            given = [parameters] if isinstance(parameters, Tensor) else parameters
            adaptive_clip_grad(masters_of(optimizer, list(optimizer.model_params()) if given is None else given), to)

    def state_dict(self) -> dict[str, Any]:
        """The loss scaler's state; empty before the first call. No sync."""
        return {} if self._optimizer is None else self._optimizer.scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or NativeScaler's, whose scale alone is taken.

        Before the first call the optimizer is not known: then it is loaded in that.

        Raises:
            TypeError, ValueError: A field is missing or wrong, or it is of a scaler of another kind.
        """
        if self._optimizer is None:
            self._loaded = dict(state_dict)
        else:
            _load(self._optimizer, state_dict)


def _load(optimizer: MixedPrecisionOptimizer, state: Mapping[str, Any]) -> None:
    if "type" not in state and "scale" in state:  # torch's GradScaler
        if optimizer.scaler.dynamic:
            optimizer.loss_scale = float(state["scale"])
    elif state:
        optimizer.scaler.load_state_dict(state)
