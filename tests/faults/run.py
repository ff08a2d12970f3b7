"""Breaks the package in a hundred ways, one after the other, and asks whether the suite notices.

    python tests/faults/run.py                     # all faults; an hour and more on two cores
    python tests/faults/run.py --check             # only whether each fault still finds its place; seconds
    python tests/faults/run.py NAME ... --all      # some, and with what only `pytest --all` runs
    python tests/faults/run.py --table table.md    # writes what killed each; a second run goes on where it stopped

The faults are in faults.toml. Each is made in a copy of this tree, in which compiled code is built again where it is
one of csrc. It meets the test files that it names, and then all; the first test that fails has killed it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import interpreters

try:
    import tomllib
except ImportError:  # before Python 3.11; pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]

SOURCES = ("fp16opt/**/*.py", "csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cuh")
NOT_COPIED = (".git", "build", "dist", "*.egg-info", ".*_cache", "__pycache__", "site", "*-output")
KILLER = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way to break the package; see faults.toml."""

    name: str
    rule: str
    breaks: str
    old: str
    new: str
    tests: list[str]


FAULTS = [Fault(**one) for one in tomllib.loads((Path(__file__).parent / "faults.toml").read_text())["fault"]]


@dataclasses.dataclass
class Fate:
    """What became of a fault."""

    killed_by: str
    seconds: float


class Tree:
    """A copy of the source tree, in which one fault at a time is made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
        self.texts = texts(root)

    def make(self, fault: Fault) -> Path:
        """Change the file; returns it."""
        path = place_of(fault, self.texts)
        path.write_text(self.texts[path].replace(fault.old, fault.new))
        return path

    def mend(self, path: Path) -> None:
        path.write_text(self.texts[path])

    def build(self) -> None:
        words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(words, cwd=self.root, env={**os.environ, "FP16OPT_CPU": "1"}, capture_output=True)
        if done.returncode:
            raise SystemExit(done.stdout.decode() + done.stderr.decode())

    def pytest(self, words: list[str], timeout: float) -> str:
        """The first test that fails; "" where none does."""
        env = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        command = ["-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:randomly", *words]
        try:
            done = interpreters.python(*command, cwd=self.root, env=env, timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"no end in {timeout:.0f} s"
        if done.returncode in (0, 5):
            return ""
        found = KILLER.search(done.stdout)
        return found.group(1) if found else (done.stdout + done.stderr).strip().splitlines()[-1]


def texts(root: Path) -> dict[Path, str]:
    return {path: path.read_text() for pattern in SOURCES for path in sorted(root.glob(pattern))}


def place_of(fault: Fault, known: dict[Path, str]) -> Path:
    """The one file in which the old text stands once."""
    found = [(path, text.count(fault.old)) for path, text in known.items() if fault.old in text]
    if [count for _, count in found] != [1]:
        where = ", ".join(f"{path.name} {count} times" for path, count in found) or "nowhere"
        raise SystemExit(
            f"{fault.name}: its old text stands {where}; it must stand once in the package. Move it along."
        )
    return found[0][0]


def check() -> None:
    """Every fault finds its place, changes something, and names files that are there."""
    known, names = texts(ROOT), [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names), "two faults of one name"
    for fault in FAULTS:
        path = place_of(fault, known)
        assert fault.new != fault.old, fault.name
        if path.suffix == ".py":
            compile(known[path].replace(fault.old, fault.new), str(path), "exec")
        for name in fault.tests:
            assert (ROOT / "tests" / name).exists(), f"{fault.name}: tests/{name} is not there"


def fate_of(fault: Fault, tree: Tree, more: list[str], only_likely: bool, workers: int) -> Fate:
    began, path = time.monotonic(), tree.make(fault)
    is_compiled = path.suffix != ".py"
    try:
        if is_compiled:
            tree.build()
        killed_by = tree.pytest([*more, "-n", "0", *(f"tests/{name}" for name in fault.tests)], 1200)
        if not killed_by and not only_likely:
            killed_by = tree.pytest([*more, "-n", str(workers), "--dist", "worksteal"], 7200)
    finally:
        tree.mend(path)
        if is_compiled:
            tree.build()
    return Fate(killed_by, time.monotonic() - began)


def table(fates: dict[str, Fate]) -> str:
    lines = ["| fault | rule | what it breaks | killed by |", "|---|---|---|---|"]
    for fault in FAULTS:
        if fault.name in fates:
            killed_by = fates[fault.name].killed_by
            said = f"`{killed_by}`" if killed_by else "**survives**"
            lines.append(f"| {fault.name} | {fault.rule} | {fault.breaks} | {said} |")
    killed = sum(bool(fate.killed_by) for fate in fates.values())
    return "\n".join([f"{killed} of {len(fates)} are killed.", "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; none: every one")
    parser.add_argument("--check", action="store_true", help="only see whether each finds its place")
    parser.add_argument("--all", action="store_true", help="run what only `pytest --all` runs, too")
    parser.add_argument("--likely", action="store_true", help="only the files that the fault names")
    parser.add_argument("--workers", type=int, default=2, help="for the whole suite")
    parser.add_argument(
        "--table", type=Path, help="write the result there; what stands beside it as .json is not run again"
    )
    given = parser.parse_args()
    check()
    if given.check:
        print(f"{len(FAULTS)} faults find their places")
        return
    unknown = set(given.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    kept = None if given.table is None else given.table.with_suffix(".json")
    fates: dict[str, Fate] = {}
    if kept is not None and kept.exists():
        fates = {name: Fate(**fate) for name, fate in json.loads(kept.read_text()).items()}
    wanted = [fault for fault in FAULTS if fault.name in (given.names or [one.name for one in FAULTS])]
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder) / "tree")
        likely = sorted({f"tests/{name}" for fault in wanted for name in fault.tests})
        if not given.likely and (bad := tree.pytest(["-n", str(given.workers), *likely], 7200)):
            raise SystemExit(f"{bad} fails without any fault")
        for fault in wanted:
            if fault.name in fates and not given.names:
                continue
            fate = fates[fault.name] = fate_of(fault, tree, ["--all"] if given.all else [], given.likely, given.workers)
            print(f"{fault.name}: {fate.killed_by or 'SURVIVES'} ({fate.seconds:.0f} s)", flush=True)
            if kept is not None:
                kept.write_text(json.dumps({name: vars(fate) for name, fate in fates.items()}, indent=1))
                given.table.write_text(table(fates))
    survivors = [name for name, fate in fates.items() if not fate.killed_by]
    print(f"{len(fates) - len(survivors)} of {len(fates)} killed; survive: {', '.join(survivors) or 'none'}")


if __name__ == "__main__":
    main()
