"""Gradients: from what autograd left in the model to what the optimizer steps.

A gradient waits, scaled, where autograd left it. The check reads it for flags and norm. Then it is stepped as it is,
by a kernel that multiplies on the way; or a true one is made of it, which lies in ``.grad`` of its master. A clip is a
factor until then. Nothing here remembers where a step stands: what waits is handed out, and handed in again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels import reference
from ..kernels.readings import Rows
from ..kernels.reference_steps import Factors
from ..kernels.tensor_lists import all_there, read, set_grads
from .dtensors import aligned, as_piece_of, local, raw_grad, raw_grads, set_raw_grad
from .folded import FoldedGradient, is_folded, takes_place
from .masters import Masters
from .params import HALF_DTYPES, DeviceParams, ParamTable

_LAYOUT = operator.attrgetter("layout")


class Waiting(NamedTuple):
    """One device's gradients that were checked, and wait, scaled, where autograd left them.

    Attributes:
        grads: by row, dense, as kernels take them. None: the parameter is left alone.
        factors: what they are to be multiplied by: 1/scale, and the factor of a clip.
        sparse: by row, those that can't wait: coalesced.
    """

    grads: Sequence[Tensor | None]
    factors: Factors
    sparse: dict[int, Tensor]

    def clipped(self, factor: Tensor) -> Waiting:
        """The same with the factor of a clip (float32, 0-dim)."""
        return self._replace(factors=Factors(self.factors.inv_scale, factor))

    def without(self, row: int) -> Waiting:
        """The same with a parameter that is left alone."""
        return self._replace(grads=[None if place == row else grad for place, grad in enumerate(self.grads)])


class GradsToStep(NamedTuple):
    """One device's gradients as a step takes them.

    Attributes:
        grads: by row, dense, as kernels take them: all scaled as autograd left them, or all true. None: the parameter
            is left alone.
        factors: what they are to be multiplied by; ones where they are true.
        scaled: which of the two they are.
        has_sparse: whether a true one is sparse, of which ``grads`` has the values.
    """

    grads: Sequence[Tensor | None]
    factors: Factors
    scaled: bool
    has_sparse: bool


# -- single tensors ----------------------------------------------------------------------------------------------------


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
    return torch.sparse_coo_tensor(
        grad._indices(), grad._values().to(dtype), grad.shape, check_invariants=False
    ).coalesce()


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


def judge(
    values: Sequence[Tensor | None], stats: kernels.GradStats, one: Tensor, cache: kernels.CallCache | None = None
) -> None:
    """Flags and sums of squares of gradients that are true already; None leaves a row as it is. No host sync.

    Args:
        values: float16 to float64, by row.
        one: float32, 0-dim: 1.0 on the device.
    """
    if any([value is not None and value.dtype in HALF_DTYPES for value in values]):  # noqa: C419
        halves = [value if value is not None and value.dtype in HALF_DTYPES else None for value in values]
        kernels.multi_tensor_check(halves, one, stats)
        values = [value if half is None else None for value, half in zip(values, halves, strict=True)]
        cache = None
    if any([value is not None for value in values]):  # noqa: C419
        kernels.multi_tensor_unscale(values, values, one, stats, write=False, cache=cache)


def round_to(wide: list[Tensor | None], outs: list[Tensor | None], stats: kernels.GradStats) -> None:
    """``outs = wide`` in 16 bits; what is too large counts as inf. None leaves a row as it is. No host sync."""
    found = kernels.CastStats.allocate(len(wide), stats.nonfinite.device)
    kernels.multi_tensor_cast(wide, outs, found)
    stats.nonfinite |= (found.overflow & kernels.TOO_LARGE).ne(0) * kernels.INF
    stats.found_inf.copy_(stats.nonfinite.ne(0).any())


def drop_gradients(tensors: Sequence[Tensor], keep: bool = False) -> None:
    """Free them, or leave zeros in their places."""
    for tensor, grad in zip(tensors, raw_grads(tensors), strict=True):
        if grad is not None:
            if keep:
                grad.zero_()
            else:
                set_raw_grad(tensor, None)


def sparse_like(grad: Tensor, values: Tensor) -> Tensor:
    """A coalesced sparse tensor with other values."""
    return torch.sparse_coo_tensor(
        grad._indices(), values, grad.shape, is_coalesced=True, check_invariants=False
    ).coalesce()


def _dense(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors that hold gradients' elements, as kernels take them; of sparse ones their values."""
    values: list[Tensor | None] = []
    for grad in grads:
        if grad is not None:
            piece = local(grad._values() if grad.is_sparse else grad)
            grad = piece.detach() if piece.requires_grad else piece
        values.append(grad)
    return values


