"""Random sequences of public calls against `oracle.Oracle`: what each shows, and what it must refuse.

A sequence is data: a setting with a list of calls. Where the oracle finds a call unspecified it is left out. On a
failure both are printed, so that calls can be struck out by hand until the fault stands alone:

    from contract.test_random_calls import play
    play({...}, [...])

``FP16OPT_SEQUENCES=20000 pytest tests/contract/test_random_calls.py`` runs that many.
"""

from __future__ import annotations

import copy
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from contract.oracle import WORDS, Oracle, Refused, Saved, Stage, Unspecified
from contract.reference import Scale
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler

SEQUENCES = int(os.environ.get("FP16OPT_SEQUENCES", "400"))
BATCH = 50
INF, NAN = float("inf"), float("nan")
DTYPES = {"h": torch.float16, "b": torch.bfloat16, "f": torch.float32}
SHAPES = ((4,), (2, 3), (5,))
NAMES = ("first.weight", "second.weight", "third.weight")
MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.25, weight_decay=0.125, foreach=False),
    "momentum": lambda params: SGD(params, lr=0.125, momentum=0.5, nesterov=True, foreach=False),
    "adamw": lambda params: AdamW(params, lr=2.0**-6, weight_decay=0.125, foreach=False),
}
Setting = dict[str, Any]
Call = tuple[Any, ...]


class Difference(AssertionError):
    """The library did something else than the oracle says."""


def same(got: Tensor | None, want: Tensor | None) -> bool:
    """Equal bits, NaNs among themselves aside."""
    if got is None or want is None:
        return got is want
    return got.dtype == want.dtype and torch.equal(got.detach().nan_to_num(12345.0), want.nan_to_num(12345.0))


