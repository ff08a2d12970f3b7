"""initialize: levels, overrides, refusals, forms, what it leaves of models and optimizers."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp16opt
from fp16opt import amp
from fp16opt.amp import _amp_state, policy

from .nets import LEVELS, X, bits, made, net, same, sgd, train

HALF = torch.float16

TABLE = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (HALF, False, True, True, "dynamic"),
    "O3": (HALF, False, False, False, 1.0),
}
NAMES = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")


@pytest.mark.parametrize("level", LEVELS)
def test_property_tables(level: str) -> None:
    made(level)
    options = _amp_state.opt_properties.options
    assert tuple(options[name] for name in NAMES) == TABLE[level]
    assert (options["enabled"], _amp_state.opt_properties.opt_level) == (True, level)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_scale": "128.0"}, 128.0),
        ({"loss_scale": 64}, 64.0),
        ({"loss_scale": "dynamic"}, 2.0**16),
        ({"loss_scale": "dynamic", "max_loss_scale": 1024.0}, 1024.0),
        ({"loss_scale": "dynamic", "max_loss_scale": None}, 2.0**16),
        ({"loss_scale": "dynamic", "min_loss_scale": 2.0**17}, 2.0**17),
    ],
)
def test_loss_scales(given: dict[str, Any], expected: float) -> None:
    made("O3", **given)
    assert _amp_state.loss_scalers[0].loss_scale() == expected
    assert _amp_state.loss_scalers[0].dynamic == (given["loss_scale"] == "dynamic")


@pytest.mark.parametrize("given", ["True", True])
def test_strings_for_keep_batchnorm(given: Any) -> None:
    model, _ = made("O3", keep_batchnorm_fp32=given)
    assert model[1].weight.dtype == torch.float32
    assert model[0].weight.dtype == HALF
    model, _ = made("O2", keep_batchnorm_fp32="False")
    assert model[1].weight.dtype == HALF


REFUSED = [
    ({"opt_level": "02"}, "letter O, not the number zero"),
    ({"opt_level": "O4"}, "expected one of 'O0', 'O1', 'O2', 'O3', got 'O4'"),
    ({"opt_level": "O1", "cast_model_type": HALF}, "cast_model_type: O1 casts around torch functions"),
    ({"opt_level": "O1", "keep_batchnorm_fp32": False}, "keep_batchnorm_fp32: under O1"),
    ({"opt_level": "O1", "master_weights": True}, "master_weights: under O1"),
    ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions: True is what O1 does"),
    ({"opt_level": "O2", "patch_torch_functions": "yes"}, "patch_torch_functions: expected True or False"),
    ({"opt_level": "O2", "keep_batchnorm_fp32": "maybe"}, "keep_batchnorm_fp32: expected True, False"),
    ({"opt_level": "O2", "master_weights": 3}, "master_weights: expected True, False"),
    ({"opt_level": "O2", "cast_model_type": torch.int8}, "cast_model_type: expected torch.float16"),
    ({"opt_level": "O2", "loss_scale": "high"}, "loss_scale: expected a number"),
    ({"opt_level": "O2", "loss_scale": True}, "loss_scale: expected a number"),
    ({"opt_level": "O2", "loss_scale": -1.0}, "loss_scale: .*over 0"),
    ({"opt_level": "O2", "num_losses": 0}, "num_losses: expected a whole number"),
    ({"opt_level": "O2", "max_loss_scale": -1}, "max_loss_scale: expected a positive number"),
    ({"opt_level": "O2", "min_loss_scale": 8.0, "max_loss_scale": 4.0}, "min_loss_scale: expected at most"),
]


def everything(model: nn.Module, optimizer: Any) -> Any:
    session = {k: v for k, v in vars(_amp_state).items() if k != "casts"}
    return (
        [(p.dtype, p.detach().clone(), id(p)) for p in model.parameters()],
        type(model), type(optimizer), set(model.__dict__), set(optimizer.__dict__),
        [id(p) for g in optimizer.param_groups for p in g["params"]], session,
    )  # fmt: skip


def unchanged(before: Any, after: Any) -> bool:
    params = all(a == c and torch.equal(b, d) and e == f
                 for (a, b, e), (c, d, f) in zip(before[0], after[0], strict=True))  # fmt: skip
    return params and before[1:] == after[1:]


@pytest.mark.parametrize(("kwargs", "message"), REFUSED)
def test_refused_overrides_change_nothing(kwargs: dict[str, Any], message: str) -> None:
    model = net()
    optimizer = sgd(model)
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=message) as raised:
        amp.initialize(model, optimizer, **kwargs)
    assert isinstance(raised.value, ValueError)
    assert unchanged(before, everything(model, optimizer))


def _half_buffer(model: Any) -> Any:
    model[1].running_mean = model[1].running_mean.half()
    return model, None


APEX_DDP = type("DistributedDataParallel", (nn.Sequential,), {"__module__": "apex.parallel.distributed"})
OLD = type("FP16_Optimizer", (torch.optim.SGD,), {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: (m.half(), None), r"parameter '0.weight' is float16, expected float32.*no \.half\(\) needed"),
        (_half_buffer, "buffer '1.running_mean' is float16"),
        (lambda m: (APEX_DDP(m), None), "wrapped for parallel training already"),
        (lambda m: (m, OLD(m.parameters(), lr=0.1)), "keeps masters of its own"),
        (lambda m: (nn.DataParallel(m), None), "wrapped for parallel training already"),
        (lambda m: (m, sgd(net(1))), "none of its 6 parameters belongs to the models"),
        (lambda m: (m, made("O0")[1]), "passed to amp.initialize before"),
        (lambda m: (made("O0")[0], None), "passed to amp.initialize before"),
        (lambda m: (m, fp16opt.MixedPrecisionOptimizer(sgd(m))), "keeps masters of its own"),
        (lambda m: (m, [sgd(m)] * 2), "optimizer 1 is in the list twice"),
        (lambda m: ([m, m], None), "model 1 is in the list twice"),
    ],
)
def test_refused_models_and_optimizers(make: Any, message: str) -> None:
    model, optimizers = make(net())
    optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
    shown = (model[0] if isinstance(model, list) else model, optimizer or sgd(net()))
    before = everything(*shown)
    with pytest.raises(RuntimeError, match=message):
        amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    assert unchanged(before, everything(*shown))


def test_types_are_refused() -> None:
    model = net()
    with pytest.raises(TypeError, match=r"models: expected a torch\.nn\.Module or a list of them, got tuple"):
        amp.initialize((model,), sgd(model))
    with pytest.raises(TypeError, match=r"models: expected a torch\.nn\.Module or a list of them, got int"):
        amp.initialize([3])
    with pytest.raises(TypeError, match=r"optimizers: expected a torch\.optim\.Optimizer or a list of them, got dict"):
        amp.initialize(model, {})
    with pytest.raises(TypeError, match=r"optimizer 0 \(object\): expected a torch.optim.Optimizer"):
        amp.initialize(model, [object()])
    weights = [nn.Parameter(torch.ones(2, dtype=torch.complex64)), *model.parameters()]
    with pytest.raises(TypeError, match=r"param 0: expected float16, bfloat16, float32 or float64, got complex64"):
        amp.initialize(model, torch.optim.SGD(weights, lr=0.1))
    assert model[0].weight.dtype == torch.float32
    with pytest.raises(TypeError, match=r"cast_model_outputs: expected a floating torch\.dtype"):
        amp.initialize(model, cast_model_outputs=torch.int8)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(model), 1)
    with pytest.raises(TypeError, match=r"optimizer 0 \(StepLR\): expected a torch.optim.Optimizer"):
        amp.initialize(model, [scheduler])
    with pytest.raises(TypeError, match="verbosity: expected 0, 1 or 2, got 'loud'"):
        amp.initialize(model, sgd(model), verbosity="loud")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"opt_level: expected one of .* got \['O2'\]"):
        amp.initialize(model, sgd(model), opt_level=["O2"])  # type: ignore[arg-type]
    assert type(model) is type(net())
    with pytest.raises(TypeError, match="half_function: expected a function, got int"):
        amp.half_function(3)  # type: ignore[type-var]


def test_cudnn_must_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(torch.backends.cudnn), "enabled", False)
    with pytest.raises(RuntimeError, match=r"cudnn\.enabled = True"):
        amp.initialize(net(), verbosity=0)


def test_hard_override_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    _amp_state.hard_override = True
    model = net()
    amp.initialize(model, sgd(model), opt_level="O1", keep_batchnorm_fp32=True, verbosity=0)
    assert "keep_batchnorm_fp32: under O1" in caplog.text
    assert _amp_state.opt_properties.keep_batchnorm_fp32 is None


def test_forms() -> None:
    model = net()
    assert amp.initialize(model, opt_level="O2", verbosity=0) is model
    models = [net(), net(1)]
    got = amp.initialize(models, opt_level="O2", verbosity=0)
    assert got is models
    a, b = net(), net(1)
    oa, ob = sgd(a), sgd(b)
    (ra, rb), ro = amp.initialize([a, b], oa, opt_level="O2", verbosity=0)
    assert (ra is a, rb is b, ro is oa) == (True, True, True)
    c = net()
    oc, od = sgd(c), torch.optim.Adam(c.parameters())
    rc, rest = amp.initialize(models=c, optimizers=[oc, od], opt_level="O0", verbosity=0)
    assert rc is c
    assert isinstance(rest, list)
    assert rest[1] is od
    assert type(ob) is torch.optim.SGD


@pytest.mark.parametrize("level", LEVELS)
def test_disabled_leaves_the_script_as_it_was(level: str) -> None:
    plain_model, model = net(), net()
    plain, optimizer = sgd(plain_model), sgd(model)
    got = amp.initialize(model, optimizer, enabled=False, opt_level=level)
    assert got == (model, optimizer)
    assert type(optimizer) is torch.optim.SGD
    losses = train(model, optimizer, 3)
    for _ in range(3):
        plain.zero_grad()
        nn.functional.cross_entropy(plain_model(X), torch.as_tensor(train.__globals__["Y"])).backward()
        plain.step()
    assert same([*model.parameters()], [*plain_model.parameters()])
    assert losses[0] > losses[-1]
    assert amp.state_dict() == {}
    amp.load_state_dict({})


@pytest.mark.parametrize("disable", [lambda m: amp.initialize(m, enabled=False), lambda m: amp.init(enabled=False)])
def test_disabled_goes_for_optimizers_that_amp_never_saw(disable: Any) -> None:
    model = net()
    disable(model)
    optimizer = sgd(model)
    loss = model(X).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


def test_a_later_initialize_leaves_the_level_of_earlier_optimizers_alone() -> None:
    model, optimizer = made("O2")
    other = net(1)
    amp.initialize(other, sgd(other), opt_level="O3", verbosity=0)
    amp.initialize(net(2), enabled=False)
    assert _amp_state.opt_properties.opt_level == "O3"
    train(model, optimizer, 2)
    assert [p.dtype for p in amp.master_params(optimizer)] == [torch.float32] * 6


def test_a_later_initialize_makes_new_scalers_and_every_optimizer_uses_them() -> None:
    """As in apex: what ``amp.state_dict()`` shows and scripts set by ``_loss_scale`` is what scales."""
    model, optimizer = made("O2")
    train(model, optimizer, 3)
    reference_model, reference = copy.deepcopy((model, optimizer))
    other = net(1)
    _, second = amp.initialize(other, sgd(other), opt_level="O1", num_losses=2, verbosity=0, max_loss_scale=2.0**20)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 0}
    _amp_state.loss_scalers[1]._loss_scale = 2.0**18
    optimizer.zero_grad()
    with amp.scale_loss(torch.ones(()), [optimizer, second], loss_id=1) as scaled:
        assert float(scaled) == 2.0**18
    amp.load_state_dict(
        {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}, "loss_scaler1": amp.state_dict()["loss_scaler1"]}
    )
    _amp_state.handle._deactivate()  # O1's casts: the reference has none
    optimizer.zero_grad()
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert float(scaled) == 1024.0
    optimizer.zero_grad()
    train(model, optimizer, 3)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 11  # 7, the scale_loss above, and three
    train(reference_model, reference, 3)
    assert same(bits(model, optimizer), bits(reference_model, reference)), "scales are powers of two: the same numbers"


# -- models ----------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.plain_bn = nn.BatchNorm2d(2, affine=False)
        self.ln, self.gn, self.inn = nn.LayerNorm(4), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2, affine=True)
        self.rnn = nn.LSTM(2, 2)
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("table", torch.ones(3))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {n: t.dtype for n, t in [*model.named_parameters(), *model.named_buffers()]}


def test_what_is_cast() -> None:
    model = amp.initialize(Zoo(), opt_level="O2", verbosity=0)
    for name, dtype in dtypes(model).items():
        if name.startswith("bn.") and "num_batches" not in name:
            assert dtype == torch.float32, name
        elif name == "wide":
            assert dtype == torch.float64  # O2 of old made it FP16
        elif name == "counts" or "num_batches" in name:
            assert dtype == torch.int64
        else:
            assert dtype == HALF, name
    model = amp.initialize(Zoo(), opt_level="O3", verbosity=0)
    assert dtypes(model)["bn.weight"] == HALF
    assert set(dtypes(amp.initialize(Zoo(), opt_level="O0", verbosity=0)).values()) == {
        torch.float32, torch.float64, torch.int64,
    }  # fmt: skip
    assert dtypes(amp.initialize(Zoo(), opt_level="O2", cast_model_type=False, verbosity=0))["conv.weight"] is (
        torch.float32
    )
    assert dtypes(amp.initialize(Zoo(), opt_level="O2", cast_model_type=torch.bfloat16, verbosity=0))[
        "conv.weight"
    ] is (torch.bfloat16)


def test_modules_of_the_users_that_stay_in_fp32() -> None:
    _amp_state.fp32_modules.append(nn.GroupNorm)
    model = amp.initialize(Zoo(), opt_level="O2", verbosity=0)
    assert model.gn.weight.dtype == torch.float32
    assert model.ln.weight.dtype == HALF


Pair = namedtuple("Pair", "a b")


class Batch:
    """A batch class of the user's."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.x.to(dtype))


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return kwargs.get("back", args)


