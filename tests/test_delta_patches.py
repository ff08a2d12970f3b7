"""Deltas for other loaders: patches by their names, in their shapes; and who notices that one went astray."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pretended
import pytest
import torch
from test_deltas import BFLOAT, HALF, MODES, assert_equal, bits, pair, resume, sent, step, step_small, write_some
from torch import Tensor, nn

import fp16opt
from fp16opt import MixedPrecisionOptimizer, WeightDelta, WeightPatch

SYNCS = int(os.environ.get("FP16OPT_DELTA_SYNCS", "8"))
"""Of each random walk; FP16OPT_DELTA_SYNCS=500 makes 9,000 of one rank."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="fp16opt")


# -- a sampler with other names ----------------------------------------------------------------------------------------


def their_names(name: str, shape: tuple[int, ...]) -> Any:
    """Tensors of Net divided, stacked apart, joined, renamed, given twice and left out."""
    if name == "a.weight":
        return [("a.q", 0, (30, 67)), ("a.k", 30, (20, 67)), ("a.v", 50, (15, 67))]
    if name == "conv.weight":
        return [(f"experts.{number}", number, shape[1:]) for number in range(shape[0])]
    if name in ("a.bias", "conv.bias"):
        return [("biases", 0 if name == "a.bias" else 65, (70,))]
    if name == "b.weight":
        return [("embed", 0, shape), ("head", 0, shape)]
    return None if name == "norm.num_batches_tracked" else f"model.{name}"


