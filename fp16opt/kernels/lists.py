"""The checks of lists of tensors, before anything reads or writes their memory.

Reading dtype, shape and strides of a thousand tensors from Python takes longer than the arithmetic on them, so every
call site keeps a :class:`.calls.CallCache` of the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import backends, cuda
from .calls import Entries, Operation, Plan
from .pieces import WHOLE, Piece, check_count, check_piece
from .readings import has_memory

_CODES = (torch.int8, torch.uint8)


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
    if not has_memory(tensor):
        raise ValueError(f"{where} has {tensor.numel()} elements and no memory: clone() it, or set it to None.")


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
    if counter.dtype != torch.float32:
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


def _check_scales(
    operation: Operation, i: int, scales: object, numel: int, wanted: int, device: torch.device
) -> Tensor:
    where = f"{operation.name}: {operation.scales}[{i}]"
    _check_dense(where, scales)
    if not isinstance(scales, Tensor) or scales.numel() != wanted or not scales.is_contiguous():
        raise ValueError(
            f"{where} must be contiguous with {wanted} elements, one for every {operation.block} of the tensor's "
            f"{numel}."
        )
    if scales.dtype != torch.float32:
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
    return any(tensor is not None and tensor.dtype in _CODES for tensor in (entries[i] for entries in lists))


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


def check_lists(
    operation: Operation,
    lists: Sequence[Entries],
    device: torch.device | None,
    pieces: tuple[Piece, ...] | None = None,
) -> Plan:
    """Check every tensor and sort the positions by how they can be served.

    Args:
        operation: what is to be done with the lists.
        lists: as many as the operation has; behind the others come scales, and counters.
        device: what counts for lists without tensors; None for the CPU.
        pieces: by entry; None: all are whole.

    Returns:
        The plan, with nothing compiled yet.

    Raises:
        TypeError: a wrong type, layout or dtype, naming list and position.
        ValueError: a wrong length, device or shape, naming list and position.
    """
    width = len(operation.lists)
    used = _rows(operation, operation.names, lists)
    if pieces is not None:
        check_count(operation.name, pieces, len(lists[0]))
    direct: list[int] = []
    found: torch.device | None = None
    counted_on: torch.device | None = None
    for i in used:
        row = [entries[i] for entries in lists[:width]]
        tensors = [tensor for tensor in row if tensor is not None]
        if found is None and isinstance(row[0], Tensor):
            found = row[0].device
        _check_row(operation, i, tensors, found or torch.device("cpu"))
        is_direct = _is_direct(tensors)
        piece, numel = WHOLE if pieces is None else pieces[i], tensors[0].numel()
        check_piece(operation.name, i, piece, numel)
        if operation.scales:
            wanted = piece.block_count(numel)
            scales = _check_scales(operation, i, lists[width][i], numel, wanted, found or torch.device("cpu"))
            is_direct = _is_plain(scales) and is_direct
        if operation.counters:
            counter = _check_counter(operation, i, lists[-1][i], counted_on, found or torch.device("cpu"))
            counted_on, is_direct = counter.device, _is_plain(counter) and is_direct
        if is_direct:
            direct.append(i)
    where = found or device or torch.device("cpu")
    serving = backends.compiled_for(where)
    is_plain = len(direct) == len(used)
    if serving is cuda or not operation.wide:  # float64 is rare, and would make every kernel longer
        direct = [i for i in direct if getattr(lists[0][i], "dtype", None) != torch.float64]
    if serving is not None and ("cuda" if serving is cuda else "cpu") not in operation.coded:
        direct = [i for i in direct if not _is_coded(lists[:width], i)]
    served = set(direct) if serving is not None else set()
    by_reference = [i for i in used if i not in served]
    counts_here = counted_on is None or counted_on == where
    decided_here = serving is not cuda or bool(by_reference) or not counts_here
    is_coded = any(_is_coded(lists[:width], i) for i in used)
    served_by = (by_reference, serving, is_plain, is_coded)
    return Plan(
        operation.planned_as or operation,
        where,
        len(lists[0]),
        used,
        direct,
        *served_by,
        counts_here,
        decided_here,
        pieces,
    )
