"""What the unscaling pass does besides: hash the model as it goes by, look without writing, write clipped."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle_kernels as oracle
import pytest
import torch
from kernel_cases import KINDS, SIXTEEN, assert_same_values, make, raw, shape_of
from test_kernel_bits import SEEDS, UNSCALE_DTYPES, random_rows
from torch import Tensor

from fp16opt.kernels import (
    GradStats,
    PointerTables,
    Watch,
    multi_tensor_hash,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
)

ONE = torch.tensor(1.0)


def copies(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in tensors]


@pytest.mark.parametrize("seed", SEEDS)
def test_watched_params_are_hashed_whatever_their_gradient_is(implementation: str, seed: int) -> None:
    rng = np.random.default_rng(500 + seed)
    grads, outs = random_rows(rng, UNSCALE_DTYPES, 0.0)
    params: list[Tensor | None] = []
    for grad in grads:
        # Of the gradient's shape, in another layout now and then, or (as beside a sparse gradient) of another shape.
        shape = shape_of(rng) if grad is None or rng.random() < 0.2 else tuple(grad.shape)
        param = make(rng, shape, SIXTEEN[int(rng.integers(0, 2))], "reversed" if rng.random() < 0.2 else "plain")
        params.append(None if rng.random() < 0.1 else param)
    alone, along = (GradStats.allocate(len(grads), "cpu") for _ in range(2))
    watch = Watch.allocate(params, "cpu")
    watch.hashes.fill_(7)
    watch.samples.fill_(8)
    multi_tensor_unscale(grads, copies(outs), ONE, alone)
    multi_tensor_unscale(grads, copies(outs), ONE, along, watch=watch)
    for name in ("nonfinite", "sumsq", "norm", "found_inf"):
        assert torch.equal(getattr(alone, name), getattr(along, name)), name
    clipped = Watch.allocate(params, "cpu")
    clipped.hashes.fill_(7)
    clipped.samples.fill_(8)
    multi_tensor_unscale_clipped(grads, copies(outs), ONE, ONE, watch=clipped)
    assert torch.equal(clipped.hashes, watch.hashes)
    assert torch.equal(clipped.samples, watch.samples)
    samples = torch.full_like(watch.samples, 8)
    multi_tensor_hash(params, samples, sample=True)
    for i, param in enumerate(params):
        found = (watch.hashes[i].item(), watch.samples[i].item(), samples[i].item())
        if param is None:
            assert found == (7, 8, 8)
        else:
            sample = oracle.content_sample(raw(param))
            assert found == (oracle.content_hash(raw(param)), sample, sample), f"tensor {i}"


@pytest.mark.parametrize("numel", [1, 64, 8191, 8192, 8193, 65536, 65537, 65536 + 8192, 65536 + 8193, 131072])
def test_the_sample_is_64_of_every_8192_elements_and_all_of_a_short_chunk(implementation: str, numel: int) -> None:
    found = torch.zeros(1, dtype=torch.int64)
    values = torch.zeros(numel).half()
    multi_tensor_hash([values], found, sample=True)
    before = found.item()
    last_chunk = (numel - 1) // 65536 * 65536
    for i in {0, 63, 64, 8191, 8192, 8255, 8256, 65536, 65600, numel - 1}:
        if i >= numel:
            continue
        values[i] = 1.0
        multi_tensor_hash([values], found, sample=True)
        values[i] = 0.0
        short = i >= last_chunk and numel - last_chunk <= 8192
        assert (found.item() != before) == (short or i % 8192 < 64), i


@pytest.mark.parametrize("special", [0.0, 0.001])
@pytest.mark.parametrize("seed", SEEDS)
def test_looking_finds_what_writing_finds_and_writes_nothing(implementation: str, seed: int, special: float) -> None:
    grads, outs = random_rows(np.random.default_rng(600 + seed), UNSCALE_DTYPES, special)
    written, looked = (GradStats.allocate(len(grads), "cpu") for _ in range(2))
    inv_scale, tables = torch.tensor(0.3), PointerTables()
    multi_tensor_unscale(grads, copies(outs), inv_scale, written)
    before = [None if t is None else (t._version, raw(t)) for t in outs]
    multi_tensor_unscale(grads, outs, inv_scale, looked, write=False, tables=tables)
    for out, kept in zip(outs, before, strict=True):
        if out is not None and kept is not None:
            assert out._version == kept[0]
            assert (raw(out).view("u1") == kept[1].view("u1")).all()
    assert torch.equal(written.nonfinite, looked.nonfinite)
    assert torch.equal(written.found_inf, looked.found_inf)
    for name in ("sumsq", "norm"):
        assert torch.equal(getattr(written, name).nan_to_num(nan=-1), getattr(looked, name).nan_to_num(nan=-1)), name


@pytest.mark.parametrize("special", [0.0, 0.001])
@pytest.mark.parametrize("seed", SEEDS)
def test_unscaled_and_clipped_is_rounded_twice(implementation: str, seed: int, special: float) -> None:
    grads, outs = random_rows(np.random.default_rng(700 + seed), UNSCALE_DTYPES, special)
    inv_scale, factor = np.float32(0.3), np.float32(0.7)
    multi_tensor_unscale_clipped(grads, outs, torch.tensor(inv_scale), torch.tensor(factor))
    for i, (grad, out) in enumerate(zip(grads, outs, strict=True)):
        if grad is not None and out is not None:
            wide = oracle.unscale(raw(grad, out), KINDS[grad.dtype], inv_scale, None).out
            wanted = oracle.scale(wide, KINDS[out.dtype], factor)
            assert_same_values(raw(out), wanted, KINDS[out.dtype], f"tensor {i}")


def test_in_place_unscaled_and_clipped(implementation: str) -> None:
    grad = torch.linspace(-3, 3, 1000)
    wanted = (grad * 0.3) * 0.7
    multi_tensor_unscale_clipped([grad], [grad], torch.tensor(0.3), torch.tensor(0.7))
    assert torch.equal(grad, wanted)


def test_a_finite_gradient_that_overflows_is_flagged_by_a_look(implementation: str) -> None:
    for numel in (1, 64, 100, 70000):
        grad = torch.zeros(numel)
        grad[-1] = 3e38
        stats = GradStats.allocate(1, "cpu")
        multi_tensor_unscale([grad], [torch.zeros(numel)], torch.tensor(4.0), stats, write=False)
        assert (stats.nonfinite.item(), stats.found_inf.item()) == (1, 1.0)
        assert grad[-1] == torch.tensor(3e38)


def _watching(params: list[Tensor | None], **changes: Tensor) -> Callable[[], None]:
    def call() -> None:
        watch = Watch.allocate(params, "cpu")
        for name, value in changes.items():
            setattr(watch, name, value)
        multi_tensor_unscale([torch.ones(2).half()], [torch.zeros(2)], ONE, GradStats.allocate(1, "cpu"), watch=watch)

    return call


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, r"watch.params has 2 entries, grads has 1", _watching([torch.ones(2).half()] * 2)),
        (TypeError, r"wants float16 or bfloat16, got tensors\[0\] float32", _watching([torch.ones(2)])),
        (ValueError, r"watch.params are on meta, the gradients on cpu", _watching([torch.ones(2).half().to("meta")])),
        (TypeError, r"watch.hashes must be int64", _watching([torch.ones(2).half()], hashes=torch.zeros(1))),
        (TypeError, r"watch.samples must be int64", _watching([torch.ones(2).half()], samples=torch.zeros(1))),
        (
            ValueError,
            r"write=False goes with accumulate=False only",
            lambda: multi_tensor_unscale(
                [ONE], [ONE.clone()], ONE, GradStats.allocate(1, "cpu"), accumulate=True, write=False
            ),
        ),
        (
            TypeError,
            r"multi_tensor_unscale_clipped: factor must be float32, got float64",
            lambda: multi_tensor_unscale_clipped([ONE], [ONE.clone()], ONE, ONE.double()),
        ),
        (
            TypeError,
            r"multi_tensor_unscale_clipped: inv_scale must be a tensor, got float",
            lambda: multi_tensor_unscale_clipped([ONE], [ONE.clone()], 1.0, ONE),  # type: ignore[arg-type]
        ),
    ],
)
def test_refused(level: str, error: type[Exception], match: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=match):
        call()
