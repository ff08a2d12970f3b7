"""fp16opt.optim by class path in programs as they are: Hydra, Lightning's CLI, transformers' Trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp16opt.optim
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer
from integrations.byhand import BF16, HALF, STEPS, batches, loss_of, network

TOLD = {"lr": 2.0**-6, "weight_decay": 0.125, "betas": (0.8, 0.95)}


def by_wrapper(clip: float | None, params: Callable[[nn.Module], Any] = nn.Module.parameters) -> nn.Module:
    """The BF16 model after a plain loop with ``MixedPrecisionOptimizer(torch.optim.AdamW(params(model)))``."""
    net = network(BF16)
    return looped(net, MixedPrecisionOptimizer(torch.optim.AdamW(params(net), **TOLD)), clip)


def looped(net: nn.Module, opt: Any, clip: float | None) -> nn.Module:
    for batch in batches(STEPS):
        opt.zero_grad()
        loss_of(net, batch, BF16).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
    return net


def assert_trained_alike(net: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "in-a-config-file.md"
needs_page = pytest.mark.skipif(not PAGE.exists(), reason="run from an installed package, without the repository")


def files_of_the_page() -> list[str]:
    """Its YAML blocks: for Hydra, for Lightning's CLI with BF16, and with FP16."""
    return re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


# -- Hydra -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["parameters", "partial"])
def test_hydras_target(way: str) -> None:
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    text = """
        _target_: fp16opt.optim.AdamW
        lr: 0.015625
        weight_decay: 0.125
        betas: [0.8, 0.95]
        """
    config = OmegaConf.create(text)
    net = network(BF16)
    if way == "partial":
        opt = hydra.utils.instantiate(config, _partial_=True)(net.parameters())
    else:
        opt = hydra.utils.instantiate(config, params=net.parameters())
    assert type(opt) is fp16opt.optim.AdamW
    assert opt.param_groups[0]["betas"] == (0.8, 0.95)
    assert type(opt.param_groups[0]["betas"]) is tuple
    assert_trained_alike(looped(net, opt, 0.5), by_wrapper(0.5))


@needs_page
def test_hydras_file_of_the_page() -> None:
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    net = network(BF16)
    opt = hydra.utils.instantiate(OmegaConf.create(files_of_the_page()[0]), params=net.parameters())
    assert type(opt) is fp16opt.optim.AdamW
    assert (opt.param_groups[0]["betas"], opt.master_weights) == ((0.9, 0.95), "split")


def test_hydra_makes_the_loss_scaler_too() -> None:
    hydra = pytest.importorskip("hydra")
    config = {
        "_target_": "fp16opt.optim.SGD",
        "lr": 0.5,
        "master_weights": "split",
        "scaler": {"_target_": "fp16opt.DynamicLossScaler", "init_scale": 1024.0, "growth_interval": 5},
    }
    net = network(HALF)
    opt = hydra.utils.instantiate(config, params=net.parameters())
    assert isinstance(opt.scaler, DynamicLossScaler)
    assert opt.loss_scale == 1024.0
    opt.backward(loss_of(net, batches(1)[0], HALF))
    opt.step()
    assert not opt.step_was_skipped


# -- Lightning's CLI ---------------------------------------------------------------------------------------------------


def lightning_cli(folder: Path, module: Any, *arguments: str) -> Any:
    """``python train.py fit ARGUMENTS`` of a script whose last line is ``LightningCLI(module)``."""
    from lightning.pytorch.cli import LightningCLI

    told = ["logger=false", "enable_checkpointing=false", "enable_progress_bar=false", "enable_model_summary=false"]
    told += ["accelerator=cpu", "devices=1", "max_epochs=1", f"default_root_dir={folder}"]
    given = ["fit", *(f"--trainer.{one}" for one in told), *arguments]
    return LightningCLI(module, args=given, save_config_callback=None, seed_everything_default=0)


def modules() -> tuple[Any, Any]:
    """One whose optimizer the CLI makes for it, and one that is handed what makes it."""
    from lightning.pytorch.cli import OptimizerCallable

    from integrations.by_lightning import Module

    class Plain(Module):
        def __init__(self) -> None:
            super().__init__()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(batches(STEPS), batch_size=None)  # type: ignore[arg-type]

    class Handed(Plain):
        def __init__(self, optimizer: Any) -> None:
            super().__init__()
            self.make = optimizer

    Handed.__init__.__annotations__["optimizer"] = OptimizerCallable  # the CLI can't see a name of this function
    return Plain, Handed


SETTINGS = ("lr=0.015625", "weight_decay=0.125", "betas=[0.8, 0.95]")


