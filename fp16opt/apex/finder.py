"""The import finder behind install_as_apex(): apex's module names, filled from this package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from .table import FORCED, ROOTS, children_of, entries_of, names_of, not_provided


@dataclass
class RealApex:
    """An apex that is installed or imported."""

    where: str
    has_amp: bool


def real_apex() -> RealApex | None:
    """The apex that ``import apex`` would give now; None where there is none. Imports nothing.

    A folder without ``__init__.py`` is none: it may be a clone of apex's repository beside the script.
    """
    module = sys.modules.get("apex")
    spec = module.__spec__ if module is not None else importlib.util.find_spec("apex")
    if module is None and (spec is None or spec.origin is None):
        return None
    places = list(getattr(module, "__path__", None) or (spec.submodule_search_locations if spec else None) or [])
    has_amp = any((Path(place) / "amp").is_dir() or (Path(place) / "amp.py").is_file() for place in places)
    where = places[0] if places else str(spec.origin if spec else "sys.modules")
    return RealApex(where, has_amp or hasattr(module, "amp"))


class AliasModule(ModuleType):
    """A module of apex's: the names of ours, and a message for those that are not there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise AttributeError(not_provided(f"{self.__name__}.{name}"))


class ApexFinder:
    """A finder for ``sys.meta_path``, the loader of what it finds, and the handle by which to undo its installation.

    Args:
        beside_real: A real apex without amp is installed: what it has stays its own, except the parts that are forced.
    """

    def __init__(self, beside_real: bool) -> None:
        self.beside_real = beside_real
        self._displaced: dict[str, ModuleType] = {}

    # -- installing --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put it in front of ``sys.meta_path``, and set aside modules that were imported under names now ours."""
        for name in list(sys.modules):
            if self._is_ours_to_serve(name):
                self._displaced[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)
        if self.beside_real:
            try:
                for name in FORCED:
                    if entries_of(name) is not None:
                        importlib.import_module(name)  # so that `import apex; apex.amp` works
            except BaseException:
                self.uninstall()
                raise

    def uninstall(self) -> None:
        """Take it out, with the modules it made, and put back what was there before."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in list(sys.modules.items()):
            if isinstance(module, AliasModule):
                del sys.modules[name]
                _rebind(name, module, self._displaced.get(name))
        sys.modules.update(self._displaced)
        self._displaced = {}
        importlib.invalidate_caches()

    def __enter__(self) -> ApexFinder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def _is_ours_to_serve(self, name: str) -> bool:
        if name.partition(".")[0] not in ROOTS:
            return False
        return not self.beside_real or any(f"{name}.".startswith(f"{forced}.") for forced in FORCED)

    # -- finding and loading -----------------------------------------------------------------------------------------

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of apex's modules; None for any other name.

        Raises:
            ImportError: It is a name of apex's that is not provided. Not ModuleNotFoundError: ``from apex import name``
                would then hide the message.
        """
        if fullname.partition(".")[0] not in ROOTS:
            return None
        if not self._is_ours_to_serve(fullname) and self._others_find(fullname, path):
            return None
        if entries_of(fullname) is not None:
            return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
        if not self._is_ours_to_serve(fullname):
            return None
        raise ImportError(not_provided(fullname), name=fullname)

    def _others_find(self, fullname: str, path: Sequence[str] | None) -> bool:
        others = [finder for finder in sys.meta_path if finder is not self]
        return any(finder.find_spec(fullname, path) is not None for finder in others)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty alias."""
        return AliasModule(spec.name, f"fp16opt's stand-in for {spec.name}.")

    def exec_module(self, module: ModuleType) -> None:
        """Import the submodules, then fill in the names: some names are a submodule's and an object's too."""
        for child in children_of(module.__name__):
            importlib.import_module(child)
        names = names_of(entries_of(module.__name__) or ())
        vars(module).update(names)
        shown = [name for name in names if not name.startswith("_")]
        module.__all__ = shown or [child.rpartition(".")[2] for child in children_of(module.__name__)]  # type: ignore[attr-defined]


def _rebind(name: str, ours: ModuleType, before: ModuleType | None) -> None:
    """Take ``ours`` out of a real parent package, and put back what it had under that name."""
    parent, _, last = name.rpartition(".")
    holder = sys.modules.get(parent)
    if holder is None or isinstance(holder, AliasModule) or vars(holder).get(last) is not ours:
        return
    if before is None:
        delattr(holder, last)
    else:
        setattr(holder, last, before)
