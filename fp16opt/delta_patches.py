"""WeightPatch: what changed in one tensor, by the name and in the shape that another program has for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .engine.modes.changes import TensorChange
from .kernels.changed import unpacked

Names = Callable[[str, tuple[int, ...]], str | Iterable[tuple[str, int, tuple[int, ...]]] | None]
"""What a user's ``names`` is: see :meth:`.WeightDelta.patches`."""
CHUNK_BYTES = 512 << 20
"""As vLLM's loader of patches has it."""


class WeightPatch(NamedTuple):
    """New values of one tensor of a checkpoint, and where they go.

    The fields are those of vLLM's ``CheckpointWeightPatch``, in its order: ``CheckpointWeightPatch(*patch)``.

    Attributes:
        name: In the checkpoint.
        shape: Of the whole tensor there.
        dtype: Of the tensor.
        values: Shape [n], in ``dtype``.
        indices: Shape [n], ascending: where they go in the flattened whole tensor. int32, or int64 of tensors of more
            than 2^31 elements. None: ``values`` are all of it.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> patch = WeightPatch("weight", (2, 3), torch.float32, torch.ones(2), torch.tensor([1, 5], dtype=torch.int32))
        >>> weight.view(-1)[patch.indices] = patch.values
        >>> weight
        tensor([[0., 1., 0.],
                [0., 0., 1.]])
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None = None


class _Block(NamedTuple):
    """What one tensor and one name of the other side have in common, in elements.

    Attributes:
        first, numel: which elements of the tensor, in row-major order.
        into: where the first of them goes in the other one.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    numel: int
    into: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all that has its name."""
        return self.numel == math.prod(self.shape)


def patches_of(
    changes: Iterable[TensorChange], device: torch.device | str | None, chunk_bytes: int, names: Names | None
) -> Iterator[WeightPatch]:
    """The patches of tensors, or of a rank's parts of them: see :meth:`.WeightDelta.patches`.

    Raises:
        ValueError, TypeError: ``names`` gives what can't be; before there is a patch.
    """
    dense: list[tuple[TensorChange, _Block]] = []
    sparse: list[tuple[TensorChange, list[_Block]]] = []
    for change in changes:
        if not change.num_changed:
            continue
        blocks = _blocks(change.name, change.region.shape, names)
        if change.places is None and change.region.is_whole:
            dense += [(change, block) for block in blocks if block.is_whole]
            blocks = [block for block in blocks if not block.is_whole]
        sparse.append((change, blocks))
    patches = itertools.chain(
        (_dense(change, block) for change, block in dense),
        (patch for change, blocks in sparse if blocks for patch in _sparse(change, blocks, chunk_bytes)),
    )
    return patches if device is None else (_moved(patch, device) for patch in patches)


def _moved(patch: WeightPatch, device: torch.device | str) -> WeightPatch:
    indices = None if patch.indices is None else patch.indices.to(device)
    return patch._replace(values=patch.values.to(device), indices=indices)


def _dense(change: TensorChange, block: _Block) -> WeightPatch:
    values = change.taken[block.first : block.first + block.numel]
    return WeightPatch(block.name, block.shape, change.dtype, values)


def _sparse(change: TensorChange, blocks: list[_Block], chunk_bytes: int) -> Iterator[WeightPatch]:
    for indices, values in _listed(change, chunk_bytes):
        for block, begin, end in _divided(indices, blocks, math.prod(change.region.shape)):
            if begin < end:
                there = indices[begin:end]
                if block.into != block.first:
                    there = there.long() + (block.into - block.first)
                yield WeightPatch(
                    block.name, block.shape, change.dtype, values[begin:end], there.to(_width(block.shape))
                )


def _width(shape: tuple[int, ...]) -> torch.dtype:
    """What holds all indices."""
    return torch.int32 if math.prod(shape) <= 2**31 else torch.int64


def _blocks(name: str, shape: tuple[int, ...], names: Names | None) -> list[_Block]:
    """Where a tensor goes.

    Raises:
        TypeError: ``names`` gives no names.
        ValueError: a block is outside.
    """
    given = name if names is None else names(name, shape)
    if given is None:
        return []
    if isinstance(given, str):
        return [_Block(given, shape, 0, math.prod(shape), 0)]
    try:
        listed = [(to, start, tuple(size)) for to, start, size in given]
        fits = all(isinstance(to, str) and isinstance(start, int) for to, start, _ in listed)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise TypeError(
            f"patches: names({name!r}, {shape}) returned {given!r}. Expected a name, None, or a list of (name, start, "
            "shape)."
        )
    return [_block(name, shape, *each) for each in listed]


def _block(name: str, shape: tuple[int, ...], to: str, start: int, size: tuple[int, ...]) -> _Block:
    mine, theirs = math.prod(shape), math.prod(size)
    larger, outer = (shape, mine) if theirs <= mine else (size, theirs)
    at = start * math.prod(larger[1:])
    if start < 0 or at + min(mine, theirs) > outer:
        raise ValueError(
            f"patches: names puts {to!r} of shape {size} and {name!r} of shape {shape} together from row {start} on. "
            f"{min(mine, theirs):,} elements from there are not in the {outer:,} of the larger one."
        )
    return _Block(to, size, at, theirs, 0) if theirs <= mine else _Block(to, size, 0, mine, at)


def _listed(change: TensorChange, chunk_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices in the whole, int32 or int64, and values: so many at a time, and at least eight."""
    places, values = change.places, change.taken
    limit = chunk_bytes // (change.dtype.itemsize + _width(change.region.shape).itemsize)
    limit = max(8, limit // 8 * 8)  # whole bytes of bits
    has_bits = places is not None and places.dtype == torch.uint8
    count, taken = change.region.numel if has_bits else values.numel(), 0
    for start in range(0, count, limit):
        stop = min(start + limit, count)
        if places is None:
            found = change.region.indices(torch.arange(start, stop, dtype=torch.int64, device=values.device))
        elif places.dtype == torch.uint8:
            bits = unpacked(places[start // 8 : -(-stop // 8)], stop - start)
            found = torch.nonzero(bits).view(-1) + start
        else:
            found = places[start:stop]
        yield found, values[taken : taken + found.numel()]
        taken += found.numel()


def _divided(indices: Tensor, blocks: list[_Block], numel: int) -> Iterator[tuple[_Block, int, int]]:
    """Which of the ascending indices of a tensor lie in each block. Syncs where a block is not all of it."""
    if all(block.numel == numel for block in blocks):
        ends = [(0, indices.numel())] * len(blocks)
    else:
        if numel >= 2**31:
            indices = indices.long()  # the last edge, too
        edges = [(block.first, block.first + block.numel) for block in blocks]
        ends = torch.searchsorted(indices, torch.tensor(edges, dtype=indices.dtype, device=indices.device)).tolist()
    for block, (begin, end) in zip(blocks, ends, strict=True):
        yield block, begin, end
