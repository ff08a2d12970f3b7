"""The older interface, and what scripts read and write of the internals."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from fp16opt import amp
from fp16opt.amp import _amp_state
from fp16opt.amp._amp_state import _amp_state as from_module
from fp16opt.amp._amp_state import master_params, maybe_print, warn_or_err
from fp16opt.amp.handle import NoOpHandle

from .nets import X, Y, made, net, same, sgd, train


def test_the_state_object_and_the_module_of_the_same_name() -> None:
    assert amp._amp_state is from_module is _amp_state
    module = importlib.import_module("fp16opt.amp._amp_state")
    assert module._amp_state is _amp_state
    assert amp.master_params is master_params
    assert "state_dict" in amp.__dict__
    for name in ("frontend", "handle", "scaler", "lists.functional_overrides", "amp"):
        importlib.import_module(f"fp16opt.amp.{name}")
    from fp16opt.amp.frontend import O2, Properties
    from fp16opt.amp.scaler import LossScaler

    assert O2(Properties()).opt_level == "O2"
    assert LossScaler


def test_messages(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level("INFO", logger="fp16opt.amp"):
        maybe_print("shown", True)
        _amp_state.verbosity = 0
        maybe_print("hidden")
    assert caplog.messages == ["shown"]
    assert capsys.readouterr().out == ""
    with pytest.raises(RuntimeError, match=r"wrong .*hard_override"):
        warn_or_err("wrong")
    _amp_state.hard_override = True
    warn_or_err("wrong")
    assert caplog.messages[-1] == "wrong"


def test_properties_of_the_session() -> None:
    made("O2", min_loss_scale=2.0, max_loss_scale=2.0**20, num_losses=2)
    assert _amp_state.opt_properties.enabled
    assert _amp_state.opt_properties.options["cast_model_type"] is torch.float16
    assert (_amp_state.min_loss_scale, _amp_state.max_loss_scale) == (2.0, 2.0**20)
    assert [s.dynamic for s in _amp_state.loss_scalers] == [True, True]
    assert not _amp_state.handle.is_active()
    _model, _ = made("O1")
    assert _amp_state.handle.is_active()
    assert _amp_state.handle._is_active
    with _amp_state.handle.disable_casts():
        assert torch.mm(X, X.t()).dtype == torch.float32


def test_the_stash() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = sgd(model)
    assert not hasattr(optimizer, "_amp_stash")
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    stash = optimizer._amp_stash  # type: ignore[attr-defined]
    optimizer._lazy_init_maybe_master_weights()  # type: ignore[attr-defined]
    optimizer._amp_lazy_init()  # type: ignore[attr-defined]
    stash.lazy_init_called = True
    assert stash.lazy_init_called
    bn, last = model[1], model[3]
    halves = [model[0].weight, model[0].bias, last.weight, last.bias]
    assert [id(p) for p in stash.all_fp16_params] == [id(p) for p in halves]
    masters = [p for p in amp.master_params(optimizer) if p.dtype == torch.float32]
    assert [id(p) for p in stash.all_fp32_from_fp16_params] == [id(masters[i]) for i in (0, 3, 4)]
    assert [id(p) for p in stash.all_fp32_from_fp32_params] == [id(p) for p in list(amp.master_params(optimizer))[2:4]]
    assert [p.data_ptr() for p in stash.all_fp32_params] == [bn.weight.data_ptr(), bn.bias.data_ptr()]
    assert [len(g) for g in (stash.fp16_groups[0], stash.fp32_from_fp16_groups[0])] == [4, 3]


def test_the_resume_recipe_that_copies_masters() -> None:
    model, optimizer = made("O2")
    train(model, optimizer, 3)
    masters = [p.detach().clone() for p in optimizer._amp_stash.all_fp32_from_fp16_params]
    other, fresh = made("O2")
    fresh._lazy_init_maybe_master_weights()
    fresh._amp_stash.lazy_init_called = True
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict({k: v for k, v in optimizer.state_dict().items() if k != "fp16opt_masters"})
    for p, saved in zip(fresh._amp_stash.all_fp32_from_fp16_params, masters, strict=True):
        p.data.copy_(saved)
    fresh._master_params_to_model_params()
    train(model, optimizer, 2)
    train(other, fresh, 2)
    assert same([*model.parameters()], [*other.parameters()])


def test_a_backward_by_hand() -> None:
    model, optimizer = made("O2")
    reference_model, reference = made("O2")
    train(reference_model, reference, 1)
    scaler = _amp_state.loss_scalers[0]
    optimizer._prepare_amp_backward()
    (F.cross_entropy(model(X).float(), Y).float() * scaler.loss_scale()).backward()
    optimizer._post_amp_backward(scaler)
    optimizer.step()
    assert same([*model.parameters()], [*reference_model.parameters()])


def test_the_interface_of_2018_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"init: handles were replaced by model, optimizer = amp\.initialize"):
        amp.init(loss_scale=128.0)


def test_disabled_handle() -> None:
    amp.initialize(net(), enabled=False)
    assert isinstance(_amp_state.handle, NoOpHandle)
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    loss = torch.ones((), requires_grad=True)
    with handle.scale_loss(loss, None) as scaled:
        assert scaled is loss
    with handle.disable_casts():
        pass
    handle._deactivate()
