"""Everything that the documentation shows as code is run: docstring examples and the README's python
blocks."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import fp16opt

PACKAGE = Path(fp16opt.__file__).parent
HERE = Path(__file__).resolve().parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _modules() -> list[str]:
    names = ["fp16opt"]
    for info in pkgutil.walk_packages([str(PACKAGE)], "fp16opt."):
        if not info.name.endswith(("__main__", "._cpu")):
            names.append(info.name)
    return names


MODULES = _modules()


# Pages and modules about a package that requirements-trainers.txt installs, by the last part of their names.
TRAINERS = ("lightning", "accelerate", "transformers", "timm")


def skip_without_trainer(name: str) -> None:
    if name in TRAINERS and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (requirements-trainers.txt)")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    if name.startswith("fp16opt.integrations."):
        skip_without_trainer(name.rpartition(".")[2].partition("_")[0])
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; run python -m doctest on it"


def test_the_public_classes_show_examples() -> None:
    finder = doctest.DocTestFinder()
    for name in ("MixedPrecisionOptimizer", "DynamicLossScaler", "StaticLossScaler"):
        examples = [e for t in finder.find(getattr(fp16opt, name), name) for e in t.examples]
        assert examples, f"{name} shows no example"


def _blocks(path: Path) -> list[tuple[int, str]]:
    text = path.read_text()
    return [
        (text[: m.start()].count("\n") + 1, m.group(1))
        for m in re.finditer(r"^```(?:python|py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


PAGES = [p for p in [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))] if p.exists()]
BLOCKS = [(p, line, code) for p in PAGES for line, code in _blocks(p)]


@pytest.mark.skipif(not (HERE / "README.md").exists(), reason="run from an installed package, without the repository")
def test_readme_has_an_example() -> None:
    assert any(p.name == "README.md" for p, _, _ in BLOCKS)


@pytest.mark.parametrize(("path", "line", "code"), [pytest.param(*b, id=f"{b[0].name}:{b[1]}") for b in BLOCKS])
def test_python_block_of_the_documentation(
    path: Path, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_trainer(path.stem)
    monkeypatch.chdir(tmp_path)  # what a block saves is not left in the repository
    namespace = {"__name__": "__readme__"}
    if ">>>" in code:
        test = doctest.DocTestParser().get_doctest(code, dict(namespace), f"{path.name}:{line}", str(path), line)
        result = doctest.DocTestRunner(optionflags=OPTIONS).run(test)
        assert result.failed == 0
        return
    exec(compile("\n" * line + code, str(path), "exec"), namespace)  # raises where the block is wrong
    assert len(namespace) > 1, "the block defines nothing"
