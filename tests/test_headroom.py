"""policy="headroom": the rule against plain numbers, its state, what the optimizers tell it, and that rises hold."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp16opt import DynamicLossScaler, GradScaler, MixedPrecisionOptimizer
from fp16opt.scaling import LossScaler

single = np.float32


class Oracle:
    """The docstring's rule in plain numbers."""

    def __init__(self, init: float, interval: int = 2000, hysteresis: int = 1, least: float = 2.0**-14) -> None:
        self.scale, self.interval, self.hysteresis, self.least = init, interval, hysteresis, least
        self.ceiling, self.block, self.last, self.left = 2.0**24, 0.0, 0.0, 8
        self.found, self.clean, self.skips = False, 0, 0

    def update(self, overflow: bool, norm: float) -> None:
        if overflow:
            self.clean, self.skips = 0, self.skips + 1
            if self.skips < self.hysteresis:
                return
            backed = self.scale / 2
            self.ceiling = min(self.ceiling, backed)
            self.left = 64
            if not self.found or self.skips > self.hysteresis:
                backed = min(backed, 2.0**10 if self.scale > 2.0**10 else self.scale * 2.0**-10)
                self.left = 8
            self.scale = max(backed, self.least)
            return
        self.found, self.skips, self.clean = True, 0, self.clean + 1
        self.block = max(self.block, norm)
        self.left -= 1
        if self.clean == self.interval:
            self.clean, self.ceiling = 0, min(2 * self.ceiling, 2.0**24)
        largest = max(self.block, self.last)
        if largest:
            room = 2.0 ** math.floor(math.log2(single(2.0**15) / single(largest)))
            room = min(max(room, self.least), 2.0**24)
            self.scale = min(room, max(self.ceiling, self.least)) if self.left <= 0 else min(room, self.scale)
        if self.left <= 0:
            self.left, self.last, self.block = 64, self.block, 0.0


@pytest.mark.parametrize("seed", range(6))
def test_the_rule_in_plain_numbers(seed: int) -> None:
    draw = np.random.default_rng(seed)
    interval, hysteresis = int(draw.choice([7, 50, 2000])), int(draw.choice([1, 2, 3]))
    init = 2.0 ** int(draw.integers(0, 25))
    oracle = Oracle(init, interval, hysteresis)
    scaler = DynamicLossScaler(init, growth_interval=interval, hysteresis=hysteresis, policy="headroom")
    level = 1.0
    for number in range(400):
        if draw.random() < 0.02:
            level = float(2.0 ** draw.uniform(-8, 8))
        norm = float(single(level * draw.uniform(0.5, 1.0)))
        overflow = bool(norm * oracle.scale > 60000 or draw.random() < 0.01)
        scaler.see(torch.tensor(math.nan if overflow and number % 2 else norm))
        if number % 5 == 0:
            scaler.see(torch.tensor(norm / 2))  # a second optimizer of the step
        scaler.update(torch.tensor(float(overflow)))
        oracle.update(overflow, norm)
        assert scaler.scale.item() == oracle.scale, number
        assert (int(scaler.growth_tracker), int(scaler.consecutive_skips)) == (oracle.clean, oracle.skips)


def run(scaler: DynamicLossScaler, *steps: tuple[float, float]) -> list[float]:
    scales = []
    for overflow, norm in steps:
        scaler.see(torch.tensor(norm))
        scaler.update(torch.tensor(overflow))
        scales.append(scaler.scale.item())
    return scales


def test_what_overflowed_is_a_ceiling_until_it_is_lifted() -> None:
    scaler = DynamicLossScaler(2.0**4, growth_interval=200, policy="headroom")
    run(scaler, *[(0.0, 1.0)] * 8)
    assert run(scaler, (1.0, 1.0)) == [2.0**14]
    assert set(run(scaler, *[(0.0, 2.0**-9)] * 199)) == {2.0**14}
    assert run(scaler, *[(0.0, 2.0**-9)] * 64)[-1] == 2.0**15
    scaler.set_scale(2.0**10)
    assert run(scaler, *[(0.0, 2.0**-9)] * 64)[-1] == 2.0**24, "who sets the scale knows of no ceiling"
    assert scaler.back_off()
    assert run(scaler, *[(0.0, 2.0**-9)] * 64)[-1] == 2.0**23


