"""The examples run in their short modes, and an interrupted and resumed run ends in the same bits as a whole one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from engine.checks import assert_same

import fp16opt
from fp16opt.tools.reports import sinks

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDED = ("sklearn", "matplotlib", "tqdm")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="run from an installed package, without the repository"),
    pytest.mark.skipif(bool(MISSING), reason=f"the examples need {', '.join(MISSING)} (requirements/examples.txt)"),
]


def environment(*before: Path) -> dict[str, str]:
    """With the package that these tests import, and folders before all others."""
    package = Path(fp16opt.__file__).resolve().parent.parent
    path = os.pathsep.join([*map(str, (*before, package)), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def run_example(name: str, output: Path, *arguments: str) -> str:
    """Run an example as a user does. Returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--output", str(output), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr  # none of torch, of matplotlib, of schedulers
    return done.stdout


def load(path: Path) -> dict[str, Any]:
    """A checkpoint without the figures that the clock gave."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    checkpoint.pop("seconds", None)
    checkpoint.get("progress", {}).pop("seconds", None)
    return checkpoint


def assert_is_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


@pytest.mark.slow
def test_train_digits_short_mode_and_resume_bit_exact(tmp_path: Path) -> None:
    """An epoch and another one, against two at once: weights, masters, momentum, loss scale, curves."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = run_example("train_digits.py", whole, "--short")
    table = (whole / "table.md").read_text()
    assert table in printed
    rows = {cells[1].strip(): cells for line in table.splitlines() if (cells := line.split("|"))}
    # Bytes a parameter: of the weights; with gradients and momentum, and masters, whose gradients are not made.
    expected = {"fp32": ["4.0", "12.0"], "fp16": ["2.0", "6.0"], "fp16+masters": ["2.0", "12.0"]}
    for mode, sizes in expected.items():
        assert [cell.strip() for cell in rows[mode][6:8]] == sizes
    assert_is_picture(whole / "curves.png")
    run_example("train_digits.py", parts, "--epochs", "1")
    middle = {mode: load(parts / f"{mode}-seed0.pt") for mode in expected}
    run_example("train_digits.py", parts, "--short", "--resume")
    for mode in expected:
        assert_same(load(whole / f"{mode}-seed0.pt"), load(parts / f"{mode}-seed0.pt"))
        with pytest.raises(AssertionError):  # and the second epoch did train
            assert_same(middle[mode]["model"], load(parts / f"{mode}-seed0.pt")["model"])


