"""One-pass steps: what SGD, Adam, AdamW or Lion would do, by one kernel, from the scaled gradient to the 16-bit weight.

:class:`OnePassStep` keeps one plan for each device: which rows a kernel call takes, with the tuples of masters, models
and state that it gets. A step with the same parameters, the same rows with gradients and the same state tensors uses
the plan again; anything else makes a new one, which checks all state before anything is written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..kernels import CallCache, CastStats, backend
from ..kernels.backends import captures
from ..kernels.lists import is_dense
from ..kernels.pieces import WHOLE, Piece
from ..kernels.readings import Rows
from ..kernels.steps import Factors, NamedStep, StepValues, run_step
from ..kernels.tensor_lists import all_there, are_items, hold
from . import errors
from .config import INSTEAD, NO_MASTERS, Config
from .diagnostics import Lines
from .dtensors import local, piece_of, pieces
from .fused_registry import (
    CannotServe,
    FusedStepSpec,
    counter_to_device,
    counters_to_host,
    no_fused_step,
    steps_on_device,
)
from .gradients import StepState
from .look import Look
from .masters import Home, Masters
from .params import HALF_DTYPES, DeviceParams, ParamPair, ParamTable, labelled
from .passes import GradsToStep
from .step import Step
from .wrapped_step import WrappedStep, has_own_step, run_hooks

# -- what stands in the way --------------------------------------------------------------------------------------------


def check_one_pass(
    config: Config,
    optimizer: Optimizer,
    spec: FusedStepSpec | None,
    groups: list[dict[str, Any]],
    names: dict[int, str],
    first: int = 0,
    is_new: bool = False,
) -> None:
    """Raise ``ValueError`` where an argument leaves no step but the one-pass step, and no kernel can take it.

    Args:
        groups: as they are to be: defaults filled in, and "params" are the model's.
        names: by id of a parameter.
        first: the number of the first of the groups.
        is_new: the optimizer is about to be wrapped. Of groups that come later ``fused_step=True`` does not ask it.
    """
    what = config.required_by or ("fused_step=True" if is_new and config.fused_step is True else "")
    if not what:
        return
    of_groups = (group_obstacle(spec, number, group) for number, group in enumerate(groups, first))
    reason = (
        config.rules_one_pass_out
        or optimizer_obstacle(optimizer, spec)
        or params_obstacle(labelled(groups, names, first), config.master_weights == "split24")
        or next(filter(None, of_groups), "")
    )
    if reason:
        raise ValueError(f"{what} needs the one-pass step, which can't be had: {reason}. Use {INSTEAD[what]}.")


def optimizer_obstacle(optimizer: Optimizer, spec: FusedStepSpec | None) -> str:
    """Why no kernel can step ``optimizer``, whatever its groups say, in words; "" where one can. No sync."""
    if spec is None:
        return no_fused_step(type(optimizer))
    if has_own_step(optimizer):
        return f"the step of this {type(optimizer).__name__} was replaced"
    return spec.optimizer_obstacle(optimizer)


def params_obstacle(params: Iterable[tuple[str, Tensor]], needs_place: bool) -> str:
    """Why no kernel can step one of the model's parameters, in words; "" where one can.

    Args:
        params: with what messages call them.
        needs_place: masters are rounded by the place of an element in the whole parameter.
    """
    for name, param in params:
        piece = local(param)
        if piece.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"parameter {name!r} is {str(piece.dtype).removeprefix('torch.')}"
        if type(piece).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"parameter {name!r} is a {type(piece).__name__}"
        if piece.layout is not torch.strided or (piece.numel() and not is_dense(piece)):
            return f"the memory of parameter {name!r} is not dense"
        if needs_place and piece.dtype in HALF_DTYPES and piece_of(param) is None:
            return (
                f"where the shards of parameter {name!r} lie in the whole can't be said, as they are strided or cut "
                'along two dimensions behind the first; master_weights="split" does not ask it'
            )
    return ""


def group_obstacle(spec: Any, number: int, group: dict[str, Any]) -> str:
    """Why no kernel can step a group with this number, as its settings are now; "" where one can. No sync."""
    reason = spec.group_obstacle(group)
    return f"group {number} has {reason}" if reason else ""


# -- settings and state ------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """What a group's settings mean to a kernel, for as long as all of them stay the very same objects.

    Attributes:
        names, values: the group's keys, and what it held there.
        obstacle: why no kernel can step it, in words; "" where one can. Then the others are empty.
        settings: under the names that the functor's own class has for them.
        options: the kernel's.
        deciding: what of them decides which state a step needs.
    """

    names: list[str]
    values: list[Any]
    obstacle: str
    settings: dict[str, Any]
    options: Any = None
    deciding: tuple[Any, ...] = ()

    @classmethod
    def of(cls, spec: Any, number: int, group: dict[str, Any]) -> Settings:
        """Of the group with this number, as it is now. No sync."""
        reason = group_obstacle(spec, number, group)
        held = list(group), list(group.values())
        if reason:
            return cls(*held, reason, {})
        settings = spec.settings(group)
        return cls(*held, "", settings, spec.options(settings), spec.deciding(settings))

    def is_of(self, group: dict[str, Any]) -> bool:
        """Whether the group is as it was."""
        return list(group) == self.names and are_items(list(group.values()), self.values)

    @property
    def stays(self) -> bool:
        """Whether it may be kept: no value can change in place, but for lists that don't count here."""
        held = dict(zip(self.names, self.values, strict=True))
        counted = [value for name, value in held.items() if name not in ("params", "param_names")]
        kinds = {type(part) for value in counted for part in (value if type(value) is tuple else (value,))}
        return kinds <= {int, float, bool, str, type(None)} and not held.get("capturable")


