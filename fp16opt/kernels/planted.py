"""What a kernel is proved on: calls of every kernel on planted numbers, in memory with guards between the tensors.

The sizes lie at every border that a kernel knows: of eight elements, of a warp, of the 2,048 that a block passes over
at a time, of four such rows, of a chunk, of a piece. The numbers are those where rounding and flags turn: ties,
subnormals, the borders of overflow, zeros of both signs, inf and nan at the first and at the last place.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, cuda
from .averages import multi_tensor_lerp
from .calls import CallCache
from .changed import ChangedBits
from .cuda_rows import KERNELS, of_kind
from .formulas import FORMULAS
from .measures import COMPARED, MEASURED, Snapshots, multi_tensor_compare, multi_tensor_measure
from .operations import (
    Factors,
    multi_tensor_axpby,
    multi_tensor_cast,
    multi_tensor_check,
    multi_tensor_join,
    multi_tensor_l2norm,
    multi_tensor_sample,
    multi_tensor_scale,
    multi_tensor_split,
    multi_tensor_step,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
)
from .pieces import CHUNK, WHOLE, Piece
from .state8 import multi_tensor_adam8, multi_tensor_sgd8
from .stats import CastStats, GradStats
from .written import multi_tensor_refresh_masters, multi_tensor_reset_remainders

GUARD = 256
"""Bytes before and behind every tensor, of which no kernel may touch one."""
_PATTERN, _SEED = 0xA5, 44
_HALF, _BFLOAT, _SINGLE = torch.float16, torch.bfloat16, torch.float32
_UP_TO_SINGLE = (_HALF, _BFLOAT, _SINGLE)
_FLOATS = [(dtype,) for dtype in _UP_TO_SINGLE]
_INTO_SINGLE = [(dtype, _SINGLE) for dtype in _UP_TO_SINGLE]
_ROUNDED = [(_SINGLE, _HALF), (_SINGLE, _BFLOAT)]
_SPLIT = list(itertools.product((_HALF, _BFLOAT), (torch.int16, torch.int8)))
_SPECIALS = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-45, 6e-8, 65504.0, 3.39e38, -3.4e38, 1e30, 1e-30)
_BORDERS = (65519.996, 65520.0, -65520.0, 65536.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14 - 2.0**-25)
_SMALL = (0, 1, 7, 8, 9, 63, 65, 255, 257, 2047, 2048)
_LONG = 4 * 2048 + 2048 + 5
_MANY = 2 * 1024 + 3 * 256 + 43
"""Words of which a thread takes eleven or twelve."""
_PLAIN, _FINITE, _ALONE, _EVERY = range(4)
"""Kinds of numbers: of mixed magnitude; those where something turns among them; one of these alone; inf and nan too."""
_RARE = (math.nan, math.inf, 65520.0, -math.inf, 3.39e38)
_FLAGS, _TOO_LARGE = (math.inf, math.nan), (math.inf, 3.39e38)
_AHEAD = 4 * 2048 + 8
"""Elements of which a thread has loads of four rows in flight."""
_PIECES = (WHOLE, Piece(1000), Piece(129, 171, 400))

Slot = int
Column = list["Slot | None"]


class Part(NamedTuple):
    """One planted tensor.

    Attributes:
        name: for messages.
        start: its first byte.
        value: before the call, on the CPU.
    """

    name: str
    start: int
    value: Tensor


class Room:
    """The planted tensors of one call, somewhere in memory.

    Args:
        parts: what lies where.
        memory: uint8, contiguous, on any device.

    Attributes:
        device: of the memory.
        is_card: whether the CUDA kernels are to work there.
    """

    def __init__(self, parts: Sequence[Part], memory: Tensor, is_card: bool) -> None:
        self._parts, self._memory, self.device, self.is_card = parts, memory, memory.device, is_card

    def at(self, slot: Slot) -> Tensor:
        """The tensor there."""
        _, start, value = self._parts[slot]
        return self._memory[start : start + value.nbytes].view(value.dtype).view(value.shape)

    def list(self, column: Column) -> Any:
        """The tensors of a list."""
        return [None if slot is None else self.at(slot) for slot in column]


Run = Callable[[Room], None]


@functools.cache
def _pool(dtype: torch.dtype, kind: int) -> Tensor:
    """Numbers that tensors take theirs from: the same in every process with the same torch."""
    count, generator = CHUNK + CHUNK // 2, torch.Generator("cpu").manual_seed(_SEED)
    if not dtype.is_floating_point:
        low, high = {torch.int8: (-127, 128), torch.uint8: (0, 256), torch.int16: (-(1 << 15), 1 << 15)}[dtype]
        return torch.randint(low, high, (count,), generator=generator, dtype=dtype, device="cpu")
    if dtype != _SINGLE or kind == _FINITE:
        found = _pool(_SINGLE, _EVERY if kind else _PLAIN).to(dtype)
        return torch.where(found.isfinite(), found, found.new_tensor(1.5)) if kind == _FINITE else found
    found = torch.randn(count, generator=generator, dtype=_SINGLE, device="cpu")
    found *= 10.0 ** (torch.rand(count, generator=generator, dtype=_SINGLE, device="cpu") * 6.0 - 4.0)
    if kind == _EVERY:
        values = torch.tensor((*_SPECIALS, *_BORDERS), dtype=_SINGLE, device="cpu")
        found[::11] = values.repeat(-(-count // 11 // len(values)) + 1)[: len(found[::11])]
        bits = found.view(torch.int32)  # ties: exactly between two numbers of float16, and of bfloat16
        bits[3::17] = bits[3::17] & ~0x1FFF | 0x1000
        bits[5::17] = bits[5::17] & ~0xFFFF | 0x8000
    return found


class Planter:
    """Makes the tensors of one call. Numbers are the same in every process with the same torch."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.size = GUARD
        self._taken = self._turn = 0

    def put(self, name: str, value: Tensor, shifted: bool = False) -> Slot:
        """Plant ``value``; ``shifted``: it begins one element behind an address that is a multiple of 256."""
        start = self.size + (value.element_size() if shifted else 0)
        self.parts.append(Part(name, start, value))
        self.size = (start + value.nbytes + 2 * GUARD - 1) // GUARD * GUARD
        return len(self.parts) - 1

    def number(self, name: str, value: float, dtype: torch.dtype = _SINGLE) -> Slot:
        """Plant one number."""
        return self.put(name, torch.tensor(value, dtype=dtype, device="cpu"))

    def zeros(self, name: str, *shape: int, dtype: torch.dtype) -> Slot:
        """Plant what the call overwrites."""
        return self.put(name, torch.zeros(shape, dtype=dtype, device="cpu"))

    def numbers(self, numel: int, dtype: torch.dtype, kind: int = _PLAIN) -> Tensor:
        """Numbers of a kind; every tenth or so is one where something turns."""
        pool = _pool(dtype, _PLAIN if kind == _ALONE else kind)
        if numel > pool.numel():
            pool = pool.repeat(-(-numel // pool.numel()))
        self._taken = (self._taken + 7919) % (pool.numel() - numel + 1)
        found = pool[self._taken : self._taken + numel].clone()
        if not numel or not dtype.is_floating_point:
            return found
        if kind == _EVERY:
            found[0], found[-1] = math.inf, math.nan
        if kind == _ALONE:
            self._turn += 1
            found[(2731 * self._turn + _SEED) % numel] = _RARE[self._turn % len(_RARE)]
        return found

    def rows(
        self,
        names: Sequence[str],
        combos: Sequence[tuple[torch.dtype, ...]],
        chunks: int = 1,
        most: int = _EVERY,
        flagged: Sequence[float] = (),
    ) -> Rows:
        """Lists of tensors in every combination of dtypes, by ``names``, and some entries that are None.

        Args:
            names: of the lists.
            combos: of their dtypes.
            chunks: whole ones of the longest tensor.
            most: what no kind of numbers is beyond: sums of inf and nan tell little.
            flagged: numbers that kernels report: each place of a thread's groups has one that is alone in its tensor.
        """
        made, are_few = Rows(self, names), len(names) * len(combos) < 20
        small, tails = itertools.cycle(_SMALL), 12 if are_few else 3
        for k, combo in enumerate(combos):
            made.add(combo, _LONG if k < 3 else 4101)
            for which in range(-1, min(len(names), 2)) if are_few else ():  # what is read, as it lies and elsewhere
                for kind in (_FINITE, _ALONE, _EVERY):
                    numel = 4 * 2048 if kind == _FINITE else _LONG
                    made.add(combo, numel, range(which, which + 1), min(kind, most))
            made.add(combo, 2049 + k, range(len(combo)), most)
            for j in range(tails):  # groups of eight with every number of elements in the last one
                numel, which = 8 * (j % 3) + (k * tails + j) % 8 + 1, (k + j) % len(combo)
                made.add(combo, numel, (), min(most, (_PLAIN, _ALONE, _FINITE, _EVERY)[j % 4]))
                made.add(combo, numel + 8 * (k % 2), (which,), min(most, (_ALONE, _PLAIN, _EVERY, _FINITE)[j % 4]))
            made.add(combo, next(small), range(k % 2 * len(combo)), most * (k % 3 == 1))
        for combo in (combos if are_few else combos[:: max(1, len(combos) // 2)]) if flagged else ():
            for row, lane in itertools.product(range(-1, 4 * are_few), range(8)):
                made.add(combo, _AHEAD if row >= 0 else 16)
                first = next(iter(made.columns.values()))[-1]
                if first is not None:
                    place = 8 + lane if row < 0 else 2048 * row + 8 * (29 * lane + 5) + lane
                    self.parts[first].value[place] = flagged[(row + lane) % len(flagged)]
        if chunks:
            made.add(combos[0], chunks * CHUNK + 2049)
            made.add(combos[-1], CHUNK if are_few else 0, (), most)
        made.skip()
        while len(made) % 4 != 3:  # sums over all entries go on behind those of four at a time
            made.skip()
        return made

    def summed(self, names: Sequence[str], combos: Sequence[tuple[torch.dtype, ...]]) -> tuple[Rows, Rows]:
        """What is proved of kernels that add up all entries: :meth:`rows`, and some whose sum is finite."""
        return self.rows(names, combos, flagged=_FLAGS), self.rows(names, combos, 6, _FINITE)

    def cast_stats(self, rows: Rows, models: str, marks: bool) -> Callable[[Room], CastStats]:
        """What a call is given that rounds masters; with ``marks`` some elements are marked before."""
        overflow = self.zeros("overflow", len(rows), dtype=torch.int32)
        if not marks:
            return lambda room: CastStats(room.at(overflow))
        of = [None if slot is None else self.parts[slot].value for slot in rows.columns[models]]
        for value in of:
            if value is not None:  # which nan a nan becomes, and whether it is marked, is up to the machine
                _without_nan(value)
        made = ChangedBits.allocate(of, "cpu")
        for row in range(1, len(of), 3):
            if of[row] is not None:
                made.of(row)[1:].fill_(0x10)
        memory, offsets = self.put("marks", made.memory), self.put("offsets of marks", made.offsets)

        def stats(room: Room) -> CastStats:
            changed = ChangedBits(room.at(memory), made.starts, made.numels, room.at(offsets))
            return CastStats(room.at(overflow), changed)

        return stats

    def grad_stats(self, rows: Rows) -> Callable[[Room], GradStats]:
        """What a call is given that judges gradients."""
        count = len(rows)
        slots = (
            self.zeros("nonfinite", count, dtype=torch.int32),
            self.zeros("sumsq", count, dtype=torch.float64),
            self.zeros("norm", dtype=torch.float64),
            self.zeros("found_inf", dtype=_SINGLE),
        )

        def stats(room: Room) -> GradStats:
            nonfinite, sumsq, norm, found_inf = map(room.at, slots)
            return GradStats(nonfinite, sumsq, norm, found_inf)

        return stats


class Rows:
    """Lists of planted tensors.

    Args:
        planter: where they are planted.
        names: of the lists.

    Attributes:
        columns: by name.
        numels: of the entries; 0 for None.
    """

    def __init__(self, planter: Planter, names: Sequence[str]) -> None:
        self._planter = planter
        self.columns: dict[str, Column] = {name: [] for name in names}
        self.numels: list[int] = []

    def __len__(self) -> int:
        return len(self.numels)

    def add(self, combo: Sequence[torch.dtype], numel: int, shifted: Sequence[int] = (), kind: int = _PLAIN) -> None:
        """One entry more, with a tensor in each list; ``shifted``: those of them that begin elsewhere."""
        for k, ((name, column), dtype) in enumerate(zip(self.columns.items(), combo, strict=True)):
            value = self._planter.numbers(numel, dtype, kind)
            if name in ("exp_avg_sq", "max_exp_avg_sq", "scales"):
                value = value.abs()
            words = f"{name}[{len(self)}] ({str(dtype)[6:]}, {numel} elements)"
            column.append(self._planter.put(words, value, k in shifted))
        self.numels.append(numel)

    def scaled(self, combo: Sequence[torch.dtype], by: float, **of: float) -> None:
        """One entry more, whose numbers are ``by`` times as large, or what is given of a list."""
        self.add(combo, 300)
        for name, column in self.columns.items():
            if column[-1] is not None and (factor := of.get(name, by)) != 1.0:
                value = self._planter.parts[column[-1]].value
                value.copy_(value * factor)

    def skip(self) -> None:
        """One entry more, which is None in every list."""
        for column in self.columns.values():
            column.append(None)
        self.numels.append(0)

    def on(self, room: Room) -> Any:
        """The lists there, by their order."""
        return [room.list(column) for column in self.columns.values()]

    def beside(self, name: str, sizes: Sequence[int], dtype: torch.dtype) -> Column:
        """A further list, of tensors of sizes of their own."""
        column: Column = []
        for row, (size, numel) in enumerate(zip(sizes, self.numels, strict=True)):
            there = numel > 0 or next(iter(self.columns.values()))[row] is not None
            value = self._planter.numbers(size, dtype).abs()
            column.append(self._planter.put(f"{name}[{row}]", value) if there else None)
        return column

    def alternating(self) -> list[bool]:
        """A flag for each."""
        return [row % 2 == 1 for row in range(len(self))]


def _without_nan(value: Tensor) -> None:
    value.nan_to_num_(nan=1.0, posinf=math.inf, neginf=-math.inf)


def _do(function: Callable[..., Any], *given: Any, **more: Any) -> None:
    """Call an operation with lists whose number is another for each."""
    function(*given, **more)


def _twice(function: Callable[..., Any], *given: Any, clear: Sequence[Tensor] = (), **more: Any) -> Any:
    """The same with one table: the second time a kernel finds in it what the first has left, and no results."""
    cache = CallCache()
    found = function(*given, cache=cache, **more)
    for result in (*(() if found is None else found), *clear):
        result.zero_()
    return function(*given, cache=cache, **more)


def _of_stats(stats: GradStats) -> tuple[Tensor, ...]:
    return stats.nonfinite, stats.sumsq, stats.norm, stats.found_inf


# -- calls of operations -----------------------------------------------------------------------------------------------


Plant = Callable[[Planter, bool], Run]
"""Plants what proves a kernel, with marks or without."""


def _unscale(p: Planter, marks: bool) -> Run:
    names, combos = ("grads", "outs"), _INTO_SINGLE
    scale = p.number("inv_scale", 0.1)
    calls = [
        (rows, p.grad_stats(rows), more)
        for rows, more in (
            (p.rows(names, combos, 6, flagged=_FLAGS), {"accumulate": False}),
            (p.rows(names, combos, flagged=_FLAGS), {"accumulate": True}),
            (p.rows(names, combos, 0, _FINITE), {"write": False}),
        )
    ]

    def run(room: Room) -> None:
        for rows, stats, more in calls:
            found = stats(room)
            _twice(multi_tensor_unscale, *rows.on(room), room.at(scale), found, clear=_of_stats(found), **more)

    return run


def _check(p: Planter, marks: bool) -> Run:
    scale = p.number("inv_scale", 0.1)
    rows, finite = p.summed(("grads",), _FLOATS)
    stats = [p.grad_stats(of) for of in (rows, finite)]

    def run(room: Room) -> None:
        one, other = (given(room) for given in stats)
        _do(multi_tensor_check, *rows.on(room), room.at(scale), one)
        _twice(multi_tensor_check, *finite.on(room), room.at(scale), other, clear=_of_stats(other))

    return run


def _scale(p: Planter, marks: bool) -> Run:
    rows = p.rows(("tensors",), _FLOATS)
    untouched = p.rows(("tensors",), [(_SINGLE,)], 0)
    factor, one = p.number("factor", 0.3), p.number("one", 1.0)

    def run(room: Room) -> None:
        for lists, by in ((rows, factor), (untouched, one)):
            _do(multi_tensor_scale, *lists.on(room), room.at(by))

    return run


def _lerp(p: Planter, marks: bool) -> Run:
    rows = p.rows(("averages", "values"), [(_SINGLE, dtype) for dtype in _UP_TO_SINGLE])

    def run(room: Room) -> None:
        for weight in (0.001, 0.75):
            _do(multi_tensor_lerp, *rows.on(room), weight)

    return run


def _axpby(p: Planter, marks: bool) -> Run:
    combos = list(itertools.product(_UP_TO_SINGLE, repeat=3))
    rows = p.rows(("xs", "ys", "outs"), [*combos[::2], (_BFLOAT, _HALF, _SINGLE)])
    finite = p.rows(("xs", "ys", "outs"), [(_SINGLE,) * 3], 0)
    x, y, out = (column[1] for column in finite.columns.values())
    for slot in () if x is None else (x,):  # not finite in x alone
        p.parts[slot].value[-1] = math.inf
    found = [p.number(f"found_inf {k}", 0.0) for k in range(3)]

    def run(room: Room) -> None:
        xs, ys, outs = rows.on(room)
        multi_tensor_axpby(0.3, xs, -1.7, ys, outs, found_inf=room.at(found[0]))
        one = room.list([x]), room.list([y]), room.list([out])
        for flag, check in ((found[1], "y"), (found[2], "x")):
            _do(multi_tensor_axpby, 0.3, one[0], 2.0, one[1], one[2], found_inf=room.at(flag), check=check)
        multi_tensor_axpby(0.3, one[0], 2.0, one[1], one[2])

    return run


def _rounding(function: Callable[..., None], names: Sequence[str], combos: Sequence[tuple[torch.dtype, ...]]) -> Plant:
    """Of operations that round masters to params."""

    def plant(p: Planter, marks: bool) -> Run:
        rows = p.rows(names, combos, 6, flagged=_TOO_LARGE)
        stats = p.cast_stats(rows, "params", marks)

        def run(room: Room) -> None:
            found = stats(room)
            _twice(function, *rows.on(room), found, clear=[found.overflow])

        return run

    return plant


def _plain(
    function: Callable[..., None], names: Sequence[str], combos: Sequence[tuple[torch.dtype, ...]], *factors: float
) -> Plant:
    """Of operations that are given lists and numbers."""

    def plant(p: Planter, marks: bool) -> Run:
        rows = p.rows(names, combos)
        given = [p.number("factor", factor) for factor in factors]
        return lambda room: _do(function, *rows.on(room), *map(room.at, given))

    return plant


def _sample(p: Planter, marks: bool) -> Run:
    rows = p.rows(("tensors",), [(_HALF,), (_BFLOAT,)], 6)
    samples = p.zeros("samples", len(rows), dtype=torch.int64)
    return lambda room: _twice(multi_tensor_sample, *rows.on(room), room.at(samples), clear=[room.at(samples)])


def _l2norm(p: Planter, marks: bool) -> Run:
    calls = [
        (rows, p.zeros("norm", dtype=torch.float64), p.zeros("norms", len(rows), dtype=torch.float64))
        for rows in p.summed(("tensors",), _FLOATS)
    ]

    def run(room: Room) -> None:
        for rows, norm, norms in calls:
            whole, each = _twice(multi_tensor_l2norm, *rows.on(room))
            room.at(norm).copy_(whole)
            room.at(norms).copy_(each)

    return run


def _measure(p: Planter, marks: bool) -> Run:
    rows = p.rows(("grads",), _FLOATS, 6, flagged=_FLAGS)
    numbers = p.zeros("numbers", len(rows), len(MEASURED), dtype=torch.float64)

    def run(room: Room) -> None:
        room.at(numbers).copy_(_twice(multi_tensor_measure, *rows.on(room)))

    return run


def _compare(p: Planter, marks: bool) -> Run:
    kinds = [*_ROUNDED, *((dtype, dtype) for dtype in _UP_TO_SINGLE)]
    rows = p.rows(("masters", "weights", "before"), [(*kind, _SINGLE) for kind in kinds], 6)
    for name, like in (("weights", 1.0), ("before", 0.999)):  # near the masters, as a step leaves them
        for slot, of in zip(rows.columns[name], rows.columns["masters"], strict=True):
            if slot is not None and of is not None:
                p.parts[slot].value.copy_(p.parts[of].value * like)
    numbers = p.zeros("numbers", len(rows), len(COMPARED), dtype=torch.float64)

    def run(room: Room) -> None:
        masters, weights, before = rows.on(room)
        room.at(numbers).copy_(_twice(multi_tensor_compare, masters, weights, Snapshots(before)))

    return run


def _where_written(p: Planter, rows: Rows, call: Callable[..., None]) -> Run:
    now = p.put("now", torch.arange(len(rows), dtype=torch.int64, device="cpu"))
    then = p.put("then", torch.arange(len(rows), dtype=torch.int64, device="cpu"))
    p.parts[then].value[::3] -= 1 << 40
    p.parts[then].value[1::3] += 1
    taken = p.zeros("taken", len(rows), dtype=torch.int32)

    def run(room: Room) -> None:
        call(*rows.on(room), room.at(now), room.at(then), room.at(taken))

    return run


def _take(p: Planter, marks: bool) -> Run:
    rows = p.rows(("masters", "params"), _ROUNDED)
    for master, param in zip(*rows.columns.values(), strict=True):
        if master is not None and param is not None:  # two of three elements are what the master rounds to
            value = p.parts[param].value
            for first in (1, 2):
                value[first::3] = p.parts[master].value[first::3].to(value.dtype)
            _without_nan(value)  # which nan a nan rounds to, and whether it is taken, is up to the machine
    return _where_written(p, rows, multi_tensor_refresh_masters)


def _renew(p: Planter, marks: bool) -> Run:
    return _where_written(p, p.rows(("params", "remainders"), _SPLIT), multi_tensor_reset_remainders)


# -- decisions ---------------------------------------------------------------------------------------------------------


def _capture_scale(p: Planter, marks: bool) -> Run:
    scales = [p.number("scale", value) for value in (65536.0, 3.0, 1e-38)]
    pairs = [p.zeros("pair", 2, dtype=_SINGLE) for _ in scales]

    def run(room: Room) -> None:
        for scale, pair in zip(scales, pairs, strict=True):
            if room.is_card:
                cuda.capture_scale(room.at(scale), room.at(pair))
            else:
                value = room.at(scale)
                room.at(pair).copy_(torch.stack([value, value.reciprocal()]))

    return run


_MAX_NORM = 0.6
_NORMS = (3.3000001, 0.7, 17.123456789, 1.002047e39, math.inf, math.nan, 0.0)


def _decide_clip(p: Planter, marks: bool) -> Run:
    norms = [p.number("norm", value, torch.float64) for value in _NORMS]
    flags = [p.number("found_inf", value) for value in (0.0, 1.0)]
    cases = [(norm, None, False) for norm in norms] + [(norm, 0, True) for norm in norms[3:5]]
    cases.append((norms[0], 1, False))
    made = [(p.zeros("single", dtype=_SINGLE), p.zeros("factor", dtype=_SINGLE)) for _ in cases]

    def run(room: Room) -> None:
        for (norm, flag, only), (single, factor) in zip(cases, made, strict=True):
            found = None if flag is None else room.at(flags[flag])
            if room.is_card:
                cuda.decide_clip(room.at(norm), found, _MAX_NORM, only, room.at(single), room.at(factor))
            else:
                given = backends.clip_factor(room.at(norm), _MAX_NORM)
                given = given if found is None else torch.where(found > 0, 1.0, given)
                room.at(single).copy_(room.at(norm).float())
                room.at(factor).copy_(torch.where(room.at(norm).isfinite(), given, 1.0) if only else given)

    return run


_GROWTH, _BACKOFF, _LEAST, _MOST = 1.7000000123, 0.3000000456, 0.2500001, 131072.1
_SCALER = (_GROWTH, _BACKOFF, 3.0, 2.0, _LEAST, _MOST)  # the scale grows after 3 steps, and backs off after 2 skips
_FOLLOWED: tuple[Any, ...] = (
    # (scale, clean steps, skips in a row), whether a step overflowed: what they become
    ((1024.0, 0, 1), 0.0, (1024.0, 1, 0)),
    ((1001.0, 2, 0), 0.0, (1001.0 * _GROWTH, 0, 0)),
    ((131072.0, 2, 0), 0.0, (_MOST, 0, 0)),
    ((1024.0, 2, 0), 1.0, (1024.0, 0, 1)),
    ((1001.0, 0, 1), 1.0, (1001.0 * _BACKOFF, 0, 2)),
    ((0.5, 0, 5), 1.0, (_LEAST, 0, 6)),
    ((1024.0, 1, (1 << 31) - 2), 1.0, (1024.0 * _BACKOFF, 0, 0)),
)
_FOLLOWED_STATIC = (((1024.0, 3, 2), 0.0, (1024.0, 0, 2)), ((1024.0, 3, 2), 1.0, (1024.0, 4, 2)))
"""The same of a static scale, whose first tracker are the skips in a row."""


def _close_step(p: Planter, marks: bool) -> Run:
    settings = p.put("settings", torch.tensor(_SCALER, dtype=torch.float64, device="cpu"))
    cases = [(*case, settings) for case in _FOLLOWED] + [(*case, None) for case in _FOLLOWED_STATIC]
    made = []
    for before, found, after, given in cases:
        trackers = torch.tensor(before[1:], dtype=torch.int32, device="cpu")
        slots = (
            p.number("found_inf", found),
            p.number("last", 0.5),
            p.number("skipped", 7.0, torch.float64),
            p.number("scale", before[0]),
            p.put("trackers", trackers),
            p.put("flags", torch.arange(_MANY, dtype=torch.int32, device="cpu")),
            p.zeros("kept", _MANY, dtype=torch.int32),
            p.put("memory", torch.full((4 * _MANY,), 7, dtype=torch.uint8, device="cpu")),
        )
        made.append((slots, found, after, given))

    def run(room: Room) -> None:
        for slots, found, after, given in made:
            flag, last, skipped, scale, trackers, flags, kept, memory = map(room.at, slots)
            if room.is_card:
                scaler = (scale, trackers, None if given is None else room.at(given))
                cuda.close_step(room.device, memory, flags, kept, flag, (last, skipped), scaler)
                continue
            last.copy_(flag)
            skipped += found
            scale.fill_(after[0])
            trackers.copy_(torch.tensor(after[1:], dtype=torch.int32, device="cpu"))
            kept.copy_(flags)
            memory.zero_()

    return run


# -- steps -------------------------------------------------------------------------------------------------------------

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
_MODELS: list[Dtypes] = [
    (grad, master, model)
    for model in (_HALF, _BFLOAT)
    for grad, master in itertools.product((model, _SINGLE), (_SINGLE, torch.int16, torch.int8))
]
"""Dtypes of gradients, masters and models."""
_COUNTS = (0.0, 7.0, 1000.0, 1.0, 65536.0, 20_000.0, 300_001.0)
"""Of steps that a parameter has made."""
_VALUES = {
    "beta1": (0.9, 0.0, 0.3, 2.0**-70),
    "beta2": (0.999, 2.0**-70, 0.0, 0.3),
    "eps": (1e-8, 1e-3, 0.0, 1e-5),
    "weight_decay": (0.01, 0.0, 0.1, 0.3),
    "momentum": (0.9, 0.3, 0.9, 0.5),
    "dampening": (0.0, 0.3, 0.0, 0.1),
}


def _groups(formula: str, rates: Sequence[Any]) -> list[Any]:
    """Options of param_groups, every flag in both states, the learning rates given."""
    row, made = FORMULAS[formula], []
    for k, rate in enumerate(rates):
        turn, which = divmod(k, 4)
        flags = itertools.count(k + turn)
        given = [next(flags) % 2 == 1 if kind is bool else _VALUES[name][which] for name, kind in row.fields.items()]
        made.append(row.options(rate, *given))
    return made


class _Step:
    """One call of a step, with models or without.

    Args:
        p: where tensors are planted.
        formula: of :data:`.formulas.FORMULAS`.
        state: names and dtypes of the lists of state.
        models: whether masters have 16-bit models.
        marks: whether what changes is marked.
        coded: whether state has 8 bits.
        only: the one kind of gradients, masters and models; None: all.
    """

    def __init__(
        self,
        p: Planter,
        formula: str,
        state: Sequence[tuple[str, torch.dtype]],
        models: bool,
        marks: bool,
        coded: bool,
        only: Dtypes | None = None,
    ) -> None:
        names = ("grads", "masters", *(name for name, _ in state), *(("models",) if models else ()))
        kinds = [kind for _, kind in state]
        combos = (
            [(grad, master, *kinds, model) for grad, master, model in ([only] if only else _MODELS)]
            if models
            else [(_SINGLE, _SINGLE, *kinds)]
        )
        self._formula, self._coded = formula, coded
        self.rows = rows = p.rows(names, combos, models or coded, flagged=_TOO_LARGE if models else ())
        if coded or models:  # pieces of whole tensors, with units of 171 elements
            rows.add(combos[-1], 3 * 171)
            rows.add(combos[0], 12 * 171, (0, 1))
            rows.scaled(combos[0], 0.0)  # blocks in which nothing is
            tiny = {names[2]: 2.0**-30, "grads": 2.0**-26, "models": 2.0**-26}  # steps below what remainders hold
            for combo in 2 * (combos if only else combos[1:3] + combos[7:9]):
                rows.scaled(combo, 1.0, **tiny)
        self._pieces = [_PIECES[2] if n and n % 171 == 0 else _PIECES[k % 2] for k, n in enumerate(rows.numels)]
        self._state = [rows.columns[name] for name, _ in state]
        self._scales: Column = []
        if coded:
            counts = [piece.block_count(n) for piece, n in zip(self._pieces, rows.numels, strict=True)]
            self._scales = rows.beside("scales", counts, _SINGLE)
        self._steps: Slot | None = None
        if FORMULAS[formula].counts:
            made = torch.tensor(_COUNTS, dtype=_SINGLE, device="cpu").repeat(-(-len(rows) // len(_COUNTS)))
            self._steps = p.put("steps", made[: len(rows)].clone())
        self._rates = p.number("lr", 0.1), p.number("lr", 1e-3, torch.float64)
        self._factors = p.number("inv_scale", 0.1), p.number("coefficient", 0.3)
        self._found = p.number("found_inf", 1.0), p.number("found_inf", 0.0)
        self._stats = p.cast_stats(rows, "models", marks) if models else None
        self._lr = (0.02, 0.3, 3e-3) if coded else (0.02, 0.3)
        self._group_of = [k // 2 % (2 + len(self._lr)) for k in range(len(rows))]
        self._first = rows.alternating()

    def run(self, room: Room) -> None:
        """Two calls: one that must write nothing, for gradients overflowed, and one step."""
        columns = {name: room.list(column) for name, column in self.rows.columns.items()}
        first, second = map(room.at, self._rates)
        options = _groups(self._formula, [first, self._lr[0], second, *self._lr[1:]])
        factors = Factors(*map(room.at, self._factors))
        state: Any = [room.list(column) for column in self._state]
        common: dict[str, Any] = {
            "models": columns.get("models"),
            "stats": None if self._stats is None else self._stats(room),
            "pieces": self._pieces,
        }
        lists: Any = (columns["grads"], columns["masters"])
        steps: Any = None
        if self._steps is not None:
            each = room.at(self._steps).unbind()
            steps = [
                None if slot is None else step for slot, step in zip(self.rows.columns["grads"], each, strict=True)
            ]
        common["cache"] = CallCache()
        for found in self._found:
            common["found_inf"] = room.at(found)
            behind: Any = (options, self._group_of, factors)
            if not self._coded:
                more: dict[str, Any] = {"steps": steps, "first": self._first, "number": 3}
                _do(multi_tensor_step, self._formula, *lists, state, *behind, **more, **common)
            elif steps is not None:
                _do(multi_tensor_adam8, *lists, *state, room.list(self._scales), steps, *behind, 3, **common)
            else:
                _do(multi_tensor_sgd8, *lists, *state, room.list(self._scales), *behind, 3, first=self._first, **common)


def _step(
    formula: str, state: Sequence[tuple[str, torch.dtype]], coded: bool = False, only: Dtypes | None = None
) -> Plant:
    def plant(p: Planter, marks: bool) -> Run:
        kinds = (True,) if marks or only else (False, True)  # weights of their own have no marks
        steps = [_Step(p, formula, state, models, marks, coded, only) for models in kinds]

        def run(room: Room) -> None:
            for step in steps:
                step.run(room)

        return run

    return plant


_CODED = {
    "adam8": ("adam", [("exp_avg_codes", torch.int8), ("exp_avg_sq_codes", torch.uint8)]),
    "sgd8": ("sgd", [("momentum_codes", torch.int8)]),
}
"""Formula and state of steps that keep it in 8 bits."""
_CALLS: dict[str, Plant] = {
    "unscale": _unscale,
    "check": _check,
    "unscale_clipped": _plain(multi_tensor_unscale_clipped, ("grads", "outs"), _INTO_SINGLE, 0.1, 0.3),
    "scale": _scale,
    "lerp": _lerp,
    "axpby": _axpby,
    "cast": _rounding(multi_tensor_cast, ("masters", "params"), _ROUNDED),
    "sample": _sample,
    "l2norm": _l2norm,
    "measure": _measure,
    "compare": _compare,
    "split": _rounding(
        multi_tensor_split, ("masters", "params", "remainders"), [(_SINGLE, *combo) for combo in _SPLIT]
    ),
    "join": _plain(multi_tensor_join, ("params", "remainders", "outs"), [(*combo, _SINGLE) for combo in _SPLIT]),
    "take": _take,
    "renew": _renew,
    "capture_scale": _capture_scale,
    "decide_clip": _decide_clip,
    "close_step": _close_step,
    **{name: _step(*what, coded=True) for name, what in _CODED.items()},
    **{
        of_kind(name, kind): _step(*what, coded=True, only=dtypes)
        for name, what in _CODED.items()
        for dtypes, kind in cuda.OF_DTYPES.items()
    },
    **{
        kernel: _step(name, [(one, _SINGLE) for one in formula.state[:count]])
        for name, formula in FORMULAS.items()
        for count, kernel in enumerate(formula.kernels, formula.least())
    },
}


class Planted(NamedTuple):
    """A kernel's planted tensors, and the calls that it is proved by.

    Attributes:
        parts: what lies where.
        before: uint8, on the CPU: the memory that they lie in.
        run: makes the calls, in any memory.
    """

    parts: list[Part]
    before: Tensor
    run: Run


@functools.cache
def planted(kernel: str) -> Planted:
    """What proves ``kernel``, a key of :data:`.cuda_rows.KERNELS`."""
    planter, marks = Planter(), KERNELS[kernel].marks
    run = _CALLS[kernel.removesuffix("_marking")](planter, marks)
    memory = torch.full((planter.size,), _PATTERN, dtype=torch.uint8, device="cpu")
    for _, start, value in planter.parts:
        memory[start : start + value.nbytes] = value.reshape(-1).view(torch.uint8)
    return Planted(planter.parts, memory, run)


@functools.cache
def expected(kernel: str) -> Tensor:
    """The memory of :func:`planted` after its calls, by the CPU's kernels, or torch operations without these."""
    parts, before, run = planted(kernel)
    after = before.clone()
    run(Room(parts, after, False))
    return after
