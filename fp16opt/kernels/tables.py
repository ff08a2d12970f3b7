"""Lists of tensors, checked once and remembered.

Reading dtype, shape and strides of a thousand tensors from Python takes longer than the arithmetic on them, so every
call site keeps a :class:`PointerTables`. It holds the outcome of the last check and proves on each call that it still
applies: same places that are None, same dtype, device, shape and strides in every entry. Addresses are read afresh on
every call and never remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import native

Entries = Sequence["Tensor | None"]

HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_DTYPES = (HALF, BFLOAT)
"""The dtypes of parameters that get masters."""


class Operation(NamedTuple):
    """One multi-tensor operation as the guards see it."""

    name: str
    lists: tuple[str, ...]
    accepts: Callable[..., bool]
    wanted: str
    shape_of: int = 0  # the list whose shapes and strides the others must have


def _unscale_accepts(grad: torch.dtype, out: torch.dtype) -> bool:
    return (grad in (HALF, BFLOAT, SINGLE) and out == SINGLE) or (grad == DOUBLE and out == DOUBLE)


def _any_float(*dtypes: torch.dtype) -> bool:
    return all(dtype in (HALF, BFLOAT, SINGLE, DOUBLE) for dtype in dtypes)


def _up_to_single(*dtypes: torch.dtype) -> bool:
    return all(dtype in (HALF, BFLOAT, SINGLE) for dtype in dtypes)


def _cast_accepts(master: torch.dtype, param: torch.dtype) -> bool:
    return master == SINGLE and param in (HALF, BFLOAT)


def _sixteen_bits(dtype: torch.dtype) -> bool:
    return dtype in (HALF, BFLOAT)


UNSCALE = Operation(
    "multi_tensor_unscale",
    ("grads", "outs"),
    _unscale_accepts,
    "float16, bfloat16 or float32 into float32, or float64 into float64",
    1,
)
CHECK = Operation(
    "multi_tensor_check", ("grads", "grads"), lambda grad, _: grad in (HALF, BFLOAT, SINGLE), "float16 to float32"
)
L2NORM = Operation("multi_tensor_l2norm", ("tensors",), _any_float, "float16, bfloat16, float32 or float64")
SCALE = Operation("multi_tensor_scale", ("tensors",), _any_float, "float16, bfloat16, float32 or float64")
AXPBY = Operation("multi_tensor_axpby", ("xs", "ys", "outs"), _up_to_single, "float16, bfloat16 or float32 each", 2)
CAST = Operation(
    "multi_tensor_cast", ("masters", "params"), _cast_accepts, "float32 masters into float16 or bfloat16 params", 1
)
TAKE = Operation(
    "multi_tensor_take", ("masters", "params"), _cast_accepts, "float32 masters and float16 or bfloat16 params"
)
HASH = Operation("multi_tensor_hash", ("tensors",), _sixteen_bits, "float16 or bfloat16")


@dataclass
class Plan:
    """Lists that passed the checks.

    Attributes:
        device: where all tensors live; None for lists without any.
        count: n, the common length of the lists.
        rows: positions that are not None in any list.
        direct: places in ``rows`` whose memory may be walked linearly in all lists at once.
        indirect: places in ``rows`` that need the reference version.
        single: places in ``rows`` of tensors with one element.
        compiled: what a compiled backend made of ``direct``, or None.
    """

    operation: Operation
    device: torch.device | None
    count: int
    rows: list[int]
    direct: list[int]
    indirect: list[int]
    single: list[int]
    compiled: Any = field(default=None)


Columns = list[list[Tensor]]


def _columns(operation: Operation, lists: Sequence[Entries]) -> tuple[int, list[int] | None, Columns]:
    """Length of the lists, the positions in use (None: all of them), and the tensors at those positions."""
    count = len(lists[0])
    for name, entries in zip(operation.lists, lists, strict=True):
        if len(entries) != count:
            raise ValueError(
                f"{operation.name}: {name} has {len(entries)} entries, {operation.lists[0]} has {count}. "
                "Give lists of equal length, with None for what is to be skipped."
            )
    columns = [[t for t in entries if t is not None] for entries in lists]
    if all(len(column) == count for column in columns):
        return count, None, columns
    rows = [i for i, row in enumerate(zip(*lists, strict=True)) if all(t is not None for t in row)]
    return count, rows, [[t for i in rows if (t := entries[i]) is not None] for entries in lists]


def _check_row(operation: Operation, i: int, row: Sequence[Tensor], device: torch.device | None) -> None:
    """Raise unless the tensors at position ``i`` may be given to ``operation`` together."""
    model = row[operation.shape_of]
    for name, tensor in zip(operation.lists, row, strict=True):
        where = f"{operation.name}: {name}[{i}]"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where} must be a tensor or None, got {type(tensor).__name__}.")
        if tensor.layout != torch.strided:
            raise TypeError(f"{where} must be a dense tensor, got layout {tensor.layout}. Convert it with to_dense().")
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


def check_lists(operation: Operation, count: int, rows: list[int] | None, columns: Columns) -> Plan:
    """Check every tensor and sort the positions by how they can be served.

    Args:
        operation: what is to be done with the lists.
        count: their common length.
        rows: positions in use, or None for all.
        columns: for each list, the tensors at those positions.

    Returns:
        The plan, with nothing compiled yet.

    Raises:
        TypeError: a wrong type, layout or dtype, naming list and position.
        ValueError: a wrong device or shape, naming list and position.
    """
    used = list(range(count)) if rows is None else rows
    direct: list[int] = []
    indirect: list[int] = []
    device: torch.device | None = None
    for place, (i, row) in enumerate(zip(used, zip(*columns, strict=True), strict=True)):
        if device is None and isinstance(row[0], Tensor):
            device = row[0].device
        _check_row(operation, i, row, device)
        (direct if _is_direct(row) else indirect).append(place)
    single = [place for place, tensor in enumerate(columns[0]) if tensor.numel() == 1]
    return Plan(operation, device, count, used, direct, indirect, single)


class Call(NamedTuple):
    """Lists that passed the checks, ready for a backend.

    Attributes:
        plan: what the checks found.
        columns: for each list, its tensors at ``plan.rows``.
        addresses: for each list, the addresses that were read along with the checks; None where they were not.
        owner: the cache of the call site, if it has one.
    """

    plan: Plan
    columns: Columns
    addresses: list[Any] | None
    owner: PointerTables | None = None

    def for_reference(self, compiled: bool) -> Iterator[tuple[int, int]]:
        """(place, row) of the entries that the reference version must serve: all where nothing is compiled."""
        for place in self.plan.indirect if compiled else range(len(self.plan.rows)):
            yield place, self.plan.rows[place]


class _Attributes:
    """Proof that a list of tensors is as it was, by comparing attributes; for torch without DLPack's exchange table."""

    def __init__(self, column: list[Tensor]) -> None:
        self._seen = self._read(column)

    @staticmethod
    def _read(column: list[Tensor]) -> list[tuple[Any, ...]]:
        return [(t.shape, t.stride(), t.dtype, t.device, type(t), t.is_neg()) for t in column]

    def match(self, column: list[Tensor]) -> list[int] | None:
        """The tensors' addresses, or None where something is not as it was."""
        if any(not isinstance(t, Tensor) or t.layout != torch.strided for t in column):
            return None
        return [t.data_ptr() for t in column] if self._seen == self._read(column) else None


