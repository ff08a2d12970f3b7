"""For Lightning: a precision plugin of the Trainer, and one of Fabric, that train 16-bit weights with FP32 masters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.fabric import is_wrapped
from lightning.fabric.plugins.precision.half import HalfPrecision as FabricHalfPrecision
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision.half import HalfPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..engine.missing_scale import WayToScale
from ..optimizer import MixedPrecisionOptimizer
from .lightning_finetuning import adapt
from .optimizer_group import OptimizerGroup, WaitingScheduler, check_not_released, named_parameters, says_scale

_PRECISIONS = ("16-true", "bf16-true")
Precision = Literal["16-true", "bf16-true"]


def _way_to_scale(plugin: str, backward: str) -> WayToScale:
    return WayToScale(f'{plugin}("16-true", dynamic=True)', "loss_scale=1.0", backward)


def _settings(precision: str, options: dict[str, Any]) -> dict[str, Any]:
    """The wrapper's options: with FP16 a dynamic loss scale, unless they say otherwise.

    Raises:
        ValueError: ``precision`` is none of the two.
    """
    if precision not in _PRECISIONS:
        raise ValueError(
            f"precision: expected '16-true' or 'bf16-true', got {precision!r}. The weights are 16-bit here; for FP32 "
            "weights use Lightning's own precision='16-mixed'."
        )
    if precision == "16-true" and not says_scale(options):
        return {"dynamic": True, **options}
    return options


@contextlib.contextmanager
def _single_by_default() -> Iterator[None]:
    """In manual optimization Lightning runs steps with a 16-bit default dtype, which optimizers' states would have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _ours(optimizer: Any) -> Any:
    """The optimizer inside of Lightning's own wrapping."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


class MasterWeightsPrecision(HalfPrecision):
    """``Trainer(plugins=MasterWeightsPrecision("16-true"))``: 16-bit weights, FP32 masters, loss scaling.

    What ``configure_optimizers`` returns is wrapped in ``fp16opt.MixedPrecisionOptimizer``, with the module's parameter
    names. Several optimizers share one scaler, which follows once all have stepped; those wrapped already stay as they
    are. Clipping is on true gradients, also in ``configure_gradient_clipping`` and ``self.clip_gradients``. Masters,
    scaler and state are in Lightning's own checkpoints. With automatic and with manual optimization.

    Args:
        precision: "16-true" (FP16) or "bf16-true".
        schedulers_wait: Schedulers with ``interval="step"`` stay where they are on skipped steps.
        log_scale: Log ``loss_scale`` and ``skipped_steps`` at the Trainer's ``log_every_n_steps``.
        **options: Of ``MixedPrecisionOptimizer``. With "16-true" ``dynamic=True``, unless they say otherwise.

    Raises:
        ValueError: ``precision`` is neither.

    Example:
        >>> MasterWeightsPrecision("16-true", master_weights="split").options
        {'dynamic': True, 'master_weights': 'split'}
    """

    def __init__(
        self,
        precision: Precision = "16-true",
        *,
        schedulers_wait: bool = False,
        log_scale: bool = True,
        **options: Any,
    ) -> None:
        self.options = _settings(precision, options)
        super().__init__(precision)
        self.schedulers_wait = schedulers_wait
        self.log_scale = log_scale
        self._optimizer_group: OptimizerGroup | None = None
        self._undo: Callable[[], None] | None = None

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Wrap the optimizers; Lightning's hook. Schedulers go on with the groups that they know.

        Raises:
            TypeError, ValueError: As ``MixedPrecisionOptimizer`` raises them.
        """
        self._end()
        if not optimizers:
            return model, optimizers, lr_schedulers
        way = _way_to_scale("MasterWeightsPrecision", "self.manual_backward(loss)")
        group = OptimizerGroup([_ours(one) for one in optimizers], named_parameters(model), self.options, way)
        group.attach(model)
        if self.schedulers_wait:
            for config in lr_schedulers:
                if config.interval == "step":
                    of = _driven(config.scheduler, group.optimizers)
                    config.scheduler = WaitingScheduler(config.scheduler, _skipped(of))
        self._optimizer_group = group
        module: Any = model.module if isinstance(model, DistributedDataParallel) else model
        self._undo = adapt(module.trainer)
        _save_with_masters(module.trainer.strategy)
        return model, list(group.optimizers), lr_schedulers

    def _end(self) -> None:
        self._optimizer_group = None
        if self._undo is not None:
            self._undo()
            self._undo = None

    # -- backward ----------------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss, then Lightning's ``on_before_backward``, as its own AMP plugin does.

        Raises:
            RuntimeError: After ``toggle_optimizer``, which does not reach the model's weights.
        """
        if self._optimizer_group is not None:
            _check_toggled(self._optimizer_group.optimizers)
            tensor = self._optimizer_group.scale(tensor)
        scaled: Tensor = super().pre_backward(tensor, module)
        return scaled

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the module's ``backward`` hook on the scaled loss."""
        try:
            super().backward(tensor, model, optimizer, *args, **kwargs)
        except BaseException:
            if self._optimizer_group is not None:
                self._optimizer_group.interrupt()
            raise
        if self._optimizer_group is not None:
            self._optimizer_group.arrived()

    # -- the step ----------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Evaluate the closure once, clip and step; an overflow is one skip."""
        with _single_by_default():
            result = super().optimizer_step(_ours(optimizer), model, closure, **kwargs)
        self._log(model)
        return result

    def _log(self, model: Any) -> None:
        """Put scale and skips into Lightning's log where it is about to write one."""
        trainer = model.trainer
        group = self._optimizer_group
        if group is None or not self.log_scale or not trainer.loggers:
            return
        if model.automatic_optimization and (trainer.global_step + 1) % trainer.log_every_n_steps:
            return  # to count skips waits for the device
        first = group.optimizers[0]
        skips = sum(one.skipped_steps for one in group.optimizers)
        model.log("loss_scale", first.scaler.scale, on_step=True, on_epoch=False)
        model.log("skipped_steps", float(skips), on_step=True, on_epoch=False)

    # -- clipping ----------------------------------------------------------------------------------------------------

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip true master gradients to a total norm of ``clip_val``."""
        ours = _ours(optimizer)
        if isinstance(ours, MixedPrecisionOptimizer):
            ours.clip_master_grads(float(clip_val))
        else:
            super().clip_grad_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip true master gradients by value."""
        ours = _ours(optimizer)
        if isinstance(ours, MixedPrecisionOptimizer):
            ours.clip_master_values(float(clip_val))
        else:
            super().clip_grad_by_value(optimizer, clip_val)

    def main_params(self, optimizer: Any) -> Iterator[Tensor]:
        """The masters, whose gradients are true."""
        ours = _ours(optimizer)
        if isinstance(ours, MixedPrecisionOptimizer):
            return ours.master_params()
        return iter(super().main_params(optimizer))

    def teardown(self) -> None:
        """The training is over."""
        self._end()
        super().teardown()


