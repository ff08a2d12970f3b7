"""Random sequences of calls against a small model of the contract in numpy: never a half-changed state."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.checks import assert_same, assert_same_bits, linear_loss, snapshot
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler

INF, NAN = float("inf"), float("nan")
# Halves whose products with every scale below are exact, and which add up without rounding surprises of
# their own.
GRADS = st.sampled_from([0.0, 0.5, -0.25, 1.0, -2.0, 2.0**-9, 3.0, None, INF, -INF, NAN])
CLEAN = st.sampled_from([0.0, 0.5, -0.25, 1.0, -2.0, 2.0**-9])
SHAPES = [(3,), (2, 2)]


class Calls(RuleBasedStateMachine):
    """SGD with powers of two for constants, so that numpy and every torch variant agree to the bit."""

    @initialize(
        kind=st.sampled_from(["static", "dynamic", "hysteresis"]),
        folding=st.booleans(),
        impl=st.sampled_from([{"foreach": False}, {"foreach": True}, {"fused": True}]),
        fused_step=st.sampled_from([False, "auto"]),
    )
    def start(self, kind: str, folding: bool, impl: dict[str, bool], fused_step: bool | str) -> None:
        self.kind, self.folding, self.impl, self.fused_step = kind, folding, impl, fused_step
        self.params, self.opt = self._build()
        self.masters = [np.ones(s, np.float32) for s in SHAPES]
        self.sgd = oracle.SGD(0.25, momentum=0.5)
        self.scaler: Any = {
            "static": lambda: oracle.StaticScaler(16.0),
            "dynamic": lambda: oracle.DynamicScaler(16.0, growth_interval=2, min_scale=1.0, max_scale=256.0),
            "hysteresis": lambda: oracle.DynamicScaler(
                16.0, growth_interval=3, hysteresis=2, min_scale=1.0, max_scale=256.0
            ),
        }[kind]()
        self.skipped, self.was_skipped = 0, False
        self._clear()

    def _build(self) -> tuple[list[torch.nn.Parameter], MixedPrecisionOptimizer]:
        params = [torch.nn.Parameter(torch.ones(s, dtype=torch.float16)) for s in SHAPES]
        scaler = {
            "static": lambda: StaticLossScaler(16.0),
            "dynamic": lambda: DynamicLossScaler(16.0, growth_interval=2, min_scale=1.0, max_scale=256.0),
            "hysteresis": lambda: DynamicLossScaler(
                16.0, growth_interval=3, hysteresis=2, min_scale=1.0, max_scale=256.0
            ),
        }[self.kind]()
        inner = torch.optim.SGD(params, lr=0.25, momentum=0.5, **self.impl)
        return params, MixedPrecisionOptimizer(
            inner,
            scaler=scaler,
            grad_accumulation="fp32" if self.folding else "model",
            fused_step=self.fused_step,
        )

    def _clear(self, zeros: bool = False) -> None:
        """No gradients: half sums in "model" mode, float sums in folding mode, and what a clip made of
        them. Or zeros in place of those that are there, which take part in the next step, as in torch."""
        left = [None if s is None else np.zeros_like(s) for s in self.sums] if zeros else [None] * len(SHAPES)
        self.sums: list[np.ndarray | None] = left
        self.clipped: list[np.ndarray | None] | None = None
        self.pending = False
        self.written: list[bool] = [False] * len(SHAPES)

    def _take_zeros(self) -> None:
        """Whoever asks for gradients gets zeros that are there."""
        self.pending = self.pending or any(s is not None for s in self.sums)

    def _unscaled(self) -> list[np.ndarray | None]:
        if self.folding:
            return list(self.sums)
        return [None if s is None else oracle.unscale(s, self.scaler.scale) for s in self.sums]

    # ---- calls

    @rule(grads=st.tuples(GRADS, GRADS), update=st.booleans())
    def backward(self, grads: tuple[Any, Any], update: bool) -> None:
        self._backward(grads, update)

    @rule(grads=st.tuples(CLEAN, CLEAN), update=st.booleans())
    def clean_backward(self, grads: tuple[Any, Any], update: bool) -> None:
        self._backward(grads, update)

    def _backward(self, grads: tuple[Any, Any], update: bool) -> None:
        if all(g is None for g in grads):
            return
        self.opt.backward(linear_loss(self.params, grads), update_master_grads=update)
        if self.folding and not update:
            self.opt.update_master_grads()
        for i, g in enumerate(grads):
            if g is None:
                continue
            new = oracle.round_half(np.full(SHAPES[i], np.float32(g) * np.float32(self.scaler.scale)))
            part = oracle.unscale(new, self.scaler.scale) if self.folding else new
            with np.errstate(all="ignore"):
                base = self.sums[i] if self.clipped is None or not self.folding else self.clipped[i]
                self.sums[i] = part if base is None else (base + part).astype(part.dtype)
        if self.folding and self.clipped is not None:
            self.sums = [s if g is not None else c for s, g, c in zip(self.sums, grads, self.clipped, strict=True)]
        self.clipped, self.pending = None, True

    @rule()
    @precondition(lambda self: not self.folding)
    def update_master_grads(self) -> None:
        if self.pending:
            self.opt.update_master_grads()
            self.clipped = None

    @rule(max_norm=st.sampled_from([0.5, 4.0, 1e6]))
    def clip(self, max_norm: float) -> None:
        got = float(self.opt.clip_master_grads(max_norm))
        self._take_zeros()
        now = self._unscaled() if self.clipped is None else self.clipped
        total, clipped = oracle.clip(now, max_norm)
        if np.isfinite(total):
            # Squares and sums are of at most 7 numbers, exact or correctly rounded in double: 1 float32 ulp.
            assert abs(got - total) <= 2.0**-23 * total
        else:
            assert not np.isfinite(got)
        if self.pending:
            self.clipped = clipped

    @rule(zero=st.booleans())
    def step(self, zero: bool) -> None:
        self._take_zeros()
        grads = self._unscaled() if self.clipped is None else self.clipped
        bad = any(g is not None and not np.isfinite(g).all() for g in grads)
        if self.pending and not bad:
            self._take_writes()
        self.opt.step()
        if self.pending:
            if not bad:
                self.sgd.step(self.masters, grads)
                for p, m in zip(self.params, self.masters, strict=True):
                    assert_same_bits(p, torch.from_numpy(oracle.round_half(m)))
            self.scaler.update(bad)
            self.skipped += bad
            self.was_skipped = bad
        else:
            self.was_skipped = False
        if self.was_skipped:
            assert bool(self.opt.step_was_skipped)
            assert len(self.opt.overflow_report()) > 0
        else:
            assert self.opt.overflow_report() == []
        self.opt.zero_grad(set_to_none=zero)
        written = self.written if not self.pending or self.was_skipped else [False] * len(SHAPES)
        self._clear(zeros=not zero)
        self.written = written

    @rule(zero=st.booleans())
    def zero_grad(self, zero: bool) -> None:
        self.opt.zero_grad(set_to_none=zero)
        written = self.written
        self._clear(zeros=not zero)
        self.written = written

    def _take_writes(self) -> None:
        for i, p in enumerate(self.params):
            if self.written[i]:
                now = p.detach().numpy()
                self.masters[i] = np.where(
                    oracle.round_half(self.masters[i]).view(np.uint16) == now.view(np.uint16),
                    self.masters[i],
                    now.astype(np.float32),
                )
        self.written = [False] * len(SHAPES)

    @rule(which=st.integers(0, 1), value=st.sampled_from([0.0, 1.5, -4.0]), through_data=st.booleans())
    def write_model(self, which: int, value: float, through_data: bool) -> None:
        p = self.params[which]
        if through_data:
            p.data.view(-1)[1] = value
        else:
            with torch.no_grad():
                p.view(-1)[1] = value
        # Masters are compared with what the model held when they were copied down, so the last write counts.
        self.written[which] = True

    @rule(value=st.sampled_from([4.0, 32.0]))
    def write_scale(self, value: float) -> None:
        if self.pending:
            with pytest.raises(RuntimeError):
                self.opt.loss_scale = value
            return
        self.opt.loss_scale = value
        self.scaler.scale = value
        if hasattr(self.scaler, "clean"):
            self.scaler.clean = 0

    @rule(through_file=st.booleans())
    def round_trip(self, through_file: bool) -> None:
        """Save, load into fresh objects (gradients are not part of a checkpoint), go on with those."""
        sd: Any = self.opt.state_dict()
        self._take_writes()
        if through_file:
            buffer = io.BytesIO()
            torch.save(sd, buffer)
            buffer.seek(0)
            sd = torch.load(buffer, weights_only=True)
        self.params, self.opt = self._build()
        self.opt.load_state_dict(copy.deepcopy(sd))
        assert_same(self.opt.state_dict(), sd)
        self.was_skipped = False  # how many were is part of a checkpoint
        self._clear()

    @rule()
    def copy_both(self) -> None:
        if not self.pending:
            before = snapshot(self.opt, self.params, scaler=True)
            self.params, self.opt = copy.deepcopy((self.params, self.opt))
            assert_same(snapshot(self.opt, self.params, scaler=True), before)
            written = self.written
            self._clear()  # copies have no gradients
            self.written = written

    @rule()
    @precondition(lambda self: not any(self.written))  # a refused call may notice a write, and that is no harm
    def failing_calls(self) -> None:
        before = snapshot(self.opt, self.params, scaler=True)
        for call in (
            lambda: self.opt.backward(1.0),
            lambda: self.opt.clip_master_grads(-1.0),
            lambda: self.opt.load_state_dict({}),
            lambda: self.opt.step(3),
        ):
            with pytest.raises((TypeError, ValueError)):
                call()
        assert_same(snapshot(self.opt, self.params, scaler=True), before)

    # ---- what holds at any time

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        if not hasattr(self, "opt"):
            return
        for i, m in enumerate(self.opt.master_params()):
            if not self.written[i]:
                assert_same_bits(m, torch.from_numpy(self.masters[i]), f"master {i}")
        assert float(self.opt.loss_scale) == self.scaler.scale
        assert int(self.opt.skipped_steps) == self.skipped
        assert bool(self.opt.step_was_skipped) == self.was_skipped


logging.getLogger("fp16opt").addHandler(logging.NullHandler())
Calls.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
TestCalls = Calls.TestCase
