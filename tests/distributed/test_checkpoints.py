"""Checkpoints by name: saved on some ranks, loaded on others, whole or not there; refusals change nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import products
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adagrad, AdamW

from distributed.models import Net, assert_alike, train
from distributed.world import World, on_ranks, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed
from fp16opt.engine.dtensors import local

HOWS = ("fsdp2", "ddp", "zero", "none", "split")
LR = 1e-2


class Noisy(Net):
    """With a buffer, and a frozen parameter that the optimizer does not have."""

    def __init__(self, norm: bool) -> None:
        super().__init__(norm=norm)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.frozen = nn.Parameter(torch.full((5,), 2.0, dtype=torch.float16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def make(how: str, inner: Any = AdamW, norm: bool = False, **settings: Any) -> tuple[nn.Module, Any]:
    """(what to call, the wrapper)."""
    net: nn.Module = Noisy(norm)
    settings = settings or {"lr": LR}
    if how == "fsdp2":
        for layer in (net.a, net.b, net):
            fully_shard(layer)
    model = DDP(net) if how in ("ddp", "zero", "split") else net
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    params = [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "bias" in n]},
    ]
    optimizer = ZeroRedundancyOptimizer(params, inner, **settings) if how == "zero" else inner(params, **settings)
    scaler = DynamicLossScaler(init_scale=2.0**6, growth_interval=3)
    # The wrapped optimizer's own step, as pieces are stepped; split masters have one step.
    options: Any = {"master_weights": "split"} if how == "split" else {"fused_step": False}
    opt = MixedPrecisionOptimizer(optimizer, scaler=scaler, named_parameters=net.named_parameters(), **options)
    return model, opt


def whole(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    """Masters, moments, weights and scale, by name, gathered on every rank."""
    sd = distributed.state_dict(model, opt)
    mine = {f"master {n}": v for n, v in sd["masters"].items()}
    for name, entry in sd["state"].items():
        mine |= {f"{key} {name}": value for key, value in entry.items() if isinstance(value, Tensor)}
    mine["scale"] = opt.scaler.scale
    mine |= {f"model {n}": v for n, v in distributed.named.unwrapped(model).state_dict().items()}
    full = {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in mine.items()}
    everyone: list[Any] = [full]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, full)
    return {key: value for part in everyone for key, value in part.items()}


def differences(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert got.keys() == wanted.keys()
    return [key for key in wanted if not torch.equal(got[key], wanted[key])]


def save_four(rank: int, size: int, folder: str) -> None:
    """Four ways to train, saved by four ranks, and where each of them stands two steps later."""
    for how in HOWS:
        model, opt = make(how)
        train(model, opt, range(4))
        distributed.save(Path(folder) / how, model, opt)
        saved = whole(model, opt)
        train(model, opt, range(4, 6))
        later = whole(model, opt)
        if rank == 0:
            torch.save((saved, later), Path(folder) / f"{how}.pt")


def load_any(rank: int, size: int, folder: str, rows: list[tuple[str, str, int]]) -> None:
    """Every way loads every way's checkpoint, bit for bit, and goes on as if nothing had happened."""
    for number, (how, other, _) in enumerate(rows):
        saved, later = torch.load(Path(folder) / f"{how}.pt")
        model, opt = make(other, lr=1.0)
        if number % 2:
            train(model, opt, range(7, 9))  # used ones are overwritten
        distributed.load(Path(folder) / how, model, opt)
        assert not differences(whole(model, opt), saved), (how, other)
        assert opt.param_groups[0]["lr"] == LR
        if (how == "split") == (other == "split"):  # a fused step has roundings of its own
            train(model, opt, range(4, 6))
            assert not differences(whole(model, opt), later), (how, other)


