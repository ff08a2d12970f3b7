"""The plan's formulas against arithmetic by hand, and against the tensors and messages of real ranks."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import pytest
import torch
from engine.checks import tensor_bytes
from engine.split_cases import bytes_kept
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import fp16opt
from distributed.models import HALF, messages
from distributed.world import on_ranks
from fp16opt import MixedPrecisionOptimizer, distributed
from fp16opt.__main__ import main
from fp16opt.tools.plan import Plan, add_arguments, answer, of_arguments

LAYERS, WIDTH = 4, 64
PARAMS = LAYERS * WIDTH * WIDTH


def make(shard: str, fused: bool = False) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=HALF) for _ in range(LAYERS)))
    if shard == "fsdp2":
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    model = DDP(net) if shard in ("ddp", "zero") else net
    inner: Any = AdamW
    params = list(net.parameters())
    optimizer = ZeroRedundancyOptimizer(params, inner, lr=1e-3) if shard == "zero" else inner(params, lr=1e-3)
    opt = MixedPrecisionOptimizer(optimizer, loss_scale=8.0, fused_step=fused)
    if shard != "none":
        distributed.attach(opt, model)
    return model, opt


def step(model: nn.Module, opt: MixedPrecisionOptimizer, width: int = WIDTH) -> None:
    opt.zero_grad()
    opt.backward(model(torch.ones(2, width, dtype=HALF)).float().square().mean())
    opt.clip_master_grads(1.0)
    opt.step()


def held(tensors: Any) -> int:
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    return sum(t.nbytes for t in locals_)


def measured(model: nn.Module, opt: MixedPrecisionOptimizer) -> dict[str, int]:
    masters = list(opt.master_params())
    return {
        "16-bit weights": held(model.parameters()),
        "16-bit gradients": held(p.grad for p in model.parameters()),
        "masters": held(masters),
        "FP32 master gradients": held(p.grad for p in masters),
        "optimizer state": held(v for entry in opt.state.values() for k, v in entry.items() if k != "step"),
    }


@on_ranks(2)
def test_memory_and_messages_of_two_ranks(rank: int, size: int) -> None:
    for shard in ("ddp", "zero", "fsdp2"):
        plan = Plan(params=PARAMS, ranks=size, shard=shard, layers=LAYERS, fused_step=False)
        model, opt = make(shard)
        for _ in range(3):
            step(model, opt)
        wanted = plan.memory_parts()
        for name, size_here in measured(model, opt).items():
            assert size_here == wanted[name], (shard, name, size_here, wanted[name])
        with messages() as ours:
            step(model, opt)
        own = [n for name, n in ours if name == "all_reduce"]
        assert own == ([] if shard == "ddp" else [32]), (shard, own)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(model, opt)
        counts = [e.name for e in profile.events() or () if e.name.startswith("c10d::")]
        expected = {"ddp": 1, "zero": 1 + LAYERS, "fsdp2": 3 * LAYERS}[shard]  # besides the optimizer's own
        # FSDP2's last layer stays gathered between forward and backward: one gather less.
        assert len(counts) in (expected, expected - 1), (shard, counts)


@on_ranks(2)
def test_memory_of_split_masters(rank: int, size: int) -> None:
    before, width = tensor_bytes(), 8 * WIDTH  # so that statistics and the like are little beside it
    net = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=HALF) for _ in range(LAYERS)))
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    opt = MixedPrecisionOptimizer(optimizer, loss_scale=8.0, master_weights="split", fused_step=True)
    distributed.attach(opt, model)
    for _ in range(2):
        step(model, opt, width)
    wanted = Plan(params=LAYERS * width**2, ranks=size, shard="ddp", masters="split").memory_parts()
    assert wanted["FP32 master gradients"] == 0
    opt.zero_grad()
    lasting = wanted["16-bit weights"] + wanted["masters"] + wanted["16-bit gradients"]  # DDP keeps its buckets
    kept = bytes_kept(opt, before)
    assert kept <= 1.1 * lasting, f"{kept / lasting} of weights, gradients and what splits off from masters"
    state = [v for entry in opt.state.values() for k, v in entry.items() if k != "step"]
    assert held(state) == wanted["optimizer state"]


class Tensors(nn.Module):
    """``count`` parameters of half a MiB each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(2**18, dtype=HALF)) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.stack([p.float().sum() for p in self.all]).sum()


