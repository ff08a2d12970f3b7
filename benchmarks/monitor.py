"""What looking at a run costs, and what the two loss scale policies do: Monitor, diagnose, check, policy="headroom".

    python benchmarks/monitor.py [--quick] [--json PATH] [--rounds N] [--threads N] [--part NAME ...] [--runs FOLDER]

Parts: "cost" (a step with a Monitor that does not sample it, held against the upper quartile of none against none; one
that samples it; what sampling adds, against ``torch._foreach_norm`` of gradients, masters and updates), "diagnose"
(against a forward and backward of the small GPT of examples/language_model.py), "check" (against as many steps of that
GPT as it runs, in FP32 and in BF16 with masters, without and with ``train_step``), "scales" (skips until calibrated
from 2**24, skips in all and the share of underflowing gradients under both policies: the digits and the small GPT,
three seeds). ``--runs FOLDER`` trains the small GPT in five ways instead, each watched, and leaves records, pages and
pictures there: those of docs/reading-a-run.
Contenders take turns in one run; ratios are taken within a round; the figure is their median.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp16opt import DynamicLossScaler, GradScaler, MixedPrecisionOptimizer, Monitor, check, diagnose
from fp16opt.tools.reports import page, pictures, reading

sys.path.insert(0, str(common.ROOT / "examples"))
import language_model as gpt
import train_digits as digits

PARTS = ("cost", "diagnose", "check", "scales")
LR, SCALE = 2.0**-10, 2.0**10


class Stepping:
    """A step of AdamW on many parameters, watched or not.

    Args:
        every: of the Monitor; 0 for none; 1 samples each step.
    """

    def __init__(self, name: str, shapes: list[tuple[int, ...]], every: int) -> None:
        self.name = name
        draw = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape, generator=draw).half()) for shape in shapes]
        self.grads = [torch.randn(shape, generator=draw).mul_(2.0**-6).half() for shape in shapes]
        self.opt = MixedPrecisionOptimizer(torch.optim.AdamW(self.params, lr=LR), loss_scale=SCALE)
        self.monitor = Monitor(self.opt, every=every, to=lambda record: None) if every else None
        self.prepare()
        self.run()  # where a Monitor samples seldom this was its sample

    def prepare(self) -> None:
        """Gradients are there, as a backward leaves them."""
        self.opt.zero_grad()
        self.opt.scale_loss(torch.zeros(()))
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def run(self) -> None:
        """Look and step."""
        self.opt.step()


class Norms:
    """``torch._foreach_norm`` of gradients, masters and updates."""

    name = "three norms"

    def __init__(self, like: Stepping) -> None:
        self.lists = [like.grads, list(like.opt.master_params()), [p.detach().float() for p in like.params]]

    def prepare(self) -> None:
        """Nothing."""

    def run(self) -> None:
        """One pass over each."""
        for tensors in self.lists:
            torch._foreach_norm(tensors)


class Work:
    """Whatever a function does."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self.run = name, work

    def prepare(self) -> None:
        """Nothing."""


def cost(arguments: argparse.Namespace) -> tuple[list[common.Row], list[common.Timing]]:
    width, layers = (64, 2) if arguments.quick else (512, 4)
    shapes = layers * [(3 * width, width), (width,), (4 * width, width), (width, width)]
    watched = {"none": 0, "seldom": 10**6, "always": 1, "none again": 0}
    plain, seldom, always, again = (Stepping(name, shapes, every) for name, every in watched.items())
    timings = common.alternate([plain, seldom, always, again, Norms(plain)], arguments.rounds)
    if [p.detach().tolist() for p in plain.params] != [p.detach().tolist() for p in always.params]:
        sys.exit("watching changed the weights")
    none, unsampled, sampled, norms = (timings[name] for name in ("none", "seldom", "always", "three norms"))
    adds = [(a - b) / c for a, b, c in zip(sampled.seconds, none.seconds, norms.seconds, strict=True)]
    spent = statistics.median(sampled.processor) - statistics.median(none.processor)
    noise = common.ratio_row("a step without / without, for its noise", None, timings["none again"], none)
    rows = [
        noise,
        common.ratio_row(
            "a step with a Monitor, not sampled / without",
            None if arguments.quick else max(1.0, noise.high),
            unsampled,
            none,
        ),
        common.Row(
            "what a sample adds / three _foreach_norm",
            None if arguments.quick else 1.5,
            statistics.median(adds),
            *common.quartiles(adds),
            spent / statistics.median(norms.processor),
        ),
        common.ratio_row("a sampled step / without", None, sampled, none),
    ]
    return rows, list(timings.values())


