"""Optimizer classes by name: what the command line gives to :func:`fp16opt.certify`."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["load"]

_LR = 1e-3


def load(target: str, options: Sequence[str] = ()) -> Callable[[Any], Optimizer]:
    """The factory that ``package.module:Class`` names, with its options.

    Args:
        target: Module and class (or any callable that takes parameters), as an import would name them.
        options: ``name=value`` with a Python literal, or a word, as value. ``lr`` is 1e-3 where it has no default.

    Returns:
        A function from parameters to an optimizer.

    Raises:
        ValueError: The target or an option can't be understood, or there is no such module or class.
        TypeError: What it names can't be called.

    Example:
        >>> load("torch.optim:SGD", ["momentum=0.9"])([__import__("torch").ones(1)]).defaults["momentum"]
        0.9
    """
    module, colon, path = target.partition(":")
    if not (module and colon and path):
        raise ValueError(f"target: expected package.module:Class, got {target!r}.")
    found = _find(module, path)
    if not callable(found):
        raise TypeError(f"{target}: expected an optimizer class, got {type(found).__name__}.")
    kwargs = dict(map(_option, options))
    if "lr" not in kwargs and _needs_lr(found):
        kwargs["lr"] = _LR

    def factory(params: Any) -> Optimizer:
        try:
            made: Optimizer = found(params, **kwargs)
        except SystemExit:
            raise ValueError(f"{target} ends the process when it is called.") from None
        return made

    return factory


def _find(module: str, path: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise ValueError(f"{module} can't be imported: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ValueError(f"{module} has no {path}.") from None
    return found


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise ValueError(f"option: expected name=value, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _needs_lr(found: Callable[..., Any]) -> bool:
    try:
        lr = inspect.signature(found).parameters.get("lr")
    except (TypeError, ValueError):  # built-in callables have no signature
        return False
    return lr is not None and lr.default is inspect.Parameter.empty
