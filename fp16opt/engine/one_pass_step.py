"""One-pass steps: what SGD, Adam or AdamW would do, by one kernel, from 16-bit gradient to 16-bit weight."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..kernels import PointerTables, backend, counters
from ..kernels.backends import captures
from ..kernels.native import state_columns
from ..kernels.reference_steps import Factors
from ..kernels.tables import is_dense
from .diagnostics import warn
from .gradients import Gradients
from .masters import Masters
from .one_pass_rows import (
    CannotServe,
    OnePassRow,
    bring_counter,
    counters_to_host,
    group_obstacle,
    no_row,
    row_of,
    steps_on_device,
)
from .one_pass_trial import Trials
from .pairs import HALF_DTYPES, DeviceGroup, Pairs
from .state_formats import StateFormat
from .sweep import ToStep
from .wrapped_step import run_hooks

_MODEL, _NEEDS_GRAD = operator.attrgetter("model"), operator.attrgetter("requires_grad")
NO_MASTERS = "there are no FP32 masters (master_weights='none')"


def obstacle(
    optimizer: Optimizer,
    params: list[Tensor],
    names: list[str],
    trials: Trials,
    form: StateFormat | None = None,
) -> str:
    """Why ``optimizer`` can't be stepped by a one-pass kernel now, in words; "" where it can. No sync.

    Args:
        params: the model's parameters.
        names: what messages call them.
        trials: what is known of classes that are not torch's, which learns of this one.
        form: what state is to be made of; None for FP32.
    """
    cls = type(optimizer)
    row = row_of(cls)
    if row is None:
        return no_row(cls)
    if "step" in optimizer.__dict__ and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return f"the step of this {cls.__name__} was replaced"
    groups = enumerate(optimizer.param_groups)
    return params_obstacle(params, names) or groups_obstacle(row, optimizer, groups, trials, form)


def require_row(optimizer: Optimizer) -> OnePassRow:
    """The row of an optimizer that was found to have one.

    Raises:
        ValueError: It has none: a copy came to where its class is not registered.
    """
    row = row_of(type(optimizer))
    if row is None:
        raise ValueError(f"{no_row(type(optimizer))}. Call fp16opt.register_one_pass for it first.")
    return row


def groups_obstacle(
    row: OnePassRow,
    optimizer: Optimizer,
    groups: Iterable[tuple[int, dict[str, Any]]],
    trials: Trials,
    form: StateFormat | None = None,
) -> str:
    """The part of :func:`obstacle` that may change from one step to the next: settings of groups, with their numbers.

    Args:
        form: what their state is to be made of; None for FP32.
    """
    for number, group in groups:
        reason = ("" if form is None else form.obstacle(group)) or group_obstacle(row, group)
        if reason:
            return f"group {number} has {reason}"
        found = trials.difference(row, optimizer, group) if row.keys else ""  # torch's own need no trial
        if found:
            return f"{type(optimizer).__name__}, with the settings of group {number}, {found}"
    return ""


def params_obstacle(params: list[Tensor], names: list[str]) -> str:
    """The part of :func:`obstacle` that asks for the model's parameters."""
    for param, name in zip(params, names, strict=True):
        if param.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"parameter {name!r} is {str(param.dtype).removeprefix('torch.')}"
        if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"parameter {name!r} is a {type(param).__name__}"
        if param.layout is not torch.strided or (param.numel() and not is_dense(param)):
            return f"the memory of parameter {name!r} is not dense"
    return ""


