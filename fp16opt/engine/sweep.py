"""One device's gradients, a row for each parameter."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels import PointerTables, counters, reference
from ..kernels.calls import Entries
from ..kernels.counters import GRAD, count_there, store
from ..kernels.reference_steps import Factors
from ..kernels.tables import same_walk
from .dtensors import aligned, local
from .masters import Masters
from .pairs import HALF_DTYPES, DeviceGroup, Pair, Pairs

# -- the passes --------------------------------------------------------------------------------------------------------


class Sweep:
    """The passes over the gradients of one device, and what the last of them found.

    All lists have ``rows`` entries; None is left out, and its statistics stay. No call waits for the device.

    Attributes:
        stats: non-finite flags and sums of squares of each row; ``found_inf`` and ``norm`` over all rows.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device = device
        self.stats = kernels.GradStats.allocate(rows, device)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self._look, self._take, self._take_own, self._in_place = (PointerTables() for _ in range(4))
        self._judge, self._judge_some, self._round = PointerTables(), PointerTables(), PointerTables()
        self._norm, self._scale = PointerTables(), PointerTables()

    def look(self, grads: Entries, inv_scale: Tensor) -> None:
        """What ``grads * inv_scale`` would be in FP32: flags and sums of squares. Writes no gradient."""
        kernels.multi_tensor_check(grads, inv_scale, self.stats, tables=self._look)

    def take(
        self, grads: Entries, outs: Entries, inv_scale: Tensor, adds: bool | list[bool] = False, own: bool = False
    ) -> None:
        """``outs = grads * inv_scale``, or added to, looked at on the way. ``outs`` may be ``grads``.

        Args:
            own: these are gradients of parameters that are their own masters, which come in turns with the others.
        """
        tables = self._in_place if outs is grads else self._take_own if own else self._take
        kernels.multi_tensor_unscale(grads, outs, inv_scale, self.stats, accumulate=adds, tables=tables)

    def write(self, grads: Entries, outs: Entries, inv_scale: Tensor, coefficient: Tensor) -> None:
        """``outs = (grads * inv_scale) * coefficient``, of gradients that were looked at."""
        kernels.multi_tensor_unscale_clipped(grads, outs, inv_scale, coefficient, tables=self._take)

    def judge(self, values: list[Tensor | None], narrow: Sequence[int]) -> None:
        """Look at gradients that are true already.

        Args:
            values: float32 or float64; in 16 bits where there are no masters.
            narrow: rows that may be in 16 bits.
        """
        if narrow:
            values = list(values)
            halves: list[Tensor | None] = [None] * len(values)
            for row in narrow:
                value = values[row]
                if value is not None and value.dtype in kernels.HALF_DTYPES:
                    halves[row], values[row] = value, None
            self.look(halves, self.one)
            if all(map(operator.is_, values, itertools.repeat(None))):
                return
        tables = self._judge if count_there(values) == len(values) else self._judge_some
        kernels.multi_tensor_unscale(values, values, self.one, self.stats, write=False, tables=tables)

    def measure(self, sums: list[Tensor | None], known: Tensor | None, narrow: Sequence[int]) -> None:
        """Sums of squares of FP32 sums. Flags stay, and rise where a sum is not finite that was not ``known`` to be."""
        flags = self.stats.nonfinite.clone()
        self.judge(sums, narrow)
        new = self.stats.nonfinite if known is None else self.stats.nonfinite.masked_fill(known != 0, 0)
        self.stats.nonfinite.copy_(flags | new)
        self.total()

    def drop(self, rows: list[int]) -> None:
        """Gradients are gone: what was found in them does not count."""
        index = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        self.stats.nonfinite.index_fill_(0, index, 0)
        self.stats.sumsq.index_fill_(0, index, 0.0)
        self.total()

    def round(self, rows: list[int], wide: Entries, outs: Entries) -> None:
        """``outs = wide`` in the 16 bits of parameters without masters; what is too large for them counts as inf."""
        found = kernels.CastStats.allocate(len(rows), self.device)
        kernels.multi_tensor_cast(wide, outs, found, tables=self._round)
        self.flag(rows, (found.overflow & kernels.TOO_LARGE).ne(0) * kernels.INF)

    def forget_flags(self) -> None:
        """No row is known to have a non-finite gradient. Sums of squares stay."""
        self.stats.nonfinite.zero_()
        self.stats.found_inf.zero_()

    def flag(self, rows: list[int], bits: Tensor) -> None:
        """Add flags (int32, one for each of ``rows``) that another pass has found."""
        index = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        self.stats.nonfinite[index] |= bits
        self.stats.found_inf.copy_(self.stats.nonfinite.ne(0).any())

    def total(self) -> None:
        """``found_inf`` and ``norm`` anew from the rows."""
        reference.finish(self.stats)

    def norm(self, values: Entries) -> Tensor:
        """The 2-norm over all rows, read again: float64, 0-dim, on the device also where no row has a tensor."""
        if all(map(operator.is_, values, itertools.repeat(None))):
            return torch.zeros_like(self.stats.norm)
        return kernels.multi_tensor_l2norm(values, tables=self._norm)[0]

    def largest_norm(self) -> Tensor:
        """The largest of the rows' norms that the last pass has found: float32, 0-dim. No element is larger."""
        sums = self.stats.sumsq
        return sums.amax().sqrt().float() if len(sums) else torch.zeros_like(self.one)

    def scale(self, values: Entries, factor: Tensor) -> None:
        """``values *= factor`` in place. On the CPU a factor of 1 touches no memory."""
        kernels.multi_tensor_scale(values, factor, tables=self._scale)


