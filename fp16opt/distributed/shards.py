"""Masters that are spread over ranks: one verdict, one norm, in one message of 32 bytes a step."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..engine.diagnostics import are_finite
from ..engine.dtensors import local
from ..engine.gradients import StepState
from ..engine.ranks import Agreed, Asked, Facts, Origin, Ranks
from .alike import Bits, Holders, Reach, compare, ranks_in
from .digits import digits_of
from .exchange import require_process_group
from .replicas import content_hash
from .settings import Settings
from .waiting import explain, meet, own_group, reduce_over

_HIGHEST = 7  # (2**128) ** 7 is within float64, with room for a sum, and so are small gradients


class _Own(NamedTuple):
    """What a rank brings to the message: float64, on its device.

    Attributes:
        flags: its verdicts.
        any_found: 1.0 where one of them says that something was found.
        loss_is_bad: 1.0 where it knows a loss of its own that is not finite.
        last: its part of the norm: the sum of powers, or the largest magnitude.
        number: of its settings.
    """

    flags: Tensor
    any_found: Tensor
    loss_is_bad: Tensor
    last: Tensor
    number: int
    has_grads: bool


class GroupRanks(Ranks):
    """Verdicts and norms are added up over a process group.

    Args:
        group: the ranks that share the masters.
        device: where messages must lie.
        facts: what these ranks must have alike, compared once, before the first message.
        optimizer: the wrapped one, whose settings are compared in every message.
    """

    alone = False

    def __init__(self, group: Any, device: torch.device, facts: Callable[[], Facts], optimizer: Optimizer) -> None:
        self.group = group
        self.device = device
        self._facts: Callable[[], Facts] | None = facts
        self._settings = Settings(optimizer)
        self._own: Any = None  # of the same ranks, for messages of steps
        self._unread: tuple[Asked, Tensor] | None = None  # of a message whose numbers lie on a device

    @property
    def kept_settings(self) -> frozenset[str]:  # type: ignore[override]
        """See :class:`fp16opt.engine.ranks.Ranks`."""
        return self._settings.kept

    def see_step(self, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
        """See :meth:`.settings.Settings.see_step`."""
        self._settings.see_step(before, after)

    def must_hold(self, param: Any) -> Holders:
        """The ranks that certainly have a parameter, and so have gradients where one of them has some."""
        raise NotImplementedError("each kind of training has its own")

    def reach(self, param: Tensor) -> Reach:
        """Over which ranks a parameter lies: those that certainly have it."""
        ranks = self.must_hold(param)
        return Reach(ranks, ranks)

    def check_alike(self) -> None:
        """Compare, the first time, what ranks must have alike. One that differs would be summed wrongly."""
        require_process_group("an optimizer with masters on several ranks")
        if self._facts is not None:
            meet("the first clip or step", self.group)
            compare("the optimizer", self._facts(), self.reach, self.group)
            self._facts = None

    def check_clip(self, norm_type: float, is_of_all: bool) -> None:
        """Sums of higher powers of FP32 numbers leave float64, and one message has no room for their largest."""
        if _HIGHEST < norm_type < math.inf:
            raise ValueError(
                f"norm_type: over ranks expected at most {_HIGHEST}, or inf, got {norm_type:g}: sums of such powers "
                "don't fit into float64."
            )

    def agree(
        self,
        found: Sequence[Tensor],
        asked: Asked,
        power_sum: Tensor | None,
        losses: Sequence[Tensor] = (),
    ) -> Agreed:
        """See :meth:`fp16opt.engine.ranks.Ranks.agree`.

        Sends float64 [counts, sum, number and counts, the number's square]: 32 bytes. The number stands for settings
        and for what is asked; it is the same on all ranks where that of all, squared, is their count times the sum of
        squares. Counts tell how many ranks found something, and which one did where it is one.
        """
        with self._sending("a clip or a step"):
            self.check_alike()
            return self._agree(found, asked, power_sum, losses)

    def _agree(
        self,
        found: Sequence[Tensor],
        asked: Asked,
        power_sum: Tensor | None,
        losses: Sequence[Tensor],
    ) -> Agreed:
        size, norm_type = dist.get_world_size(self.group), asked.norm_type
        if self._unread is not None:
            before, numbers = self._unread
            self._unread = None
            self._compare(before, numbers, size, is_late=True)
        home = found[0].device
        flags = torch.stack([flag.double() for flag in found]).to(self.device)
        any_found = flags.amax()
        last = torch.zeros_like(any_found) if power_sum is None else power_sum.to(any_found)
        last = torch.where(any_found > 0, torch.zeros_like(last), last)  # no inf or nan travels
        number = self._settings.number(asked, size)
        loss_is_bad = self._loss_is_bad(any_found, losses)
        reduced = self._largest if norm_type == math.inf else self._added_up
        own = _Own(flags, any_found, loss_is_bad, last, number, asked.has_grads)
        verdicts, last, there, origin, numbers = reduced(own, size)
        if self.device.type == "cpu":
            self._compare(asked, numbers, size)
        else:
            self._unread = asked, numbers
        verdicts = verdicts.float().to(home)
        norm = None
        if norm_type is not None:
            norm = last if norm_type == math.inf else last.pow(1.0 / norm_type)
            norm = torch.where(verdicts.amax().to(norm) > 0, torch.full_like(norm, math.inf), norm).to(home)
        return Agreed(list(verdicts.unbind()), norm, there, origin)

    def _added_up(self, mine: _Own, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(verdicts, sum, whether some rank has gradients, the origin, numbers), over the ranks."""
        flags, any_found, loss_is_bad, last, number, has_grads = mine
        several = [any_found] if len(flags) > 1 else []
        count = 1 + len(flags) + len(several)
        digits = digits_of(count - 1, size, flags.device)
        own = torch.tensor([has_grads, number, dist.get_rank(self.group)], dtype=flags.dtype, device=flags.device)
        where = own[2] * any_found, loss_is_bad, own[2] * loss_is_bad
        slots = digits.packed(torch.stack([own[0], *flags, *several, own[1], *where]))
        total = torch.cat([slots, last.view(1), own[1].square().view(1)])
        reduce_over(self._own_group(), total, dist.ReduceOp.SUM)
        numbers = digits.unpacked(total[:-2])
        origin = torch.cat([numbers[count - 1].view(1), numbers[count + 1 :]])
        compared = torch.stack([numbers[count], total[-1]])
        return numbers[1 : 1 + len(flags)] > 0, total[-2], numbers[0] > 0, origin, compared

    def _largest(self, mine: _Own, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """As :meth:`_added_up`, for the largest magnitude: of ranks that found something the last one is known."""
        flags, any_found, loss_is_bad, last, number, has_grads = mine
        index = dist.get_rank(self.group)
        own = torch.tensor([has_grads, 2 + index, number, -number], dtype=flags.dtype, device=flags.device)
        code = torch.where(any_found > 0, own[1] + size * loss_is_bad, own[0])  # 1: there are gradients
        each = [flags] if len(flags) > 1 else []
        total = torch.cat([code.view(1), *each, last.view(1), own[2:]])
        reduce_over(self._own_group(), total, dist.ReduceOp.MAX)
        code = total[0]
        verdicts = total[1:-3] if each else code.view(1) > 1
        is_bad, at = torch.floor((code - 2) / size), (code - 2) % size
        origin = torch.stack([(code > 1).to(at), at, is_bad, is_bad * at])
        return verdicts > 0, total[-3], code > 0, origin, total[-2:]

    def _loss_is_bad(self, any_found: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """1.0 where this rank found something and knows a loss that is not finite; on the messages' device."""
        if not losses:
            return torch.zeros_like(any_found)
        if self.device.type == "cpu":
            return torch.full_like(any_found, bool(any_found) and are_finite(losses) is False)
        each = torch.stack([loss.detach().float().reshape(()).to(self.device) for loss in losses])
        return any_found * ~each.isfinite().all()

    def origin(self, numbers: Tensor) -> Origin:
        """See :meth:`fp16opt.engine.ranks.Ranks.origin`."""
        found, at, bad, bad_at = map(int, numbers.tolist())
        return Origin(self._in_words(found, at), self._in_words(bad, bad_at))

    def _in_words(self, count: int, index: int) -> str:
        """So many ranks of the group; ``index`` is known where it is one, and -1 where there are too many ranks."""
        size = dist.get_world_size(self.group)
        if count <= 0:
            return ""
        if count == 1 and index >= 0:
            return f"rank {ranks_in(self.group)[index]}"
        return f"all {size} ranks" if count == size else f"{count} of {size} ranks"

    def _compare(self, asked: Asked, numbers: Tensor, size: int, is_late: bool = False) -> None:
        """Raise on all ranks where the numbers of some differ."""
        first, second = map(int, numbers.tolist())
        are_alike = first == -second if asked.norm_type == math.inf else first * first == size * second
        if not are_alike:
            self._settings.refuse(asked, self.must_hold, self.group, is_late)

    def _own_group(self) -> Any:
        if self._own is None:
            self._own = own_group(self.group)
        return self._own

    @contextlib.contextmanager
    def _sending(self, place: str) -> Iterator[None]:
        """A message that fails says which ranks did other things."""
        try:
            yield
        except RuntimeError as error:
            explain(error, place)
            raise

    def is_anywhere(self, flag: Tensor) -> bool:
        """See :meth:`fp16opt.engine.ranks.Ranks.is_anywhere`."""
        return bool(self.largest(flag.float().reshape(1)))

    def largest(self, norms: Tensor) -> Tensor:
        """See :meth:`fp16opt.engine.ranks.Ranks.largest`. A norm that is not finite travels as 0."""
        there = torch.where(norms.isfinite(), norms, 0.0).to(self.device)
        with self._sending("a clip, a step or the beginning of a backward"):
            reduce_over(self._own_group(), there, dist.ReduceOp.MAX)
        return there.to(norms.device)


class MeshRanks(GroupRanks):
    """Masters are DTensors, perhaps with plain tensors among them (a layer norm under tensor parallelism).

    The ranks that share the verdict are those of all meshes together. A piece is repeated where its mesh has several
    of the same, on each dimension of the root mesh that its mesh lacks, and, of a plain tensor, on all of the ranks.

    Args:
        params: the model's parameters that the optimizer has.
        facts, optimizer: see :class:`GroupRanks`.
    """

    def __init__(self, params: Sequence[Tensor], facts: Callable[[], Facts], optimizer: Optimizer) -> None:
        self._of_root: dict[int, tuple[Any, Holders]] = {}  # root meshes, kept by their ids, and their ranks
        self._counted: dict[int, tuple[Tensor, bool]] = {}
        roots = root_meshes(params)
        self.union: Holders = tuple(sorted({rank for root in roots for rank in self._ranks(root)}))
        covers_world = len(self.union) == dist.get_world_size()
        covering = [root for root in roots if root.size() == len(self.union)]
        self._is_covered = bool(covering) or covers_world
        group = _group_of(covering[0]) if covering and not (covers_world and len(roots) > 1) else None
        super().__init__(group, _device_of(roots[0]), facts, optimizer)

    @property
    def group(self) -> Any:
        """The ranks of all meshes together; None where these are all ranks.

        Raises:
            ValueError: no mesh has all of them.
        """
        if not self._is_covered:
            ranks = list(self.union)
            raise ValueError(
                f"the parameters' meshes lie on the ranks {ranks} together, and no single mesh does: a group of these "
                f"ranks is needed. Call group = torch.distributed.new_group({ranks}) on every rank of the world, then "
                "attach(opt, model, process_group=group) on these, before the first step."
            )
        return self._group

    @group.setter
    def group(self, group: Any) -> None:
        self._group = group

    def reach(self, param: Any) -> Reach:
        """See :class:`GroupRanks`: all of these ranks have it."""
        return super().reach(param)._replace(bits=self.bits(param))

    def must_hold(self, param: Any) -> Holders:
        """See :class:`GroupRanks`."""
        return self.may_hold(param)

    def may_hold(self, param: Any) -> Holders:
        """The ranks of the parameter's root mesh; of a plain one, all."""
        return self._ranks(_root_of(param.device_mesh)) if hasattr(param, "device_mesh") else self.union

    def bits(self, param: Any) -> Bits | None:
        """Of a parameter that other ranks may have too without its mesh saying so: its bits here."""
        mesh = getattr(param, "device_mesh", None)
        if param.is_meta or (mesh is not None and ranks_of(mesh) == self.may_hold(param)):
            return None
        return Bits(_place(param), content_hash(local(param)))

    def piece_with_copies(self, param: Any) -> str | None:
        """See :class:`fp16opt.engine.ranks.Ranks`: along mesh dimensions that repeat it, or that its mesh lacks."""
        mesh = getattr(param, "device_mesh", None)
        if mesh is None:
            return None
        holders = self.may_hold(param)
        repeats = any(placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(param.placements))
        return repr((holders, _place(param))) if repeats or ranks_of(mesh) != holders else None

    def _ranks(self, root: Any) -> Holders:
        if id(root) not in self._of_root:
            self._of_root[id(root)] = root, ranks_of(root)
        return self._of_root[id(root)][1]

    def counted(self, param: Tensor) -> bool:
        """Once over all ranks: on the first rank of every dimension over which the piece is repeated."""
        known = self._counted.get(id(param))
        if known is None:
            known = self._counted[id(param)] = (param, is_counted(param, self.may_hold(param)))
        return known[1]


def _place(param: Any) -> tuple[int, ...]:
    """Where this rank's piece lies in its mesh: copies have one place."""
    mesh = getattr(param, "device_mesh", None)
    coordinate = () if mesh is None else mesh.get_coordinate()
    places = zip(coordinate, getattr(param, "placements", ()), strict=True)
    return tuple(0 if placement.is_replicate() else at for at, placement in places)


def is_counted(param: Any, holders: Holders) -> bool:
    """Whether this rank's piece of a parameter enters the norm, that has its pieces and copies on ``holders``."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return dist.get_rank() == holders[0]
    # The holders fall into meshes like this one, with equal contents: the one with the first rank counts.
    coordinate = mesh.get_coordinate()
    if coordinate is None or not bool((mesh.mesh == holders[0]).any()):
        return False
    places = zip(coordinate, param.placements, strict=True)
    return all(place == 0 for place, placement in places if placement.is_replicate())


_stages: weakref.WeakSet[StageRanks] = weakref.WeakSet()


class StageRanks(GroupRanks):
    """Verdict and norm over the stages of a pipeline, each with parameters of its own.

    Who holds what is known by names: ranks of one mesh, or of one DDP module, that have a parameter of one name hold
    the same. Collective when made.

    Args:
        group: every rank of every stage.
        device: where messages must lie.
        facts: what to compare; settings and scaler over all, parameters by stage.
        optimizer: see :class:`GroupRanks`.
        within: the ranks of this stage alone.
        copies: the ranks that hold plain parameters alike, this one among them.
        state: of the optimizer.

    Raises:
        ValueError: see :func:`.alike.compare`.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        facts: Facts,
        optimizer: Optimizer,
        within: Ranks,
        copies: Holders,
        state: StepState,
    ) -> None:
        super().__init__(group, device, lambda: facts, optimizer)
        self._within = within
        self._copies = copies
        holders = compare("the optimizer", facts, self.reach, group, are_stages=True)
        self._facts = None
        self._counted = {
            id(fact.param): (fact.param, is_counted(fact.param, who))
            for fact, who in zip(facts.params, holders, strict=True)
        }
        self._state = weakref.ref(state)
        _stages.add(self)

    def check_clip(self, norm_type: float, is_of_all: bool) -> None:
        """See :class:`GroupRanks`."""
        super().check_clip(norm_type, is_of_all)
        others = [one for one in _stages if one.has_more(self._counted.keys(), self.group)]
        if is_of_all and others:
            raise RuntimeError(
                f"clip_master_grads: {len(others)} more of this rank's optimizers are attached to the same ranks and "
                "have gradients that wait, so the norm would be that of one chunk of the model. Make one optimizer "
                "over all chunks of a rank, nn.ModuleDict(chunks), and attach that; or name the parameters whose norm "
                "is meant: clip_master_grads(max_norm, params=chunk.parameters())."
            )

    def has_more(self, params: Set[int], group: Any) -> bool:
        """Whether the optimizer is attached to these ranks, and gradients of none of ``params`` wait for its step."""
        state = self._state()
        if state is None or state.ranks is not self or ranks_in(group) != ranks_in(self.group):
            return False
        if not params.isdisjoint(self._counted):  # another wrapper of the same model
            return False
        return bool(state.waits_for_step() or state.has_new())

    @property
    def within(self) -> Ranks:
        """The ranks of this stage alone."""
        return self._within

    def reach(self, param: Any) -> Reach:
        """See :class:`GroupRanks`: stages of its root mesh may lack it."""
        if not isinstance(self.within, MeshRanks):
            return super().reach(param)
        return Reach(self.within.may_hold(param), self.must_hold(param), self.within.bits(param))

    def must_hold(self, param: Any) -> Holders:
        """See :class:`GroupRanks`: stages of the root mesh may lack it."""
        if not isinstance(self.within, MeshRanks):
            return self._copies
        mesh = getattr(param, "device_mesh", None)
        return (dist.get_rank(),) if mesh is None else ranks_of(mesh)

    def counted(self, param: Tensor) -> bool:
        """Once over all ranks that hold it.

        Raises:
            RuntimeError: it came after this was made.
        """
        if id(param) not in self._counted:
            raise RuntimeError(
                "parameters were added after attach(opt, model, process_group=...), so which ranks hold them isn't "
                "known. Call it again, on every rank, after they were added."
            )
        return self._counted[id(param)][1]

    def agree(
        self,
        found: Sequence[Tensor],
        asked: Asked,
        power_sum: Tensor | None,
        losses: Sequence[Tensor] = (),
    ) -> Agreed:
        """See :class:`GroupRanks`.

        Raises:
            RuntimeError: backwards had several scalers, of which other stages can't know.
        """
        if len(found) != 1:
            raise RuntimeError(
                f"a step of a pipeline: expected gradients of one loss scaler, got those of {len(found)}. Other stages "
                "see no loss: add the losses up in the schedule's loss_fn, and scale their sum by one scaler."
            )
        return super().agree(found, asked, power_sum, losses)

    def largest(self, norms: Tensor) -> Tensor:
        """See :class:`GroupRanks`. All are of one scaler, and stages may have looked several times: one is sent."""
        largest = torch.where(norms.isfinite(), norms, 0.0).amax().reshape(1)
        return super().largest(largest).expand_as(norms)

    def is_anywhere(self, flag: Tensor) -> bool:
        """Of this rank alone: other stages begin no backward, or at other times."""
        return bool(flag)

    def followed_by(self, ask: Callable[[], Ranks]) -> Ranks:
        """Stays: which ranks share a verdict was said."""
        return self


def _dim_names(mesh: Any) -> tuple[Any, ...]:
    return tuple(mesh.mesh_dim_names or range(mesh.ndim))


def _root_of(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch before 2.10

    return _mesh_resources.get_root_mesh(mesh)


def root_meshes(params: Sequence[Tensor]) -> list[Any]:
    """The meshes that those of DTensors among ``params`` are parts of."""
    roots: list[Any] = []
    for mesh in dict.fromkeys(param.device_mesh for param in params if hasattr(param, "device_mesh")):
        root = _root_of(mesh)
        if root not in roots:
            roots.append(root)
    return roots


def ranks_of(mesh: Any) -> Holders:
    """A mesh's global ranks, ascending."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _group_of(root: Any) -> Any:
    """The group of all ranks of the mesh; None where these are all ranks."""
    if root.ndim == 1:
        return root.get_group()
    if root.size() == dist.get_world_size():
        return None
    for dim in range(root.ndim):
        if root.size(dim) == root.size():
            return root.get_group(dim)
    # A new group, which torch numbers on the ranks of the mesh alone: the others must make as many.
    return root._flatten("_".join(map(str, _dim_names(root)))).get_group()


def _device_of(root: Any) -> torch.device:
    kind = root.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