@pytest.mark.slow
def test_language_model_short_mode_and_resume_bit_exact(tmp_path: Path) -> None:
    """Interrupted after three of eight steps, against eight at once: also the schedule of the learning rate."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = run_example("language_model.py", whole, "--short")
    for dtype in ("fp32", "fp16", "bf16"):
        assert f"| {dtype} " in printed
    assert "The class statement " in printed
    assert_is_picture(whole / "loss.png")
    run_example("language_model.py", parts, "--short", "--dtype", "fp16", "bf16", "--stop-after", "3")
    for dtype in ("fp16", "bf16"):
        assert load(parts / f"{dtype}.pt")["progress"]["step"] == 3
    run_example("language_model.py", parts, "--short", "--dtype", "fp16", "bf16", "--resume", "--monitor")
    for dtype in ("fp16", "bf16"):
        steps = [r["step"] for r in sinks.read(parts / f"{dtype}.jsonl") if r["kind"] == "step"]
        assert steps == [4, 5, 6, 7, 8]
        assert_same(load(whole / f"{dtype}.pt"), load(parts / f"{dtype}.pt"))


@pytest.mark.slow
def test_rl_fp16_quick_mode(tmp_path: Path) -> None:
    """Every way, with a sampler whose weights are the trainer's after every step; the sampler's process ends."""
    printed = run_example("rl_fp16.py", tmp_path, "--quick")
    table = (tmp_path / "table.md").read_text()
    assert table in printed
    rows = {cells[1].strip(): cells for line in table.splitlines() if (cells := line.split("|"))}
    for way in ("fp16 + masters", "fp16", "bf16 + masters", "bf16"):
        assert rows[way][8].strip() == "4 of 4"
        assert 0 < float(rows[way][4]) < 100, "a step changed weights"
        assert 0 < int(rows[way][6]) < 100, "and less than the model was sent"
    assert float(rows["fp16 + masters"][7]) < float(rows["bf16 + masters"][7]) / 3
    assert_is_picture(tmp_path / "rl.png")


@pytest.mark.slow
def test_rl_fp16_stops_where_the_sampler_has_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    rl = importlib.import_module("rl_fp16")
    model = rl.Sorter().half()
    rl.require_equal(model, rl.digest(model))
    other = rl.digest(model)
    with torch.no_grad():
        model.blocks[1].down.weight[5, 7] += 1e-3
    with pytest.raises(SystemExit, match="The sampler's weights are not the trainer's"):
        rl.require_equal(model, other)


@pytest.mark.slow
def test_finetune_stopped_by_ctrl_c_and_resumed_bit_exact(tmp_path: Path) -> None:
    """In 8-bit state, by the plan: weights, codes, scale, order of the data; and deltas that lead to these weights."""
    transformers = pytest.importorskip("transformers")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["--budget", "1.1MB", "--steps", "16", "--save-every", "4", "--save", "deltas"]
    printed = run_example("finetune.py", whole, *options)
    assert (
        "102.8K parameters in float16: master_weights='split', optimizer_state='8bit'; 818.7 KiB of 1.0 MiB" in printed
    )
    assert_is_picture(whole / "finetune.png")
    line = [sys.executable, str(EXAMPLES / "finetune.py"), "--output", str(parts), *options]
    with subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        while not (parts / "checkpoint.pt").exists() and run.poll() is None:
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        said, _ = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGINT
    middle = load(parts / "checkpoint.pt")
    assert 4 <= middle["step"] < 16
    assert f"Stopped after step {middle['step']} of 16, and saved." in said
    assert_is_picture(parts / "finetune.png")
    shutil.copy(parts / f"delta-{middle['step']:06}.safetensors", parts / "delta-000015.safetensors")  # of a step lost
    run_example("finetune.py", parts, *options, "--resume")
    end = load(parts / "checkpoint.pt")
    assert_same(load(whole / "checkpoint.pt"), end)
    for folder in (whole, parts):
        sampler = transformers.AutoModelForCausalLM.from_pretrained(folder / "start")
        for path in sorted(folder.glob("delta-*.safetensors")):
            fp16opt.WeightDelta.load(path).apply_(sampler)
        assert_same(dict(sampler.state_dict()), dict(end["model"]))
    run_example("finetune.py", parts, *options, "--resume")  # which finds that all is done
    assert_same(load(parts / "checkpoint.pt"), end)


@pytest.mark.slow
def test_finetune_reads_json_lines_and_hands_out_whole_weights(tmp_path: Path) -> None:
    """With gradients released, as nothing else fits: a static scale, no clip."""
    transformers = pytest.importorskip("transformers")
    data = tmp_path / "data.jsonl"
    lines = [{"text": f"{number} is a number. " * 9} for number in range(40)]
    lines += [{"prompt": f"{number} + 1 = ", "completion": f"{number + 1}" * 20} for number in range(40)]
    data.write_text("\n".join(map(json.dumps, lines)))
    options = ["--short", "--data", str(data), "--budget", "0.8MB"]
    assert "gradient_release=True" in run_example("finetune.py", tmp_path / "out", *options)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    saved = load(tmp_path / "out" / "checkpoint.pt")
    assert_same(dict(model.state_dict()), dict(saved["model"]))
    losses = saved["history"]["loss"]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert set(saved["history"]["scale"]) == {1024.0}


def test_finetune_says_that_it_needs_transformers(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError")
    done = interpreters.python(str(EXAMPLES / "finetune.py"), cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "examples/finetune.py needs transformers: pip install -r requirements/trainers.txt\n"
    assert not (tmp_path / "finetune-output").exists()


def test_a_checkpoint_made_with_other_settings_is_refused(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("examples_common", EXAMPLES / "common.py")
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    common.save_checkpoint(tmp_path / "run.pt", {"settings": {"seed": 0}, "weight": torch.ones(2)})
    assert common.load_checkpoint(tmp_path / "run.pt", {"seed": 0})["weight"].equal(torch.ones(2))
    with pytest.raises(SystemExit, match=r"run\.pt was made with \{'seed': 0\}, not \{'seed': 1\}\. Use another"):
        common.load_checkpoint(tmp_path / "run.pt", {"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"], "nothing is left of writing beside it"
