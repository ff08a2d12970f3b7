"""For transformers: a Trainer that trains 16-bit weights with FP32 masters, and the same as a mixin for TRL's."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import save_fsdp_model
from torch import Tensor, nn

from ..engine.missing_scale import WayToScale
from ..engine.parts import inside
from ..optimizer import MixedPrecisionOptimizer
from .accelerate import SCALE_THEMSELVES, Accelerator, check_options, convert, masters_in
from .optimizer_group import scaled_by_dtype

_SCHEDULER = "scheduler.pt"  # the Trainer's name


class TrainerAccelerator(Accelerator):
    """A Trainer's accelerator. What it prepares tells how: who made the optimizer does not matter.

    The scale is dynamic where there are FP16 parameters, unless options say otherwise. FP32 models are left to the
    Trainer's own mixed precision.
    """

    way_to_scale = WayToScale(
        'Trainer(..., master_weights={"dynamic": True}), or leave "dynamic" out, which does the same',
        'master_weights={"loss_scale": 1.0}',
        "self.accelerator.backward(loss)",
    )

    def begin(self, master_weights: dict[str, Any] | None) -> None:
        """Take the options. Whether the Trainer's own scaler is in the way is known when there is a model.

        Raises:
            ValueError: DeepSpeed, or Megatron-LM.
        """
        super().begin(None)
        self.master_weights = master_weights
        if self.distributed_type in SCALE_THEMSELVES:
            raise ValueError(
                f"{self.distributed_type.value} keeps masters and a loss scale of its own. Use transformers.Trainer "
                "with it; or leave TrainingArguments(deepspeed=...), or what Accelerate's config says of it, out."
            )

    def options_for(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """See :class:`TrainerAccelerator`.

        Raises:
            ValueError: The Trainer would scale, too.
        """
        if self.scales_by_itself():
            raise ValueError(
                "fp16=True, in TrainingArguments or as mixed_precision in Accelerate's config or environment: the "
                "Trainer would scale the loss a second time. Leave it out: 16-bit weights need no autocast."
            )
        return scaled_by_dtype(self.master_weights or {}, params)


class MasterWeightsMixin:
    """FP32 masters and loss scaling for ``transformers.Trainer`` and what is derived from it.

    The Trainer's optimizer is wrapped in ``fp16opt.MixedPrecisionOptimizer`` where the Trainer prepares it, with the
    model's parameter names. The loss is scaled, true gradients are clipped and their norm is logged, skipped steps keep
    the scheduler where it is, checkpoints have masters and scale. ``loss_scale`` and ``skipped_steps`` are logged.

    Args:
        master_weights: Options of ``MixedPrecisionOptimizer``. Where the model has FP16 parameters the scale is
            dynamic, unless ``dynamic``, ``loss_scale`` or ``scaler`` is among them.
        *args, **kwargs: The Trainer's own. ``TrainingArguments(fp16=True)`` scales by itself: for a model in 16 bits,
            which needs neither it nor ``bf16=True``, it is refused.

    Raises:
        TypeError: ``master_weights`` is no dict; a class names the mixin behind its Trainer.
        ValueError: ``gradient_release=True`` unless ``max_grad_norm`` is 0; DeepSpeed or Megatron-LM, which keep
            masters of their own; and as ``MixedPrecisionOptimizer`` raises it when the training begins.

    Example:
        >>> from trl import SFTTrainer                                    # doctest: +SKIP
        >>> class Tuning(MasterWeightsMixin, SFTTrainer): ...             # doctest: +SKIP
    """

    accelerator: Any
    args: Any

    def __init__(self, *args: Any, master_weights: dict[str, Any] | None = None, **kwargs: Any) -> None:
        check_options(master_weights)
        self.master_weights = master_weights
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The mixin stands before the Trainer, else the Trainer's methods are found first and there are no masters.

        Raises:
            TypeError: It stands behind.
        """
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if transformers.Trainer in order and order.index(transformers.Trainer) < order.index(MasterWeightsMixin):
            first = next(base for base in cls.__bases__ if issubclass(base, transformers.Trainer)).__name__
            raise TypeError(
                f"{cls.__name__}: MasterWeightsMixin stands behind {first}, and would change nothing. Write class "
                f"{cls.__name__}(MasterWeightsMixin, {first})."
            )

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; then its accelerator is one that has masters."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        given = self.master_weights or {}
        if given.get("gradient_release") is True and self.args.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm={self.args.max_grad_norm}: with gradient_release=True parameters are stepped before "
                "the norm is known. Use TrainingArguments(max_grad_norm=0), or gradient_release=False."
            )
        self.accelerator = convert(self.accelerator, given, TrainerAccelerator)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The Trainer's, for its log; None where gradients were released before there was a norm."""
        optimizer = inside(getattr(self, "optimizer", None))
        if isinstance(optimizer, MixedPrecisionOptimizer) and optimizer.gradient_release is True:
            return None
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    # -- checkpoints under FSDP2 -------------------------------------------------------------------------------------

    def _sharded(self) -> MixedPrecisionOptimizer | None:
        """The optimizer, if its masters are spread over ranks. Torch's calls for such state have no place for them."""
        optimizer = inside(getattr(self, "optimizer", None))
        return optimizer if isinstance(optimizer, MixedPrecisionOptimizer) and optimizer.params.has_dtensors else None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The Trainer's; under FSDP2 masters, state and scale go into a folder of their own in the checkpoint's."""
        optimizer = self._sharded()
        if optimizer is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        from ..distributed import save

        accelerator: Accelerator = self.accelerator
        model: nn.Module = self.model  # type: ignore[attr-defined]
        save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, output_dir, adapter_only=True)
        where = masters_in(output_dir, 0)
        if accelerator.is_main_process and where.exists():  # the Trainer writes checkpoints over older ones
            shutil.rmtree(where)
        accelerator.wait_for_everyone()
        save(where, model, optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The Trainer's; under FSDP2 what was saved there, on any number of ranks.

        Raises:
            FileNotFoundError: Under FSDP2: the checkpoint has no masters.
        """
        optimizer = self._sharded()
        if optimizer is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        from ..distributed import load

        where = masters_in(checkpoint, 0)
        if not where.exists():
            raise FileNotFoundError(
                f"{checkpoint}: expected a folder {where.name!r} with masters, state and scale, and there is none: the "
                "checkpoint is not complete, or was saved without masters. Resume from another one."
            )
        load(where, self.model, optimizer)  # type: ignore[attr-defined]
        state = torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(state)  # type: ignore[attr-defined]

    # -- the log -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's, with ``loss_scale`` and ``skipped_steps`` beside the loss. Syncs with the device."""
        optimizer = inside(getattr(self, "optimizer", None))
        if "loss" in logs and isinstance(optimizer, MixedPrecisionOptimizer):
            logs = {**logs, "loss_scale": optimizer.loss_scale, "skipped_steps": float(optimizer.skipped_steps)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class Trainer(MasterWeightsMixin, transformers.Trainer):
    """``transformers.Trainer`` with FP32 masters and loss scaling; see :class:`MasterWeightsMixin`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
        >>> config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)
        >>> model = transformers.GPT2LMHeadModel(config).half()
        >>> data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
        >>> told = {"max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        >>> args = transformers.TrainingArguments(tempfile.mkdtemp(), logging_strategy="no", **told)
        >>> trainer = Trainer(model, args, train_dataset=data)
        >>> trainer.remove_callback(transformers.PrinterCallback)
        >>> trainer.train().global_step, trainer.optimizer.optimizer.loss_scale
        (2, 65536.0)
    """
