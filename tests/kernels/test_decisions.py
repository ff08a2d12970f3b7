"""Decisions in one launch against torch operations and plain numbers, bit for bit."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import emulated
import numpy as np
import pretended
import pytest
import torch
from engine.checks import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler
from fp16opt.engine import outcome as closing
from fp16opt.grad_scaler.face import _Rule
from fp16opt.kernels import GradStats, backends, cuda_devices, native

SCALES = st.integers(-14, 24).map(lambda e: 2.0**e)
FACTORS = st.floats(1.0 + 2.0**-10, 1e6, width=32) | st.sampled_from([2.0, 1.1, 3.0, 2.0**40])


def close(scaler: Any, found: float, counters: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A step's end, by the kernel."""
    stats = GradStats.allocate(3, "cpu")
    stats.found_inf.fill_(found)
    flags = torch.tensor([0, 3, 1], dtype=torch.int32)
    kept = torch.zeros(3, dtype=torch.int32)
    memory = scaler.memory
    assert memory is not None
    backends.close_step(stats=stats, flags=flags, kept=kept, found_inf=stats.found_inf, outcome=counters, scaler=memory)
    assert kept.tolist() == [0, 3, 1]
    assert stats.memory is not None
    assert not stats.memory.any()


def bits(scaler: Any) -> tuple[int, ...]:
    memory = scaler.memory
    return (int(memory.scale.view(torch.int32)), *memory.trackers.reshape(-1).tolist())


@st.composite
def dynamic_scalers(draw: Any) -> tuple[Any, Any]:
    """The same scaler twice; of both kinds: factors in float32, and as torch.amp takes them."""
    low, first, high = sorted(draw(st.lists(SCALES, min_size=3, max_size=3)))
    arguments = {
        "init_scale": first * draw(st.sampled_from([1.0, 1.0, 1.0 + 2.0**-20])) if first < high else first,
        "growth_factor": draw(FACTORS),
        "backoff_factor": 1.0 / draw(FACTORS),
        "growth_interval": draw(st.integers(1, 4)),
        "hysteresis": draw(st.integers(1, 3)),
        "min_scale": low,
        "max_scale": high,
    }
    if not draw(st.booleans()):
        return DynamicLossScaler(**arguments), DynamicLossScaler(**arguments)
    pair = _Rule(**arguments), _Rule(**arguments)
    for rule in pair:
        rule.set_factors(arguments["growth_factor"], arguments["backoff_factor"])
    return pair


@given(dynamic_scalers(), st.lists(st.booleans(), min_size=1, max_size=30))
def test_the_scale_follows_as_update_says(host: Any, scalers: tuple[Any, Any], overflows: list[bool]) -> None:
    ours, theirs = scalers
    last, skipped = torch.full((), 7.0), torch.zeros((), dtype=torch.float64)
    for k, overflow in enumerate(overflows):
        close(ours, float(overflow), (last, skipped))
        theirs.update(torch.tensor(float(overflow)))
        assert bits(ours) == bits(theirs), f"step {k} of {overflows}"
        assert last.item() == float(overflow)
    assert skipped.item() == sum(overflows)


@given(dynamic_scalers(), st.lists(st.booleans(), min_size=1, max_size=30))
def test_on_the_host_it_follows_alike(scalers: tuple[Any, Any], overflows: list[bool]) -> None:
    ours, theirs = scalers
    for k, overflow in enumerate(overflows):
        found, memory = torch.tensor(float(overflow)), ours.memory
        versions = memory.scale._version, memory.trackers._version
        moved = backends.follow(found, memory)
        if not native.available():
            assert moved is None
            return
        before = theirs.scale
        theirs.update(found)
        assert bits(ours) == bits(theirs), f"step {k} of {overflows}"
        assert moved is bool(theirs.scale != before) is (memory.scale._version > versions[0])
        assert memory.trackers._version > versions[1]


def test_a_scale_is_taken_anew_exactly_where_it_moved() -> None:
    """Its generation says so; the captured scale of a backward is the present one after each change."""
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = DynamicLossScaler(16.0, growth_interval=3, min_scale=1.0, max_scale=64.0)
    opt = MixedPrecisionOptimizer(torch.optim.SGD([p], lr=0.0), scaler=scaler)
    changes = {5: lambda: scaler.set_scale(2.0), 9: scaler.back_off, 12: lambda: opt.load_state_dict(saved)}
    saved = opt.state_dict()
    for k in range(16):
        changes.get(k, lambda: None)()
        opt.zero_grad()
        opt.backward((p * (float("inf") if k == 7 else 1.0)).sum())
        assert torch.equal(p.grad, torch.full((2,), float("inf") if k == 7 else opt.loss_scale).half()), k
        generation, scale = scaler.generation, opt.loss_scale
        opt.step()
        if native.available():
            assert (scaler.generation > generation) is (opt.loss_scale != scale), k


