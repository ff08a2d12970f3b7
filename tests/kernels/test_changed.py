"""Which elements of 16-bit weights a pass changed: operations, backends, threads and layouts, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from named_steps import adam_step
from step_cases import KINDS, place, random_case
from torch import Tensor

from fp16opt.kernels import CastStats, Piece, changes, multi_tensor_cast, multi_tensor_split
from fp16opt.kernels.changed import ChangedBits
from fp16opt.kernels.operations import AdamOptions, Factors

M32 = np.uint64(0xFFFFFFFF)


def words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Of a 16-bit tensor, in memory order, as the documentation has it: dimensions from the largest stride on."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.detach().permute(order).contiguous().view(-1).view(torch.int16).numpy().copy()


def guard_terms(found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of all words of a tensor, modulo 2^32."""
    with np.errstate(over="ignore"):
        at = np.arange(len(found), dtype=np.uint64)
        block = at // np.uint64(64)
        factor = (block * np.uint64(0x9E3779B1)) & M32
        factor = ((factor ^ (factor >> np.uint64(15))) * np.uint64(0x85EBCA6B)) & M32
        factor = (factor ^ (factor >> np.uint64(13))) | np.uint64(1)
        keys = ((np.uint64(2) * (at % np.uint64(64)) + np.uint64(1)) * np.uint64(0x6487)) & np.uint64(0x7FFF)
        signed = found.astype(np.int64).astype(np.uint64) & M32
        return (((signed * keys) & M32) * factor) & M32


class Oracle:
    """What is to be marked, element by element."""

    def __init__(self, models: Sequence[Tensor | None]) -> None:
        self.marks = [None if model is None else np.zeros(model.numel(), dtype=bool) for model in models]
        self.left = [0] * len(models)

    def step(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        for row, marks in enumerate(self.marks):
            if marks is None:
                continue
            differ = before[row] != after[row]
            fresh = differ & ~marks
            self.left[row] = (self.left[row] + int(guard_terms(before[row])[fresh].sum())) % 2**32
            marks |= differ

    def check(self, changed: ChangedBits, after: Sequence[Any]) -> None:
        for row, marks in enumerate(self.marks):
            if marks is None:
                continue
            memory = changed.of(row)
            there = np.unpackbits(memory[1:].view(torch.uint8).numpy(), bitorder="little").astype(bool)
            assert not there[len(marks) :].any(), "a bit behind the last element"
            assert np.array_equal(there[: len(marks)], marks), row
            assert int(memory[0]) == self.left[row], row
            now = torch.from_numpy(after[row])
            places, taken, more = changes.take(changed, row, now)
            assert np.array_equal(places.numpy(), np.flatnonzero(marks))
            assert np.array_equal(taken.numpy(), after[row][marks])
            assert more == (int(guard_terms(after[row])[marks].sum()) - self.left[row]) % 2**32
            assert int(changes.guard(now)) == int(guard_terms(after[row]).sum()) % 2**32


def run(models: Sequence[Tensor | None], stats: CastStats, calls: Sequence[Callable[[], object]]) -> None:
    """Calls, each of which is compared; between the last two the bits are cleared."""
    stats.changed = ChangedBits.allocate(models, "cpu")
    oracle = Oracle(models)
    for number, call in enumerate(calls):
        if number and number == len(calls) - 1:
            stats.changed.clear()
            oracle = Oracle(models)
        before = [None if model is None else words(model) for model in models]
        call()
        after = [None if model is None else words(model) for model in models]
        oracle.step(before, after)
        oracle.check(stats.changed, after)


@pytest.mark.cells("each")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("own")])
def test_steps_mark_what_they_change(implementation: str, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, kind, 0.02).on("cpu")
    other = [None if grad is None else place(-grad, "cpu") for grad in case.columns["grads"]]
    stats = case.stats  # type: ignore[attr-defined]
    grads = case.columns["grads"]
    run(case.columns["models"], stats, [case.run, lambda: case.again(other), lambda: case.again(grads)])


