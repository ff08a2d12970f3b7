"""The training that a function of a script makes, for ``python -m fp16opt check FILE:make``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import preflight

__all__ = ["NothingToCheckError", "check"]

_NAMES = tuple(inspect.signature(preflight.check).parameters)


class NothingToCheckError(ValueError):
    """There is no such file or function, or what it gives is no training."""


def check(target: str, steps: int = 8) -> preflight.Preflight:
    """Run :func:`fp16opt.check` on what a script's function makes.

    Args:
        target: "FILE:FUNCTION". The file is run as a module, so that what stands under ``if __name__ == "__main__":``
            is not. The function is called without arguments. It gives ``(model, loss_fn)``, ``(model, loss_fn,
            optimizer)``, or a dict of :func:`fp16opt.check`'s arguments.
        steps: As for :func:`fp16opt.check`, unless such a dict has them.

    Raises:
        NothingToCheckError: In one line: there is no such file or function, one of them raises, or what it gives is no
            training that can be checked.

    Example:
        >>> check("train.py")
        Traceback (most recent call last):
        ...
        fp16opt.tools.reports.scripts.NothingToCheckError: expected FILE:FUNCTION as in train.py:make, got 'train.py'.
    """
    file, colon, name = target.rpartition(":")
    if not (colon and file and name.isidentifier()):
        raise NothingToCheckError(f"expected FILE:FUNCTION as in train.py:make, got {target!r}.")
    module = _run(Path(file))
    make = getattr(module, name, None)
    if not callable(make):
        raise NothingToCheckError(f"{file} has no function {name}.")
    given = _arguments(_called(make, target), target)
    try:
        return preflight.check(**{"steps": steps, **given})
    except Exception as error:
        raise NothingToCheckError(_in_one_line(error, f"{target}: ")) from error


def _run(path: Path) -> Any:
    """The module that a file is; its folder can be imported from, as when it is run."""
    if not path.is_file():
        raise NothingToCheckError(f"there is no file {path}.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise NothingToCheckError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    _called(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    return module


def _called(function: Callable[[], Any], what: str) -> Any:
    try:
        return function()
    except SystemExit:
        raise NothingToCheckError(f"{what} ends the process when it is run.") from None
    except Exception as error:
        raise NothingToCheckError(_in_one_line(error, f"{what} raised ")) from error


def _in_one_line(error: BaseException, before: str) -> str:
    """An error, and the script's line that it comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f" ({Path(last.filename).name}:{last.lineno})"
    return f"{before}{type(error).__name__}: {error}{where}"


def _arguments(given: Any, target: str) -> dict[str, Any]:
    """What the function gave, as arguments of the check."""
    if isinstance(given, Mapping):
        unknown = [str(name) for name in given if name not in _NAMES]
        if unknown or not {"model", "loss_fn"} <= {*given}:
            raise NothingToCheckError(
                f"{target}: expected a dict with model, loss_fn and, of these, what there is: "
                f"{', '.join(_NAMES[2:])}; got {', '.join(map(str, given)) or 'an empty one'}."
            )
        return dict(given)
    if isinstance(given, (tuple, list)) and len(given) in (2, 3):
        return dict(zip(_NAMES, given, strict=False))
    raise NothingToCheckError(
        f"{target}: expected (model, loss_fn), (model, loss_fn, optimizer) or a dict, got {type(given).__name__}."
    )
