"""The one-pass optimizer steps: gradient in; master, state and 16-bit weight out.

A stored gradient g becomes (float32(g) * inv_scale) * coefficient, two roundings, and the step's formulas are torch's
with every operation rounded: compiled kernels and the specifications of :mod:`.formulas` give the same bits.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import cuda, cuda_steps, native, reference_steps
from .backends import captures
from .calls import CallCache, Entries, Operation, Plan
from .cuda_rows import KERNELS, Blocks
from .formulas import FORMULAS, Formula, LionOptions
from .launches import begin, by_torch, is_trusted, prove, run_by_torch
from .pieces import WHOLE, Piece
from .reference_steps import Factors, OneStep, StepValues
from .stats import CastStats
from .table import step_operation
from .tensor_lists import are_items

__all__ = [
    "Factors",
    "LionOptions",
    "NamedStep",
    "Step",
    "StepValues",
    "multi_tensor_step",
    "named_step",
    "run_step",
    "steps_of",
]

PACKS = {name: kernel.group.on_host().pack for name, kernel in KERNELS.items() if kernel.blocks is Blocks.STEPPING}
"""By kernel: what packs the options of a param_group as compiled code reads them on the CPU."""

Reference = Callable[[Tensor, Tensor, "list[Tensor]", OneStep], None]


class Step(NamedTuple):
    """One step with so many lists of state, with or without models.

    Attributes:
        operation: its row of the table. The arguments of its specification are (step, values).
        functor: the struct of compiled code.
        options: the class of a param_group's options.
        reference: what it does to one tensor: (gradient as stored, float32 master, state with scales behind it, what
            it is stepped with).
        state: how many lists of state there are, scales counted.
        packed: from a group's options to the fields that kernels are given.
    """

    operation: Operation
    functor: str
    options: type[Any]
    reference: Reference
    state: int
    packed: Callable[[Any], tuple[Any, ...]] = tuple


def _one_row(row: int, tensors: list[Tensor], given: tuple[Any, ...], first: bool) -> None:
    """The specification of every step."""
    step, values = given
    operation = step.operation
    grad, master, *rest = tensors
    t = float(rest.pop().add_(1.0)) if operation.counters else 0.0
    scales = [rest.pop()] if operation.scales else []
    model = rest.pop() if "models" in operation.lists else None
    piece = WHOLE if values.pieces is None else values.pieces[row]
    one = OneStep(values.options[values.group_of[row]], values.factors, t, first, values.number, piece)
    with reference_steps.whole(row, master, model, values.stats, values.number, piece) as single:
        step.reference(grad, single, [*rest, *scales], one)


def steps_of(
    name: str,
    functor: str,
    options: type[Any],
    reference: Reference,
    state: tuple[str, ...],
    kernel: str,
    *,
    counts: bool,
    block: int = 0,
    packed: Callable[[Any], tuple[Any, ...]] = tuple,
) -> dict[bool, Step]:
    """A step without and with models.

    Args:
        name: of the public function.
        functor, options, reference, packed: as in :class:`Step`.
        state, kernel, counts, block: as for :func:`.table.step_operation`.
    """
    made = {}
    for has_models in (False, True):
        row = step_operation(name, state, _one_row, kernel, has_models=has_models, counts=counts, block=block)
        made[has_models] = Step(row, functor, options, reference, len(state) + bool(block), packed)
    return made


def _of_formula(name: str, formula: Formula) -> Iterator[tuple[tuple[str, int, bool], Step]]:
    """A formula's steps, by its name, the number of lists of state, and whether there are models."""

    reference = functools.partial(reference_steps.step, formula.reference)
    for count, kernel in enumerate(formula.kernels, formula.least()):
        state = tuple(f"{one}s" for one in formula.state[:count])
        given = (f"multi_tensor_{name}", formula.struct, formula.options, reference, state, kernel)
        for has_models, step in steps_of(*given, counts=formula.counts).items():
            yield (name, count, has_models), step


_STEPS = dict(itertools.chain.from_iterable(itertools.starmap(_of_formula, FORMULAS.items())))


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


def _check_values(operation: Operation, values: StepValues, plan: Plan) -> None:
    """Raise unless the values fit the lists."""
    count = plan.count
    if values.stats is None and "models" in operation.lists:
        raise ValueError(f"{operation.name}: stats must be given along with models, got None. Use CastStats.allocate.")
    for name, each in (("group_of", values.group_of), ("first", values.first)):
        if not isinstance(each, bool) and len(each) != count:
            raise ValueError(f"{operation.name}: {name} has {len(each)} entries, grads has {count}. Give one each.")
    group_of, before = values.group_of, plan.grouped
    if type(group_of) is tuple and group_of is before[0] and len(values.options) == before[1]:
        return
    groups = set(group_of)
    if groups and not 0 <= min(groups) <= max(groups) < len(values.options):
        raise ValueError(
            f"{operation.name}: group_of reaches from {min(groups)} to {max(groups)}, there are "
            f"{len(values.options)} options."
        )
    plan.grouped = group_of, len(values.options)


_is_none = functools.partial(operator.is_, None)


