"""``python -m fp16opt report``: what is said of a run is so, and the page stands alone."""

from __future__ import annotations

import importlib
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fp16opt import __main__ as program
from fp16opt.tools.reports import page, pictures, reading, sinks
from fp16opt.tools.reports.monitor import NUMBERS

ROWS = {"a.weight": {"dtype": "float16", "elements": 100}, "b.<weight>": {"dtype": "float16", "elements": 10}}
FINE = dict.fromkeys(NUMBERS, 0.0) | {"grad_norm": 1.0, "grad_largest": 0.1, "weight_norm": 2.0, "update_ratio": 1e-3}
FINE |= {"update_ulps": 4.0}


MEND = "there is something to mend"


def write(path: Path, *, count: int = 20, header: dict[str, Any] | None = None, skips: tuple[int, ...] = (),
          **changes: dict[str, Any]) -> Path:  # fmt: skip
    """A run; ``changes`` are of rows, in all samples, by "a" and "b"."""
    sink = sinks.JsonLines(path)
    sink({"kind": "run", "format": 1, "torch": "2", "every": 5, "ranks": 1, "optimizer": "SGD", "scaler": "x",
          "dynamic": True, "masters": "full", "rows": ROWS, **(header or {})})  # fmt: skip
    for step in range(1, count + 1):
        sink({"kind": "step", "step": step, "loss_scale": 2.0**10, "skipped": step in skips, "grad_norm": 1.0,
              "clip_factor": 1.0, "seconds": None if step == 1 else 0.01})  # fmt: skip
        if step % 5 == 1:
            rows = {name: FINE | changes.get(name[0], {}) for name in ROWS}
            sink({"kind": "sample", "step": step, "skipped": False, "loss_scale": 2.0**10, "skipped_steps": 0,
                  "rows": rows})  # fmt: skip
    sink.close()
    return path


def said(path: Path) -> tuple[str, dict[str, str]]:
    run = reading.load(path)
    return " ".join(reading.of_run(run)), {one.row: one.words for one in reading.worth_a_look(run)}


def test_a_good_run_says_so(tmp_path: Path) -> None:
    words, looks = said(write(tmp_path / "run.jsonl"))
    assert words == "20 steps, 0 skipped, 4 looked at. The loss scale was 1024. Nothing to mend."
    assert looks == {}


def test_what_is_normal_is_nothing_to_mend(tmp_path: Path) -> None:
    """Calibration, a rare overflow, and small updates that masters hold."""
    words, looks = said(write(tmp_path / "run.jsonl", skips=(1, 2, 14), a={"lost": 0.5}))
    assert "Calibration took 2 skips. Skipped later: step 14" in words
    assert words.endswith("would be lost without masters, which hold them. Nothing to mend.")
    assert looks == {}


def test_the_loss_is_told_and_drawn(tmp_path: Path) -> None:
    header = {"kind": "run", "format": 1, "rows": ROWS, "dynamic": True}
    values = [4.0, math.nan, 3.0, None, 2.5]
    told = [
        {"kind": "step", "step": step, "loss": loss, "loss_scale": 1.0, "skipped": False, "grad_norm": None}
        for step, loss in enumerate(values, 1)
    ]
    run = reading.RunRead(header, told)
    assert "The loss went from 4 to 2.5." in reading.of_run(run)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    pictures.losses(axes, run)
    assert axes.lines[0].get_xydata().tolist() == [[1, 4.0], [3, 3.0], [5, 2.5]]
    older = reading.load(write(tmp_path / "older.jsonl"))  # of a version that wrote no loss
    assert not any("The loss went" in words for words in reading.of_run(older))
    empty = figure.subplots()
    pictures.losses(empty, older)
    assert [text.get_text() for text in empty.texts] == ["nothing of this kind in the run"]


