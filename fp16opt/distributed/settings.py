"""What all ranks must have alike in every step, in a number that travels with the message they send anyway."""

from __future__ import annotations

import ctypes
import math
import zlib
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..engine import errors
from ..engine.ranks import Asked
from .exchange import gather

_NONE = -1.7e308  # stands for None: no setting has it
_EXACT = 2**53  # float64 counts up to here without gaps


def setting_lines(groups: Sequence[dict[str, Any]], kept: Container[str] = ()) -> list[str]:
    """Settings of groups in words, in an order in which the first difference tells most.

    Args:
        kept: keys that are no settings: see :class:`Settings`.
    """
    return [line for key, line in _named_lines(groups) if key not in kept]


def _named_lines(groups: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(key, line) of each setting."""
    lines = []
    for number, group in enumerate(groups):
        lines += [(key, f"group {number} with {key}={shown(value)}") for key, value in _settings(group)]
    return lines


def shown(value: Any) -> str:
    """A value in words that are alike on all ranks where the value is: of objects the class, as their addresses differ.

    Example:
        >>> import math
        >>> shown(0.1), shown([1e-4, 3]), shown(math.nextafter(0.1, 1.0)), shown(max)
        ('0.1', '(0.0001, 3)', '0.1', 'builtin_function_or_method')
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, float):
        value = value + 0.0  # which makes 0 of -0
        single = _single(value)
        texts = [f"{value:.{digits}g}" for digits in range(6, 10)]  # nine digits tell any two float32 apart
        return next((text for text in texts if _single(float(text)) == single), texts[-1])
    if isinstance(value, (tuple, list)):
        items = ", ".join(map(shown, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if value is None or isinstance(value, (bool, int, str, dict)):
        return repr(value)
    return type(value).__qualname__


def _single(number: float) -> float:
    """A setting as ranks compare it: float32, as machines may compute its last bits of float64 differently."""
    return ctypes.c_float(number).value + 0.0  # which makes 0 of -0


def refuse_settings(first: int, lines: list[str], rank: int, others: list[str], when: str) -> None:
    """Raise ``RuntimeError`` where two ranks have other settings: lines of :func:`setting_lines`."""
    for one, other in zip([*lines, "nothing more"], [*others, "nothing more"], strict=False):
        if one != other:
            raise errors.SETTINGS_DRIFTED(first=first, one=one, rank=rank, other=other, when=when)


def _settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, group[key]) for key in sorted(group) if key not in ("params", "param_names")]


def number_limit(ranks: int) -> int:
    """The largest number whose squares, added up over so many ranks, are exact in float64."""
    return math.isqrt(_EXACT // ranks)


class Settings:
    """Of one optimizer, the user's object: a scheduler or the user may change its groups at any time.

    Args:
        optimizer: the wrapped one.

    Attributes:
        kept: keys of groups in which steps keep values, each rank its own, and which are no settings: the estimates
            of Prodigy around ZeRO. Known, on all ranks alike, when such a value has differed for the first time.
        idle: whether this rank has no gradients of its own, as a frozen stage of a pipeline. Known in the same way.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._written: set[str] = set()
        self.kept: frozenset[str] = frozenset()
        self.idle = False

    def see_step(self, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
        """Groups as they were before a step of this rank, and as it has left them: what differs is no setting."""
        for one, other in zip(before, after, strict=True):
            for key, value in _settings(other):
                if isinstance(value, (int, float)) and one.get(key) != value:
                    self._written.add(key)

    def number(self, asked: Asked, ranks: int) -> int:
        """1 or more, and so small that squares of it, added up over so many ranks, are exact in float64.

        Made of numbers, texts, None and tuples of these; a tensor on a device counts as there, so that nothing syncs.
        """
        values = array("d")
        _extend(values, asked._replace(has_grads=asked.has_grads is not self.idle))
        for group in self._optimizer.param_groups:
            for key, value in _settings(group):
                if key not in self.kept:
                    _extend(values, (value,))
        return 1 + zlib.crc32(values.tobytes()) % (number_limit(ranks) - 1)

    def refuse(self, asked: Asked, must_hold: Callable[[Tensor], Sequence[int]], group: Any, is_late: bool) -> None:
        """Ranks have asked for different things, or have other settings: raise on all of them. Collective.

        Where they differ in values alone that steps have written, these are :attr:`kept` from here on; and ranks
        without gradients that share no parameter with those that have some are :attr:`idle`.

        Args:
            must_hold: gives the ranks that have a parameter.
            is_late: whether it is the step before that they differed in.
        """
        groups = self._optimizer.param_groups
        trained = {tuple(must_hold(param)) for each in groups for param in each["params"] if param.requires_grad}
        is_as_known = asked.has_grads is not self.idle
        mine = words_of(asked), _named_lines(groups), self._written, (asked.has_grads, is_as_known, trained)
        everyone = gather(mine, group)
        when = errors.STEPPED_BEFORE if is_late else errors.NOTHING_WAS_STEPPED
        for rank, (words, *_) in enumerate(everyone):
            if words != everyone[0][0]:
                raise errors.ANOTHER_ORDER(one=everyone[0][0], rank=rank, other=words, when=when)
        holds = [told for *_, told in everyone]
        for rank, (has_grads, _, trained) in enumerate(holds):
            there = [k for k, (others_have, _, theirs) in enumerate(holds) if others_have and theirs & trained]
            if there and not has_grads:
                raise errors.NO_GRADIENTS_HERE(rank=rank, one=words_of(asked), first=there[0], when=when)
        self.idle = not asked.has_grads
        kept = self.kept.union(*(written for *_, written, _ in everyone))
        told = [[line for key, line in lines if key not in kept] for _, lines, *_ in everyone]
        for rank, lines in enumerate(told):
            refuse_settings(0, told[0], rank, lines, when)
        if kept != self.kept or not all(is_as_known for _, is_as_known, _ in holds):
            self.kept = kept
            return
        raise RuntimeError(
            f"settings drifted apart in the last message and are alike again now. {when}. Change settings on all ranks "
            "between the same two calls."
        )


def words_of(asked: Asked) -> str:
    """A call in words."""
    if asked.norm_type is None:
        call = "step()"
    else:
        most = "" if asked.max_norm is None else f"{asked.max_norm:g}, "
        call = f"clip_master_grads({most}norm_type={asked.norm_type:g})"
    clips = f"{asked.turn} clip{'s' if asked.turn > 1 else ''}"
    call = f"{call}, after {clips} of these gradients" if asked.turn else call
    return f"{call}, of step {asked.steps + 1}"


def _extend(values: array[float], items: Iterable[Any]) -> None:
    for item in items:
        if item is None:
            values.append(_NONE)
        elif isinstance(item, int) and abs(item) >= _EXACT:
            values.append(zlib.crc32(repr(item).encode()))
        elif isinstance(item, (int, float)):
            values.append(_single(item))
        elif isinstance(item, str):
            values.append(zlib.crc32(item.encode()))
        elif isinstance(item, (tuple, list)):
            _extend(values, item)
        elif isinstance(item, Tensor) and item.device.type == "cpu" and item.numel() == 1:
            values.append(_single(item.item()))
