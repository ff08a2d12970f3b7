"""The proof of CUDA kernels on a card: planted numbers, in the kernel's hands and in the CPU's, to the bit.

It works in memory and on a stream of its own, and reads nothing but what it has planted. A kernel that gives another
bit, touches a guard, raises an error or does not answer in time may not serve; see :mod:`.verdicts`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .planted import GUARD, Part, Room, expected, planted

_cuda: Any = torch.cuda
PATIENCE = 20.0
"""Seconds that a card has for an answer; a proof takes it some milliseconds."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Outcome(NamedTuple):
    """What the proof of one kernel found.

    Attributes:
        words: why it may not serve; "" where it may.
        stays: whether it would be found again: a verdict that is kept. Not so what was not answered in time, or for
            lack of memory.
        bits: how many were compared.
    """

    words: str
    stays: bool = True
    bits: int = 0


_here = threading.local()


def is_proving() -> bool:
    """Whether this thread's launches are a proof's."""
    return getattr(_here, "proves", False)


@contextlib.contextmanager
def proving() -> Iterator[None]:
    """Inside, this thread's launches go to the kernels whatever was found of them: they are what is proved."""
    before, _here.proves = is_proving(), True
    try:
        yield
    finally:
        _here.proves = before


class Place:
    """Where kernels are proved: memory of a card, and a stream of its own.

    Args:
        index: the card's number.
        patience: seconds.

    Attributes:
        device: the card.
        patience: as given.
    """

    def __init__(self, index: int, patience: float = PATIENCE) -> None:
        self.device, self.patience = torch.device("cuda", index), patience

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """What is done inside goes to a new stream of the card, whatever the caller's torch is set to."""
        debugs = torch.cuda.get_sync_debug_mode()
        with torch.no_grad(), torch.inference_mode(False), torch.cuda.device(self.device):
            torch.cuda.set_sync_debug_mode(0)
            try:
                with torch.cuda.stream(_cuda.Stream(self.device)):
                    yield
            finally:
                torch.cuda.set_sync_debug_mode(debugs)

    def bring(self, memory: Tensor) -> Tensor:
        """A copy on the card. Does not wait."""
        return memory.pin_memory().to(self.device, non_blocking=True)

    def fetch(self, memory: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        """A copy on the CPU, and what tells whether it is there. Does not wait."""
        there = torch.empty(memory.shape, dtype=memory.dtype, device="cpu", pin_memory=True)
        there.copy_(memory, non_blocking=True)
        event = _cuda.Event()
        event.record()
        return there, event.query


_unanswered: list[object] = []
"""Memory that a kernel may still write to: it is never given back."""


def prove(names: Iterable[str], index: int, place: Place | None = None) -> dict[str, Outcome]:
    """Prove kernels on a card. The host waits for the answer, no stream of the caller's does.

    Args:
        names: of the kernels.
        index: the card's number.
        place: where; that card's own memory and a new stream.

    Returns:
        By name what was found. Errors are found too, and not raised.
    """
    there = Place(index) if place is None else place
    asked = list(names)
    failed: dict[str, Outcome] = {}
    stretches = [planted(name).before for name in asked]
    starts = [0, *itertools.accumulate(stretch.numel() for stretch in stretches)]
    began = torch.cat(stretches)
    try:
        with there.working(), proving():
            memory = there.bring(began)
            for name, start in zip(asked, starts, strict=False):
                parts, before, run = planted(name)
                try:
                    run(Room(parts, memory[start : start + before.numel()], True))
                except Exception as error:
                    failed[name] = _of_error(error)
            found, is_there = there.fetch(memory)
            wanted = {name: expected(name) for name in asked}  # the CPU's turn, while the card works
            until = time.monotonic() + there.patience
            while not is_there():
                if time.monotonic() > until:
                    _unanswered.extend((memory, found, began))
                    words = f"it gave no answer within {there.patience:g} s"
                    return dict.fromkeys(asked, Outcome(words, stays=False))
                time.sleep(1e-4)
    except Exception as error:
        return dict.fromkeys(asked, _of_error(error))
    outcomes = {}
    for name, start in zip(asked, starts, strict=False):
        want = wanted[name]
        outcomes[name] = failed.get(name) or compare(planted(name).parts, found[start : start + want.numel()], want)
    return outcomes


def _of_error(error: Exception) -> Outcome:
    """Errors of the card are kept: what raises one there may have ended the process's CUDA."""
    words = " ".join(str(error).split())[:300]
    stays = "CUDA error" in words or "CUDA reports" in words
    return Outcome(f"{type(error).__name__}: {words}", stays and not isinstance(error, torch.OutOfMemoryError))


def compare(parts: list[Part], found: Tensor, wanted: Tensor) -> Outcome:
    """Judge memory that a kernel has worked in.

    Args:
        parts: the tensors that lie there.
        found: uint8, on the CPU: as the kernel left it.
        wanted: uint8: as it should be. Two nans are equal whatever their payloads.
    """
    bits = 8 * sum(part.value.nbytes for part in parts)
    places = (found != wanted).nonzero().view(-1)
    if not places.numel():
        return Outcome("", bits=bits)
    covered = torch.zeros_like(found, dtype=torch.bool)
    for part in parts:
        covered[part.start : part.start + part.value.nbytes] = True
    outside = places[~covered[places]]
    if outside.numel():
        return Outcome(_of_guard(parts, int(outside[0])), bits=bits)
    starts = torch.tensor([part.start for part in parts], dtype=torch.int64, device="cpu")
    rows: Any = torch.bucketize(places, starts, right=True)
    for row in rows.unique().tolist():
        words = _of_part(parts[row - 1], found, wanted)
        if words:
            return Outcome(words, bits=bits)
    return Outcome("", bits=bits)


def _of_guard(parts: list[Part], at: int) -> str:
    name, where = "", GUARD * 2
    for part in parts:
        for distance, side in ((part.start - at, "before"), (at - part.start - part.value.nbytes + 1, "behind")):
            if 0 < distance < where:
                name, where = f"it wrote {distance} bytes {side} {part.name}", distance
    return name or f"it wrote where no tensor lies, at byte {at}"


def _of_part(part: Part, found: Tensor, wanted: Tensor) -> str:
    """Of the first element that is another, and how many are; "" where all are nan on both sides."""
    dtype, end = part.value.dtype, part.start + part.value.nbytes
    got, want = (memory[part.start : end].clone().view(dtype).view(-1) for memory in (found, wanted))
    as_bits = _BITS[dtype.itemsize]
    differs = got.view(as_bits) != want.view(as_bits)
    if dtype.is_floating_point:
        differs &= ~(got.isnan() & want.isnan())
    places = differs.nonzero().view(-1)
    if not places.numel():
        return ""
    at, mask = int(places[0]), (1 << 8 * dtype.itemsize) - 1
    one, other = (int(tensor.view(as_bits)[at]) & mask for tensor in (got, want))
    digits = 2 * dtype.itemsize
    return (
        f"{part.name}: element {at} is {got[at].item()!r} (0x{one:0{digits}x}), the CPU's {want[at].item()!r} "
        f"(0x{other:0{digits}x}); {places.numel()} of {got.numel()} differ"
    )