def test_the_picture_of_margins_has_a_legend_and_the_limits(tmp_path: Path) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    pictures.margins(axes, reading.load(write(tmp_path / "run.jsonl")))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(ROWS)
    assert [text.get_text().strip() for text in axes.texts] == ["overflow", "subnormal below"]
    lines = axes.lines[: len(ROWS)]
    assert len({line.get_color() for line in lines}) == len(ROWS)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"skips": (1, 2, 3)}, "Calibration took 3 skips. Nothing to mend."),
        ({"skips": (13,)}, "Skipped later: step 13: bad batches, or rare overflows."),
        ({"skips": (1, 2, 9)}, "Calibration took 3 skips. Nothing to mend."),
        ({"skips": (3, 5, 6, 7, 8)}, "Calibration took 3 skips. Skipped later: step 7, 8"),
        ({"skips": (12, 14, 16, 18)}, MEND),
        ({"skips": tuple(range(1, 21))}, "No step was taken: gradients were never finite. Ask fp16opt.diagnose why."),
        ({"skips": tuple(range(1, 21))}, MEND),
        ({"skips": (9,), "header": {"rows": {name: {"dtype": "bfloat16"} for name in ROWS}}}, MEND),
        (
            {"skips": (3, 7, 9, 12), "header": {"dynamic": False}},
            "20% of the steps were skipped at a fixed scale: it is too high.",
        ),
        ({"a": {"underflow": 0.5}, "b": {"underflow": 0.1}}, "46% of the 16-bit gradients' elements underflow"),
        ({"a": {"underflow": 0.5}}, MEND),
        ({"a": {"update_ratio": 0.0}}, MEND),
        (
            {"a": {"lost": 0.5}, "b": {"lost": 0.3}},
            "48% of the updates' elements are under half a unit in the last place",
        ),
        ({"a": {"lost": 0.5}, "b": {"lost": 0.3}}, "would be lost without masters, which hold them."),
        ({"a": {"lost": 0.5}, "header": {"masters": "none"}}, "are lost: use masters."),
        ({"a": {"lost": 0.5}, "header": {"masters": "none"}}, MEND),
    ],
)
def test_the_run_in_sentences(tmp_path: Path, arguments: dict[str, Any], wanted: str) -> None:
    words = said(write(tmp_path / "run.jsonl", **arguments))[0]
    assert wanted in words if wanted is not MEND else "Nothing to mend." not in words


@pytest.mark.parametrize("skips", [(9,), (5, 9, 12, 15)])
def test_no_loss_scale_is_advised_where_none_helps(tmp_path: Path, skips: tuple[int, ...]) -> None:
    """BF16 gradients have FP32's range: a batch with a nan, in a short run too, is not the scale's fault."""
    rows = {name: {"dtype": "bfloat16", "elements": 10} for name in ROWS}
    header = {"rows": rows, "dynamic": False}
    words, looks = said(write(tmp_path / "run.jsonl", skips=skips, header=header, a={"underflow": 0.5}))
    wanted = "Skipped later: step 9: bad batches." if len(skips) == 1 else "20% of the steps were skipped. No gradient"
    assert wanted in words
    assert not re.search("too high|too low|lower|higher|dynamic=True", words)
    assert looks == {}


def test_one_skip_of_few_steps_is_no_scale_that_is_too_high(tmp_path: Path) -> None:
    words, _ = said(write(tmp_path / "run.jsonl", count=10, skips=(7,), header={"dynamic": False}))
    assert "Skipped later: step 7: bad batches, or rare overflows." in words
    assert "too high" not in words


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"lost": 0.75}, "75% of its updates are under half an ulp"),
        ({"grad_norm": math.inf}, "its gradient was not finite in 4 of 4 samples, first in step 1"),
        ({"zero": 1.0, "underflow": 1.0}, "its gradient is all zero"),
        ({"underflow": 0.25}, "25% of its gradients underflow at the present loss scale"),
        ({"near_overflow": 0.01}, "its largest gradients come within a factor of 2 of 65504, where float16 ends"),
        ({"update_ratio": 0.5}, "a step moves it by 50% of its own norm"),
        ({"update_ratio": 0.0}, "it stands still: its update is zero"),
        ({"distance": 0.02}, "its weights are 2.0% away from the masters"),
    ],
)
def test_a_row_that_is_worth_a_look(tmp_path: Path, changes: dict[str, Any], wanted: str) -> None:
    header = {"masters": "none"} if "lost" in changes else {}  # which would keep them
    _, looks = said(write(tmp_path / "run.jsonl", a=changes, header=header))
    assert list(looks) == ["a.weight"]
    assert wanted in looks["a.weight"]


def test_samples_of_the_calibration_are_no_findings(tmp_path: Path) -> None:
    _, looks = said(write(tmp_path / "run.jsonl", skips=tuple(range(1, 7)), a={"grad_norm": math.inf}))
    assert "in 2 of 4 samples, first in step 11" in looks["a.weight"]


