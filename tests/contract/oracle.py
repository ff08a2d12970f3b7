"""The contract's table of stages with its seven rules in plain torch, for a few small parameters.

It is written from the text of the contract alone: it knows nothing of the library, holds its own copies of everything,
and is not fast. Each method is one public call, or one thing that a user does to gradients. A method either moves the
oracle on, or raises `Refused` (the library must raise a RuntimeError, and nothing may change), or raises `Unspecified`
(the contract leaves open what happens, so that the call is not made at all).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from contract.reference import Make, Scale, clip_factor, found_inf, total_norm, unscaled

Given = Sequence[float | None]
HALVES = (torch.float16, torch.bfloat16)


class Refused(Exception):
    """The call must be refused, with words for one of ``keys`` (see `WORDS`)."""

    def __init__(self, *keys: str) -> None:
        super().__init__(*keys)
        self.keys = keys


class Unspecified(Exception):
    """What happens here is left open."""


WORDS = {
    "written": r"update_master_grads\(\)",
    "closed": r"after the last backward",
    "left over": r"zero_grad\(\)",
    # Gradients that were all dropped, and others that came before a call of the engine, are such that were written.
    "unscaled": r"opt\.backward\(loss\)|backward\(loss\) of this optimizer",
    "interrupted": r"zero_grad\(\)",
    "scale": r"loss_scale",
    "set": r"update_master_grads\(\)",
}


class Stage(enum.Enum):
    READY = "READY"
    SCALED = "SCALED"
    CHECKED = "CHECKED"
    UNSCALED = "UNSCALED"
    INTERRUPTED = "INTERRUPTED"


@dataclass
class Param:
    """One parameter.

    Attributes:
        master: FP32; the parameter itself where that is FP32.
        grad: The model's gradient in the parameter's dtype. Of an FP32 parameter also the master's, once unscaled.
        true: The master's gradient, where the stage is UNSCALED and the parameter has 16 bits.
        written: The gradient was written or replaced after a stamp, or after the check.
        is_frozen: It takes no part in any loss, and no master is made for it.
    """

    dtype: torch.dtype
    master: nn.Parameter
    is_frozen: bool = False
    grad: Tensor | None = None
    true: Tensor | None = None
    written: bool = False
    largest: float = 0.0

    @property
    def is_half(self) -> bool:
        return self.dtype in HALVES


@dataclass
class Saved:
    masters: list[Tensor]
    state: dict[str, object]
    scale: Scale
    skipped_steps: int


@dataclass
class Oracle:
    """All that the contract says about one wrapper.

    Attributes:
        folds: ``grad_accumulation="fp32"``.
        backward_scale: The scale of this step's backwards.
        factor: What the clips of this step multiply true gradients by, while that is not done.
        is_stamped: The last backward ended with a stamp.
        is_clipped, is_edited: A clip, or a write into master gradients, that closes the step to backwards.
        is_taken: The gradients came without a backward of the wrapper.
        is_folded: FP32 sums on the masters are all that counts; the model's 16-bit gradients were freed.
        was_undone: ``update_master_grads`` came after a clip or an edit.
        is_used: The gradients are those of a step that is over, as that left them.
        may_show_last: Masters may still show what the last step, or a clear that keeps tensors, left in them.
        was_clipped_again: A clip came after a clip: whether FP32 parameters hold true gradients by now is open.
        is_set_alone: A master was given a gradient where the model has none.
        left: What the last step may have left as the gradient of each FP32 parameter: how far it brings them is open.
        heard: The scalers of this step's backwards, with what each one's own gradients were.
        clips: Clips of the whole run that multiplied gradients that were multiplied before: each may round once more.
    """

    params: list[Param]
    optimizer: torch.optim.Optimizer
    scale: Scale
    other: Scale = field(default_factory=lambda: Scale(16.0, growth_interval=2))
    folds: bool = False
    stage: Stage = Stage.READY
    backward_scale: float = 1.0
    factor: Tensor | None = None
    is_stamped: bool = False
    is_clipped: bool = False
    is_edited: bool = False
    is_taken: bool = False
    is_folded: bool = False
    was_undone: bool = False
    is_used: bool = False
    may_show_last: bool = False
    was_clipped_again: bool = False
    is_set_alone: bool = False
    heard: list[tuple[Scale, bool]] = field(default_factory=list)
    left: list[list[Tensor | None]] = field(default_factory=list)
    clips: int = 0
    steps: int = 0
    step_was_skipped: bool | None = False
    skipped_steps: int = 0

    @classmethod
    def of(cls, models: Sequence[Tensor], make: Make, scale: Scale, folds: bool, frozen: Sequence[int] = ()) -> Oracle:
        masters = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in models]
        params = [
            Param(p.dtype, m, is_frozen=i in frozen) for i, (p, m) in enumerate(zip(models, masters, strict=True))
        ]
        oracle = cls(params, make(masters), scale, folds=folds)
        oracle._measure()
        return oracle

    # -- backwards ---------------------------------------------------------------------------------------------------

    def backward(self, grads: Given, stamp: bool = True, second_scaler: bool = False) -> None:
        """``opt.backward``; with ``stamp=False`` also ``opt.scale_loss(loss).backward()``."""
        self._settle()
        scale = self.other if second_scaler else self.scale
        folds = self.folds or self.is_folded or second_scaler
        if self.stage is Stage.READY:
            if second_scaler:
                raise Unspecified
            if any(p.grad is not None and bool((p.grad != 0).any()) for p in self.params) and not scale.is_one:
                raise Refused("left over")
            self._forget()
        else:
            self._may_add()
        if folds and not self.is_folded and self.stage in (Stage.CHECKED, Stage.UNSCALED) and not second_scaler:
            raise Unspecified  # whether what was read is in sums
        if self.stage is Stage.UNSCALED and not folds:
            for p in self._there():
                if not p.is_half and p.grad is not None:
                    p.grad = p.grad * self.backward_scale
                p.true = None
        if folds and (stamp or second_scaler):
            self._fold(grads, scale)
            return
        if self.is_folded:
            raise Unspecified  # sums, and 16-bit gradients beside them
        self._accumulate(grads, scale.value)
        self.stage, self.backward_scale, self.is_stamped = Stage.SCALED, scale.value, stamp
        self.was_undone = False

    def plain_backward(self, grads: Given) -> None:
        """``loss.backward()``, which the wrapper doesn't hear of."""
        hit = [p for p, g in zip(self.params, grads, strict=True) if g is not None]
        if self.stage is Stage.SCALED and all(p.grad is None for p in self.params):
            raise Unspecified  # whether a call of the engine has come in between, and seen that there were none
        for p in hit:
            self._may_write(p)
        self._check_not_zeros({id(p): g for p, g in zip(self.params, grads, strict=True)})
        self._accumulate(grads, 1.0)
        for p in hit:
            self._note_write(p)

    def interrupted_backward(self, which: int) -> None:
        """An exception comes out of ``opt.backward`` after the gradient of parameter ``which`` was accumulated."""
        self._settle()
        if self.stage is Stage.READY:
            if any(p.grad is not None for p in self.params):
                raise Unspecified  # whether the wrapper or the hook raises first
        elif self.stage is not Stage.SCALED or any(p.written for p in self.params):
            raise Unspecified
        self.stage = Stage.INTERRUPTED
        p = self.params[which]
        p.grad = torch.zeros_like(p.master, dtype=p.dtype) if p.grad is None else p.grad

    def _accumulate(self, grads: Given, scale: float) -> None:
        for p, g in zip(self.params, grads, strict=True):
            if g is not None and not p.is_frozen:
                new = torch.full_like(p.master, g * scale).detach().to(p.dtype)
                p.grad = new if p.grad is None else p.grad + new

    def _fold(self, grads: Given, scale: Scale) -> None:
        """What is there becomes true FP32 sums, this backward's are added to them, and 16-bit gradients are freed."""
        if self.stage is Stage.READY:
            self.backward_scale = scale.value
        was_ready = self.stage is Stage.READY
        self._unscale()
        sums = [self._true(p) for p in self.params]
        if not was_ready and not self.is_folded:
            self.heard = [(self.scale, found_inf(sums))]
        finite = True
        for p, g, old in zip(self.params, grads, sums, strict=True):
            if g is not None and not p.is_frozen:
                new = unscaled(torch.full_like(p.master, g * scale.value).detach().to(p.dtype), scale.value)
                finite = finite and bool(torch.isfinite(new).all())
                old = new if old is None else old + new
            if p.is_half:
                p.grad, p.true = None, old
            else:
                p.grad = old
        self.heard.append((scale, not finite))
        self.stage, self.is_folded, self.is_stamped = Stage.UNSCALED, True, False
        self.backward_scale = scale.value

    def _may_add(self) -> None:
        if self.was_undone:
            raise Unspecified
        keys = []
        if self.is_clipped or self.is_edited:
            keys.append("closed")
        if any(p.written for p in self.params):
            keys.append("written")
        if keys:
            raise Refused(*keys)

    # -- what a user does to the model's gradients -------------------------------------------------------------------

    def edit_model(self, which: int, factor: float | None, replaces: bool) -> None:
        """Multiply the gradient in place, replace it by such a product, or (None) drop it."""
        p = self.params[which]
        if p.grad is None or self.stage is Stage.INTERRUPTED:
            raise Unspecified
        if factor is None:
            self._drop(p)
            return
        self._may_write(p)
        self._check_not_zeros({id(p): p.grad * factor - p.grad})
        p.grad = p.grad * factor
        self._note_write(p)

    def give_model(self, which: int, value: float) -> None:
        """A gradient where there was none."""
        p = self.params[which]
        if p.grad is not None or p.is_frozen or self.stage is Stage.INTERRUPTED:
            raise Unspecified
        self._may_write(p)
        p.grad = torch.full_like(p.master, value).detach().to(p.dtype)
        self._note_write(p)

    def model_zero_grad(self) -> None:
        if self.is_set_alone or (self.folds and self.stage is not Stage.READY):
            raise Unspecified
        if self.is_folded:
            raise Unspecified  # the model holds no 16-bit gradients that could be cleared
        for p in self.params:
            p.grad, p.true, p.written = None, None, False

    def _drop(self, p: Param) -> None:
        if self.is_open or self.is_set_alone or (self.folds and self.stage is Stage.SCALED):
            raise Unspecified
        if self.is_edited:
            raise Unspecified  # the edit may go with the gradient
        p.grad, p.true, p.written = None, None, False

    def _check_not_zeros(self, added: dict[int, Tensor | float | None]) -> None:
        """Zeros everywhere, written to what was there, may be zero_grad(set_to_none=False) of the model (rule 6)."""
        if self.stage is Stage.READY:
            return
        held = [(p.grad, added.get(id(p))) for p in self.params if p.grad is not None]
        there = [grad if more is None else grad + more for grad, more in held]
        if there and not any(bool((grad != 0).any()) for grad in there):
            raise Unspecified

    def _may_write(self, p: Param) -> None:
        if self.stage is Stage.INTERRUPTED or self.is_set_alone or (self.is_open and not self.is_folded):
            raise Unspecified
        if self.folds and self.stage is Stage.SCALED:
            raise Unspecified  # whether an earlier backward's are in sums
        if self.is_taken and self.stage in (Stage.CHECKED, Stage.UNSCALED) and p.is_half:
            raise Unspecified  # these are checked anew, and rule 3 refuses them
        if self.is_taken and self.stage is Stage.CHECKED:
            raise Unspecified
        if not p.is_half and (self.was_clipped_again or (self.stage is Stage.UNSCALED and self.factor is not None)):
            raise Unspecified  # whether the clip is in it by now

    def _note_write(self, p: Param) -> None:
        self.is_used = False
        if self.stage is Stage.READY or (self.stage is Stage.SCALED and not self.is_stamped):
            return
        if self.stage is Stage.UNSCALED and not p.is_half:
            self.is_edited = True
            return
        p.written = True

    # -- master gradients --------------------------------------------------------------------------------------------

    def read_master(self, which: int) -> Tensor | None:
        """``.grad`` of a 16-bit parameter's master. Raises `Unspecified` where it isn't said what it shows."""
        p = self.params[which]
        if not p.is_half or p.is_frozen or self.stage is Stage.INTERRUPTED or any(q.written for q in self.params):
            raise Unspecified
        self._settle()
        if self.stage is Stage.READY:
            if not any(q.grad is not None for q in self.params):
                if self.is_used or self.may_show_last:
                    raise Unspecified
                return None
            if self.is_used or not self.scale.is_one:
                raise Unspecified
            self._take(1.0)
        self._unscale()
        return p.true

    def edit_master(self, which: int, factor: float) -> None:
        """Multiply the master's gradient in place."""
        p = self.params[which]
        grad = self.read_master(which)
        if grad is None:
            raise Unspecified
        p.true = grad * factor
        self.is_edited = True

    def set_master(self, which: int, value: float | None) -> None:
        """Put another tensor, or None, into the master's ``.grad``."""
        p = self.params[which]
        if not p.is_half or p.is_frozen or self.stage is Stage.INTERRUPTED or any(q.written for q in self.params):
            raise Unspecified
        if self.stage is not Stage.READY and all(q.grad is None for q in self.params):
            raise Unspecified  # all were dropped: whether the one that is set now is dropped with them
        if value is None and all(q is p or (q.grad is None and q.true is None) for q in self.params):
            raise Unspecified  # the step's last gradient goes: whether that begins the step anew
        self._settle()
        new = None if value is None else torch.full_like(p.master, value).detach()
        if self.stage is Stage.READY:
            there = any(q.grad is not None for q in self.params)
            if self.is_used or (value is None and there):
                raise Unspecified
            if value is None:
                return
            if not self.scale.is_one:
                raise Refused("set")
            self._take(1.0)
        if p.grad is None and new is not None and not self.is_folded:
            self.is_set_alone = True
        self._unscale()
        if p.true is not None or new is not None:
            p.true, self.is_edited = new, True

    def update_master_grads(self) -> None:
        self._settle()
        if self.is_set_alone:
            raise Unspecified
        if self.is_open and (self.is_clipped or self.is_edited or any(p.written for p in self.params)):
            raise Unspecified
        if self.is_folded:
            return
        if self.stage is Stage.READY:
            if not any(p.grad is not None for p in self.params):
                return
            self._take(self.scale.value)
        if (self.was_clipped_again or (self.stage is Stage.UNSCALED and self.is_clipped)) and any(
            not p.is_half and p.grad is not None for p in self.params
        ):
            raise Unspecified  # a clip that may be in the gradients of FP32 parameters
        if self.is_clipped or self.is_edited:
            self.was_undone = True
        was_unscaled = self.stage is Stage.UNSCALED
        self.factor = None
        for p in self.params:
            p.written = False
            p.true = unscaled(p.grad, self.backward_scale) if p.is_half and p.grad is not None else None
            if not p.is_half and p.grad is not None and not was_unscaled:
                p.grad = unscaled(p.grad, self.backward_scale)
        self.stage, self.is_clipped, self.is_edited = Stage.UNSCALED, False, False

    # -- clips -------------------------------------------------------------------------------------------------------

    def clip_norm(self) -> float:
        """The norm that ``clip_master_grads`` returns; `clip` then says what it does."""
        return total_norm(self.grads()) if self._check() else 0.0

    def clip(self, max_norm: float, norm: float) -> None:
        """After `clip_norm`. ``norm`` is the FP32 one that the library returned, so that the factor has its bits."""
        if self.stage is Stage.READY:
            return
        self.was_clipped_again = self.is_clipped and self.stage is not Stage.UNSCALED
        self.is_clipped = True
        factor = clip_factor(norm, max_norm)
        if self.stage is Stage.SCALED:
            self.stage = Stage.CHECKED
        if found_inf(self.grads()) or float(factor) == 1.0:
            return
        if self.factor is not None:
            self.clips += 1
        self.factor = factor if self.factor is None else self.factor * factor

    def clip_values(self, max_value: float) -> None:
        if not self._check():
            return
        self._unscale()
        self.is_clipped = True
        if found_inf(self.grads()):
            return
        self._apply_factor()
        for p in self._there():
            if p.is_half:
                p.true = None if p.true is None else p.true.clamp(-max_value, max_value)
            else:
                p.grad = None if p.grad is None else p.grad.clamp(-max_value, max_value)

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        if not self._check():
            self.step_was_skipped = False
            return
        grads = self.grads()
        overflow = found_inf(grads)
        self.left = [
            [p.grad, self._true(p), true, *([None] if self.is_folded else [])]
            for p, true in zip(self.params, grads, strict=True)
        ]
        if not overflow:
            for p, g in zip(self.params, grads, strict=True):
                p.master.grad = None if g is None else g.clone()
            self.optimizer.step()
            self.steps += 1
        self.step_was_skipped = overflow
        self.skipped_steps += overflow
        self._update_scales(overflow)
        self._measure()
        was_folded = self.is_folded
        self._reset()
        self.is_used = self.may_show_last = True
        for p in self.params:
            p.true = None
            if was_folded and p.is_half:
                p.grad = None

    def _update_scales(self, overflow: bool) -> None:
        """Each scaler hears of its own backwards; one alone hears whether the step was skipped."""
        heard = {id(scale): scale for scale, _ in self.heard} or {id(self.scale): self.scale}
        bad = {id(scale) for scale, is_bad in self.heard if is_bad}
        for key, scale in heard.items():
            scale.update(overflow and (len(heard) == 1 or key in bad))

    # -- the rest ----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none and (self.is_folded or self.is_set_alone or self.stage is Stage.INTERRUPTED):
            raise Unspecified
        for p in self.params:
            p.grad = None if set_to_none or p.grad is None else torch.zeros_like(p.grad)
            p.true = None
        self._reset()
        self.may_show_last = not set_to_none

    def write_scale(self, value: float) -> None:
        self._settle()
        if self.stage is not Stage.READY:
            if self.is_set_alone:
                raise Unspecified
            raise Refused("scale")
        self.scale.write(value)

    def save(self) -> Saved:
        return Saved(
            [p.master.detach().clone() for p in self.params],
            copy.deepcopy(self.optimizer.state_dict()),
            copy.copy(self.scale),
            self.skipped_steps,
        )

    def load(self, saved: Saved) -> None:
        if self.stage is not Stage.INTERRUPTED:  # a checkpoint loads there, and what is incomplete stays to be cleared
            self._settle()
            if self.stage is not Stage.READY:
                raise Unspecified
        for p, master in zip(self.params, saved.masters, strict=True):
            if p.is_half and not p.is_frozen:  # others are in the model's own checkpoint
                with torch.no_grad():
                    p.master.copy_(master)
        self.optimizer.load_state_dict(copy.deepcopy(saved.state))
        self.scale.value, self.scale.clean = saved.scale.value, saved.scale.clean
        self.skipped_steps, self.step_was_skipped = saved.skipped_steps, None

    # -- what must be there ------------------------------------------------------------------------------------------

    def grads(self) -> list[Tensor | None]:
        """True FP32 gradients, clips included, as a step would take them now."""
        out = [self._true(p) for p in self.params]
        return out if self.factor is None else [None if g is None else g * self.factor for g in out]

    def shown_by_fp32(self, which: int) -> list[Tensor | None]:
        """What ``.grad`` of an FP32 parameter may be now: a clip may be in it, or wait."""
        p = self.params[which]
        shown = [p.grad]
        if self.was_clipped_again:
            shown.append(self._true(p))
        if self.factor is not None and (self.was_clipped_again or self.stage is Stage.UNSCALED):
            shown += [None if g is None else g * self.factor for g in shown]
        return shown

    def model(self) -> list[Tensor]:
        return [p.master.detach().to(p.dtype) for p in self.params]

    @property
    def is_open(self) -> bool:
        """Gradients are in FP32 sums, or may be: what is left of the model's is not said."""
        return self.is_folded or (self.folds and self.stage in (Stage.CHECKED, Stage.UNSCALED))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _there(self) -> list[Param]:
        return [p for p in self.params if not p.is_frozen]

    def _true(self, p: Param) -> Tensor | None:
        if self.stage is Stage.UNSCALED:
            return p.true if p.is_half else p.grad
        return None if p.grad is None else unscaled(p.grad, self.backward_scale)

    def _settle(self) -> None:
        """All gradients gone is READY, however they went."""
        if self.stage is Stage.INTERRUPTED and any(p.grad is not None for p in self.params):
            raise Refused("interrupted")
        if self.stage is Stage.READY or self.is_open or self.is_set_alone:
            return
        if all(p.grad is None for p in self.params):
            self._reset()

    def _check(self) -> bool:
        """What a clip or a step begins with. False: nothing is there."""
        self._settle()
        if self.stage is Stage.READY:
            there = [p.grad for p in self.params if p.grad is not None]
            if not there:
                return False
            if not self.scale.is_one and any(bool((g != 0).any()) for g in there):
                raise Refused("unscaled")
            self._take(1.0)
        if any(p.written for p in self.params):
            raise Refused("written")
        return True

    def _take(self, scale: float) -> None:
        self.stage, self.backward_scale, self.is_stamped, self.is_taken = Stage.SCALED, scale, False, True
        self.is_used = False

    def _unscale(self) -> None:
        if self.stage is not Stage.UNSCALED:
            for p in self.params:
                true = self._true(p)
                if p.is_half:
                    p.true = true
                else:
                    p.grad = true
            self.stage = Stage.UNSCALED
        self._apply_factor()

    def _apply_factor(self) -> None:
        if self.factor is None:
            return
        for p in self.params:
            if p.is_half:
                p.true = None if p.true is None else p.true * self.factor
            else:
                p.grad = None if p.grad is None else p.grad * self.factor
        self.factor = None

    def _forget(self) -> None:
        self.is_taken = self.is_used = self.may_show_last = False

    def _reset(self) -> None:
        self.stage, self.factor, self.heard = Stage.READY, None, []
        self.is_stamped = self.is_clipped = self.is_edited = self.is_taken = self.is_folded = False
        self.was_undone = self.is_used = self.is_set_alone = self.was_clipped_again = False
        for p in self.params:
            p.written = False

    def _measure(self) -> None:
        for p in self.params:
            now = float(p.master.detach().abs().max())
            p.largest = max(p.largest, now) if now == now else p.largest
