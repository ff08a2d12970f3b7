"""Checkpoints of other libraries, by their own writers where these run here, else built as they build them."""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import assert_same
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import fp16opt
import fp16opt.distributed
from fp16opt import Loaded, MixedPrecisionOptimizer, load_foreign
from fp16opt.tools.foreign.single_files import with_error_bits

FILES = Path(__file__).parent / "files"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    """16-bit linears around an FP32 norm with buffers."""

    def __init__(self, dtype: torch.dtype = torch.float16, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(4, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6)
        self.b = nn.Linear(6, 6, dtype=dtype)


def grouped(net: nn.Module) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]


def target(dtype: torch.dtype = torch.float16, net: nn.Module | None = None, **options: Any) -> Any:
    """Another model, with an optimizer of other settings, that has stepped."""
    net = Net(dtype, seed=1) if net is None else net
    opt = MixedPrecisionOptimizer(AdamW(grouped(net), lr=0.5, betas=(0.5, 0.5)), dynamic=True, **options)
    opt.backward(sum(p.float().square().sum() for p in net.parameters() if p.requires_grad))
    opt.step()
    return net, opt


def trained(dtype: torch.dtype = torch.float32) -> tuple[Net, AdamW]:
    """A plain training of three steps, whose weights and moments no 16-bit number holds."""
    net = Net(torch.float32)
    optimizer = AdamW(grouped(net), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        (net.b(net.norm(net.a(x))) - 1.0).square().mean().backward()
        optimizer.step()
    return net, optimizer


def assert_loaded(net: nn.Module, opt: MixedPrecisionOptimizer, weights: dict[str, Tensor], old: AdamW | None) -> None:
    """Masters are the weights in FP32, the model's are these rounded, moments and settings are the old optimizer's."""
    named = dict(net.named_parameters())
    names = {id(param): name for name, param in named.items()}
    masters = {names[id(m)]: master for m, master in zip(opt.model_params(), opt.master_params(), strict=True)}
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert np.array_equal(master.detach().numpy(), weights[name].detach().float().numpy()), name
        assert torch.equal(named[name].detach(), weights[name].detach().to(named[name].dtype)), name
    if old is None:
        return
    theirs = [p for group in old.param_groups for p in group["params"]]
    mine = [p for group in opt.param_groups for p in group["params"]]
    for a, b in zip(mine, theirs, strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(opt.state[a][key].cpu(), old.state[b][key]), key
            assert opt.state[a][key].dtype == torch.float32
    assert [group["lr"] for group in opt.param_groups] == [0.01, 0.01]
    assert [group["betas"] for group in opt.param_groups] == [(0.9, 0.999)] * 2


def save(content: Any, folder: Path, name: str = "checkpoint.pt") -> Path:
    torch.save(content, folder / name)
    return folder / name


def goes_on(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(sum(p.float().square().sum() for p in net.parameters()))
    opt.step()
    assert all(bool(p.isfinite().all()) for p in net.parameters())


# -- DeepSpeed: files that it wrote itself (write_deepspeed.py)


def deepspeed_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3)).to(dtype)
    net[3].bias.requires_grad_(False)
    return net


DEEPSPEED = sorted(path.name for path in FILES.glob("deepspeed-*"))


@pytest.mark.parametrize("given", ["folder", "tag", "file"])
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_by_name_over_two_ranks(name: str, given: str) -> None:
    kind = name.split("-")[1]
    net = deepspeed_net(DTYPES[kind])
    net, opt = target(net=net)
    wanted = torch.load(FILES / name / "wanted.pt", weights_only=True)
    path = {
        "folder": FILES / name,
        "tag": FILES / name / "step4",
        "file": next((FILES / name / "step4").glob("*_optim_states.pt")),
    }[given]
    loaded = load_foreign(path, net, opt)
    assert loaded == Loaded("deepspeed", 5, 5, wanted["scale"] or None)
    assert_loaded(net, opt, wanted["masters"], None)
    for master in opt.master_params():
        state = opt.state[master]
        assert torch.equal(state["exp_avg"], 2.0 * master.detach())
        assert torch.equal(state["exp_avg_sq"], master.detach().square())
        assert float(state["step"]) == 4.0
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in opt.param_groups] == [0.01, 0.01]
    frozen = torch.load(
        next((FILES / name / "step4").glob("*model_states.pt")), weights_only=False, pickle_module=_Blind
    )
    assert torch.equal(net[3].bias.detach(), frozen["module"]["3.bias"].to(net[3].bias.dtype))
    assert float(opt.scaler.scale) == (wanted["scale"] or 2.0**16)
    goes_on(net, opt)


