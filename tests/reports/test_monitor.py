"""Monitor: every number against numpy in every mode, nothing changed by looking, sinks, and attaching and detaching."""

from __future__ import annotations

import gc
import json
import math
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp16opt import DynamicLossScaler, GradScaler, MixedPrecisionOptimizer, Monitor
from fp16opt.tools.reports import sinks
from fp16opt.tools.reports.monitor import NUMBERS

HALF = torch.float16

# -- tables of numbers -------------------------------------------------------------------------------------------------


# -- a run -------------------------------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "wrapped": {"fused_step": False},
    "fp32": {"grad_accumulation": "fp32"},
    "split": {"master_weights": "split"},
    "none": {"master_weights": "none", "fused_step": False},
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(HALF)
    model[2].bias.data = model[2].bias.data.float()
    return model


def loss_of(model: nn.Sequential, number: int) -> Tensor:
    x = torch.from_numpy(np.random.default_rng(number).standard_normal((16, 8))).to(HALF)
    hidden = model[1](model[0](x))
    return (hidden @ model[2].weight.T).float().add(model[2].bias).square().mean()


def wrap(model: nn.Module, **options: Any) -> MixedPrecisionOptimizer:
    settings = {"scaler": DynamicLossScaler(2.0**8), "named_parameters": model.named_parameters(), **options}
    return MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5), **settings)


def turn(
    model: nn.Sequential, opt: MixedPrecisionOptimizer, number: int, closure: bool = False, factor: float = 1.0
) -> None:
    def evaluate() -> Tensor:
        opt.zero_grad()
        loss = loss_of(model, number) * factor
        opt.backward(loss)
        return loss

    if closure:
        opt.step(evaluate)
    else:
        evaluate()
        opt.clip_master_grads(0.25)
        opt.step()