def test_inputs_in_any_container_are_cast_and_never_written() -> None:
    model = amp.initialize(Echo(), opt_level="O2", verbosity=0)
    x = torch.ones(2)
    ordered = OrderedDict(p=x, q=["text", None, 3.5])
    array = np.ones(2, dtype=np.float32)
    inner = nn.Linear(1, 1)
    batch = {"x": x, "ids": torch.tensor([1]), "deep": [Pair(x, (x, "s"))]}
    model(x, batch, ordered, array, inner, Batch(x), pack=nn.utils.rnn.pack_sequence([x]), flag=True)
    (a, b, c, d, e, f), kwargs = model.seen
    assert a.dtype == HALF
    assert b["x"].dtype == HALF
    assert b["ids"].dtype == torch.int64
    assert type(b["deep"][0]) is Pair
    assert b["deep"][0].a.dtype == HALF
    assert b["deep"][0].b[0].dtype == HALF
    assert type(c) is OrderedDict
    assert c["p"].dtype == HALF
    assert c["q"] == ["text", None, 3.5]
    assert d is array
    assert e is inner
    assert inner.weight.dtype == torch.float32
    assert f.x.dtype == HALF
    assert kwargs["pack"].data.dtype == HALF
    assert kwargs["flag"] is True
    assert batch["x"].dtype == torch.float32  # the caller's own
    assert ordered["p"] is x


