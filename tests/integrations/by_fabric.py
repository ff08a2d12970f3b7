"""Lightning's Fabric, as the tests of all trainers drive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch

from fp16opt.integrations.lightning import FabricMasterWeightsPrecision
from integrations.by_lightning import PRECISIONS
from integrations.byhand import Trained, adamw, halving, loss_of, network

schedule, WAITS = halving, False
FORGOTTEN, ADVICE = {"dynamic": False}, 'Write FabricMasterWeightsPrecision("16-true", dynamic=True); or loss_scale'


def train(
    dtype: torch.dtype,
    data: Any,
    folder: Path | None = None,
    micro: int = 1,
    clip: float | None = None,
    clip_value: float | None = None,
    wrap_late: bool = False,
    **options: Any,
) -> Trained:
    """Of micro-batches whose losses are divided here. ``made``: the fabric, and the optimizer that is stepped."""
    plugin = FabricMasterWeightsPrecision(PRECISIONS[dtype], **options)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    net = network()
    bare = adamw(net.parameters())
    scheduler = schedule(bare)
    if wrap_late:
        model, optimizer = fabric.setup(net, bare)
        inner = optimizer = plugin.wrap(optimizer, model=model)
    else:
        model = fabric.setup_module(net)
        inner = plugin.wrap(bare, model=model)
        optimizer = fabric.setup_optimizers(inner)
    losses = []
    for start in range(0, len(data), micro):
        optimizer.zero_grad()
        for batch in data[start : start + micro]:
            loss = loss_of(model, batch, dtype)
            losses.append(loss.item())
            fabric.backward(loss / micro)
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
        if clip_value:
            fabric.clip_gradients(model, optimizer, clip_val=clip_value)
        optimizer.step()
        scheduler.step()
    return Trained(losses, net, inner, (fabric, optimizer))
