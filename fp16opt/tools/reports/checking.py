"""Steps on the user's own batch by a copy of the optimizer, and what they show, as findings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...engine.diagnostics import describe, groups_without_eps
from ...engine.dtensors import raw_grad, version
from ...engine.modes.closures import closure_mode
from ...engine.params import HALF_DTYPES
from ...optimizer import MixedPrecisionOptimizer
from .diagnosis import CEILING, Diagnosis, diagnose, room
from .findings import (
    SHARE,
    WRAP,
    WRAP_DYNAMIC,
    PreflightFinding,
    largest_first,
    mean_over,
    most_elements_first,
    percent,
    shares_in_words,
)
from .monitor import Monitor
from .probing import Inside, Probe, Run, check_loss, same_bits
from .rounds import Seen, named_lines
from .statistics import GRADIENT, of_gradients, underflow
from .twins import params_of, twin_of

_PATIENCE = 24
"""Skips with which a dynamic scale may begin."""
_REFUSED = {
    "in place of loss.backward()": "optimizer.backward(loss)  # in place of loss.backward()",
    "after each step, also after a skipped one": "optimizer.zero_grad()  # after each step, skipped or not",
}
"""What to write where a refusal has these words."""
_BITS = {torch.bfloat16: 8, torch.float16: 11}
_MANY = {torch.bfloat16: 16, torch.float16: 64}
"""From how many micro-batches on their sum in 16 bits is worth a word."""
_NEAR = 0.5
"""The share of FP16's range from which on a number is near its end."""


