"""What does it cost to know which 16-bit weights a step changed?

    python benchmarks/deltas.py [--quick] [--json PATH] [--rounds N] [--threads N]

Steps of AdamW with a clip over 50 million parameters in float16, with ``track_changes=True`` and without: in one pass,
and the wrapped optimizer's own. Then ``take_delta`` where one weight in a hundred has changed, against what a user does
in torch: ``clone`` all weights before, and compare, ``nonzero`` and gather after. Before anything is timed, deltas of
three steps are applied to a copy, whose bits must be the model's.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import sys

import torch
from torch import Tensor, nn

from fp16opt import MixedPrecisionOptimizer, digests

LR = 1e-6  # as reinforcement learning uses


def model_of(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(width, width).mul_(0.02).half() for _ in range(layers)])


def equal(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


class Step:
    """A clip and a step, with gradients that are there."""

    def __init__(self, name: str, model: nn.Module, grads: list[Tensor], tracks: bool, fused: bool) -> None:
        self.name, self.model, self.grads = name, model, grads
        adamw = torch.optim.AdamW(model.parameters(), lr=LR)
        self.opt = MixedPrecisionOptimizer(adamw, track_changes=tracks, fused_step="auto" if fused else False)

    def prepare(self) -> None:
        """Gradients, and nothing marked."""
        self.opt.zero_grad()
        for param, grad in zip(self.model.parameters(), self.grads, strict=True):
            param.grad = grad
        if self.opt.config.track_changes:
            self.opt.take_delta(self.model)

    def run(self) -> None:
        """What is timed."""
        self.opt.clip_master_grads(1.0)
        self.opt.step()


class Take:
    """``take_delta`` behind a step that changed one weight in a hundred."""

    name = "take_delta"

    def __init__(self, opt: MixedPrecisionOptimizer, model: nn.Module, masks: list[Tensor]) -> None:
        self.opt, self.model, self.masks = opt, model, masks
        self.delta = opt.take_delta(model)
        self.sign = 1.0

    def prepare(self) -> None:
        """Some masters move by more than their weights' last place, and are rounded down by the engine's pass."""
        self.sign = -self.sign
        with torch.no_grad():
            for master, mask in zip(self.opt.master_params(), self.masks, strict=True):
                master.add_(mask, alpha=self.sign)
        self.opt.write_masters()

    def run(self) -> None:
        """What is timed."""
        self.delta = self.opt.take_delta(self.model)


class Digests:
    """A number for each tensor, as ``verify`` compares them."""

    name = "digests"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def prepare(self) -> None:
        """Nothing to do."""

    def run(self) -> None:
        """What is timed."""
        digests(self.model)


class Patches:
    """What a sampler's loader gets of a delta."""

    name = "patches"

    def __init__(self, take: Take) -> None:
        self.take = take

    def prepare(self) -> None:
        """Nothing to do."""

    def run(self) -> None:
        """What is timed."""
        for _ in self.take.delta.patches():
            pass


class ByHand:
    """torch's operations: a copy before, a comparison and a gather after."""

    name = "clone, !=, nonzero, gather"

    def __init__(self, take: Take) -> None:
        self.take = take
        self.found: list[tuple[Tensor, Tensor]] = []

    def prepare(self) -> None:
        """The same change, between the two halves of :meth:`run`."""
        self.before = [param.detach().clone() for param in self.take.model.parameters()]
        self.take.prepare()

    def run(self) -> None:
        """What is timed: the copy of this round, and the comparison with the one before the change."""
        params = [param.detach() for param in self.take.model.parameters()]
        before, self.before = self.before, [param.clone() for param in params]
        self.found = []
        for param, was in zip(params, before, strict=True):
            places = torch.nonzero(param.view(-1) != was.view(-1)).view(-1).to(torch.int32)
            self.found.append((places, param.view(-1)[places]))


def check(model: nn.Module, opt: MixedPrecisionOptimizer, step: Step) -> None:
    """Exit where deltas of three steps don't make a copy equal."""
    import copy

    opt.take_delta(model)
    other = copy.deepcopy(model)
    for _ in range(3):
        step.prepare()
        opt.take_delta(model).apply_(other)
        step.run()
        opt.take_delta(model).apply_(other)
        if not equal(model, other):
            sys.exit("a delta did not make a copy equal")


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "", rounds=21)
    common.print_versions()
    width, layers = (256, 3) if arguments.quick else (1024, 48)
    rounds = 2 if arguments.quick else arguments.rounds
    elements = layers * width * width
    print(f"{layers} tensors, {elements / 1e6:.1f} million parameters, {rounds} rounds")
    grads = [torch.randn(width, width).mul_(1e-3).half() for _ in range(layers)]
    bounds = {"one pass": 1.05, "general": 1.10}
    rows, timings = [], []
    for kind, fused in (("one pass", True), ("general", False)):
        steps = []
        for tracks in (True, False):
            name = f"{kind}, {'with' if tracks else 'without'} tracking"
            steps.append(Step(name, model_of(width, layers), grads, tracks, fused))
        check(steps[0].model, steps[0].opt, steps[0])
        found = common.alternate(steps, rounds)
        timings += found.values()
        bound = None if arguments.quick else bounds[kind]
        rows.append(common.ratio_row(f"{kind}: with tracking / without", bound, *found.values()))
        if fused:
            kept = [step.opt.memory().engine for step in steps]
            each = (kept[0] - kept[1]) / elements
            rows.append(common.Row("bytes kept a parameter", None if arguments.quick else 0.126, each, each, each))
        if not fused:
            opt, model = steps[0].opt, steps[0].model
    masks = [torch.rand(width, width).lt_(0.01).mul_(2.0**-4) for _ in range(layers)]
    take = Take(opt, model, masks)
    hand = ByHand(take)
    take.prepare()
    take.run()
    hand.prepare()
    hand.run()
    if sum(len(places) for places, _ in hand.found) != opt.take_delta(model).num_changed:
        sys.exit("take_delta and torch find other weights")
    print(
        f"deltas gave equal bits; {take.delta.num_changed / elements:.2%} of weights changed, {take.delta.nbytes} bytes"
    )
    found = common.alternate([take, hand, Digests(model), Patches(take)], rounds)
    timings += found.values()
    bound = None if arguments.quick else 0.40
    taken, by_hand, *others = found.values()
    rows.append(common.ratio_row("take_delta / torch by hand, 1% changed", bound, taken, by_hand))
    for other in others:
        rows.append(common.ratio_row(f"{other.name} / take_delta", None, other, taken))
    common.print_rows(rows)
    common.write_json(arguments.json, rows=rows, timings=timings, elements=elements)


if __name__ == "__main__":
    main()
