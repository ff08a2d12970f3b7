"""What steps changed in the model's weights: bits that passes mark, and what each tensor was when they were last taken.

Every pass that rounds masters into weights reads the old ones first, where bits are kept, and marks the elements that
get others. Other code may write weights too, and buffers, and parameters whose masters lie on their memory. That shows
in guards: what the elements that are not marked add to one is known. Where it is another by now, the tensor is given
whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.changed import ChangedBits, packed, unpacked
from ...kernels.changes import digest, guard, guard_and_digest, take
from ...kernels.digests import digest_at, words_each, words_of
from ..dtensors import local
from ..params import ParamPair, ParamTable, not_in_model
from .regions import Region, region_of


class TensorChange(NamedTuple):
    """One tensor of a model, or a rank's part of it, and what changed in it.

    Attributes:
        name: in the model's ``state_dict``.
        tied: other names of the same tensor.
        dtype: of the tensor.
        region: which part of the whole this is.
        before, after: digests of the part; ``before`` is None where it is not known.
        places: int32 or int64 indices in the whole, from the least on; or uint8, a bit for each element of the whole.
            None: all of the region.
        values: of the elements that changed, in that order. None: nothing changed.

    Places and values lie on the device that the tensor was on, or where they were moved.
    """

    name: str
    tied: tuple[str, ...]
    dtype: torch.dtype
    region: Region
    before: int | None
    after: int
    places: Tensor | None
    values: Tensor | None

    @property
    def num_changed(self) -> int:
        """How many elements have values here."""
        return 0 if self.values is None else self.values.numel()

    @property
    def taken(self) -> Tensor:
        """Values, also of a tensor that did not change: none of them."""
        return torch.zeros(0, dtype=self.dtype, device="cpu") if self.values is None else self.values

    def to(self, device: torch.device | str) -> TensorChange:
        """The same with places and values there."""
        places, values = (None if one is None else one.to(device) for one in (self.places, self.values))
        return self._replace(places=places, values=values)

    def indices(self) -> Tensor:
        """int64: where they lie in the whole, from the least on."""
        if self.values is None:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        if self.places is None:
            return self.region.indices(torch.arange(self.region.numel, dtype=torch.int64, device=self.values.device))
        if self.places.dtype != torch.uint8:
            return self.places.long()
        return torch.nonzero(unpacked(self.places, self.region.numel)).view(-1)


def change_of(
    name: str,
    tied: tuple[str, ...],
    region: Region,
    digests: tuple[int | None, int],
    indices: Tensor | None,
    values: Tensor,
) -> TensorChange:
    """A change with places in the form that takes least.

    Args:
        digests: before and after.
        indices: int32 or int64, in the whole, from the least on; None: all of the region.
        values: of these elements.
    """
    places, count = indices, values.numel()
    if indices is not None:
        width = torch.int32 if _numel(region.shape) <= 2**31 else torch.int64
        listed, bits = count * width.itemsize, -(-region.numel // 8)
        if count == region.numel:
            places = None
        elif region.is_whole and bits < listed:
            marks = torch.zeros(region.numel, dtype=torch.bool, device=indices.device)
            marks[indices.long()] = True
            places = packed(marks)
        else:
            places = indices.to(width)
    return TensorChange(name, tied, values.dtype, region, *digests, places, values)


def _numel(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


class _Known(NamedTuple):
    """A tensor as it was when changes were last taken.

    Attributes:
        strides: of the piece.
        guard: by places in memory; of one that isn't contiguous it says nothing.
        digest: by indices in the whole.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    guard: int
    digest: int


class _Seen(NamedTuple):
    """A tensor as it is now. Digests are on its device."""

    name: str
    tied: tuple[str, ...]
    tensor: Tensor
    region: Region
    guard: Tensor
    digest: Tensor
    key: ParamPair | str


