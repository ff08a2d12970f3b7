"""Users' loops on a card: trainers, shards over NCCL, compiled and captured steps, checkpoints, averages, reports."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import card
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import fp16opt
from fp16opt import AveragedMasters, DynamicLossScaler, GradScaler, MixedPrecisionOptimizer, Monitor, distributed, ema

pytestmark = [pytest.mark.card, pytest.mark.skipif(not card.IS_THERE, reason="there is no card")]
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "general": {"fused_step": False},
    "split": {"master_weights": "split"},
    "split24, 8bit": {"master_weights": "split24", "optimizer_state": "8bit"},
    "sums": {"grad_accumulation": "fp32"},
    "changes": {"track_changes": True},
}
CARD = torch.device("cuda", 0)


class Loop:
    """A classifier in 16 bits and its training."""

    def __init__(self, dtype: torch.dtype = torch.float16, make: Any = AdamW, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).to(CARD, dtype)
        self.inputs = torch.randn(256, 64, device=CARD).to(dtype)
        self.targets = (self.inputs[:, :8].float() + 0.1 * torch.randn(256, 8, device=CARD)).argmax(1)
        self.call: Callable[[Tensor], Tensor] = self.model
        self.opt = MixedPrecisionOptimizer(
            make(self.model.parameters(), lr=3e-3),
            scaler=DynamicLossScaler(init_scale=2.0**12, growth_interval=4),
            named_parameters=self.model.named_parameters(),
            **settings,
        )

    def loss(self) -> Tensor:
        return nn.functional.cross_entropy(self.call(self.inputs).float(), self.targets)

    def step(self, factor: float = 1.0) -> float:
        self.opt.zero_grad()
        loss = self.loss() * factor
        self.opt.backward(loss)
        self.opt.clip_master_grads(1.0)
        self.opt.step()
        return float(loss)

    def train(self, steps: int, overflows: tuple[int, ...] = ()) -> list[float]:
        return [self.step(float("inf") if k in overflows else 1.0) for k in range(steps)]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "opt": self.opt.state_dict()}


def same(one: Any, other: Any, where: str = "") -> None:
    """The same nested values, tensors in every bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one.cpu(), other.cpu()), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}/{place}")
    else:
        assert one == other, where


@pytest.mark.parametrize("mode", list(MODES))
def test_a_training_is_saved_and_goes_on_bit_for_bit(tmp_path: Path, mode: str) -> None:
    loop = Loop(**MODES[mode])
    losses = loop.train(20, (3, 4))
    assert losses[-1] < 0.6 * losses[0]
    assert loop.opt.skipped_steps == 2
    torch.save(loop.state(), tmp_path / "saved.pt")
    loop.train(5, (2,))
    again = Loop(**MODES[mode])
    saved = torch.load(tmp_path / "saved.pt", map_location="cpu")
    again.model.load_state_dict(saved["model"])
    again.opt.load_state_dict(saved["opt"])
    again.train(5, (2,))
    same(again.state(), loop.state())


@pytest.mark.parametrize("mode", list(MODES))
def test_a_copy_and_a_pickle_go_on_as_the_original(mode: str) -> None:
    loop = Loop(**MODES[mode])
    loop.train(3)
    other = copy.deepcopy(loop)
    assert loop.train(4, (1,))[2:] == other.train(4, (1,))[2:]
    same(other.state(), loop.state())


def test_gradscaler_with_autocast_is_torchs() -> None:
    def train(kind: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(CARD)
        inner, inputs = AdamW(model.parameters(), lr=1e-2, fused=True), torch.randn(128, 32, device=CARD)
        scaler, losses, scales = kind("cuda", growth_interval=3), [], []
        for k in range(12):
            inner.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean() * (float("inf") if k == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(inner)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(inner)
            scaler.update()
            losses.append(float(loss))
            scales.append(scaler.get_scale())
        return losses, scales, list(model.parameters())

    ours, theirs = train(GradScaler), train(torch.amp.GradScaler)
    assert ours[0][-1] < ours[0][0]
    same(ours, theirs)


@pytest.mark.parametrize("mode", ["full", "split", "split24, 8bit"])
def test_averages_and_a_monitor(tmp_path: Path, mode: str) -> None:
    loop = Loop(**MODES[mode])
    averaged = AveragedMasters(loop.model, loop.opt, ema(0.9))
    wanted: list[Tensor] = []
    with Monitor(loop.opt, every=2, to=str(tmp_path / "run.jsonl")):
        for k in range(10):
            loop.step(float("inf") if k == 5 else 1.0)
            averaged.update()
            masters = [master.detach().clone() for master in loop.opt.master_params()]
            for value, master in zip(wanted, masters, strict=False):
                value.lerp_(master, 1.0 - 0.9)
            wanted = wanted or masters  # the first update takes them as they are
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert len(lines) > 3
    before = [param.detach().clone() for param in loop.model.parameters()]
    with averaged.swap(), torch.no_grad():
        for param, value in zip(loop.model.parameters(), wanted, strict=True):
            torch.testing.assert_close(param.float(), value, rtol=2e-3, atol=2e-4)
    same(list(loop.model.parameters()), before)


def test_check_and_diagnose() -> None:
    loop = Loop()
    kept = copy.deepcopy(loop.state())
    assert not fp16opt.check(loop.model, loop.loss, loop.opt).findings
    same(loop.state(), kept)
    with torch.no_grad():
        loop.model[0].weight.fill_(6e4)  # type: ignore[union-attr,operator]
    found = fp16opt.diagnose(loop.model, loop.loss)
    assert found.kind == "forward"


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_certify(make: Any) -> None:
    report = fp16opt.certify(lambda params: make(params, lr=1e-2, fused=True))
    assert report.ok
    assert report.checks["found_inf"].passed, report


def test_a_compiled_model() -> None:
    pytest.importorskip("triton")
    loop = Loop(torch.bfloat16)
    loop.call = torch.compile(loop.model)
    losses = loop.train(8)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["full", "general", "split"])
def test_a_whole_iteration_in_a_graph(mode: str) -> None:
    settings = dict(MODES[mode])
    make = lambda params, lr: AdamW(params, lr=torch.tensor(lr, device=CARD), capturable=True, fused=True)  # noqa: E731
    eager, captured = Loop(make=make, **settings), Loop(make=make, **settings)

    def iteration(loop: Loop) -> None:
        loop.opt.backward(loop.loss())
        loop.opt.clip_master_grads(1.0)
        loop.opt.step()
        loop.opt.zero_grad()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for loop in (eager, captured):
            for _ in range(3):
                iteration(loop)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration(captured)
    for _ in range(5):
        graph.replay()
        iteration(eager)
    same(list(captured.model.parameters()), list(eager.model.parameters()))
    same(list(captured.opt.master_params()), list(eager.opt.master_params()))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["full", "split", "split24, 8bit", "sums"])