class MasterWeightsModelParallel(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), whose checkpoints have the masters.

    Torch's calls for sharded optimizer state, which Lightning's own makes, have no place for masters and scaler. Here
    they are in Lightning's own checkpoint folder, by parameter name, and resume on another number of ranks.
    :class:`MasterWeightsPrecision` makes one of Lightning's own; to be named for subclasses alone. Takes the arguments
    of Lightning's; ``save_distributed_checkpoint`` must stay True.
    """

    optimizers: list[Any]

    def optimizer_state(self, optimizer: Any) -> Any:
        """Masters, state and scaler by parameter name, in this rank's pieces.

        Raises:
            RuntimeError: ``save_distributed_checkpoint=False``.
        """
        from ..distributed import state_dict

        ours = _ours(optimizer)
        if not isinstance(ours, MixedPrecisionOptimizer):
            return super().optimizer_state(optimizer)
        if not self._save_distributed_checkpoint:
            raise RuntimeError(
                "save_distributed_checkpoint=False: masters are saved in pieces. Leave it True, and use "
                "fp16opt.distributed.fp32_state_dict for whole weights."
            )
        return state_dict(self.model, ours)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load the model as Lightning does, and masters, state and scaler after it."""
        optimizers = list(self.optimizers)
        self.optimizers = [one for one in optimizers if not isinstance(one, MixedPrecisionOptimizer)]
        try:
            rest = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # weights_only, from 2.6 on
        finally:
            self.optimizers = optimizers
        for number, one in enumerate(optimizers):
            if isinstance(one, MixedPrecisionOptimizer):
                self._load(one, f"optimizer_{number}", self.broadcast(checkpoint_path))
        return rest

    def _load(self, optimizer: MixedPrecisionOptimizer, key: str, path: str | os.PathLike[str]) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        from ..distributed import load_state_dict, state_dict

        state = {key: state_dict(self.model, optimizer)}
        load(state, checkpoint_id=path)
        load_state_dict(self.model, optimizer, state[key])


def _save_with_masters(strategy: Any) -> None:
    """Lightning's own strategy is made the one whose checkpoints have masters, as there is no hook for these."""
    if type(strategy) is ModelParallelStrategy:
        strategy.__class__ = MasterWeightsModelParallel


