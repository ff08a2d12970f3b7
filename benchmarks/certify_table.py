"""Which optimizers pass which checks of fp16opt.certify: torch.optim and other packages, as a Markdown table."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator

import torch

from fp16opt import Report, certify
from fp16opt.tools.certify import targets

TORCH = [
    *["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam"],
    *["RMSprop", "Rprop", "SGD", "SGD momentum=0.9", "SparseAdam"],
    *["Adagrad fused=True", "Adam fused=True", "AdamW fused=True", "SGD fused=True", "SGD momentum=0.9 fused=True"],
]
OTHERS = {
    "lion_pytorch": ["Lion"],
    "schedulefree": ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"],
    "optimi": ["Adan", "Lion", "Ranger", "StableAdamW"],
    "pytorch_optimizer": ["AdaBelief", "AdaFactor", "AdEMAMix", "DAdaptAdam", "Lamb", "Shampoo", "SOAP"],
    "prodigyopt": ["Prodigy"],
}
WORDS = {True: "yes", False: "**no**", None: "-"}


def rows() -> Iterator[tuple[str, Report, float]]:
    """(name, report, seconds) of every optimizer that is installed."""
    chosen = [("torch.optim", line) for line in TORCH]
    chosen += [(module, line) for module, lines in OTHERS.items() for line in lines]
    for module, line in chosen:
        name, *options = line.split()
        try:
            importlib.import_module(module)
        except ImportError:
            print(f"{module} is not installed")
            continue
        began = time.perf_counter()
        report = certify(targets.load(f"{module}:{name}", options))
        yield f"{module}: {' '.join([name, *options])}", report, time.perf_counter() - began


def main() -> None:
    print(f"torch {torch.__version__}, CUDA device: {torch.cuda.is_available()}\n")
    slowest = 0.0
    for number, (name, report, seconds) in enumerate(rows()):
        slowest = max(slowest, seconds)
        if number == 0:
            print(f"| | ok | {' | '.join(report.checks)} |")
            print(f"|---|---|{'---|' * len(report.checks)}")
        print(f"| {name} | {WORDS[report.ok]} | {' | '.join(WORDS[c.passed] for c in report.checks.values())} |")
    print(f"\nThe slowest took {slowest:.1f} s.")


if __name__ == "__main__":
    main()