class Seen:
    """The dtypes, devices, shapes and strides of a list of tensors, to find out quickly that they are what they were.

    It holds no tensor; copies and pickles of it are empty and recognise nothing.

    Example:
        >>> x = torch.zeros(3)
        >>> Seen([x]).again([x]), Seen([x]).again([x.double()])
        (True, False)
    """

    __slots__ = ("_column",)

    def __init__(self, tensors: list[Tensor] | None = None) -> None:
        self._column = None if tensors is None else native.read_column(tensors) or _Attributes(tensors)

    def __reduce__(self) -> tuple[type[Seen], tuple[()]]:
        return (Seen, ())

    def again(self, tensors: list[Tensor]) -> bool:
        """Whether ``tensors`` have the same dtypes, devices, shapes and strides. Does not sync."""
        return self._column is not None and self._column.match(tensors) is not None


class PointerTables:
    """What one call site remembers between calls. Opaque: make one for each operation and list, and pass it along.

    It is a cache and nothing else: it holds no tensor, a call without it gives the same result, and copies and
    pickles of it are empty. It must outlive the CUDA graphs that its calls are captured into.

    Example:
        >>> import pickle
        >>> pickle.loads(pickle.dumps(PointerTables()))
        PointerTables(empty)
    """

    __slots__ = ("_plan", "_rows", "_seen", "captured", "rebuilds")

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._rows: list[int] | None = None
        self._seen: list[Any] = []
        self.captured: list[Any] = []  # tables that CUDA graphs read; memory that goes with this object
        self.rebuilds = 0

    def __reduce__(self) -> tuple[type[PointerTables], tuple[()]]:
        return (PointerTables, ())

    def __repr__(self) -> str:
        state = "empty" if self._plan is None else f"{self._plan.operation.name}, {self._plan.count} entries"
        return f"PointerTables({state})"

    def _match(self, operation: Operation, count: int, rows: list[int] | None, columns: Columns) -> list[Any] | None:
        """The addresses of all lists, or None where what is remembered does not apply."""
        plan = self._plan
        if plan is None or plan.operation is not operation or plan.count != count or self._rows != rows:
            return None
        addresses = []
        for seen, column in zip(self._seen, columns, strict=True):
            found = seen.match(column)
            if found is None:
                return None
            # DLPack does not report a lazy negation. Only where there is no second element can the real view of a
            # conjugated tensor that carries one have the strides of a dense tensor.
            if any(column[place].is_neg() for place in plan.single):
                return None
            addresses.append(found)
        return addresses

    def call(self, operation: Operation, lists: Sequence[Entries]) -> Call:
        """Check the lists, or recognise them.

        Args:
            operation: what is to be done.
            lists: as many lists as the operation has.

        Returns:
            The lists with a plan, remembered or new.

        Raises:
            TypeError, ValueError: as :func:`check_lists`; the table is then empty.
        """
        count, rows, columns = _columns(operation, lists)
        addresses = self._match(operation, count, rows, columns)
        if addresses is not None and self._plan is not None:
            return Call(self._plan, columns, addresses, self)
        self._plan = None
        plan = check_lists(operation, count, rows, columns)
        self._seen = [] if plan.indirect else [native.read_column(c) or _Attributes(c) for c in columns]
        if not plan.indirect:  # entries of odd layout are checked every time: their storage may be anything
            self._plan, self._rows = plan, rows
        self.rebuilds += 1
        return Call(plan, columns, None, self)


