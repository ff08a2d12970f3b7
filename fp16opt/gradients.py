"""MasterGrads: gradients on their way from the model up to the masters, unscaled, checked and measured in one pass."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .kernels import decisions
from .local import aligned, drop_grad, lies_like, locals_of, version
from .masters import HALF_DTYPES, MasterParams
from .norms import total_norm, vector_norm
from .shard import Shard


class _Lists(NamedTuple):
    """For one device's parameters: what to read, where to write, whether to add there, and what torch adds later."""

    sources: list[Tensor | None]
    outs: list[Tensor | None]
    adds: list[bool]
    later: list[tuple[int, Tensor]]


class MasterGrads:
    """The FP32 gradients of all masters.

    Memory: one FP32 buffer per parameter with a master, made when its first gradient arrives and reused from then on.
    A parameter that is its own master keeps its gradient in its own ``.grad``, unscaled in place.
    """

    def __init__(self, params: MasterParams) -> None:
        self.params = params
        self.buffers: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forget what was found, held and folded; gradients and their memory stay."""
        for shard in self.params.shards:
            shard.stats.reset()
        self.held: dict[int, Tensor] = {}
        self.own_is_fresh = False
        self.folded: list[Tensor] | None = None
        self._measured: list[Tensor | None] | None = None
        self._versions: list[int] = []
        self._measurable = True
        self._has_sparse = False
        self._is_read = False

    # -- before a backward -------------------------------------------------------------------------------------------

    def set_aside_own(self, keep: bool = False) -> None:
        """Take ``.grad`` from parameters that are their own masters, to be added back after the next unscaling.

        Otherwise autograd would add scaled gradients to unscaled ones. With ``keep``, zeros stay in place of None.
        """
        for i in self.params.own:
            param = self.params.model[i]
            if param.grad is not None:
                # DDP writes the next gradient into the same memory, where gradients are views of its buckets.
                self.held[i] = param.grad.clone() if keep or param.grad._is_view() else param.grad
                drop_grad(param, keep)
        self.own_is_fresh = True

    def give_back_own(self) -> None:
        """Drop what a backward that failed left behind, and undo :meth:`set_aside_own`."""
        for param in self.params.model:
            param.grad = None
        for i, grad in self.held.items():
            self.params.model[i].grad = grad
        self.held = {}
        self.own_is_fresh = False

    def has_any(self) -> bool:
        """Whether some model parameter holds a gradient."""
        return any(param.grad is not None for param in self._model())

    def _model(self) -> list[Tensor]:
        return self.params.model + self.params.elsewhere

    def has_model_grads(self) -> bool:
        """Whether a parameter that has a master holds a 16-bit gradient."""
        model = self.params.model
        return any(model[i].grad is not None for i in self.params.copied)

    def mark_consumed(self) -> None:
        """Remember that a step has used the gradients as they are now."""
        plain = not self.params.has_pieces
        for grad in [param.grad for param in self._model()]:
            if grad is not None:
                grad._fp16opt_consumed = grad._version if plain else version(grad)  # type: ignore[attr-defined]

    def has_unconsumed(self) -> bool:
        """Whether a gradient came, or was added to, since :meth:`mark_consumed`."""
        grads = [param.grad for param in self._model()]
        return any(g is not None and getattr(g, "_fp16opt_consumed", None) != version(g) for g in grads)

    # -- the pass ----------------------------------------------------------------------------------------------------

    def unscale(self, inv_scale: Tensor, keep: bool = False) -> None:
        """Multiply model gradients by ``inv_scale`` into FP32 master gradients, check and measure them. No host sync.

        Master gradients are made anew from the model's, or, after :meth:`start_folding`, added to; then the 16-bit
        gradients are freed. Gradients of parameters that are their own masters are unscaled once per backward.

        Args:
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made the gradients.
            keep: Leave zeros where folded gradients would be freed.
        """
        fold = self.folded is not None
        carries = fold or bool(self.params.own)  # master gradients that this call does not make anew
        self._measurable = not carries or self._measured is None or self._is_measured()
        try:
            with torch.no_grad():
                for number, shard in enumerate(self.params.shards):
                    self._unscale_shard(number, shard, inv_scale.to(shard.device), fold)
        except (TypeError, ValueError, RuntimeError):
            self.params.verify()  # if a parameter was changed, this says which
            raise
        if fold:
            for param in [*(self.params.model[i] for i in self.params.copied), *self.params.elsewhere]:
                drop_grad(param, keep)
        self.own_is_fresh = False
        self.held = {}
        self._measured = self._stored()
        self._versions = _versions(self._measured, not self.params.has_pieces)

    def _unscale_shard(self, number: int, shard: Shard, inv_scale: Tensor, fold: bool) -> None:
        """One kernel call for the parameters of one device."""
        lists = self._lists(shard, fold)
        keep = self._flags_to_keep(number, shard, fold)
        self._pass(shard, lists, inv_scale)
        if self.params.own_halves:
            self._narrow(shard, lists.sources, lists.outs)
        self._merge_flags(number, shard, keep, fold)
        for i, before in lists.later:
            total = self.params.master[i].grad
            self._set_grad(i, before if total is None else before + total)
            self._measurable = False

    def makes_all_anew(self) -> bool:
        """Whether the next :meth:`unscale` adds to nothing that is there, so that it may as well clip."""
        return self.folded is None and not self.held and not self.params.own_halves

    def unscale_clipped(self, inv_scale: Tensor, max_norm: float, judge: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """:meth:`unscale`, with the 2-norm clipped: one pass that reads and one that writes. No host sync.

        Only where :meth:`makes_all_anew`. Gradients with an element that is not finite are not clipped.

        Args:
            inv_scale: As for :meth:`unscale`.
            max_norm: To clip at.
            judge: Called between reading and writing: (the norm over all ranks, the verdict of all ranks).

        Returns:
            The norm before clipping: float32, 0-dim.
        """
        try:
            with torch.no_grad():
                listed = [(shard, self._lists(shard, fold=False)) for shard in self.params.shards]
                for shard, lists in listed:
                    kernels.multi_tensor_unscale(
                        lists.sources,
                        lists.outs,
                        inv_scale.to(shard.device),
                        shard.stats,
                        write=False,
                        tables=shard.unscale_tables,
                    )
                norm, found = self._judged(judge)
                norm, factor = decisions.decide_clip(norm, found, max_norm)
                for shard, lists in listed:
                    self._clipped_pass(shard, lists, inv_scale.to(shard.device), factor.to(shard.device))
        except (TypeError, ValueError, RuntimeError):
            self.params.verify()
            raise
        self.own_is_fresh = False
        self._measured, self._measurable = [], False
        return norm

    def _judged(self, judge: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The outcome of a pass that has read and measured gradients, and has not written them yet."""
        self._is_read = True
        try:
            return judge()
        finally:
            self._is_read = False

    def _clipped_pass(self, shard: Shard, lists: _Lists, inv_scale: Tensor, factor: Tensor) -> None:
        watch = self.params.watch(shard)
        kernels.multi_tensor_unscale_clipped(
            lists.sources, lists.outs, inv_scale, factor, watch=watch, tables=shard.unscale_tables
        )
        shard.passed = watch is not None

    def _pass(self, shard: Shard, lists: _Lists, inv_scale: Tensor) -> None:
        """The kernel call that unscales; the model is hashed on the way where somebody wants to know of writes."""
        watch = self.params.watch(shard)
        kernels.multi_tensor_unscale(
            lists.sources,
            lists.outs,
            inv_scale,
            shard.stats,
            accumulate=lists.adds if any(lists.adds) else False,
            watch=watch,
            tables=shard.unscale_tables,
        )
        shard.passed = watch is not None

    def _lists(self, shard: Shard, fold: bool) -> _Lists:
        """What to read and where to write, and every ``.grad`` set to what will hold the result."""
        usual = None if fold or self.params.has_pieces else self._usual_lists(shard)
        if usual is not None:
            return usual
        sources: list[Tensor | None] = []
        outs: list[Tensor | None] = []
        adds: list[bool] = []
        later: list[tuple[int, Tensor]] = []
        models, masters, buffers = self.params.model, self.params.master, self.buffers
        pieces = self.params.has_pieces
        fresh = self.own_is_fresh and not self.params.own_halves and not pieces  # which may be laid out anew
        if pieces:
            shard.take_pieces(models, masters)
        for i in shard.index:
            grad = models[i].grad
            if pieces and grad is not None:
                grad = aligned(grad, models[i])
            add = False
            if grad is None:
                self._without_grad(i, fold)
                source, out = None, None
            elif not fold and i in buffers and grad.layout is torch.strided and not grad.requires_grad:
                # The usual case, a 16-bit gradient that goes to its buffer, without a call per parameter.
                source, out = grad, buffers[i]
                if masters[i].grad is not out:
                    masters[i].grad = out
            elif fresh and i not in self.held and masters[i] is models[i] and lies_like(grad, models[i]):
                source, out = grad, grad  # as usual: an FP32 parameter's own gradient, unscaled in place
            else:
                source, out, add = self._unusual(i, grad, fold, later)
            sources.append(source)
            outs.append(out)
            adds.append(add)
        if pieces:
            sources, outs = locals_of(sources), locals_of(outs)
        return _Lists(sources, outs, adds, later)

    def _usual_lists(self, shard: Shard) -> _Lists | None:
        """The same where every parameter has a dense 16-bit gradient and a buffer: few operations for each."""
        if shard.rows is not None or not self.buffers.keys() >= set(shard.index):
            return None
        grads = [param.grad for param in shard.models]
        sources = [grad for grad in grads if grad is not None]
        if len(sources) != len(shard.index) or any([grad.requires_grad for grad in sources]):  # noqa: C419
            return None
        if {grad.layout for grad in sources} != {torch.strided}:
            return None
        outs = [self.buffers[i] for i in shard.index]
        for master, out in zip(shard.masters, outs, strict=True):
            master.grad = out
        return _Lists(grads, list[Tensor | None](outs), [], [])

    def _narrow(self, shard: Shard, sources: list[Tensor | None], outs: list[Tensor | None]) -> None:
        """Bring FP32 gradients of 16-bit parameters without masters down into their own; one that is too large is inf.

        The sum of squares is that of the wide ones, so the norm is read again.
        """
        wide, places = [], []
        for k, (source, out) in enumerate(zip(sources, outs, strict=True)):
            if source is not None and out is not None and self.params.master[shard.index[k]].dtype in HALF_DTYPES:
                wide.append(out)
                places.append(k)
        if not places:  # they are frozen
            return
        cast = kernels.CastStats.allocate(len(places), shard.device)
        kernels.multi_tensor_cast(wide, [sources[k] for k in places], cast)
        shard.stats.nonfinite[places] |= (cast.overflow & kernels.TOO_LARGE).ne(0) * kernels.INF
        shard.stats.found_inf.copy_((shard.stats.nonfinite != 0).any())
        self._measurable = False

    def _unusual(
        self, i: int, grad: Tensor, fold: bool, later: list[tuple[int, Tensor]]
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """(what to read, where to write, whether to add there) for one gradient; torch adds ``later``."""
        is_own = self.params.master[i] is self.params.model[i]
        if is_own and not self.own_is_fresh:
            return None, None, False
        before = self.params.master[i].grad if fold and not is_own else self.held.get(i)
        source, out, add = self._pair(i, grad.detach() if grad.requires_grad else grad, before)
        if before is not None and not add:
            later.append((i, before))
        return source, out, add

    def _without_grad(self, i: int, fold: bool) -> None:
        """No gradient arrived: what was held or folded stays, anything older goes."""
        param, master = self.params.model[i], self.params.master[i]
        if i in self.held:
            param.grad = self.held[i]
            self._measurable = False
        elif master is not param and not fold and master.grad is not None:
            master.grad = None
            self._measurable = False

    def _pair(self, i: int, grad: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, bool]:
        """(what to read, where to write, whether to add there), and ``.grad`` set to what will hold the result."""
        param, master = self.params.model[i], self.params.master[i]
        if grad.layout is not torch.strided:
            return self._sparse_pair(i, grad)
        if master.dtype in HALF_DTYPES:
            self._set_grad(i, grad)
            return grad, torch.empty_like(grad, dtype=torch.float32), False
        if before is not None and before.layout is torch.strided:
            self._set_grad(i, before)
            return grad, before, True
        if master is not param:
            out = self._buffer(i)
        elif grad.stride() == param.stride():
            out = grad
        else:
            # torch's fused steps are silently wrong where a gradient's strides are not its parameter's.
            out = torch.empty_like(param).copy_(grad)
            grad = out
        self._set_grad(i, out)
        return grad, out, False

    def _sparse_pair(self, i: int, grad: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Duplicates are summed in FP32, not in 16 bits; the values then go through the kernel like any tensor."""
        dtype = self.params.master[i].dtype
        if grad.layout is not torch.sparse_coo:
            raise TypeError(
                f"parameter {self.params.names[i]!r}: expected a dense or a sparse COO gradient, got layout "
                f"{grad.layout}. Convert it in a hook."
            )
        if not grad.is_coalesced():
            values = grad._values().to(dtype)
            grad = torch.sparse_coo_tensor(grad._indices(), values, grad.shape).coalesce()
        out = torch.empty_like(grad._values(), dtype=dtype)
        self._set_grad(i, torch.sparse_coo_tensor(grad._indices(), out, grad.shape, is_coalesced=True))
        return grad._values(), out, False

    def _set_grad(self, i: int, grad: Tensor) -> None:
        master = self.params.master[i]
        if master.grad is not grad:
            master.grad = grad.coalesce() if grad.layout is torch.sparse_coo else grad

    def _buffer(self, i: int) -> Tensor:
        master = self.params.master[i]
        buffer = self.buffers.get(i)
        if buffer is None or buffer.device != master.device:
            buffer = self.buffers[i] = self.params.like(i)
        return buffer

    # -- what was found ----------------------------------------------------------------------------------------------

    def _flags_to_keep(self, number: int, shard: Shard, fold: bool) -> Tensor | None:
        """Flags of earlier backwards that the call overwrites although their gradients are still in the sums."""
        if fold and shard.stats.touched:
            shard.stats.nonfinite.zero_()
        if fold or not self.held:
            return None
        key = (number, tuple(self.held))
        if key not in self._masks:  # made once: bringing it to a device waits
            self._masks[key] = torch.tensor([i in self.held for i in shard.index], device=shard.device)
        return shard.stats.nonfinite * self._masks[key]

    def _merge_flags(self, number: int, shard: Shard, keep: Tensor | None, fold: bool) -> None:
        if fold and self.folded is not None:
            self.folded[number] |= shard.stats.nonfinite
        elif keep is not None:
            shard.stats.nonfinite |= keep
            shard.stats.found_inf.copy_((shard.stats.nonfinite != 0).any())

    def start_folding(self) -> None:
        """From now on :meth:`unscale` adds to the master gradients. What they hold counts; 16-bit ones are freed."""
        if self.folded is None:
            unscaled = self._measured is not None
            for i in self.params.copied:
                if unscaled:
                    self.params.model[i].grad = None
                else:
                    self.params.master[i].grad = None
            self.folded = [shard.stats.nonfinite.clone() for shard in self.params.shards]

    def found_inf(self, device: torch.device) -> Tensor:
        """float32, 0-dim: 1.0 where the last :meth:`unscale` met a non-finite gradient, else 0.0."""
        found = [shard.stats.found_inf.to(device) for shard in self.params.shards]
        if not found:
            return torch.zeros((), device=device)  # the masters are all on other ranks
        return found[0] if len(found) == 1 else torch.stack(found).amax()

    def flags(self) -> list[int]:
        """Per parameter, bits ``kernels.INF | kernels.NAN`` of all that went into the masters. Syncs."""
        return self.read_flags(self.flags_on_devices())

    def flags_on_devices(self) -> list[Tensor]:
        """The flags themselves, int32, one tensor a shard, which the next pass overwrites. No sync."""
        return self.folded or [shard.stats.nonfinite for shard in self.params.shards]

    def read_flags(self, found: list[Tensor]) -> list[int]:
        """:meth:`flags_on_devices`, or a copy, read and sorted by position. Syncs."""
        bits = [0] * len(self.params)
        for shard, flags in zip(self.params.shards, found, strict=True):
            for i, flag in zip(shard.index, flags.tolist(), strict=False):
                bits[i] = flag
        return bits

    def grow(self) -> None:
        """Follow parameters that came, or got masters, in the middle of a step."""
        self._measurable = False
        self._masks = {}
        if self.folded is not None:
            for number, shard in enumerate(self.params.shards):
                grown = torch.zeros_like(shard.stats.nonfinite)
                if number < len(self.folded):
                    grown[: len(self.folded[number])] = self.folded[number]
                self.folded[number : number + 1] = [grown]

    # -- norm and clipping -------------------------------------------------------------------------------------------

    def _is_measured(self) -> bool:
        if self._is_read:
            return True
        if self._measured is None or not self._measurable or len(self._measured) != len(self.params):
            return False
        same, plain = all(map(operator.is_, grads := self._stored(), self._measured)), not self.params.has_pieces
        return same and _versions(grads, plain) == self._versions

    def _stored(self) -> list[Tensor | None]:
        """Every ``.grad`` of the masters that is there."""
        return [master.grad for master in self.params.master]

    def values(self, shard: Shard) -> list[Tensor | None]:
        """The dense tensors that hold the master gradients' elements."""
        masters = self.params.master
        grads = [masters[i].grad for i in shard.index]
        self._has_sparse = bool({grad.layout for grad in grads if grad is not None} - {torch.strided})
        if self._has_sparse:
            return [self._dense_values(i) for i in shard.index]
        return locals_of(grads) if self.params.has_pieces else grads

    def _dense_values(self, i: int) -> Tensor | None:
        grad = self.params.master[i].grad
        if grad is None or grad.layout is not torch.sparse_coo:
            return grad
        if not grad.is_coalesced():
            grad = self.params.master[i].grad = grad.coalesce()
        return grad._values()

    def norm(self, norm_type: float, device: torch.device) -> Tensor:
        """float64, 0-dim, on ``device``: the norm over all master gradients. No host sync.

        The 2-norm was summed by the pass that unscaled; it is read again only if a gradient was written since.
        """
        with torch.no_grad():
            if norm_type == 2.0:
                parts = self._norms_of_shards()
            else:
                each = [value for shard in self.params.shards for value in self.values(shard) if value is not None]
                parts = [vector_norm(value, norm_type) for value in each if value.numel()]
            return total_norm(parts, norm_type, device)

    def _norms_of_shards(self) -> list[Tensor]:
        if self._is_measured():
            return [shard.stats.norm for shard in self.params.shards]
        return [
            kernels.multi_tensor_l2norm(self.values(shard), tables=shard.norm_tables)[0] for shard in self.params.shards
        ]

    def scale(self, factor: Tensor) -> None:
        """Multiply all master gradients by ``factor`` (float32, 0-dim). At 1.0 no gradient memory is touched."""
        with torch.no_grad():
            for shard in self.params.shards:
                kernels.multi_tensor_scale(self.values(shard), factor.to(shard.device), tables=shard.scale_tables)
                self._measurable &= not self._has_sparse  # a sparse tensor's version does not follow its values'

    def zero(self, set_to_none: bool) -> None:
        """Clear the model's and the masters' gradients and forget what was found."""
        for tensor in [*self._model(), *self.params.master]:
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                grad = tensor.grad
                tensor.grad = grad.detach() if grad.requires_grad else grad
                tensor.grad.zero_()
        if not set_to_none:
            self.mark_consumed()


def _versions(grads: list[Tensor | None], plain: bool) -> list[int]:
    """Version counters; those of pieces too, unless all are ``plain``."""
    return [0 if grad is None else grad._version if plain else version(grad) for grad in grads]
