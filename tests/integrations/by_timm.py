"""timm's train_one_epoch in outline, as the tests of all trainers drive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fp16opt.integrations.timm import MasterScaler, with_masters
from integrations.byhand import Trained, adamw, halving, loss_of, network, scaled

schedule, WAITS = halving, False
FORGOTTEN, ADVICE = {"dynamic": False}, "Write with_masters(optimizer, model, dynamic=True); or loss_scale=1.0 to say"


class Loop:
    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        self.dtype = dtype
        self.net = network(dtype)
        bare = adamw(self.net.parameters())
        self.scheduler = schedule(bare)
        self.optimizer, self.loss_scaler = with_masters(bare, self.net, **options)
        self.losses: list[float] = []

    def train(self, data: Any, micro: int = 1, clip: float | None = None, clip_value: float | None = None) -> Trained:
        how = {"clip_grad": clip_value or clip, "clip_mode": "value" if clip_value else "norm"}
        for number, batch in enumerate(data, 1):
            loss = loss_of(self.net, batch, self.dtype)
            self.losses.append(loss.item())
            last = number % micro == 0
            self.loss_scaler(loss / micro, self.optimizer, parameters=self.net.parameters(), need_update=last, **how)
            if last:
                self.optimizer.zero_grad()
                self.scheduler.step()
        return Trained(self.losses, self.net, self.optimizer, self)


def train(
    dtype: torch.dtype,
    data: Any,
    folder: Path | None = None,
    micro: int = 1,
    clip: float | None = None,
    clip_value: float | None = None,
    **options: Any,
) -> Trained:
    return Loop(dtype, **options).train(data, micro, clip, clip_value)


def in_halves(dtype: torch.dtype, data: Any, folder: Path, **told: Any) -> tuple[Trained, Trained]:
    """Twice over ``data``, from a file as timm's CheckpointSaver writes it; the scale is in it twice."""

    def loop() -> Loop:
        return Loop(dtype, **scaled(dtype, **told))

    whole, half = loop().train(data * 2, 2, 0.5), loop()
    half.train(data, 2, 0.5)
    parts = {"state_dict": "net", "optimizer": "optimizer", MasterScaler.state_dict_key: "loss_scaler"}
    parts["scheduler"] = "scheduler"
    torch.save({key: getattr(half, name).state_dict() for key, name in parts.items()}, folder / "half.pt")
    rest, loaded = loop(), torch.load(folder / "half.pt", weights_only=True)
    for key, name in parts.items():
        getattr(rest, name).load_state_dict(loaded[key])
    return whole, rest.train(data, 2, 0.5)
