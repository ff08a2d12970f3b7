"""offload="cpu" on the pretended card: bits, files, copies and addresses are compared with those of runs without it."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import mmap
import os
import pickle
import resource
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from fused.test_registered_classes import PlainLion
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from engine.checks import Problem, assert_same, assert_same_bits, normal, parameters, snapshot, steps_in_one_pass
from fp16opt import AveragedMasters, DynamicLossScaler, MixedPrecisionOptimizer, ema
from fp16opt.kernels import host_memory

SHAPES = ((), (70,), (3, 0), (64, 80), (33, 65), (64, 100))
MIXED = (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float16)
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=0.02),
    "amsgrad": lambda p: Adam(p, lr=0.02, weight_decay=0.01, amsgrad=True),
    "fused": lambda p: Adam([{"params": p[:3], "lr": 0.1}, {"params": p[3:]}], lr=0.02, fused=True),
    "SGD": lambda p: SGD(p, lr=0.02),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "Lion": lambda p: PlainLion(p),
}


def used(params: list[nn.Parameter]) -> Optimizer:
    """One that has state, which is carried over."""
    inner = AdamW(params, lr=0.02)
    for k, p in enumerate(params):
        p.grad = normal(p.shape, p.dtype, 50 + k).as_strided(p.shape, p.stride())
    inner.step()
    inner.zero_grad()
    return inner


MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "split": {"master_weights": "split"},
    "split24": {"master_weights": "split24"},
    "full, 8 bits": {"optimizer_state": "8bit"},
    "split24, 8 bits": {"master_weights": "split24", "optimizer_state": "8bit"},
    "sums": {"grad_accumulation": "fp32", "master_weights": "split"},
}
PAIRS = [  # of which a user's run takes each mode, and each optimizer with one
    pytest.param(
        make, settings, id=f"{name}-{mode}", marks=[] if name == "AdamW" or mode == "split" else pytest.mark.all
    )
    for mode, settings in MODES.items()
    for name, make in MAKERS.items()
    if "optimizer_state" not in settings or name in ("AdamW", "fused", "momentum")
]
by_mode = pytest.mark.parametrize("settings", list(MODES.values()), ids=list(MODES))


@pytest.fixture(autouse=True)
def card(emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The pretended card, on which no pages are locked when a test is over."""
    yield from pretended.unlocked_after(emulated_cuda, monkeypatch)


class Run:
    """A small training with planned overflows, clips and several backwards a step."""

    def __init__(self, make: Callable[..., Optimizer] = MAKERS["AdamW"], **settings: Any) -> None:
        self.params = parameters(SHAPES, MIXED)
        with torch.no_grad():
            self.params[2].data = torch.empty(3, 0, dtype=torch.float16)  # NumPy's has strides of its own
            self.params[5].data = self.params[5].data.t().contiguous().t()  # other strides
        self.problem = Problem(self.params)
        if "gradient_release" not in settings:
            settings["scaler"] = DynamicLossScaler(init_scale=2.0**8, growth_interval=3, hysteresis=2)
        self.opt = MixedPrecisionOptimizer(make(self.params), **settings)

    def train(self, steps: int = 5, overflows: tuple[int, ...] = (1, 3)) -> Run:
        for k in range(steps):
            self.opt.zero_grad()
            for _ in range(1 if self.opt.gradient_release else 2):
                self.opt.backward(self.problem.loss(self.params, float("inf") if k in overflows else 1.0))
            if k % 2 and not self.opt.gradient_release:
                self.opt.clip_master_grads(0.5)
            self.opt.step()
        return self

    def load(self, file: bytes, weights: list[Tensor]) -> Run:
        """Go on from a file, and from the model's weights, of which FP32 ones are in no file of the optimizer."""
        with torch.no_grad():
            for param, weight in zip(self.params, weights, strict=True):
                param.copy_(weight)
        self.opt.load_state_dict(loaded(file))
        return self

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.params]

    def snapshot(self) -> Any:
        """Weights, masters, state, and what would be saved."""
        return {"held": snapshot(self.opt, self.params), "saved": self.opt.state_dict()}

    def all(self) -> Any:
        """All that a user can see of it."""
        return {**self.snapshot(), "counts": self.opt.stats()}