@on_ranks(2)
def test_messages_of_larger_models(rank: int, size: int) -> None:
    for count in (1, 3, 60):
        ddp = DDP(Tensors(count))
        for _ in range(2):  # DDP arranges its buckets anew in the second step
            ddp.zero_grad()
            ddp().backward()
        ddp.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp().backward()
        found = sum(e.name.startswith("c10d::allreduce") for e in profile.events() or ())
        wanted = Plan(params=count * 2**18, ranks=size, shard="ddp").messages()
        assert {"buckets of gradients": found} == wanted, count


@pytest.mark.parametrize("fused", [True, False])
def test_memory_of_one_process(fused: bool) -> None:
    model, opt = make("none", fused)
    step(model, opt)
    plan = Plan(params=PARAMS, fused_step=fused)
    found = opt.memory().parts()
    assert found["gradients"] == plan.memory_parts()["16-bit gradients"] + plan.memory_parts()["FP32 master gradients"]
    if not fused:  # else FP32 gradients would be made where they are asked for
        assert measured(model, opt) == plan.memory_parts()
    kept = sum(found[kind] for kind in ("weights", "gradients", "masters", "moments"))
    assert plan.memory_total() == (16 if fused else 20) * PARAMS
    assert kept == plan.memory_total() + LAYERS * 4, "a float32 counter a tensor is among the moments"
    assert plan.traffic() == 0.0


def test_by_hand() -> None:
    ddp = Plan(params=1e9, ranks=4, shard="ddp")
    assert ddp.memory_total() == (2 + 2 + 4 + 8 + 2) * 1e9
    assert ddp.step_bytes() == (2 + 2 + 4 + 4 + 2 + 16) * 1e9
    own = Plan(params=1e9, ranks=4, shard="ddp", fused_step=False)
    assert own.memory_total() == (2 + 2 + 4 + 4 + 8 + 2) * 1e9
    assert own.step_bytes() == (2 + 6 + 28 + 6) * 1e9
    assert ddp.traffic() == 2 * 3 / 4 * 2e9
    assert ddp.messages() == {"buckets of gradients": 78}  # the first of 1 MiB, the others of 25
    zero = Plan(params=1e9, ranks=4, shard="zero", optimizer="sgd-momentum", clip=False)
    assert zero.memory_total() == (2 + 2 + 2) * 1e9 + (4 + 4) * 0.25e9
    assert zero.traffic() == 3 * 3 / 4 * 2e9
    assert zero.messages()["verdict and norm, 32 bytes"] == 1
    assert zero.step_bytes() == 0.25e9 * (2 + 2 + 4 + 4 + 2 + 8)
    torchs = Plan(params=1e9, ranks=4, shard="zero", optimizer="sgd-momentum", clip=False, fused_step=False)
    assert torchs.memory_total() == (2 + 2 + 2) * 1e9 + (4 + 4 + 4) * 0.25e9
    assert torchs.step_bytes() == 0.25e9 * (6 + 20 + 6)
    fsdp = Plan(params=1e12, ranks=4096, shard="fsdp2", masters="split", layers=100, network=1e11, memory=1e12)
    assert fsdp.memory_total() == pytest.approx((2 + 2 + 2 + 8) * 1e12 / 4096 + 8e12 / 100)
    assert fsdp.traffic() == pytest.approx(3 * 4095 / 4096 * 2e12)
    assert fsdp.shortest_step() == pytest.approx(fsdp.traffic() / 1e11 + 1e12 / 4096 * (2 + 10 + 16) / 1e12)
    slow = Plan(params=1e12, ranks=4096, shard="fsdp2", compute=1e4)
    assert slow.shortest_step() > 1e4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": 0}, "params: expected a number of 1 or more, got 0"),
        ({"params": float("nan")}, "params: expected"),
        ({"ranks": 2}, "Choose shard='ddp'"),
        ({"shard": "zero3"}, "shard: expected one of 'none', 'ddp', 'zero', 'fsdp2', got 'zero3'"),
        ({"optimizer": "lamb"}, "optimizer: expected one of"),
        ({"masters": "half"}, "masters: expected one of"),
        ({"compute": -1.0}, "compute: expected 0 seconds or more"),
        ({"offload": "disk"}, "offload: expected one of 'cpu', got 'disk'"),
        ({"state": "4bit"}, "state: expected one of 'fp32', '8bit', got '4bit'"),
        ({"state": "8bit", "optimizer": "lion"}, "state: 'lion' has no 8-bit state. Use 'fp32'"),
        ({"release": True, "ranks": 2, "shard": "ddp"}, "release: True is for one rank, got shard='ddp'"),
        ({"state": "8bit", "fused_step": False}, "fused_step: split masters, 8-bit state and released .* False. Use"),
        ({"masters": "split", "fused_step": False}, "fused_step: .* got False"),
        ({"release": True, "fused_step": False}, "fused_step: .* got False"),
    ],
)
def test_what_is_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**{"params": 1e9, **options})


