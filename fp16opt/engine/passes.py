"""Passes over gradients: from what autograd left in the model to what the optimizer steps, device by device.

The check reads scaled gradients for flags and norm. Then they are stepped as they lie, by a kernel that multiplies on
the way; or true ones are made of them, which lie in ``.grad`` of their masters. Nothing here knows where a step stands.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels.readings import Rows
from ..kernels.reference_steps import Factors
from ..kernels.tensor_lists import all_there, any_there, read, set_grads, types_of
from .dtensors import aligned, as_piece_of, local, raw_grads, set_raw_grad
from .folded import is_folded
from .look import Look
from .masters import Masters
from .params import HALF_DTYPES, DeviceParams, ParamTable
from .ranks import Ranks
from .stage import Grads

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


def sparse_like(grad: Tensor, values: Tensor) -> Tensor:
    """A coalesced sparse tensor with other values."""
    return torch.sparse_coo_tensor(
        grad._indices(), values, grad.shape, is_coalesced=True, check_invariants=False
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


def round_to(wide: list[Tensor | None], outs: list[Tensor | None], stats: kernels.GradStats) -> None:
    """``outs = wide`` in 16 bits; what is too large counts as inf. None leaves a row as it is. No host sync."""
    found = kernels.CastStats.allocate(len(wide), stats.nonfinite.device)
    kernels.multi_tensor_cast(wide, outs, found)
    stats.nonfinite |= (found.overflow & kernels.TOO_LARGE).ne(0) * kernels.INF
    stats.found_inf.copy_(stats.nonfinite.ne(0).any())


def _any_not_zero(grad: Tensor) -> Tensor:
    """bool, 0-dim: whether this rank's part of a gradient has an element that is not zero. No sync."""
    values = grad._values() if grad.layout is torch.sparse_coo else local(grad)
    return values.detach().ne(0).any()


def are_zero(grads: Grads) -> bool:
    """Whether all gradients that are there are zeros. Syncs for each, up to the first that is not."""
    return not any(grad is not None and not is_folded(grad) and bool(_any_not_zero(grad)) for grad in grads)


# -- one device --------------------------------------------------------------------------------------------------------


class Laid(NamedTuple):
    """Gradients of any kind as kernels take them, by row; None: the parameter is left alone.

    Attributes:
        ins: what is read: dense, of the weight's dtype or of ``outs``'.
        outs: what is written: FP32, or FP64 of FP64 parameters.
        places: what becomes ``.grad``: it holds ``outs``, or is to be made of them.
    """

    ins: Grads
    outs: Grads
    places: Grads


class GradsToStep(NamedTuple):
    """One device's gradients as a step takes them.

    Attributes:
        grads: by row: all scaled as autograd left them, or all true ones. None: the parameter is left alone.
        factors: what they are to be multiplied by; ones where they are true.
        sparse: the name of a parameter whose true one is sparse, of which ``grads`` has the values; "" for none.
    """

    grads: Grads
    factors: Factors
    sparse: str = ""