def test_fsdp2_over_nccl_has_the_bits_of_plain_tensors(one_rank: None, tmp_path: Path, mode: str) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    def sharded() -> Loop:
        loop = Loop(**MODES[mode])
        fsdp.fully_shard(loop.model, mesh=dist.init_device_mesh("cuda", (1,)))
        inner = AdamW(loop.model.parameters(), lr=3e-3)
        scaler = DynamicLossScaler(init_scale=2.0**12, growth_interval=4)
        loop.opt = MixedPrecisionOptimizer(
            inner, scaler=scaler, named_parameters=loop.model.named_parameters(), **MODES[mode]
        )
        return loop

    plain, loop = Loop(**MODES[mode]), sharded()
    assert plain.train(8, (3,)) == loop.train(8, (3,))
    same([param.full_tensor() for param in loop.model.parameters()], list(plain.model.parameters()))  # type: ignore[attr-defined]
    distributed.save(tmp_path / "saved", loop.model, loop.opt)
    again = sharded()
    distributed.load(tmp_path / "saved", again.model, again.opt)
    assert again.train(4, (1,))[2:] == loop.train(4, (1,))[2:]


def test_ddp_over_nccl(one_rank: None) -> None:
    plain, loop = Loop(), Loop()
    ddp = nn.parallel.DistributedDataParallel(loop.model, device_ids=[0])
    distributed.attach(loop.opt, ddp)
    loop.call = ddp
    assert plain.train(6, (3,)) == loop.train(6, (3,))
    same(list(loop.model.parameters()), list(plain.model.parameters()))


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from fp16opt.integrations.transformers import Trainer

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    rows = (torch.randint(0, 64, (64, 1)) + torch.arange(16)) % 64
    data = [{"input_ids": row, "labels": row} for row in rows]

    def trainer(steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"),
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            report_to=[],
            save_steps=10,
            logging_steps=1,
            seed=1,
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).half()
        return Trainer(model, arguments, train_dataset=data, master_weights={"dynamic": True})

    whole = trainer(20)
    whole.train()
    losses = [one["loss"] for one in whole.state.log_history if "loss" in one]
    assert losses[-1] < losses[0] - 0.5
    resumed = trainer(20)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10"))
    same(list(resumed.model.parameters()), list(whole.model.parameters()))


def test_an_accelerate_loop() -> None:
    pytest.importorskip("accelerate")
    from fp16opt.integrations.accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, master_weights={"dynamic": True})
    torch.manual_seed(0)
    model: Any = nn.Linear(16, 1).half()
    inner: Any = AdamW(model.parameters(), lr=3e-2)
    data: Any = torch.utils.data.DataLoader(torch.randn(512, 16), batch_size=32)  # type: ignore[arg-type]
    model, inner, data = accelerator.prepare(model, inner, data)
    losses = []
    for _ in range(4):
        for inputs in data:
            with accelerator.accumulate(model):
                loss = (model(inputs.half()).squeeze(1).float() - inputs.sum(dim=1)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                inner.step()
                inner.zero_grad()
            losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from fp16opt.integrations.lightning import MasterWeightsPrecision

    class Lines(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = nn.Linear(16, 1), []

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss = (self.net(batch).squeeze(1).float() - batch.float().sum(dim=1)).square().mean()
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=3e-2)

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        plugins=MasterWeightsPrecision("16-true"),
        accelerator="gpu",
        devices=1,
        max_epochs=4,
        logger=False,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    module = Lines()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(256, 16), batch_size=32))  # type: ignore[arg-type]
    assert module.losses[-1] < module.losses[0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apex_amp(level: str) -> None:
    from fp16opt import amp

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(CARD)
    inner: Any = SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, inner = amp.initialize(model, inner, opt_level=level, verbosity=0)
    images, labels = torch.randn(32, 64, device=CARD), torch.randint(0, 10, (32,), device=CARD)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(images).float(), labels)
        inner.zero_grad()
        with amp.scale_loss(loss, inner) as scaled:
            scaled.backward()
        nn.utils.clip_grad_norm_(amp.master_params(inner), 1.0)
        inner.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
