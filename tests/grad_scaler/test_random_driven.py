"""Random calls to torch's GradScaler and to ours, each around a wrapper of a 16-bit model, and to torch's around FP32.

Losses are linear and their numbers few, so that 16-bit gradients are exact: the wrapper's masters must be what torch
makes of FP32 parameters, bit for bit, whichever GradScaler drives it. Left out is what torch forbids or leaves open (a
backward after gradients were unscaled, gradients of a step that are not cleared before the next, a step without a
backward), and what the wrapper refuses: the model's gradients written after they were unscaled, or cleared through the
model then. Random programs with all that the wrapper may refuse are in tests/contract/test_random_calls.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import Ours, Theirs, assert_same_bits

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STARTS = (0.5, -1.0, 2.0)
numbers = st.sampled_from([0.0, 0.5, -0.25, 1.0, -2.0])
some = st.tuples(*[st.one_of(numbers, numbers, st.none()) for _ in DTYPES]).filter(lambda c: c != (None,) * 3)
MODES: dict[str, tuple[Callable[[list[Tensor]], Any], dict[str, Any]]] = {
    "sgd, one pass": (lambda params: SGD(params, lr=0.125, momentum=0.5), {}),
    "sgd, wrapped": (lambda params: SGD(params, lr=0.125, momentum=0.5, foreach=False), {"fused_step": False}),
    "sgd, one pass, FP32 sums": (lambda params: SGD(params, lr=0.125, momentum=0.5), {"grad_accumulation": "fp32"}),
    "adamw, wrapped, FP32 sums": (
        lambda params: AdamW(params, lr=0.0625, foreach=False),
        {"fused_step": False, "grad_accumulation": "fp32"},
    ),
    "sgd, split": (lambda params: SGD(params, lr=0.125, momentum=0.5), {"master_weights": "split"}),
}


class Side:
    """A GradScaler, and the optimizer that it drives."""

    def __init__(self, cls: Any, make: Any, dtypes: tuple[torch.dtype, ...], options: dict[str, Any] | None) -> None:
        starts = zip(STARTS, dtypes, strict=True)
        self.params = [torch.nn.Parameter(torch.full((3,), start, dtype=dtype)) for start, dtype in starts]
        self.opt = make(self.params)
        if options is not None:
            self.opt = MixedPrecisionOptimizer(self.opt, **options)
        self.scaler = cls("cpu", init_scale=2.0**6, growth_interval=3)

    @property
    def masters(self) -> list[Tensor]:
        """Asked for each time: split ones are made of what is there."""
        return list(self.opt.master_params()) if isinstance(self.opt, MixedPrecisionOptimizer) else self.params

    def backward(self, coefficients: Any) -> None:
        """A loss that is not about a frozen parameter alone, and in which every number is exact."""
        terms = [(p.float() * c).sum() for p, c in zip(self.params, coefficients, strict=True) if c is not None]
        self.scaler.scale(torch.stack(terms).sum()).backward()

    def stepped(self) -> list[Tensor]:
        return [param for group in self.opt.param_groups for param in group["params"]]


class DrivenCalls(RuleBasedStateMachine):
    mode: ClassVar[str]

    @initialize()
    def start(self) -> None:
        make, options = MODES[self.mode]
        self.plain = Side(Theirs, make, (torch.float32,) * 3, None)
        self.wrapped = [Side(cls, make, DTYPES, options) for cls in (Theirs, Ours)]
        self.sides = [self.plain, *self.wrapped]
        self.stage, self.came, self.used, self.finite = "READY", False, False, True

    def every(self, call: Callable[[Side], Any]) -> list[Any]:
        return [call(side) for side in self.sides]

    # -- gradients -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.stage == "READY" and not self.used)
    @rule(coefficients=some, bad=st.sampled_from([None] * 4 + [float("inf"), float("nan")]), which=st.integers(0, 2))
    def backward(self, coefficients: Any, bad: float | None, which: int) -> None:
        trained = [p.requires_grad for p in self.plain.params]
        if bad is not None:
            coefficients = tuple(bad if i == which else c for i, c in enumerate(coefficients))
            self.finite = self.finite and not trained[which]
        if not any(mine and c is not None for mine, c in zip(trained, coefficients, strict=True)):
            coefficients = (1.0,) * 3
        self.every(lambda side: side.backward(coefficients))
        self.came = True

    @precondition(lambda self: self.stage == "READY" and self.came and not self.used)
    @rule()
    def unscale(self) -> None:
        self.every(lambda side: side.scaler.unscale_(side.opt))
        self.stage = "UNSCALED"

    @precondition(lambda self: self.stage == "UNSCALED" and self.came)
    @rule()
    def read_masters(self) -> None:
        expected, *found = self.every(lambda side: [master.grad for master in side.masters])
        if self.finite:
            for grads in found:
                for which, pair in enumerate(zip(grads, expected, strict=True)):
                    assert_same_bits(*pair, f"gradient of master {which}")

    @precondition(lambda self: self.stage == "UNSCALED" and self.came)
    @rule(over=st.sampled_from(["masters", "param_groups"]), max_norm=st.sampled_from([0.5, 1e6]))
    def clip_with_torch(self, over: str, max_norm: float) -> None:
        chosen = {"masters": lambda s: s.masters, "param_groups": Side.stepped}[over]
        expected, *found = self.every(lambda side: clip_grad_norm_(chosen(side), max_norm))
        if self.finite:
            for norm in found:
                assert_same_bits(norm, expected, "norm")

    @precondition(lambda self: self.stage == "UNSCALED" and self.finite and self.came)
    @rule(max_norm=st.sampled_from([0.5, 1e6]))
    def clip_with_the_wrapper(self, max_norm: float) -> None:
        """torch's side clips by the same factor."""
        norms = [side.opt.clip_master_grads(max_norm) for side in self.wrapped]
        assert_same_bits(*norms, "norm")
        factor = (max_norm / (norms[0] + 1e-6)).clamp(max=1.0)
        for param in self.plain.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    @precondition(lambda self: self.stage == "UNSCALED" and self.came)
    @rule(which=st.integers(0, 2), how=st.sampled_from(["written", "replaced", "dropped", "dropped from the model"]))
    def edit(self, which: int, how: str) -> None:
        """By the masters, whose gradients are the true ones, of FP32 parameters too; or one goes with the model's."""
        if "dropped" in how and not self._leaves_some(which):
            return
        for side in self.sides:
            grads = [master.grad for master in side.masters]
            if how == "dropped from the model":
                side.params[which].grad = None
            elif how == "dropped":
                side.masters[which].grad = None
            elif grads[which] is not None and how == "written":
                grads[which].mul_(0.5)
            elif grads[which] is not None:
                side.masters[which].grad = grads[which] * 0.5

    @precondition(lambda self: self.stage == "READY" and self.came and not self.used)
    @rule(which=st.integers(0, 2), drops=st.booleans())
    def edit_the_model_before_unscaling(self, which: int, drops: bool) -> None:
        if drops and not self._leaves_some(which):
            return
        for side in self.sides:
            param = side.params[which]
            if param.grad is not None:
                param.grad = None if drops else param.grad * 0.5

    def _leaves_some(self, which: int) -> bool:
        """Whether others have a gradient too, and what is judged of them stays the same."""
        others = [p.grad for i, p in enumerate(self.plain.params) if i != which and p.grad is not None]
        mine = self.plain.params[which].grad
        return bool(others) and (mine is None or bool(mine.isfinite().all()))

    @rule(which=st.integers(0, 2), trained=st.booleans())
    def freeze(self, which: int, trained: bool) -> None:
        """At any time: who has a gradient by then is stepped."""
        if trained or sum(p.requires_grad for p in self.plain.params) > 1 or not self.plain.params[which].requires_grad:
            for side in self.sides:
                side.params[which].requires_grad_(trained)

    @precondition(lambda self: self.stage == "READY" and not self.came)
    @rule()
    def resume(self) -> None:
        """With the same model."""
        for side in self.sides:
            side.opt.load_state_dict(side.opt.state_dict())

    # -- looking on ------------------------------------------------------------------------------------------------

    @rule()
    def look_at_groups(self) -> None:
        assert len({side.opt.param_groups[0]["lr"] for side in self.sides}) == 1

    @precondition(lambda self: self.stage != "READY" or self.used or not self.came)
    @rule(what=st.sampled_from(["skipped_steps", "step_was_skipped", "loss_scale"]))
    def ask(self, what: str) -> None:
        theirs, ours = (getattr(side.opt, what) for side in self.wrapped)
        assert theirs == ours

    # -- the end of an iteration -----------------------------------------------------------------------------------

    @precondition(lambda self: self.stage != "STEPPED" and self.came and not self.used)
    @rule()
    def step(self) -> None:
        self.every(lambda side: side.scaler.step(side.opt))
        self.stage, self.used = "STEPPED", True

    @precondition(lambda self: self.stage != "READY")
    @rule(clear=st.sampled_from(["opt", "zeros", "model", "nothing"]))
    def update(self, clear: str) -> None:
        self.every(lambda side: side.scaler.update())
        if clear != "nothing" or self.stage == "UNSCALED":
            self.zero_grad("opt" if clear == "nothing" else clear)
        else:
            self.used = True
        self.stage = "READY"

    @rule(how=st.sampled_from(["opt", "zeros", "model"]))
    def zero_grad(self, how: str) -> None:
        if self.stage == "UNSCALED" or (how == "zeros" and "sums" in self.mode):
            how = "opt"  # FP32 sums free what they take: there is nothing to be filled with zeros
        for side in self.sides:
            if how == "model":
                for param in side.params:
                    param.grad = None
            else:
                side.opt.zero_grad(set_to_none=how == "opt")
        self.came, self.used, self.finite = False, False, True

    @rule(
        coefficients=some,
        bad=st.sampled_from([None, None, float("inf")]),
        which=st.integers(0, 2),
        clear=st.sampled_from(["opt", "zeros", "model"]),
        unscales=st.booleans(),
    )
    def whole_iteration(self, coefficients: Any, bad: float | None, which: int, clear: str, unscales: bool) -> None:
        if self.stage != "READY":
            self.update("nothing")
        self.zero_grad(clear)
        self.backward(coefficients, bad, which)
        if unscales:
            self.unscale()
            self.clip_with_torch("masters", 0.5)
        self.step()
        self.update("nothing")

    @precondition(lambda self: hasattr(self, "sides"))
    @invariant()
    def same(self) -> None:
        assert len({side.scaler.get_scale() for side in self.sides}) == 1
        for side in self.wrapped:
            for param, master, plain in zip(side.params, side.masters, self.plain.params, strict=True):
                assert_same_bits(master, plain, "master")
                assert_same_bits(param, plain.detach().to(param.dtype), "parameter")


@pytest.mark.parametrize("mode", MODES)
def test_random_driven_calls(mode: str) -> None:
    machine = type("Machine", (DrivenCalls,), {"mode": mode})
    run_state_machine_as_test(
        machine,
        settings=settings(settings.get_profile("default"), max_examples=25, stateful_step_count=20),
    )