@pytest.mark.parametrize("make", [DynamicLossScaler, lambda: StaticLossScaler(8.0)])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_and_a_scaler_that_moved_are_followed_in_their_own_memory(make: Any, copied: Any) -> None:
    scaler = make()
    assert scaler.memory is scaler.memory
    other = copied(scaler)
    closing.update_scale(other, torch.tensor(1.0))
    assert (int(scaler.consecutive_skips), int(other.consecutive_skips)) == (0, 1)
    assert scaler.to("meta").memory.trackers.device.type == scaler.memory.scale.device.type == "meta"


def test_a_scaler_that_loads_another_policy_is_followed_by_its_rule() -> None:
    doubling, headroom = DynamicLossScaler(), DynamicLossScaler(policy="headroom")
    scaler = DynamicLossScaler()
    assert scaler.memory is not None
    scaler.load_state_dict(headroom.state_dict())
    assert scaler.memory is None
    scaler.load_state_dict(doubling.state_dict())
    assert scaler.memory is not None


@pytest.mark.parametrize("make", [lambda: DynamicLossScaler(8.0), lambda: StaticLossScaler(8.0)])
def test_a_scaler_made_in_inference_mode_counts_no_versions_and_is_followed(make: Any) -> None:
    with torch.inference_mode():
        scaler = make()
    with torch.inference_mode():
        closing.update_scale(scaler, torch.tensor(1.0))
    assert int(scaler.consecutive_skips) == 1
    assert float(scaler.scale) == (4.0 if scaler.dynamic else 8.0)


def test_closing_a_step_asks_a_scaler_of_the_users_own() -> None:
    class Own(DynamicLossScaler):
        def update(self, found_inf: torch.Tensor) -> None:
            asked.append(found_inf.item())
            super().update(found_inf)

    asked: list[float] = []
    of_ours = {"init_scale": 64.0, "growth_interval": 3, "hysteresis": 2}
    scalers: list[Any] = [Own(**of_ours), DynamicLossScaler(**of_ours), StaticLossScaler(2.0), StaticLossScaler(2.0)]
    stream = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    for found in stream:
        for scaler in scalers[:-1]:
            closing.update_scale(scaler, torch.tensor(found))
        scalers[-1].update(torch.tensor(found))
        assert bits_of(scalers[0])[:2] == bits_of(scalers[1])[:2]
        assert bits_of(scalers[2]) == bits_of(scalers[3])
    assert asked == stream


def bits_of(scaler: Any) -> tuple[float, ...]:
    return float(scaler.scale), int(scaler.consecutive_skips), scaler.generation


def test_counts_wrap_where_they_wrap_in_torch(host: Any) -> None:
    pair = [DynamicLossScaler(2.0, hysteresis=2**31 - 1, growth_interval=2**31 - 1) for _ in range(2)]
    for found in (1.0, 0.0):
        for scaler in pair:
            scaler._trackers.fill_(2**31 - 2)
        close(pair[0], found, (torch.zeros(()), torch.zeros((), dtype=torch.float64)))
        pair[1].update(torch.tensor(found))
        assert bits(pair[0]) == bits(pair[1])


NORMS = st.floats(0.0, math.inf) | st.sampled_from([math.nan, 1e-6, 3.5e38, 3.4e38, 1e300, 2.0**-149, 1.0])
LIMITS = st.floats(0.0, math.inf) | st.sampled_from([1.0, 1e39, 1e300])


@pytest.mark.parametrize("by", ["cpu", "cuda"])
@pytest.mark.parametrize("only_finite", [False, True])
@given(norm=NORMS, max_norm=LIMITS, found=st.sampled_from([None, 0.0, 1.0]))
def test_a_clip_is_decided_as_in_torch(
    emulated_cuda: emulated.Emulated, by: str, only_finite: bool, norm: float, max_norm: float, found: float | None
) -> None:
    given_norm = torch.tensor(norm, dtype=torch.float64)
    flag = None if found is None else torch.tensor(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "module", None)
        wanted = backends.decide_clip(given_norm, flag, max_norm, only_finite=only_finite)
    with pytest.MonkeyPatch.context() as patch:
        if by == "cuda":
            emulated.use(emulated_cuda, patch)
        got = backends.decide_clip(given_norm, flag, max_norm, only_finite=only_finite)
    for a, b, what in zip(got, wanted, ("norm", "factor"), strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a.isnan() and b.isnan()) or a.view(torch.int32) == b.view(torch.int32), f"{what}: {a} is not {b}"


