"""Several optimizers of one trainer, without a trainer: what they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer
from fp16opt.integrations.optimizer_group import OptimizerGroup, SharedLossScaler


def weights(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(count)]


def together(params: list[torch.nn.Parameter], **options: Any) -> OptimizerGroup:
    return OptimizerGroup([torch.optim.SGD([p], lr=1.0, momentum=0.9) for p in params], options=options)


def backward(both: OptimizerGroup, loss: torch.Tensor) -> None:
    with both.backward(loss) as scaled:
        scaled.backward()  # type: ignore[no-untyped-call]


def test_a_shared_scaler_that_follows_norms_hears_of_them() -> None:
    scaler = DynamicLossScaler(policy="headroom", init_scale=2.0**24, growth_interval=5)
    one, two = weights()
    both = together([one, two], scaler=scaler)
    alone = weights(1)[0]
    other = DynamicLossScaler(policy="headroom", init_scale=2.0**24, growth_interval=5)
    single = MixedPrecisionOptimizer(torch.optim.SGD([alone], lr=0.0), scaler=other)
    for _ in range(60):
        backward(both, (one.float() * 2.0**-6 + two.float() * 2.0**-6).sum())
        single.backward((alone.float() * 2.0**-6).sum())
        for opt in (*both.optimizers, single):
            opt.step()
            opt.zero_grad()
    assert float(scaler.scale) == float(other.scale) > 1024.0


def test_a_clip_over_an_overflow_leaves_the_others_gradients() -> None:
    one, two = weights()
    both = together([one, two], loss_scale=64.0)
    backward(both, one.float().sum() + two.float().sum() * 3.0e38)
    norm = both.clip_grad_norm([one, two], 0.5)
    assert not bool(norm.isfinite())
    for opt in both.optimizers:
        opt.step()
    assert one.tolist() == [0.0] * 4
    assert [opt.step_was_skipped for opt in both.optimizers] == [False, True]


def test_a_clip_over_several_whose_gradients_were_released_raises() -> None:
    one, two = weights()
    both = together([one, two], loss_scale=1.0, gradient_release=True)
    backward(both, one.float().sum() + two.float().sum())
    with pytest.raises(RuntimeError, match="masters have no gradients"):
        both.clip_grad_norm([one, two], 0.5)


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_a_backward_of_another_s_loss_leaves_gradients_that_were_used(scale: float) -> None:
    """As in a GAN whose two optimizers clear their own gradients alone."""
    params = weights()
    both = together(params, loss_scale=scale)
    for _ in range(3):
        for param, opt in zip(params, both.optimizers, strict=True):
            opt.zero_grad()
            backward(both, param.float().sum() * 0.125)
            opt.step()
    moved = 0.125 * (1.0 + 1.9 + 2.71)  # with momentum
    assert [param[0].item() for param in params] == pytest.approx([1.0 - moved] * 2, rel=2e-3)


def test_a_backward_that_adds_to_gradients_of_an_earlier_step_raises() -> None:
    one, two = weights()
    both = together([one, two], loss_scale=64.0)
    for k in range(2):
        both.optimizers[0].zero_grad()
        if k:
            with pytest.raises(RuntimeError, match=r"gradients that the last step of optimizer 1 \(SGD\) has used"):
                backward(both, one.float().sum() + two.float().sum())
        else:
            backward(both, one.float().sum() + two.float().sum())
            for opt in both.optimizers:
                opt.step()
    both.optimizers[1].zero_grad()


@pytest.mark.parametrize("trained", [0, 1])
def test_steps_without_a_gradient_are_logged_where_none_of_them_had_one(
    trained: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One may wait for its turn for long, as a discriminator that is trained later."""
    params, strangers = weights(), weights()
    both = together(params, loss_scale=1.0)
    for _ in range(5):
        backward(both, sum((p.float().sum() for p in params[:trained] + strangers), start=torch.zeros(())))
        for opt in both.optimizers:
            opt.step()
            opt.zero_grad()
    assert sum("four steps in a row found no gradient" in line for line in caplog.messages) == 1 - trained


def test_a_round_is_resumed_in_its_middle() -> None:
    """Where one has stepped and the other has not: what the first found is in the file."""
    params = weights()
    both = together(params, scaler=DynamicLossScaler(1024.0, growth_interval=3))
    one, other = both.optimizers
    backward(both, params[0].float().sum() * float("inf"))
    one.step()
    assert one.step_was_skipped
    assert both.optimizers[0].loss_scale == 1024.0, "the round is open"
    states = [each.state_dict() for each in both.optimizers]
    backward(both, params[1].float().sum())
    other.step()
    assert one.loss_scale == 512.0
    again = together(params := weights(), dynamic=True)
    for each, state in zip(again.optimizers, states, strict=True):
        each.load_state_dict(state)
    assert again.optimizers[0].loss_scale == 1024.0
    backward(again, params[1].float().sum())
    again.optimizers[1].step()
    assert again.optimizers[1].loss_scale == 512.0


def test_one_that_steps_twice_before_the_others_ends_the_round() -> None:
    """As a discriminator that is trained more often: its overflows are heard of, one step late."""
    params = weights()
    both = together(params, scaler=DynamicLossScaler(64.0))
    first = both.optimizers[0]
    for loss_scale in (64.0, 32.0):
        assert first.loss_scale == 64.0
        backward(both, params[0].float().sum() * float("inf"))
        first.step()
        first.zero_grad()
        assert first.loss_scale == loss_scale
    assert isinstance(first.scaler, SharedLossScaler)
    assert "of 2 optimizers" in repr(first.scaler)