def diagnosing(arguments: argparse.Namespace) -> list[common.Row]:
    text = gpt.load_text(torch.device("cpu"))
    run = gpt.make_run("fp16", len(text.characters), 1, torch.device("cpu"))
    batch = gpt.draw_batch(text.train, seed=0)
    rows = []

    def loss() -> Tensor:
        return gpt.compute_loss(run.model, batch)

    for scale in (2.0**10, 2.0**24):
        scaler = GradScaler("cpu", init_scale=scale, max_scale=2.0**24)
        works = [
            Work("forward and backward", lambda: (loss() * 128.0).backward()),
            Work("diagnose", lambda scaler=scaler: diagnose(run.model, loss, scaler)),
        ]
        timings = common.alternate(works, 2 if arguments.quick else arguments.rounds)
        words = f"diagnose at scale {scale:g} / forward and backward"
        bound = None if arguments.quick else 5.0
        rows.append(common.ratio_row(words, bound, timings["diagnose"], timings["forward and backward"]))
    return rows


def checking(arguments: argparse.Namespace) -> list[common.Row]:
    text = gpt.load_text(torch.device("cpu"))
    batch = gpt.draw_batch(text.train, seed=0)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = gpt.GPT(len(text.characters)).to(dtype)
        adamw = torch.optim.AdamW(model.parameters(), lr=gpt.LEARNING_RATE)
        opt = MixedPrecisionOptimizer(adamw, named_parameters=model.named_parameters())

        def loss(model: nn.Module = model) -> Tensor:
            return gpt.compute_loss(model, batch)

        def train_step(opt: MixedPrecisionOptimizer = opt, loss: Callable[[], Tensor] = loss) -> None:
            opt.zero_grad()
            opt.backward(loss())
            opt.step()

        train_step()
        for rounds, options in ((0, {}), (3, {"train_step": train_step})):
            found = check(model, loss, opt, **options)
            if not found.ok:
                sys.exit(str(found))
            works = [
                Work("steps", lambda step=train_step, n=found.steps + rounds: [step() for _ in range(n)]),
                Work("check", lambda m=model, f=loss, o=opt, more=options: check(m, f, o, **more)),
            ]
            timings = common.alternate(works, 2 if arguments.quick else arguments.rounds)
            words = f"check{' with train_step' * bool(rounds)} / its {found.steps + rounds} steps, {str(dtype)[6:]}"
            bound = None if arguments.quick else 1.5
            rows.append(common.ratio_row(words, bound, timings["check"], timings["steps"]))
    return rows


def train_digits(scaler: DynamicLossScaler, seed: int, steps: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    data = digits.load_data(torch.device("cpu"))
    model = digits.make_model(seed).half()
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), scaler=scaler)
    draw = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        rows = torch.randint(len(data.train_y), (digits.BATCH_SIZE,), generator=draw)
        return nn.functional.cross_entropy(model(data.train_x[rows].half()).float(), data.train_y[rows])

    return watched(opt, loss, steps)


def train_gpt(scaler: DynamicLossScaler, seed: int, steps: int) -> list[dict[str, Any]]:
    text = gpt.load_text(torch.device("cpu"))
    torch.manual_seed(seed)
    model = gpt.GPT(len(text.characters)).half()
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=gpt.LEARNING_RATE), scaler=scaler)
    numbers = iter(range(10**6 * seed, 10**6 * (seed + 1)))
    return watched(opt, lambda: gpt.compute_loss(model, gpt.draw_batch(text.train, next(numbers))), steps)