@pytest.mark.parametrize(
    ("norm", "factor"), [(math.nan, math.nan), (math.inf, 0.0), (1e39, 1e-39), (1e300, 1e-300)], ids=str
)
def test_the_factor_of_norms_beyond_float32(norm: float, factor: float) -> None:
    _, found = backends.decide_clip(torch.tensor(norm, dtype=torch.float64), None, 1.0)
    assert_same_bits(found, torch.tensor(factor, dtype=torch.float64).float())


@given(norm=st.floats(0.0, 1e30), max_norm=st.floats(0.0, 1e30))
def test_the_factor_is_that_of_torchs_clip(norm: float, max_norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([norm])
    single = parameter.grad.double().norm()
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    factor = backends.clip_factor(single, max_norm)
    assert torch.equal(parameter.grad, torch.tensor([norm]) * factor)


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_a_captured_scale_and_its_inverse(emulated_cuda: emulated.Emulated, value: float) -> None:
    scale = torch.tensor(value)
    with pytest.MonkeyPatch.context() as patch:
        emulated.use(emulated_cuda, patch)
        now, inverse = backends.capture_scale(scale)
    scale.fill_(0.0)
    assert now.item() == value
    assert inverse.numpy() == np.float32(1.0) / np.float32(value)
    assert inverse.data_ptr() != now.data_ptr()


def test_other_devices_take_torchs_operations() -> None:
    stats, flags = GradStats.allocate(1, "cpu"), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"close_step: the compiled CUDA kernels do not serve cpu\. Use LossScaler"):
        backends.close_step(stats=stats, flags=flags, kept=flags.clone())
    with pytest.raises(ValueError, match="do not serve no tensors"):
        backends.close_step()
    scale = torch.tensor(8.0)
    now, inverse = backends.capture_scale(scale)
    scale.fill_(1.0)
    assert (now.item(), inverse.item()) == (8.0, 0.125)


def test_settings_that_are_loaded_are_written_in_place() -> None:
    """A CUDA graph that is replayed reads them."""
    scaler, other = DynamicLossScaler(8.0), DynamicLossScaler(16.0, 3.0, 0.25, growth_interval=7, hysteresis=2)
    memory = scaler.memory
    assert memory is not None
    names = ("_scale", "_trackers", "_other", "_limits", "_wrap", "_factors", "_settings")
    places = [getattr(scaler, name).data_ptr() for name in names]
    scaler.load_state_dict(other.state_dict())
    assert [getattr(scaler, name).data_ptr() for name in names] == places
    assert memory.settings is not None
    assert memory.settings.tolist() == [3.0, 0.25, 7.0, 2.0, 2.0**-14, 2.0**24]


def test_decisions_run_on_the_current_stream_and_hold_what_they_use(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    launched: list[tuple[Any, ...]] = []

    def hold(_: Any, given: Sequence[object]) -> None:
        held.extend(one.data_ptr() for one in given if isinstance(one, torch.Tensor))

    monkeypatch.setattr(host, "hold", hold)

    class Noted(pretended.Counting):
        def launch(self, name: str, blocks: int, stream: int, *arguments: bytes) -> None:
            launched.append((name, blocks, stream, len(arguments)))
            super().launch(name, blocks, stream, *arguments)

    monkeypatch.setattr(host, "current", 7)
    emulated.launch_on(Noted(cuda_devices.kernels_on(0)), monkeypatch)
    norm, found, scale = torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.0), torch.tensor(8.0)
    results = [*backends.decide_clip(norm, found, 1.0), *backends.capture_scale(scale)]
    flags, kept, stats = *torch.zeros(2, 1, dtype=torch.int32), GradStats.allocate(1, "cpu")
    backends.close_step(stats=stats, flags=flags, kept=kept, found_inf=found)
    assert launched == [(name, 1, 7, 1) for name in ("decide_clip", "capture_scale", "close_step")]
    used = [norm, found, scale, results[0], results[2], flags, kept, stats.memory]
    assert {tensor.data_ptr() for tensor in used if tensor is not None} <= set(held)