# -- one device --------------------------------------------------------------------------------------------------------


class DeviceGradients:
    """The gradients of one device, a row for each parameter. No call waits for the device.

    Args:
        device: its parameters.
        params: of all devices.
        masters: how masters are kept.

    Attributes:
        stats: what the last pass found, by row: flags and sums of squares; ``found_inf`` and ``norm`` over all rows.
        one: float32, 0-dim: 1.0 on the device.
        halves: rows whose master is in 16 bits: it lies on the weight's memory.
    """

    def __init__(self, device: DeviceParams, params: ParamTable, masters: Masters) -> None:
        self.device = device
        self.params = params
        self.pairs = device.pairs
        self.models = [pair.model for pair in self.pairs]
        self.masters = [pair.master for pair in self.pairs]
        self.stats = kernels.GradStats.allocate(len(device), device.device)
        self.one = torch.ones((), dtype=torch.float32, device=device.device)
        self._dtypes = [model.dtype for model in self.models]
        self._lie = read(device.models)
        self._true_dtypes = [master.dtype for master in self.masters]
        self.halves = [row for row, dtype in enumerate(self._true_dtypes) if dtype in HALF_DTYPES]
        self._wide = frozenset(row for row, dtype in enumerate(self._dtypes) if dtype is torch.float64)
        self._has_dtensors = params.has_dtensors
        self._spread = [getattr(model, "placements", None) for model in self.models]  # over ranks, of DTensors
        self._like = [masters.operand(pair) for pair in self.pairs]  # of which gradients have shape and strides
        self._memory: list[Tensor | None] = [None] * len(self.pairs)  # for true gradients
        self._rooms: tuple[Tensor, ...] | None = None  # the same, where there is some for each row
        self._folded: dict[int, FoldedGradient] = {}  # what stands in the model's .grad, by row

    # -- what kernels take -------------------------------------------------------------------------------------------

    def collect(self, grads: Sequence[Tensor | None], inv_scale: Tensor) -> tuple[Waiting, Sequence[Tensor | None]]:
        """The model's gradients, by row, as they are now; and the dense ones once more, as the call reads them.

        Args:
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
        """
        factors = Factors(inv_scale, self.one)
        pieces = self._pieces_of(grads) if self._has_dtensors else grads
        if pieces is not None and self._lie is not None:
            rows = pieces if isinstance(pieces, Rows) else Rows(tuple(pieces), read(tuple(pieces)))
            reading = rows.reading
            if reading is not None and reading.types in ([], [Tensor]) and reading.has_dtypes_of(self._lie):
                return Waiting(rows.tensors, factors, {}), rows
        self.params.verify()
        sparse: dict[int, Tensor] = {}
        with torch.no_grad():
            dense = [
                None if grad is None else self._as_kernels_take(row, grad, sparse) for row, grad in enumerate(grads)
            ]
        return Waiting(dense, factors, sparse), dense

    def _pieces_of(self, grads: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """This rank's pieces of gradients; None where one is not laid out over ranks as its parameter is."""
        found: list[Tensor | None] = []
        for grad, wanted in zip(grads, self._spread, strict=True):
            if grad is None or wanted is None:
                found.append(grad)
            elif getattr(grad, "placements", None) == wanted:
                found.append(grad._local_tensor)  # type: ignore[attr-defined]
            else:
                return None
        return found

    def _as_kernels_take(self, row: int, grad: Tensor, sparse: dict[int, Tensor]) -> Tensor | None:
        """A dense gradient in its parameter's dtype or FP32; a sparse one goes into ``sparse``.

        Raises:
            TypeError: it is neither dense nor sparse COO.
        """
        pair, dtype = self.pairs[row], self._dtypes[row]
        grad = aligned(grad.detach() if grad.requires_grad else grad, pair.model)
        wide = torch.float32 if dtype in HALF_DTYPES else dtype
        if grad.layout is not torch.strided:
            sparse[row] = coalesced(grad, wide, pair.name)
            return None
        piece = local(grad)
        return piece if piece.dtype in (dtype, wide) else piece.to(wide)

    def room(self, row: int) -> Tensor:
        """The memory for the true gradient of a master, in its dtype, laid out as that is."""
        room = self._memory[row]
        if room is None:
            made = torch.empty_like(local(self._like[row]), dtype=self._true_dtypes[row], requires_grad=False)
            room = self._memory[row] = as_piece_of(made, self.models[row])
        return room

    def memory(self) -> list[Tensor | None]:
        """What is kept of gradients beside ``.grad``."""
        return self._memory

    def wide_dtype(self, row: int) -> torch.dtype:
        """In which a row's gradient is computed: that of its master, at least FP32."""
        dtype = self._true_dtypes[row]
        return torch.float32 if dtype in HALF_DTYPES else dtype

    # -- check -------------------------------------------------------------------------------------------------------

    def check(self, grads: Sequence[Tensor | None], inv_scale: Tensor) -> Waiting:
        """Flags and sums of squares of ``grads * inv_scale``, which are not written. Sparse ones are left out.

        Args:
            grads: the model's, by row.
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
        """
        waiting, scaled = self.collect(grads, inv_scale)
        self.stats.reset()
        if self._wide:
            doubles = [grad if row in self._wide else None for row, grad in enumerate(scaled)]
            if any([grad is not None for grad in doubles]):  # noqa: C419
                kernels.multi_tensor_unscale(doubles, doubles, inv_scale, self.stats, write=False)
            scaled = [None if row in self._wide else grad for row, grad in enumerate(scaled)]
        kernels.multi_tensor_check(scaled, inv_scale, self.stats, cache=self.device.caches["check"])
        return waiting

    def drop(self, row: int) -> None:
        """A parameter's gradient was set to None: it is left alone, and what was found in it does not count."""
        set_raw_grad(self.masters[row], None)
        self.stats.nonfinite[row] = 0
        self.stats.sumsq[row] = 0.0
        reference.finish(self.stats)

    # -- unscale -----------------------------------------------------------------------------------------------------

    def check_and_unscale(self, grads: Sequence[Tensor | None], inv_scale: Tensor) -> None:
        """:meth:`check` and :meth:`unscale` in one pass."""
        waiting, _ = self.collect(grads, inv_scale)
        self.stats.reset()
        self._write(waiting, is_checked=False)

    def unscale(self, waiting: Waiting) -> None:
        """Write true gradients to ``.grad`` of masters, of those that were checked, with the factor of a clip.

        They have the bits that the step of a kernel would use.
        """
        self._write(waiting, is_checked=True)

    def _write(self, waiting: Waiting, is_checked: bool) -> None:
        if all_there(waiting.grads) and not (self.halves or waiting.sparse or self._has_dtensors):
            self._write_rooms(waiting, is_checked)
            return
        ins: list[Tensor | None] = list(waiting.grads)
        places = [None if grad is None else self.room(row) for row, grad in enumerate(ins)]  # what goes into .grad
        outs = [None if place is None else local(place) for place in places]
        for row, grad in waiting.sparse.items():
            ins[row] = grad._values()
            outs[row] = torch.empty_like(grad._values(), dtype=self._true_dtypes[row])
        halves = {row: out for row in self.halves if (out := outs[row]) is not None and out.dtype in HALF_DTYPES}
        for row in halves:
            outs[row] = torch.empty_like(halves[row], dtype=torch.float32)
        with torch.no_grad():
            self._run(ins, outs, waiting.factors, is_checked)
            if halves:
                wide = [outs[row] if row in halves else None for row in range(len(outs))]
                round_to(wide, [halves.get(row) for row in range(len(outs))], self.stats)
        for row, grad in waiting.sparse.items():
            made = halves.get(row, outs[row])
            if made is not None:
                places[row] = sparse_like(grad, made)
        for master, place in zip(self.masters, places, strict=True):
            set_raw_grad(master, place)

    def _write_rooms(self, waiting: Waiting, is_checked: bool) -> None:
        """:meth:`_write` where every row has a dense gradient, and there are no DTensors."""
        rooms = self._rooms
        if rooms is None:
            rooms = self._rooms = tuple(map(self.room, range(len(self.pairs))))
        with torch.no_grad():
            self._run(list(waiting.grads), rooms, waiting.factors, is_checked)  # a tuple would be kept
        set_grads(self.masters, rooms)

    def _run(
        self, ins: Sequence[Tensor | None], outs: Sequence[Tensor | None], factors: Factors, is_checked: bool
    ) -> None:
        cache = self.device.caches["unscale"]
        if is_checked:
            kernels.multi_tensor_unscale_clipped(ins, outs, *factors, cache=cache)
        else:
            kernels.multi_tensor_unscale(ins, outs, factors.inv_scale, self.stats, cache=cache)

    # -- true gradients ----------------------------------------------------------------------------------------------

    def true_ones(self) -> tuple[list[Tensor | None], bool]:
        """(by row what masters hold, dense, as kernels take it; whether one is sparse, of which it is the values)."""
        grads = raw_grads(self.masters)
        has_sparse = False
        if not self._has_dtensors and set(map(type, grads)) == {Tensor} and set(map(_LAYOUT, grads)) == {torch.strided}:
            return grads, False
        for row, grad in enumerate(grads):
            if grad is not None and grad.is_sparse:
                has_sparse = True
                if not grad.is_coalesced():
                    grads[row] = grad.coalesce()
                    set_raw_grad(self.masters[row], grads[row])
        return _dense(grads), has_sparse

    def recheck(self) -> None:
        """Flags and sums of squares of the true gradients as they are now."""
        self.stats.reset()
        with torch.no_grad():
            judge(self.true_ones()[0], self.stats, self.one, self.device.caches["judge"])

    def multiply_true(self, inv_scale: Tensor) -> None:
        """Multiply true gradients by ``inv_scale`` (float32, 0-dim), with flags and sums of squares of the products."""
        values, _ = self.true_ones()
        self.stats.reset()
        halves = [value if value is not None and value.dtype in HALF_DTYPES else None for value in values]
        wide = [value if half is None else None for value, half in zip(values, halves, strict=True)]
        with torch.no_grad():
            kernels.multi_tensor_unscale(wide, wide, inv_scale, self.stats)
            kernels.multi_tensor_scale(halves, inv_scale)
            kernels.multi_tensor_check(halves, self.one, self.stats)

    def to_step(self, waiting: Waiting | None) -> GradsToStep:
        """See :class:`GradsToStep`."""
        if waiting is not None:
            return GradsToStep(waiting.grads, waiting.factors, True, False)
        values, has_sparse = self.true_ones()
        return GradsToStep(values, Factors(self.one, self.one), False, has_sparse)

    # -- norm and clip -----------------------------------------------------------------------------------------------

    def norm(self) -> Tensor:
        """The 2-norm over the true gradients, read again: float64, 0-dim."""
        values, _ = self.true_ones()
        if all([value is None for value in values]):  # noqa: C419
            return torch.zeros_like(self.stats.norm)
        return kernels.multi_tensor_l2norm(values)[0]

    def largest_norm(self) -> Tensor:
        """float32, 0-dim: the largest of the rows' norms that the last pass has found. No element is larger."""
        sums = self.stats.sumsq
        return sums.amax().sqrt().float() if len(sums) else torch.zeros_like(self.one)

    def measured_power_sum(self, counted: Callable[[Tensor], bool]) -> Tensor:
        """float64, 0-dim: the sum of squares that the last pass has found, of parameters that are ``counted``."""
        mine = torch.tensor([counted(model) for model in self.models], dtype=torch.bool, device=self.one.device)
        return self.stats.sumsq.where(mine, 0.0).sum()  # not times the mask: inf * 0 is nan

    def power_sum(self, norm_type: float, counted: Callable[[Tensor], bool]) -> Tensor:
        """float64, 0-dim: the sum of |g|**p over true gradients (p = inf: the largest |g|)."""
        values = [
            value
            for value, model in zip(self.true_ones()[0], self.models, strict=True)
            if value is not None and value.numel() and counted(model)
        ]
        if not values:
            return torch.zeros((), dtype=torch.float64, device=self.one.device)
        if norm_type == 2.0:
            return kernels.multi_tensor_l2norm(values)[0].square()
        parts = torch.stack([vector_norm(value, norm_type) for value in values])
        return parts.amax() if norm_type == float("inf") else parts.pow(norm_type).sum()

    def chosen(self, of: set[int] | None) -> list[Tensor | None]:
        """The true gradients that belong to the model's parameters with these ids; None elsewhere."""
        values, _ = self.true_ones()
        if of is None:
            return values
        return [value if id(model) in of else None for model, value in zip(self.models, values, strict=True)]

    def clip_true(self, factor: Tensor, of: set[int] | None) -> None:
        """Multiply true gradients by ``factor`` (float32, 0-dim). On the CPU a factor of 1 touches no memory."""
        with torch.no_grad():
            kernels.multi_tensor_scale(self.chosen(of), factor, cache=self.device.caches["clip"])

    def mark_folded(self) -> None:
        """Gradients were folded into the sums that masters hold: what stands in their place refuses to be used."""
        for row, sum_ in enumerate(raw_grads(self.masters)):
            model = self.pairs[row].model
            if sum_ is not None and takes_place(model):
                if row not in self._folded:
                    self._folded[row] = FoldedGradient(model, self.pairs[row].name)
                set_raw_grad(model, self._folded[row])

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self, frees: bool) -> None:
        """A step is over, or was given up: what was found is forgotten, what is in ``.grad`` stays.

        Args:
            frees: give the memory of true gradients back.
        """
        if frees:
            self._memory, self._rooms = [None] * len(self._memory), None
            self.device.caches["unscale"].forget()  # which holds the list of rooms
        self._folded.clear()  # they refer to the parameters, which torch could not swap
        self.stats.reset()


