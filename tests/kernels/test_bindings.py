"""What the compiled module takes and refuses, and what it does with callers that go away while it works."""

from __future__ import annotations

import array
import ctypes
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreters
import numpy as np
import pytest
import torch

from fp16opt.kernels import native

if native.module is None:
    pytest.skip("no compiled module", allow_module_level=True)


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In another process, as what is wrong here ends one."""
    head = "import torch\nfrom fp16opt.kernels.native import module as _cpu\n"
    home = Path(native.__file__).parents[2]  # Python looks first where it is started: a checkout may hold no module
    return interpreters.python("-c", head + textwrap.dedent(code), cwd=home, clears_up=True)


def test_python_ends_while_a_thread_works() -> None:
    done = run(
        """
        import threading, time

        values, one = torch.zeros(1 << 24), torch.ones(())
        table = _cpu.Table([values.numel()], [[2]], [0])

        def work():
            while True:
                _cpu.scale(table, [[values.data_ptr()]], 1, 1, one.data_ptr())

        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]


def as_numpy(addresses: list[int]) -> Any:
    return np.array(addresses, dtype=np.uint64)


def as_array(addresses: list[int]) -> Any:
    return array.array("Q", addresses)


@pytest.mark.parametrize("outer", [list, tuple])
@pytest.mark.parametrize("inner", [list, tuple, as_array, as_numpy, lambda values: memoryview(as_array(values))])
def test_addresses_come_as_ints_or_as_buffers(outer: Callable[[Any], Any], inner: Callable[[list[int]], Any]) -> None:
    tensors, half = [torch.ones(n) for n in (3, 0, 70)], torch.tensor(0.5)
    table = native.module.Table([t.numel() for t in tensors], [[2, 2, 2]], [0, 1, 2])
    addresses = outer([inner([t.data_ptr() for t in tensors])])
    native.module.scale(table, addresses, 1, 3, half.data_ptr())
    for tensor in tensors:
        assert tensor.eq(0.5).all()


@pytest.mark.parametrize(
    ("addresses", "error", "message"),
    [
        (3, TypeError, "not iterable"),
        ([3], TypeError, "addresses must be a buffer or a sequence of ints"),
        ([[1.0]], TypeError, "an integer is required"),
        ([[-1]], OverflowError, "negative"),
        ([[1 << 64]], OverflowError, "too large"),
        ([array.array("I", [1])], TypeError, "unsigned 64-bit"),
        ([array.array("q", [1])], TypeError, "unsigned 64-bit"),
        ([bytes(8)], TypeError, "unsigned 64-bit"),
        ([np.zeros((1, 1), np.uint64)], TypeError, "unsigned 64-bit"),
        ([np.zeros(4, np.uint64)[::2]], TypeError, "must be contiguous"),
        ([], ValueError, "fewer lists of addresses"),
        ([[1, 2]], ValueError, "does not have the table's length"),
    ],
    ids=repr,
)
def test_other_addresses_are_refused(addresses: Any, error: type[Exception], message: str) -> None:
    table, one = native.module.Table([4], [[2]], [0]), torch.ones(())
    with pytest.raises(error, match=message):
        native.module.scale(table, addresses, 1, 1, one.data_ptr())


def test_errors_name_the_class_that_was_wanted() -> None:
    with pytest.raises(TypeError, match=r"_cpu\.Table"):
        native.module.scale(3, [], 1, 3, 0)


def test_names_of_levels_and_formulas_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="SIMD level 'sse9' is not one"):
        native.module.use_simd_level("sse9")
    table, one = native.module.Table([], [[], []], []), torch.ones(())
    numbers = (one.data_ptr(), one.data_ptr(), 0, 0, 0)
    with pytest.raises(ValueError, match="no formula 'Nadam'"):
        native.module.step(table, [[], []], 1, 0, "Nadam", *numbers, False, [], b"", 0, False)