def state_of(model: nn.Module, opt: MixedPrecisionOptimizer) -> list[bytes]:
    tensors = [*model.parameters(), *(t for s in opt.state.values() for t in s.values() if isinstance(t, Tensor))]
    return [t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("options", list(MODES.values()), ids=list(MODES))
def test_every_number_of_a_sample(options: dict[str, Any], closure: bool) -> None:
    """Against a second run without a monitor, whose weights are read before and after, and gradients on the way."""
    records: list[dict[str, Any]] = []
    model, twin = net(), net()
    opt, other = wrap(model, **options), wrap(twin, **options)
    monitor = Monitor(opt, every=2, to=records.append)
    for number in range(3):
        turn(model, opt, number, closure)
        before = [t.detach().double().numpy().copy() for t in other.master_params()]
        turn(twin, other, number, closure)
        after = [t.detach().double().numpy().copy() for t in other.master_params()]
    monitor.detach()
    assert state_of(model, opt) == state_of(twin, other), "watching changes nothing"
    assert [r["kind"] for r in records] == ["run", "step", "sample", "step", "step", "sample"]
    sample = records[-1]
    assert (sample["step"], sample["skipped"], sample["loss_scale"]) == (3, False, 2.0**8)
    for place, (name, param) in enumerate(twin.named_parameters()):
        row = sample["rows"][name]
        assert set(row) == set(NUMBERS)
        update = after[place] - before[place]
        assert row["weight_norm"] == pytest.approx(np.linalg.norm(after[place]), rel=1e-5)
        assert row["update_ratio"] == pytest.approx(np.linalg.norm(update) / np.linalg.norm(after[place]), rel=1e-4)
        distance = np.linalg.norm(after[place] - param.detach().double().numpy()) / np.linalg.norm(after[place])
        if options.get("master_weights") != "split":
            assert row["distance"] == pytest.approx(distance, rel=1e-5, abs=1e-12)
        if param.dtype == HALF:
            ulp = np.exp2(np.maximum(np.frexp(before[place])[1] - 1.0, -14.0) - 10.0)
            assert row["update_ulps"] == pytest.approx(np.abs(update).sum() / ulp.sum(), rel=1e-5)
            moved = update != 0
            lost = np.mean(np.abs(update[moved]) < ulp[moved] / 2)
            stands = 1.0 - moved.sum() / (moved.size * (1.0 - row["zero"]))  # where weights are stepped themselves
            want = stands if options.get("master_weights") == "none" else lost
            assert row["lost"] == pytest.approx(max(0.0, want))
        else:
            assert row["lost"] is None
            assert row["zero"] == row["subnormal"] == row["near_overflow"] == 0.0
    grads = true_gradients(options, closure)
    for name, grad in grads.items():
        row = sample["rows"][name]
        assert row["grad_norm"] == pytest.approx(np.linalg.norm(grad), rel=2e-3), name
        assert row["grad_largest"] == pytest.approx(np.abs(grad).max(), rel=2e-3), name


@pytest.mark.parametrize("driven", ["plain", "torch", "unscaled", "ours"])
@pytest.mark.parametrize("fused", [False, "auto"])
def test_gradients_that_the_optimizer_did_not_scale(driven: str, fused: bool | str) -> None:
    """A plain backward at scale 1; torch's GradScaler, with ``unscale_`` and without; this library's."""
    records: list[dict[str, Any]] = []
    model = net()
    opt = wrap(model, scaler=None, fused_step=fused)
    grads = torch.autograd.grad(loss_of(model, 0) * 2.0**8, list(model.parameters()))
    scale = 1.0 if driven == "plain" else 2.0**8
    scaler = (GradScaler if driven == "ours" else torch.amp.GradScaler)("cpu", init_scale=scale)
    with Monitor(opt, to=records.append):
        scaler.scale(loss_of(model, 0)).backward()
        if driven == "unscaled":
            scaler.unscale_(opt)
        opt.step() if driven == "plain" else scaler.step(opt)
    assert [r["kind"] for r in records] == ["run", "step", "sample"]
    assert records[1]["loss"] is None, "it is not known"
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        row, true = records[-1]["rows"][name], grad.double().numpy() / 2.0**8
        assert row["grad_norm"] == pytest.approx(np.linalg.norm(true), rel=2e-3), name
        assert row["grad_largest"] == pytest.approx(np.abs(true).max(), rel=2e-3), name


def true_gradients(options: dict[str, Any], closure: bool) -> dict[str, np.ndarray]:
    """Of the third step, unscaled and before the clip."""
    model = net()
    opt = wrap(model, **options)
    for number in range(2):
        turn(model, opt, number, closure)
    grads = torch.autograd.grad(loss_of(model, 2) * 2.0**8, list(model.parameters()))
    return {n: g.double().numpy() / 2.0**8 for (n, _), g in zip(model.named_parameters(), grads, strict=True)}


@pytest.mark.parametrize("accumulation", ["model", "fp32"])
def test_underflow_and_overflow_are_shares_of_the_scaled_gradients(accumulation: str) -> None:
    weight = nn.Parameter(torch.zeros(8, dtype=HALF))
    factors = torch.tensor([2.0**-30, 2.0**-22, 2.0**-20, 1.0, 1.0, 2.0**12, 2.0**13, 0.0])
    records: list[dict[str, Any]] = []
    sgd, names = torch.optim.SGD([weight], lr=1.0), [("w", weight)]
    opt = MixedPrecisionOptimizer(sgd, loss_scale=4.0, grad_accumulation=accumulation, named_parameters=names)
    with Monitor(opt, to=records.append):
        opt.backward((weight.float() * factors).sum())
        opt.step()
    row = records[-1]["rows"]["w"]
    assert row["zero"] == 2 / 8
    assert row["subnormal"] == 2 / 8
    assert row["underflow"] == 4 / 8
    assert row["near_overflow"] == 1 / 8
    assert row["grad_largest"] == 2.0**13
    assert row["grad_norm"] == pytest.approx(float(np.linalg.norm(factors.double().numpy())), rel=1e-6)


def test_of_fp32_sums_the_norm_is_the_sums_and_the_largest_that_of_one_backward() -> None:
    """What could overflow is each backward's 16-bit gradient: the sum here is of four times its size, or zero."""
    weight = nn.Parameter(torch.zeros(2, dtype=HALF))
    records: list[dict[str, Any]] = []
    sgd, names = torch.optim.SGD([weight], lr=1.0), [("w", weight)]
    opt = MixedPrecisionOptimizer(sgd, loss_scale=4.0, grad_accumulation="fp32", named_parameters=names)
    with Monitor(opt, to=records.append):
        for sign in (1.0, -1.0, 1.0, -1.0):
            opt.backward((weight.float() * torch.tensor([2.0**12, sign * 2.0**13])).sum())
        opt.step()
    row = records[-1]["rows"]["w"]
    assert row["grad_largest"] == 2.0**13
    assert row["grad_norm"] == 2.0**14
    assert row["near_overflow"] == 1 / 2


def test_true_zeros_are_no_underflow_and_all_zeros_are() -> None:
    rows = nn.Parameter(torch.zeros(10, 4, dtype=HALF))
    gone = nn.Parameter(torch.zeros(4, dtype=HALF))
    records: list[dict[str, Any]] = []
    opt = MixedPrecisionOptimizer(torch.optim.SGD([rows, gone], lr=1.0))
    with Monitor(opt, to=records.append):
        opt.backward(rows[3].float().sum() + gone.float().sum() * 2.0**-40)
        opt.step()
    first, second = records[-1]["rows"].values()
    assert (first["zero"], first["underflow"]) == (0.9, 0.0)
    assert (second["zero"], second["underflow"]) == (1.0, 1.0)


def test_masters_that_do_not_move_are_still() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=HALF))
    records: list[dict[str, Any]] = []
    opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=2.0**-12), named_parameters=[("w", weight)])
    with Monitor(opt, to=records.append):
        opt.backward((weight.float() * torch.tensor([0.0, 0.0, 1, 1, 1, 1, 1, 2.0**-14])).sum())  # 2**-26 of 1 is none
        opt.step()
    assert records[-1]["rows"]["w"]["still"] == 1 / 6
    assert records[-1]["rows"]["w"]["lost"] == 1.0


