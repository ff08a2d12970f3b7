"""Checkpoints of other parameters or groups: ``load(..., strict=False)`` takes what it finds, and says what not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD, AdamW

from distributed.models import Net, full, one_step
from distributed.world import World, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed

FULL = ("a.weight", "a.bias", "b.weight", "b.bias")


class Adapted(Net):
    """With an adapter, which a full run does not have."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.lora = nn.Linear(16, 3, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora(x.to(self.lora.weight.dtype)).float()


def wrapped(net: nn.Module, groups: Iterable[Iterable[str]], inner: Any = AdamW, **options: Any) -> Any:
    """An optimizer over groups of names; what is in none of them is frozen and left out."""
    named = dict(net.named_parameters())
    chosen = [[named[name] for name in names] for names in groups]
    for p in named.values():
        p.requires_grad_(any(p is q for group in chosen for q in group))
    params = [{"params": group, "lr": 10.0 ** -(2 + number)} for number, group in enumerate(chosen)]
    made: Any = ZeroRedundancyOptimizer(params, AdamW, lr=1e-2) if inner == "zero" else inner(params, lr=1e-2)
    scaler = options or {"scaler": DynamicLossScaler(2.0**5)}
    return MixedPrecisionOptimizer(made, named_parameters=named.items(), **scaler)


def train(net: nn.Module, opt: Any, steps: int = 2) -> None:
    for number in range(steps):
        one_step(net, opt, number, 0)


def inside(net: nn.Module, opt: Any) -> dict[str, Tensor]:
    """Masters and moments by key, whole."""
    sd = distributed.state_dict(net, opt)
    found = {f"masters.{name}": full(value) for name, value in sd["masters"].items()}
    for name, entry in sd["state"].items():
        found |= {f"{key}.{name}": full(value) for key, value in entry.items() if isinstance(value, Tensor)}
    return found


def keys(kind: str, *names: str) -> list[str]:
    return [f"{kind}.{name}" for name in names]


