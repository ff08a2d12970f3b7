"""The table of operations: what each takes, its specification in torch operations, and its compiled kernels."""

from __future__ import annotations

from typing import Any

import torch

from . import reference, reference_measures, reference_split
from .calls import Argument, Operation, Specification

HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_DTYPES = (HALF, BFLOAT)
"""The dtypes of parameters that get masters."""
REMAINDERS = (torch.int16, torch.int8)
"""The dtypes of what is kept beside the weights of split masters."""

# -- dtypes that go together -------------------------------------------------------------------------------------------


def _unscale_accepts(grad: torch.dtype, out: torch.dtype) -> bool:
    return (grad in (HALF, BFLOAT, SINGLE) and out == SINGLE) or (grad == DOUBLE and out == DOUBLE)


def _lerp_accepts(average: torch.dtype, value: torch.dtype) -> bool:
    return _unscale_accepts(value, average)


def _any_float(*dtypes: torch.dtype) -> bool:
    return all(dtype in (HALF, BFLOAT, SINGLE, DOUBLE) for dtype in dtypes)


def _up_to_single(*dtypes: torch.dtype) -> bool:
    return all(dtype in (HALF, BFLOAT, SINGLE) for dtype in dtypes)


def _cast_accepts(master: torch.dtype, param: torch.dtype) -> bool:
    return master == SINGLE and param in HALF_DTYPES


def _sixteen_bits(dtype: torch.dtype) -> bool:
    return dtype in HALF_DTYPES


def _split_accepts(master: torch.dtype, param: torch.dtype, remainder: torch.dtype) -> bool:
    return master == SINGLE and param in HALF_DTYPES and remainder in REMAINDERS


def _join_accepts(param: torch.dtype, remainder: torch.dtype, out: torch.dtype) -> bool:
    return _split_accepts(out, param, remainder)


def _remainder_accepts(param: torch.dtype, remainder: torch.dtype) -> bool:
    return _split_accepts(SINGLE, param, remainder)


def _compare_accepts(master: torch.dtype, weight: torch.dtype) -> bool:
    return _any_float(master) and (weight == master or (master == SINGLE and weight in HALF_DTYPES))


# -- specifications of one row: (row, tensors, arguments, flag) --------------------------------------------------------


def _unscale(row: int, tensors: Any, given: tuple[Any, ...], accumulate: bool) -> None:
    grad, out = tensors
    inv_scale, stats, write = given
    reference.unscale(row, grad, out, inv_scale.view(()), accumulate, write, stats)