def test_four_ranks_save_and_four_two_and_one_load(four: World, two: World, tmp_path: Path) -> None:
    four.run(save_four, str(tmp_path))
    rows = products.sample("who saves, who loads, on how many", HOWS, HOWS, (4, 2))
    for world in (four, two):
        world.run(load_any, str(tmp_path), [row for row in rows if row[2] == world.size])
    saved, later = torch.load(tmp_path / "fsdp2.pt")
    model, opt = make("none")
    distributed.load(tmp_path / "fsdp2", model, opt)
    assert not differences(whole(model, opt), saved)
    train(model, opt, range(4, 6))
    assert not differences(whole(model, opt), later)


@on_ranks(2)
def test_the_dict_goes_through_torchs_own_functions(rank: int, size: int, tmp_path: Path) -> None:
    """The dict goes through torch.distributed.checkpoint itself; a fresh optimizer gives a template."""
    for how, inner, settings in (("none", AdamW, {}), ("fsdp2", SGD, {"momentum": 0.9}), ("fsdp2", Adagrad, {})):
        path = f"{tmp_path}/{how}-{inner.__name__}"
        model, opt = make(how, inner, lr=LR, **settings)
        before = [p.clone() for p in opt.master_params()]
        template = distributed.state_dict(model, opt)
        assert set(template) == {"masters", "state", "scaler", "param_groups", "counts"}
        assert "a.weight" in template["masters"]
        assert bool(opt.state) == (inner is Adagrad), "asking changes nothing"
        assert all(torch.equal(a, b) for a, b in zip(opt.master_params(), before, strict=True))
        train(model, opt, range(3))
        distributed.load_state_dict(model, opt, template) if inner is not Adagrad else None
        assert inner is Adagrad or not opt.state, "no step was made when that dict was made"
        train(model, opt, range(3))
        dcp.save(distributed.state_dict(model, opt), checkpoint_id=path)
        saved = whole(model, opt)
        other, fresh = make(how, inner, lr=LR, **settings)
        sd = distributed.state_dict(other, fresh)
        dcp.load(sd, checkpoint_id=path)
        distributed.load_state_dict(other, fresh, sd)
        got = whole(other, fresh)
        count = [key for key in got if key.endswith(" count")]  # a buffer: not in this dict
        assert set(differences(got, saved)) <= set(count), how
        train(model, opt, range(3, 5))
        train(other, fresh, range(3, 5))
        assert set(differences(whole(other, fresh), whole(model, opt))) <= set(count)


@on_ranks(2)
def test_a_template_that_the_user_has_filled_is_loaded_whole(rank: int, size: int) -> None:
    """What a user puts into a fresh template is loaded; of one left as it was the state is left to the first step."""
    for how in ("fsdp2", "ddp"):
        model, opt = make(how)
        train(model, opt, range(2))
        trained = distributed.state_dict(model, opt)
        for puts in (False, True):
            net, fresh = make(how)
            template = distributed.state_dict(net, fresh)
            template["masters"] = trained["masters"]
            if puts:
                template["state"] = trained["state"]
            distributed.load_state_dict(net, fresh, template)
            assert bool(fresh.optimizer.state) == puts
            kept = distributed.state_dict(net, fresh)
            for name, master in trained["masters"].items():
                assert torch.equal(local(kept["masters"][name]), local(master))
                if puts:
                    assert torch.equal(local(kept["state"][name]["exp_avg"]), local(trained["state"][name]["exp_avg"]))


