"""Every operation on the GPU against the CPU backend, bit for bit (payloads of nans aside)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from card import IS_THERE, seeds
from kernel_cases import BORDERS, LAYOUTS, make, shape_of
from torch import Tensor

from fp16opt import kernels
from fp16opt.kernels import CallCache, CastStats, GradStats, cuda_devices

pytestmark = pytest.mark.gpu
SIXTEEN = (torch.float16, torch.bfloat16)
Lists = list[list[Tensor | None]]


def to(device: torch.device, lists: Lists) -> Lists:
    """The same values with the same strides. Tensors are moved together with the memory around them."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device, copy=True)
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return [[moved(tensor) for tensor in entries] for entries in lists]


def same(got: Any, want: Any, where: str) -> None:
    """Equal bits, or both nan."""
    if isinstance(want, Tensor):
        left, right = got.detach().cpu(), want.detach()
        assert left.dtype == right.dtype
        as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[right.element_size()]
        equal = left.contiguous().view(as_bits) == right.contiguous().view(as_bits)
        if right.dtype.is_floating_point:
            equal |= left.isnan() & right.isnan()
        assert equal.all(), f"{where}: {int((~equal).sum())} of {equal.numel()} differ"
    elif isinstance(want, list | tuple):
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            same(a, b, f"{where}[{k}]")
    else:
        assert got == want


def unscale(accumulate: bool = False, write: bool = True) -> Callable[..., Any]:
    def call(lists: Lists, tables: CallCache) -> Any:
        grads, outs = lists
        device = next(t.device for t in outs if t is not None)
        stats = GradStats.allocate(len(grads), device)
        scale = torch.tensor(2.0**-7, device=device)
        kernels.multi_tensor_unscale(grads, outs, scale, stats, accumulate=accumulate, write=write, cache=tables)
        return outs, stats.nonfinite, stats.sumsq, stats.norm, stats.found_inf

    return call


def clipped(lists: Lists, tables: CallCache) -> Any:
    device = next(t.device for t in lists[1] if t is not None)
    scale, factor = torch.tensor(0.1, device=device), torch.tensor(0.3, device=device)
    kernels.multi_tensor_unscale_clipped(*lists, scale, factor, cache=tables)
    return lists[1]


def scale(lists: Lists, tables: CallCache) -> Any:
    device = next(t.device for t in lists[0] if t is not None)
    kernels.multi_tensor_scale(lists[0], torch.tensor(0.3, device=device), cache=tables)
    return lists[0]


def lerp(lists: Lists, tables: CallCache) -> Any:
    for weight in (0.001, 0.75):
        kernels.multi_tensor_lerp(lists[0], lists[1], weight, cache=tables)
    return lists[0]


def axpby(lists: Lists, tables: CallCache) -> Any:
    device = next(t.device for t in lists[0] if t is not None)
    found = torch.zeros((), device=device)
    kernels.multi_tensor_axpby(0.3, lists[0], -1.7, lists[1], lists[2], found_inf=found, cache=tables)
    return lists[2], found


def cast(lists: Lists, tables: CallCache) -> Any:
    device = next(t.device for t in lists[0] if t is not None)
    stats = CastStats.allocate(len(lists[0]), device)
    kernels.multi_tensor_cast(*lists, stats, cache=tables)
    return lists[1], stats.overflow


def sample(lists: Lists, tables: CallCache) -> Any:
    device = next(t.device for t in lists[0] if t is not None)
    found = torch.zeros(len(lists[0]), dtype=torch.int64, device=device)
    kernels.multi_tensor_sample(lists[0], found, cache=tables)
    return found


def l2norm(lists: Lists, tables: CallCache) -> Any:
    return kernels.multi_tensor_l2norm(lists[0], cache=tables)


def measure(lists: Lists, tables: CallCache) -> Any:
    return kernels.multi_tensor_measure(lists[0], cache=tables)


