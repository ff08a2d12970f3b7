"""READY -> SCALED -> LOOKED or TAKEN -> READY: the order of calls, what each leaves behind, and what is refused."""

from __future__ import annotations

import pytest
import torch
from specs import BAD_LOSSES
from torch.optim import SGD, AdamW

from engine import recipes
from engine.checks import (
    array,
    assert_same,
    assert_same_bits,
    by_step,
    linear_loss,
    normal,
    one_step,
    ones,
    parameters,
    snapshot,
    stored_grad,
)
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step


def _made(scale: float = 8.0, **kwargs: object) -> tuple[torch.nn.Parameter, MixedPrecisionOptimizer]:
    p = ones()
    return p, MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=scale, **kwargs)


def test_step_before_any_backward_does_nothing_and_counts_nothing() -> None:
    p = ones()
    opt = recipes.engine(AdamW([p], lr=0.5, weight_decay=0.5), init_scale=8.0, growth_interval=1)
    before = snapshot(opt, [p], scaler=True)
    for _ in range(3):
        opt.step()
    assert_same(snapshot(opt, [p], scaler=True), before)
    assert not bool(opt.step_was_skipped)
    assert int(opt.skipped_steps) == 0
    assert opt.overflow_report() == []


def test_second_step_without_backward_does_nothing() -> None:
    p = ones()
    opt = recipes.engine(AdamW([p], lr=0.5), init_scale=8.0, growth_interval=1)
    one_step(opt, [p], [1.0])
    opt.zero_grad()
    before = snapshot(opt, [p], scaler=True)
    opt.step()
    assert_same(snapshot(opt, [p], scaler=True), before)


def test_a_step_with_nothing_to_do_is_not_a_skipped_step() -> None:
    p, opt = _made()
    one_step(opt, [p], [float("inf")])
    assert bool(opt.step_was_skipped)
    opt.zero_grad()
    opt.step()
    assert not bool(opt.step_was_skipped)
    assert opt.overflow_report() == []
    assert int(opt.skipped_steps) == 1


def test_refused_calls_between_backward_and_step_keep_the_gradients() -> None:
    for mode in ("model", "fp32"):
        p, opt = _made(grad_accumulation=mode)
        opt.backward(linear_loss([p], [1.0]))
        for call, argument in (
            (opt.backward, 1.0),
            (opt.scale_loss, 1.0),
            (opt.clip_master_grads, -1.0),
            (opt.load_state_dict, {}),
            (opt.step, 3),
            (opt.step, "closure"),
        ):
            with pytest.raises((TypeError, ValueError)):
                call(argument)
        opt.step()
        assert_same_bits(p, array([0.5] * 4))


def test_backward_returns_none_and_step_returns_the_closures_loss() -> None:
    p, opt = _made()
    assert opt.backward(linear_loss([p], [1.0])) is None
    assert opt.step() is None


@pytest.mark.parametrize("explicit", ["nothing", "update", "clip", "clip_and_update", "update_twice"])
def test_step_updates_by_itself_and_calls_between_change_nothing(explicit: str) -> None:
    p, opt = _made()
    opt.backward(linear_loss([p], [1.0]), update_master_grads=False)
    for word in explicit.split("_and_"):
        if word.startswith("update"):
            opt.update_master_grads()
        if word == "update_twice":
            opt.update_master_grads()
        if word == "clip":
            opt.clip_master_grads(100.0)
    opt.step()
    assert_same_bits(p, array([0.5] * 4))


def test_update_master_grads_twice_gives_the_same_bits_and_undoes_a_clip() -> None:
    params = parameters([(50,), (3, 4), (7,)], (torch.float16, torch.bfloat16))
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.5), loss_scale=3.0)
    grads = [normal(tuple(p.shape), torch.float32, i) for i, p in enumerate(params)]
    opt.backward(linear_loss(params, grads))
    opt.update_master_grads()
    first = [m.grad.clone() for m in opt.master_params()]
    opt.update_master_grads()
    assert_same([m.grad for m in opt.master_params()], first, "second update ")
    norm = float(opt.clip_master_grads(0.01))
    assert not torch.equal(next(iter(opt.master_params())).grad, first[0])
    opt.update_master_grads()
    assert_same([m.grad for m in opt.master_params()], first, "update after a clip ")
    assert float(opt.clip_master_grads(1e6)) == norm


def test_backward_after_a_clip_starts_from_the_unclipped_gradients() -> None:
    p, opt = _made()
    opt.backward(linear_loss([p], [1.0]))
    opt.clip_master_grads(0.001)
    opt.backward(linear_loss([p], [0.5]))
    opt.step()
    assert_same_bits(p, array([0.25] * 4))