@on_ranks(2)
def test_refusals_leave_everything_as_it_was(rank: int, size: int, tmp_path: Path) -> None:
    model, opt = make("fsdp2")
    train(model, opt, range(3))
    path = tmp_path / "good"
    distributed.save(path, model, opt)
    before = whole(model, opt)
    for call in (distributed.save, distributed.save_async):
        assert "never written over" in raised(FileExistsError, lambda c=call: c(path, model, opt))
    cases: list[tuple[type[Exception], str, Any]] = [
        (FileNotFoundError, "no complete checkpoint", lambda: distributed.load(f"{tmp_path}/none", model, opt)),
        (TypeError, "expected a torch.nn.Module", lambda: distributed.load(path, None, opt)),
        (TypeError, "expected a fp16opt", lambda: distributed.load(path, model, opt.optimizer)),
        (
            ValueError,
            "than parameter 'a.weight' of this optimizer",
            lambda: distributed.load(path, Net(), opt),
        ),
        (TypeError, "must be a dict", lambda: distributed.load_state_dict(model, opt, [])),
        (ValueError, "lacks 'masters'", lambda: distributed.load_state_dict(model, opt, {})),
    ]
    sd = distributed.state_dict(model, opt)
    masters, groups = sd["masters"], sd["param_groups"]
    changes: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "masters lacks 'b.bias'", {"masters": {k: v for k, v in masters.items() if k != "b.bias"}}),
        (ValueError, "got torch.float32 [4]", {"masters": {**masters, "b.bias": torch.zeros(4)}}),
        (TypeError, "must be a tensor, got str", {"masters": {**masters, "b.bias": "zero"}}),
        (TypeError, "masters must be a dict", {"masters": []}),
        (ValueError, "skipped_steps must be", {"counts": {"steps": 2, "skipped_steps": -1}}),
        (TypeError, "skipped_steps must be", {"counts": {"steps": 2, "skipped_steps": "1"}}),
        (TypeError, "counts must be a dict", {"counts": [2, 1]}),
        (ValueError, "a list of 2 groups, got 1", {"param_groups": groups[:1]}),
        (ValueError, "group 0: state_dict has the parameter 'a.bias'", {"param_groups": groups[::-1]}),
        (ValueError, "", {"scaler": {"kind": "static"}}),
    ]
    for error, wanted, change in changes:
        cases.append((error, wanted, lambda c=change: distributed.load_state_dict(model, opt, {**sd, **c})))
    for error, wanted, call in cases:
        assert wanted in raised(error, call), wanted
    assert not differences(whole(model, opt), before)
    other, small = make("none", norm=True)
    lacks = "has no master of 'norm.weight', which this optimizer trains: the file lacks it. Make the optimizer over"
    assert lacks in raised(ValueError, lambda: distributed.load(path, other, small))
    frozen, _ = make("none")
    part = MixedPrecisionOptimizer(AdamW(frozen.a.parameters(), lr=LR), named_parameters=frozen.named_parameters())
    message = raised(ValueError, lambda: distributed.load(path, frozen, part))
    assert "has 'b.weight' as a parameter that was trained, and this optimizer does not have it" in message, message
    # torch's own functions for optimizers can't hold masters.
    for how in ("fsdp2", "none"):
        model, opt = make(how)
        for _ in range(2):
            for call in (
                lambda m=model, o=opt: get_optimizer_state_dict(m, o),
                lambda m=model, o=opt: set_optimizer_state_dict(m, o, {"state": {}, "param_groups": []}),
            ):
                assert "fp16opt.distributed.state_dict" in raised(RuntimeError, call)
            assert {group["lr"] for group in opt.param_groups} == {LR}
            assert not opt.skipped_steps
            train(model, opt, range(1))


