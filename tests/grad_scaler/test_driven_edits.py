"""Gradients that a loop assigns, drops or asks about while a GradScaler drives: as torch does with FP32."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import DRIVEN, Ours, Theirs

pytestmark = DRIVEN

HALVES, MIXED, WIDE = (torch.float16,) * 2, (torch.float16, torch.float32), (torch.float32,) * 2
SCALERS = pytest.mark.parametrize("cls", [Theirs, Ours], ids=["torch", "fp16opt"])
DTYPES = pytest.mark.parametrize("dtypes", [HALVES, MIXED, WIDE], ids=["halves", "mixed", "wide"])
MODES = pytest.mark.parametrize(
    "options",
    [{}, {"fused_step": False}, {"grad_accumulation": "fp32"}, {"master_weights": "split"}],
    ids=["one pass", "wrapped", "sums", "split"],
)
SCALE = 4.0


class Driven:
    """Two parameters of ones, and the wrapper around SGD with momentum; without ``options`` plain SGD on FP32."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], cls: Any = None, options: dict[str, Any] | None = None) -> None:
        self.params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
        self.opt: Any = SGD(self.params, lr=0.125, momentum=0.5)
        if options is not None:
            self.opt = MixedPrecisionOptimizer(self.opt, **options)
        self.scaler = None if cls is None else cls("cpu", init_scale=SCALE)

    @property
    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params()) if hasattr(self.opt, "master_params") else self.params

    def loss(self, first: float | None, second: float | None) -> Tensor:
        terms = zip(self.params, (first, second), strict=True)
        return torch.stack([(p.float() * c).sum() for p, c in terms if c is not None]).sum()

    def backward(self, first: float | None, second: float | None) -> None:
        loss = self.loss(first, second)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        if self.scaler is None:
            self.opt.step()
            return
        self.scaler.step(self.opt)
        self.scaler.update()

    def values(self) -> list[float]:
        assert all(torch.equal(p.float(), p.float()[:1].expand(3)) for p in self.params)
        return [p[0].item() for p in self.params]


def _as_plain(play: Callable[[Driven], Any], dtypes: Any, cls: Any, options: Any) -> Driven:
    """The wrapper's side of a play, whose weights are those of the same play on FP32; all numbers are exact."""
    plain = Driven(WIDE, None if cls is None else Theirs)
    mine = Driven(dtypes, cls, options)
    expected, found = play(plain), play(mine)
    assert mine.values() == plain.values()
    assert found == expected
    return mine


def _assign(tensors: list[Tensor], value: float | None) -> None:
    held = tensors[0]
    held.grad = None if value is None else torch.full((3,), value, dtype=held.dtype)


@pytest.mark.parametrize("cls", [None, Theirs, Ours], ids=["nobody", "torch", "fp16opt"])
@DTYPES
@MODES
@pytest.mark.parametrize("first", [1.0, None], ids=["in place of one", "where there was none"])
@pytest.mark.parametrize("value", [4.0, None])
def test_a_master_gradient_assigned_before_anybody_has_read_one_counts(
    cls: Any, dtypes: Any, options: Any, first: float | None, value: float | None
) -> None:
    def play(side: Driven) -> None:
        held = side.masters
        side.backward(first, 2.0)
        _assign(held, None if value is None else value * (1.0 if cls is None else SCALE))
        side.step()

    if options.get("master_weights") == "split":
        pytest.skip("split masters are read, not held")
    _as_plain(play, dtypes, cls, options)


@SCALERS
@DTYPES
@MODES
@pytest.mark.parametrize("read", ["nothing", "param_groups", "masters"])
@pytest.mark.parametrize("value", [4.0, None, math.inf])
@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_replaced_in_the_model_after_unscaling_is_stepped(
    cls: Any, dtypes: Any, options: Any, read: str, value: float | None, clip: bool
) -> None:
    """By one of FP32, as ``param.grad = f(param.grad)`` makes it, whether or not the wrapper has looked before."""

    def play(side: Driven) -> None:
        side.backward(1.0, 2.0)
        side.scaler.unscale_(side.opt)
        if clip and isinstance(side.opt, MixedPrecisionOptimizer):
            side.opt.clip_master_grads(1e6)
        side.params[0].grad = None if value is None else torch.full((3,), value)
        if read != "nothing":
            groups = side.opt.param_groups if read == "param_groups" else [{"params": side.masters}]
            grads = [p.grad for group in groups for p in group["params"]]
            if options.get("master_weights") != "split" or read == "param_groups":
                assert [None if g is None else g[0].item() for g in grads] == [value, 2.0]
        if value != math.inf or isinstance(side.opt, MixedPrecisionOptimizer):
            side.step()  # torch's would step by inf; the wrapper skips

    mine = _as_plain(play, dtypes, cls, options)
    assert mine.opt.skipped_steps == (value == math.inf)


