"""What the compiled module does with callers and objects that other code changes while it works."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import interpreters
import pytest
import torch
from torch import Tensor

from fp16opt.kernels import native

if native.module is None or native._exchange is None:
    pytest.skip("no compiled module, or no exchange table", allow_module_level=True)


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In another process, as what is wrong here ends one."""
    native_names = "from fp16opt.kernels.native import module as _cpu, _exchange\n"
    head = "import torch, weakref\nfrom torch import Tensor\n" + native_names
    home = Path(native.__file__).parents[2]  # Python looks first where it is started: a checkout may hold no module
    return interpreters.python("-c", head + textwrap.dedent(code), cwd=home)


def assert_runs(code: str) -> None:
    done = run(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_list_that_shrinks_while_another_is_read_matches_no_more() -> None:
    assert_runs(
        """
        first, second, armed = [torch.zeros(4)[1:2]] * 200000, [torch.zeros(1)] * 200000, False

        def is_neg(tensor):
            if armed:
                second.clear()
            return False

        seen, armed = _cpu.SeenLists(_exchange, Tensor, is_neg, (first, second), 0), True
        with _cpu.Reading(True):
            assert seen.match((first, second)) is None
        """
    )


def test_tensors_that_a_block_lets_go_of_may_run_code_that_reads_lists() -> None:
    assert_runs(
        """
        tensors = [torch.zeros(3) for _ in range(300)]
        seen, kept = _cpu.SeenLists(_exchange, Tensor, Tensor.is_neg, (tensors,), 0), []

        def freed(_):
            with _cpu.Reading(False):
                pass
            assert seen.match(([torch.zeros(3) for _ in range(300)],)) is not None

        with _cpu.Reading(True):
            for _ in range(50):
                tensors = [torch.zeros(3) for _ in range(300)]
                kept.append(weakref.ref(tensors[0], freed))
                assert seen.match((tensors,)) is not None
            del tensors
            with _cpu.Reading(False):
                pass
        """
    )


def test_a_block_that_is_never_left_is_forgotten() -> None:
    assert_runs(
        """
        _cpu.Reading(True).__enter__()
        tensors, others = [torch.zeros(3)], [_cpu.Reading(False) for _ in range(100)]
        seen = _cpu.SeenLists(_exchange, Tensor, Tensor.is_neg, (tensors,), 0)
        for _ in range(1000):
            assert seen.match((tensors,)) is not None
        """
    )


def test_python_ends_while_a_thread_works() -> None:
    assert_runs(
        """
        import threading, time

        values, one = torch.zeros(1 << 24), torch.ones(())
        table = _cpu.Table([values.numel()], [0], [[2]], [0])

        def work():
            while True:
                _cpu.scale(table, [[values.data_ptr()]], 1, 1, one.data_ptr())

        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        """
    )


def test_attributes_of_other_classes_are_refused() -> None:
    quiet = torch._C.DisableTorchFunctionSubclass
    for kind, grad in [(int, Tensor.grad), (Tensor, int.__dict__["real"])]:
        with pytest.raises(TypeError, match="not an attribute of tensors"):
            native.module.TensorReader(kind, grad, Tensor._version, quiet)


def test_errors_name_the_class_that_was_wanted() -> None:
    with pytest.raises(TypeError, match=r"expected fp16opt\._cpu\.Table, got int"):
        native.module.scale(3, [], 1, 3, 0)