@pytest.mark.parametrize("way", ["--optimizer", "--model.optimizer", "a file"])
def test_lightnings_class_path(way: str, tmp_path: Path) -> None:
    """The CLI makes ``--optimizer`` before the Trainer converts the model to bf16-true; the others are made after."""
    pytest.importorskip("lightning")
    pytest.importorskip("jsonargparse")
    module = modules()[way == "--model.optimizer"]
    if way == "a file":
        config = tmp_path / "config.yaml"
        config.write_text(
            "optimizer:\n  class_path: fp16opt.optim.AdamW\n  init_args:\n    lr: 0.015625\n    weight_decay: 0.125\n"
            "    betas: [0.8, 0.95]\n    master_weights: full\n    named_parameters: null\n"
        )
        arguments = ["--config", str(config)]
    else:
        arguments = [f"{way}=fp16opt.optim.AdamW", *(f"{way}.{one}" for one in SETTINGS)]
    cli = lightning_cli(tmp_path, module, "--trainer.precision=bf16-true", *arguments)
    opt = cli.trainer.optimizers[0]
    assert type(opt) is fp16opt.optim.AdamW
    assert "parameters: 6 bfloat16 with FP32 masters" in repr(opt)
    assert opt.steps_counted() == STEPS
    assert_trained_alike(cli.model.net, by_wrapper(None))


@needs_page
@pytest.mark.parametrize("which", [1, 2], ids=["bf16", "fp16"])
def test_lightnings_files_of_the_page(which: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("jsonargparse")
    (tmp_path / "config.yaml").write_text(files_of_the_page()[which])
    cli = lightning_cli(tmp_path, modules()[0], "--config", str(tmp_path / "config.yaml"))
    opt = cli.trainer.optimizers[0]
    assert isinstance(opt, MixedPrecisionOptimizer)
    assert f"parameters: 6 {('bfloat16', 'float16')[which - 1]} with FP32 masters" in repr(opt)
    assert opt.scaler.dynamic is (which == 2)
    assert opt.steps_counted() == STEPS - opt.skipped_steps > 0


def test_lightnings_class_path_with_a_scaler_of_its_own_and_the_plugin(tmp_path: Path) -> None:
    """FP16: the plugin scales; what the config says of the scaler is the optimizer's."""
    pytest.importorskip("lightning")
    pytest.importorskip("jsonargparse")
    of = "--model.optimizer"
    cli = lightning_cli(
        tmp_path,
        modules()[1],
        "--trainer.plugins=fp16opt.integrations.lightning.MasterWeightsPrecision",
        "--trainer.plugins.precision=16-true",
        "--trainer.gradient_clip_val=0.5",
        f"{of}=fp16opt.optim.AdamW",
        f"{of}.lr=0.015625",
        f"{of}.master_weights=split",
        f"{of}.scaler=fp16opt.DynamicLossScaler",
        f"{of}.scaler.init_scale=4194304",
    )
    opt = cli.trainer.optimizers[0]
    assert type(opt) is fp16opt.optim.AdamW
    assert "split masters" in repr(opt)
    assert 2 <= opt.skipped_steps < STEPS / 2
    assert opt.loss_scale == 2.0**22 / 2**opt.skipped_steps


# -- the Trainer -------------------------------------------------------------------------------------------------------


def trained_by(stock: bool, dtype: torch.dtype, folder: Path, options: dict[str, Any], **told: Any) -> Any:
    """(the model, its optimizer) after the stock Trainer, or after ours"""
    by = pytest.importorskip("integrations.by_transformers", exc_type=ImportError)
    model = by.Regressor(dtype)
    args = by.arguments(folder, gradient_accumulation_steps=1, lr_scheduler_type="constant", **told)
    given = {"train_dataset": by.rows(batches(STEPS)), "optimizer_cls_and_kwargs": (fp16opt.optim.AdamW, options)}
    trainer = (by.OrderedStock if stock else by.Ordered)(model, args, **given)
    trainer.train()
    opt = trainer.optimizer.optimizer
    assert type(opt) is fp16opt.optim.AdamW
    assert opt.steps_counted() == STEPS - opt.skipped_steps
    return model, opt


@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clip", "clip"])
def test_the_trainers_class_and_arguments(clip: float | None, tmp_path: Path) -> None:
    """The stock Trainer, which clips the model's own gradients."""
    options = {**TOLD, "on_model_write": "error"}
    model, opt = trained_by(True, BF16, tmp_path, options, max_grad_norm=clip or 0.0, weight_decay=0.125)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.125, 0.0]

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        parts = {decays: [] for decays in (True, False)}  # type: ignore[var-annotated]
        for name, param in net.named_parameters():
            parts[name in ("0.weight", "3.weight")].append(param)
        return [{"params": parts[True]}, {"params": parts[False], "weight_decay": 0.0}]

    assert_trained_alike(model.net, by_wrapper(clip, groups))


def test_a_scale_in_the_stock_trainer_raises_and_ours_serves_it(tmp_path: Path) -> None:
    options = {"lr": 2.0**-6, "dynamic": True}
    with pytest.raises(RuntimeError, match=r"trainers that call it themselves have a module in fp16opt\.integrations"):
        trained_by(True, HALF, tmp_path, options)
    assert trained_by(False, HALF, tmp_path, options)[1].scaler.dynamic