@SCALERS
@MODES
def test_a_16_bit_gradient_that_replaces_an_unscaled_one_is_stepped(cls: Any, options: Any) -> None:
    def play(side: Driven) -> None:
        side.backward(1.0, 2.0)
        side.scaler.unscale_(side.opt)
        side.params[0].grad = torch.full((3,), 4.0, dtype=side.params[0].dtype)
        side.step()

    _as_plain(play, HALVES, cls, options)


@SCALERS
@DTYPES
@MODES
def test_the_norm_is_that_of_replaced_and_dropped_gradients(cls: Any, dtypes: Any, options: Any) -> None:
    side = Driven(dtypes, cls, options)
    side.backward(1.0, 2.0)
    side.scaler.unscale_(side.opt)
    side.params[0].grad = torch.full((3,), 4.0)
    assert float(side.opt.clip_master_grads(1e6)) == pytest.approx(math.sqrt(60.0), rel=1e-6)
    side.params[0].grad = None
    assert float(side.opt.clip_master_grads(1e6)) == pytest.approx(math.sqrt(12.0), rel=1e-6)
    assert [m.grad is None for m in side.masters] == [True, False] or options.get("master_weights") == "split"
    side.params[0].grad = torch.full((3,), 2.0)
    assert float(side.opt.clip_master_grads(1e6)) == pytest.approx(math.sqrt(24.0), rel=1e-6)
    side.step()
    assert side.values() == [0.75, 0.75]


@pytest.mark.parametrize("write", ["written", "replaced"])
@MODES
def test_a_look_at_a_plain_backward_is_followed_by_no_shown_write(options: Any, write: str) -> None:
    """Nobody shares gradients then: as after ``backward(loss)`` of the wrapper. It was stepped with another's norm."""
    side = Driven(HALVES, None, options)
    side.backward(1.0, 2.0)
    side.opt.clip_master_grads(1e6)
    if write == "written":
        side.params[0].grad.mul_(2.0)
    else:
        side.params[0].grad = side.params[0].grad * 2.0
    with pytest.raises(RuntimeError, match=r"were written after they were looked at: group 0, param 0"):
        side.opt.step()
    assert side.values() == [1.0, 1.0]
    side.opt.update_master_grads()
    side.opt.step()
    assert side.values() == [0.75, 0.75]


ASKS: dict[str, Callable[[Any], Any]] = {
    "skipped_steps": lambda opt: opt.skipped_steps,
    "step_was_skipped": lambda opt: opt.step_was_skipped,
    "stats": lambda opt: opt.stats(),
}


@SCALERS
@DTYPES
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("unscales", [True, False])
def test_one_overflow_is_counted_once_whenever_somebody_asks(
    cls: Any, dtypes: Any, which: int, ask: str, unscales: bool
) -> None:
    side = Driven(dtypes, cls, {})

    def look() -> None:
        assert side.opt.param_groups[0]["lr"] == 0.125
        ASKS[ask](side.opt)

    for k in range(4):
        look()
        side.backward(*[math.inf if k % 2 and i == which else 1.0 for i in range(2)])
        look()
        if unscales:
            side.scaler.unscale_(side.opt)
            look()
        side.step()
        look()
        assert side.opt.skipped_steps == (k + 1) // 2
        side.opt.zero_grad()
    assert side.values() == [1.0 - 0.125 - 0.125 * 1.5] * 2


@SCALERS
def test_who_asks_before_a_grad_scaler_has_come_hears_of_no_skip(cls: Any) -> None:
    """The FP32 parameter's gradient is inf, and the user drops it: the step is taken."""
    side = Driven(MIXED, cls, {})
    side.backward(1.0, math.inf)
    assert side.opt.param_groups[0]["lr"] == 0.125
    assert side.opt.skipped_steps == 0
    side.params[1].grad = None
    side.step()
    assert (side.opt.skipped_steps, side.values()) == (0, [0.875, 1.0])


