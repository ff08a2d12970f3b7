"""Where ``python -m fp16opt prove`` works: on a card, or on the emulated device of the tests."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels import cuda_devices
from ...kernels.installed import PACKAGE
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

    def close(self) -> None:
        """Nothing was opened."""


class HostPlace(Place):
    """Memory of the host, which emulated kernels work in at once."""

    def __init__(self) -> None:
        self.device, self.patience = torch.device("cpu"), 1.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Nothing but what is done has a stream."""
        with torch.no_grad():
            yield

    def bring(self, memory: Tensor) -> Tensor:
        """A copy."""
        return memory.clone()

    def fetch(self, memory: Tensor) -> tuple[Tensor, Any]:
        """A copy, which is there at once."""
        return memory.clone(), lambda: True


class Pretended:
    """The device that the tests emulate: the kernels' source, compiled by the host's C++ compiler.

    Attributes:
        device: the CPU, taken for a card inside of :meth:`serving`.

    Raises:
        NoCard: there is no source tree around the package or in the present folder, or the tests' packages are missing.
    """

    def __init__(self) -> None:
        trees = PACKAGE.parent, Path.cwd()
        tests = next((tree / "tests" for tree in trees if (tree / "tests" / "emulated.py").is_file()), None)
        if tests is None:
            raise NoCard(
                "--pretend needs fp16opt's source tree, with its folder tests; it is neither in "
                f"{trees[0]} nor in {trees[1]}"
            )
        for folder in (tests, tests / "gpu"):
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        try:
            self._emulated, self._card = map(importlib.import_module, ("emulated", "card"))
            self._patches: Any = importlib.import_module("pytest").MonkeyPatch
        except ImportError as error:
            raise NoCard(
                f"--pretend needs what the tests need: {error}. pip install -r requirements/test.txt"
            ) from None
        if self._emulated.compiler() is None:
            raise NoCard("--pretend needs a C++ compiler")
        self._folder = tempfile.TemporaryDirectory(prefix="fp16opt-prove-")
        self._module = self._emulated.build(Path(self._folder.name))
        self.device = torch.device("cpu")

    def facts(self) -> dict[str, str]:
        """What was proved, by name."""
        return {"card": "pretended: the kernels' source as plain C++ on the CPU", "torch": torch.__version__}

    def place(self) -> Place:
        """Where single kernels are proved."""
        return HostPlace()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Inside, emulated kernels serve the CPU."""
        with self._patches.context() as patch:
            self._card.pretend(self._module, patch)
            yield

    def note(self, outcomes: dict[str, Outcome]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Remove what was compiled."""
        self._folder.cleanup()


Where = Card | Pretended
