"""Monitor: what gradients, masters and updates of a run do, written down every so many steps."""

from __future__ import annotations

import atexit
import math
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...engine.arguments import check_number
from ...engine.dtensors import local, raw_grad, raw_grads
from ...engine.folded import is_folded
from ...engine.outcome import read_at_once
from ...engine.params import HALF_DTYPES, ParamPair
from ...engine.parts import Wrapper, inside
from ...engine.stage import BackwardScale, Checked, Unscaled
from ...optimizer import MixedPrecisionOptimizer
from .sinks import JsonLines, Record, Sink, make_sink
from .statistics import GRADIENT, UPDATE, Earlier, of_gradients, of_updates, take, underflow

FORMAT = 1
PATIENCE = 10.0
"""Seconds after which steps that wait are written: what a run that is killed loses."""
_SUMSQ, _LARGEST = GRADIENT.index("sumsq"), GRADIENT.index("largest")


@dataclass
class _Step:
    """A step whose numbers may still lie on the device.

    Attributes:
        losses: copies of what its backwards were called on.
    """

    step: int
    seconds: float | None
    loss_scale: Tensor
    skipped: bool | Tensor
    clipped: tuple[Tensor, Tensor] | None
    losses: list[Tensor]


@dataclass
class _Sample:
    """What the step that is sampled has given so far.

    Attributes:
        before: of masters.
        gradients: the table of them, by position.
        folded: rows of 16-bit gradients that were added to FP32 sums, and gone by the time of the step, by position.
        seconds: what looking took.
    """

    before: Earlier = field(default_factory=list)
    gradients: Tensor | None = None
    folded: dict[int, Tensor] = field(default_factory=dict)
    seconds: float = 0.0


