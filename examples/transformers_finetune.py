"""Fine-tune a tiny language model with transformers' Trainer, in 16-bit weights with and without FP32 masters.

    python examples/transformers_finetune.py             # under two minutes on two CPU cores
    python examples/transformers_finetune.py --short     # a few steps of each

A Llama of two layers is made from its configuration and trained in FP32, character by character, on the first half of
the language reference that comes with Python; nothing is downloaded. Then it is fine-tuned on the second half at a
small learning rate, each time from the same weights:

- ``fp32``: the stock Trainer.
- ``bf16``: the stock Trainer on BF16 weights. AdamW steps them, and most of its updates are rounded away.
- ``bf16 + masters``, ``fp16 + masters``: ``fp16opt.integrations.transformers.Trainer`` on BF16 and on FP16 weights.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import common
import torch
import transformers
from torch import Tensor

from fp16opt.integrations.transformers import Trainer

WAYS: dict[str, tuple[Any, torch.dtype]] = {
    "fp32": (transformers.Trainer, torch.float32),
    "bf16": (transformers.Trainer, torch.bfloat16),
    "bf16 + masters": (Trainer, torch.bfloat16),
    "fp16 + masters": (Trainer, torch.float16),
}
CONTEXT, BATCH_SIZE = 64, 8
FIRST_RATE, SECOND_RATE = 3e-3, 2e-5


def load_text() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], int]:
    """(rows of the first half, rows of the second half, the number of characters that there are)."""
    text = "\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    number = {character: place for place, character in enumerate(characters)}
    ids = torch.tensor([number[character] for character in text])
    rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    made = [{"input_ids": row, "labels": row} for row in rows]
    return made[: len(made) // 2], made[len(made) // 2 :], len(characters)


def make_model(characters: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=characters,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def train(kind: Any, model: Any, data: Any, evaluated: Any, steps: int, rate: float, output: Path) -> tuple[Any, float]:
    """(the Trainer after it, its loss on ``evaluated``)."""
    args = transformers.TrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=64,
        learning_rate=rate,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = kind(model, args, train_dataset=data, eval_dataset=evaluated)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer, trainer.evaluate()["eval_loss"]


def row_of(name: str, start: Any, data: Any, evaluated: Any, steps: int, output: Path) -> list[str]:
    """Fine-tune in one way; the row of the table."""
    kind, dtype = WAYS[name]
    model = copy.deepcopy(start).to(dtype)
    before = [param.detach().clone() for param in model.parameters()]
    began = time.perf_counter()
    trainer, loss = train(kind, model, data, evaluated, steps, SECOND_RATE, output)
    seconds = time.perf_counter() - began
    pairs = list(zip(before, model.parameters(), strict=True))
    moved = sum(int((old != new).sum()) for old, new in pairs) / sum(old.numel() for old, _ in pairs)
    optimizer = trainer.optimizer.optimizer
    skipped = f"{optimizer.skipped_steps}" if hasattr(optimizer, "skipped_steps") else "-"
    return [name, f"{loss:.4f}", f"{100 * moved:.0f} %", skipped, f"{seconds:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of the first training and of each one after it")
    parser.add_argument("--short", action="store_true", help="four steps each")
    parser.add_argument("--output", type=Path, default=Path("transformers-finetune-output"))
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    given.output.mkdir(parents=True, exist_ok=True)
    steps = 4 if given.short else given.steps
    first, second, characters = load_text()
    evaluated, second = second[:: len(second) // 256], [row for i, row in enumerate(second) if i % (len(second) // 256)]
    trainer, loss = train(
        transformers.Trainer, make_model(characters), first, evaluated, steps, FIRST_RATE, given.output
    )
    header = ["weights", "evaluation loss", "weights that moved", "skipped steps", "seconds"]
    rows = [["before fine-tuning", f"{loss:.4f}", "-", "-", "-"]]
    rows += [row_of(name, trainer.model, second, evaluated, steps, given.output) for name in WAYS]
    table = common.format_table(header, rows)
    (given.output / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