class FabricMasterWeightsPrecision(FabricHalfPrecision):
    """``Fabric(plugins=precision)``: 16-bit weights, FP32 masters, loss scaling.

    Fabric has no hook for optimizers, so they are wrapped by :meth:`wrap`, after the model was set up. From then on
    ``fabric.backward`` scales the loss, ``fabric.clip_gradients`` clips true gradients, and ``optimizer.step`` skips.

    Args:
        precision: "16-true" (FP16) or "bf16-true".
        **options: Of ``MixedPrecisionOptimizer``. With "16-true" ``dynamic=True``, unless they say otherwise.

    Raises:
        ValueError: ``precision`` is neither.

    Example:
        >>> import lightning
        >>> precision = FabricMasterWeightsPrecision("bf16-true")
        >>> fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=precision)
        >>> model = fabric.setup_module(torch.nn.Linear(2, 1))
        >>> optimizer = precision.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        >>> fabric.backward(model(torch.ones(1, 2)).sum())
        >>> optimizer.step()
        >>> [str(param.dtype) for param in (*model.parameters(), *optimizer.master_params())]
        ['torch.bfloat16', 'torch.bfloat16', 'torch.float32', 'torch.float32']
    """

    def __init__(self, precision: Precision = "16-true", **options: Any) -> None:
        self.options = _settings(precision, options)
        super().__init__(precision)
        self._optimizer_group: OptimizerGroup | None = None

    def wrap(self, *optimizers: Any, model: nn.Module | None = None) -> Any:
        """Wrap the optimizers of a training, all in one call; several share one scaler.

        Args:
            optimizers: torch's, or what ``fabric.setup`` returned for them. Those wrapped already stay.
            model: What ``fabric.setup`` or ``fabric.setup_module`` returned: for names in messages, and under DDP.

        Returns:
            The ``MixedPrecisionOptimizer``; a tuple of them for several. ``fabric.setup_optimizers`` takes them, for
            Fabric's callbacks.

        Raises:
            RuntimeError: Others were wrapped before.
            TypeError, ValueError: There are none; or as ``MixedPrecisionOptimizer`` raises them.
        """
        if self._optimizer_group is not None:
            raise RuntimeError(
                "wrap was called before. One scaler serves all optimizers of a training: wrap them in one call, and "
                "make a plugin of its own for another training."
            )
        if not optimizers:
            raise TypeError("wrap: expected at least one optimizer, got none.")
        inside = [one.optimizer if is_wrapped(one) else one for one in optimizers]
        forward = getattr(model, "_forward_module", model)
        names = () if forward is None else named_parameters(forward)
        way = _way_to_scale("FabricMasterWeightsPrecision", "fabric.backward(loss)")
        group = OptimizerGroup(inside, names, self.options, way)
        if forward is not None:
            group.attach(forward)
        self._optimizer_group = group
        return group.optimizers[0] if len(group.optimizers) == 1 else tuple(group.optimizers)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run autograd; ``fabric.backward`` calls it.

        Raises:
            RuntimeError: No optimizer was wrapped.
        """
        if self._optimizer_group is None:
            raise RuntimeError(
                "no optimizer was wrapped, so the loss can't be scaled. After fabric.setup call optimizer = "
                "precision.wrap(optimizer, model=model) on the plugin, and step what it returns."
            )
        with self._optimizer_group.backward(tensor) as scaled:
            super().backward(scaled, model, *args, **kwargs)

    def main_params(self, optimizer: Any) -> Iterator[Tensor]:
        """The masters, whose gradients are true."""
        if not isinstance(optimizer, MixedPrecisionOptimizer):
            return iter(super().main_params(optimizer))
        return optimizer.master_params()

    def unscale_gradients(self, optimizer: Any) -> None:
        """Gradients of masters are true when they are read. Fabric is about to clip them; what is inf becomes nan.

        torch's ``clip_grad_value_`` would make a number of an inf, and the overflow would be stepped. Syncs.

        Raises:
            RuntimeError: ``gradient_release``: there are none to clip.
        """
        if isinstance(optimizer, MixedPrecisionOptimizer):
            check_not_released(optimizer, "clip_gradients")
        if isinstance(optimizer, MixedPrecisionOptimizer) and not bool(
            optimizer.clip_master_grads(float("inf")).isfinite()
        ):
            for master in optimizer.master_params():
                if master.grad is not None:
                    master.grad.masked_fill_(master.grad.isinf(), float("nan"))


def _check_toggled(optimizers: Sequence[MixedPrecisionOptimizer]) -> None:
    """Raise ``RuntimeError`` where Lightning has switched masters off, as weights of the model know nothing of it."""
    for one in optimizers:
        for model, master in zip(one.model_params(), one.master_params(), strict=True):
            if model.requires_grad and not master.requires_grad:
                raise RuntimeError(
                    "toggle_optimizer switches off what the other optimizers hold, which are FP32 masters: the model's "
                    "weights go on making gradients. Leave toggle_optimizer and untoggle_optimizer out, and set "
                    "requires_grad_ of the other networks' parameters yourself."
                )


def _driven(scheduler: Any, optimizers: Sequence[MixedPrecisionOptimizer]) -> list[MixedPrecisionOptimizer]:
    """The optimizers whose learning rates a scheduler writes; all where it does not say."""
    of = getattr(scheduler, "optimizer", None)
    return [one for one in optimizers if of is one or of is one.optimizer] or list(optimizers)


def _skipped(optimizers: Sequence[MixedPrecisionOptimizer]) -> Callable[[], bool]:
    return lambda: any(one.step_was_skipped for one in optimizers)
