"""Gradients that were dropped, abandoned, left from before or made without us; sparse ones and graphs of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from contract import oracle
from contract.worlds import (
    ALL,
    INF,
    KEEPS,
    NAN,
    ONE_PASS,
    SCALES,
    WRAPPED,
    Mode,
    World,
    by,
    every_mixed_mode,
    every_mode,
    every_mode_that_keeps_gradients,
    every_scale,
    every_scale_but_one,
    instead,
    plus,
    sgd,
    times,
    values,
)
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler

WHAT_TO_CALL = r"update_master_grads|opt\.backward|backward\(loss|scale_loss|zero_grad"


# -- dropped -------------------------------------------------------------------------------------------------------


@every_mode_that_keeps_gradients
@pytest.mark.parametrize(("how", "scale"), [("backward", "static"), ("waiting", "dynamic"), ("scale_loss", "one")])
@pytest.mark.parametrize("look", ["nothing", "clip", "update", "read"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_dropped_gradient_goes_with_its_flags_and_its_norm(
    mode: Mode, scale: str, how: str, look: str, which: int
) -> None:
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, instead(grads, which, torch.full_like(grads[which], NAN)))
    if look == "clip":
        world.opt.clip_master_grads(2.0)
    if look == "update":
        world.opt.update_master_grads()
    if look == "read":
        assert world.masters[0].grad is not None
    world.params[which].grad = None
    grads = instead(grads, which, None)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
    assert world.masters[which].grad is None
    world.expect_step(oracle.clipped(grads, norm, 2.0))


@every_mode_that_keeps_gradients
@pytest.mark.parametrize(("how", "scale"), [("backward", "static"), ("waiting", "dynamic"), ("scale_loss", "one")])
@pytest.mark.parametrize("look", ["nothing", "update", "read"])
@pytest.mark.parametrize("value", [NAN, 8.0])
def test_a_dropped_gradient_is_not_in_torchs_clip_of_masters(
    mode: Mode, scale: str, how: str, look: str, value: float
) -> None:
    """Whoever has read masters before: what the model dropped since, its master shows no more."""
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, instead(grads, 1, torch.full_like(grads[1], value)))
    if look == "update":
        world.opt.update_master_grads()
    if look == "read":
        assert all(master.grad is not None for master in world.masters)
    world.params[1].grad = None
    grads = instead(grads, 1, None)
    norm = world.expect_norm(torch.nn.utils.clip_grad_norm_(world.masters, 2.0), grads)
    world.expect_step(oracle.clipped(grads, norm, 2.0))


@pytest.mark.parametrize("fused_step", ["auto", False])
@pytest.mark.parametrize("look", ["read", "update"])
def test_a_dropped_gradient_is_no_edit_of_its_master(fused_step: bool | str, look: str) -> None:
    """Its master has none after a read, and a further backward adds up what is there."""
    params = [torch.nn.Parameter(torch.ones(4).half()) for _ in range(3)]
    opt = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=1.0), loss_scale=4.0, fused_step=fused_step)

    def backward() -> None:
        opt.backward(sum((factor * param).float().sum() for factor, param in zip((3, 4, 5), params, strict=True)))

    backward()
    if look == "update":
        opt.update_master_grads()
    assert all(master.grad is not None for master in opt.master_params())
    params[2].grad = None
    assert [master.grad is None for master in opt.master_params()] == [False, False, True]
    opt.clip_master_grads(100.0)
    backward()
    opt.step()
    assert [param[0].item() for param in params] == [1 - 6, 1 - 8, 1 - 5]


@every_mode_that_keeps_gradients
def test_a_gradient_that_is_dropped_after_a_clip_leaves_the_others_clipped(mode: Mode) -> None:
    """As with torch's clip_grad_norm_; a second clip measures what is left."""
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
    world.params[0].grad = None
    grads = instead(oracle.clipped(grads, norm, 2.0), 0, None)
    world.expect_norm(world.opt.clip_master_grads(1e6), grads)
    world.expect_step(grads)


