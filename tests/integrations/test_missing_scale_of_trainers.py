"""The warning of FP16 weights without a loss scale names the trainer's own line, not the wrapper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp16opt import MixedPrecisionOptimizer
from integrations.byhand import HALF, LIGHTNING, Regressor, adamw, network, rows

pytestmark = pytest.mark.missing_scale


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.ones(2, 8, dtype=HALF)).float().square().mean()


def by_accelerate(settings: dict[str, Any], _: Path) -> None:
    accelerate = pytest.importorskip("fp16opt.integrations.accelerate", exc_type=ImportError)
    accelerator, net = accelerate.Accelerator(cpu=True, master_weights=settings), network(HALF)
    model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    accelerator.backward(loss_of(model))
    optimizer.step()


def by_fabric(settings: dict[str, Any], _: Path) -> None:
    lightning = pytest.importorskip("fp16opt.integrations.lightning", exc_type=ImportError)
    from lightning.fabric import Fabric

    plugin = lightning.FabricMasterWeightsPrecision("16-true", **settings)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model = fabric.setup_module(network())
    optimizer = plugin.wrap(adamw(model.parameters()), model=model)
    fabric.backward(loss_of(model))
    optimizer.step()


def by_timm(settings: dict[str, Any], _: Path) -> None:
    timm = pytest.importorskip("fp16opt.integrations.timm", exc_type=ImportError)
    net = network(HALF)
    optimizer, scaler = timm.with_masters(adamw(net.parameters()), net, **settings)
    scaler(loss_of(net), optimizer, parameters=net.parameters())
    assert isinstance(optimizer, MixedPrecisionOptimizer)


def by_lightning(settings: dict[str, Any], folder: Path) -> None:
    module = pytest.importorskip("fp16opt.integrations.lightning", exc_type=ImportError)
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return loss_of(self.net)

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    plugin = module.MasterWeightsPrecision("16-true", **settings)
    trainer = lightning.Trainer(**LIGHTNING, max_steps=1, default_root_dir=folder, plugins=plugin)
    trainer.fit(Module(), torch.utils.data.DataLoader([0]))  # type: ignore[arg-type]


def by_transformers(settings: dict[str, Any], folder: Path) -> None:
    module = pytest.importorskip("fp16opt.integrations.transformers", exc_type=ImportError)
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    module.Trainer(Regressor(HALF), arguments, train_dataset=rows(1), master_weights=settings).train()


TRAINERS = {
    "accelerate": (
        by_accelerate,
        {},
        'Write Accelerator(master_weights={"dynamic": True}); or master_weights={"loss_sc',
    ),
    "lightning": (
        by_lightning,
        {"dynamic": False},
        'Write MasterWeightsPrecision("16-true", dynamic=True); or loss_scale',
    ),
    "fabric": (
        by_fabric,
        {"dynamic": False},
        'Write FabricMasterWeightsPrecision("16-true", dynamic=True); or loss_scale',
    ),
    "timm": (
        by_timm,
        {"dynamic": False},
        "Write with_masters(optimizer, model, dynamic=True); or loss_scale=1.0 to say",
    ),
    "transformers": (
        by_transformers,
        {"dynamic": False},
        'Write Trainer(..., master_weights={"dynamic": True}), or leave "',
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_trainer_s_line_is_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, forgotten, words = TRAINERS[name]
    for settings, lines in ((forgotten, 1), ({"loss_scale": 1.0}, 0), ({"dynamic": True}, 0)):
        caplog.clear()
        train(settings, tmp_path)
        heard = [one.message for one in caplog.records if "without loss scaling" in one.message]
        assert len(heard) == lines
        assert all(words in line and " in place of " not in line for line in heard)
