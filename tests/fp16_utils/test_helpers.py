"""Converters for networks, masters kept by hand, and the loss scalers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from engine.checks import assert_same_bits
from torch import Tensor, nn

from fp16opt.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

HALF, FLOAT = torch.float16, torch.float32


class Net(nn.Module):
    """Affine and plain batch norms, other norms, a buffer and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.plain_bn = nn.BatchNorm2d(4, affine=False)
        self.norm = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(4, 3)
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.plain_bn(self.bn(self.conv(x))))
        return self.fc(x.mean(dim=(2, 3)))


def dtypes(net: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in net.state_dict().items()}


def check_converted(net: nn.Module) -> None:
    for name, dtype in dtypes(net).items():
        last = name.rpartition(".")[2]
        if last in ("num_batches_tracked", "count"):
            assert dtype == torch.int64, name
        else:
            assert dtype == (FLOAT if name.split(".")[-2:-1] == ["bn"] else HALF), name


def test_fp16model_params_and_output() -> None:
    """The two tests that apex had: affine batch norms FP32, all else half, and a half result."""
    model = FP16Model(Net())
    check_converted(model.network)
    assert model(torch.randn(2, 2, 5, 5)).dtype == HALF


def test_fp16model_leaves_integers_and_others_alone() -> None:
    """apex made indices half (quirk 42)."""
    seen: list[Any] = []

    class Look(nn.Module):
        def forward(self, *inputs: Any) -> None:
            seen.extend(inputs)

    indices, mask = torch.arange(3), torch.ones(3).bool()
    FP16Model(Look())(indices, mask, torch.ones(1), "text", None)
    assert seen[0] is indices
    assert seen[1] is mask
    assert seen[2].dtype == HALF
    assert seen[3:] == ["text", None]
    assert tofp16()(indices) is indices
    assert FP16Model(nn.Embedding(4, 2))(torch.tensor([3])).dtype == HALF


def test_network_to_half_keeps_batch_norms_unrounded() -> None:
    net = Net()
    with torch.no_grad():
        net.bn.weight.fill_(1.0001)  # FP16 would make it 1
    half = network_to_half(net)
    assert isinstance(half, nn.Sequential)
    check_converted(half[1])
    assert half[1].bn.weight[0].item() == torch.tensor(1.0001).item()
    assert half(torch.randn(2, 2, 5, 5)).dtype == HALF


def test_bn_convert_float_reaches_in_and_takes_one() -> None:
    net = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)), nn.Linear(2, 2)).half()
    assert BN_convert_float(net) is net
    assert net[0][0].running_mean.dtype == FLOAT
    assert net[0][1].running_mean.dtype == HALF
    assert net[1].weight.dtype == HALF
    assert BN_convert_float(nn.SyncBatchNorm(2).half()).weight.dtype == FLOAT


def test_convert_module_converts_its_own_and_its_gradients() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    outer = nn.Module()
    outer.own, outer.inner = nn.Parameter(torch.ones(2)), net
    outer.own.grad = torch.ones(2)
    param = outer.own
    convert_module(outer, HALF)
    assert outer.own is param
    assert (param.dtype, param.grad.dtype, net[0].weight.dtype) == (HALF, HALF, FLOAT)
    convert_module(outer, torch.float64)
    assert (param.dtype, param.grad.dtype) == (torch.float64, torch.float64)
    with pytest.raises(
        TypeError, match=r"dtype: expected a floating torch.dtype such as torch.float16, got torch.int8"
    ):
        convert_module(outer, torch.int8)
    with pytest.raises(TypeError, match=r"dtype: expected a floating torch.dtype"):
        convert_network(net, "half")  # type: ignore[arg-type]


def test_convert_network_keeps_rnns_running() -> None:
    rnn = convert_network(nn.LSTM(3, 4, num_layers=2, bidirectional=True), HALF)
    out, _ = rnn(torch.randn(5, 2, 3).half())
    assert out.dtype == HALF
    out.float().sum().backward()
    assert all(p.grad is not None for p in rnn.parameters())


