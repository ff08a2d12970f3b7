"""How much Python is a step? Calls of the package's functions, files they lie in, and what one more parameter adds.

    python benchmarks/walk.py [--quick] [--json PATH] [--check] [--show WORDS]

The walk of one step is ``backward``, ``clip_master_grads(1.0)`` and ``step`` of three parameters with AdamW, in every
mode, after three steps that made whatever lasts. ``sys.setprofile`` counts every call of Python code that lies in the
package (a generator that goes on is a call too, as the interpreter counts). What one more parameter adds is the
difference between thirteen parameters and three, divided by ten. Nothing is timed: the counts are the same on every
machine, and in this script the same in two steps in a row, or it exits. ``--check`` exits with 1 where a bound is
missed; ``--show "fused_step=auto, full"`` lists the calls of that mode.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import fp16opt
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

CALLS, FILES, FURTHER = 150, 14, 1.0
PACKAGE = Path(fp16opt.__file__).resolve().parent
SCALE, MAX_NORM, LR = 2.0**10, 1.0, 2.0**-4
HALF, SINGLE = torch.float16, torch.float32
NAME = "co_qualname" if sys.version_info >= (3, 11) else "co_name"
Calls = Counter[tuple[str, str]]


class Wrapped:
    """A few parameters, AdamW, the wrapper, and the walk of one step.

    Args:
        count: of parameters, four elements each.
        dtypes: theirs, in turns.
        closure: the step gets a closure, which runs ``backward`` and clips.
        options: of the wrapper.
    """

    def __init__(
        self, count: int, dtypes: tuple[torch.dtype, ...] = (HALF,), closure: bool = False, **options: Any
    ) -> None:
        self.params = [torch.nn.Parameter(torch.ones(4, dtype=dtypes[i % len(dtypes)])) for i in range(count)]
        self.opt = MixedPrecisionOptimizer(torch.optim.AdamW(self.params, lr=LR), **options)
        self.closure = self._evaluate if closure else None
        self.loss = torch.zeros(())

    def prepare(self) -> None:
        """Not counted."""
        self.opt.zero_grad()
        self.loss = torch.stack([param.float().sum() for param in self.params]).sum()

    def walk(self) -> None:
        """Counted."""
        if self.closure is None:
            self._evaluate()
        self.opt.step(self.closure)

    def _evaluate(self) -> Tensor:
        self.opt.backward(self.loss)
        self.opt.clip_master_grads(MAX_NORM)
        return self.loss


class Driven(Wrapped):
    """The wrapper under a GradScaler, as trainers call it, with torch's clip of the masters or of the model."""

    def __init__(self, count: int, scaler: torch.amp.GradScaler, of_masters: bool = True, **options: Any) -> None:
        super().__init__(count, **options)
        self.scaler, self.of_masters = scaler, of_masters

    def walk(self) -> None:
        """Counted."""
        self.scaler.scale(self.loss).backward()
        self.scaler.unscale_(self.opt)
        torch.nn.utils.clip_grad_norm_(list(self.opt.master_params()) if self.of_masters else self.params, MAX_NORM)
        self.scaler.step(self.opt)
        self.scaler.update()


class ScalerAlone:
    """``fp16opt.GradScaler`` and its own clip on FP32 parameters, with torch's AdamW and no wrapper."""

    def __init__(self, count: int) -> None:
        self.params = [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]
        self.opt = torch.optim.AdamW(self.params, lr=LR)
        self.scaler = fp16opt.GradScaler("cpu", init_scale=SCALE)
        self.loss = torch.zeros(())

    def prepare(self) -> None:
        """Not counted."""
        self.opt.zero_grad()
        self.loss = torch.stack([param.sum() for param in self.params]).sum()

    def walk(self) -> None:
        """Counted."""
        self.scaler.scale(self.loss).backward()
        self.scaler.clip_grad_norm_(self.opt, MAX_NORM)
        self.scaler.step(self.opt)
        self.scaler.update()


Maker = Callable[[int], Any]


def dynamic() -> DynamicLossScaler:
    return DynamicLossScaler(init_scale=SCALE)