@SCALERS
@DTYPES
@MODES
@pytest.mark.parametrize("read", ["param_groups", "masters"])
def test_a_gradient_that_is_not_finite_and_is_dropped_before_unscaling_skips_nothing(
    cls: Any, dtypes: Any, options: Any, read: str
) -> None:
    """Others are left, so it is the same iteration: they were taken for used, and not stepped."""

    def play(side: Driven) -> None:
        side.backward(math.inf, 2.0)
        groups = side.opt.param_groups if read == "param_groups" else [{"params": side.masters}]
        assert len([p.grad for group in groups for p in group["params"]]) == 2
        side.params[0].grad = None
        side.step()

    mine = _as_plain(play, dtypes, cls, options)
    assert mine.opt.skipped_steps == 0


@SCALERS
@MODES
@pytest.mark.parametrize("edit", ["read", "assigned"])
@pytest.mark.parametrize("clears", [True, False])
def test_a_16_bit_gradient_that_replaces_one_that_is_not_finite_is_stepped(
    cls: Any, options: Any, edit: str, clears: bool
) -> None:
    """Before unscaling, after masters' gradients were read; what a backward makes after a clear is another thing."""
    side = Driven(HALVES, cls, options)
    side.backward(1.0, math.inf)
    (first, _) = side.masters
    if edit == "assigned":
        first.grad = first.grad * 1.0
    assert first.grad is not None
    side.params[1].grad = torch.zeros(3, dtype=torch.float16)
    side.step()
    assert side.values() == [0.875, 1.0]
    assert side.opt.skipped_steps == 0
    if clears:
        side.opt.zero_grad()
        side.backward(0.0, 1.0)
        side.step()
        assert side.values() == [0.875 - 0.0625, 0.875]


@SCALERS
@pytest.mark.parametrize("zeroes", [True, False])
def test_a_skip_on_gradients_that_nobody_cleared_is_counted(cls: Any, zeroes: bool) -> None:
    """Model and masters share them still, so that nobody hears when a GradScaler reads them."""
    side = Driven(MIXED, cls, {})
    side.backward(1.0, 2.0)
    side.step()
    for param in side.params if zeroes else ():
        assert param.grad is not None
        param.grad.zero_()
    side.backward(math.inf, 2.0)
    side.step()
    assert side.opt.step_was_skipped
    assert side.opt.skipped_steps == 1
    assert side.values() == [0.875, 0.75]


@DTYPES
def test_who_reads_groups_has_nothing_stepped_twice(dtypes: Any) -> None:
    side = Driven(dtypes, None, {})
    side.backward(1.0, 2.0)
    assert side.opt.param_groups[0]["lr"] == 0.125
    side.opt.step()
    side.opt.step()
    assert side.values() == [0.875, 0.75]


@SCALERS
def test_gradients_that_a_load_dropped_are_not_stepped(cls: Any) -> None:
    side = Driven(HALVES, cls, {})
    side.backward(1.0, 2.0)
    side.step()
    side.opt.load_state_dict(side.opt.state_dict())
    side.opt.step()
    assert side.values() == [0.875, 0.75]


@SCALERS
@MODES
@pytest.mark.parametrize("other", [torch.float16, torch.float32])
@pytest.mark.parametrize("unscales", [True, False])
def test_a_parameter_that_is_unfrozen_later_is_stepped_on_a_master(
    cls: Any, options: Any, other: torch.dtype, unscales: bool
) -> None:
    def play(side: Driven) -> None:
        side.params[0].requires_grad_(False)
        for k in range(4):
            side.params[0].requires_grad_(k > 1)
            side.backward(1.0 if k > 1 else None, 2.0)
            if unscales:
                side.scaler.unscale_(side.opt)
                clip_grad_norm_(side.params, 100.0)
            side.step()
            side.opt.zero_grad()

    def frozen_from_the_start(dtypes: Any, *arguments: Any) -> Driven:
        params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
        params[0].requires_grad_(False)
        side = Driven(dtypes, *arguments[:1])
        side.params, side.opt = params, SGD(params, lr=0.125, momentum=0.5)
        if len(arguments) > 1:
            side.opt = MixedPrecisionOptimizer(side.opt, **arguments[1])
        return side

    plain, mine = frozen_from_the_start(WIDE, Theirs), frozen_from_the_start((torch.float16, other), cls, options)
    play(plain)
    play(mine)
    assert mine.values() == plain.values()
    assert [m.dtype for m in mine.masters] == [torch.float32] * 2


