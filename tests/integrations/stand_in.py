"""timm without torchvision, which has no CPU build for this torch: empty modules while timm is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Kind(type):
    """Of a class that has members of all names, as an enumeration has."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Empty(types.ModuleType):
    """Has whatever is asked for: a class of that name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_timm() -> Any:
    """timm, whose models and scalers need nothing of torchvision; others must not take the empty modules for it."""
    if importlib.util.find_spec("torchvision") is not None:
        import timm

        return timm
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        import timm
        import timm.utils
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
    return timm