def run_step(step: Step, lists: tuple[Entries | None, ...], values: StepValues, cache: CallCache | None) -> None:
    """Check a step, decide it where the host has to, and do it.

    Args:
        step: what is to be done.
        lists: grads, masters, the lists of state; models, scales and counters, each of which may be None.
        values: what is given beside them.
        cache: of the call site.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`multi_tensor_step`.
    """
    operation, stats, factors = step.operation, values.stats, values.factors
    given: list[Any] = list(itertools.filterfalse(_is_none, lists))
    pieces = None if values.pieces is None else tuple(values.pieces)
    numbers = (*factors, values.found_inf, None if stats is None else stats.overflow)
    call = begin(operation, given, cache, numbers, getattr(factors[0], "device", None), pieces)
    plan = call.plan
    before, packed = plan.packed
    are_known = len(values.options) == len(before) and are_items(values.options, before)
    if not are_known:
        check_options(operation.name, step.options, values.options)
    if not call.is_proven:
        prove(call, numbers, numbers)
    _check_values(operation, values, plan)
    marks = None if stats is None else stats.marks
    if not is_trusted(call, marks):
        call = by_torch(call)
        plan = call.plan
    if plan.is_coded and captures(plan.device):
        raise RuntimeError(
            f"{operation.name}: state and remainders of 8 bits are rounded by the number of the step, and each replay "
            "of the CUDA graph that is being captured would take this one's. Step outside of the graph, or use float32 "
            "state and masters."
        )
    if values.found_inf is not None and plan.decided_here and bool(values.found_inf.item()):
        return
    first = values.first
    if plan.by_reference:
        run_by_torch(call, (step, values), None if stats is None else stats.changed, first)
    if plan.serving is cuda:
        cuda_steps.launch(call, values._replace(options=list(map(step.packed, values.options))))
    elif plan.serving is not None and plan.direct:
        if not are_known:
            packed = b"".join(itertools.starmap(PACKS[operation.cuda], map(step.packed, values.options)))
            if not any(isinstance(one, Tensor) for one in itertools.chain(*values.options)):
                plan.packed = tuple(values.options), packed
        number = values.number & 0xFFFFFFFF
        found = numbers[-1], *(marks or (0, 0))
        behind = [step.functor, *factors, *found, stats is not None, values.group_of, packed, number]
        native.launch(call, behind, written=[] if stats is None else [stats.overflow], flags=first)


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
    pieces: Sequence[Piece] | None = None,
    cache: CallCache | None = None,
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
        pieces: which part of a whole tensor each of the n is: they are rounded as those elements of the whole would be.
            None: all are whole.
        cache: the cache of this call site.

    Raises:
        TypeError: a wrong type or dtype. ValueError: lengths, shapes or devices that differ, or another number of lists
            than the formula has. RuntimeError: a CUDA graph is being captured, and something has 8 bits. Nothing is
            written then.

    Example:
        >>> import torch
        >>> master, m, one = [torch.ones(1)], [torch.zeros(1)], torch.tensor(1.0)
        >>> options = [LionOptions(0.25, 0.5, 0.5, 0.0, False)]
        >>> multi_tensor_step("lion", [torch.ones(1)], master, [m], options, [0], Factors(one, one))
        >>> master[0], m[0]
        (tensor([0.7500]), tensor([0.5000]))
    """
    step = _STEPS.get((formula, len(state), models is not None))
    if step is None or (steps is None) is bool(step.operation.counters):
        if formula not in FORMULAS:
            raise ValueError(f"formula: expected one of {', '.join(map(repr, FORMULAS))}, got {formula!r}.")
        row = FORMULAS[formula]
        raise ValueError(
            f"multi_tensor_{formula}: state must have {row.least()} to {len(row.state)} lists, of "
            f"{', '.join(row.state)}, and steps {'be a list' if row.counts else 'be None'}; got {len(state)} lists "
            f"and steps {'None' if steps is None else 'in a list'}."
        )
    fills = first if FORMULAS[formula].fills_first and state and first is not None else False
    found = None if models is None else stats
    values = StepValues(options, group_of, factors, found, found_inf, fills, number, pieces)
    run_step(step, (grads, masters, *state, models, steps), values, cache)


class NamedStep(NamedTuple):
    """A step with the names of its lists of state, by which the engine lays them out.

    Attributes:
        step: what :func:`run_step` takes.
        state: names of the lists that stand before the models, in their order.
        behind: names of those that stand behind the models: scales, counters.
        fills_first: whether the step has to know which state holds nothing yet.
    """

    step: Step
    state: tuple[str, ...]
    behind: tuple[str, ...]
    fills_first: bool

    def lists(
        self, grads: Entries, masters: Entries, models: Entries | None, named: Mapping[str, Entries]
    ) -> tuple[Entries | None, ...]:
        """All lists in the order in which :func:`run_step` takes them.

        Args:
            named: the lists of state, scales and counters among them, by name.
        """
        state, behind = map(named.__getitem__, self.state), map(named.__getitem__, self.behind)
        return (grads, masters, *state, models, *behind)


def named_step(name: str, formula: Formula, names: Collection[str], has_models: bool) -> NamedStep:
    """The step of a formula.

    Args:
        names: of the lists of state that there are; its counter is called "step".
    """
    state = tuple(filter(names.__contains__, formula.state))
    behind = ("step",) if formula.counts else ()
    return NamedStep(_STEPS[name, len(state), has_models], state, behind, formula.fills_first and bool(state))