def saved(opt: MixedPrecisionOptimizer, **how: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    torch.save(opt.state_dict(**how), file)
    return file.getvalue()


def loaded(file: bytes) -> Any:
    return torch.load(io.BytesIO(file), weights_only=True)


def stays(name: str) -> bool:
    """Whether it is to stay on the card."""
    return name in ("step", "exp_avg_sq_scales", "momentum_scales")


def kept(opt: MixedPrecisionOptimizer) -> list[tuple[str, Tensor]]:
    """What is kept beside the weights, with names."""
    apart = [("master", opt.masters.operand(pair)) for pair in opt.params.all if pair.is_apart]
    state = [(n, t) for entry in opt.inner.state.values() for n, t in entry.items() if isinstance(t, Tensor)]
    return [(name, tensor.detach()) for name, tensor in [*apart, *state] if tensor.numel()]


def assert_in_its_place(opt: MixedPrecisionOptimizer) -> None:
    """Masters and state lie on the host, scales and step counters on the card."""
    found = kept(opt)
    assert found
    assert [name for name, tensor in found if host_memory.is_on_host(tensor) == stays(name)] == []


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "settings"), PAIRS)
def test_the_bits_are_those_without(make: Any, settings: dict[str, Any]) -> None:
    there = Run(make, offload="cpu", **settings).train()
    here = Run(make, **settings).train()
    assert steps_in_one_pass(there.opt)
    assert there.opt.skipped_steps == here.opt.skipped_steps == 2
    assert_same(there.all(), here.all())
    assert_in_its_place(there.opt)


@pytest.mark.parametrize("bits", ["fp32", "8bit"])
@pytest.mark.parametrize("masters", ["full", "split", "split24"])
def test_the_bits_of_released_gradients_are_those_without(masters: str, bits: Any) -> None:
    settings = {"gradient_release": True, "loss_scale": 8.0, "master_weights": masters, "optimizer_state": bits}
    there = Run(offload="cpu", **settings).train()
    assert_same(there.all(), Run(**settings).train().all())
    assert_in_its_place(there.opt)


def written(run: Run) -> Run:
    run.train(2)
    with torch.no_grad():
        run.params[3].mul_(1.5)
        run.params[4].add_(0.25)
    run.train(2)
    run.params[0].data.fill_(0.5)
    run.opt.refresh_masters()
    return run.train(1)


def changed(run: Run) -> Run:
    """Parameters come and go, and a setting by which codes of 8 bits are made anew."""
    run.train(2)
    late = nn.Parameter(normal((64, 66), torch.float16, 5))
    late_too = nn.Parameter(normal((5,), torch.float16, 6))
    run.opt.add_param_group({"params": [late, late_too], "lr": 0.5})
    del run.opt.param_groups[0]["params"][1]
    run.params = [run.params[0], *run.params[2:], late, late_too]
    run.problem = Problem(run.params)
    run.train(2)
    run.opt.param_groups[0]["betas"] = (0.8, 0.9)
    return run.train(2)


def dropped(run: Run) -> Run:
    """State begins anew."""
    run.train(2).opt.optimizer.state.clear()
    return run.train(2)


@pytest.mark.parametrize(
    ("make", "history"),
    [
        (MAKERS["AdamW"], written),
        (MAKERS["AdamW"], changed),
        (MAKERS["AdamW"], dropped),
        (used, lambda run: run.train(2)),
    ],
    ids=["written", "changed", "dropped", "used before"],
)
@by_mode
def test_what_users_do_has_the_bits_without(settings: dict[str, Any], make: Any, history: Any) -> None:
    there = history(Run(make, offload="cpu", **settings))
    assert_same(there.all(), history(Run(make, **settings)).all())
    assert_in_its_place(there.opt)