def test_outputs() -> None:
    model = amp.initialize(Echo(), opt_level="O2", verbosity=0)
    out = model(torch.ones(2), OrderedDict(z=Pair(torch.ones(1).half(), torch.tensor(1))))
    assert out[0].dtype == torch.float32
    assert type(out[1]) is OrderedDict
    assert type(out[1]["z"]) is Pair
    assert out[1]["z"].a.dtype == torch.float32
    assert out[1]["z"].b.dtype == torch.int64
    model = amp.initialize(Echo(), opt_level="O2", cast_model_outputs=HALF, verbosity=0)
    assert model(torch.ones(2))[0].dtype == HALF
    model = amp.initialize(Echo(), opt_level="O1", cast_model_outputs=HALF, verbosity=0)
    assert model(torch.ones(2))[0].dtype == HALF  # without a cast of the model as well
    assert model.lin.weight.dtype == torch.float32


def test_forward_called_directly_hooks_eval_and_forward_set_on_the_instance() -> None:
    model = net()
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model.forward(X).dtype == torch.float32
    assert model.eval()(X).dtype == torch.float32
    assert seen == [torch.float32, torch.float32]  # outside the casts, as before
    patched = Echo()
    patched.forward = lambda x: patched.lin(x)  # type: ignore[method-assign]
    amp.initialize(patched, opt_level="O2", verbosity=0)
    assert patched(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_copies_and_pickles_compute_with_their_own_weights(level: str) -> None:
    model, _ = made(level)
    model.eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert isinstance(twin, nn.Sequential)
        assert torch.equal(twin(X), model(X))
        with torch.no_grad():
            twin[3].bias.add_(1.0)
        assert not torch.equal(twin(X), model(X))
    assert (type(model).__name__, repr(model)) == ("Sequential", repr(net()))
    fresh = type(model)(nn.Linear(8, 2))  # code that makes another instance of the class
    assert fresh(X).dtype == torch.float32 if level != "O1" else torch.is_tensor(fresh(X))


@pytest.mark.parametrize("level", LEVELS)
def test_state_dicts_are_fp32_and_load(level: str) -> None:
    model, _ = made(level)
    model[1].register_module("extra", Extra())
    state = model.state_dict()
    assert {v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.is_floating_point()} == {torch.float32}
    assert model[3].state_dict()["weight"].dtype == torch.float32
    assert state["1.extra._extra_state"] == {"a": 1}
    assert isinstance(model.state_dict(keep_vars=True)["0.weight"], nn.Parameter)
    other, _ = made(level)
    other[1].register_module("extra", Extra())
    with torch.no_grad():
        other[0].weight.zero_()
    other.load_state_dict(state)
    assert same([*other.parameters()], [*model.parameters()])
    plain = net(3)
    plain[1].register_module("extra", Extra())
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, model[0].weight.float())


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