class Changes:
    """Keeps the bits of all weights that have masters, and takes what changed.

    Args:
        params: who is trained; from here on passes mark what they change.

    Attributes:
        sequence: how many times changes were taken.
        source: a number of 48 bits that no other one has, by which deltas of one optimizer know each other.
    """

    def __init__(self, params: ParamTable) -> None:
        self.sequence = 0
        self.source = int.from_bytes(os.urandom(6), "little")
        self._params = params
        self._known: dict[ParamPair | str, _Known] = {}
        self._names: dict[ParamPair, str] = {}
        self._bits: dict[ParamPair, tuple[ChangedBits, int]] = {}
        self._lost = False
        self.follow_params()
        pairs = list(params.all)
        regions = [_region("a parameter", pair.name, pair.model) for pair in pairs]
        seen = [_seen(pair.name, (), pair.model, region, pair) for pair, region in zip(pairs, regions, strict=True)]
        self._remember(seen)

    def follow_params(self) -> None:
        """Parameters or masters came or went: bits for all that have masters. Those that were marked stay so."""
        for gone in self._bits.keys() - set(self._params.all):
            del self._bits[gone]
        for gone in {pair for pair in self._known if isinstance(pair, ParamPair)} - set(self._params.all):
            del self._known[gone]
            self._names.pop(gone, None)
            self._lost = True
        before = self._bits
        self._bits = {}
        for device in self._params.devices:
            changed = ChangedBits.allocate(device.apart_models, device.device)
            for row in device.apart:
                pair = device.pairs[row]
                self._bits[pair] = changed, row
                if pair in before:
                    old, there = before[pair]
                    changed.of(row).copy_(old.of(there))
            device.cast.changed = changed

    # -- taking ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What an exception within cuts is not taken: weights whose marks are gone by then come whole the next time."""
        before = self.sequence, dict(self._known)
        try:
            yield
        except BaseException:
            self.sequence, self._known = before
            raise

    def take(self, tensors: Mapping[str, Tensor]) -> list[TensorChange]:
        """What changed since the last call; from here on nothing is marked.

        Args:
            tensors: the model's ``state_dict``, of the very tensors that are trained.

        Raises:
            ValueError: a parameter of the optimizer is not among them, or a shard can't be placed; nothing is taken.

        Syncs.
        """
        self._params.find_pieces()
        found: dict[str, TensorChange] = {}
        seen = self._look(tensors, found)
        digests = read_numbers([one for each in seen for one in (each.guard, each.digest)])
        for each, mine, now in zip(seen, digests[::2], digests[1::2], strict=True):
            found[each.name] = self._compare(each, mine, now)
        self._remember(seen, digests)
        for device in self._params.devices:
            if device.cast.changed is not None:
                device.cast.changed.clear()
        self.sequence += 1
        return [found[name] for name in tensors if name in found]

    def _look(self, tensors: Mapping[str, Tensor], found: dict[str, TensorChange]) -> list[_Seen]:
        """Every tensor once; of those that other ranks train, empty parts go into ``found``."""
        pairs = {id(pair.model): pair for pair in self._params.all}
        elsewhere = {id(param) for param in self._params.elsewhere}
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        for number, mine in pairs.items():
            if number not in names:
                known = self._names.get(mine, mine.name)
                raise not_in_model("model", known, mine.model, tensors.get(known))
        seen = []
        for number, (name, *tied) in names.items():
            tensor, pair = tensors[name], pairs.get(number)
            if number in elsewhere:
                shape = tuple(tensor.shape)
                nothing = Region(shape, (0,) * len(shape), (0,) * max(1, len(shape)))
                found[name] = TensorChange(name, tuple(tied), tensor.dtype, nothing, 0, 0, None, None)
                continue
            region = _region("tensor", name, tensor)
            if pair is not None:
                self._names[pair] = name
            seen.append(_seen(name, tuple(tied), tensor, region, name if pair is None else pair))
        return seen

    def _compare(self, seen: _Seen, mine: int, now: int) -> TensorChange:
        known = self._known.get(seen.key)
        piece = local(seen.tensor.detach())
        as_before = known is not None and (known.dtype, known.shape) == (piece.dtype, tuple(piece.shape))
        before = known.digest if known is not None and as_before else None
        alike = seen.name, seen.tied, piece.dtype, seen.region
        if known is None and self._is_frozen(seen):
            return TensorChange(*alike, now, now, None, None)
        if known is not None and as_before and known.strides == piece.stride() and piece.is_contiguous():
            marked = self._marked(seen.key, piece)
            if marked is None or not marked[0].numel():
                if now == before:
                    return TensorChange(*alike, now, now, None, None)
            elif (mine - marked[2]) % 2**32 == known.guard and not _has_nan(marked[1].view(piece.dtype)):
                return self._sparse(seen, piece, *marked[:2], (before, now))
        elif before == now:
            return TensorChange(*alike, now, now, None, None)
        values = piece.clone(memory_format=torch.contiguous_format).view(-1)
        return change_of(seen.name, seen.tied, seen.region, (before, now), None, values)

    def _is_frozen(self, seen: _Seen) -> bool:
        """Whether a tensor that was not seen before is taken as unchanged: a parameter that nothing trains."""
        is_param = isinstance(seen.tensor, torch.nn.Parameter) and not seen.tensor.requires_grad
        return is_param and self.sequence == 0 and not self._lost

    def _marked(self, key: ParamPair | str, piece: Tensor) -> tuple[Tensor, Tensor, int] | None:
        """:func:`.kernels.changes.take` of a weight; None of a tensor without bits."""
        if isinstance(key, str) or key not in self._bits:
            return None
        return take(*self._bits[key], words_of(piece))

    def _sparse(
        self, seen: _Seen, piece: Tensor, places: Tensor, words: Tensor, digests: tuple[int | None, int]
    ) -> TensorChange:
        values = words.view(piece.dtype)
        indices = places if seen.region.is_whole else seen.region.indices(places.long())
        return change_of(seen.name, seen.tied, seen.region, digests, indices, values)

    def _remember(self, seen: Sequence[_Seen], digests: Sequence[int] | None = None) -> None:
        if digests is None:
            digests = read_numbers([one for each in seen for one in (each.guard, each.digest)])
        for each, mine, now in zip(seen, digests[::2], digests[1::2], strict=True):
            piece = local(each.tensor)
            self._known[each.key] = _Known(piece.dtype, tuple(piece.shape), piece.stride(), mine, now)