def theirs_of(model: nn.Module) -> dict[str, Tensor]:
    """What a sampler with these names has when it has the model's weights, made without the library."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    q, k, v = state.pop("a.weight").split([30, 20, 15])
    made = {"a.q": q, "a.k": k, "a.v": v, "biases": torch.cat([state.pop("a.bias"), state.pop("conv.bias")])}
    made |= {f"experts.{number}": part for number, part in enumerate(state.pop("conv.weight"))}
    made |= {"embed": state.pop("b.weight"), "head": state.pop("tied.weight")}
    del state["norm.num_batches_tracked"]
    return {name: value.clone().contiguous() for name, value in (made | prefixed(state)).items()}


def prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in state.items()}


def load(state: dict[str, Tensor], patches: Iterable[WeightPatch]) -> int:
    """What samplers do: a sparse patch is a whole tensor of NaNs with the values in it, and NaNs are not written."""
    count, sparse = 0, False
    for patch in patches:
        target = state[patch.name]
        assert (target.shape, target.dtype, patch.values.dim()) == (patch.shape, patch.dtype, 1)
        assert patch.values.dtype == patch.dtype
        if patch.indices is None:
            assert not sparse or patch.name == "biases", "dense ones come first"
            new = patch.values.view(patch.shape)
        else:
            sparse = True
            assert patch.indices.dtype == torch.int32
            assert (patch.indices[1:] > patch.indices[:-1]).all()
            assert not patch.values.isnan().any()
            whole = torch.full((math.prod(patch.shape),), math.nan, dtype=patch.dtype)
            whole.index_copy_(0, patch.indices.long(), patch.values)
            whole = whole.view(patch.shape)
            new = torch.where(whole.isnan(), target, whole)
        target.copy_(new)
        count += patch.values.numel()
    return count


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("mode", MODES)
def test_random_syncs(mode: str, dtype: torch.dtype) -> None:
    """One to five steps, overflows, writes by others and resumes; single or merged, in any chunks, also from files.

    To three samplers: one applies the deltas themselves, two load patches under their names or under ours.
    """
    rng = random.Random(f"{mode}{dtype} patches")
    model, sampler, opt = pair(dtype, **MODES[mode])
    applied, theirs, ours = copy.deepcopy(sampler), theirs_of(model), sampler.state_dict()
    waiting: list[WeightDelta] = [opt.take_delta(model)]  # from here on writes to frozen parameters are seen too
    previous: WeightDelta | None = None
    saved: list[Any] = []
    # AdamW's epsilon is 0 in float16: weights become NaN, and parts of a tensor can't send these.
    goes_by_patches = mode != "no masters" or dtype != HALF
    for _ in range(SYNCS):
        for _ in range(rng.randint(1, 5)):
            step(model, opt, overflows=rng.random() < 0.2)
            if rng.random() < 0.2:
                write_some(model, rng, opt)
            if rng.random() < 0.1 and mode != "no masters":
                resume(model, opt, saved, rng)
            if rng.random() < 0.3:
                waiting.append(opt.take_delta(model))
        waiting.append(opt.take_delta(model))
        delta = WeightDelta.merge(waiting)
        for one in [delta] if rng.random() < 0.3 else waiting:
            (sent(one) if rng.random() < 0.5 else one).apply_(applied)
        waiting.clear()
        assert_equal(model, applied)
        if not goes_by_patches:
            continue
        delta = sent(delta) if rng.random() < 0.3 else delta
        chunk = rng.choice([3000, 1 << 29])
        load(theirs, delta.patches(chunk_bytes=chunk, names=their_names))
        assert load(ours, delta.patches(chunk_bytes=chunk)) == delta.num_changed, "each element once"
        assert_equal(theirs_of(model), theirs)
        assert_equal(model, sampler)
        delta.verify(sampler, previous)
        assert fp16opt.digests(model) == fp16opt.digests(sampler)
        previous = delta


def one_step(**options: Any) -> tuple[nn.Linear, nn.Linear, MixedPrecisionOptimizer]:
    """A model of one weight whose first three rows alone change, and a copy of it as it was."""
    model = nn.Linear(8, 10, bias=False, dtype=HALF)
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), track_changes=True, **options)
    before = copy.deepcopy(model)
    opt.backward(model(torch.ones(1, 8, dtype=HALF))[:, :3].float().sum())
    opt.step()
    return model, before, opt


def test_a_patch_has_what_changed_in_it() -> None:
    model, before, opt = one_step()
    (patch,) = opt.take_delta(model).patches()
    assert patch[:3] == ("weight", (10, 8), HALF)
    assert patch.indices is not None
    assert patch.indices.tolist() == list(range(24))
    assert torch.equal(patch.values, model.weight.view(-1)[:24])
    assert before.weight.view(-1)[:24].ne(patch.values).all()
    values = patch.values.clone()
    step_small(model, opt)
    assert torch.equal(patch.values, values), "a later step does not write into it"
    opt.take_delta(model)
    with torch.no_grad():
        model.weight.mul_(2)  # comes whole
    (whole,) = opt.take_delta(model).patches()
    assert whole.indices is None
    with torch.no_grad():
        expected = model.weight.clone()
        model.weight.mul_(2)
    assert torch.equal(whole.values.view(10, 8), expected), "nor does another write"


def test_chunks_are_as_small_as_asked_for() -> None:
    model, _, opt = one_step()
    delta = opt.take_delta(model)
    for chunk in (1, 48, 100):
        patches = list(delta.patches(chunk_bytes=chunk))
        assert len(patches) > 1
        assert all(patch.values.numel() * 6 <= max(48, chunk) for patch in patches)
        assert torch.cat([patch.indices for patch in patches if patch.indices is not None]).tolist() == list(range(24))
    with pytest.raises(ValueError, match=r"patches: chunk_bytes must be positive, got 0\."):
        delta.patches(chunk_bytes=0)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ([("q", 4, (7, 8))], ValueError, r"names puts 'q' of shape \(7, 8\) and 'weight' of shape \(10, 8\) together"),
        ([("q", -1, (2, 8))], ValueError, r"from row -1 on\. 16 elements from there are not in the 80"),
        (
            [("all", 3, (12, 8))],
            ValueError,
            r"together from row 3 on\. 80 elements from there are not in the 96 of the",
        ),
        (3, TypeError, r"names\('weight', \(10, 8\)\) returned 3\. Expected a name, None, or a list"),
        ([("q", 0)], TypeError, "Expected a name, None, or a list"),
        ([(0, "q", (1,))], TypeError, "Expected a name, None, or a list"),
    ],
)
def test_names_that_do_not_fit_are_refused_before_there_is_a_patch(given: Any, error: Any, match: str) -> None:
    model, _, opt = one_step()
    delta = opt.take_delta(model)
    with pytest.raises(error, match=match):
        delta.patches(names=lambda name, shape: given)


def test_a_tensor_that_gets_a_nan_comes_whole() -> None:
    """Loaders mark what did not change by NaN."""
    model, _, opt = one_step()
    opt.take_delta(model)
    with torch.no_grad():
        next(iter(opt.master_params()))[9, 7] = math.nan
    opt.write_masters()
    (patch,) = opt.take_delta(model).patches()
    assert patch.indices is None
    assert torch.equal(bits(patch.values), bits(model.weight))


def test_a_delta_moves() -> None:
    model, before, opt = one_step()
    delta = opt.take_delta(model)
    there = delta.to("meta")
    assert {change.values.device.type for change in there.changes if change.values is not None} == {"meta"}
    assert {patch.values.device.type for patch in delta.patches(device="meta")} == {"meta"}
    assert (there.sequence, there.since, there.source) == (delta.sequence, delta.since, delta.source)
    delta.to("cpu").apply_(before)
    assert_equal(model, before)


@pytest.mark.parametrize("mode", ["one pass", "wrapped", "split24", "8-bit", "no masters"])
def test_no_weight_goes_to_the_host(mode: str, emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended card: what take_delta reads are two numbers a tensor and how many changed, patches how many."""
    pretended.pretend(emulated_cuda, monkeypatch)
    model, _, opt = pair(**MODES[mode])
    step(model, opt)
    moved: list[Tensor] = []
    for name in ("cpu", "numpy", "tolist"):
        original = getattr(Tensor, name)

        def noted(self: Tensor, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            moved.append(self)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, noted)
    original_to = Tensor.to

    def noted_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "cpu" in map(str, (*args, kwargs.get("device"))):
            moved.append(self)
        return original_to(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", noted_to)
    delta = opt.take_delta(model)
    assert all(tensor.dtype == torch.int64 for tensor in moved), "digests and guards"
    assert sum(tensor.numel() for tensor in moved) <= 2 * len(delta.changes)
    moved.clear()
    assert delta.num_changed > 4000
    for _ in delta.patches():
        assert not moved
    for _ in delta.patches(names=their_names):
        assert all(tensor.shape[1:] == (2,) for tensor in moved), "where the blocks of a divided tensor begin and end"
    assert sum(tensor.numel() for tensor in moved) <= 2 * (3 + 5), "of a.weight and of conv.weight"
    moved.clear()
    list(delta.patches(device="cpu"))
    assert moved, "what was asked for is seen here"


# -- digests and verify ------------------------------------------------------------------------------------------------


def test_digests_tell_any_bit() -> None:
    model, other, _ = pair()
    found = fp16opt.digests(model)
    assert list(found) == list(model.state_dict())
    assert found == fp16opt.digests(other)
    assert found["b.weight"] == found["tied.weight"]
    assert all(-(2**63) <= number < 2**63 for number in found.values())
    rng = random.Random(0)
    for name, tensor in other.state_dict().items():
        if tensor.numel():
            flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().permute(0, 2, 3, 1).view(-1)
            word = flat[rng.randrange(flat.numel())].view(1).view(torch.uint8)
            word[0] ^= 1 << rng.randrange(8)
            now = fp16opt.digests(other)
            names = {"b.weight", "tied.weight"}
            assert {key for key in now if now[key] != found[key]} == (names if name in names else {name})
            found = now
    with pytest.raises(TypeError, match="digests: expected a Module or a state_dict, got int"):
        fp16opt.digests(3)


class Stream:
    """A trainer, a sampler that loads patches without any check, and two deltas that were verified there."""

    def __init__(self, mode: str, rng: random.Random, lr: float) -> None:
        torch.manual_seed(rng.randrange(1000))
        self.model, self.sampler, self.opt = pair(lr=lr, **MODES[mode])
        self.deltas: list[WeightDelta] = []
        self.rng = rng
        for _ in range(2):
            self.sync(self.take())

    def take(self) -> WeightDelta:
        for _ in range(self.rng.randint(1, 3)):
            step(self.model, self.opt)
        return self.opt.take_delta(self.model)

    def load(self, delta: WeightDelta) -> None:
        load(self.sampler.state_dict(), delta.patches())

    def sync(self, delta: WeightDelta) -> None:
        self.load(delta)
        delta.verify(self.sampler, self.deltas[-1] if self.deltas else None)
        self.deltas.append(delta)


def not_loaded(stream: Stream, other: Stream) -> Iterator[WeightDelta]:
    yield stream.take()


def not_received(stream: Stream, other: Stream) -> Iterator[WeightDelta]:
    stream.take()
    delta = stream.take()
    stream.load(delta)
    yield delta


def received_again(stream: Stream, other: Stream) -> Iterator[WeightDelta]:
    stream.load(stream.deltas[0])
    yield stream.deltas[0]


def loaded_again_behind(stream: Stream, other: Stream) -> Iterator[WeightDelta]:
    delta = stream.take()
    stream.load(delta)
    stream.load(stream.deltas[-1])
    yield delta


def of_another_run(stream: Stream, other: Stream) -> Iterator[WeightDelta]:
    stream.load(other.deltas[-1])
    yield other.deltas[-1]


def of_another_run_between(stream: Stream, other: Stream) -> Iterator[WeightDelta]:
    stream.load(other.deltas[0])
    delta = stream.take()
    stream.load(delta)
    yield delta


def to_other_weights(stream: Stream, other: Stream) -> Iterator[WeightDelta]:
    with torch.no_grad():
        stream.sampler.a.weight.view(-1)[::3] += 1
    delta = stream.take()
    stream.load(delta)
    yield delta


FAULTS: list[tuple[Callable[[Stream, Stream], Iterator[WeightDelta]], str]] = [
    (not_loaded, r"delta 3 was lost"),
    (not_received, r"what is between delta 2 and delta 4 was lost"),
    (received_again, r"delta 1 was applied twice"),
    (loaded_again_behind, r"an earlier delta was applied twice"),
    (of_another_run, r"applied to other weights.* another optimizer than delta 2"),
    (of_another_run_between, r"applied to other weights"),
    (to_other_weights, r"applied to other weights"),
]


@pytest.mark.parametrize("mode", ["one pass", "split24"])
@pytest.mark.parametrize(("fault", "match"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_delta_that_went_astray_is_named(
    fault: Callable[[Stream, Stream], Iterator[WeightDelta]], match: str, mode: str
) -> None:
    rng = random.Random(f"{fault.__name__}{mode}")
    for _ in range(max(1, SYNCS // 6)):
        stream, other = (Stream(mode, rng, lr) for lr in (1e-4, 3e-4))
        (delta,) = fault(stream, other)
        with pytest.raises(ValueError, match=rf"verify: '[\w.]+' is not what it was .* at delta \d: .*{match}") as seen:
            delta.verify(stream.sampler, stream.deltas[-1])
        named = str(seen.value).split("'")[1]
        goal = max(delta, stream.deltas[-1], key=lambda one: one.sequence)
        (expected,) = (change.after for change in goal.changes if change.name == named)
        assert fp16opt.digests(stream.sampler)[named] != expected


def test_verify_without_the_one_before() -> None:
    stream = Stream("one pass", random.Random(0), 1e-4)
    (delta,) = not_received(stream, stream)
    with pytest.raises(ValueError, match="applied to other weights than those it began with, or delta 3 was lost"):
        delta.verify(stream.sampler)
    with pytest.raises(TypeError, match="verify: expected a Module or a state_dict, got list"):
        delta.verify([])
    with pytest.raises(ValueError, match="verify: the model has no 'frozen'"):
        delta.verify({})
