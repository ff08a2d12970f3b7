"""``opt.stats()``: each number against what was done, in every mode; and which loss a skip's log line is about."""

from __future__ import annotations

import logging
import math
from types import ModuleType

import pretended
import pytest
import torch
from torch import Tensor, nn

from fp16opt import DynamicLossScaler, GradScaler, MixedPrecisionOptimizer

KEYS = {
    *(
        "loss_scale",
        "steps",
        "steps_taken",
        "skipped_steps",
        "skipped_in_a_row",
        "steps_since_calibration",
        "step_was_skipped",
    ),
    *("parameters_blamed", "grad_norm", "clip_factor", "model_writes_taken"),
}
MODES = [
    {},
    {"fused_step": False},
    {"grad_accumulation": "fp32"},
    {"master_weights": "split"},
    {"master_weights": "none", "fused_step": False},
]


def made(**options: object) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    params = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float16, torch.float16, torch.float32)]
    settings = {"scaler": DynamicLossScaler(init_scale=16.0), **options}
    return params, MixedPrecisionOptimizer(torch.optim.SGD(params, lr=2.0**-8), **settings)  # type: ignore[arg-type]


def loss(params: list[nn.Parameter], factors: list[float]) -> Tensor:
    terms = [factor * param.float().sum() for factor, param in zip(factors, params, strict=True)]
    return torch.stack(terms).sum()


def turn(
    params: list[nn.Parameter], opt: MixedPrecisionOptimizer, factors: list[float], clip: float | None = 1.0
) -> dict[str, float]:
    opt.zero_grad()
    opt.backward(loss(params, factors))
    if clip is not None:
        opt.clip_master_grads(clip)
    opt.step()
    return opt.stats()


@pytest.mark.parametrize("options", MODES)
def test_every_number(options: dict[str, object]) -> None:
    params, opt = made(**options)
    before = opt.stats()
    assert set(before) == KEYS
    assert {name: value for name, value in before.items() if value} == {
        "loss_scale": 16.0,
        "grad_norm": pytest.approx(math.nan, nan_ok=True),
        "clip_factor": pytest.approx(math.nan, nan_ok=True),
    }
    bad = turn(params, opt, [6e4, 1.0, 6e4])  # times 16: too large for FP16 alone
    assert set(bad) == KEYS
    assert (bad["loss_scale"], bad["steps"], bad["skipped_steps"], bad["skipped_in_a_row"]) == (8.0, 1, 1, 1)
    assert (bad["step_was_skipped"], bad["parameters_blamed"], bad["steps_since_calibration"]) == (1, 1, 0)
    worse = turn(params, opt, [6e4, 6e4, 1.0])
    assert (worse["skipped_steps"], worse["skipped_in_a_row"], worse["parameters_blamed"]) == (2, 2, 2)
    good = turn(params, opt, [1.0, 2.0, 2.0], clip=3.0)
    assert (good["loss_scale"], good["steps"], good["skipped_steps"], good["skipped_in_a_row"]) == (4.0, 3, 2, 0)
    assert (good["step_was_skipped"], good["parameters_blamed"], good["steps_since_calibration"]) == (0, 0, 1)
    assert (bad["steps_taken"], worse["steps_taken"], good["steps_taken"]) == (0, 0, 1)
    assert good["grad_norm"] == 6.0  # of four elements each: sqrt(4 + 16 + 16)
    assert good["clip_factor"] == pytest.approx(3.0 / 6.0, rel=1e-6)
    assert good["model_writes_taken"] == 0
    assert all(type(value) is (float if value != value or name in ("loss_scale", "grad_norm", "clip_factor") else int)
               for name, value in good.items())  # fmt: skip
    assert opt.stats() == good, "reading changes nothing"


@pytest.mark.parametrize("mode", ["full", "split"])
def test_model_writes_are_counted(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    params, opt = made(master_weights=mode)
    turn(params, opt, [1.0, 1.0, 1.0])
    for number, written in enumerate([[0, 1], [1], []]):
        for position in written:
            params[position].data.fill_(2.0 + number)
        turn(params, opt, [1.0, 1.0, 1.0])
    assert opt.stats()["model_writes_taken"] == 3
    assert caplog.text.count("masters take the values") == 2


@pytest.mark.parametrize("overflow", [False, True])
def test_one_look_at_a_device(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, overflow: bool) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    params = [nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2)]
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(params), dynamic=True)
    turn(params, opt, [0.25, 0.25])
    opt.zero_grad()
    params[0].data.fill_(3.0)
    opt.backward(loss(params, [1e6 if overflow else 0.5, 0.0]))
    opt.clip_master_grads(1.0)
    opt.step()
    with pretended.watching(monkeypatch) as seen:
        got = opt.stats()
    assert seen.looks == ["tolist", "_local_scalar_dense"][: len(seen.looks)]
    assert "tolist" in seen.looks
    assert (got["steps"], got["skipped_steps"], got["parameters_blamed"]) == (2, overflow, overflow)
    assert got["model_writes_taken"] == 1
    assert opt.stats() == got


