"""The wrapper in trainers as they are, without fp16opt.integrations: right, or it raises, and never wrong in silence.

Each test is a row of a table that was made before the engine was rebuilt, where seven such uses gave a wrong curve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from contract import reference
from torch import Tensor

pytest.importorskip("lightning")

import lightning

from fp16opt import MixedPrecisionOptimizer
from integrations.by_lightning import Module, fit
from integrations.byhand import (
    BF16,
    HALF,
    STEPS,
    adamw,
    assert_same_run,
    batches,
    by_hand,
    loss_of,
    network,
    scaled,
)

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")
SCALES_NOT = r"trainers that call it themselves have a module in fp16opt\.integrations"


def dynamic() -> dict[str, Any]:
    return scaled(HALF, fused_step=False)


# -- Lightning ---------------------------------------------------------------------------------------------------------


def by_lightning(
    kind: type[Module], options: dict[str, Any], precision: str, folder: Path, data: Any, **told: Any
) -> Any:
    """(a module that wraps its optimizer itself, after a training without a plugin; that optimizer)"""
    made: list[Any] = []

    def make(params: Any) -> Any:
        made.append(MixedPrecisionOptimizer(adamw(params), **options))
        return made[0]

    module = kind()
    module.make = make
    fit(module, None, folder, data, precision=precision, **told)
    return module, made[0]


class Hooked(Module):
    """What the error message of a plain backward proposed: the optimizer's own backward, in Lightning's hook."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.optimizers().optimizer.backward(loss)


class ByItself(Module):
    """In manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt = self.optimizers().optimizer
        opt.zero_grad()
        opt.backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def test_lightning_bf16_true(tmp_path: Path) -> None:
    data = batches(2 * STEPS)
    told = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    module, _ = by_lightning(Module, {"fused_step": False}, "bf16-true", tmp_path, data, **told)
    hand = by_hand(BF16, data, micro=2, clip=0.5)
    # Lightning's clip takes torch's norm, which is added up in FP32: the factor may be a rounding off, and a weight of
    # BF16 by 2**-8 of itself with it.
    assert module.losses == pytest.approx(hand.losses, rel=2.0**-7)


def test_lightning_16_true_with_a_scale_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=SCALES_NOT):
        by_lightning(Module, dynamic(), "16-true", tmp_path, batches(2))


@pytest.mark.parametrize("micro", [1, 2])
def test_lightning_16_true_with_a_backward_hook(micro: int, tmp_path: Path) -> None:
    """It ran training_step again at each overflow, or fell to the lowest scale."""
    data = batches(micro * STEPS)
    told = {"accumulate_grad_batches": micro, "gradient_clip_val": 1e9}
    module, opt = by_lightning(Hooked, dynamic(), "16-true", tmp_path, data, **told)
    hand = by_hand(HALF, data, micro=micro)
    assert_same_run(module.losses, module, opt, hand)
    assert sum(hand.skipped) > 1


def test_lightning_manual_optimization(tmp_path: Path) -> None:
    data = batches(STEPS)
    module, opt = by_lightning(ByItself, dynamic(), "16-true", tmp_path, data)
    assert_same_run(module.losses, module, opt, by_hand(HALF, data))


def test_fabric_with_scale_loss_and_clip_gradients() -> None:
    """Masters had no gradients yet when they were clipped."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="16-true")
    model = fabric.setup_module(network())
    opt = MixedPrecisionOptimizer(adamw(model.parameters()), loss_scale=256.0, fused_step=False)
    optimizer = fabric.setup_optimizers(opt)
    data, losses = batches(STEPS), []
    for batch in data:
        loss = loss_of(model, batch, HALF)
        losses.append(loss.item())
        fabric.backward(opt.scale_loss(loss))
        fabric.clip_gradients(model, optimizer, clip_val=0.125)
        optimizer.step()
        optimizer.zero_grad()
    hand = by_hand(HALF, data, scale=reference.Scale(256.0), clip_value=0.125)
    assert_same_run(losses, model, opt, hand)
