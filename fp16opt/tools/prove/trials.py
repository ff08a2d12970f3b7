"""Whole steps on a card against the CPU's, to the bit: every optimizer in every mode, graphs, streams, skips."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ...optimizer import MixedPrecisionOptimizer
from ...optimizers import lion
from ...scaling import DynamicLossScaler
from .where import Card

_cuda: Any = torch.cuda
ITERATIONS = 50
_OVERFLOWS = (3, 17, 18, 40)
_SHAPES = ((), (70,), (3, 0), (33, 65), (80, 70), (70_001,))
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FACTORS = (1.0, 0.5, -0.25, 2.0)


class Result(NamedTuple):
    """What one trial found.

    Attributes:
        name: of the trial.
        words: what is wrong; "" for nothing.
        figures: what was counted or measured.
    """

    name: str
    words: str
    figures: Mapping[str, Any] = MappingProxyType({})


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


class Loop:
    """Steps whose gradients have the same bits on every device: no sum of products goes into one.

    Args:
        device: of the weights.
        make: makes the optimizer from the parameters.
        clip: whether gradients are clipped.
        dtypes: of the parameters, by turns.
        settings: of MixedPrecisionOptimizer.

    Attributes:
        params: the parameters.
        opt: the MixedPrecisionOptimizer.
        factor: float32, on the device, by which all gradients are multiplied.
    """

    def __init__(
        self,
        device: torch.device,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        clip: bool = True,
        dtypes: Sequence[torch.dtype] = _DTYPES,
        **settings: Any,
    ) -> None:
        self.params = [
            nn.Parameter(_normal(shape, k).to(dtypes[k % len(dtypes)]).to(device)) for k, shape in enumerate(_SHAPES)
        ]
        self._targets = [_normal(shape, 40 + k).to(device) for k, shape in enumerate(_SHAPES)]
        self.factor = torch.ones((), dtype=torch.float32, device=device)
        if "loss_scale" not in settings:
            settings["scaler"] = DynamicLossScaler(init_scale=2.0**8, growth_interval=5, max_scale=2.0**10)
        self.opt, self._clip = MixedPrecisionOptimizer(make(self.params), **settings), clip

    def step(self) -> None:
        """Gradients, clip and step."""
        self.backward()
        self.update()

    def backward(self) -> None:
        """Gradients, of nothing that was before."""
        self.opt.zero_grad()
        total = torch.zeros((), dtype=torch.float32, device=self.factor.device)
        for param, target in zip(self.params, self._targets, strict=True):
            total = total + (param.float() * target).flatten().mul(self.factor).sum()
        scaled: Any = self.opt.scale_loss(total)
        scaled.backward()

    def update(self) -> None:
        """Clip and step."""
        if self._clip:
            self.opt.clip_master_grads(0.5)
        self.opt.step()

    def tensors(self, gradients: bool = False) -> dict[str, Tensor]:
        """Everything that steps change, on the CPU; with ``gradients`` the masters' gradients alone."""
        if gradients:
            grads = {f"gradient of master {k}": p.grad for k, p in enumerate(self.opt.master_params())}
            return {name: grad.detach().cpu().clone() for name, grad in grads.items() if grad is not None}
        found: dict[str, Tensor] = {f"parameter {k}": param for k, param in enumerate(self.params)}
        saved = self.opt.state_dict()
        found |= {f"master {k}": master for k, master in enumerate(saved["masters"]) if master is not None}
        for k, state in saved["optimizer"]["state"].items():
            found |= {f"{name} of {k}": value for name, value in state.items() if isinstance(value, Tensor)}
        found["loss scale"] = torch.tensor(self.opt.loss_scale, dtype=torch.float64, device="cpu")
        found["skipped steps"] = torch.tensor(self.opt.skipped_steps, dtype=torch.int64, device="cpu")
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[str, int]:
    """(what is another, "" for nothing; how many bits were compared). Two nans are equal."""
    bits = 0
    if ours.keys() != theirs.keys():
        return f"there are other tensors: {sorted(ours.keys() ^ theirs.keys())}", 0
    for name, want in theirs.items():
        got = ours[name]
        if got.dtype != want.dtype or got.shape != want.shape:
            return f"{name} is {got.dtype} {tuple(got.shape)}, the CPU's {want.dtype} {tuple(want.shape)}", bits
        bits += 8 * want.nbytes
        one, other = (tensor.contiguous().view(-1) for tensor in (got, want))
        differs = one.view(torch.uint8) != other.view(torch.uint8)
        differs = differs.view(want.numel(), want.element_size()).any(1)
        if want.is_floating_point():
            differs &= ~(one.isnan() & other.isnan())
        places = differs.nonzero().view(-1)
        if places.numel():
            at = int(places[0])
            return f"{name}: element {at} is {one[at].item()!r}, the CPU's {other[at].item()!r}; {places.numel()}", bits
    return "", bits


def _factor(iteration: int, overflows: Sequence[int] = _OVERFLOWS) -> float:
    if iteration in overflows:
        return math.nan if iteration % 2 == 0 else math.inf
    return _FACTORS[iteration % len(_FACTORS)]


_ADAMW: Callable[..., Any] = lambda p: AdamW(p, lr=2.0**-6)  # noqa: E731
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": _ADAMW,
    "AdamW amsgrad": lambda p: AdamW(p, lr=2.0**-6, amsgrad=True),
    "SGD": lambda p: SGD(p, lr=2.0**-6, weight_decay=0.01),
    "SGD momentum": lambda p: SGD(p, lr=2.0**-6, momentum=0.9, nesterov=True),
    "Lion": lambda p: lion.Lion(p, lr=2.0**-8, weight_decay=0.1),
}
MODES: dict[str, dict[str, Any]] = {
    "full masters": {},
    "split masters": {"master_weights": "split"},
    "split24 masters": {"master_weights": "split24"},
    "8-bit state": {"optimizer_state": "8bit"},
    "split24 masters, 8-bit state": {"master_weights": "split24", "optimizer_state": "8bit"},
    "tracked changes": {"track_changes": True},
    "FP32 accumulation": {"grad_accumulation": "fp32"},
    "released gradients": {"gradient_release": True, "loss_scale": 256.0, "clip": False},
}
_HAS_8_BITS = ("AdamW", "SGD momentum")