def parse(arguments: list[str]) -> Plan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return of_arguments(parser.parse_args(arguments))


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --params 7e9 --ranks 64 --shard fsdp2 --optimizer adamw --masters split --network 25 --memory 1000"
    assert main(line.split()) == 0
    said = capsys.readouterr().out
    wanted = Plan(params=7e9, ranks=64, shard="fsdp2", masters="split", network=25e9, memory=1e12)
    assert said.strip() == wanted.report()
    assert "verdict and norm, 32 bytes" in said
    assert parse(["--params", "1e6", "--ranks", "8"]).shard == "ddp"
    assert parse(["--params", "1e6"]).shard == "none"
    assert parse(["--params", "1e6"]).fused_step
    own = parse(["--params", "1e6", "--no-fused-step"])
    assert not own.fused_step
    assert "adamw, full masters, stepped by the wrapped optimizer" in own.report()


# -- formats and released gradients ------------------------------------------------------------------------------------


def test_steps_move_fewer_bytes_with_smaller_formats() -> None:
    ratio8 = Plan(params=1e9, masters="split", state="8bit").step_bytes()
    assert ratio8 == pytest.approx(1e9 * (2 + 2 + 8 + 2 * (2 + 4 / 128)))
    assert Plan(params=1e9, masters="split24", state="8bit").step_bytes() == pytest.approx(ratio8 - 2e9)


def test_the_command_line_asks_for_formats() -> None:
    plan = parse(["--params", "1e9", "--state", "8bit", "--masters", "split24", "--release"])
    assert (plan.state, plan.masters, plan.release) == ("8bit", "split24", True)
    assert "8-bit state, gradients released" in plan.report()
    assert "of one parameter at a time comes on top" in plan.report()


# -- which modes fit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "card", "host"),
    [
        ({}, 4, 12),
        ({"masters": "split"}, 4, 10),
        ({"masters": "split", "state": "8bit"}, 4 + 4 / 128, 4),
        ({"masters": "split24", "state": "8bit"}, 4 + 4 / 128, 3),
        ({"masters": "split24", "state": "8bit", "release": True}, 2 + 4 / 128, 3),
        ({"masters": "split24", "state": "8bit", "release": True, "largest": 10**7}, 2 + 4 / 128 + 0.02, 3),
        ({"masters": "split", "optimizer": "lion", "other": 5e8}, 4.5, 6),
        ({"state": "8bit"}, 4 + 4 / 128, 6),
        ({"masters": "split", "optimizer": "sgd-momentum", "state": "8bit"}, 4 + 4 / 128, 3),
    ],
)
def test_bytes_on_the_card_and_on_the_host(given: dict[str, Any], card: float, host: float) -> None:
    """Scales stay on the card; all else of masters and state goes to the host, and over the link and back in a step."""
    plan = Plan(params=1e9, offload="cpu", link=1e9, **given)
    assert plan.memory_total() == pytest.approx(card * 1e9, rel=1e-12)
    assert plan.host_total() == pytest.approx(host * 1e9, rel=1e-12)
    assert plan.shortest_step() == pytest.approx(host)
    without = Plan(params=1e9, **given)
    assert without.memory_total() == pytest.approx((card + host) * 1e9, rel=1e-12)
    assert without.host_total() == 0.0
    assert "memory of the host" not in without.report()
    assert "memory of the host" in plan.report()
    assert plan.shortest_step() > without.shortest_step()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("1e9", "24GiB", "0GiB"), {}),
        (("1.3e9", "24GiB", "0GiB"), {"master_weights": "split"}),
        (("1.5e9", "24GiB", "64GiB"), {"master_weights": "split", "offload": "cpu"}),
        (("2.5e9", "24GiB", "0GiB"), {"master_weights": "split", "optimizer_state": "8bit"}),
        (("5e9", "24GiB", "32GiB"), {"master_weights": "split", "optimizer_state": "8bit", "offload": "cpu"}),
        (("5e9", "24GiB", "18GiB"), {"master_weights": "split24", "optimizer_state": "8bit", "offload": "cpu"}),
        (("4e9", "24GiB", "0GiB"),
         {"master_weights": "split24", "optimizer_state": "8bit", "gradient_release": True}),
        (("7e9", "24GiB", "32GiB"),
         {"master_weights": "split24", "optimizer_state": "8bit", "gradient_release": True, "offload": "cpu"}),
        (("7e9", "24GiB", "16GiB"), None),
    ],
)  # fmt: skip
def test_the_first_mode_that_fits(given: tuple[str, str, str], wanted: dict[str, Any] | None) -> None:
    params, budget, ram = given
    modes = fp16opt.plan(float(params), budget, ram=ram)
    assert (None if modes.chosen is None else modes.chosen.arguments()) == wanted
    arguments = ["--params", params, "--budget", budget, "--ram", ram]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert answer(parser.parse_args(arguments)) == str(modes)


