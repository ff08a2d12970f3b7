"""The CUDA kernels' tables: what is copied and when, streams, captured graphs, chunks."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
from array import array
from typing import Any

import emulated
import numpy as np
import pretended
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from named_steps import sgd_step

from fp16opt import MixedPrecisionOptimizer, kernels
from fp16opt.kernels import (
    CallCache,
    CastStats,
    GradStats,
    cuda,
    multi_tensor_cast,
    multi_tensor_l2norm,
    multi_tensor_sample,
    multi_tensor_unscale,
    native,
)
from fp16opt.kernels.calls import Call, Plan
from fp16opt.kernels.cuda_rows import FOUND, LISTS
from fp16opt.kernels.operations import Factors, SgdOptions
from fp16opt.kernels.table import L2NORM

CHUNK = 65536


def tensors(n: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal(300 + k).astype(np.float32)) for k in range(n)]


def test_the_table_is_copied_where_an_address_changed_and_only_there(host: Any) -> None:
    site, values = CallCache(), tensors(20)
    norms = [multi_tensor_l2norm(values, cache=site)[0].item() for _ in range(3)]
    assert len(host.copies) == 1, "the first call copies everything"
    values[7] = values[7].clone()
    norms.append(multi_tensor_l2norm(values, cache=site)[0].item())
    assert len(host.copies) == 2
    assert host.copies[1] < host.copies[0] / 2, "later calls copy addresses alone"
    norms.append(multi_tensor_l2norm(values, cache=site)[0].item())
    assert len(host.copies) == 2
    assert len(set(norms)) == 1


class Watched:
    """Emulated kernels; before a launch the memory for what chunks are found to hold is filled with 0x5A.

    Args:
        device: which launches.

    Attributes:
        parts: what is there after the last launch: sum of squares, digest and flags of each chunk.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self.parts: list[tuple[bytes, ...]] = []

    def launch(self, name: str, blocks: int, stream: int, *arguments: bytes) -> None:
        told = dict(zip(LISTS.fields, LISTS.packer.unpack(arguments[1]), strict=True))
        size = FOUND.packer.size
        ctypes.memset(told["partial"], 0x5A, told["chunk_count"] * size)
        self._device.launch(name, blocks, stream, *arguments)
        chunks = [ctypes.string_at(told["partial"] + at * size, size) for at in range(told["chunk_count"])]
        self.parts = [(chunk[:8], chunk[8:16], chunk[16:20], chunk[20:]) for chunk in chunks]


