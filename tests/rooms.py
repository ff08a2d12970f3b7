"""A wrapped optimizer with masters and a scaler, and no engine: what the checkpoint tests load into."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from engine.checks import assert_same, flatten
from specs import CASES, OptimizerCase
from torch import Tensor
from torch.nn import Parameter

from fp16opt.engine import checkpoint
from fp16opt.engine.schema import is_ours
from fp16opt.scaling import DynamicLossScaler

BY_ID = {case.id: case for case in CASES}
ADAM = BY_ID["Adam-default-forloop"]


def shapes_of(case: OptimizerCase) -> list[tuple[int, ...]]:
    """Adafactor divides by the number of elements: none of its parameters may be empty."""
    return [(2, 1, 3) if case.cls == "Adafactor" and 0 in shape else shape for shape in case.shapes]


def frozen(value: Any) -> Any:
    """`flatten` for structures that may hold meta tensors, which have no bits."""
    if isinstance(value, Tensor):
        return f"meta {value.shape}" if value.is_meta else value
    if isinstance(value, dict):
        return flatten({k: frozen(v) for k, v in value.items()})
    return flatten([frozen(v) for v in value]) if isinstance(value, list | tuple) else value


class Room:
    """A wrapped optimizer, its masters and a scaler, with every second parameter its own master."""

    def __init__(self, case: OptimizerCase = ADAM, seed: int = 0, own: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.case = case
        self.params = [
            Parameter(torch.randn(s, generator=rng).to(own if i % 2 else torch.float32))
            for i, s in enumerate(shapes_of(case))
        ]
        half = (len(self.params) + 1) // 2
        groups = [self.params] if case.kind == "closure" else [self.params[:half], self.params[half:]]
        self.optimizer = case.make([{"params": list(g)} for g in groups])
        self.masters = [None if i % 2 else p for i, p in enumerate(self.params)]
        self.names = [f"layer{i}.weight" for i in range(len(self.params))]
        self.scaler: Any = DynamicLossScaler(init_scale=64.0, growth_interval=3, hysteresis=2, max_scale=1e6)

    def train(self, steps: int, first: int = 0) -> Room:
        for step in range(first, first + steps):
            rng = torch.Generator().manual_seed(1000 + step)
            targets = [torch.randn(p.shape, generator=rng).to(p.dtype) for p in self.params]
            if self.case.kind == "closure":
                self.optimizer.step(lambda targets=targets: self._loss(targets))
            else:
                for p, t in zip(self.params, targets, strict=True):
                    p.grad = t.to_sparse(1) if self.case.kind == "sparse" else t
                self.optimizer.step()
            self.scaler.update(torch.tensor(float(step % 2)))
        return self

    def _loss(self, targets: list[Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = sum(((p - t) ** 2).double().sum() for p, t in zip(self.params, targets, strict=True))
        loss.backward()
        return loss.detach()

    def build(self) -> dict[str, Any]:
        return checkpoint.build(self.optimizer, self.masters, self.scaler, steps=0, skipped=0)

    def check(self, sd: Any) -> None:
        checkpoint.check(sd, self.optimizer, self.masters, self.names, self.scaler)

    def load(self, sd: Any) -> Room:
        self.check(sd)
        self.apply(sd)
        return self

    def apply(self, sd: Any) -> None:
        def finish() -> None:
            with torch.no_grad():
                for master, saved in zip(self.masters, sd["masters"] if is_ours(sd) else self.masters, strict=True):
                    if master is not None:
                        master.copy_(saved)

        checkpoint.load(sd, self.optimizer, self.names, self.scaler, lambda: None, finish)

    def everything(self) -> Any:
        return flatten([
            self.params, self.optimizer.state_dict(), self.optimizer.defaults, self.scaler.state_dict(),
            [id(g["params"]) for g in self.optimizer.param_groups],
        ])  # fmt: skip


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value._values() if value.is_sparse else value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [t for item in items for t in tensors(item)]


def refused(room: Room, sd: Any, error: type[Exception], message: str) -> None:
    before, given = room.everything(), frozen(sd)
    with pytest.raises(error, match=message) as raised:
        room.check(sd)
    assert type(raised.value) is error
    assert_same(room.everything(), before, "after a refused load")
    assert_same(frozen(sd), given, "the refused dict")


class Odd(torch.optim.Optimizer):
    """A third-party optimizer with every kind of state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def fill(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": 3,
                    "sum64": torch.full_like(p, 1 + 2**-40, dtype=torch.float64),
                    "exp_avg": torch.full_like(p, 1 + 2**-40, dtype=torch.float64),
                    "codes": torch.full(p.shape, 12345, dtype=torch.int16),
                    "mask": torch.ones(p.shape, dtype=torch.bool),
                    "half": torch.full(p.shape, 1.5, dtype=torch.float16),
                    "nested": [
                        torch.ones(2, dtype=torch.int64),
                        {"a": (torch.ones(3, dtype=torch.bfloat16), None)},
                    ],
                    "big_step": torch.tensor(2**53 + 1),
                    "mode": "fast",
                    "none": None,
                }


def odd_room(seed: int) -> Room:
    room = Room(seed=seed)
    room.optimizer = Odd(room.params)
    return room


def edit(sd: dict[str, Any], *path: Any, value: Any = None, drop: bool = False) -> dict[str, Any]:
    """A copy with one place changed."""
    sd = copy.deepcopy(sd)
    at: Any = sd
    for key in path[:-1]:
        at = at[key]
    if drop:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return sd


LR = ("optimizer", "param_groups", 0, "lr")
IDS = ("optimizer", "param_groups", 0, "params")
STATE0 = ("optimizer", "state", 0)
