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
from .cuda_rows import KERNELS
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
_SPECIALS = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-45, 6e-8, 65504.0, 3.39e38, -3.4e38, 1e30, 1e-30)
_BORDERS = (65519.996, 65520.0, -65520.0, 65536.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14 - 2.0**-25)
_SMALL = (1, 7, 0, 8, 9, 63, 65, 255, 257, 2047, 2048)
_LONG = 4 * 2048 + 2048 + 5
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
def _pool(dtype: torch.dtype, special: bool) -> Tensor:
    """Numbers that tensors take theirs from: the same in every process with the same torch."""
    count, generator = CHUNK + CHUNK // 2, torch.Generator("cpu").manual_seed(_SEED)
    if not dtype.is_floating_point:
        low, high = {torch.int8: (-127, 128), torch.uint8: (0, 256), torch.int16: (-(1 << 15), 1 << 15)}[dtype]
        return torch.randint(low, high, (count,), generator=generator, dtype=dtype, device="cpu")
    if dtype != _SINGLE:
        return _pool(_SINGLE, special).to(dtype)
    found = torch.randn(count, generator=generator, dtype=_SINGLE, device="cpu")
    found *= 10.0 ** (torch.rand(count, generator=generator, dtype=_SINGLE, device="cpu") * 6.0 - 4.0)
    if special:
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
        self._taken = 0

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

    def numbers(self, numel: int, dtype: torch.dtype, special: bool) -> Tensor:
        """Numbers of mixed magnitude; with ``special`` every tenth or so is one where something turns."""
        pool = _pool(dtype, special)
        self._taken = (self._taken + 7919) % (pool.numel() - numel + 1)
        found = pool[self._taken : self._taken + numel].clone()
        if special and numel and dtype.is_floating_point:
            found[0], found[-1] = math.inf, math.nan
        return found

    def rows(self, names: Sequence[str], combos: Sequence[tuple[torch.dtype, ...]], chunk: bool = True) -> Rows:
        """Lists of tensors in every combination of dtypes, by ``names``, and one entry that is None.

        Args:
            names: of the lists.
            combos: of their dtypes.
            chunk: whether tensors of more than one chunk are among them.
        """
        made, tails = Rows(self, names), 8 if len(names) < 4 else 2
        small = itertools.cycle(_SMALL)
        for k, combo in enumerate(combos):
            made.add(combo, _LONG if k < 3 else 4101, shifted=())
            made.add(combo, 2049 + k, shifted=range(len(combo)), special=True)
            for j in range(tails):  # groups of eight with every number of elements in the last one
                numel = 8 * (j % 3) + (k * tails + j) % 8 + 1
                made.add(combo, numel, shifted=(), special=j % 2 == 1)
                made.add(combo, numel + 8 * (k % 2), shifted=((k + j) % len(combo),), special=j % 2 == 0)
            made.add(combo, next(small), shifted=range(k % 2 * len(combo)), special=k % 3 == 1)
        made.skip()
        if chunk:
            made.add(combos[0], CHUNK + 2049, shifted=())
        if chunk and len(names) < 4:
            made.add(combos[-1], CHUNK, shifted=(), special=True)
        return made

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

    def add(self, combo: Sequence[torch.dtype], numel: int, *, shifted: Sequence[int], special: bool = False) -> None:
        """One entry more, with a tensor in each list; ``shifted``: those of them that begin elsewhere."""
        for k, ((name, column), dtype) in enumerate(zip(self.columns.items(), combo, strict=True)):
            value = self._planter.numbers(numel, dtype, special)
            if name in ("exp_avg_sq", "max_exp_avg_sq", "scales"):
                value = value.abs()
            words = f"{name}[{len(self)}] ({str(dtype)[6:]}, {numel} elements)"
            column.append(self._planter.put(words, value, k in shifted))
        self.numels.append(numel)

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
            value = self._planter.numbers(size, dtype, False).abs()
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


# -- calls of operations -----------------------------------------------------------------------------------------------


