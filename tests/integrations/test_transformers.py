"""transformers' Trainer, TRL and PEFT: what it logs, who makes the optimizer, language models, refusals."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from fp16opt import Loaded, MixedPrecisionOptimizer, load_foreign
from fp16opt.integrations.transformers import MasterWeightsMixin
from integrations import by_transformers
from integrations.by_transformers import InOrder, Ordered, OrderedStock, Regressor, arguments, logs, rows
from integrations.byhand import (
    BF16,
    HALF,
    STEPS,
    ByHand,
    adamw,
    assert_same_run,
    batches,
    by_hand,
    every_dtype,
    scale_of,
    scaled,
)

pytestmark = pytest.mark.filterwarnings("error:.*lr_scheduler.*")


def test_the_log_has_rates_skips_and_the_scale(tmp_path: Path) -> None:
    data = batches(2 * STEPS)
    got = by_transformers.train(HALF, data, tmp_path, 2, 0.5, **scaled(HALF, fused_step=False))
    hand = by_hand(HALF, data, micro=2, clip=0.5, schedule=by_transformers.schedule, waits=True)
    entries = logs(got.made)
    after = [*hand.rates[1:], hand.optimizer.param_groups[0]["lr"]]  # older ones log the next step's
    assert [entry["learning_rate"] for entry in entries] in (hand.rates, after)
    assert [entry["skipped_steps"] for entry in entries] == list(itertools.accumulate(hand.skipped))
    assert entries[-1]["loss_scale"] == hand.scale.value


@pytest.mark.parametrize(("dtype", "dynamic"), [(HALF, True), (BF16, False)], ids=str)
def test_without_options_it_goes_by_the_models_dtype(dtype: torch.dtype, dynamic: bool, tmp_path: Path) -> None:
    model = Regressor(dtype)
    trainer = Ordered(model, arguments(tmp_path, max_steps=1), train_dataset=rows(batches(4)))
    trainer.train()
    assert trainer.optimizer.optimizer.scaler.dynamic is dynamic
    assert set(trainer.optimizer.optimizer.params.names) == {name for name, _ in model.named_parameters()}
    trainer.train()  # a second time, with the optimizer that is there
    assert isinstance(trainer.optimizer.optimizer, MixedPrecisionOptimizer)


def test_an_fp32_model_is_left_alone(tmp_path: Path) -> None:
    trainer = Ordered(Regressor(torch.float32), arguments(tmp_path, max_steps=2), train_dataset=rows(batches(8)))
    trainer.train()
    assert not isinstance(trainer.optimizer.optimizer, MixedPrecisionOptimizer)
    assert "loss_scale" not in trainer.state.log_history[0]


def test_options_are_a_dict(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="master_weights: expected a dict of"):
        Ordered(Regressor(HALF), arguments(tmp_path), master_weights=True)


def test_a_folder_of_the_trainers_own_is_read_for_any_loop(tmp_path: Path) -> None:
    """As the stock Trainer writes it after an FP32 run: masters and moments are its weights and state."""
    told = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    stock = OrderedStock(Regressor(torch.float32), arguments(tmp_path, **told), train_dataset=rows(batches(8)))
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
def test_adapters_are_trained_as_by_hand(dtype: torch.dtype, adapters: str, tmp_path: Path) -> None:
    """To the bit, with a scale that overflows at first, a clip, two micro-batches and a scheduler."""
    kind = torch.float32 if adapters == "in FP32" else dtype
    data = texts(2 * STEPS * 4)
    model = speaking(dtype, kind)
    args = arguments(tmp_path, max_grad_norm=4.0)
    optimizers = (adamw([param for param in model.parameters() if param.requires_grad]), None)
    options = scaled(dtype, fused_step=False)
    trainer = Ordered(model, args, train_dataset=data, optimizers=optimizers, master_weights=options)
    trainer.train()
    twin = speaking(dtype, kind)
    assert {param.dtype for param in twin.parameters() if param.requires_grad} == {kind}
    hand = ByHand(twin, scale=scale_of(dtype), clip=4.0, schedule=by_transformers.schedule, waits=True)
    loader = torch.utils.data.DataLoader(data, 4)
    parts = [functools.partial(loss_of_batch, twin, batch) for batch in loader]
    for start in range(0, len(parts), 2):
        hand.step(parts[start : start + 2])
    assert_same_run(model.losses, model, trainer.optimizer.optimizer, hand)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    assert max(hand.norms) > 4.0
    assert sum(hand.skipped) >= 2 * (dtype == HALF)


def loss_of_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)["loss"]


# -- gradients that are released ---------------------------------------------------------------------------------------


def test_released_gradients_train_and_log(tmp_path: Path) -> None:
    """Parameters were stepped by the time of the log, so there is no norm. A clip is refused by its argument."""
    told: dict[str, Any] = {"dtype": HALF, "data": batches(2 * STEPS), "folder": tmp_path, "loss_scale": 64.0}
    plain, released = (by_transformers.train(**told, gradient_release=release) for release in (False, True))
    assert [entry["loss"] for entry in logs(released.made)] == [entry["loss"] for entry in logs(plain.made)]
    assert not any("grad_norm" in entry for entry in logs(released.made))
    with pytest.raises(ValueError, match=r"max_grad_norm=0.5: with gradient_release=True .*max_grad_norm=0"):
        by_transformers.train(**told, clip=0.5, gradient_release=True)


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


def tuned(name: str, folder: Path, learning_rate: float, told: dict[str, Any], **given: Any) -> Any:
    """What a trainer of TRL's with the mixin has made of a tiny model: its masters were trained, and the model is they.

    Args:
        told: More of its settings; None: without that.
        **given: More of its arguments, and what ``master_weights`` says.
    """
    trl = pytest.importorskip("trl")
    kind = type("Tuning", (MasterWeightsMixin, getattr(trl, f"{name}Trainer")), {})
    settings = {key: value for key, value in {**TOLD, **told}.items() if value is not None}
    args = getattr(trl, f"{name}Config")(output_dir=str(folder), learning_rate=learning_rate, **settings)
    model = tiny(HALF)
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    trainer = kind(model, args=args, processing_class=word_tokenizer(WORDS), **given)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, MixedPrecisionOptimizer)
    assert trainer.state.log_history[0]["loss_scale"] > 1.0
    assert {param.dtype for param in model.parameters()} == {HALF}
    for param, master in zip(optimizer.model_params(), optimizer.master_params(), strict=True):
        assert torch.equal(param, master.to(HALF))
    changed = [name for name, param in model.named_parameters() if not torch.equal(param, before[name])]
    assert len(changed) > len(before) / 2
    return trainer


def of_rows(rows: list[dict[str, str]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def test_sft_trainer_with_the_mixin(tmp_path: Path) -> None:
    data = of_rows([{"text": " ".join(WORDS[i : i + 8])} for i in range(20)])
    tuned("SFT", tmp_path, 1e-2, {}, train_dataset=data, master_weights={"dynamic": True})


def test_dpo_trainer_with_the_mixin(tmp_path: Path) -> None:
    """The model that it refers to stays as it is."""
    data = of_rows([{"prompt": word, "chosen": " w27", "rejected": " w28"} for word in WORDS[:20]])
    given = {"ref_model": tiny(HALF), "train_dataset": data, "master_weights": {"dynamic": True}}
    trainer = tuned("DPO", tmp_path, 1e-2, {}, **given)
    assert all(map(torch.equal, given["ref_model"].parameters(), tiny(HALF).parameters()))
    assert trainer.state.log_history[3]["loss"] < trainer.state.log_history[0]["loss"]


def test_grpo_trainer_with_the_mixin_gives_deltas_to_a_sampler(tmp_path: Path) -> None:
    """After each step the sampler's weights are the trained ones to the bit."""
    sampler, steps = tiny(HALF), []

    class SendDeltas(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            delta = kwargs["optimizer"].optimizer.take_delta(kwargs["model"])
            delta.apply_(sampler)
            state_dicts = zip(kwargs["model"].state_dict().values(), sampler.state_dict().values(), strict=True)
            steps.append((delta.sequence, all(torch.equal(ours, theirs) for ours, theirs in state_dicts)))

    told = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 4, "max_length": None}
    tuned(
        "GRPO",
        tmp_path,
        1e-3,
        told,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        train_dataset=of_rows([{"prompt": word} for word in WORDS[:20]]),
        master_weights={"track_changes": True},
        callbacks=[SendDeltas()],
    )
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
        ({"grad_accumulation": "fp32"}, "DynamicLossScaler("),
        ({"loss_scale": 8.0}, "StaticLossScaler(scale=8.0)"),
        ({"dynamic": False}, "StaticLossScaler(scale=1.0)"),
    ],
)
def test_options_leave_the_scale_dynamic_unless_they_say_otherwise(given: Any, wanted: Any, tmp_path: Path) -> None:
    trainer = Ordered(
        Regressor(HALF), arguments(tmp_path, max_steps=1), train_dataset=rows(batches(4)), master_weights=given
    )
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
        self.lr_scheduler = by_transformers.schedule(self.optimizer)

    def create_optimizer(self, model: Any = None) -> Any:  # newer versions call this and the next
        self.optimizer = adamw(self.model.parameters())
        return self.optimizer


