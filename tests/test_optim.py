"""fp16opt.optim: optimizers by class path are the wrapper around torch's own, however they are made."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
from collections import UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.checks import assert_same, snapshot
from rooms import through_file
from torch import Tensor, nn

import fp16opt.optim
from fp16opt import MixedPrecisionOptimizer, optimizers

BF16, HALF = torch.bfloat16, torch.float16
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 2.0**-5, "momentum": 0.9, "weight_decay": 0.125, "nesterov": True},
    "Adam": {"lr": 2.0**-6, "betas": (0.8, 0.95), "weight_decay": 0.125},
    "AdamW": {"lr": 2.0**-6, "eps": 1e-6, "weight_decay": 0.125, "amsgrad": True},
    "Lion": {"lr": 2.0**-8, "betas": (0.8, 0.95), "weight_decay": 0.125},
}
each = pytest.mark.parametrize("name", SETTINGS)


def inner_class(name: str) -> Any:
    return optimizers.Lion if name == "Lion" else getattr(torch.optim, name)


def by_class(name: str, params: Any, **options: Any) -> Any:
    return getattr(fp16opt.optim, name)(params, **SETTINGS[name], **options)


def wrapped(name: str, params: Any, **options: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(inner_class(name)(params, **SETTINGS[name]), **options)


def network(dtype: torch.dtype = BF16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 1)).to(dtype)


def loss_of(net: nn.Module, step: int) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
    return (net(x.to(next(net.parameters()).dtype)).float() - x.sum(1, keepdim=True)).square().mean()


def train(opt: Any, net: nn.Module, first: int, last: int, bad: tuple[int, ...] = ()) -> None:
    """A loop that knows of the wrapper."""
    for step in range(first, last):
        opt.zero_grad()
        opt.backward(loss_of(net, step) * (float("inf") if step in bad else 1.0))
        opt.clip_master_grads(0.5)
        opt.step()


def train_plainly(opt: Any, net: nn.Module, first: int, last: int) -> None:
    """A trainer's loop, that knows nothing of it."""
    for step in range(first, last):
        opt.zero_grad()
        loss_of(net, step).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()


# -- what they are ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_arguments_are_torchs(name: str) -> None:
    """All that this torch has, with the same kinds and defaults, in the same order."""
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    ours = inspect.signature(getattr(fp16opt.optim, name)).parameters
    assert [n for n in ours if n in theirs] == list(theirs)
    for key, parameter in theirs.items():
        assert (ours[key].kind, ours[key].default) == (parameter.kind, parameter.default), key


@each
@pytest.mark.parametrize(
    "options",
    [{"dynamic": True}, {"master_weights": "split", "loss_scale": 64.0}, {"fused_step": False}, {}],
    ids=["dynamic", "split", "torch's step", "none given"],
)
def test_the_same_bits_as_the_wrapper_around_torchs_own(name: str, options: dict[str, Any]) -> None:
    nets = network(HALF), network(HALF)
    opts = by_class(name, nets[0].parameters(), **options), wrapped(name, nets[1].parameters(), **options)
    for opt, net in zip(opts, nets, strict=True):
        train(opt, net, 0, 6, bad=(2,))
    mine, theirs = opts
    assert isinstance(mine, MixedPrecisionOptimizer)
    assert type(mine.optimizer) is inner_class(name)
    assert 1 <= mine.skipped_steps == theirs.skipped_steps < 6
    assert_same(snapshot(mine, nets[0].parameters(), scaler=True), snapshot(theirs, nets[1].parameters(), scaler=True))
    assert repr(mine).startswith(f"{name}(\n  optimizer: {name} (")
    assert mine.defaults == theirs.defaults


def forms(net: nn.Module) -> dict[str, Any]:
    pairs = list(net.named_parameters())
    return {
        "generator": net.parameters(),
        "list": list(net.parameters()),
        "groups": [{"params": [p for _, p in pairs[:2]], "lr": 0.25}, {"params": (p for _, p in pairs[2:])}],
        "named": net.named_parameters(),
        "named groups": [{"params": pairs[:2], "lr": 0.25}, {"params": pairs[2:], "weight_decay": 0.0}],
    }


