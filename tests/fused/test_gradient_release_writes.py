"""What others do between a backward that has stepped parameters and ``step``: it counts, and disturbs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.checks import assert_same
from torch import nn

import fp16opt
from fp16opt import MixedPrecisionOptimizer, Monitor


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).half()


def wrapped(model: nn.Module, lr: float = 1e-3, **options: Any) -> MixedPrecisionOptimizer:
    options = {"loss_scale": 128.0, "gradient_release": True, **options}
    return MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=lr), **options)


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).half()
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def masters_of(opt: MixedPrecisionOptimizer) -> list[torch.Tensor]:
    return [master.detach().clone() for master in opt.master_params()]


@pytest.mark.parametrize("masters", ["full", "split", "split24"])
def test_a_write_to_the_model_before_step_is_taken(masters: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    opt = wrapped(model, master_weights=masters)
    opt.backward(loss_of(model))
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # type: ignore[union-attr, operator]
    opt.step()
    assert "written" in caplog.text
    assert float(next(iter(opt.master_params())).min()) == 0.5
    opt.backward(loss_of(model, 1))
    opt.step()
    assert abs(float(model[0].weight.detach().mean()) - 0.5) < 0.01  # type: ignore[union-attr, arg-type]


def run_backward(opt: MixedPrecisionOptimizer, loss: torch.Tensor, way: str) -> None:
    if way == "backward":
        opt.backward(loss)
    else:
        opt.scale_loss(loss).backward()


@pytest.mark.parametrize("way", ["backward", "scale_loss"])
def test_a_write_that_counts_no_version_is_taken_too(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Weights are sampled when autograd says that the backward is over, whoever called it."""
    model = net()
    opt = wrapped(model)
    run_backward(opt, loss_of(model), way)
    model[0].weight.data.fill_(0.5)  # type: ignore[union-attr, operator]
    opt.step()
    assert "written" in caplog.text
    assert float(next(iter(opt.master_params())).min()) == 0.5


@pytest.mark.parametrize("way", ["backward", "scale_loss"])
def test_what_was_stepped_before_a_backward_raised_is_no_write(way: str) -> None:
    model = net()
    opt = wrapped(model, lr=1e-5, on_model_write="error")
    before = masters_of(opt)

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("in backward")

    handle = model[0].weight.register_hook(fail)  # type: ignore[union-attr, operator]
    with pytest.raises(KeyError):
        run_backward(opt, loss_of(model), way)
    handle.remove()
    stepped = masters_of(opt)
    assert not torch.equal(stepped[3], before[3])
    assert torch.equal(stepped[0], before[0])
    opt.zero_grad()
    opt.state_dict()  # looks for writes
    assert all(map(torch.equal, masters_of(opt), stepped))
    if way == "scale_loss":
        opt.step()  # nobody has told that the backward raised: its step is counted
    run_backward(opt, loss_of(model), way)
    opt.step()
    model[0].weight.data.fill_(0.5)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="written behind the optimizer"):
        opt.state_dict()


def test_a_write_is_an_error_where_that_is_asked() -> None:
    model = net()
    opt = wrapped(model, on_model_write="error")
    opt.backward(loss_of(model))
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="written behind the optimizer"):
        opt.step()


@pytest.mark.parametrize("masters", ["full", "split", "split24"])
def test_a_look_between_backward_and_step_changes_nothing(masters: str) -> None:
    found = []
    for looks in (False, True):
        model = net()
        opt = wrapped(model, lr=1e-5, master_weights=masters, on_model_write="error")
        for step in range(5):
            opt.backward(loss_of(model, step))
            if looks:
                opt.state_dict()
                opt.fp32_state_dict(model)
            opt.step()
        found.append(masters_of(opt))
    assert all(map(torch.equal, *found))