def _has_nan(values: Tensor) -> bool:
    """Whether a tensor comes whole for that: loaders of samplers mark what did not change by NaN. Syncs."""
    return bool(values.isnan().any())


def _seen(name: str, tied: tuple[str, ...], tensor: Tensor, region: Region, key: ParamPair | str) -> _Seen:
    piece = local(tensor.detach())
    if piece.is_contiguous() and region.first is not None:
        sums = guard_and_digest(words_of(piece), region.first * words_each(piece.dtype))
    else:
        found = digest_of(piece, region)
        sums = guard(words_of(piece)) if piece.is_contiguous() else found, found
    return _Seen(name, tied, tensor, region, *sums, key)


def digest_of(piece: Tensor, region: Region) -> Tensor:
    """The digest of a piece by indices in the whole: int64, shape []. No sync."""
    words, each = words_of(piece), words_each(piece.dtype)
    if region.first is not None:
        return digest(words, region.first * each)
    index = region.indices(torch.arange(piece.numel(), dtype=torch.int64, device=piece.device))
    return digest_at(words, word_indices(index, each))


def word_indices(indices: Tensor, each: int) -> Tensor:
    """The indices of words of elements that have ``each`` words."""
    if each == 1:
        return indices
    return (indices.view(-1, 1) * each + torch.arange(each, dtype=torch.int64, device=indices.device)).view(-1)


def _region(what: str, name: str, tensor: Tensor) -> Region:
    region = region_of(tensor)
    if region is None:
        raise ValueError(
            f"track_changes: which part of the whole the shards of {what} {name!r} are can't be said. Use "
            "track_changes=False, or other placements."
        )
    return region


def read_numbers(numbers: Sequence[Tensor]) -> list[int]:
    """Of int64 tensors of shape [] on any devices. Syncs once a device."""
    found = [0] * len(numbers)
    by_device: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        by_device.setdefault(number.device, []).append(place)
    for places in by_device.values():
        for place, value in zip(places, torch.stack([numbers[place] for place in places]).tolist(), strict=True):
            found[place] = value
    return found


def require_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A ``state_dict`` of plain dense tensors, each with bits of its own.

    Raises:
        TypeError: one is something else.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"model: expected a state_dict of tensors, got {type(value).__name__} for {name!r}. A WeightDelta has "
                "no place for extra state: send that apart."
            )
        if kind := _kind(local(value)):
            raise TypeError(
                f"model: expected a state_dict of plain dense tensors, got {kind} one for {name!r}. Materialize it, or "
                "keep it out of the state_dict."
            )
    return dict(state)


def _kind(piece: Tensor) -> str:
    """What keeps a tensor from having plain bits in memory; empty for one that has them."""
    if piece.layout is not torch.strided:
        return f"a {str(piece.layout).removeprefix('torch.')}"
    kinds = {"a meta": piece.is_meta, "a conjugated": piece.is_conj(), "a negated": piece.is_neg()}
    return next((kind for kind, holds in kinds.items() if holds), "")
