"""Lightning's Trainer and Fabric with the plugins: manual steps, several optimizers, schedulers, logs, finetuning."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import reference
from engine.checks import assert_same
from torch import Tensor, nn

pytest.importorskip("lightning")

import lightning
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm

from fp16opt import DynamicLossScaler, Loaded, MixedPrecisionOptimizer, load_foreign
from fp16opt.integrations.lightning import FabricMasterWeightsPrecision, MasterWeightsPrecision
from integrations import by_fabric
from integrations.by_lightning import PRECISIONS, Manual, Module, fit, optimizer_of
from integrations.byhand import (
    HALF,
    STEPS,
    ByHand,
    adamw,
    assert_same_run,
    assert_same_weights,
    batches,
    by_hand,
    every_dtype,
    halving,
    loss_of,
    network,
    scale_of,
    scaled,
)

pytestmark = [  # any warning of an optimizer or a scheduler counts
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("error:.*lr_scheduler.*|.*optimizer.step.*"),
]


def test_a_checkpoint_of_an_fp32_run_goes_on_with_masters(tmp_path: Path) -> None:
    """In Lightning, and in any loop: masters and moments are its weights and state."""
    data = batches(8)
    plain = fit(Module(), None, tmp_path, data, steps=4)
    plain.save_checkpoint(tmp_path / "fp32.ckpt")
    plugin = MasterWeightsPrecision("16-true", loss_scale=128.0)
    made = fit(Module(), plugin, tmp_path, data, tmp_path / "fp32.ckpt", steps=4)
    net = Module().to(HALF)
    opt = MixedPrecisionOptimizer(adamw(net.parameters()), dynamic=True)
    assert load_foreign(tmp_path / "fp32.ckpt", net, opt) == Loaded("lightning", 6, 6, None)
    state = optimizer_of(made).state_dict()["optimizer"]["state"]
    for number, (master, want) in enumerate(zip(opt.master_params(), plain.lightning_module.parameters(), strict=True)):
        assert torch.equal(master, want)
        moment = plain.optimizers[0].state[want]["exp_avg"]
        assert torch.equal(state[number]["exp_avg"], moment)
        assert state[number]["exp_avg"].dtype == torch.float32
        assert torch.equal(opt.state[master]["exp_avg"], moment)


# -- schedulers, logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True], ids=["every step", "taken steps"])
def test_schedulers_step_always_or_with_the_optimizer(waits: bool, tmp_path: Path) -> None:
    data = batches(STEPS)
    module = Module(schedule=halving)
    plugin = MasterWeightsPrecision("16-true", fused_step=False, schedulers_wait=waits, **scaled(HALF))
    monitor = LearningRateMonitor("step")
    logger = CSVLogger(tmp_path)
    made = fit(module, plugin, tmp_path, data, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    hand = by_hand(HALF, data, schedule=halving, waits=waits)
    assert_same_weights(module, optimizer_of(made), hand)
    scheduler = made.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == STEPS - waits * sum(hand.skipped)
    assert scheduler.state_dict()["last_epoch"] == scheduler.last_epoch
    assert scheduler.get_last_lr() == hand.scheduler.get_last_lr()
    made.save_checkpoint(tmp_path / "waiting.ckpt")
    assert "step" not in torch.load(tmp_path / "waiting.ckpt", weights_only=True)["lr_schedulers"][0]


def test_an_epochs_scheduler_does_not_wait(tmp_path: Path) -> None:
    module = Module(schedule=halving, interval="epoch")
    plugin = MasterWeightsPrecision("16-true", schedulers_wait=True, **scaled(HALF))
    made = fit(module, plugin, tmp_path, batches(2), max_epochs=3, steps=-1)
    assert optimizer_of(made).skipped_steps >= 3
    assert made.lr_scheduler_configs[0].scheduler.last_epoch == 3


def rows_of(logger: CSVLogger) -> list[dict[str, float]]:
    """What was logged of the scale."""
    file = Path(logger.log_dir) / "metrics.csv"
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    return [{key: float(value) for key, value in row.items() if value} for row in rows if row.get("loss_scale")]


def test_scale_and_skips_are_in_the_log(tmp_path: Path) -> None:
    data = batches(STEPS)
    logger = CSVLogger(tmp_path)
    plugin = MasterWeightsPrecision("16-true", **scaled(HALF))
    made = fit(Module(), plugin, tmp_path, data, logger=logger, log_every_n_steps=4)
    rows = rows_of(logger)
    assert [row["step"] for row in rows] == [3, 7, 11, 15, 19, 23]
    hand = ByHand(network(HALF), scale=scale_of(HALF))
    at = {}
    for number, batch in enumerate(data):
        hand.train([batch], HALF)
        at[number] = (hand.scale.value, sum(hand.skipped))
    assert [(row["loss_scale"], row["skipped_steps"]) for row in rows][:2] == [at[3], at[7]]
    assert rows[-1]["loss_scale"] == optimizer_of(made).loss_scale
    quiet = CSVLogger(tmp_path / "quiet")
    fit(Module(), MasterWeightsPrecision("16-true", log_scale=False), tmp_path, data, logger=quiet, log_every_n_steps=1)
    assert rows_of(quiet) == []


# -- manual optimization, several optimizers ---------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("how", ["norm", "value"])
def test_manual_optimization_is_the_loop_by_hand(dtype: torch.dtype, how: str, tmp_path: Path) -> None:
    data = batches(2 * STEPS)
    module = Manual(how)
    plugin = MasterWeightsPrecision(PRECISIONS[dtype], fused_step=False, **scaled(dtype))
    made = fit(module, plugin, tmp_path, data)
    hand = by_hand(dtype, data, micro=2, **({"clip": 0.5} if how == "norm" else {"clip_value": 0.5}))
    assert_same_run(module.losses, module, optimizer_of(made), hand)
    assert torch.get_default_dtype() == torch.float32


class Averaging(torch.optim.SGD):
    """Makes state in the default dtype, as optimizers of other packages do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("weight_sum", torch.zeros(()))
        return super().step(closure)


