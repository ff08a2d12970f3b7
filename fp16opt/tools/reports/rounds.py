"""Rounds of a user's own training loop, watched: which lines clip, step a scheduler, write weights or gradients."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...engine.dtensors import raw_grad, version
from ...engine.params import HALF_DTYPES
from ...optimizer import MixedPrecisionOptimizer
from .averages import Averages
from .probing import same_bits
from .restoring import Others
from .twins import params_of

_CLIPS = {inspect.unwrap(one).__code__: one.__name__ for one in (clip_grad_norm_, clip_grad_value_)}
_BACKWARD = inspect.unwrap(MixedPrecisionOptimizer.backward).__code__
_WRITE = {
    inspect.unwrap(one).__code__ for one in (MixedPrecisionOptimizer.write_masters, MixedPrecisionOptimizer.train)
}
_CLEARED = ("zero_grad", "backward")
"""Methods of an optimizer that a round calls before its step."""
_TAKE = inspect.unwrap(MixedPrecisionOptimizer.update_master_grads).__code__
_WATCHED = {"step", "scale", "unscale_", *_CLEARED, *(code.co_name for code in (*_CLIPS, *_WRITE, _TAKE))}
"""Names of the functions whose calls say something."""
_OURS = Path(__file__).resolve().parents[2]
_TORCH = Path(torch.__file__).resolve().parent


@dataclass(frozen=True)
class Place:
    """A line of the user's.

    Attributes:
        text: the line itself, stripped; "" where there is no source.
    """

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        where = f"{Path(self.file).name}:{self.line}"
        return f"`{self.text}` ({where})" if self.text else where


@dataclass
class Seen:
    """What the rounds showed.

    Attributes:
        clips: lines that clipped the model's gradients where it doesn't count, with the norm that each saw.
        gradients: parameters whose gradients were written between backward and step, in a way that doesn't count.
        weights: 16-bit parameters that something else than the optimizer wrote between two steps.
        schedulers: lines that stepped a scheduler in the round with the overflow.
        moved: a learning rate before and after that round, where one differs.
        skipped: whether that round's step was skipped; None where there was no such round.
        steps: is 0 where the optimizer had no gradient in any step.
        others: the ids of parameters that other optimizers stepped.
        left: parameters whose gradients of an earlier step were still there, and were added to, at the next one.
        added: how many 16-bit gradients were added up in 16 bits for one step, at most, and in which dtype.
        averages: lines that average 16-bit weights in 16 bits.
        refused: what an optimizer of this library said when it refused a call, and where the script made it.
    """

    clips: dict[Place, float | None] = field(default_factory=dict)
    gradients: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    schedulers: list[Place] = field(default_factory=list)
    moved: tuple[float, float] | None = None
    skipped: bool | None = None
    refused: tuple[str, Place] | None = None
    steps: int = 0
    others: set[int] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    added: tuple[int, torch.dtype] = (0, torch.float32)
    averages: list[Place] = field(default_factory=list)


class Rounds:
    """Runs a round of a loop some times, and watches.

    Calls are seen by ``sys.setprofile``, by whatever name a script has imported a function. A Python
    profiler of the user's that is running loses these rounds.

    Args:
        train_step: one round, from the forward to the step.
        optimizer: which the round steps.
        scaler: the loop's GradScaler.
        others: gets every scheduler, GradScaler, optimizer and module that the loop uses, before it is used.
    """

    def __init__(
        self,
        model: nn.Module,
        train_step: Callable[[], Any],
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        others: Others,
    ) -> None:
        self.seen = Seen()
        self._train_step = train_step
        self._optimizer = optimizer
        self._wrapper = optimizer if isinstance(optimizer, MixedPrecisionOptimizer) else None
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._others = others
        self._held = {id(param) for param in params_of(optimizer)}
        self._left: dict[str, tuple[Tensor, int]] = {}  # gradients after a step, with their versions
        self._is_added_to: set[str] = set()  # parameters whose gradients of an earlier step got others on top
        self._adds: dict[str, int] = {}  # how many are in a gradient
        self._stepping = 0  # how many optimizers' steps are running, one in the other
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        halves = [param for param in self._params.values() if param.dtype in HALF_DTYPES]
        self._averages = Averages(halves, self._averaged) if halves else contextlib.nullcontext()
        self._after_step: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        self._trained: str | None = None  # a parameter that gets gradients
        self._overflows = False

    def run(self) -> Seen:
        """Three rounds; in the second a gradient overflows, where that skips a step.

        Raises:
            Exception: What ``train_step`` raises, unless this library's optimizer has raised it to refuse a call.
        """
        if self._scaler is not None:
            self._others.see(self._scaler)
        handles: list[Any] = [
            param.register_post_accumulate_grad_hook(self._keeper(name))  # type: ignore[no-untyped-call]
            for name, param in self._params.items()
        ]
        handles += [
            param.register_hook(self._counter(name))  # type: ignore[no-untyped-call]
            for name, param in self._params.items()
        ]
        handles += [
            self._optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            self._optimizer.register_step_post_hook(lambda *_: self._when_stepped()),
        ]
        try:
            for overflows in (False, True, False):  # an optimizer tells of its last step, which is to be no skip
                self._round(overflows and not (self._scaler is None and self._wrapper is None))
                if self.seen.refused is not None:
                    break
        finally:
            if self.seen.refused is not None and self._scaler is not None:
                with contextlib.suppress(AssertionError):  # it had unscaled nothing yet
                    self._scaler.update()
            for handle in handles:
                handle.remove()
        return self.seen

    def _round(self, overflows: bool) -> None:
        self._scaled = self._unscaled = self._taken = False
        self._grads.clear()
        self._overflows = overflows
        hook = self._make_one_overflow() if overflows else None
        rates, was_skipped = self._rates(), self._ask_for_skips()
        before = sys.getprofile()
        try:
            sys.setprofile(self._profile)
            try:
                with self._averages:
                    self._train_step()
            finally:
                sys.setprofile(before)
        except RuntimeError as error:
            self.seen.refused = self._refusal(error)
            if self.seen.refused is None:
                raise
        finally:
            if hook is not None:
                hook.remove()
        if overflows and self.seen.refused is None:
            self.seen.skipped = was_skipped()
            if self._rates() != rates:
                self.seen.moved = next((a, b) for a, b in zip(rates, self._rates(), strict=False) if a != b)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group]

    def _make_one_overflow(self) -> Any:
        """A gradient of the next backward is inf, once."""
        spent: list[bool] = []

        def overflow(grad: Tensor) -> Tensor | None:
            if spent:
                return None
            spent.append(True)
            return torch.full_like(grad, float("inf"))

        if self._trained is None:
            return None
        return self._params[self._trained].register_hook(overflow)  # type: ignore[no-untyped-call]

    def _ask_for_skips(self) -> Callable[[], bool]:
        """Tells afterwards whether a step of which one gradient is inf was skipped."""
        if self._wrapper is not None:
            wrapper, skips = self._wrapper, self._wrapper.skipped_steps
            return lambda: wrapper.skipped_steps > skips
        param = None if self._trained is None else self._params[self._trained]
        before = None if param is None else param.detach().clone()
        return lambda: param is not None and before is not None and same_bits(param, before)

    def _refusal(self, error: RuntimeError) -> tuple[str, Place] | None:
        """What the optimizer has refused, and at which line; None where the error is another's."""
        trace, place, last = error.__traceback__, None, ""
        while trace is not None:
            frame = trace.tb_frame
            last = frame.f_code.co_filename
            if not _is_library(last):
                place = _place(frame, trace.tb_lineno)
            trace = trace.tb_next
        return None if place is None or not Path(last).resolve().is_relative_to(_OURS) else (str(error), place)

    # -- gradients and weights, by what they hold -----------------------------------------------------------------

    def _counter(self, name: str) -> Callable[[Tensor], None]:
        """Called before a gradient is added to those that are there."""

        def count(_: Tensor) -> None:
            grad = raw_grad(self._params[name])
            if grad is None or (grad.layout is torch.strided and not bool(grad.any())):
                self._adds[name] = 0
                self._is_added_to.discard(name)
            elif name in self._left and grad is self._left[name][0] and version(grad) == self._left[name][1]:
                self._is_added_to.add(name)

        return count

    def _keeper(self, name: str) -> Callable[[Tensor], None]:
        def keep(param: Tensor) -> None:
            self._trained = self._trained or name
            grad = raw_grad(param)
            if grad is not None and grad.dtype in HALF_DTYPES:
                self._adds[name] = self._adds.get(name, 0) + 1
            if self._wrapper is not None and type(grad) is Tensor and grad.layout is torch.strided:
                self._grads[name] = grad.detach().clone()

        return keep

    def _before_step(self) -> None:
        self._see_gradients()
        self._see_writes()

    def _see_gradients(self) -> None:
        """What has been added up for the step that is to come."""
        self.seen.steps += self._has_gradients()
        for name in self._adds:
            self.seen.added = max(self.seen.added, (self._adds[name], self._params[name].dtype), key=lambda one: one[0])
        more = [name for name in self._params if name in self._is_added_to and name not in self.seen.left]
        self.seen.left += [name for name in more if id(self._params[name]) in self._held]

    def _has_gradients(self) -> bool:
        sums = self._wrapper is not None and self._wrapper.grad_accumulation == "fp32"
        held = (param for param in self._params.values() if id(param) in self._held)
        return sums or any(raw_grad(param) is not None for param in held)

    def _see_writes(self) -> None:
        if self._scaled and not self._taken:
            for name, kept in self._grads.items():
                grad = raw_grad(self._params[name])
                is_there = type(grad) is Tensor  # and not what stands for one that FP32 sums have taken
                if is_there and not same_bits(grad, kept) and name not in self.seen.gradients:
                    self.seen.gradients.append(name)
        self._grads.clear()
        for name, kept in self._after_step.items():
            if not same_bits(self._params[name], kept) and name not in self.seen.weights:
                self.seen.weights.append(name)

    def _when_stepped(self) -> None:
        self.seen.steps += self._has_gradients()
        grads = ((name, raw_grad(param)) for name, param in self._params.items() if id(param) in self._held)
        self._left = {name: (grad, version(grad)) for name, grad in grads if grad is not None}
        self._note_weights()

    def _note_weights(self) -> None:
        held = {name: param for name, param in self._params.items() if id(param) in self._held}
        halves = {n: p for n, p in held.items() if p.dtype in HALF_DTYPES and raw_grad(p) is not None}
        self._after_step = {name: param.detach().clone() for name, param in halves.items()}

    # -- calls ----------------------------------------------------------------------------------------------------

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if code.co_name not in _WATCHED or event not in ("call", "return"):
            return
        if event == "return":
            if code in _CLIPS:
                self._clipped(frame, arg)
            elif code in _WRITE and frame.f_locals.get("self") is self._wrapper and self._after_step:
                self._note_weights()  # masters were written, and the model follows
            elif code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
                self._stepping -= 1
            return
        if code.co_name == "step":
            one = frame.f_locals.get("self")
            if isinstance(one, LRScheduler):
                self._others.see(one)
                if self._overflows:
                    self._scheduled(frame)
            elif isinstance(one, Optimizer):
                self._others.see(one)
                self._stepping += 1
                self.seen.others |= {id(param) for param in params_of(one)} - self._held
            elif isinstance(one, torch.amp.GradScaler) and frame.f_locals.get("optimizer") is self._optimizer:
                self._see_gradients()
        elif code.co_name in ("scale", "unscale_"):
            one = frame.f_locals.get("self")
            if isinstance(one, torch.amp.GradScaler) and one.is_enabled():
                self._others.see(one)
                self._scaled, self._unscaled = True, code.co_name == "unscale_"
        elif code.co_name in _CLEARED and isinstance(frame.f_locals.get("self"), Optimizer):
            self._others.see(frame.f_locals["self"])
        if code is _BACKWARD:
            self._scaled = frame.f_locals.get("update_master_grads", True)
        elif code is _TAKE:
            self._taken = True

    def _averaged(self, frame: FrameType) -> None:
        place = None if self._stepping else _caller(frame)
        if place is not None and place not in self.seen.averages:
            self.seen.averages.append(place)

    def _scheduled(self, frame: FrameType) -> None:
        place = _caller(frame)
        if place is not None and place not in self.seen.schedulers:
            self.seen.schedulers.append(place)

    def _clipped(self, frame: FrameType, norm: Any) -> None:
        """A clip is over: remember it where it was of the model's gradients and they are scaled, or not there."""
        held = frame.f_locals.get("parameters")
        params = held if isinstance(held, list) else []
        grads = frame.f_locals.get("grads") or []
        ours = {id(raw_grad(param)) for param in self._params.values()} - {id(None)}
        is_the_models = any(id(one) in self._names for one in params) or any(id(one) in ours for one in grads)
        is_scaled = self._scaled and (self._wrapper is not None or not self._unscaled)
        place = _caller(frame)
        if is_the_models and is_scaled and place is not None:
            self.seen.clips[place] = float(norm) if isinstance(norm, Tensor) else None


def _is_library(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_relative_to(_OURS) or path.is_relative_to(_TORCH)


def _place(frame: FrameType, line: int) -> Place:
    file = frame.f_code.co_filename
    return Place(file, line, linecache.getline(file, line).strip())


def _caller(frame: FrameType) -> Place | None:
    """The line of the user's that led to this call; the outermost of torch's own in between is passed over."""
    at: FrameType | None = frame.f_back
    outermost = frame
    while at is not None and _is_library(at.f_code.co_filename):
        outermost, at = at, at.f_back
    return _place(outermost, outermost.f_lineno) if at is None else _place(at, at.f_lineno)


def named_lines(places: Sequence[Place]) -> str:
    """Lines in one sentence.

    Example:
        >>> named_lines([Place("train.py", 3, "scheduler.step()")])
        '`scheduler.step()` (train.py:3)'
    """
    return ", ".join(map(str, places))