@every_mode
@every_scale
def test_the_scale_may_be_set_after_all_gradients_were_dropped(mode: Mode, scale: str) -> None:
    """An abandoned batch, as whatever cleared it."""
    world = World(mode, scale)
    world.backward(values(0.5, 1.0, -0.5))
    if not mode.folds:
        world.model_zero_grad()
        world.opt.loss_scale = 32.0
        world.reference.scale.value = 32.0
        world.backward(values(0.5, 1.0, -0.5))
        world.expect_step(values(0.5, 1.0, -0.5))
    else:  # sums in FP32 are of masters alone
        with pytest.raises(RuntimeError, match="loss_scale was set between backward and step"):
            world.opt.loss_scale = 32.0


# -- a second scaler -----------------------------------------------------------------------------------------------


@by([mode for mode in ALL if mode.is_mixed])
@pytest.mark.parametrize("how", ["backward", "waiting"])
def test_an_overflow_of_fp32_gradients_skips_though_a_second_scaler_joins(mode: Mode, how: str) -> None:
    """They were true, and unseen, when the others began to be summed up."""
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    world.backward(instead(grads, world.own(), torch.full_like(grads[world.own()], INF)))
    world.leave(how, grads)
    world.backward(grads, scaler=StaticLossScaler(4.0))
    world.expect_skip()
    world.opt.zero_grad()
    world.backward(grads)
    world.expect_step(grads)


@by([mode for mode in KEEPS if not mode.is_mixed])
@pytest.mark.parametrize("limit", [1e9, 0.5])
def test_what_was_clipped_before_a_further_backward_is_summed_as_it_came(mode: Mode, limit: float) -> None:
    """Whatever the clip found of gradients that were fewer then."""
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    world.backward(instead(grads, 1, None))
    world.opt.clip_master_grads(limit)
    world.backward(grads)
    world.backward(instead(grads, 1, None), scaler=StaticLossScaler(4.0))
    world.expect_step(plus(instead(grads, 1, None), grads, instead(grads, 1, None)))


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("value", [8.0, NAN])
@pytest.mark.parametrize("look", ["nothing", "read", "clip"])
def test_a_dropped_gradient_is_gone_though_a_second_scaler_joins(mode: Mode, look: str, value: float) -> None:
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    world.backward(instead(grads, 0, torch.full_like(grads[0], value)))
    if look == "read":
        assert all(master.grad is not None for master in world.masters)
    if look == "clip":
        world.opt.clip_master_grads(1e9)
    world.params[0].grad = None
    world.backward(instead(grads, 0, None), scaler=StaticLossScaler(4.0))
    summed = plus(instead(grads, 0, None), instead(grads, 0, None))
    world.expect_norm(world.opt.clip_master_grads(1e9), summed)
    world.expect_step(summed)


@by([mode for mode in ALL if mode.has_masters])
@pytest.mark.parametrize("edit", ["torch's clip", "mul", "inf", "mended"])
@pytest.mark.parametrize("first", [True, False])
def test_an_edit_blames_no_scaler_whose_backwards_were_finite(mode: Mode, edit: str, first: bool) -> None:
    """Of two scalers, torch's clip over masters for one. Where an edit itself is not finite the last hears of it."""
    world = World(mode)
    a, b = (DynamicLossScaler(8.0) for _ in range(2))
    grads = values(0.5, 1.0, -0.5)
    bad = instead(grads, 0, torch.full_like(grads[0], INF))
    clean = edit == "inf"
    world.backward(bad if first and not clean else grads, scaler=a)
    world.backward(grads if first or clean else bad, scaler=b)
    masters = world.masters
    if edit == "torch's clip":
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
    elif edit == "mul":
        masters[2].grad.mul_(0.5)
    elif edit == "inf":
        masters[2].grad[0] = INF
    else:
        masters[0].grad = torch.ones_like(masters[0].grad)
    world.opt.step()
    assert bool(world.opt.step_was_skipped) == (edit != "mended")
    told = {"mended": (8.0, 8.0), "inf": (8.0, 4.0)}.get(edit, (4.0, 8.0) if first else (8.0, 4.0))
    assert (float(a.scale), float(b.scale)) == told


# -- abandoned -----------------------------------------------------------------------------------------------------


