"""``python -m fp16opt``: its commands are listed, and a wrong command line is answered in one line."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import interpreters
import pytest

import fp16opt
from fp16opt.__main__ import main

COMMANDS = ("certify", "check", "compile", "plan", "prove", "old-lines", "report")
HEADER = {"kind": "run", "format": 1, "torch": "2", "every": 5, "ranks": 1, "optimizer": "SGD", "scaler": "x"}
HEADER |= {"dynamic": True, "masters": "full", "rows": {"a": {"dtype": "float16", "elements": 3}}}  # type: ignore[dict-item]
STEP = {"kind": "step", "step": 1, "skipped": False, "loss_scale": 2.0, "grad_norm": 1.0, "clip_factor": 1.0}


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


RUNS = {
    "words": b"hello\n",
    "bytes": b"\xff\xfe\x00\x01\n",
    "list": b"[1, 2]\n",
    "no_kind": b'{"a": 1}\n',
    "empty": b"",
    "lacks": lines(HEADER, {"kind": "step"}),
    "strings": lines(HEADER, {"kind": "sample", "step": 3, "rows": {"a": {"grad_norm": "x"}}}),
    "number": lines(HEADER, 3, STEP),
    "good": lines(HEADER, STEP | {"seconds": None}),
}


MADE = """import sys

import torch

number = 3
model = torch.nn.Linear(2, 2).bfloat16()
batch = torch.ones(1, 2, dtype=torch.bfloat16)

def loss_fn():
    return model(batch).float().square().mean()

three = lambda: 3
named = lambda: {"net": model, "loss_fn": loss_fn}
no_loss = lambda: (model, three)

def wrong():
    return 1 / 0

def ends():
    sys.exit(3)

def lossy():
    return model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-6)

def sound():
    from fp16opt import MixedPrecisionOptimizer

    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    return {"model": model, "loss_fn": loss_fn, "optimizer": optimizer, "steps": 5}

