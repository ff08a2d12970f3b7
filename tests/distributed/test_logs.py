"""What is logged of skipped steps where masters are spread over ranks: the same on all, and on which rank it began."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW

from distributed.models import Net, Said, loss_of, messages
from distributed.world import World, raised
from fp16opt import DynamicLossScaler, GradScaler, LossScaleError, MixedPrecisionOptimizer, StaticLossScaler
from fp16opt.distributed.digits import digits_of
from fp16opt.distributed.settings import number_limit


def made(how: str, scaler: Any) -> tuple[Net, MixedPrecisionOptimizer]:
    net = Net(norm=False)
    if how == "fsdp2":
        fully_shard(net)
    inner: Any = AdamW(net.parameters(), lr=1e-2) if how == "fsdp2" else None
    if inner is None:
        inner = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    options = {} if scaler is None else {"scaler": scaler}
    return net, MixedPrecisionOptimizer(inner, named_parameters=net.named_parameters(), **options)


def inf_on(net: Net, rank: int, where: int) -> None:
    """An element that is not finite in what one rank has of the gradients, or all where that is -1."""
    if where in (rank, -1):
        for p in reversed(list(net.parameters())):
            piece = getattr(p.grad, "_local_tensor", p.grad)
            if piece is not None and piece.numel():
                piece.view(-1)[-1] = math.inf
                if where == rank:
                    return


def skips(rank: int, size: int, how: str) -> dict[str, list[str]]:
    """Lines by case."""
    heard, said = Said(), {}
    logger = logging.getLogger("fp16opt")
    logger.addHandler(heard)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        for case in ("one rank", "all ranks", "largest", "a loss", "at the floor", "limit", "GradScaler"):
            scaler: Any = DynamicLossScaler(2.0**4, max_consecutive_skips=2 if case == "limit" else None)
            if case == "all ranks":
                scaler = StaticLossScaler(2.0**4)
            if case == "at the floor":
                scaler = DynamicLossScaler(2.0, min_scale=2.0)
            net, opt = made(how, None if case == "GradScaler" else scaler)
            driver = GradScaler(init_scale=2.0**4, device="cpu") if case == "GradScaler" else None
            heard.lines.clear()
            for number in range(5):
                opt.zero_grad()
                loss = loss_of(
                    net, number, rank, poison=rank == 1 and number == 2 and case in ("a loss", "at the floor")
                )
                if driver is not None:
                    driver.scale(loss).backward()
                else:
                    opt.backward(loss, update_master_grads=False)
                if number > 1 and case in ("one rank", "largest", "limit", "GradScaler"):
                    inf_on(net, rank, size - 1)
                if number == 2 and case == "all ranks":
                    inf_on(net, rank, -1)
                with messages() as sent:
                    if driver is not None:
                        driver.step(opt)
                        driver.update()
                    else:
                        if case == "largest":
                            opt.clip_master_grads(1.0, math.inf)
                        if number == 3 and case == "limit":
                            heard.lines.append(raised(LossScaleError, opt.step))
                            break
                        opt.step()
                ours = [one for one in sent if one[0] == "all_reduce"]  # and the weights of ZeRO
                assert number == 0 or ours == [("all_reduce", 32)], (case, number, sent)
            said[case] = list(heard.lines)
            del opt
    finally:
        logger.removeHandler(heard)
        logger.setLevel(before)
    return said


@pytest.mark.parametrize("how", ["fsdp2", "zero"])
def test_all_ranks_say_the_same_and_where_it_was_found(two: World, how: str) -> None:
    first, second = two.run(skips, how)
    names = re.compile(r"(gradients in|Last in:) .*?, found on")
    without = [
        {case: [names.sub("NAMES", line) for line in lines] for case, lines in said.items()} for said in (first, second)
    ]
    assert without[0] == without[1]
    here = "none of this rank's parameters, found on rank 1"
    for case in ("one rank", "largest", "GradScaler"):
        assert any(f"non-finite gradients in {here}" in line for line in first[case]), first[case]
        assert any("in b." in line and "(inf), found on rank 1" in line for line in second[case]), second[case]
    assert any("found on all 2 ranks" in line for line in first["all ranks"]), first["all ranks"]
    for case, hopeless in (("a loss", True), ("at the floor", True)):
        line = next(line for line in first[case] if "loss itself" in line)
        assert "the loss itself is not finite on rank 1 (1 in a row)" in line, line
        assert ("so that no loss scale can help" in line) == hopeless, line
    assert first["limit"][-1].startswith("2 steps in a row"), first["limit"]
    assert f"Last in: {here}. Lowering" in first["limit"][-1]


def test_counts_travel_at_any_number_of_ranks() -> None:
    """In two numbers up to 11,000 ranks, in which the rank of one overflow is among them; sums are exact."""
    for size in (1, 2, 3, 64, 1000, 1024, 8192, 11_000):
        digits, last, limit = digits_of(1, size, torch.device("cpu")), size - 1, number_limit(size)
        own = [[1.0, 0.0, limit - 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, limit - 1.0, last, 1.0, last]]
        each = [digits.packed(torch.tensor(numbers, dtype=torch.float64)) for numbers in own]
        assert len(each[0]) == 2, "with a sum and a square: 32 bytes"
        for found in (0, 1, size):
            total = (size - found) * each[0] + found * each[1]
            wanted = [size, found, size * (limit - 1), found * last, found, found * last]
            got = digits.unpacked(total).tolist()
            if size > 1024:
                assert got[5] == -1.0
                wanted[5] = -1.0
            if found == size > 1:
                continue  # the sum of one rank's number so many times is no sum of different ones
            assert float(total.max()) < 2.0**53, "else float64 has gaps"
            assert got == wanted, (size, found)
