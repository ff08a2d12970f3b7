"""WeightDelta: what steps changed in a model's weights, to be applied elsewhere, saved, merged or gathered."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .delta_files import Contents, file_size, read, write
from .engine.diagnostics import describe
from .engine.dtensors import is_sharded, local
from .engine.modes.changes import TensorChange, change_of, digest_of, require_tensors, word_indices
from .engine.modes.regions import Region, region_of
from .kernels.digests import digest_at, words_each, words_of


class WeightDelta:
    """What changed in a model between two calls of ``take_delta``, by name in its ``state_dict``.

    It holds new values, where they go, and digests of all tensors before and after. All of it lies on the CPU.

    Args:
        sequence: Its number, from 1 on; of merged ones the last.
        since: The number of the delta before it; of merged ones before the first.
        changes: One for each tensor of the model, unchanged ones included.

    Attributes:
        sequence, since, changes: As given.

    Example:
        >>> import copy, fp16opt
        >>> model = torch.nn.Linear(2, 2, dtype=torch.float16)
        >>> sampler = copy.deepcopy(model)
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> opt = fp16opt.MixedPrecisionOptimizer(adamw, track_changes=True)
        >>> opt.backward(model(torch.ones(1, 2, dtype=torch.float16)).float().sum())
        >>> opt.step()
        >>> delta = opt.take_delta(model)
        >>> delta.apply_(sampler)
        >>> delta.sequence, delta.names(), torch.equal(model.weight, sampler.weight)
        (1, ['weight', 'bias'], True)
    """

    def __init__(self, sequence: int, since: int, changes: Iterable[TensorChange]) -> None:
        self.sequence = sequence
        self.since = since
        self.changes = list(changes)

    def __repr__(self) -> str:
        return f"WeightDelta(sequence={self.sequence}, num_changed={self.num_changed}, nbytes={self.nbytes})"

    # -- what it holds -----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The tensors that changed, by all their names, in the order of the model's ``state_dict``."""
        return [name for change in self.changes if change.values is not None for name in (change.name, *change.tied)]

    @property
    def num_changed(self) -> int:
        """How many elements it has values for: those that got other bits, and all of tensors that come whole.

        An element that a step changed and another changed back is among them.
        """
        return sum(change.num_changed for change in self.changes)

    @property
    def is_complete(self) -> bool:
        """Whether it has all parts of all tensors; else :meth:`gather` brings them together."""
        return all(change.region.is_whole for change in self.changes)

    # -- applying ----------------------------------------------------------------------------------------------------

    def apply_(self, model_or_state_dict: torch.nn.Module | Mapping[str, Any]) -> None:
        """Write the new values. The model then has the ``state_dict`` of the trained one, to the bit.

        Args:
            model_or_state_dict: On any device. Its tensors may be DTensors of any placement: call it on all their
                ranks.

        Raises:
            TypeError: It is neither, or holds something else than tensors.
            ValueError: Names, shapes or dtypes differ, a tensor is not what it was when the delta began, or what is
                written could not stay there: in copies that a module's ``state_dict`` gives, or where tensors share
                memory. Nothing is written then.
            RuntimeError: The delta is one rank's part.

        Syncs.
        """
        if not self.is_complete:
            raise RuntimeError("apply_: this delta is one rank's part. Call delta.gather() on all ranks first.")
        targets = self._targets(model_or_state_dict)
        agreed = _Agreement(target.tensor for target in targets)
        digests = [target.digest() for target in targets]
        now = agreed.sums(digests)
        then = agreed.sums([target.digest_after(found) for target, found in zip(targets, digests, strict=True)])
        for target, found, made in zip(targets, now, then, strict=True):
            change = target.change
            if change.before is not None and found != change.before:
                raise ValueError(
                    f"apply_: {target.name!r} is not what it was when delta {self.sequence} began. Apply deltas in "
                    f"order, from the model that was wrapped on: this one follows number {self.since}."
                )
            if made != change.after:
                raise ValueError(
                    f"apply_: {target.name!r} would not get the values of the trained model from delta "
                    f"{self.sequence}: it is damaged, or the tensor is another one. Send the model whole."
                )
        changed = [target for target, found, made in zip(targets, now, then, strict=True) if found != made]
        own = _own_memory(model_or_state_dict)
        for target in changed:
            target.require_writable(own)
        for target in changed:
            target.write()

    def _targets(self, model_or_state_dict: object) -> list[_Target]:
        """Every tensor once, with what it gets."""
        if isinstance(model_or_state_dict, torch.nn.Module):
            state: Mapping[str, Any] = model_or_state_dict.state_dict(keep_vars=True)
        elif isinstance(model_or_state_dict, Mapping):
            state = model_or_state_dict
        else:
            raise TypeError(f"apply_: expected a Module or a state_dict, got {type(model_or_state_dict).__name__}.")
        tensors = require_tensors(state)
        known = {name for change in self.changes for name in (change.name, *change.tied)}
        if more := [name for name in tensors if name not in known]:
            raise ValueError(
                f"apply_: the delta's model has no {describe(map(repr, more))}. Give a model of the same kind."
            )
        targets: list[_Target] = []
        at: dict[Any, _Target] = {}
        for change in self.changes:
            names = [name for name in (change.name, *change.tied) if name in tensors]
            if not names:
                raise ValueError(
                    f"apply_: the model has no {change.name!r}, which the delta has. Give a model of the same kind."
                )
            for name in names:
                target = _Target.of(name, tensors[name], change)
                first = at.setdefault(_memory(tensors[name]), target)
                if first.change.after != change.after:
                    raise ValueError(
                        f"apply_: {first.name!r} and {name!r} share memory, and their values differ in the delta. Give "
                        "each its own, as in the trained model."
                    )
                if first is target or first.change is not change:
                    targets.append(target)
        return targets

    # -- bringing together -------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, deltas: Sequence[WeightDelta]) -> WeightDelta:
        """One delta that does what several do one after the other.

        Args:
            deltas: Consecutive ones, the earliest first.

        Raises:
            ValueError: There are none, they don't follow one another, or they are of different models.
        """
        deltas = list(deltas)
        if not deltas:
            raise ValueError("merge: expected one delta or more, got none.")
        merged = deltas[0]
        for delta in deltas[1:]:
            merged = merged._followed_by(delta)
        return merged

    def _followed_by(self, later: WeightDelta) -> WeightDelta:
        if later.since != self.sequence:
            raise ValueError(
                f"merge: delta {later.sequence} follows number {later.since}, and came behind number {self.sequence}. "
                "Give consecutive ones, the earliest first."
            )
        mine = {change.name: change for change in self.changes}
        if list(mine) != [change.name for change in later.changes]:
            raise ValueError("merge: the deltas are of models with different tensors. Send the model whole.")
        return WeightDelta(later.sequence, self.since, [_merged(mine[change.name], change) for change in later.changes])

    def gather(self, process_group: Any = None, dst: int = 0) -> WeightDelta | None:
        """Bring the parts of all ranks to one. A collective: call it on all ranks of the group.

        Args:
            process_group: The ranks that share the model; None for all.
            dst: The rank, in the whole world, that gets them.

        Returns:
            The complete delta on ``dst``, None elsewhere. Where there is one process, the delta itself.

        Raises:
            ValueError: Ranks took different numbers of deltas, or parts are missing.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1:
            return self
        is_here = dist.get_rank() == dst
        count = dist.get_world_size(process_group)
        found: list[Any] | None = [None] * count if is_here else None
        dist.gather_object((self.sequence, self.since, self.changes), found, dst, process_group)
        if found is None:
            return None
        if any(numbers[:2] != (self.sequence, self.since) for numbers in found):
            raise ValueError(
                f"gather: ranks have deltas with the numbers {[numbers[0] for numbers in found]}. Take them at the "
                "same steps on all ranks."
            )
        mine = dist.get_rank(process_group)
        order = [mine, *(rank for rank in range(count) if rank != mine)]
        return WeightDelta(self.sequence, self.since, joined([found[rank][2] for rank in order]))

    # -- files -------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """What :meth:`save` writes, in bytes."""
        return file_size(self._contents)

    def save(self, path_or_file: str | os.PathLike[str] | BinaryIO) -> None:
        """Write it in the format of safetensors, with a checksum.

        Args:
            path_or_file: A path, or a binary file (``io.BytesIO``, a pipe) that is written from where it stands.
        """
        if hasattr(path_or_file, "write"):
            write(path_or_file, self._contents)
            return
        with open(path_or_file, "wb") as file:
            write(file, self._contents)

    @classmethod
    def load(cls, path_or_file: str | os.PathLike[str] | BinaryIO) -> WeightDelta:
        """Read what :meth:`save` wrote.

        Args:
            path_or_file: A path, or a binary file, which is read from where it stands to the end of the delta.

        Raises:
            ValueError: It is no delta, or damaged.
        """
        if hasattr(path_or_file, "read"):
            return cls(*read(path_or_file, "the file"))
        with open(path_or_file, "rb") as file:
            return cls(*read(file, str(path_or_file)))

    @property
    def _contents(self) -> Contents:
        return Contents(self.sequence, self.since, self.changes)


# -- merging and gathering ---------------------------------------------------------------------------------------------


def _merged(first: TensorChange, later: TensorChange) -> TensorChange:
    alike = first.dtype == later.dtype and first.region == later.region and first.tied == later.tied
    if not alike or (later.before is not None and later.before != first.after):
        raise ValueError(
            f"merge: {later.name!r} begins with other values than those that the delta before it left. Give deltas of "
            "one optimizer, in order."
        )
    digests = first.before, later.after
    names = later.name, later.tied
    if later.values is None or (first.values is not None and later.places is not None):
        if later.values is None or first.values is None:
            return later._replace(before=first.before, places=first.places, values=first.values)
        if first.places is None:
            values = first.values.clone()
            values[later.region.places(later.indices())] = later.values
            return change_of(*names, later.region, digests, None, values)
        indices = torch.cat([first.indices(), later.indices()])
        indices, order = torch.sort(indices, stable=True)
        last = torch.ones_like(indices, dtype=torch.bool)
        last[:-1] = indices[1:] != indices[:-1]
        values = torch.cat([first.values, later.values])[order][last]
        return change_of(*names, later.region, digests, indices[last], values)
    return later._replace(before=first.before)


def joined(parts: Sequence[Sequence[TensorChange]]) -> list[TensorChange]:
    """Whole tensors of the parts of all ranks. Of a part that several have, the first one's counts."""
    by_name: dict[str, dict[tuple[Any, Any], TensorChange]] = {}
    for part in parts:
        for change in part:
            by_name.setdefault(change.name, {}).setdefault((change.region.starts, change.region.sizes), change)
    return [_whole(list(found.values())) for found in by_name.values()]