def compare(lists: Lists, tables: CallCache) -> Any:
    before = kernels.Snapshots([None if master is None else master * 0.999 for master in lists[0]])
    return kernels.multi_tensor_compare(lists[0], lists[1], before, cache=tables)


UP_TO_SINGLE = (*SIXTEEN, torch.float32)
ANY = (*UP_TO_SINGLE, torch.float64)
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "unscale": (unscale(), (UP_TO_SINGLE, torch.float32)),
    "accumulate": (unscale(accumulate=True), (UP_TO_SINGLE, torch.float32)),
    "look": (unscale(write=False), (UP_TO_SINGLE, torch.float32)),
    "unscale float64": (unscale(), (torch.float64, torch.float64)),
    "unscale clipped": (clipped, (UP_TO_SINGLE, torch.float32)),
    "scale": (scale, (ANY,)),
    "axpby": (axpby, (UP_TO_SINGLE, UP_TO_SINGLE, UP_TO_SINGLE)),
    "lerp": (lerp, (torch.float32, UP_TO_SINGLE)),
    "lerp float64": (lerp, (torch.float64, torch.float64)),
    "cast": (cast, (torch.float32, SIXTEEN)),
    "sample": (sample, (SIXTEEN,)),
    "l2norm": (l2norm, (ANY,)),
    "measure": (measure, (ANY,)),
    "compare": (compare, (torch.float32, SIXTEEN)),
}


def choose(rng: np.random.Generator, dtypes: Any) -> torch.dtype:
    return dtypes if isinstance(dtypes, torch.dtype) else dtypes[int(rng.integers(0, len(dtypes)))]


def random_lists(rng: np.random.Generator, dtypes: tuple[Any, ...], special: float) -> Lists:
    lists: Lists = [[] for _ in dtypes]
    for _ in range(int(rng.integers(1, 30))):
        shape, layout, missing = shape_of(rng), LAYOUTS[int(rng.integers(0, len(LAYOUTS)))], rng.random() < 0.1
        for entries, kinds in zip(lists, dtypes, strict=True):
            tensor = make(rng, shape, choose(rng, kinds), layout, special)
            if rng.random() < 0.2 and tensor.dim() == 1 and tensor.is_contiguous():
                tensor = torch.cat([tensor[:1], tensor])[1:]  # not aligned to 16 bytes
            entries.append(None if missing else tensor)
    for entries, kinds in zip(lists, dtypes, strict=True):
        entries.append(make(rng, (3,), choose(rng, kinds)))
    return lists


@pytest.mark.parametrize("special", [0.0, 0.05])
@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_same_bits_as_the_cpu(device: torch.device, name: str, seed: int, special: float) -> None:
    operation, dtypes = OPERATIONS[name]
    rng = np.random.default_rng(seed)
    lists = random_lists(rng, dtypes, special)
    there, tables = to(device, lists), CallCache()
    same(operation(there, tables), operation(lists, CallCache()), name)
    if name in ("l2norm", "sample", "measure", "compare"):
        again = [operation(there, tables) for _ in range(5)]
        same(again, [operation(lists, CallCache())] * 5, f"{name} again")


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", UP_TO_SINGLE)
def test_one_element_that_is_not_finite_is_found_anywhere(device: torch.device, dtype: torch.dtype, bad: float) -> None:
    for numel in BORDERS if IS_THERE else BORDERS[:9]:
        places = {0, numel - 1, *(p for border in BORDERS for p in (border - 1, border) if p < numel)}
        for place in sorted(places):
            grads = [torch.ones(9, device=device, dtype=dtype), torch.ones(numel, device=device, dtype=dtype)]
            grads[1][place] = bad
            outs = [torch.zeros_like(grad, dtype=torch.float32) for grad in grads]
            stats = GradStats.allocate(2, device)
            kernels.multi_tensor_unscale(grads, outs, torch.tensor(0.5, device=device), stats)
            assert stats.found_inf.item() == 1.0
            assert stats.nonfinite.tolist() == [0, kernels.NAN if bad != bad else kernels.INF], f"{numel}, {place}"