def test_the_table_of_modes() -> None:
    shown = str(fp16opt.plan(7e9, "24GiB", ram="32GiB", link=45e9)).splitlines()
    assert shown[0] == "7B parameters, adamw: 24.0 GiB on the card, 32.0 GiB of RAM, 45 GB/s between them each way"
    assert [line for line in shown if line.startswith(">")] == [
        "> split24  8bit   yes       cpu        13.2 GiB   19.6 GiB        467 ms  yes",
        "> master_weights='split24', optimizer_state='8bit', gradient_release=True, offload='cpu'",
    ]
    assert "  split    8bit   -         cpu        26.3 GiB   26.1 GiB        622 ms  no: card, RAM" in shown
    assert all(len(line) <= 120 for line in shown)
    assert "> none fits" in str(fp16opt.plan(7e9, "8GiB"))
    plain = str(fp16opt.plan(1e9, "24GiB", optimizer="sgd"))
    assert "8bit" not in plain
    assert plain.count("  split24  fp32 ") == 4, "SGD without momentum keeps no state, in 8 bits neither"
    ranks = str(fp16opt.plan(7e9, "80GiB", ranks=8, shard="fsdp2", optimizer="lion"))
    assert "lion, 8 ranks, fsdp2: 80.0 GiB on the card, any of RAM" in ranks
    assert ranks.count("no: ") + ranks.count("yes") == 3, "neither 8-bit state nor released gradients"


@pytest.mark.parametrize(
    "one", [{"masters": "split"}, {"state": "8bit"}, {"release": True}, {"offload": "cpu"}, {"fused_step": False}]
)
def test_a_plan_of_every_mode_is_asked_for_none(one: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"budget: it tries every mode\. Leave out what asks for one"):
        fp16opt.plan(7e9, "24GiB", **one)


def test_a_model_tells_its_bytes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
    model[0].weight.requires_grad_(False)
    found = fp16opt.plan(model, 10**9).all[-1]
    assert (found.params, found.largest) == (64 * 64 + 2 * 64, 64 * 64)
    assert found.other == 4 * 1000 * 64 + 2 * 4 * 64 + 8
    assert found.memory_parts()["16-bit gradients"] == 2 * 64 * 64
    assert fp16opt.plan(model, 2 * found.other).chosen is not None


def test_the_plan_of_old_scripts() -> None:
    assert fp16opt.plan.Plan is Plan  # type: ignore[attr-defined]
    assert importlib.import_module("fp16opt.plan").Plan is Plan


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--budget 24", "budget: expected a size as in '24GiB', got '24'"),
        ("--budget 1.1.1GiB", "budget: expected a size"),
        ("--budget 24GiB --ram=-1GiB", "ram: expected a size"),
        ("--budget 24GiB --release", "budget: it tries every mode"),
        ("--budget 24GiB --no-fused-step", "budget: it tries every mode"),
        ("--ram 24GiB", "ram: it is for --budget"),
        ("--budget 24GiB --link-gbs 0", "link: expected a number of 1 or more"),
        ("--offload --no-fused-step", "fused_step: .* and offload takes it, got False"),
    ],
)
def test_what_is_wrong_with_a_budget(line: str, message: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        answer(parser.parse_args(["--params", "7e9", *line.split()]))


def test_what_is_no_size() -> None:
    with pytest.raises(ValueError, match="budget: expected a size as in '24GiB', got nan"):
        fp16opt.plan(7e9, float("nan"))


def test_the_help_shows_each_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    for action in parser._actions:
        if action.nargs != 0 and action.default is not None:
            assert f"default {action.default}" in shown, action.dest
