"""Accelerate: clips, what is prepared and in which order, its own class with our scaler, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import reference
from engine.checks import assert_same
from torch import nn

pytest.importorskip("accelerate")

import accelerate
from accelerate.optimizer import AcceleratedOptimizer

import fp16opt.distributed
from fp16opt import (
    AveragedMasters,
    GradScaler,
    MixedPrecisionOptimizer,
    Monitor,
    diagnose,
    ema,
    load_foreign,
)
from fp16opt.fp16_utils import FP16_Optimizer
from fp16opt.integrations.accelerate import Accelerator, use_fp16opt_scaler
from fp16opt.integrations.optimizer_group import SharedLossScaler
from integrations.by_accelerate import Loop
from integrations.byhand import (
    BF16,
    HALF,
    OVERFLOWING,
    STEPS,
    adamw,
    assert_same_weights,
    batches,
    by_hand,
    halving,
    loss_of,
    network,
    scaled,
)

DEEPSPEED = accelerate.utils.DistributedType.DEEPSPEED
pytestmark = pytest.mark.filterwarnings("error:.*lr_scheduler.*")


# -- clipping ----------------------------------------------------------------------------------------------------------


def test_some_parameters_are_clipped_by_their_own_norm() -> None:
    loop = Loop(HALF, loss_scale=64.0, fused_step=False)
    batch = batches(1)[0]
    loop.accelerator.backward(loss_of(loop.net, batch, HALF))
    grads = [reference.unscaled(param.grad, 64.0) for param in loop.net.parameters()]
    norm = loop.accelerator.clip_grad_norm_(list(loop.net.parameters())[:2], 0.5)
    assert float(norm) == pytest.approx(reference.total_norm(grads[:2]), rel=2.0**-22)
    want = [*reference.clipped(grads[:2], float(norm), 0.5), *grads[2:]]
    got = [param.grad for param in loop.optimizer.optimizer.master_params()]
    assert_same(got, want, "gradient")
    assert float(loop.accelerator.clip_grad_norm_(loop.net.parameters(), 1e9, norm_type=float("inf"))) == max(
        float(g.abs().max()) for g in want
    )


def test_two_optimizers_are_clipped_by_one_norm_and_share_a_scale() -> None:
    accelerator = Accelerator(cpu=True, master_weights={"loss_scale": 64.0})
    nets = [network(HALF), network(HALF, seed=5)]
    *nets, one, other = accelerator.prepare(*nets, *(adamw(net.parameters()) for net in nets))
    batch = batches(1)[0]
    accelerator.backward(loss_of(nets[0], batch, HALF) + loss_of(nets[1], batch, HALF))
    params = [param for net in nets for param in net.parameters()]
    grads = [reference.unscaled(param.grad, 64.0) for param in params]
    norm = accelerator.clip_grad_norm_(params, 0.5)
    assert float(norm) == pytest.approx(reference.total_norm(grads), rel=1e-5)  # torch's, which adds up in FP32
    clipped = [p.grad.clone() for opt in (one, other) for p in opt.optimizer.master_params()]
    assert reference.total_norm(clipped) == pytest.approx(0.5, rel=1e-5)
    accelerator.clip_grad_value_(params, 0.01)
    values = [p.grad for opt in (one, other) for p in opt.optimizer.master_params()]
    assert_same(values, [g.clamp(-0.01, 0.01) for g in clipped], "gradient")
    stray = nn.Parameter(torch.ones(2))
    stray.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"parameters: number 12, of shape \(2,\), has a gradient and is in none of"):
        accelerator.clip_grad_norm_([*params, stray], 0.5)
    with pytest.raises(ValueError, match=r"parameters: number 12, of shape \(2,\), has a gradient and is in none of"):
        accelerator.clip_grad_value_([*params, stray], 0.5)
    assert isinstance(one.optimizer.scaler, SharedLossScaler)
    assert one.optimizer.scaler.rule is other.optimizer.scaler.rule


def test_a_clip_by_value_hides_no_overflow() -> None:
    loop = Loop(HALF, **scaled(HALF)).train(batches(3), clip_value=0.1)
    assert loop.skipped == [True, True, True]


def test_a_clip_in_the_middle_of_an_accumulation_is_refused() -> None:
    loop = Loop(HALF, 2, **scaled(HALF))
    with loop.accelerator.accumulate(loop.net):
        loop.accelerator.backward(loss_of(loop.net, batches(1)[0], HALF))
        for clip in (loop.accelerator.clip_grad_norm_, loop.accelerator.clip_grad_value_):
            with pytest.raises(RuntimeError, match="was called in the middle of an accumulation"):
                clip(loop.net.parameters(), 0.5)


# -- preparing ---------------------------------------------------------------------------------------------------------


def test_one_by_one_in_any_order() -> None:
    accelerator = Accelerator(cpu=True, master_weights={"loss_scale": 64.0})
    net = accelerator.prepare(network(HALF))
    optimizer = accelerator.prepare_optimizer(adamw(net.parameters()))
    assert isinstance(optimizer.optimizer, MixedPrecisionOptimizer)
    assert accelerator.prepare_optimizer(optimizer) is optimizer
    accelerator.prepare(torch.utils.data.DataLoader([1, 2]))  # for instance to validate; nothing is wrapped anew
    accelerator.backward(loss_of(net, batches(1)[0], HALF))
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    names = {name for name, _ in net.named_parameters()}
    assert set(optimizer.optimizer.params.names) == names


def test_optimizers_of_fp32_models_stay_as_they_are() -> None:
    accelerator = Accelerator(cpu=True, master_weights={"dynamic": True})
    net, optimizer = accelerator.prepare(*(lambda net: (net, adamw(net.parameters())))(network()))
    assert not isinstance(optimizer.optimizer, MixedPrecisionOptimizer)
    accelerator.backward(loss_of(net, batches(1)[0], torch.float32))
    accelerator.clip_grad_norm_(net.parameters(), 0.5)
    accelerator.clip_grad_value_(net.parameters(), 0.5)
    optimizer.step()
    assert not optimizer.step_was_skipped
    plain = Accelerator(cpu=True)
    _, optimizer = plain.prepare(*(lambda net: (net, adamw(net.parameters())))(network(HALF)))
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)


def test_one_that_is_wrapped_already_stays() -> None:
    accelerator = Accelerator(cpu=True, master_weights={})
    net = network(HALF)
    own = MixedPrecisionOptimizer(adamw(net.parameters()), dynamic=True)
    net, optimizer = accelerator.prepare(net, own)
    assert optimizer.optimizer is own
    accelerator.backward(loss_of(net, batches(1)[0], HALF))
    optimizer.step()
    assert own.step_was_skipped is accelerator.optimizer_step_was_skipped


def test_a_second_training_begins_after_free_memory() -> None:
    accelerator = Accelerator(cpu=True, master_weights={"dynamic": True})
    net = network(HALF)
    accelerator.prepare(net, adamw(net.parameters()))
    with pytest.raises(RuntimeError, match="optimizers were prepared before, and one loss scale is to serve all"):
        accelerator.prepare(adamw(network(HALF, 5).parameters()))
    accelerator.free_memory()
    net = network(HALF)
    _, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    assert isinstance(optimizer.optimizer, MixedPrecisionOptimizer)


def test_schedule_free_takes_the_model_along() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    accelerator = Accelerator(cpu=True, master_weights={"loss_scale": 64.0})
    net = network(HALF)
    net, optimizer = accelerator.prepare(net, schedulefree.AdamWScheduleFree(net.parameters(), lr=0.05))
    optimizer.train()
    for batch in batches(4):
        accelerator.backward(loss_of(net, batch, HALF))
        optimizer.step()
        optimizer.zero_grad()
    trained = [param.detach().clone() for param in net.parameters()]
    optimizer.eval()
    assert not all(map(torch.equal, trained, net.parameters()))
    for param, master in zip(net.parameters(), optimizer.optimizer.master_params(), strict=True):
        assert torch.equal(param, master.to(HALF))
    optimizer.train()
    assert all(map(torch.equal, trained, net.parameters()))


@pytest.mark.parametrize(("dtype", "precision", "words"), [(HALF, "bf16", 1), (BF16, "bf16", 0), (HALF, "no", 0)])
def test_fp16_weights_under_bf16_autocast_are_told_of(
    dtype: torch.dtype, precision: str, words: int, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(dtype, told={"mixed_precision": precision})
    told = [message for message in caplog.messages if "FP16 weights run under BF16 autocast" in message]
    assert len(told) == words
    assert all("bf16=False" in message for message in told)


def test_prepared_optimizers_are_taken_as_they_are(tmp_path: Path) -> None:
    """By what asks for the wrapper: monitor, averages, files, diagnosis."""
    loop = Loop(HALF, loss_scale=64.0)
    records: list[Any] = []
    averaged = AveragedMasters(loop.net, loop.optimizer, ema(0.5))
    with Monitor(loop.optimizer, every=1, to=records.append):
        loop.train(batches(2))
        averaged.update()
    assert [record["loss_scale"] for record in records if record["kind"] == "step"] == [64.0, 64.0]
    average = averaged.fp32_state_dict()["0.weight"]
    assert torch.equal(average, next(loop.optimizer.optimizer.master_params()))
    found = diagnose(loop.net, lambda: loss_of(loop.net, batches(1)[0], HALF), loop.optimizer)
    assert found.scale == 64.0
    old = network(HALF, seed=5)
    fp16 = FP16_Optimizer(adamw(old.parameters()))
    torch.save({"model": old.state_dict(), "optimizer": fp16.state_dict()}, tmp_path / "apex.pt")
    assert load_foreign(tmp_path / "apex.pt", loop.net, loop.optimizer).masters == 6
    assert_same(dict(loop.net.state_dict()), dict(old.state_dict()), "model")
    fp16opt.distributed.save(tmp_path / "ours", loop.net, loop.optimizer)
    before = [master.detach().clone() for master in loop.optimizer.optimizer.master_params()]
    loop.train(batches(1))
    fp16opt.distributed.load(tmp_path / "ours", loop.net, loop.optimizer)
    assert_same([master.data for master in loop.optimizer.optimizer.master_params()], before, "masters")
    with pytest.raises(TypeError, match=r"expected a fp16opt.MixedPrecisionOptimizer, got AcceleratedOptimizer"):
        AveragedMasters(loop.net, AcceleratedOptimizer(adamw(loop.net.parameters())), ema(0.5))


# -- Accelerate's own class --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made", [None, torch.amp.GradScaler, GradScaler], ids=["use_fp16opt_scaler", "torch's", "ours, put there"]
)
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_scaler_in_accelerates_own_class_drives_the_wrapper(made: Any, clear: str) -> None:
    """The wrapper counts the skips. Accelerate's own class sees none, so that its schedulers go on; with
    use_fp16opt_scaler, skips, clip and scheduler are as by hand. On a CPU Accelerate alone would not unscale.
    """
    ours, settings = made is None, {"init_scale": OVERFLOWING, "growth_interval": 5}
    accelerator = accelerate.Accelerator(cpu=True, **({"mixed_precision": "fp16"} if ours else {}))
    scaler = use_fp16opt_scaler(accelerator, **settings) if ours else made("cpu", **settings)
    assert isinstance(scaler, made or GradScaler)
    if ours:
        assert accelerator.scaler is scaler
    accelerator.scaler = scaler
    net = network(HALF)
    bare = adamw(net.parameters())
    opt = MixedPrecisionOptimizer(bare, fused_step=False)
    net, optimizer, scheduler = accelerator.prepare(net, opt, halving(bare))
    data, losses, skipped = batches(STEPS), [], []
    for batch in data:
        loss = loss_of(net, batch, HALF)
        losses.append(loss.item())
        accelerator.backward(loss)
        if ours:
            accelerator.clip_grad_value_(net.parameters(), 0.125)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        scheduler.step()
        (net if clear == "model" else optimizer).zero_grad()
    hand = by_hand(HALF, data, clip_value=0.125 if ours else None, schedule=halving, waits=ours)
    assert losses == hand.losses
    assert_same_weights(net, opt, hand)
    assert skipped == (hand.skipped if ours else [False] * STEPS)
    assert opt.skipped_steps == sum(hand.skipped) > 1
    if ours:
        with pytest.raises(RuntimeError, match="optimizers were prepared already, with the scaler that was there"):
            use_fp16opt_scaler(accelerator)


def test_our_scaler_with_fp32_weights_under_autocast() -> None:
    """Clips by norm are of true gradients, and forwards are in FP16, as on a GPU."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    use_fp16opt_scaler(accelerator, init_scale=1024.0)
    net, optimizer = accelerator.prepare(*(lambda net: (net, adamw(net.parameters())))(network()))
    by_hand = network()
    for batch in batches(4):
        seen: list[torch.dtype] = []
        handle = net[0].register_forward_hook(lambda module, args, made, seen=seen: seen.append(made.dtype))
        accelerator.backward(loss_of(net, batch, torch.float32))
        handle.remove()
        assert seen == [HALF]
        norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
        by_hand.load_state_dict(net.state_dict())
        by_hand.zero_grad()
        with torch.autocast("cpu", HALF):
            (loss_of(by_hand, batch, torch.float32) * 1024.0).backward()
        wanted = reference.total_norm([param.grad / 1024.0 for param in by_hand.parameters()])
        assert float(norm) == pytest.approx(wanted, rel=1e-5)  # torch's, which adds up in FP32
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()