class DeviceGradients:
    """The gradients of one device, a row for each parameter. No call waits for the device.

    Attributes:
        stats: what the last pass found, by row: flags and sums of squares; ``found_inf`` and ``norm`` over all rows.
        one: float32, 0-dim: 1.0 on the device.
    """

    def __init__(self, device: DeviceParams, params: ParamTable, masters: Masters) -> None:
        self.device = device
        self.params = params
        self.pairs = device.pairs
        self.masters = [pair.master for pair in self.pairs]
        self.stats = kernels.GradStats.allocate(len(device), device.device)
        self.one = torch.ones((), dtype=torch.float32, device=device.device)
        self._weights = read(device.models)
        self._dtypes = [pair.model.dtype for pair in self.pairs]
        self._true_dtypes = [master.dtype for master in self.masters]
        self._has_doubles = torch.float64 in self._dtypes
        self._has_halves = any(dtype in HALF_DTYPES for dtype in self._true_dtypes)
        self._like = [masters.operand(pair) for pair in self.pairs]  # of which gradients have shape and strides
        self._rooms: dict[int, Tensor] = {}  # for true gradients, by row
        self._all_rooms: tuple[Tensor, ...] | None = None  # the same, where there is one for each row

    # -- what kernels take -------------------------------------------------------------------------------------------

    def takes(self, grads: Rows) -> bool:
        """Whether kernels check and step all of these as they lie: dense ones of their weights' dtype, but FP64."""
        if self._has_doubles:
            return False
        reading = grads.reading
        if reading is not None and self._weights is not None:
            return reading.types in ([Tensor], []) and bool(reading.has_dtypes_of(self._weights))
        return set(types_of(grads.tensors)) <= {Tensor, type(None)} and all(
            grad is None or (grad.dtype == dtype and grad.layout is torch.strided)
            for grad, dtype in zip(grads.tensors, self._dtypes, strict=True)
        )

    def room(self, row: int) -> Tensor:
        """The memory for the true gradient of a master, in its dtype, laid out as that is."""
        room = self._rooms.get(row)
        if room is None:
            made = torch.empty_like(local(self._like[row]), dtype=self._true_dtypes[row], requires_grad=False)
            room = self._rooms[row] = as_piece_of(made, self.pairs[row].model)
        return room

    def memory(self) -> list[Tensor]:
        """What is kept of gradients beside ``.grad``."""
        return list(self._rooms.values())

    def lay_out(self, grads: Grads, sums: Grads | None = None) -> Laid:
        """Gradients of any kind.

        Args:
            sums: what masters hold, where dense ones are to be added to these.

        Raises:
            TypeError: one is neither dense nor sparse COO.
        """
        ins: list[Tensor | None] = [None] * len(self.pairs)
        outs, places = list(ins), list(ins)
        for row, (pair, grad) in enumerate(zip(self.pairs, grads, strict=True)):
            if grad is None:
                continue
            true, sum_ = self._true_dtypes[row], None if sums is None else sums[row]
            wide = torch.float32 if true in HALF_DTYPES else true
            grad = aligned(grad.detach() if grad.requires_grad else grad, pair.model)
            if grad.layout is torch.strided:
                grad = local(grad)
                place = sum_ if sum_ is not None and sum_.layout is torch.strided else self.room(row)
                out = local(place)
            else:
                place = coalesced(grad, wide, pair.name)
                grad = place._values()
                out = torch.empty_like(grad, dtype=wide)
            ins[row] = grad if grad.dtype in (self._dtypes[row], wide) else grad.to(wide)
            outs[row] = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
            places[row] = place
        return Laid(ins, outs, places)

    def placed(self, laid: Laid) -> list[Tensor | None]:
        """What becomes ``.grad``, when a kernel has written: rounded where masters are of 16 bits, sparse again."""
        found = list(laid.places)
        halves: list[Tensor | None] = [None] * len(found)
        if self._has_halves:
            for row, (place, out) in enumerate(zip(laid.places, laid.outs, strict=True)):
                if place is not None and out is not None and self._true_dtypes[row] in HALF_DTYPES:
                    is_sparse = place.is_sparse
                    halves[row] = torch.empty_like(out, dtype=self._true_dtypes[row]) if is_sparse else local(place)
            wide = [None if half is None else out for half, out in zip(halves, laid.outs, strict=True)]
            round_to(wide, halves, self.stats)
        for row, (place, out, half) in enumerate(zip(laid.places, laid.outs, halves, strict=True)):
            if place is not None and place.is_sparse and out is not None:
                found[row] = sparse_like(place, out if half is None else half)
        return found

    # -- passes ------------------------------------------------------------------------------------------------------

    def check(self, grads: Rows, inv_scale: Tensor) -> None:
        """Flags and sums of squares of ``grads * inv_scale``, which are not written.

        Args:
            grads: the model's, by row, as :meth:`takes` wants them.
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
        """
        self.stats.reset()
        kernels.multi_tensor_check(grads, inv_scale, self.stats, cache=self.device.caches["check"])

    def write(self, grads: Rows, inv_scale: Tensor, factor: Tensor | None = None) -> None:
        """Write true gradients to ``.grad`` of masters.

        Args:
            factor: float32, 0-dim: of a clip, or 1, of gradients that were checked; they get the bits that the step of
                a kernel would use. None: they are checked on the way.
        """
        if all_there(grads.tensors) and self.takes(grads) and not (self._has_halves or self.params.has_dtensors):
            if self._all_rooms is None:
                self._all_rooms = tuple(map(self.room, range(len(self.pairs))))
            laid = Laid(grads, self._all_rooms, self._all_rooms)
        else:
            laid = self.lay_out(grads.tensors)
        if factor is None:
            self.stats.reset()
        cache = self.device.caches["unscale"]
        with torch.no_grad():
            if factor is None:
                kernels.multi_tensor_unscale(laid.ins, laid.outs, inv_scale, self.stats, cache=cache)
            else:
                kernels.multi_tensor_unscale_clipped(laid.ins, laid.outs, inv_scale, factor, cache=cache)
            set_grads(self.masters, laid.places if laid.places is self._all_rooms else self.placed(laid))

    # -- true gradients ----------------------------------------------------------------------------------------------

    def true_values(self, of: set[int] | None = None) -> list[Tensor | None]:
        """By row, what masters hold, as kernels take it: of sparse ones, which are coalesced, the values.

        Args:
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        found: list[Tensor | None] = []
        for pair, grad in zip(self.pairs, raw_grads(self.masters), strict=True):
            if grad is None or not pair.has_master or (of is not None and id(pair.model) not in of):
                found.append(None)
                continue
            if grad.is_sparse and not grad.is_coalesced():
                grad = grad.coalesce()
                set_raw_grad(pair.master, grad)
            piece = local(grad._values() if grad.is_sparse else grad)
            found.append(piece.detach() if piece.requires_grad else piece)
        return found

    def first_sparse(self) -> str:
        """The name of the first parameter whose true gradient is sparse; "" for none."""
        grads = zip(self.pairs, raw_grads(self.masters), strict=True)
        return next((pair.name for pair, grad in grads if grad is not None and grad.is_sparse), "")

    def measure(self, factor: Tensor | None = None) -> None:
        """Flags and sums of squares of the true gradients as they are now.

        Args:
            factor: float32, 0-dim: they are multiplied by it first.
        """
        values = self.true_values()
        self.stats.reset()
        with torch.no_grad():
            if self._has_halves:
                halves = [value if value is not None and value.dtype in HALF_DTYPES else None for value in values]
                values = [value if half is None else None for value, half in zip(values, halves, strict=True)]
                if factor is not None:
                    kernels.multi_tensor_scale(halves, factor)
                kernels.multi_tensor_check(halves, self.one, self.stats)
            if any_there(values):
                given = values, values, self.one if factor is None else factor, self.stats
                kernels.multi_tensor_unscale(*given, write=factor is not None, cache=self.device.caches["measure"])

    def clip(self, factor: Tensor, of: set[int] | None) -> None:
        """Multiply true gradients by ``factor`` (float32, 0-dim). On the CPU a factor of 1 touches no memory."""
        with torch.no_grad():
            kernels.multi_tensor_scale(self.true_values(of), factor, cache=self.device.caches["clip"])

    # -- norms -------------------------------------------------------------------------------------------------------

    def norm(self, is_measured: bool) -> Tensor:
        """The 2-norm over the true gradients: float64, 0-dim. They are read again, unless the last pass has it."""
        values = None if is_measured else self.true_values()
        return self.stats.norm if values is None or not any_there(values) else kernels.multi_tensor_l2norm(values)[0]

    def largest_norm(self) -> Tensor:
        """float32, 0-dim: the largest of the rows' norms that the last pass has found. No element is larger."""
        sums = self.stats.sumsq
        return sums.amax().sqrt().float() if len(sums) else torch.zeros_like(self.one)

    def power_sum(self, norm_type: float, is_measured: bool, of: set[int] | None, ranks: Ranks) -> Tensor:
        """float64, 0-dim: the sum of |g|**p over true gradients ``of`` parameters that count on this one of ``ranks``.

        For p = inf the largest |g|. The sum of squares is that of the last pass, where it ``is_measured``.
        """
        mine = [(of is None or id(pair.model) in of) and ranks.counted(pair.model) for pair in self.pairs]
        if norm_type == 2.0 and is_measured:
            mask = torch.tensor(mine, dtype=torch.bool, device=self.one.device)
            return self.stats.sumsq.where(mask, 0.0).sum()  # not times the mask: inf * 0 is nan
        values = zip(self.true_values(), mine, strict=True)
        found = [value for value, is_mine in values if value is not None and value.numel() and is_mine]
        if not found:
            return torch.zeros((), dtype=torch.float64, device=self.one.device)
        if norm_type == 2.0:
            return kernels.multi_tensor_l2norm(found)[0].square()
        parts = torch.stack([vector_norm(value, norm_type) for value in found])
        return parts.amax() if norm_type == float("inf") else parts.pow(norm_type).sum()

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self, frees: bool) -> None:
        """A step is over, or was given up: what was found is forgotten, what is in ``.grad`` stays.

        Args:
            frees: give the memory of true gradients back.
        """
        if frees and self._rooms:
            self._rooms, self._all_rooms = {}, None
            self.device.caches["unscale"].forget()  # which holds the list of rooms
        self.stats.reset()