def flip(file: Path, place: int) -> None:
    """Flip a bit of a file's byte; twice, and it is as it was."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << place % 8
    file.write_bytes(content)


@on_ranks(2)
def test_what_is_not_whole_is_passed_over(rank: int, size: int, tmp_path: Path) -> None:
    """latest passes over what is not whole; load says so on every rank."""
    model, opt = make("ddp")
    train(model, opt, range(2))
    paths = [tmp_path / f"step{k}" for k in range(4)]
    for path in paths:
        distributed.save(path, model, opt)
    assert distributed.latest(tmp_path) == paths[3]
    dist.barrier()
    if rank == 0:
        data = next(paths[3].glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-1])
        (paths[2] / "fp16opt.json").unlink()
        manifest = json.loads((paths[1] / "fp16opt.json").read_text())
        (paths[1] / "fp16opt.json").write_text(json.dumps({**manifest, "format": 99}))
        (tmp_path / "notes.txt").write_text("no checkpoint")
    dist.barrier()
    assert distributed.latest(tmp_path) == paths[0]
    for path, wanted in zip(
        paths[1:], ("expected format 1, got 99", "no complete checkpoint", "another size"), strict=True
    ):
        assert wanted in raised(FileNotFoundError, lambda p=path: distributed.load(p, model, opt))
    before = whole(model, opt)
    for file in sorted(paths[0].glob("*.distcp")):
        if rank == 0:
            flip(file, 100)
        dist.barrier()
        message = raised(ValueError, lambda: distributed.load(paths[0], model, opt))
        assert f"{file.name} has other bytes" in message
        assert not differences(whole(model, opt), before)
        dist.barrier()
        if rank == 0:
            flip(file, 100)
        dist.barrier()
    distributed.load(paths[0], model, opt)
    # A file that can't be written on one rank: all ranks raise, and nothing is left.
    target = tmp_path / "blocked" / "step"
    if rank == 0:
        target.parent.write_text("a file where a tmp_path should be")
    dist.barrier()
    raised(RuntimeError, lambda: distributed.save(target, model, opt))
    if rank == 0:
        (tmp_path / "empty").mkdir()
    dist.barrier()
    assert distributed.latest(tmp_path / "empty") is None
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".partial")]


@on_ranks(2)
def test_saving_while_training(rank: int, size: int, tmp_path: Path) -> None:
    """Training goes on while a thread writes what was there when save_async was called."""
    model, opt = make("fsdp2")
    train(model, opt, range(3))
    saved = whole(model, opt)
    pending = distributed.save_async(tmp_path / "early", model, opt)
    train(model, opt, range(3, 12))
    pending.result(30)
    assert pending.done()
    assert distributed.latest(tmp_path) == tmp_path / "early"
    assert differences(whole(model, opt), saved)
    distributed.load(tmp_path / "early", model, opt)
    assert not differences(whole(model, opt), saved)


@on_ranks(2)
def test_full_fp32_weights_on_rank_0(rank: int, size: int) -> None:
    """On rank 0 whole FP32 weights under every name, whatever the sharding."""
    found = []
    for how in HOWS:
        model, opt = make(how)
        train(model, opt, range(3))
        whole_masters = whole(model, opt)
        sd = distributed.fp32_state_dict(model, opt)
        assert bool(sd) == (rank == 0)
        found.append(sd)
        for name, value in sd.items():
            assert not isinstance(value, DTensor)
            if name not in ("frozen", "count"):
                assert value.dtype == torch.float32
                assert torch.equal(value, whole_masters[f"master {name}"])
        if rank == 0:
            assert set(sd) == {"a.weight", "a.bias", "b.weight", "b.bias", "frozen", "count"}
            sd["a.weight"].zero_()
    assert bool(next(iter(make("none")[1].master_params())).any())
    assert_alike([torch.ones(1)])


def test_without_a_process_group(tmp_path: Path) -> None:
    model, opt = make("none")
    train(model, opt, range(3))
    distributed.save(tmp_path / "a", model, opt)
    other, fresh = make("none")
    distributed.load(tmp_path / "a", other, fresh)
    assert not differences(whole(other, fresh), whole(model, opt))
    distributed.save_async(tmp_path / "b", model, opt).result(30)
    assert distributed.latest(tmp_path) == tmp_path / "b"
    assert distributed.latest(tmp_path / "missing") is None
    assert set(distributed.fp32_state_dict(model, opt)) >= {"a.weight", "count"}
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.checkpoint\.state_dict has no place"):
        get_optimizer_state_dict(model, opt)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_counts_of_steps_go_on_and_older_files_begin_at_0(tmp_path: Path, tensor_lr: bool) -> None:
    lr = torch.tensor(LR) if tensor_lr else LR
    model, opt = make("none", lr=lr)
    train(model, opt, range(4))  # step 1 is skipped
    assert opt.skipped_steps == 1
    distributed.save(tmp_path / "now", model, opt)
    sd = distributed.state_dict(model, opt)
    assert sd["counts"] == {"steps": 3, "skipped_steps": 1}
    other, fresh = make("none", lr=lr)
    distributed.load(tmp_path / "now", other, fresh)
    assert (fresh.skipped_steps, fresh.stats()["steps"]) == (1, 4)
    train(other, fresh, range(1, 3))
    assert (fresh.skipped_steps, fresh.stats()["steps"]) == (2, 6)

    # As files were: no counts, and the steps in param_groups where roundings go by them.
    old = {key: value for key, value in sd.items() if key != "counts"}
    old["param_groups"] = [{**group, "steps": 3} for group in old["param_groups"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed.files, "state_dict", lambda model, opt: old)
        distributed.save(tmp_path / "old", model, opt)
    distributed.load(tmp_path / "old", other, fresh)
    assert (fresh.skipped_steps, fresh.stats()["steps"]) == (0, 3)
    assert all("steps" not in group for group in fresh.param_groups)
    assert not differences(whole(other, fresh), whole(model, opt))


def test_a_setting_called_steps_is_the_optimizers_own(tmp_path: Path) -> None:
    model, opt = make("none")
    opt.param_groups[0]["steps"] = 7
    distributed.save(tmp_path / "a", model, opt)
    other, fresh = make("none")
    fresh.param_groups[0]["steps"] = 0
    distributed.load(tmp_path / "a", other, fresh)
    assert fresh.param_groups[0]["steps"] == 7


def test_a_flipped_bit_in_any_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    model, opt = make("none")
    train(model, opt, range(3))
    distributed.save(path, model, opt)
    other, fresh = make("none")
    train(other, fresh, range(1))
    before = whole(other, fresh)
    files = sorted(path.iterdir())
    assert {file.name for file in files} == {".metadata", "__0_0.distcp", "fp16opt.json"}
    for file in files:
        size = file.stat().st_size
        every = range(0, size, 1 if products.takes_all else 5)
        for place in every if file.name == "fp16opt.json" else (0, 1, size // 3, size // 2, size - 1):
            flip(file, place)
            with pytest.raises((ValueError, FileNotFoundError)) as caught:
                distributed.load(path, other, fresh)
            assert str(path) in str(caught.value)
            if file.name != "fp16opt.json":
                assert isinstance(caught.value, ValueError)
                assert f"{file.name} has other bytes than when it was saved" in str(caught.value)
                assert distributed.latest(tmp_path) == path, "sizes alone are looked at"
            flip(file, place)
    assert not differences(whole(other, fresh), before)
    distributed.load(path, other, fresh)
    assert not differences(whole(other, fresh), whole(model, opt))


def test_a_manifest_from_before_checksums_loads(tmp_path: Path) -> None:
    path = tmp_path / "a"
    model, opt = make("none")
    train(model, opt, range(3))
    distributed.save(path, model, opt)
    manifest = json.loads((path / "fp16opt.json").read_text())
    assert manifest["files"].keys() == manifest["blake2b"].keys() == {".metadata", "__0_0.distcp"}
    for file in ("__0_0.distcp", ".metadata"):
        wanted = hashlib.blake2b((path / file).read_bytes(), digest_size=32).hexdigest()
        assert manifest["blake2b"][file] == wanted
    old = {key: manifest[key] for key in ("format", "saved_at_ns", "files")}
    (path / "fp16opt.json").write_text(json.dumps(old))
    other, fresh = make("none")
    distributed.load(path, other, fresh)
    assert not differences(whole(other, fresh), whole(model, opt))
    (path / "fp16opt.json").write_text(json.dumps({**old, "blake2b": {}}))
    with pytest.raises(FileNotFoundError, match=r"fp16opt\.json is damaged"):
        distributed.load(path, other, fresh)