class Stub:
    """For any class of DeepSpeed's."""

    def __init__(self, *arguments: Any) -> None:
        pass


class _Blind:
    """A pickle module for the tests' own look at a file that this repository holds."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return super().find_class(module, name) if module.startswith(("torch", "collections")) else Stub

    load = staticmethod(pickle.load)


def test_there_are_deepspeed_s_files() -> None:
    assert DEEPSPEED


def _broken(tmp_path: Path, change: Callable[[Path], None]) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(FILES / DEEPSPEED[0], folder)
    change(folder / "step4")
    return folder


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: next(f.glob("*_rank_1_*optim*")).unlink(), r"has files of ranks \[0\] of 2"),
        (lambda f: next(f.glob("*model_states.pt")).unlink(), "has no mp_rank_00_model_states.pt, which has the names"),
        (
            lambda f: next(f.glob("*_rank_1_*optim*")).rename(f / "zero_pp_rank_1_mp_rank_01_optim_states.pt"),
            "is of tensor or pipeline parallelism",
        ),
        (lambda f: _edit(f, zero_stage=3), "is of ZeRO stage 3"),
        (lambda f: [p.unlink() for p in f.glob("*optim_states.pt")], "neither DeepSpeed's files nor an optimizer.pt"),
    ],
)
def test_deepspeed_s_incomplete_folders(tmp_path: Path, change: Callable[[Path], None], match: str) -> None:
    net, opt = target(net=deepspeed_net(torch.bfloat16))
    refused(_broken(tmp_path, change), net, opt, match)


def _edit(folder: Path, **values: Any) -> None:
    for file in folder.glob("*optim_states.pt"):
        saved = torch.load(file, weights_only=False, pickle_module=_Blind)
        saved["optimizer_state_dict"] = {**saved["optimizer_state_dict"], **values}
        torch.save(saved, file)


def refused(path: Path, net: nn.Module, opt: MixedPrecisionOptimizer, match: str, kind: str = "auto") -> None:
    """It says which item, and model and optimizer are as they were."""
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = copy.deepcopy(opt.state_dict())
    with pytest.raises((ValueError, TypeError), match=match):
        load_foreign(path, net, opt, kind)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert_same(opt.state_dict(), state)


# -- by position: apex, apex.amp, Megatron-LM, FairSeq


def halves_and_masters() -> tuple[Net, Net, AdamW]:
    """(the model as a 16-bit training holds it, its masters, their optimizer)."""
    wide, old = trained()
    net = Net()
    net.load_state_dict(wide.state_dict())
    return net, wide, old


def masters_by_group(wide: Net, old: AdamW) -> list[list[Tensor]]:
    """Of 16-bit parameters alone, as apex and Megatron-LM save them."""
    own = {id(param) for name, param in wide.named_parameters() if name.startswith("norm")}
    return [[p.detach().clone() for p in group["params"] if id(p) not in own] for group in old.param_groups]


def test_apex_fp16_optimizer(tmp_path: Path, of_another_library: Callable[..., Any], monkeypatch: Any) -> None:
    net, wide, old = halves_and_masters()
    scaler = of_another_library(
        "apex.fp16_utils.loss_scaler",
        "DynamicLossScaler",
        cur_scale=512.0,
        cur_iter=7,
        last_overflow_iter=2,
        scale_factor=2.0,
        scale_window=1000,
    )
    state = {
        "loss_scaler": scaler,
        "dynamic_loss_scale": True,
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": old.state_dict(),
        "fp32_from_fp16": masters_by_group(wide, old),
    }
    path = save({"model": net.state_dict(), "optimizer": state}, tmp_path)
    new, opt = target()
    assert load_foreign(path, new, opt) == Loaded("apex", 6, 6, 512.0)
    assert_loaded(new, opt, wide.state_dict(), old)
    assert opt.scaler.state_dict()["growth_tracker"] == 4
    assert new.norm.running_mean.equal(wide.norm.running_mean)
    goes_on(new, opt)


def test_apex_amp_o2(tmp_path: Path) -> None:
    _, wide, old = halves_and_masters()
    amp = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 5}}
    path = save({"model": wide.state_dict(), "optimizer": old.state_dict(), "amp": amp}, tmp_path)
    new, opt = target()
    assert load_foreign(path, new, opt) == Loaded("amp", 6, 6, 1024.0)
    assert_loaded(new, opt, wide.state_dict(), old)
    assert opt.scaler.state_dict()["growth_tracker"] == 5


def fused_state(old: AdamW) -> dict[str, Any]:
    """As apex's and TransformerEngine's FusedAdam save: the step in the group, other settings beside ours."""
    state = copy.deepcopy(old.state_dict())
    for group in state["param_groups"]:
        group.update(step=3, wd_mult=1.0, is_expert_parallel=False, bias_correction=True)
    for held in state["state"].values():
        del held["step"]
    return state


def test_megatron(tmp_path: Path) -> None:
    net, wide, old = halves_and_masters()
    state = {
        "optimizer": fused_state(old),
        "fp32_from_fp16_params": masters_by_group(wide, old),
        "grad_scaler": {"scale": torch.tensor(4096.0), "growth_tracker": 9, "hysteresis_tracker": 2},
    }
    content = {"args": argparse.Namespace(lr=0.1), "model": net.state_dict(), "optimizer": state, "iteration": 3}
    path = save(content, tmp_path, "model_optim_rng.pt")
    new, opt = target()
    assert load_foreign(path, new, opt) == Loaded("megatron", 6, 6, 4096.0)
    assert_loaded(new, opt, wide.state_dict(), old)
    assert "wd_mult" not in opt.param_groups[0]
    assert opt.scaler.state_dict()["growth_tracker"] == 9


def test_a_scale_outside_the_bounds_is_moved_into_them(tmp_path: Path) -> None:
    wide, old = trained()
    scaler = {"scale": 2.0**32, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9000}
    content = {"optimizer_states": [old.state_dict()], "state_dict": wide.state_dict()}
    path = save({**content, "MixedPrecision": {**scaler, "_growth_tracker": 8000}}, tmp_path)
    new, opt = target()
    assert load_foreign(path, new, opt).loss_scale == 2.0**24
    assert (opt.loss_scale, int(opt.scaler.state_dict()["growth_tracker"])) == (2.0**24, 1999)


@pytest.mark.parametrize("flat", [False, True])
def test_fairseq(tmp_path: Path, flat: bool) -> None:
    net, _, _ = halves_and_masters()
    params = list(net.parameters())
    state: dict[int, dict[str, Any]] = {
        i: {"step": 3, "exp_avg": torch.randn(p.shape), "exp_avg_sq": torch.rand(p.shape)} for i, p in enumerate(params)
    }
    group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": list(range(len(params)))}
    if flat:
        joined = {k: torch.cat([held[k].reshape(-1) for held in state.values()]) for k in ("exp_avg", "exp_avg_sq")}
        saved = {"state": {0: {"step": 3, **joined}}, "param_groups": [{**group, "params": [0]}]}
    else:
        saved = {"state": state, "param_groups": [group]}
    content = {
        "args": argparse.Namespace(fp16=True),
        "model": net.state_dict(),
        "last_optimizer_state": {**saved, "loss_scale": 128.0},
        "optimizer_history": [{"optimizer_name": "FP16Optimizer"}],
    }
    path = save(content, tmp_path, "checkpoint_last.pt")
    new = Net(seed=1)
    opt = MixedPrecisionOptimizer(AdamW(new.parameters(), lr=0.5), dynamic=True)
    assert load_foreign(path, new, opt) == Loaded("fairseq", 6, 6, 128.0)
    assert_loaded(new, opt, net.state_dict(), None)
    for i, master in enumerate(opt.master_params()):
        assert torch.equal(opt.state[master]["exp_avg"], state[i]["exp_avg"])
        assert torch.equal(opt.state[master]["exp_avg_sq"], state[i]["exp_avg_sq"])
        assert float(opt.state[master]["step"]) == 3.0
    assert opt.param_groups[0]["lr"] == 0.01


# -- FP32 runs of Lightning and of Hugging Face's Trainer


@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_lightning(tmp_path: Path, prefix: str) -> None:
    wide, old = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    content = {
        "epoch": 1,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": OrderedDict((prefix + name, value) for name, value in wide.state_dict().items()),
        "optimizer_states": [old.state_dict()],
        "lr_schedulers": [],
        "MixedPrecision": scaler.state_dict(),
        "hyper_parameters": argparse.Namespace(width=6),
    }
    path = save(content, tmp_path, "last.ckpt")
    new, opt = target()
    assert load_foreign(path, new, opt) == Loaded("lightning", 6, 6, 256.0)
    assert_loaded(new, opt, wide.state_dict(), old)
    static = Net(seed=2)
    other = MixedPrecisionOptimizer(AdamW(grouped(static), lr=0.5))
    assert load_foreign(path, static, other).loss_scale is None  # its scale is its own
    assert other.loss_scale == 1.0
    refused(save({**content, "optimizer_states": [{}, {}]}, tmp_path), new, opt, "has 2 optimizers")


def test_trainer(tmp_path: Path) -> None:
    wide, old = trained()
    save(wide.state_dict(), tmp_path, "pytorch_model.bin")
    save(old.state_dict(), tmp_path, "optimizer.pt")
    new, opt = target()
    assert load_foreign(tmp_path, new, opt) == Loaded("trainer", 6, 6, None)
    assert_loaded(new, opt, wide.state_dict(), old)
    refused(tmp_path / "optimizer.pt", new, opt, "is a file", kind="trainer")
    (tmp_path / "pytorch_model.bin").unlink()
    refused(tmp_path, new, opt, "has neither model.safetensors nor pytorch_model.bin")


def test_trainer_with_safetensors(tmp_path: Path) -> None:
    wide, old = trained()
    save(old.state_dict(), tmp_path, "optimizer.pt")
    new, opt = target()
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        (tmp_path / "model.safetensors").write_bytes(b"")
        refused(tmp_path, new, opt, "is read by the package safetensors")
        return
    save_file(wide.state_dict(), str(tmp_path / "model.safetensors"))
    assert load_foreign(tmp_path, new, opt).masters == 6
    assert_loaded(new, opt, wide.state_dict(), old)


def test_names_in_the_groups_decide_whatever_the_order(tmp_path: Path) -> None:
    wide, _ = trained()
    named = list(wide.named_parameters())
    old = AdamW(named[::-1], lr=0.01)  # the other way round, in one group; b.weight and a.weight have other shapes
    wide.b(wide.norm(wide.a(torch.ones(2, 4)))).square().mean().backward()
    old.step()
    path = save({"optimizer_states": [old.state_dict()], "state_dict": wide.state_dict()}, tmp_path)
    new = Net(seed=1)
    opt = MixedPrecisionOptimizer(AdamW(new.parameters(), lr=0.5))
    load_foreign(path, new, opt)
    for (_, theirs), master in zip(named, opt.master_params(), strict=True):
        assert torch.equal(opt.state[master]["exp_avg"], old.state[theirs]["exp_avg"])
    assert opt.param_groups[0]["lr"] == 0.01


# -- FlashOptim


def numpy_master(weight: np.float32, bits: int, mantissa: int, least: int, most: int) -> np.float32:
    """The definition: a signed share of half the gap to the next number of the dtype."""
    exponent = max(int(np.floor(np.log2(abs(np.float64(weight))))) if weight else least, least)
    return np.float32(weight) + np.float32(np.float32(bits) / np.float32(most)) * np.float32(
        2.0 ** (exponent - mantissa - 1)
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_flashoptim_s_error_bits(dtype: torch.dtype, size: int) -> None:
    rng = np.random.default_rng(4)
    values = np.concatenate([rng.normal(size=200), rng.normal(size=50) * 1e-6, [0.0, 1.0, 2.0, -0.5]])
    weight = torch.from_numpy(values.astype(np.float32)).to(dtype)
    most = 127 if size == 1 else 32767
    bits = torch.from_numpy(rng.integers(-most, most + 1, weight.numel())).to(torch.int8 if size == 1 else torch.int16)
    saved = bits.to(dtype) if size == 1 else bits.view(dtype)  # as it saves them
    mantissa, least = (10, -14) if dtype == torch.float16 else (7, -126)
    wanted = [
        numpy_master(np.float32(w), int(b), mantissa, least, most)
        for w, b in zip(weight.float().tolist(), bits.tolist(), strict=True)
    ]
    found = with_error_bits(weight, saved, 2 + size)
    assert np.array_equal(found.numpy(), np.array(wanted, dtype=np.float32))
    assert torch.equal(with_error_bits(weight, bits, 2 + size), found)


def test_flashoptim(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3, dtype=torch.bfloat16)
    bits = {i: torch.randint(-32767, 32767, p.shape, dtype=torch.int16) for i, p in enumerate(net.parameters())}
    state = {
        i: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(p.shape).bfloat16(),
            "exp_avg_sq": torch.rand(p.shape).bfloat16(),
            "error_bits": bits[i].view(torch.bfloat16),
        }
        for i, p in enumerate(net.parameters())
    }
    group = {
        "lr": 0.01,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "master_bytewidth": 4,
        "params": [0, 1],
    }
    content = {"model": net.state_dict(), "optimizer": {"state": state, "param_groups": [group]}}
    path = save(content, tmp_path)
    new = nn.Linear(4, 3, dtype=torch.bfloat16)
    opt = MixedPrecisionOptimizer(AdamW(new.parameters(), lr=0.5))
    assert load_foreign(path, new, opt) == Loaded("flashoptim", 2, 2, None)
    for i, (param, master) in enumerate(zip(net.parameters(), opt.master_params(), strict=True)):
        assert torch.equal(master.detach(), with_error_bits(param.detach(), bits[i], 4))
        assert not torch.equal(master.detach(), param.detach().float())
        assert torch.equal(opt.state[master]["exp_avg"], state[i]["exp_avg"].float())
    state[0]["exp_avg::quantized"] = state[0].pop("exp_avg")
    refused(save(content, tmp_path), new, opt, "parameter 0 has 'exp_avg::quantized': 8-bit moments")
    refused(save({"optimizer": content["optimizer"]}, tmp_path), new, opt, "lacks 'model'")
    more = {**net.state_dict(), "extra": torch.ones(1)}
    refused(save({**content, "model": more}, tmp_path, "m.pt"), new, opt, "8-bit moments")
    state[0]["exp_avg"] = state[0].pop("exp_avg::quantized")
    refused(save({**content, "model": more}, tmp_path, "m.pt"), new, opt, "3 tensors in 'model' and 2 parameters")


# -- nothing is executed, nothing is guessed


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    wide, old = trained()
    marker = tmp_path / "ran"
    content = {"optimizer_states": [old.state_dict()], "state_dict": wide.state_dict(), "callbacks": Bomb(str(marker))}
    path = save(content, tmp_path)
    new, opt = target()
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(pickle.UnpicklingError, match="holds more than tensors, numbers and containers, and nothing"):
        load_foreign(path, new, opt)
    assert not marker.exists()
    assert set(torch.serialization.get_safe_globals()) == before


def test_objects_of_libraries_are_stand_ins_and_these_are_not_imported(
    tmp_path: Path, of_another_library: Callable[..., Any]
) -> None:
    made = of_another_library("somebodys.library", "Callback", best=torch.ones(2))
    path = save({"made": made, "args": argparse.Namespace(a=1)}, tmp_path)
    found = fp16opt.saved_objects.read(path)
    assert isinstance(found["made"], fp16opt.saved_objects.SavedObject)
    assert found["made"].best.equal(torch.ones(2))
    assert not isinstance(found["args"], argparse.Namespace)
    assert found["args"].a == 1
    assert repr(found["made"]).startswith("somebodys.library.Callback({'best': tensor")


def test_older_torch_says_from_which_one_on_classes_are_left_out(
    tmp_path: Path, of_another_library: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save({"a": torch.ones(2)}, tmp_path, "plain.pt")
    strange = save({"made": of_another_library("somebodys.library", "Callback")}, tmp_path, "strange.pt")
    monkeypatch.setattr(fp16opt.saved_objects, "NAMES_CLASSES", False)
    assert fp16opt.saved_objects.read(plain)["a"].equal(torch.ones(2))
    with pytest.raises(pickle.UnpicklingError, match=r"torch 2\.6 or newer is needed"):
        fp16opt.saved_objects.read(strange)


CASES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown": (lambda c: {"weights": c["state_dict"]}, "is of no known kind; it holds 'weights'"),
    "a list": (lambda c: [1], "is of no known kind; it holds list"),
    "lacking weight": (lambda c: c["state_dict"].pop("b.bias") is None or c, "has no 'b.bias', which the optimizer"),
    "a stranger": (
        lambda c: c["state_dict"].update(more=torch.ones(1)) or c,
        "has 'more', which is not in the model",
    ),
    "shape": (lambda c: c["state_dict"].update({"b.bias": torch.ones(7)}) or c, r"'b.bias' is \(7,\), and \(6,\) in"),
    "shape of a buffer": (
        lambda c: c["state_dict"].update({"norm.running_mean": torch.ones(7)}) or c,
        r"'norm.running_mean' is \(7,\)",
    ),
    "groups": (
        lambda c: c["optimizer_states"][0]["param_groups"].pop() is None or c,
        r"an optimizer with groups of \[3\] parameters, here are \[3, 3\]",
    ),
    "moments": (
        lambda c: c["optimizer_states"][0]["state"][0].pop("exp_avg") is None or c,
        r"group 0, param 0.*lacks 'exp_avg'",
    ),
    "shape of moments": (
        lambda c: c["optimizer_states"][0]["state"][0].update(exp_avg=torch.ones(3)) or c,
        r"group 0, param 0",
    ),
    "state of nobody": (
        lambda c: c["optimizer_states"][0]["state"].update({77: {}}) or c,
        "has state of parameter 77, which is in no group",
    ),
    "no state": (lambda c: c["optimizer_states"].__setitem__(0, {}) or c, "has no optimizer state of torch's form"),
    "type": (lambda c: {**c, "state_dict": [1]}, "'state_dict' is a list, expected a mapping"),
    "absent": (lambda c: c.pop("state_dict") is None or c, "lacks 'state_dict'"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_can_t_be_mapped_is_refused_by_name_and_nothing_is_changed(tmp_path: Path, case: str) -> None:
    change, match = CASES[case]
    wide, old = trained()
    content = {"optimizer_states": [old.state_dict()], "state_dict": dict(wide.state_dict())}
    new, opt = target()
    refused(save(change(content), tmp_path), new, opt, match)


def test_masters_that_do_not_fit_the_groups(tmp_path: Path) -> None:
    net, wide, old = halves_and_masters()
    masters = masters_by_group(wide, old)
    new, opt = target()
    state = {"optimizer": fused_state(old), "fp32_from_fp16_params": masters[:1]}
    refused(
        save({"model": net.state_dict(), "optimizer": state}, tmp_path), new, opt, r"has masters of \[2\] parameters"
    )
    state["fp32_from_fp16_params"] = masters
    refused(save({"optimizer": state}, tmp_path), new, opt, "has no 'norm.weight', which is its own master")


def test_another_optimizer_s_state_is_refused(tmp_path: Path) -> None:
    wide, old = trained()
    path = save({"optimizer_states": [old.state_dict()], "state_dict": wide.state_dict()}, tmp_path)
    new = Net(seed=1)
    opt = MixedPrecisionOptimizer(SGD(grouped(new), lr=0.5, momentum=0.9))
    refused(path, new, opt, "state of 'a.weight' has '(step|exp_avg)', which SGD does not keep")


def test_arguments_are_checked(tmp_path: Path) -> None:
    new, opt = target()
    with pytest.raises(TypeError, match=r"optimizer: expected a fp16opt\.MixedPrecisionOptimizer, got SGD"):
        load_foreign(tmp_path, new, SGD(new.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kind: expected one of 'auto', 'deepspeed', .*, got 'jax'"):
        load_foreign(tmp_path, new, opt, "jax")
    with pytest.raises(FileNotFoundError, match="path: expected a checkpoint, there is nothing at"):
        load_foreign(tmp_path / "nothing", new, opt)
    wide, old = trained()
    path = save({"optimizer_states": [old.state_dict()], "state_dict": wide.state_dict()}, tmp_path)
    with pytest.raises(ValueError, match="model: parameter 'group 0, param 0' of the optimizer is not in it"):
        load_foreign(path, Net(), opt)
    refused(tmp_path, new, opt, "no zero_pp_rank_.* is there", kind="deepspeed")


@pytest.mark.parametrize("put", ["itself", "an entry", "lightning", "trainer", "a folder"])
def test_files_of_our_own_are_told(put: str, tmp_path: Path) -> None:
    """A user who tries it on one is sent to the call that loads it."""
    model = torch.nn.Linear(4, 1).half()
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()), dynamic=True)
    state, path, kind = opt.state_dict(), tmp_path / "file.pt", "auto"
    words = r"holds a state_dict of fp16opt's own, which needs no conversion. Load it with optimizer.load_state_dict"
    if put == "itself":
        torch.save(state, path)
    elif put == "an entry":
        torch.save({"net": model.state_dict(), "opt": state}, path)
    elif put == "lightning":
        torch.save({"state_dict": model.state_dict(), "optimizer_states": [state]}, path)
        kind = "lightning"
    elif put == "trainer":
        path = tmp_path / "checkpoint-1"
        path.mkdir()
        torch.save(state, path / "optimizer.pt")
        torch.save(model.state_dict(), path / "pytorch_model.bin")
    else:
        path, words = tmp_path / "ours", r"was saved by fp16opt.distributed. Load it with fp16opt.distributed.load"
        fp16opt.distributed.save(path, model, opt)
    with pytest.raises(ValueError, match=words):
        load_foreign(path, model, opt, kind)