def test_state_made_in_a_manual_step_is_fp32(tmp_path: Path) -> None:
    """Lightning runs it with FP16 as the default dtype."""
    module = Manual()
    module.make = lambda params: Averaging(params, lr=0.1)
    made = fit(module, MasterWeightsPrecision("16-true", loss_scale=8.0), tmp_path, batches(2))
    sums = [state["weight_sum"] for state in optimizer_of(made).state.values()]
    assert {each.dtype for each in sums} == {torch.float32}


class TwoNets(Module):
    """Two optimizers in turns, as a GAN has them; the second net learns from the first one's output."""

    def __init__(self, wrapped: Callable[[Any], Any] = lambda each: each) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = network(seed=5)
        self.wrapped = wrapped
        self.scales: list[float] = []

    def losses_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        dtype = next(self.net.parameters()).dtype
        return loss_of(self.net, batch, dtype), loss_of(self.second, batch, dtype) * 0.125

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, opt in enumerate(self.optimizers()):
            opt.zero_grad()
            loss = self.losses_of(batch)[number]
            self.losses.append(loss.item())
            self.manual_backward(loss)
            opt.step()
            self.scales.append(opt.loss_scale)

    def configure_optimizers(self) -> Any:
        made = [adamw(self.net.parameters()), adamw(self.second.parameters(), lr=2.0**-5)]
        return self.wrapped(made)


def scaled_loss(net: nn.Module, batch: Any, factor: float) -> Tensor:
    return loss_of(net, batch, HALF) * factor


def test_several_optimizers_share_a_scale_that_follows_once_all_have_stepped(tmp_path: Path) -> None:
    data = batches(STEPS)
    module = TwoNets()
    plugin = MasterWeightsPrecision("16-true", fused_step=False, **scaled(HALF))
    made = fit(module, plugin, tmp_path, data, steps=2 * STEPS)
    hands = [ByHand(network(HALF)), ByHand(network(HALF, seed=5))]
    hands[1].make = lambda params: adamw(params, lr=2.0**-5)
    hands[1].__post_init__()
    scale, losses, scales = scale_of(HALF), [], []
    for batch in data:
        for number, hand in enumerate(hands):
            hand.scale = reference.Scale(scale.value)
            factor = 0.125 if number else 1.0
            hand.step([functools.partial(scaled_loss, hand.model, batch, factor)])
            losses.append(hand.losses[-1])
            if number:
                scale.update(any(hand.skipped[-1] for hand in hands))
            scales.append(scale.value)
    assert module.losses == losses
    assert module.scales == scales
    for opt, hand, net in zip(made.optimizers, hands, (module.net, module.second), strict=True):
        assert_same_weights(net, opt, hand)
        assert opt.skipped_steps == sum(hand.skipped)
    assert sum(hands[0].skipped) != sum(hands[1].skipped), "one overflows where the other does not"


