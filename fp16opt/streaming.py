"""Steps of any optimizer on split masters: FP32 masters and gradients exist for one bucket of parameters at a time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import kernels, parallel, wrapped
from .buckets import BucketSteps, hooks_muted, settings_of
from .certify import check_bucket_invariant
from .fused.deferred import stored_grad
from .split import SplitParams
from .trials import factory_like

if TYPE_CHECKING:
    from .fused.deferred import DeferredGrads
    from .optimizer import MixedPrecisionOptimizer
    from .shard import Shard

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
    streamed = StreamedStep()
    streamed.certified.check(optimizer)
    return streamed


class StreamedStep:
    """Steps the wrapped optimizer on split masters, a bucket at a time.

    Attributes:
        certified: The kinds of groups for which that is one step.
    """

    def __init__(self) -> None:
        self.certified = Certified()
        self._planned: tuple[list[Shard], list[int], list[Bucket]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"certified": self.certified, "_planned": None}

    def _buckets(self, stepped: list[int]) -> list[Bucket]:
        groups, shards = (
            len(self.optimizer.param_groups),
            self.params.shards,
        )  # new ones when parameters or masters come
        if self._planned is None or self._planned[0] is not shards or self._planned[1] != stepped:
            self._planned = (shards, stepped, plan_buckets(self.params, groups, stepped))
        return self._planned[2]

    def step(self, engine: MixedPrecisionOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step on split masters. If a part was done before something raised, it counts as a step.

        A closure is evaluated once, before the step: optimizers that evaluate it otherwise were refused.
        """
        grads: Any = engine._grads
        try:
            loss = self.run(engine.optimizer, engine._params, grads.deferred, closure)
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
        self.optimizer, self.params = optimizer, params
        self._step_all(deferred)

    def run(self, optimizer: Optimizer, params: Any, deferred: Any, closure: Callable[[], Any] | None = None) -> Any:
        """One step, with the optimizer's hooks. Gradients come from ``deferred``, or from placeholders that have them.

        Args:
            optimizer: The wrapped optimizer; its groups hold the placeholders of ``params``.
            params: The engine's :class:`SplitParams`.
            deferred: The engine's ``DeferredGrads``.
            closure: Evaluated before the step, after the hooks that come before one.

        Returns:
            What the closure returned.

        Raises:
            StepFailed: Around what the optimizer or one of its hooks raised; ``completed`` where a bucket was stepped.
        """
        self.optimizer, self.params = optimizer, params
        self._done = False

        def step(_: Optimizer, *closure: Callable[[], Any]) -> Any:
            with torch.enable_grad():
                loss = closure[0]() if closure else None
            self._step_all(deferred)
            return loss

        try:
            return Optimizer.profile_hook_step(step)(optimizer, *(() if closure is None else (closure,)))
        except BaseException as error:
            raise wrapped.StepFailed(error, self._done) from error

    def _step_all(self, deferred: DeferredGrads) -> None:
        try:
            with torch.no_grad(), hooks_muted(self.optimizer):
                self._run(deferred)
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
        values, room = memory.views(bucket, rests)
        kernels.multi_tensor_join(models, rests, values, tables=bucket.join_tables)
        grads = self._gradients(bucket, room, deferred)
        members = [params.master[i] for i in bucket.split]
        with _filled(members, values, grads):
            stepped = members + [params.master[i] for i in bucket.own]
            parts.run(bucket.group, stepped, self._step_part)
        if bucket.split:
            stats = kernels.CastStats.allocate(len(models), bucket.device)
            kernels.multi_tensor_split(values, models, rests, stats, tables=bucket.split_tables)
            shard = next(shard for shard in params.shards if shard.device == bucket.device)
            shard.cast.overflow[bucket.rows] = stats.overflow
            shard.cast.hashes[bucket.rows] = stats.hashes

    def _step_part(self) -> None:
        with wrapped.fused_steps_guarded(self.optimizer):
            self.optimizer.step()

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

    def views(self, bucket: Bucket, rests: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(masters, gradients): for each of ``rests``, which are dense, a part of the memory in its shape and strides.

        The remainders keep their strides, and so does the state, if the model's weights are laid out anew.
        """
        if bucket.device not in self._made:
            size = self._size[bucket.device]
            self._made[bucket.device] = tuple(  # type: ignore[assignment]
                torch.empty(size, dtype=torch.float32, device=bucket.device) for _ in range(2)
            )
        at = 0
        views: tuple[list[Tensor], list[Tensor]] = ([], [])
        for rest in rests:
            for memory, made in zip(self._made[bucket.device], views, strict=True):
                made.append(memory.as_strided(rest.shape, rest.stride(), at))
            at += _room_for(rest)
        return views


@contextlib.contextmanager
def _filled(members: list[Tensor], values: list[Tensor], grads: list[Tensor | None]) -> Iterator[None]:
    """Within, the placeholders are ordinary parameters with values and gradients."""
    kept: list[tuple[Tensor, type, Tensor, Tensor | None]] = []
    try:
        for member, value, grad in zip(members, values, grads, strict=True):
            cls = type(member)
            member.__class__ = torch.nn.Parameter  # torch takes its faster loops for exactly this class
            before = member.grad
            kept.append((member, cls, member.data, before))
            if before is not None:
                member.grad = None  # of strides that the new values may not have
            member.data = value
            member.grad = grad
        yield
    finally:
        for member, cls, data, before in kept:
            member.grad = None
            member.data = data
            if before is not None:
                member.grad = before
            member.__class__ = cls