def test_deltas_and_averages_are_those_without() -> None:
    def trained(**more: Any) -> Any:
        run = Run(track_changes=True, master_weights="split", **more)
        model = nn.Module()
        for k, param in enumerate(run.params):
            model.register_parameter(f"p{k}", param)
        averages = AveragedMasters(model, run.opt, ema(0.5))
        run.train(2)
        delta = run.opt.take_delta(model)
        run.train(2)
        averages.update()
        run.train(2)
        averages.update()
        return {
            "first": delta.num_changed,
            "second": run.opt.take_delta(model).num_changed,
            "averages": averages.state_dict(),
            "whole": run.opt.fp32_state_dict(model),
        }

    assert_same(trained(offload="cpu"), trained())


# -- files and copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
@by_mode
def test_files_are_those_without_and_go_both_ways(settings: dict[str, Any], compact: bool) -> None:
    there, here = Run(offload="cpu", **settings).train(3), Run(**settings).train(3)
    file, weights = saved(there.opt, compact=compact), there.weights()
    assert file == saved(here.opt, compact=compact)
    wanted = here.train(3).snapshot()
    for offload in ("cpu", None):
        fresh = Run(offload=offload, **settings).load(file, weights)
        assert_same(fresh.train(3).snapshot(), wanted)
    used = Run(offload="cpu", **settings).train(5).load(file, weights)
    assert_in_its_place(used.opt)
    assert_same(used.train(3).snapshot(), wanted)


@by_mode
def test_a_load_takes_no_more_memory_and_steps_the_loaded_state(settings: dict[str, Any], card: Any) -> None:
    run = Run(offload="cpu", **settings).train(3)
    file, weights, before = saved(run.opt), run.weights(), dict(card.locked)
    addresses = [tensor.data_ptr() for name, tensor in kept(run.opt) if not stays(name)]
    run.train(2).load(file, weights)
    assert card.locked == before
    assert [tensor.data_ptr() for name, tensor in kept(run.opt) if not stays(name)] == addresses
    again = Run(**settings).load(file, weights)
    assert_same(run.train(2).snapshot(), again.train(2).snapshot())


