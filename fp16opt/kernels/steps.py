"""The one-pass optimizer steps over lists of tensors: gradient in, master, state and 16-bit weight out.

A stored gradient g becomes (float32(g) * inv_scale) * coefficient, two roundings, and the step's formulas are torch's
with every operation rounded: compiled kernels and the references of :mod:`.formulas` give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda, cuda_steps, reference_steps
from .backends import captures
from .calls import Call, Entries, Operation, PointerTables
from .cuda_rows import KERNELS, Blocks
from .formulas import FORMULAS, AdamOptions, Formula, LionOptions, SgdOptions
from .reference_steps import Factors
from .stats import CastStats, check_given
from .tables import BFLOAT, HALF, REMAINDERS, SINGLE, call_for

__all__ = [
    "AdamOptions",
    "Factors",
    "LionOptions",
    "SgdOptions",
    "multi_tensor_step",
]

_NO_STATS = "stats must be given along with models, got None. Use CastStats.allocate."
_MODELS = "float32, but for models of float16 or bfloat16 and gradients of float32 or the model's dtype"


def _owned(grad: torch.dtype, *others: torch.dtype) -> bool:
    return grad == SINGLE and all(dtype == SINGLE for dtype in others)


def _with_models(grad: torch.dtype, *others: torch.dtype) -> bool:
    master, *singles, model = others
    fits = model in (HALF, BFLOAT) and grad in (SINGLE, model) and master in (SINGLE, *REMAINDERS)
    return fits and all(dtype == SINGLE for dtype in singles)


class _Served(NamedTuple):
    """What a step with so many lists of state needs: its formula, its lists as the guards see them, its CUDA kernel."""

    formula: Formula
    operation: Operation
    kernel: str


def _served(name: str, formula: Formula) -> Iterator[tuple[tuple[str, int, bool], _Served]]:
    """A formula's steps, by its name, the number of lists of state, and whether there are models."""
    counters = "steps" if formula.counts else ""
    for count, kernel in enumerate(formula.kernels, formula.least()):
        lists = ("grads", "masters", *(f"{one}s" for one in formula.state[:count]))
        called, coded = f"multi_tensor_{name}", ("cpu", "cuda")
        own = Operation(called, lists, _owned, "float32 each", (1,), 1, counters)
        with_models = (*lists, "models")
        models = Operation(called, with_models, _with_models, _MODELS, (len(lists),), 1, counters, coded=coded)
        yield (name, count, False), _Served(formula, own, kernel)
        yield (name, count, True), _Served(formula, models, kernel)


_STEPS = dict(itertools.chain.from_iterable(itertools.starmap(_served, FORMULAS.items())))


class Given(NamedTuple):
    """What every step is given beside its lists; see :func:`multi_tensor_step`.

    Attributes:
        has_models: whether masters have 16-bit parameters, whose ``stats`` are written.
        first: which state holds nothing yet.
    """

    factors: Factors
    options: Sequence[Any]
    group_of: Sequence[int]
    has_models: bool
    stats: CastStats | None
    found_inf: Tensor | None
    tables: PointerTables | None
    number: int
    first: Sequence[bool] | None = None

    def behind(self, struct: str, groups: Iterable[bytes]) -> tuple[Any, ...]:
        """What the compiled CPU step of a functor has behind its lists, but for flags."""
        overflow = self.stats.overflow if self.has_models and self.stats is not None else 0
        told = (overflow, self.has_models, self.group_of, b"".join(groups), self.number & 0xFFFFFFFF)
        return (struct, *self.factors, *told)


def check_options(name: str, kind: type[Any], options: Sequence[Any]) -> None:
    """Raise unless the options of all groups are of a kind, and their betas have powers.

    Raises:
        TypeError: of another kind, or an lr that is neither a number nor a tensor. ValueError: a beta.
    """
    for place, given in enumerate(options):
        if type(given) is not kind or not isinstance(given[0], (int, float, Tensor)):
            raise TypeError(
                f"{name}: options[{place}] must be {kind.__name__}, with a number or a tensor for lr, got {given!r}."
            )
        for beta in ("beta1", "beta2"):
            value = getattr(given, beta, 0.0)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: options[{place}].{beta} must be at least 0 and less than 1, got {value}.")


def step_call(operation: Operation, lists: tuple[Entries, ...], given: Given) -> Call | None:
    """The lists of a step, checked with what is given beside them; None where the host reads that it is to skip.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`multi_tensor_step`.
    """
    factors, found_inf = given.factors, given.found_inf
    call = call_for(operation, lists, given.tables, getattr(factors[0], "device", None))
    if given.has_models and given.stats is None:
        raise ValueError(f"{operation.name}: {_NO_STATS}")
    numbers = {"factors.inv_scale": factors[0], "factors.coefficient": factors[1], "found_inf": found_inf}
    each: dict[str, Any] = {"group_of": given.group_of, "first": given.first}
    stats = given.stats if given.has_models else None
    check_given(operation.name, call.plan, numbers, stats, each, len(given.options))
    if call.plan.is_coded and captures(call.plan.device):
        raise RuntimeError(
            f"{operation.name}: state and remainders of 8 bits are rounded by the number of the step, and each replay "
            "of the CUDA graph that is being captured would take this one's. Step outside of the graph, or use float32 "
            "state and masters."
        )
    decided = found_inf is not None and call.plan.decided_here and bool(found_inf.item())
    return None if decided else call