def test_prefixes_sum_up() -> None:
    model, twin = net(), net()
    opt, whole = wrap(model), wrap(twin)
    by_module: list[dict[str, Any]] = []
    by_param: list[dict[str, Any]] = []
    with Monitor(opt, to=by_module.append, depth=1), Monitor(whole, to=by_param.append):
        turn(model, opt, 0)
        turn(twin, whole, 0)
    rows, parts = by_module[-1]["rows"], by_param[-1]["rows"]
    assert list(rows) == ["0", "2"]
    squares = parts["0.weight"]["grad_norm"] ** 2 + parts["0.bias"]["grad_norm"] ** 2
    assert rows["0"]["grad_norm"] == pytest.approx(math.sqrt(squares))
    assert rows["0"]["grad_largest"] == max(parts["0.weight"]["grad_largest"], parts["0.bias"]["grad_largest"])
    assert by_module[0]["rows"]["0"]["dtype"] == "float16"


def test_every_step_and_skips_are_written() -> None:
    model = net()
    opt = wrap(model)
    records: list[dict[str, Any]] = []
    with Monitor(opt, every=4, to=records.append, start=8):
        for number, factor in enumerate([1.0, math.inf, 1.0, 1.0, math.inf]):
            turn(model, opt, number, factor=factor)
        opt.zero_grad()
        opt.step()  # nothing to step
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["step"] for r in steps] == [9, 10, 11, 12, 13]
    assert [r["skipped"] for r in steps] == [False, True, False, False, True]
    assert [r["loss_scale"] for r in steps] == [2.0**8, 2.0**8, 2.0**7, 2.0**7, 2.0**7], "that of the step itself"
    assert steps[0]["seconds"] is None
    assert all(r["seconds"] > 0 for r in steps[1:])
    assert all(0 < r["grad_norm"] < math.inf for r in (steps[0], steps[2]))
    samples = [r for r in records if r["kind"] == "sample"]
    assert [r["step"] for r in samples] == [9, 13]
    assert samples[1]["skipped"]
    assert samples[1]["skipped_steps"] == 2
    row = samples[1]["rows"]["0.weight"]
    assert row["update_ratio"] is None
    assert not math.isfinite(row["grad_norm"])


def test_the_loss_of_every_step_is_written() -> None:
    """The sum of a step's backwards; a loss that the user changes in place afterwards is written as it was."""
    model = net()
    opt = wrap(model)
    records: list[dict[str, Any]] = []
    want: list[float | None] = []
    with Monitor(opt, every=3, to=records.append):
        for number in range(4):
            opt.zero_grad()
            losses = [loss_of(model, number + part) / 2 for part in range(2)]
            for loss in losses:
                opt.backward(loss)
            want.append(sum(loss.item() for loss in losses))
            opt.step()
            for loss in losses:
                loss.detach().mul_(2.0)
        turn(model, opt, 4, closure=True)
        want.append(None)
    assert [r["loss"] for r in records if r["kind"] == "step"] == want