@SCALERS
@MODES
def test_a_parameter_that_is_unfrozen_has_a_master_for_who_reads_masters_first(cls: Any, options: Any) -> None:
    side = Driven(HALVES, cls, options)
    side.params[1].requires_grad_(False)
    for k in range(2):
        side.opt.zero_grad()
        side.params[1].requires_grad_(k == 1)
        side.backward(1.0, None if k == 0 else 1.0)
        assert [master.grad is None for master in side.masters] == [False, k == 0]
        side.step()
    assert side.values() == [1.0 - 0.125 - 0.1875, 0.875]


@SCALERS
def test_a_group_added_through_the_wrapped_optimizer_gets_masters(cls: Any) -> None:
    side, late = Driven(HALVES, cls, {}), torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    side.opt.optimizer.add_param_group({"params": [late]})
    side.scaler.scale(side.loss(1.0, 2.0) + late.float().sum()).backward()
    side.step()
    assert [*side.values(), late[0].item()] == [0.875, 0.75, 0.875]


# Sparse gradients


def _tables(dtypes: tuple[torch.dtype, ...], cls: Any, options: dict[str, Any] | None) -> tuple[list[Any], Any, Any]:
    tables = [torch.nn.Embedding(4, 2, sparse=True, dtype=dtype) for dtype in dtypes]
    for table in tables:
        torch.nn.init.ones_(table.weight)
    opt: Any = SGD([table.weight for table in tables], lr=0.125)
    return tables, opt if options is None else MixedPrecisionOptimizer(opt, **options), cls("cpu", init_scale=SCALE)


@SCALERS
@MODES
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), WIDE, HALVES], ids=["mixed", "wide", "halves"])
def test_sparse_gradients_of_any_parameter_are_unscaled_once(cls: Any, options: Any, clip: bool, dtypes: Any) -> None:
    """torch's GradScaler holds on to the values of the first while the second's are made."""
    if options.get("master_weights") == "split" and torch.float16 in dtypes:
        options = {}
    found = []
    for wraps in (False, True):
        tables, opt, scaler = _tables(dtypes if wraps else WIDE, cls if wraps else Theirs, options if wraps else None)
        for k in range(3):
            loss = sum(
                table(torch.tensor([k, 1, k])).float().sum() * c for table, c in zip(tables, (1.0, 2.0), strict=True)
            )
            if k == 1:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            if k != 1 and clip and wraps:  # torch's own can't clip them
                assert float(opt.clip_master_grads(1e6)) == pytest.approx(math.sqrt(50.0), rel=1e-6)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        found.append([table.weight.float().tolist() for table in tables])
        if wraps:
            assert opt.skipped_steps == 1
    assert found[1] == found[0]


@SCALERS
@pytest.mark.parametrize("options", [{}, {"fused_step": False}], ids=["one pass", "wrapped"])
def test_a_sparse_gradient_after_a_dense_one_is_stepped_with_the_others(cls: Any, options: Any) -> None:
    """A plan of the one-pass step was made for dense ones: the first parameter was stepped, the second refused."""
    first = torch.nn.Parameter(torch.ones(3))
    (table,), _, scaler = _tables((torch.float16,), cls, None)
    opt = MixedPrecisionOptimizer(SGD([first, table.weight], lr=0.125), **options)
    for k in range(4):
        scaler.scale(first.sum() + table(torch.tensor([1])).float().sum()).backward()
        if k < 2:
            table.weight.grad = table.weight.grad.to_dense()
        assert opt.param_groups[0]["lr"] == 0.125
        assert all(p.grad is not None for p in opt.master_params())
        scaler.step(opt)
        scaler.update()
        for p in (first, table.weight):
            p.grad = None
    assert first.tolist() == [0.5] * 3
    assert table.weight.tolist() == [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [1.0, 1.0]]