def test_codes_are_rounded_by_a_number_that_moves_though_a_parameter_is_left_alone() -> None:
    model, alone = net(), net()
    extra = nn.Parameter(torch.ones(4).half())
    inner = torch.optim.AdamW([*model.parameters(), extra], lr=1e-3)
    opt = MixedPrecisionOptimizer(inner, loss_scale=128.0, gradient_release=True, optimizer_state="8bit")
    plain = wrapped(alone, gradient_release=False, optimizer_state="8bit")
    for step in range(3):
        opt.backward(loss_of(model, step) + (extra.float() * float("nan")).sum())
        opt.step()
        plain.zero_grad()
        plain.backward(loss_of(alone, step))
        plain.step()
    assert opt.skipped_steps == 3
    assert opt.state_dict()["steps"] == 3
    assert torch.equal(extra, torch.ones(4).half())
    assert all(map(torch.equal, model.parameters(), alone.parameters())), "its neighbours were stepped"
    states = [one.state_dict(compact=True)["optimizer"]["state"][0] for one in (opt, plain)]
    assert_same(*states)


def test_who_finds_no_gradients_says_so() -> None:
    model = net()
    opt = wrapped(model)
    with pytest.raises(ValueError, match="frees gradients before there is anything to sample"):
        Monitor(opt, to=print)
    opt.backward(loss_of(model))
    next(iter(opt.master_params())).grad = torch.zeros(64, 64)
    with pytest.raises(RuntimeError, match="gradients are there that no backward made"):
        opt.step()


def test_codes_become_what_a_plain_optimizer_steps_with() -> None:
    model = nn.Linear(128, 128, bias=False).half()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = MixedPrecisionOptimizer(inner, loss_scale=128.0, optimizer_state="8bit")
    opt.backward(model(torch.ones(2, 128).half()).float().square().mean())
    opt.step()
    plain = fp16opt.optimizer_state(opt.state_dict(compact=True))
    whole = fp16opt.optimizer_state(opt.state_dict())
    assert torch.equal(plain["state"][0]["momentum_buffer"], whole["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_moments_without_a_code_are_refused_at_wrapping(bad: float) -> None:
    weight = nn.Parameter(torch.ones(64, 64).half())
    inner = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    inner.step()
    inner.state[weight]["exp_avg_sq"][0, 0] = bad
    with pytest.raises(ValueError, match="exp_avg_sq holds numbers that"):
        MixedPrecisionOptimizer(inner, optimizer_state="8bit")
    assert inner.param_groups[0]["params"] == [weight]


def test_repr_says_what_is_there_after_the_model_was_changed() -> None:
    model = net()
    opt = wrapped(model, gradient_release=False)
    model.float()
    assert "memory:" in repr(opt)


@pytest.mark.parametrize("masters", ["full", "split", "split24"])
def test_a_converted_model_is_refused_before_backward_steps_anything(masters: str) -> None:
    model = net()
    opt = wrapped(model, master_weights=masters)
    opt.backward(loss_of(model))
    opt.step()
    before, counted = masters_of(opt), [float(state["step"]) for state in opt.state.values()]
    model.bfloat16()
    x = torch.ones(4, 64).bfloat16()
    with pytest.raises(RuntimeError, match=r"had dtype torch\.float16 .* and has torch\.bfloat16 now"):
        opt.backward(model(x).float().square().mean())
    assert [float(state["step"]) for state in opt.state.values()] == counted
    model.half()
    if masters == "full":  # of split ones the weights are a part, and went through bfloat16
        assert all(map(torch.equal, masters_of(opt), before))


def test_a_backward_that_raised_without_being_ours_is_interrupted_and_writes_after_it_count() -> None:
    model = net()
    opt = wrapped(model, lr=0.0)
    handle = model[0].weight.register_hook(lambda grad: 1 / 0)  # type: ignore[union-attr, operator]
    with pytest.raises(ZeroDivisionError):
        opt.scale_loss(loss_of(model)).backward()
    handle.remove()
    last = model[2].weight
    last.data.fill_(3.0)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="a backward was interrupted"):
        opt.step()
    opt.zero_grad()
    opt.scale_loss(loss_of(model)).backward()
    opt.step()
    assert last.unique().tolist() == [3.0]  # type: ignore[union-attr, operator]
    assert opt.stats()["model_writes_taken"] == 1
