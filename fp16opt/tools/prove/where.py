"""Where ``python -m fp16opt prove`` works: on a card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ...kernels import cuda_devices
from ...kernels.proof import Outcome, Place


class NoCard(RuntimeError):
    """There is nothing to prove kernels on; the message says why, and what to do."""


class Card:
    """A CUDA card.

    Args:
        index: its number.

    Attributes:
        device: the card.

    Raises:
        NoCard: the CUDA kernels can't serve it at all.
    """

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise NoCard("torch finds no CUDA device here")
        if 0 <= index < torch.cuda.device_count():
            cuda_devices.compile_missing(index)
        served = cuda_devices.served(index)
        if served.device is None:
            raise NoCard(f"torch operations serve cuda:{index}: {served.words}")
        self.device, self._index, self._served = torch.device("cuda", index), index, served

    def facts(self) -> dict[str, str]:
        """What was proved, by name."""
        around = {} if self._served.verdicts is None else self._served.verdicts.around
        memory = torch.cuda.get_device_properties(self._index).total_memory
        return {**around, "memory": f"{memory / 2**30:.0f} GiB", "kernels are": self._served.words}

    def place(self) -> Place:
        """Where single kernels are proved."""
        return Place(self._index)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Inside, what is on :attr:`device` is on the card."""
        with torch.cuda.device(self.device):
            yield
            torch.cuda.synchronize(self.device)

    def note(self, outcomes: dict[str, Outcome]) -> None:
        """Kernels that were found to be wrong serve no more."""
        if self._served.verdicts is not None:
            self._served.verdicts.note(outcomes)
