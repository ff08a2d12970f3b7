"""transformers' Trainer, TRL and PEFT: 24 steps are those of a loop by hand; a tiny language model trains in FP16."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.checks import assert_same
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from fp16opt import Loaded, MixedPrecisionOptimizer, load_foreign
from fp16opt.integrations.transformers import MasterWeightsMixin, Trainer
from integrations.byhand import (
    BF16,
    HALF,
    STEPS,
    ByHand,
    Regressor,
    adamw,
    assert_same_run,
    batches,
    by_hand,
    rows,
    scale_of,
    scaled,
)

DTYPES = {"fp16": HALF, "bf16": BF16}
every_dtype = pytest.mark.parametrize("precision", DTYPES)
pytestmark = pytest.mark.filterwarnings("error:.*lr_scheduler.*")


class InOrder:
    """Batches in the order in which they are given."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            self.train_dataset, self.args.per_device_train_batch_size, collate_fn=self.data_collator
        )


class Ordered(InOrder, Trainer):
    pass


class OrderedStock(InOrder, transformers.Trainer):
    pass


def arguments(folder: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 2.0**-6,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "seed": 0,
    }
    return transformers.TrainingArguments(**{**defaults, **options})


def masters(precision: str, **options: Any) -> dict[str, Any]:
    return scaled(DTYPES[precision], **{"fused_step": False, **options})


def linear(optimizer: Any) -> Any:
    return transformers.get_scheduler("linear", optimizer, 0, STEPS)