def test_a_sample_in_which_all_is_bad_is_told_of_the_run_and_not_of_rows(tmp_path: Path) -> None:
    rows = {f"row{n}": {"dtype": "float16", "elements": 1} for n in range(6)}
    path = tmp_path / "run.jsonl"
    sink = sinks.JsonLines(path)
    sink({"kind": "run", "format": 1, "rows": rows, "dynamic": True})
    for step in range(1, 4):
        common = {"step": step, "loss_scale": 1.0}
        told = {"skipped": step == 2, "loss": math.nan if step == 2 else 1.0, "grad_norm": None, "seconds": None}
        sink({"kind": "step", **told, **common})
        bad = {"grad_norm": math.nan, "near_overflow": 1.0} if step == 2 else {}
        sink({"kind": "sample", **common, "rows": dict.fromkeys(rows, FINE | bad)})
    sink.close()
    words, looks = said(path)
    assert "In step 2 the gradients of nearly all layers were not finite" in words
    assert looks == {}
    finite = path.with_name("finite.jsonl")
    finite.write_text(path.read_text().replace('"loss":"nan"', '"loss":3e4'))
    words, looks = said(finite)
    assert "Calibration took 1 skip. Nothing to mend." in words
    assert "nearly all layers" not in words, "the loss was finite: a gradient near it overflowed"
    assert looks == {}


@pytest.mark.parametrize(
    ("losses", "between"),
    [
        ([4.0, 3.0, 2.0] * 10 + [1e6] + [2.0] * 9, (2.0, 5.0)),
        ([-1.0, -2.0] * 10 + [-1e6] + [-2.0] * 9, (-4.0, -1.0)),
        ([1e6] * 9 + [1.0] * 30, (1.0, 1e6)),
        ([5.0 - 0.1 * step for step in range(40)], (1.1, 5.0)),
        ([1.0], (1.0, 1.0)),
    ],
    ids=["a spike", "a spike down", "a high beginning", "none", "one step"],
)
def test_one_bad_loss_does_not_flatten_the_curve(losses: list[float], between: tuple[float, float]) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    steps = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    pictures.losses(axes, reading.RunRead({}, steps))
    drawn = axes.lines[0].get_ydata()
    assert (min(drawn), max(drawn)) == pytest.approx(between)
    beyond = [step for step, loss in enumerate(losses, 1) if not min(drawn) <= loss <= max(drawn)]
    assert [step for line in axes.lines[1:] for step in line.get_xdata()] == beyond


def test_losses_that_are_not_finite_are_marked() -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    losses = [1.0, math.nan, 2.0, None, math.inf]
    pictures.losses(axes, reading.RunRead({}, [{"step": at, "loss": loss} for at, loss in enumerate(losses)]))
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 2], [1, 4]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["2 not finite"]


def test_a_step_that_takes_a_hundred_times_as_long_is_marked_at_the_top() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    steps = [{"step": n, "grad_norm": 1.0, "seconds": 1.0 if n == 5 else 0.01} for n in range(1, 10)]
    pictures.norms(axes, reading.RunRead({}, steps))
    (other,) = [one for one in figure.axes if one is not axes]
    low, high = other.get_ylim()
    assert all(low <= value <= high for line in other.lines for value in line.get_ydata())
    assert [list(line.get_xdata()) for line in other.lines[1:]] == [[5]]


def sampled(path: Path, samples: list[dict[str, Any]], skipped: tuple[int, ...] = (), **header: Any) -> Path:
    """A run in which every step is sampled, with what a row "a" has there."""
    sink = sinks.JsonLines(path)
    rows = {name: {"dtype": "float16", "elements": 1} for name in ("a", "b", "c")}
    sink({"kind": "run", "format": 1, "rows": rows, "dynamic": True, "masters": "full", **header})
    for step, changes in enumerate(samples, 1):
        common = {"step": step, "loss_scale": 1.0, "skipped": step in skipped}
        sink({"kind": "step", "grad_norm": None, "seconds": None, **common})
        sink({"kind": "sample", **common, "rows": {name: FINE | (changes if name == "a" else {}) for name in rows}})
    sink.close()
    return path


@pytest.mark.parametrize(
    ("ratios", "is_found"),
    [
        ([1.0], False),
        ([0.13], False),
        ([1.0, 0.5, 0.33, 0.25, 0.2], False),
        ([1.0, 0.71, 0.58, 0.5, 0.45], False),
        ([0.5] * 5, True),
        ([0.2, 0.4, 0.5, 0.6], True),
    ],
    ids=["one sample", "a small layer", "from zero", "from zero, to and fro", "a rate too high", "it grows"],
)
def test_a_layer_that_starts_at_zero_is_no_finding(ratios: list[float], is_found: bool, tmp_path: Path) -> None:
    words, looks = said(sampled(tmp_path / "run.jsonl", [{"update_ratio": ratio} for ratio in ratios]))
    assert ("a" in looks) == is_found
    assert ("Nothing to mend." in words) != is_found