# -- masters by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
def test_a_step_with_masters_kept_by_hand(flat: bool) -> None:
    """The pattern of the old examples equals a plain FP32 step that starts from the halves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    model[0].bias.requires_grad_(False)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    twin.load_state_dict(model.state_dict())
    model_params, masters = prep_param_lists(model, flat_master=flat)
    assert len(model_params) == 3
    assert [m.dtype for m in masters] == [FLOAT] * (1 if flat else 3)
    optimizer = torch.optim.SGD(masters, lr=0.5)
    grads = [torch.randn(p.shape).half() for p in model_params]
    for p, g in zip(model_params, grads, strict=True):
        p.grad = g
    model_grads_to_master_grads(model_params, masters, flat_master=flat)
    optimizer.step()
    master_params_to_model_params(model_params, masters, flat_master=flat)
    twins = [p for name, p in twin.named_parameters() if name != "0.bias"]
    for p, t, g in zip(model_params, twins, grads, strict=True):
        assert_same_bits(p, (t.detach() - 0.5 * g.float()).half(), "param")


def test_missing_gradients_clear_the_masters() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).half()
    model_params, masters = prep_param_lists(model)
    for p in model_params:
        p.grad = torch.ones_like(p)
    model_grads_to_master_grads(model_params, masters)
    model_params[1].grad = None
    model_grads_to_master_grads(model_params, masters)
    assert masters[1].grad is None
    assert masters[0].grad is not None
    flat_params, flat = prep_param_lists(model, flat_master=True)
    assert flat[0].grad is not None
    assert flat[0].grad.tolist() == [0.0] * 4
    flat[0].grad = None
    model_grads_to_master_grads(flat_params, flat, flat_master=True)
    assert flat[0].grad.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_flat_masters_follow_channels_last_in_logical_order() -> None:
    model = nn.Conv2d(2, 3, 2, bias=False).half().to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    params, flat = prep_param_lists(model, flat_master=True)
    model.weight.grad = torch.arange(24.0).half().view(3, 2, 2, 2).to(memory_format=torch.channels_last)
    model_grads_to_master_grads(params, flat, True)
    assert flat[0].grad is not None
    assert flat[0].grad.tolist() == list(range(24))
    master_params_to_model_params(params, flat, True)
    assert_same_bits(model.weight, before, "weight")


def test_bad_lists_are_refused() -> None:
    model = nn.Linear(2, 1).half()
    params, masters = prep_param_lists(model)
    _, flat = prep_param_lists(model, flat_master=True)
    with pytest.raises(ValueError, match=r"expected as many master_params as model_params \(2\), got 1"):
        master_params_to_model_params(params, flat)
    with pytest.raises(ValueError, match="expected one flat master of 3 elements, got 2 with 2 in the first"):
        model_grads_to_master_grads(params, masters, flat_master=True)
    with pytest.raises(ValueError, match="expected parameters that require gradients, got none"):
        prep_param_lists(nn.Linear(2, 1).requires_grad_(False))


def test_to_python_float() -> None:
    assert to_python_float(torch.tensor([2.5])) == 2.5
    assert to_python_float([1]) == 1.0


# -- loss scalers ----------------------------------------------------------------------------------------------------


def test_dynamic_scaler_halves_to_one_and_grows_after_the_window() -> None:
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=2.0, scale_window=3)
    seen = []
    for overflow in (True, False, False, False, False, True, True, True, True, False, False, False):
        scaler.update_scale(overflow)
        seen.append(scaler.cur_scale)
    assert seen == [4, 4, 4, 8, 8, 4, 2, 1, 1, 1, 1, 2]
    assert DynamicLossScaler().loss_scale == 2.0**32
    assert (scaler.scale_factor, scaler.scale_window, scaler.dynamic) == (2.0, 3, True)


def test_static_scaler_and_backward() -> None:
    scaler = LossScaler(64)
    scaler.update_scale(True)
    assert scaler.loss_scale == 64.0
    assert not scaler.dynamic
    weight = nn.Parameter(torch.ones(2).half())
    loss = weight.float().sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert weight.grad is not None
    assert weight.grad.tolist() == [128.0, 128.0]
    assert scaler.scale_gradient(None, (None, torch.ones(1)), ()) == (None, torch.tensor([64.0]))
    assert LossScaler().cur_scale == 1.0


@pytest.mark.parametrize("scaler", [LossScaler(), DynamicLossScaler()], ids=["static", "dynamic"])
def test_has_overflow_looks_at_elements(scaler: LossScaler) -> None:
    """apex took a sum, which overflows for large finite halves and cancels inf - inf to nan (quirk 41)."""
    p = nn.Parameter(torch.zeros(8).half())
    assert not scaler.has_overflow([p])
    p.grad = torch.full((8,), 60000.0).half()
    assert not scaler.has_overflow([p])
    for value in (float("inf"), -float("inf"), float("nan")):
        for place in (0, 7):
            p.grad = torch.zeros(8).half()
            p.grad[place] = value
            assert scaler.has_overflow([nn.Parameter(torch.zeros(1)), p])
    p.grad = torch.tensor([1.0, float("inf")] * 4).half().to_sparse()
    assert scaler.has_overflow([p])


def test_scalers_pickle_and_refuse_bad_values() -> None:
    scaler = DynamicLossScaler(init_scale=8.0, scale_window=5)
    scaler.update_scale(False)
    again = pickle.loads(pickle.dumps(scaler))
    assert (again.cur_scale, again._unskipped, again.scale_window) == (8.0, 1, 5)
    with pytest.raises(ValueError, match="init_scale: expected a number over 0, got 0"):
        DynamicLossScaler(init_scale=0)
    with pytest.raises(TypeError, match="init_scale: expected a number, got NoneType"):
        DynamicLossScaler(init_scale=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="growth_interval must be from 1"):
        DynamicLossScaler(scale_window=0)
    with pytest.raises(ValueError, match="scale must be over 0"):
        LossScaler(0)
