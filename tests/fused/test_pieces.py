"""Steps of pieces of a tensor: the bits are those that the whole one gets, whatever it is cut into.

What a whole tensor gets is held against oracles elsewhere; here it is the measure. Of rows, at which blocks begin anew,
the measure is each row as a tensor of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fp16opt.kernels import WHOLE, CallCache, CastStats, Piece
from fp16opt.kernels.operations import AdamOptions, Factors, SgdOptions
from fp16opt.kernels.state8 import multi_tensor_adam8, multi_tensor_sgd8
from fp16opt.kernels.steps import multi_tensor_step
from fused.test_state8_bits import few

ONE = torch.tensor(1.0)
ADAM = AdamOptions(0.01, 0.9, 0.999, 1e-8, 0.1, True, False)
KINDS = ("adam8", "sgd8", "split24", "split24 + adam8")
STEPS = 3

Cut = tuple[slice, slice]


@dataclass
class Tensors:
    """What one step works on: a list of each, and which piece each entry is."""

    kind: str
    masters: list[Tensor]
    pieces: list[Piece]
    models: list[Tensor] | None = None
    codes: list[list[Tensor]] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    cache: CallCache = field(default_factory=CallCache)

    @classmethod
    def of(cls, kind: str, values: list[Tensor], pieces: list[Piece]) -> Tensors:
        made = cls(kind, [v.clone() for v in values], pieces)
        if "split24" in kind:
            made.models = [v.bfloat16() for v in values]
            made.masters = [torch.zeros(v.shape, dtype=torch.int8) for v in values]
        dtypes = {"sgd8": [torch.int8], "split24": [torch.float32, torch.float32]}.get(kind, [torch.int8, torch.uint8])
        made.codes = [[torch.zeros(v.shape, dtype=dtype) for v in values] for dtype in dtypes]
        made.scales = [torch.zeros(p.block_count(v.numel())) for p, v in zip(pieces, values, strict=True)]
        made.counts = [torch.tensor(0.0) for _ in values]
        return made

    def step(self, grads: list[Tensor], number: int) -> None:
        groups, stats = [0] * len(grads), CastStats.allocate(len(grads), "cpu")
        more: dict[str, Any] = {"models": self.models, "stats": None if self.models is None else stats}
        more |= {"pieces": self.pieces, "cache": self.cache}
        factors = Factors(ONE, ONE)
        if self.kind == "sgd8":
            options, first = [SgdOptions(0.1, 0.9, 0.0, 0.0, False, False)], [number == 1] * len(grads)
            given = self.masters, *self.codes, self.scales, options, groups, factors, number
            multi_tensor_sgd8(grads, *given, first=first, **more)
        elif self.kind == "split24":
            given = grads, self.masters, self.codes, [ADAM], groups, factors
            multi_tensor_step("adamw", *given, steps=self.counts, number=number, **more)
        else:
            given = self.masters, *self.codes, self.scales, self.counts, [ADAM], groups, factors, number
            multi_tensor_adam8(grads, *given, **more)

    def kept(self) -> list[list[Tensor]]:
        """Of each entry: all that the step writes in its shape."""
        lists = [self.masters, *([] if self.models is None else [self.models]), *self.codes]
        return [list(entries) for entries in zip(*lists, strict=True)]


def drawn(rows: int, columns: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    size = torch.rand(rows, columns, generator=generator).mul_(8).sub_(6).exp_()
    return torch.randn(rows, columns, generator=generator) * size


def compare(kind: str, shape: tuple[int, int], cuts: list[Cut], whole: Piece, pieces: list[Piece]) -> None:
    """Step a whole tensor and its pieces, all of them in one call, in another order than they lie."""
    weights = drawn(*shape, 0)
    one = Tensors.of(kind, [weights], [whole])
    order = list(range(len(cuts)))[::-1]
    many = Tensors.of(kind, [weights[cuts[i]].clone() for i in order], [pieces[i] for i in order])
    for number in range(1, STEPS + 1):
        grads = drawn(*shape, number)
        one.step([grads], number)
        many.step([grads[cuts[i]].clone() for i in order], number)
        for i, kept in zip(order, many.kept(), strict=True):
            for which, (a, b) in enumerate(zip(kept, one.kept()[0], strict=True)):
                assert torch.equal(a, b[cuts[i]]), (number, i, which)
    assert any(bool(t.any()) for t in one.codes[0])


EVERYTHING = slice(None)


@few
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(24, 128), (9, 100), (5, 1000), (7, 129), (3, 70_000), (300, 640)], ids=str)
def test_rows_in_uneven_and_empty_parts(shape: tuple[int, int], kind: str, implementation: str) -> None:
    rows, columns = shape
    unit = columns if columns % 128 else 0
    bounds = [0, 1, rows // 2, rows // 2, rows]
    cuts = [(slice(a, b), EVERYTHING) for a, b in itertools.pairwise(bounds)]
    pieces = [Piece(a * columns, unit, unit) for a in bounds[:-1]]
    compare(kind, shape, cuts, Piece(0, unit, unit), pieces)


@few
@pytest.mark.parametrize("kind", KINDS)
def test_columns_and_rows_at_once(kind: str, implementation: str) -> None:
    """As tensor parallelism and FSDP2 cut together; the last columns end within a block."""
    rows, columns = 11, 640 + 44
    cuts: list[Cut] = []
    pieces = []
    for a, b in ((0, 4), (4, 11)):
        for c, d in ((0, 256), (256, 640), (640, columns)):
            cuts.append((slice(a, b), slice(c, d)))
            pieces.append(Piece(a * columns + c, d - c, columns))
    compare(kind, (rows, columns), cuts, Piece(0, columns, columns), pieces)


@few
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_as_tensors_of_their_own(kind: str, implementation: str) -> None:
    """Blocks begin anew at each row: nothing of a row depends on the one before, but for the index that rounds it."""
    rows, columns = 6, 300
    cuts = [(slice(a, a + 1), EVERYTHING) for a in range(rows)]
    pieces = [Piece(a * columns) for a in range(rows)]
    compare(kind, (rows, columns), cuts, Piece(0, columns, columns), pieces)


@few
@pytest.mark.parametrize("kind", KINDS)
def test_far_behind_the_first_four_thousand_million_elements(kind: str, implementation: str) -> None:
    """Indices count modulo 2**32, and offsets don't overflow on the way."""
    weights = [drawn(2, 256, 0), drawn(2, 256, 0)]
    tensors = Tensors.of(kind, weights, [Piece(2**62 + 2**32), WHOLE])
    tensors.step([drawn(2, 256, 1)] * 2, 1)
    near, far = tensors.kept()
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


def test_another_piece_at_the_same_call_site_is_noticed() -> None:
    tensors = Tensors.of("adam8", [drawn(4, 100, 0)], [Piece(0, 100, 100)])
    tensors.step([drawn(4, 100, 1)], 1)
    tensors.pieces = [Piece(0, 50, 50)]
    with pytest.raises(ValueError, match=r"scales\[0\] must be contiguous with 8 elements"):
        tensors.step([drawn(4, 100, 2)], 2)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "pieces has 0 entries, grads has 1. Give one each."),
        ([Piece(-1)], r"pieces\[0\] must have no negative number"),
        ([Piece(0, 300, 300)], r"pieces\[0\] has units of 300 elements, the tensor has 400"),
    ],
    ids=["none", "negative", "units"],
)
def test_pieces_that_cannot_be_are_refused(pieces: list[Piece], message: str) -> None:
    tensors = Tensors.of("adam8", [drawn(4, 100, 0)], [WHOLE])
    before = tensors.masters[0].clone()
    tensors.pieces = pieces
    with pytest.raises(ValueError, match=message):
        tensors.step([drawn(4, 100, 1)], 1)
    assert torch.equal(before, tensors.masters[0])