def test_gradients_edited_by_the_user_are_what_is_stepped() -> None:
    p, opt = _made()
    opt.backward(linear_loss([p], [1.0]))
    opt.update_master_grads()
    (m,) = opt.master_params()
    m.grad.mul_(0.5)
    opt.step()
    assert_same_bits(p, array([0.75] * 4))


@pytest.mark.parametrize("mode", ["model", "fp32"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_zero_grad_clears_both_sides_and_discards_flags(set_to_none: bool, mode: str) -> None:
    p, wide = ones(), ones(2, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p, wide], lr=0.5), loss_scale=8.0, grad_accumulation=mode)
    opt.backward(linear_loss([p, wide], [float("inf"), float("nan")]))
    opt.update_master_grads()
    opt.zero_grad(set_to_none=set_to_none)
    for t in (p, wide, *opt.master_params()):
        assert t.grad is None or (not set_to_none and not t.grad.any())
        if set_to_none:
            assert t.grad is None
    opt.step()
    assert not bool(opt.step_was_skipped)
    assert int(opt.skipped_steps) == 0
    opt.backward(linear_loss([p, wide], [1.0, 1.0]))
    opt.step()
    assert not bool(opt.step_was_skipped)
    assert_same_bits(p, array([0.5] * 4))
    assert_same_bits(wide, array([0.5] * 2, torch.float32))


def test_master_gradient_memory_is_reused() -> None:
    p, opt = _made()
    (m,) = opt.master_params()
    places = set()
    for _ in range(4):
        opt.zero_grad(set_to_none=True)
        assert m.grad is None
        opt.backward(linear_loss([p], [0.125]))
        opt.update_master_grads()
        places.add(m.grad.data_ptr())
        opt.step()
    assert len(places) == 1, "a new master gradient was allocated"


@pytest.mark.parametrize("how", ["backward", "backward_without_update", "scale_loss"])
def test_master_gradients_are_made_when_somebody_reads_them(how: str) -> None:
    """Also through a reference that was held from before; and the model's gradients stay as they are."""
    p, opt = _made()
    (m,) = opt.master_params()
    if how == "scale_loss":
        opt.scale_loss(linear_loss([p], [1.0])).backward()
    else:
        opt.backward(linear_loss([p], [1.0]), update_master_grads=how == "backward")
    list(opt.master_params())
    assert stored_grad(m) is None, "nobody has read it"
    assert_same_bits(p.grad, array([8.0] * 4))
    assert_same_bits(m.grad, array([1.0] * 4, torch.float32))
    assert_same_bits(p.grad, array([8.0] * 4))
    opt.step()
    assert_same_bits(p, array([0.5] * 4))


def test_own_masters_have_true_gradients_when_backward_returns() -> None:
    half, own = ones(4), ones(4, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([half, own], lr=0.5), loss_scale=8.0)
    opt.backward(linear_loss([half, own], [1.0, 0.5]))
    assert_same_bits(own.grad, torch.full((4,), 0.5))
    assert_same_bits(half.grad, array([8.0] * 4))


def test_scale_loss_with_the_users_own_backward_counts_as_scaled() -> None:
    p = ones()
    opt = recipes.engine(SGD([p], lr=0.5), init_scale=8.0, growth_interval=1)
    opt.scale_loss(linear_loss([p], [1.0])).backward()
    opt.step()
    assert_same_bits(p, array([0.5] * 4))
    assert float(opt.loss_scale) == 16.0
    opt.zero_grad()
    opt.scale_loss(linear_loss([p], [float("inf")])).backward()
    opt.step()
    assert bool(opt.step_was_skipped)
    assert float(opt.loss_scale) == 8.0