def alike(ours: dict[str, Tensor], theirs: dict[str, Tensor], names: Iterable[str]) -> None:
    """Masters and moments of these parameters, which both have."""
    for name in names:
        for kind in ("masters", "exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(ours[f"{kind}.{name}"], theirs[f"{kind}.{name}"]), (kind, name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A full run in two groups, saved by one process; and what it was."""
    path = tmp_path_factory.mktemp("partial") / "full"
    net = Net(norm=False)
    opt = wrapped(net, [FULL[0::2], FULL[1::2]])
    train(net, opt)
    distributed.save(path, net, opt)
    return path, inside(net, opt)


def test_a_block_was_frozen_and_left_out(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, before = saved
    net = Net(norm=False)
    opt = wrapped(net, [FULL[2:3], FULL[3:]])
    with pytest.raises(ValueError, match=r"'a.weight' as a parameter that was trained.*strict=False"):
        distributed.load(path, net, opt)
    told = distributed.load(path, net, opt, strict=False)
    assert told.missing_keys == []
    assert sorted(told.unexpected_keys) == sorted(keys("state", *FULL[:2]))
    alike(inside(net, opt), before, FULL[2:])
    for name, p in net.named_parameters():
        assert torch.equal(p, before[f"masters.{name}"].half()), name
    assert [group["lr"] for group in opt.param_groups] == [1e-2, 1e-3]
    assert opt.stats()["steps_taken"] == 2
    assert opt.loss_scale == 2.0**5
    train(net, opt, 1)


def test_adapters_on_the_weights_of_a_full_run(saved: tuple[Path, dict[str, Tensor]]) -> None:
    """Nothing that is trained here is in the file: only weights are taken."""
    path, before = saved
    net = Adapted()
    opt = wrapped(net, [["lora.weight", "lora.bias"]], SGD, loss_scale=2.0)
    own = inside(net, opt)
    told = distributed.load(path, net, opt, strict=False)
    assert sorted(told.missing_keys) == sorted([*keys("masters", "lora.weight", "lora.bias"), "param_groups.0"])
    wanted = [*keys("state", *FULL), "param_groups.0", "param_groups.1", "scaler", "counts"]
    assert sorted(told.unexpected_keys) == sorted(wanted)
    for name in FULL:
        assert torch.equal(net.get_parameter(name), before[f"masters.{name}"].half()), name
    assert all(torch.equal(value, own[key]) for key, value in inside(net, opt).items())
    assert (opt.loss_scale, opt.stats()["steps_taken"]) == (2.0, 0)
    train(net, opt, 1)


def test_what_was_not_trained_then_is_now(tmp_path: Path) -> None:
    first = Net(norm=False)
    opt = wrapped(first, [FULL[2:]])
    train(first, opt)
    distributed.save(tmp_path / "part", first, opt)
    net = Net(norm=False)
    with torch.no_grad():
        net.a.weight.zero_()
    both = wrapped(net, [FULL])
    with pytest.raises(ValueError, match=r"no master of 'a.weight'.*has it as one that was not trained.*strict=False"):
        distributed.load(tmp_path / "part", net, both)
    told = distributed.load(tmp_path / "part", net, both, strict=False)
    assert (sorted(told.missing_keys), told.unexpected_keys) == (sorted(keys("state", *FULL[:2])), [])
    found = inside(net, both)
    alike(found, inside(first, opt), FULL[2:])
    for name in FULL[:2]:
        assert torch.equal(found[f"masters.{name}"], first.get_parameter(name).float())
        assert torch.equal(net.get_parameter(name), first.get_parameter(name))
    train(net, both, 1)


def test_other_groups(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, before = saved
    for groups in ([FULL], [[name] for name in FULL]):
        net = Net(norm=False)
        opt = wrapped(net, groups)
        own = [group["lr"] for group in opt.param_groups]
        message = raised(ValueError, lambda net=net, opt=opt: distributed.load(path, net, opt))  # type: ignore[misc]
        assert "strict=False" in message
        told = distributed.load(path, net, opt, strict=False)
        assert told.missing_keys == [f"param_groups.{number}" for number in range(len(groups))]
        assert told.unexpected_keys == ["param_groups.0", "param_groups.1"]
        alike(inside(net, opt), before, FULL)
        assert [group["lr"] for group in opt.param_groups] == own
    net = Net(norm=False)  # the same groups in another order are known by their names
    opt = wrapped(net, [FULL[1::2], FULL[0::2]])
    assert distributed.load(path, net, opt, strict=False) == ([], [])
    assert [group["lr"] for group in opt.param_groups] == [1e-3, 1e-2]


def test_where_all_is_there_it_is_a_strict_load(saved: tuple[Path, dict[str, Tensor]]) -> None:
    ends = []
    for strict in (True, False):
        net = Net(norm=False)
        opt = wrapped(net, [FULL[0::2], FULL[1::2]])
        assert distributed.load(saved[0], net, opt, strict=strict) == ([], [])
        train(net, opt, 3)
        ends.append(inside(net, opt))
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def test_what_is_missing_stays_and_what_does_not_fit_changes_nothing(saved: tuple[Path, dict[str, Tensor]]) -> None:
    net = Adapted()
    opt = wrapped(net, [[*FULL, "lora.weight", "lora.bias"]])
    train(net, opt)
    own = inside(net, opt)
    told = distributed.load(saved[0], net, opt, strict=False)
    assert sorted(told.missing_keys) == sorted([*keys("masters", "lora.weight", "lora.bias"), "param_groups.0"])
    found = inside(net, opt)
    alike(found, own, ["lora.weight", "lora.bias"])
    alike(found, saved[1], FULL)
    other = Adapted()
    other.b = nn.Linear(7, 4, dtype=torch.float16)
    for groups in ([FULL[2:]], [FULL[:2]]):  # trained here, and not
        part = wrapped(other, groups)
        kept = [p.clone() for p in other.parameters()]
        message = raised(ValueError, lambda part=part: distributed.load(saved[0], other, part, strict=False))  # type: ignore[misc]
        assert "'b.weight' has shape [3, 7], the model's has [4, 7]" in message or "'b.bias' has shape" in message
        assert all(torch.equal(p, q) for p, q in zip(kept, other.parameters(), strict=True))
    sd = {**distributed.state_dict(net, opt), "param_groups": [{"lr": 0.1}]}
    with pytest.raises(ValueError, match="param_groups: expected a list of dicts with 'params'"):
        distributed.load_state_dict(net, opt, sd, strict=False)


def on_ranks(rank: int, size: int, path: str, part: str) -> list[Any]:
    """Shards of any kind, and stages of a pipeline, take what they have; all ranks are told the same."""
    found: list[Any] = []
    layouts: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}

    def fsdp2() -> tuple[nn.Module, Any]:
        net = Net(norm=False)
        for layer in (net.a, net.b, net):
            fully_shard(layer)
        return net, wrapped(net, [FULL[2:3], FULL[3:]])

    def zero() -> tuple[nn.Module, Any]:
        net = Net(norm=False)
        return net, wrapped(net, [FULL[2:3], FULL[3:]], "zero")

    def stages() -> tuple[nn.Module, Any]:
        whole = Net(norm=False)
        stage = nn.ModuleDict({"ab"[rank]: whole.get_submodule("ab"[rank])})
        opt = wrapped(stage, [FULL[2 * rank : 2 * rank + 1], FULL[2 * rank + 1 : 2 * rank + 2]])
        distributed.attach(opt, stage, process_group=dist.group.WORLD)
        return stage, opt

    layouts |= {"fsdp2": fsdp2, "zero": zero, "stages": stages}
    for name, make in layouts.items():
        net, opt = make()
        told = distributed.load(path, net, opt, strict=False)
        weights = {n: full(p) for n, p in net.named_parameters()}
        found.append((name, tuple(told), inside(net, opt), weights))
    stage, opt = stages()  # of which one has nothing that was trained: scaler and settings are alike all the same
    for group in opt.param_groups:
        group["lr"] = 0.5
    told = distributed.load(part, stage, opt, strict=False)
    lr = [group["lr"] for group in opt.param_groups]
    found.append(("part", tuple(told), lr, (opt.loss_scale, opt.stats()["steps_taken"])))
    return found


def test_on_ranks(two: World, saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    path, before = saved
    net = Net(norm=False)
    opt = wrapped(net, [FULL[:1], FULL[1:2]])
    train(net, opt)
    distributed.save(tmp_path / "part", net, opt)
    first, second = two.run(on_ranks, str(path), str(tmp_path / "part"))
    part = first.pop()
    assert part == second.pop() == ("part", (keys("state", *FULL[2:]), []), [1e-2, 1e-3], (2.0**5, 2))
    for mine, theirs in zip(first, second, strict=True):
        name, (missing, unexpected), masters, weights = mine
        assert (missing, unexpected) == theirs[1], "all ranks are told the same"
        assert missing == []
        assert sorted(unexpected) == ([] if name == "stages" else sorted(keys("state", *FULL[:2])))
        assert {**masters, **theirs[2]}.keys() >= {f"masters.{key}" for key in FULL[2:]}
        for key, value in {**masters, **theirs[2]}.items():
            assert torch.equal(value, before[key]), (name, key)
        for key, value in {**weights, **theirs[3]}.items():
            assert torch.equal(value, before[f"masters.{key}"].half()), (name, key)
