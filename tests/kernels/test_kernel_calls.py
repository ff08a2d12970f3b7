"""How much Python a call passes through once its lists are known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fp16opt
from fp16opt import kernels
from fp16opt.kernels import PointerTables, native
from fp16opt.kernels.operations import AdamOptions, Factors, SgdOptions, multi_tensor_step

PACKAGE = str(Path(fp16opt.__file__).parent)
N = 50

pytestmark = pytest.mark.skipif(
    not native.available() or native._exchange is None, reason="needs the compiled CPU module, and torch 2.10"
)


def calls() -> dict[str, Callable[[], object]]:
    """Operations on lists of ``N`` tensors, some of them None, each with tables of its own."""

    def some(dtype: torch.dtype) -> Any:
        return [None if k % 7 == 3 else torch.ones(5 + k).to(dtype) for k in range(N)]

    single, half = torch.float32, torch.float16
    grads, masters, models, first, second, outs = (
        some(half),
        some(single),
        some(half),
        *(some(single) for _ in range(3)),
    )
    steps = [torch.tensor(0.0) for _ in range(N)]
    stats, cast = kernels.GradStats.allocate(N, "cpu"), kernels.CastStats.allocate(N, "cpu")
    samples, inv = torch.zeros(N, dtype=torch.int64), torch.tensor(0.5)
    factors, group_of = Factors(inv, inv), [0] * N
    adam, sgd = [AdamOptions(0.1, 0.9, 0.99, 1e-8, 0.0, True, False)], [SgdOptions(0.1, 0.9, 0.0, 0.0, False, False)]
    t = [kernels.PointerTables() for _ in range(6)]
    own, other = PointerTables(), PointerTables()
    with_models = {"models": models, "stats": cast}
    return {
        "check": lambda: kernels.multi_tensor_check(grads, inv, stats, tables=t[0]),
        "unscale": lambda: kernels.multi_tensor_unscale(grads, outs, inv, stats, tables=t[1]),
        "unscale_clipped": lambda: kernels.multi_tensor_unscale_clipped(grads, outs, inv, inv, tables=t[2]),
        "l2norm": lambda: kernels.multi_tensor_l2norm(outs, tables=t[3]),
        "cast": lambda: kernels.multi_tensor_cast(masters, models, cast, tables=t[4]),
        "sample": lambda: kernels.multi_tensor_sample(models, samples, tables=t[5]),
        "adam": lambda: multi_tensor_step(
            "adam", grads, masters, (first, second), adam, group_of, factors, steps=steps, tables=own, **with_models
        ),
        "sgd": lambda: multi_tensor_step(
            "sgd", grads, masters, (first,), sgd, group_of, factors, tables=other, **with_models
        ),
    }


def passed(call: Callable[[], object]) -> list[str]:
    """The functions of the package that ``call`` passes through, once for each call of one."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            seen.append(code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("name", list(calls()))
def test_a_call_that_is_made_again_is_one_function_and_none_for_each_tensor(name: str) -> None:
    """Of steps three, as options are checked and packed, and of the norm, whose results are new, five."""
    call = calls()[name]
    call()
    seen = passed(call)
    assert len(seen) <= {"l2norm": 5, "adam": 3, "sgd": 3}.get(name, 1), seen
    assert len(set(seen)) == len(seen)