_options_of, _deciding_of = operator.attrgetter("options"), operator.attrgetter("deciding")


class ParamState(NamedTuple):
    """The state of one parameter as a kernel takes it.

    Attributes:
        spec: how it is stepped.
        entry: the optimizer's own dict of it; None where it needs no state.
        tensors: by name.
        made: new state that holds nothing yet, and is not in ``entry``: a step that is skipped leaves none. Else empty.
    """

    spec: FusedStepSpec
    entry: dict[str, Any] | None
    tensors: dict[str, Tensor]
    made: dict[str, Any]

    @classmethod
    def find(cls, optimizer: Optimizer, spec: Any, home: Home, settings: dict[str, Any], pair: ParamPair) -> ParamState:
        """Find it, in the format in which it is kept; made as torch makes it where there is none. No sync.

        Raises:
            CannotServe: the kernel can't take what is there.
        """
        mine = spec.spec_for(settings, pair.model)
        names = mine.state_names(settings)
        if not names:
            return cls(mine, None, {}, {})
        entry = optimizer.state[pair.master]
        spec.convert(entry, settings, pair.model)
        home.bring(entry, pair.model)
        if mine.fills_first and any(entry.get(name) is None for name in names):
            made = home.new_state(mine, settings, pair.model)
            return cls(mine, entry, {name: made[name] for name in names}, made)
        if not entry:
            entry.update(home.new_state(mine, settings, pair.model))
        counter_to_device(entry, pair.master.device)
        for name in names:
            mine.check_state(name, entry.get(name), pair.model)
        return cls(mine, entry, {name: entry[name] for name in names}, {})


# -- plans -------------------------------------------------------------------------------------------------------------