def _unscale(p: Planter, marks: bool) -> Run:
    combos = [(dtype, _SINGLE) for dtype in _UP_TO_SINGLE]
    rows = p.rows(("grads", "outs"), [combo for combo in combos for _ in range(2)])
    grads, outs = rows.columns.values()
    # A tensor's rows alternate: of one combination each, as it is, and added.
    added = [row // 4 % 2 == 1 for row in range(len(rows))]
    scale, stats = p.number("inv_scale", 2.0**-7), p.grad_stats(rows)
    # Of their own: what is looked at, and not written.
    looked, seen = p.rows(("grads", "outs"), combos, chunk=False), None
    seen = p.grad_stats(looked)

    def run(room: Room) -> None:
        multi_tensor_unscale(room.list(grads), room.list(outs), room.at(scale), stats(room), accumulate=added)
        theirs = looked.on(room)
        _do(multi_tensor_unscale, *theirs, room.at(scale), seen(room), write=False)

    return run


def _check(p: Planter, marks: bool) -> Run:
    rows = p.rows(("grads",), [(dtype,) for dtype in _UP_TO_SINGLE])
    scale, stats = p.number("inv_scale", 0.1), p.grad_stats(rows)
    return lambda room: multi_tensor_check(room.list(rows.columns["grads"]), room.at(scale), stats(room))


def _unscale_clipped(p: Planter, marks: bool) -> Run:
    rows = p.rows(("grads", "outs"), [(dtype, _SINGLE) for dtype in _UP_TO_SINGLE])
    scale, factor = p.number("inv_scale", 0.1), p.number("factor", 0.3)

    def run(room: Room) -> None:
        _do(multi_tensor_unscale_clipped, *rows.on(room), room.at(scale), room.at(factor))

    return run


def _scale(p: Planter, marks: bool) -> Run:
    rows = p.rows(("tensors",), [(dtype,) for dtype in _UP_TO_SINGLE])
    untouched = p.rows(("tensors",), [(_SINGLE,)], chunk=False)
    factor, one = p.number("factor", 0.3), p.number("one", 1.0)

    def run(room: Room) -> None:
        multi_tensor_scale(room.list(rows.columns["tensors"]), room.at(factor))
        multi_tensor_scale(room.list(untouched.columns["tensors"]), room.at(one))

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
    finite = p.rows(("xs", "ys", "outs"), [(_SINGLE,) * 3], chunk=False)
    for slot in finite.columns["xs"][1:2]:  # not finite in x alone
        if slot is not None:
            p.parts[slot].value[-1] = math.inf
    found = [p.number(f"found_inf {k}", 0.0) for k in range(4)]
    xs, ys, outs = finite.columns.values()

    def run(room: Room) -> None:
        given = rows.on(room)
        multi_tensor_axpby(0.3, given[0], -1.7, given[1], given[2], found_inf=room.at(found[0]))
        one = room.list(xs[:2]), room.list(ys[:1] * 2), room.list(outs[:2])
        if xs[1] is not None and ys[0] is not None:
            one = room.list(xs[1:2]), [room.at(ys[0])[: p.parts[xs[1]].value.numel()]], room.list(outs[1:2])
        multi_tensor_axpby(0.3, one[0], 2.0, one[1], one[2], found_inf=room.at(found[1]), check="y")
        multi_tensor_axpby(0.3, one[0], 2.0, one[1], one[2], found_inf=room.at(found[2]), check="x")
        multi_tensor_axpby(0.3, one[0], 2.0, one[1], one[2])

    return run


def _cast(p: Planter, marks: bool) -> Run:
    rows = p.rows(("masters", "params"), [(_SINGLE, _HALF), (_SINGLE, _BFLOAT)])
    stats = p.cast_stats(rows, "params", marks)
    return lambda room: _do(multi_tensor_cast, *rows.on(room), stats(room))


def _sample(p: Planter, marks: bool) -> Run:
    rows = p.rows(("tensors",), [(_HALF,), (_BFLOAT,)])
    samples = p.zeros("samples", len(rows), dtype=torch.int64)
    return lambda room: multi_tensor_sample(room.list(rows.columns["tensors"]), room.at(samples))


def _l2norm(p: Planter, marks: bool) -> Run:
    rows = p.rows(("tensors",), [(dtype,) for dtype in _UP_TO_SINGLE])
    finite = p.rows(("tensors",), [(dtype,) for dtype in _UP_TO_SINGLE], chunk=False)
    plain = [column for row, column in enumerate(finite.columns["tensors"]) if row % 4 in (0, 2)]
    norm = [p.zeros("norm", dtype=torch.float64) for _ in range(2)]
    norms = [p.zeros("norms", size, dtype=torch.float64) for size in (len(rows), len(plain))]

    def run(room: Room) -> None:
        for k, column in enumerate((rows.columns["tensors"], plain)):
            whole, each = multi_tensor_l2norm(room.list(column))
            room.at(norm[k]).copy_(whole)
            room.at(norms[k]).copy_(each)

    return run


def _measure(p: Planter, marks: bool) -> Run:
    rows = p.rows(("grads",), [(dtype,) for dtype in _UP_TO_SINGLE])
    numbers = p.zeros("numbers", len(rows), len(MEASURED), dtype=torch.float64)

    def run(room: Room) -> None:
        room.at(numbers).copy_(multi_tensor_measure(room.list(rows.columns["grads"])))

    return run


def _compare(p: Planter, marks: bool) -> Run:
    combos = [(_SINGLE, _HALF, _SINGLE), (_SINGLE, _BFLOAT, _SINGLE)]
    rows = p.rows(("masters", "weights", "before"), combos)
    for name, like in (("weights", None), ("before", 0.999)):  # near the masters, as a step leaves them
        for slot, of in zip(rows.columns[name], rows.columns["masters"], strict=True):
            if slot is not None and of is not None:
                p.parts[slot].value.copy_(p.parts[of].value * (like or 1.0))
    numbers = p.zeros("numbers", len(rows), len(COMPARED), dtype=torch.float64)

    def run(room: Room) -> None:
        masters, weights, before = rows.on(room)
        room.at(numbers).copy_(multi_tensor_compare(masters, weights, Snapshots(before)))

    return run


_SPLIT = [(dtype, rest) for dtype in (_HALF, _BFLOAT) for rest in (torch.int16, torch.int8)]


def _split(p: Planter, marks: bool) -> Run:
    rows = p.rows(("masters", "params", "remainders"), [(_SINGLE, *combo) for combo in _SPLIT])
    stats = p.cast_stats(rows, "params", marks)
    return lambda room: _do(multi_tensor_split, *rows.on(room), stats(room))


def _join(p: Planter, marks: bool) -> Run:
    rows = p.rows(("params", "remainders", "outs"), [(*combo, _SINGLE) for combo in _SPLIT])
    return lambda room: _do(multi_tensor_join, *rows.on(room))


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
    rows = p.rows(("masters", "params"), [(_SINGLE, _HALF), (_SINGLE, _BFLOAT)])
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


_MAX_NORM = 0.9
_NORMS = (3.3000001, 0.7, 17.123456789, 1.23456789e200, math.inf, math.nan, 0.0)


def _decide_clip(p: Planter, marks: bool) -> Run:
    norms = [p.number("norm", value, torch.float64) for value in _NORMS]
    flags = [p.number("found_inf", value) for value in (0.0, 1.0)]
    cases = [(norm, flag, only) for norm in norms for flag, only in ((None, False), (0, True))]
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


_SCALER = (2.0, 0.5, 3.0, 2.0, 0.25, 131072.0)  # growth and backoff, an interval of 3, a hysteresis of 2, the borders
_FOLLOWED = (  # (scale, clean steps, skips in a row), whether a step overflowed: what they become
    ((1024.0, 0, 1), 0.0, (1024.0, 1, 0)),
    ((1024.0, 2, 0), 0.0, (2048.0, 0, 0)),
    ((131072.0, 2, 0), 0.0, (131072.0, 0, 0)),
    ((1024.0, 2, 0), 1.0, (1024.0, 0, 1)),
    ((1024.0, 0, 1), 1.0, (512.0, 0, 2)),
    ((0.25, 0, 5), 1.0, (0.25, 0, 6)),
)


def _close_step(p: Planter, marks: bool) -> Run:
    settings = p.put("settings", torch.tensor(_SCALER, dtype=torch.float64, device="cpu"))
    made = []
    for before, found, after in _FOLLOWED:
        trackers = torch.tensor(before[1:], dtype=torch.int32, device="cpu")
        slots = (
            p.number("found_inf", found),
            p.number("last", 0.5),
            p.number("skipped", 7.0, torch.float64),
            p.number("scale", before[0]),
            p.put("trackers", trackers),
            p.put("flags", torch.arange(300, dtype=torch.int32, device="cpu")),
            p.zeros("kept", 300, dtype=torch.int32),
            p.put("memory", torch.full((64,), 7, dtype=torch.uint8, device="cpu")),
        )
        made.append((slots, found, after))

    def run(room: Room) -> None:
        for slots, found, after in made:
            flag, last, skipped, scale, trackers, flags, kept, memory = map(room.at, slots)
            if room.is_card:
                scaler = (scale, trackers, room.at(settings))
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

_MODELS = [
    (grad, master, model)
    for model in (_HALF, _BFLOAT)
    for grad, master in itertools.product((model, _SINGLE), (_SINGLE, torch.int16, torch.int8))
]
"""Dtypes of gradients, masters and models."""
_VALUES = {
    "beta1": (0.9, 0.0, 0.3),
    "beta2": (0.999, 0.99, 0.0),
    "eps": (1e-8, 1e-3, 0.0),
    "weight_decay": (0.01, 0.0, 0.1),
    "momentum": (0.9, 0.3, 0.9),
    "dampening": (0.0, 0.3, 0.0),
}


def _groups(formula: str, rates: Sequence[Any]) -> list[Any]:
    """Options of three param_groups, every flag in both states, the learning rates given."""
    row, made = FORMULAS[formula], []
    for k, rate in enumerate(rates):
        flags = itertools.count(k)
        given = [
            next(flags) % 2 == 1 if kind is bool else _VALUES.get(name, (0.5, 0.25, 0.0))[k]
            for name, kind in row.fields.items()
        ]
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
    """

    def __init__(
        self, p: Planter, formula: str, state: Sequence[tuple[str, torch.dtype]], models: bool, marks: bool, coded: bool
    ) -> None:
        names = ("grads", "masters", *(name for name, _ in state), *(("models",) if models else ()))
        kinds = [kind for _, kind in state]
        combos = (
            [(grad, master, *kinds, model) for grad, master, model in _MODELS]
            if models
            else [(_SINGLE, _SINGLE, *kinds)]
        )
        self._formula, self._coded = formula, coded
        self.rows = rows = p.rows(names, combos, chunk=models or coded)
        if coded or models:  # pieces of whole tensors, with units of 171 elements
            rows.add(combos[-1], 3 * 171, shifted=())
            rows.add(combos[0], 12 * 171, shifted=(0, 1))
        self._pieces = [_PIECES[2] if n and n % 171 == 0 else _PIECES[k % 2] for k, n in enumerate(rows.numels)]
        self._state = [rows.columns[name] for name, _ in state]
        self._scales: Column = []
        if coded:
            counts = [piece.block_count(n) for piece, n in zip(self._pieces, rows.numels, strict=True)]
            self._scales = rows.beside("scales", counts, _SINGLE)
        self._steps = rows.beside("steps", [1] * len(rows), _SINGLE) if FORMULAS[formula].counts else None
        for k, slot in enumerate(self._steps or ()):
            if slot is not None:
                p.parts[slot].value.fill_((0.0, 7.0, 1000.0)[k % 3])
        self._rates = p.number("lr", 0.1), p.number("lr", 1e-3, torch.float64)
        self._factors = p.number("inv_scale", 2.0**-7), p.number("coefficient", 0.3)
        self._found = p.number("found_inf", 1.0), p.number("found_inf", 0.0)
        self._stats = p.cast_stats(rows, "models", marks) if models else None
        self._group_of = [k % 3 for k in range(len(rows))]
        self._first = rows.alternating()

    def run(self, room: Room) -> None:
        """Two calls: one that must write nothing, for gradients overflowed, and one step."""
        columns = {name: room.list(column) for name, column in self.rows.columns.items()}
        options = _groups(self._formula, [room.at(self._rates[0]), 0.02, room.at(self._rates[1])])
        factors = Factors(*map(room.at, self._factors))
        state: Any = [room.list(column) for column in self._state]
        common: dict[str, Any] = {
            "models": columns.get("models"),
            "stats": None if self._stats is None else self._stats(room),
            "pieces": self._pieces,
        }
        lists: Any = (columns["grads"], columns["masters"])
        steps = None if self._steps is None else room.list(self._steps)
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


def _step(formula: str, state: Sequence[tuple[str, torch.dtype]], coded: bool = False) -> Callable[..., Run]:
    def plant(p: Planter, marks: bool) -> Run:
        kinds = (True,) if marks else (False, True)  # weights of their own have no marks
        steps = [_Step(p, formula, state, models, marks, coded) for models in kinds]

        def run(room: Room) -> None:
            for step in steps:
                step.run(room)

        return run

    return plant


_CALLS: dict[str, Callable[[Planter, bool], Run]] = {
    "unscale": _unscale,
    "check": _check,
    "unscale_clipped": _unscale_clipped,
    "scale": _scale,
    "lerp": _lerp,
    "axpby": _axpby,
    "cast": _cast,
    "sample": _sample,
    "l2norm": _l2norm,
    "measure": _measure,
    "compare": _compare,
    "split": _split,
    "join": _join,
    "take": _take,
    "renew": _renew,
    "capture_scale": _capture_scale,
    "decide_clip": _decide_clip,
    "close_step": _close_step,
    "adam8": _step("adam", [("exp_avg_codes", torch.int8), ("exp_avg_sq_codes", torch.uint8)], coded=True),
    "sgd8": _step("sgd", [("momentum_codes", torch.int8)], coded=True),
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
