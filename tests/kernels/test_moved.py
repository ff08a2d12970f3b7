"""Numbers that go from device to device: the host never reads one before it has arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fp16opt import kernels
from fp16opt.engine.wrapped_step import supports_found_inf

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


class Moves(TorchFunctionMode):
    """Notes where copies go and whether they are waited for; makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.device, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            self.seen.append((args[1], not kwargs["non_blocking"]))
            return args[0]
        return func(*args, **(kwargs or {}))


def test_only_copies_to_the_host_are_waited_for() -> None:
    number = torch.zeros(())
    with Moves() as moves:
        kernels.moved(number, CPU)
        kernels.moved(number, CARD)
    assert moves.seen == [(CPU, True), (CARD, False)]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_torchs_fused_steps_are_not_handed_the_flag_where_some_parameters_lie_on_the_host(make: Any) -> None:
    optimizer = make([nn.Parameter(torch.ones(3))], fused=True)
    assert supports_found_inf(optimizer, [CARD])
    assert supports_found_inf(optimizer, [CPU])
    assert supports_found_inf(optimizer, [CARD, torch.device("cuda", 1)])
    assert not supports_found_inf(optimizer, [CARD, CPU])
    assert not supports_found_inf(optimizer, [CPU, CARD])
