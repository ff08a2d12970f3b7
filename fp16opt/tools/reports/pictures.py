"""The pictures of a report, by matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable
from typing import Any

from .reading import LARGEST, RunRead

_INK, _RED, _BLUE, _GREY = "#1b1f24", "#c1121f", "#00629b", "#8a8f98"
_LABELS = 40  # rows that are named at most
_NAMED = 10  # lines of a picture that are named at most
_DPI, _DPI_TOGETHER = 110, 70


def _figure(width: float, height: float) -> Any:
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError("the report's pictures need matplotlib: pip install matplotlib") from None
    return module.Figure(figsize=(width, height), layout="constrained")


def scale_and_skips(axes: Any, run: RunRead) -> None:
    """The loss scale of every step, with a mark where one was skipped."""
    steps = [step["step"] for step in run.steps]
    scales = [step["loss_scale"] for step in run.steps]
    axes.step(steps, scales, where="post", color=_BLUE, linewidth=1.6)
    skips = [(step["step"], step["loss_scale"]) for step in run.steps if step["skipped"]]
    if skips:
        label = f"{len(skips)} skipped"
        axes.plot(*zip(*skips, strict=True), "|", color=_RED, markersize=11, markeredgewidth=1.4, label=label)
        axes.legend(loc="best", frameon=False)
    axes.set_yscale("log", base=2)
    if scales:
        axes.set_ylim(min(scales) / 4, max(scales) * 4)
    _title(axes, "Loss scale, and skipped steps", "loss scale")


def losses(axes: Any, run: RunRead) -> None:
    """The loss of every step."""
    known = [(step["step"], step["loss"]) for step in run.steps if _good(step.get("loss"))]
    if not known:
        _title(axes, "Loss", "loss")
        _nothing(axes)
        return
    low, high = _without_spikes([loss for _, loss in known])
    within = [(step, min(max(loss, low), high)) for step, loss in known]
    axes.plot(*zip(*within, strict=True), color=_BLUE, linewidth=1.0)
    above, below = [step for step, loss in known if loss > high], [step for step, loss in known if loss < low]
    bad = [step["step"] for step in run.steps if step.get("loss") is not None and not _good(step["loss"])]
    for steps, at, mark, color, label in (
        (above, high, "^", _BLUE, "higher"),
        (below, low, "v", _BLUE, "lower"),
        (bad, high, "x", _RED, "not finite"),
    ):
        if steps:
            axes.plot(steps, [at] * len(steps), mark, color=color, markersize=5, label=f"{len(steps)} {label}")
    if above or below or bad:
        axes.legend(loc="best", frameon=False)
    _title(axes, "Loss", "loss")


def _without_spikes(values: list[float]) -> tuple[float, float]:
    """Between which numbers values are drawn: one loss of a bad batch would leave nothing to see of the others.

    Lasting changes are drawn whole: they go with the median of the nine values around each.
    """
    if len(values) < 20:
        return min(values), max(values)
    around = [sorted(values[max(0, at - 4) : at + 5]) for at in range(len(values))]
    middle = [some[len(some) // 2] for some in around]
    low, high = min(middle), max(middle)
    room = max(2.0 * (high - low), 0.1 * abs(high))
    return max(min(values), low - room), min(max(values), high + room)


def norms(axes: Any, run: RunRead) -> None:
    """The norm before the clip, and the seconds that a step took."""
    known = [(step["step"], step["grad_norm"]) for step in run.steps if _good(step["grad_norm"])]
    if not known:  # the run does not clip: norms of the samples
        known = [(sample["step"], _total(sample)) for sample in run.samples if _good(_total(sample))]
    if known:
        axes.plot(*zip(*known, strict=True), color=_BLUE, linewidth=1.0)
        if min(value for _, value in known) > 0:
            axes.set_yscale("log")
            for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                formatter(_plain(axes))
    _title(axes, "Norm of all gradients, before the clip", "norm")
    seconds = [(step["step"], 1e3 * step["seconds"]) for step in run.steps if step["seconds"]]
    if seconds:
        other = axes.twinx()
        top = 3 * sorted(value for _, value in seconds)[len(seconds) // 2]
        within = [(step, min(value, top)) for step, value in seconds]
        other.plot(*zip(*within, strict=True), color=_GREY, linewidth=0.6, alpha=0.7)
        longer = [(step, top) for step, value in seconds if value > top]
        if longer:  # a first step that compiles, or a save, would leave nothing to see of the others
            other.plot(*zip(*longer, strict=True), "^", color=_GREY, markersize=4)
        other.set_ylabel("milliseconds a step" + (", \u25b2 more" if longer else ""), color=_GREY)
        other.set_ylim(0, 1.05 * top)


def _plain(axes: Any) -> Any:
    """1, 3.4 and 2e+06 in place of powers of ten, and between these only where there are few."""
    ticker = importlib.import_module("matplotlib.ticker")

    class Plain(ticker.LogFormatter):  # type: ignore[misc, name-defined]
        def __call__(self, value: float, position: int | None = None) -> str:
            return f"{value:g}" if super().__call__(value, position) else ""

    made = Plain(minor_thresholds=(1.5, 0.5))
    made.set_axis(axes.yaxis)
    return made


def _total(sample: dict[str, Any]) -> float:
    squares = [row["grad_norm"] ** 2 for row in sample["rows"].values() if row["grad_norm"] is not None]
    return math.sqrt(sum(squares)) if all(map(math.isfinite, squares)) else math.inf


def norms_by_layer(axes: Any, run: RunRead) -> None:
    """A heat map of gradient norms."""
    _heat(axes, run, "grad_norm", "Gradient norms by layer (log10)", _log10, "viridis")


def underflow_by_layer(axes: Any, run: RunRead) -> None:
    """A heat map of the shares of 16-bit gradients that underflow."""
    title = "16-bit gradients that underflow, % of each layer's"
    _heat(axes, run, "underflow", title, lambda value: 100 * value, "magma_r", (0.0, 100.0))


def margins(axes: Any, run: RunRead) -> None:
    """How far the largest scaled gradient of each layer is from where its dtype ends."""
    limit, drawn = None, []
    for row in run.rows:
        kind = run.header.get("rows", {}).get(row, {}).get("dtype")
        if kind not in ("float16", "bfloat16"):
            continue
        scales = {step["step"]: step["loss_scale"] for step in run.steps}
        points = [
            (sample["step"], sample["rows"][row]["grad_largest"] * scales.get(sample["step"], sample["loss_scale"]))
            for sample in run.samples
            if row in sample["rows"] and _good(sample["rows"][row]["grad_largest"])
        ]
        points = [(step, value) for step, value in points if value > 0]
        limit = max(limit or 0.0, LARGEST[kind])
        if points:
            drawn.append((row, points))
    for (row, points), color in zip(drawn, _colors(len(drawn)), strict=True):
        axes.plot(*zip(*points, strict=True), color=color, linewidth=1.0, marker=".", markersize=3, label=row[-34:])
    if drawn:
        largest = sorted(range(len(drawn)), key=lambda at: -max(value for _, value in drawn[at][1]))[:_NAMED]
        lines = [axes.lines[at] for at in largest]
        title = f"the {_NAMED} largest of {len(drawn)}" if len(drawn) > _NAMED else None
        axes.legend(handles=lines, title=title, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=6)
    if limit is not None:
        axes.axhline(limit, color=_RED, linewidth=1.4)
        axes.text(0.01, limit, " overflow", color=_RED, va="bottom", transform=axes.get_yaxis_transform())
        tiny = 2.0**-14 if limit == LARGEST["float16"] else 2.0**-126
        axes.axhline(tiny, color=_GREY, linewidth=1.0, linestyle="--")
        axes.text(0.01, tiny, " subnormal below", color=_GREY, va="bottom", transform=axes.get_yaxis_transform())
        axes.set_yscale("log", base=2)
    _title(axes, "Largest scaled gradient of each layer, and the format's limits", "magnitude")


def _colors(count: int) -> list[Any]:
    """A colour for each, in the order of the layers."""
    colors = importlib.import_module("matplotlib").colormaps["turbo"]
    return [colors(0.05 + 0.9 * at / max(1, count - 1)) for at in range(count)]


def updates(axes: Any, run: RunRead) -> None:
    """A heat map of the sizes of updates, in units of the last place of the 16-bit weight."""
    title = "Updates in ulps of the weight (log2; below -1 lost without masters)"
    _heat(axes, run, "update_ulps", title, _log2, "PuOr", (-8.0, 6.0))


PANELS: dict[str, Callable[[Any, RunRead], None]] = {
    "scale": scale_and_skips,
    "loss": losses,
    "norm": norms,
    "margins": margins,
    "norms by layer": norms_by_layer,
    "underflow": underflow_by_layer,
    "updates": updates,
}
"""What a report shows, in order."""


def _heat(
    axes: Any,
    run: RunRead,
    name: str,
    title: str,
    change: Callable[[float], float],
    colors: str,
    between: tuple[float, float] | None = None,
) -> None:
    rows = [row for row in run.rows if any(value is not None for value in run.values(row, name))]
    table = [[_changed(value, change) for value in run.values(row, name)] for row in rows]
    _title(axes, title, "")
    if not table or not table[0]:
        _nothing(axes)
        return
    low, high = between or (None, None)
    axes.set_facecolor("#f2b5b5")  # where there is no finite number
    extent = (-0.5, len(run.samples) - 0.5, len(rows) - 0.5, -0.5)
    image = axes.imshow(table, aspect="auto", cmap=colors, interpolation="nearest", vmin=low, vmax=high, extent=extent)
    every = max(1, math.ceil(len(rows) / _LABELS))
    axes.set_yticks(range(0, len(rows), every), [row[-34:] for row in rows[::every]], fontsize=7)
    spots = range(0, len(run.samples), max(1, len(run.samples) // 8))
    axes.set_xticks(list(spots), [str(run.samples[spot]["step"]) for spot in spots])
    axes.figure.colorbar(image, ax=axes, pad=0.01)


def _nothing(axes: Any) -> None:
    axes.text(0.5, 0.5, "nothing of this kind in the run", ha="center", transform=axes.transAxes, color=_GREY)
    axes.set_yticks([])


def _changed(value: float | None, change: Callable[[float], float]) -> float:
    return math.nan if value is None or not math.isfinite(value) else change(value)


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan


def _log2(value: float) -> float:
    return math.log2(value) if value > 0 else math.nan


def _good(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _title(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _height(run: RunRead, name: str) -> float:
    """In inches: heat maps grow with their rows."""
    heat = name not in ("scale", "loss", "norm", "margins")
    return max(2.6, 1.1 + 0.17 * min(len(run.rows), _LABELS)) if heat else 2.8


def one(run: RunRead, name: str) -> bytes:
    """One of ``PANELS`` as a PNG.

    Raises:
        ImportError: There is no matplotlib.
    """
    figure = _figure(9.0, _height(run, name))
    PANELS[name](figure.subplots(), run)
    return _png(figure)


def together(run: RunRead) -> bytes:
    """All of them as one PNG, in two columns.

    Raises:
        ImportError: There is no matplotlib.
    """
    names = list(PANELS)
    pairs = [names[at : at + 2] for at in range(0, len(names), 2)]
    heights = [max(_height(run, name) for name in pair) for pair in pairs]
    figure = _figure(15.0, sum(heights))
    axes = figure.subplots(len(pairs), 2, gridspec_kw={"height_ratios": heights})
    for line, pair in zip(axes, pairs, strict=True):
        for place, name in zip(line, pair, strict=False):
            PANELS[name](place, run)
    for place in axes.flat[len(names) :]:
        place.set_axis_off()
    return _png(figure, _DPI_TOGETHER)


def _png(figure: Any, dpi: int = _DPI) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()