PACKS = {name: kernel.group.on_host().pack for name, kernel in KERNELS.items() if kernel.blocks is Blocks.STEPPING}
"""By kernel: what packs the options of a param_group as compiled code reads them on the CPU."""


def multi_tensor_step(
    formula: str,
    grads: Entries,
    masters: Entries,
    state: Sequence[Entries],
    options: Sequence[Any],
    group_of: Sequence[int],
    factors: Factors,
    *,
    steps: Entries | None = None,
    first: Sequence[bool] | None = None,
    models: Entries | None = None,
    stats: CastStats | None = None,
    found_inf: Tensor | None = None,
    number: int = 0,
    tables: PointerTables | None = None,
) -> None:
    """One step of n tensors by a formula, in one pass over their memory. Messages name it multi_tensor_FORMULA.

    Args:
        formula: a key of :data:`.formulas.FORMULAS`.
        grads: n tensors, still scaled: float32, or the dtype of ``models[i]``. Read only.
        masters: n float32 tensors of the same shapes, or int16 or int8 remainders to ``models``. Written, as all the
            following.
        state: the formula's lists, all or those that it needs, of n float32 tensors of the same shapes.
        options: of the param_groups, the formula's. An ``lr`` that is a tensor on the device is read there.
        group_of: for each of the n entries, its place in ``options``.
        factors: what gradients are multiplied by.
        steps: for formulas that count: n float32 tensors of one element, each its own: how many steps were taken.
            Counted up. Where they are on the CPU and the others are not, the step is decided on the host: one wait, if
            ``found_inf`` is given.
        first: for formulas that fill state in the first step: which of the n hold nothing yet.
        models: n float16 or bfloat16 tensors of the same shapes, to which masters are rounded; None where masters are
            the parameters themselves.
        stats: for n tensors; written with ``models``, as by :func:`fp16opt.kernels.multi_tensor_cast`.
        found_inf: float32, shape [], on the device: where it is not 0, nothing is written. Compiled kernels look at it
            there; torch operations wait for it.
        number: of the step, by which masters with int8 remainders are rounded; modulo 2**32.
        tables: the cache of this call site.

    Raises:
        TypeError: a wrong type or dtype. ValueError: lengths, shapes or devices that differ, or another number of lists
            than the formula has. RuntimeError: a CUDA graph is being captured, and something has 8 bits. Nothing is
            written then.

    Example:
        >>> master, m, one = [torch.ones(1)], [torch.zeros(1)], torch.tensor(1.0)
        >>> options = [LionOptions(0.25, 0.5, 0.5, 0.0, False)]
        >>> multi_tensor_step("lion", [torch.ones(1)], master, [m], options, [0], Factors(one, one))
        >>> master[0], m[0]
        (tensor([0.7500]), tensor([0.5000]))
    """
    served = _STEPS.get((formula, len(state), models is not None))
    if served is None or (steps is None) is served.formula.counts:
        if formula not in FORMULAS:
            raise ValueError(f"formula: expected one of {', '.join(map(repr, FORMULAS))}, got {formula!r}.")
        row = FORMULAS[formula]
        raise ValueError(
            f"multi_tensor_{formula}: state must have {row.least()} to {len(row.state)} lists, of "
            f"{', '.join(row.state)}, and steps {'be a list' if row.counts else 'be None'}; got {len(state)} lists "
            f"and steps {'None' if steps is None else 'in a list'}."
        )
    row, operation, kernel = served
    check_options(operation.name, row.options, options)
    lists = (grads, masters, *state)
    lists = lists if models is None else (*lists, models)
    lists = lists if steps is None else (*lists, steps)
    fills = first if row.fills_first and state else None
    given = Given(factors, options, group_of, models is not None, stats, found_inf, tables, number, fills)
    fresh: bool | Sequence[bool] = False if fills is None else fills
    if tables is not None and tables.known is not None and found_inf is None:
        behind = given.behind(row.struct, itertools.starmap(PACKS[kernel], options))
        if tables.repeats("step", lists, (*behind, fresh), True):
            return
    with torch.no_grad():
        call = step_call(operation, lists, given)
        if call is None:
            return
        plan, found = call.plan, None if models is None else stats
        for _, place in plan.by_reference:
            grad, master, *rest = call.row(place)
            kept, others = rest[: len(state)], rest[len(state) :]
            t = float(others[-1].add_(1.0)) if row.counts else 0.0
            begins = fresh if isinstance(fresh, bool) else bool(fresh[place])
            with reference_steps.whole(place, master, None if found is None else others[0], found, number) as single:
                reference_steps.step(row.reference, grad, single, kept, options[group_of[place]], factors, t, begins)
        if plan.serving is cuda:
            cuda_steps.launch(call, kernel, options, group_of, factors, found, found_inf, fresh, number)
        elif plan.serving is not None:
            behind = given.behind(row.struct, itertools.starmap(PACKS[kernel], options))
            plan.serving.launch(call, "step", *behind, results=behind[3:4], flags=fresh)
