"""The reference under the arithmetic of torch's CUDA kernels, where that is not the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from step_cases import KINDS, assert_same_results, random_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp16opt.kernels import native


class Card(TorchDispatchMode):
    """Divisions by a number as torch's CUDA kernels do them: by multiplication with its reciprocal."""

    def __init__(self) -> None:
        super().__init__()
        self.divisions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1].rstrip("_")
        if name == "div":
            self.divisions += 1
            if not isinstance(args[1], Tensor):
                reciprocal = torch.tensor(1.0, dtype=args[0].dtype) / torch.tensor(args[1], dtype=args[0].dtype)
                return args[0] * reciprocal
        return func(*args, **(kwargs or {}))


def test_the_card_divides_as_torch_does_there() -> None:
    values, by = torch.arange(1.0, 2000.0), float(np.float32(0.3))
    with Card():
        there = values / by
        exact = values / torch.tensor(by)
    assert not torch.equal(there, values / by), "a division by a number gives other bits on a card"
    assert torch.equal(exact, values / by)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_the_reference_have_the_same_bits_on_a_card(
    monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    monkeypatch.setattr(native, "module", None)
    case = random_case(np.random.default_rng(seed), kind, 0.0, 8)
    here = case.on("cpu").run()
    card, there = Card(), case.on("cpu")
    with card:
        there.run()
    assert_same_results(there, here, kind)
    assert (card.divisions > 0) == ("adam" in kind or "amsgrad" in kind)