def test_a_skip_that_the_log_calls_calibration_is_none_of_bad_batches(tmp_path: Path) -> None:
    samples = [{"grad_norm": math.inf} if step == 6 else {} for step in range(1, 9)]
    words, looks = said(sampled(tmp_path / "run.jsonl", samples, skipped=(6,)))
    assert "Calibration took 1 skip." in words
    assert "bad batches" not in words
    assert looks == {}


@pytest.mark.parametrize("masters", ["none", "full"])
def test_weights_that_are_nan_are_not_blamed_on_the_data(masters: str, tmp_path: Path) -> None:
    bad = {"weight_norm": math.nan, "grad_norm": math.nan}
    path = sampled(tmp_path / "run.jsonl", [{}, bad, bad, bad], skipped=(2, 3, 4), masters=masters)
    words, looks = said(path)
    assert "From step 2 on weights hold inf or nan: a." in words
    assert ("eps=1e-8 is 0 in FP16" in words) == (masters == "none")
    assert not re.search("bad batches|the data", words)
    assert looks == {}


def test_the_worst_comes_first_and_five_are_listed(tmp_path: Path) -> None:
    rows = {f"row{n}": {"dtype": "float16", "elements": 1} for n in range(8)}
    sample = {"step": 1, "loss_scale": 1.0, "rows": {f"row{n}": FINE | {"underflow": 0.1 * n} for n in range(8)}}
    run = reading.RunRead({"rows": rows, "dynamic": True}, [], [sample])
    assert [one.row for one in reading.worth_a_look(run)] == ["row7", "row6", "row5", "row4", "row3"]


class Links(HTMLParser):
    """Everything that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "run.jsonl", skips=(1, 9), b={"underflow": 0.4, "update_ulps": 0.1, "grad_norm": math.nan})
    output = tmp_path / "page.html"
    assert program.main(["report", str(path), "-o", str(output), "--png"]) == 0
    printed = capsys.readouterr().out
    assert f"The page is {output}, its pictures are {output.with_suffix('.png')}." in printed
    assert "1. b.<weight>: its gradient was not finite" in printed
    text = output.read_text()
    links = Links()
    links.feed(text)
    assert len(links.found) == len(pictures.PANELS) == len(page._CAPTIONS) == 7
    assert all(link.startswith("data:image/png;base64,") for link in links.found)
    assert "b.&lt;weight&gt;" in text
    assert "b.<weight>" not in text
    assert not re.search(r"https?://", text)
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.all
def test_a_run_of_nothing_has_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.jsonl"
    sinks.JsonLines(path)({"kind": "run", "format": 1, "rows": {}})
    assert "0 steps" in page.page(reading.load(path), "empty")
    assert pictures.together(reading.load(path)).startswith(b"\x89PNG")


def test_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"run","format":9}\n')
    with pytest.raises(ValueError, match="expected records of format 1, got 9"):
        reading.load(path)
    write(tmp_path / "good.jsonl")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match="the report's pictures need matplotlib: pip install matplotlib"):
        pictures.one(reading.load(tmp_path / "good.jsonl"), "scale")


def test_shares_of_the_run_are_of_elements(tmp_path: Path) -> None:
    """A mean over tensors would count a bias as much as a matrix."""
    kinds = {name: {"dtype": "float16", "elements": 900 if name[0] == "a" else 100} for name in ROWS}
    words, _ = said(write(tmp_path / "run.jsonl", header={"rows": kinds}, a={"lost": 0.1}, b={"lost": 1.0}))
    assert "19% of the updates' elements are under half a unit in the last place of the weight" in words


def test_a_file_that_is_used_twice_shows_the_last_run(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", skips=(3, 7))
    words, _ = said(write(tmp_path / "run.jsonl", count=10, header={"first_step": 0}))
    assert words.startswith("10 steps, 0 skipped, 2 looked at.")
    assert words.endswith("The file holds 2 runs; this is the last.")


def test_a_run_that_was_resumed_is_one_and_what_it_took_again_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", skips=(3, 18))
    sink = sinks.JsonLines(tmp_path / "run.jsonl")
    sink({"kind": "run", "format": 1, "first_step": 15, "dynamic": True, "masters": "full", "rows": ROWS})
    for step in (16, 17):
        sink({"kind": "step", "step": step, "loss_scale": 2.0**10, "skipped": False, "grad_norm": 1.0,
              "clip_factor": 1.0, "seconds": None})  # fmt: skip
    sink.close()
    words, _ = said(tmp_path / "run.jsonl")
    assert words.startswith("17 steps, 1 skipped, 3 looked at.")
    assert "The file holds" not in words