@pytest.mark.parametrize("options", MODES)
def test_counts_go_on_after_a_resume(options: dict[str, object]) -> None:
    params, opt = made(**options)
    for first in (6e4, 6e4, 1.0, 1.0):
        turn(params, opt, [first, 1.0, 1.0])
    again, resumed = made(**options)
    turn(again, resumed, [6e4, 1.0, 1.0])  # what was before counts no more
    resumed.load_state_dict(opt.state_dict())
    counts = ("steps", "skipped_steps", "steps_taken", "steps_since_calibration")
    assert [resumed.stats()[name] for name in counts] == [4, 2, 2, 2]
    assert resumed.skipped_steps == 2
    turn(again, resumed, [1e30, 1.0, 1.0])
    after = turn(again, resumed, [1.0, 1.0, 1.0])
    assert [after[name] for name in counts] == [6, 3, 3, 3]
    saved = resumed.state_dict()
    assert (saved["steps"], saved["skipped_steps"]) == (after["steps_taken"], after["skipped_steps"])


def test_a_file_from_before_skips_were_counted_loads() -> None:
    params, opt = made()
    turn(params, opt, [6e4, 1.0, 1.0])
    turn(params, opt, [1.0, 1.0, 1.0])
    older = {name: value for name, value in opt.state_dict().items() if name != "skipped_steps"}
    _, resumed = made()
    resumed.load_state_dict(older)
    assert (resumed.skipped_steps, resumed.stats()["steps"]) == (0, 1)


@pytest.mark.parametrize(("count", "error"), [(True, TypeError), (1.0, TypeError), (-1, ValueError)])
def test_a_count_of_skips_that_is_none_is_refused(count: object, error: type[Exception]) -> None:
    _, opt = made()
    with pytest.raises(error, match="skipped_steps must be"):
        opt.load_state_dict({**opt.state_dict(), "skipped_steps": count})


# -- the log line knows whether the loss was finite -------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="fp16opt")
    return caplog


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("accumulation", ["model", "fp32"])
def test_a_loss_that_is_not_finite_is_named_in_the_log(
    log: pytest.LogCaptureFixture, micro_batches: int, accumulation: str
) -> None:
    params, opt = made(grad_accumulation=accumulation)
    for _ in range(10):
        turn(params, opt, [1.0, 1.0, 1.0])
    for bad in (math.nan, 6e4, 1.0):
        opt.zero_grad()
        for number in range(micro_batches):
            opt.backward(loss(params, [bad if number == 0 else 1.0, 1.0, 1.0]))
        opt.step()
    first, second = [record.getMessage() for record in log.records]
    assert "the loss itself is not finite (1 in a row)" in first
    assert "a rare overflow" in second, "the loss of the step before is forgotten"


def test_losses_of_an_abandoned_batch_are_forgotten(log: pytest.LogCaptureFixture) -> None:
    params, opt = made()
    for _ in range(10):
        turn(params, opt, [1.0, 1.0, 1.0])
    opt.zero_grad()
    opt.backward(loss(params, [math.nan, 1.0, 1.0]))
    turn(params, opt, [6e4, 1.0, 1.0])
    assert "a rare overflow" in log.records[-1].getMessage()


def test_an_unreduced_loss_is_not_kept(log: pytest.LogCaptureFixture) -> None:
    params, opt = made()
    for factors in ([1.0, 1.0, 1.0], *[[6e4, 1.0, 1.0]] * 3):
        opt.zero_grad()
        opt.scale_loss(torch.stack([loss(params, factors)] * 2)).sum().backward()
        opt.step()
    assert log.records[-1].getMessage().startswith("gradients are not finite, 3 times in a row")


def test_a_loss_keeps_no_graph_alive() -> None:
    params, opt = made()
    opt.zero_grad()
    made_of = loss(params, [1.0, 1.0, 1.0])
    opt.scale_loss(made_of)
    assert all(kept.grad_fn is None for kept in opt.step_state.stage.losses)
    assert opt.step_state.stage.losses[0] == made_of


def test_a_grad_scaler_knows_its_losses(log: pytest.LogCaptureFixture) -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=2.0**-8)
    scaler = GradScaler("cpu", init_scale=16.0)
    for factor in (*[1.0] * 10, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((factor * param).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    scaler.scale((param * 1e38).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    first, second = [record.getMessage() for record in log.records]
    assert "the loss itself is not finite (1 in a row)" in first
    assert "a rare overflow" in second
