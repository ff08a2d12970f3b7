"""Random calls, legal and illegal, to torch's GradScaler and to ours: the same scales, bits and error types.

Left out are the calls where ours does something else on purpose, each tested in another file: steps without gradients,
closures, scales outside the bounds, FP16 gradients.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import hypothesis.strategies as st
import products
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.optim import SGD, Adam, AdamW

from grad_scaler.pairs import Ours, Theirs, assert_norm, assert_same_bits, exact_norm, linear_loss, outcome, parameters

OPTIMIZERS = {
    "sgd": lambda params: SGD(params, lr=0.125, momentum=0.5),
    "foreach": lambda params: SGD(params, lr=0.125, momentum=0.5, weight_decay=0.25, foreach=True),
    "adam": lambda params: Adam(params, lr=0.0625),
    "fused": lambda params: AdamW(params, lr=0.0625, fused=True),
}
LAYOUTS = ([(3,), (2, 2)], [(5,), (), (0,)])
BAD = {"inf": float("inf"), "nan": float("nan"), "-inf": float("-inf")}
numbers = st.integers(-8, 8).map(float)


class Side:
    """One scaler with two optimizers."""

    def __init__(self, cls: type, kinds: list[str], dtypes: list[torch.dtype], **scaling: Any) -> None:
        self.scaler = cls("cpu", **scaling)
        self.params = [parameters(shapes, dtype) for shapes, dtype in zip(LAYOUTS, dtypes, strict=True)]
        pairs = zip(kinds, self.params, strict=True)
        self.optimizers = [OPTIMIZERS[kind](params) for kind, params in pairs]

    def grads(self, which: int) -> list[torch.Tensor]:
        return [p.grad for p in self.params[which] if p.grad is not None]

    def backward(self, terms: list[tuple[int, list[float]]]) -> None:
        losses = [linear_loss(self.params[which], coefficients) for which, coefficients in terms]
        for loss in self.scaler.scale(losses):
            loss.backward()

    def stage(self, which: int) -> str:
        state = self.scaler._per_optimizer_states.get(id(self.optimizers[which]))  # [...] would make one
        return "READY" if state is None else str(state["stage"].name)


class SameAsTorch(RuleBasedStateMachine):
    @initialize(
        kinds=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=2, max_size=2),
        dtypes=st.lists(st.sampled_from([torch.float32, torch.float64]), min_size=2, max_size=2),
        binary=st.booleans(),
        interval=st.integers(1, 4),
        data=st.data(),
    )
    def make(self, kinds: list[str], dtypes: Any, binary: bool, interval: int, data: Any) -> None:
        # With grad_scale torch's fused steps divide by the scale, which is x * (1/scale) for powers of two only.
        binary = binary or "fused" in kinds
        scaling = {
            "init_scale": data.draw(st.sampled_from([2.0**16, 2.0**10] if binary else [2.0**16, 1000.1, 96.0])),
            "growth_factor": data.draw(st.sampled_from([2.0, 4.0] if binary else [2.0, 1.5, 1.1])),
            "backoff_factor": data.draw(st.sampled_from([0.5, 0.25] if binary else [0.5, 0.7, 0.3])),
            "growth_interval": interval,
        }
        self.binary = binary
        self.sides = [Side(cls, kinds, dtypes, **scaling) for cls in (Theirs, Ours)]

    def both(self, call: Any) -> tuple[type | None, list[Any]]:
        (error, theirs), (our_error, ours) = (outcome(lambda side=side: call(side)) for side in self.sides)
        assert error is our_error, f"torch raised {error}, ours {our_error}"
        return error, [theirs, ours]

    def has_grads(self, which: int) -> bool:
        return bool(self.sides[0].grads(which))

    @rule(
        which=st.sampled_from([(0,), (1,), (0, 1), (0, 0)]),
        coefficients=st.lists(numbers, min_size=6, max_size=6),
        bad=st.sampled_from([None, None, None, None, *BAD]),
    )
    def random_backward(self, which: tuple[int, ...], coefficients: list[float], bad: str | None) -> None:
        self.backward(which, coefficients, bad)

    def backward(self, which: tuple[int, ...], coefficients: list[float], bad: str | None) -> None:
        terms = [(i, coefficients[3 * k : 3 * k + len(LAYOUTS[i])]) for k, i in enumerate(which)]
        if bad is not None:
            terms[0][1][0] = BAD[bad]
        self.both(lambda side: side.backward(terms))

    @rule(
        coefficients=st.lists(numbers, min_size=6, max_size=6),
        bad=st.sampled_from([None, None, None, *BAD]),
        clips=st.booleans(),
        repeats=st.integers(1, 3),
    )
    def whole_iterations(self, coefficients: list[float], bad: str | None, clips: bool, repeats: int) -> None:
        """Legal from beginning to end, which random calls seldom are."""
        for _ in range(repeats):
            for which in (0, 1):
                self.zero_grad(which, True)
            self.backward((0, 1), coefficients, bad)
            for which in (0, 1):
                if clips and which == 0:
                    self.unscale(which)
                    self.clip_with_torch(which, 0.5)
                self.step(which)
            self.update(None)
            self.same()

    @rule(value=numbers)
    def scale_a_structure(self, value: float) -> None:
        error, (theirs, ours) = self.both(
            lambda s: s.scaler.scale([torch.tensor([value]), (torch.tensor(value, dtype=torch.float64),)])
        )
        assert error is None
        assert type(theirs[1]) is type(ours[1]) is tuple
        assert_same_bits(theirs[0], ours[0])
        assert_same_bits(theirs[1][0], ours[1][0])

    @rule(which=st.integers(0, 1))
    def unscale(self, which: int) -> None:
        if self.has_grads(which):
            self.both(lambda s: s.scaler.unscale_(s.optimizers[which]))

    @rule(which=st.integers(0, 1), max_norm=st.sampled_from([0.5, 3.0, 1e6]))
    def clip_with_torch(self, which: int, max_norm: float) -> None:
        _, norms = self.both(lambda s: torch.nn.utils.clip_grad_norm_(s.params[which], max_norm))
        assert_same_bits(*norms, "norm")

    @rule(which=st.integers(0, 1), max_norm=st.sampled_from([0.5, 3.0, 1e6]))
    def clip_with_the_scaler(self, which: int, max_norm: float) -> None:
        """torch's side unscales, and clips by torch's formula with the exact norm, where gradients are finite."""
        theirs, ours = self.sides
        if not self.has_grads(which):
            return
        error, norm = outcome(lambda: ours.scaler.clip_grad_norm_(ours.optimizers[which], max_norm))
        if theirs.stage(which) == "READY":
            assert outcome(lambda: theirs.scaler.unscale_(theirs.optimizers[which]))[0] is error
        elif theirs.stage(which) == "STEPPED":
            assert error is RuntimeError
        if error is None:
            expected = exact_norm(theirs.grads(which))
            flags = theirs.scaler._found_inf_per_device(theirs.optimizers[which]).values()
            if expected.isfinite() and not any(map(bool, flags)):
                assert_norm(norm, expected)
                factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
                for grad in theirs.grads(which):
                    grad.mul_(factor)
            else:
                assert not norm.isfinite() or any(map(bool, flags))

    @rule(which=st.integers(0, 1))
    def step(self, which: int) -> None:
        if self.has_grads(which) or self.sides[0].stage(which) != "READY":
            self.both(lambda s: s.scaler.step(s.optimizers[which]))

    @rule(new_scale=st.sampled_from([None, None, None, None, 512.0, "tensor", "grad", "two"]))
    def update(self, new_scale: Any) -> None:
        kinds = {
            "tensor": torch.tensor(64.0),
            "grad": torch.tensor([64.0], requires_grad=True),
            "two": torch.tensor([1.0, 2.0]),
        }
        self.both(lambda s: s.scaler.update(kinds.get(new_scale, new_scale)))
        if self.sides[0].scaler.get_scale() < 2.0:  # under 1, unscaling itself may overflow: ours looks at the product
            self.both(lambda s: s.scaler.update(1024.0))

    @rule(which=st.integers(0, 1), set_to_none=st.booleans())
    def zero_grad(self, which: int, set_to_none: bool) -> None:
        self.both(lambda s: s.optimizers[which].zero_grad(set_to_none))

    @rule(factor=st.sampled_from([2.0, 4.0]), backoff=st.sampled_from([0.5, 0.125]), more=st.integers(1, 3))
    def change_settings(self, factor: float, backoff: float, more: int) -> None:
        interval = self.sides[0].scaler._get_growth_tracker() + more

        def change(side: Side) -> tuple[float, ...]:
            side.scaler.set_growth_factor(factor)
            side.scaler.set_backoff_factor(backoff)
            side.scaler.set_growth_interval(interval)
            s = side.scaler
            return s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval()

        _, (theirs, ours) = self.both(change)
        assert theirs == ours

    @rule()
    def exchange_states(self) -> None:
        """torch's state into ours and ours into torch's, through a file."""
        states = []
        for side in self.sides:
            file = io.BytesIO()
            torch.save(side.scaler.state_dict(), file)
            file.seek(0)
            states.append(torch.load(file, weights_only=True))
        for side, state in zip(self.sides, reversed(states), strict=True):
            side.scaler.load_state_dict(state)

    @rule()
    def pickle_both(self) -> None:
        def copy(side: Side) -> None:
            side.scaler = pickle.loads(pickle.dumps(side.scaler))

        self.both(copy)

    @precondition(lambda self: hasattr(self, "sides"))
    @invariant()
    def same(self) -> None:
        theirs, ours = self.sides
        assert theirs.scaler.get_scale() == ours.scaler.get_scale()
        assert theirs.scaler._get_growth_tracker() == ours.scaler._get_growth_tracker()
        for which in (0, 1):
            for p, q in zip(theirs.params[which], ours.params[which], strict=True):
                assert_same_bits(p, q, "parameter")
                if not _torch_spoils(theirs, which):
                    assert_same_bits(p.grad, q.grad, "gradient")


def _torch_spoils(side: Side, which: int) -> bool:
    """Not finite: ours leaves such gradients alone, torch turns them to nan, and a fused step writes them."""
    return not all(bool(grad.isfinite().all()) for grad in side.grads(which))


TestSameAsTorch = SameAsTorch.TestCase
TestSameAsTorch.settings = settings(
    settings.get_profile("default"), max_examples=100 if products.takes_all else 25, stateful_step_count=25
)