# -- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_optimizer_is_what_it_was(level: str) -> None:
    model = net()
    optimizer = sgd(model)
    optimizer.my_setting = 3  # type: ignore[attr-defined]
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    same_object = amp.initialize(model, optimizer, opt_level=level, verbosity=0)[1]
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert same_object is optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(optimizer, fp16opt.MixedPrecisionOptimizer) == (level == "O2")
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.my_setting == 3  # type: ignore[attr-defined]
    optimizer.my_setting = 4  # type: ignore[attr-defined]
    stepped = optimizer.optimizer if level == "O2" else optimizer
    assert stepped.my_setting == 4
    with pytest.raises(AttributeError):
        _ = optimizer.nothing  # type: ignore[attr-defined]
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _amp_state.loss_scalers[0]._loss_scale = 1.0 if level in ("O0", "O3") else 8.0
        train(model, optimizer, 1)
        before.step()
        after.step()
    assert optimizer.param_groups[0]["lr"] == 0.125 / 4
    assert optimizer.state[next(amp.master_params(optimizer))]["momentum_buffer"] is not None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_schedulers_do_not_warn_where_the_first_step_is_skipped(level: str, recwarn: pytest.WarningsRecorder) -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(X).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("level", LEVELS)
def test_copied_or_pickled_with_its_model_training_goes_on(level: str, copied: Any) -> None:
    model, optimizer = made(level)
    train(model, optimizer, 3)
    twin_model, twin = copied((model, optimizer))
    assert isinstance(twin, torch.optim.SGD)
    twin.amp.scalers[0]._unskipped = 0
    train(model, optimizer, 3)
    train(twin_model, twin, 3)
    assert same(bits(model, optimizer), bits(twin_model, twin))


def test_properties_refuse_unknown_names() -> None:
    properties = policy.Properties()
    with pytest.raises(AttributeError, match="amp's properties are enabled, opt_level"):
        properties.nothing = 1
    with pytest.raises(AttributeError, match="there is no 'nothing'"):
        _ = properties.nothing
    assert "loss_scale=1.0" in repr(properties)


def test_one_line_is_logged(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    with caplog.at_level("INFO", logger="fp16opt.amp"):
        amp.initialize(model, sgd(model), opt_level="O2")
        assert len(caplog.records) == 1
        caplog.clear()
        amp.initialize(net(), opt_level="O2", verbosity=0)
        assert not caplog.records
    assert capsys.readouterr().out == ""
