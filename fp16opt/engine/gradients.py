"""Gradients: from what autograd left in the model to what the optimizer steps.

A gradient waits, scaled, where autograd left it. The check reads it for flags and norm. Then it is stepped as it is,
by a kernel that multiplies on the way; or a true FP32 one is made of it, which lies in ``.grad`` of its master. A clip
is a factor until then. FP32 sums lie in ``.grad`` of masters from the first backward on.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels import reference
from ..kernels.calls import StableEntries
from ..kernels.lists import same_walk
from ..kernels.reference_steps import Factors
from .dtensors import aligned, as_piece_of, local, raw_grad, raw_grads, set_raw_grad
from .masters import Masters
from .params import HALF_DTYPES, DeviceParams, ParamTable

_DTYPE, _LAYOUT = operator.attrgetter("dtype"), operator.attrgetter("layout")


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


# -- one device --------------------------------------------------------------------------------------------------------


class DeviceGradients:
    """The gradients of one device, a row for each parameter. No call waits for the device.

    Args:
        device: its parameters.
        params: of all devices.
        masters: how masters are kept.

    Attributes:
        stats: what the last pass found, by row: flags and sums of squares; ``found_inf`` and ``norm`` over all rows.
        scaled: by row, gradients that were checked and wait where they are, as kernels take them.
        factors: what these are to be multiplied by.
        has_sparse: whether the last check met a sparse one, which can't wait.
        summed: rows of 16-bit parameters whose master gradient is a sum that the next one is added to.
    """

    def __init__(self, device: DeviceParams, params: ParamTable, masters: Masters) -> None:
        self.device = device
        self.params = params
        self.pairs = device.pairs
        self.models = [pair.model for pair in self.pairs]
        self.masters = [pair.master for pair in self.pairs]
        self.stats = kernels.GradStats.allocate(len(device), device.device)
        self.one = torch.ones((), dtype=torch.float32, device=device.device)
        self.factors = Factors(self.one, self.one)
        self.scaled: Sequence[Tensor | None] = []
        self.has_sparse = False
        self.summed: set[int] = set()
        self._sum_flags: Tensor | None = None
        self._set_aside: dict[int, Tensor] | None = None  # true gradients of own rows while a backward adds others
        self._sparse: dict[int, Tensor] = {}
        self._has_dtensors = params.has_dtensors
        self._spread = [getattr(model, "placements", None) for model in self.models]  # over ranks, of DTensors
        self._own = frozenset(device.own)
        self._dtypes = [model.dtype for model in self.models]
        self._half_own = [row for row in device.own if self._dtypes[row] in HALF_DTYPES]
        self._like = [masters.operand(pair) for pair in self.pairs]  # of which gradients have shape and strides
        self._memory: list[Tensor | None] = [None] * len(self.pairs)  # for FP32 gradients
        self._rooms: tuple[Tensor, ...] | None = None  # the same, where there is some for each row

    # -- what kernels take -------------------------------------------------------------------------------------------

    def _collect(self, grads: list[Tensor | None], inv_scale: Tensor) -> None:
        """Take the model's gradients, by row, as they are now."""
        self.factors = Factors(inv_scale, self.one)
        self._sparse, self.has_sparse = {}, False
        laid_out: list[Tensor | None] | None = self._pieces_of(grads) if self._has_dtensors else grads
        there, dtypes = laid_out or [], self._dtypes
        if not all(map(operator.is_not, there, itertools.repeat(None))):
            there = [grad for grad in there if grad is not None]
            dtypes = [dtype for grad, dtype in zip(grads, dtypes, strict=True) if grad is not None]
        plain = (
            laid_out is not None
            and set(map(type, there)) <= {Tensor}
            and list(map(_DTYPE, there)) == dtypes
            and set(map(_LAYOUT, there)) <= {torch.strided}
        )
        if plain and laid_out is not None:
            self.scaled = StableEntries(laid_out)
            return
        self.params.verify()
        rows = enumerate(grads)
        with torch.no_grad():
            self.scaled = [None if grad is None else self._as_kernels_take(row, grad) for row, grad in rows]
        self.has_sparse = bool(self._sparse)

    def _pieces_of(self, grads: list[Tensor | None]) -> list[Tensor | None] | None:
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

    def _as_kernels_take(self, row: int, grad: Tensor) -> Tensor | None:
        """A dense gradient in its parameter's dtype or FP32; a sparse one is put where :meth:`unscale` finds it.

        Raises:
            TypeError: it is neither dense nor sparse COO.
        """
        pair, dtype = self.pairs[row], self._dtypes[row]
        grad = aligned(grad.detach() if grad.requires_grad else grad, pair.model)
        if grad.layout is not torch.strided:
            self._sparse[row] = coalesced(grad, torch.float32 if dtype in HALF_DTYPES else dtype, pair.name)
            return None
        piece = local(grad)
        fits = piece.dtype == dtype or (piece.dtype is torch.float32 and dtype in HALF_DTYPES)
        return piece if fits else piece.to(torch.float32 if dtype in HALF_DTYPES else dtype)

    def _room(self, row: int) -> Tensor:
        """The memory for the FP32 gradient of a master, laid out as that is."""
        room = self._memory[row]
        if room is None:
            made = torch.empty_like(local(self._like[row]), dtype=torch.float32, requires_grad=False)
            room = self._memory[row] = as_piece_of(made, self.models[row])
        return room

    def memory(self) -> list[Tensor | None]:
        """What is kept of gradients beside ``.grad``."""
        return [*self._memory, *(self._set_aside or {}).values()]

    # -- check -------------------------------------------------------------------------------------------------------

    def check(self, grads: list[Tensor | None], inv_scale: Tensor) -> None:
        """Flags and sums of squares of ``grads * inv_scale``, which are not written.

        Args:
            grads: the model's, by row.
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
        """
        self._collect(grads, inv_scale)
        self.stats.reset()
        if self.has_sparse:
            return  # it is unscaled at once
        wide = [row for row in self.device.own if self._dtypes[row] is torch.float64]
        scaled: Sequence[Tensor | None] = self.scaled
        if wide:
            doubles = [grad if row in wide else None for row, grad in enumerate(scaled)]
            if any([grad is not None for grad in doubles]):  # noqa: C419
                kernels.multi_tensor_unscale(doubles, doubles, inv_scale, self.stats, write=False)
            scaled = [None if row in wide else grad for row, grad in enumerate(scaled)]
        kernels.multi_tensor_check(scaled, inv_scale, self.stats, cache=self.device.caches["check"])

    def drop(self, row: int) -> None:
        """A parameter's gradient was set to None: it is left alone, and what was found in it does not count."""
        if self.scaled:
            self.scaled = [None if place == row else grad for place, grad in enumerate(self.scaled)]
        if row not in self._own:
            set_raw_grad(self.masters[row], None)
        self.summed.discard(row)
        self.stats.nonfinite[row] = 0
        self.stats.sumsq[row] = 0.0
        reference.finish(self.stats)

    # -- unscale -----------------------------------------------------------------------------------------------------

    def check_and_unscale(self, grads: list[Tensor | None], inv_scale: Tensor, unit: bool) -> None:
        """:meth:`check` and :meth:`unscale` in one pass.

        Args:
            unit: whether gradients that lie where they belong are known to be true already.
        """
        self._collect(grads, inv_scale)
        self.stats.reset()
        self._write(is_checked=False, unit=unit)

    def unscale(self, unit: bool) -> None:
        """Write true FP32 gradients to ``.grad`` of masters, of those that were checked, with the factor of a clip.

        They have the bits that the step of a kernel would use.
        """
        self._write(is_checked=True, unit=unit and self.factors.coefficient is self.one)

    def _write(self, is_checked: bool, unit: bool) -> None:
        are_there = all(map(operator.is_not, self.scaled, itertools.repeat(None)))
        if are_there and not (self._own or self._sparse or self._has_dtensors):
            self._write_rooms(is_checked)
            return
        ins: list[Tensor | None] = list(self.scaled)
        places: list[Tensor | None] = [None] * len(ins)  # what goes into .grad
        for row, grad in enumerate(ins):
            if grad is not None:
                places[row] = self._place_of(row)
        outs = [None if place is None else local(place) for place in places]
        for row, grad in self._sparse.items():
            ins[row] = grad._values()
            outs[row] = torch.empty_like(grad._values(), dtype=self._sparse_dtype(row))
        halves = {row: out for row in self._half_own if (out := outs[row]) is not None and out.dtype in HALF_DTYPES}
        for row in halves:
            outs[row] = torch.empty_like(ins[row], dtype=torch.float32)  # type: ignore[arg-type]
        with torch.no_grad():
            self._run(ins, outs, is_checked, unit)
            if halves:
                wide = [outs[row] if row in halves else None for row in range(len(outs))]
                round_to(wide, [halves.get(row) for row in range(len(outs))], self.stats)
        for row, grad in self._sparse.items():
            places[row] = _sparse_like(grad, _there(halves.get(row, outs[row])))
        for row, (master, place) in enumerate(zip(self.masters, places, strict=True)):
            if not (row in self._own and (place is None or place is raw_grad(master))):
                set_raw_grad(master, place)
        self.scaled, self._sparse = [], {}

    def _write_rooms(self, is_checked: bool) -> None:
        """:meth:`_write` where every row has a dense gradient and a master apart, and there are no DTensors."""
        rooms = self._rooms
        if rooms is None:
            rooms = self._rooms = tuple(map(self._room, range(len(self.pairs))))
        with torch.no_grad():
            self._run(self.scaled, rooms, is_checked, unit=False)
        for master, room in zip(self.masters, rooms, strict=True):
            set_raw_grad(master, room)
        self.scaled = []

    def _sparse_dtype(self, row: int) -> torch.dtype:
        dtype = self._dtypes[row]
        return torch.float32 if dtype in HALF_DTYPES and row not in self._own else dtype

    def _place_of(self, row: int) -> Tensor:
        """The tensor that is to hold a row's true gradient: of parameters that are their own masters, in place."""
        if row not in self._own:
            return self._room(row)
        held: Tensor = raw_grad(self.models[row])
        return held if self._fits(row, held) else torch.empty_like(self.models[row], requires_grad=False)

    def _fits(self, row: int, held: Tensor) -> bool:
        """Whether a gradient of a parameter that is its own master can be made true where it lies."""
        model = self.models[row]
        is_of_dtype = held.dtype == model.dtype or held.dtype is torch.float32
        # torch's fused steps are silently wrong where a gradient's strides are not its parameter's.
        fits = is_of_dtype and held.layout is torch.strided and not held.requires_grad and aligned(held, model) is held
        return fits and same_walk(local(held), local(model))

    def _run(self, ins: Sequence[Tensor | None], outs: Sequence[Tensor | None], is_checked: bool, unit: bool) -> None:
        if unit:  # what is there already is read at most
            there = [grad if grad is out else None for grad, out in zip(ins, outs, strict=True)]
            if not is_checked:
                judge(there, self.stats, self.one, self.device.caches["judge"])
            ins = [None if same is not None else grad for grad, same in zip(ins, there, strict=True)]
            outs = [None if same is not None else out for out, same in zip(outs, there, strict=True)]
            if all([grad is None for grad in ins]):  # noqa: C419
                return
        cache = self.device.caches["unscale"]
        if is_checked:
            kernels.multi_tensor_unscale_clipped(ins, outs, *self.factors, cache=cache)
        else:
            kernels.multi_tensor_unscale(ins, outs, self.factors.inv_scale, self.stats, cache=cache)

    def scale_back(self, scale: Tensor) -> None:
        """Multiply gradients that were unscaled in place by ``scale`` (float32, 0-dim): others are to be added."""
        own = [self.models[row] for row in self.device.own]
        with torch.no_grad():
            values = [grad for grad in _dense(raw_grads(own)) if grad is not None]
            kernels.multi_tensor_scale(values, scale)

    def scale_again(self, inv_scale: Tensor) -> None:
        """Multiply true gradients by ``inv_scale`` (float32, 0-dim): they were made at a scale that is known by now."""
        with torch.no_grad():
            values = self.true_ones()
            self.stats.reset()
            halves = [value if value is not None and value.dtype in HALF_DTYPES else None for value in values]
            wide = [value if half is None else None for value, half in zip(values, halves, strict=True)]
            kernels.multi_tensor_unscale(wide, wide, inv_scale, self.stats)
            kernels.multi_tensor_scale(halves, inv_scale)
            kernels.multi_tensor_check(halves, self.one, self.stats)

    # -- true gradients ----------------------------------------------------------------------------------------------

    def true_ones(self) -> list[Tensor | None]:
        """By row: what masters hold, dense, as kernels take it; of sparse ones the values, coalesced."""
        grads = raw_grads(self.masters)
        self.has_sparse = False
        if not self._has_dtensors and set(map(type, grads)) == {Tensor} and set(map(_LAYOUT, grads)) == {torch.strided}:
            return grads
        for row, grad in enumerate(grads):
            if grad is not None and grad.is_sparse:
                self.has_sparse = True
                if not grad.is_coalesced():
                    grads[row] = grad.coalesce()
                    set_raw_grad(self.masters[row], grads[row])
        return _dense(grads)

    def recheck(self) -> None:
        """Flags and sums of squares of the true gradients as they are now."""
        self.stats.reset()
        with torch.no_grad():
            judge(self.true_ones(), self.stats, self.one, self.device.caches["judge"])
        self._sum_flags = None

    def to_step(self, scaled: bool) -> GradsToStep:
        """See :class:`GradsToStep`."""
        if scaled:
            return GradsToStep(self.scaled, self.factors, True, False)
        return GradsToStep(self.true_ones(), Factors(self.one, self.one), False, self.has_sparse)

    # -- norm and clip -----------------------------------------------------------------------------------------------

    def norm(self) -> Tensor:
        """The 2-norm over the true gradients, read again: float64, 0-dim."""
        values = self.true_ones()
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
            for value, model in zip(self.true_ones(), self.models, strict=True)
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
        values = self.true_ones()
        if of is None:
            return values
        return [value if id(model) in of else None for model, value in zip(self.models, values, strict=True)]

    def clip_scaled(self, factor: Tensor) -> None:
        """Multiply gradients that wait by ``factor`` (float32, 0-dim) when they are used."""
        self.factors = Factors(self.factors.inv_scale, factor)

    def clip_true(self, factor: Tensor, of: set[int] | None) -> None:
        """Multiply true gradients by ``factor`` (float32, 0-dim). On the CPU a factor of 1 touches no memory."""
        with torch.no_grad():
            kernels.multi_tensor_scale(self.chosen(of), factor, cache=self.device.caches["clip"])

    # -- FP32 sums ---------------------------------------------------------------------------------------------------

    def start_summing(self, are_true: bool) -> None:
        """From now on :meth:`fold` adds to masters' gradients. Those that ``are_true`` there are sums already."""
        self.summed = set()
        self._sum_flags = None
        if are_true:
            self.summed = {row for row in self.device.copied if raw_grad(self.masters[row]) is not None}
            self._sum_flags = self.stats.nonfinite.clone()
        else:
            self.stats.reset()

    def set_aside(self, keep: bool) -> None:
        """Take true gradients from parameters that are their own masters: a backward is about to add scaled ones.

        Args:
            keep: leave zeros, not None: DDP still reduces them.
        """
        if self._set_aside is not None:
            return
        self._set_aside = {}
        for row in self.device.own:
            grad = raw_grad(self.models[row])
            if grad is not None:
                # DDP writes the next gradient into the same memory, where gradients are views of its buckets.
                self._set_aside[row] = grad.clone() if keep or grad._is_view() else grad
                drop_gradients([self.models[row]], keep)

    def fold(self, inv_scale: Tensor, keep: bool) -> None:
        """Add the model's gradients times ``inv_scale`` to the sums, and free 16-bit ones.

        ``stats.found_inf`` says of those alone whether one was not finite.

        Args:
            inv_scale: float32, 0-dim.
            keep: leave zeros where gradients would be freed.
        """
        self.stats.nonfinite.zero_()  # of earlier ones, which are in the flags of sums
        self.stats.found_inf.zero_()
        self.stats.touched = True
        self._collect(raw_grads(self.models), inv_scale)
        aside, self._set_aside = self._set_aside or {}, None
        before = [self._sum_of(row, aside) for row in range(len(self.pairs))]
        ins, outs, places = self._plan_fold(before)
        adds = [place is not None and place is before[row] for row, place in enumerate(places)]
        with torch.no_grad():
            if any([grad is not None for grad in ins]):  # noqa: C419
                kernels.multi_tensor_unscale(ins, outs, inv_scale, self.stats, accumulate=adds if any(adds) else False)
            self._store_sums(ins, outs, places, before)
        drop_gradients([self.models[row] for row in self.device.copied], keep)
        found = self.stats.nonfinite
        self._sum_flags = found.clone() if self._sum_flags is None else self._sum_flags | found
        self.scaled, self._sparse = [], {}

    def _sum_of(self, row: int, aside: dict[int, Tensor]) -> Tensor | None:
        if row in self._own:
            return aside.get(row)
        return raw_grad(self.masters[row]) if row in self.summed else None

    def _plan_fold(
        self, before: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """(what is read; what is written, as kernels take it; what goes into ``.grad``), by row."""
        ins: list[Tensor | None] = list(self.scaled)
        outs: list[Tensor | None] = [None] * len(ins)
        places: list[Tensor | None] = [None] * len(ins)
        for row, grad in enumerate(self.scaled):
            if grad is None:
                continue
            sum_ = before[row]
            if row in self._half_own:
                outs[row] = torch.empty_like(grad, dtype=torch.float32)
            elif sum_ is not None and sum_.layout is torch.strided:
                places[row], outs[row] = sum_, local(sum_)
            else:
                places[row] = self._place_of(row)
                outs[row] = local(places[row])  # type: ignore[arg-type]
        for row, grad in self._sparse.items():
            ins[row] = grad._values()
            outs[row] = torch.empty_like(grad._values(), dtype=self._sparse_dtype(row))
        return ins, outs, places

    def _store_sums(
        self,
        ins: list[Tensor | None],
        outs: list[Tensor | None],
        places: list[Tensor | None],
        before: list[Tensor | None],
    ) -> None:
        measured_anew = False
        for row, master in enumerate(self.masters):
            made, sum_ = places[row], before[row]
            if row in self._sparse:
                made = _sparse_like(self._sparse[row], _there(outs[row]))
            elif row in self._half_own and ins[row] is not None:
                wide: list[Tensor | None] = [outs[row] if k == row else None for k in range(len(outs))]
                made = torch.empty_like(ins[row])  # type: ignore[arg-type]
                round_to(wide, [made if k == row else None for k in range(len(outs))], self.stats)
            if made is None:
                made = sum_
            elif made is sum_ and row in self._own and self._fits(row, held := raw_grad(master)):
                made = held.copy_(sum_)  # torch's clip_grad_norm_ may have listed it already
            elif sum_ is not None and made is not sum_:
                made, measured_anew = sum_ + made, True
            if made is not None:
                set_raw_grad(master, made)
                if row not in self._own:
                    self.summed.add(row)
        if measured_anew:
            self._measure_sums()

    def _measure_sums(self) -> None:
        """Sums of squares of the sums. Flags of what was added last stay."""
        flags = self.stats.nonfinite.clone()
        judge(self.true_ones(), self.stats, self.one)
        self.stats.nonfinite.copy_(flags)
        reference.finish(self.stats)

    def sums(self) -> list[Tensor | None]:
        """By row: the FP32 sums so far, without what a backward has just left in parameters that are own masters.

        Raises:
            TypeError: a sum is sparse.
        """
        aside = self._set_aside
        values = [
            (raw_grad(self.models[row]) if aside is None else aside.get(row))
            if row in self._own
            else self._sum_of(row, {})
            for row in range(len(self.pairs))
        ]
        for pair, value in zip(self.pairs, values, strict=True):
            if value is not None and value.layout is not torch.strided:
                raise TypeError(
                    f"parameter {pair.name!r}: expected a dense gradient, got {value.layout}: sparse gradients made "
                    "under no_sync can't be averaged over ranks. Leave no_sync, or use sparse=False."
                )
        return values

    def put_sum(self, row: int, value: Tensor) -> Tensor:
        """Overwrite the sum of a row, or begin one; returns the tensor that holds it."""
        there = self.sums()[row]
        if there is None:
            own = row in self._own
            there = torch.empty_like(self.models[row], requires_grad=False) if own else self._room(row)
            if own and self._set_aside is not None:
                self._set_aside[row] = there
            else:
                set_raw_grad(self.masters[row], there)
        if row not in self._own:
            self.summed.add(row)
        return there.copy_(value)

    def averaged(self, stats: kernels.GradStats) -> None:
        """The sums are averages over ranks now, in which a pass has found ``stats``."""
        found = stats.nonfinite
        self._sum_flags = found.clone() if self._sum_flags is None else self._sum_flags | found
        self.stats.sumsq.copy_(stats.sumsq)
        reference.finish(self.stats)

    def flags(self) -> Tensor:
        """int32 bits ``kernels.INF | kernels.NAN`` of each row; of sums, of all that went into them."""
        return self.stats.nonfinite if self._sum_flags is None else self._sum_flags

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self, frees: bool) -> None:
        """A step is over, or was given up: what was found is forgotten, what is in ``.grad`` stays.

        Args:
            frees: give the memory of FP32 gradients back.
        """
        self.scaled, self._sparse, self.summed, self._sum_flags = [], {}, set(), None
        self._set_aside = None
        if frees:
            self._memory, self._rooms = [None] * len(self._memory), None
            self.device.caches["unscale"].forget()  # which holds the list of rooms
        self.stats.reset()

    def forget_true(self) -> None:
        """Masters have no gradients but those that are their model's."""
        drop_gradients([self.masters[row] for row in self.device.copied])


