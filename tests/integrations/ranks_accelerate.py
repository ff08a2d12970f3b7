"""Accelerate's DDP and FSDP2 with master_weights, for two_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor

from fp16opt import MixedPrecisionOptimizer
from integrations.by_accelerate import Loop, trained
from integrations.byhand import HALF, Trained, adamw, exported, network, raised, scaled
from integrations.sharding import as_on_accelerators

WAYS = ("DDP", "FSDP2") if hasattr(FullyShardedDataParallelPlugin, "fsdp_version") else ("DDP",)  # from 1.6 on
make, schedule, in_order = adamw, None, list


def loop_of(way: str) -> Loop:
    options = scaled(HALF, fused_step=False)
    if way == "DDP":
        return Loop(HALF, 2, **options)
    as_on_accelerators()
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, cpu_ram_efficient_loading=False
    )
    return Loop(HALF, 2, told={"fsdp_plugin": sharding}, **options)


def whole(way: str, folder: Path, data: Any) -> Trained:
    """Saved in the middle."""
    loop = loop_of(way).train(data, clip=0.5)
    loop.accelerator.save_state(str(folder / way))
    loop.accelerator.wait_for_everyone()
    return trained(loop.train(data, clip=0.5))


def resumed(way: str, folder: Path, data: Any) -> Trained:
    loop = loop_of(way)
    loop.accelerator.load_state(str(folder / way))
    beginning = exported(loop.net, loop.optimizer)
    made = trained(loop.train(data, clip=0.5))
    made.made = beginning
    return made


def more(folder: Path, data: Any, half: list[Tensor]) -> None:
    if "FSDP2" not in WAYS:
        return
    accelerator, net = loop_of("FSDP2").accelerator, network(HALF)
    state = str(folder / "FSDP2")
    raised(FileExistsError, "masters were saved there before", lambda: accelerator.save_state(state))
    raised(
        ValueError,
        "it was wrapped before prepare shards the model, and its masters are whole",
        lambda: accelerator.prepare(net, MixedPrecisionOptimizer(adamw(net.parameters()))),
    )