def _combinations() -> Iterator[tuple[str, str]]:
    for name in OPTIMIZERS:
        for mode, settings in MODES.items():
            if "optimizer_state" not in settings or name in _HAS_8_BITS:
                yield name, mode


class Trials:
    """All trials of whole steps.

    Args:
        where: the card.
        iterations: steps of each.
    """

    def __init__(self, where: Card, iterations: int = ITERATIONS) -> None:
        self._where, self._iterations = where, iterations

    def all(self) -> list[tuple[str, Callable[[], Result]]]:
        """(name, what tries it), in their order."""
        found: list[tuple[str, Callable[[], Result]]] = []
        for name, mode in _combinations():
            found.append((f"{name}, {mode}", functools.partial(self._steps, name, mode)))
        found.append(("torch's own AdamW step: gradients", self._wrapped))
        found.append(("a skip that stays on the device", self._skip))
        found.append(("a CUDA graph", self._graph))
        found.append(("two streams", self._streams))
        return found

    def _steps(self, name: str, mode: str) -> Result:
        settings = {"fused_step": True, **MODES[mode]}
        make = OPTIMIZERS[name]
        released = settings.get("gradient_release", False)

        def run(device: torch.device, is_there: bool) -> dict[str, Tensor]:
            loop = Loop(device, make, **settings)
            for k in range(self._iterations):
                loop.factor.fill_(_factor(k, () if released else _OVERFLOWS))
                loop.step()
            return loop.tensors()

        return self._compared(f"{name}, {mode}", run)

    def _compared(self, name: str, run: Callable[[torch.device, bool], dict[str, Tensor]]) -> Result:
        theirs = run(torch.device("cpu"), False)
        with self._where.serving():
            ours = run(self._where.device, True)
        words, bits = difference(ours, theirs)
        return Result(name, words, {"bits": bits, "iterations": self._iterations})

    def _wrapped(self) -> Result:
        """What torch's kernels step is another on a card; the gradients that they get are ours."""

        def run(device: torch.device, is_there: bool) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            loop = Loop(device, lambda p: AdamW(p, lr=0.0), fused_step=False)  # so weights stay as they are
            for k in range(self._iterations):
                loop.factor.fill_(_factor(k))
                loop.step()
                if k % 10 == 0:
                    found |= {f"{name}, step {k}": value for name, value in loop.tensors(gradients=True).items()}
            return found

        return self._compared("torch's own AdamW step: gradients", run)

    def _skip(self) -> Result:
        """A step after an overflow, with everything refused by which the host would wait."""

        def run(device: torch.device, is_there: bool) -> dict[str, Tensor]:
            loop = Loop(device, _ADAMW, fused_step=True)
            factors = [torch.tensor(value, dtype=torch.float32, device="cpu").to(device) for value in (1.0, math.inf)]
            for k in range(self._iterations):
                loop.factor.copy_(factors[k % 3 == 2])
                with self._without_waits() if is_there and k else contextlib.nullcontext():
                    loop.step()
            return loop.tensors()

        return self._compared("a skip that stays on the device", run)

    @contextlib.contextmanager
    def _without_waits(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _graph(self) -> Result:
        """Eager steps, then replays of one that was captured."""
        warm = 3

        def run(device: torch.device, is_there: bool) -> dict[str, Tensor]:
            rate = torch.tensor(2.0**-6, dtype=torch.float32, device=device)
            make = lambda p: AdamW(p, lr=rate, capturable=is_there)  # noqa: E731
            loop = Loop(device, make, fused_step=True, dtypes=(torch.float16,))
            graph: Any = None
            for k in range(self._iterations):
                if is_there and k == warm:
                    graph = self._captured(loop)
                loop.factor.fill_(_factor(k))
                if graph is not None:
                    graph.replay()
                elif is_there:
                    self._aside(loop)
                else:
                    loop.step()
            return loop.tensors()

        return self._compared("a CUDA graph", run)

    def _aside(self, loop: Loop) -> None:
        """A step on another stream, as torch wants those before a capture."""
        side = _cuda.Stream(self._where.device)
        side.wait_stream(torch.cuda.current_stream(self._where.device))
        with torch.cuda.stream(side):
            loop.step()
        torch.cuda.current_stream(self._where.device).wait_stream(side)

    def _captured(self, loop: Loop) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loop.step()
        return graph

    def _streams(self) -> Result:
        """Steps on two streams by turns, each of which waits for the other, behind work that keeps the card busy."""

        def run(device: torch.device, is_there: bool) -> dict[str, Tensor]:
            loop = Loop(device, _ADAMW, fused_step=True)
            if not is_there:
                for k in range(self._iterations):
                    loop.factor.fill_(_factor(k))
                    loop.step()
                return loop.tensors()
            streams = [_cuda.Stream(device) for _ in range(2)]
            streams[0].wait_stream(torch.cuda.current_stream(device))
            for k in range(self._iterations):
                streams[k % 2].wait_stream(streams[(k + 1) % 2])
                with torch.cuda.stream(streams[k % 2]):
                    _cuda._sleep(500_000)
                    loop.factor.fill_(_factor(k))
                    loop.step()
            for stream in streams:
                torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            return loop.tensors()

        return self._compared("two streams", run)
