"""Plain FP32 runs that torch.distributed.checkpoint saved go on with masters, sharded or not, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from distributed.models import Net, full, loss_of
from distributed.world import World, raised
from fp16opt import MixedPrecisionOptimizer, distributed, load_foreign


class Counting(Net):
    """With a buffer."""

    def __init__(self, dtype: torch.dtype, value: float) -> None:
        super().__init__(dtype, norm=False)
        self.register_buffer("count", torch.full((3,), value))


def made(dtype: torch.dtype, size: int, value: float = 0.0) -> tuple[nn.Module, Optimizer]:
    net = Counting(dtype, value)
    if size > 1:
        fully_shard(net)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(value)
    weights = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() < 2]
    return net, AdamW([{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def everything(net: nn.Module, optimizer: Any) -> list[Tensor]:
    """Weights as they are stepped, moments and counts, by the model's order."""
    is_wrapped = isinstance(optimizer, MixedPrecisionOptimizer)
    held = distributed.state_dict(net, optimizer)["masters"] if is_wrapped else dict(net.named_parameters())
    state = [optimizer.state[p][key] for p in net.parameters() for key in ("exp_avg", "exp_avg_sq", "step")]
    return [full(value) for value in (*(held[name] for name, _ in net.named_parameters()), *state)]


def there_and_back(rank: int, size: int, folder: str, options: dict[str, Any]) -> None:
    old, adamw = made(torch.float32, size)
    for step in range(3):
        adamw.zero_grad()
        loss_of(old, step, 0).backward()
        adamw.step()
    adamw.param_groups[1]["lr"] = 5e-3
    model, state = get_state_dict(old, adamw)
    dcp.save({"weights": model, "of the optimizer": state}, checkpoint_id=folder)
    net, inner = made(torch.bfloat16, size, 0.5)
    opt = MixedPrecisionOptimizer(inner, **options)
    told = load_foreign(folder, net, opt, kind="dcp")
    assert (told.kind, told.masters, told.states, told.loss_scale) == ("dcp", 4, 4, None)
    assert all(map(torch.equal, everything(net, opt), everything(old, adamw)))
    assert torch.equal(net.count, old.count)
    assert [(g["lr"], g["weight_decay"]) for g in opt.param_groups] == [(1e-2, 0.1), (5e-3, 0.0)]
    opt.backward(loss_of(net, 3, 0))
    opt.step()
    plain, adamw = made(torch.float32, size, 1.0)
    now = distributed.state_dict(net, opt)
    set_state_dict(
        plain,
        adamw,
        model_state_dict={**net.state_dict(), **now["masters"]},
        optim_state_dict={
            "state": now["state"],
            "param_groups": [{k: v for k, v in group.items() if k != "fresh"} for group in now["param_groups"]],
        },
    )
    assert all(map(torch.equal, everything(plain, adamw), everything(net, opt)))
    other = MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1))
    assert "has 2 param groups, expected 1" in raised(ValueError, lambda: load_foreign(folder, net, other))
    fewer = nn.ModuleDict({"c": nn.Linear(3, 3).bfloat16()})
    alone = MixedPrecisionOptimizer(SGD(fewer.parameters(), lr=0.1))
    message = raised(ValueError, lambda: load_foreign(folder, fewer, alone))
    assert "has no 'c.weight', which the optimizer trains. Build the model as it was." in message


@pytest.mark.parametrize("options", [{}, {"master_weights": "split"}])
def test_a_plain_run_of_fsdp2_goes_on_with_masters(two: World, tmp_path: Path, options: dict[str, Any]) -> None:
    two.run(there_and_back, str(tmp_path / "run"), options)


def test_a_plain_run_of_one_rank(tmp_path: Path) -> None:
    there_and_back(0, 1, str(tmp_path / "run"), {})


def test_weights_alone_are_refused(tmp_path: Path) -> None:
    net, inner = made(torch.bfloat16, 1)
    dcp.save({"model": net.state_dict()}, checkpoint_id=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="has no optimizer state of get_state_dict"):
        load_foreign(tmp_path / "run", net, MixedPrecisionOptimizer(inner))
    with pytest.raises(ValueError, match="this folder has neither"):
        load_foreign(tmp_path, net, MixedPrecisionOptimizer(made(torch.bfloat16, 1)[1]), kind="dcp")