class KernelCall(NamedTuple):
    """One kernel call: rows that are stepped alike, with state of the same names.

    Attributes:
        step: the kernel's.
        rows: those that it takes.
        states: of each of these.
        masters, state: by row, None in others.
        models: the same; None where masters lie on the weights' memory, so that none is rounded.
        group_of: by row: the group's number.
        first: by row: whether its state holds nothing yet; False where it does in none.
        pieces: by row, where that matters: see :func:`pieces_of`.
    """

    step: NamedStep
    rows: list[int]
    states: list[ParamState]
    masters: tuple[Tensor | None, ...]
    models: tuple[Tensor | None, ...] | None
    state: dict[str, tuple[Tensor | None, ...]]
    group_of: tuple[int, ...]
    first: bool | list[bool]
    pieces: tuple[Piece, ...] | None
    cache: CallCache

    @classmethod
    def of(
        cls,
        taken: list[tuple[int, ParamPair, ParamState]],
        models: Sequence[Tensor],
        masters: Masters,
        cache: CallCache | None = None,
    ) -> KernelCall:
        """Lay rows out, of which each is taken with its parameter and its state, over all rows of ``models``."""
        rows, pairs, states = map(list, zip(*taken, strict=True))
        spec, names, count = states[0].spec, states[0].tensors, len(models)
        is_apart = pairs[0].is_apart
        first = [bool(made) for made in _spread(count, rows, [state.made for state in states])]
        columns = {name: pieces([state.tensors[name] for state in states]) for name in names}
        of_whole = pieces_of(spec, masters, pairs)
        return cls(
            spec.step(names, is_apart),
            rows,
            states,
            _spread(count, rows, pieces([masters.operand(pair) for pair in pairs])),
            _spread(count, rows, [models[row] for row in rows]) if is_apart else None,
            {name: _spread(count, rows, column) for name, column in columns.items()},
            tuple(number or 0 for number in _spread(count, rows, [pair.group for pair in pairs])),
            first if any(first) else False,
            None if of_whole is None else tuple(piece or WHOLE for piece in _spread(count, rows, of_whole)),
            CallCache() if cache is None else cache,
        )

    def run(
        self,
        options: Any,
        grads: Sequence[Tensor | None],
        weights: Sequence[Tensor | None],
        factors: Factors,
        cast: CastStats | None,
        found_inf: Tensor | None,
        number: int,
    ) -> None:
        """Step. The optimizer keeps the state that a first step has filled, if it was not skipped.

        Args:
            options: the kernel's, by group.
            grads: by row.
            weights: the models, by row, as they were read.
            cast: what a kernel says of the weights that it has rounded.
            found_inf: float32, 0-dim: where it is 1.0 nothing is written. None: decided already.
            number: of the step.
        """
        models = weights
        if len(self.rows) < len(self.masters):
            models = self.models or ()
            grads = [None if master is None else grad for grad, master in zip(grads, self.masters, strict=True)]
        is_apart, first = self.models is not None, self.first if self.step.fills_first else False
        stats = cast if is_apart else None
        given = StepValues(options, self.group_of, factors, stats, found_inf, first, number, self.pieces)
        lists = self.step.lists(grads, self.masters, models if is_apart else None, self.state)
        run_step(self.step.step, lists, given, self.cache)
        if self.first and (found_inf is None or not bool(found_inf)):
            for state in self.states:
                if state.entry is not None:
                    state.entry.update(state.made)


def pieces_of(spec: FusedStepSpec, masters: Masters, pairs: Sequence[ParamPair]) -> list[Piece] | None:
    """Which part of the whole each parameter of one kernel call is here; None where no bit depends on it.

    Where that can't be said, :func:`params_obstacle` was in the way.
    """
    if spec.piece is None and not (masters.needs_number and pairs[0].is_apart):
        return None
    found = [(spec.piece or piece_of)(pair.model) or WHOLE for pair in pairs]
    return None if all(piece == WHOLE for piece in found) else found


def _spread(count: int, rows: list[int], values: Sequence[Any]) -> tuple[Any, ...]:
    spread: list[Any] = [None] * count
    for row, value in zip(rows, values, strict=True):
        spread[row] = value
    return tuple(spread)