@every_scale
@every_mode_that_keeps_gradients
@pytest.mark.parametrize("look", ["nothing", "clip", "read"])
def test_an_abandoned_batch_leaves_nothing(mode: Mode, scale: str, look: str) -> None:
    """``model.zero_grad()`` after a nan: the next step is whole, and nobody counts a skip."""
    world = World(mode, scale)
    world.backward([NAN, NAN, NAN])
    if look == "clip":
        world.opt.clip_master_grads(2.0)
    if look == "read":
        assert world.masters[0].grad is not None
    world.model_zero_grad()
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
    world.expect_step(oracle.clipped(grads, norm, 2.0))


@every_mode
@every_scale
def test_an_abandoned_batch_that_opt_zero_grad_clears_leaves_nothing(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    world.backward([NAN, NAN, NAN])
    world.opt.zero_grad()
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    world.expect_step(grads)


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("look", ["nothing", "clip"])
def test_an_abandoned_batch_leaves_nothing_on_parameters_that_the_next_does_not_use(mode: Mode, look: str) -> None:
    world = World(mode, "dynamic")
    world.backward([NAN, NAN, NAN])
    if look == "clip":
        world.opt.clip_master_grads(2.0)
    world.model_zero_grad()
    grads = instead(values(0.5, 1.0, -0.5), 0, None)
    world.backward(grads)
    world.expect_step(grads)


@every_mode_that_keeps_gradients
def test_a_step_after_all_gradients_were_dropped_is_nothing(mode: Mode) -> None:
    world = World(mode, "dynamic")
    world.backward([NAN, 1.0, 1.0])
    world.model_zero_grad()
    world.opt.step()
    world.check()


# -- before our backward, and after our step -----------------------------------------------------------------------


@every_scale_but_one
@every_mode
@pytest.mark.parametrize("how", ["backward", "waiting"])
def test_gradients_that_came_without_us_are_refused(mode: Mode, scale: str, how: str) -> None:
    world = World(mode, scale)
    world.loss(values(0.5, 1.0, -0.5)).backward()
    with pytest.raises(RuntimeError, match=WHAT_TO_CALL):
        world.leave(how, values(1.0, -0.25, 2.0))
    world.check()
    world.opt.zero_grad()
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    world.expect_step(grads)


@every_mode
def test_at_a_scale_of_one_gradients_that_came_without_us_count(mode: Mode) -> None:
    world = World(mode, "one")
    grads, more = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)
    world.loss(grads).backward()
    world.backward(more)
    world.expect_step(plus(grads, more))


@every_scale
@every_mode_that_keeps_gradients
@pytest.mark.parametrize("how", ["backward", "waiting", "scale_loss"])
def test_gradients_of_our_step_that_nobody_cleared_add_up_each_with_its_scale(mode: Mode, scale: str, how: str) -> None:
    """The dynamic scale doubles after each step, so each backward has another one."""
    world = World(mode, scale, scaler_settings={"growth_interval": 1})
    total: list[Tensor | None] = [None, None, None]
    for k in range(4):
        grads = values(0.5, -0.25 * k, 1.0)
        world.leave(how, grads)
        total = plus(total, grads)
        world.expect_step(total)


@every_scale
@every_mode_that_keeps_gradients
def test_update_master_grads_undoes_a_clip_of_what_was_left_too(mode: Mode, scale: str) -> None:
    """The same bits on the same gradients, those of another scale included."""
    if mode.is_mixed:
        pytest.skip("the clip of FP32 parameters' gradients stays")
    world = World(mode, scale, scaler_settings={"growth_interval": 1})
    grads, more = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)
    world.backward(grads)
    world.expect_step(grads)
    world.backward(more)
    for _ in range(2):
        world.opt.clip_master_grads(0.5)
        world.opt.update_master_grads()
    world.check_master_grads(plus(grads, more))
    world.expect_step(plus(grads, more))