# -- all devices -------------------------------------------------------------------------------------------------------


class Gradients:
    """The gradients of all parameters, device by device.

    Attributes:
        each: of each device.
    """

    def __init__(self, params: ParamTable, masters: Masters) -> None:
        self.params = params
        self.masters = masters
        self.each: list[DeviceGradients] = []
        self.follow_params()

    def follow_params(self, keeps: bool = False) -> None:
        """Parameters or masters came or went. What masters hold stays.

        Args:
            keeps: all parameters are where they were, and some got their master: what was found stays too.
        """
        before = self.each
        self.each = [DeviceGradients(device, self.params, self.masters) for device in self.params.devices]
        if keeps and len(before) == len(self.each):
            for each, earlier in zip(self.each, before, strict=True):
                each.stats = earlier.stats
        self._place = {id(each.device): place for place, each in enumerate(self.each)}

    @property
    def stats(self) -> list[kernels.GradStats]:
        """By device: where the passes write."""
        return [each.stats for each in self.each]

    def tensors(self) -> list[Tensor]:
        """Every gradient that is there, the masters' too, and memory that is kept for them."""
        found = [*raw_grads(self.params.models), *raw_grads(self.params.masters), *raw_grads(self.params.elsewhere)]
        for each in self.each:
            found += each.memory()
        return [tensor for tensor in found if tensor is not None and not is_folded(tensor)]

    def by_device(self, grads: Sequence[Tensor | None]) -> Iterator[tuple[DeviceGradients, Sequence[Tensor | None]]]:
        """Each device with its rows of ``grads``, which are of all parameters."""
        for each in self.each:
            whole = len(self.each) == 1
            yield each, grads if whole else list(map(grads.__getitem__, each.device.positions))

    # -- the passes --------------------------------------------------------------------------------------------------

    def check(self, grads: Sequence[Tensor | None], inv_scale: Tensor) -> list[Waiting] | None:
        """Flags and norm of the model's gradients times ``inv_scale``.

        Args:
            grads: the model's, of all parameters, as they were just read.
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.

        Returns:
            By device, what waits. None where there are sparse ones: they can't wait, and true ones were made of all.

        Raises:
            RuntimeError: a parameter's dtype, shape or device was changed.
        """
        with NamingChanges(self.params):
            waiting = [each.check(mine, inv_scale.to(each.one.device)) for each, mine in self.by_device(grads)]
        if any([one.sparse for one in waiting]):  # noqa: C419
            self.check_and_unscale(grads, inv_scale)
            return None
        return waiting

    def check_and_unscale(self, grads: Sequence[Tensor | None], inv_scale: Tensor) -> None:
        """:meth:`check`, and write true gradients to the masters, in one pass."""
        with torch.no_grad(), NamingChanges(self.params):
            for each, mine in self.by_device(grads):
                each.check_and_unscale(mine, inv_scale.to(each.one.device))

    def unscale(self, waiting: Sequence[Waiting]) -> None:
        """Write true gradients to the masters, of those that wait, with the factor of a clip."""
        for each, mine in zip(self.each, waiting, strict=True):
            each.unscale(mine)

    def recheck(self) -> None:
        """Flags and norm of true gradients as they are now."""
        for each in self.each:
            each.recheck()

    def multiply_true(self, inv_scale: Tensor) -> None:
        """Multiply true gradients by ``inv_scale`` (float32, 0-dim), checked on the way. No host sync."""
        for each in self.each:
            each.multiply_true(inv_scale.to(each.one.device))

    def drop(self, positions: Sequence[int], waiting: Sequence[Waiting] | None) -> list[Waiting] | None:
        """Gradients that were set to None are not part of the step. Returns what waits without them."""
        left = None if waiting is None else list(waiting)
        for position in positions:
            place = next(n for n, each in enumerate(self.each) if position in each.device.positions)
            row = self.params.all[position].row
            self.each[place].drop(row)
            if left is not None:
                left[place] = left[place].without(row)
        return left

    # -- what was found ----------------------------------------------------------------------------------------------

    def found_inf(self, device: torch.device) -> Tensor:
        """float32, 0-dim: 1.0 where the last pass met a non-finite gradient, else 0.0. Overwritten by the next."""
        found = [each.stats.found_inf.to(device) for each in self.each]
        if len(found) == 1:
            return found[0]
        return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float32, device=device)

    def flags(self) -> list[Tensor]:
        """By device: int32 bits ``kernels.INF | kernels.NAN`` of each row, which the next pass overwrites. No sync."""
        return [each.stats.nonfinite for each in self.each]

    def to_step(self, device: DeviceParams, waiting: Sequence[Waiting] | None) -> GradsToStep:
        """A device's gradients as a step takes them: those that wait; else the true ones."""
        place = self._place[id(device)]
        return self.each[place].to_step(None if waiting is None else waiting[place])

    # -- norm and clip -----------------------------------------------------------------------------------------------

    def norm(self, norm_type: float, device: torch.device, is_measured: bool, of: set[int] | None = None) -> Tensor:
        """float64, 0-dim, on ``device``: the norm over all gradients. No host sync.

        The 2-norm was summed by the pass that checked; it is read again only after a clip.

        Args:
            is_measured: whether the last pass has summed the squares of the gradients as they are.
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        if of is None and norm_type == 2.0 and is_measured:
            return total_norm([each.stats.norm for each in self.each], norm_type, device)
        if of is None and norm_type == 2.0:
            return total_norm([each.norm() for each in self.each], norm_type, device)
        power = self.power_sum(norm_type, device, is_measured, lambda param: of is None or id(param) in of)
        return power if norm_type == float("inf") else power.pow(1.0 / norm_type)

    def largest_norm(self, device: torch.device) -> Tensor:
        """float32, 0-dim, on ``device``: the largest of the norms of single tensors at the last pass. No host sync."""
        norms = [each.largest_norm().to(device) for each in self.each]
        return torch.stack(norms).amax() if norms else torch.zeros((), dtype=torch.float32, device=device)

    def power_sum(
        self, norm_type: float, device: torch.device, is_measured: bool, counted: Callable[[Tensor], bool]
    ) -> Tensor:
        """float64, 0-dim: the sum of |g|**p over the elements that this rank counts (p = inf: the largest |g|)."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        with torch.no_grad():
            for each in self.each:
                if norm_type == 2.0 and is_measured:
                    part = each.measured_power_sum(counted).to(total)
                else:
                    part = each.power_sum(norm_type, counted).to(total)
                total = torch.maximum(total, part) if norm_type == float("inf") else total + part
        return total

    def clip_true(self, factor: Tensor, of: set[int] | None = None) -> None:
        """Multiply true gradients by ``factor`` (float32, 0-dim). No host sync.

        Args:
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        for each in self.each:
            each.clip_true(factor.to(each.one.device), of)

    def clip_values(self, largest: float, found_inf: Tensor, of: set[int] | None = None) -> None:
        """Bring every element of true gradients to at most ``largest`` in size. No host sync.

        Args:
            largest: not negative.
            found_inf: float32, 0-dim. Where it is 1.0 gradients stay, or an inf would become a number.
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        bound = torch.full_like(found_inf, largest, dtype=torch.float64).masked_fill_(found_inf > 0, float("inf"))
        with torch.no_grad():
            for value in [value for each in self.each for value in each.chosen(of)]:
                if value is not None:
                    mine = bound.to(value.device, value.dtype)
                    value.clamp_(-mine, mine)

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self, frees: bool = False) -> None:
        """A step is over, or was given up: what was found is forgotten; what is in ``.grad`` stays.

        Args:
            frees: no true gradients were made: give back memory that is kept from an earlier step, in which they were.
        """
        for each in self.each:
            each.release(frees or not self.masters.keeps_gradients)

    def forget_true(self) -> None:
        """Masters have no gradients."""
        drop_gradients([pair.master for pair in self.params.all if pair.has_master])

    def clear(self, set_to_none: bool) -> None:
        """Clear the model's gradients, as ``torch.optim.Optimizer.zero_grad`` does; masters have none after it."""
        freed = self.params.masters if set_to_none else [pair.master for pair in self.params.all if pair.has_master]
        tensors = [*self.params.models, *self.params.elsewhere]
        set_grads([*freed, *tensors] if set_to_none else freed, None)
        for tensor in () if set_to_none else tensors:
            grad = raw_grad(tensor)
            if is_folded(grad):
                set_raw_grad(tensor, None)
            elif grad is not None:
                if grad.requires_grad:
                    grad = grad.detach()
                    set_raw_grad(tensor, grad)
                grad.zero_()


class NamingChanges:
    """Where kernels refuse tensors within, a parameter that was changed is named instead."""

    def __init__(self, params: ParamTable) -> None:
        self._params = params

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (TypeError, ValueError, RuntimeError)):
            self._params.verify()