@dataclass
class _Call:
    """One kernel call on a device: rows with state of the same names, all with models or all without.

    Attributes:
        row: how they are stepped.
        waits: whether its gradients wait in 16 bits.
        columns: by name, by row: masters, models; gradients and state while it runs.
        places: of each row in use, where its state is among all of the optimizer's; None where the two are one list.
        first: rows whose state holds nothing yet.
    """

    row: OnePassRow
    waits: bool
    own: bool
    names: tuple[str, ...]
    count: int
    rows: list[int] = field(default_factory=list)
    places: list[int] | None = None
    columns: dict[str, list[Tensor | None]] = field(default_factory=dict)
    group_of: list[int] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)
    tables: PointerTables = field(default_factory=PointerTables)

    def fill(self, grads: list[Tensor | None], state: list[list[Any]]) -> None:
        """Take this step's gradients, by row, and for each name the state as it is now, of each row in use."""
        columns: dict[str, list[Any]] = {"grads": grads, **dict(zip(self.names, state, strict=True))}
        if len(self.rows) < self.count:
            columns["grads"] = list(map(grads.__getitem__, self.rows))
            for name, column in columns.items():
                entries = columns[name] = [None] * self.count
                for row, value in zip(self.rows, column, strict=True):
                    entries[row] = value
        self.columns.update(columns)


_FIXED = (bool, int, float, str, type(None))


def _are_fixed(values: Iterable[object]) -> bool:
    """Whether none of them can change in place: numbers, words, and tuples of these."""
    return all(isinstance(one, _FIXED) or (isinstance(one, tuple) and _are_fixed(one)) for one in values)


@dataclass
class _Settings:
    """What the groups' settings mean to a kernel.

    Attributes:
        seen: keys and values of all groups; empty where one of these can change in place.
        reason: why no kernel takes them, in words; "" where one does; None where nobody has asked.
        options: the kernel's, by group; none where nobody has asked.
        deciding: what of each group decides which state a step needs.
    """

    seen: list[Any]
    reason: str | None = None
    options: list[Any] = field(default_factory=list)
    deciding: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass
class _Plan:
    """The calls of one device, and what they were planned for.

    Attributes:
        kinds: of each row: None without gradient, whether it waits else.
        keys: all that the optimizer has state of, in its order.
        deciding: as :class:`_Settings` had it.
    """

    generation: int
    kinds: list[bool | None]
    keys: list[Any]
    deciding: list[tuple[Any, ...]]
    calls: list[_Call]