@every_scale_but_one
@every_mode_that_keeps_gradients
def test_an_overflow_that_nobody_cleared_skips_again(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(instead(grads, 0, torch.full_like(grads[0], INF)))
    world.expect_skip()
    world.backward(grads)
    world.expect_skip()
    world.opt.zero_grad()
    world.backward(grads)
    world.expect_step(grads)


@every_scale
def test_fp32_sums_are_used_up_by_a_step(scale: str) -> None:
    """Also by one that skips."""
    (folding,) = (mode for mode in ALL if mode.folds and not mode.is_mixed)
    world = World(folding, scale, scaler_settings={"growth_interval": 1})
    grads = values(0.5, 1.0, -0.5)
    for k in range(5):
        if k == 2:
            world.backward([INF, 1.0, 1.0])
            world.expect_skip()
        else:
            world.backward(times(grads, 1.0 + k))
            world.expect_step(times(grads, 1.0 + k))


@by([mode for mode in KEEPS if not mode.is_mixed])
@pytest.mark.parametrize("then", ["backward", "read", "clip"])
def test_a_gradient_that_counts_no_versions_may_stay_after_a_step(mode: Mode, then: str) -> None:
    """One that was made in inference mode, and that nobody clears: torch's own optimizers go on, too."""
    world = World(mode, "one")
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads, update_master_grads=False)
    with torch.inference_mode():
        world.params[0].grad = grads[0].half()
    world.expect_step(grads)
    if then == "read":
        assert [master.grad is None for master in world.masters] == [False] * 3
    elif then == "clip":
        assert float(world.opt.clip_master_grads(1.0)) == 0.0, "all were used"
    more = [None, values(0.0, 0.25)[1], None]
    world.backward(more)
    world.expect_step(plus(more, grads))


# -- sparse, create_graph ------------------------------------------------------------------------------------------


def _sparse_world(mode: Mode, scale: str) -> World:
    """Plain SGD everywhere: torch's AdamW takes no sparse gradients."""
    return World(mode, scale, shapes=((5, 2), (2, 3), (5,)), make=sgd)


@every_mode
@pytest.mark.parametrize(("how", "scale"), [("backward", "static"), ("waiting", "dynamic"), ("scale_loss", "one")])
@pytest.mark.parametrize("then", ["step", "clip", "read"])
def test_sparse_gradients(mode: Mode, scale: str, how: str, then: str) -> None:
    """An embedding row looked up twice, a dense parameter beside it."""
    world = _sparse_world(mode, scale)
    weight, dense = world.params[0], values(0.5, 1.0)[1]
    rows = torch.tensor([1, 3, 3])
    coefficients = torch.tensor([[0.5, 1.0], [2.0, -1.0], [1.0, 0.25]])
    first = torch.zeros(5, 2).index_add(0, rows, coefficients)
    grads: list[Tensor | None] = [first, dense, None]
    loss = (nn.functional.embedding(rows, weight, sparse=True).float() * coefficients).sum()
    loss = loss + world.loss([None, dense, None])
    if how == "scale_loss":
        world.opt.scale_loss(loss).backward()
    else:
        world.opt.backward(loss, update_master_grads=how == "backward")
    if then == "clip":
        norm = world.expect_norm(world.opt.clip_master_grads(1.0), grads)
        grads = oracle.clipped(grads, norm, 1.0)
    if then == "read":
        shown = world.masters[0].grad
        assert shown is not None
        assert shown.layout is torch.sparse_coo
        assert shown.is_coalesced()
        assert shown.dtype is torch.float32
        assert shown.to_dense().tolist() == first.tolist()
    world.expect_step(grads)


@every_mixed_mode
@every_scale
def test_create_graph_unscales_fp32_gradients_out_of_place(mode: Mode, scale: str) -> None:
    """So that a second derivative can be taken of the true gradient."""
    world = World(mode, scale)
    p = world.params[world.own()]
    world.opt.backward((p**3).sum(), create_graph=True)
    assert p.grad is not None
    assert torch.allclose(p.grad.detach(), 3 * p.detach() ** 2)
    assert p.grad.requires_grad
    (second,) = torch.autograd.grad(p.grad.sum(), p)
    assert torch.allclose(second, 6 * p.detach())
    world.expect_step([None, 3 * p.detach() ** 2, None])


@by([WRAPPED, ONE_PASS])
@pytest.mark.parametrize("scale", SCALES)
def test_create_graph_on_16_bit_parameters_steps(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    world.opt.backward(world.loss(values(0.5, 1.0, -0.5)), create_graph=True)
    world.expect_step(values(0.5, 1.0, -0.5))
