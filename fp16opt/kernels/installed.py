"""Where the package lies, what its build has left there, what to type where something is missing."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
BUILD = "pip install setuptools pybind11 ninja && python setup.py build_ext --inplace"


def is_source_tree(package: Path) -> bool:
    """Whether the package lies in a source tree, and not where an install has put it.

    Example:
        >>> is_source_tree(Path("/no/such/folder/fp16opt"))
        False
    """
    return (package.parent / "setup.py").is_file() and (package.parent / "csrc").is_dir()


def hidden_install(package: Path) -> Path | None:
    """The folder of another fp16opt that is installed, and that Python passes over for this one."""
    for found in importlib.metadata.distributions(name="fp16opt"):
        folder = Path(str(found.locate_file("fp16opt"))).resolve()
        if folder != package and (folder / "__init__.py").is_file():
            return folder
    return None


def remedy(package: Path) -> str:
    """What to type where something that the build makes is missing.

    Example:
        >>> remedy(Path("/no/such/folder/fp16opt"))
        'reinstall fp16opt'
    """
    if not is_source_tree(package):
        return "reinstall fp16opt"
    hidden = hidden_install(package)
    first = "" if hidden is None else "start Python in another folder, where it takes that one; or "
    return f"{first}build in {package.parent}: {BUILD}"


def reason_not_built(name: str, package: Path | None = None) -> tuple[str, bool]:
    """Why the compiled module ``name`` is not there.

    Args:
        name: of the module, as in "_cpu".
        package: the folder of the package; this one's.

    Returns:
        (the reason and the remedy, in words; whether no install has told the user of it).
    """
    package = PACKAGE if package is None else package
    try:
        noted = json.loads((package / "_build.json").read_text(encoding="utf-8"))
        outcome = str(noted[name])
    except (OSError, ValueError, KeyError, TypeError):
        outcome = ""
    if outcome not in ("", "built"):
        return outcome, False
    if not is_source_tree(package):
        if outcome == "":
            return "this install was made without it", False
        return f"it was built, but its file is missing: {remedy(package)}", False
    hidden = hidden_install(package)
    found = "nothing was built for this Python" if outcome else "nothing was built"
    before = "" if hidden is None else f", and Python takes it before the fp16opt that is installed in {hidden.parent}"
    return f"{package.parent} is a source tree in which {found}{before}. Mend it: {remedy(package)}", True