def test_flags_and_groups_have_one_entry_for_each_row() -> None:
    grads, outs = torch.ones(2), torch.ones(2)
    table, lists = native.module.Table([2], [[2], [2]], [0]), [[grads.data_ptr()], [outs.data_ptr()]]
    numbers, one = torch.zeros(8, dtype=torch.float64), torch.ones(())
    rest = (one.data_ptr(), *[numbers[k:].data_ptr() for k in range(4)], True)
    with pytest.raises(ValueError, match="one flag for each entry"):
        native.module.unscale(table, lists, 1, 1, *rest, [True, False])
    native.module.unscale(table, lists, 1, 1, *rest, [True])
    assert outs.tolist() == [2.0, 2.0]
    step = ("Sgd", one.data_ptr(), one.data_ptr(), 0, 0, 0, False)
    with pytest.raises(ValueError, match="group_of must have one entry for each row"):
        native.module.step(table, lists, 1, 1, *step, [0, 0], b"", 0, False)
    with pytest.raises(ValueError, match="group_of reaches outside"):
        native.module.step(table, lists, 1, 1, *step, [-1], b"", 0, False)


def test_addresses_that_are_not_there_are_not_put() -> None:
    at = ctypes.addressof(ctypes.c_uint64())
    with pytest.raises(ValueError, match="fewer lists of addresses"):
        native.module.put_addresses([[1]], 1, 1, None, at, 8)
    with pytest.raises(IndexError):
        native.module.put_addresses([[1]], 0, 1, [1], at, 8)


def test_memory_is_compared_by_its_bytes() -> None:
    one, other = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert native.module.are_equal(one.data_ptr(), one.clone().data_ptr(), 8)
    assert not native.module.are_equal(one.data_ptr(), other.data_ptr(), 8)
    assert native.module.are_equal(0, 0, 0)
    assert native.module.is_zero(one.data_ptr(), 4)
    assert not native.module.is_zero(one.data_ptr(), 8)
    assert not native.module.is_zero(other.data_ptr(), 4)
    assert native.module.is_zero(0, 0)


def test_a_scale_follows_a_step_and_says_whether_it_moved() -> None:
    scale, trackers = torch.tensor(8.0), torch.zeros(2, dtype=torch.int32)
    skips = torch.zeros(1, dtype=torch.int32)
    assert not native.module.follow_scale(True, 0, skips.data_ptr(), 0)
    assert not native.module.follow_scale(True, scale.data_ptr(), skips.data_ptr(), 0)
    assert (skips.item(), scale.item()) == (2, 8.0)
    # growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale
    settings = torch.tensor([2.0, 0.5, 2.0, 1.0, 1.0, 64.0], dtype=torch.float64)
    assert native.module.follow_scale(True, scale.data_ptr(), trackers.data_ptr(), settings.data_ptr())
    assert (scale.item(), trackers.tolist()) == (4.0, [0, 1])
    assert not native.module.follow_scale(False, scale.data_ptr(), trackers.data_ptr(), settings.data_ptr())
    assert (scale.item(), trackers.tolist()) == (4.0, [1, 0])
    assert native.module.follow_scale(False, scale.data_ptr(), trackers.data_ptr(), settings.data_ptr())
    assert (scale.item(), trackers.tolist()) == (8.0, [0, 0])


def test_other_threads_run_while_a_kernel_works() -> None:
    values, one, times = torch.zeros(1 << 22), torch.ones(()), 100
    table = native.module.Table([values.numel()] * times, [[2] * times], list(range(times)))
    addresses = [[values.data_ptr()] * times]
    call = (table, addresses, 1, times, one.data_ptr())
    worker = threading.Thread(target=native.module.scale, args=call)
    worker.start()
    ran = 0
    while worker.is_alive():
        ran += 1
        time.sleep(0.001)
    assert ran > 10, "while it keeps the lock this thread runs before the one call and after it"
