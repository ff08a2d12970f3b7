"""Random one-pass steps and split masters: lists of tensors that any backend can take, and what comes out of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kernel_cases import LAYOUTS, SIXTEEN, make, place, shape_of
from named_steps import adam_step, sgd_step
from torch import Tensor

from fp16opt.kernels import CallCache, CastStats, multi_tensor_join, multi_tensor_split, reference_split
from fp16opt.kernels.operations import (
    AdamOptions,
    Factors,
    LionOptions,
    SgdOptions,
    multi_tensor_step,
)

STATE = {"adam": 2, "amsgrad": 3, "sgd": 0, "momentum": 1, "lion": 1}
KINDS = (*STATE, *(f"own {kind}" for kind in STATE))
Column = list["Tensor | None"]


@dataclass
class StepCase:
    """One call of a step. Lists are by name; a copy may be placed on any device."""

    kind: str
    columns: dict[str, Column]
    state: list[Column]
    steps: Column
    options: list[Any]
    group_of: list[int]
    first: list[bool]
    factors: tuple[Tensor, Tensor]
    found_inf: Tensor | None
    cache: CallCache = field(default_factory=CallCache)

    def on(self, device: torch.device | str, steps_on: torch.device | str | None = None) -> StepCase:
        """The same on ``device``, with a cache of its own; learning rates that are tensors move too."""

        def moved(column: Column, to: torch.device | str = device) -> Column:
            return [None if tensor is None else place(tensor, to) for tensor in column]

        def lr(o: Any) -> Any:
            return o._replace(lr=o.lr.to(device)) if isinstance(o.lr, Tensor) else o

        result = copy.copy(self)
        result.columns = {name: moved(column) for name, column in self.columns.items()}
        result.state = [moved(column) for column in self.state]
        result.steps = moved(self.steps, device if steps_on is None else steps_on)
        result.options = [lr(o) for o in self.options]
        result.factors = (self.factors[0].to(device), self.factors[1].to(device))
        result.found_inf = None if self.found_inf is None else self.found_inf.to(device)
        result.cache = CallCache()
        result.stats = CastStats.allocate(len(self.group_of), device)  # type: ignore[attr-defined]
        return result

    def run(self) -> StepCase:
        """Step once."""
        c, models = self.columns, self.columns.get("models")
        common: dict[str, Any] = {
            "models": models, "found_inf": self.found_inf, "cache": self.cache,
            "stats": None if models is None else self.stats,  # type: ignore[attr-defined]
        }  # fmt: skip
        factors = Factors(*self.factors)
        if self.kind.endswith(("adam", "amsgrad")):
            largest = self.state[2] if self.kind.endswith("amsgrad") else None
            lists = (c["grads"], c["masters"], self.state[0], self.state[1], self.steps)
            adam_step(*lists, self.options, self.group_of, factors, max_exp_avg_sqs=largest, **common)
        elif self.kind.endswith("lion"):
            multi_tensor_step(
                "lion", c["grads"], c["masters"], self.state, self.options, self.group_of, factors, **common
            )
        else:
            if self.state:
                common.update(momentum_buffers=self.state[0], first=self.first)
            sgd_step(c["grads"], c["masters"], self.options, self.group_of, factors, **common)
        return self

    def again(self, grads: Column) -> StepCase:
        """A further step with other gradients; buffers hold something by now."""
        self.columns["grads"] = grads
        self.first = [False] * len(self.first)
        return self.run()

    def results(self) -> dict[str, Column]:
        """All that a step may write, and the gradients that it may not."""
        found = {**self.columns, **{f"state {k}": column for k, column in enumerate(self.state)}, "steps": self.steps}
        stats = self.stats  # type: ignore[attr-defined]
        return {**found, "overflow": [stats.overflow]}


def assert_same_results(got: StepCase, want: StepCase, where: str) -> None:
    """Equal bits, but for the payloads of nans."""
    theirs = want.results()
    for name, column in got.results().items():
        for k, (a, b) in enumerate(zip(column, theirs[name], strict=True)):
            if a is None or b is None:
                assert a is None
                assert b is None
                continue
            left, right = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[right.element_size()]
            same = left.view(bits) == right.view(bits)
            if right.dtype.is_floating_point:
                same |= left.isnan() & right.isnan()
            assert same.all(), f"{where}: {name}[{k}] {tuple(right.shape)} {right.dtype}: {int((~same).sum())} differ"


def _options(rng: np.random.Generator, base: str) -> Any:
    is_adam, momentum = base in ("adam", "amsgrad"), base == "momentum"
    lr: Any = float(rng.choice([1e-3, 0.1, 0.0]))
    if rng.random() < 0.5:
        lr = torch.tensor(lr, dtype=torch.float32 if rng.random() < 0.7 else torch.float64)
    decay, maximize = float(rng.choice([0.0, 0.01, 0.1])), bool(rng.random() < 0.3)
    if is_adam:
        beta1, beta2 = float(rng.choice([0.0, 0.3, 0.9])), float(rng.choice([0.99, 0.999]))
        eps = float(rng.choice([1e-8, 0.0, 1e-3]))
        return AdamOptions(lr, beta1, beta2, eps, decay, bool(rng.random() < 0.5), maximize)
    if base == "lion":
        return LionOptions(lr, float(rng.choice([0.0, 0.3, 0.9])), float(rng.choice([0.0, 0.99])), decay, maximize)
    nesterov = momentum and bool(rng.random() < 0.5)
    dampening = 0.0 if nesterov else float(rng.choice([0.0, 0.3]))
    return SgdOptions(lr, 0.9 if momentum else 0.0, dampening, decay, nesterov, maximize)


def unaligned(rng: np.random.Generator, tensor: Tensor) -> Tensor:
    """Sometimes a copy that begins one element into its memory."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.numel() or rng.random() > 0.3:
        return tensor
    return torch.cat([tensor[:1], tensor])[1:]