def _check(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    inv_scale, stats, write = given
    out = torch.empty_like(tensors[0], dtype=SINGLE)  # judged is what float32 ones would hold
    reference.unscale(row, tensors[0], out, inv_scale.view(()), False, write, stats)


def _unscale_clipped(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    reference.unscale_clipped(*tensors, *(number.view(()) for number in given))


def _l2norm(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    given[0][row] = reference.sum_of_squares(*tensors)


def _scale(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    reference.scale(tensors[0], given[0].view(()))


CHECKED = {"x": 1, "y": 2, "both": 3}
"""Codes of which inputs :func:`fp16opt.kernels.multi_tensor_axpby` looks at."""
_CHECKED = {code: name for name, code in CHECKED.items()}


def _axpby(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    a, b, checked, found_inf = given
    x, y, out = tensors
    reference.axpby(a, x, b, y, out, found_inf, _CHECKED.get(checked, ""))


def _lerp(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    reference.lerp(*tensors, *given)


def _cast(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    reference.cast(row, *tensors, *given)


def _sample(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    given[0][row] = reference.sample(*tensors)


def _measure(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    given[0][row] = reference_measures.measure(*tensors)


def _compare(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    master, weight = tensors
    before, numbers = given
    numbers[row] = reference_measures.compare(master, weight, before.of(row))


def _split(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    reference_split.split(row, *tensors, *given)


def _join(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    reference_split.join(*tensors)


def _refresh(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    master, param = tensors
    now, then, taken = given
    reference.refresh_master(master, param, now[row] != then[row], taken[row])


def _reset(row: int, tensors: Any, given: tuple[Any, ...], _: bool) -> None:
    param, remainder = tensors
    now, then, taken = given
    reference_split.reset_remainder(param, remainder, now[row] != then[row], taken[row])


# -- the table ---------------------------------------------------------------------------------------------------------

_OVERFLOW = Argument("stats.overflow", torch.int32, each=True, written=True)
_INV_SCALE = Argument("inv_scale")
_FACTOR = Argument("factor")
_DIGESTS = (
    Argument("now", torch.int64, each=True),
    Argument("then", torch.int64, each=True),
    Argument("taken", torch.int32, each=True, written=True),
)


def _plain(name: str) -> Argument:
    return Argument(name, None)


def _made(name: str) -> Argument:
    """A result that the operation itself makes, or that was checked when its owner was made."""
    return Argument(name, None, written=True)


_STATS = (
    Argument("stats.nonfinite", torch.int32, each=True, written=True),
    *map(_made, ("stats.sumsq", "stats.norm", "stats.found_inf")),
)


_FLOATS = "float16, bfloat16, float32 or float64"

UNSCALE = Operation(
    "multi_tensor_unscale",
    ("grads", "outs"),
    _unscale_accepts,
    "float16, bfloat16 or float32 into float32, or float64 into float64",
    _unscale,
    "unscale",
    "unscale",
    (_INV_SCALE, *_STATS, _plain("write")),
    written=(1,),
    shape_of=1,
)
UNSCALE_CLIPPED = UNSCALE._replace(
    name="multi_tensor_unscale_clipped",
    specification=_unscale_clipped,
    cpu="unscale_clipped",
    cuda="unscale_clipped",
    arguments=(_INV_SCALE, _FACTOR),
    planned_as=UNSCALE,
)
CHECK = Operation(
    "multi_tensor_check", ("grads",), _up_to_single, "float16 to float32", _check, "unscale", "check", UNSCALE.arguments
)
L2NORM = Operation(
    "multi_tensor_l2norm",
    ("tensors",),
    _any_float,
    _FLOATS,
    _l2norm,
    "l2norm",
    "l2norm",
    (_made("sumsq"), _plain("norm"), _plain("norms")),
)
SCALE = Operation(
    "multi_tensor_scale", ("tensors",), _any_float, _FLOATS, _scale, "scale", "scale", (_FACTOR,), written=(0,)
)
AXPBY = Operation(
    "multi_tensor_axpby",
    ("xs", "ys", "outs"),
    _up_to_single,
    "float16, bfloat16 or float32 each",
    _axpby,
    "axpby",
    "axpby",
    (_plain("a"), _plain("b"), _plain("check"), Argument("found_inf", written=True)),
    written=(2,),
    shape_of=2,
)
LERP = Operation(
    "multi_tensor_lerp",
    ("averages", "values"),
    _lerp_accepts,
    "float32 averages of float16, bfloat16 or float32 values, or float64 of float64",
    _lerp,
    "lerp",
    "lerp",
    (_plain("part"), _plain("from_average")),
    written=(0,),
)
CAST = Operation(
    "multi_tensor_cast",
    ("masters", "params"),
    _cast_accepts,
    "float32 masters into float16 or bfloat16 params",
    _cast,
    "cast",
    "cast",
    (_OVERFLOW,),
    written=(1,),
    shape_of=1,
)
SAMPLE = Operation(
    "multi_tensor_sample",
    ("tensors",),
    _sixteen_bits,
    "float16 or bfloat16",
    _sample,
    "sample",
    "sample",
    (Argument("samples", torch.int64, each=True, written=True),),
)
MEASURE = Operation(
    "multi_tensor_measure",
    ("grads",),
    _any_float,
    _FLOATS,
    _measure,
    "measure",
    "measure",
    (_made("numbers"),),
    wide=False,
)
COMPARE = Operation(
    "multi_tensor_compare",
    ("masters", "weights"),
    _compare_accepts,
    "float32 masters and float16 or bfloat16 weights, or masters and weights of one floating dtype",
    _compare,
    "compare",
    "compare",
    (_plain("before.values"), _plain("before.offsets"), _made("numbers")),
    wide=False,
)
SPLIT = Operation(
    "multi_tensor_split",
    ("masters", "params", "remainders"),
    _split_accepts,
    "float32 masters into float16 or bfloat16 params and int16 or int8 remainders",
    _split,
    "split",
    "split",
    (_OVERFLOW,),
    written=(1, 2),
    shape_of=1,
    coded=("cuda",),
)
JOIN = Operation(
    "multi_tensor_join",
    ("params", "remainders", "outs"),
    _join_accepts,
    "float16 or bfloat16 params and int16 or int8 remainders into float32",
    _join,
    "join",
    "join",
    written=(2,),
    shape_of=2,
    coded=("cuda",),
)
REFRESH_MASTERS = Operation(
    "multi_tensor_refresh_masters",
    ("masters", "params"),
    _cast_accepts,
    "float32 masters and float16 or bfloat16 params",
    _refresh,
    "",
    "take",
    _DIGESTS,
)
RESET_REMAINDERS = Operation(
    "multi_tensor_reset_remainders",
    ("params", "remainders"),
    _remainder_accepts,
    "float16 or bfloat16 params and int16 or int8 remainders",
    _reset,
    "",
    "renew",
    _DIGESTS,
    written=(1,),
    coded=("cuda",),
)


# -- steps: gradients, masters, the lists of state, 16-bit models where masters have them ------------------------------

_MODELS = "float32, but for models of float16 or bfloat16 and gradients of float32 or the model's dtype"
_MODELS_8 = (
    "float32 and codes of int8 and uint8, but for models of float16 or bfloat16 and gradients of these or float32"
)
_CODES = (torch.int8, torch.uint8)


def _step_accepts(grad: torch.dtype, *others: torch.dtype) -> bool:
    return grad == SINGLE and all(dtype == SINGLE for dtype in others)


def _model_step_accepts(grad: torch.dtype, *others: torch.dtype) -> bool:
    master, *singles, model = others
    fits = model in HALF_DTYPES and grad in (SINGLE, model) and master in (SINGLE, *REMAINDERS)
    return fits and all(dtype == SINGLE for dtype in singles)


def _step8_accepts(grad: torch.dtype, master: torch.dtype, *codes: torch.dtype) -> bool:
    return grad == SINGLE and master == SINGLE and codes == _CODES[: len(codes)]


def _model_step8_accepts(grad: torch.dtype, master: torch.dtype, *rest: torch.dtype) -> bool:
    *codes, model = rest
    fits = model in HALF_DTYPES and grad in (SINGLE, model) and master in (SINGLE, *REMAINDERS)
    return fits and tuple(codes) == _CODES[: len(codes)]


_OF_STEPS = (
    Argument("factors.inv_scale"),
    Argument("factors.coefficient"),
    Argument("found_inf"),
    _OVERFLOW,
)


def step_operation(
    name: str,
    state: tuple[str, ...],
    specification: Specification,
    kernel: str,
    *,
    has_models: bool,
    counts: bool,
    block: int = 0,
) -> Operation:
    """A row of the table: a one-pass step.

    Args:
        name: of the public function.
        state: names of the lists of state.
        specification: of one row; its arguments are those of :func:`.steps.run_step`.
        kernel: of CUDA.
        has_models: whether masters have 16-bit parameters.
        counts: whether each parameter counts its steps.
        block: elements with one scale, where the state is codes of 8 bits; else 0.
    """
    lists = ("grads", "masters", *state)
    if has_models:
        accepts, wanted = (_model_step8_accepts, _MODELS_8) if block else (_model_step_accepts, _MODELS)
    elif block:
        accepts, wanted = _step8_accepts, "float32, and codes of int8 and uint8"
    else:
        accepts, wanted = _step_accepts, "float32 each"
    return Operation(
        name,
        (*lists, "models") if has_models else lists,
        accepts,
        wanted,
        specification,
        "step",
        kernel,
        _OF_STEPS,
        written=(len(lists),) if has_models else (1,),
        shape_of=1,
        counters="steps" if counts else "",
        scales="scales" if block else "",
        block=block or 1,
        coded=("cpu", "cuda") if has_models or block else (),
    )
