"""Steps of any optimizer on split masters: FP32 masters and gradients exist for one bucket of parameters at a time."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import kernels, parallel, wrapped
from .buckets import BucketSteps, settings_of
from .certify import check_bucket_invariant
from .fused.deferred import stored_grad
from .split import SplitParams, placeholder

if TYPE_CHECKING:
    from .fused.deferred import DeferredGrads
    from .optimizer import MixedPrecisionOptimizer

BUCKET = 1 << 20
"""Elements in a bucket, at most; a tensor with more is a bucket of its own."""
_ALIGNED = 16  # elements: tensors of a bucket begin at a cache line


# -- whether it can be done --------------------------------------------------------------------------------------------


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` where stepping ``optimizer`` a bucket at a time is not one step."""
    seen: list[str] = []
    for group in optimizer.param_groups:
        settings = settings_of(group)
        if repr(settings) in seen:
            continue
        seen.append(repr(settings))
        check = check_bucket_invariant(_factory_like(optimizer, settings))
        if check.passed is False:
            cls = type(optimizer)
            raise ValueError(
                f'master_weights="split": {cls.__module__}.{cls.__qualname__} can\'t be stepped a bucket at a time: '
                f'{check.detail}. Use master_weights="full". (fp16opt.certify tests for it: bucket_invariant.)'
            )


def _factory_like(optimizer: Optimizer, settings: dict[str, Any]) -> Callable[[list[torch.nn.Parameter]], Optimizer]:
    """Makes optimizers of the same class with the same settings."""
    cls = type(optimizer)
    known = inspect.signature(cls).parameters
    given = {key: value for key, value in settings.items() if key in known}

    def make(params: list[torch.nn.Parameter]) -> Optimizer:
        made: Optimizer = cls(params, **copy.deepcopy(given))
        for group in made.param_groups:
            group.update(copy.deepcopy(settings))
        return made

    return make