def test_a_factor_of_one_touches_nothing(device: torch.device) -> None:
    values = torch.full((1 << 20,), float("nan"), device=device).view(torch.int32)
    values.random_()
    before = values.clone()
    kernels.multi_tensor_scale([values.view(torch.float32)], torch.tensor(1.0, device=device))
    assert torch.equal(values, before)


@pytest.mark.card
def test_more_than_2_to_the_31_elements(device: torch.device) -> None:
    numel = 2**31 + 65536 + 3
    free, _ = torch.cuda.mem_get_info(device)
    if free < 10 * numel:
        pytest.skip(f"needs {10 * numel >> 30} GiB of free memory on the device")
    values = torch.zeros(numel, dtype=torch.float16, device=device)
    values[-1], values[0], values[2**31] = 3.0, 4.0, 12.0
    assert kernels.multi_tensor_l2norm([values])[0].item() == 13.0
    out = torch.empty(numel, dtype=torch.float32, device=device)
    stats = GradStats.allocate(1, device)
    kernels.multi_tensor_unscale([values], [out], torch.tensor(0.5, device=device), stats)
    assert (out[-1].item(), out[0].item(), out[2**31].item(), stats.norm.item()) == (1.5, 2.0, 6.0, 6.5)


def test_side_streams_and_short_lived_tensors(device: torch.device) -> None:
    """Memory that is given back while its kernel waits in a side stream is not used again too early.

    The library sees to its own; tensors in lists are the caller's, who tells the allocator, as for torch's operations.
    """
    side, tables = torch.cuda.Stream(device), CallCache()
    stats = GradStats.allocate(1, device)
    for k in range(1, 30):
        grad = torch.full((1 << 20,), float(k), device=device, dtype=torch.float16)
        out = torch.empty(grad.shape, device=device)
        scale = torch.tensor(1.0, device=device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            kernels.multi_tensor_unscale([grad], [out], scale, stats, cache=tables)
            norm = stats.norm.clone()
        if IS_THERE:
            grad.record_stream(side)
            out.record_stream(side)
        del grad, out, scale
        torch.full((1 << 20,), -1.0, device=device, dtype=torch.float16)
        torch.full((1 << 20,), -1.0, device=device)
        torch.full((), -1.0, device=device)
        torch.cuda.current_stream(device).wait_stream(side)
        assert norm.item() == k * 1024.0


def test_streams_take_turns_at_one_table(device: torch.device) -> None:
    tables, streams = CallCache(), [torch.cuda.Stream(device) for _ in range(3)]
    torch.cuda.synchronize(device)
    found = []
    for k in range(60):
        with torch.cuda.stream(streams[k % 3]):
            values = torch.full((70_000,), k + 1.0, device=device)
            found.append((k, values, kernels.multi_tensor_l2norm([values], cache=tables)[0]))
    torch.cuda.synchronize(device)
    assert tables.rebuilds == 1, "the addresses change, and the table is the same"
    assert [norm.item() for _, _, norm in found] == [(70_000.0 * (k + 1) ** 2) ** 0.5 for k, _, _ in found]


@pytest.mark.card
def test_errors_name_the_operation(device: torch.device) -> None:
    card = cuda_devices.kernels_on(0)
    assert card is not None
    with pytest.raises(RuntimeError, match="multi_tensor_scale: CUDA reports CUDA_ERROR_INVALID_VALUE"):
        card.launch("scale", 0, 0, bytes(8), bytes(64))  # a grid of no blocks
    values = torch.full((4,), 2.0, device=device)
    kernels.multi_tensor_scale([values], torch.tensor(0.5, device=device))
    assert values.tolist() == [1.0] * 4, "an error that was raised is over"
