"""What is logged about overflows and writes, at which level and how often."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re

import pytest
import torch

from fp16opt import GradScaler, MixedPrecisionOptimizer, kernels
from fp16opt.engine.diagnostics import (
    Lines,
    Overflow,
    SkipLog,
    describe,
    warn_cast,
    warn_model_write,
)
from fp16opt.scaling import DynamicLossScaler, LossScaler, StaticLossScaler

BAD = [Overflow("fc.weight", 0, 3, True, False), Overflow("fc.bias", 1, 0, True, True)]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="fp16opt")
    return caplog


def records(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    assert all(record.name == "fp16opt" for record in log.records)
    out = [(record.levelname, record.getMessage()) for record in log.records]
    log.clear()
    return out


@pytest.fixture(autouse=True)
def minutes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that lines go by: it stands still, but where a test moves it."""
    now = [0.0]
    monkeypatch.setattr(Lines, "clock", lambda self: now[0])
    return now


def skip(skips: SkipLog, scaler: LossScaler, loss_is_finite: bool | None = None) -> None:
    losses = [] if loss_is_finite is None else [torch.tensor(1.0 if loss_is_finite else float("inf"))]
    old = scaler.scale.item()
    scaler.update(torch.tensor(1.0))
    skips.skipped(scaler, old, BAD, losses)


@pytest.mark.parametrize(("count", "want"), [
    (0, "none"), (1, "a0"), (3, "a0, a1, a2"), (4, "a0, a1, a2 and 1 more"), (9, "a0, a1, a2 and 6 more"),
])  # fmt: skip
def test_describe(count: int, want: str) -> None:
    assert describe([f"a{i}" for i in range(count)], limit=3) == want


def calibrated(scale: float = 1.0, steps: int = 10) -> SkipLog:
    skips = SkipLog()
    skips.taken = steps
    skips.stepped(scale)
    return skips