def random_case(rng: np.random.Generator, kind: str, special: float, most: int = 20) -> StepCase:
    """``special``: the share of gradients and weights that are infinite, nan, huge or tiny."""
    own, base = kind.startswith("own "), kind.removeprefix("own ")
    names = ["grads", "masters"] if own else ["grads", "masters", "models"]
    columns: dict[str, Column] = {name: [] for name in names}
    state: list[Column] = [[] for _ in range(STATE[base])]
    steps: Column = []
    count = int(rng.integers(1, most))
    for i in range(count):
        shape, layout = shape_of(rng), LAYOUTS[int(rng.integers(0, len(LAYOUTS)))] if i else "plain"
        missing = rng.random() < 0.1 and i > 0

        def new(dtype: torch.dtype, share: float = 0.0, shape: Any = shape, layout: str = layout) -> Tensor:
            return unaligned(rng, make(rng, shape, dtype, layout, share))

        model = new(SIXTEEN[int(rng.integers(0, 2))], special)
        split = not own and rng.random() < 0.5
        master = new(torch.float32, special)
        if split:  # codes that splitting gives
            rest = new(torch.float16).view(torch.int16)
            reference_split.split(0, master, model, rest, CastStats.allocate(1, "cpu"))
            master = rest
        grad = new(torch.float32 if own or rng.random() < 0.3 else model.dtype, special)
        kept = [new(torch.float32), *(new(torch.float32).abs_() for _ in state[1:])][: len(state)]
        row = [grad, master, model][: len(names)]
        for name, tensor in zip(names, row, strict=True):
            columns[name].append(None if missing else tensor)
        for column, tensor in zip(state, kept, strict=True):
            column.append(None if missing else tensor)
        steps.append(None if missing else torch.tensor(float(rng.choice([0, 1, 7, 1000]))))
    return StepCase(
        kind, columns, state, steps, [_options(rng, base) for _ in range(3)],
        [int(k) for k in rng.integers(0, 3, count)], [bool(rng.random() < 0.3) for _ in range(count)],
        (torch.tensor(2.0**-7), torch.tensor(float(rng.choice([1.0, 0.3])))), torch.tensor(0.0),
    )  # fmt: skip


def split_and_join(masters: Column, models: Column, rests: Column, device: torch.device | str) -> list[Column]:
    """Weights, remainders, what they are joined to, and flags; all on ``device``, twice with the same tables."""
    there = [[None if t is None else place(t, device) for t in column] for column in (masters, models, rests)]
    outs: Column = [None if master is None else torch.full_like(master, 7.0) for master in there[0]]
    stats, tables = CastStats.allocate(len(masters), device), [CallCache(), CallCache()]
    for _ in range(2):
        multi_tensor_split(*there, stats, cache=tables[0])
        multi_tensor_join(there[1], there[2], outs, cache=tables[1])
    return [there[1], there[2], outs, [stats.overflow]]