def test_a_norm_that_float32_can_not_hold_is_not_counted() -> None:
    scaler = DynamicLossScaler(2.0**4, policy="headroom")
    assert set(run(scaler, *[(0.0, math.inf), (0.0, math.nan)] * 40)) == {2.0**4}


# -- settings and state ------------------------------------------------------------------------------------------------


def test_the_default_is_as_before() -> None:
    scaler = DynamicLossScaler()
    assert not scaler.follows_norms
    assert scaler.memory is not None
    assert not {"policy", "headroom"} & set(scaler.state_dict())
    assert "policy" not in repr(scaler)
    assert LossScaler.follows_norms is False


def test_a_policy_is_checked() -> None:
    for value in ("halving", None, 1):
        with pytest.raises(ValueError, match=r"policy must be 'doubling' or 'headroom', got"):
            DynamicLossScaler(policy=value)  # type: ignore[arg-type]
    scaler = DynamicLossScaler(policy="headroom")
    assert scaler.memory is None
    assert "policy='headroom'" in repr(scaler)


STEPS = [(1.0, math.inf), *[(0.0, 2.0**-6)] * 11, (1.0, 1.0), (0.0, 3.0), (0.0, 0.5)]


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("cut", [0, 1, 5, 12, 14])
def test_a_resumed_scaler_goes_on_as_the_other(how: str, cut: int) -> None:
    scaler = DynamicLossScaler(2.0**20, growth_interval=5, policy="headroom")
    run(scaler, *STEPS[:cut])
    if how == "state_dict":
        other = DynamicLossScaler()
        saved = scaler.state_dict()
        other.load_state_dict(saved)
        saved["headroom"].zero_()
        assert other.policy == "headroom"
    else:
        other = copy.deepcopy(scaler) if how == "deepcopy" else pickle.loads(pickle.dumps(scaler))
    rest = [*STEPS[cut:], *[(0.0, 2.0**-8)] * 70]
    assert run(other, *rest) == run(scaler, *rest)
    assert str(other.state_dict()) == str(scaler.state_dict())


def test_a_checkpoint_without_a_policy_is_of_the_doubling_rule() -> None:
    scaler = DynamicLossScaler(policy="headroom")
    scaler.load_state_dict(DynamicLossScaler(8.0).state_dict())
    assert (scaler.policy, scaler.follows_norms, scaler.scale.item()) == ("doubling", False, 8.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "halving"}, r"scaler state: policy must be 'doubling' or 'headroom'"),
        ({"headroom": torch.ones(4)}, r"scaler state: headroom must be 5 finite numbers \(largest, .* got \[1.0"),
        ({"headroom": [1.0, 2.0, 3.0, 4.0, math.nan]}, "headroom must be 5 finite numbers"),
        ({"headroom": [1.0, 2.0, -3.0, 4.0, 1.0]}, "none negative"),
        ({"headroom": "five"}, "headroom must be 5 finite numbers"),
        ({"headroom": torch.ones(5, device="meta")}, "headroom must be 5 finite numbers"),
        ({"headroom": None}, "headroom must be 5 finite numbers"),
    ],
)
def test_a_wrong_state_is_refused(change: dict[str, Any], message: str) -> None:
    scaler = DynamicLossScaler(policy="headroom")
    run(scaler, *STEPS)
    before = str(scaler.state_dict())
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict({**scaler.state_dict(), **change})
    lacks = {name: value for name, value in scaler.state_dict().items() if name != "headroom"}
    with pytest.raises(ValueError, match="lacks the key 'headroom'"):
        scaler.load_state_dict(lacks)
    assert str(scaler.state_dict()) == before


# -- what optimizers tell it -------------------------------------------------------------------------------------------