def test_optimizers_that_are_wrapped_already_stay(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(64.0)

    def wrapped(made: list[Any]) -> list[Any]:
        return [MixedPrecisionOptimizer(made[0], scaler=scaler), made[1]]

    module = TwoNets(wrapped)
    made = fit(module, MasterWeightsPrecision("16-true", grad_accumulation="fp32"), tmp_path, batches(2), steps=4)
    first, second = made.optimizers
    assert first.scaler is scaler
    assert second.scaler is scaler
    assert (first.grad_accumulation, second.grad_accumulation) == ("model", "fp32")


def test_two_nets_release_their_gradients(tmp_path: Path) -> None:
    """A backward of the one's loss makes no gradients of the other's, and ends no step of it."""
    runs = []
    for option in (False, True):
        plugin = MasterWeightsPrecision("16-true", loss_scale=64.0, gradient_release=option)
        module = TwoNets()
        fit(module, plugin, tmp_path, batches(6), steps=12)
        runs.append((module.losses, {name: value.clone() for name, value in module.state_dict().items()}))
    assert_same(runs[1], runs[0], "with gradients released")
    assert len(set(runs[0][0])) > 6, "both were trained"


def test_two_scales_for_one_backward_are_refused(tmp_path: Path) -> None:
    module = TwoNets(lambda made: [MixedPrecisionOptimizer(one, dynamic=True) for one in made])
    with pytest.raises(ValueError, match="optimizer 1 has a loss scaler of its own, and one backward serves all 2"):
        fit(module, MasterWeightsPrecision("16-true"), tmp_path, batches(2))
    both = TwoNets(lambda made: [MixedPrecisionOptimizer(one, loss_scale=2.0) for one in made])
    fit(both, MasterWeightsPrecision("16-true"), tmp_path, batches(2), steps=4)
    assert len(both.losses) == 4


# -- what else a module may do -----------------------------------------------------------------------------------------


class Clipping(Module):
    """Clips by its own hook, and looks at what the hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.norms.append(float(nn.utils.get_total_norm([param.grad for param in params])))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def test_hooks_see_true_gradients(tmp_path: Path) -> None:
    data = batches(STEPS)
    module = Clipping()
    made = fit(module, MasterWeightsPrecision("16-true", fused_step=False, loss_scale=256.0), tmp_path, data)
    hand = by_hand(HALF, data, scale=reference.Scale(256.0), clip=0.5)
    assert_same_weights(module, optimizer_of(made), hand)
    assert module.norms == pytest.approx(hand.norms, rel=1e-5)


def test_an_optimizer_that_evaluates_several_times(tmp_path: Path) -> None:
    """LBFGS: every evaluation is a training_step, on weights that are its masters, rounded."""

    class Evaluating(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    module = Evaluating()
    batch = batches(1)
    made = fit(module, MasterWeightsPrecision("16-true", **scaled(HALF)), tmp_path, batch * 6, steps=6)
    assert module.evaluated > 6
    assert module.losses[-1] < 0.5 * module.losses[0]
    for param, master in zip(module.parameters(), optimizer_of(made).master_params(), strict=True):
        assert torch.equal(param, master.to(HALF))


def test_a_training_step_without_a_loss_steps_nothing(tmp_path: Path) -> None:
    class Absent(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    data = batches(6)
    module = Absent()
    made = fit(module, MasterWeightsPrecision("16-true", fused_step=False, loss_scale=64.0), tmp_path, data, steps=6)
    hand = by_hand(HALF, data[::2], scale=reference.Scale(64.0))
    assert_same_weights(module, optimizer_of(made), hand)


@pytest.mark.parametrize("precision", ["16-mixed", "32", None])
@pytest.mark.parametrize("plugin", [MasterWeightsPrecision, FabricMasterWeightsPrecision])
def test_another_precision_is_refused(plugin: Any, precision: Any) -> None:
    with pytest.raises(ValueError, match="precision: expected '16-true' or 'bf16-true', got"):
        plugin(precision)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for module in (Module(), TwoNets()):
        with pytest.raises(ValueError, match=r"dynamic and loss_scale were given: each .* Give one of them"):
            fit(module, MasterWeightsPrecision("16-true", dynamic=True, loss_scale=2.0), tmp_path, batches(1))


def test_an_optimizer_of_an_earlier_fit_is_refused(tmp_path: Path) -> None:
    """Its groups hold masters by now: it would train them, and the model would stay as it is."""

    class Keeping(Module):
        def configure_optimizers(self) -> Any:
            self.kept = getattr(self, "kept", None) or adamw(self.parameters())
            return self.kept

    module = Keeping()
    fit(module, MasterWeightsPrecision("16-true"), tmp_path, batches(1), steps=1)
    with pytest.raises(ValueError, match=r"optimizer 0 \(AdamW\) has none of the model's parameters\. Make it anew"):
        fit(module, MasterWeightsPrecision("16-true"), tmp_path, batches(1), steps=1)


# -- finetuning --------------------------------------------------------------------------------------------------------


class Headed(Module):
    """A backbone that is frozen at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[:3], self.net[3]

    def configure_optimizers(self) -> Any:
        return adamw([param for param in self.parameters() if param.requires_grad])


class Unfreezing(BaseFinetuning):
    """The backbone joins in the second epoch, at a rate of its own; in the third all rates are halved."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=2.0**-8)
        if epoch == 2:
            for group in optimizer.param_groups:
                group["lr"] /= 2.0


def finetuned(tmp_path: Path, epochs: int, **options: Any) -> lightning.Trainer:
    plugin = MasterWeightsPrecision("16-true", loss_scale=256.0, fused_step=False)
    told = {"max_epochs": epochs, "steps": -1, "callbacks": [Unfreezing()], **options}
    return fit(Headed(), plugin, tmp_path, batches(8), **told)


def test_a_backbone_that_is_unfrozen_gets_masters(tmp_path: Path) -> None:
    made = finetuned(tmp_path, 3)
    net = network(HALF)
    net[:3].requires_grad_(False)
    hand = ByHand(net, scale=reference.Scale(256.0))
    for epoch in range(3):
        if epoch == 1:
            net.requires_grad_(True)
            backbone = ByHand(net[:3])
            hand.models += backbone.models
            hand.masters += backbone.masters
            hand.optimizer.add_param_group({"params": backbone.masters, "lr": 2.0**-8})
        if epoch == 2:
            for group in hand.optimizer.param_groups:
                group["lr"] /= 2.0
        hand.train(batches(8), HALF)
    assert made.lightning_module.losses == hand.losses
    assert_same([m.data for m in optimizer_of(made).master_params()], [m.data for m in hand.masters], "masters")
    assert_same(made.lightning_module.net.state_dict(), net.state_dict(), "model")


def test_finetuning_resumes_with_its_groups(tmp_path: Path) -> None:
    """Groups and masters are back. That the backbone is frozen again is Lightning's own doing."""
    half = finetuned(tmp_path, 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = finetuned(tmp_path, 2, ckpt=tmp_path / "half.ckpt")
    assert_same(optimizer_of(rest).state_dict(), optimizer_of(half).state_dict(), "optimizer")
    assert [len(group["params"]) for group in optimizer_of(rest).param_groups] == [2, 4]

    class Regrouped(Headed):
        def configure_optimizers(self) -> Any:
            return adamw([*self.head.parameters()][:1])

    plugin = MasterWeightsPrecision("16-true", loss_scale=256.0)
    told = {"max_epochs": 3, "steps": -1, "callbacks": [Unfreezing()], "ckpt": tmp_path / "half.ckpt"}
    with pytest.raises(ValueError, match="group 0 of the checkpoint has other parameters than that of configure_optim"):
        fit(Regrouped(), plugin, tmp_path, batches(8), **told)


def test_a_finetuning_callback_is_as_it_was_after_the_fit(tmp_path: Path) -> None:
    callback = BackboneFinetuning(1, lambda epoch: 1.5)
    made = finetuned(tmp_path, 3, callbacks=[callback])
    assert [group["lr"] for group in optimizer_of(made).param_groups] == pytest.approx([2.0**-6, 0.15 * 2.0**-6])
    assert not {"on_fit_start", "on_train_epoch_start"} & set(vars(callback))


# -- Fabric ------------------------------------------------------------------------------------------------------------


@every_dtype
def test_fabric_wraps_what_setup_returned(dtype: torch.dtype) -> None:
    data = batches(2 * STEPS)
    got = by_fabric.train(dtype, data, micro=2, clip_value=0.125, wrap_late=True, **scaled(dtype, fused_step=False))
    hand = by_hand(dtype, data, micro=2, clip_value=0.125, schedule=halving)
    assert_same_run(got.losses, got.model, got.optimizer, hand)


def test_fabric_clips_true_gradients_by_torchs_own_norm() -> None:
    """torch's norm is added up in FP32, which the engine's is not: off by a rounding or two, as the weights are."""
    data = batches(STEPS)
    got = by_fabric.train(HALF, data, clip=0.5, **scaled(HALF, fused_step=False))
    hand = by_hand(HALF, data, clip=0.5, schedule=halving)
    assert got.losses == pytest.approx(hand.losses, rel=2.0**-9)  # a flipped rounding of a weight is 2**-11 of it
    assert got.optimizer.skipped_steps == sum(hand.skipped) > 0


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    runs = [by_fabric.train(HALF, data, **scaled(HALF)) for data in (batches(STEPS), batches(1))]
    held = [{"model": run.model, "optimizer": run.made[1]} for run in runs]
    runs[0].made[0].save(tmp_path / "state.ckpt", held[0])
    runs[1].made[0].load(tmp_path / "state.ckpt", held[1])
    for name in ("model", "optimizer"):
        assert_same(held[1][name].state_dict(), held[0][name].state_dict(), name)


def test_fabrics_several_optimizers_come_in_one_call() -> None:
    plugin = FabricMasterWeightsPrecision("16-true")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    nets = [fabric.setup_module(network(seed=seed)) for seed in (0, 1)]
    with pytest.raises(RuntimeError, match="no optimizer was wrapped, so the loss can't be scaled"):
        fabric.backward(nets[0](torch.ones(1, 8)).sum())
    with pytest.raises(TypeError, match="wrap: expected at least one optimizer, got none"):
        plugin.wrap()
    both = plugin.wrap(*(adamw(net.parameters()) for net in nets))
    assert len({id(one.scaler.rule) for one in both}) == 1
    with pytest.raises(RuntimeError, match="wrap was called before"):
        plugin.wrap(adamw(nets[0].parameters()))


class Toggling(TwoNets):
    """One is switched off while the other is trained."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.toggle_optimizer(self.optimizers()[0])  # type: ignore[index]
        super().training_step(batch, batch_idx)


def test_toggled_optimizers_are_refused(tmp_path: Path) -> None:
    """Lightning switches off masters, and the model's weights would go on making gradients."""
    with pytest.raises(RuntimeError, match="toggle_optimizer switches off what the other optimizers hold"):
        fit(Toggling(), MasterWeightsPrecision("16-true"), tmp_path, batches(1), steps=1)


class Norms(Module):
    """Logs the norm of the gradients, as Lightning's pages do it, and as the true one is had."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        try:
            theirs = float(grad_norm(self, 2)["grad_2.0_norm_total"])
        except RuntimeError as error:
            theirs = None if "folded into FP32 sums" in str(error) else float("nan")
        self.__dict__.setdefault("norms", []).append((theirs, float(optimizer.clip_master_grads(float("inf")))))


class Counted(Module):
    """Asks for the norm of the step that is over."""

    def on_train_batch_end(self, *_: Any) -> None:
        norm = optimizer_of(self.trainer).stats()["grad_norm"]
        self.__dict__.setdefault("norms", []).append(float("nan") if norm is None else norm)


@pytest.mark.parametrize("clip", [None, 0.125])
def test_the_norm_to_log(clip: float | None, tmp_path: Path) -> None:
    """Of the model's gradients Lightning's is scaled, and FP32 sums have taken them: the masters' is the true one."""
    weights, norms = [], []
    for more in ({}, {"grad_accumulation": "fp32"}):
        module = Norms()
        plugin = MasterWeightsPrecision("16-true", loss_scale=64.0, fused_step=False, **more)
        fit(module, plugin, tmp_path, batches(4), steps=4, gradient_clip_val=clip)
        norms.append(module.norms)
        weights.append([p.detach() for p in module.parameters()])
    assert all(theirs == pytest.approx(64.0 * true, rel=1e-3) for theirs, true in norms[0])
    assert norms[1] == [(None, true) for _, true in norms[0]]
    bare = Counted()
    plugin = MasterWeightsPrecision("16-true", loss_scale=64.0, fused_step=False)
    fit(bare, plugin, tmp_path, batches(4), steps=4, gradient_clip_val=clip)
    assert all(map(torch.equal, weights[0], bare.parameters())), "asking for the norm changes nothing"
    assert bare.norms == pytest.approx([float("nan") if clip is None else true for _, true in norms[0]], nan_ok=True)