def overflow_at(log: pytest.LogCaptureFixture, *steps: int, opt: MixedPrecisionOptimizer | None = None) -> list[str]:
    """What an optimizer with a dynamic scale logs in twelve steps, of which some overflow."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1e-3), dynamic=True) if opt is None else opt
    [weight] = opt.model_params()
    for step in range(12):
        opt.zero_grad()
        opt.backward(weight.float().sum() * (1e6 if step in steps else 0.1))
        opt.step()
    return [text for _, text in records(log)]


def test_skips_of_the_first_ten_steps_are_calibration(log: pytest.LogCaptureFixture) -> None:
    first, second, third = overflow_at(log, 0, 5, 11)
    assert first.startswith("calibrating the loss scale: step skipped, the scale is now 32768.")
    assert second.startswith("calibrating the loss scale: step skipped, the scale is now 16384.")
    assert third.startswith("calibrating"), "nine were taken before it"
    assert "loss scale 65536 -> 32768: a rare overflow" in overflow_at(log, 11)[0]


def test_a_resumed_run_is_calibrated(log: pytest.LogCaptureFixture) -> None:
    opts = [
        MixedPrecisionOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(4).half())], lr=1e-3), dynamic=True)
        for _ in range(2)
    ]
    assert overflow_at(log, opt=opts[0]) == []
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    assert "a rare overflow" in overflow_at(log, 0, opt=opts[1])[0]


def test_three_in_a_row_after_a_step_are_no_calibration(log: pytest.LogCaptureFixture) -> None:
    skips, scaler = calibrated(steps=1), DynamicLossScaler(init_scale=2.0**20)
    for _ in range(3):
        skip(skips, scaler)
    assert [text.split(":")[0] for _, text in records(log)] == [
        "calibrating the loss scale",
        "calibrating the loss scale",
        "gradients are not finite, 3 times in a row",
    ]


def test_later_skips_are_warnings_by_name(log: pytest.LogCaptureFixture) -> None:
    skips, scaler = calibrated(), DynamicLossScaler(init_scale=8.0, hysteresis=2)
    assert records(log) == []
    skip(skips, scaler)
    skip(skips, scaler)
    names = "a rare overflow, non-finite gradients in fc.weight (inf), fc.bias (inf and nan)."
    assert records(log) == [
        ("WARNING", f"step skipped, loss scale stays at 8 (hysteresis): {names}"),
        ("WARNING", f"step skipped, loss scale 8 -> 4: {names}"),
    ]


@pytest.mark.parametrize(
    ("finite", "words"),
    [(True, "the loss is finite and gradients are not, "), (None, "gradients are not finite, ")],
)
def test_many_in_a_row_are_no_rare_overflow(
    log: pytest.LogCaptureFixture, minutes: list[float], finite: bool | None, words: str
) -> None:
    skips, scaler = calibrated(), DynamicLossScaler(init_scale=2.0**20)
    logged = {}
    for number in range(1, 18):
        minutes[0] += 60.0
        skip(skips, scaler, finite)
        for level, text in records(log):
            logged[number] = text
            assert level == "WARNING"
    assert list(logged) == [1, 2, 3, 4, 8, 16]
    assert "a rare overflow" in logged[1]
    assert "a rare overflow" in logged[2]
    assert logged[3].startswith(f"{words}3 times in a row: step skipped, loss scale 262144 -> 131072, non-finite")
    assert "in fc.weight (inf), fc.bias (inf and nan). See fp16opt.diagnose(model, loss_fn, optimizer)" in logged[3]
    assert logged[16].startswith(f"{words}16 times in a row")
    scaler.update(torch.tensor(0.0))
    skip(skips, scaler, finite)
    assert "a rare overflow" in records(log)[0][1], "a finite step ends the row"


def test_calibration_under_a_scale_of_one_is_none(log: pytest.LogCaptureFixture) -> None:
    skips, scaler = SkipLog(), DynamicLossScaler(init_scale=2.0)
    skip(skips, scaler, True)
    skip(skips, scaler, True)
    got = records(log)
    assert [level for level, _ in got] == ["INFO", "WARNING"]
    assert got[1][1].startswith("the loss is finite and gradients are not, 2 times in a row: step skipped, loss")


def test_a_loss_that_is_not_finite_is_told_apart(log: pytest.LogCaptureFixture) -> None:
    """A part of it that the user has scaled (a gradient penalty) may be finite at a lower scale."""
    for make in (SkipLog, calibrated):
        skips, scaler = make(), DynamicLossScaler()
        logged = []
        for number in range(1, 10):
            skip(skips, scaler, False)
            for level, text in records(log):
                logged.append(number)
                assert level == "WARNING"
                assert text.startswith(
                    f"step skipped, loss scale {2.0 ** (17 - number):g} -> {2.0 ** (16 - number):g}: the"
                )
                assert (
                    f"the loss itself is not finite ({number} in a row); non-finite gradients in fc.weight (inf)"
                    in text
                )
                assert "may be finite at a lower scale" in text
        assert logged == [1, 2, 4, 8]


HELPLESS = "the loss itself is not finite (1 in a row), so that no loss scale can help; non-finite"
LOW = "The loss is FP16, which ends at 65504: compute it in FP32, with .float() on the model's outputs."


@pytest.mark.parametrize(
    ("skips", "scaler", "dtype", "level", "words"),
    [
        (calibrated(1024.0), DynamicLossScaler(1024.0), torch.float32, "WARNING", HELPLESS),
        (calibrated(1024.0), StaticLossScaler(1024.0), torch.float32, "WARNING", f"stays at 1024: {HELPLESS}"),
        (SkipLog(), StaticLossScaler(1.0), torch.float32, "WARNING", HELPLESS),
        (SkipLog(), StaticLossScaler(1024.0), torch.float32, "WARNING", None),  # what was scaled may be too large
        (SkipLog(), DynamicLossScaler(1.0, min_scale=1.0), torch.float32, "ERROR", HELPLESS),
        (SkipLog(), DynamicLossScaler(), torch.float16, "WARNING", LOW),
    ],
)
def test_whether_a_scale_can_help_a_loss_that_is_not_finite(
    skips: SkipLog, scaler: LossScaler, dtype: torch.dtype, level: str, words: str | None, log: pytest.LogCaptureFixture
) -> None:
    old = scaler.scale.item()
    scaler.update(torch.tensor(1.0))
    skips.skipped(scaler, old, BAD, [torch.tensor(float("inf"), dtype=dtype)])
    [(found, text)] = records(log)
    assert found == level
    assert (words or "") in text
    assert ("no loss scale can help" in text) is (words is not None and HELPLESS in words)
    assert ("ook for inf or nan in the data" in text) is (dtype == torch.float32)


def test_a_step_after_skips_is_heard_of(log: pytest.LogCaptureFixture) -> None:
    """A later loss that is not finite at that scale is none that a scale could help."""
    skips, scaler = calibrated(), DynamicLossScaler(1024.0)
    assert not skips.awaits_step
    skip(skips, scaler)
    assert skips.awaits_step
    skips.stepped(512.0)
    assert not skips.awaits_step
    skip(skips, scaler, False)
    assert "no loss scale can help" in records(log)[-1][1]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_skip_log_is_copied_with_its_counts(log: pytest.LogCaptureFixture, how: object) -> None:
    skips, scaler = SkipLog(), StaticLossScaler()
    for _ in range(3):
        skip(skips, scaler)
    records(log)
    skip(how(skips), scaler)  # type: ignore[operator]
    assert "(4 so far)" in records(log)[0][1]


def test_cast_warnings_name_each_parameter_once(log: pytest.LogCaptureFixture) -> None:
    warned = {"something else"}
    lines = Lines()
    warn_cast(lines, [("a", 0), ("b", kernels.TOO_LARGE), ("c", kernels.NOT_FINITE)], warned)
    assert records(log) == [
        ("WARNING", "FP32 masters hold inf or nan: c."),
        ("WARNING", "FP32 masters are too large for their 16-bit parameters, which became inf: b."),
    ]
    warn_cast(lines, [("b", kernels.TOO_LARGE), ("c", kernels.NOT_FINITE)], warned)
    assert records(log) == []
    warn_cast(lines, ((n, kernels.TOO_LARGE | kernels.NOT_FINITE) for n in "bcd"), warned)
    assert [text for _, text in records(log)] == [
        "FP32 masters hold inf or nan: b, d.",
        "FP32 masters are too large for their 16-bit parameters, which became inf: c, d.",
    ]
    assert "something else" in warned


def test_writes_come_at_a_falling_rate(log: pytest.LogCaptureFixture, minutes: list[float]) -> None:
    lines = Lines()
    for times in range(1, 100):
        minutes[0] += 60.0
        warn_model_write(lines, ["w"], times)
    said = [text for _, text in records(log)]
    assert ["times so far" in text for text in said] == [False] + 6 * [True]
    assert "w (64 times so far). There is nothing to do after a load" in said[-1]


def test_a_line_comes_at_most_four_times_a_minute_and_says_what_was_left_out(
    log: pytest.LogCaptureFixture, minutes: list[float]
) -> None:
    skips, scaler = calibrated(), DynamicLossScaler(init_scale=2.0**20)
    said = []
    for _ in range(120):  # an overflow a second, each alone
        scaler.set_scale(2.0**20)
        scaler.update(torch.tensor(0.0))
        skip(skips, scaler)
        said.append(len(records(log)))
        minutes[0] += 1.0
    assert sum(said[:60]) == sum(said[60:]) == 4
    assert all(sum(said[at : at + 60]) <= 4 for at in range(60))
    minutes[0] += 60.0
    skip(skips, scaler)
    [(_, text)] = records(log)
    assert text.endswith("fc.weight (inf), fc.bias (inf and nan). (56 more like it since the last.)")
    skip(skips, scaler)
    assert "more like it" not in records(log)[0][1]


def test_lines_of_other_kinds_and_optimizers_do_not_count(log: pytest.LogCaptureFixture) -> None:
    lines, others = Lines(), Lines()
    for _ in range(9):
        lines.say(logging.WARNING, "one %d", 1)
        lines.say(logging.WARNING, "another")
        lines.say(logging.WARNING, "once", once=True)
        others.say(logging.WARNING, "one %d", 2)
    said = [text for _, text in records(log)]
    assert {text: said.count(text) for text in said} == {"one 1": 4, "another": 4, "once": 1, "one 2": 4}


def test_a_level_that_is_not_logged_uses_nothing_up(log: pytest.LogCaptureFixture) -> None:
    lines = Lines()
    log.set_level(logging.WARNING, logger="fp16opt")
    for _ in range(9):
        lines.say(logging.INFO, "calm", once=True)
    log.set_level(logging.INFO, logger="fp16opt")
    assert lines.say(logging.INFO, "calm", once=True)


def wrapped(dtype: torch.dtype = torch.float16, **options: object) -> tuple[torch.nn.Module, MixedPrecisionOptimizer]:
    model = torch.nn.Linear(2, 2).to(dtype)
    adamw = torch.optim.AdamW(model.parameters())
    return model, MixedPrecisionOptimizer(adamw, **options)  # type: ignore[arg-type]


def overflow(model: torch.nn.Module, opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(model(torch.ones(1, 2, dtype=torch.float16)).float().sum() * float("nan"))
    opt.step()


def test_two_optimizers_are_told_apart(log: pytest.LogCaptureFixture) -> None:
    gc.collect()
    generator, g_opt = wrapped(loss_scale=1.0)
    overflow(generator, g_opt)
    [(_, alone)] = records(log)
    discriminator, d_opt = wrapped(loss_scale=1.0)
    overflow(generator, g_opt)
    overflow(discriminator, d_opt)
    copied_model, copied = copy.deepcopy((discriminator, d_opt))
    overflow(copied_model, copied)
    said = [text.partition(" [")[2] for _, text in records(log)]
    assert len(set(said)) == 3
    assert all(re.fullmatch(r"optimizer \d+: AdamW over group 0, param 0 and 1 more]", text) for text in said)
    assert "[optimizer" not in alone
    del g_opt, copied
    overflow(discriminator, d_opt)
    assert "[optimizer" not in records(log)[-1][1]


def test_one_line_a_skip(log: pytest.LogCaptureFixture) -> None:
    """Whoever drives it, at whatever scale."""
    for options in ({"loss_scale": 1.0}, {"dynamic": True}, {"loss_scale": 8.0, "grad_accumulation": "fp32"}):
        model, opt = wrapped(**options)
        overflow(model, opt)
        assert len(records(log)) == 1
        del opt
    for scaler in (torch.amp.GradScaler("cpu"), GradScaler("cpu")):
        model, opt = wrapped()
        scaler.scale(model(torch.ones(1, 2).half()).float().sum() * float("nan")).backward()
        scaler.step(opt)
        scaler.update()
        assert len([level for level, _ in records(log) if level != "DEBUG"]) == 1
        del opt
