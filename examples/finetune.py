"""Fine-tune all weights of a causal language model of transformers in 16 bits, in the memory that there is.

    python examples/finetune.py              # a tiny model, text of Python's own: under a minute on two CPU cores
    python examples/finetune.py --model Qwen/Qwen2.5-3B --data chats.jsonl --budget 24GiB
    python examples/finetune.py --resume     # goes on after Ctrl-C, bit for bit, with the same other arguments

``fp16opt.plan`` chooses the first mode that fits --budget and --ram: full masters, split ones, state on the host, 8-bit
state, released gradients. A line of --data is a JSON object with "text", or "prompt" and "completion", or "messages"
for the tokenizer's chat template; of the latter two the completion, or the last message, is learned. Texts are joined
and cut into rows of --context tokens. Which rows a step takes follows from its number.

Ctrl-C, or SIGTERM, ends the step that runs, saves a checkpoint and leaves; a second one leaves at once. --output gets
the checkpoint, a picture, and the weights at the end, or with ``--save deltas`` what changed between checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import common
import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import fp16opt
from fp16opt.kernels.host_memory import available
from fp16opt.tools.plan import count, size

try:
    import transformers
except ImportError:
    raise SystemExit("examples/finetune.py needs transformers: pip install -r requirements/trainers.txt") from None

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

BYTES, END = 257, 256  # the tiny model reads bytes, and a number that ends a text
NOT_LEARNED = -100


# -- model and data ----------------------------------------------------------------------------------------------------


def load_model(name: str | None, dtype: torch.dtype) -> Any:
    """The model with its weights, or with shapes alone where torch's default device is "meta"."""
    if name is None:
        torch.manual_seed(0)
        small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(
            vocab_size=BYTES,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=END,
            tie_word_embeddings=True,
            **small,
        )
        return transformers.LlamaForCausalLM(config).to(dtype)
    if torch.get_default_device().type == "meta":
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(name))
    return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)


def read_texts(path: Path | None, tokenizer: Any) -> list[tuple[str, str]]:
    """(what is read alone, what is learned) of each line; without a file Python's language reference."""
    if path is None:
        return [("", topics[name]) for name in sorted(topics)]
    found = []
    for number, line in enumerate(filter(str.strip, path.read_text(encoding="utf-8").splitlines()), 1):
        one = json.loads(line)
        if "messages" in one and tokenizer is not None:
            chat = one["messages"]
            prompt = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(chat, tokenize=False)
            found.append((prompt, whole.removeprefix(prompt)))
        elif "text" in one or "completion" in one:
            found.append((one.get("prompt", ""), one.get("text") or one["completion"]))
        else:
            raise SystemExit(f'{path}, line {number}: expected "text", "prompt" and "completion", or "messages".')
    return found


