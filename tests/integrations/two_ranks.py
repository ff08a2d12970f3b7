"""Ranks on gloo, started by torchrun: a trainer under DDP and FSDP2, against a loop by hand.

    two_ranks.py FOLDER TRAINER

Each rank checks what it has; one that fails ends the program with an error. On two ranks it trains, saves and resumes,
and leaves its files. On another number of ranks it resumes from these. All ranks see the same batches, so that averages
over ranks are what each rank has.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from contract import reference
from distributed.world import leave
from torch.distributed.tensor import DTensor

from integrations.byhand import HALF, OVERFLOWING, ByHand, Trained, batches, check_masters, network

STEPS = 16


def main(folder: Path, trainer: str) -> None:
    driver = importlib.import_module(f"integrations.ranks_{trainer}")
    data = batches(STEPS)  # twice, two to a step

    def by_hand(times: int) -> ByHand:
        scale = reference.Scale(OVERFLOWING, 5)
        told = {"schedule": driver.schedule, "waits": True, "micro": 2, "clip": 0.5}
        return ByHand(network(HALF), driver.make, scale, **told).train(data * times, HALF)

    half, hand = by_hand(1), by_hand(2)
    if not 2 <= sum(hand.skipped) < STEPS - 2:
        raise SystemExit("the scale is no test")

    def check(what: str, got: Trained, losses: list[float]) -> None:
        if got.losses != losses:
            raise SystemExit(f"{what}: losses {got.losses}, wanted {losses}")
        check_masters(what, got.optimizer.master_params(), driver.in_order(hand.masters))
        check_masters(f"{what}: the model", got.model.parameters(), hand.models)
        if (got.optimizer.loss_scale, got.optimizer.skipped_steps) != (hand.scale.value, sum(hand.skipped)):
            raise SystemExit(f"{what}: scale {got.optimizer.loss_scale}, {got.optimizer.skipped_steps} skips")
        if ("DDP" not in what) != all(isinstance(param, DTensor) for param in got.model.parameters()):
            raise SystemExit(f"{what}: expected that FSDP2 alone shards")

    def check_beginning(what: str, resumed: Any) -> None:
        """Whole FP32 weights come out; and the steps are counted on."""
        masters, steps = resumed
        if os.environ["RANK"] == "0":
            check_masters(what, masters, half.masters)
        if steps != half.skipped.count(False):
            raise SystemExit(f"{what}: {steps} steps were counted")

    ranks = int(os.environ["WORLD_SIZE"])
    for way in driver.WAYS:
        if ranks == 2:
            check(f"{way}, whole", driver.whole(way, folder, data), hand.losses)
        elif way == "DDP":
            continue
        rest = driver.resumed(way, folder, data)
        check_beginning(f"{way}, resumed on {ranks}", rest.made)
        if ranks < 3:  # three add gradients up in another order
            check(f"{way}, resumed on {ranks}", rest, hand.losses[STEPS:])
    if ranks == 2:
        driver.more(folder, data, half.masters)
    print(f"rank {os.environ['RANK']}: all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave()
