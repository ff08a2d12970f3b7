"""Lists of tensors, checked once and remembered.

Reading dtype, shape and strides of a thousand tensors from Python takes longer than the arithmetic on them, so every
call site keeps a :class:`PointerTables` (calls.py). It holds the outcome of the last check and proves on each call that
it still applies: same places that are None, same dtype, device, shape and strides in every entry. Addresses are read
afresh on every call and never remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends, cuda, native
from .calls import Call, Entries, Operation, Plan, PointerTables

HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
REMAINDERS = (torch.int16, torch.int8)
"""The dtypes of what is kept beside the weights of split masters."""
CODES = (torch.int8, torch.uint8)
HALF_DTYPES = (HALF, BFLOAT)
"""The dtypes of parameters that get masters."""


def _unscale_accepts(grad: torch.dtype, out: torch.dtype) -> bool:
    return (grad in (HALF, BFLOAT, SINGLE) and out == SINGLE) or (grad == DOUBLE and out == DOUBLE)


def _lerp_accepts(average: torch.dtype, value: torch.dtype) -> bool:
    return _unscale_accepts(value, average)


def _any_float(*dtypes: torch.dtype) -> bool:
    return all(dtype in (HALF, BFLOAT, SINGLE, DOUBLE) for dtype in dtypes)


def _up_to_single(*dtypes: torch.dtype) -> bool:
    return all(dtype in (HALF, BFLOAT, SINGLE) for dtype in dtypes)


def _cast_accepts(master: torch.dtype, param: torch.dtype) -> bool:
    return master == SINGLE and param in (HALF, BFLOAT)


def _sixteen_bits(dtype: torch.dtype) -> bool:
    return dtype in (HALF, BFLOAT)


def _split_accepts(master: torch.dtype, param: torch.dtype, remainder: torch.dtype) -> bool:
    return master == SINGLE and param in (HALF, BFLOAT) and remainder in REMAINDERS


def _join_accepts(param: torch.dtype, remainder: torch.dtype, out: torch.dtype) -> bool:
    return _split_accepts(out, param, remainder)


def _renew_accepts(param: torch.dtype, remainder: torch.dtype) -> bool:
    return _split_accepts(SINGLE, param, remainder)


def _compare_accepts(master: torch.dtype, weight: torch.dtype) -> bool:
    return _any_float(master) and (weight == master or (master == SINGLE and weight in HALF_DTYPES))


UNSCALE = Operation(
    "multi_tensor_unscale",
    ("grads", "outs"),
    _unscale_accepts,
    "float16, bfloat16 or float32 into float32, or float64 into float64",
    written=(1,),
    shape_of=1,
)
CHECK = Operation("multi_tensor_check", ("grads",), _up_to_single, "float16 to float32")
L2NORM = Operation("multi_tensor_l2norm", ("tensors",), _any_float, "float16, bfloat16, float32 or float64")
SCALE = Operation("multi_tensor_scale", ("tensors",), _any_float, L2NORM.wanted, written=(0,))
AXPBY = Operation(
    "multi_tensor_axpby",
    ("xs", "ys", "outs"),
    _up_to_single,
    "float16, bfloat16 or float32 each",
    written=(2,),
    shape_of=2,
)
LERP = Operation(
    "multi_tensor_lerp",
    ("averages", "values"),
    _lerp_accepts,
    "float32 averages of float16, bfloat16 or float32 values, or float64 of float64",
    written=(0,),
)
CAST = Operation(
    "multi_tensor_cast",
    ("masters", "params"),
    _cast_accepts,
    "float32 masters into float16 or bfloat16 params",
    written=(1,),
    shape_of=1,
)
TAKE = Operation(
    "multi_tensor_take",
    ("masters", "params"),
    _cast_accepts,
    "float32 masters and float16 or bfloat16 params",
)
SAMPLE = Operation("multi_tensor_sample", ("tensors",), _sixteen_bits, "float16 or bfloat16")
MEASURE = Operation("multi_tensor_measure", ("grads",), _any_float, L2NORM.wanted, wide=False)
COMPARE = Operation(
    "multi_tensor_compare",
    ("masters", "weights"),
    _compare_accepts,
    "float32 masters and float16 or bfloat16 weights, or masters and weights of one floating dtype",
    wide=False,
)
SPLIT = Operation(
    "multi_tensor_split",
    ("masters", "params", "remainders"),
    _split_accepts,
    "float32 masters into float16 or bfloat16 params and int16 or int8 remainders",
    written=(1, 2),
    shape_of=1,
    coded=("cuda",),
)
JOIN = Operation(
    "multi_tensor_join",
    ("params", "remainders", "outs"),
    _join_accepts,
    "float16 or bfloat16 params and int16 or int8 remainders into float32",
    written=(2,),
    shape_of=2,
    coded=("cuda",),
)
RENEW = Operation(
    "multi_tensor_renew",
    ("params", "remainders"),
    _renew_accepts,
    "float16 or bfloat16 params and int16 or int8 remainders",
    written=(1,),
    coded=("cuda",),
)


def _rows(operation: Operation, names: Sequence[str], lists: Sequence[Entries]) -> list[int]:
    """The positions in use, of lists that are of one length."""
    count = len(lists[0])
    for name, entries in zip(names, lists, strict=True):
        if len(entries) != count:
            raise ValueError(
                f"{operation.name}: {name} has {len(entries)} entries, {names[0]} has {count}. "
                "Give lists of equal length, with None for what is to be skipped."
            )
    deciding = lists[: len(operation.lists)]
    return [i for i, row in enumerate(zip(*deciding, strict=True)) if all(tensor is not None for tensor in row)]


def _check_dense(where: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{where} must be a tensor or None, got {type(tensor).__name__}.")
    if tensor.layout != torch.strided:
        raise TypeError(f"{where} must be a dense tensor, got layout {tensor.layout}. Convert it with to_dense().")


def _check_row(operation: Operation, i: int, row: Sequence[Tensor], device: torch.device) -> None:
    """Raise unless the tensors at position ``i`` may be given to ``operation`` together."""
    model = row[operation.shape_of]
    for name, tensor in zip(operation.lists, row, strict=True):
        where = f"{operation.name}: {name}[{i}]"
        _check_dense(where, tensor)
        if tensor.device != device:
            raise ValueError(
                f"{where} is on {tensor.device}, the first tensor of the call on {device}. "
                "Make one call for each device."
            )
        if tensor.shape != model.shape:
            raise ValueError(
                f"{where} has shape {tuple(tensor.shape)}, but {operation.lists[operation.shape_of]}[{i}] has "
                f"{tuple(model.shape)}. Give tensors of one shape."
            )
    dtypes = [tensor.dtype for tensor in row]
    if not operation.accepts(*dtypes):
        names = ", ".join(f"{n}[{i}] {str(d)[6:]}" for n, d in zip(operation.lists, dtypes, strict=True))
        raise TypeError(f"{operation.name}: wants {operation.wanted}, got {names}.")


def _check_counter(
    operation: Operation, i: int, counter: object, counted_on: torch.device | None, device: torch.device
) -> Tensor:
    """Raise unless a counter may be among others on ``counted_on``, beside lists on ``device``."""
    where = f"{operation.name}: {operation.counters}[{i}]"
    _check_dense(where, counter)
    if not isinstance(counter, Tensor) or counter.numel() != 1:
        raise ValueError(
            f"{operation.name}: {operation.counters} must have one element for each entry that is stepped."
        )
    if counter.dtype != SINGLE:
        raise TypeError(f"{operation.name}: wants float32, got {operation.counters}[{i}] {str(counter.dtype)[6:]}.")
    if counted_on is not None and counter.device != counted_on:
        raise ValueError(
            f"{where} is on {counter.device}, the first of the call on {counted_on}. Keep them on one device."
        )
    if counter.device not in (device, torch.device("cpu")):
        raise ValueError(
            f"{where} is on {counter.device}, the tensors of the call on {device}. Keep counters there or on the CPU."
        )
    return counter


def _check_scales(operation: Operation, i: int, scales: object, numel: int, device: torch.device) -> Tensor:
    where, wanted = f"{operation.name}: {operation.scales}[{i}]", -(-numel // operation.block)
    _check_dense(where, scales)
    if not isinstance(scales, Tensor) or scales.numel() != wanted or not scales.is_contiguous():
        raise ValueError(
            f"{where} must be contiguous with {wanted} elements, one for every {operation.block} of the tensor's "
            f"{numel}."
        )
    if scales.dtype != SINGLE:
        raise TypeError(f"{operation.name}: wants float32, got {operation.scales}[{i}] {str(scales.dtype)[6:]}.")
    if scales.device != device:
        raise ValueError(f"{where} is on {scales.device}, the first tensor of the call on {device}.")
    return scales


def _walk(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that move through memory, in the order of the dimensions."""
    return [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills a stretch of memory, each address once, whatever the order of its dimensions.

    Args:
        tensor: any strided tensor.

    Returns:
        True for contiguous, transposed and channels-last tensors; False for slices with gaps and expanded ones.

    Example:
        >>> is_dense(torch.zeros(3, 4).t()), is_dense(torch.zeros(3, 4)[:, :2]), is_dense(torch.zeros(1).expand(4))
        (True, False, False)
    """
    expected = 1
    for stride, size in sorted(_walk(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def same_walk(a: Tensor, b: Tensor) -> bool:
    """Whether one index walks two tensors of the same shape through memory together.

    Args:
        a, b: any strided tensors.

    Returns:
        True where strides are equal but for dimensions of one element, and for empty tensors.

    Example:
        >>> same_walk(torch.zeros(1, 4), torch.zeros(4, 1).t()), same_walk(torch.zeros(2, 2), torch.zeros(2, 2).t())
        (True, False)
    """
    return a.stride() == b.stride() or a.numel() == 0 or _walk(a) == _walk(b)


def _is_coded(lists: Sequence[Entries], i: int) -> bool:
    return any(tensor is not None and tensor.dtype in CODES for tensor in (entries[i] for entries in lists))


def _is_plain(tensor: Tensor) -> bool:
    """Whether the address of the tensor is where its values are, as they are."""
    overridden = getattr(type(tensor), "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    return not overridden and not tensor.is_neg()


def _is_direct(row: Sequence[Tensor]) -> bool:
    """Whether one index walks all tensors of the row through memory together."""
    if not all(_is_plain(tensor) for tensor in row):
        return False
    if row[0].numel() == 0:
        return True
    walk = _walk(row[0])
    return is_dense(row[0]) and all(_walk(tensor) == walk for tensor in row[1:])


def check_lists(operation: Operation, lists: Sequence[Entries], device: torch.device | None) -> Plan:
    """Check every tensor and sort the positions by how they can be served.

    Args:
        operation: what is to be done with the lists.
        lists: as many as the operation has; behind the others come scales, and counters.
        device: what counts for lists without tensors; None for the CPU.

    Returns:
        The plan, with nothing compiled yet.

    Raises:
        TypeError: a wrong type, layout or dtype, naming list and position.
        ValueError: a wrong length, device or shape, naming list and position.
    """
    width = len(operation.lists)
    used = _rows(operation, operation.names, lists)
    direct: list[int] = []
    found: torch.device | None = None
    counted_on: torch.device | None = None
    for place, i in enumerate(used):
        row = [entries[i] for entries in lists[:width]]
        tensors = [tensor for tensor in row if tensor is not None]
        if found is None and isinstance(row[0], Tensor):
            found = row[0].device
        _check_row(operation, i, tensors, found or torch.device("cpu"))
        is_direct = _is_direct(tensors)
        if operation.scales:
            scales = _check_scales(operation, i, lists[width][i], tensors[0].numel(), found or torch.device("cpu"))
            is_direct = _is_plain(scales) and is_direct
        if operation.counters:
            counter = _check_counter(operation, i, lists[-1][i], counted_on, found or torch.device("cpu"))
            counted_on, is_direct = counter.device, _is_plain(counter) and is_direct
        if is_direct:
            direct.append(place)
    where = found or device or torch.device("cpu")
    serving = backends.compiled_for(where)
    is_plain = len(direct) == len(used)
    if serving is cuda or not operation.wide:  # float64 is rare, and would make every kernel longer
        direct = [place for place in direct if getattr(lists[0][used[place]], "dtype", None) != DOUBLE]
    if serving is not None and ("cuda" if serving is cuda else "cpu") not in operation.coded:
        direct = [place for place in direct if not _is_coded(lists[:width], used[place])]
    served = set(direct) if serving is not None else set()
    by_reference = [(place, row) for place, row in enumerate(used) if place not in served]
    counts_here = counted_on is None or counted_on == where
    decided_here = serving is not cuda or bool(by_reference) or not counts_here
    is_coded = any(_is_coded(lists[:width], i) for i in used)
    served_by = (by_reference, serving, is_plain, is_coded)
    return Plan(operation, where, len(lists[0]), used, direct, *served_by, counts_here, decided_here)


class _Attributes:
    """What `_cpu.SeenLists` is, for torch without DLPack's exchange table: it compares attributes."""

    def __init__(self, lists: tuple[Entries, ...], deciding: int) -> None:
        self._deciding = deciding
        self._seen = self._read(lists)

    def _columns(self, lists: tuple[Entries, ...]) -> list[list[Any]]:
        kept = [all(tensor is not None for tensor in row) for row in zip(*lists[: self._deciding], strict=True)]
        return [[t for t, keep in zip(entries, kept, strict=True) if keep] for entries in lists]

    def _read(self, lists: tuple[Entries, ...]) -> Any:
        nones = [[tensor is None for tensor in entries] for entries in lists[: self._deciding]]
        read = [
            [(t.shape, t.stride(), t.dtype, t.device, type(t), t.is_neg()) for t in c] for c in self._columns(lists)
        ]
        return [any(row) for row in zip(*nones, strict=True)], read

    def match(self, lists: tuple[Entries, ...]) -> list[list[int]] | None:
        """The tensors' addresses, or None where something is not as it was."""
        if len({len(entries) for entries in lists}) > 1:
            return None
        columns = self._columns(lists)
        if any(not isinstance(t, Tensor) or t.layout != torch.strided for column in columns for t in column):
            return None
        return [[t.data_ptr() for t in column] for column in columns] if self._seen == self._read(lists) else None

    def again(self, tensors: Entries) -> bool:
        """Whether the one list that was given is as it was."""
        return self.match((tensors,)) is not None


def _seen(lists: tuple[Entries, ...], deciding: int) -> Any:
    return native.seen_lists(lists, deciding) or _Attributes(lists, deciding)


class Seen:
    """The dtypes, devices, shapes and strides of a list of tensors, to find out quickly that they are what they were.

    It holds no tensor; copies and pickles of it are empty and recognise nothing.

    Example:
        >>> x = torch.zeros(3)
        >>> Seen([x]).again([x]), Seen([x]).again([x.double()])
        (True, False)
    """

    __slots__ = ("again",)

    again: Callable[[Entries], bool]
    """Whether a list of tensors has the same dtypes, devices, shapes and strides. Does not sync."""

    def __init__(self, tensors: Entries | None = None) -> None:
        self.again = _nothing_seen if tensors is None else _seen((tensors,), 1).again

    def __reduce__(self) -> tuple[type[Seen], tuple[()]]:
        return (Seen, ())


def _nothing_seen(tensors: Entries) -> bool:
    return False


def call_for(
    operation: Operation, lists: tuple[Entries, ...], tables: PointerTables | None, device: torch.device | None
) -> Call:
    """Check the lists, or recognise them.

    Args:
        operation: what is to be done.
        lists: as many as the operation has.
        tables: the cache of the call site; None checks, and remembers nothing.
        device: as for :func:`check_lists`.

    Raises:
        TypeError, ValueError: as :func:`check_lists`; the cache is then empty.
    """
    if tables is None:
        lists = tuple(list(entries) for entries in lists)
        return Call(check_lists(operation, lists, device), lists, None, None)
    plan = tables.plan
    if plan is not None and plan.operation is operation:
        addresses = plan.seen.match(lists)
        if addresses is not None:
            return Call(plan, lists, addresses, tables)
    tables.forget()
    lists = tuple(list(entries) for entries in lists)
    plan = check_lists(operation, lists, device)
    tables.rebuilds += 1
    # Entries of odd layout are checked every time: their storage may be anything.
    if plan.rows and plan.is_plain:
        plan.seen = _seen(lists, len(operation.lists))
        tables.plan = plan
    return Call(plan, lists, None, tables)