def total_norm(parts: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm over tensors whose norms are ``parts``: float64, 0-dim, on ``device``."""
    if len(parts) == 1:
        return parts[0].to(device)
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return vector_norm(torch.stack([part.to(device) for part in parts]), norm_type)


def vector_norm(value: Tensor, norm_type: float) -> Tensor:
    """The norm of one dense tensor: float64, 0-dim. No host sync."""
    dtype = torch.complex128 if value.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(value, norm_type, dtype=dtype)
    return norm


# -- the forms in which gradients come ---------------------------------------------------------------------------------


class Taken:
    """Gradients that an unscaling pass writes at once, by row."""

    def __init__(self, count: int) -> None:
        self.sources: list[Tensor | None] = [None] * count
        self.outs: list[Tensor | None] = [None] * count
        self.adds = [False] * count
        self.used = False

    def put(self, row: int, source: Tensor, out: Tensor, add: bool = False) -> None:
        """A row's ``source`` goes to ``out``, or is added there."""
        self.sources[row], self.outs[row], self.adds[row], self.used = source, out, add, True


def coalesced(grad: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A sparse gradient with duplicates summed in ``dtype``, not in 16 bits.

    Raises:
        TypeError: it is neither dense nor sparse COO.
    """
    if grad.layout is not torch.sparse_coo:
        raise TypeError(
            f"parameter {name!r}: expected a dense or a sparse COO gradient, got layout {grad.layout}. Convert it in a "
            "hook."
        )
    if grad.is_coalesced():
        return grad
    return torch.sparse_coo_tensor(grad._indices(), grad._values().to(dtype), grad.shape).coalesce()


def can_wait(grad: Tensor, model: Tensor) -> bool:
    """Whether kernels can walk a gradient along with its parameter, so that it stays where it is until a step."""
    return grad.layout is torch.strided and grad.dtype == model.dtype and same_walk(grad, model)


def as_master_grad(grad: Tensor, master: Tensor, name: str) -> Tensor:
    """A gradient in FP32 and laid out as its master, or sparse and coalesced: itself where it is.

    Raises:
        TypeError: as :func:`coalesced`.
    """
    grad = grad.detach()
    if grad.layout is not torch.strided:
        whole = coalesced(grad, torch.float32, name)
        return whole if whole.dtype is torch.float32 else whole.to(torch.float32)
    if can_wait(local(grad), local(master)):
        return grad
    return torch.empty_like(master, requires_grad=False).copy_(grad)


def kernel_values(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors that hold gradients' elements, as kernels take them; of sparse ones their values."""
    values: list[Tensor | None] = []
    for grad in grads:
        if grad is not None:
            if grad.layout is torch.sparse_coo:
                grad = grad._values()
            if type(grad) is not Tensor:
                grad = local(grad)
            grad = grad.detach() if grad.requires_grad else grad
        values.append(grad)
    return values


# -- parameters that are their own masters -----------------------------------------------------------------------------


class OwnGradients:
    """Those of one device, in whatever forms they come: sorted one by one, then made true by one pass.

    Args:
        pairs: of all rows of the device.
        sweep: the device's passes.
        held: by row, true gradients that were set aside during the backward, to be added.
        inv_scale: float32, 0-dim: 1 / the scale of that backward.

    Attributes:
        live: rows with a gradient.
        are_usual: whether all have one, dense and laid out as their parameters, and none was set aside.
    """

    def __init__(self, pairs: list[Pair], sweep: Sweep, held: dict[int, Tensor], inv_scale: Tensor) -> None:
        self.live: set[int] = set()
        self.are_usual = True
        self._pairs = pairs
        self._sweep = sweep
        self._held = held
        self._inv_scale = inv_scale
        self._taken = Taken(len(pairs))
        self._narrow: list[tuple[int, Tensor]] = []
        self._later: list[tuple[int, Tensor]] = []

    def add(self, row: int, grad: Tensor | None) -> None:
        """Sort one in."""
        param, before = self._pairs[row].model, self._held.get(row)
        if grad is None:
            self.are_usual = False
            if before is not None:
                param.grad = before
                self.live.add(row)
            return
        self.live.add(row)
        if param.dtype in HALF_DTYPES and grad.dtype in HALF_DTYPES:
            self._add_half(row, grad, before)
        elif grad.layout is not torch.strided:
            self._add_sparse(row, grad, before)
        else:
            self._add_dense(row, grad, before)

    def _add_dense(self, row: int, grad: Tensor, before: Tensor | None) -> None:
        param = self._pairs[row].model
        if grad.requires_grad:  # create_graph: it stays part of the graph
            self.are_usual = False
            with torch.enable_grad():
                true = grad * self._inv_scale
                param.grad = true if before is None else before + true
            return
        mine = aligned(grad, param)
        if before is not None and before.layout is torch.strided:
            self._taken.put(row, local(mine).detach(), local(before), True)
            if type(grad) is Tensor and grad.dtype == before.dtype and not grad._is_view():
                grad.data = before  # still the same tensor: torch's clip_grad_norm_ may have listed it already
            else:
                param.grad = before
            self.are_usual = False
            return
        if mine is not grad or local(mine).stride() != local(param).stride():
            # torch's fused steps are silently wrong where a gradient's strides are not its parameter's.
            self.are_usual = False
            mine = torch.empty_like(param, dtype=mine.dtype, requires_grad=False).copy_(mine)
            param.grad = mine
        self._taken.put(row, local(mine), local(mine))
        if before is not None:
            self._later.append((row, before))

    def _add_sparse(self, row: int, grad: Tensor, before: Tensor | None) -> None:
        self.are_usual = False
        pair = self._pairs[row]
        whole = coalesced(grad.detach(), pair.model.dtype, pair.name)
        if not grad.is_coalesced():
            pair.model.grad = whole
        elif grad.requires_grad or not whole._values().is_contiguous():
            pair.model.grad = whole = whole.clone()
        self._taken.put(row, whole._values(), whole._values())  # in place: a GradScaler may hold them
        if before is not None:
            self._later.append((row, before))

    def _add_half(self, row: int, grad: Tensor, before: Tensor | None) -> None:
        """16-bit parameters without masters: through FP32 memory, and rounded back."""
        pair = self._pairs[row]
        self.are_usual &= type(grad) is Tensor and before is None and can_wait(grad, pair.model)
        if grad.layout is not torch.strided:
            grad = coalesced(grad.detach(), torch.float32, pair.name)
            values = grad._values().to(pair.model.dtype)
            grad = torch.sparse_coo_tensor(grad._indices(), values, grad.shape, is_coalesced=True).coalesce()
        elif grad.requires_grad:
            grad = grad.detach().clone()
        source = local(grad if grad.layout is torch.strided else grad._values())
        self._taken.put(row, source, torch.empty_like(source, dtype=torch.float32))
        self._narrow.append((row, source))
        pair.model.grad = grad
        if before is not None:
            self._later.append((row, before))

    def run(self) -> None:
        """One pass over all of them."""
        sweep, taken = self._sweep, self._taken
        if taken.used:
            adds = taken.adds if any(taken.adds) else False
            sweep.take(taken.sources, taken.outs, self._inv_scale, adds, own=True)
        if self._narrow:
            rows = [row for row, _ in self._narrow]
            sweep.round(rows, [taken.outs[row] for row in rows], [out for _, out in self._narrow])
        for row, before in self._later:
            param = self._pairs[row].model
            param.grad = before if param.grad is None else before + param.grad


# -- all of a device ---------------------------------------------------------------------------------------------------


_NEEDS_GRAD = operator.attrgetter("requires_grad")
_new_room = functools.partial(torch.empty_like, dtype=torch.float32, requires_grad=False)


def drop_gradients(tensors: list[Tensor], keep: bool = False) -> None:
    """Free them, or leave zeros in their places."""
    if not keep:
        counters.set_gradients(tensors, [None] * len(tensors))
        return
    for grad in counters.gradients(tensors):
        if grad is not None:
            grad.zero_()


class ToStep(NamedTuple):
    """Gradients that are about to be stepped, by row.

    Attributes:
        waiting: those that wait in 16 bits; None: there are none.
        true: those that are FP32 and unscaled, dense, as kernels take them; None: there are none.
        factors: what those that wait are to be multiplied by.
        has_sparse: whether a true one is sparse, of which ``true`` has the values.
    """

    waiting: list[Tensor | None] | None
    true: list[Tensor | None] | None
    factors: Factors
    has_sparse: bool = False


class DeviceGradients:
    """What :class:`Gradients` keeps and does for one device. No call waits for it.

    Attributes:
        group: the device's parameters.
        models, masters: the tensors whose ``.grad`` is read and set, by row.
        sweep: the passes; its ``stats`` say what the last one found.
        waiting: 16-bit gradients that were looked at and stay where they are, by row; None: there are none.
        factors: what they are to be multiplied by.
        flags: of all that went into sums; None where nothing is summed.
        live: rows that had a gradient at the last pass.
        summed: rows whose master gradient is a sum that the next one is added to.
        has_sparse: whether :meth:`true_ones` met a sparse one.
    """

    def __init__(self, group: DeviceGroup, pairs: Pairs, masters: Masters) -> None:
        self.group = group
        self.pairs = [pairs.all[i] for i in group.positions]
        self.models = [pair.model for pair in self.pairs]
        self.masters = [pair.master for pair in self.pairs]
        self.own_models = [self.models[row] for row in group.own]
        self.copied_models = [self.models[row] for row in group.copied]
        self._copied_masters = [self.masters[row] for row in group.copied]
        self.sweep = Sweep(group.device, len(group))
        self.waiting: list[Tensor | None] | None = None
        self.factors = Factors(self.sweep.one, self.sweep.one)
        self.flags: Tensor | None = None
        self.has_sparse = False
        self.live: set[int] = set()
        self._waits = 0  # how many do
        self._copied_rows = frozenset(group.copied)  # a set takes in another faster than a list
        self._copied_positions = [group.positions[row] for row in group.copied]
        self._shapes = [masters.operand(pair) for pair in self.pairs]
        self._has_pieces = pairs.has_pieces
        self._rooms: list[Tensor | None] = [None] * len(group)  # memory for FP32 gradients
        self._has_rooms = False
        self._held: dict[int, Tensor] = {}  # own gradients that were set aside during a backward
        self.summed: set[int] = set()
        self._narrow = [row for row in group.own if self.models[row].dtype in HALF_DTYPES]
        self._usual = kernels.Seen()
        self._usual_own = kernels.Seen()
        self._usual_true = kernels.Seen()

    def take_over(self, old: DeviceGradients) -> None:
        """Parameters or masters came: for those that were there before all is as it was."""
        self._has_rooms = self._has_rooms or old._has_rooms
        for row, pair in enumerate(old.pairs):
            if old.masters[row] is not pair.master or pair.device is not self.group:
                continue
            if row in old.live:
                self.live.add(pair.row)
            if old.waiting is not None and old.waiting[row] is not None:
                self.waiting = self.waiting or [None] * len(self.models)
                self.waiting[pair.row], self.factors = old.waiting[row], old.factors
                self._waits += 1
            self._rooms[pair.row] = old._rooms[row]
            self.sweep.stats.nonfinite[pair.row] = old.sweep.stats.nonfinite[row]
            self.sweep.stats.sumsq[pair.row] = old.sweep.stats.sumsq[row]
            self.sweep.stats.touched = True
            if row in old._held:
                self._held[pair.row] = old._held[row]
            if row in old.summed:
                self.summed.add(pair.row)
            if old.flags is not None:
                if self.flags is None:
                    self.flags = torch.zeros_like(self.sweep.stats.nonfinite)
                self.flags[pair.row] = old.flags[row]
        self.sweep.total()

    # -- lists of rows -----------------------------------------------------------------------------------------------

    def _spread(self, rows: list[int], values: list[Any]) -> list[Any]:
        """``values`` at ``rows``, None elsewhere."""
        if len(rows) == len(self.models):
            return values
        entries: list[Any] = [None] * len(self.models)
        for row, value in zip(rows, values, strict=True):
            entries[row] = value
        return entries

    def _dense(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The tensors that hold the gradients' elements, for kernels."""
        for row, grad in enumerate(grads):
            if grad is not None and grad.is_sparse and not grad.is_coalesced():
                grads[row] = grad.coalesce()
                if GRAD.__get__(self.models[row]) is grad:  # as it is of own ones, and of those that are shared
                    store(self.models[row], grads[row])
                store(self.masters[row], grads[row])
        return kernel_values(grads)

    def _room(self, row: int) -> Tensor:
        room = self._rooms[row]
        if room is None or room.device != self.masters[row].device:
            room = self._rooms[row] = _new_room(self._shapes[row])
            self._has_rooms = True
        return room

    def _outs(self, entries: list[Tensor | None]) -> list[Tensor | None]:
        """The memory for FP32 gradients of ``entries``, put into their masters' ``.grad``."""
        copied = self.group.copied
        are_all = count_there(entries) == len(copied)
        rows = copied if are_all else [row for row, entry in enumerate(entries) if entry is not None]
        if count_there(self._rooms) < len(copied):
            self._has_rooms = True
            for row in rows:
                if self._rooms[row] is None:
                    self._rooms[row] = _new_room(self._shapes[row])
        rooms = list(map(self._rooms.__getitem__, rows))
        masters = self._copied_masters if are_all else list(map(self.masters.__getitem__, rows))
        counters.set_gradients(masters, rooms)
        outs = self._spread(rows, rooms)
        return [None if out is None else local(out) for out in outs] if self._has_pieces else outs

    def kept(self) -> list[Tensor | None]:
        """Memory for gradients, and those that were set aside."""
        return [*self._rooms, *self._held.values()]

    # -- parameters that are their own masters -----------------------------------------------------------------------

    def set_aside(self, keep: bool) -> None:
        """Take true gradients away, to be added back when the next are true. ``keep`` leaves zeros, not None."""
        for row, model in zip(self.group.own, self.own_models, strict=True):
            grad = model.grad
            if grad is not None:
                # DDP writes the next gradient into the same memory, where gradients are views of its buckets.
                self._held[row] = grad.clone() if keep or grad._is_view() else grad
                drop_gradients([model], keep)

    def unscale_own(self, inv_scale: Tensor, are_sums: bool) -> None:
        """Make their gradients true, in place, checked and measured. With ``are_sums`` flags of earlier ones stay."""
        if not self.group.own:
            return
        grads = counters.gradients(self.own_models)
        self.sweep.stats.touched = True
        if not self._held and self._usual_own.again(grads) and True not in map(_NEEDS_GRAD, grads):
            self.live.update(self.group.own)
            self._unscale_usual(self._spread(self.group.own, grads), inv_scale)
            return
        self.live.update([row for row, grad in zip(self.group.own, grads, strict=True) if grad is not None])
        held, self._held = self._held, {}
        own = OwnGradients(self.pairs, self.sweep, held, inv_scale)
        for row, grad in zip(self.group.own, grads, strict=True):
            own.add(row, grad)
        own.run()
        if own.live and own.are_usual and not self._has_pieces:
            self._usual_own = kernels.Seen(grads)
        if held and are_sums:
            models = zip(self.group.own, self.own_models, strict=True)
            sums = [model.grad if row in held else None for row, model in models]
            self.sweep.measure(self._dense(self._spread(self.group.own, sums)), self.flags, self._narrow)

    def _unscale_usual(self, entries: list[Any], inv_scale: Tensor) -> None:
        """In place; of 16-bit parameters without masters through FP32 memory, and rounded back."""
        if not self._narrow:
            self.sweep.take(entries, entries, inv_scale)
            return
        outs = list(entries)
        for row in self._narrow:
            outs[row] = torch.empty_like(entries[row], dtype=torch.float32)
        self.sweep.take(entries, outs, inv_scale)
        narrow = self._narrow
        self.sweep.round(narrow, list(map(outs.__getitem__, narrow)), list(map(entries.__getitem__, narrow)))

    # -- the look ----------------------------------------------------------------------------------------------------

    def look(self, inv_scale: Tensor, write: bool, seen: list[Tensor | None] | None) -> None:
        """The pass over 16-bit gradients, and over true ones of other parameters, which were the user's till now.

        Args:
            inv_scale: float32, 0-dim.
            write: make FP32 ones of all; else of those only that can't wait.
            seen: the model's gradients by pair, where they were just read.
        """
        group, sweep = self.group, self.sweep
        self.waiting = None
        sweep.stats.touched = True
        live: set[int] = set()
        if group.own:
            self._look_at_own(live)
        if group.copied:
            self.factors = Factors(inv_scale, sweep.one)
            grads = counters.gradients(self.copied_models) if seen is None else self._copied_of(seen)
            taken, count = None, len(grads)
            if self._are_usual(grads):
                live |= self._copied_rows
            else:
                with torch.no_grad():
                    grads, taken = self._sorted(grads, live)
                count = count_there(grads)
            entries = self._spread(group.copied, grads) if count else None
            if taken is not None:
                sweep.take(taken.sources, taken.outs, inv_scale)
            if entries is not None and write:
                sweep.take(entries, self._outs(entries), inv_scale)
            elif entries is not None:
                sweep.look(entries, inv_scale)
                self.waiting, self._waits = entries, count
        self._drop_gone(live)

    def _copied_of(self, seen: list[Tensor | None]) -> list[Tensor | None]:
        """Of gradients by pair those of rows with masters."""
        whole = len(self._copied_positions) == len(seen)
        return list(seen) if whole else list(map(seen.__getitem__, self._copied_positions))

    def _look_at_own(self, live: set[int]) -> None:
        grads = counters.gradients(self.own_models)
        entries = self._spread(self.group.own, grads)
        if self._usual_own.again(grads):
            live.update(self.group.own)
        else:
            live.update([row for row, grad in zip(self.group.own, grads, strict=True) if grad is not None])
            with torch.no_grad():
                entries = self._dense(entries)
        self.sweep.judge(entries, self._narrow)

    def _are_usual(self, grads: list[Tensor | None]) -> bool:
        """Whether every 16-bit parameter has a gradient, and all can wait as they are."""
        if self._usual.again(grads):
            return True
        models = [self.group.models[row] for row in self.group.copied]
        usual = all(
            type(grad) is Tensor and not grad.requires_grad and can_wait(grad, model)
            for grad, model in zip(grads, models, strict=True)
        )
        if usual and not self._has_pieces:
            self._usual = kernels.Seen(grads)
        return usual and not self._has_pieces

    def _sorted(self, grads: list[Tensor | None], live: set[int]) -> tuple[list[Tensor | None], Taken | None]:
        """(what can wait, of rows with masters; the others, made at once). Rows with a gradient go into ``live``."""
        waiting: list[Tensor | None] = []
        taken = Taken(len(self.models))
        for row, grad in zip(self.group.copied, grads, strict=True):
            waits = None
            if grad is not None:
                live.add(row)
                grad = aligned(grad.detach() if grad.requires_grad else grad, self.models[row])
                if can_wait(local(grad), self.group.models[row]):
                    waits = local(grad)
                else:
                    self._take_odd(row, grad, taken)
            waiting.append(waits)
        return waiting, taken if taken.used else None

    def _take_odd(self, row: int, grad: Tensor, taken: Taken) -> None:
        """A gradient that can't wait: sparse, of another dtype, or laid out otherwise than its parameter."""
        pair = self.pairs[row]
        if grad.layout is torch.strided:
            # A GradScaler reads one after the other: what a master shares already it may have been given before.
            is_shared = grad.dtype == torch.float32 and GRAD.__get__(pair.master) is grad
            out = grad if is_shared else self._room(row)
            taken.put(row, local(grad), local(out))
            store(pair.master, out)
            return
        grad = coalesced(grad, torch.float32, pair.name)
        out = torch.empty_like(grad._values(), dtype=torch.float32)
        taken.put(row, grad._values(), out)
        store(pair.master, torch.sparse_coo_tensor(grad._indices(), out, grad.shape, is_coalesced=True).coalesce())

    def _drop_gone(self, live: set[int]) -> None:
        """What an earlier pass found in gradients that are not there any more does not count."""
        gone = sorted(self.live - live)
        for row in gone:
            if self.masters[row] is not self.models[row]:
                store(self.masters[row], None)
        self.live = live
        if gone:
            self.sweep.drop(gone)

    # -- FP32 gradients ----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Make FP32 gradients of those that wait, in the bits that a one-pass step would use."""
        if self.waiting is not None:
            self.sweep.write(self.waiting, self._outs(self.waiting), *self.factors)
            self.waiting = None

    def forget_gone(self) -> None:
        """See :class:`Gradients`."""
        for row in self.group.copied:
            if row not in self.live:
                store(self.masters[row], None)

    def true_ones(self, made: bool) -> list[Tensor | None]:
        """By row: gradients that are FP32 and unscaled, dense, as kernels take them; None where one waits.

        Args:
            made: whether all masters hold theirs; else what a master holds is of an earlier step, unless it could not
                wait.
        """
        grads = counters.gradients(self.masters)
        if not made:
            waits = self.waiting or [None] * len(grads)
            for row, wait in enumerate(waits):
                if wait is not None or row not in self.live:
                    grads[row] = None
        if self._usual_true.again(grads):
            self.has_sparse = False
            return grads
        values = self._dense(grads)
        self.has_sparse = any([grad is not None and grad.is_sparse for grad in grads])  # noqa: C419
        if all(map(operator.is_, grads, values)):
            self._usual_true = kernels.Seen(values)
        return values

    def all_wait(self) -> bool:
        """Whether every gradient waits, so that there are no true ones."""
        return self.waiting is not None and len(self.live) == self._waits

    def judge(self, made: bool) -> None:
        """Look at true gradients as they are now: somebody edited them."""
        values = self.true_ones(made)
        self.sweep.stats.reset()
        self.live = set()
        for row, value in itertools.chain(enumerate(values), enumerate(self.waiting or ())):
            if value is not None:
                self.live.add(row)
        if self.waiting is not None:
            self.sweep.look(self.waiting, self.factors.inv_scale)
        self.sweep.judge(values, self._narrow)
        if self.flags is not None:  # a sum may be finite again; what went into it was judged with its scaler
            self.flags.copy_(self.sweep.stats.nonfinite)

    def judge_apart(self, values: list[Tensor | None]) -> None:
        """Look at ``values``, true gradients by row, in place of those that are there."""
        self.sweep.stats.reset()
        self.sweep.stats.touched = True
        self.sweep.judge(self._dense(values), self._narrow)

    def drop(self, row: int) -> None:
        """Somebody has set a gradient to None: it is not part of the step."""
        pair = self.pairs[row]
        if self.waiting is not None and self.waiting[row] is not None:
            self.waiting[row] = None
            self._waits -= 1
        if pair.master is not pair.model:
            store(pair.master, None)
        self.live.discard(row)
        self.sweep.drop([row])

    def rescale(self, factor: Tensor) -> None:
        """Multiply 16-bit gradients that are left from an earlier step by ``factor`` (float32, 0-dim)."""
        grads = [model.grad for model in self.copied_models]
        kernels.multi_tensor_scale(kernel_values(self._spread(self.group.copied, grads)), factor)

    # -- FP32 sums ---------------------------------------------------------------------------------------------------

    def start_summing(self, made: bool) -> None:
        """What masters hold, if it was ``made``, is what the next ones are added to; 16-bit gradients are freed."""
        if not made and self.live:  # what was found was in gradients that come again, or are gone
            self._begin()
        self.flags = self.sweep.stats.nonfinite.clone()
        self.summed = self.live - set(self.group.own) if made else set()
        if made:
            drop_gradients(self.copied_models)

    def sum_up(self, inv_scale: Tensor) -> None:
        """Add 16-bit gradients to the sums; flags of own ones, which were just unscaled, are counted with theirs."""
        sweep, group = self.sweep, self.group
        sweep.stats.touched = True
        own_flags = sweep.stats.nonfinite.clone()
        grads = counters.gradients(self.copied_models)
        for row in group.own:
            if self.models[row].grad is not None:
                self.live.add(row)
        sums, is_whole = self._whole_sums() if self.summed else ([], True)
        if is_whole and group.copied and self._are_usual(grads):
            entries = self._spread(group.copied, grads)
            outs = self._spread(group.copied, sums) if sums else self._outs(entries)
            sweep.take(entries, outs, inv_scale, bool(sums))
            self.summed |= self._copied_rows
            self.live |= self._copied_rows
        else:
            self._add_up(grads, inv_scale)
        found = sweep.stats.nonfinite | own_flags
        self.flags = found if self.flags is None else self.flags | found

    def _whole_sums(self) -> tuple[list[Tensor | None], bool]:
        """The sums that there are, and whether every 16-bit parameter has one, dense."""
        sums = counters.gradients([self.masters[row] for row in self.group.copied if row in self.summed])
        return sums, len(sums) == len(self.group.copied) and not any(one is None or one.is_sparse for one in sums)

    def _add_up(self, grads: list[Tensor | None], inv_scale: Tensor) -> None:
        """Add gradients, in whatever forms, to what there is of sums."""
        taken, later = Taken(len(self.models)), []
        for row, grad in zip(self.group.copied, grads, strict=True):
            if grad is None:
                continue
            grad = aligned(grad.detach() if grad.requires_grad else grad, self.models[row])
            before = GRAD.__get__(self.masters[row]) if row in self.summed else None
            if grad.layout is torch.strided and (before is None or before.layout is torch.strided):
                out = self._room(row) if before is None else before
                taken.put(row, local(grad), local(out), before is not None)
                store(self.masters[row], out)
            else:
                self._take_odd(row, grad, taken)
                if before is not None:
                    later.append((row, before))
            self.summed.add(row)
            self.live.add(row)
        if taken.used:
            self.sweep.take(taken.sources, taken.outs, inv_scale, taken.adds if any(taken.adds) else False)
        for row, before in later:
            store(self.masters[row], before + GRAD.__get__(self.masters[row]))
        if later:
            sums = self._spread([row for row, _ in later], counters.gradients([self.masters[row] for row, _ in later]))
            self.sweep.measure(self._dense(sums), self.flags, self._narrow)

    def sums(self, own_are_scaled: bool) -> list[Tensor | None]:
        """By row: the FP32 sums so far, without what a backward has just left in own parameters.

        Raises:
            TypeError: a sum is sparse.
        """
        own = set(self.group.own)
        values = [
            (self._held.get(row) if own_are_scaled else self.models[row].grad)
            if row in own
            else GRAD.__get__(self.masters[row])
            if row in self.summed
            else None
            for row in range(len(self.models))
        ]
        for pair, value in zip(self.pairs, values, strict=True):
            if value is not None and value.layout is not torch.strided:
                raise TypeError(
                    f"parameter {pair.name!r}: expected a dense gradient, got {value.layout}: sparse gradients made "
                    "under no_sync can't be averaged over ranks. Leave no_sync, or use sparse=False."
                )
        return values

    def put_sum(self, row: int, value: Tensor, own_are_scaled: bool) -> Tensor:
        """Overwrite the sum of a row, or begin one; returns the tensor that holds it."""
        pair = self.pairs[row]
        own = pair.master is pair.model
        if own and own_are_scaled:
            there = self._held.get(row)
        else:
            there = GRAD.__get__(pair.master) if own or row in self.summed else None
        if there is None:
            there = self._room(row) if not own else torch.empty_like(pair.model, requires_grad=False)
            if own and own_are_scaled:
                self._held[row] = there
            else:
                store(pair.master, there)
        if not own:
            self.summed.add(row)
        self.live.add(row)
        return there.copy_(value)

    def averaged(self, stats: kernels.GradStats) -> None:
        """The sums are averages over ranks now, in which a pass has found ``stats``."""
        self.flags = stats.nonfinite.clone() if self.flags is None else self.flags | stats.nonfinite
        self.sweep.stats.sumsq.copy_(stats.sumsq)
        self.sweep.total()

    # -- norm and clip -----------------------------------------------------------------------------------------------

    def measured_power_sum(self, counted: Callable[[Tensor], bool]) -> Tensor:
        """float64, 0-dim: the sum of squares that the last pass has found, of parameters that are ``counted``."""
        mine = torch.tensor([counted(model) for model in self.models], dtype=torch.bool, device=self.group.device)
        return self.sweep.stats.sumsq.where(mine, 0.0).sum()  # not times the mask: inf * 0 is nan

    def power_sum(self, norm_type: float, counted: Callable[[Tensor], bool], made: bool) -> Tensor:
        """float64, 0-dim: the sum of |g|**p, read again (p = inf: the largest |g|)."""
        values = [
            value if counted(model) else None for value, model in zip(self.true_ones(made), self.models, strict=True)
        ]
        if norm_type == 2.0:
            return self.sweep.norm(values).square()
        parts = [vector_norm(value, norm_type) for value in values if value is not None and value.numel()]
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=self.group.device)
        return torch.stack(parts).amax() if norm_type == float("inf") else torch.stack(parts).pow(norm_type).sum()

    def clip(self, factor: Tensor, made: bool, of: set[int] | None) -> None:
        """Multiply by ``factor``: what waits when it is used, true ones now."""
        if self.waiting is not None:
            self.factors = Factors(self.factors.inv_scale, factor)
        if not self.all_wait():
            with torch.no_grad():
                self.sweep.scale(self.meant(made, of), factor)

    def meant(self, made: bool, of: set[int] | None) -> list[Tensor | None]:
        """The true gradients that belong to parameters with these ids, None elsewhere."""
        values = self.true_ones(made)
        return (
            values
            if of is None
            else [value if id(model) in of else None for model, value in zip(self.models, values, strict=True)]
        )

    # -- reading late, clearing --------------------------------------------------------------------------------------

    def rest(self, frees: bool, made: bool) -> None:
        """A step is over. ``frees`` gives their memory back; what was ``made`` in them stays with who reads it."""
        self.summed = set()
        self._held = {}
        if not made and len(self.live) < len(self.models):
            self.forget_gone()  # parameters had none in this step, and their masters may hold an earlier one's
        if frees and self._has_rooms:
            for row, room in enumerate(self._rooms):
                if room is not None and not made and GRAD.__get__(self.masters[row]) is room:
                    store(self.masters[row], None)
            self._free()
        self._begin()

    def _free(self) -> None:
        self._rooms, self._has_rooms = [None] * len(self._rooms), False

    def read_late(self, are_used: Callable[[int, Tensor], bool]) -> None:
        """Make FP32 gradients of those that a step has used, where they are there still.

        Args:
            are_used: whether a gradient, in the model at the position of its pair, is such a one.
        """
        entries: list[Tensor | None] = [None] * len(self.models)
        for row in self.group.copied:
            grad = self.models[row].grad
            if grad is not None and are_used(self.group.positions[row], grad):
                entries[row] = local(grad)
        if any(entry is not None for entry in entries):
            self.sweep.write(entries, self._outs(entries), *self.factors)

    def _begin(self) -> None:
        """Forget what was found; what is in ``.grad`` stays."""
        self.sweep.stats.reset()
        self.live = set()
        self.waiting, self.flags = None, None

    def clear(self, frees: bool) -> None:
        """``.grad`` was set to None: so are those set aside, and sums."""
        self._held, self.summed = {}, set()
        if frees:
            self._free()
        self._begin()

    def clear_to_zeros(self, sums_stay: bool) -> bool:
        """``.grad`` was filled with zeros: so are those set aside. Returns whether zeros stay as sums."""
        for row, held in self._held.items():
            store(self.models[row], held.zero_())
        self._held, self.summed = {}, set()
        self._begin()
        if sums_stay:
            self.summed = {row for row in self.group.copied if GRAD.__get__(self.masters[row]) is not None}
        if self.summed:
            self.live = set(self.summed)
            self.flags = torch.zeros_like(self.sweep.stats.nonfinite)
        return bool(self.summed)