def test_a_refused_load_leaves_all_as_it_was() -> None:
    run = Run(offload="cpu", optimizer_state="8bit").train(3)
    before, file = run.all(), loaded(saved(Run(offload="cpu", optimizer_state="8bit").train(2).opt))
    before = copy.deepcopy(before)
    file["optimizer"]["state"][3]["exp_avg_sq"] = -file["optimizer"]["state"][3]["exp_avg_sq"] - 1.0
    with pytest.raises(ValueError, match="no code for"):
        run.opt.load_state_dict(file)
    assert_same(run.all(), before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@by_mode
def test_copies_have_memory_of_their_own_and_the_same_bits(settings: dict[str, Any], how: str, card: Any) -> None:
    run = Run(offload="cpu", **settings).train(3)
    locked = len(card.locked)
    other = copy.deepcopy(run) if how == "deepcopy" else pickle.loads(pickle.dumps(run))
    assert len(card.locked) > locked
    assert_in_its_place(other.opt)
    before = copy.deepcopy(run.all()["saved"])
    wanted = Run(**settings).train(3).train(2).all()
    assert_same(other.train(2).all(), wanted)
    assert_same(run.opt.state_dict(), before)
    assert_same(run.train(2).all(), wanted)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_exactly_what_is_needed_is_asked_for_at_construction(card: Any) -> None:
    run = Run(offload="cpu", master_weights="split24", optimizer_state="8bit")
    at_first, sizes = dict(card.locked), [tensor.numel() for tensor in run.params]
    asked = run.opt.memory().host
    run.train(3)
    assert card.locked == at_first, "one slab for each dtype, and none later"
    sixteen = sum(size for size, p in zip(sizes, run.params, strict=True) if p.dtype != torch.float32)
    coded = sizes[3] + sizes[5]  # and sizes[4] has rows of 65, in FP32 weights
    coded += sizes[4] if sizes[4] >= 4096 else 0
    memory = run.opt.memory()
    assert memory.host == asked == sixteen + 2 * coded + 8 * (sum(sizes) - coded)
    rounding = host_memory.ALIGNMENT * 3 * len(sizes) + 4 * mmap.PAGESIZE
    assert memory.host <= sum(card.locked.values()) < memory.host + rounding
    assert str(memory).endswith(f"on the host {memory.host / memory.parameters:.2f}")
    assert "offload: 'cpu'" in repr(run.opt)
    assert run.opt.offload_to == "cpu"
    assert MixedPrecisionOptimizer(SGD(parameters(((3,),)), lr=0.1)).offload_to is None


def test_memory_lives_as_long_as_its_last_tensor(card: Any) -> None:
    run = Run(offload="cpu").train(2)
    moment = next(t for n, t in kept(run.opt) if n == "exp_avg" and t.numel() > 100)
    wanted = moment.clone()
    gone = weakref.ref(run.opt)
    del run
    gc.collect()
    assert gone() is None
    assert len(card.locked) == 1, "the slab of FP32, for one moment"
    assert_same_bits(moment, wanted)
    view = host_memory.on_host(moment)
    del moment
    assert len(card.locked) == 1, "and for the host's view"
    assert_same_bits(view, wanted)
    del view
    assert card.locked == {}


def test_the_host_reads_after_the_card(card: Any) -> None:
    run = Run(offload="cpu", master_weights="split").train(2)
    waits = card.waits
    run.opt.state_dict()
    assert card.waits > waits


def test_tensors_of_one_slab_do_not_overlap() -> None:
    run = Run(offload="cpu").train(1)
    found = [tensor for name, tensor in kept(run.opt) if not stays(name)]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()) for tensor in found)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert {begin % host_memory.ALIGNMENT for begin, _ in spans} == {0}
    first, second = [t for n, t in kept(run.opt) if n == "exp_avg"][:2]
    version = second._version
    first.zero_()
    assert second._version == version, "each counts its own writes"


def test_a_forked_child_has_no_part_of_it_and_is_told() -> None:
    run = Run(offload="cpu").train(2)
    before = copy.deepcopy(run.opt.state_dict())
    read, write = os.pipe()
    child = os.fork()
    if not child:  # no assertion may leave from here
        try:
            run.opt.state_dict()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode().startswith("a forked process has no part of the page-locked memory")
    os.close(read)
    os.close(write)
    assert_same(run.opt.state_dict(), before)
    run.train(1)


# -- what does not go with it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (lambda p: SGD(p, lr=0.1), {"fused_step": False}, "fused_step=False"),
        (lambda p: torch.optim.Adagrad(p), {}, "Adagrad is not exactly SGD, Adam or AdamW of torch.optim, Lion, or"),
        (lambda p: SGD(p, lr=0.1), {"master_weights": "none"}, "there are no FP32 masters"),
        (lambda p: AdamW(p, differentiable=True), {}, "differentiable=True"),
    ],
)
def test_a_step_that_is_not_one_pass_is_refused(make: Any, settings: Any, reason: str, card: Any) -> None:
    params = parameters(((3, 4),))
    inner = make(params)
    with pytest.raises(ValueError, match=f'offload="cpu" needs the one-pass step.*{reason}.*Use offload=None'):
        MixedPrecisionOptimizer(inner, offload="cpu", **settings)
    assert inner.param_groups[0]["params"][0] is params[0]
    assert card.locked == {}


