"""master_weights="split": files, copies, and what full and split masters load of each other."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from specs import OptimizerCase, params_of
from torch import nn
from torch.optim import SGD, AdamW

from engine import recipes
from engine.checks import (
    assert_same,
    assert_same_bits,
    groups_params,
    linear_loss,
    normal,
    one_step,
    ones,
)
from engine.split_cases import ONE_PASS, by_dtype, gradients, half_sgd, masters, through_file, trained, wrap
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


def test_a_write_after_a_load_is_still_noticed(caplog: pytest.LogCaptureFixture) -> None:
    opt, params = trained("full", torch.bfloat16)
    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    loaded = wrap(half_sgd(fresh), loss_scale=1.0)
    loaded.load_state_dict(opt.state_dict())
    with torch.no_grad():
        for p, value in zip(fresh, params, strict=True):
            p.copy_(value)
        fresh[0][3] = 9.0
    with caplog.at_level(logging.WARNING):
        loaded.state_dict()
    assert "written" in caplog.text
    assert masters(loaded)[0][3] == 9.0


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


@by_dtype
@pytest.mark.parametrize("inner", [{"fused": True}, {}], ids=str)
def test_state_keeps_the_masters_strides_over_a_load(inner: dict[str, Any], dtype: torch.dtype) -> None:
    """torch's fused steps are silently wrong where a state's strides are not its parameter's."""

    def made() -> tuple[Any, list[nn.Parameter]]:
        values = normal((3, 4, 5, 2), dtype, 1).to(memory_format=torch.channels_last)
        params = [nn.Parameter(values), nn.Parameter(normal((6, 7), dtype, 2).t())]
        return wrap(AdamW(params, lr=0.1, **inner)), params

    opt, params = made()
    one_step(opt, params, gradients(params, 0, False))
    resumed, others = made()
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for master, param in zip(groups_params(resumed), others, strict=True):
        assert resumed.state[master]["exp_avg"].stride() == param.stride()
    for k in (1, 2):
        for o, ps in ((opt, params), (resumed, others)):
            one_step(o, ps, gradients(ps, k, False))
    assert_same(masters(resumed), masters(opt))


@pytest.mark.parametrize("model_first", [True, False])
def test_a_scalar_on_a_tie(model_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    source = [nn.Parameter(torch.ones(()).bfloat16())]
    full = wrap(SGD(source, lr=1.0), "full", loss_scale=1.0)
    one_step(full, source, [-(2.0**-8)])
    fresh = [nn.Parameter(torch.zeros(()).bfloat16())]
    split = wrap(SGD(fresh, lr=1.0), loss_scale=1.0)
    for load in (fresh[0].data.copy_, split.load_state_dict)[:: 1 if model_first else -1]:
        load(source[0].detach() if load != split.load_state_dict else full.state_dict())
    with caplog.at_level(logging.WARNING):
        assert split.state_dict()["masters"][0].item() == 1 + 2.0**-8
    assert "written" not in caplog.text


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