if __name__ == "__main__":
    raise RuntimeError("it is not run as a program")
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, content in RUNS.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    (tmp_path / "made.py").write_text(MADE)
    monkeypatch.delitem(sys.modules, "made", raising=False)
    return tmp_path


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr()
    listed = [line.split()[0] for line in said.out.splitlines() if line.startswith("    ") and line[4:5].isalpha()]
    assert listed == list(COMMANDS)
    assert said.err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: python -m fp16opt {command} ")
    assert said.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fp16opt {fp16opt.__version__}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "invalid choice: 'nonsense'"),
        ("--bogus", "unrecognized arguments: --bogus"),
        ("certify", "the following arguments are required: target. See python -m fp16opt certify --help"),
        ("certify torch.optim", "expected package.module:Class, got 'torch.optim'"),
        ("certify .a:b", ".a can't be imported"),
        ("certify no_such_package:SGD", "no_such_package can't be imported: ModuleNotFoundError"),
        ("certify torch.optim:Sgd", "torch.optim has no Sgd"),
        ("certify torch.optim:SGD lr=-1", "could not make an optimizer"),
        ("certify os:path", "expected an optimizer class, got module"),
        ("certify builtins:int", "could not make an optimizer"),
        ("certify sys:exit", "sys:exit ends the process when it is called"),
        ("certify torch.optim:SGD fast", "expected name=value, got 'fast'"),
        ("certify torch.optim:SGD 'lr=('", "could not make an optimizer"),
        ("check", "the following arguments are required: target. See python -m fp16opt check --help"),
        ("check made.py", "expected FILE:FUNCTION as in train.py:make, got 'made.py'"),
        ("check none.py:make", "there is no file none.py"),
        ("check made.py:none", "made.py has no function none"),
        ("check made.py:number", "made.py has no function number"),
        ("check made.py:three", "expected (model, loss_fn), (model, loss_fn, optimizer) or a dict, got int"),
        ("check made.py:named", "expected a dict with model, loss_fn and, of these, what there is: optimizer, scaler"),
        ("check made.py:wrong", "made.py:wrong raised ZeroDivisionError: division by zero (made.py:17)"),
        ("check made.py:ends", "made.py:ends ends the process when it is run"),
        ("check made.py:no_loss", "loss_fn: expected it to return a floating tensor, the loss, got int"),
        ("check made.py:lossy --steps 1", "steps: expected an integer of 4 or more, got 1"),
        ("check good.jsonl:make", "good.jsonl is no Python file"),
        ("compile --arch", "argument --arch: expected one argument"),
        ("compile --arch volta", "expected cards as in sm_70,sm_90, got 'volta'"),
        ("compile --arch sm_70,", "expected cards as in sm_70,sm_90, got 'sm_70,'"),
        ("compile sm_70", "unrecognized arguments: sm_70"),
        ("plan", "the following arguments are required: --params"),
        ("plan --params 7X", "expected a number as in 7e9 or 125M, got '7X'"),
        ("plan --params nan", "params: expected a number of 1 or more"),
        ("plan --params 1e308 --ranks 2", "params: expected a number of at most 1e+24, got 1e+308"),
        (f"plan --params 1e9 --ranks 1{'0' * 400}", "ranks: expected a number of at most 1e+24, got 1"),
        ("plan --params 1e9 --ranks 2 --shard none", "ranks: expected 1 where nothing is shared"),
        ("old-lines", "the following arguments are required: FILE"),
        ("old-lines missing.py", "No such file or directory: 'missing.py'"),
        ("old-lines bytes.jsonl", "old-lines: bytes.jsonl: source code string cannot contain null bytes"),
        ("report", "the following arguments are required: run"),
        ("report missing.jsonl", "No such file or directory: 'missing.jsonl'"),
        ("report .", "Is a directory"),
        ("report words.jsonl", "line 1: expected a JSON record, got 'hello'"),
        ("report bytes.jsonl", "bytes.jsonl, line 1: expected a JSON record"),
        ("report list.jsonl", "expected a record of fp16opt.Monitor, got '[1, 2]'"),
        ("report no_kind.jsonl", "expected a record of fp16opt.Monitor"),
        ("report empty.jsonl", "there is none that begins a run"),
        ("report lacks.jsonl", "are not as this version's fp16opt.Monitor writes them (KeyError: "),
        ("report strings.jsonl", "strings.jsonl: the records are not as this version's fp16opt.Monitor"),
        ("report number.jsonl", "line 2: expected a record of fp16opt.Monitor, got '3'"),
        ("report good.jsonl -o good.jsonl", "the run, the page and its picture need a name each"),
        ("report good.jsonl -o page.png --png", "the run, the page and its picture need a name each"),
        pytest.param(
            *("report good.jsonl -o no/such/folder.html", "No such file or directory: 'no/such/folder.html'"),
            marks=pytest.mark.all,  # whose page is drawn first
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    line: str, words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert (runs / "good.jsonl").read_bytes() == RUNS["good"]


def test_a_check_exits_with_1_where_a_finding_is_an_error(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "made.py:lossy"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("fp16opt.check: 1 error.\n\n1. error: ")
    assert "8 steps of AdamW" in said.out
    assert said.err == ""
    assert main(["check", str(runs / "made.py:sound")]) == 0
    assert "nothing to change.\n\n5 steps of AdamW" in capsys.readouterr().out


def test_numbers_of_parameters_with_a_letter(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for params in ("125M", "1.25e8", "125000K"):
        assert main(["plan", "--params", params]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize(("command", "status"), [([], 141), pytest.param(["nonsense"], 2, marks=pytest.mark.all)])
def test_a_reader_that_goes_away_and_unknown_commands(tmp_path: Path, command: list[str], status: int) -> None:
    """``report | head -0``: the pipe is closed before anything is written."""
    environment = {**os.environ, "PYTHONPATH": str(Path(fp16opt.__file__).parents[1])}
    program = """
import os, runpy
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 1)
runpy.run_module("fp16opt", run_name="__main__", alter_sys=True)
"""
    done = interpreters.python("-c", program, *command, cwd=tmp_path, env=environment, clears_up=True)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
