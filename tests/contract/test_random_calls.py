"""Random programs: whatever users write around a few parameters, the library does what the contract says.

`programs` draws them, `oracle` says what must come of each statement, `walk` runs both sides. A failure prints the
program, shrunk, with imports and all, so that it runs by itself. Seeds are fixed; `--all` runs three times as many,
`-m slow` many more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import products
import pytest
import torch
from torch import Tensor

from contract.programs import MODES, make_program
from contract.walk import complaint, difference, shrunk
from fp16opt import MixedPrecisionOptimizer

MORE = 1000


@pytest.fixture(autouse=True)
def one_thread() -> Iterable[None]:
    """Tensors of a few elements gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "many more"])
@pytest.mark.parametrize("mode", MODES)
def test_programs_do_what_the_contract_says(mode: str, more: bool) -> None:
    programs = MODES[mode].programs
    for seed in range(programs, MORE) if more else range(programs if products.takes_all else programs // 3):
        text = complaint(*make_program(mode, seed))
        if text is not None:
            pytest.fail(f"seed {seed}, {text}", pytrace=False)


# -- the walk finds what is broken -------------------------------------------------------------------------------------


class TakesEditsAfterAStamp(MixedPrecisionOptimizer):
    def step(self, closure: Any = None) -> Any:
        self.update_master_grads()
        return super().step(closure)


class ScalesASecondBackwardTwice(MixedPrecisionOptimizer):
    def backward(self, loss: Tensor, **options: Any) -> None:
        is_second = any(p.grad is not None for p in self.model_params())
        super().backward(loss * float(self.loss_scale) if is_second else loss, **options)


class NeverClears(MixedPrecisionOptimizer):
    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


BROKEN = [
    TakesEditsAfterAStamp,
    ScalesASecondBackwardTwice,
    NeverClears,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_wrapper_is_found(broken: type) -> None:
    """By the programs of the walk itself; and what is shown is a few statements, which run by themselves."""
    mode = "wrapped step"
    for seed in range(MODES[mode].programs):
        setting, statements = make_program(mode, seed)
        _, found = difference(setting, statements, broken)
        if found is not None:
            break
    else:
        pytest.fail(f"{MODES[mode].programs} programs find nothing", pytrace=False)
    small = shrunk(setting, statements, found.kind, broken)
    assert difference(setting, small)[1] is None  # it is the wrapper that is broken
    assert 0 < len(small) <= 6
    program = complaint(setting, small, broken)
    assert program is not None
    with contextlib.suppress(RuntimeError):  # of the wrapper as it is, which may refuse the last statement
        exec(program.split("\n", 1)[1], {})