# -- all devices -------------------------------------------------------------------------------------------------------


class Gradients:
    """The gradients of all parameters.

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
        for each, earlier in zip(self.each, before, strict=False) if keeps else ():
            each.stats = earlier.stats

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

    # -- the passes --------------------------------------------------------------------------------------------------

    def check(self, look: Look, inv_scale: Tensor) -> bool:
        """Flags and norm of the model's gradients times ``inv_scale`` (float32, 0-dim).

        Returns:
            False where kernels don't take all of them as they lie, and nothing was done.

        Raises:
            RuntimeError: a parameter's dtype, shape or device was changed.
        """
        rows = list(zip(self.each, look.rows, strict=True))
        if not all([each.takes(mine) for each, mine in rows]):  # noqa: C419
            return False
        with NamingChanges(self.params):
            for each, mine in rows:
                each.check(mine, inv_scale.to(each.one.device))
        return True

    def write(self, look: Look, inv_scale: Tensor, factor: Tensor | None = None, checked: bool = False) -> None:
        """Write true gradients to the masters, checked on the way; or with the factor of a clip, of ``checked`` ones.

        Raises:
            TypeError: one is neither dense nor sparse COO.
            RuntimeError: a parameter's dtype, shape or device was changed.
        """
        with NamingChanges(self.params):
            for each, mine in zip(self.each, look.rows, strict=True):
                by = each.one if factor is None else factor.to(each.one.device)
                each.write(mine, inv_scale.to(each.one.device), by if checked else None)

    def measure(self, factor: Tensor | None = None) -> None:
        """Flags and norm of true gradients as they are now, multiplied by ``factor`` (float32, 0-dim) first."""
        for each in self.each:
            each.measure(None if factor is None else factor.to(each.one.device))

    def clip(self, factor: Tensor, of: set[int] | None = None) -> None:
        """Multiply true gradients by ``factor`` (float32, 0-dim). No host sync.

        Args:
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        for each in self.each:
            each.clip(factor.to(each.one.device), of)

    def clip_values(self, largest: float, found_inf: Tensor, of: set[int] | None = None) -> None:
        """Bring every element of true gradients to at most ``largest`` in size. No host sync.

        Args:
            largest: not negative.
            found_inf: float32, 0-dim. Where it is 1.0 gradients stay, or an inf would become a number.
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        bound = torch.full_like(found_inf, largest, dtype=torch.float64).masked_fill_(found_inf > 0, float("inf"))
        with torch.no_grad():
            for value in [value for each in self.each for value in each.true_values(of)]:
                if value is not None:
                    mine = bound.to(value.device, value.dtype)
                    value.clamp_(-mine, mine)

    def not_zero(self, grads: Grads, ranks: Ranks) -> list[str]:
        """Names of parameters whose gradient is there and not all zeros. Syncs once where there are gradients.

        Where masters are spread over ranks it is so on all of them alike: else some would raise, and the others wait.
        """
        params = self.params
        named = [*zip(params.names, grads, strict=True)]
        named += zip(params.called_elsewhere, raw_grads(params.elsewhere), strict=True)
        # What a wrapper that these weights had before has folded is gone with its sums.
        there = [(name, grad) for name, grad in named if grad is not None and not is_folded(grad)]
        if not there:
            return []
        home = there[0][1].device
        flags = torch.stack([_any_not_zero(grad).to(home) for _, grad in there])
        found = [name for (name, _), flag in zip(there, flags.tolist(), strict=True) if flag]
        if params.has_dtensors and ranks.is_anywhere(flags.any()):
            return found or ["a parameter's piece on another rank, which names it"]
        return found

    # -- what was found ----------------------------------------------------------------------------------------------

    def found_inf(self, device: torch.device) -> Tensor:
        """float32, 0-dim: 1.0 where the last pass met a non-finite gradient, else 0.0. Overwritten by the next."""
        found = [each.stats.found_inf.to(device) for each in self.each]
        if len(found) == 1:
            return found[0]
        return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float32, device=device)

    def norm(self, norm_type: float, device: torch.device, is_measured: bool, of: set[int] | None = None) -> Tensor:
        """float64, 0-dim, on ``device``: the norm over all gradients. No host sync.

        Args:
            is_measured: whether the last pass has summed the squares of the gradients as they are.
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        if of is None and norm_type == 2.0:
            return total_norm([each.norm(is_measured) for each in self.each], norm_type, device)
        power = self.power_sum(norm_type, device, is_measured, of, Ranks())
        return power if norm_type == float("inf") else power.pow(1.0 / norm_type)

    def largest_norm(self, device: torch.device) -> Tensor:
        """float32, 0-dim, on ``device``: the largest of the norms of single tensors at the last pass. No host sync."""
        norms = [each.largest_norm().to(device) for each in self.each]
        return torch.stack(norms).amax() if norms else torch.zeros((), dtype=torch.float32, device=device)

    def power_sum(
        self, norm_type: float, device: torch.device, is_measured: bool, of: set[int] | None, ranks: Ranks
    ) -> Tensor:
        """float64, 0-dim: the sum of |g|**p over the elements that this rank counts (p = inf: the largest |g|)."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        with torch.no_grad():
            for each in self.each:
                part = each.power_sum(norm_type, is_measured, of, ranks).to(total)
                total = torch.maximum(total, part) if norm_type == float("inf") else total + part
        return total

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
        set_grads([pair.master for pair in self.params.all if pair.has_master], None)

    def clear(self, set_to_none: bool) -> None:
        """Clear the model's gradients, as ``torch.optim.Optimizer.zero_grad`` does; masters have none after it."""
        self.forget_true()
        tensors = [*self.params.models, *self.params.elsewhere]
        if set_to_none:
            set_grads(tensors, None)
            return
        for tensor, grad in zip(tensors, raw_grads(tensors), strict=True):
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
