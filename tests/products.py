"""Which cells of a product of parameters a user's run takes. `pytest --all`, as CI runs it, takes every cell.

A test with several axes of parameters has a cell for each combination. Without ``--all`` each value of each axis is in
one cell that is run, or more; which one is drawn by the test's name, so that another test tries others. What is wrong
in one combination alone is for the random walk of tests/contract to find, and for CI. An optimizer case has two axes:
what it is, and which of torch's loops steps it.

Bits are transitive: of what may serve a kernel (`ways_to_serve`) the first takes the product, and each of the others
meets each value of each other axis.

A test says where it needs more, or less::

    @pytest.mark.cells("every")  # the product
    @pytest.mark.cells("each")  # each value once, also of what may serve

A test that walks a product by itself, as ranks do that are asked once, takes its rows from :func:`sample`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from specs import OptimizerCase

Values = dict[Any, Any]

takes_all = False
"""Whether ``--all`` was given: for what a parameter can't say, as how many random programs are run."""

WAYS = ("implementation", ("implementation",), "level")
"""Fixtures that say which kernels serve; see `ways_to_serve`."""


def ways_to_serve(levels: Sequence[str], threads: Sequence[int]) -> list[Any]:
    """Names of all that may serve the CPU: first the SIMD level that this machine would take, with two threads.

    Args:
        levels: from the plainest on; none where nothing is compiled.
        threads: how many, each with each level. A user's run takes more than one number with the first level alone.
    """
    best = levels[-1:]
    first = [f"{level}-2" for level in best]
    often = [*(f"{level}-2" for level in levels), *(f"{level}-{n}" for level in best for n in threads)]
    rest = [f"{level}-{n}" for level in levels for n in threads]
    names = dict.fromkeys([*first, "reference", "emulated", *often, *rest])
    return [
        name if name in (*often, "reference", "emulated") else pytest.param(name, marks=pytest.mark.all)
        for name in names
    ]


def axes_of(tables: Iterable[Sequence[str]], values: Values) -> Values:
    """The axes of a cell, with what stands for its value on each.

    Args:
        tables: of each ``parametrize``, the names that it gives. They are one axis, whose value is a row of the table.
        values: by name, of fixtures' parameters too. They are the same where they are the same object.
    """
    left: Values = dict(values)
    axes: Values = {}
    for names in tables:
        row = [left.pop(name) for name in names if name in left]
        cases = [value for value in row if isinstance(value, OptimizerCase)]
        axes[tuple(names)] = tuple(id(value) for value in row if not isinstance(value, OptimizerCase))
        for case in cases:
            axes["optimizer"], axes["loop"] = case.id.rpartition("-")[0], case.id.rpartition("-")[2]
    return {**axes, **{name: id(value) for name, value in left.items()}}


def chosen(cells: Sequence[tuple[str, str, Values]]) -> list[int]:
    """The places of those cells that a user's run takes.

    Args:
        cells: of each, the name of its test, what that is marked with ("" for nothing), and its axes.
    """
    tests: dict[str, list[int]] = {}
    for place, (name, _, _) in enumerate(cells):
        tests.setdefault(name, []).append(place)
    return [place for name, places in tests.items() for place in _of_one(name, cells[places[0]][1], cells, places)]


def _of_one(name: str, strength: str, cells: Sequence[tuple[str, str, Values]], places: list[int]) -> list[int]:
    axes = list(cells[places[0]][2])
    if strength == "every" or len(axes) < 2:
        return places
    way = next((axis for axis in axes if axis in WAYS), "") if strength != "each" else ""
    first = cells[places[0]][2].get(way)
    taken = [place for place in places if way and cells[place][2][way] == first]
    pairs = [(way, axis) for axis in axes if axis != way]
    return taken + covering([(place, cells[place][2]) for place in places if place not in taken], pairs, name)


def sample(seed: str, *axes: Sequence[Any], pairs: Sequence[tuple[int, int]] = ()) -> list[tuple[Any, ...]]:
    """Rows of a product that a test walks by itself, in the product's order: with ``--all`` every one.

    Args:
        seed: what draws them; the test's name.
        axes: the values of each.
        pairs: axes, by their places, of which any two values meet. Of the others each value is met once.
    """
    rows = list(itertools.product(*axes))
    if takes_all:
        return rows
    cells = [(number, dict(enumerate(map(id, row)))) for number, row in enumerate(rows)]
    alone = [("", axis) for axis in range(len(axes))]
    return [rows[place] for place in sorted(covering(cells, [*pairs, *alone], seed))]


def covering(cells: Sequence[tuple[int, Values]], pairs: Sequence[tuple[Any, Any]], seed: str) -> list[int]:
    """Places of some cells in which every two values meet that meet in some cell, of the axes of each pair.

    Args:
        pairs: of names of axes; the first may be "": then each value of the second is met once.
    """
    order = list(cells)
    random.Random(seed).shuffle(order)
    goals = {place: {(a, values.get(a), b, values.get(b)) for a, b in pairs} for place, values in order}
    left = set().union(*goals.values())
    taken = []
    for wanted in range(len(pairs), 0, -1):  # first those in which most meet that have not met
        for place, _ in order:
            if len(goals[place] & left) >= wanted:
                taken.append(place)
                left -= goals[place]
    return taken
