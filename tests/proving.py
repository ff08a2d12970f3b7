"""``python -m fp16opt prove`` on the emulated device: the kernels' source, compiled by the host's C++ compiler.

python tests/proving.py                    # every kernel and step, some minutes; CI runs it
python tests/proving.py --iterations 2     # with the arguments of the command
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [one for one in (str(HERE), str(HERE / "gpu")) if one not in sys.path]

import card  # noqa: E402
import emulated  # noqa: E402

from fp16opt import __main__ as command  # noqa: E402
from fp16opt.kernels.proof import Outcome, Place  # noqa: E402
from fp16opt.tools import prove  # noqa: E402


class HostPlace(Place):
    """Memory of the host, which emulated kernels work in at once."""

    def __init__(self) -> None:
        self.device, self.patience = torch.device("cpu"), 1.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def bring(self, memory: Tensor) -> Tensor:
        return memory.clone()

    def fetch(self, memory: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        return memory.clone(), lambda: True


class EmulatedCard:
    """The CPU, taken for a card inside of ``serving``."""

    device = torch.device("cpu")

    def __init__(self, module: Any) -> None:
        self._module = module

    def facts(self) -> dict[str, str]:
        return {"card": "emulated: the kernels' source as plain C++ on the CPU", "torch": torch.__version__}

    def place(self) -> HostPlace:
        return HostPlace()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            card.pretend(self._module, patch)
            yield

    def note(self, outcomes: dict[str, Outcome]) -> None:
        """Nothing is kept."""


def main(module: Any, *arguments: str) -> int:
    """The command, with these emulated kernels; its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prove, "Card", lambda index: EmulatedCard(module))
        return command.main(["prove", *arguments])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(emulated.build(Path(folder)), *sys.argv[1:]))
