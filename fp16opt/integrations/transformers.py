"""For transformers: a Trainer that trains 16-bit weights with FP32 masters, and the same as a mixin for TRL's."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from torch.optim import Optimizer

from ..engine.parts import inside
from ..optimizer import MixedPrecisionOptimizer
from .accelerate import check_options, convert
from .optimizer_group import scaled_by_dtype


class MasterWeightsMixin:
    """FP32 masters and loss scaling for ``transformers.Trainer`` and what is derived from it.

    The Trainer's optimizer is wrapped in ``fp16opt.MixedPrecisionOptimizer`` where the Trainer prepares it, with the
    model's parameter names. The loss is scaled, true gradients are clipped and their norm is logged, skipped steps keep
    the scheduler where it is, checkpoints have masters and scale. ``loss_scale`` and ``skipped_steps`` are logged.

    Args:
        master_weights: Options of ``MixedPrecisionOptimizer``. Where the model has FP16 parameters the scale is
            dynamic, unless ``dynamic``, ``loss_scale`` or ``scaler`` is among them.
        *args, **kwargs: The Trainer's own. ``TrainingArguments(fp16=True)`` scales by itself and is refused; a model in
            16 bits needs neither it nor ``bf16=True``.

    Raises:
        TypeError, ValueError: As ``fp16opt.integrations.accelerate.Accelerator`` raises them; and for
            ``gradient_release=True`` unless ``max_grad_norm`` is 0.

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

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; then its accelerator is one that has masters."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = convert(self.accelerator, self.master_weights or {})

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The Trainer's. It is wrapped where the Trainer prepares it."""
        made: Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        of = getattr(self, "model", None) if model is None else model
        given = scaled_by_dtype(self.master_weights or {}, () if of is None else of.parameters())
        if given.get("gradient_release") is True and self.args.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm={self.args.max_grad_norm}: with gradient_release=True parameters are stepped before "
                "the norm is known. Use TrainingArguments(max_grad_norm=0), or gradient_release=False."
            )
        self.accelerator.master_weights = given
        return made

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The Trainer's, for its log; None where gradients were released before there was a norm."""
        optimizer = inside(getattr(self, "optimizer", None))
        if isinstance(optimizer, MixedPrecisionOptimizer) and optimizer.gradient_release is True:
            return None
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

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