def _whole(parts: list[TensorChange]) -> TensorChange:
    for part in parts:
        if part.region.is_whole:
            return part
    first = parts[0]
    shape = first.region.shape
    whole = Region(shape, (0,) * len(shape), shape)
    if sum(part.region.numel for part in parts) != whole.numel:
        raise ValueError(
            f"gather: the parts of {first.name!r} that ranks have are not all of it. Call it on all ranks that share "
            "the model, with their process_group."
        )
    before = None if any(part.before is None for part in parts) else _sum(part.before or 0 for part in parts)
    digests = before, _sum(part.after for part in parts)
    found = [part for part in parts if part.values is not None]
    if not found:
        return TensorChange(first.name, first.tied, first.dtype, whole, *digests, None, None)
    indices = torch.cat([part.indices() for part in found])
    indices, order = torch.sort(indices)
    values = torch.cat([part.values for part in found if part.values is not None])[order]
    return change_of(first.name, first.tied, whole, digests, indices, values)


def _sum(numbers: Iterable[int]) -> int:
    """Modulo 2^64, as int64 has it."""
    return (sum(numbers) + 2**63) % 2**64 - 2**63


# -- applying ----------------------------------------------------------------------------------------------------------


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors, or pieces, that are one in memory."""
    piece = local(tensor)
    return piece.data_ptr() or id(tensor), tuple(piece.shape), piece.stride()


def _own_memory(model_or_state_dict: object) -> set[int] | None:
    """Where parameters and buffers of a module lie; None of a ``state_dict``, whose tensors are written as they are."""
    if not isinstance(model_or_state_dict, torch.nn.Module):
        return None
    tensors = (*model_or_state_dict.parameters(), *model_or_state_dict.buffers())
    return {local(tensor).untyped_storage().data_ptr() for tensor in tensors}


class _Target(NamedTuple):
    """A tensor, and what it gets.

    Attributes:
        name: in the model that it belongs to.
        places: in the row-major order of this rank's piece; None for all of it.
        values: on its device; None for none.
    """

    name: str
    tensor: Tensor
    region: Region
    change: TensorChange
    places: Tensor | None
    values: Tensor | None

    @classmethod
    def of(cls, name: str, tensor: Tensor, change: TensorChange) -> _Target:
        """What this rank's piece of a tensor gets.

        Raises:
            ValueError: it has another shape or dtype, or its piece can't be placed.
        """
        if tuple(tensor.shape) != change.region.shape or tensor.dtype != change.dtype:
            have, want = (
                f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
                for dtype, shape in ((tensor.dtype, tensor.shape), (change.dtype, change.region.shape))
            )
            raise ValueError(f"apply_: {name!r} is {have}, the delta's is {want}. Give a model of the same kind.")
        region = region_of(tensor)
        if region is None:
            raise ValueError(
                f"apply_: which part of the whole the shards of {name!r} are can't be said. Use other placements."
            )
        if change.values is None:
            return cls(name, tensor, region, change, None, None)
        device, values = local(tensor).device, change.values
        if change.places is None and region.is_whole:
            return cls(name, tensor, region, change, None, values.to(device))
        if change.places is None:
            mine = region.indices(torch.arange(region.numel, dtype=torch.int64, device="cpu"))
            return cls(name, tensor, region, change, None, values[mine].to(device))
        places = region.places(change.indices())
        inside = places >= 0
        return cls(name, tensor, region, change, places[inside].to(device), values[inside].to(device))

    def digest(self) -> Tensor:
        """Of the piece as it is."""
        return digest_of(local(self.tensor.detach()), self.region)

    def digest_after(self, now: Tensor) -> Tensor:
        """Of the piece as it would be; ``now`` is that of the piece as it is."""
        if self.values is None:
            return now
        if self.places is None:
            return digest_of(self.values.view(self.region.sizes), self.region)
        each = words_each(self.tensor.dtype)
        index = word_indices(self.region.indices(self.places), each)
        old = local(self.tensor.detach()).contiguous().view(-1)[self.places]
        return now - digest_at(words_of(old), index) + digest_at(words_of(self.values), index)

    def require_writable(self, own: set[int] | None) -> None:
        """Raise ``ValueError`` where the model would not have what is written; ``own``: of :func:`_own_memory`."""
        piece = local(self.tensor)
        if not piece.numel():
            return
        if own is not None and piece.untyped_storage().data_ptr() not in own:
            raise ValueError(
                f"apply_: {self.name!r} of the module's state_dict is a copy, or extra state: what is written there "
                "would not reach the module. Apply the delta to its state_dict(), and load that."
            )
        if any(step == 0 and size > 1 for step, size in zip(piece.stride(), piece.shape, strict=True)):
            raise ValueError(
                f"apply_: elements of {self.name!r} share memory, as those of an expanded tensor do. Give each its own "
                "by .clone()."
            )

    def write(self) -> None:
        """Write what it gets."""
        if self.values is None:
            return
        piece = local(self.tensor.detach())
        with torch.inference_mode(piece.is_inference()), torch.no_grad():
            if self.places is None:
                piece.copy_(self.values.view(piece.shape))
            elif piece.is_contiguous():
                piece.view(-1)[self.places] = self.values
            else:
                made = piece.contiguous()
                made.view(-1)[self.places] = self.values
                piece.copy_(made)


class _Agreement:
    """Adds up digests of pieces over the ranks that have them; of plain tensors there is one piece."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)

    def sums(self, digests: Sequence[Tensor]) -> list[int]:
        """Of each tensor, over all its ranks. Syncs."""
        found = [0] * len(digests)
        together: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
        for place, tensor in enumerate(self._tensors):
            if not is_sharded(tensor):
                found[place] = int(digests[place])
                continue
            of: Any = tensor
            cut = tuple(dim for dim, placement in enumerate(of.placements) if hasattr(placement, "dim"))
            together.setdefault((of.device_mesh, cut), []).append(place)
        for (mesh, cut), places in together.items():
            total = torch.stack([digests[place] for place in places])
            for dim in cut:
                torch.distributed.all_reduce(total, group=mesh.get_group(dim))
            for place, number in zip(places, total.tolist(), strict=True):
                found[place] = number
        return found