@pytest.mark.parametrize("kind", [MixedIn, OverOurs, MakesBoth], ids=lambda kind: kind.__name__)
@every_dtype
def test_a_trainer_that_makes_its_own_optimizer(kind: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """FP16 weights get a dynamic scale there too, and train as by hand."""
    model = Regressor(dtype)
    options = None if kind is OverOurs else scaled(dtype, fused_step=False)
    trainer = kind(model, arguments(tmp_path), train_dataset=rows(batches(2 * STEPS)), master_weights=options)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert optimizer.scaler.dynamic is (dtype == HALF)
    assert optimizer.params.names == [name for name, _ in model.named_parameters()]
    if options is None:
        return
    hand = by_hand(dtype, batches(2 * STEPS), micro=2, clip=0.5, schedule=by_transformers.schedule, waits=True)
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
    trainer = scaling(Ordered(Regressor(HALF), arguments(tmp_path, max_steps=2), train_dataset=rows(batches(8))))
    with pytest.raises(ValueError, match=r"fp16=True, in TrainingArguments or .*would scale the loss a second time"):
        trainer.train()


def test_an_fp32_model_under_the_trainers_own_fp16(tmp_path: Path) -> None:
    """Is trained as by the stock Trainer: its scaler is Accelerate's, and skips."""
    runs = []
    for kind in (Ordered, OrderedStock):
        model = Regressor(torch.float32)
        trainer = scaling(kind(model, arguments(tmp_path, max_steps=4), train_dataset=rows(batches(16))))
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
