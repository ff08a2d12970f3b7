"""Steps of any optimizer on split masters: FP32 masters and gradients exist for one bucket of parameters at a time."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ... import kernels
from ...kernels.reference_steps import Factors
from ..dtensors import raw_grad, set_raw_grad
from ..masters import Masters
from ..params import ParamPair, ParamTable
from ..step import Step
from ..wrapped_step import StepGradients, guard_open, note_step, run_code
from .buckets import BucketSteps, hooks_muted, settings_of

BUCKET = 1 << 20
"""Elements in a bucket, at most; a tensor with more is a bucket of its own."""
_ALIGNED = 16  # elements: tensors of a bucket begin at a cache line


# -- whether it can be done --------------------------------------------------------------------------------------------


_ONLY_SIZES = ("lr", "initial_lr", "weight_decay")  # groups often differ in these, and step alike


class Certified:
    """The classes and settings that were found to step a bucket at a time as in one step. Each is asked for once.

    Args:
        ask: from an optimizer and the settings of a group: why it can't, in words; "" where it can.
            (:func:`fp16opt.certify.checks.bucket_obstacle`.)
    """

    def __init__(self, ask: Callable[[Optimizer, dict[str, Any]], str]) -> None:
        self._ask = ask
        self._known: set[tuple[type, str]] = set()

    def check(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` for the first group of ``optimizer`` that can't be stepped a bucket at a time."""
        for group in optimizer.param_groups:
            self.check_settings(optimizer, settings_of(group))

    def check_settings(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        """The same for a group that would have these settings."""
        kind = repr([(key, bool(value) if _is_size(key, value) else value) for key, value in sorted(settings.items())])
        if (type(optimizer), kind) in self._known:
            return
        reason = self._ask(optimizer, settings)
        if reason:
            raise ValueError(
                f'master_weights="split": {_named(optimizer, settings)} can\'t be stepped a bucket at a time: '
                f'{reason}. Use master_weights="full". (fp16opt.certify tests for it: bucket_invariant.)'
            )
        self._known.add((type(optimizer), kind))


def _is_size(key: str, value: object) -> bool:
    return key in _ONLY_SIZES and isinstance(value, (int, float))


def _named(optimizer: Optimizer, settings: dict[str, Any]) -> str:
    """The class, and the options by which the group differs from what it does when it is given none."""
    cls = type(optimizer)
    usual = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
    options = [
        f"{name}={settings[name]!r}"
        for name, default in usual.items()
        if name != "lr" and name in settings and repr(settings[name]) != repr(default)
    ]
    return f"{cls.__module__}.{cls.__qualname__}" + (f" with {', '.join(options)}" if options else "")


# -- buckets -----------------------------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Parameters of one group and one device that are stepped together.

    Attributes:
        group: the number of their param_group.
        split: those with split masters.
        on_weights: those whose masters lie on the weights' memory; they are stepped where they are.
        rests: what the masters of ``split`` keep beside the weights.
        offsets: where each of ``split`` begins in the bucket's memory, in elements.
        rows: of ``split`` in the statistics of their device.
        cast: statistics of ``split`` alone.
        models, members: of ``split``.
        stepped: all that the optimizer is shown.
    """

    group: int
    device: torch.device
    split: list[ParamPair]
    on_weights: list[ParamPair]
    rests: list[Tensor]
    offsets: list[int]
    rows: Tensor
    size: int
    join_cache: kernels.CallCache = field(default_factory=kernels.CallCache)
    unscale_cache: kernels.CallCache = field(default_factory=kernels.CallCache)
    split_cache: kernels.CallCache = field(default_factory=kernels.CallCache)
    device_caches: defaultdict[torch.device, kernels.CallCache] = field(
        default_factory=lambda: defaultdict(kernels.CallCache)
    )
    cast: kernels.CastStats = field(init=False)
    models: list[Tensor] = field(init=False)
    members: list[Tensor] = field(init=False)
    stepped: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.cast = kernels.CastStats.allocate(len(self.split), self.device)
        if self.split:
            self.cast = self.split[0].cast.beside([pair.row for pair in self.split])
        self.models = [pair.model for pair in self.split]
        self.members = [pair.master for pair in self.split]
        self.stepped = self.members + [pair.master for pair in self.on_weights]


def _room_for(tensor: Tensor) -> int:
    return -(-tensor.numel() // _ALIGNED) * _ALIGNED


def plan_buckets(params: ParamTable, masters: Masters, groups: int, stepped: Sequence[ParamPair]) -> list[Bucket]:
    """The buckets of a step.

    Args:
        groups: how many param_groups there are.
        stepped: those with split masters that have a gradient. The others are left out.
    """
    wanted = {id(pair) for pair in stepped}
    buckets: list[Bucket] = []
    for number in range(groups):
        members = [pair for pair in params.all if pair.group == number]
        parts = _parts([pair for pair in members if id(pair) in wanted])
        rest = [pair for pair in members if not pair.is_apart]
        if not parts:  # a group without any gradient takes part in a step, too: some optimizers count steps in it
            parts, rest = [[]], members
        for part in parts:
            device = part[0].master.device if part else torch.device("cpu")
            *offsets, size = itertools.accumulate([_room_for(pair.model) for pair in part], initial=0)
            rows = torch.tensor([pair.row for pair in part], dtype=torch.int64, device=device)
            rests = [masters.operand(pair) for pair in part]
            buckets.append(Bucket(number, device, part, rest, rests, offsets, rows, size))
            rest = []
    return buckets


def _parts(members: list[ParamPair]) -> list[list[ParamPair]]:
    """Members of one group, cut where the device changes or the bucket is full."""
    parts: list[list[ParamPair]] = []
    by_device: dict[torch.device, list[ParamPair]] = {}
    for pair in members:
        by_device.setdefault(pair.master.device, []).append(pair)
    for alike in by_device.values():
        size = BUCKET + 1
        for pair in alike:
            room = _room_for(pair.model)
            if size + room > BUCKET:
                parts.append([])
                size = 0
            parts[-1].append(pair)
            size += room
    return parts


class BucketedStep:
    """Steps the wrapped optimizer on split masters, a bucket at a time.

    Args:
        optimizer: the wrapped optimizer; its groups hold the placeholders of ``params``.
        masters: split ones.
    """

    def __init__(self, optimizer: Optimizer, params: ParamTable, masters: Masters, gradients: StepGradients) -> None:
        self.optimizer = optimizer
        self.params = params
        self.masters = masters
        self.gradients = gradients
        self.rounded_all = True
        self._planned: tuple[int, list[ParamPair], list[Bucket]] | None = None
        self._closure: Any = None

    def takes_scaled(self) -> bool:
        """True: true gradients are made for one bucket at a time."""
        return True

    def skips_on_device(self) -> bool:
        """False: the wrapped optimizer steps each bucket, and the host decides for it."""
        return False

    def counts_steps(self) -> bool:
        """Whether masters are rounded by the number of the step."""
        return self.masters.needs_number

    def describe(self) -> str:
        """Why no kernel steps."""
        return "general (a bucket of split masters at a time)"

    def step(self, step: Step, found_inf: Tensor | None, closure: Any = None) -> Any:
        """See :class:`fp16opt.engine.wrapped_step.Stepper`. Each bucket is shown the closure, which was evaluated."""
        self._closure = closure

        def run(_: Optimizer, *closure: Callable[[], Any]) -> None:
            self.step_within_hooks(step)

        note_step(self.optimizer)
        try:
            return Optimizer.profile_hook_step(run)(self.optimizer, *(() if closure is None else (closure,)))
        finally:
            self._closure = None

    def step_within_hooks(self, step: Step) -> None:
        """Step all buckets without the optimizer's hooks, which are running."""
        with torch.no_grad(), hooks_muted(self.optimizer), guard_open(self.optimizer):
            step.about_to_write = True
            self._step_buckets()
        self.masters.ties.clear()
        step.all_written = True

    def _step_buckets(self) -> None:
        grads = self._find_gradients()
        parts = BucketSteps(self.optimizer)
        buckets = self._buckets(grads)
        memory = _Memory(buckets)
        for bucket in buckets:
            self._step(bucket, parts, memory, grads)
        parts.finish()

    def _find_gradients(self) -> dict[int, _Gradient]:
        """By ``id(pair)``, where there is one."""
        found: dict[int, _Gradient] = {}
        for device in self.params.devices:
            grads, factors, scaled, _ = self.gradients.to_step(device)
            for pair, grad in zip(device.pairs, grads, strict=True):
                if grad is not None:
                    found[id(pair)] = _Gradient(grad if scaled else None, factors)
        return found

    def _buckets(self, grads: dict[int, _Gradient]) -> list[Bucket]:
        """The buckets of this step: those of the last one where the same parameters have gradients."""
        generation = self.params.generation
        stepped = [pair for pair in self.params.all if pair.is_apart and id(pair) in grads]
        known = self._planned
        same = known is not None and known[0] == generation and len(known[1]) == len(stepped)
        if known is None or not same or not all(map(operator.is_, known[1], stepped)):
            groups = len(self.optimizer.param_groups)
            known = self._planned = generation, stepped, plan_buckets(self.params, self.masters, groups, stepped)
        return known[2]

    def _step(
        self,
        bucket: Bucket,
        parts: BucketSteps,
        memory: _Memory,
        grads: dict[int, _Gradient],
    ) -> None:
        values, room = memory.views(bucket)
        kernels.multi_tensor_join(bucket.models, bucket.rests, values, cache=bucket.join_cache)
        true = self._true_ones(bucket.members, room, [grads[id(pair)] for pair in bucket.split], bucket.unscale_cache)
        # torch 2.13 adds a sparse gradient to a view with an offset at the wrong place, outside of its memory.
        values = [
            value.clone() if grad is not None and grad.layout is torch.sparse_coo else value
            for value, grad in zip(values, true, strict=True)
        ]

        def write_back() -> None:
            kernels.multi_tensor_split(values, bucket.models, bucket.rests, bucket.cast, cache=bucket.split_cache)
            bucket.split[0].cast.overflow[bucket.rows] = bucket.cast.overflow

        with (
            _filled(bucket.members, values, true),
            _with_gradients(self._other_gradients(bucket, grads)),
        ):
            closure = None if self._closure is None else self._closure.again(bucket.stepped)
            parts.run(bucket.group, bucket.stepped, lambda: self._step_part(closure))
        if bucket.split:
            write_back()

    def _step_part(self, closure: Callable[[], Any] | None) -> None:
        step = operator.methodcaller("step") if closure is None else operator.methodcaller("step", closure)
        run_code(self.optimizer, Step(), None, step)

    def _true_ones(
        self, masters: list[Tensor], room: list[Tensor], grads: list[_Gradient], cache: kernels.CallCache
    ) -> list[Tensor | None]:
        """True gradients of a bucket's parameters: what their masters hold, or what is made in ``room``."""
        scaled = [grad.scaled for grad in grads]
        if any(grad is not None for grad in scaled):  # then all are
            kernels.multi_tensor_unscale_clipped(scaled, room, *grads[0].factors, cache=cache)
            return list(room)
        return [raw_grad(master) for master in masters]

    def _other_gradients(self, bucket: Bucket, grads: dict[int, _Gradient]) -> list[tuple[Tensor, Tensor | None]]:
        """True gradients of a bucket's masters that lie on the weights' memory, with those masters."""
        found: list[tuple[Tensor, Tensor | None]] = []
        there_are = [pair for pair in bucket.on_weights if id(pair) in grads]
        for device in dict.fromkeys(pair.model.device for pair in there_are):
            there = [pair for pair in there_are if pair.model.device == device]
            masters = [pair.master for pair in there]
            room = [torch.empty_like(master, requires_grad=False) for master in masters]
            true = self._true_ones(masters, room, [grads[id(pair)] for pair in there], bucket.device_caches[device])
            found += zip(masters, true, strict=True)
        return found


@dataclass(frozen=True)
class _Gradient:
    """One parameter's: as it is scaled, with what it is to be multiplied by; None where its master has a true one."""

    scaled: Tensor | None
    factors: Factors


class _Memory:
    """FP32 masters and gradients of the largest bucket; gone after the step."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._size: dict[torch.device, int] = {}
        for bucket in buckets:
            self._size[bucket.device] = max(self._size.get(bucket.device, 0), bucket.size)
        self._made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def views(self, bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
        """(masters, gradients): for each of the remainders, which are dense, memory in its shape and strides.

        The remainders keep their strides, and so does the state, if the model's weights are laid out anew.
        """
        if bucket.device not in self._made:
            masters = torch.empty(self._size[bucket.device], dtype=torch.float32, device=bucket.device)
            self._made[bucket.device] = masters, torch.empty_like(masters)
        masters, grads = self._made[bucket.device]
        views: tuple[list[Tensor], list[Tensor]] = [], []
        for rest, at in zip(bucket.rests, bucket.offsets, strict=True):
            views[0].append(masters.as_strided(rest.shape, rest.stride(), at))
            views[1].append(grads.as_strided(rest.shape, rest.stride(), at))
        return views


@contextlib.contextmanager
def _filled(members: list[Tensor], values: list[Tensor], grads: list[Tensor | None]) -> Iterator[None]:
    """Within, the placeholders are ordinary parameters with values and gradients."""
    kept = [(member, type(member), member.data, raw_grad(member)) for member in members]
    try:
        for (member, _, _, before), value, grad in zip(kept, values, grads, strict=True):
            member.__class__ = torch.nn.Parameter  # torch takes its faster loops for exactly this class
            if before is not None:
                set_raw_grad(member, None)  # of strides that the new values may not have
            member.data = value
            set_raw_grad(member, grad)
        yield
    finally:
        for member, cls, data, before in kept:
            set_raw_grad(member, None)
            member.data = data
            if before is not None:
                set_raw_grad(member, before)
            member.__class__ = cls


@contextlib.contextmanager
def _with_gradients(given: list[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """Within, masters on the weights' memory are ordinary parameters with these gradients; after it as they were."""
    kept = [(master, type(master), raw_grad(master)) for master, _ in given]
    try:
        for master, grad in given:
            set_raw_grad(master, grad)
            master.__class__ = torch.nn.Parameter
        yield
    finally:
        for master, cls, grad in kept:
            set_raw_grad(master, grad)
            master.__class__ = cls