# -- buckets -----------------------------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Parameters of one group and one device that are stepped together.

    Attributes:
        group: The number of their param_group.
        split: Positions of split masters.
        own: Positions of parameters that are their own masters; they are stepped where they are.
        rows: Where the entries of ``split`` are among the ``copied`` of their shard.
    """

    group: int
    device: torch.device
    split: list[int]
    own: list[int]
    rows: Tensor
    size: int
    join_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    unscale_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    split_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)


def _room_for(tensor: Tensor) -> int:
    return -(-tensor.numel() // _ALIGNED) * _ALIGNED


def plan_buckets(params: SplitParams, groups: int, stepped: Sequence[int]) -> list[Bucket]:
    """The buckets of a step.

    Args:
        params: All parameters.
        groups: How many param_groups there are.
        stepped: Positions of split masters that have a gradient. The others are left out.
    """
    row_of = {i: row for shard in params.shards for row, i in enumerate(shard.copied)}
    wanted = set(stepped)
    own = set(params.own)
    buckets: list[Bucket] = []
    for number in range(groups):
        members = [i for i in range(len(params)) if params.places[i][0] == number]
        parts = _parts(params, [i for i in members if i in wanted])
        rest = [i for i in members if i in own]
        if not parts:  # a group without any gradient takes part in a step, too: some optimizers count steps in it
            parts, rest = [[]], members
        for part in parts:
            device = params.master[part[0]].device if part else torch.device("cpu")
            size = sum(_room_for(params.model[i]) for i in part)
            rows = torch.tensor([row_of[i] for i in part], dtype=torch.int64, device=device)
            buckets.append(Bucket(number, device, part, rest, rows, size))
            rest = []
    return buckets


def _parts(params: SplitParams, positions: list[int]) -> list[list[int]]:
    """Positions of one group, cut where the device changes or the bucket is full."""
    parts: list[list[int]] = []
    by_device: dict[torch.device, list[int]] = {}
    for i in positions:
        by_device.setdefault(params.master[i].device, []).append(i)
    for members in by_device.values():
        size = BUCKET + 1
        for i in members:
            room = _room_for(params.model[i])
            if size + room > BUCKET:
                parts.append([])
                size = 0
            parts[-1].append(i)
            size += room
    return parts


def choose(master_weights: str, on_model_write: str, optimizer: Optimizer) -> StreamedStep | None:
    """What steps split masters; None for full ones.

    Raises:
        ValueError: Split masters do not go with the other choice or with the optimizer.
    """
    if master_weights != "split":
        return None
    if on_model_write == "ignore":
        raise ValueError(
            'on_model_write="ignore" does not go with master_weights="split": the model\'s weights are part of the '
            'masters, so a write to them can\'t be ignored. Use "refresh" or "error".'
        )
    if parallel.is_zero(optimizer):
        raise ValueError(
            'master_weights="split" does not go with ZeroRedundancyOptimizer: it sends 16-bit weights and knows of no '
            'remainders. Use master_weights="full", which ZeRO spreads over the ranks.'
        )
    check_optimizer(optimizer)
    return StreamedStep()


class StreamedStep:
    """Steps the wrapped optimizer on split masters, a bucket at a time."""

    def __init__(self) -> None:
        self._planned: tuple[int, list[int], list[Bucket]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_planned": None}

    def _buckets(self, stepped: list[int]) -> list[Bucket]:
        groups = len(self.optimizer.param_groups)
        if self._planned is None or self._planned[:2] != (len(self.params), stepped):
            self._planned = (len(self.params), stepped, plan_buckets(self.params, groups, stepped))
        return self._planned[2]

    def step(self, engine: MixedPrecisionOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step on split masters. If a part was done before something raised, it counts as a step.

        A closure is evaluated once, before the step: optimizers that evaluate it otherwise were refused.
        """
        loss = None if closure is None else closure()
        try:
            grads: Any = engine._grads
            self.run(engine.optimizer, engine._params, grads.deferred)
        except wrapped.StepFailed as failed:
            if failed.completed:
                engine._finish(skipped=False)
            raise failed.error from None
        engine._copy_down()  # copies nothing, and warns of masters that do not fit
        return loss

    @staticmethod
    def serves() -> bool:
        """Gradients wait in 16 bits whatever steps: it is one bucket that is made at a time."""
        return True

    def fall_back(self, optimizer: Optimizer, params: Any, deferred: Any) -> None:
        """A step that a fused kernel can't take after all, in the midst of the optimizer's hooks."""
        try:
            self.run(optimizer, params, deferred, hooks=False)
        except wrapped.StepFailed as failed:
            raise failed.error from None

    def run(self, optimizer: Optimizer, params: Any, deferred: Any, hooks: bool = True) -> None:
        """One step. Gradients come from ``deferred``, or from the placeholders where they exist in FP32.

        Args:
            optimizer: The wrapped optimizer; its groups hold the placeholders of ``params``.
            params: The engine's :class:`SplitParams`.
            deferred: The engine's ``DeferredGrads``.
            hooks: Fire the optimizer's own step hooks.

        Raises:
            StepFailed: Around what the optimizer or one of its hooks raised; ``completed`` where a bucket was stepped.
        """
        self.optimizer, self.params = optimizer, params
        self._done = False
        try:
            with torch.no_grad(), _hooks_once(optimizer, hooks):
                self._run(deferred)
        except wrapped.StepFailed as failed:
            raise wrapped.StepFailed(failed.error, self._done or failed.completed) from failed.error
        except BaseException as error:
            raise wrapped.StepFailed(error, self._done) from error
        finally:
            self.params.stepped()

    def _run(self, deferred: DeferredGrads) -> None:
        params = self.params
        stepped = [i for i in params.copied if i in deferred.waiting or stored_grad(params.master[i]) is not None]
        buckets = self._buckets(stepped)
        parts = BucketSteps(self.optimizer)
        memory = _Memory(buckets)
        for bucket in buckets:
            self._step(bucket, parts, memory, deferred)
            self._done = True
        parts.finish()

    def _step(self, bucket: Bucket, parts: BucketSteps, memory: _Memory, deferred: DeferredGrads) -> None:
        params = self.params
        models = [params.model[i] for i in bucket.split]
        rests = [params.remainders[i] for i in bucket.split]
        values, room = memory.views(bucket, models)
        kernels.multi_tensor_join(models, rests, values, tables=bucket.join_tables)
        grads = self._gradients(bucket, room, deferred)
        members = [params.master[i] for i in bucket.split]
        with _filled(members, values, grads):
            stepped = members + [params.master[i] for i in bucket.own]
            parts.run(bucket.group, stepped, lambda: wrapped.run_step(self.optimizer, None))
        if bucket.split:
            stats = kernels.CastStats.allocate(len(models), bucket.device)
            kernels.multi_tensor_split(values, models, rests, stats, tables=bucket.split_tables)
            shard = next(shard for shard in params.shards if shard.device == bucket.device)
            shard.cast.overflow[bucket.rows] = stats.overflow
            shard.cast.hashes[bucket.rows] = stats.hashes

    def _gradients(self, bucket: Bucket, room: list[Tensor], deferred: DeferredGrads) -> list[Tensor | None]:
        """The bucket's FP32 gradients: those that exist, and those that are made of 16-bit ones in ``room``."""
        params = self.params
        grads = [stored_grad(params.master[i]) for i in bucket.split]
        waiting = [i in deferred.waiting for i in bucket.split]
        if any(waiting):
            sources = [params.model[i].grad if waits else None for i, waits in zip(bucket.split, waiting, strict=True)]
            outs = [out if waits else None for out, waits in zip(room, waiting, strict=True)]
            factors = deferred.factors(bucket.device, waiting=True)
            tables = bucket.unscale_tables
            kernels.multi_tensor_unscale_clipped(_detached(sources), outs, *factors, tables=tables)
            grads = [out if waits else grad for out, waits, grad in zip(room, waiting, grads, strict=True)]
        return grads