@SCALERS
@MODES
@pytest.mark.parametrize("dtypes", [(torch.float16,), WIDE[:1]], ids=["half", "wide"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sparse_gradients_that_are_cleared_to_zeros_stay_sparse(
    cls: Any, options: Any, dtypes: Any, momentum: float
) -> None:
    """With momentum the dense zeros that came in their place could not be added to a sparse buffer."""
    found = []
    for wraps in (False, True):
        (table,) = (torch.nn.Embedding(4, 2, sparse=True, dtype=dtypes[0] if wraps else torch.float32),)
        torch.nn.init.ones_(table.weight)
        opt: Any = SGD([table.weight], lr=0.125, momentum=momentum)
        if wraps:
            split = options.get("master_weights") == "split"  # which sparse gradients with momentum do not suit
            opt = MixedPrecisionOptimizer(opt, **({} if split else options))
        scaler = (cls if wraps else Theirs)("cpu", init_scale=SCALE)
        for k in range(3):
            scaler.scale(table(torch.tensor([k, 1, k])).float().sum()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=False)
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse
        found.append(table.weight.float().tolist())
    assert found[1] == found[0]


@SCALERS
@pytest.mark.parametrize("options", [{}, {"fused_step": False}], ids=["one pass", "wrapped"])
@pytest.mark.parametrize("other", [torch.float16, torch.float32])
def test_a_step_goes_on_without_a_used_gradient_that_was_dropped_beside_a_sparse_one(
    cls: Any, options: Any, other: torch.dtype
) -> None:
    """Ours read the old gradient of the dropped one's master, and found it gone in the middle of the call."""
    halves = [torch.nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2)]
    (table,), _, scaler = _tables((other,), cls, None)
    opt = MixedPrecisionOptimizer(SGD([*halves, table.weight], lr=0.125), **options)
    scaler.scale(sum(p.float().sum() for p in halves) + table(torch.tensor([1])).float().sum()).backward()
    scaler.step(opt)
    scaler.update()
    halves[0].grad = None
    scaler.step(opt)
    scaler.update()
    assert [p.tolist() for p in halves] == [[0.875] * 3] * 2
    assert next(opt.master_params()).grad is None


# What model and masters share


@SCALERS
@DTYPES
@MODES
@pytest.mark.parametrize("clip", [False, True])
def test_a_load_leaves_gradients_that_were_unscaled_to_their_step(
    cls: Any, dtypes: Any, options: Any, clip: bool
) -> None:
    def play(side: Driven) -> None:
        for k in range(2):
            side.backward(1.0, 2.0)
            side.scaler.unscale_(side.opt)
            if clip:
                for param in side.params:
                    assert param.grad is not None
                    param.grad.mul_(0.5)
            if k:
                side.opt.load_state_dict(copy.deepcopy(side.opt.state_dict()))
            side.step()
            side.opt.zero_grad()

    mine = _as_plain(play, dtypes, cls, options)
    assert mine.opt.skipped_steps == 0


@SCALERS
@pytest.mark.parametrize("dtypes", [HALVES, MIXED], ids=["halves", "mixed"])
@MODES
def test_a_master_shows_no_gradient_of_a_step_that_the_model_has_dropped(cls: Any, dtypes: Any, options: Any) -> None:
    side = Driven(dtypes, cls, options)
    side.backward(1.0, 2.0)
    side.step()
    side.params[0].grad = None
    shown = [p.grad is None for group in side.opt.param_groups for p in group["params"]]
    assert shown[0]
    assert [p.grad is None for p in side.params] == [True, False]


@SCALERS
@pytest.mark.parametrize("dtypes", [HALVES, MIXED], ids=["halves", "mixed"])
@MODES
def test_a_gradient_where_there_was_none_when_others_were_unscaled_is_stepped(
    cls: Any, dtypes: Any, options: Any
) -> None:
    def play(side: Driven) -> None:
        side.backward(None, 2.0)
        side.scaler.unscale_(side.opt)
        side.params[0].grad = torch.full((3,), 4.0, dtype=side.params[0].dtype)
        side.step()

    _as_plain(play, dtypes, cls, options)


@SCALERS
@DTYPES
@MODES
def test_gradients_that_were_made_anew_are_shared_still(cls: Any, dtypes: Any, options: Any) -> None:
    """``update_master_grads`` after an assignment; a clip of the model was lost for the one that was assigned."""

    def play(side: Driven) -> None:
        side.backward(1.0, 2.0)
        side.scaler.unscale_(side.opt)
        side.params[0].grad = torch.full((3,), 4.0)
        if isinstance(side.opt, MixedPrecisionOptimizer):
            side.opt.update_master_grads()
        for param in side.params:
            assert param.grad is not None
            param.grad.mul_(0.5)
        side.step()

    _as_plain(play, dtypes, cls, options)


@SCALERS
def test_a_look_before_unscaling_ends_what_an_earlier_iteration_shared(cls: Any) -> None:
    """The wrapper's clip is of its own gradients then: 16-bit ones of the model do not replace them."""
    side = Driven(MIXED, cls, {"fused_step": False})
    side.backward(1.0, 2.0)
    side.step()
    for param in side.params:
        param.grad = None
    side.loss(1.0, 2.0).backward()
    side.opt.clip_master_values(0.5)
    assert side.params[1].grad is not None
    side.params[1].grad.mul_(0.5)  # so that all are looked at again
    side.opt.step()
    assert side.values() == [0.875 - 0.125 * (0.5 + 0.5), 0.75 - 0.125 * (1.0 + 0.25)]


@pytest.mark.parametrize("cls", [None, Theirs, Ours], ids=["nobody", "torch", "fp16opt"])
@DTYPES
@MODES
@pytest.mark.parametrize("before", ["nothing", "a step", "zeros"])
def test_a_gradient_that_is_assigned_where_none_wait_is_stepped(
    cls: Any, dtypes: Any, options: Any, before: str
) -> None:
    if options.get("master_weights") == "split":
        pytest.skip("split masters are read, not held")

    def play(side: Driven) -> None:
        side.scaler and side.scaler.scale(torch.ones(()))
        if before != "nothing":
            side.backward(1.0, 2.0)
            side.step()
            side.opt.zero_grad(set_to_none=before != "zeros")
        _assign(side.masters, 4.0 * (1.0 if cls is None else SCALE))
        side.step()
        side.opt.zero_grad()
        side.backward(1.0, 2.0)
        side.step()

    _as_plain(play, dtypes, cls, options)


@SCALERS
@pytest.mark.parametrize("options", [{}, {"fused_step": False}], ids=["one pass", "wrapped"])
def test_a_clip_of_a_sparse_gradient_with_duplicates_that_was_assigned_is_kept(cls: Any, options: Any) -> None:
    """Its duplicates were summed for the master alone; the next look took the model's, which was not clipped."""
    (table,), _, scaler = _tables((torch.float16,), cls, None)
    other = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([table.weight, other], lr=0.125), **options)
    scaler.scale(table(torch.tensor([1])).float().sum() + other.float().sum()).backward()
    scaler.unscale_(opt)
    master = next(opt.master_params())
    master.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.full((2, 2), 2.0), (4, 2))
    opt.clip_master_values(1.0)
    assert other.grad is not None
    other.grad.mul_(2.0)
    scaler.step(opt)
    assert table.weight[1].tolist() == [0.875] * 2
    assert other.tolist() == [0.75] * 3


