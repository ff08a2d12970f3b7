"""Small models, data that differs between ranks, and the messages that a step sends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp16opt.distributed import waiting

HALF = torch.float16


class Net(nn.Module):
    """16-bit linears around an FP32 layer norm; odd sizes, so that pieces differ and some are empty."""

    def __init__(self, dtype: torch.dtype = HALF, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(16, 7, dtype=dtype)
        self.norm = nn.LayerNorm(7) if norm else nn.Identity()
        self.b = nn.Linear(7, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """FP32 in and out."""
        x = torch.tanh(self.a(x.to(self.a.weight.dtype))).float()
        return self.b(self.norm(x).to(self.b.weight.dtype)).float()


def batch(step: int, rank: int, rows: int = 4) -> Tensor:
    """A batch that step and rank decide."""
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int, poison: bool = False) -> Tensor:
    """A loss whose gradients are infinite where ``poison`` is set."""
    loss = (model(batch(step, rank)) - 1.0).square().mean()
    return loss * float("inf") if poison else loss


def one_step(model: nn.Module, opt: Any, number: int, rank: int, poison: bool = False) -> None:
    """Clear, backward and step."""
    opt.zero_grad()
    opt.backward(loss_of(model, number, rank, poison))
    opt.step()


def train(model: nn.Module, opt: Any, steps: Iterable[int]) -> None:
    """The same batch on every rank: any number of ranks has the same gradients (halves add up exactly)."""
    for number in steps:
        one_step(model, opt, number, 0, poison=number == 1)


def full(tensor: Any) -> Tensor:
    """A copy of all of a tensor, also of one that is spread over ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Said(logging.Handler):
    """What is logged, without the name of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage().split(" [optimizer")[0])


def gathered(tensors: list[Tensor]) -> list[list[bytes]]:
    """The bits of plain tensors on every rank."""
    mine = [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def assert_alike(tensors: list[Tensor]) -> None:
    """The same bits on every rank."""
    everyone = gathered(tensors)
    assert all(other == everyone[0] for other in everyone[1:])


_COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "all_gather_object", "all_gather")


@contextlib.contextmanager
def messages() -> Iterator[list[tuple[str, int]]]:
    """Collectives that Python code calls inside, as (name, bytes); DDP's and FSDP2's own are not among them."""
    sent: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in _COLLECTIVES}

    def watched(name: str) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sent.append((name, tensor.nbytes if isinstance(tensor, Tensor) else -1))
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in _COLLECTIVES:
        setattr(dist, name, watched(name))
    own = waiting._reduce_over_own

    def reduced(group: Any, tensor: Tensor, operation: Any) -> None:
        sent.append(("all_reduce", tensor.nbytes))
        own(group, tensor, operation)

    waiting._reduce_over_own = reduced
    try:
        yield sent
    finally:
        waiting._reduce_over_own = own
        for name, original in originals.items():
            setattr(dist, name, original)