@each
@pytest.mark.parametrize("form", ["generator", "list", "groups", "named", "named groups"])
def test_parameters_come_in_every_form_of_torchs(name: str, form: str) -> None:
    net = network()
    opt = by_class(name, forms(net)[form])
    assert [id(p) for p in opt.model_params()] == [id(p) for p in net.parameters()]
    assert all(master.dtype == torch.float32 for master in opt.master_params())
    if "groups" in form:
        assert [group["lr"] for group in opt.param_groups] == [0.25, SETTINGS[name]["lr"]]
    opt.backward(loss_of(net, 0) * float("nan"))
    opt.step()
    names = [found.name for found in opt.overflow_report()]
    wanted = [n if "named" in form else None for n, _ in net.named_parameters()]
    assert names == wanted or (None in wanted and all(n.startswith("group ") for n in names))


def test_adams_own_decoupled_weight_decay() -> None:
    if "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters:
        pytest.skip("this torch's Adam has none")
    opt = fp16opt.optim.Adam(network().parameters(), weight_decay=0.5, decoupled_weight_decay=True)
    assert opt.param_groups[0]["decoupled_weight_decay"] is True


def test_a_configs_own_list_for_betas_becomes_a_tuple() -> None:
    """Else the kind of list goes into checkpoints, which ``torch.load`` then refuses."""
    for name in ("Adam", "AdamW", "Lion"):
        net = network()
        opt = getattr(fp16opt.optim, name)(net.parameters(), lr=0.125, betas=UserList([0.75, 0.875]))
        train(opt, net, 0, 1)
        saved = through_file(opt.state_dict())
        assert saved["optimizer"]["param_groups"][0]["betas"] == (0.75, 0.875)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion"])