class Checking:
    """One check: what is measured becomes findings at once.

    Args:
        optimizer: as :func:`.held_by` gives it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[], Tensor],
        optimizer: Optimizer | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.wrapper = optimizer if isinstance(optimizer, MixedPrecisionOptimizer) else None
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.findings: list[PreflightFinding] = []
        self.facts: list[str] = []
        self.steps = 0
        self._first_written: set[str] = set()  # by the first forward, which may lay weights out
        self._written_to: dict[str, None] = {}  # by a later one
        self._share_at_best = 1.0  # what underflows at the largest possible scale, where that is larger
        self._skipped_at = math.inf  # the least loss scale at which a step was skipped

    def _find(self, key: str, level: str, sentence: str, line: str, **more: Any) -> None:
        self.findings.append(PreflightFinding(key, level, sentence, line, **more))

    @property
    def _has_masters(self) -> bool:
        return self.wrapper is not None and self.wrapper.master_weights != "none"

    def _wrapping(self) -> str:
        """The line that gives masters."""
        if self.wrapper is not None:
            return 'leave master_weights="none" out'
        fp16 = any(param.dtype == torch.float16 for param in self.trained.values())
        return WRAP_DYNAMIC if fp16 and self.scaler is None else WRAP

    # -- the steps ------------------------------------------------------------------------------------------------

    def train(self, steps: int, lr: float) -> None:
        """Run the steps. Whatever they show becomes a finding."""
        if self._two_scales():
            return
        twin = twin_of(self.optimizer, self.model, self.scaler, lr)
        twin.train()  # a schedule-free one steps in no other mode
        lost = _overflown(self.model)
        self._eps(twin)
        if not self._calibrate(twin):
            return
        probe = Probe(self.model, self.loss_fn)
        run = probe.run(float(twin.loss_scale), inside=True)
        self.steps += 1
        if not run.is_finite:
            if not any(finding.key == "eps" for finding in self.findings):  # which says why
                self._not_finite(diagnose(self.model, self.loss_fn, twin), after="after one step: ")
            return
        last = max(steps, self.steps + 2)
        largest = self._largest_scale(probe, run, float(twin.loss_scale))
        last = max(last, self.steps + 1)
        self._of_probe(run, twin, largest)
        records: list[dict[str, Any]] = []
        with Monitor(twin, every=max(1, last - self.steps - 1), to=records.append):
            while self.steps < last:
                self._step(twin, looks=self.steps == last - 1)
        if self._written_to:
            line = "a.weight = b.weight  # once, which ties them, in place of a copy in each forward"
            self._written(list(self._written_to), "the forward or the backward", line)
        self._of_buffers(_overflown(self.model) - lost)
        self._of_samples([record for record in records if record["kind"] == "sample"], twin)
        self._tell(run, twin, largest)

    def _largest_scale(self, probe: Probe, run: Run, scale: float) -> float:
        """The largest power of two at which no gradient of this batch overflows, tried; of an FP16 loss it is one."""
        most = 2.0**15 if run.loss_dtype == torch.float16 else CEILING
        largest = min(room(run.reaches, scale, torch.device("cpu")) or scale, most, self._skipped_at / 2)
        while largest > scale and any(reach.dtype == torch.float16 for reach in run.reaches):
            self.steps += 1
            tried = probe.run(largest)
            if all(reach.is_finite for reach in tried.reaches):
                self._share_at_best = self._mean(self._underflow(tried))
                break
            largest /= 2
        return largest

    def _step(self, twin: MixedPrecisionOptimizer, looks: bool = False) -> None:
        """One step of the copy.

        Args:
            looks: whether to see which 16-bit weights the forward and the backward write.
        """
        scale = float(twin.loss_scale)
        self._step_at_its_scale(twin, looks)
        if twin.step_was_skipped:
            self._skipped_at = min(self._skipped_at, scale)

    def _step_at_its_scale(self, twin: MixedPrecisionOptimizer, looks: bool) -> None:
        self.steps += 1
        twin.zero_grad()

        def evaluate() -> Tensor:
            loss = self.loss_fn()
            check_loss(loss)
            twin.backward(loss)
            self._loss = loss.detach()
            return loss

        if closure_mode(twin.config.closure, twin.optimizer) == "reevaluate":
            twin.step(evaluate)
            return
        halves = {name: param for name, param in self.trained.items() if looks and param.dtype in HALF_DTYPES}
        before = {name: (version(param), param.detach().clone()) for name, param in halves.items()}
        evaluate()
        for name, (count, values) in before.items():
            differs = not same_bits(halves[name], values)
            if self.steps == 1 and differs:
                self._first_written.add(name)
            elif self.steps > 1 and (differs or (name in self._first_written and version(halves[name]) != count)):
                self._written_to[name] = None
        try:
            twin.step()
        except TypeError as error:
            if self.wrapper is not None:
                raise
            kind, told = type(twin.optimizer).__name__, f"TypeError: {error}"
            raise TypeError(
                f"optimizer: {kind}.step() raised {told}. One that evaluates a closure itself, as SAM does, is checked "
                'as MixedPrecisionOptimizer(optimizer, closure="reevaluate").'
            ) from error

    def _calibrate(self, twin: MixedPrecisionOptimizer) -> bool:
        """The first step that is taken. False where none is, which has become a finding."""
        for _ in range(_PATIENCE if twin.scaler.dynamic else 1):
            self._step(twin, looks=self.steps == 0)
            if self.steps == 1:
                self._who_has_gradients(twin)
            if not twin.step_was_skipped:
                return True
            if not bool(self._loss.isfinite().all()):
                break
        found = diagnose(self.model, self.loss_fn, twin)
        if found.kind == "none":  # by chance: a batch, a dropout
            return True
        if found.kind == "overflow" and found.largest_scale is None:
            self._inside(Probe(self.model, self.loss_fn).run(found.scale, inside=True).inside)
        if not any(finding.key == "inside" for finding in self.findings):  # which says why
            self._not_finite(found)
        return False

    # -- before anything is measured ------------------------------------------------------------------------------

    def _two_scales(self) -> bool:
        if self.wrapper is None or self.scaler is None:
            return False
        scale = float(self.wrapper.loss_scale)
        if not self.wrapper.scaler.dynamic and scale == 1.0:
            return False
        self._find(
            "two_scales",
            "error",
            f"the optimizer has a loss scale of its own ({scale:g}), and a GradScaler scales the loss too: such a step "
            "is refused.",
            "optimizer.backward(loss); optimizer.step()  # and no GradScaler. Or leave dynamic, loss_scale and scaler "
            "out of MixedPrecisionOptimizer(...)",
            numbers={"loss_scale": scale, "grad_scaler": float(self.scaler.get_scale())},
        )
        return True

    def _eps(self, twin: MixedPrecisionOptimizer) -> None:
        """Whether 16-bit parameters are stepped with an ``eps`` of 0; masters in the groups are FP32."""
        if self.optimizer is not None:
            groups = self.optimizer.param_groups
        else:
            groups = [{**twin.optimizer.param_groups[0], "params": list(self.trained.values())}]
        found = groups_without_eps(groups)
        if found:
            eps = found[0][1]
            self._find(
                "eps",
                "error",
                f"eps={eps:g} is 0 in FP16, in which these weights are stepped: where a gradient is 0 the update is "
                "0/0, and the weight becomes nan.",
                f"{self._wrapping()}  # masters are FP32. Or eps=1e-4",
                numbers={"eps": eps},
            )

    def _who_has_gradients(self, twin: MixedPrecisionOptimizer) -> None:
        """Parameters and who steps them, after the first backward."""
        held = {id(param) for param in params_of(self.optimizer, self.model)}
        got = {id(pair.model) for pair in twin.params.all if self._has_gradient(twin, pair)}
        theirs = [pair for pair in twin.params.all if id(pair.model) not in self.names]
        strangers = [pair for pair in theirs if id(pair.model) not in got and pair.model.requires_grad]
        if strangers:
            none = not any(id(param) in held for param in self.trained.values())
            which = "all of the optimizer's parameters" if none else f"{len(strangers)} of the optimizer's parameters"
            self._find(
                "other_parameters",
                "error",
                f"{which} are not the model's and got no gradient: the optimizer was made for another model, or before "
                "the model's parameters were replaced.",
                f"optimizer = {type(twin.optimizer).__name__}(model.parameters(), ...)  # after the last line that "
                "converts or wraps the model",
                numbers={"parameters": float(len(strangers))},
            )
            if none:
                return
        silent = [name for name, param in self.trained.items() if id(param) in held and id(param) not in got]
        if silent:
            some = describe(silent, limit=3)
            self._find(
                "no_gradient",
                "warning",
                f"{len(silent)} parameter{'s' * (len(silent) > 1)} that the optimizer holds got no gradient from this "
                f"batch: {some}. The loss does not depend on {'them' if len(silent) > 1 else 'it'}.",
                f"for name in {_listed(silent)}: model.get_parameter(name).requires_grad_(False)  # or use them in the "
                "loss: look for a detach() or a no_grad()",
                layer=silent[0],
                numbers={"parameters": float(len(silent))},
                by_layer=dict.fromkeys(silent, 0.0),
            )

    def _has_gradient(self, twin: MixedPrecisionOptimizer, pair: Any) -> bool:
        return raw_grad(pair.model) is not None or (
            twin.grad_accumulation == "fp32" and raw_grad(pair.master) is not None
        )

    def _written(self, names: list[str], who: str, line: str) -> None:
        some = describe(names, limit=1)
        lost = (
            "masters take the 16-bit values each time, and lose what they hold below these"
            if self._has_masters
            else "masters, once there are any, would take the 16-bit values each time"
        )
        self._find(
            "weights_written",
            "error" if self._has_masters else "warning",
            f"{who} writes 16-bit weights in every step: {some}. So {lost}.",
            line,
            layer=names[0],
            by_layer=dict.fromkeys(names, 1.0),
        )

    # -- not finite -----------------------------------------------------------------------------------------------

    def _not_finite(self, found: Diagnosis, after: str = "") -> None:
        numbers = {"loss_scale": found.scale}
        if found.kind == "overflow":
            if found.largest_scale is not None:
                numbers["largest_scale"] = found.largest_scale
            line = (
                "dynamic=True  # in place of loss_scale"
                if found.largest_scale is not None and found.largest_scale >= 1.0
                else "loss = loss.float().mean()  # end the model with .float(); a mean in place of a sum"
            )
            self._find("overflow", "error", found.words, line, layer=found.culprit, numbers=numbers)
            return
        lines = {
            "weights": "load a checkpoint from before",
            "input": "batch = torch.nan_to_num(batch)  # or leave the batch out: look at the data",
            "loss": "loss_fn(outputs.float(), targets)",
        }
        line = lines.get(found.kind, f"model.bfloat16()  # or FP32 for {found.culprit or 'what leaves the range'}")
        if after and found.kind == "weights":
            after, line = "one step has done this: ", "a smaller lr, or FP32 for what leaves the range"
        self._find("not_finite", "error", after + found.words, line, layer=found.culprit, numbers=numbers)

    # -- one forward and backward with hooks ----------------------------------------------------------------------

    def _of_probe(self, run: Run, twin: MixedPrecisionOptimizer, largest: float) -> None:
        scale, dynamic = float(twin.loss_scale), twin.scaler.dynamic
        shares = self._underflow(run)
        elements = {name: self.trained[name].numel() for name in shares}
        share = self._mean(shares)
        bad = most_elements_first(shares, elements)
        numbers = {"underflow": share, "loss_scale": scale, "largest_scale": largest}
        of = {"layer": next(iter(bad), None), "numbers": numbers, "by_layer": bad}
        worst = f", most in {shares_in_words(bad)}" if bad else ""
        flows = any(reach.dtype == torch.float16 for reach in run.reaches)
        if flows and scale == 1.0 and not dynamic and self._may_lack_scale():
            self._find(
                "no_loss_scale",
                "error",
                f"{self._fp16_words()} without a loss scale: {percent(share)} of the gradients' elements underflow in "
                f"this batch{worst}, and more as the loss falls. There is room for a scale of {largest:,.0f}.",
                self._scale_line(),
                **of,
            )
        elif share > SHARE:
            can = largest > scale and self._share_at_best <= SHARE
            best = f"At {largest:,.0f}, the largest that is possible, {percent(self._share_at_best)} do."
            best = best if largest > scale else "No larger scale is possible."
            self._find(
                "underflow",
                "warning" if dynamic else "error",
                f"{percent(share)} of the gradients' elements underflow at a loss scale of {scale:g}{worst}. "
                + (f"There is room for a scale of {largest:,.0f}." if can else best),
                self._larger_scale_line(largest) if can else "model.bfloat16()",
                **of,
            )
        self._inside([one for one in run.inside if not one.is_harmless])
        self._autocast(run)
        self._near_the_end(run, scale, dynamic)
        self._not_held(run)

    def _inside(self, found: list[Inside]) -> None:
        if not found:
            return
        one = found[0]
        gives = "" if one.output is None else f" What {one.name} gives is {one.output}"
        gives += "." if one.in_fp32 is None or not gives else f", and in FP32 {one.in_fp32}."
        gives = " What it gives is right all the same, and its gradient is not finite." if one.is_harmless else gives
        more = f" So it is in {describe([other.name for other in found[1:]])}." if found[1:] else ""
        self._find(
            "inside",
            "error",
            f"in the forward of {one.name}, {one.operation} makes inf: FP16 ends at 65504, and FP32 would hold "
            f"{one.largest:,.0f}.{gives}{more}",
            f"x = x.float()  # first in the forward of {one.name}; what it returns .half() again",
            layer=one.name,
            numbers={"largest": one.largest},
            by_layer={other.name: other.largest for other in found},
        )

    def _of_buffers(self, names: set[str]) -> None:
        """FP16 buffers that have come to hold inf or nan, such as the variance of a batch norm."""
        if not names:
            return
        found = sorted(names)
        module = found[0].rpartition(".")[0]
        self._find(
            "buffers",
            "error",
            f"{describe(found)}: the buffer is FP16, and became inf or nan in these steps. In eval mode the module "
            "takes its numbers from there.",
            f"model.get_submodule({module!r}).float()  # before the optimizer is made",
            layer=found[0],
            numbers={"buffers": float(len(found))},
            by_layer=dict.fromkeys(found, 1.0),
        )

    def _mean(self, shares: dict[str, float]) -> float:
        return mean_over(shares, {name: self.trained[name].numel() for name in shares})

    def _may_lack_scale(self) -> bool:
        """Not where the user has written ``loss_scale=1.0``."""
        return self.wrapper is None or bool(getattr(self.wrapper.scaler, "is_default", True))

    def _fp16_words(self) -> str:
        kinds = {param.dtype for param in self.trained.values()}
        if torch.float16 in kinds:
            return "FP16 weights are trained"
        return "weights are trained through FP16 activations"

    def _scale_line(self) -> str:
        kinds = {param.dtype for param in self.trained.values()} | {p.dtype for p in self.model.parameters()}
        if self.wrapper is not None:
            way = self.wrapper.way_to_scale
            return f"{way.write}, and {way.backward}"
        if torch.float16 in kinds:
            return f"{WRAP_DYNAMIC}\noptimizer.backward(loss)  # in place of loss.backward()"
        return (
            f'scaler = fp16opt.GradScaler("{self._device}")\n'
            "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()  # or BF16 for autocast"
        )

    def _larger_scale_line(self, largest: float) -> str:
        if self.scaler is not None:
            return f'scaler = fp16opt.GradScaler("{self._device}", init_scale={largest:.0f})'
        scaler = f"scaler=fp16opt.DynamicLossScaler(init_scale={largest:.0f})"
        return f"{scaler}  # in place of loss_scale; or dynamic=True, which gets there in time"

    @property
    def _device(self) -> str:
        return next(iter(self.trained.values())).device.type

    def _underflow(self, run: Run) -> dict[str, float]:
        """The share of each FP16 gradient that underflows; also of FP32 ones that came through FP16 activations."""
        through = torch.float16 in run.autocast or any(reach.dtype == torch.float16 for reach in run.reaches)
        grads = {name: _as_fp16(grad, through) for name, grad in run.gradients.items()}
        names = [name for name, grad in grads.items() if grad is not None and grad.numel()]
        if not names:
            return {}
        table = of_gradients([grads[name] for name in names], torch.device("cpu"))
        count, zero, subnormal = (
            table[:, GRADIENT.index(column)].tolist() for column in ("count", "zero", "subnormal")
        )
        return {name: underflow(count[at], zero[at], subnormal[at]) for at, name in enumerate(names)}

    def _autocast(self, run: Run) -> None:
        other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
        kinds = {torch.float16: "FP16", torch.bfloat16: "BF16"}
        for dtype in run.autocast:
            weights = [n for n, p in self.model.named_parameters() if p.dtype == other.get(dtype)]
            if not weights:
                continue
            trains = any(name in self.trained for name in weights)
            mine, its = kinds[other[dtype]], kinds[dtype]
            loses = "3 of their 11 bits" if dtype == torch.bfloat16 else "the range that they have"
            self._find(
                "autocast",
                "error" if trains else "warning",
                f"{mine} weights run under {its} autocast: {describe(weights, limit=1)}. Every product casts them, and "
                f"loses {loses}; their gradients are {mine} all the same. 16-bit weights need no autocast.",
                f"model.{str(dtype).removeprefix('torch.')}()  # before the optimizer is made. Or no torch.autocast "
                f"around the model; {its.lower()}=False in a trainer's arguments",
                layer=weights[0],
                numbers={"parameters": float(len(weights))},
            )

    def _near_the_end(self, run: Run, scale: float, dynamic: bool) -> None:
        end = torch.finfo(torch.float16).max
        reaches = run.outputs + ([] if dynamic else run.reaches)
        near = {
            one.name: one.largest / end for one in reaches if one.dtype == torch.float16 and one.largest > _NEAR * end
        }
        if near:
            near = largest_first(near)
            name = next(iter(near))
            is_gradient = all(one.name != name for one in run.outputs)
            more = f", and {len(near) - 1} more" if len(near) > 1 else ""
            self._find(
                "near_the_end",
                "warning",
                f"{name}{'' if is_gradient else ' (its output)'} reaches {near[name] * end:,.0f}, "
                f"{percent(near[name])} of where FP16 ends{more}: a batch that is a little larger overflows.",
                f"dynamic=True  # or loss_scale={2.0 ** math.floor(math.log2(scale) - 2):g}"
                if is_gradient
                else "model.bfloat16()  # or FP32 from that module on; or smaller inputs of it",
                layer=name,
                numbers={"largest": near[name] * end},
                by_layer=near,
            )

    def _not_held(self, run: Run) -> None:
        held = {id(param) for param in params_of(self.optimizer, self.model)}
        left = [name for name in run.gradients if id(self.trained[name]) not in held]
        if not left or any(finding.key == "other_parameters" for finding in self.findings):
            return
        some = describe(left, limit=3)
        self._find(
            "not_in_optimizer",
            "warning",
            f"in no optimizer, so that {'they' if len(left) > 1 else 'it'} will not move, though there was a gradient: "
            f"{some}.",
            f"optimizer.add_param_group({{'params': [model.get_parameter(name) for name in {_listed(left)}]}})  # or "
            "requires_grad_(False), which saves their gradients",
            layer=left[0],
            numbers={"parameters": float(len(left))},
            by_layer=dict.fromkeys(left, 1.0),
        )

    # -- the samples of a Monitor ---------------------------------------------------------------------------------

    def _of_samples(self, samples: list[dict[str, Any]], twin: MixedPrecisionOptimizer) -> None:
        taken = [sample["rows"] for sample in samples if not sample["skipped"]]
        if not taken:
            return
        pairs = {pair.name: pair.model for pair in twin.params.all if pair.model.dtype in HALF_DTYPES}
        called = {name: self.names.get(id(model), name) for name, model in pairs.items()}
        elements = {called[name]: model.numel() for name, model in pairs.items()}
        without: dict[str, float] = {}
        still: dict[str, float] = {}
        for name, title in called.items():
            rows = [rows[name] for rows in taken if name in rows]
            for number, into in (("lost", without), ("still", still)):
                values = [row[number] for row in rows if row[number] is not None]
                if values:
                    into[title] = sum(values) / len(values)
        if not without:
            return
        share, with_masters = mean_over(without, elements), mean_over(still, elements)
        if self._has_masters:
            self.facts.append(
                f"Masters keep {percent(1.0 - with_masters)} of the updates; 16-bit weights alone would lose "
                f"{percent(share)} of them."
            )
            return
        kept_by = self._keeps_what_is_lost(twin.optimizer)
        if kept_by:
            self.facts.append(f"The optimizer steps 16-bit weights with {kept_by}, which keeps small updates.")
            return
        bad = most_elements_first(without, elements) if share > SHARE else {}
        has_none = self.wrapper is not None
        with_words = "" if has_none else f" With FP32 masters {percent(with_masters)} are lost."
        how_many = (
            f"of the updates are too small for 16-bit weights, and are lost: most in {shares_in_words(bad)}."
            if bad
            else "of these updates are lost, as 16-bit weights train without masters, and more later on, as the "
            "learning rate and the gradients fall."
        )
        self._find(
            "lost_updates",
            "error" if bad else "warning",
            f"{percent(share)} {how_many}{with_words}",
            self._wrapping(),
            layer=next(iter(bad), None),
            numbers={"without_masters": share, **({} if has_none else {"with_masters": with_masters})},
            by_layer=bad,
        )

    def _keeps_what_is_lost(self, optimizer: Optimizer) -> str:
        """The setting by which an optimizer keeps updates that 16-bit weights can't hold; "" where there is none."""
        settings = {**vars(optimizer), **optimizer.param_groups[0]}
        keeps = (name for name, value in settings.items() if ("kahan" in name or "stochastic" in name) and value)
        return next(keeps, "")

    def _tell(self, run: Run, twin: MixedPrecisionOptimizer, largest: float) -> None:
        """What was run, as the first fact."""
        counts: dict[str, int] = {}
        for param in self.trained.values():
            kind = str(param.dtype).removeprefix("torch.")
            counts[kind] = counts.get(kind, 0) + param.numel()
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        whose = type(twin.optimizer).__name__ + ("" if self.optimizer is not None else " (none was given)")
        skipped = twin.skipped_steps - (0 if self.wrapper is None else self.wrapper.skipped_steps)
        skips = f", {skipped} of them skipped to find the loss scale" if skipped else ""
        largest = min(largest, self._skipped_at / 2)
        why = (
            "as the loss is FP16: end the model with .float()" if run.loss_dtype == torch.float16 else "for this batch"
        )
        scale = f" The loss scale is {twin.loss_scale:,g}; the largest possible is {largest:,.0f}, {why}."
        fp16 = any(reach.dtype == torch.float16 for reach in run.reaches)
        self.facts.insert(
            0, f"{self.steps} steps of {whose} over {kinds} weights{skips}.{scale if fp16 or skipped else ''}"
        )

    # -- the user's own loop --------------------------------------------------------------------------------------

    def loop(self, seen: Seen) -> None:
        """What three rounds of ``train_step`` showed."""
        wrapped = self.wrapper is not None
        self.findings = [one for one in self.findings if not self._is_held_by(seen.others, one)]
        clip = "optimizer.clip_master_grads(max_norm)  # in place of that line"
        unscale = "scaler.unscale_(optimizer)  # before that line"
        masters = "clip_grad_norm_(optimizer.master_params(), max_norm)  # after scaler.unscale_(optimizer)"
        if seen.clips:
            place, norm = next(iter(seen.clips.items()))
            saw = f" (it saw a norm of {norm:.4g})" if norm is not None else ""
            if not wrapped:
                why = "before scaler.unscale_(optimizer), so that the loss scale is in the norm"
            elif norm == 0.0:
                why = "which are gone by then, folded into the masters' gradients: nothing is clipped"
            else:
                why = "which are scaled: the optimizer refuses or ignores what is written there"
            self._find(
                "clip",
                "error",
                f"{place} clips the model's own gradients{saw}, {why}.",
                (clip if self.scaler is None else masters) if wrapped else unscale,
                numbers={} if norm is None else {"norm": norm},
            )
        elif seen.gradients:
            some = describe(seen.gradients, limit=1)
            self._find(
                "gradients_written",
                "error",
                f"a line between backward and step writes gradients of the model, which are scaled there: {some}.",
                "optimizer.clip_master_values(max_value)  # in place of p.grad.data.clamp_. Or, after "
                "optimizer.update_master_grads(), write the gradients of optimizer.master_params()",
                layer=seen.gradients[0],
            )
        if seen.refused is not None and not (seen.clips or seen.gradients):
            words, place = seen.refused
            line = next((line for said, line in _REFUSED.items() if said in words), "see docs/errors.md")
            self._find("refused", "error", f"{place} is refused: {words}", line)
        if seen.left:
            some = describe(seen.left, limit=3)
            self._find(
                "left_over",
                "error",
                f"a step takes the gradients of earlier steps once more, as nothing clears them in between: {some}.",
                "optimizer.zero_grad()  # before the backward, or after optimizer.step()",
                layer=seen.left[0],
                numbers={"parameters": float(len(seen.left))},
            )
        if not seen.steps and seen.refused is None:
            self._find(
                "no_step",
                "warning",
                "three rounds of train_step never step this optimizer while there are gradients, so that its weights "
                "stay as they are. Where a round is one of several micro-batches, give all of them as one train_step.",
                "optimizer.step()  # after the backward, before optimizer.zero_grad()",
            )
        count, dtype = seen.added
        if count >= _MANY.get(dtype, math.inf):
            kind = str(dtype).removeprefix("torch.")
            sums = 'grad_accumulation="fp32"'
            wrap = WRAP.replace("named", f"{sums}, named", 1)
            self._find(
                "micro_batches",
                "warning",
                f"{count} micro-batches are added up in {kind}, of {_BITS[dtype]} bits: of the last one, next to the "
                f"sum, {max(0.0, _BITS[dtype] - math.log2(count)):.1f} bits are left.",
                f"{sums}  # in MixedPrecisionOptimizer(...)"
                if wrapped
                else f"{wrap}\noptimizer.backward(loss)  # in place of loss.backward()",
                numbers={"micro_batches": float(count)},
            )
        if seen.averages:
            first = "" if wrapped else f"{self._wrapping()}\n"
            self._find(
                "average",
                "warning",
                f"{named_lines(seen.averages)} averages 16-bit weights in 16 bits: what an update adds to the average "
                "is mostly less than half of what it can move by, and is lost.",
                f"{first}averaged = fp16opt.AveragedMasters(model, optimizer, fp16opt.ema(0.999))  # in FP32\n"
                "averaged.update()  # after optimizer.step(), in place of that line",
            )
        already = any(finding.key == "weights_written" for finding in self.findings)
        if seen.weights and not already:
            line = (
                "with torch.no_grad():\n"
                "    for p in optimizer.master_params(): ...  # what that line does to the model's\n"
                "optimizer.write_masters()"
            )
            line = line if self._has_masters else f"{self._wrapping()}\n{line}"
            self._written(seen.weights, "a line between two steps", line)
        if seen.skipped and (seen.schedulers or seen.moved):
            rates = "" if seen.moved is None else f" (lr {seen.moved[0]:g} -> {seen.moved[1]:g})"
            what = named_lines(seen.schedulers) or "a line of the loop"
            self._find(
                "scheduler",
                "warning",
                f"{what} moves the learning rate{rates} although the step was skipped: the schedule runs ahead of the "
                "training by one step for each skip.",
                "if not optimizer.step_was_skipped: scheduler.step()"
                if wrapped
                else "before = scaler.get_scale(); scaler.update()\nif scaler.get_scale() >= before: scheduler.step()",
                numbers={} if seen.moved is None else {"lr_before": seen.moved[0], "lr_after": seen.moved[1]},
            )

    def _is_held_by(self, others: set[int], finding: PreflightFinding) -> bool:
        """Whether it names parameters that other optimizers of the loop hold."""
        missed = [id(self.trained[name]) for name in finding.by_layer] if finding.key == "not_in_optimizer" else []
        return bool(missed) and others.issuperset(missed)


def _overflown(model: nn.Module) -> set[str]:
    """FP16 buffers that hold inf or nan. What is -inf may be a mask."""
    halves = {name: value for name, value in model.named_buffers() if value.dtype == torch.float16}
    return {name for name, value in halves.items() if not bool((value < math.inf).all())}


def _listed(names: list[str]) -> str:
    """Some names as a list in Python."""
    return repr(names) if len(names) <= 4 else f"[{', '.join(map(repr, names[:4]))}, ...]"


def _as_fp16(grad: Tensor, through_fp16: bool) -> Tensor | None:
    """A gradient as FP16 holds it: FP16 ones, and where FP16 activations were about, others that FP16 holds exactly."""
    if grad.dtype == torch.float16:
        return grad
    if grad.dtype == torch.bfloat16 or not through_fp16:
        return None
    half = grad.half()
    return half if torch.equal(half.to(grad.dtype), grad) and bool(half.any()) else None
