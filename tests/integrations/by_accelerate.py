"""Accelerate, as the tests of all trainers drive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fp16opt.integrations.accelerate import Accelerator
from integrations.byhand import Trained, adamw, halving, loss_of, network, scaled

schedule, WAITS = halving, True
FORGOTTEN, ADVICE = {}, 'Write Accelerator(master_weights={"dynamic": True}); or master_weights={"loss_sc'  # type: ignore[var-annotated]


class Loop:
    """A training as Accelerate's documentation writes it; the optimizer is prepared before its model."""

    def __init__(
        self, dtype: torch.dtype, micro: int = 1, scheduled: bool = False, told: Any = None, **options: Any
    ) -> None:
        """``told``: more of the Accelerator's."""
        self.dtype = dtype
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=micro, master_weights=options, **(told or {})
        )
        net = network(dtype)
        optimizer = adamw(net.parameters())
        scheduler = schedule(optimizer) if scheduled else None
        prepared = self.accelerator.prepare(*filter(None, [optimizer, net, scheduler]))
        self.optimizer, self.net = prepared[:2]
        self.scheduler = prepared[2] if scheduled else None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[bool] = []

    def train(self, data: Any, clip: float | None = None, clip_value: float | None = None) -> Any:
        for batch in data:
            with self.accelerator.accumulate(self.net):
                loss = loss_of(self.net, batch, self.dtype)
                self.losses.append(loss.item())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and clip is not None:
                    norm = float(self.accelerator.clip_grad_norm_(self.net.parameters(), clip))
                if self.accelerator.sync_gradients and clip_value is not None:
                    self.accelerator.clip_grad_value_(self.net.parameters(), clip_value)
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.skipped.append(self.accelerator.optimizer_step_was_skipped)
                    if clip is not None and not self.skipped[-1]:
                        self.norms.append(norm)
                if self.scheduler is not None:
                    self.scheduler.step()
                self.optimizer.zero_grad()
        return self


def train(
    dtype: torch.dtype,
    data: Any,
    folder: Path | None = None,
    micro: int = 1,
    clip: float | None = None,
    clip_value: float | None = None,
    **options: Any,
) -> Trained:
    return trained(Loop(dtype, micro, True, **options).train(data, clip, clip_value))


def trained(loop: Loop) -> Trained:
    return Trained(loop.losses, loop.net, loop.optimizer.optimizer, loop, loop.norms or None, loop.skipped)


def in_halves(dtype: torch.dtype, data: Any, folder: Path, **told: Any) -> tuple[Trained, Trained]:
    """Twice over ``data``: (in one go, the second half of a training that was saved in the middle)."""

    def loop() -> Loop:
        return Loop(dtype, 2, True, **scaled(dtype, **told))

    whole, half, rest = loop().train(data * 2, 0.5), loop().train(data, 0.5), loop()
    half.accelerator.save_state(folder / "half")
    rest.accelerator.load_state(folder / "half")
    return trained(whole), trained(rest.train(data, 0.5))