class Noting(DynamicLossScaler):
    """Remembers the largest norm that it was told for each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(policy="headroom", **options)
        self.told: list[float] = []
        self._now: list[float] = []

    def see(self, norm: Tensor) -> None:
        assert norm.shape == ()
        assert norm.dtype == torch.float32
        self._now.append(norm.item())
        super().see(norm)

    def update(self, found_inf: Tensor) -> None:
        self.told.append(max(self._now, default=math.nan))
        self._now = []
        super().update(found_inf)


MODES: list[dict[str, Any]] = [
    {},
    {"fused_step": False},
    {"grad_accumulation": "fp32"},
    {"master_weights": "split"},
    {"master_weights": "none"},
]


@pytest.mark.parametrize("clip", ["", "ours", "torch's"])
@pytest.mark.parametrize("options", MODES)
def test_the_largest_norm_of_a_tensor_before_the_clip(options: dict[str, Any], clip: str) -> None:
    kinds = [(4, torch.float16), (9, torch.float16), (1, torch.float32)]
    params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n, dtype in kinds]
    scaler = Noting(init_scale=2.0**6)
    opt = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.0), scaler=scaler, **options)
    for factors in ([1.0, 2.0, 3.0], [8.0, 2.0, 3.0], [1.0, 0.0, 40.0]):
        opt.zero_grad()
        opt.backward(torch.stack([f * p.float().sum() for f, p in zip(factors, params, strict=True)]).sum())
        if clip == "ours":
            opt.clip_master_grads(0.5)
        elif clip and options.get("master_weights") != "split":
            opt.update_master_grads()  # without masters nothing tells that gradients are read
            nn.utils.clip_grad_norm_(list(opt.master_params()), 0.5)
        opt.step()
    assert scaler.told == [6.0, 16.0, 40.0]  # of 4, 9 and 1 elements: factor times sqrt(n)


def test_each_scaler_hears_of_its_own_steps() -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    one, two = Noting(init_scale=2.0**6), Noting(init_scale=2.0**4)
    opt = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.0), scaler=one)
    opt.backward(param.float().sum())
    opt.backward(param.float().sum() * 4.0, scaler=two)
    opt.step()
    opt.zero_grad()
    opt.backward(param.float().sum())
    opt.step()
    assert two.told == [10.0], "of the sum so far"
    assert one.told[-1] == 2.0
    assert len(one.told) == 2


def test_a_batch_that_was_given_up_is_no_step() -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler = Noting(init_scale=2.0**6)
    opt = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.0), scaler=scaler)
    opt.backward(param.float().sum())
    opt.zero_grad()
    assert scaler.told == []


@pytest.mark.parametrize("seed", range(3))
def test_a_rise_never_overflows_on_gradients_like_those_seen(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.zeros(32, dtype=torch.float16)) for _ in range(3)]
    scaler = DynamicLossScaler(2.0**24, policy="headroom")
    opt = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.0), scaler=scaler)
    scales = []
    for _ in range(150):
        opt.zero_grad()
        directions = [torch.rand(32, generator=draw) * 0.01 for _ in params]
        opt.backward(torch.stack([(p.float() * d).sum() for p, d in zip(params, directions, strict=True)]).sum())
        opt.step()
        scales.append(opt.loss_scale)
    assert opt.skipped_steps <= 1
    assert scales[-1] >= 2.0**18, "and it does rise"


def test_a_grad_scaler_has_it_too() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler = GradScaler("cpu", init_scale=2.0**24, max_scale=2.0**24, policy="headroom")

    def step(mine: GradScaler, clip: bool) -> None:
        optimizer.zero_grad()
        mine.scale((param.half() * 2.0).float().sum()).backward()
        if clip:
            mine.clip_grad_norm_(optimizer, 0.1)
        mine.step(optimizer)
        mine.update()

    for number in range(12):
        step(scaler, clip=number % 2 == 0)
    assert scaler.skipped_steps == 1
    assert scaler.get_scale() == 2.0**13  # the norm is 4
    other = GradScaler("cpu")
    saved = pickle.loads(pickle.dumps(scaler.state_dict()))
    assert all(type(value) in (int, float, str, list, type(None)) for value in saved["fp16opt"].values())
    other.load_state_dict(saved)
    for mine in (scaler, other):
        for number in range(60):
            step(mine, clip=number % 2 == 0)
    assert str(other.state_dict()) == str(scaler.state_dict())
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(saved)
    assert theirs.get_scale() == 2.0**13
    assert "policy" not in GradScaler("cpu").state_dict()["fp16opt"]
    with pytest.raises(ValueError, match="policy must be"):
        GradScaler("cpu", policy="x")