def modes() -> dict[str, Maker]:
    """Every mode by name, as a function from the number of parameters to what walks."""
    found: dict[str, Maker] = {}
    product = itertools.product((False, "auto"), ("full", "split", "none"), ("model", "fp32"))
    for fused_step, masters, sums in product:
        name = f"fused_step={fused_step}, {masters} masters" + (", FP32 sums" if sums == "fp32" else "")
        options = {"fused_step": fused_step, "master_weights": masters, "grad_accumulation": sums}
        found[name] = lambda n, o=options: Wrapped(n, scaler=dynamic(), **o)
    for fused_step in (False, "auto"):
        start, f = f"fused_step={fused_step}, ", {"fused_step": fused_step}
        found |= {
            start + "FP32 parameters": lambda n, f=f: Wrapped(n, (SINGLE,), scaler=dynamic(), **f),
            start + "FP16 and FP32": lambda n, f=f: Wrapped(n, (HALF, SINGLE), scaler=dynamic(), **f),
            start + "static scale": lambda n, f=f: Wrapped(n, loss_scale=SCALE, **f),
            start + "closure": lambda n, f=f: Wrapped(n, closure=True, scaler=dynamic(), **f),
            start + "torch's GradScaler": lambda n, f=f: Driven(n, torch.amp.GradScaler("cpu", init_scale=SCALE), **f),
            start + "our GradScaler": lambda n, f=f: Driven(n, fp16opt.GradScaler("cpu", init_scale=SCALE), **f),
        }
        for masters in ("full", "split"):
            crossed, o = f"{start}{masters} masters, FP16 and FP32, ", {**f, "master_weights": masters}
            both: dict[str, Any] = {"dtypes": (HALF, SINGLE), **o}
            found |= {
                crossed + "closure": lambda n, b=both: Wrapped(n, closure=True, scaler=dynamic(), **b),
                crossed + "torch's GradScaler": lambda n, b=both: Driven(
                    n, torch.amp.GradScaler("cpu", init_scale=SCALE), False, **b
                ),
                crossed + "our GradScaler": lambda n, b=both: Driven(
                    n, fp16opt.GradScaler("cpu", init_scale=SCALE), False, **b
                ),
            }
    return {**found, "our GradScaler alone, FP32 parameters": ScalerAlone}


def crossings() -> dict[str, Maker]:
    """Whatever goes together of masters, sums, dtypes, state and driver: of these only the longest walks are shown."""
    found: dict[str, Maker] = {}
    drivers: dict[str, type[torch.amp.GradScaler]] = {
        "torch's GradScaler": torch.amp.GradScaler,
        "our GradScaler": fp16opt.GradScaler,
    }
    for fused_step, masters, sums, dtypes, state, how in itertools.product(
        (False, "auto"),
        ("full", "split", "split24", "none"),
        ("model", "fp32"),
        ((HALF,), (HALF, SINGLE), (HALF, torch.bfloat16, SINGLE)),
        ("fp32", "8bit"),
        ("one", "static", "dynamic", "closure", *drivers),
    ):
        if how in drivers and (masters == "none" or sums == "fp32"):
            continue  # GradScalers refuse 16-bit gradients without masters, and sum none up in FP32
        options = {
            "fused_step": fused_step,
            "master_weights": masters,
            "grad_accumulation": sums,
            "optimizer_state": state,
        }
        name = ", ".join(map(str, (*options.values(), *dtypes, how)))

        def make(n: int, dtypes: Any = dtypes, options: Any = options, how: str = how) -> Wrapped:
            if how in drivers:
                return Driven(n, drivers[how]("cpu", init_scale=SCALE), False, dtypes=dtypes, **options)
            if how in ("one", "static"):
                return Wrapped(n, dtypes, loss_scale=1.0 if how == "one" else SCALE, **options)
            return Wrapped(n, dtypes, how == "closure", scaler=dynamic(), **options)

        try:
            make(1)
        except ValueError:  # what does not go together is refused by name
            continue
        found[name] = make
    return found