def run(precision: str, folder: Path, resume: Any = None, options: Any = None, **told: Any) -> Any:
    model = Regressor(DTYPES[precision])
    trainer = Ordered(
        model,
        arguments(folder, **told),
        train_dataset=rows(2 * STEPS),
        optimizers=(adamw(model.parameters()), None),
        master_weights=masters(precision) if options is None else options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@every_dtype
@pytest.mark.parametrize("clip", [0.5, 0.0], ids=["clip", "no clip"])
def test_the_trainers_loop_is_the_loop_by_hand(precision: str, clip: float, tmp_path: Path) -> None:
    """Two micro-batches, a scheduler that waits for skips, the norm of true gradients in the log."""
    trainer = run(precision, tmp_path, max_grad_norm=clip)
    told = {"micro": 2, "clip": clip or None, "schedule": linear, "waits": True}
    hand = by_hand(DTYPES[precision], batches(2 * STEPS), **told)
    assert_same_run(trainer.model.losses, trainer.model, trainer.optimizer.optimizer, hand)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == STEPS
    if clip or "grad_norm" in logs[0]:  # older ones log none where nothing is clipped
        norms = [entry["grad_norm"] for entry, skipped in zip(logs, hand.skipped, strict=True) if not skipped]
        assert norms == hand.norms
    after = [*hand.rates[1:], hand.optimizer.param_groups[0]["lr"]]  # older ones log the next step's
    assert [entry["learning_rate"] for entry in logs] in (hand.rates, after)
    assert [entry["skipped_steps"] for entry in logs][-1] == sum(hand.skipped)
    assert logs[-1]["loss_scale"] == hand.scale.value
    if precision == "fp16":
        assert 2 <= sum(hand.skipped) < STEPS / 2
    if clip:
        assert max(hand.norms) > clip


@every_dtype
@pytest.mark.parametrize("fused", [False, "auto"], ids=["torch's step", "one pass"])
def test_resumed_in_the_middle_it_ends_in_the_same_bits(precision: str, fused: Any, tmp_path: Path) -> None:
    told = {"save_strategy": "steps", "save_steps": STEPS // 2}
    whole = run(precision, tmp_path / "whole", options=masters(precision, fused_step=fused), **told)
    checkpoint = tmp_path / "whole" / f"checkpoint-{STEPS // 2}"
    rest = run(precision, tmp_path / "rest", str(checkpoint), masters(precision, fused_step=fused), **told)
    assert rest.model.losses == whole.model.losses[STEPS:]
    assert_same(rest.optimizer.state_dict(), whole.optimizer.state_dict(), "optimizer")
    assert_same(dict(rest.model.state_dict()), dict(whole.model.state_dict()), "model")


@pytest.mark.parametrize(("dtype", "dynamic"), [(HALF, True), (BF16, False)], ids=str)
def test_without_options_it_goes_by_the_models_dtype(dtype: torch.dtype, dynamic: bool, tmp_path: Path) -> None:
    model = Regressor(dtype)
    trainer = Ordered(model, arguments(tmp_path, max_steps=1), train_dataset=rows(4))
    trainer.train()
    assert trainer.optimizer.optimizer.scaler.dynamic is dynamic
    assert set(trainer.optimizer.optimizer.params.names) == {name for name, _ in model.named_parameters()}
    trainer.train()  # a second time, with the optimizer that is there
    assert isinstance(trainer.optimizer.optimizer, MixedPrecisionOptimizer)


def test_an_fp32_model_is_left_alone(tmp_path: Path) -> None:
    trainer = Ordered(Regressor(torch.float32), arguments(tmp_path, max_steps=2), train_dataset=rows(8))
    trainer.train()
    assert not isinstance(trainer.optimizer.optimizer, MixedPrecisionOptimizer)
    assert "loss_scale" not in trainer.state.log_history[0]


def test_options_are_a_dict(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="master_weights: expected a dict of"):
        Ordered(Regressor(HALF), arguments(tmp_path), master_weights=True)


def test_a_folder_of_the_trainers_own_is_read_for_any_loop(tmp_path: Path) -> None:
    """As the stock Trainer writes it after an FP32 run: masters and moments are its weights and state."""
    told = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    stock = OrderedStock(Regressor(torch.float32), arguments(tmp_path, **told), train_dataset=rows(8))
    stock.train()
    model = Regressor(HALF)
    opt = MixedPrecisionOptimizer(type(stock.optimizer.optimizer)(grouped(stock, model)), dynamic=True)
    assert load_foreign(tmp_path / "checkpoint-4", model, opt) == Loaded("trainer", 6, 6, None)
    theirs = [param for group in stock.optimizer.param_groups for param in group["params"]]
    for master, want in zip(opt.master_params(), theirs, strict=True):
        assert torch.equal(master, want)
        assert torch.equal(opt.state[master]["exp_avg"], stock.optimizer.state[want]["exp_avg"])
    assert opt.param_groups[0]["weight_decay"] == stock.optimizer.param_groups[0]["weight_decay"]


def grouped(stock: Any, model: nn.Module) -> list[dict[str, Any]]:
    """The parameters of ``model`` in groups as the Trainer makes them."""
    names = {id(param): name for name, param in stock.model.named_parameters()}
    mine = dict(model.named_parameters())
    return [{"params": [mine[names[id(p)]] for p in group["params"]]} for group in stock.optimizer.param_groups]


# -- language models ---------------------------------------------------------------------------------------------------


def tiny(dtype: torch.dtype) -> Any:
    """A language model from its configuration, without dropout."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def texts(count: int) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    starts = torch.randint(0, 32, (count, 1), generator=rng)
    ids = (starts + 3 * torch.arange(12)) % 32
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def trained_params(model: nn.Module, trainer: Any) -> list[Tensor]:
    return list(trainer.optimizer.optimizer.model_params())


class Speaking(nn.Module):
    """A language model whose forward returns its loss, in FP32 and without settings of a Trainer's."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.losses: list[float] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids=input_ids).logits.float()
        loss = 64.0 * nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.losses.append(loss.item())
        return {"loss": loss, "logits": logits}


def speaking(dtype: torch.dtype, adapters: torch.dtype) -> Speaking:
    """A frozen base of ``dtype`` with adapters that don't start at zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    base = tiny(dtype)
    torch.manual_seed(1)
    return Speaking(peft.get_peft_model(base, config, autocast_adapter_dtype=adapters == torch.float32))


@pytest.mark.parametrize("adapters", ["in FP32", "in 16 bits"])
@every_dtype
def test_adapters_are_trained_as_by_hand(precision: str, adapters: str, tmp_path: Path) -> None:
    """To the bit, with a scale that overflows at first, a clip, two micro-batches and a scheduler."""
    dtype = DTYPES[precision]
    kind = torch.float32 if adapters == "in FP32" else dtype
    data = texts(2 * STEPS * 4)
    model = speaking(dtype, kind)
    args = arguments(tmp_path, max_grad_norm=4.0)
    optimizers = (adamw([param for param in model.parameters() if param.requires_grad]), None)
    trainer = Ordered(model, args, train_dataset=data, optimizers=optimizers, master_weights=masters(precision))
    trainer.train()
    twin = speaking(dtype, kind)
    assert {param.dtype for param in twin.parameters() if param.requires_grad} == {kind}
    hand = ByHand(twin, scale=scale_of(dtype), clip=4.0, schedule=linear, waits=True)
    loader = torch.utils.data.DataLoader(data, 4)
    parts = [functools.partial(loss_of_batch, twin, batch) for batch in loader]
    for start in range(0, len(parts), 2):
        hand.step(parts[start : start + 2])
    assert_same_run(model.losses, model, trainer.optimizer.optimizer, hand)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    assert max(hand.norms) > 4.0
    assert sum(hand.skipped) >= 2 * (precision == "fp16")


def loss_of_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)["loss"]


# -- gradients that are released ---------------------------------------------------------------------------------------


def test_released_gradients_train_and_log(tmp_path: Path) -> None:
    """Parameters were stepped by the time of the log, so there is no norm."""
    logs = {}
    for release in (False, True):
        trainer = run(
            "fp16",
            tmp_path,
            options={"loss_scale": 64.0, "gradient_release": release},
            gradient_accumulation_steps=1,
            max_grad_norm=0.0,
        )
        logs[release] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logs[True]] == [entry["loss"] for entry in logs[False]]
    assert not any("grad_norm" in entry for entry in logs[True])


def test_a_clip_of_released_gradients_is_refused_by_its_argument(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm=0.5: with gradient_release=True .*max_grad_norm=0"):
        run("fp16", tmp_path, options={"loss_scale": 64.0, "gradient_release": True})


# -- TRL ---------------------------------------------------------------------------------------------------------------

TOLD = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "max_length": 12,
    "bf16": False,
    "gradient_checkpointing": False,
}
WORDS = [f"w{number}" for number in range(29)]


def check_tuned(trainer: Any, model: nn.Module, before: dict[str, Tensor]) -> None:
    """Its masters were trained, and the model is they."""
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, MixedPrecisionOptimizer)
    assert trainer.state.log_history[0]["loss_scale"] > 1.0
    assert {param.dtype for param in model.parameters()} == {HALF}
    for param, master in zip(trained_params(model, trainer), optimizer.master_params(), strict=True):
        assert torch.equal(param, master.to(HALF))
    changed = [name for name, param in model.named_parameters() if not torch.equal(param, before[name])]
    assert len(changed) > len(before) / 2


def test_sft_trainer_with_the_mixin(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    import datasets

    class Tuning(MasterWeightsMixin, trl.SFTTrainer):
        pass

    args = trl.SFTConfig(output_dir=str(tmp_path), learning_rate=1e-2, **TOLD)
    data = datasets.Dataset.from_dict({"text": [" ".join(WORDS[i : i + 8]) for i in range(20)]})
    model = tiny(HALF)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    given = {"processing_class": word_tokenizer(WORDS), "master_weights": {"dynamic": True}}
    trainer = Tuning(model, args, train_dataset=data, **given)
    trainer.train()
    check_tuned(trainer, model, before)


def test_dpo_trainer_with_the_mixin(tmp_path: Path) -> None:
    """The model that it refers to stays as it is."""
    trl = pytest.importorskip("trl")
    import datasets

    class Tuning(MasterWeightsMixin, trl.DPOTrainer):
        pass

    args = trl.DPOConfig(output_dir=str(tmp_path), learning_rate=1e-2, **TOLD)
    rows = [{"prompt": word, "chosen": " w27", "rejected": " w28"} for word in WORDS[:20]]
    model, reference = tiny(HALF), tiny(HALF)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    trainer = Tuning(
        model,
        reference,
        args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=word_tokenizer(WORDS),
        master_weights={"dynamic": True},
    )
    trainer.train()
    check_tuned(trainer, model, before)
    assert all(torch.equal(param, before[name]) for name, param in reference.named_parameters())
    assert trainer.state.log_history[3]["loss"] < trainer.state.log_history[0]["loss"]


def test_grpo_trainer_with_the_mixin_gives_deltas_to_a_sampler(tmp_path: Path) -> None:
    """After each step the sampler's weights are the trained ones to the bit."""
    trl = pytest.importorskip("trl")
    import datasets

    class Tuning(MasterWeightsMixin, trl.GRPOTrainer):
        pass

    model = tiny(HALF)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    sampler, steps = copy.deepcopy(model), []

    class SendDeltas(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            delta = kwargs["optimizer"].optimizer.take_delta(kwargs["model"])
            delta.apply_(sampler)
            state_dicts = zip(kwargs["model"].state_dict().values(), sampler.state_dict().values(), strict=True)
            steps.append((delta.sequence, all(torch.equal(ours, theirs) for ours, theirs in state_dicts)))

    told = {**TOLD, "per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 4}
    del told["max_length"]
    trainer = Tuning(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=trl.GRPOConfig(output_dir=str(tmp_path), learning_rate=1e-3, **told),
        train_dataset=datasets.Dataset.from_list([{"prompt": word} for word in WORDS[:20]]),
        processing_class=word_tokenizer(WORDS),
        master_weights={"track_changes": True},
        callbacks=[SendDeltas()],
    )
    trainer.train()
    check_tuned(trainer, model, before)
    assert steps == [(1, True), (2, True), (3, True), (4, True)]


def word_tokenizer(words: list[str]) -> Any:
    """A tokenizer of whole words, as nothing can be downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", "<pad>", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<pad>",
        model_input_names=["input_ids", "attention_mask"],  # by default also what this model doesn't take
    )


# -- who makes the optimizer, and which precision is asked for ---------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, "DynamicLossScaler("),
        ({"grad_accumulation": "fp32"}, "DynamicLossScaler("),
        ({"loss_scale": 8.0}, "StaticLossScaler(scale=8.0)"),
        ({"dynamic": False}, "StaticLossScaler(scale=1.0)"),
    ],
)
def test_options_leave_the_scale_dynamic_unless_they_say_otherwise(given: Any, wanted: Any, tmp_path: Path) -> None:
    trainer = Ordered(Regressor(HALF), arguments(tmp_path, max_steps=1), train_dataset=rows(4), master_weights=given)
    trainer.train()
    assert wanted in repr(trainer.optimizer.optimizer)


class MakesItsOwn(InOrder, transformers.Trainer):
    """A usual habit: a Trainer whose method, of older versions' signature, makes the optimizer."""

    def create_optimizer(self) -> Any:  # type: ignore[override]
        if self.optimizer is None:
            self.optimizer = adamw(self.model.parameters())
        return self.optimizer


class MixedIn(MasterWeightsMixin, MakesItsOwn):
    """With the mixin before it."""


class OverOurs(Ordered):
    """The same method, in a subclass of our Trainer."""

    create_optimizer = MakesItsOwn.create_optimizer


class MakesBoth(Ordered):
    """With a method that makes the scheduler, too."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.optimizer = adamw(self.model.parameters())
        self.lr_scheduler = linear(self.optimizer)

    def create_optimizer(self, model: Any = None) -> Any:  # newer versions call this and the next
        self.optimizer = adamw(self.model.parameters())
        return self.optimizer


@pytest.mark.parametrize("kind", [MixedIn, OverOurs, MakesBoth], ids=lambda kind: kind.__name__)
@every_dtype
def test_a_trainer_that_makes_its_own_optimizer(kind: Any, precision: str, tmp_path: Path) -> None:
    """FP16 weights get a dynamic scale there too, and train as by hand."""
    model = Regressor(DTYPES[precision])
    options = None if kind is OverOurs else masters(precision)
    trainer = kind(model, arguments(tmp_path), train_dataset=rows(2 * STEPS), master_weights=options)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert optimizer.scaler.dynamic is (precision == "fp16")
    assert optimizer.params.names == [name for name, _ in model.named_parameters()]
    if options is None:
        return
    hand = by_hand(DTYPES[precision], batches(2 * STEPS), micro=2, clip=0.5, schedule=linear, waits=True)
    assert_same_run(model.losses, model, optimizer, hand)


def test_the_mixin_stands_before_the_trainer() -> None:
    with pytest.raises(TypeError, match=r"Wrong: MasterWeightsMixin stands behind Trainer, .*\(MasterWeightsMixin, T"):

        class Wrong(transformers.Trainer, MasterWeightsMixin):
            pass


def scaling(trainer: Any) -> Any:
    """The trainer as TrainingArguments(fp16=True) makes it where there is a GPU."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer.accelerator.native_amp = True
    return trainer


def test_fp16_of_the_arguments_is_refused_for_16_bit_weights_by_its_name(tmp_path: Path) -> None:
    trainer = scaling(Ordered(Regressor(HALF), arguments(tmp_path, max_steps=2), train_dataset=rows(8)))
    with pytest.raises(ValueError, match=r"fp16=True, in TrainingArguments or .*would scale the loss a second time"):
        trainer.train()


def test_an_fp32_model_under_the_trainers_own_fp16(tmp_path: Path) -> None:
    """Is trained as by the stock Trainer: its scaler is Accelerate's, and skips."""
    runs = []
    for kind in (Ordered, OrderedStock):
        model = Regressor(torch.float32)
        trainer = scaling(kind(model, arguments(tmp_path, max_steps=4), train_dataset=rows(16)))
        trainer.train()
        assert not isinstance(trainer.optimizer.optimizer, MixedPrecisionOptimizer)
        assert trainer.accelerator.scaler.get_scale() == 64.0
        runs.append((model.losses, [param.detach().clone() for param in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


def test_deepspeed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate
    from accelerate.utils import DistributedType

    kind = property(lambda self: DistributedType.DEEPSPEED)
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", kind)
    with pytest.raises(ValueError, match=r"DEEPSPEED keeps masters and a loss scale of its own\. Use transformers\.Tr"):
        Ordered(Regressor(HALF), arguments(tmp_path))
