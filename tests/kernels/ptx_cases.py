"""Calls of every CUDA kernel that writes tensors, whose grids are executed: see ptx_machine.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import ptx_faults
import pytest
import torch
from named_steps import adam_step, sgd_step
from ptx_machine import Machine
from torch import Tensor

from fp16opt.kernels import (
    CastStats,
    GradStats,
    cuda,
    cuda_rows,
    multi_tensor_axpby,
    multi_tensor_cast,
    multi_tensor_join,
    multi_tensor_lerp,
    multi_tensor_refresh_masters,
    multi_tensor_reset_remainders,
    multi_tensor_scale,
    multi_tensor_split,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
    state8,
)
from fp16opt.kernels.changed import ChangedBits
from fp16opt.kernels.cuda_rows import KERNELS
from fp16opt.kernels.operations import AdamOptions, Factors, LionOptions, SgdOptions, multi_tensor_step

ROWS = 4  # of 256 threads with eight elements each: as many as a kernel has in flight
N = ROWS * 2048
ONE = torch.tensor(1.0)
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


class Case(NamedTuple):
    """One call.

    Attributes:
        kernel: the name of its functor.
        name: what is particular about it.
        written: the tensors that it writes, of N elements each.
        apart: those of them whose bits are not compared: they are nan.
        call: makes it.
        changed: where it marks what changes; None where it doesn't.
    """

    kernel: str
    name: str
    written: list[Tensor]
    apart: list[Tensor]
    call: Callable[[], None]
    changed: ChangedBits | None = None


def random(dtype: torch.dtype = SINGLE) -> Tensor:
    """N numbers, at an address that is a multiple of 64."""
    return torch.randn(N).to(dtype)


def codes(dtype: torch.dtype) -> Tensor:
    """N codes or remainders that can be."""
    low = {torch.int8: -127, torch.uint8: 1, torch.int16: -999}[dtype]
    return torch.randint(low, 127, (N,), dtype=dtype)


def stats_for(model: Tensor, marks: bool) -> CastStats:
    """What is found of one weight; with ``marks`` some of its elements are marked already."""
    found = CastStats.allocate(1, "cpu")
    if marks:
        found.changed = ChangedBits.allocate([model], "cpu")
        found.changed.of(0)[1:].random_()
    return found


def _short(*dtypes: torch.dtype) -> str:
    return " ".join(str(dtype)[6:] for dtype in dtypes)


def _elementwise() -> list[Case]:
    found = []

    def add(
        kernel: str,
        name: str,
        written: Tensor | list[Tensor],
        call: Callable[[], None],
        changed: ChangedBits | None = None,
    ) -> None:
        found.append(Case(kernel, name, written if isinstance(written, list) else [written], [], call, changed))

    for dtype in (HALF, BFLOAT, SINGLE):
        grad, out = random(dtype), random()
        for more in (False, True):

            def unscale(grad: Tensor = grad, out: Tensor = out, more: bool = more) -> None:
                multi_tensor_unscale([grad], [out], ONE * 0.5, GradStats.allocate(1, "cpu"), accumulate=more)

            add("Unscale", f"{_short(dtype)}{' added' if more else ''}", out, unscale)
        add(
            "UnscaleClipped", _short(dtype), out,
            lambda g=grad, o=out: multi_tensor_unscale_clipped([g], [o], ONE * 0.5, ONE * 0.3),
        )  # fmt: skip
        values = random(dtype)
        add("Scale", _short(dtype), values, lambda v=values: multi_tensor_scale([v], ONE * 0.3))
        add("Lerp", _short(dtype), out, lambda g=grad, o=out: multi_tensor_lerp([o], [g], 0.1))
        add("Axpby", _short(dtype), out, lambda g=grad, o=out: multi_tensor_axpby(0.5, [g], 2.0, [g], [o]))
    for dtype in (HALF, BFLOAT):
        master, model, cast = random(), random(dtype), random(dtype)
        for marks in (False, True):
            stats, prefix = stats_for(model, marks), "Marking" if marks else ""
            add(
                f"{prefix}Cast", _short(dtype), cast, lambda m=master, w=cast, s=stats: multi_tensor_cast([m], [w], s),
                stats.changed,
            )  # fmt: skip
        digests, taken = torch.tensor([[1], [2]]), torch.zeros(1, dtype=torch.int32)
        add(
            "Take", _short(dtype), master,
            lambda m=master, w=model, d=digests, t=taken: multi_tensor_refresh_masters([m], [w], d[0], d[1], t),
        )  # fmt: skip
        for width in (torch.int16, torch.int8):
            rest, out = codes(width), random()
            for marks in (False, True):
                stats, prefix = stats_for(model, marks), "Marking" if marks else ""
                add(
                    f"{prefix}Split", _short(dtype, width), [model, rest],
                    lambda m=master, w=model, r=rest, s=stats: multi_tensor_split([m], [w], [r], s), stats.changed,
                )  # fmt: skip
            add("Join", _short(dtype, width), out, lambda w=model, r=rest, o=out: multi_tensor_join([w], [r], [o]))
            zeros, rests = torch.where(random() < 0, -0.0, 0.0).to(dtype), codes(width)
            add(
                "Join", f"{_short(dtype, width)}, zeros", out,
                lambda w=zeros, r=rests, o=out: multi_tensor_join([w], [r], [o]),
            )  # fmt: skip
            add(
                "Renew", _short(dtype, width), rest,
                lambda w=model, r=rest, d=digests, t=taken: multi_tensor_reset_remainders([w], [r], d[0], d[1], t),
            )  # fmt: skip
    return found


MASTERS: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype | None]] = {
    "own": (SINGLE, SINGLE, None),
    "half": (HALF, SINGLE, HALF),
    "bfloat16": (BFLOAT, SINGLE, BFLOAT),
    "bfloat16 of float32 gradients": (SINGLE, SINGLE, BFLOAT),
    "half split": (HALF, torch.int16, HALF),
    "bfloat16 split": (BFLOAT, torch.int16, BFLOAT),
    "half in 24 bits": (HALF, torch.int8, HALF),
    "bfloat16 in 24 bits": (BFLOAT, torch.int8, BFLOAT),
}
"""Dtypes of gradients, masters and models."""


def _steps() -> list[Case]:
    found = []
    factors, adam = Factors(ONE * 0.5, ONE), [AdamOptions(0.1, 0.9, 0.999, 1e-8, 0.1, True, False)]
    momentum, plain = [SgdOptions(0.1, 0.9, 0.0, 0.0, False, False)], [SgdOptions(0.1, 0.0, 0.0, 0.0, False, False)]
    for name, (of_grad, of_master, of_model) in MASTERS.items():

        def add(
            kernel: str,
            state: list[Tensor],
            call: Callable[..., None],
            *given: Any,
            name: str = name,
            dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None] = (of_grad, of_master, of_model),
            **more: Any,
        ) -> None:
            grad, master = random(dtypes[0]), random() if dtypes[1] == SINGLE else codes(dtypes[1])
            model = None if dtypes[2] is None else random(dtypes[2])
            written = [master, *state] if model is None else [master, model, *state]
            own = cuda.OF_DTYPES.get(dtypes) if kernel in ("Adam8Step", "Sgd8Step") else None  # type: ignore[arg-type]
            of_kind = kernel if own is None else KERNELS[cuda_rows.of_kind(kernel[:-4].lower(), own)].functor.name
            for marks in (False,) if model is None else (False, True):
                stats = None if model is None else stats_for(model, marks)
                rest = more if model is None else {**more, "models": [model], "stats": stats}
                found.append(
                    Case(
                        f"Marking{kernel}" if marks else of_kind, name, written, [],
                        lambda rest=rest: call([grad], [master], *given, **rest),
                        None if stats is None else stats.changed,
                    )
                )  # fmt: skip

        m, v, most, count = random(), random().abs(), random().abs(), [torch.tensor(7.0)]
        add("AdamStep", [m, v], adam_step, [m], [v], count, adam, [0], factors)
        m, v = random(), random().abs()
        add("AmsgradStep", [m, v, most], adam_step, [m], [v], count, adam, [0], factors, max_exp_avg_sqs=[most])
        add("SgdStep", [], sgd_step, plain, [0], factors)
        for first in (False, True):
            m, which = random(), f"{name}, first" if first else name
            add(
                "MomentumStep", [m], sgd_step, momentum, [0], factors,
                name=which, momentum_buffers=[m], first=[first],
            )  # fmt: skip
        m = random()

        def lion(grads: list[Tensor], masters: list[Tensor], kept: Tensor = m, **more: Any) -> None:
            options = [LionOptions(0.1, 0.9, 0.99, 0.1, False)]
            multi_tensor_step("lion", grads, masters, [[kept]], options, [0], factors, **more)

        add("LionStep", [m], lion)
        first_codes, second, scales = codes(torch.int8), codes(torch.uint8), torch.rand(N // state8.BLOCK)
        add(
            "Adam8Step", [first_codes, second], state8.multi_tensor_adam8,
            [first_codes], [second], [scales], count, adam, [0], factors, 3,
        )  # fmt: skip
        shares, scales = codes(torch.int8), torch.rand(N // state8.BLOCK)
        add(
            "Sgd8Step", [shares], state8.multi_tensor_sgd8, [shares], [scales], momentum, [0], factors, 3,
            first=[False],
        )  # fmt: skip
    return found


def _not_finite() -> list[Case]:
    """A step of 8-bit state whose gradients are inf and nan of both signs: codes of what became nan."""
    grad, master, first, second = random(), random(), codes(torch.int8), codes(torch.uint8)
    grad.view(torch.int32)[::3] = -1
    grad[1::3] = torch.where(grad[1::3] < 0, -torch.inf, torch.inf)
    lists = [grad], [master], [first], [second], [torch.rand(N // state8.BLOCK)], [torch.tensor(7.0)]
    more: Any = [AdamOptions(0.1, 0.9, 0.999, 1e-8, 0.1, True, False)], [0], Factors(ONE, ONE), 3
    step = Case(
        "Adam8Step", "own, not finite", [master, first, second], [master],
        lambda: state8.multi_tensor_adam8(*lists, *more),
    )  # fmt: skip
    return [step]


def all_cases() -> list[Case]:
    """At least one for each kernel that writes tensors."""
    torch.manual_seed(0)
    return _elementwise() + _steps() + _not_finite()


class Executed(NamedTuple):
    """What was done in one call.

    Attributes:
        name: of the case.
        total: bytes that the first thread wrote to tensors.
        wide: those of them that went in stores as wide as eight elements allow, of sixteen bytes at most.
        missing: elements of its own that it left as they were.
        other: bytes that another backend writes differently, of all threads.
        again: how often it loaded from one address, at most.
    """

    name: str
    total: int
    wide: int
    missing: int
    other: int
    again: int


def execute(case: Case, twin: Case, machine: Machine) -> Executed:
    """How a grid writes the tensors of ``case``, and whether the backend that serves those of its twin writes the same
    bytes."""
    with pytest.MonkeyPatch.context() as patch:
        ptx_faults.serve(machine, patch)
        case.call()
    twin.call()
    total = wide = missing = other = 0
    for tensor, same in zip(case.written, twin.written, strict=True):
        first, widest = tensor.data_ptr(), min(16, 8 * tensor.element_size())
        stores = [(address, size) for address, size in machine.stores if first <= address < first + tensor.nbytes]
        total += sum(size for _, size in stores)
        wide += sum(size for _, size in stores if size == widest)
        missing += ROWS * 8 - len({at + k for at, size in stores for k in range(size)}) // tensor.element_size()
        if not any(tensor is one for one in case.apart):
            other += int(tensor.view(torch.uint8).ne(same.view(torch.uint8)).sum())
    if case.changed is not None and twin.changed is not None:
        other += int(case.changed.of(0).ne(twin.changed.of(0)).sum())
    return Executed(case.name, total, wide, missing, other, max(Counter(at for at, _ in machine.loads).values()))