@pytest.mark.parametrize("betas", ["(0.9, 0.95)", (0.9,), (0.9, 0.95, 0.99)], ids=["text", "one", "three"])
def test_betas_are_two_numbers(name: str, betas: Any) -> None:
    with pytest.raises(ValueError, match=r"betas: expected two numbers, got .*\. Write betas: \[0\.9, 0\.999\]"):
        getattr(fp16opt.optim, name)(network().parameters(), betas=betas)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"momentum_decay": 0.1}, TypeError, "unexpected keyword argument 'momentum_decay'"),
        ({"master_weights": "half"}, ValueError, "master_weights: expected one of 'full', 'none', 'split', 'split24'"),
        ({"dynamic": "True"}, TypeError, "dynamic: expected True or False, got str"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        (
            {"lr": "1e-3"},
            TypeError,
            "lr: expected a number, got the text '1e-3'. YAML takes 1e-3 for one: write 1.0e-3",
        ),
        ({"eps": "1e-8"}, TypeError, "eps: expected a number, got the text '1e-8'"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fp16opt.optim.AdamW(network().parameters(), **options)


# -- what trainers do with them --------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_with_the_same_bits(name: str, how: str) -> None:
    net = network()
    opt = by_class(name, net.parameters(), master_weights="split" if name == "AdamW" else "full")
    train(opt, net, 0, 3)
    pair = (net, opt)
    again, copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert type(copied) is getattr(fp16opt.optim, name)
    train(opt, net, 3, 6)
    train(copied, again, 3, 6)
    assert_same(snapshot(copied, again.parameters(), scaler=True), snapshot(opt, net.parameters(), scaler=True))


@each
@pytest.mark.parametrize("way", ["class to wrapper", "wrapper to class", "class to class"])
def test_checkpoints_move_between_class_and_wrapper(name: str, way: str) -> None:
    first, second = {"class": by_class, "wrapper": wrapped}[way.split()[0]], way.split()[2]
    net = network()
    opt = first(name, net.parameters(), loss_scale=8.0)
    train(opt, net, 0, 3)
    saved = through_file({"model": net.state_dict(), "optimizer": opt.state_dict()})
    train(opt, net, 3, 6)
    other = network(seed=5)
    resumed = {"class": by_class, "wrapper": wrapped}[second](name, other.parameters(), loss_scale=8.0)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(resumed, other, 3, 6)
    assert_same(snapshot(resumed, other.parameters(), scaler=True), snapshot(opt, net.parameters(), scaler=True))


# -- Lion --------------------------------------------------------------------------------------------------------------


def test_lion_is_the_papers() -> None:
    """Algorithm 2, in double; tolerance: six steps, some five FP32 operations each, on numbers below 4."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40))
    for maximize in (False, True):
        opt = optimizers.Lion([p], lr=0.03, betas=(0.8, 0.95), weight_decay=0.1, maximize=maximize)
        want, m = p.detach().double(), torch.zeros(40, dtype=torch.float64)
        for _ in range(6):
            g = torch.randn(40)
            p.grad = g.clone()
            opt.step()
            d = (-g if maximize else g).double()
            want = want * (1 - 0.03 * 0.1) - 0.03 * torch.sign(0.8 * m + 0.2 * d)
            m = 0.95 * m + 0.05 * d
            assert torch.equal(p.grad, g)
            torch.testing.assert_close(p.detach().double(), want, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(opt.state[p]["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)


def test_lion_is_stepped_in_one_pass() -> None:
    assert "step: fused\n" in repr(fp16opt.optim.Lion(network().parameters(), fused_step=True))


def test_lion_refuses_sparse_gradients() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.ones(3, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match=r"group 0, param 0: Lion takes dense gradients, got layout torch\.sparse"):
        optimizers.Lion([p]).step()


# -- made before the model is what will be trained -------------------------------------------------------------------


@each
@pytest.mark.parametrize(
    "options",
    [{}, {"master_weights": "split"}, {"master_weights": "none"}, {"grad_accumulation": "fp32"}, {"dynamic": True}],
    ids=lambda options: next(iter(options.values()), "full") if options else "full",
)
def test_a_model_that_is_converted_before_the_first_step_is_followed(name: str, options: dict[str, Any]) -> None:
    """As Lightning's CLI and kohya's scripts do it, with a scheduler made in between and names kept."""
    net, twin = network(torch.float32), network(torch.float32)
    opt = by_class(name, net.named_parameters(), **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
    for each_net in (net, twin):
        each_net.to(BF16)
    other = wrapped(name, twin.named_parameters(), **options)
    other_schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0 / (1 + step))
    for step in range(4):
        for each_opt, each_net, each_schedule in ((opt, net, schedule), (other, twin, other_schedule)):
            train(each_opt, each_net, step, step + 1, bad=(1,))
            if step == 1:
                report = each_opt.overflow_report()
                assert [found.name for found in report] == [n for n, _ in net.named_parameters()]
            each_schedule.step()
    assert_same(snapshot(opt, net.parameters(), scaler=True), snapshot(other, twin.parameters(), scaler=True))
    if options.get("master_weights") != "none":
        assert "parameters: 6 bfloat16 with" in repr(opt)


@each
@pytest.mark.parametrize("way", ["plain", "scaled", "clipped"])
def test_a_plain_loop_is_followed_too_and_so_is_a_grad_scaler(name: str, way: str) -> None:
    runs = []
    for make, early in ((by_class, True), (wrapped, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=way != "plain")
        net = network(torch.float32)
        opt = make(name, net.parameters()) if early else None
        net.to(HALF)
        opt = opt if early else make(name, net.parameters())
        assert opt is not None
        for step in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(net, step)).backward()
            if way == "clipped":
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(opt.master_params(), 0.25)
            scaler.step(opt)
            scaler.update()
        runs.append(snapshot(opt, net.parameters()))
    assert_same(*runs)
    assert {master.dtype for master in opt.master_params()} == {torch.float32}


MOVED = "had dtype torch.float32 when the optimizer was wrapped and has torch.bfloat16 now. Convert or move the model"


def stepped(net: nn.Module, opt: Any) -> None:
    train(opt, net, 0, 1)


def skipped(net: nn.Module, opt: Any) -> None:
    """Its count and its lowered scale belong to the model as it was."""
    train(opt, net, 0, 1, bad=(0,))
    assert opt.skipped_steps == 1


def loaded(net: nn.Module, opt: Any) -> None:
    """State of an FP32 run, which counts no steps of the wrapper."""
    plain = torch.optim.AdamW(network(torch.float32).parameters())
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    plain.step()
    opt.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("name", "before"),
    [("AdamW", stepped), ("SGD", stepped), ("AdamW", skipped), ("AdamW", loaded)],
    ids=["stepped", "stepped, without state", "skipped", "loaded"],
)
def test_a_conversion_after_steps_is_refused_as_ever(name: str, before: Callable[[nn.Module, Any], None]) -> None:
    net = network(torch.float32)
    opt = getattr(fp16opt.optim, name)(net.parameters())
    before(net, opt)
    net.to(BF16)
    with pytest.raises(RuntimeError, match=MOVED):
        train_plainly(opt, net, 1, 2)


def test_masters_that_hold_more_than_the_model_are_not_made_anew() -> None:
    net = network(HALF)
    opt = fp16opt.optim.AdamW(net.parameters())
    with torch.no_grad():
        for master in opt.master_params():
            master.add_(2.0**-20)
    net.to(BF16)
    with pytest.raises(RuntimeError, match=r"had dtype torch\.float16 when the optimizer was wrapped"):
        opt.state_dict()


@pytest.mark.parametrize(
    ("options", "dtype", "error", "message"),
    [
        ({"gradient_release": True}, BF16, RuntimeError, MOVED),
        ({"fused_step": True}, torch.float64, ValueError, r"fused_step=True needs the one-pass step, .*: .*float64"),
        ({}, torch.complex64, ValueError, r"'0\.weight'.*complex64"),
    ],
    ids=["released gradients", "an argument", "a dtype"],
)
def test_what_can_not_be_served_in_the_new_dtype_is_refused(
    options: dict[str, Any], dtype: torch.dtype, error: type[Exception], message: str
) -> None:
    net = network(torch.float32)
    opt = fp16opt.optim.AdamW(net.named_parameters(), **options)
    for param in net.parameters():
        param.data = param.data.to(dtype)
    with pytest.raises(error, match=message):
        train(opt, net, 0, 1) if options.get("gradient_release") else opt.state_dict()


# -- programs that import by a dotted name ---------------------------------------------------------------------------


def test_as_verl_makes_it() -> None:
    """verl, workers/config/optimizer.py, ``build_optimizer``: ``optimizer_impl`` is imported, ``optimizer`` is looked
    up in it, and called with the parameters, lr and weight_decay, betas where the name has "adam" in it, and what
    ``override_optimizer_config`` holds. Its FSDP2 engine clips the model's own gradients and steps."""
    for name in ("AdamW", "Adam", "SGD", "Lion"):
        config: dict[str, Any] = {"optimizer_impl": "fp16opt.optim", "optimizer": name, "lr": 1e-3, "weight_decay": 0.1}
        arguments = {"lr": config["lr"], "weight_decay": config["weight_decay"]}
        if "adam" in name.lower():
            arguments["betas"] = UserList([0.9, 0.999])
        arguments.update({"master_weights": "split"})
        net = network()
        made = getattr(importlib.import_module(config["optimizer_impl"]), config["optimizer"])
        opt = made(net.parameters(), **arguments)
        train_plainly(opt, net, 0, 3)
        assert opt.steps_counted() == 3
        assert opt.master_weights == "split"


def test_as_kohyas_scripts_make_it() -> None:
    """sd-scripts, library/train_util.py, ``get_optimizer``: ``--optimizer_type fp16opt.optim.AdamW`` is split at its
    last dot, ``--optimizer_args`` are ``key=value`` with values by ``ast.literal_eval``; then ``train()`` is called
    where there is one. The scheduler is made, and ``--full_bf16`` converts the network, after that."""
    given = ["weight_decay=0.1", "betas=(0.9, 0.95)", "master_weights='split'"]
    keywords = {key: ast.literal_eval(value) for key, value in (one.split("=", 1) for one in given)}
    values = ["fp16opt", "optim", "AdamW"]
    made = getattr(importlib.import_module(".".join(values[:-1])), values[-1])
    net = network(torch.float32)
    opt = made([{"params": list(net.parameters()), "lr": 1e-3}], lr=1e-4, **keywords)
    opt.train()
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    net.to(BF16)
    train_plainly(opt, net, 0, 2)
    schedule.step()
    assert made.__module__ + "." + made.__name__ == "fp16opt.optim.AdamW"
    assert opt.param_groups[0]["betas"] == (0.9, 0.95)
    assert "bfloat16 with split masters" in repr(opt)


def test_as_a_plugin_of_axolotl_makes_it() -> None:
    """axolotl takes names from a list of its own for ``optimizer``; a plugin, which it imports by dotted name, may make
    one in ``BasePlugin.create_optimizer(cfg, trainer)``: what that returns is the trainer's optimizer. Values of its
    ``optim_args`` that are written as one text stay texts, which are refused by name."""
    net = network()
    text = dict(one.split("=") for one in ["master_weights=split", "dynamic=True"])
    with pytest.raises(TypeError, match="dynamic: expected True or False, got str"):
        fp16opt.optim.AdamW(net.parameters(), lr=1e-3, **text)
    opt = fp16opt.optim.AdamW(net.parameters(), lr=1e-3, **{**text, "dynamic": False})
    train_plainly(opt, net, 0, 2)
    assert opt.steps_counted() == 2
