"""Lightning's Trainer, as the tests of all trainers drive it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from fp16opt import MixedPrecisionOptimizer
from fp16opt.integrations.lightning import MasterWeightsPrecision
from integrations.byhand import LIGHTNING, STEPS, Trained, adamw, halving, loss_of, network, scaled

PRECISIONS = {torch.float16: "16-true", torch.bfloat16: "bf16-true"}
schedule, WAITS = halving, False
FORGOTTEN, ADVICE = {"dynamic": False}, 'Write MasterWeightsPrecision("16-true", dynamic=True); or loss_scale'


class Module(lightning.LightningModule):
    """Counts its steps, and notes every loss."""

    def __init__(
        self,
        make: Callable[..., Any] = adamw,
        schedule: Callable[[Any], Any] | None = None,
        interval: str = "step",
    ) -> None:
        super().__init__()
        self.net = network()
        self.make, self.schedule, self.interval = make, schedule, interval
        self.losses: list[float] = []
        self.evaluated = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.evaluated += 1
        loss = loss_of(self.net, batch, next(self.net.parameters()).dtype)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        if self.schedule is None:
            return optimizer
        config = {"scheduler": self.schedule(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Manual(Module):
    """Two micro-batches a step, a clip, by hand."""

    def __init__(self, how: str = "norm") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt = self.optimizers()
        if batch_idx % 2 == 0:
            opt.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm=self.how)
            opt.step()


def fit(
    module: Any, plugin: Any, folder: Path, data: Any, ckpt: Path | None = None, steps: int = STEPS, **options: Any
) -> lightning.Trainer:
    told = {**LIGHTNING, "max_steps": steps, "max_epochs": -1, "default_root_dir": folder, **options}
    made = lightning.Trainer(plugins=plugin, **told)
    made.fit(module, torch.utils.data.DataLoader(data, batch_size=None), **resuming(made, ckpt))
    return made


def resuming(made: lightning.Trainer, ckpt: Path | None) -> dict[str, Any]:
    """Arguments of ``fit`` that read a checkpoint as torch.load(weights_only=True) does; Lightning 2.4 asks nothing."""
    asks = "weights_only" in inspect.signature(made.fit).parameters
    return {"ckpt_path": ckpt, **({"weights_only": True} if asks and ckpt else {})}


def optimizer_of(made: lightning.Trainer) -> MixedPrecisionOptimizer:
    (optimizer,) = made.optimizers
    assert isinstance(optimizer, MixedPrecisionOptimizer)
    return optimizer


def train(
    dtype: torch.dtype,
    data: Any,
    folder: Path,
    micro: int = 1,
    clip: float | None = None,
    clip_value: float | None = None,
    told: Any = None,
    **options: Any,
) -> Trained:
    """``told``: more of ``fit``'s."""
    module = Module(schedule=schedule)
    how = {"gradient_clip_val": clip_value or clip, "gradient_clip_algorithm": "value" if clip_value else "norm"}
    plugin = MasterWeightsPrecision(PRECISIONS[dtype], **options)
    made = fit(module, plugin, folder, data, accumulate_grad_batches=micro, **how, **(told or {}))
    return Trained(module.losses, module, optimizer_of(made), made)


def in_halves(dtype: torch.dtype, data: Any, folder: Path, **told: Any) -> tuple[Trained, Trained]:
    """Twice over ``data``: (in one go, the second half of a training that was saved in the middle)."""

    def run(epochs: int, ckpt: Path | None = None) -> Trained:
        fits = {"max_epochs": epochs, "steps": -1, "ckpt": ckpt}
        return train(dtype, data, folder, 2, 0.5, told=fits, **scaled(dtype, **told))

    whole = run(2)
    run(1).made.save_checkpoint(folder / "half.ckpt")
    return whole, run(2, folder / "half.ckpt")