def test_steps_do_not_wait_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed has no chance to write what waits."""
    model, path = net(), tmp_path / "run.jsonl"
    opt = wrap(model)
    monitor = Monitor(opt, to=path)

    def steps_after(number: int) -> list[int]:
        turn(model, opt, number)
        return [record["step"] for record in sinks.read(path) if record["kind"] == "step"]

    assert steps_after(0) == [1], "sampled"
    assert steps_after(1) == [1]
    monkeypatch.setattr("fp16opt.tools.reports.monitor.PATIENCE", 0.0)
    assert steps_after(2) == [1, 2, 3]
    monitor.detach()


# -- attached and detached ---------------------------------------------------------------------------------------------


def test_detaching_leaves_nothing_and_can_be_done_twice(tmp_path: Path) -> None:
    model = net()
    opt = wrap(model, grad_accumulation="fp32")
    monitor = Monitor(opt, to=tmp_path / "a" / "run.jsonl", every=2)
    turn(model, opt, 0)
    turn(model, opt, 1)
    monitor.detach()
    monitor.detach()
    assert not opt._optimizer_step_pre_hooks
    assert not opt._optimizer_step_post_hooks
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    turn(model, opt, 2)
    assert [r["kind"] for r in sinks.read(tmp_path / "a" / "run.jsonl")] == ["run", "step", "sample", "step"]


def test_it_keeps_nothing_alive() -> None:
    model = net()
    opt = wrap(model)
    monitor = Monitor(opt, to=lambda record: None)
    turn(model, opt, 0)
    gone = weakref.ref(opt)
    gc.disable()
    try:
        del opt
        assert gone() is None
    finally:
        gc.enable()
    monitor.detach()


def test_a_group_that_comes_later_gets_a_row() -> None:
    model = net()
    opt = wrap(model)
    records: list[dict[str, Any]] = []
    with Monitor(opt, every=1, to=records.append):
        turn(model, opt, 0)
        extra = nn.Parameter(torch.ones(3, dtype=HALF))
        opt.add_param_group({"params": [extra]})
        opt.zero_grad()
        opt.backward(extra.float().sum())
        opt.step()
    assert records[-1]["rows"]["group 1, param 0"]["grad_norm"] == pytest.approx(math.sqrt(3.0))
    assert records[-1]["rows"]["0.weight"]["grad_norm"] is None


# -- sinks -------------------------------------------------------------------------------------------------------------


def test_json_lines_survive_a_cut_and_add_up(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = sinks.JsonLines(path)
    sink({"kind": "step", "norm": math.inf, "n": math.nan, "list": [1, -math.inf], "none": None})
    assert [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    sink.close()
    sinks.JsonLines(path)({"kind": "step", "norm": 2.0})
    with path.open("a") as file:
        file.write('{"kind":"st')
    first, second = sinks.read(path)
    assert first["norm"] == math.inf
    assert math.isnan(first["n"])
    assert first["list"] == [1, -math.inf]
    assert second == {"kind": "step", "norm": 2.0}
    sinks.JsonLines(path)({"kind": "step", "norm": 3.0})
    assert [record["norm"] for record in sinks.read(path)][1:] == [2.0, 3.0], "a run that goes on after a crash"
    path.write_text('{"kind":"' + "s" * 70000)
    sinks.JsonLines(path)({"kind": "step"})
    assert sinks.read(path) == [{"kind": "step"}]
    path.write_text('{"kind":"st\n{"kind":"step"}\n')
    with pytest.raises(ValueError, match=r"run.jsonl, line 1: expected a JSON record, got '\{\"kind\":\"st'"):
        sinks.read(path)


def test_tensorboard_and_wandb_get_scalars(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.found: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.found.append((name, value, step))

    logged: list[dict[str, Any]] = []
    run = types.ModuleType("wandb")
    run.log = logged.append  # type: ignore[attr-defined]
    writer, model = Writer(), net()
    opt = wrap(model)
    with Monitor(opt, to=[writer, run, tmp_path / "run.jsonl"]):
        turn(model, opt, 0)
    names = {name: value for name, value, step in writer.found if step == 1}
    assert names["fp16opt/loss_scale"] == 2.0**8
    assert names["fp16opt/grad_norm/0.weight"] > 0
    assert logged[-1]["fp16opt/step"] == 1
    assert logged[-1]["fp16opt/update_ratio/2.weight"] == names["fp16opt/update_ratio/2.weight"]
    assert len(sinks.read(tmp_path / "run.jsonl")) == 3
    assert "wandb" not in sys.modules


def test_what_it_refuses() -> None:
    model = net()
    opt = wrap(model)
    with pytest.raises(TypeError, match=r"opt: expected a MixedPrecisionOptimizer, got SGD\. Wrap the optimizer"):
        Monitor(torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    for name in ("every", "depth"):
        with pytest.raises(ValueError, match=name):
            Monitor(opt, to=print, **{name: 0})
    with pytest.raises(ValueError, match="start"):
        Monitor(opt, to=print, start=-1)
    with pytest.raises(TypeError, match=r"to: expected a path, a TensorBoard SummaryWriter, .* got int"):
        Monitor(opt, to=3)
    assert not opt._optimizer_step_pre_hooks
