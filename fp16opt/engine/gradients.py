"""Gradients: from what autograd left in the model to what the optimizer steps.

A 16-bit gradient waits where it is. It is looked at (flags, norm) when somebody needs to know, and an FP32 one is made
of it when somebody needs it: the wrapped optimizer's step, or whoever reads ``.grad`` of its master. A clip is a factor
until then. Gradients of parameters that are their own masters are unscaled in place, once a backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..kernels.reference_steps import Factors
from .dtensors import aligned, local
from .gradient_rows import OwnRows, Rows, Taken, can_wait, coalesced, dense, total_norm, vector_norm
from .masters import Masters
from .pairs import DeviceGroup, Pairs
from .sights import GRAD, FadedSight, Sight, drop_grads, store, stored


class Gradients:
    """The gradients of all pairs.

    Attributes:
        made: whether FP32 gradients are in the masters' ``.grad``: then these are what is stepped.
        own_are_scaled: whether a backward has added to gradients of parameters that are their own masters, and they
            were not unscaled since.
        summing: whether the next ones are added to FP32 sums.
        sight: the model's gradients when they were last brought up to date.
    """

    def __init__(self, pairs: Pairs, masters: Masters) -> None:
        self.pairs = pairs
        self.masters = masters
        self.made = False
        self.own_are_scaled = False
        self.summing = False
        self.sight: Sight | None = None
        self._made_sight: Sight | None = None
        self._measured = False
        self._clipped = False
        self._late: FadedSight | None = None
        self._rows = [Rows(group, pairs) for group in pairs.devices]
        self._of = {id(rows.group): rows for rows in self._rows}

    def grow(self) -> None:
        """Parameters or masters came."""
        before, self._rows = self._rows, [Rows(group, self.pairs) for group in self.pairs.devices]
        self._of = {id(rows.group): rows for rows in self._rows}
        place = {id(pair): rows for rows in self._rows for pair in rows.pairs}
        for old in before:
            for row, pair in enumerate(old.pairs):
                rows = place[id(pair)]
                if old.masters[row] is pair.master:
                    rows.buffers[pair.row] = old.buffers[row]
                    rows.has_buffers = old.has_buffers
                    rows.sweep.stats.nonfinite[pair.row] = old.sweep.stats.nonfinite[row]
                    rows.sweep.stats.sumsq[pair.row] = old.sweep.stats.sumsq[row]
                    rows.sweep.stats.touched = True
                    if row in old.held:
                        rows.held[pair.row] = old.held[row]
                    if row in old.sums:
                        rows.sums.add(pair.row)
                if old.flags is not None:
                    if rows.flags is None:
                        rows.flags = torch.zeros_like(rows.sweep.stats.nonfinite)
                    rows.flags[pair.row] = old.flags[row]
        self.sight = self._made_sight = None

    # -- what is there -----------------------------------------------------------------------------------------------

    def of_model(self) -> list[Tensor | None]:
        """The model's gradients, of all pairs."""
        return list(map(GRAD.__get__, self.pairs.models))

    def any_there(self) -> bool:
        """Whether a parameter holds a gradient, or a sum."""
        for tensors in (self.pairs.models, self.pairs.elsewhere):
            for grad in map(GRAD.__get__, tensors):
                if grad is not None:
                    return True
        return self.summing and any(rows.sums for rows in self._rows)

    def tensors(self) -> list[Tensor]:
        """Every gradient that is there, the masters' too, and memory that is kept for them."""
        found = [*self.of_model(), *stored(self.pairs.masters), *stored(self.pairs.elsewhere)]
        for rows in self._rows:
            found += [*rows.buffers, *rows.held.values()]
        return [tensor for tensor in found if tensor is not None]

    def see(self) -> None:
        """Remember the model's gradients as they are now."""
        self.sight = Sight(self.of_model())

    def moved(self) -> list[int]:
        """Positions of pairs whose gradient in the model was replaced, removed or written since."""
        return [] if self.sight is None else self.sight.moved(self.of_model())

    def was_carried(self, position: int) -> bool:
        """Whether a moved gradient holds the same bits as before: DDP rearranges its buckets once. Syncs."""
        now = self.pairs.models[position].grad
        return now is not None and self.sight is not None and self.sight.was_carried(position, now)

    def edited(self) -> list[int]:
        """Positions whose master gradient was written or replaced since it was made. Own ones are the model's."""
        if not self.made or self._made_sight is None:
            return []
        return self._made_sight.moved(self._of_masters())

    def _of_masters(self) -> list[Tensor | None]:
        return [
            None if own else grad
            for own, grad in zip(
                map(operator.is_, self.pairs.masters, self.pairs.models), stored(self.pairs.masters), strict=True
            )
        ]

    def left_over(self) -> FadedSight | None:
        """The model's gradients as a step has used them, keeping none alive."""
        for grad in () if self.sight is None else self.sight.grads:
            if grad is not None:
                return self.sight.faded()  # type: ignore[union-attr]
        return None

    # -- before and after a backward ---------------------------------------------------------------------------------

    def set_aside(self, keep: bool = False) -> None:
        """Take true gradients from parameters that are their own masters, to be added back when the next are true.

        Otherwise autograd would add scaled gradients to unscaled ones. With ``keep``, zeros stay in place of None.
        """
        if self.own_are_scaled:
            return
        for rows in self._rows:
            for row, model in zip(rows.group.own, rows.own_models, strict=True):
                grad = model.grad
                if grad is not None:
                    # DDP writes the next gradient into the same memory, where gradients are views of its buckets.
                    rows.held[row] = grad.clone() if keep or grad._is_view() else grad
                    drop_grads([model], keep)
        self.own_are_scaled = True

    def unscale_own(self, inv_scale: Tensor) -> None:
        """Make gradients of parameters that are their own masters true, in place, and check and measure them.

        Args:
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
        """
        if not self.own_are_scaled:
            return
        self.own_are_scaled = False
        with torch.no_grad():
            for rows in self._rows:
                if rows.group.own:
                    self._unscale_own(rows, inv_scale.to(rows.group.device))

    def _unscale_own(self, rows: Rows, inv_scale: Tensor) -> None:
        grads = [model.grad for model in rows.own_models]
        rows.live.update([row for row, grad in zip(rows.group.own, grads, strict=True) if grad is not None])
        rows.sweep.stats.touched = True
        usual = not rows.held and rows.usual_own.again(grads)
        if usual and not any([g is not None and g.requires_grad for g in grads]):  # noqa: C419
            entries = rows.spread(rows.group.own, grads)
            rows.sweep.take(entries, entries, inv_scale)
            return
        held, rows.held = rows.held, {}
        own = OwnRows(rows, held, inv_scale)
        for row, grad in zip(rows.group.own, grads, strict=True):
            own.add(row, grad)
        own.run()
        if own.live and own.are_usual and not self.pairs.has_pieces:
            rows.usual_own = kernels.Seen(grads)
        if held and self.summing:
            models = zip(rows.group.own, rows.own_models, strict=True)
            sums = [model.grad if row in held else None for row, model in models]
            rows.sweep.measure(dense(rows.spread(rows.group.own, sums), rows), self._known(rows))

    # -- the passes --------------------------------------------------------------------------------------------------

    def bring(self, inv_scale: Tensor, write: bool) -> None:
        """Look at the model's gradients as they are now. No host sync.

        Args:
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
            write: make FP32 ones of all; else of those only that can't wait.
        """
        if self.summing:
            self.sum_up(inv_scale)
            return
        self.unscale_own(inv_scale)
        self.made, self._clipped, self._measured = write, False, True
        self._late = None
        try:
            with torch.no_grad():
                waits = [self._look(rows, inv_scale.to(rows.group.device), write) for rows in self._rows]
        except (TypeError, ValueError, RuntimeError):
            self.pairs.verify()  # if a parameter was changed, this says which
            raise
        self.made = write or not any(waits)
        if self.made:
            self._forget_gone()
        self._note_made(anew=False)

    def _forget_gone(self) -> None:
        """Masters have no gradient where the model has none: what is there is of an earlier step."""
        for rows in self._rows:
            for row in rows.group.copied if len(rows.live) < len(rows.models) else ():
                if row not in rows.live:
                    store(rows.masters[row], None)

    def _note_made(self, anew: bool = True) -> None:
        """Remember gradients as they are now; with ``anew`` False the model's are as they were seen, if they were."""
        if anew or self.sight is None or self.pairs.has_own:
            self.see()
        self._made_sight = Sight(self._of_masters()) if self.made else None

    def _look(self, rows: Rows, inv_scale: Tensor, write: bool) -> bool:
        """The pass over one device's 16-bit gradients; returns whether some wait."""
        group, sweep = rows.group, rows.sweep
        rows.waiting = None
        sweep.stats.touched = True
        live: set[int] = set()
        if group.own:  # looked at only now: until then they are the user's to edit
            grads = [model.grad for model in rows.own_models]
            own = rows.spread(group.own, grads)
            if not rows.usual_own.again(grads):
                own = dense(own, rows)
            live.update([row for row, grad in zip(group.own, grads, strict=True) if grad is not None])
            sweep.judge(own)
        if group.copied:
            rows.factors = Factors(inv_scale, sweep.one)
            grads = [model.grad for model in rows.copied_models]
            if self._are_usual(rows, grads):
                waiting, taken = grads, None
                live.update(group.copied)
            else:
                waiting, taken = self._sorted(rows, grads, live)
            entries = rows.spread(group.copied, waiting) if any([grad is not None for grad in waiting]) else None  # noqa: C419
            if taken is not None:
                sweep.take(taken.sources, taken.outs, inv_scale)
            if entries is not None and write:
                sweep.take(entries, self._outs(rows, entries), inv_scale)
            elif entries is not None:
                sweep.look(entries, inv_scale)
                rows.waiting = entries
        self._drop_gone(rows, live)
        return rows.waiting is not None

    def _drop_gone(self, rows: Rows, live: set[int]) -> None:
        """What an earlier pass found in gradients that are not there any more does not count."""
        gone = sorted(rows.live - live)
        for row in gone:
            if rows.masters[row] is not rows.models[row]:
                store(rows.masters[row], None)
        rows.live = live
        if gone:
            rows.sweep.drop(gone)

    def _sorted(
        self, rows: Rows, grads: list[Tensor | None], live: set[int]
    ) -> tuple[list[Tensor | None], Taken | None]:
        """(what can wait, of rows with masters; the others, made at once). Rows with a gradient go into ``live``."""
        waiting: list[Tensor | None] = []
        taken = Taken(len(rows.models))
        for row, grad in zip(rows.group.copied, grads, strict=True):
            waits = None
            if grad is not None:
                live.add(row)
                grad = aligned(grad.detach() if grad.requires_grad else grad, rows.models[row])
                if can_wait(local(grad), rows.group.models[row]):
                    waits = local(grad)
                else:
                    self._take_odd(rows, row, grad, taken)
            waiting.append(waits)
        return waiting, taken if taken.used else None

    def _are_usual(self, rows: Rows, grads: list[Tensor | None]) -> bool:
        """Whether every 16-bit parameter has a gradient, and all can wait as they are."""
        if rows.usual.again(grads):
            return True
        models = [rows.group.models[row] for row in rows.group.copied]
        usual = all(
            type(grad) is Tensor and not grad.requires_grad and can_wait(grad, model)
            for grad, model in zip(grads, models, strict=True)
        )
        if usual and not self.pairs.has_pieces:
            rows.usual = kernels.Seen(grads)
        return usual and not self.pairs.has_pieces

    def _take_odd(self, rows: Rows, row: int, grad: Tensor, taken: Taken) -> None:
        """A gradient that can't wait: sparse, of another dtype, or laid out otherwise than its parameter."""
        pair = rows.pairs[row]
        if grad.layout is torch.strided:
            out = self._buffer(rows, row)
            taken.put(row, local(grad), local(out))
            store(pair.master, out)
            return
        grad = coalesced(grad, torch.float32, pair.name)
        out = torch.empty_like(grad._values(), dtype=torch.float32)
        taken.put(row, grad._values(), out)
        store(pair.master, torch.sparse_coo_tensor(grad._indices(), out, grad.shape, is_coalesced=True).coalesce())

    def _outs(self, rows: Rows, entries: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The memory for FP32 gradients of ``entries``, put into their masters' ``.grad``."""
        outs: list[Tensor | None] = []
        for row, entry in enumerate(entries):
            if entry is None:
                outs.append(None)
                continue
            out = rows.buffers[row]
            if out is None:
                out = self._buffer(rows, row)
            GRAD.__set__(rows.masters[row], out)
            outs.append(out)
        return [None if out is None else local(out) for out in outs] if self.pairs.has_pieces else outs

    def _buffer(self, rows: Rows, row: int) -> Tensor:
        buffer = rows.buffers[row]
        if buffer is None or buffer.device != rows.masters[row].device:
            buffer = rows.buffers[row] = self.masters.like(rows.pairs[row])
            rows.has_buffers = True
        return buffer

    def write(self) -> None:
        """Make FP32 gradients of those that wait, in the bits that a one-pass step would use. No host sync."""
        if self.made:
            return
        with torch.no_grad():
            for rows in self._rows:
                if rows.waiting is not None:
                    rows.sweep.write(rows.waiting, self._outs(rows, rows.waiting), *rows.factors)
                    rows.waiting = None
        self.made, self._clipped = True, False
        self._forget_gone()
        self._made_sight = Sight(self._of_masters())

    def judge(self) -> None:
        """Look at true gradients as they are now: somebody edited them. No host sync."""
        with torch.no_grad():
            for rows in self._rows:
                values = self.true_ones(rows.group)
                rows.sweep.stats.reset()
                rows.live = {row for row, value in enumerate(values) if value is not None}
                rows.live |= {row for row, value in enumerate(rows.waiting or ()) if value is not None}
                if rows.waiting is not None:
                    rows.sweep.look(rows.waiting, rows.factors.inv_scale)
                rows.sweep.judge(values)
                if rows.flags is not None:  # a sum may be finite again; what went into it was judged with its scaler
                    rows.flags.copy_(rows.sweep.stats.nonfinite)
        self._measured = not self._clipped
        self._note_made()

    def judge_apart(self, values: list[Tensor | None], device: torch.device) -> Tensor:
        """float32, 0-dim, on ``device``: 1.0 where one of ``values``, true gradients by pair, is not finite.

        :meth:`flags` are theirs until the next pass. No host sync.
        """
        whole = [v.coalesce()._values() if v is not None and v.layout is torch.sparse_coo else v for v in values]
        with torch.no_grad():
            for rows in self._rows:
                rows.sweep.stats.reset()
                rows.sweep.stats.touched = True
                rows.sweep.judge(dense([whole[position] for position in rows.group.positions], rows))
        return self.found_inf(device).clone()

    def drop(self, positions: list[int]) -> None:
        """Gradients that somebody has set to None are not part of the step."""
        for position in positions:
            pair = self.pairs.all[position]
            rows = self._of[id(pair.device)]
            if rows.waiting is not None:
                rows.waiting[pair.row] = None
            if pair.master is not pair.model:
                store(pair.master, None)
            rows.live.discard(pair.row)
            rows.sweep.drop([pair.row])
        if self.sight is not None:
            self._note_made()

    def rescale(self, factor: Tensor) -> None:
        """Multiply 16-bit gradients that are left from an earlier step by ``factor`` (float32, 0-dim). No host sync."""
        with torch.no_grad():
            for rows in self._rows:
                grads = [model.grad for model in rows.copied_models]
                values = dense(rows.spread(rows.group.copied, grads), rows)
                kernels.multi_tensor_scale(values, factor.to(rows.group.device))

    # -- FP32 sums ---------------------------------------------------------------------------------------------------

    def start_summing(self) -> None:
        """From now on :meth:`sum_up` adds to the master gradients. What they hold counts; 16-bit ones are freed."""
        if self.summing:
            return
        if any(rows.waiting is not None for rows in self._rows):
            self.write()
        for rows in self._rows:
            rows.flags = rows.sweep.stats.nonfinite.clone()
            rows.sums = rows.live - set(rows.group.own) if self.made else set()
            if self.made:
                drop_grads(rows.copied_models)
        self.summing = True

    def sum_up(self, inv_scale: Tensor, keep: bool = False) -> None:
        """Add the model's gradients to FP32 sums, and free the 16-bit ones. No host sync.

        Args:
            keep: leave zeros where they would be freed.
        """
        for rows in self._rows:  # what earlier ones gave is in ``flags``, and is not this one's
            rows.sweep.forget_flags()
        self.unscale_own(inv_scale)
        with torch.no_grad():
            for rows in self._rows:
                self._sum_up(rows, inv_scale.to(rows.group.device))
        for rows in self._rows:
            drop_grads(rows.copied_models, keep)
        drop_grads(self.pairs.elsewhere, keep)
        self.made, self._measured, self._clipped = True, True, False
        self._forget_gone()
        self._note_made()

    def _sum_up(self, rows: Rows, inv_scale: Tensor) -> None:
        sweep, group = rows.sweep, rows.group
        sweep.stats.touched = True
        own_flags = sweep.stats.nonfinite.clone()
        grads = [model.grad for model in rows.copied_models]
        rows.live.update([row for row in group.own if rows.models[row].grad is not None])
        sums = stored([rows.masters[row] for row in group.copied if row in rows.sums])
        is_whole = len(sums) in (0, len(grads)) and not any([one is None or one.is_sparse for one in sums])  # noqa: C419
        if is_whole and group.copied and self._are_usual(rows, grads):
            entries = rows.spread(group.copied, grads)
            outs = rows.spread(group.copied, sums) if sums else self._outs(rows, entries)
            sweep.take(entries, outs, inv_scale, bool(sums))
            rows.sums.update(group.copied)
            rows.live.update(group.copied)
        else:
            self._add_up(rows, grads, inv_scale)
        rows.flags = self._known(rows) | sweep.stats.nonfinite | own_flags

    def _add_up(self, rows: Rows, grads: list[Tensor | None], inv_scale: Tensor) -> None:
        """Add the 16-bit gradients of one device to what there is of sums."""
        sweep = rows.sweep
        taken, later = Taken(len(rows.models)), []
        for row, grad in zip(rows.group.copied, grads, strict=True):
            if grad is None:
                continue
            grad = aligned(grad.detach() if grad.requires_grad else grad, rows.models[row])
            before = GRAD.__get__(rows.masters[row]) if row in rows.sums else None
            if grad.layout is torch.strided and (before is None or before.layout is torch.strided):
                out = self._buffer(rows, row) if before is None else before
                taken.put(row, local(grad), local(out), before is not None)
                store(rows.masters[row], out)
            else:
                self._take_odd(rows, row, grad, taken)
                if before is not None:
                    later.append((row, before))
            rows.sums.add(row)
            rows.live.add(row)
        if taken.used:
            sweep.take(taken.sources, taken.outs, inv_scale, taken.adds if any(taken.adds) else False)
        for row, before in later:
            store(rows.masters[row], before + GRAD.__get__(rows.masters[row]))
        if later:
            sums = rows.spread([row for row, _ in later], stored([rows.masters[row] for row, _ in later]))
            sweep.measure(dense(sums, rows), self._known(rows))

    def _known(self, rows: Rows) -> Tensor:
        """Flags of what is in the sums."""
        return torch.zeros_like(rows.sweep.stats.nonfinite) if rows.flags is None else rows.flags

    def sums(self) -> Iterator[tuple[DeviceGroup, list[Tensor | None]]]:
        """By device: the FP32 sums so far, by row, without what a backward has just left in own parameters.

        Raises:
            TypeError: a sum is sparse.
        """
        for rows in self._rows:
            own = set(rows.group.own)
            values = [
                (rows.held.get(row) if self.own_are_scaled else rows.models[row].grad)
                if row in own
                else GRAD.__get__(rows.masters[row])
                if row in rows.sums
                else None
                for row in range(len(rows.models))
            ]
            for pair, value in zip(rows.pairs, values, strict=True):
                if value is not None and value.layout is not torch.strided:
                    raise TypeError(
                        f"parameter {pair.name!r}: expected a dense gradient, got {value.layout}: sparse gradients "
                        "made under no_sync can't be averaged over ranks. Leave no_sync, or use sparse=False."
                    )
            yield rows.group, values

    def put_sum(self, group: DeviceGroup, row: int, value: Tensor) -> Tensor:
        """Overwrite the sum of a row, or begin one; returns the tensor that holds it."""
        rows = self._of[id(group)]
        pair = rows.pairs[row]
        own = pair.master is pair.model
        if own and self.own_are_scaled:
            there = rows.held.get(row)
        else:
            there = GRAD.__get__(pair.master) if own or row in rows.sums else None
        if there is None:
            there = self._buffer(rows, row) if not own else torch.empty_like(pair.model, requires_grad=False)
            if own and self.own_are_scaled:
                rows.held[row] = there
            else:
                store(pair.master, there)
        if not own:
            rows.sums.add(row)
        rows.live.add(row)
        return there.copy_(value)

    def averaged(self, group: DeviceGroup, stats: kernels.GradStats) -> None:
        """The sums of a device are averages over ranks now, in which a pass has found ``stats``."""
        rows = self._of[id(group)]
        rows.flags = stats.nonfinite.clone() if rows.flags is None else rows.flags | stats.nonfinite
        rows.sweep.stats.sumsq.copy_(stats.sumsq)
        rows.sweep.total()
        self._note_made()

    # -- what was found ----------------------------------------------------------------------------------------------

    def found_inf(self, device: torch.device) -> Tensor:
        """float32, 0-dim: 1.0 where the last pass met a non-finite gradient, else 0.0. Overwritten by the next."""
        if len(self._rows) == 1:
            return self._rows[0].sweep.stats.found_inf.to(device)
        found = [rows.sweep.stats.found_inf.to(device) for rows in self._rows]
        return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float32, device=device)

    def flags(self) -> list[Tensor]:
        """By device: int32 bits ``kernels.INF | kernels.NAN`` of each row, which the next pass overwrites. No sync."""
        return [rows.sweep.stats.nonfinite if rows.flags is None else rows.flags for rows in self._rows]

    def stats(self) -> list[kernels.GradStats]:
        """By device: where the passes write."""
        return [rows.sweep.stats for rows in self._rows]

    def true_ones(self, group: DeviceGroup) -> list[Tensor | None]:
        """By row: gradients that are FP32 and unscaled, dense, as kernels take them; None where one waits."""
        rows = self._of[id(group)]
        grads = stored(rows.masters)
        if not self.made:  # what a master holds is of an earlier step, unless it could not wait
            waits = rows.waiting or [None] * len(grads)
            there = zip(grads, waits, strict=True)
            grads = [grad if wait is None and row in rows.live else None for row, (grad, wait) in enumerate(there)]
        return dense(grads, rows)

    def all_wait(self, group: DeviceGroup) -> bool:
        """Whether every gradient of a device waits, so that there are no true ones."""
        rows = self._of[id(group)]
        return rows.waiting is not None and len(rows.live) == len([1 for grad in rows.waiting if grad is not None])

    def waiting(self, group: DeviceGroup) -> tuple[list[Tensor | None] | None, Factors]:
        """By row: 16-bit gradients that wait, and what they are to be multiplied by."""
        rows = self._of[id(group)]
        return rows.waiting, rows.factors

    # -- norm and clip -----------------------------------------------------------------------------------------------

    def norm(self, norm_type: float, device: torch.device, of: set[int] | None = None) -> Tensor:
        """float64, 0-dim, on ``device``: the norm over all gradients. No host sync.

        The 2-norm was summed by the pass that looked; it is read again only after a clip.

        Args:
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        if of is not None:
            power = self.power_sum(norm_type, device, lambda param: id(param) in of)
            return power if norm_type == float("inf") else power.pow(1.0 / norm_type)
        with torch.no_grad():
            if norm_type != 2.0:
                parts = [vector_norm(value, norm_type) for value in self._true_values() if value.numel()]
            elif self._measured:
                parts = [rows.sweep.stats.norm for rows in self._rows]
            else:
                self.write()
                parts = [rows.sweep.norm(self.true_ones(rows.group)) for rows in self._rows]
            return total_norm(parts, norm_type, device)

    def largest_norm(self, device: torch.device) -> Tensor:
        """float32, 0-dim, on ``device``: the largest of the norms of single tensors at the last pass. No host sync."""
        norms = [rows.sweep.largest_norm().to(device) for rows in self._rows]
        return torch.stack(norms).amax() if norms else torch.zeros((), dtype=torch.float32, device=device)

    def _true_values(self) -> list[Tensor]:
        self.write()
        each = [value for rows in self._rows for value in self.true_ones(rows.group)]
        return [value for value in each if value is not None]

    def power_sum(self, norm_type: float, device: torch.device, counted: Callable[[Tensor], bool]) -> Tensor:
        """float64, 0-dim: the sum of |g|**p over the elements that this rank counts (p = inf: the largest |g|)."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        if norm_type != 2.0 or not self._measured:
            self.write()
        with torch.no_grad():
            for rows in self._rows:
                mask = [counted(model) for model in rows.models]
                part = self._power_sum(rows, norm_type, mask).to(total)
                total = torch.maximum(total, part) if norm_type == float("inf") else total + part
        return total

    def _power_sum(self, rows: Rows, norm_type: float, mask: list[bool]) -> Tensor:
        if norm_type == 2.0 and self._measured:
            mine = torch.tensor(mask, device=rows.group.device)
            return rows.sweep.stats.sumsq.where(mine, 0.0).sum()  # not times the mask: inf * 0 is nan
        values = [value if mine else None for value, mine in zip(self.true_ones(rows.group), mask, strict=True)]
        if norm_type == 2.0:
            return rows.sweep.norm(values).square()
        parts = [vector_norm(value, norm_type) for value in values if value is not None and value.numel()]
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=rows.group.device)
        return torch.stack(parts).amax() if norm_type == float("inf") else torch.stack(parts).pow(norm_type).sum()

    def clip(self, factor: Tensor, of: set[int] | None = None) -> None:
        """Multiply all gradients by ``factor`` (float32, 0-dim): those that wait when they are used. No host sync.

        A second factor would be a third rounding, so gradients that wait are made before one. So they are where the
        factor is not for all.

        Args:
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        if self._clipped or of is not None:
            self.write()
        with torch.no_grad():
            for rows in self._rows:
                mine = factor.to(rows.group.device)
                if rows.waiting is not None:
                    rows.factors = Factors(rows.factors.inv_scale, mine.reshape(()))
                if not self.all_wait(rows.group):
                    rows.sweep.scale(self._meant(rows, of), mine)
        self._clipped, self._measured = not self.made, False
        if self.made or self.pairs.has_own:
            self._note_made()

    def _meant(self, rows: Rows, of: set[int] | None) -> list[Tensor | None]:
        """The true gradients of one device that belong to parameters with these ids, None elsewhere."""
        values = self.true_ones(rows.group)
        if of is None:
            return values
        return [value if id(model) in of else None for model, value in zip(rows.models, values, strict=True)]

    def clip_values(self, largest: float, found_inf: Tensor, of: set[int] | None = None) -> None:
        """Bring every element of all gradients to at most ``largest`` in size. No host sync.

        Args:
            largest: not negative.
            found_inf: float32, 0-dim. Where it is 1.0 gradients stay, or an inf would become a number.
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        self.write()
        bound = torch.full_like(found_inf, largest, dtype=torch.float64).masked_fill_(found_inf > 0, float("inf"))
        with torch.no_grad():
            for rows in self._rows:
                for value in self._meant(rows, of):
                    if value is not None:
                        mine = bound.to(value.device, value.dtype)
                        value.clamp_(-mine, mine)
        self._measured = False
        self._note_made()

    # -- reading late, clearing --------------------------------------------------------------------------------------

    def rest(self, used: FadedSight | None) -> None:
        """A step is over. What waited can still be read while the model's gradients stay as they are."""
        self._late = None if self.made else used
        keeps = self.masters.keeps_gradients and self.made
        for rows in self._rows:
            rows.waiting, rows.flags = None, None
            rows.sums = set()
            rows.held = {}
            if not keeps and rows.has_buffers:
                self._free(rows)
        self.summing = False
        self.sight = self._made_sight = None

    def _free(self, rows: Rows) -> None:
        """Give the FP32 buffers back; what was made in them stays with who reads it."""
        for row, buffer in enumerate(rows.buffers):
            if buffer is not None and not self.made and GRAD.__get__(rows.masters[row]) is buffer:
                store(rows.masters[row], None)
        rows.buffers, rows.has_buffers = [None] * len(rows.buffers), False

    def read_late(self) -> None:
        """``.grad`` of a master is read after the step that used it."""
        used, self._late = self._late, None
        if used is None:
            return
        with torch.no_grad():
            for rows in self._rows:
                entries: list[Tensor | None] = [None] * len(rows.models)
                for row in rows.group.copied:
                    grad = rows.models[row].grad
                    if grad is not None and used.holds(rows.group.positions[row], grad):
                        entries[row] = local(grad)
                if any(entry is not None for entry in entries):
                    rows.sweep.write(entries, self._outs(rows, entries), *rows.factors)

    def begin(self) -> None:
        """Forget what was found; what is in ``.grad`` stays."""
        for rows in self._rows:
            rows.sweep.stats.reset()
            rows.live = set()
            rows.waiting, rows.flags = None, None
        self.made = self._clipped = self._measured = False

    def clear(self, set_to_none: bool, sums_stay: bool = False) -> None:
        """Clear the model's and the masters' gradients.

        Args:
            sums_stay: zeros of master gradients are sums, to be added to.
        """
        self._late, self.sight, self._made_sight = None, None, None
        for tensor in [*self.pairs.models, *self.pairs.elsewhere, *self.pairs.masters]:
            if set_to_none:
                GRAD.__set__(tensor, None)
            elif (grad := GRAD.__get__(tensor)) is not None:
                if grad.requires_grad:
                    grad = grad.detach()
                    GRAD.__set__(tensor, grad)
                grad.zero_()
        self.summing = False
        for rows in self._rows:
            if not set_to_none:
                for row, held in rows.held.items():
                    store(rows.models[row], held.zero_())
            rows.held = {}
            rows.sums = set()
            if not set_to_none and sums_stay:
                rows.sums = {row for row in rows.group.copied if GRAD.__get__(rows.masters[row]) is not None}
                self.summing = self.summing or bool(rows.sums)
            if set_to_none and not self.masters.keeps_gradients:
                rows.buffers, rows.has_buffers = [None] * len(rows.buffers), False
        self.own_are_scaled = False
        self.begin()
        for rows in self._rows:
            if rows.sums:
                rows.live = set(rows.sums)
                rows.flags = torch.zeros_like(rows.sweep.stats.nonfinite)
