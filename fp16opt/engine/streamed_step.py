"""Steps of any optimizer on split masters: FP32 masters and gradients exist for one bucket of parameters at a time."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import kernels
from ..certify import check_bucket_invariant
from ..certify.buckets import BucketSteps, hooks_muted, settings_of
from ..certify.trials import factory_like
from ..kernels.counters import GRAD, count_there
from ..kernels.native import read_anew
from ..kernels.reference_steps import Factors
from .gradients import Gradients
from .masters import Masters
from .pairs import Pair, Pairs
from .wrapped_step import StepFailed, fused_steps_guarded

BUCKET = 1 << 20
"""Elements in a bucket, at most; a tensor with more is a bucket of its own."""
_ALIGNED = 16  # elements: tensors of a bucket begin at a cache line


# -- whether it can be done --------------------------------------------------------------------------------------------


_ONLY_SIZES = ("lr", "initial_lr", "weight_decay")  # groups often differ in these, and step alike


class Certified:
    """Kinds of param groups that were found to be stepped a bucket at a time as in one step."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._groups = 0

    def check(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` where one of the groups that came since the last call is not. The first is named."""
        for group in optimizer.param_groups[self._groups :]:
            self.check_settings(optimizer, settings_of(group))
        self._groups = len(optimizer.param_groups)

    def check_settings(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        """The same for a group that would have these settings."""
        kind = repr([(key, bool(value) if _is_size(key, value) else value) for key, value in sorted(settings.items())])
        if kind in self._kinds:
            return
        check = check_bucket_invariant(factory_like(optimizer, settings))
        if check.passed is False:
            raise ValueError(
                f'master_weights="split": {_named(optimizer, settings)} can\'t be stepped a bucket at a time: '
                f'{check.detail}. Use master_weights="full". (fp16opt.certify tests for it: bucket_invariant.)'
            )
        self._kinds.add(kind)


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
        group: The number of their param_group.
        split: Those with split masters.
        own: Those that are their own masters; they are stepped where they are.
        rests: What their masters keep beside the weights.
        offsets: Where each of ``split`` begins in the bucket's memory, in elements.
        rows: Those of ``split`` in the statistics of their device.
        cast: Statistics of ``split`` alone.
        models, members: Of ``split``.
        stepped: All that the optimizer is shown.
    """

    group: int
    device: torch.device
    split: list[Pair]
    own: list[Pair]
    rests: list[Tensor]
    offsets: list[int]
    rows: Tensor
    size: int
    join_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    unscale_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    split_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    cast: kernels.CastStats = field(init=False)
    models: list[Tensor] = field(init=False)
    members: list[Tensor] = field(init=False)
    stepped: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.cast = kernels.CastStats.allocate(len(self.split), self.device)
        self.models = [pair.model for pair in self.split]
        self.members = [pair.master for pair in self.split]
        self.stepped = self.members + [pair.master for pair in self.own]


def _room_for(tensor: Tensor) -> int:
    return -(-tensor.numel() // _ALIGNED) * _ALIGNED


def plan_buckets(pairs: Pairs, masters: Masters, groups: int, stepped: Sequence[Pair]) -> list[Bucket]:
    """The buckets of a step.

    Args:
        groups: How many param_groups there are.
        stepped: Those with split masters that have a gradient. The others are left out.
    """
    wanted = {id(pair) for pair in stepped}
    buckets: list[Bucket] = []
    for number in range(groups):
        members = [pair for pair in pairs.all if pair.group == number]
        parts = _parts([pair for pair in members if id(pair) in wanted])
        rest = [pair for pair in members if pair.master is pair.model]
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


def _parts(members: list[Pair]) -> list[list[Pair]]:
    """Members of one group, cut where the device changes or the bucket is full."""
    parts: list[list[Pair]] = []
    by_device: dict[torch.device, list[Pair]] = {}
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


class _Gradient(NamedTuple):
    """One parameter's: as it waits in 16 bits, with what it is to be multiplied by; or as it is true."""

    waiting: Tensor | None
    true: Tensor | None
    factors: Factors


class StreamedStep:
    """Steps the wrapped optimizer on split masters, a bucket at a time.

    Args:
        optimizer: The wrapped optimizer; its groups hold the placeholders of ``pairs``.
        masters: Split ones.
    """

    all_or_nothing = True
    reads_once = False

    def __init__(self, optimizer: Optimizer, pairs: Pairs, masters: Masters, gradients: Gradients) -> None:
        self.optimizer = optimizer
        self.pairs = pairs
        self.masters = masters
        self.gradients = gradients
        self._planned: tuple[int, list[Pair], list[Bucket]] | None = None
        self._done = False
        self.rounded_all = True

    def takes_waiting(self) -> bool:
        """True: it is one bucket's gradients that are made at a time."""
        return True

    def skips_on_device(self) -> bool:
        """False: a bucket is stepped by the wrapped optimizer, which is decided on the host."""
        return False

    def describe(self) -> str:
        """See :class:`fp16opt.engine.wrapped_step.Stepper`."""
        return "general (a bucket of split masters at a time)"

    def step(self, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """See :class:`fp16opt.engine.wrapped_step.Stepper`. A closure's value is that of its evaluation before."""
        self._done = False

        def run(_: Optimizer, *closure: Callable[[], Any]) -> Any:
            loss = closure[0]() if closure else None
            self._step_all()
            return loss

        try:
            return Optimizer.profile_hook_step(run)(self.optimizer, *(() if closure is None else (closure,)))
        except BaseException as error:
            raise StepFailed(error, self._done) from error

    def run(self, step: Callable[..., Any], *args: Any) -> None:
        """In place of ``step``, in the midst of the optimizer's hooks: a kernel could not step after all."""
        self._step_all()

    def _step_all(self) -> None:
        try:
            with torch.no_grad(), hooks_muted(self.optimizer):
                self._run()
        finally:
            self.masters.ties.clear()

    def _gradients(self) -> dict[int, _Gradient]:
        """By ``id(pair)``, where there is one."""
        found: dict[int, _Gradient] = {}
        for group in self.pairs.devices:
            grads = self.gradients.to_step(group)
            nothing: list[Tensor | None] = [None] * len(group.positions)
            each = zip(group.positions, grads.waiting or nothing, grads.true or nothing, strict=True)
            for position, waits, true in each:
                if waits is not None or true is not None:
                    found[id(self.pairs.all[position])] = _Gradient(waits, true, grads.factors)
        return found

    def _run(self) -> None:
        grads = self._gradients()
        stepped = [pair for pair in self.pairs.all if pair.master is not pair.model and id(pair) in grads]
        known = self._planned
        same = known is not None and known[0] == self.pairs.generation and len(known[1]) == len(stepped)
        if known is None or not same or not all(map(operator.is_, known[1], stepped)):
            groups = len(self.optimizer.param_groups)
            known = self._planned = (
                self.pairs.generation,
                stepped,
                plan_buckets(self.pairs, self.masters, groups, stepped),
            )
        parts = BucketSteps(self.optimizer)
        memory = _Memory(known[2])
        with read_anew():  # the wrapped optimizer's code runs, on members with other memory
            for bucket in known[2]:
                self._step(bucket, parts, memory, grads)
                self._done = True
        parts.finish()

    def _step(
        self,
        bucket: Bucket,
        parts: BucketSteps,
        memory: _Memory,
        grads: dict[int, _Gradient],
    ) -> None:
        models, members = bucket.models, bucket.members
        values, room = memory.views(bucket)
        kernels.multi_tensor_join(models, bucket.rests, values, tables=bucket.join_tables)
        mine = self._made(bucket, room, list(map(grads.__getitem__, map(id, bucket.split))))
        with _filled(members, values, mine):
            parts.run(bucket.group, bucket.stepped, self._step_part)
        if bucket.split:
            kernels.multi_tensor_split(values, models, bucket.rests, bucket.cast, tables=bucket.split_tables)
            bucket.split[0].device.cast.overflow[bucket.rows] = bucket.cast.overflow

    def _step_part(self) -> None:
        with contextlib.ExitStack() as around:
            if isinstance(self.optimizer, torch.optim.SGD):
                around.enter_context(fused_steps_guarded(self.optimizer))
            self.optimizer.step()

    def _made(self, bucket: Bucket, room: list[Tensor], grads: list[_Gradient]) -> list[Tensor | None]:
        """The bucket's FP32 gradients: true ones, with their masters' ``.grad``, and those made in ``room``."""
        waiting: list[Tensor | None] = [None] * len(grads)
        outs, found = waiting.copy(), waiting.copy()
        for row, (member, out, grad) in enumerate(zip(bucket.members, room, grads, strict=True)):
            if grad.waiting is not None:
                waiting[row], outs[row], found[row] = grad.waiting, out, out
            elif grad.true is not None:
                found[row] = GRAD.__get__(member)
        if count_there(waiting):
            kernels.multi_tensor_unscale_clipped(waiting, outs, *grads[0].factors, tables=bucket.unscale_tables)
        return found


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
    kept: list[tuple[Tensor, type, Tensor, Tensor | None]] = []
    try:
        for member, value, grad in zip(members, values, grads, strict=True):
            cls, before = type(member), GRAD.__get__(member)
            member.__class__ = torch.nn.Parameter  # torch takes its faster loops for exactly this class
            kept.append((member, cls, member.data, before))
            if before is not None:
                GRAD.__set__(member, None)  # of strides that the new values may not have
            member.data = value
            GRAD.__set__(member, grad)
        yield
    finally:
        for member, cls, data, before in kept:
            GRAD.__set__(member, None)
            member.data = data
            if before is not None:
                GRAD.__set__(member, before)
            member.__class__ = cls