class Plan(NamedTuple):
    """The kernel calls of one device, with what they were planned for.

    Attributes:
        generation: the parameter table's.
        models, masters: of all rows of the device: FSDP2 makes new pieces where a model is moved.
        there: by row, whether it has a gradient; None where all have.
        deciding: of each group.
        state: the whole state of the optimizer: its keys, then its values.
        kept: of each list of state: the dicts that hold it, its name there, and what they hold.
    """

    generation: int
    models: tuple[Tensor, ...]
    masters: tuple[Tensor, ...]
    there: list[bool] | None
    deciding: list[tuple[Any, ...]]
    calls: list[KernelCall]
    state: list[Tensor | dict[str, Any]]
    kept: list[tuple[list[dict[str, Any]], str, list[Tensor]]]

    def has_state(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether the optimizer's state is made of the very same tensors.

        Keys are compared in their order: to look one up calls a function of Python, the hash of a tensor.
        """
        now = [*state, *state.values()]
        return len(now) == len(self.state) and are_items(now, self.state) and hold(self.kept)


# -- the step ----------------------------------------------------------------------------------------------------------


class OnePassStep:
    """Decides at every step whether a kernel takes it, and takes it; else ``fallback`` steps.

    Args:
        config: the wrapper's. Where an argument leaves no other way to step, ``fallback`` does not.
        optimizer: the wrapped optimizer. Its state is used and filled.
        spec: of its class, and of how its state is kept.
        step_count: gives the number of the step that is being taken, by which 8-bit values are rounded.
        fallback: the wrapped optimizer's own step.
        run: runs the kernels in the place of the optimizer's own step, as :func:`.wrapped_step.run_hooks` does.
    """

    def __init__(
        self,
        config: Config,
        optimizer: Optimizer,
        params: ParamTable,
        masters: Masters,
        state: StepState,
        spec: FusedStepSpec,
        step_count: Callable[[], int],
        fallback: WrappedStep,
        run: Callable[..., None] = run_hooks,
        lines: Lines | None = None,
    ) -> None:
        self.wanted = config.fused_step
        self.required_by = config.required_by
        self.spec = spec
        self.optimizer = optimizer
        self.params = params
        self.masters = masters
        self.state = state
        self.fallback = fallback
        self.run = run
        self.lines = Lines() if lines is None else lines
        self.rounded_all = False
        self._lasting_reason = self._last_reason = self._unserved = ""
        self._known_generation = -1
        self._has_served = self._has_warned = False
        self._plans: dict[torch.device, Plan] = {}
        self._known: dict[int, Settings | None] = {}
        self._groups: list[Settings] = []  # as the present step has read them
        self.counts_steps = spec.needs_number or masters.needs_number
        self._number = step_count if self.counts_steps else int  # else 0, so that no step waits for a count

    def forget(self) -> None:
        """Plans hold pieces of weights, and with them their memory."""
        self._plans.clear()

    # -- whether -----------------------------------------------------------------------------------------------------

    def reason(self) -> str:
        """Why the fallback steps; "" where a kernel does. No sync."""
        if self._lasting_reason or self._known_generation != self.params.generation:  # an obstacle may be gone
            self._known_generation = self.params.generation
            self._lasting_reason = self._find_lasting_reason()
        return self._lasting_reason or optimizer_obstacle(self.optimizer, self.spec) or self._groups_obstacle()

    def _find_lasting_reason(self) -> str:
        if self.params.halves_stepped:
            return NO_MASTERS
        reason = params_obstacle(zip(self.params.names, self.params.models, strict=True), self.masters.needs_number)
        if reason or self.required_by or self.wanted != "auto":
            return reason
        plain = [str(each.device) for each in self.params.devices if backend(each.device) == "reference"]
        return f"no compiled kernels serve {plain[0]}" if plain else ""

    def _groups_obstacle(self) -> str:
        """Read all groups, for the step; why a kernel can't step one of them."""
        self._groups = []
        for number, group in enumerate(self.optimizer.param_groups):
            read = self._read(number, group)
            if read.obstacle:
                return read.obstacle
            self._groups.append(read)
        return ""

    def _read(self, number: int, group: dict[str, Any]) -> Settings:
        """What a group's settings mean now. No sync."""
        known = self._known.get(number)
        if known is not None and known.is_of(group):
            return known
        read = Settings.of(self.spec, number, group)
        self._known[number] = read if read.stays else None
        return read

    def describe(self) -> str:
        """For the wrapper's repr: that it is fused, or why not."""
        reason = self.reason() or self._unserved
        return f"general ({reason})" if reason else "fused"

    def takes_scaled(self) -> bool:
        """See :class:`.WrappedStep`. Where a kernel stepped before and does not any more, a warning says once why.

        Raises:
            RuntimeError: there is no other way to step; or a CUDA graph is being captured, and steps are rounded by
                their number. Nothing has been done.
        """
        if self.counts_steps:
            self._refuse_capture()
        reason = self._last_reason = self.reason()
        if reason:
            self._warn_or_refuse(reason)
            return self.fallback.takes_scaled()
        self._has_served = True
        return True

    def _refuse_capture(self) -> None:
        if any(captures(each.device) for each in self.params.devices):
            raise RuntimeError(
                f"a step with {self.required_by} can't be captured into a CUDA graph: the host decides whether it is "
                "skipped, and by which number it rounds. Step outside of the graph."
            )

    def _warn_or_refuse(self, reason: str) -> None:
        if self.required_by:
            raise RuntimeError(
                f"this step can't be taken in one pass: {reason}. With {self.required_by} there is no other way: undo "
                "that, or save, and load into an optimizer wrapped without."
            )
        if not self._has_warned and (self.wanted is True or self._has_served):
            self._has_warned = True
            self.lines.tell(errors.NOT_IN_ONE_PASS, reason=reason)

    def skips_on_device(self, look: Look) -> bool:
        """See :class:`.WrappedStep`."""
        if self.reason():
            return bool(self.fallback.skips_on_device(look))
        return all(steps_on_device(each.device) for each in self.params.devices)

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, step: Step, look: Look, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """See :class:`.WrappedStep`."""
        self.rounded_all = bool(self._last_reason)
        if self.rounded_all:
            if self._has_served:
                counters_to_host(self.optimizer)
            return self.fallback.step(step, look, found_inf, closure)
        self.run(self.optimizer, self._step_or_fall_back, step, look, found_inf)
        return None

    def _step_or_fall_back(self, has_hooks: bool, step: Step, look: Look, found_inf: Tensor | None) -> None:
        """Runs between the optimizer's hooks, which may have changed its groups since :meth:`reason` looked."""
        try:
            if has_hooks:  # code of the user's has run
                look = self.state.look()
                if reason := self._groups_obstacle():
                    raise CannotServe(reason)
            self._call_kernels(step, look, found_inf)
            self._unserved = ""
        except CannotServe as unserved:
            self._unserved = str(unserved)
            self._warn_or_refuse(str(unserved))
            if found_inf is None or not bool(found_inf):  # the host decides
                counters_to_host(self.optimizer)
                self.state.unscale(look)
                self.fallback.step_within_hooks(step)

    def _call_kernels(self, step: Step, look: Look, found_inf: Tensor | None) -> None:
        """The step alone. All calls are planned, and all obstacles found, before the first call is made.

        Raises:
            CannotServe: a kernel can't take it; nothing was stepped.
        """
        options = list(map(_options_of, self._groups))
        planned = []
        for place, device in enumerate(self.params.devices):
            grads = self.state.to_step(look, place)
            models = device.models if look.weights is None else look.weights[place]
            planned.append((device, grads, models, self._plan(device, grads)))
        number = self._number()
        step.about_to_write = True
        for device, grads, models, plan in planned:
            flag = found_inf if found_inf is None or found_inf.device == device.device else found_inf.to(device.device)
            for call in plan.calls:
                call.run(options, grads.grads, models, grads.factors, device.cast, flag, number)
        self.masters.ties.clear()
        step.all_written = True

    def step_one(
        self, pair: ParamPair, grad: Tensor, factors: Factors, found_inf: Tensor | None, cache: CallCache
    ) -> None:
        """Step one parameter alone, without hooks.

        Args:
            grad: in the parameter's strides: of its dtype, or float32.
            found_inf: float32, 0-dim, on the device: where it is 1.0 nothing is written. None: decided already.
            cache: of this parameter.

        Raises:
            CannotServe: the kernel can't take it; nothing was stepped.
        """
        group = self._read(pair.group, self.optimizer.param_groups[pair.group])
        if group.obstacle:
            raise CannotServe(group.obstacle)
        state = ParamState.find(self.optimizer, self.spec, self.masters.home, group.settings, pair)
        call = KernelCall.of([(0, pair, state)], [pair.model], self.masters, cache)._replace(group_of=(0,))
        cast = pair.cast.of_row(pair.row) if pair.is_apart else None
        call.run([group.options], [grad], [pair.model], factors, cast, found_inf, self._number())
        self.masters.ties.pop(id(pair.master), None)

    # -- plans -------------------------------------------------------------------------------------------------------

    def _plan(self, device: DeviceParams, grads: GradsToStep) -> Plan:
        """The calls of one device: those of the last step, or new ones."""
        if grads.sparse:
            raise CannotServe(f"the gradient of {grads.sparse!r} is sparse")
        values = grads.grads.tensors if isinstance(grads.grads, Rows) else grads.grads
        there = None if all_there(values) else [grad is not None for grad in values]
        deciding = list(map(_deciding_of, self._groups))
        plan = self._plans.get(device.device)
        if (
            plan is not None
            and plan.generation == self.params.generation
            and plan.models is device.models
            and plan.masters is device.masters
            and plan.there == there
            and plan.deciding == deciding
            and plan.has_state(self.optimizer.state)
        ):
            return plan
        self._plans.pop(device.device, None)
        calls = self._new_calls(device, there)
        state, kept = self.optimizer.state, []
        for call in calls:
            entries = [each.entry for each in call.states if each.entry is not None]
            kept += [(entries, name, [each.tensors[name] for each in call.states]) for name in call.state if entries]
        known = self.params.generation, device.models, device.masters, there, deciding
        plan = Plan(*known, calls, [*state, *state.values()], kept)
        if not any(call.first for call in calls):  # else the next step finds other state
            self._plans[device.device] = plan
        return plan

    def _new_calls(self, device: DeviceParams, there: list[bool] | None) -> list[KernelCall]:
        taken: dict[tuple[bool, tuple[str, ...]], list[tuple[int, ParamPair, ParamState]]] = {}
        for row, pair in enumerate(device.pairs):
            if pair.has_master and (there is None or there[row]):
                settings, home = self._groups[pair.group].settings, self.masters.home
                state = ParamState.find(self.optimizer, self.spec, home, settings, pair)
                taken.setdefault((pair.is_apart, tuple(state.tensors)), []).append((row, pair, state))
        return [KernelCall.of(alike, device.models, self.masters) for alike in taken.values()]