def make_rows(texts: list[tuple[str, str]], tokenizer: Any, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and what is to be learned of them, [rows, context]: texts behind one another, cut."""
    tokens: list[int] = []
    labels: list[int] = []
    end = END if tokenizer is None else tokenizer.eos_token_id
    for prompt, learned in texts:
        for text, is_learned in ((prompt, False), (learned, True)):
            ids = list(text.encode()) if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)
            ids = [*ids, end] if is_learned and end is not None else ids
            tokens += ids
            labels += ids if is_learned else [NOT_LEARNED] * len(ids)
    rows = len(tokens) // context
    if rows == 0:
        raise SystemExit(f"--data has {len(tokens)} tokens, less than a row of --context {context}.")
    cut = rows * context
    return torch.tensor(tokens[:cut]).view(rows, context), torch.tensor(labels[:cut]).view(rows, context)


def rows_of(step: int, rows: int, batch: int, seed: int) -> list[int]:
    """The rows that a step takes: each pass over the data has an order of its own."""
    places = range(step * batch, (step + 1) * batch)
    orders = {
        turn: torch.randperm(rows, generator=torch.Generator().manual_seed(seed + turn))
        for turn in {place // rows for place in places}
    }
    return [int(orders[place // rows][place % rows]) for place in places]


# -- what fits ---------------------------------------------------------------------------------------------------------


def choose_mode(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of ``MixedPrecisionOptimizer``, by the plan; says them in a line."""
    with torch.device("meta"):
        model = load_model(args.model, dtype)
    on_card = args.device.startswith("cuda")
    ram = args.ram if args.ram is not None else (available() or 0) if on_card else 0
    budget = args.budget
    if budget is None:
        budget = torch.cuda.mem_get_info(args.device)[1] if on_card else (available() or 0)
    try:
        sums = 4 * model.num_parameters() if args.accumulate > 1 else 0
        tracked = args.save == "deltas"
        modes = fp16opt.plan(model, budget, ram=ram if on_card else 0, other=sums, track_changes=tracked)
    except ValueError as error:
        raise SystemExit(f"--{error}") from None
    chosen = modes.chosen
    if chosen is None:
        raise SystemExit(str(modes))
    told = ", ".join(f"{name}={value!r}" for name, value in chosen.arguments().items()) or "full masters, FP32 state"
    host = f", {size(chosen.host_total())} on the host" if chosen.offload else ""
    print(
        f"{type(model).__name__}, {count(chosen.params)} parameters in {str(dtype)[6:]}: {told}; "
        f"{size(chosen.memory_total())} of {size(modes.budget)}{host}"
    )
    return chosen.arguments()


# -- training ----------------------------------------------------------------------------------------------------------


class Run:
    """One training: what it has come to, and where that is saved.

    Args:
        args: of the command line.
        device: where it trains.
        settings: those that a checkpoint must agree with.
        saved: the checkpoint that it goes on from.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        settings: dict[str, Any],
        saved: dict[str, Any] | None,
    ) -> None:
        self.args, self.device, self.settings, self.path = args, device, settings, args.output / "checkpoint.pt"
        dtype = choose_dtype(args)
        self.mode = choose_mode(args, dtype) if saved is None else saved["mode"]
        self.tokenizer = None if args.model is None else transformers.AutoTokenizer.from_pretrained(args.model)
        self.rows, self.labels = make_rows(read_texts(args.data, self.tokenizer), self.tokenizer, args.context)
        self.batch = args.batch * args.accumulate
        self.steps = args.steps or max(1, len(self.rows) // self.batch)
        self.model = load_model(args.model, dtype)
        if saved is None and args.save == "deltas" and args.model is None:
            self.model.save_pretrained(args.output / "start")
        if saved is not None:
            self.model.load_state_dict(saved["model"])  # before it is wrapped: deltas go on from here
        self.model.to(self.device).train()
        self.model.config.use_cache = False
        if args.recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.is_released = self.mode.get("gradient_release", False)
        if self.is_released and args.accumulate > 1:
            raise SystemExit("Only released gradients fit, which take one backward a step. Use --accumulate 1.")
        is_dynamic = dtype == torch.float16 and not self.is_released
        scale = {"dynamic": True} if is_dynamic else {"loss_scale": 1024.0 if dtype == torch.float16 else 1.0}
        if args.accumulate > 1:
            scale["grad_accumulation"] = "fp32"
        decayed = [param for param in self.model.parameters() if param.ndim > 1]
        others = [param for param in self.model.parameters() if param.ndim <= 1]
        adamw = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )
        self.optimizer = fp16opt.MixedPrecisionOptimizer(
            adamw,
            named_parameters=self.model.named_parameters(),
            track_changes=args.save == "deltas",
            **scale,
            **self.mode,
        )
        self.schedule = LambdaLR(self.optimizer, self.share_of_rate)
        self.step, self.history = 0, {"loss": [], "norm": [], "scale": []}
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.schedule.load_state_dict(saved["schedule"])
            self.step, self.history = saved["step"], saved["history"]
            print(f"On from step {self.step}, in the mode that the checkpoint has: {self.mode or 'the defaults'}")
            torch.set_rng_state(saved["random"][0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(saved["random"][1], self.device)
            for path in args.output.glob("delta-*.safetensors"):  # of steps that no checkpoint has
                if int(path.stem[6:]) > self.step:
                    path.unlink()

    def share_of_rate(self, step: int) -> float:
        """Of the learning rate: up in the first tenth of the steps, then down to a tenth along a cosine."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return (step + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm) / max(1, self.steps - warm)))

    def train_step(self) -> int:
        """One step on the next rows. Returns how many tokens it has read."""
        self.optimizer.zero_grad()
        chosen = torch.tensor(rows_of(self.step, len(self.rows), self.batch, self.args.seed))
        learned = (self.labels[chosen, 1:] != NOT_LEARNED).sum().clamp(min=1).to(self.device)
        total = torch.zeros((), device=self.device)
        for part in chosen.split(self.args.batch):
            tokens, labels = self.rows[part].to(self.device), self.labels[part, 1:].to(self.device)
            logits = self.model(input_ids=tokens).logits[:, :-1].float().flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=NOT_LEARNED) / learned
            del logits
            self.optimizer.backward(loss)
            total += loss.detach()
        norm = math.nan if self.is_released else float(self.optimizer.clip_master_grads(self.args.clip))
        self.history["scale"].append(self.optimizer.loss_scale)
        self.optimizer.step()
        if not self.optimizer.step_was_skipped:
            self.schedule.step()
        self.step += 1
        self.history["loss"].append(total.item())
        self.history["norm"].append(norm)
        return chosen.numel() * self.args.context

    def save(self) -> None:
        """Write the checkpoint, beside the last one until it is complete; before it what changed since then."""
        if self.args.save == "deltas":
            self.optimizer.take_delta(self.model).save(self.args.output / f"delta-{self.step:06}.safetensors")
        random = [torch.get_rng_state()]
        if self.device.type == "cuda":
            random.append(torch.cuda.get_rng_state(self.device))
        checkpoint = {
            "settings": self.settings,
            "mode": self.mode,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(compact=True),
            "schedule": self.schedule.state_dict(),
            "random": random,
            "step": self.step,
            "history": self.history,
        }
        common.save_checkpoint(self.path, checkpoint)

    def train(self) -> int | None:
        """Step up to the end. Returns the number of the signal that has ended it before."""
        received: list[int] = []

        def stop(number: int, _: Any) -> None:
            received.append(number)
            signal.signal(number, signal.SIG_DFL)

        former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        began, read = time.perf_counter(), 0
        with tqdm(total=self.steps, initial=self.step, unit="step") as bar:
            while self.step < self.steps and not received:
                read += self.train_step()
                speed = read / (time.perf_counter() - began)
                norm = "-" if self.is_released else f"{self.history['norm'][-1]:.2f}"
                shown = {"loss": f"{self.history['loss'][-1]:.3f}", "norm": norm}
                shown |= {
                    "scale": f"{self.optimizer.loss_scale:g}",
                    "tok/s": f"{speed:,.0f}",
                    "peak": size(self.peak()),
                }
                bar.set_postfix(shown, refresh=False)
                bar.update()
                if self.step % self.args.save_every == 0 or self.step == self.steps or received:
                    self.save()
        for number, handler in former.items():
            signal.signal(number, handler)
        return received[0] if received and self.step < self.steps else None

    def peak(self) -> int:
        """The most bytes that torch has had on the card, or the process on the host."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if resource is None:
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def draw(self, path: Path) -> None:
        """Loss above, norm and scale below."""
        figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
        steps = torch.arange(1, self.step + 1)
        losses = torch.tensor(self.history["loss"])
        window = max(1, self.step // 20)
        above.plot(steps, losses, color="#00798c", alpha=0.3, linewidth=1, label="each step")
        above.plot(
            steps[window - 1 :], losses.unfold(0, window, 1).mean(-1), color="#00798c", label=f"mean of {window}"
        )
        above.set(ylabel="loss, nats a token", title=f"{type(self.model).__name__}, {str(self.model.dtype)[6:]}")
        above.legend(frameon=False)
        norms = torch.tensor(self.history["norm"])
        if norms.isfinite().any():
            below.plot(
                steps, norms.where(norms.isfinite(), math.nan), color="#444444", linewidth=1, label="gradient norm"
            )
            below.axhline(self.args.clip, color="#444444", linewidth=0.8, linestyle=":", label="clipped from here on")
            below.set(yscale="log", ylabel="gradient norm")
            below.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            for set_formatter in (below.yaxis.set_major_formatter, below.yaxis.set_minor_formatter):
                set_formatter("{x:g}")
        else:
            below.set_yticks([])
        below.set(xlabel="step")
        scales = below.twinx()
        scales.step(steps, self.history["scale"], where="mid", color="#d1495b", label="loss scale")
        scales.set_yscale("log", base=2)
        scales.set_ylabel("loss scale", color="#d1495b")
        skipped = steps[norms.isinf() | losses.isfinite().logical_not()]
        for number, step in enumerate(skipped.tolist()):
            below.axvline(step, color="#edae49", linewidth=2, zorder=0, label=None if number else "skipped")
        lines = [*below.get_legend_handles_labels()[0], *scales.get_legend_handles_labels()[0]]
        labels = [line.get_label() for line in lines]
        below.legend(lines, labels, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        for axes in (above, below):
            axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def choose_dtype(args: argparse.Namespace) -> torch.dtype:
    """That of --dtype; BF16 by itself on cards that multiply it."""
    if args.dtype == "auto":
        has = args.device.startswith("cuda") and torch.cuda.get_device_capability(args.device) >= (8, 0)
        return torch.bfloat16 if has else torch.float16
    return torch.bfloat16 if args.dtype == "bf16" else torch.float16


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a causal language model; without it a tiny one is made")
    parser.add_argument("--data", type=Path, help="JSON lines; without it Python's language reference")
    parser.add_argument("--budget", help="the card's memory, as in 24GiB; without it all of it")
    parser.add_argument("--ram", help="the host's for state, as in 32GiB, 0GiB for none; without it what is free")
    parser.add_argument("--dtype", choices=("auto", "fp16", "bf16"), default="auto", help="of the weights")
    parser.add_argument("--steps", type=int, help="without it one pass over --data, or 160 of the tiny model")
    parser.add_argument("--batch", type=int, default=8, help="rows of one backward")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards of one step, added up in FP32")
    parser.add_argument("--context", type=int, help="tokens of a row; without it 1024, or 64 of the tiny model")
    parser.add_argument("--lr", type=float, help="without it 1e-5, or 2e-3 of the tiny model")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of all gradients")
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows")
    parser.add_argument("--recompute", action="store_true", help="activations in backward, which takes less memory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", choices=("weights", "deltas"), default="weights", help="what a sampler gets")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    parser.add_argument("--output", type=Path, default=Path("finetune-output"), help="folder for results")
    parser.add_argument("--short", action="store_true", help="a few steps, to see that everything works")
    args = parser.parse_args()
    if args.data is not None and not args.data.is_file():
        parser.error(f"--data: there is no file {args.data}")
    is_tiny = args.model is None
    args.context = args.context or (64 if is_tiny else 1024)
    args.lr = args.lr or (2e-3 if is_tiny else 1e-5)
    if args.short:
        args.steps = 12
    elif args.steps is None and args.data is None:
        args.steps = 160
    return args


def main() -> None:
    """Train, draw, hand out."""
    args = parse_arguments()
    device = common.choose_device(args.device)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    args.output.mkdir(parents=True, exist_ok=True)
    fixed = ("model", "steps", "batch", "accumulate", "context", "lr", "clip", "seed", "device", "save")
    settings = {name: getattr(args, name) for name in fixed}
    settings |= {"data": None if args.data is None else str(args.data), "dtype": str(choose_dtype(args))}
    path = args.output / "checkpoint.pt"
    saved = common.load_checkpoint(path, settings) if args.resume and path.exists() else None
    with logging_redirect_tqdm():
        run = Run(args, device, settings, saved)
        del saved
        stopped_by = run.train()
    run.draw(args.output / "finetune.png")
    if stopped_by is not None:
        print(f"Stopped after step {run.step} of {run.steps}, and saved. The same line with --resume goes on.")
        raise SystemExit(128 + stopped_by)
    if args.save == "deltas":
        found = sorted(args.output.glob("delta-*.safetensors"))
        taken = size(sum(path.stat().st_size for path in found))
        print(f"{len(found)} deltas, {taken}; in their order: fp16opt.WeightDelta.load(path).apply_(model)")
    else:
        run.model.save_pretrained(args.output / "model")
        if run.tokenizer is not None:
            run.tokenizer.save_pretrained(args.output / "model")
    print(
        f"loss {run.history['loss'][-1]:.3f}, {run.optimizer.skipped_steps} steps skipped; {args.output}/ has all of it"
    )


if __name__ == "__main__":
    main()
