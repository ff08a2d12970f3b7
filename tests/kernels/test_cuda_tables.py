"""The CUDA kernels' tables: what is copied and when, streams, captured graphs, chunks; and the import without a GPU."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import emulated
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp16opt
from fp16opt import MixedPrecisionOptimizer, kernels
from fp16opt.kernels import GradStats, PointerTables, cuda, multi_tensor_l2norm, multi_tensor_unscale, native

CHUNK = 65536


@pytest.fixture
def host(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    return emulated.use(emulated_cuda, monkeypatch)


def tensors(n: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal(300 + k).astype(np.float32)) for k in range(n)]


def test_the_table_is_copied_where_an_address_changed_and_only_there(host: Any) -> None:
    tables, values = PointerTables(), tensors(20)
    norms = [multi_tensor_l2norm(values, tables=tables)[0].item() for _ in range(3)]
    assert len(host.copies) == 1, "the first call copies everything"
    values[7] = values[7].clone()
    norms.append(multi_tensor_l2norm(values, tables=tables)[0].item())
    assert len(host.copies) == 2
    assert host.copies[1] < host.copies[0] / 2, "later calls copy addresses alone"
    norms.append(multi_tensor_l2norm(values, tables=tables)[0].item())
    assert len(host.copies) == 2
    assert len(set(norms)) == 1


def test_a_flag_that_changed_is_copied_too(host: Any) -> None:
    tables, grads, outs = PointerTables(), tensors(3), tensors(3, 1)
    stats, one = GradStats.allocate(3, "cpu"), torch.tensor(1.0)
    wanted = [out + grad if k == 1 else grad for k, (out, grad) in enumerate(zip(outs, grads, strict=True))]
    before = [out.clone() for out in outs]
    multi_tensor_unscale(grads, outs, one, stats, tables=tables)
    for out, value in zip(outs, before, strict=True):
        out.copy_(value)  # the same addresses again
    multi_tensor_unscale(grads, outs, one, stats, accumulate=[False, True, False], tables=tables)
    assert all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True))


def test_another_stream_waits_for_the_one_before(host: Any) -> None:
    tables, values = PointerTables(), tensors(2)
    for stream in (0, 0, 7, 7, 0):
        host.current = stream
        multi_tensor_l2norm(values, tables=tables)
    assert host.waits == [(7, 0), (0, 7)]


def test_what_is_held_for_a_side_stream_is_the_librarys_own_and_nothing_else(host: Any) -> None:
    grads, outs = tensors(3), tensors(3, 1)
    stats, scale, factor = GradStats.allocate(3, "cpu"), torch.tensor(0.5), torch.tensor(0.25)
    multi_tensor_unscale(grads, outs, scale, stats)
    kernels.multi_tensor_unscale_clipped(grads, outs, scale, factor)
    now, then, taken = torch.ones(3).long(), torch.zeros(3).long(), torch.zeros(3, dtype=torch.int32)
    params = [out.half() for out in outs]
    kernels.multi_tensor_sample(params, now)
    kernels.multi_tensor_take(outs, params, now, then, taken)
    own = [scale, factor, now, then, taken, stats.nonfinite, stats.sumsq, stats.norm, stats.found_inf]
    assert {tensor.data_ptr() for tensor in own} <= set(host.held)
    assert not {tensor.data_ptr() for tensor in (*grads, *outs, *params)} & set(host.held)


def test_a_captured_call_has_a_table_of_its_own(
    host: Any, emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays run with the addresses of the capture, whatever came between, and later calls with theirs."""
    launched: list[tuple[Any, ...]] = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(emulated_cuda, name)

        def unscale(self, *arguments: Any) -> None:
            launched.append(arguments)
            emulated_cuda.unscale(*arguments)

    tables, half, stats = PointerTables(), torch.tensor(0.5), GradStats.allocate(3, "cpu")
    first, second = tensors(3), [2 * value for value in tensors(3)]
    outs, others = tensors(3, 1), tensors(3, 2)
    multi_tensor_unscale(first, outs, half, stats, tables=tables)
    eager = stats.norm.item()
    monkeypatch.setattr(native, "_cuda", Recorded())
    monkeypatch.setattr(host, "capturing", True)
    copies = len(host.copies)
    multi_tensor_unscale(second, others, half, stats, tables=tables)
    assert len(host.copies) == copies, "nothing that a replay would repeat"
    monkeypatch.setattr(host, "capturing", False)
    for lists in ((first, outs), (second, others)):
        multi_tensor_unscale(*lists, half, stats, tables=tables)
        assert stats.norm.item() == (eager if lists[0] is first else 2 * eager)
    for out in (*outs, *others):
        out.zero_()
    emulated_cuda.unscale(*launched[0])  # what a replay does
    assert stats.norm.item() == 2 * eager
    assert not any(out.any() for out in outs)
    assert all(torch.equal(out, value * 0.5) for out, value in zip(others, second, strict=True))