def watched(opt: MixedPrecisionOptimizer, loss: Callable[[], Tensor], steps: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    with Monitor(opt, every=10, to=records.append):
        for _ in range(steps):
            opt.zero_grad()
            opt.backward(loss())
            opt.clip_master_grads(1.0)
            opt.step()
    return records


def judged(records: list[dict[str, Any]]) -> tuple[int, int, float, float]:
    """(skips until calibrated, skips in all, share of underflowing elements over the samples, last scale)."""
    steps = [record for record in records if record["kind"] == "step"]
    skipped = [record["skipped"] for record in steps]
    until = skipped.index(False) if False in skipped else len(skipped)
    sizes = {name: kind["elements"] for name, kind in records[0]["rows"].items()}
    shares = []
    for record in records:
        if record["kind"] == "sample" and not record["skipped"]:
            lost = [sizes[name] * (row["underflow"] or 0.0) for name, row in record["rows"].items()]
            shares.append(sum(lost) / sum(sizes.values()))
    return until, sum(skipped), statistics.mean(shares) if shares else float("nan"), steps[-1]["loss_scale"]


def scales(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    seeds, steps = ((0,), 30) if arguments.quick else ((0, 1, 2), arguments.steps)
    names = ("task", "policy", "from", "seed", "until", "skips", "underflow", "last")
    print("\n" + "  ".join(f"{name:>9}" for name in names))
    for task, train in (("digits", train_digits), ("gpt", train_gpt)):
        for start in (2.0**24, 2.0**16):
            for policy in ("headroom", "doubling"):
                for seed in seeds:
                    records = train(DynamicLossScaler(start, policy=policy), seed, steps)
                    until, skips, share, last = judged(records)
                    found.append(dict(zip(names, (task, policy, start, seed, until, skips, share, last), strict=True)))
                    print("  ".join(f"{_short(value):>9}" for value in found[-1].values()), flush=True)
    return found


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def make_runs(folder: Path, steps: int) -> None:
    """The five runs of the docs page."""
    text = gpt.load_text(torch.device("cpu"))
    ways: dict[str, dict[str, Any]] = {
        "good": {"scaler": DynamicLossScaler(2.0**20)},
        "too-high": {"loss_scale": 2.0**18},
        "too-low": {"loss_scale": 2.0**-3},
        "no-masters": {"scaler": DynamicLossScaler(2.0**20), "master_weights": "none", "fused_step": False},
        "nan-batch": {"scaler": DynamicLossScaler(2.0**20)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in ways.items():
        torch.manual_seed(0)
        model = gpt.GPT(len(text.characters)).half()
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        opt = MixedPrecisionOptimizer(sgd, named_parameters=model.named_parameters(), **options)
        path = folder / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        with Monitor(opt, every=5, to=path):
            for number in range(steps):
                opt.zero_grad()
                loss = gpt.compute_loss(model, gpt.draw_batch(text.train, number))
                if name == "nan-batch" and number == 2 * steps // 3:
                    loss = loss * float("nan")
                opt.backward(loss)
                opt.clip_master_grads(1.0)
                opt.step()
        run = reading.load(path)
        (folder / f"{name}.html").write_text(page.page(run, name), encoding="utf-8")
        (folder / f"{name}.png").write_bytes(pictures.together(run))
        print(f"-- {name}: loss {loss.item():.3f}\n{page.in_words(run)}", flush=True)


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
        parser.add_argument("--steps", type=int, default=200, help="of each training of 'scales' and --runs")
        parser.add_argument("--runs", type=Path, metavar="FOLDER", help="train the runs of the docs page instead")

    arguments = common.parse_arguments(__doc__ or "", add, rounds=41)
    common.print_versions()
    if arguments.runs is not None:
        make_runs(arguments.runs, arguments.steps)
        return
    rows: list[common.Row] = []
    timings: list[common.Timing] = []
    if "cost" in arguments.part:
        more, timings = cost(arguments)
        rows += more
    if "diagnose" in arguments.part:
        rows += diagnosing(arguments)
    if "check" in arguments.part:
        rows += checking(arguments)
    found = scales(arguments) if "scales" in arguments.part else []
    if rows:
        common.print_rows(rows)
    common.write_json(arguments.json, rows=rows, timings=timings, scales=found)


if __name__ == "__main__":
    main()