@pytest.mark.cells("each")
@pytest.mark.parametrize("sizes", [(0, 1, 63, 64, 65), (2047, 2048, 2049), (65535, 65536, 65537, 200001)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_mark_what_they_change(implementation: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Few elements, none, the first and the last one, and all."""
    torch.manual_seed(0)
    models: list[Tensor | None] = [torch.randn(size).to(dtype) for size in sizes] + [None]
    masters = [None if model is None else model.float() for model in models]
    stats = CastStats.allocate(len(models), "cpu")

    def change(share: float) -> Callable[[], None]:
        def call() -> None:
            for master in masters:
                if master is not None:
                    master[torch.rand(master.numel()) < share] += 1.0
                    if share and master.numel():
                        master[0] += 1.0
                        master[-1] += 1.0
            multi_tensor_cast(masters, models, stats)

        return call

    run(models, stats, [change(0.0), change(0.01), change(0.3), change(1.0), change(0.01)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_splitting_marks_weights_alone(implementation: str, dtype: torch.dtype) -> None:
    """Remainders that change are no change of a weight."""
    torch.manual_seed(0)
    model: list[Tensor | None] = [torch.randn(3001).to(dtype)]
    masters, rests = [model[0].float()], [torch.zeros(3001, dtype=torch.int16)]  # type: ignore[union-attr]
    stats = CastStats.allocate(1, "cpu")

    def call() -> None:
        masters[0] *= 1 + 2.0**-14
        multi_tensor_split(masters, model, rests, stats)

    run(model, stats, [call, call, call])
    assert rests[0].count_nonzero() > 1000


@pytest.mark.cells("each")
@pytest.mark.parametrize("unit", [100, 7, 64, 4096])
def test_pieces_whose_units_end_within_a_word_of_bits(implementation: str, unit: int) -> None:
    """Chunks of such a piece share words, and threads must not lose each other's bits."""
    torch.manual_seed(0)
    model = torch.randn(unit * (40000 // unit)).half()
    rest = torch.zeros(model.numel(), dtype=torch.int8)
    stats = CastStats.allocate(1, "cpu")
    state, count = [torch.zeros(model.numel()) for _ in range(2)], torch.zeros(())
    one = torch.tensor(1.0)

    def call() -> None:
        adam_step(
            [torch.randn(model.numel()).half()], [rest], [state[0]], [state[1]], [count],
            [AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)], [0], Factors(one, one),
            models=[model], stats=stats, pieces=[Piece(3, unit, 2 * unit)], number=1,
        )  # fmt: skip

    run([model], stats, [call] * 4)


def test_digests_add_up_over_pieces(level: str) -> None:
    """In any order, and any word that is another one shows."""
    torch.manual_seed(0)
    found = torch.randint(-(2**15), 2**15 - 1, (70001,), dtype=torch.int16)
    whole = int(changes.digest(found))
    for cut in (1, 64, 65536, 70000):
        parts = int(changes.digest(found[cut:].contiguous(), cut)) + int(changes.digest(found[:cut]))
        assert (parts - whole) % 2**64 == 0
    for place_of in (0, 64, 65535, 70000):
        other = found.clone()
        other[place_of] += 1
        assert int(changes.digest(other)) != whole
        assert int(changes.guard(other)) != int(changes.guard(found))
    assert int(changes.digest(found[:0])) == int(changes.guard(found[:0])) == 0
    assert int(changes.digest(found, 2**32 - 5)) != whole
    for first in (0, 17, 2**32 - 5):
        alone = int(changes.guard(found)), int(changes.digest(found, first))
        assert tuple(map(int, changes.guard_and_digest(found, first))) == alone, "both in one pass"


def test_digests_are_those_of_the_definition(level: str) -> None:
    found = torch.arange(-300, 700, dtype=torch.int16)
    with np.errstate(over="ignore"):
        h = ((np.arange(1000, dtype=np.uint64) + np.uint64(17)) * np.uint64(0x9E3779B1)) & M32
        h = h ^ (h >> np.uint64(16))
        h = ((h ^ (found.numpy().astype(np.int64).astype(np.uint64) & np.uint64(0xFFFF))) * np.uint64(0x85EBCA6B)) & M32
        h = h ^ (h >> np.uint64(15))
        h = (h * np.uint64(0xC2B2AE35)) & M32
        h = h ^ (h >> np.uint64(16))
        wanted = int((h * h).sum().astype(np.int64))
    assert int(changes.digest(found, 17)) == wanted