def test_a_captured_calls_table_goes_with_the_call_site(
    host: Any, emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = emulated_cuda.kept_tables()
    monkeypatch.setattr(host, "capturing", True)
    tables = PointerTables()
    for seed in range(3):
        multi_tensor_l2norm(tensors(2, seed), tables=tables)
    assert emulated_cuda.kept_tables() == before + 3, "graphs read them, whatever the calls after them"
    monkeypatch.setattr(host, "capturing", False)
    multi_tensor_l2norm([t.double() for t in tensors(3)], tables=tables)  # other lists
    assert emulated_cuda.kept_tables() == before + 3
    assert pickle.loads(pickle.dumps(tables)).captured == []
    assert copy.deepcopy(tables).captured == []
    del tables
    assert emulated_cuda.kept_tables() == before


def test_a_wrapper_gives_back_what_its_captured_steps_were_given(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pretended

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


def test_without_a_call_site_a_captured_table_stays(
    host: Any, emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = emulated_cuda.kept_tables()
    monkeypatch.setattr(host, "capturing", True)
    multi_tensor_l2norm(tensors(2))
    gc.collect()
    assert emulated_cuda.kept_tables() == before + 1


def test_a_failed_copy_leaves_no_table_behind(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, values = PointerTables(), tensors(2)
    wanted = multi_tensor_l2norm(values)[0].item()

    def refuse(self: Any, size: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no host memory")

    with monkeypatch.context() as patch:
        patch.setattr(host, "staging", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no host memory"):
            multi_tensor_l2norm(values, tables=tables)
    assert multi_tensor_l2norm(values, tables=tables)[0].item() == wanted


def test_clipping_uses_the_table_of_the_pass_before(host: Any) -> None:
    tables, grads, outs = PointerTables(), tensors(4), tensors(4, 1)
    stats, half = GradStats.allocate(4, "cpu"), torch.tensor(0.5)
    for _ in range(2):
        multi_tensor_unscale(grads, outs, half, stats, write=False, tables=tables)
        kernels.multi_tensor_unscale_clipped(grads, outs, half, half, tables=tables)
    assert len(host.copies) == 1
    assert all(torch.equal(out, grad * 0.25) for out, grad in zip(outs, grads, strict=True))


@given(
    st.lists(st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5]), max_size=9),
    st.randoms(use_true_random=False),
)
def test_chunks_cover_each_element_once(emulated_cuda: ModuleType, sizes: list[int], random: Any) -> None:
    """The shared packing (launch/pack.h), read back from what is written for the GPU."""
    places = sorted(random.sample(range(len(sizes)), random.randint(0, len(sizes))))
    table = emulated_cuda.Table(sizes, list(range(len(sizes))), [[2] * len(sizes)], places)
    size = table.point([[k + 1 for k in range(len(sizes))]], None)
    memory = torch.zeros(size, dtype=torch.uint8)
    table.fill(memory.data_ptr())
    raw = memory.numpy().tobytes()
    start = (8 * len(places) + 15) // 16 * 16
    start = (start + len(places) + 15) // 16 * 16
    chunks = np.frombuffer(raw, dtype=[("start", "<i8"), ("tensor", "<i4"), ("numel", "<i4")], offset=start)
    chunks = chunks[: table.chunks()]
    seen = [np.zeros(sizes[place], dtype=np.int8) for place in places]
    for chunk in chunks:
        assert 1 <= chunk["numel"] <= CHUNK
        assert chunk["start"] % CHUNK == 0
        seen[chunk["tensor"]][chunk["start"] : chunk["start"] + chunk["numel"]] += 1
    assert all((covered == 1).all() for covered in seen)
    assert list(chunks["tensor"]) == sorted(chunks["tensor"])


def test_tensors_of_more_than_2_to_the_31_elements_are_packed(emulated_cuda: ModuleType) -> None:
    numel = 2**31 + 3 * CHUNK + 5
    table = emulated_cuda.Table([7, numel, 9], [0, 1, 2], [[0] * 3], [0, 1, 2])
    assert table.chunks() == 2**15 + 4 + 2


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("rows must have one entry", ([1], [], [[2]], [0])),
        ("a place lies outside", ([1], [0], [[2]], [1])),
        ("a size or row is negative", ([-1], [0], [[2]], [0])),
        ("dtypes must have one entry", ([1], [0], [[]], [0])),
        ("unknown dtype code", ([1], [0], [[9]], [0])),
        ("one to six lists", ([1], [0], [], [0])),
    ],
)
def test_tables_that_do_not_fit_are_refused(emulated_cuda: ModuleType, message: str, arguments: Any) -> None:
    with pytest.raises(ValueError, match=message):
        emulated_cuda.Table(*arguments)


def test_float64_beside_others_is_served_by_torch_operations(host: Any) -> None:
    tables, stats = PointerTables(), GradStats.allocate(3, "cpu")
    grads = [torch.full((9,), 4.0).half(), torch.full((9,), 2.0).double(), torch.full((9,), 6.0)]
    outs: list[torch.Tensor] = [torch.zeros(9), torch.zeros(9).double(), torch.zeros(9)]
    for _ in range(2):
        multi_tensor_unscale(grads, outs, torch.tensor(0.5), stats, tables=tables)
        assert [out[8].item() for out in outs] == [2.0, 1.0, 3.0]
        assert stats.sumsq.tolist() == [36.0, 9.0, 81.0]
        assert stats.norm.item() == 126.0**0.5
    assert tables.rebuilds == 1, "the lists are recognised all the same"
    assert multi_tensor_l2norm(outs[1:2])[0].item() == 3.0


def test_operations_refuse_tables_made_for_others(emulated_cuda: ModuleType) -> None:
    table, where = emulated_cuda.Table([1], [3], [[2]], [0]), emulated_cuda.Where(0, 0, 0)
    with pytest.raises(ValueError, match="another number of lists"):
        emulated_cuda.Table([1], [3], [[2], [2]], [0]).point([[0]], None)
    with pytest.raises(ValueError, match="does not have the table's length"):
        table.point([[0, 0]], None)
    with pytest.raises(ValueError, match="one flag for each row"):
        table.point([[0]], [True, False])
    with pytest.raises(ValueError, match="another number of lists"):
        emulated_cuda.axpby(table, where, 4, 1.0, 1.0, 0, 0)
    with pytest.raises(ValueError, match="a row lies outside the statistics"):
        emulated_cuda.l2norm(table, where, 3, 0, 0, 0)
    with pytest.raises(ValueError, match="a dtype that the operation does not take"):
        emulated_cuda.sample(table, where, 4, 0)
    with pytest.raises(ValueError, match="a dtype that the operation does not take"):
        emulated_cuda.l2norm(emulated_cuda.Table([1], [0], [[3]], [0]), where, 4, 0, 0, 0)


# -- the real module, without a GPU ------------------------------------------------------------------------------------


@pytest.mark.skipif(native.cuda_module() is None, reason="the compiled CUDA module is not installed")
def test_the_module_imports_without_a_gpu_and_says_what_it_holds(tmp_path: Path) -> None:
    code = (
        "import fp16opt.kernels.native as n; m = n.cuda_module(); print(m.architectures, m.runs_on(0), m.runs_on(-1))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(fp16opt.__file__).parents[1]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    *names, first, second = done.stdout.split()
    assert (first, second) == ("False", "False")
    assert any(name.startswith("sm_") for name in names)
    assert names[-1].startswith("compute_")
    assert f"loaded; it holds code for {' '.join(names)}" in native.status()["_cuda"]


def test_without_the_module_a_gpu_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cuda", None)
    assert not cuda.serves(torch.device("cuda:0"))
    assert kernels.backend("cuda:0") == "reference"
    assert kernels.backend("mps") == "reference"
    assert native.status()["_cuda"].startswith("missing: ")


class OnlyOld:
    """A module without code for the device."""

    @staticmethod
    def runs_on(index: int) -> bool:
        return index == 1


def test_a_device_that_the_module_has_no_code_for_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cuda", OnlyOld())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert kernels.backend("cuda:0") == "reference"
    assert kernels.backend("cuda:1") == "cuda"
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm calls its devices cuda too
    assert kernels.backend("cuda:1") == "reference"
