"""Everything that the documentation shows as code is run: docstring examples and the README's python
blocks."""

from __future__ import annotations

import ast
import doctest
import fnmatch
import importlib
import importlib.util
import itertools
import pkgutil
import re
from pathlib import Path

import pytest

import fp16opt

PACKAGE = Path(fp16opt.__file__).parent
HERE = Path(__file__).resolve().parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _modules() -> list[str]:
    """Modules that show an example."""
    names = [info.name for info in pkgutil.walk_packages([str(PACKAGE)], "fp16opt.") if info.name != "fp16opt._cpu"]
    sources = {name: importlib.util.find_spec(name).origin for name in ["fp16opt", *names]}
    return [name for name, path in sources.items() if ">>>" in Path(path).read_text()]


MODULES = _modules()


# Pages and modules about a package that requirements/trainers.txt installs, by the last part of their names.
TRAINERS = ("lightning", "accelerate", "transformers", "timm")


def skip_without_trainer(name: str) -> None:
    if name in TRAINERS and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (requirements/trainers.txt)")


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


CONTINUES = "<!-- continues -->\n"
"""Before a block that goes on where the one above it has ended."""


def _blocks(path: Path) -> list[tuple[int, str]]:
    """(line, code) of each python block of a page; of one that continues, with the code that it goes on from.

    Blank lines stand for what is between, so that a traceback names the page's lines.
    """
    text = path.read_text()
    blocks: list[tuple[int, str]] = []
    first = 0
    for found in re.finditer(r"^```(?:python|py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line, code = text[: found.start()].count("\n") + 1, found.group(1)
        if text[: found.start()].endswith(CONTINUES):
            before = blocks[-1][1]
            code = before + "\n" * (line - first - before.count("\n")) + code
        else:
            first = line
        blocks.append((first, code))
    return blocks


PAGES = [p for p in [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))] if p.exists()]
BLOCKS = [(p, line, code) for p in PAGES for line, code in _blocks(p)]


@pytest.mark.skipif(not (HERE / "README.md").exists(), reason="run from an installed package, without the repository")
def test_readme_has_an_example() -> None:
    assert any(p.name == "README.md" for p, _, _ in BLOCKS)


def _name(path: Path, line: int, code: str) -> str:
    """A block is called by its last line: several that continue begin at one line."""
    return f"{path.name}:{line + code.count(chr(10))}"


@pytest.mark.parametrize(("path", "line", "code"), [pytest.param(*b, id=_name(*b)) for b in BLOCKS])
def test_python_block_of_the_documentation(
    path: Path, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_trainer(path.stem)
    for name in re.findall(r"^(?:import|from) (trl|transformers|vllm|verl|safetensors)\b", code, re.MULTILINE):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)  # what a block saves is not left in the repository
    namespace = {"__name__": "__readme__"}
    if ">>>" in code:
        test = doctest.DocTestParser().get_doctest(code, dict(namespace), f"{path.name}:{line}", str(path), line)
        result = doctest.DocTestRunner(optionflags=OPTIONS).run(test)
        assert result.failed == 0
        return
    exec(compile("\n" * line + code, str(path), "exec"), namespace)  # raises where the block is wrong
    assert len(namespace) > 1, "the block defines nothing"


def test_the_reference_lists_all_public_names() -> None:
    listed = re.findall(r"^::: fp16opt\.(\w+)$", (HERE / "docs" / "api.md").read_text(), re.MULTILINE)
    assert set(fp16opt.__all__) - set(listed) == {"__version__", "register_one_pass"}  # the latter gives a warning


# -- what CONTRIBUTING says of the tree --------------------------------------------------------------------------------

CONTRIBUTING = HERE / "CONTRIBUTING.md"
needs_tree = pytest.mark.skipif(not CONTRIBUTING.exists(), reason="run from an installed package")


@needs_tree
@pytest.mark.parametrize("folder", ["engine", "engine/modes", "kernels"])
def test_the_picture_of_the_house_has_every_file(folder: str) -> None:
    house = CONTRIBUTING.read_text().partition("## The house")[2].partition("\n## ")[0]
    words = set(re.findall(r"[\w*]+", house)) - {"*"}
    stems = [path.stem for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"]
    assert [stem for stem in stems if not any(fnmatch.fnmatch(stem, word) for word in words)] == []


@needs_tree
def test_files_that_contributing_names_are_there() -> None:
    words = [word for text in re.findall(r"`([^`\n]+)`", CONTRIBUTING.read_text()) for word in text.split()]
    paths = [word for word in words if re.match(r"(tests|benchmarks|csrc|\.ci)/[\w./-]+$", word) and "NAME" not in word]
    assert len(paths) > 30
    assert [path for path in paths if not (HERE / path).exists()] == []


@needs_tree
def test_tests_that_the_pages_name_are_there() -> None:
    files = list((HERE / "tests").rglob("test_*.py"))
    written = "".join(path.read_text() for path in files) + "".join(f"def {path.stem}\n" for path in files)
    named = {name for page in (HERE / "docs").glob("*.md") for name in re.findall(r"\btest_\w+", page.read_text())}
    assert [name for name in sorted(named) if f"def {name}" not in written] == []


# -- messages that the pages quote -------------------------------------------------------------------------------------

GAP = "…"
"""For what a message fills in, and for what a page leaves out."""


def _said_by_the_package() -> list[str]:
    """The package's string literals, with a gap for what is filled in."""
    said = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
                said.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(" ".join(node.value.split()))  # engine/errors.py has texts of several lines
    return said


def _quoted_messages() -> list[str]:
    """The first cells of the table of messages; docs/errors.md has a test of its own."""
    found = []
    lines = iter((HERE / "docs" / "from-fp32.md").read_text().splitlines())
    for line in lines:
        if line.startswith("| an error that begins with |"):
            next(lines)
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines)
            found += [row.split("|")[1].strip() for row in rows]
    return found


def test_messages_that_the_pages_quote_are_raised() -> None:
    said, quoted = _said_by_the_package(), _quoted_messages()
    assert len(quoted) >= 4
    for message in quoted:
        wanted = ".*".join(re.escape(part.strip()) for part in message.split(GAP))
        assert any(re.search(wanted, text, re.DOTALL) for text in said), f"nothing in the package says {message!r}"


def test_modules_of_tools_are_found_where_they_lay() -> None:
    for name in ("averaging", "certify", "foreign.loading", "plan", "reports.monitor"):
        old, new = (importlib.import_module(f"fp16opt.{room}{name}") for room in ("", "tools."))
        assert old is new
    assert fp16opt.averaging.ema is fp16opt.ema
    assert callable(fp16opt.certify)
