"""multi_tensor_sample: digests by which a write to a 16-bit tensor is noticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle_kernels as oracle
import pytest
import torch
from kernel_cases import LAYOUTS, SIXTEEN, make, raw, seeds, shape_of
from torch import Tensor

from fp16opt.kernels import CallCache, multi_tensor_sample, reference

LONG = [16384, 16385, 65536, 65537, 131071, 131072, 200000, 1009 * 64]


def digest(tensor: Tensor) -> int:
    found = torch.zeros(1, dtype=torch.int64)
    multi_tensor_sample([tensor], found)
    return int(found.item())


@seeds(4)
def test_digests_of_random_lists(implementation: str, seed: int) -> None:
    rng, tensors, tables = np.random.default_rng(seed), [], CallCache()
    for _ in range(24):
        shape = (int(rng.choice(LONG)),) if rng.random() < 0.2 else shape_of(rng)
        tensor = make(rng, shape, SIXTEEN[int(rng.integers(0, 2))], LAYOUTS[int(rng.integers(0, len(LAYOUTS)))])
        tensors.append(None if rng.random() < 0.1 else tensor)
    for _ in range(2):
        samples = torch.full((24,), 7, dtype=torch.int64)
        multi_tensor_sample(tensors, samples, cache=tables)
        for i, tensor in enumerate(tensors):
            assert samples[i].item() == (7 if tensor is None else oracle.sample(raw(tensor))), f"tensor {i}"


@pytest.mark.parametrize("numel", LONG)
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_digests_of_long_tensors(implementation: str, dtype: torch.dtype, numel: int) -> None:
    rng = np.random.default_rng(numel)
    values = make(rng, (numel,), dtype, special=0.01)
    assert digest(values) == oracle.sample(raw(values))
    one_behind = torch.cat([values[:1], values])[1:]  # at another alignment
    assert digest(one_behind) == digest(values)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("numel", [517, 16384, 50000])
def test_every_bit_of_every_sampled_element_counts(level: str, dtype: torch.dtype, numel: int) -> None:
    first, stride = make(np.random.default_rng(7), (numel,), dtype), oracle.lattice_stride(numel)
    last = (numel - 1) // stride
    digests = {digest(first)}
    places = [stride * k for k in (0, 1, 2, 3, 4, min(last, 63), min(last, 64), last - 1, last)]
    for place in sorted(set(places)):
        for bit in range(16):
            changed = first.clone()
            changed.view(torch.int16)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
            digests.add(digest(changed))
    assert len(digests) == 1 + 16 * len(set(places))
    swapped = first.clone()
    swapped[0], swapped[stride] = first[stride], first[0]
    assert digest(swapped) not in digests


def test_an_element_beside_the_lattice_does_not_count(level: str) -> None:
    values = torch.zeros(50000).half()
    before = digest(values)
    values[1:1009] = 1.0
    assert digest(values) == before


def row_lengths() -> list[tuple[int, ...]]:
    return [(1100, 1009), (1200, 1010), (2000, 1024), (1100, 1008), (15000, 3), (40000, 7), (512, 64, 3, 3)]


WRITES: dict[str, Callable[[Tensor], object]] = {
    "a copy": lambda t: t.copy_(torch.randn_like(t)),
    "the first column": lambda t: t[:, 0].add_(1.0),
    "a column": lambda t: t[:, t.shape[1] // 2].neg_(),
    "the last column": lambda t: t[:, -1].mul_(3.0),
    "a mask": lambda t: t.masked_fill_(torch.rand(t.shape, generator=torch.Generator().manual_seed(1)) < 0.1, 0.0),
    "the lower triangle": lambda t: t.triu_() if t.dim() == 2 else t.mul_(0.5),
    "one place of each filter": lambda t: t[..., -1].add_(1.0),
    "a step": lambda t: t.sub_(0.01 * torch.sign(t)),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", row_lengths(), ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_writes_to_large_tensors_are_seen(write: str, shape: tuple[int, ...], transposed: bool) -> None:
    """Where a column has as many elements as the lattice's step, no column is missed."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator).half()
    if transposed:
        values = values.transpose(0, 1)
    if values.numel() // max(values.shape[1], values.shape[-1]) < 1009 and write not in ("a copy", "a mask", "a step"):
        return  # what is written may be fewer elements than the step is long
    before = digest(values)
    WRITES[write](values)
    assert digest(values) != before


@pytest.mark.parametrize("shape", row_lengths(), ids=str)
def test_no_dimension_has_a_divisor_in_common_with_the_step(shape: tuple[int, ...]) -> None:
    numel = int(np.prod(shape))
    stride = oracle.lattice_stride(numel)
    assert all(np.gcd(stride, n) == 1 for n in shape)
    assert stride == reference.sample_stride(numel)
    assert 1009 <= stride < 1040


def test_what_has_the_same_bits_in_memory_has_the_same_digest(level: str) -> None:
    values = torch.randn(300, 200).half()
    assert digest(values.t()) == digest(values)
    assert digest(values.bfloat16().view(torch.float16)) == digest(values.bfloat16())
    assert digest(values.repeat_interleave(2, 1)[:, ::2]) == digest(values)