def longest(found: dict[str, Maker]) -> list[Walk]:
    """Of all modes the one with most calls, with most files, and with most calls a further parameter."""
    walks = [measure(name, make) for name, make in found.items()]
    most = [max(walks, key=lambda walk: getattr(walk, of)) for of in ("calls", "files", "further")]
    words = ("most calls", "most files", "most a further parameter")
    return [
        Walk(
            f"{word} of {len(walks)} crossings: {walk.mode.replace('torch.', '')}", walk.calls, walk.files, walk.further
        )
        for word, walk in zip(words, most, strict=True)
    ]


def calls_of(work: Callable[[], object]) -> Calls:
    """How often each function of the package was called during ``work``, by (file, name)."""
    found: Calls = Counter()

    def look(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(inside):
            found[file.removeprefix(inside), getattr(frame.f_code, NAME)] += 1

    inside = f"{PACKAGE}/"
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def steady(name: str, make: Maker, count: int) -> Calls:
    """The calls of one step after three others. Exits where it does not train, or the step after it takes more."""
    training = make(count)
    found = []
    for _ in range(5):
        training.prepare()
        before = [param.detach().clone() for param in training.params]
        found.append(calls_of(training.walk))
        if any(torch.equal(a, b) for a, b in zip(before, training.params, strict=True)):
            sys.exit(f"{name}: a step left a parameter as it was")
    if found[3] != found[4]:
        sys.exit(f"{name}: two steps in a row take other calls: {found[3] - found[4]}, {found[4] - found[3]}")
    return found[3]


@dataclass
class Walk:
    """What was counted in one mode.

    Attributes:
        calls, files: of the package, with three parameters.
        further: calls that one more parameter adds.
    """

    mode: str
    calls: int
    files: int
    further: float

    @property
    def met(self) -> bool:
        return self.calls <= CALLS and self.files <= FILES and self.further <= FURTHER


def measure(name: str, make: Maker) -> Walk:
    three, thirteen = steady(name, make, 3), steady(name, make, 13)
    return Walk(name, three.total(), len({file for file, _ in three}), (thirteen.total() - three.total()) / 10)


def show(name: str, make: Maker) -> None:
    """The calls of one mode, file by file."""
    three, thirteen = steady(name, make, 3), steady(name, make, 13)
    print(f"\n{name}: calls with 3 parameters, with 13, function")
    for file in sorted({file for file, _ in three}):
        print(f"  {file}: {sum(n for (where, _), n in three.items() if where == file)}")
        for (where, function), number in three.most_common():
            if where == file:
                print(f"    {number:>4} {thirteen[where, function]:>4}  {function}")


def print_walks(walks: list[Walk], bounds: bool) -> None:
    width = max(len(walk.mode) for walk in walks)
    print(f"\n{'walk of one step':<{width}}  {'calls':>5}  {'files':>5}  {'a further parameter':>19}  verdict")
    for walk in walks:
        verdict = "-" if not bounds else "met" if walk.met else "MISSED"
        print(f"{walk.mode:<{width}}  {walk.calls:>5}  {walk.files:>5}  {walk.further:>19.1f}  {verdict}")
    if bounds:
        print(f"{'bound, at most':<{width}}  {CALLS:>5}  {FILES:>5}  {FURTHER:>19.1f}")


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    parser.add_argument("--show", metavar="WORDS", help="list the calls of the modes whose names contain this")


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "", more_options)
    common.print_versions()
    chosen = modes()
    if arguments.show is not None:
        chosen = {name: make for name, make in chosen.items() if arguments.show in name}
        if not chosen:
            sys.exit(f"--show: no mode's name contains {arguments.show!r}; the names: {', '.join(modes())}")
    elif arguments.quick:
        chosen = dict(itertools.islice(chosen.items(), 0, None, 5))
    walks = [measure(name, make) for name, make in chosen.items()]
    if arguments.show is not None:
        for name, make in chosen.items():
            show(name, make)
    elif not arguments.quick:
        walks += longest(crossings())
    print_walks(walks, bounds=arguments.check or not arguments.quick)
    common.write_json(
        arguments.json,
        walks=[{**asdict(walk), "verdict": "met" if walk.met else "MISSED"} for walk in walks],
        bounds={"calls": CALLS, "files": FILES, "further": FURTHER},
    )
    if arguments.check and not all(walk.met for walk in walks):
        sys.exit(1)


if __name__ == "__main__":
    main()