def _detached(grads: list[Tensor | None]) -> list[Tensor | None]:
    return [grad.detach() if grad is not None and grad.requires_grad else grad for grad in grads]


class _Memory:
    """FP32 masters and gradients of the largest bucket; gone after the step."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._size: dict[torch.device, int] = {}
        for bucket in buckets:
            self._size[bucket.device] = max(self._size.get(bucket.device, 0), bucket.size)
        self._made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def views(self, bucket: Bucket, models: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(masters, gradients): for each of ``models`` a part of the memory, in its shape and strides."""
        if bucket.device not in self._made:
            size = self._size[bucket.device]
            self._made[bucket.device] = tuple(  # type: ignore[assignment]
                torch.empty(size, dtype=torch.float32, device=bucket.device) for _ in range(2)
            )
        at = 0
        views: tuple[list[Tensor], list[Tensor]] = ([], [])
        for model in models:
            strides = torch.empty_like(model, device="meta").stride()
            for memory, made in zip(self._made[bucket.device], views, strict=True):
                made.append(memory.as_strided(model.shape, strides, at))
            at += _room_for(model)
        return views


@contextlib.contextmanager
def _filled(members: list[Tensor], values: list[Tensor], grads: list[Tensor | None]) -> Iterator[None]:
    """Within, the placeholders are ordinary parameters with values and gradients."""
    kept = [(type(member), stored_grad(member)) for member in members]
    try:
        for member, value, grad in zip(members, values, grads, strict=True):
            member.__class__ = torch.nn.Parameter  # torch takes its faster loops for exactly this class
            member.data = value
            member.grad = grad
        yield
    finally:
        for member, (cls, grad) in zip(members, kept, strict=True):
            member.grad = None
            member.data = placeholder(member)
            member.grad = grad
            member.__class__ = cls


@contextlib.contextmanager
def _hooks_once(optimizer: Optimizer, fire: bool) -> Iterator[None]:
    """The optimizer's own step hooks run once, and not for every bucket."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    pre, post = (optimizer.__dict__[name] for name in names)
    for hook in list(pre.values()) if fire else []:
        hook(optimizer, (), {})
    try:
        for name in names:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        for name, hooks in zip(names, (pre, post), strict=True):
            setattr(optimizer, name, hooks)
    for hook in list(post.values()) if fire else []:
        hook(optimizer, (), {})
