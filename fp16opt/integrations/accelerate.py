"""For Accelerate: an Accelerator that trains 16-bit weights with FP32 masters; our GradScaler for Accelerate's own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..engine import errors
from ..engine.missing_scale import WayToScale
from ..grad_scaler import GradScaler
from ..optimizer import MixedPrecisionOptimizer
from .optimizer_group import OptimizerGroup, has_fp16, has_halves, named_parameters, params_of

_logger = logging.getLogger("fp16opt")

SCALE_THEMSELVES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class MasterWeightsOptimizer(AcceleratedOptimizer):
    """Accelerate's own wrapping of an optimizer, which knows of the skips of a ``MixedPrecisionOptimizer`` inside."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. May sync with the device."""
        if isinstance(self.optimizer, MixedPrecisionOptimizer):
            return self.optimizer.step_was_skipped
        return bool(super().step_was_skipped)


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` with one more argument: ``prepare`` wraps optimizers of 16-bit models.

    Args:
        master_weights: Options of ``fp16opt.MixedPrecisionOptimizer``: ``{"dynamic": True}`` for FP16, ``{}`` for a
            static scale of 1. None: Accelerate as it is. If one of the models has 16-bit parameters, also
            frozen ones under FP32 adapters, all optimizers are wrapped; several share one scaler, which follows once
            all have stepped.
        *args, **kwargs: Accelerate's own. ``mixed_precision="fp16"`` has a scaler of its own and is refused.

    ``backward`` scales, ``clip_grad_norm_`` and ``clip_grad_value_`` clip true gradients, of some parameters too;
    ``optimizer_step_was_skipped`` tells, prepared schedulers wait for skips, ``save_state`` and ``load_state`` have
    masters and scale.

    Raises:
        ValueError: ``master_weights`` with a scaler of Accelerate's, or with DeepSpeed or Megatron-LM, which keep
            masters of their own.
        TypeError: ``master_weights`` is no dict.

    Example:
        >>> import torch
        >>> accelerator = Accelerator(cpu=True, master_weights={"dynamic": True})
        >>> model = torch.nn.Linear(2, 1).half()
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.backward(model(torch.ones(1, 2, dtype=torch.float16)).float().sum() * 0.25)
        >>> optimizer.step()
        >>> accelerator.optimizer_step_was_skipped, [str(p.dtype) for p in optimizer.param_groups[0]["params"]]
        (False, ['torch.float32', 'torch.float32'])
    """

    way_to_scale = WayToScale(
        'Accelerator(master_weights={"dynamic": True})',
        'master_weights={"loss_scale": 1.0}',
        "accelerator.backward(loss)",
    )

    def __init__(self, *args: Any, master_weights: dict[str, Any] | None = None, **kwargs: Any) -> None:
        check_options(master_weights)
        super().__init__(*args, **kwargs)
        self.begin(master_weights)

    def begin(self, master_weights: dict[str, Any] | None) -> None:
        """Take the options of optimizers that will be prepared.

        Raises:
            ValueError: See the class.
        """
        self.master_weights = master_weights
        self._optimizer_group: OptimizerGroup | None = None
        self._is_preparing = False
        if master_weights is None:
            return
        if self.scales_by_itself():
            raise ValueError(
                'master_weights with mixed_precision="fp16", which may come from Accelerate\'s config file or from '
                "ACCELERATE_MIXED_PRECISION, too: Accelerate would scale the loss a second time. Leave "
                "mixed_precision out, and give the model 16-bit weights; or leave master_weights out, and wrap the "
                "optimizer in MixedPrecisionOptimizer(optimizer), which Accelerate's scaler then drives."
            )
        if self.distributed_type in SCALE_THEMSELVES:
            raise ValueError(
                f"master_weights: {self.distributed_type.value} keeps masters of its own. Leave them out, or train "
                "without it."
            )

    def scales_by_itself(self) -> bool:
        """Whether Accelerate has a loss scaler of its own."""
        return self.scaler is not None or self.mixed_precision == "fp16"

    def options_for(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """Options of ``MixedPrecisionOptimizer`` for optimizers of models with these parameters."""
        return dict(self.master_weights or {})

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Accelerate's; then optimizers are wrapped, when their model is on its device and sharded.

        Raises:
            RuntimeError: Optimizers were wrapped in an earlier call, and would not share their scale with these.
            ValueError: Under FSDP2: an optimizer was wrapped before its model is sharded.
            TypeError, ValueError: As ``MixedPrecisionOptimizer`` raises them.
        """
        self._check_not_wrapped_too_early(args)
        if self.master_weights is None:
            result = super().prepare(*args, device_placement=device_placement)
            self._tell_of_plain_steps()
            return result
        self._is_preparing = True
        try:
            result = super().prepare(*args, device_placement=device_placement)
        finally:
            self._is_preparing = False
        self._wrap()
        return result

    def _check_not_wrapped_too_early(self, args: Sequence[Any]) -> None:
        """Under FSDP2 Accelerate puts pieces in the place of the parameters in groups, where it would find masters."""
        if self.distributed_type != DistributedType.FSDP:
            return
        for one in args:
            if isinstance(one, MixedPrecisionOptimizer) and not one.params.has_dtensors:
                name = type(one.optimizer).__name__
                raise ValueError(
                    f"{type(one).__name__} of {name}: it was wrapped before prepare shards the model, and its masters "
                    f"are whole. Make torch's own {name}, and give the options as master_weights."
                )

    def _tell_of_plain_steps(self) -> None:
        """Log once that FP16 weights are stepped themselves, unless something scales the loss."""
        plain = [one.optimizer for one in self._optimizers if not isinstance(one.optimizer, MixedPrecisionOptimizer)]
        if self.scales_by_itself() or not has_fp16(params_of(plain)) or self.distributed_type in SCALE_THEMSELVES:
            return
        if not self.__dict__.get("_told"):
            self._told = True
            _logger.warning(errors.PREPARED_WITHOUT_MASTERS.filled())

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Accelerate's, of a class that knows of skips."""
        if self.master_weights is None:
            prepared = super().prepare_optimizer(optimizer, device_placement)
            if type(prepared) is AcceleratedOptimizer and isinstance(prepared.optimizer, MixedPrecisionOptimizer):
                prepared.__class__ = MasterWeightsOptimizer  # its `step` is called for a skip too
            return prepared
        if isinstance(optimizer, MasterWeightsOptimizer):
            if not any(one is optimizer for one in self._optimizers):  # after free_memory
                self._optimizers.append(optimizer)
            return optimizer
        if device_placement is None:
            device_placement = self.device_placement
        prepared = MasterWeightsOptimizer(optimizer, device_placement=device_placement, scaler=self.scaler)
        self._optimizers.append(prepared)
        if not self._is_preparing:
            self._wrap()
        return prepared

    def _wrap(self) -> None:
        """Wrap what was prepared and is not wrapped yet, if anything that was prepared has 16-bit parameters."""
        inside = [one.optimizer for one in self._optimizers]
        new = [one for one in inside if not isinstance(one, MixedPrecisionOptimizer)]
        known = [] if self._optimizer_group is None else self._optimizer_group.optimizers
        held = [param for model in self._models for param in model.parameters()]  # frozen ones too: see PEFT
        params = [*params_of(new), *held]
        if not (new and (known or has_halves(params))):
            if inside and not new:
                self._join(OptimizerGroup(inside))
            return
        if any(one is other for one in inside for other in known):
            raise RuntimeError(
                "optimizers were prepared before, and one loss scale is to serve all. Prepare all optimizers in one "
                "call of accelerator.prepare; free_memory() ends a training."
            )
        options = self.options_for(params)
        if self.mixed_precision == "bf16" and has_fp16(params):
            _logger.warning(errors.HALVES_UNDER_BF16.filled())
        self._join(OptimizerGroup(inside, named_parameters(*self._models), options, self.way_to_scale))

    def _join(self, group: OptimizerGroup) -> None:
        for prepared, wrapped in zip(self._optimizers, group.optimizers, strict=True):
            if prepared.optimizer is not wrapped:
                prepared.optimizer = wrapped
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                self._attach(group, model)
        self._optimizer_group = group

    def _attach(self, group: OptimizerGroup, model: nn.Module) -> None:
        from ..distributed import attach

        known = {id(param) for param in model.parameters()}
        for one in group.optimizers:
            if all(id(param) in known for param in one.model_params()):
                attach(one, model)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide by the number of micro-batches, scale, and run autograd.

        Raises:
            TypeError, RuntimeError: As ``MixedPrecisionOptimizer.backward`` raises them.
        """
        if self._optimizer_group is None:
            super().backward(loss, **kwargs)
            return
        with self._optimizer_group.backward(loss / self.gradient_accumulation_steps) as scaled:
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the true gradients of ``parameters`` by their norm.

        Returns:
            The norm before: float32, 0-dim.

        Raises:
            RuntimeError: In the middle of an accumulation: what is clipped there would be added to.
            ValueError: A parameter has a gradient and is in no prepared optimizer.
        """
        clipping = self._clipping("clip_grad_norm_")
        if clipping is None:
            before: Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return before
        return clipping.clip_grad_norm(parameters, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip the true gradients of ``parameters`` by value. An overflow stays one, and is skipped.

        Raises:
            RuntimeError, ValueError: As :meth:`clip_grad_norm_`.
        """
        clipping = self._clipping("clip_grad_value_")
        if clipping is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        clipping.clip_grad_value(parameters, float(clip_value))

    def _clipping(self, what: str) -> OptimizerGroup | None:
        """Whose masters are clipped, with true gradients; None: clip as Accelerate does."""
        clipping = self._optimizer_group
        inside = [one.optimizer for one in self._optimizers]
        are_wrapped = bool(inside) and all(isinstance(one, MixedPrecisionOptimizer) for one in inside)
        if clipping is None and self.scaler is not None and are_wrapped:
            clipping = OptimizerGroup(inside)
        if clipping is None:
            return None
        if not self.sync_gradients:
            raise RuntimeError(
                f"{what} was called in the middle of an accumulation. Call it where accelerator.sync_gradients is "
                "True, before optimizer.step()."
            )
        if clipping is not self._optimizer_group:
            self.unscale_gradients()
        return clipping

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's. Under FSDP2, whose calls for sharded state have no place for masters, in folders of their own.

        Raises:
            FileExistsError: Under FSDP2: masters were saved into this folder before.
        """
        if self._optimizer_group is None or self.distributed_type != DistributedType.FSDP:
            return super().save_state(output_dir, *args, **kwargs)
        from ..distributed import save

        if output_dir is not None and masters_in(output_dir, 0).exists():
            raise FileExistsError(
                f"{output_dir}: masters were saved there before. Save every checkpoint under a name of its own."
            )
        with self._without_optimizers() as held:
            where = super().save_state(output_dir, *args, **kwargs)
        for number, one in enumerate(held):
            save(masters_in(where, number), self._models[number], one)
        return where

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Accelerate's, and under FSDP2 what :meth:`save_state` saved, on any number of ranks."""
        if self._optimizer_group is None or self.distributed_type != DistributedType.FSDP:
            super().load_state(input_dir, *args, **kwargs)
            return
        from ..distributed import load

        folders: list[str] = []
        handle = self.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
        try:
            with self._without_optimizers() as held:
                super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        for number, one in enumerate(held):
            load(masters_in(folders[0], number), self._models[number], one)

    @contextlib.contextmanager
    def _without_optimizers(self) -> Iterator[list[Any]]:
        """Accelerate sees none of them inside."""
        held = list(self._optimizers)
        self._optimizers.clear()
        try:
            yield held
        finally:
            self._optimizers.extend(held)

    def free_memory(self, *objects: Any) -> Any:
        """Accelerate's; optimizers that are prepared next begin a training of their own."""
        self._optimizer_group = None
        return super().free_memory(*objects)


def masters_in(folder: str, number: int) -> Path:
    """Where, in a checkpoint under FSDP2, masters, state and scale of an optimizer are."""
    return Path(folder) / f"masters_{number}"


def convert(
    accelerator: accelerate.Accelerator, master_weights: dict[str, Any] | None, kind: type[Accelerator] = Accelerator
) -> Accelerator:
    """Make an accelerator that a trainer has made one of ``kind``. Nothing may be prepared yet.

    transformers makes its own and has no hook for another class.

    Raises:
        TypeError, ValueError: As the constructor raises them.
    """
    check_options(master_weights)
    accelerator.__class__ = kind
    accelerator.begin(master_weights)
    return cast(Accelerator, accelerator)


def check_options(master_weights: object) -> None:
    """Raise ``TypeError`` for anything but a dict or None."""
    if not (master_weights is None or isinstance(master_weights, dict)):
        raise TypeError(
            f"master_weights: expected a dict of MixedPrecisionOptimizer's options, or None, got "
            f"{type(master_weights).__name__}. For its defaults give {{}}."
        )


def use_fp16opt_scaler(accelerator: accelerate.Accelerator, **settings: Any) -> GradScaler:
    """Put ``fp16opt.GradScaler`` in the place of the scaler that Accelerate's own class has for "fp16".

    For models with FP32 weights under autocast, and for 16-bit ones whose optimizers are wrapped in
    ``MixedPrecisionOptimizer(optimizer)``. Call it before ``prepare``. On a CPU, where Accelerate leaves its "fp16"
    off, it is on with this call: models run under autocast, and clips see true gradients. The accelerator becomes an
    :class:`Accelerator`, which clips the masters of wrapped optimizers and tells of their skips.

    Args:
        accelerator: With ``mixed_precision="fp16"``.
        **settings: Of ``fp16opt.GradScaler``.

    Returns:
        The scaler.

    Raises:
        ValueError: Another ``mixed_precision``, or DeepSpeed or Megatron-LM: Accelerate then scales nothing.
        RuntimeError: Optimizers were prepared with the other scaler already.
    """
    if accelerator.mixed_precision != "fp16":
        raise ValueError(
            f'accelerator: expected mixed_precision="fp16", got {accelerator.mixed_precision!r}: Accelerate scales no '
            "loss then. For 16-bit weights use fp16opt.integrations.accelerate.Accelerator."
        )
    if accelerator._optimizers:
        raise RuntimeError(
            "optimizers were prepared already, with the scaler that was there. Call use_fp16opt_scaler before prepare."
        )
    if accelerator.distributed_type in SCALE_THEMSELVES:
        raise ValueError(
            f"accelerator: {accelerator.distributed_type.value} scales by itself, and would not ask this scaler. Leave "
            "use_fp16opt_scaler out."
        )
    scaler = GradScaler(accelerator.device.type, **settings)
    if type(accelerator) is accelerate.Accelerator:
        convert(accelerator, None)
    accelerator.scaler = scaler
    accelerator.native_amp = True  # False on a CPU: then clips would not unscale
    return scaler
