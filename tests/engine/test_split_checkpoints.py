"""master_weights="split": files, copies, and what full and split masters load of each other."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from rooms import through_file
from specs import OptimizerCase, params_of
from torch import nn
from torch.optim import SGD

from engine import recipes
from engine.checks import assert_same, assert_same_bits, groups_params, linear_loss, one_step, ones
from engine.split_cases import ONE_PASS, by_dtype, gradients, half_sgd, masters, trained, wrap
from fp16opt import DynamicLossScaler


@pytest.mark.parametrize("case", params_of(ONE_PASS))
@pytest.mark.parametrize("model_first", [True, False, None])
def test_resume_bit_exact(case: OptimizerCase, model_first: bool | None) -> None:
    recipes.check_resume_bit_exact(
        lambda inner, **kwargs: wrap(inner, scaler=DynamicLossScaler(**kwargs)),
        case,
        {"init_scale": 64.0, "growth_interval": 3},
        model_first,
    )


@by_dtype
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize(("source", "target"), [("full", "split"), ("split", "full"), ("split", "split")])
def test_full_and_split_load_each_others_files(
    source: str, target: str, model_first: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    opt, params = trained(source, dtype)
    saved = through_file({"opt": opt.state_dict(), "model": [p.detach() for p in params]})
    wanted = masters(opt)
    assert all(m.dtype == torch.float32 for m in saved["opt"]["masters"])
    ties = (wanted[0].view(torch.int32) & 0x1FFFF) == 0x8000
    assert dtype == torch.float16 or ties.any(), "without ties this tests little"

    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    loaded = wrap(half_sgd(fresh), target, loss_scale=1.0)

    def load_model() -> None:
        with torch.no_grad():
            for p, value in zip(fresh, saved["model"], strict=True):
                p.copy_(value)

    if model_first:
        load_model()
    loaded.load_state_dict(saved["opt"])
    if not model_first:
        load_model()
    with caplog.at_level(logging.WARNING):
        assert_same(loaded.state_dict(), opt.state_dict(), "after the load")
        for o, ps in ((opt, params), (loaded, fresh)):
            one_step(o, ps, gradients(ps, 50, False))
    assert "written" not in caplog.text
    for got, want in zip(masters(loaded), masters(opt), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=2.0**-40) if dtype == torch.float16 else torch.equal(got, want)


def test_loading_goes_on_after_a_hook_that_raises() -> None:
    """A strange optimizer's load is undone tensor by tensor; placeholders hold nothing to undo."""
    opt, _ = trained("split", torch.bfloat16)
    saved = copy.deepcopy(opt.state_dict())
    wanted = masters(opt)

    def raises(_: Any) -> None:
        raise KeyError("stop")

    handle = opt.optimizer.register_load_state_dict_post_hook(raises)
    with pytest.raises(KeyError, match="stop"):
        opt.load_state_dict(saved)
    handle.remove()
    assert_same(masters(opt), wanted)
    opt.load_state_dict(saved)
    assert_same(masters(opt), wanted)


def test_fp32_state_dict_with_tied_weights() -> None:
    torch.manual_seed(0)  # some first weights leave the ReLU dead, and no gradient
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).bfloat16()
    model[2].weight = model[0].weight
    opt = wrap(SGD(model.parameters(), lr=2.0**-10))
    for _ in range(3):
        opt.zero_grad()
        opt.backward(model(torch.ones(2, 4).bfloat16()).float().sum())
        opt.step()
    state = opt.fp32_state_dict(model)
    assert state["0.weight"] is state["2.weight"]
    assert_same_bits(state["0.weight"], next(opt.master_params()).detach())
    assert not torch.equal(state["0.weight"], model[0].weight.float())


def test_copies_of_what_master_params_gives_are_ordinary_parameters() -> None:
    p = ones(3)
    opt = wrap(SGD([p], lr=2.0**-13))
    opt.backward(linear_loss([p], [1.0]))
    (master,) = opt.master_params()
    assert master.grad is not None
    for made in (copy.deepcopy(master), pickle.loads(pickle.dumps(master)), through_file(master)):
        assert type(made) is nn.Parameter
        assert made.__dict__ == {}
        assert made.grad is None
        assert_same_bits(made.detach(), master.detach())
    twice = copy.deepcopy([master, master])
    assert twice[0] is twice[1]
    assert twice[0].data_ptr() != master.data_ptr()
    del master.grad
    assert groups_params(opt)[0].grad is None