class Play:
    """The library beside the oracle. ``wrap`` is the class under test, so that broken ones can be put in its place."""

    def __init__(self, setting: Setting, wrap: type[MixedPrecisionOptimizer] = MixedPrecisionOptimizer) -> None:
        make, folds = MAKES[setting["optimizer"]], setting["accumulation"] == "fp32"
        self.params = [
            nn.Parameter((torch.arange(n := int(np.prod(shape))) - n // 2).reshape(shape).div(8).to(DTYPES[letter]))
            for shape, letter in zip(SHAPES, setting["dtypes"], strict=False)
        ]
        frozen = [len(self.params) - 1] if setting["frozen"] else []
        for i in frozen:
            self.params[i].requires_grad_(False)
        value = setting["scale"]
        if setting["dynamic"]:
            scaler, scale = DynamicLossScaler(value, growth_interval=3), Scale(value, growth_interval=3)
        else:
            scaler, scale = StaticLossScaler(value), Scale(value)
        self.oracle = Oracle.of(self.params, make, scale, folds, frozen)
        self.other = DynamicLossScaler(16.0, growth_interval=2)
        self.names = NAMES[: len(self.params)]
        self.opt = wrap(
            make(self.params),
            scaler=scaler,
            named_parameters=list(zip(self.names, self.params, strict=True)),
            grad_accumulation=setting["accumulation"],
            fused_step=setting["fused_step"],
        )
        self.is_exact = setting["fused_step"] is False
        self.saved: tuple[Any, Saved] | None = None

    # -- the calls ---------------------------------------------------------------------------------------------------

    def do(self, call: Call) -> None:
        name, *args = call
        before = self._oracle_now()
        try:
            getattr(self, name)(*args)
        except Unspecified:
            self._put_back(before)
            return
        self.compare()

    def _oracle_now(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The oracle replaces what it holds before it raises, and writes into nothing."""
        oracle = self.oracle
        return {**vars(oracle), "heard": list(oracle.heard)}, [dict(vars(p)) for p in oracle.params]

    def _put_back(self, before: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        """A call that was left out moves nothing, also where that shows only half-way through."""
        vars(self.oracle).update(before[0])
        for p, was in zip(self.oracle.params, before[1], strict=True):
            vars(p).update(was)

    def expect(self, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[Any, Any]:
        """Results of the oracle and of the library, or None twice where both refuse."""
        written = [n for n, p in zip(self.names, self.oracle.params, strict=True) if p.written]
        try:
            want = ours()
        except Refused as refused:
            try:
                theirs()
            except RuntimeError as error:
                self.check_words(str(error), refused.keys, written)
                return None, None
            raise Difference(f"must be refused: {refused.keys}") from None
        return want, theirs()

    def check_words(self, message: str, keys: Sequence[str], written: Sequence[str]) -> None:
        fits = [key for key in keys if re.search(WORDS[key], message)]
        if not fits:
            raise Difference(f"refused for {keys}, so one of {[WORDS[key] for key in keys]} must stand in: {message}")
        if fits == ["written"] and not any(name in message for name in written):
            raise Difference(f"names none of {written}: {message}")

    def loss(self, grads: Sequence[float | None]) -> Tensor:
        total = torch.zeros(())
        for p, g in zip(self.params, grads, strict=True):
            if g is not None and p.requires_grad:
                total = total + (p.float() * g).sum()
        return total

    def fit(self, grads: Sequence[float | None]) -> list[float | None]:
        """As many as there are parameters, at least one of them for a parameter that is trained."""
        fitting = [g if p.requires_grad else None for g, p in zip(grads, self.params, strict=False)]
        return [0.25, *fitting[1:]] if fitting == [None] * len(fitting) else fitting

    def backward(self, grads: Sequence[float | None], stamp: bool = True) -> None:
        given = self.fit(grads)
        self.expect(
            lambda: self.oracle.backward(given, stamp),
            lambda: self.opt.backward(self.loss(given), update_master_grads=stamp),
        )

    def second_scaler(self, grads: Sequence[float | None]) -> None:
        given = self.fit(grads)
        self.expect(
            lambda: self.oracle.backward(given, second_scaler=True),
            lambda: self.opt.backward(self.loss(given), scaler=self.other),
        )

    def scale_loss(self, grads: Sequence[float | None]) -> None:
        """Where `backward` would be refused for other reasons than what was left over, only the next call may know."""
        given = self.fit(grads)

        def ours() -> None:
            try:
                self.oracle.backward(given, stamp=False)
            except Refused as refused:
                if refused.keys != ("left over",):
                    raise Unspecified from None
                raise

        try:
            ours()
        except Refused as refused:
            self.expect_refusal_later(refused, given)
        else:
            self.opt.scale_loss(self.loss(given)).backward()

    def expect_refusal_later(self, refused: Refused, grads: Sequence[float | None]) -> None:
        """What was left over might be cleared after ``scale_loss``: where it is not, what comes next refuses."""

        def refuse() -> None:
            raise refused

        if self.oracle.folds:
            self.expect(refuse, lambda: self.opt.scale_loss(self.loss(grads)))
            return
        self.opt.scale_loss(self.loss(grads)).backward()
        for theirs in (self.opt.update_master_grads, self.opt.step):
            self.expect(refuse, theirs)
        self.zero_grad()

    def plain_backward(self, grads: Sequence[float | None]) -> None:
        given = self.fit(grads)
        self.expect(lambda: self.oracle.plain_backward(given), lambda: self.loss(given).backward())

    def interrupted_backward(self, which: int) -> None:
        which %= sum(p.requires_grad for p in self.params)
        p = self.params[which]
        given = [0.25 if q.requires_grad else None for q in self.params]

        def theirs() -> None:
            def fail(_: Tensor) -> None:
                raise KeyError("mine")

            handle = p.register_post_accumulate_grad_hook(fail)
            try:
                self.opt.backward(self.loss(given))
            except KeyError:
                pass
            else:
                raise Difference("the exception of a hook was lost")
            finally:
                handle.remove()

        self.expect(lambda: self.oracle.interrupted_backward(which), theirs)

    def edit_model(self, which: int, factor: float | None, replaces: bool) -> None:
        which %= len(self.params)
        p = self.params[which]

        def theirs() -> None:
            grad = p.grad
            if grad is None:
                raise Difference(f"{self.names[which]} has no gradient")
            if factor is None:
                p.grad = None
            elif replaces:
                p.grad = grad * factor
            else:
                grad.mul_(factor)

        self.expect(lambda: self.oracle.edit_model(which, factor, replaces), theirs)

    def give_model(self, which: int, value: float) -> None:
        which %= len(self.params)
        p = self.params[which]
        self.expect(
            lambda: self.oracle.give_model(which, value), lambda: setattr(p, "grad", torch.full_like(p.detach(), value))
        )

    def read_masters(self, which: int) -> None:
        """The first of the reads may move the stage, so each is the first in some sequences."""
        which %= len(self.params)
        masters = list(self.opt.master_params())
        for i in [which, *(i for i in range(len(self.params)) if i != which and self.oracle.stage is Stage.UNSCALED)]:
            if not self.oracle.params[i].is_half or self.oracle.params[i].is_frozen:
                if i == which:
                    raise Unspecified
                continue
            want, got = self.expect(lambda i=i: self.oracle.read_master(i), lambda i=i: masters[i].grad)  # type: ignore[misc]
            if not self.is_near(got, want):
                raise Difference(f"the master gradient of {self.names[i]} is {got}, must be {want}")

    def is_near(self, got: Tensor | None, want: Tensor | None) -> bool:
        if not self.oracle.clips or got is None or want is None:
            return same(got, want)
        return torch.allclose(got, want, rtol=2.0**-22 * self.oracle.clips, atol=0.0, equal_nan=True)

    def edit_master(self, which: int, factor: float) -> None:
        which %= len(self.params)

        def theirs() -> None:
            grad = list(self.opt.master_params())[which].grad
            if grad is None:
                raise Difference(f"the master of {self.names[which]} has no gradient")
            grad.mul_(factor)

        self.expect(lambda: self.oracle.edit_master(which, factor), theirs)

    def set_master(self, which: int, value: float | None) -> None:
        which %= len(self.params)

        def theirs() -> None:
            master = list(self.opt.master_params())[which]
            master.grad = None if value is None else torch.full_like(master.detach(), value)

        self.expect(lambda: self.oracle.set_master(which, value), theirs)

    def update_master_grads(self) -> None:
        self.expect(self.oracle.update_master_grads, self.opt.update_master_grads)

    def clip(self, max_norm: float) -> None:
        want, got = self.expect(self.oracle.clip_norm, lambda: self.opt.clip_master_grads(max_norm))
        if want is None:
            return
        if got.dtype != torch.float32 or got.dim():
            raise Difference(f"the norm is {got.dtype} of shape {tuple(got.shape)}")
        norm = float(got)
        if np.isfinite(want) != np.isfinite(norm) or (np.isfinite(want) and abs(norm - want) > 1e-6 * want):
            raise Difference(f"the norm is {norm}, must be {want}")
        self.oracle.clip(max_norm, norm)

    def clip_values(self, max_value: float) -> None:
        self.expect(lambda: self.oracle.clip_values(max_value), lambda: self.opt.clip_master_values(max_value))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.expect(lambda: self.oracle.zero_grad(set_to_none), lambda: self.opt.zero_grad(set_to_none))

    def model_zero_grad(self) -> None:
        def theirs() -> None:
            for p in self.params:
                p.grad = None

        self.expect(self.oracle.model_zero_grad, theirs)

    def step(self) -> None:
        self._step(self.oracle.step, lambda: self.opt.step())

    def step_with_closure(self, grads: Sequence[float | None] | None) -> None:
        """With ``grads`` the closure clears, then makes new ones; without it returns a number."""
        if grads is None:
            self._step(self.oracle.step, lambda: self.opt.step(lambda: 2.5), 2.5)
            return
        if self.oracle.stage is not Stage.READY:
            raise Unspecified
        given = self.fit(grads)

        def ours() -> None:
            self.oracle.zero_grad()
            self.oracle.backward(given)
            self.oracle.step()

        def closure() -> float:
            self.opt.zero_grad()
            self.opt.backward(self.loss(given))
            return 1.5

        self._step(ours, lambda: self.opt.step(closure), 1.5)

    def _step(self, ours: Callable[[], None], theirs: Callable[[], Any], value: float | None = None) -> None:
        steps, skips = self.oracle.steps, self.oracle.skipped_steps

        def both() -> bool:
            ours()
            return True

        done, got = self.expect(both, theirs)
        if not done:
            return
        if got != value:
            raise Difference(f"step returned {got!r}, must return {value!r}")
        if (steps, skips) != (self.oracle.steps, self.oracle.skipped_steps):
            self._adopt()

    def _adopt(self) -> None:
        """How far the step brought the gradients of FP32 parameters is left open; it must be one of the oracle's."""
        for i, (p, ours) in enumerate(zip(self.params, self.oracle.params, strict=True)):
            if not ours.is_half:
                if not any(self.is_near(p.grad, choice) for choice in self.oracle.left[i]):
                    raise Difference(f"the gradient of {self.names[i]} after the step is {p.grad}")
                ours.grad = None if p.grad is None else p.grad.detach().clone()
        is_mixed = any(not p.is_half for p in self.oracle.params)
        if self.oracle.folds and (is_mixed or any(p.grad is not None for p in self.oracle.params)):
            self.oracle.zero_grad()  # what is left in the model beside FP32 sums that were used up is left open
            self.opt.zero_grad()

    def state_dict(self) -> None:
        self.saved = copy.deepcopy(self.opt.state_dict()), self.oracle.save()

    def load_state_dict(self) -> None:
        if self.saved is None:
            raise Unspecified
        theirs, ours = self.saved
        self.expect(lambda: self.oracle.load(ours), lambda: self.opt.load_state_dict(theirs))

    def set_scale(self, value: float) -> None:
        self.expect(lambda: self.oracle.write_scale(value), lambda: setattr(self.opt, "loss_scale", value))

    # -- what is compared after each ---------------------------------------------------------------------------------

    def bound(self, i: int) -> float:
        """How far master i may be off.

        Own steps of the wrapped optimizer have torch's bits. The kernels' recipe and torch's each round to the ulp of
        the parameter, as large as it was, once a step: within 2k ulp after k steps. A clip of clipped gradients may
        round once more, by 2^-24 of a gradient, which moves SGD's weights by lr times that, over 1 - momentum in all,
        and AdamW's by less.
        """
        k, p = max(self.oracle.steps, 1), self.oracle.params[i]
        rounding = 0.0 if self.is_exact else 2 * k * float(np.spacing(np.float32(p.largest)))
        if not self.oracle.clips:
            return rounding
        largest = max(p.largest, 64.0)
        rounding = 2 * k * float(np.spacing(np.float32(p.largest)))
        return rounding + k * self.oracle.clips * 2.0**-22 * largest

    def compare(self) -> None:
        oracle, opt = self.oracle, self.opt
        counts = {"loss_scale": (float(opt.loss_scale), oracle.scale.value)}
        counts["skipped_steps"] = int(opt.skipped_steps), oracle.skipped_steps
        counts["the second scale"] = float(self.other.scale), oracle.other.value
        if oracle.step_was_skipped is not None:
            counts["step_was_skipped"] = bool(opt.step_was_skipped), oracle.step_was_skipped
        for what, (got, want) in counts.items():
            if got != want:
                raise Difference(f"{what} is {got}, must be {want}")
        for i, (p, master, ours) in enumerate(zip(self.params, opt.master_params(), oracle.params, strict=True)):
            off = (master.detach().double() - ours.master.detach().double()).abs().max().item()
            if not off <= self.bound(i):
                raise Difference(f"the master of {self.names[i]} is {master.tolist()}, must be {ours.master.tolist()}")
            if not same(p, master.detach().to(p.dtype)):
                raise Difference(f"{self.names[i]} is not its master rounded: {p.tolist()}, {master.tolist()}")
            self._compare_model_grad(i)

    def _compare_model_grad(self, i: int) -> None:
        oracle, ours, grad = self.oracle, self.oracle.params[i], self.params[i].grad
        if oracle.stage is Stage.INTERRUPTED or (oracle.is_open and not oracle.is_folded):
            return
        if oracle.folds and oracle.stage is Stage.SCALED:
            return  # a part of it may be in sums
        if ours.is_half:
            if not same(grad, ours.grad):
                raise Difference(f"the model's gradient of {self.names[i]} is {grad}, must be {ours.grad}")
        elif not any(self.is_near(grad, choice) for choice in oracle.shown_by_fp32(i)):
            raise Difference(f"the gradient of {self.names[i]} is {grad}, must be {oracle.shown_by_fp32(i)}")


def play(
    setting: Setting, calls: Sequence[Call], wrap: type[MixedPrecisionOptimizer] = MixedPrecisionOptimizer
) -> None:
    """Make the calls one after the other; AssertionError with all that is needed to make them again."""
    world, k = Play(setting, wrap), -1
    try:
        world.compare()
        for k, call in enumerate(calls):  # noqa: B007
            world.do(call)
    except Exception as error:
        made = ",\n    ".join(map(repr, calls[: k + 1]))
        what = f"{type(error).__name__}: {error}"
        where = f"after these calls the oracle is in {world.oracle.stage}"
        raise AssertionError(f"{what}\n\nplay({setting}, [\n    {made},\n])\n{where}") from error


# -- sequences ---------------------------------------------------------------------------------------------------------

GRADS = (0.0, 0.25, -0.25, 0.5, -0.5, 1.0)


def make_setting(draw: random.Random) -> Setting:
    folds = draw.random() < 0.25
    dynamic = draw.random() < 0.4
    exponents = [12] if folds else [12, 13, 14, 15]
    return {
        "dtypes": draw.choice(["hhh", "hfh", "fhb", "bb", "hf", "bfh", "h"]),
        "optimizer": draw.choice(list(MAKES)),
        "dynamic": dynamic,
        "scale": 2.0 ** draw.choice(exponents) if dynamic else draw.choice([1.0, 1024.0]),
        "accumulation": "fp32" if folds else "model",
        "fused_step": draw.choice(["auto", False]),
        "frozen": draw.random() < 0.15,
    }


def make_calls(draw: random.Random, setting: Setting) -> list[Call]:
    """Whole training steps with single calls between and within them."""
    if len(setting["dtypes"]) == 1:
        setting["frozen"] = False

    def grads(bad: float = 0.03) -> tuple[float | None, ...]:
        out: list[float | None] = [draw.choice(GRADS) if draw.random() < 0.85 else None for _ in range(3)]
        if draw.random() < bad:
            out[draw.randrange(3)] = draw.choice([INF, -INF, NAN])
        return tuple(out)

    def which() -> int:
        return draw.randrange(3)

    single: list[tuple[float, Callable[[], Call]]] = [
        (3, lambda: ("backward", grads())),
        (1, lambda: ("backward", grads(0.5))),
        (2, lambda: ("backward", grads(), False)),
        (2, lambda: ("scale_loss", grads())),
        (1, lambda: ("plain_backward", grads())),
        (0.4, lambda: ("second_scaler", grads(0.2))),
        (0.4, lambda: ("interrupted_backward", which())),
        (1, lambda: ("update_master_grads",)),
        (1.5, lambda: ("clip", draw.choice([0.125, 1.0, 1e6]))),
        (0.5, lambda: ("clip_values", draw.choice([0.25, 10.0]))),
        (0.8, lambda: ("edit_model", which(), draw.choice([0.5, 0.0, 2.0, INF]), draw.random() < 0.5)),
        (0.6, lambda: ("edit_model", which(), None, False)),
        (0.3, lambda: ("give_model", which(), 0.5)),
        (1.5, lambda: ("read_masters", which())),
        (0.8, lambda: ("edit_master", which(), draw.choice([0.5, 0.0, 3.0]))),
        (0.6, lambda: ("set_master", which(), draw.choice([0.5, -1.0, None]))),
        (1.5, lambda: ("zero_grad",)),
        (0.6, lambda: ("zero_grad", False)),
        (0.8, lambda: ("model_zero_grad",)),
        (2, lambda: ("step",)),
        (0.4, lambda: ("step_with_closure", draw.choice([None, grads()]))),
        (0.4, lambda: ("state_dict",)),
        (0.4, lambda: ("load_state_dict",)),
        (0.5, lambda: ("set_scale", draw.choice([1.0, 1024.0, 4096.0]))),
    ]
    weights = [weight for weight, _ in single]

    def some(chance: float) -> list[Call]:
        count = 0
        while count < 4 and draw.random() < chance:
            count += 1
        return [make() for _, make in draw.choices(single, weights, k=count)]

    calls: list[Call] = []
    for _ in range(draw.randint(2, 4)):
        calls += some(0.3)
        for _ in range(draw.randint(1, 2)):
            calls += [draw.choice([("backward", grads()), ("backward", grads(), False), ("scale_loss", grads())])]
            calls += some(0.3)
        calls += some(0.5)
        calls += [("step",)]
        calls += some(0.3)
        calls += [("zero_grad",)] if draw.random() < 0.8 else []
    return calls


def make_sequence(seed: int) -> tuple[Setting, list[Call]]:
    draw = random.Random(seed)
    setting = make_setting(draw)
    return setting, make_calls(draw, setting)


@pytest.mark.parametrize("first", range(0, SEQUENCES, BATCH))
def test_every_call_does_what_the_contract_says(first: int) -> None:
    for seed in range(first, min(first + BATCH, SEQUENCES)):
        try:
            play(*make_sequence(seed))
        except AssertionError as error:
            pytest.fail(f"seed {seed}\n{error}", pytrace=False)


# -- the comparison finds what is broken -------------------------------------------------------------------------------


class ClipsNothing(MixedPrecisionOptimizer):
    def clip_master_grads(self, max_norm: float, *args: Any, **options: Any) -> Tensor:
        return super().clip_master_grads(INF, *args, **options)


class CountsTheSecondBackwardTwice(MixedPrecisionOptimizer):
    def backward(self, loss: Tensor, **options: Any) -> None:
        twice = any(p.grad is not None for p in self.model_params())
        super().backward(loss * 2 if twice else loss, **options)


class TakesAnyEdit(MixedPrecisionOptimizer):
    def step(self, closure: Any = None) -> Any:
        self.update_master_grads()
        return super().step(closure)


class NeverClears(MixedPrecisionOptimizer):
    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


@pytest.mark.parametrize("broken", [ClipsNothing, CountsTheSecondBackwardTwice, TakesAnyEdit, NeverClears])
def test_a_broken_engine_is_found(broken: type[MixedPrecisionOptimizer]) -> None:
    def many() -> None:
        for seed in range(60):
            play(*make_sequence(seed), wrap=broken)

    with pytest.raises(AssertionError, match=r"play\("):
        many()