class OnePassStep:
    """Decides at every step whether a kernel takes it, and takes it; else ``fallback`` steps.

    Args:
        wanted: ``fused_step`` of the wrapper, checked.
        row: Of the optimizer's class.
        optimizer: The wrapped optimizer. Its state is used and filled.
        form: What that state is made of.
        needed_by: The argument that leaves no other way to step, as one writes it; "" where ``fallback`` may step.
        number: Gives the number of the step that is being taken, by which what is kept in 8 bits is rounded.
        fallback: A wrapped or a streamed step.
        trials: What is known of classes that are not torch's.
    """

    all_or_nothing = True
    reads_once = True

    def __init__(
        self,
        wanted: bool | str,
        row: OnePassRow,
        optimizer: Optimizer,
        pairs: Pairs,
        masters: Masters,
        gradients: Gradients,
        form: StateFormat,
        needed_by: str,
        number: Callable[[], int],
        fallback: Any,
        trials: Trials,
    ) -> None:
        self.wanted = wanted
        self.optimizer = optimizer
        self.pairs = pairs
        self.masters = masters
        self.gradients = gradients
        self.form = form
        self.needed_by = needed_by
        self._number = number
        self.fallback: Any = fallback
        self.rounded_all = False
        self._row = row
        self._trials = trials
        self._lasting = self._last_reason = ""
        self._known = -1
        self._served = self._warned = self._began = False
        self._plans: dict[torch.device, _Plan] = {}
        self._settings = _Settings([])

    # -- whether -----------------------------------------------------------------------------------------------------

    def reason(self) -> str:
        """Why the fallback steps; "" where a kernel does. No sync."""
        if self._lasting or self._known != self.pairs.generation:  # what was in the way may be gone
            self._known = self.pairs.generation
            halves = map(_MODEL, self.pairs.own_halves)
            if True in map(_NEEDS_GRAD, halves):
                self._lasting = NO_MASTERS
            else:
                self._lasting = obstacle(self.optimizer, self.pairs.models, self.pairs.names, self._trials)
            if self.wanted == "auto" and not self._lasting and not self.needed_by:
                plain = [str(g.device) for g in self.pairs.devices if backend(g.device) == "reference"]
                self._lasting = f"no compiled kernels serve {plain[0]}" if plain else ""
        return self._lasting or self._groups_obstacle()

    def _groups_obstacle(self, asks: bool = True) -> str:
        """Look at the groups' settings as they are now; what they mean is known where the same fixed values stand.

        Args:
            asks: False does not ask whether a kernel takes them.
        """
        groups, settings = self.optimizer.param_groups, self._settings
        seen = [*itertools.chain.from_iterable(groups), *itertools.chain.from_iterable(map(dict.values, groups))]
        if len(seen) != len(settings.seen) or not all(map(operator.is_, seen, settings.seen)):
            fixed = _are_fixed(value for group in groups for key, value in group.items() if key != "params")
            settings = self._settings = _Settings(seen if fixed else [])
        if asks and settings.reason is None:
            settings.reason = groups_obstacle(self._row, self.optimizer, enumerate(groups), self._trials, self.form)
        return settings.reason or ""

    def describe(self) -> str:
        """See :class:`Stepper`."""
        reason = self.reason()
        return f"general ({reason})" if reason else "fused"

    def takes_waiting(self) -> bool:
        """See :class:`Stepper`. Where a kernel stepped before and does not any more, a warning says once why.

        Raises:
            RuntimeError: There is no other way to step, or a CUDA graph is being captured, which what needs this one
                does not go with. Nothing has been done.
        """
        if self.needed_by:
            for group in self.pairs.devices:
                if captures(group.device):
                    raise RuntimeError(
                        f"a step with {self.needed_by} can't be captured into a CUDA graph: the host decides whether "
                        "it is skipped, and by which number it rounds. Step outside of the graph."
                    )
        reason = self._last_reason = self.reason()
        if reason:
            if self.needed_by:
                self._refuse(reason)
            if not self._warned:
                self._warn(reason)
            return bool(self.fallback.takes_waiting())
        self._served = True
        return True

    def _warn(self, reason: str) -> None:
        if self.wanted is True or self._served:
            self._warned = True
            warn("the wrapped optimizer steps itself from here on, and not in one pass: %s.", reason)

    def _refuse(self, reason: str) -> None:
        raise RuntimeError(
            f"this step can't be taken in one pass: {reason}. With {self.needed_by} there is no other way: undo that, "
            "or save, and load into an optimizer wrapped without."
        )

    def skips_on_device(self) -> bool:
        """See :class:`Stepper`. A new momentum buffer is none where the step was left out: the host remembers."""
        if self.reason():
            return bool(self.fallback.skips_on_device())
        if self.needed_by or not all(steps_on_device(group.device) for group in self.pairs.devices):
            return False
        if not self._row.fills_first:
            return True
        state, groups = self.optimizer.state, self.optimizer.param_groups
        names = [self._row.state(self._row.settings(group)) for group in groups]
        stepped = [pair for pair in self.pairs.all if pair.model.grad is not None]
        return all(state.get(pair.master, {}).get(name) is not None for pair in stepped for name in names[pair.group])

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """See :class:`Stepper`."""
        self.rounded_all = bool(self._last_reason)
        if self.rounded_all:
            if self._served:
                counters_to_host(self.optimizer)
            return self.fallback.step(found_inf, closure)

        run_hooks(self.optimizer, self._take_or_fall_back, found_inf)

    def _take_or_fall_back(self, hooked: bool, found_inf: Tensor | None) -> None:
        """In the midst of the optimizer's hooks, which may have changed its groups since :meth:`reason` looked."""
        try:
            if hooked and (reason := self._groups_obstacle()):
                raise CannotServe(reason)
            self._take(found_inf)
        except CannotServe as unserved:
            if self.needed_by:
                self._refuse(str(unserved))
            if not self._warned:
                self._warn(str(unserved))
            self._fall_back(found_inf)

    def _fall_back(self, found_inf: Tensor | None) -> None:
        """In the midst of the optimizer's hooks. The step is decided on the host."""
        if found_inf is None or not bool(found_inf):
            counters_to_host(self.optimizer)
            unhooked = getattr(type(self.optimizer).step, "__wrapped__", type(self.optimizer).step)
            self.fallback.run(unhooked, self.optimizer)
            for group in self.pairs.devices:
                self.masters.round_down(group)

    def take(self, found_inf: Tensor | None) -> None:
        """The step alone, for groups that were looked at, without the optimizer's hooks and without a fallback.

        All calls are planned, and with them all that can't be served is found, before the first is made.

        Raises:
            CannotServe: A kernel can't take it; nothing was stepped.
        """
        self._groups_obstacle(asks=False)
        self._take(found_inf)

    def _take(self, found_inf: Tensor | None) -> None:
        settings = self._settings
        if not settings.options:
            told = [self._row.settings(group) for group in self.optimizer.param_groups]
            settings.deciding = [self.form.settings(each) for each in told]
            settings.options = [self._row.options(each) for each in told]
        try:
            self._make_calls(settings, found_inf)
        except (TypeError, ValueError):  # kernels refuse lists before they write: is there state that was not planned?
            if self._began or not self._plans:
                raise
            self._plans = {}
            self._make_calls(settings, found_inf)
        self.masters.ties.clear()

    def _make_calls(self, settings: _Settings, found_inf: Tensor | None) -> None:
        self._began = False
        planned = []
        for group in self.pairs.devices:
            grads = self.gradients.to_step(group)
            planned.append((group, grads.factors, self._plan(group, settings, grads)))
        number = self._number() if self.form.needs_number or self.masters.needs_number else 0
        for group, factors, plan in planned:
            one = found_inf if found_inf is None or found_inf.device == group.device else found_inf.to(group.device)
            for call in plan.calls:
                self._call(group, call, settings.options, factors, one, number)
                self._began = True

    def _call(
        self,
        group: DeviceGroup,
        call: _Call,
        options: list[Any],
        factors: Factors,
        found_inf: Tensor | None,
        number: int,
    ) -> None:
        if not call.waits:
            one = torch.ones((), dtype=torch.float32, device=group.device)
            factors = Factors(one, one)
        call.row.call(
            call.columns,
            options,
            call.group_of,
            factors,
            call.first,
            models=None if call.own else call.columns["models"],
            stats=None if call.own else group.cast,
            found_inf=found_inf,
            tables=call.tables,
            number=number,
        )
        if True in call.first and (found_inf is None or not bool(found_inf)):  # a step that skips leaves nothing there
            for name in call.names:
                for row in call.rows:
                    master = self.pairs.all[group.positions[row]].master
                    self.optimizer.state[master][name] = call.columns[name][row]
        for name in ("grads", *call.names):  # nothing is kept alive
            call.columns[name] = []

    # -- plans -------------------------------------------------------------------------------------------------------

    def _plan(self, group: DeviceGroup, settings: _Settings, grads: ToStep) -> _Plan:
        """The calls of one device: those of the last step with other gradients, or new ones."""
        kinds = _kinds(len(group.positions), grads)
        plan = self._plans.get(group.device)
        if not (
            plan is not None
            and not grads.has_sparse
            and plan.generation == self.pairs.generation
            and plan.kinds == kinds
            and plan.deciding == settings.deciding
            and self._filled(plan, grads)
        ):
            plan = self._new_plan(group, kinds, settings, grads)
            self._plans.pop(group.device, None)
            if not any(any(call.first) for call in plan.calls):
                self._plans[group.device] = plan
        return plan

    def _filled(self, plan: _Plan, grads: ToStep) -> bool:
        """Whether the calls of a plan found gradients and all state for this step."""
        for call in plan.calls:
            state = state_columns(self.optimizer.state, plan.keys, call.places, call.names)
            if state is None:
                return False
            call.fill((grads.waiting if call.waits else grads.true) or [], state)
        return True

    def _new_plan(
        self,
        group: DeviceGroup,
        kinds: list[bool | None],
        settings: _Settings,
        grads: ToStep,
    ) -> _Plan:
        calls: dict[tuple[bool, bool, tuple[str, ...]], _Call] = {}
        states: dict[int, list[dict[str, Any]]] = {}
        for row, waits in enumerate(kinds):
            pair = self.pairs.all[group.positions[row]]
            own = pair.master is pair.model
            if waits is None or (own and pair.model.dtype in HALF_DTYPES):
                continue
            if not waits and counters.gradients([pair.master])[0].layout is not torch.strided:  # type: ignore[union-attr]
                raise CannotServe(f"the gradient of {pair.name!r} is sparse")
            settings_of = self._row.settings(self.optimizer.param_groups[pair.group])
            stepped = self.form.row(settings_of, pair.model.numel())
            names = stepped.state(settings_of)
            state, new = self._state_of(stepped, settings_of, pair.master, pair.model)
            call = calls.setdefault((waits, own, names), _Call(stepped, waits, own, names, len(group)))
            if not call.group_of:
                call.group_of, call.first = [0] * len(group), [False] * len(group)
                call.columns = {"masters": [None] * len(group), "models": [None] * len(group)}
            call.rows.append(row)
            states.setdefault(id(call), []).append(state)
            call.columns["masters"][row] = self.masters.operand(pair)
            call.columns["models"][row] = None if own else pair.model
            call.group_of[row] = pair.group
            call.first[row] = new and stepped.fills_first
        keys = list(self.optimizer.state)
        place = {id(key): k for k, key in enumerate(keys)}
        for call in calls.values():
            masters = [self.pairs.all[group.positions[row]].master for row in call.rows]
            places = [place[id(master)] for master in masters] if call.names else []
            call.places = None if places == list(range(len(keys))) else places
            columns = [[of_one.get(name) for of_one in states[id(call)]] for name in call.names]
            call.fill((grads.waiting if call.waits else grads.true) or [], columns)
        return _Plan(self.pairs.generation, kinds, keys, settings.deciding, list(calls.values()))

    def _state_of(
        self, row: OnePassRow, settings: dict[str, Any], master: Tensor, model: Tensor
    ) -> tuple[dict[str, Any], bool]:
        """A parameter's state, made as torch makes it where there is none, and whether it is new.

        What is new and filled by the first step is not in the optimizer yet: it holds nothing before the step was done.
        """
        names = row.state(settings)
        if not names:
            return {}, False
        there = self.optimizer.state[master]
        self.form.adopt(there, settings, model.numel())
        if row.fills_first and any(there.get(name) is None for name in names):
            made: dict[str, Any] = {name: there[name] for name in names if there.get(name) is not None}
            row.make(made, settings, model)
            return made, True
        new = not there
        if new:
            row.make(there, settings, model)
        bring_counter(there, master.device)
        for name in names:
            row.check(name, there.get(name), master)
        return there, new


def _kinds(count: int, grads: ToStep) -> list[bool | None]:
    waiting, true = grads.waiting, grads.true
    if waiting is not None and true is None and counters.count_there(waiting) == len(waiting):
        return [True] * count
    kinds: list[bool | None] = [None] * count
    for values, kind in ((waiting, True), (true, False)):
        for row, grad in enumerate(values or ()):
            if grad is not None:
                kinds[row] = kind
    return kinds