def ours(**told: Any) -> Any:
    return use_fp16opt_scaler(accelerate.Accelerator(cpu=True, **told))


def sharded_by_fsdp1() -> Any:
    """Pieces, as they are marked, don't tell which part of a weight they are."""
    net = network(HALF)
    for param in net.parameters():
        param._fsdp_flattened = True  # type: ignore[attr-defined]
    return Accelerator(cpu=True, master_weights={}).prepare(net, adamw(net.parameters()))


REFUSED: dict[str, tuple[Callable[[], Any], Any, type[Exception], str]] = {
    "our scaler, DeepSpeed's": (
        lambda: ours(mixed_precision="fp16"),
        DEEPSPEED,
        ValueError,
        "accelerator: DEEPSPEED scales by itself, and would not ask this scaler",
    ),
    "our scaler, no FP16": (
        lambda: ours(),
        None,
        ValueError,
        "accelerator: expected mixed_precision=\"fp16\", got 'no'",
    ),
    "DeepSpeed": (
        lambda: Accelerator(cpu=True, master_weights={}),
        DEEPSPEED,
        ValueError,
        "master_weights: DEEPSPEED keeps masters of its own",
    ),
    "two scales": (
        lambda: Accelerator(cpu=True, mixed_precision="fp16", master_weights={}),
        None,
        ValueError,
        "or from ACCELERATE_MIXED_PRECISION, too: Accelerate would scale the loss a second time",
    ),
    "FSDP1": (sharded_by_fsdp1, None, ValueError, r"FullyShardedDataParallel \(FSDP1\)"),
    **{
        f"options: {given!r}": (
            lambda given=given: Accelerator(cpu=True, master_weights=given),
            None,
            TypeError,
            f"master_weights: expected a dict of .*, or None, got {type(given).__name__}",
        )
        for given in (True, "dynamic", 2.0)
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, distributed, error, words = REFUSED[case]
    if distributed is not None:
        monkeypatch.setattr(accelerate.Accelerator, "distributed_type", property(lambda self: distributed))
    with pytest.raises(error, match=words):
        call()


def test_fp16_weights_without_master_weights_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [one.message for one in caplog.records if one.name == "fp16opt"]

    accelerator = Accelerator(cpu=True)
    for dtype in (torch.float32, BF16):
        net = network(dtype)
        accelerator.prepare(net, adamw(net.parameters()))
    net = network(HALF)
    accelerator.prepare(net, MixedPrecisionOptimizer(adamw(net.parameters())))
    assert told() == []
    for _ in range(2):
        net = network(HALF)
        accelerator.prepare(net, adamw(net.parameters()))
    assert len(told()) == 1
    assert 'Write Accelerator(master_weights={"dynamic": True}).' in told()[0]