@SCALERS
@DTYPES
@MODES
@pytest.mark.parametrize(
    "when", ["in an empty step", "before the step", "once unscaled", "of the model once unscaled", "after"]
)
@pytest.mark.parametrize("clips", [False, True])
def test_a_gradient_that_is_shared_before_another_comes_is_unscaled_with_it(
    cls: Any, dtypes: tuple[torch.dtype, ...], options: dict[str, Any], when: str, clips: bool
) -> None:
    """torch's GradScaler reads masters one after the other, and the first may share its gradient already."""

    def run(driven: Driven) -> list[Tensor]:
        scaler, opt = driven.scaler, driven.opt
        assert scaler is not None
        if when == "in an empty step":
            opt.zero_grad()
            driven.masters[0].grad = torch.full((3,), 2.0)
        else:
            driven.backward(0.5, None)
        if "unscaled" in when:
            scaler.unscale_(opt)
        of = driven.params if "model" in when else driven.masters
        if "unscaled" in when or when == "before the step":
            of[0].grad = of[0].grad.clone()
        if when != "in an empty step":
            driven.step()
        if when == "after":
            of[0].grad = of[0].grad.clone()
        driven.backward(0.5, 0.25)
        if clips:
            scaler.unscale_(opt)
            clip_grad_norm_(driven.masters, 0.125)
        driven.step()
        return [master.detach().clone() for master in driven.masters]

    wanted = run(Driven(WIDE, Theirs))
    found = run(Driven(dtypes, cls, options))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=2.0**-20, atol=0.0)