@pytest.mark.parametrize(
    "pretends",
    [
        lambda patch, card: patch.undo(),
        lambda patch, card: patch.setattr(card, "shares_memory", lambda: True),
    ],
    ids=["no card", "one memory"],
)
def test_where_no_card_steps_from_the_host_it_is_refused(
    pretends: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters(((3, 4),))
    used = SGD(params, lr=0.1)
    pretends(monkeypatch, card)
    with pytest.raises(RuntimeError, match=r"^cpu is no card with memory of its own .* or leave offload out"):
        MixedPrecisionOptimizer(used, offload="cpu")
    assert used.param_groups[0]["params"][0] is params[0]
    assert card.locked == {}


def test_the_message_about_memory_says_what_limits_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4 kB\nMemAvailable: 0 kB\n")
    (tmp_path / "proc/sys/kernel/osrelease").write_text("5.15.167.4-microsoft-standard-WSL2\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2**33}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{3 * 2**30}\n")
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text(f"inactive_file {2**30}\n")
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**26, 2**26))
    with pytest.raises(RuntimeError) as caught:
        MixedPrecisionOptimizer(SGD(parameters(((3,),)), lr=0.1), offload="cpu")
    assert str(caught.value) == (
        "0.00 GiB of page-locked host memory can't be had: 0.00 GiB are free; ulimit -l is 0.06 GiB; the cgroup has a "
        "limit of 8.00 GiB, of which 2.00 GiB are used; WSL2 locks less than Linux does (memory= in .wslconfig). Free "
        "some, raise the limit, keep fewer bytes, or leave offload out."
    )


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"offload: expected one of None, 'cpu', got 'nvme'"):
        MixedPrecisionOptimizer(SGD(parameters(((3,),)), lr=0.1), offload="nvme")  # type: ignore[arg-type]


def test_too_little_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch, card: Any) -> None:
    params = parameters(((300, 4),))
    inner = AdamW(params)
    monkeypatch.setattr(host_memory, "available", lambda: 5000)
    with pytest.raises(RuntimeError, match=r"0\.00 GiB of page-locked host memory can't be had: .* leave offload out"):
        MixedPrecisionOptimizer(inner, offload="cpu")
    assert inner.param_groups[0]["params"][0] is params[0]
    assert card.locked == {}


def test_a_group_without_room_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(**more: Any) -> Any:
        run = Run(master_weights="split", **more).train(2)
        late = nn.Parameter(normal((64, 66), torch.float16, 5))
        if more:
            before = copy.deepcopy(run.all())
            with monkeypatch.context() as small:
                small.setattr(host_memory, "available", lambda: 1000)
                with pytest.raises(RuntimeError, match="of page-locked host memory can't be had"):
                    run.opt.add_param_group({"params": [late], "lr": 0.5})
            assert_same(run.all(), before)
            assert len(run.opt.param_groups) == 1
        run.opt.add_param_group({"params": [late], "lr": 0.5})
        run.params.append(late)
        run.problem = Problem(run.params)
        return run.train(2).all()

    assert_same(trained(offload="cpu"), trained())


@by_mode
def test_a_step_without_room_for_new_state_can_be_taken_later(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(**more: Any) -> Any:
        run = Run(MAKERS["SGD"], **settings, **more).train(2)
        run.opt.param_groups[0]["momentum"] = 0.9
        run.opt.zero_grad()
        run.opt.backward(run.problem.loss(run.params))
        if more:
            with monkeypatch.context() as small:
                small.setattr(host_memory, "available", lambda: 1000)
                with pytest.raises(RuntimeError, match="of page-locked host memory can't be had"):
                    run.opt.step()
        run.opt.step()
        return run.train(1).all()

    assert_same(trained(offload="cpu"), trained())


def test_a_load_without_room_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Run(MAKERS["amsgrad"]).train(3)
    run = Run(lambda params: Adam(params, lr=0.02), offload="cpu").train(2)
    before = copy.deepcopy(run.all())
    with monkeypatch.context() as small:
        small.setattr(host_memory, "available", lambda: 1000)
        with pytest.raises(RuntimeError, match="of page-locked host memory can't be had"):
            run.opt.load_state_dict(other.opt.state_dict())
    assert_same(run.all(), before)
    run.load(saved(other.opt), other.weights())
    assert_in_its_place(run.opt)
    assert_same(run.train(2).snapshot(), other.train(2).snapshot())