class Monitor:
    """Writes down what the numbers of a run do, for ``python -m fp16opt report`` and other loggers.

    Every step: loss, loss scale, skip, norm before the clip, seconds. The loss is this rank's: the sum of those that
    ``backward`` or ``scale_loss`` got since the step before. It is not known under a GradScaler, of closures, and where
    one of them was no single number. The first and then each ``every``-th step, for each parameter: what
    docs/reading-a-run.md lists. Such a step reads gradients, masters and weights once more, and keeps of large masters
    one element in 17 while it runs; the others cost a clock, a list and a copy of each loss.

    It uses the optimizer's step hooks alone and changes nothing. Detach it with ``with`` or :meth:`detach`; where the
    last reference to the optimizer goes it goes too. Where masters are spread over ranks (FSDP2, ZeRO) all ranks make
    one, sampled numbers are summed up by one message, and rank 0 writes; under DDP rank 0 alone looks.

    Args:
        opt: The optimizer, or a trainer's that holds it. Names come from its ``named_parameters``.
        every: Steps from one sample to the next.
        to: Where records go: a path (JSON lines), a ``SummaryWriter``, a run of Weights & Biases, any callable that
            takes a dict, or several of them.
        depth: Sum up parameters by the first so many parts of their names, such as 2 for "blocks.0"; None: each.
        start: How many steps were taken before, where a run goes on.

    Raises:
        TypeError, ValueError: An argument is of another kind or out of range.

    Syncs: in sampled steps, once, and where ten seconds have passed since. Else only where what a step gave lies on the
    host anyway.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        >>> opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=2.0**-13), loss_scale=2.0**-10)
        >>> records = []
        >>> with Monitor(opt, to=records.append):
        ...     opt.backward(weight.float().sum() * 2.0**-9)
        ...     opt.step()
        >>> [record["kind"] for record in records]
        ['run', 'step', 'sample']
        >>> row = records[2]["rows"]["group 0, param 0"]
        >>> row["underflow"], row["lost"]
        (1.0, 1.0)
    """

    def __init__(
        self,
        opt: Optimizer,
        every: int = 100,
        to: Any = "run.jsonl",
        *,
        depth: int | None = None,
        start: int = 0,
    ) -> None:
        wrapper = inside(opt)
        if not isinstance(wrapper, MixedPrecisionOptimizer):
            raise TypeError(f"opt: expected a MixedPrecisionOptimizer, got {type(opt).__name__}. Wrap the optimizer.")
        if wrapper.gradient_release:
            raise ValueError(
                f"opt: gradient_release={wrapper.gradient_release!r} frees gradients before there is anything to "
                "sample. Use opt.stats() for numbers of steps, or gradient_release=False."
            )
        check_number("every", every, above_zero=True)
        check_number("start", start)
        check_number("depth", 1 if depth is None else depth, above_zero=True)
        sinks = to if isinstance(to, (list, tuple)) else [to]
        self.every, self.depth, self.steps = int(every), depth, int(start)
        self._sinks: list[Sink] = [make_sink(one) for one in sinks]
        self._is_attached = True
        self._reference = weakref.ref(wrapper)  # whose hooks hold this monitor
        self._writes = _rank() == 0
        self._waiting: list[_Step] = []
        self._losses: list[Tensor] = []
        self._sample: _Sample | None = None
        self._folding: list[Any] = []
        self._clipped = wrapper.outcome.clipped
        self._closed = wrapper.outcome.steps
        self._clock: float | None = None
        self._written = time.perf_counter()
        self._lay_rows()
        self._handles = [wrapper.register_step_pre_hook(self._before), wrapper.register_step_post_hook(self._after)]
        if self._writes:
            self._emit(self._header(wrapper))
        self._arm()
        me = weakref.ref(self)
        self._at_exit: Callable[[], None] = lambda: _finish(me)
        atexit.register(self._at_exit)

    @property
    def _wrapper(self) -> Wrapper | None:
        return self._reference() if self._is_attached else None

    # -- attached and detached ---------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take the hooks out, and write what waits. Does nothing the second time. May sync."""
        if not self._is_attached:
            return
        for handle in [*self._handles, *self._folding]:
            handle.remove()
        self._folding, self._sample = [], None
        self._flush()
        self._is_attached = False
        atexit.unregister(self._at_exit)
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                sink.close()

    def close(self) -> None:
        """Another name of :meth:`detach`, as writers of logs have it."""
        self.detach()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    # -- what is written ---------------------------------------------------------------------------------------------

    def _emit(self, record: Record) -> None:
        for sink in self._sinks:
            sink(record)

    def _header(self, opt: MixedPrecisionOptimizer) -> Record:
        scaler = opt.scaler
        return {
            "kind": "run",
            "format": FORMAT,
            "torch": str(torch.__version__),
            "every": self.every,
            "first_step": self.steps,
            "ranks": _ranks(),
            "optimizer": type(opt.optimizer).__name__,
            "scaler": repr(scaler),
            "dynamic": scaler.dynamic,
            "masters": opt.master_weights,
            "rows": self._kinds,
        }

    def _flush(self) -> None:
        """Write the steps that wait. Syncs where their numbers lie on a device."""
        waiting, self._waiting, self._written = self._waiting, [], time.perf_counter()
        if not self._writes or not waiting:
            return
        numbers: dict[str, float | Tensor] = {}
        for one in waiting:
            numbers[f"{one.step} scale"] = one.loss_scale
            numbers[f"{one.step} skipped"] = one.skipped
            numbers.update({f"{one.step} loss {number}": loss for number, loss in enumerate(one.losses)})
            if one.clipped is not None:
                numbers[f"{one.step} norm"], numbers[f"{one.step} factor"] = one.clipped
        read = read_at_once(numbers)
        for one in waiting:
            losses = [read[f"{one.step} loss {number}"] for number in range(len(one.losses))]
            self._emit(
                {
                    "kind": "step",
                    "step": one.step,
                    "loss": sum(losses) if losses else None,
                    "loss_scale": read[f"{one.step} scale"],
                    "skipped": bool(read[f"{one.step} skipped"]),
                    "grad_norm": read.get(f"{one.step} norm"),
                    "clip_factor": read.get(f"{one.step} factor"),
                    "seconds": one.seconds,
                }
            )

    # -- the hooks ---------------------------------------------------------------------------------------------------

    def _before(self, opt: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Look at what a step is about to change; gradients that a closure makes are looked at when it returns."""
        wrapper = self._wrapper
        losses = wrapper.step_state.stage.losses if wrapper is not None and self._writes else ()
        self._losses = [one.clone() for one in losses]
        if self.steps % self.every or wrapper is None or not self._looks():
            return None
        begun = time.perf_counter()
        sample = self._sample = self._sample or _Sample()
        changed = None
        with torch.no_grad():
            sample.before = self._masters(wrapper)
            if any(map(callable, (*args[1:], *kwargs.values()))):

                def watched(value: Any) -> Any:
                    return self._watched(wrapper, sample, value) if callable(value) else value

                changed = (args[0], *map(watched, args[1:])), {name: watched(value) for name, value in kwargs.items()}
            else:
                sample.gradients = self._look(wrapper, sample)
        sample.seconds += time.perf_counter() - begun
        return changed

    def _watched(self, wrapper: Wrapper, sample: _Sample, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, and then a look at the gradients that it made: those of the last evaluation stay."""

        def evaluate() -> Any:
            loss = closure()
            begun = time.perf_counter()
            with torch.no_grad():
                sample.gradients = self._look(wrapper, sample)
            sample.seconds += time.perf_counter() - begun
            return loss

        return evaluate

    def _after(self, opt: Any, args: Any, kwargs: Any) -> None:
        now, wrapper = time.perf_counter(), self._wrapper
        if wrapper is None or wrapper.outcome.steps == self._closed:  # there was nothing to step
            return
        self._closed = wrapper.outcome.steps
        self.steps += 1
        sample, self._sample = self._sample, None
        took = 0.0 if sample is None else sample.seconds
        seconds = None if self._clock is None else now - self._clock - took
        self._note(wrapper, seconds)
        if now - self._written > PATIENCE:
            self._flush()
        if sample is not None:
            self._finish_sample(opt, wrapper, sample)
            now = time.perf_counter()
        self._clock = now
        if self.steps % self.every == 0:
            self._arm()

    def _note(self, wrapper: Wrapper, seconds: float | None) -> None:
        """What every step gives, without a look at a device."""
        if not self._writes:
            return
        last, clipped = wrapper.outcome.last, wrapper.outcome.clipped
        used = wrapper.outcome.scale
        scale = wrapper.scaler.scale if used is None else used
        skipped = last.clone() if isinstance(last, Tensor) else last
        clip = None if clipped is self._clipped else clipped
        self._waiting.append(_Step(self.steps, seconds, scale, skipped, clip, self._losses))
        self._clipped, self._losses = clipped, []
        if skipped is True or len(self._waiting) >= self.every:
            self._flush()

    # -- a sample ----------------------------------------------------------------------------------------------------

    def _looks(self) -> bool:
        """Whether this rank reads tensors: rank 0, or all where each has a part of the masters."""
        wrapper = self._wrapper
        return self._writes or (wrapper is not None and not wrapper.step_state.ranks.alone)

    def _arm(self) -> None:
        """The next step is sampled: where gradients are folded into FP32 sums, look at each before it goes."""
        wrapper = self._wrapper
        if wrapper is None or wrapper.config.grad_accumulation != "fp32" or not self._looks():
            return
        sample = self._sample = _Sample()
        for position, pair in enumerate(wrapper.params.all):
            if pair.model.dtype in HALF_DTYPES and pair.model.requires_grad and pair.model.is_leaf:
                fold = _folder(sample, position)
                self._folding.append(pair.model.register_post_accumulate_grad_hook(fold))  # type: ignore[no-untyped-call]

    def _masters(self, wrapper: Wrapper) -> Earlier:
        """Some elements of all that is stepped, as they are now."""
        masters: dict[int, Tensor] = {}
        joined: Earlier = []
        for position, pair in enumerate(wrapper.params.all):
            if pair.is_apart and not wrapper.masters.are_whole:  # each in memory of its own, for a moment
                joined += take({position: _stepped(wrapper, pair)})
            elif pair.has_master:
                masters[position] = _stepped(wrapper, pair)
        return take(masters) + joined

    def _look(self, wrapper: Wrapper, sample: _Sample) -> Tensor:
        """Numbers of the gradients that are there now, of each unscaled and before the clip."""
        state, clipped = wrapper.step_state, wrapper.outcome.clipped
        are_true = type(state.stage) is Unscaled
        grads = [_gradient(pair, are_true) for pair in wrapper.params.all]
        found = of_gradients([grad for grad, _ in grads], wrapper.device)
        folded = [position for position in sample.folded if grads[position][0] is not None]
        for position in folded:  # the sum is that of the FP32 gradient; shares and the largest are of those folded in
            found[position, 0] = sample.folded[position][0]
            found[position, _LARGEST:] = sample.folded[position][_LARGEST:].to(found)
        still = torch.tensor([scaled for _, scaled in grads], dtype=torch.bool, device="cpu").to(wrapper.device)
        inverse = _inv_scale(wrapper).to(found)
        factor = found.new_ones(()) if clipped is None or clipped is self._clipped else clipped[1].to(found)
        as_it_lies = torch.where(still, inverse, 1.0 / factor)  # what is not scaled was clipped where it lies
        as_it_lies[found[:, 0] == 0] = 0.0
        found[:, _SUMSQ] *= as_it_lies.square()
        as_it_lies[folded] = inverse
        found[:, _LARGEST] *= as_it_lies
        if are_true and not state.stage.is_own:  # a GradScaler divides them where they lie
            true = of_gradients(list(map(_piece, raw_grads(wrapper.params.masters))), wrapper.device)
            factor = _told_by_grad_scaler(wrapper).to(true)
            found[:, _SUMSQ], found[:, _LARGEST] = true[:, _SUMSQ] * factor.square(), true[:, _LARGEST] * factor
        elif isinstance(state.stage, (Checked, Unscaled)):
            # The sums are known, from before any clip.
            for device, one in zip(wrapper.params.devices, wrapper.gradients.stats, strict=True):
                rows = [at for at, position in enumerate(device.positions) if grads[position][0] is not None]
                found[[device.positions[at] for at in rows], _SUMSQ] = one.sumsq[rows].to(found)
        return found

    def _finish_sample(self, opt: Any, wrapper: Wrapper, sample: _Sample) -> None:
        begun = time.perf_counter()
        for handle in self._folding:
            handle.remove()
        self._folding = []
        with torch.no_grad():
            if sample.gradients is None:  # the closure was not called
                sample.gradients = self._look(wrapper, sample)
            pairs = wrapper.params.all

            def now(position: int) -> tuple[Tensor, Tensor]:
                return _stepped(wrapper, pairs[position]), local(pairs[position].model.detach())

            updates = of_updates(sample.before, now, len(pairs), wrapper.device)
            came = updates.new_zeros(len(pairs) - len(sample.gradients), len(GRADIENT))  # parameters of a later group
            table = self._gather(wrapper, torch.cat([torch.cat([sample.gradients, came]), updates], dim=1))
        if self._writes:
            self._flush()
            skipped = bool(wrapper.outcome.last)
            whole = [name for name, kind in self._kinds.items() if kind["stepped"] in ("float16", "bfloat16")]
            rows = {
                name: _in_words(numbers, skipped, name in whole)
                for name, numbers in zip(self._rows, table, strict=True)
            }
            seconds = sample.seconds + time.perf_counter() - begun
            record = {"kind": "sample", "step": self.steps, "skipped": skipped, **_of_stats(opt.stats())}
            self._emit({**record, "sample_seconds": seconds, "rows": rows})

    def _lay_rows(self) -> None:
        """Which row each parameter counts to; where masters are spread over ranks the same rows on all of them."""
        wrapper = self._wrapper
        if wrapper is None:
            return
        mine = [(_prefix(pair.name, self.depth), _kind(pair)) for pair in wrapper.params.all]
        everyone = [mine] if wrapper.step_state.ranks.alone else _all_gathered(mine)
        self._kinds: dict[str, dict[str, Any]] = {}
        for name, kind in (row for rows in everyone for row in rows):
            self._kinds.setdefault(name, kind)
        self._rows = list(self._kinds) if len(everyone) == 1 else sorted(self._kinds)
        place = {name: number for number, name in enumerate(self._rows)}
        self._places = [place[name] for name, _ in mine]

    def _gather(self, wrapper: Wrapper, numbers: Tensor) -> list[list[float]]:
        """By row: sums over its parameters and over the ranks, and the largest gradient. Syncs once."""
        ranks, device = wrapper.step_state.ranks, wrapper.device
        self._follow(wrapper)
        if not ranks.alone:
            counted = [ranks.counted(model) for model in wrapper.params.models]
            others = ~torch.tensor(counted, dtype=torch.bool, device="cpu").to(device)
            numbers = numbers.masked_fill(others[:, None], 0.0)
        rows = torch.tensor(self._places, dtype=torch.int64, device="cpu").to(device)
        table = numbers.new_zeros(len(self._rows), numbers.shape[1]).index_add_(0, rows, numbers)
        largest = numbers.new_zeros(len(self._rows)).scatter_reduce_(0, rows, numbers[:, _LARGEST], "amax")
        if not ranks.alone:
            table, largest = _over_ranks(table, largest, ranks.group)
        table[:, _LARGEST] = largest
        read: list[list[float]] = table.tolist()
        return read

    def _follow(self, wrapper: Wrapper) -> None:
        """Rows of parameters that came since, as ``add_param_group`` brings them: rows of their own."""
        for pair in wrapper.params.all[len(self._places) :]:
            name = _prefix(pair.name, self.depth)
            if name not in self._kinds:
                self._kinds[name] = _kind(pair)
                self._rows.append(name)
            self._places.append(self._rows.index(name))


NUMBERS = (
    *("grad_norm", "grad_largest", "zero", "subnormal", "underflow", "near_overflow"),
    *("weight_norm", "update_ratio", "update_ulps", "lost", "still", "distance"),
)
"""What a sample says of each row, None where there is nothing to say it of; docs/reading-a-run.md says what each is."""


def _folder(sample: _Sample, position: int) -> Callable[[Tensor], None]:
    def fold(param: Tensor) -> None:
        grad: Tensor | None = raw_grad(param)
        if grad is None or grad.layout is not torch.strided or grad.dtype not in HALF_DTYPES:
            return
        with torch.no_grad():
            here, earlier = local(grad), sample.folded.get(position)
            found = of_gradients([here], here.device)[0]
            if earlier is not None:
                largest = torch.maximum(earlier[_LARGEST], found[_LARGEST])
                found = earlier + found
                found[_LARGEST] = largest
            sample.folded[position] = found

    return fold


def _stepped(wrapper: Wrapper, pair: ParamPair) -> Tensor:
    """This rank's piece of what the optimizer steps for a pair; of split masters a new tensor."""
    return local(wrapper.masters.read([pair])[0] if pair.is_apart else pair.model.detach())


def _gradient(pair: ParamPair, are_true: bool) -> tuple[Tensor | None, bool]:
    """(this rank's piece of a pair's gradient as it lies in memory, whether it is still scaled).

    Args:
        are_true: whether masters hold true gradients. Where the model has one beside it, that one is meant.
    """
    grad = raw_grad(pair.model)
    grad = None if is_folded(grad) else grad
    return (_piece(raw_grad(pair.master)), False) if grad is None and are_true else (_piece(grad), grad is not None)


def _piece(grad: Tensor | None) -> Tensor | None:
    """This rank's elements of a gradient, dense; of a sparse one its values."""
    if grad is None:
        return None
    return local((grad._values() if grad.layout is torch.sparse_coo else grad).detach())


def _inv_scale(wrapper: Wrapper) -> Tensor:
    """float32, 0-dim: what makes the model's gradients true."""
    scale: BackwardScale | None = wrapper.step_state.stage.scale
    return _told_by_grad_scaler(wrapper) if scale is None else scale.inv_scale


def _told_by_grad_scaler(wrapper: Wrapper) -> Tensor:
    """0-dim: what ``step`` is to multiply gradients by for a GradScaler of torch; 1.0 without one."""
    grad_scale: Tensor | None = getattr(wrapper, "grad_scale", None)
    if grad_scale is None:
        return torch.ones((), dtype=torch.float32, device=wrapper.device)
    return grad_scale.reshape(()).reciprocal()


def _in_words(numbers: Sequence[float], skipped: bool, has_no_master: bool) -> dict[str, float | None]:
    """A row of a sample, under the names of ``NUMBERS``.

    Args:
        has_no_master: 16-bit weights are stepped themselves, so that a lost update is one of zero where the gradient
            is not.
    """
    found = dict(zip(GRADIENT, numbers, strict=False))
    update = dict(zip((f"of {name}" for name in UPDATE), numbers[len(GRADIENT) :], strict=False))
    count, zero, subnormal = found["count"], found["zero"], found["subnormal"]
    row: dict[str, float | None] = dict.fromkeys(NUMBERS)
    if count:
        row.update(grad_norm=_root(found["sumsq"]), grad_largest=found["largest"])
        row.update(zero=zero / count, subnormal=subnormal / count, near_overflow=found["near_overflow"] / count)
        row["underflow"] = underflow(count, zero, subnormal)
    if update["of count"] and not skipped:
        norm = _root(update["of master_sumsq"])
        row["weight_norm"] = norm
        row["update_ratio"] = _root(update["of update_sumsq"]) / norm if norm else None
        row["distance"] = _root(update["of distance_sumsq"]) / norm if norm else None
        if update["of ulp"]:
            row["update_ulps"] = update["of update"] / update["of ulp"]
            row["lost"] = update["of lost"] / update["of moved"] if update["of moved"] else None
            if count > zero:
                row["still"] = max(0.0, count - zero - update["of moved"]) / (count - zero)
            if has_no_master and count:
                row["lost"] = row["still"]
    return row


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _of_stats(stats: dict[str, float]) -> Record:
    names = ("skipped_steps", "parameters_blamed", "model_writes_taken", "steps_since_calibration")
    return {"loss_scale": stats["loss_scale"], **{name: stats[name] for name in names}}


def _kind(pair: ParamPair) -> dict[str, Any]:
    dtype, stepped = (str(one.dtype).removeprefix("torch.") for one in (pair.model, pair.master))
    return {"dtype": dtype, "stepped": stepped, "elements": pair.model.numel()}


def _prefix(name: str, depth: int | None) -> str:
    """The first ``depth`` parts of a dotted name.

    Example:
        >>> _prefix("blocks.0.mlp.weight", 2)
        'blocks.0'
    """
    return name if depth is None else ".".join(name.split(".")[:depth])


def _finish(monitor: weakref.ref[Monitor]) -> None:
    there = monitor()
    if there is not None:
        there.detach()


# -- several ranks -----------------------------------------------------------------------------------------------------


def _dist() -> Any:
    """``torch.distributed``, where there is a process group."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _rank() -> int:
    dist = _dist()
    return 0 if dist is None else int(dist.get_rank())


def _ranks() -> int:
    dist = _dist()
    return 1 if dist is None else int(dist.get_world_size())


def _all_gathered(mine: list[tuple[str, dict[str, Any]]]) -> list[list[tuple[str, dict[str, Any]]]]:
    everyone: list[Any] = [None] * _ranks()
    _dist().all_gather_object(everyone, mine)
    return everyone


def _over_ranks(table: Tensor, largest: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Sums of ``table`` and maxima of ``largest`` over the ranks, by one message: each rank has a column."""
    dist = _dist()
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    columns = torch.zeros(len(largest), size, dtype=table.dtype, device=table.device)
    columns[:, rank] = largest
    together = torch.cat([table, columns], dim=1)
    dist.all_reduce(together, group=group)
    return together[:, : table.shape[1]].clone(), together[:, table.shape[1] :].amax(1)
