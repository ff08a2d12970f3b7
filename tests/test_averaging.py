"""AveragedMasters: averages of FP32 masters, the model that holds them for a while, and their checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rooms import through_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fp16opt import (
    AveragedMasters,
    MixedPrecisionOptimizer,
    distributed,
    ema,
    optimizer_state,
    register_fused_step,
)

DTYPES = (torch.float16, torch.bfloat16)


class Net(nn.Module):
    """16-bit linears, a tied one, an FP32 batch norm with buffers, an FP64 bias."""

    def __init__(self, dtype: torch.dtype = torch.float16, wide: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Linear(5, 7, dtype=dtype)
        self.norm = nn.BatchNorm1d(7)
        self.b = nn.Linear(7, 5, dtype=dtype)
        self.tied = nn.Linear(7, 5, bias=False, dtype=dtype)
        self.tied.weight = self.b.weight
        self.wide = nn.Parameter(torch.zeros(5, dtype=wide))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x.to(self.a.weight.dtype)).float())
        x = x.to(self.b.weight.dtype)
        return (self.b(x) + self.tied(x)).float() + self.wide.float()


def batch(number: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(number))


def train(net: nn.Module, opt: MixedPrecisionOptimizer, numbers: range) -> None:
    for number in numbers:
        opt.zero_grad()
        opt.backward((net(batch(number)) - 1.0).square().mean())
        opt.step()


def follow(net: nn.Module, opt: MixedPrecisionOptimizer, averaged: AveragedMasters, numbers: range) -> None:
    """Steps, and an update after each."""
    for number in numbers:
        train(net, opt, range(number, number + 1))
        averaged.update()


def make(dtype: torch.dtype = torch.float16, inner: Any = AdamW, **options: Any) -> tuple[Net, MixedPrecisionOptimizer]:
    net = Net(dtype, torch.float32 if options.get("master_weights") == "split" else torch.float64)
    return net, MixedPrecisionOptimizer(inner(net.parameters(), lr=0.05), **options)


def masters(net: nn.Module, opt: MixedPrecisionOptimizer) -> dict[str, np.ndarray]:
    """Of every parameter, by name, as numpy."""
    named = {id(param): name for name, param in net.named_parameters()}
    pairs = zip(opt.model_params(), opt.master_params(), strict=True)
    return {named[id(model)]: master.detach().numpy().copy() for model, master in pairs}


def bits(net: nn.Module) -> dict[str, bytes]:
    return {
        name: value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in net.state_dict().items()
    }


def moved(average: np.ndarray, value: np.ndarray, weight: float) -> np.ndarray:
    """The definition of the average, each operation rounded to the dtype; from the nearer end."""
    number = average.dtype.type
    if weight < 0.5:
        return average + number(weight) * (value - average)
    return value + number(1.0 - weight) * (average - value)


# -- the numbers -------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "general": {"fused_step": False},
    "split": {"master_weights": "split"},
    "without masters": {"inner": SGD, "master_weights": "none", "fused_step": False},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_averages_are_those_of_the_definition_bit_for_bit(dtype: torch.dtype, way: str) -> None:
    net, opt = make(dtype, **WAYS[way])
    averaged = AveragedMasters(net, opt, ema(0.875))
    wanted: dict[str, np.ndarray] = {}
    for number in range(6):
        follow(net, opt, averaged, range(number, number + 1))
        values = masters_or_weights(net, opt)
        wanted = {name: moved(wanted[name], value, 0.125) if wanted else value for name, value in values.items()}
    found = averaged.fp32_state_dict()
    for name, value in wanted.items():
        assert found[name].dtype == (net.wide.dtype if name == "wide" else torch.float32)
        assert np.array_equal(found[name].numpy(), value), name
    assert averaged.updates == 6


def masters_or_weights(net: nn.Module, opt: MixedPrecisionOptimizer) -> dict[str, np.ndarray]:
    """In float32 where there are no masters."""
    if opt.master_weights != "none":
        return masters(net, opt)
    return {
        name: param.detach().to(torch.promote_types(param.dtype, torch.float32)).numpy().copy()
        for name, param in net.named_parameters()
    }


def test_a_slow_average_moves_where_one_of_16_bit_weights_stands_still() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    net = nn.ParameterDict({"weight": weight})
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0))
    averaged = AveragedMasters(net, opt, ema(0.9999))
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    for number in range(101):
        opt.zero_grad()
        opt.backward((weight.float() * (-1.0 if number == 1 else 0.0)).sum())  # 1, then 2 for a hundred updates
        opt.step()
        averaged.update()
        theirs.update_parameters(net)
    assert theirs.module["weight"].item() == 1.0
    assert averaged.fp32_state_dict()["weight"].item() == pytest.approx(2.0 - 0.9999**100, abs=1e-6)


def test_a_rule_of_ones_own_gets_the_number_of_updates() -> None:
    net, opt = make()
    seen: list[int] = []

    def equal(updates: int) -> float:
        seen.append(updates)
        return 1 / (updates + 1)

    averaged = AveragedMasters(net, opt, equal)
    values = []
    for number in range(5):
        follow(net, opt, averaged, range(number, number + 1))
        values.append(masters(net, opt)["a.weight"].astype(np.float64))
    assert seen == [1, 2, 3, 4]  # the first takes the values as they are
    assert np.allclose(averaged.fp32_state_dict()["a.weight"].numpy(), np.mean(values, axis=0), rtol=0, atol=1e-6)


def test_parameters_that_come_later_and_those_that_thaw() -> None:
    net = Net()
    net.a.weight.requires_grad_(False)
    rest = [param for name, param in net.named_parameters() if name != "wide"]
    opt = MixedPrecisionOptimizer(SGD(rest, lr=0.05))
    averaged = AveragedMasters(net, opt, ema(0.75))
    train(net, opt, range(1))
    averaged.update()
    opt.add_param_group({"params": [net.wide]})
    net.a.weight.requires_grad_(True)
    frozen = net.a.weight.detach().float().numpy()
    train(net, opt, range(1, 2))
    averaged.update()
    found, values = averaged.fp32_state_dict(), masters(net, opt)
    assert np.array_equal(found["a.weight"].numpy(), moved(frozen, values["a.weight"], 0.25))
    assert np.array_equal(found["wide"].numpy(), values["wide"])  # its first values are those of its first update


# -- the model with averages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_swap_puts_averages_into_the_model_and_weights_back(
    dtype: torch.dtype, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, opt = make(dtype, **WAYS[way])
    other, theirs = make(dtype, **WAYS[way])
    averaged = AveragedMasters(net, opt, ema(0.9))
    follow(net, opt, averaged, range(4))
    train(other, theirs, range(4))
    before = bits(net)
    for _ in range(2):
        with averaged.swap():
            held = averaged.fp32_state_dict()
            for name, param in net.named_parameters():
                assert torch.equal(param.detach(), held[name].to(param.dtype)), name
            assert bits(net)["a.weight"] != before["a.weight"]
            assert net.tied.weight is net.b.weight
            assert net.norm.running_mean.equal(other.norm.running_mean)  # buffers stay
        assert bits(net) == before
    train(net, opt, range(4, 6))
    train(other, theirs, range(4, 6))
    assert bits(net) == bits(other)
    for mine, wanted in zip(opt.master_params(), theirs.master_params(), strict=True):
        assert torch.equal(mine, wanted)
    assert not caplog.records  # it was no write


def test_swap_is_no_write_where_writes_are_errors() -> None:
    net, opt = make(on_model_write="error")
    averaged = AveragedMasters(net, opt, ema(0.5))
    for number in range(3):
        follow(net, opt, averaged, range(number, number + 1))
        with averaged.swap():
            net(batch(0))
    with torch.no_grad():
        net.a.weight.add_(1.0)  # this is one
    with pytest.raises(RuntimeError, match="written behind the optimizer"), averaged.swap():
        pass
    opt.refresh_masters()
    with averaged.swap():
        pass


INSIDE: dict[str, Callable[[Net, MixedPrecisionOptimizer, AveragedMasters], Any]] = {
    "step": lambda net, opt, averaged: opt.step(),
    "step with a closure": lambda net, opt, averaged: opt.step(lambda: opt.backward(net(batch(0)).sum())),
    "backward": lambda net, opt, averaged: opt.backward(net(batch(0)).sum()),
    "state_dict": lambda net, opt, averaged: opt.state_dict(),
    "load_state_dict": lambda net, opt, averaged: opt.load_state_dict({}),
    "fp32_state_dict": lambda net, opt, averaged: opt.fp32_state_dict(net),
    "refresh_masters": lambda net, opt, averaged: opt.refresh_masters(),
    "write_masters": lambda net, opt, averaged: opt.write_masters(),
    "distributed.state_dict": lambda net, opt, averaged: distributed.state_dict(net, opt),
    "distributed.fp32_state_dict": lambda net, opt, averaged: distributed.fp32_state_dict(net, opt),
    "eval": lambda net, opt, averaged: opt.eval(),
    "update": lambda net, opt, averaged: averaged.update(),
    "swap": lambda net, opt, averaged: averaged.swap().__enter__(),
    "another swap": lambda net, opt, averaged: AveragedMasters(net, opt, ema(0.5)).swap().__enter__(),
}


class Switched(AdamW):
    """As schedule-free ones: evaluation has other masters than training."""

    def eval(self) -> None:
        raise AssertionError("reached")


same = {name: name for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
register_fused_step(Switched, "adamw", same)


@pytest.mark.parametrize("way", ["one pass", "split"])
@pytest.mark.parametrize("call", INSIDE)
def test_what_trains_saves_or_loads_raises_inside_and_changes_nothing(call: str, way: str) -> None:
    net, opt = make(**WAYS[way], inner=Switched if call == "eval" else AdamW)
    averaged = AveragedMasters(net, opt, ema(0.9))
    follow(net, opt, averaged, range(2))
    before, values = bits(net.eval()), masters(net, opt)
    with averaged.swap():
        inside = bits(net)
        with pytest.raises(RuntimeError, match=r"was called while the model holds averages, inside AveragedMasters"):
            INSIDE[call](net, opt, averaged)
        assert bits(net) == inside
    assert bits(net) == before
    for name, value in masters(net, opt).items():
        assert np.array_equal(value, values[name])
    net.train()
    train(net, opt, range(2, 3))
    averaged.update()


def test_an_exception_inside_puts_the_weights_back() -> None:
    net, opt = make()
    averaged = AveragedMasters(net, opt, ema(0.9))
    train(net, opt, range(2))
    before = bits(net)
    with pytest.raises(KeyError, match="evaluation"), averaged.swap():
        raise KeyError("evaluation")
    assert bits(net) == before
    train(net, opt, range(1))


def test_inference_mode_around_everything() -> None:
    net, opt = make()
    with torch.inference_mode():
        averaged = AveragedMasters(net, opt, ema(0.5))
        averaged.update()
        with averaged.swap():
            net.eval()(batch(0))
    net.train()
    train(net, opt, range(2))
    averaged.update()
    wanted = masters(net, opt)
    averaged.load_state_dict(averaged.state_dict())
    assert averaged.updates == 2
    assert not np.array_equal(averaged.fp32_state_dict()["a.weight"].numpy(), wanted["a.weight"])


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_resumed_average_goes_on_bit_for_bit() -> None:
    net, opt = make()
    averaged = AveragedMasters(net, opt, ema(0.9))
    for number in range(6):
        if number == 3:
            saved = through_file({"net": net.state_dict(), "opt": opt.state_dict(), "averages": averaged.state_dict()})
        follow(net, opt, averaged, range(number, number + 1))
    net2, opt2 = make()
    averaged2 = AveragedMasters(net2, opt2, ema(0.9))
    net2.load_state_dict(saved["net"])
    opt2.load_state_dict(saved["opt"])
    averaged2.load_state_dict(saved["averages"])
    kept = saved["averages"]["module.a.weight"].clone()
    follow(net2, opt2, averaged2, range(3, 6))
    assert torch.equal(saved["averages"]["module.a.weight"], kept)  # training does not edit the caller's dict
    mine, theirs = averaged2.state_dict(), averaged.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_torch_s_averaged_model_loads_it_and_gives_it_back(dtype: torch.dtype) -> None:
    net, opt = make(dtype)
    averaged = AveragedMasters(net, opt, ema(0.9))
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(4):
        follow(net, opt, averaged, range(number, number + 1))
        theirs.update_parameters(net)
    if dtype == torch.float32:  # the same definition; torch's lerp may contract
        for name, param in theirs.module.named_parameters():
            assert torch.allclose(averaged.fp32_state_dict()[name], param, rtol=0, atol=1e-6), name
    theirs.load_state_dict(averaged.state_dict())
    assert int(theirs.n_averaged) == 4
    with averaged.swap():
        for mine, param in zip(net.parameters(), theirs.module.parameters(), strict=True):
            assert torch.equal(mine, param)
    theirs.module.load_state_dict(averaged.fp32_state_dict())
    back = AveragedMasters(net, opt, ema(0.9))
    back.load_state_dict(theirs.state_dict())
    assert back.updates == 4
    assert torch.equal(back.fp32_state_dict()["a.weight"], theirs.module.a.weight.float())
    assert back.fp32_state_dict()["a.weight"].dtype == torch.float32
    wrapped = {("module." + name if name != "n_averaged" else name): v for name, v in theirs.state_dict().items()}
    back.load_state_dict(wrapped)  # of an AveragedModel around DDP


def test_names_of_compiled_and_tied_parameters() -> None:
    net, opt = make()
    averaged = AveragedMasters(torch.compile(net, backend="eager"), opt, ema(0.9))
    assert averaged.fp32_state_dict().keys() == net.state_dict().keys()
    state = averaged.fp32_state_dict()
    assert state["tied.weight"] is state["b.weight"]


def test_copies_go_on_apart() -> None:
    net, opt = make()
    averaged = AveragedMasters(net, opt, ema(0.9))
    train(net, opt, range(2))
    averaged.update()
    for copied in (copy.deepcopy(averaged), pickle.loads(pickle.dumps(averaged))):
        assert torch.equal(copied.fp32_state_dict()["a.weight"], averaged.fp32_state_dict()["a.weight"])
        copied._optimizer.refresh_masters()
        with torch.no_grad():
            list(copied._optimizer.master_params())[1].fill_(9.0)
        copied.update()
        copied.load_state_dict(copied.state_dict())
        assert copied.fp32_state_dict()["a.weight"].max() > 0.8
    assert averaged.updates == 1
    assert averaged.fp32_state_dict()["a.weight"].max() < 0.8


LOADS: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "no dict": (lambda s: [s], TypeError, "state_dict: expected a dict, got list"),
    "no count": (lambda s: s.pop("n_averaged") is None or s, ValueError, "lacks 'n_averaged'"),
    "negative": (lambda s: s | {"n_averaged": torch.tensor(-1)}, ValueError, "n_averaged: expected a number of upd"),
    "two numbers": (lambda s: s | {"n_averaged": torch.tensor([1, 2])}, ValueError, "n_averaged: expected a number of"),
    "a fraction": (lambda s: s | {"n_averaged": torch.tensor(2.5)}, ValueError, "n_averaged: expected a number of upd"),
    "nan": (lambda s: s | {"n_averaged": torch.tensor(np.nan)}, ValueError, "n_averaged: expected a number of updates"),
    "more than int64": (lambda s: s | {"n_averaged": 2**63}, ValueError, "n_averaged: expected a number of updates"),
    "bool": (lambda s: s | {"n_averaged": True}, ValueError, "n_averaged: expected a number of updates, got True"),
    "lacking": (lambda s: s.pop("module.b.bias") is None or s, ValueError, "lacks 'module.b.bias'"),
    "no tensor": (lambda s: s | {"module.b.bias": 1.0}, TypeError, "module.b.bias: expected a tensor, got float"),
    "shape": (lambda s: s | {"module.b.bias": torch.ones(4)}, ValueError, r"module.b.bias: .*\(5,\), got .*\(4,\)"),
    "dtype": (lambda s: s | {"module.b.bias": torch.ones(5).int()}, ValueError, "module.b.bias: .*got torch.int32"),
    "the optimizer's": (lambda s: {"state": {}, "param_groups": []}, ValueError, "lacks 'n_averaged'"),
}


@pytest.mark.parametrize("case", LOADS)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(case: str) -> None:
    damage, error, match = LOADS[case]
    net, opt = make()
    averaged = AveragedMasters(net, opt, ema(0.9))
    before = {name: value.clone() for name, value in averaged.state_dict().items()}
    given = {name: value.clone() + 1 for name, value in averaged.state_dict().items()}
    with pytest.raises(error, match=match):
        averaged.load_state_dict(damage(given))
    assert averaged.updates == 0
    for name, value in averaged.state_dict().items():
        assert torch.equal(value, before[name]), name


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "error", "match"),
    [
        (lambda n: 1.5, ValueError, "rule: expected a number from 0 to 1 for update 1, got 1.5"),
        (lambda n: float("nan"), ValueError, "rule: expected a number from 0 to 1 for update 1, got nan"),
        (lambda n: None, TypeError, "rule: expected a number from 0 to 1 for update 1, got NoneType"),
    ],
)
def test_a_rule_that_gives_no_weight(rule: Any, error: type[Exception], match: str) -> None:
    net, opt = make()
    averaged = AveragedMasters(net, opt, rule)
    averaged.update()
    before = averaged.fp32_state_dict()["a.weight"].clone()
    train(net, opt, range(1))
    with pytest.raises(error, match=match):
        averaged.update()
    assert torch.equal(averaged.fp32_state_dict()["a.weight"], before)
    assert averaged.updates == 1


def test_arguments_are_checked() -> None:
    net, opt = make()
    with pytest.raises(TypeError, match=r"optimizer: expected a fp16opt\.MixedPrecisionOptimizer, got SGD"):
        AveragedMasters(net, SGD(net.parameters(), lr=0.1), ema(0.9))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rule: expected fp16opt\.ema\(decay\) or another function, got float"):
        AveragedMasters(net, opt, 0.9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got list"):
        AveragedMasters([net], opt, ema(0.9))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model: none of its parameters is in this optimizer"):
        AveragedMasters(Net(), opt, ema(0.9))
    with pytest.raises(ValueError, match=r"decay: expected a number from 0 to 1, without 1, got 1\.0"):
        ema(1.0)
    with pytest.raises(ValueError, match="decay: expected a number"):
        ema(float("nan"))
    with pytest.raises(TypeError, match="decay: expected a number, got str"):
        ema("0.9")  # type: ignore[arg-type]
    assert repr(AveragedMasters(net, opt, ema(0.9))) == "AveragedMasters(7 parameters, ema(0.9), updates=0)"


def test_one_optimizer_of_two_models() -> None:
    one, other = Net(), Net()
    opt = MixedPrecisionOptimizer(SGD([*one.parameters(), *other.parameters()], lr=0.05))
    averaged = AveragedMasters(one, opt, ema(0.5))
    train(one, opt, range(2))
    averaged.update()
    before = bits(other)
    with averaged.swap():
        assert bits(other) == before
    assert optimizer_state(opt.state_dict())["param_groups"]
