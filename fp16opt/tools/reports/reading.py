"""A run as a monitor has written it down, and what is remarkable about it, in words."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engine.diagnostics import describe
from . import sinks

_CALIBRATED = 10  # steps taken, after which the loss scale has been found: as the log counts
_MANY = 3  # skips in a row from which on they are no calibration, once a step was taken

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
"""The largest finite number of each dtype."""


@dataclass
class RunRead:
    """The records of one run, in order.

    Attributes:
        header: of the last start; a run that goes on has several.
        steps: one record each.
        samples: of the steps that were looked at.
        rows: their names, in the model's order.
        earlier: how many runs are in the file before this one.
    """

    header: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    earlier: int = 0

    @property
    def rows(self) -> list[str]:
        """Names of parameters or prefixes."""
        names = dict.fromkeys(self.header.get("rows", {}))
        for sample in self.samples:
            names.update(dict.fromkeys(sample["rows"]))
        return list(names)

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale moves."""
        return bool(self.header.get("dynamic"))

    @property
    def masters(self) -> str:
        """ "full", "split" or "none"."""
        return str(self.header.get("masters", "full"))

    def values(self, row: str, name: str) -> list[float | None]:
        """One number of a row, of each sample."""
        return [sample["rows"].get(row, {}).get(name) for sample in self.samples]

    @property
    def has_narrow_range(self) -> bool:
        """Whether a loss scale can matter to gradients: float16 ones, or of a kind that is not known."""
        kinds = self.header.get("rows", {}).values()
        return not kinds or any(kind.get("dtype") == "float16" for kind in kinds)

    @property
    def calibrated(self) -> int:
        """The first step that was taken; the first of all where none was."""
        return next((step["step"] for step in self.steps if not step["skipped"]), 0)

    def calibration(self) -> list[int]:
        """Steps that were skipped while a dynamic scale was looked for: those that the log calls so."""
        found: list[int] = []
        taken, in_a_row = int(self.header.get("first_step", 0)) if not self.earlier else 0, 0
        for step in self.steps if self.dynamic and self.has_narrow_range else ():
            in_a_row = in_a_row + 1 if step["skipped"] else 0
            taken += not step["skipped"]
            loss = step.get("loss")
            is_of_the_scale = loss is None or math.isfinite(loss)
            if step["skipped"] and is_of_the_scale and taken < _CALIBRATED and (not taken or in_a_row < _MANY):
                found.append(step["step"])
        return found

    def spoilt_weights(self) -> tuple[int, list[str]] | None:
        """The first sample whose weights are not all finite, and which: what comes after it says nothing else."""
        for sample in self.samples:
            norms = {row: numbers.get("weight_norm") for row, numbers in sample["rows"].items()}
            bad = [row for row, norm in norms.items() if norm is not None and not math.isfinite(norm)]
            if bad:
                return sample["step"], bad
        return None

    def spoilt(self) -> list[int]:
        """Steps of samples, after the calibration, in which nearly all rows had a gradient that was not finite."""
        found, looked_for = [], self.calibration()
        for sample in self.samples:
            norms = [row["grad_norm"] for row in sample["rows"].values() if row["grad_norm"] is not None]
            bad = [norm for norm in norms if not math.isfinite(norm)]
            if (
                sample["step"] not in looked_for
                and sample["step"] >= self.calibrated
                and len(norms) > 2
                and len(bad) >= 0.8 * len(norms)
            ):
                found.append(sample["step"])
        return found

    def spoilt_by_the_loss(self) -> list[int]:
        """Of these the ones whose loss is not known to be finite: else a gradient near it overflowed at that scale."""
        losses = {step["step"]: step.get("loss") for step in self.steps}
        finite = [step for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
        return [step for step in self.spoilt() if step not in finite]

    def skipped(self) -> list[int]:
        """Numbers of steps that were skipped."""
        return [step["step"] for step in self.steps if step["skipped"]]


def load(path: str | os.PathLike[str]) -> RunRead:
    """Read the last run that a monitor has written there.

    A start at a step that the file has already takes the place of what comes after that step: a training that was
    resumed. Where that is the first step of all, another run begins.

    Raises:
        ValueError: It holds no run, or one of a format that is not known here.
    """
    run: RunRead | None = None
    for record in sinks.read(path):
        if record["kind"] == "run":
            if record.get("format") != 1:
                raise ValueError(
                    f"{path}: expected records of format 1, got {record.get('format')!r}. A newer fp16opt reads them."
                )
            run = RunRead(record) if run is None else _follow(run, record)
        elif run is not None and record["kind"] == "step":
            run.steps.append(record)
        elif run is not None and record["kind"] == "sample":
            run.samples.append(record)
    if run is None:
        raise ValueError(f"{path}: expected records of fp16opt.Monitor, and there is none that begins a run.")
    return run


def _follow(run: RunRead, header: dict[str, Any]) -> RunRead:
    """What a further start in the same file makes of the run before it."""
    first, known = header.get("first_step", 0), [*run.steps, *run.samples]
    if known and first < min(record["step"] for record in known):
        return RunRead(header, earlier=run.earlier + 1)
    steps, samples = ([one for one in part if one["step"] <= first] for part in (run.steps, run.samples))
    return RunRead(header, steps, samples, run.earlier)


@dataclass(frozen=True)
class Finding:
    """Something to look at.

    Attributes:
        weight: how much it matters; larger is worse.
    """

    row: str
    weight: float
    words: str


def of_run(run: RunRead) -> list[str]:
    """The run as a whole, in sentences."""
    count, skipped = len(run.steps), run.skipped()
    words = [f"{count} steps, {len(skipped)} skipped, {len(run.samples)} looked at."]
    mend: list[str] = []
    normal: list[str] = []  # sentences that tell of nothing to mend
    scales = [step["loss_scale"] for step in run.steps]
    if scales:
        went = f"went from {scales[0]:g} to {scales[-1]:g}" if min(scales) < max(scales) else f"was {scales[0]:g}"
        words.append(f"The loss scale {went}.")
    losses = [loss for step in run.steps if (loss := step.get("loss")) is not None and math.isfinite(loss)]
    if losses:
        words.append(f"The loss went from {losses[0]:.4g} to {losses[-1]:.4g}.")
    looked_for, spoilt_weights = run.calibration(), run.spoilt_weights()
    late = [step for step in skipped if step not in looked_for]
    later = len(late)
    if count and len(skipped) == count:
        mend.append("No step was taken: gradients were never finite. Ask fp16opt.diagnose why.")
        later = 0
    elif looked_for:
        normal.append(f"Calibration took {len(looked_for)} skip{'s' if len(looked_for) > 1 else ''}.")
    if spoilt_weights is not None:
        step, rows = spoilt_weights
        mend.append(
            f"From step {step} on weights hold inf or nan: {describe(rows)}. A step before has written it, and no loss "
            "is finite after it: go back to a checkpoint, and look at eps, the learning rate, and at code that writes "
            "weights." + (" Without masters eps=1e-8 is 0 in FP16: use 1e-4 or more." if run.masters == "none" else "")
        )
        late = [one for one in late if one < step]
        later = len(late)
    if later > max(2, 0.05 * count) and not run.has_narrow_range:
        mend.append(
            f"{later / count:.0%} of the steps were skipped. No gradient is FP16, so that no loss scale helps: it is "
            "the data or the forward. Ask fp16opt.diagnose."
        )
    elif later > max(2, 0.05 * count) and not run.dynamic:
        mend.append(
            f"{later / count:.0%} of the steps were skipped at a fixed scale: it is too high. Use a lower one, or "
            "dynamic=True."
        )
    elif later:
        steps, why = late, "bad batches, or rare overflows" if run.has_narrow_range else "bad batches"
        more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
        told = normal if run.has_narrow_range and later <= max(2, 0.05 * count) else mend
        told.append(f"Skipped later: step {', '.join(map(str, steps[:5]))}{more}: {why}.")
    spoilt = [step for step in run.spoilt_by_the_loss() if spoilt_weights is None or step < spoilt_weights[0]]
    if spoilt:
        mend.append(
            f"In step {', '.join(map(str, spoilt[:5]))} the gradients of nearly all layers were not finite: that is a "
            "loss that is inf or nan, from the data or the forward."
        )
    under = _over_elements(run, "underflow", [row for row in run.rows if _kind(run, row) == "float16"])
    if under is not None and under > 0.05 and run.masters == "none":
        mend.append(
            f"{under:.0%} of the gradients' elements underflow when they are unscaled in 16 bits, which masters avoid."
        )
    elif under is not None and under > 0.05:
        mend.append(
            f"{under:.0%} of the 16-bit gradients' elements underflow: the scale is too low. Use a higher one, or "
            "dynamic=True."
        )
    lost = _over_elements(run, "lost", run.rows)
    if lost is not None and lost > 0.05:
        small = f"{lost:.0%} of the updates' elements are under half a unit in the last place of the weight and"
        if run.masters == "none":
            mend.append(f"{small} are lost: use masters.")
        else:
            normal.append(f"{small} would be lost without masters, which hold them.")
    words += normal + mend
    if not (mend or worth_a_look(run, 1)):
        words.append("Nothing to mend.")
    if run.earlier:
        words.append(f"The file holds {run.earlier + 1} runs; this is the last.")
    return words


def _over_elements(run: RunRead, name: str, rows: Sequence[str]) -> float | None:
    """The mean over all elements of some rows; each row counts as one where the file does not tell how many it has."""
    kinds = run.header.get("rows", {})
    known = [(_late(run, row, name), float(kinds.get(row, {}).get("elements", 1))) for row in rows]
    there = [(share, count) for share, count in known if share is not None]
    total = sum(count for _, count in there)
    return sum(share * count for share, count in there) / total if total else None


def worth_a_look(run: RunRead, limit: int = 5) -> list[Finding]:
    """The rows that are most remarkable, the worst first, each once."""
    found = [finding for row in run.rows for finding in _of_row(run, row)]
    best: dict[str, Finding] = {}
    for finding in sorted(found, key=lambda one: -one.weight):
        best.setdefault(finding.row, finding)
    return list(best.values())[:limit]


def _of_row(run: RunRead, row: str) -> list[Finding]:
    kind = _kind(run, row)
    found = []
    norms = run.values(row, "grad_norm")
    known = [(sample["step"], norm) for sample, norm in zip(run.samples, norms, strict=True) if norm is not None]
    spoilt_weights = run.spoilt_weights()
    end = math.inf if spoilt_weights is None else spoilt_weights[0]
    apart = [*run.spoilt(), *run.calibration(), *(step for step, _ in known if step >= end)]
    bad = [step for step, norm in known if not math.isfinite(norm) and step >= run.calibrated and step not in apart]
    finite = [norm for _, norm in known if math.isfinite(norm)]
    if bad:
        share = len(bad) / len(run.samples)
        words = f"its gradient was not finite in {len(bad)} of {len(run.samples)} samples, first in step {bad[0]}"
        found.append(Finding(row, 50.0 + 40.0 * share, words))
    zero, under = _late(run, row, "zero"), _late(run, row, "underflow")
    if zero == 1.0:
        words = "its gradient is all zero: it underflows, or the loss does not depend on it (diagnose tells which)"
        found.append(Finding(row, 60.0, words))
    elif under is not None and under > 0.02 and kind == "float16":
        held = "when unscaled in 16 bits, without a master" if run.masters == "none" else "at the present loss scale"
        words = f"{under:.0%} of its gradients underflow {held}"
        found.append(Finding(row, 20.0 + 40.0 * under, words))
    near = zip(run.samples, run.values(row, "near_overflow"), strict=True)
    calm = [value or 0.0 for sample, value in near if sample["step"] >= run.calibrated and sample["step"] not in apart]
    if max(calm, default=0.0) > 0.0 and not bad:
        words = f"its largest gradients come within a factor of 2 of {LARGEST.get(kind, math.inf):g}, where {kind} ends"
        found.append(Finding(row, 15.0, words))
    lost, ratio = _late(run, row, "lost"), _late(run, row, "update_ratio")
    if lost is not None and lost > 0.05 and run.masters == "none":  # else masters keep them
        words = f"{lost:.0%} of its updates are under half an ulp of the weight and are lost, as there are no masters"
        found.append(Finding(row, 40.0 + 10.0 * lost, words))
    if ratio is not None and ratio > 0.1 and not _settles(run.values(row, "update_ratio")):
        found.append(Finding(row, 18.0, f"a step moves it by {ratio:.0%} of its own norm"))
    if ratio == 0.0:
        found.append(Finding(row, 55.0, "it stands still: its update is zero"))
    usual = _median(finite[1:]) if len(finite) > 3 else 0.0
    if usual > 0 and finite[-1] > 100 * usual:
        found.append(Finding(row, 12.0, f"its gradient norm has grown to {finite[-1] / usual:.0f} times its median"))
    distance = _late(run, row, "distance")
    if distance is not None and distance > (2.0**-8 if kind == "float16" else 2.0**-6):
        words = f"its weights are {distance:.1%} away from the masters: too large or too small for {kind}"
        found.append(Finding(row, 25.0, words))
    return found


def _settles(ratios: Sequence[float | None]) -> bool:
    """Whether updates become smaller beside the weight, or too few were seen to tell.

    A layer that starts at zero is its first update, and a step moves it by 100% of its norm: then by 1/n at the n-th,
    or by 1/sqrt(n) where updates go to and fro.
    """
    there = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    return len(there) < 3 or there[-1] < 0.6 * there[0]


def _kind(run: RunRead, row: str) -> str:
    return str(run.header.get("rows", {}).get(row, {}).get("dtype", "float16"))


def _late(run: RunRead, row: str, name: str) -> float | None:
    """The mean of a number over the later half of the samples."""
    values = [value for value in run.values(row, name)[len(run.samples) // 2 :] if value is not None]
    return _mean([value if math.isfinite(value) else None for value in values])


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