def call_for(operation: Operation, lists: Sequence[Entries], tables: PointerTables | None) -> Call:
    """:meth:`PointerTables.call` of ``tables``, or for this call alone where ``tables`` is None."""
    if tables is not None:
        return tables.call(operation, lists)
    count, rows, columns = _columns(operation, lists)
    return Call(check_lists(operation, count, rows, columns), columns, None)


@dataclass(eq=False)
class Watch:
    """n 16-bit tensors to be hashed in the pass that unscales n gradients, so that it costs no pass of its own.

    Attributes:
        params: n float16 or bfloat16 tensors, or None, one for each gradient of the call. Those whose gradient is None
            or has another size (a sparse one's values) are hashed too, on their own.
        hashes: int64, shape [n], on the device. Rows of params that are not None are overwritten, as by
            :func:`fp16opt.kernels.multi_tensor_hash`.
        samples: the same with ``sample=True``.
        tables: the cache of this list.

    Example:
        >>> Watch.allocate([None], "cpu").hashes
        tensor([0])
    """

    params: Entries
    hashes: Tensor
    samples: Tensor
    tables: PointerTables

    @classmethod
    def allocate(cls, params: Entries, device: torch.device | str) -> Watch:
        """All zeros, for ``params`` on ``device``. Does not sync."""
        hashes, samples = torch.zeros(2, len(params), dtype=torch.int64, device=device).unbind()
        return cls(params, hashes, samples, PointerTables())
