"""Random sequences of public calls against the reference, one machine for each mode.

The machine holds two lists: what the model's gradients truly are (``sums``), and, once somebody clipped or edited, what
the masters' are instead (``edited``). Numbers are such that 16-bit sums are exact at every scale. Left out is what the
contract leaves open: writes into gradients of which a part was set aside with another scale, model writes beside edited
masters, and, where gradients add up in the model, calls after a clip other than those that end or undo it. FP32 sums
keep clips and edits, and go on.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from contract import oracle
from contract.worlds import ALL, INF, NAN, ONE_PASS, SCALES, WRAPPED, Mode, World, sgd

CLEAN = st.sampled_from([0.0, 0.5, -0.25, 1.0, -2.0])
GRADS = st.tuples(*[st.one_of(CLEAN, CLEAN, st.none()) for _ in range(3)]).filter(lambda g: g != (None,) * 3)
WAYS = ["backward", "waiting", "scale_loss"]
WHICH = st.integers(0, 2)


class Calls(RuleBasedStateMachine):
    mode: ClassVar[Mode]
    world_class: ClassVar[type[World]] = World

    @initialize(scale=st.sampled_from(SCALES))
    def start(self, scale: str) -> None:
        options = {"momentum": 0.5} if self.mode.make is sgd else {}
        settings = {"growth_interval": 2, "max_scale": 256.0}
        self.world = self.world_class(self.mode, scale, scaler_settings=settings, **options)
        self.opt, self.params = self.world.opt, self.world.params
        self.clear()

    def clear(self) -> None:
        self.sums: list[Tensor | None] = [None] * 3
        self.edited: list[Tensor | None] | None = None
        self.pending = False  # a backward came since the last step
        self.mine = False  # the model's gradients are the user's: nobody looked, nobody said they are done
        self.looked = False
        self.carried = False  # gradients of an earlier step are in the sums
        self.was_clipped = self.was_edited = self.zeroed = False

    def now(self) -> list[Tensor | None]:
        return list(self.sums) if self.edited is None else list(self.edited)

    def is_sixteen(self, i: int) -> bool:
        return self.params[i].dtype is torch.float16

    # -- backward --------------------------------------------------------------------------------------------------

    def may_add(self) -> bool:
        return self.mode.folds or not (self.was_clipped or self.was_edited)

    @rule(grads=GRADS, how=st.sampled_from(WAYS))
    @precondition(may_add)
    def backward(self, grads: Any, how: str) -> None:
        self._backward(grads, how)

    @rule(grads=GRADS, bad=st.sampled_from([INF, NAN]), which=WHICH)
    @precondition(may_add)
    def overflow(self, grads: Any, bad: float, which: int) -> None:
        self._backward([bad if i == which else g for i, g in enumerate(grads)], "backward")

    def _backward(self, grads: Any, how: str) -> None:
        if self.carried and self.mode.folds and self.mode.is_mixed:
            self.zero_grad()  # whether those of FP32 parameters are used up too is left open
        self.world.leave(how, grads)
        if self.edited is not None:
            self.sums, self.was_clipped, self.was_edited = self.edited, False, False
        for i, g in enumerate(grads):
            if g is not None:
                new, old = torch.full(self.params[i].shape, g), self.sums[i]
                self.sums[i] = new if old is None else old + new
        self.pending, self.mine, self.looked, self.edited, self.zeroed = True, how != "backward", False, None, False

    @rule(grads=GRADS, which=WHICH)
    @precondition(lambda self: self.pending and self.was_edited and not self.was_clipped and not self.mode.folds)
    def backward_after_an_edit(self, grads: Any, which: int) -> None:
        with pytest.raises(RuntimeError):
            self.world.backward(grads)
        self.zero_grad()

    # -- masters' gradients ----------------------------------------------------------------------------------------

    @rule()
    def read(self) -> None:
        """From a 16-bit one on: the read that makes the others true."""
        if not self.pending:
            return
        self.world.check_master_grads(self.now())

    @rule(which=WHICH, value=st.sampled_from([0.5, 3.0, INF, NAN]), replaces=st.booleans())
    @precondition(lambda self: self.pending and not self.was_clipped)
    def edit_master(self, which: int, value: float, replaces: bool) -> None:
        if not self.is_sixteen(which) or self.now()[which] is None:
            return
        master = self.world.masters[which]
        assert master.grad is not None
        new = torch.full(master.shape, value)
        if replaces:
            master.grad = new.clone()
        else:
            master.grad.fill_(value)
        self.edited = self.now()
        self.edited[which], self.was_edited = new, True

    @rule(max_norm=st.sampled_from([0.5, 4.0, 1e6]))
    @precondition(lambda self: self.pending)
    def clip(self, max_norm: float) -> None:
        if not self.was_clipped or max_norm == 1e6:
            self._clip(max_norm)

    def _clip(self, max_norm: float) -> None:
        norm = self.world.expect_norm(self.opt.clip_master_grads(max_norm), self.now())
        self.edited = oracle.clipped(self.now(), norm, max_norm)
        self.was_clipped, self.looked, self.mine = True, True, False

    @rule(grads=GRADS, max_norm=st.sampled_from([0.5, 4.0]))
    @precondition(lambda self: self.mode.folds and self.pending and not self.was_clipped)
    def clip_and_go_on(self, grads: Any, max_norm: float) -> None:
        """Sums that get nothing more are as the first clip has left them."""
        self._clip(max_norm)
        self._backward(grads, "backward")
        self._clip(max_norm)

    @rule()
    @precondition(lambda self: self.pending and not (self.was_clipped and self.carried))
    def update_master_grads(self) -> None:
        """What is in 16 bits begins anew; FP32 sums and gradients of FP32 parameters stay."""
        self.opt.update_master_grads()
        self.looked, self.mine = True, False
        if self.mode.folds:
            return
        pairs = enumerate(zip(self.sums, self.now(), strict=True))
        self.edited = [model if self.is_sixteen(i) else master for i, (model, master) in pairs]
        self.was_edited = False
        if not self.mode.is_mixed:
            self.was_clipped, self.edited = False, None

    # -- the model's gradients -------------------------------------------------------------------------------------

    @rule(which=WHICH, call=st.sampled_from(["step", "clip", "backward"]))
    @precondition(lambda self: self.pending and not self.was_edited and not self.carried and not self.mode.folds)
    def write_model_gradient(self, which: int, call: str) -> None:
        p, old = self.params[which], self.sums[which]
        if not self.is_sixteen(which) or old is None:
            return
        p.grad.fill_(self.world.scale)
        if not self.looked and (self.mine or self.world.scale == 1.0):
            self.sums[which] = torch.ones(p.shape)
            return
        with pytest.raises(RuntimeError, match=self.world.names[which]):
            {
                "step": self.opt.step,
                "clip": lambda: self.opt.clip_master_grads(1.0),
                "backward": lambda: self.world.backward((1.0, 1.0, 1.0)),
            }[call]()
        self.zero_grad()

    @rule(which=WHICH)
    @precondition(lambda self: self.pending and not self.was_edited and not self.carried and not self.mode.folds)
    def drop(self, which: int) -> None:
        self.params[which].grad = None
        self.sums[which] = None
        if self.edited is not None:
            self.edited[which] = None

    # -- clearing --------------------------------------------------------------------------------------------------

    @rule(how=st.sampled_from(["none", "zeros", "model"]))
    def clear_gradients(self, how: str) -> None:
        if how == "zeros" and not self.carried:
            self.zero_grad_to_zeros()
        elif how == "model" and not self.mode.folds:
            self.world.model_zero_grad()
            self.clear()
        else:
            self.zero_grad()

    def zero_grad(self) -> None:
        self.opt.zero_grad()
        self.clear()

    def zero_grad_to_zeros(self) -> None:
        """A backward follows, as whether a step on zeros alone counts as a clean one of the scale is left open."""
        if self.mode.folds and not self.pending:
            return
        self.opt.zero_grad(set_to_none=False)
        sums = [None if s is None else torch.zeros_like(s) for s in self.sums]
        self.clear()
        self.sums, self.zeroed = sums, any(s is not None for s in sums)

    # -- the step and what is between steps ------------------------------------------------------------------------

    @rule(grads=GRADS, how=st.sampled_from(WAYS), max_norm=st.sampled_from([None, 0.5]))
    @precondition(may_add)
    def whole_step(self, grads: Any, how: str, max_norm: float | None) -> None:
        self._backward(grads, how)
        if max_norm is not None:
            self._clip(max_norm)
        self._step(False)

    def teardown(self) -> None:
        """Whatever is left is stepped, so that no sequence ends unseen."""
        if hasattr(self, "world") and not self.zeroed:
            self._step(False)

    @rule(closure=st.booleans())
    @precondition(lambda self: self.pending)
    def step(self, closure: bool) -> None:
        self._step(closure)

    @rule()
    @precondition(lambda self: not self.zeroed)
    def step_on_what_is_there(self) -> None:
        self._step(False)

    def _step(self, closure: bool) -> None:
        reference, grads = self.world.reference, self.now()
        returned = self.opt.step((lambda: 2.5) if closure else None)
        assert returned == (2.5 if closure else None)
        if self.pending and any(g is not None for g in grads):
            reference.step(grads)
        else:
            reference.step_was_skipped = False
        self.world.check()
        self._after_step()

    def _after_step(self) -> None:
        own_were_clipped = self.mode.is_mixed and self.was_clipped
        sums = [None if self.mode.folds and self.is_sixteen(i) else s for i, s in enumerate(self.sums)]
        self.clear()
        if own_were_clipped:  # whether the clip was written into their gradients is left open
            self.zero_grad()
            return
        self.sums, self.carried = sums, any(s is not None for s in sums)

    @rule(deep=st.booleans())
    @precondition(lambda self: not self.pending)
    def copy_or_load(self, deep: bool) -> None:
        """A round trip of the state, or of the model and the optimizer together."""
        if deep:
            self.zero_grad()
            self.world.params, self.world.opt = copy.deepcopy((self.params, self.opt))
            self.params, self.opt = self.world.params, self.world.opt
        else:
            self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))
            self.zero_grad()

    @rule(which=WHICH, value=st.sampled_from([0.75, -1.5]))
    @precondition(lambda self: not self.pending)
    def write_model(self, which: int, value: float) -> None:
        """``state_dict`` notices it; elements whose bits are the same keep their masters."""
        with torch.no_grad():
            before = self.params[which].detach().clone()
            self.params[which].fill_(value)
            changed = self.params[which] != before
            self.world.reference.masters[which][changed] = value
        self.opt.state_dict()
        self.world.check_weights()

    @invariant()
    def weights_are_the_references(self) -> None:
        if hasattr(self, "world"):
            self.world.check_weights()


# Without shrinking, which takes minutes here: that many calls in a row can be read as they are.
RUNS = settings(max_examples=25, stateful_step_count=25, phases=(Phase.explicit, Phase.generate))


def _machine(tested: Mode, wrapped: type[World] = World) -> type[Calls]:
    class Machine(Calls):
        mode = tested
        world_class = wrapped

    return Machine


def _case(mode: Mode) -> Any:
    case = _machine(mode).TestCase
    case.settings = RUNS
    return case


TestWrapped, TestOnePass, TestOnePassAdamW, TestSplit, TestFolding, TestMixed, TestMixedOnePass, TestMixedFolding = (
    _case(mode) for mode in ALL
)


class Forgets(World.wrap):  # type: ignore[misc]
    """Clips nothing."""

    def clip_master_grads(self, max_norm: float, *args: float) -> Tensor:
        return super().clip_master_grads(INF)


class Doubles(World.wrap):  # type: ignore[misc]
    """Its second backward of a step counts twice."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        twice = any(p.grad is not None for p in self.model_params())
        super().backward(loss * 2 if twice else loss, **options)


@pytest.mark.parametrize("broken", [Forgets, Doubles], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("mode", [WRAPPED, ONE_PASS], ids=lambda mode: mode.name)
def test_the_machine_finds_a_broken_engine(mode: Mode, broken: type) -> None:
    class Broken(World):
        wrap = broken

    few = settings(RUNS, phases=(Phase.generate,), print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(_machine(mode, Broken), settings=few)