def drop_gradients(tensors: list[Tensor], keep: bool = False) -> None:
    """Free them, or leave zeros in their places."""
    for tensor, grad in zip(tensors, raw_grads(tensors), strict=True):
        if grad is not None:
            if keep:
                grad.zero_()
            else:
                set_raw_grad(tensor, None)


def _there(value: Tensor | None) -> Tensor:
    if value is None:
        raise RuntimeError("internal error: a sparse gradient was not made. Please report this.")
    return value


def _sparse_like(grad: Tensor, values: Tensor) -> Tensor:
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


# -- all devices -------------------------------------------------------------------------------------------------------


class Gradients:
    """The gradients of all parameters, device by device.

    Attributes:
        are_true: whether masters hold true FP32 gradients: then these are what is stepped.
        summing: whether the next ones are added to FP32 sums.
        is_measured: whether ``stats`` have the sums of squares of the gradients as they are.
        may_be_made: False where masters that are apart have no gradients of the engine's making, nor of the user's:
            there is nothing to look for at each of them.
    """

    def __init__(self, params: ParamTable, masters: Masters) -> None:
        self.params = params
        self.masters = masters
        self.are_true = self.summing = self.is_measured = False
        self.may_be_made = True
        self._unit = False  # whether the gradients that were checked are known to be true where they lie
        self._each: list[DeviceGradients] = []
        self.follow_params()

    def follow_params(self) -> None:
        """Parameters or masters came or went. What waits is found anew; what masters hold stays."""
        summing = self.summing
        self._each = [DeviceGradients(device, self.params, self.masters) for device in self.params.devices]
        self._of = {id(each.device): each for each in self._each}
        self.is_measured = False
        if self.are_true:
            for each in self._each:
                each.recheck()
                if summing:
                    each.start_summing(are_true=True)
            self.is_measured = True

    @property
    def stats(self) -> list[kernels.GradStats]:
        """By device: where the passes write."""
        return [each.stats for each in self._each]

    def tensors(self) -> list[Tensor]:
        """Every gradient that is there, the masters' too, and memory that is kept for them."""
        found = [*raw_grads(self.params.models), *raw_grads(self.params.masters), *raw_grads(self.params.elsewhere)]
        for each in self._each:
            found += each.memory()
        return [tensor for tensor in found if tensor is not None]

    def _by_device(self, grads: list[Tensor | None]) -> Iterator[tuple[DeviceGradients, list[Tensor | None]]]:
        for each in self._each:
            whole = len(self._each) == 1
            yield each, list(grads) if whole else list(map(grads.__getitem__, each.device.positions))

    # -- the passes --------------------------------------------------------------------------------------------------

    def check(self, grads: list[Tensor | None], inv_scale: Tensor, unit: bool) -> None:
        """Flags and norm of the model's gradients times ``inv_scale``. Sparse ones are unscaled at once.

        Args:
            grads: the model's, of all parameters, as they were just read.
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
            unit: whether that is known to be 1.

        Raises:
            RuntimeError: a parameter's dtype, shape or device was changed.
        """
        self.are_true, self.is_measured = False, True
        with _NamingChanges(self.params):
            for each, mine in self._by_device(grads):
                each.check(mine, inv_scale.to(each.one.device))
        self._unit = unit
        if any([each.has_sparse for each in self._each]):  # noqa: C419
            self.check_and_unscale(grads, inv_scale, unit)

    def check_and_unscale(self, grads: list[Tensor | None], inv_scale: Tensor, unit: bool) -> None:
        """:meth:`check`, and write true FP32 gradients to the masters, in one pass."""
        with _NamingChanges(self.params):
            for each, mine in self._by_device(grads):
                each.check_and_unscale(mine, inv_scale.to(each.one.device), unit)
        self.are_true = self.is_measured = self.may_be_made = True

    def unscale(self) -> None:
        """Write true FP32 gradients to the masters, of those that were checked, with the factor of a clip."""
        if not self.are_true:
            self.may_be_made = True
            for each in self._each:
                each.unscale(self._unit)
            self.are_true = True

    def recheck(self) -> None:
        """Flags and norm of true gradients as they are now."""
        for each in self._each:
            each.recheck()
        self.is_measured = True

    def scale_back(self, scale: Tensor) -> None:
        """Gradients that were unscaled in place are as their backward made them again. No host sync."""
        for each in self._each:
            if each.device.own:
                each.scale_back(scale.to(each.one.device))

    def scale_again(self, inv_scale: Tensor) -> None:
        """Multiply true gradients by ``inv_scale`` (float32, 0-dim), checked on the way. No host sync."""
        for each in self._each:
            each.scale_again(inv_scale.to(each.one.device))
        self.is_measured = True

    def drop(self, positions: Sequence[int]) -> None:
        """Gradients that were set to None are not part of the step."""
        for position in positions:
            each = next(each for each in self._each if position in each.device.positions)
            each.drop(self.params.all[position].row)

    # -- FP32 sums ---------------------------------------------------------------------------------------------------

    def start_summing(self) -> None:
        """From now on :meth:`fold` adds to masters' gradients. What they hold counts where it is true."""
        for each in self._each:
            each.start_summing(self.are_true)
        if self.are_true:
            drop_gradients([pair.model for pair in self.params.all if pair.master is not pair.model])
        self.summing = True

    def set_aside(self, keep: bool) -> None:
        """See :meth:`DeviceGradients.set_aside`."""
        for each in self._each:
            each.set_aside(keep)

    def fold(self, inv_scale: Tensor, keep: bool) -> None:
        """Add the model's gradients to FP32 sums, and free the 16-bit ones. No host sync."""
        self.may_be_made = True
        with _NamingChanges(self.params):
            for each in self._each:
                each.fold(inv_scale.to(each.one.device), keep)
        drop_gradients(self.params.elsewhere, keep)
        self.are_true = self.is_measured = True

    def sums(self) -> Iterator[tuple[DeviceParams, list[Tensor | None]]]:
        """By device: the FP32 sums so far, by row. Raises TypeError where one is sparse."""
        for each in self._each:
            yield each.device, each.sums()

    def put_sum(self, device: DeviceParams, row: int, value: Tensor) -> Tensor:
        """Overwrite the sum of a row, or begin one; returns the tensor that holds it."""
        self.may_be_made = True
        return self._of[id(device)].put_sum(row, value)

    def averaged(self, device: DeviceParams, stats: kernels.GradStats) -> None:
        """The sums of a device are averages over ranks now, in which a pass has found ``stats``."""
        self._of[id(device)].averaged(stats)

    # -- what was found ----------------------------------------------------------------------------------------------

    def found_inf(self, device: torch.device) -> Tensor:
        """float32, 0-dim: 1.0 where the last pass met a non-finite gradient, else 0.0. Overwritten by the next."""
        found = [each.stats.found_inf.to(device) for each in self._each]
        if len(found) == 1:
            return found[0]
        return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float32, device=device)

    def flags(self) -> list[Tensor]:
        """By device: int32 bits ``kernels.INF | kernels.NAN`` of each row, which the next pass overwrites. No sync."""
        return [each.flags() for each in self._each]

    def to_step(self, device: DeviceParams) -> GradsToStep:
        """A device's gradients as a step takes them."""
        return self._of[id(device)].to_step(scaled=not self.are_true)

    # -- norm and clip -----------------------------------------------------------------------------------------------

    def norm(self, norm_type: float, device: torch.device, of: set[int] | None = None) -> Tensor:
        """float64, 0-dim, on ``device``: the norm over all gradients. No host sync.

        The 2-norm was summed by the pass that checked; it is read again only after a clip.

        Args:
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        if of is None and norm_type == 2.0 and self.is_measured:
            return total_norm([each.stats.norm for each in self._each], norm_type, device)
        if of is None and norm_type == 2.0:
            return total_norm([each.norm() for each in self._each], norm_type, device)
        power = self.power_sum(norm_type, device, lambda param: of is None or id(param) in of)
        return power if norm_type == float("inf") else power.pow(1.0 / norm_type)

    def largest_norm(self, device: torch.device) -> Tensor:
        """float32, 0-dim, on ``device``: the largest of the norms of single tensors at the last pass. No host sync."""
        norms = [each.largest_norm().to(device) for each in self._each]
        return torch.stack(norms).amax() if norms else torch.zeros((), dtype=torch.float32, device=device)

    def power_sum(self, norm_type: float, device: torch.device, counted: Callable[[Tensor], bool]) -> Tensor:
        """float64, 0-dim: the sum of |g|**p over the elements that this rank counts (p = inf: the largest |g|)."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        with torch.no_grad():
            for each in self._each:
                if norm_type == 2.0 and self.is_measured:
                    part = each.measured_power_sum(counted).to(total)
                else:
                    part = each.power_sum(norm_type, counted).to(total)
                total = torch.maximum(total, part) if norm_type == float("inf") else total + part
        return total

    def clip(self, factor: Tensor, of: set[int] | None = None) -> None:
        """Multiply all gradients by ``factor`` (float32, 0-dim): those that wait when they are used. No host sync.

        Args:
            of: ids of the model's parameters whose gradients are meant, all of which are true; None: all.
        """
        for each in self._each:
            mine = factor.to(each.one.device)
            if self.are_true:
                each.clip_true(mine, of)
            else:
                each.clip_scaled(mine)
        self.is_measured = False

    def clip_values(self, largest: float, found_inf: Tensor, of: set[int] | None = None) -> None:
        """Bring every element of true gradients to at most ``largest`` in size. No host sync.

        Args:
            largest: not negative.
            found_inf: float32, 0-dim. Where it is 1.0 gradients stay, or an inf would become a number.
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        bound = torch.full_like(found_inf, largest, dtype=torch.float64).masked_fill_(found_inf > 0, float("inf"))
        with torch.no_grad():
            for value in [value for each in self._each for value in each.chosen(of)]:
                if value is not None:
                    mine = bound.to(value.device, value.dtype)
                    value.clamp_(-mine, mine)
        self.is_measured = False

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self, frees: bool = False) -> None:
        """A step is over, or was given up: what was found is forgotten; what is in ``.grad`` stays.

        Args:
            frees: no FP32 gradients were made: give back memory that is kept from an earlier step, in which they were.
        """
        for each in self._each:
            each.release(frees or not self.masters.keeps_gradients)
        self.are_true = self.summing = self.is_measured = False

    def forget_true(self) -> None:
        """Masters have no gradients but those that are their model's."""
        for each in self._each if self.may_be_made else ():
            each.forget_true()
        self.may_be_made = False

    def clear(self, set_to_none: bool) -> None:
        """Clear the model's and the masters' gradients, as ``torch.optim.Optimizer.zero_grad`` does.

        Zeros of FP32 sums, of which the model holds nothing, are zeros of the model too.
        """
        summed = [pair for each in self._each for row, pair in enumerate(each.pairs) if row in each.summed]
        self.release()
        tensors = [*self.params.models, *self.params.elsewhere, *self.params.masters]
        if set_to_none:
            for tensor in tensors:
                set_raw_grad(tensor, None)
            self.may_be_made = False
            return
        for tensor in tensors:
            grad = raw_grad(tensor)
            if grad is not None:
                if grad.requires_grad:
                    grad = grad.detach()
                    set_raw_grad(tensor, grad)
                grad.zero_()
        for pair in summed:
            if raw_grad(pair.model) is None:
                set_raw_grad(pair.model, torch.zeros_like(pair.model, requires_grad=False))


class _NamingChanges:
    """Where kernels refuse tensors within, a parameter that was changed is named instead."""

    def __init__(self, params: ParamTable) -> None:
        self._params = params

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (TypeError, ValueError, RuntimeError)):
            self._params.verify()