def test_of_a_chunk_only_what_was_found_is_written(
    emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that finds no sum has none in its shared memory: a copy of that would be of what nothing wrote."""
    emulated.use(emulated_cuda, monkeypatch)
    watched = Watched(emulated_cuda)
    emulated.launch_on(watched, monkeypatch)
    n, one = 2 * CHUNK + 300, torch.tensor(1.0)
    values, half = torch.full((n,), 3.0), torch.zeros(n).half()
    step = SgdOptions(0.1, 0.0, 0.0, 0.0, False, False)

    def sgd() -> None:
        sgd_step([values], [values.clone()], [step], [0], Factors(one, one))

    for found, call in (
        ((0,), lambda: multi_tensor_l2norm([values])),
        ((1,), lambda: multi_tensor_sample([half], torch.zeros(1, dtype=torch.int64))),
        ((2,), lambda: multi_tensor_cast([values], [half], CastStats.allocate(1, "cpu"))),
        ((2,), sgd),
        ((0, 2), lambda: multi_tensor_unscale([half], [values], one, GradStats.allocate(1, "cpu"))),
    ):
        call()
        assert len(watched.parts) == 3
        for part in watched.parts:
            untouched = [k for k, field in enumerate(part) if field == b"\x5a" * len(field)]
            assert untouched == [k for k in range(4) if k not in found], found


def test_a_flag_that_changed_is_copied_too(host: Any) -> None:
    site, grads, outs = CallCache(), tensors(3), tensors(3, 1)
    stats, one = GradStats.allocate(3, "cpu"), torch.tensor(1.0)
    wanted = [out + grad if k == 1 else grad for k, (out, grad) in enumerate(zip(outs, grads, strict=True))]
    before = [out.clone() for out in outs]
    multi_tensor_unscale(grads, outs, one, stats, cache=site)
    for out, value in zip(outs, before, strict=True):
        out.copy_(value)  # the same addresses again
    multi_tensor_unscale(grads, outs, one, stats, accumulate=[False, True, False], cache=site)
    assert all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True))


def test_another_stream_waits_for_the_one_before(host: Any) -> None:
    site, values = CallCache(), tensors(2)
    for stream in (0, 0, 7, 7, 0):
        host.current = stream
        multi_tensor_l2norm(values, cache=site)
    assert host.waits == [(7, 0), (0, 7)]


def test_what_is_held_for_a_side_stream_is_the_librarys_own_and_nothing_else(host: Any) -> None:
    grads, outs = tensors(3), tensors(3, 1)
    stats, scale, factor = GradStats.allocate(3, "cpu"), torch.tensor(0.5), torch.tensor(0.25)
    multi_tensor_unscale(grads, outs, scale, stats)
    kernels.multi_tensor_unscale_clipped(grads, outs, scale, factor)
    now, then, taken = torch.ones(3).long(), torch.zeros(3).long(), torch.zeros(3, dtype=torch.int32)
    params = [out.half() for out in outs]
    kernels.multi_tensor_sample(params, now)
    kernels.multi_tensor_refresh_masters(outs, params, now, then, taken)
    own = [scale, factor, now, then, taken, stats.nonfinite, stats.sumsq, stats.norm, stats.found_inf]
    assert {tensor.data_ptr() for tensor in own} <= set(host.held)
    assert not {tensor.data_ptr() for tensor in (*grads, *outs, *params)} & set(host.held)


def test_a_captured_call_has_a_table_of_its_own(
    host: Any, emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays run with the addresses of the capture, whatever came between, and later calls with theirs."""
    launched: list[tuple[Any, ...]] = []

    class Recorded(pretended.Counting):
        def launch(self, *arguments: Any) -> None:
            launched.append(arguments)
            super().launch(*arguments)

    site, half, stats = CallCache(), torch.tensor(0.5), GradStats.allocate(3, "cpu")
    first, second = tensors(3), [2 * value for value in tensors(3)]
    outs, others = tensors(3, 1), tensors(3, 2)
    multi_tensor_unscale(first, outs, half, stats, cache=site)
    eager = stats.norm.item()
    emulated.launch_on(Recorded(emulated_cuda), monkeypatch)
    monkeypatch.setattr(host, "capturing", True)
    copies = len(host.copies)
    multi_tensor_unscale(second, others, half, stats, cache=site)
    assert len(host.copies) == copies, "nothing that a replay would repeat"
    monkeypatch.setattr(host, "capturing", False)
    for lists in ((first, outs), (second, others)):
        multi_tensor_unscale(*lists, half, stats, cache=site)
        assert stats.norm.item() == (eager if lists[0] is first else 2 * eager)
    for out in (*outs, *others):
        out.zero_()
    emulated_cuda.launch(*launched[0])  # what a replay does
    assert stats.norm.item() == 2 * eager
    assert not any(out.any() for out in outs)
    assert all(torch.equal(out, value * 0.5) for out, value in zip(others, second, strict=True))


def test_a_captured_calls_table_goes_with_the_call_site(
    host: Any, emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = emulated_cuda.kept_tables()
    monkeypatch.setattr(host, "capturing", True)
    site = CallCache()
    for seed in range(3):
        multi_tensor_l2norm(tensors(2, seed), cache=site)
    assert emulated_cuda.kept_tables() == before + 3, "graphs read them, whatever the calls after them"
    monkeypatch.setattr(host, "capturing", False)
    multi_tensor_l2norm([t.double() for t in tensors(3)], cache=site)  # other lists
    assert emulated_cuda.kept_tables() == before + 3
    copies = [pickle.loads(pickle.dumps(site)), copy.deepcopy(site)]
    assert emulated_cuda.kept_tables() == before + 3
    del site
    assert emulated_cuda.kept_tables() == before, f"not with copies of it: {copies}"


def test_a_wrapper_gives_back_what_its_captured_steps_were_given(
    emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    before = emulated_cuda.kept_tables()
    params = [torch.nn.Parameter(torch.ones(5).half()) for _ in range(3)]

    def step(opt: MixedPrecisionOptimizer) -> None:
        opt.zero_grad()
        opt.scale_loss(torch.zeros(()))
        for param in params:
            param.grad = torch.ones_like(param)
        opt.update_master_grads()
        opt.clip_master_grads(0.5)
        opt.step()

    wrapper = MixedPrecisionOptimizer(torch.optim.AdamW(params, fused=True), dynamic=True, fused_step=False)
    step(wrapper)
    assert emulated_cuda.kept_tables() == before, "eager steps keep none"
    with monkeypatch.context() as patch:
        patch.setattr(cuda.Stream, "capturing", True)
        step(wrapper)
    held = emulated_cuda.kept_tables() - before
    assert held == 6, "unscale, scale, two samples, take and cast"
    step(wrapper)
    assert emulated_cuda.kept_tables() - before == held
    del wrapper
    gc.collect()
    assert emulated_cuda.kept_tables() == before


def test_a_failed_copy_leaves_no_table_behind(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site, values = CallCache(), tensors(2)
    wanted = multi_tensor_l2norm(values)[0].item()

    def refuse(self: Any, size: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no host memory")

    with monkeypatch.context() as patch:
        patch.setattr(host, "staging", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no host memory"):
            multi_tensor_l2norm(values, cache=site)
    assert multi_tensor_l2norm(values, cache=site)[0].item() == wanted


def test_a_table_made_in_inference_mode_serves_outside_of_it_and_the_other_way_round(host: Any) -> None:
    lists = [tensors(3) for _ in range(3)]
    for modes in ((True, False, True), (False, True, False)):
        host.copies.clear()
        site = CallCache()
        for mode, values in zip(modes, lists, strict=True):
            with torch.inference_mode(mode):
                assert multi_tensor_l2norm(values, cache=site)[0].item() == multi_tensor_l2norm(lists[0])[0].item()
        assert len(host.copies) == 3 + 3, "each has other addresses, which are brought there; a call without a site too"


def table_of(sizes: list[int], places: list[int], dtype: torch.dtype = torch.float32) -> cuda.Table:
    """The table of one list of tensors without memory, of which those at ``places`` are served."""
    lists: list[list[torch.Tensor | None]] = [[torch.empty(size, dtype=dtype, device="meta") for size in sizes]]
    plan = Plan(L2NORM, torch.device("meta"), len(sizes), list(range(len(sizes))), places, [], cuda, True)
    return cuda.Table(Call(L2NORM, plan, tuple(map(tuple, lists)), None, None))


@given(
    st.lists(st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5]), max_size=9),
    st.randoms(use_true_random=False),
)
def test_chunks_cover_each_element_once(sizes: list[int], random: Any) -> None:
    """The packing, read back from what is written for the GPU."""
    places = sorted(random.sample(range(len(sizes)), random.randint(0, len(sizes))))
    table = table_of(sizes, places)
    start = (8 * len(places) + 15) // 16 * 16
    start = (start + len(places) + 15) // 16 * 16
    layout = [("start", "<i8"), ("tensor", "<i4"), ("numel", "<i4"), ("index", "<u4"), ("block", "<u4")]
    chunks = np.frombuffer(table.host.raw, dtype=layout, offset=start, count=table.chunk_count)
    seen = [np.zeros(sizes[place], dtype=np.int8) for place in places]
    for chunk in chunks:
        assert 1 <= chunk["numel"] <= CHUNK
        assert chunk["start"] % CHUNK == 0
        assert (chunk["index"], chunk["block"]) == (chunk["start"], chunk["start"] // 128)
        seen[chunk["tensor"]][chunk["start"] : chunk["start"] + chunk["numel"]] += 1
    assert all((covered == 1).all() for covered in seen)
    assert list(chunks["tensor"]) == sorted(chunks["tensor"])


def test_tensors_of_more_than_2_to_the_31_elements_are_packed() -> None:
    numel = 2**31 + 3 * CHUNK + 5
    assert table_of([7, numel, 9], [0, 1, 2], torch.float16).chunk_count == 2**15 + 4 + 2


def test_more_lists_than_an_entry_has_room_for_are_refused() -> None:
    operation = L2NORM._replace(name="multi_tensor_wide", lists=tuple("abcdefghi"))
    plan = Plan(operation, torch.device("meta"), 0, [], [], [], cuda, True)
    with pytest.raises(ValueError, match=r"multi_tensor_wide: 9 lists, the CUDA kernels take up to 8. Widen Entry."):
        cuda.Table(Call(operation, plan, ((),) * 9, None, None))


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("places", [None, [2, 0], []])
def test_addresses_are_put_where_they_belong(
    monkeypatch: pytest.MonkeyPatch, places: list[int] | None, stride: int
) -> None:
    """By the compiled module and without it: one after the other, and what lies between stays."""
    call = Call(L2NORM, None, (), [[11, 12, 13], array("Q", [21, 22, 23]), [31, 32, 33]], None)  # type: ignore[arg-type]
    wanted = [10 * k + p + 1 for k in (2, 3) for p in ([0, 1, 2] if places is None else places)]
    for module in dict.fromkeys((native.module, None)):
        monkeypatch.setattr(native, "module", module)
        room = (ctypes.c_uint64 * 13)(*[7] * 13)
        at = ctypes.addressof(room)
        assert native.put_addresses(call, range(1, 3), places, at, stride) is bool(wanted)
        step = stride // 8
        assert room[: len(wanted) * step : step] == wanted
        assert sum(value == 7 for value in room) == 13 - len(wanted), "what lies between stays"
        assert native.put_addresses(call, range(1, 3), places, at, stride) is False, "the same again"


def test_float64_beside_others_is_served_by_torch_operations(host: Any) -> None:
    tables, stats = CallCache(), GradStats.allocate(3, "cpu")
    grads = [torch.full((9,), 4.0).half(), torch.full((9,), 2.0).double(), torch.full((9,), 6.0)]
    outs: list[torch.Tensor] = [torch.zeros(9), torch.zeros(9).double(), torch.zeros(9)]
    for _ in range(2):
        multi_tensor_unscale(grads, outs, torch.tensor(0.5), stats, cache=tables)
        assert [out[8].item() for out in outs] == [2.0, 1.0, 3.0]
        assert stats.sumsq.tolist() == [36.0, 9.0, 81.0]
        assert stats.norm.item() == 126.0**0.5
    assert tables.rebuilds == 1, "the lists are recognised all the same"
    assert multi_tensor_l2norm(outs[1:2])[0].item() == 3.0


def test_without_the_cpu_module_tables_are_made_all_the_same(
    emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for module in dict.fromkeys((native.module, None)):
        with monkeypatch.context() as patch:
            patch.setattr(native, "module", module)
            host, site = emulated.use(emulated_cuda, patch), CallCache()
            values = tensors(5)
            found = [multi_tensor_l2norm(values, cache=site)[1].tolist() for _ in range(2)]
            values[3] = values[3] * 2
            results.append(([*found, multi_tensor_l2norm(values, cache=site)[1].tolist()], host.copies, site.rebuilds))
    assert results == [results[0]] * len(results)
    assert results[0][2] == 1
