"""One-pass steps and split masters on the GPU: the CPU's bits, nothing waits, graphs replay them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from card import IS_THERE, seeds
from engine.checks import assert_same_bits, normal, steps_in_one_pass
from named_steps import sgd_step
from step_cases import KINDS, StepCase, assert_same_results, place, random_case, split_and_join
from test_cuda_steps import random_split, two_steps
from test_gpu_kernels import same
from test_gpu_steps import SHAPES, graph_of_a_step, linear_problem, targets_of
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer
from fp16opt.kernels import CastStats, multi_tensor_join, multi_tensor_reset_remainders, multi_tensor_split
from fp16opt.kernels.operations import Factors, SgdOptions

pytestmark = pytest.mark.gpu
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=0.02),
    "fused amsgrad": lambda p: Adam(p, lr=0.02, weight_decay=0.01, amsgrad=True, fused=True),
    "lr on the device": lambda p: AdamW(p, lr=torch.tensor(0.02, device=p[0].device), foreach=False),
    "SGD": lambda p: SGD(p, lr=0.02, weight_decay=0.01),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "groups": lambda p: AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "betas": (0.3, 0.9)}], lr=0.02),
}
by_maker = pytest.mark.parametrize("make", list(MAKERS.values()), ids=list(MAKERS))
by_masters = pytest.mark.parametrize("masters", ["full", "split"])


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [0.0, 0.05])
@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_bits_of_the_cpu(device: torch.device, kind: str, seed: int, special: float) -> None:
    case = random_case(np.random.default_rng(seed), kind, special, 30)
    assert_same_results(second(case.on(device), seed), two_steps(case.on("cpu"), seed), kind)


@pytest.mark.parametrize("kind", ["adam", "own amsgrad"])
def test_counters_on_the_host(device: torch.device, kind: str) -> None:
    case = random_case(np.random.default_rng(3), kind, 0.0, 30)
    assert_same_results(second(case.on(device, steps_on="cpu"), 3), two_steps(case.on("cpu"), 3), kind)


def second(case: StepCase, seed: int) -> StepCase:
    """What ``two_steps`` does, on the device."""
    rng = np.random.default_rng(seed)
    grads = [None if g is None else place(g, g.device) for g in case.columns["grads"]]
    for grad in grads:
        if grad is not None and grad.numel():
            grad.mul_(float(rng.choice([-0.5, 2.0])))
    return case.run().again(grads)


@pytest.mark.parametrize("kind", KINDS)
def test_found_inf_leaves_everything_untouched(device: torch.device, kind: str) -> None:
    case = random_case(np.random.default_rng(5), kind, 0.1).on(device)
    before = case.on("cpu")
    assert case.found_inf is not None
    case.found_inf.fill_(1.0)
    assert_same_results(case.run(), before, kind)


@pytest.mark.parametrize("special", [0.0, 0.1])
@pytest.mark.parametrize("seed", seeds(6))
def test_split_and_join_have_the_bits_of_the_cpu(device: torch.device, seed: int, special: float) -> None:
    lists = random_split(np.random.default_rng(seed), special)
    ours, theirs = split_and_join(*lists, device), split_and_join(*lists, "cpu")
    for k, (mine, other) in enumerate(zip(ours[:4], theirs[:4], strict=True)):
        pairs = [(a, b) for a, b in zip(mine, other, strict=True) if a is not None]
        same([a for a, _ in pairs], [b for _, b in pairs], f"list {k}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_master_of_one_binade_in_256(device: torch.device, dtype: torch.dtype) -> None:
    """All bits of the mantissa, at exponents that come round."""
    step = 1 if IS_THERE else 4099  # where it is pretended: some of them
    for exponent in range(0, 256, 5):
        bits = torch.arange(0, 1 << 23, step, dtype=torch.int32) | (exponent << 23)
        masters = torch.cat([bits, bits | (-(1 << 31))]).view(torch.float32)
        results = []
        for where in (device, torch.device("cpu")):
            values = masters.to(where)
            weights, rests = torch.zeros_like(values, dtype=dtype), torch.zeros_like(values, dtype=torch.int16)
            outs = torch.zeros_like(values)
            multi_tensor_split([values], [weights], [rests], CastStats.allocate(1, where))
            multi_tensor_join([weights], [rests], [outs])
            results.append((weights, rests, outs))
        same(list(results[0]), list(results[1]), f"exponent {exponent}")


def test_written_weights_are_renewed(device: torch.device) -> None:
    params = [torch.full((70_001,), 1.0, device=device, dtype=torch.float16) for _ in range(3)]
    params[1][5] = float("inf")
    rests = [torch.full((70_001,), 9, device=device, dtype=torch.int16) for _ in range(3)]
    now, taken = torch.tensor([0, 1, 0], device=device), torch.zeros(3, dtype=torch.int32, device=device)
    multi_tensor_reset_remainders(params, rests, now, torch.zeros_like(now), taken)
    assert taken.tolist() == [0, 1, 0]
    assert rests[0].eq(9).all()
    assert rests[2].eq(9).all()
    assert rests[1].nonzero().tolist() == [[5]]
    assert rests[1][5] == -1


@pytest.mark.card
def test_more_than_2_to_the_31_elements(device: torch.device) -> None:
    numel = 2**31 + 65536 + 3
    free, _ = torch.cuda.mem_get_info(device)
    if free < 9 * numel:
        pytest.skip(f"needs {9 * numel >> 30} GiB of free memory on the device")
    grad = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    grad[-1], grad[0], grad[2**31] = 3.0, 4.0, 12.0
    model, rest = torch.zeros_like(grad), torch.zeros(numel, dtype=torch.int16, device=device)
    one, options = torch.tensor(1.0, device=device), [SgdOptions(0.5, 0.0, 0.0, 0.0, False, False)]
    stats = CastStats.allocate(1, device)
    sgd_step([grad], [rest], options, [0], Factors(one, one), models=[model], stats=stats)
    assert (model[-1].item(), model[0].item(), model[2**31].item(), model[2**31 - 1].item()) == (-1.5, -2.0, -6.0, 0.0)


def test_steps_on_side_streams_take_turns(device: torch.device) -> None:
    """Numbers of a step are not overwritten while an earlier kernel reads them."""
    case = random_case(np.random.default_rng(2), "adam", 0.0).on(device)
    there = case.on("cpu")
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    torch.cuda.synchronize(device)
    for k in range(12):
        case.options = [o._replace(lr=0.1 / (k + 1)) for o in case.options]
        there.options = [o._replace(lr=0.1 / (k + 1)) for o in there.options]
        streams[k % 3].wait_stream(streams[(k - 1) % 3])
        with torch.cuda.stream(streams[k % 3]):
            torch.cuda._sleep(1_000_000)
            case.run()
        there.run()
    torch.cuda.synchronize(device)
    assert_same_results(case, there, "streams")


# -- the engine --------------------------------------------------------------------------------------------------------


def train(device: torch.device, make: Any, masters: str, steps: int = 7, bad: tuple[int, ...] = (0, 3, 4)) -> Any:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    params = [nn.Parameter(normal(s, dtypes[k % 3], k).to(device)) for k, s in enumerate((*SHAPES, (70_000,)))]
    targets = targets_of(params)
    scaler = DynamicLossScaler(init_scale=2.0**10, growth_interval=2)
    opt = MixedPrecisionOptimizer(make(params), scaler=scaler, fused_step=True, master_weights=masters)
    for k in range(steps):
        opt.zero_grad()
        factor = torch.tensor(float("inf") if k in bad else 1.0 / (k + 1), device=device)
        opt.backward(linear_problem(params, targets, factor))
        opt.clip_master_grads(0.5)
        opt.step()
    return params, opt


@by_masters
@by_maker
def test_training_has_the_bits_of_the_cpu(device: torch.device, make: Any, masters: str) -> None:
    params, opt = train(device, make, masters)
    others, there = train(torch.device("cpu"), make, masters)
    assert steps_in_one_pass(opt)
    assert opt.skipped_steps == there.skipped_steps == 3
    assert opt.loss_scale == there.loss_scale
    for k, (a, b) in enumerate(zip(params, others, strict=True)):
        assert_same_bits(a.detach().cpu(), b.detach(), f"parameter {k}")
    ours, theirs = opt.state_dict(), there.state_dict()
    for k, (a, b) in enumerate(zip(ours["masters"], theirs["masters"], strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(a.cpu(), b, f"master {k}")
    for k, state in theirs["optimizer"]["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                assert_same_bits(ours["optimizer"]["state"][k][name].cpu(), value, f"{name} of {k}")


def test_counters_are_saved_where_torch_has_them(device: torch.device) -> None:
    for make, where in ((MAKERS["AdamW"], "cpu"), (MAKERS["fused amsgrad"], device.type)):
        _, opt = train(device, make, "full")
        saved = copy.deepcopy(opt.state_dict())
        states = saved["optimizer"]["state"].values()
        assert {state["step"].device.type for state in states} == {where}
        live = [state["step"] for state in opt.state.values()]
        assert {step.device.type for step in live} == {device.type}
        opt.load_state_dict(saved)
        opt.param_groups[0]["differentiable"] = True
        assert not steps_in_one_pass(opt)
        opt.param_groups[0]["differentiable"] = False


@by_masters
@by_maker
def test_nothing_waits(device: torch.device, make: Any, masters: str) -> None:
    params = [nn.Parameter(normal(shape, torch.float16, k).to(device)) for k, shape in enumerate(SHAPES)]
    targets = targets_of(params)
    scaler = DynamicLossScaler(init_scale=2.0**10)  # no finite loss here overflows
    opt = MixedPrecisionOptimizer(make(params), scaler=scaler, fused_step=True, master_weights=masters)
    weights = [torch.full((), value, device=device) for value in (1.0, float("inf"), 0.5, 1.0, 2.0)]
    for k, weight in enumerate(weights):
        opt.zero_grad()
        loss = linear_problem(params, targets, weight)
        torch.cuda.set_sync_debug_mode("error" if k else "default")  # the first makes momentum buffers
        try:
            opt.scale_loss(loss).backward()
            opt.update_master_grads()
            opt.clip_master_grads(0.1)
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert opt.skipped_steps == 1


class Loop:
    """One fused training step over static inputs, as CUDA graphs want it."""

    def __init__(self, device: torch.device, kind: str) -> None:
        self.params = [nn.Parameter(normal(shape, torch.float16, k).to(device)) for k, shape in enumerate(SHAPES)]
        self.targets = targets_of(self.params)
        lr = torch.tensor(0.02, device=device)
        inner: Optimizer = SGD(self.params, lr=lr, momentum=0.9) if kind == "SGD" else AdamW(
            self.params, lr=lr, capturable=True, amsgrad=kind == "amsgrad"
        )  # fmt: skip
        self.lr = lr
        self.scaler = DynamicLossScaler(init_scale=2.0**10, growth_interval=2, hysteresis=1)
        self.opt = MixedPrecisionOptimizer(inner, scaler=self.scaler, fused_step=True)
        self.factor = torch.ones((), device=device)

    def step(self) -> None:
        self.opt.zero_grad(set_to_none=True)
        self.opt.scale_loss(linear_problem(self.params, self.targets, self.factor)).backward()
        self.opt.update_master_grads()
        self.opt.clip_master_grads(0.5)
        self.opt.step()

    def state(self) -> list[Tensor]:
        inner = [value for state in self.opt.state.values() for value in state.values() if isinstance(value, Tensor)]
        tensors = [*self.params, *self.opt.master_params(), *inner, self.scaler.scale, self.scaler.growth_tracker]
        return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("kind", ["AdamW", "amsgrad", "SGD"])
def test_a_captured_step_replays_what_eager_steps_do(device: torch.device, kind: str) -> None:
    eager, captured = Loop(device, kind), Loop(device, kind)
    for _ in range(3):
        eager.step()
    graph = graph_of_a_step(device, captured)
    for k, factor in enumerate([1.0, 0.5, float("inf"), 0.25, 1.0, float("nan"), float("inf"), 2.0, 1.0]):
        for loop in (eager, captured):
            loop.factor.fill_(factor)
            loop.lr.fill_(0.02 / (k + 1))
        eager.step()
        graph.replay()
        for n, (a, b) in enumerate(zip(captured.state(), eager.state(), strict=True)):
            assert_same_bits(a.cpu(), b.cpu(), f"step {k}, tensor {n}")
    assert captured.opt.skipped_steps == eager.opt.skipped_steps == 3
