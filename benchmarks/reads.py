"""How often does the engine read a gradient's ``.grad`` in one step of its default mode?

    python benchmarks/reads.py [--quick] [--json PATH]

A step is ``backward(loss)``, perhaps a ``clip_master_grads``, and ``step``, after a ``zero_grad``. Counted is how
often the library's own files read a ``.grad`` of the model and found a gradient there: the largest number over all
parameters.
Bound, without a clip and with what ``fused_step="auto"`` takes: two, what ``backward`` notes and what the check
compares with it.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp16opt
from fp16opt.engine import dtensors
from fp16opt.kernels import tensor_lists

HOME = str(Path(fp16opt.__file__).parent)
BOUND = 2.0


@contextlib.contextmanager
def counted(reads: Counter[int]) -> Iterator[None]:
    """Count reads of ``.grad`` by the library's files, by the tensor's ``id``: those past torch's descriptor too."""
    raw, descriptor = dtensors.raw_grad, Tensor.grad
    modules = [module for name, module in sys.modules.items() if name.startswith("fp16opt") and module is not None]
    lists = tensor_lists.grads_of, tensor_lists.gradients, tensor_lists.counted_gradients  # compiled code reads those
    ways = {id(raw), *map(id, lists)}
    places = [(module, *item) for module in modules for item in list(vars(module).items()) if id(item[1]) in ways]
    within: list[str] = []

    def noted(tensor: Tensor) -> Any:
        found = raw(tensor)
        reads[id(tensor)] += found is not None
        return found

    def noting(function: Any) -> Any:
        def noted_list(tensors: Any, *rest: Any) -> Any:
            if within:  # of another one, which counts
                return function(tensors, *rest)
            within.append(function.__name__)
            try:
                found = function(tensors, *rest)
            finally:
                within.clear()
            for tensor, grad in zip(tensors, found, strict=True):
                reads[id(tensor)] += grad is not None
            return found

        return noted_list

    def read(tensor: Tensor) -> Any:
        return (noted if not within and sys._getframe(1).f_code.co_filename.startswith(HOME) else raw)(tensor)

    set_grad: Any = descriptor.__set__
    delete_grad: Any = descriptor.__delete__
    for module, name, way in places:
        setattr(module, name, noted if way is raw else noting(way))
    Tensor.grad = property(read, set_grad, delete_grad)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.grad
        for module, name, way in places:
            setattr(module, name, way)


def reads_of(dtypes: tuple[torch.dtype, ...], clips: bool, **arguments: Any) -> int:
    """The most reads of one parameter's gradient in the fourth step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(8, 8).to(dtypes[i % len(dtypes)])) for i in range(4)]
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=1e-3), **arguments)
    reads: Counter[int] = Counter()
    for number in range(4):
        opt.zero_grad()
        with counted(reads) if number == 3 else contextlib.nullcontext():
            opt.backward(sum((param.float() ** 2).mean() for param in params))  # type: ignore[arg-type]
            if clips:
                opt.clip_master_grads(0.1)
            opt.step()
    if opt.skipped_steps:
        sys.exit("a step was skipped: what was counted is no step")
    return max(reads[id(param)] for param in params)


def check() -> None:
    """A read that is made must be counted, by whichever way."""
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    reads: Counter[int] = Counter()
    with counted(reads):
        dtensors.raw_grads([param])
    if reads != {id(param): 1} or Tensor.grad is not torch._C.TensorBase.grad:
        sys.exit(f"one read was counted as {dict(reads)}")


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "")
    common.print_versions()
    check()
    kinds = {
        "float16": (torch.float16,),
        "bfloat16 and float32": (torch.bfloat16, torch.float32),
    }
    rows = []
    for name, dtypes in kinds.items():
        for scale, asked in (("dynamic", {"dynamic": True}), ("scale 1", {})):
            for fused in ("auto", False):
                for clips in (True, False):
                    found = float(reads_of(dtypes, clips, fused_step=fused, **asked))
                    words = f"{name}, {scale}, fused_step={fused!r}, {'with' if clips else 'no'} clip"
                    bound = BOUND if fused and not clips else None
                    rows.append(common.Row(f"reads of a .grad in one step: {words}", bound, found, found, found))
    common.print_rows(rows)
    common.write_json(arguments.json, rows=rows)
    if any(row.verdict == "MISSED" for row in rows):
        sys.exit(f"a gradient is read more than {BOUND:g} times")


if __name__ == "__main__":
    main()
