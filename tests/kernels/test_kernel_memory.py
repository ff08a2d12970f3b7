"""Memory that is not to be touched, versions, threads, fork, and the FPU's modes."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import interpreters
import numpy as np
import pytest
import torch
from kernel_cases import make
from torch import Tensor

import fp16opt
from fp16opt.kernels import (
    CastStats,
    GradStats,
    multi_tensor_axpby,
    multi_tensor_cast,
    multi_tensor_l2norm,
    multi_tensor_lerp,
    multi_tensor_sample,
    multi_tensor_scale,
    multi_tensor_unscale,
    native,
)

compiled = pytest.mark.skipif(not native.available(), reason="the compiled CPU module is not installed")


def read_only(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros that kill the process when written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once in a process, that the buffer is not writable
        return torch.frombuffer(mmap.mmap(-1, size, prot=mmap.PROT_READ), dtype=dtype)


def test_scale_by_one_touches_nothing(level: str) -> None:
    tensor = read_only(4096, torch.float32)
    version = tensor._version
    multi_tensor_scale([tensor], torch.tensor(1.0))
    if level != "emulated":  # there the kernel looks at the factor, and nobody on the host knows
        assert tensor._version == version


def test_inputs_are_only_read(level: str) -> None:
    grad = read_only(1 << 19, torch.float16)
    out = torch.ones(grad.numel())
    multi_tensor_unscale([grad], [out], torch.tensor(0.5), GradStats.allocate(1, "cpu"))
    assert not out.any()
    multi_tensor_sample([grad], torch.zeros(1, dtype=torch.int64))
    assert multi_tensor_l2norm([grad])[0].item() == 0.0


WRITERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "unscale": lambda t, x: multi_tensor_unscale([x], [t], torch.tensor(1.0), GradStats.allocate(1, "cpu")),
    "accumulate": lambda t, x: multi_tensor_unscale(
        [x], [t], torch.tensor(1.0), GradStats.allocate(1, "cpu"), accumulate=True
    ),
    "scale": lambda t, x: multi_tensor_scale([t], torch.tensor(0.5)),
    "axpby": lambda t, x: multi_tensor_axpby(1.0, [x], 1.0, [x], [t]),
    "lerp": lambda t, x: multi_tensor_lerp([t], [x], 0.5),
    "cast": lambda t, x: multi_tensor_cast([x], [t], CastStats.allocate(1, "cpu")),
}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", list(WRITERS))
def test_autograd_sees_the_write(level: str, name: str, strided: bool) -> None:
    memory = torch.ones(8, dtype=torch.float16 if name == "cast" else torch.float32)
    target = memory[::2] if strided else memory
    source = torch.ones(target.shape)
    weight = torch.ones(target.shape, dtype=target.dtype, requires_grad=True)
    product = (weight * target).sum()
    version = target._version
    WRITERS[name](target, source)
    assert target._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_statistics_count_their_writes(level: str) -> None:
    stats, cast_stats, hashes = GradStats.allocate(1, "cpu"), CastStats.allocate(1, "cpu"), torch.zeros(1).long()
    multi_tensor_unscale([torch.ones(2)], [torch.ones(2)], torch.tensor(1.0), stats)
    multi_tensor_cast([torch.ones(2)], [torch.ones(2).half()], cast_stats)
    multi_tensor_sample([torch.ones(2).half()], hashes)
    written = [
        stats.nonfinite,
        stats.sumsq,
        stats.norm,
        stats.found_inf,
        cast_stats.overflow,
        hashes,
    ]
    assert all(tensor._version > 0 for tensor in written)


@compiled
def test_memory_at_odd_addresses(level: str) -> None:
    rng = np.random.default_rng(0)
    grads, outs = make(rng, (1 << 18,), torch.float16), torch.zeros(1 << 18)
    for start in range(1, 20):
        stats, out = GradStats.allocate(1, "cpu"), outs[start:]
        multi_tensor_unscale([grads[start:]], [out], torch.tensor(0.5), stats)
        assert torch.equal(out, grads[start:].float() * 0.5)


@compiled
def test_writing_around_the_caches_gives_the_same_bits(threads: None) -> None:
    rng = np.random.default_rng(1)
    big = make(rng, (17 * (1 << 20) + 77,), torch.float16)  # written: 68 MiB, over every streaming threshold
    half = [big[: big.numel() // 2 + 3], big[big.numel() // 2 + 3 :]]  # the second is not aligned
    out, stats = torch.zeros(big.shape), GradStats.allocate(2, "cpu")
    outs = [out[: half[0].numel()], out[half[0].numel() :]]
    torch.set_num_threads(2)
    multi_tensor_unscale(half, outs, torch.tensor(0.5), stats)
    assert torch.equal(out, big.float() * 0.5)
    assert stats.norm.item() == multi_tensor_l2norm(half)[0].item() * 0.5
    masters = [*outs, *[t.clone() for t in outs]]  # together 68 MiB of 16-bit values
    params, cast_stats, hashes = (
        [torch.zeros_like(t, dtype=torch.float16) for t in masters],
        CastStats.allocate(4, "cpu"),
        torch.zeros(4).long(),
    )
    multi_tensor_cast(masters, params, cast_stats)
    multi_tensor_sample(params, hashes)
    assert all(torch.equal(p, m.half()) for p, m in zip(params, masters, strict=True))


@compiled
def test_flush_mode_of_the_caller_changes_no_bit(threads: None) -> None:
    grads, outs = [torch.full((1 << 18,), 1e-40)], [torch.zeros(1 << 18)]
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    try:
        multi_tensor_unscale(grads, outs, torch.tensor(0.5), GradStats.allocate(1, "cpu"))
        flushed = float((torch.ones(1) * 1e-40 * 1.0).item())
    finally:
        torch.set_flush_denormal(False)
    assert flushed == 0.0  # the mode was on, and still is on, for torch itself
    assert outs[0].unique().numel() == 1
    assert outs[0][0].item() > 0


@compiled
def test_the_library_survives_fork(threads: None) -> None:
    tensors = [torch.ones(1 << 20)]
    torch.set_num_threads(3)
    assert multi_tensor_l2norm(tensors)[0].item() == 1024.0  # the pool has threads now
    for _ in range(3):
        child = os.fork()
        if child == 0:
            found = multi_tensor_l2norm(tensors)[0].item()
            again = multi_tensor_l2norm(tensors)[0].item()
            working = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 3
            os._exit(0 if found == again == 1024.0 and working == 3 else 1)  # with a pool of its own
        assert os.waitpid(child, 0)[1] == 0
    assert multi_tensor_l2norm(tensors)[0].item() == 1024.0


@compiled
def test_a_forked_child_of_a_busy_parent(threads: None) -> None:
    torch.set_num_threads(2)
    tensors, stop = [torch.ones(1 << 21)], threading.Event()
    of_child = [torch.ones(1 << 18)]  # made here: torch's own OpenMP threads do not survive fork

    def keep_busy() -> None:
        while not stop.is_set():
            multi_tensor_l2norm(tensors)

    worker = threading.Thread(target=keep_busy)
    worker.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0 if multi_tensor_l2norm(of_child)[0].item() == 512.0 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        worker.join()


@compiled
@pytest.mark.parametrize("name", native.module.simd_levels() if native.available() else [])
def test_environment_chooses_the_level(name: str, tmp_path: Path) -> None:
    code = "from fp16opt.kernels import native; print(native.module.simd_level())"
    environment = {**os.environ, "PYTHONPATH": str(Path(fp16opt.__file__).parents[1]), "FP16OPT_SIMD": name}
    done = interpreters.python("-c", code, cwd=tmp_path, env=environment)
    assert done.stdout.strip() == name


@compiled
def test_a_wrong_level_in_the_environment_is_reported(tmp_path: Path) -> None:
    code = "from fp16opt import kernels; print(kernels.backend('cpu'))"
    environment = {**os.environ, "PYTHONPATH": str(Path(fp16opt.__file__).parents[1]), "FP16OPT_SIMD": "mmx"}
    done = interpreters.python("-c", code, cwd=tmp_path, env=environment)
    assert done.stdout.strip() == "reference"
    assert "SIMD level 'mmx' is not one that this build has" in done.stderr
