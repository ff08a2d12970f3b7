"""The same programs told of each trainer: 24 steps against a loop by hand, the engine's own step, files, advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.checks import assert_same

from fp16opt import MixedPrecisionOptimizer
from integrations.byhand import (
    HALF,
    ONE_PASS,
    STEPS,
    adamw,
    assert_same_run,
    assert_same_weights,
    batches,
    by_hand,
    every_dtype,
    loss_of,
    network,
    scaled,
)

TRAINERS = ("lightning", "fabric", "accelerate", "transformers", "timm")
pytestmark = [  # any warning of an optimizer or a scheduler counts
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("error:.*lr_scheduler.*|.*optimizer.step.*"),
]


def driver_of(trainer: str) -> Any:
    """What drives it; see its ``train``."""
    return pytest.importorskip(f"integrations.by_{trainer}", exc_type=ImportError)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.5},
    "by value": {"micro": 2, "clip_value": 0.125},
    "two micro-batches": {"micro": 2},
    "all of it": {"micro": 2, "clip": 0.5},
    "both clips": {"micro": 2, "clip": 0.5, "clip_value": 0.125},
}
LACKS: dict[str, tuple[str, ...]] = {trainer: ("both clips",) for trainer in TRAINERS if trainer != "accelerate"}
LACKS["transformers"] += ("by value",)
LACKS["fabric"] += ("clip", "all of it")  # the norm is torch's there: see test_lightning


@every_dtype
@pytest.mark.parametrize(("trainer", "run"), [(t, r) for t in TRAINERS for r in RUNS if r not in LACKS.get(t, ())])
def test_its_loop_is_the_loop_by_hand(trainer: str, run: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With a scheduler, which waits for skipped steps where the trainer's do; norms are of true gradients."""
    driver, told = driver_of(trainer), RUNS[run]
    data = batches(STEPS * told.get("micro", 1))
    got = driver.train(dtype, data, tmp_path, **told, **scaled(dtype, fused_step=False))
    hand = by_hand(dtype, data, schedule=driver.schedule, waits=driver.WAITS, **told)
    assert_same_run(got.losses, got.model, got.optimizer, hand)
    assert got.optimizer.param_groups[0]["lr"] == hand.optimizer.param_groups[0]["lr"]
    assert got.norms in (None, hand.norms)
    assert got.skipped in (None, hand.skipped)
    if dtype == HALF:
        assert 2 <= sum(hand.skipped) < STEPS / 2, "the run is to overflow at first, and then to train"
    if "clip" in told:
        assert max(hand.norms) > told["clip"], "the clip is to have something to do"


@every_dtype
@pytest.mark.parametrize("masters", ["full", "split"])
@pytest.mark.parametrize("trainer", [trainer for trainer in TRAINERS if trainer != "fabric"])
def test_by_default_it_is_the_engines_own_step(trainer: str, masters: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """One-pass steps, to the bit of those that are driven without a trainer, and within their bounds of the loop."""
    driver, data = driver_of(trainer), batches(2 * STEPS)
    got = driver.train(dtype, data, tmp_path, 2, 0.5, **scaled(dtype, master_weights=masters))
    net = network(dtype)
    bare = adamw(net.parameters())
    scheduler = driver.schedule(bare)
    opt, losses = MixedPrecisionOptimizer(bare, **scaled(dtype, master_weights=masters)), []
    for start in range(0, len(data), 2):
        opt.zero_grad()
        for batch in data[start : start + 2]:
            loss = loss_of(net, batch, dtype)
            losses.append(loss.item())
            opt.backward(loss / 2)
        opt.clip_master_grads(0.5)
        opt.step()
        if not (driver.WAITS and opt.step_was_skipped):
            scheduler.step()
    assert got.losses == losses
    assert all(map(torch.equal, got.optimizer.master_params(), opt.master_params()))
    assert all(map(torch.equal, got.model.parameters(), net.parameters()))
    assert got.optimizer.loss_scale == opt.loss_scale
    if masters == "full":
        hand = by_hand(dtype, data, micro=2, clip=0.5, schedule=driver.schedule, waits=driver.WAITS)
        assert_same_weights(got.model, got.optimizer, hand, ONE_PASS)
        assert got.optimizer.skipped_steps == sum(hand.skipped)


@every_dtype
@pytest.mark.parametrize("fused", [False, "auto"], ids=["torch's step", "one pass"])
@pytest.mark.parametrize("trainer", [trainer for trainer in TRAINERS if trainer != "fabric"])
def test_resumed_in_the_middle_it_ends_in_the_same_bits(
    trainer: str, fused: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """From the trainer's own file, read with weights_only=True; 24 steps, of which the file has 12."""
    whole, rest = driver_of(trainer).in_halves(dtype, batches(STEPS), tmp_path, fused_step=fused)
    assert rest.losses == whole.losses[STEPS:]
    assert len(set(rest.losses)) > STEPS / 2, "the second half did train"
    assert_same(rest.optimizer.state_dict(), whole.optimizer.state_dict(), "optimizer")
    assert_same(dict(rest.model.state_dict()), dict(whole.model.state_dict()), "model")
    assert rest.optimizer.loss_scale == whole.optimizer.loss_scale


@pytest.mark.missing_scale
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_line_for_a_missing_scale_is_named(trainer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning of FP16 weights without a loss scale has the trainer's own line, not the wrapper's."""
    driver = driver_of(trainer)
    for settings, lines in ((driver.FORGOTTEN, 1), ({"loss_scale": 1.0}, 0), ({"dynamic": True}, 0)):
        caplog.clear()
        driver.train(HALF, batches(1), tmp_path, **settings)
        heard = [one.message for one in caplog.records if "without loss scaling" in one.message]
        assert len(heard) == lines
        assert all(driver.ADVICE in line and " in place of " not in line for line in heard)