def test_scale_loss_of_own_masters_is_unscaled_too() -> None:
    p = ones(4, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=8.0)
    for k in (1, 2):
        opt.scale_loss(linear_loss([p], [0.5])).backward()
        opt.update_master_grads()
        assert_same_bits(p.grad, torch.full((4,), 0.5 * k))
    opt.step()
    assert_same_bits(p, torch.full((4,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scale_loss_is_float_times_scale_and_keeps_the_graph(dtype: torch.dtype) -> None:
    _, opt = _made(scale=1024.0)
    loss = torch.tensor(600.0, dtype=dtype, requires_grad=True)
    scaled = opt.scale_loss(loss)
    assert scaled.dtype == torch.float32
    assert scaled.requires_grad
    assert float(scaled) == float(loss) * 1024.0


@pytest.mark.parametrize("via", ["backward", "scale_loss"])
@pytest.mark.parametrize(("make", "error", "match"), [pytest.param(*c[1:], id=c[0]) for c in BAD_LOSSES])
def test_loss_is_refused(make: object, error: type[Exception], match: str, via: str) -> None:
    p, opt = _made()
    loss = make(p)
    if via == "scale_loss" and isinstance(loss, torch.Tensor) and loss.dim():
        assert_same_bits(opt.scale_loss(loss), loss * 8.0)  # a vector may be reduced later by the user
        return
    before = snapshot(opt, [p], scaler=True)
    with pytest.raises(error, match=match):
        getattr(opt, via)(loss)
    assert_same(snapshot(opt, [p], scaler=True), before)
    opt.step()
    assert_same_bits(p, array([1.0] * 4))


def test_one_element_losses_of_any_shape_are_accepted() -> None:
    for shape in ((), (1,), (1, 1)):
        p, opt = _made()
        opt.backward(linear_loss([p], [1.0]).reshape(shape))
        opt.step()
        assert_same_bits(p, array([0.5] * 4))


@pytest.mark.parametrize("where", ["scaled", "unscaled"])
def test_scale_written_between_backward_and_step_is_an_error(where: str) -> None:
    p, opt = _made()
    opt.backward(linear_loss([p], [1.0]), update_master_grads=False)
    if where == "unscaled":
        opt.update_master_grads()
    with pytest.raises(RuntimeError, match=r"(?i)scale.*(step|zero_grad)"):
        opt.loss_scale = 2.0
    assert float(opt.loss_scale) == 8.0
    opt.step()
    assert_same_bits(p, array([0.5] * 4))


@pytest.mark.parametrize("then", ["construction", "step", "zero_grad"])
def test_scale_may_be_written_in_ready(then: str) -> None:
    p, opt = _made()
    if then == "step":
        one_step(opt, [p], [0.0])
        opt.zero_grad()
    elif then == "zero_grad":
        opt.backward(linear_loss([p], [1.0]))
        opt.zero_grad()
    opt.loss_scale = 2.0
    assert float(opt.loss_scale) == 2.0
    opt.backward(linear_loss([p], [1.0]))
    assert_same_bits(p.grad, array([2.0] * 4))
    opt.step()
    assert_same_bits(p, array([0.5] * 4))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "8", None, True], ids=repr)
def test_bad_scale_is_refused_and_the_old_one_stays(value: object) -> None:
    _, opt = _made()
    with pytest.raises((TypeError, ValueError), match="scale"):
        opt.loss_scale = value
    assert float(opt.loss_scale) == 8.0


def test_plain_backward_with_a_static_scale_of_one_is_taken_as_it_is() -> None:
    p, opt = _made(scale=1.0)
    linear_loss([p], [1.0]).backward()
    opt.step()
    assert_same_bits(p, array([0.5] * 4))


def test_plain_backward_with_another_scale_is_an_error_that_says_what_to_call() -> None:
    p, opt = _made(scale=8.0)
    linear_loss([p], [1.0]).backward()
    before = snapshot(opt, [p], scaler=True)
    with pytest.raises(RuntimeError, match=r"backward|scale_loss"):
        opt.step()
    assert_same(snapshot(opt, [p], scaler=True), before)
    opt.zero_grad()
    one_step(opt, [p], [1.0])
    assert_same_bits(p, array([0.5] * 4))


def test_plain_backward_under_a_static_scale_of_one_still_checks() -> None:
    p, opt = _made(scale=1.0)
    linear_loss([p], [float("inf")]).backward()
    opt.step()
    assert bool(opt.step_was_skipped)
    assert_same_bits(p, array([1.0] * 4))


def test_explicit_update_in_ready_takes_gradients_as_scaled_by_the_current_scale() -> None:
    p, opt = _made(scale=8.0)
    p.grad = array([8.0] * 4)
    opt.update_master_grads()
    opt.step()
    assert_same_bits(p, array([0.5] * 4))


def test_update_master_grads_without_gradients_is_nothing() -> None:
    p, opt = _made()
    opt.update_master_grads()
    opt.step()
    assert_same_bits(p, array([1.0] * 4))


def test_user_sets_one_gradient_to_none_before_step() -> None:
    p, q = ones(), ones()
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=0.5), loss_scale=8.0)
    one_step(opt, [p, q], [1.0, 1.0])
    opt.zero_grad()
    opt.backward(linear_loss([p, q], [1.0, 1.0]), update_master_grads=False)
    q.grad = None
    opt.step()
    assert_same_bits(p, array([0.0] * 4))
    assert_same_bits(q, array([0.5] * 4))


def test_a_param_used_once_then_unused_gets_no_stale_gradient() -> None:
    p, q = ones(), ones()
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=0.5), loss_scale=8.0)
    one_step(opt, [p, q], [0.5, 0.5])
    one_step(opt, [p, q], [0.5, None])
    assert_same_bits(q, array([0.75] * 4))
