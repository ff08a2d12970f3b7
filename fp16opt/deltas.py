"""WeightDelta: what steps changed in a model's weights, to be applied elsewhere, saved, merged or gathered."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .delta_files import Contents, file_size, read, write
from .delta_patches import CHUNK_BYTES, Names, WeightPatch, patches_of
from .engine.diagnostics import describe
from .engine.dtensors import is_sharded, local
from .engine.modes.changes import TensorChange, change_of, digest_of, read_numbers, require_tensors, word_indices
from .engine.modes.regions import Region, region_of
from .kernels.digests import digest_at, words_each, words_of


class WeightDelta:
    """What changed in a model between two calls of ``take_delta``, by name in its ``state_dict``.

    It holds new values, where they go, and digests of all tensors before and after. Values lie on the device of the
    trained parameters; :meth:`to` moves them, and :meth:`save`, :meth:`gather` and ``pickle`` copy them to the CPU.

    Args:
        sequence: Its number, from 1 on; of merged ones the last.
        since: The number of the delta before it; of merged ones before the first.
        changes: One for each tensor of the model, unchanged ones included.
        source: A number that all deltas of one optimizer have, and no other one's; None where it is not known.

    Attributes:
        sequence, since, changes, source: As given.

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

    def __init__(self, sequence: int, since: int, changes: Iterable[TensorChange], source: int | None = None) -> None:
        self.sequence = sequence
        self.since = since
        self.changes = list(changes)
        self.source = source

    def __getstate__(self) -> dict[str, Any]:
        return vars(self.to("cpu"))

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

    def to(self, device: torch.device | str) -> WeightDelta:
        """The same delta with its values on ``device``: what stays where it is shares memory with this one."""
        return self._with(change.to(device) for change in self.changes)

    def _with(self, changes: Iterable[TensorChange]) -> WeightDelta:
        return WeightDelta(self.sequence, self.since, changes, self.source)

    # -- for other loaders -------------------------------------------------------------------------------------------

    def patches(
        self, device: torch.device | str | None = None, chunk_bytes: int = CHUNK_BYTES, names: Names | None = None
    ) -> Iterator[WeightPatch]:
        """What changed, for a loader of your own or a sampler's, one tensor after the other.

        Dense patches, ``indices`` None, come first: tensors of which the delta has all values. Sparse ones follow, with
        ascending indices in the whole tensor. Tied weights come once, by their first name. On several ranks each has
        its own pieces' patches, with indices in the whole: :meth:`distinct` leaves what several ranks have to one.

        Args:
            device: Where values and indices are to lie; None for where they are, which is the device of the trained
                parameters unless the delta was loaded or moved.
            chunk_bytes: What values and indices of one sparse patch may take: where a tensor has more, several patches
                have its name, with other indices each. Dense ones are not divided.
            names: Called with the name and shape of each tensor that changed. It returns the name that the other side
                has for it; or None to leave it out; or a list of ``(name, start, shape)`` where it is several tensors
                there, or a part of one. Then the smaller of the two, by elements, is the rows of the larger one from
                row ``start`` on, rows being those of the first dimension: ``[("q", 0, (8, 4)), ("k", 8, (2, 4))]`` for
                one of 10 rows, ``[("experts", 3, (64, 8, 4))]`` for the fourth expert of 64.

        Returns:
            An iterator. It makes a patch when it is asked for it. A patch may share memory with the delta: don't write
            it.

        Raises:
            ValueError: ``chunk_bytes`` is not positive, or a block of ``names`` is outside.
            TypeError: ``names`` returns something else.

        On a GPU it waits for the device where indices are kept as bits (more than one element in 32 changed) or
        ``names`` divides a tensor; it copies no value and no index to the host.

        Example:
            >>> import fp16opt
            >>> model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
            >>> opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), track_changes=True)
            >>> opt.backward(model(torch.tensor([[0, 1.0, 0]], dtype=torch.bfloat16)).float().sum())
            >>> opt.step()
            >>> for patch in opt.take_delta(model).patches(names=lambda name, shape: f"model.{name}"):
            ...     print(patch.name, patch.shape, patch.values.numel(), patch.indices)
            model.bias (2,) 2 None
            model.weight (2, 3) 2 tensor([1, 4], dtype=torch.int32)
        """
        if chunk_bytes <= 0:
            raise ValueError(f"patches: chunk_bytes must be positive, got {chunk_bytes}.")
        return patches_of(self.changes, device, chunk_bytes, names)

    def distinct(self, process_group: Any = None) -> WeightDelta:
        """This rank's part for :meth:`patches`: a piece that several ranks have stays with the lowest of them.

        A collective: call it on all ranks of the group. Names and places of pieces are exchanged, no values.

        Args:
            process_group: The ranks that share the model; None for all.

        Returns:
            A delta without the values of pieces that a lower rank has. It can't be applied. Where there is one process,
            the delta itself.

        Raises:
            ValueError: Ranks took different numbers of deltas.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1:
            return self
        found: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(
            found, (self.sequence, self.since, [_piece(change) for change in self.changes]), process_group
        )
        self._require_numbers("distinct", found)
        lower = {piece for *_, pieces in found[: dist.get_rank(process_group)] for piece in pieces}
        return self._with(
            change._replace(places=None, values=None) if _piece(change) in lower else change for change in self.changes
        )

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
        compared = self._compared("apply_", model_or_state_dict)
        for target, found, made in compared:
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
        changed = [target for target, found, made in compared if found != made]
        own = _own_memory(model_or_state_dict)
        for target in changed:
            target.require_writable(own)
        for target in changed:
            target.write()

    def verify(
        self, model_or_state_dict: torch.nn.Module | Mapping[str, Any], previous: WeightDelta | None = None
    ) -> None:
        """Raise unless a model has the weights that the trained one had when this delta was taken, to the bit.

        For loaders that don't check: call it after a delta's patches were loaded. It reads all tensors once.

        Args:
            model_or_state_dict: With the names of the trained model, as in :meth:`apply_`.
            previous: The delta that was verified here before: a model that has gone back behind it is wrong. With it
                the error can tell a delta that was lost, or is of another optimizer, from weights that were other ones.

        Raises:
            ValueError: A tensor differs. The error names it, and what happened: a delta was lost, one was applied
                twice, or to other weights than those it began with. Or names, shapes or dtypes differ.
            TypeError: As in :meth:`apply_`.
            RuntimeError: The delta is one rank's part.

        Syncs, once a device.
        """
        compared = self._compared("verify", model_or_state_dict)
        goal = previous if previous is not None and self.sequence < previous.sequence else self
        after = {change.name: change.after for change in goal.changes}
        wrong = [each for each in compared if each.now != after.get(each.target.change.name)]
        if wrong:
            name, cause = self._cause(wrong, previous)
            raise ValueError(
                f"verify: {name!r} is not what it was in the trained model at delta {goal.sequence}: {cause}. Send the "
                "model whole."
            )

    def _cause(self, wrong: Sequence[_Compared], previous: WeightDelta | None) -> tuple[str, str]:
        """The name of a tensor that is wrong, and why it is."""
        first = wrong[0].target.name
        if previous is not None:
            if None not in (self.source, previous.source) and self.source != previous.source:
                return first, (
                    f"the delta was applied to other weights than its own. It is of another optimizer than delta "
                    f"{previous.sequence}, which was verified here before"
                )
            if previous.sequence < self.since:
                return first, f"what is between delta {previous.sequence} and delta {self.sequence} was lost"
            if self.sequence < previous.sequence:
                return first, f"delta {self.sequence} was applied twice: delta {previous.sequence} was here before"
        kinds = {each.kind: each.target.name for each in reversed(wrong)}
        if "other" in kinds:
            return kinds["other"], (
                f"the delta was applied to other weights than those it began with, or delta {self.since} was lost"
                if previous is None
                else "the delta was applied to other weights than those it began with"
            )
        if "twice" in kinds:
            return kinds["twice"], f"an earlier delta was applied twice, again after delta {self.sequence}"
        return kinds["lost"], f"delta {self.sequence} was lost. It is as it was when that delta began"

    def _compared(self, caller: str, model_or_state_dict: object) -> list[_Compared]:
        """Every tensor once, with what it is and would be. Syncs."""
        if not self.is_complete:
            raise RuntimeError(f"{caller}: this delta is one rank's part. Call delta.gather() on all ranks first.")
        targets = self._targets(caller, model_or_state_dict)
        agreed = _Agreement(target.tensor for target in targets)
        digests = [target.digest() for target in targets]
        now = agreed.sums(digests)
        then = agreed.sums([target.digest_after(found) for target, found in zip(targets, digests, strict=True)])
        return [_Compared(*each) for each in zip(targets, now, then, strict=True)]

    def _targets(self, caller: str, model_or_state_dict: object) -> list[_Target]:
        """Every tensor once, with what it gets."""
        tensors = _tensors(caller, model_or_state_dict)
        known = {name for change in self.changes for name in (change.name, *change.tied)}
        if more := [name for name in tensors if name not in known]:
            raise ValueError(
                f"{caller}: the delta's model has no {describe(map(repr, more))}. Give a model of the same kind."
            )
        targets: list[_Target] = []
        at: dict[Any, _Target] = {}
        for change in self.changes:
            names = [name for name in (change.name, *change.tied) if name in tensors]
            if not names:
                raise ValueError(
                    f"{caller}: the model has no {change.name!r}, which the delta has. Give a model of the same kind."
                )
            for name in names:
                target = _Target.of(caller, name, tensors[name], change)
                first = at.setdefault(_memory(tensors[name]), target)
                if first.change.after != change.after:
                    raise ValueError(
                        f"{caller}: {first.name!r} and {name!r} share memory, and their values differ in the delta. "
                        "Give each its own, as in the trained model."
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
        merged = [_merged(mine[change.name], change) for change in later.changes]
        return WeightDelta(later.sequence, self.since, merged, later.source)

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
        dist.gather_object((self.sequence, self.since, self.to("cpu").changes), found, dst, process_group)
        if found is None:
            return None
        self._require_numbers("gather", found)
        mine = dist.get_rank(process_group)
        order = [mine, *(rank for rank in range(count) if rank != mine)]
        return self._with(joined([found[rank][2] for rank in order]))

    def _require_numbers(self, caller: str, found: Sequence[tuple[int, int, Any]]) -> None:
        """All ranks have the same delta."""
        if any(numbers[:2] != (self.sequence, self.since) for numbers in found):
            raise ValueError(
                f"{caller}: ranks have deltas with the numbers {[numbers[0] for numbers in found]}. Take them at the "
                "same steps on all ranks."
            )

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
        return Contents(self.sequence, self.since, self.changes, self.source)


def digests(model_or_state_dict: torch.nn.Module | Mapping[str, Any]) -> dict[str, int]:
    """A number of 64 bits for each tensor of a model, by all its names: another bit in the tensor, another number.

    Equal for equal tensors on any device and, of DTensors, on any number of ranks with any placements. So two processes
    compare their models by what fits in one message. A change by chance is missed once in 2^64; it is no protection
    against people.

    Args:
        model_or_state_dict: A Module, or a ``state_dict`` of dense tensors. Of DTensors it is a collective: call it on
            all their ranks.

    Raises:
        TypeError: It is neither, or holds something else than tensors.
        ValueError: Which part of the whole a shard is can't be said.

    Reads every tensor once, by the compiled kernel on the CPU. Syncs, once a device.

    Example:
        >>> import copy, fp16opt
        >>> model = torch.nn.Linear(2, 2, dtype=torch.float16)
        >>> other = copy.deepcopy(model)
        >>> fp16opt.digests(model) == fp16opt.digests(other.state_dict())
        True
        >>> with torch.no_grad():
        ...     other.bias[1] += 1
        >>> ours, theirs = fp16opt.digests(model), fp16opt.digests(other)
        >>> [name for name in ours if ours[name] != theirs[name]]
        ['bias']
    """
    tensors = _tensors("digests", model_or_state_dict)
    once = {id(tensor): (name, tensor) for name, tensor in tensors.items()}
    pieces = [digest_of(local(tensor.detach()), _region("digests", name, tensor)) for name, tensor in once.values()]
    numbers = dict(zip(once, _Agreement(tensor for _, tensor in once.values()).sums(pieces), strict=True))
    return {name: numbers[id(tensor)] for name, tensor in tensors.items()}


# -- merging and gathering ---------------------------------------------------------------------------------------------


def _merged(first: TensorChange, later: TensorChange) -> TensorChange:
    alike = first.dtype == later.dtype and first.region == later.region and first.tied == later.tied
    if not alike or (later.before is not None and later.before != first.after):
        raise ValueError(
            f"merge: {later.name!r} begins with other values than those that the delta before it left. Give deltas of "
            "one optimizer, in order."
        )
    if later.values is not None:
        first = first.to(later.values.device)
    before_after = first.before, later.after
    names = later.name, later.tied
    if later.values is None or (first.values is not None and later.places is not None):
        if later.values is None or first.values is None:
            return later._replace(before=first.before, places=first.places, values=first.values)
        if first.places is None:
            values = first.values.clone()
            values[later.region.places(later.indices())] = later.values
            return change_of(*names, later.region, before_after, None, values)
        indices = torch.cat([first.indices(), later.indices()])
        indices, order = torch.sort(indices, stable=True)
        last = torch.ones_like(indices, dtype=torch.bool)
        last[:-1] = indices[1:] != indices[:-1]
        values = torch.cat([first.values, later.values])[order][last]
        return change_of(*names, later.region, before_after, indices[last], values)
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
    before_after = before, _sum(part.after for part in parts)
    found = [part for part in parts if part.values is not None]
    if not found:
        return TensorChange(first.name, first.tied, first.dtype, whole, *before_after, None, None)
    indices = torch.cat([part.indices() for part in found])
    indices, order = torch.sort(indices)
    values = torch.cat([part.values for part in found if part.values is not None])[order]
    return change_of(first.name, first.tied, whole, before_after, indices, values)


def _sum(numbers: Iterable[int]) -> int:
    """Modulo 2^64, as int64 has it."""
    return (sum(numbers) + 2**63) % 2**64 - 2**63


# -- comparing and applying --------------------------------------------------------------------------------------------


def _tensors(caller: str, model_or_state_dict: object) -> dict[str, Tensor]:
    """All tensors of a model, by all their names.

    Raises:
        TypeError: it is none, or holds something else.
    """
    if isinstance(model_or_state_dict, torch.nn.Module):
        return require_tensors(model_or_state_dict.state_dict(keep_vars=True))
    if isinstance(model_or_state_dict, Mapping):
        return require_tensors(model_or_state_dict)
    raise TypeError(f"{caller}: expected a Module or a state_dict, got {type(model_or_state_dict).__name__}.")


def _region(caller: str, name: str, tensor: Tensor) -> Region:
    region = region_of(tensor)
    if region is None:
        raise ValueError(
            f"{caller}: which part of the whole the shards of {name!r} are can't be said. Use other placements."
        )
    return region


def _piece(change: TensorChange) -> tuple[Any, ...]:
    """Equal for what is one piece of one tensor on several ranks."""
    return change.name, change.region.starts, change.region.sizes


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
    def of(cls, caller: str, name: str, tensor: Tensor, change: TensorChange) -> _Target:
        """What this rank's piece of a tensor gets.

        Raises:
            ValueError: it has another shape or dtype, or its piece can't be placed.
        """
        if tuple(tensor.shape) != change.region.shape or tensor.dtype != change.dtype:
            have, want = (
                f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
                for dtype, shape in ((tensor.dtype, tensor.shape), (change.dtype, change.region.shape))
            )
            raise ValueError(f"{caller}: {name!r} is {have}, the delta's is {want}. Give a model of the same kind.")
        region = _region(caller, name, tensor)
        if change.values is None:
            return cls(name, tensor, region, change, None, None)
        device, values = local(tensor).device, change.values
        if change.places is None and region.is_whole:
            return cls(name, tensor, region, change, None, values.to(device))
        if change.places is None:
            mine = region.indices(torch.arange(region.numel, dtype=torch.int64, device=values.device))
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


class _Compared(NamedTuple):
    """A tensor's digests, of the whole, over all its ranks.

    Attributes:
        now: as it is.
        then: with the delta's values in their places.
    """

    target: _Target
    now: int
    then: int

    @property
    def kind(self) -> str:
        """Of a tensor that is not what the delta leaves, why that is.

        "lost": it is as before. "twice": what the delta does not write is right, what it writes was overwritten, as by
        an earlier delta; a later one would have written elsewhere too. "other": what it does not write is wrong.
        """
        if self.then != self.target.change.after:
            return "other"
        return "lost" if self.target.change.before in (None, self.now) else "twice"


class _Agreement:
    """Adds up digests of pieces over the ranks that have them; of plain tensors there is one piece."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)

    def sums(self, digests: Sequence[Tensor]) -> list[int]:
        """Of each tensor, over all its ranks. Syncs, once a device and a mesh."""
        found = [0] * len(digests)
        together: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
        plain = [place for place, tensor in enumerate(self._tensors) if not is_sharded(tensor)]
        for place, number in zip(plain, read_numbers([digests[place] for place in plain]), strict=True):
            found[place] = number
        for place, tensor in enumerate(self._tensors):
            if not is_sharded(tensor):
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
