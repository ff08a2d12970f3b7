"""Files of torch.save, read without running anything that is in them.

torch's restricted unpickler reads tensors, numbers, strings and containers. Old scalers, argument namespaces and enums
are of libraries that may not be installed: each class becomes an empty stand-in that holds what was pickled.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

NAMES_CLASSES = hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")
"""From torch 2.6 on: without that no class can be given a stand-in."""


class SavedObject:
    """An object of a class that was not imported: its arguments, attributes and items, and nothing that runs.

    Attributes:
        made_with: arguments of its constructor.
        items: by key, of a mapping.
    """

    made_with: tuple[Any, ...] = ()

    def __new__(cls, *arguments: Any) -> SavedObject:
        """Keep the arguments."""
        made = super().__new__(cls)
        if arguments:
            made.made_with = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self).setdefault("items", {})[key] = value

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__name__}({vars(self)!r})"


def stand_in(module: str, name: str) -> type[SavedObject]:
    """A class of this name. torch's unpickler admits a class by the name that it says it has."""
    return type(name, (SavedObject,), {"__module__": module, "__qualname__": name})


@contextlib.contextmanager
def admitted(classes: Sequence[type]) -> Iterator[None]:
    """torch's list of admitted classes with these, and as it was afterwards."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(list(classes))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def read(file: Path) -> Any:
    """What ``torch.save`` wrote, on the CPU; objects of other classes as :class:`SavedObject`.

    Raises:
        pickle.UnpicklingError: The file needs more than that: code that would run, or a class in a file of torch before
            1.6, or any other class where torch is older than 2.6.
    """
    return _load(file, _other_types(file))


def _other_types(file: Path) -> list[type]:
    """A stand-in for each class that the file names. Looking for them runs nothing."""
    if not NAMES_CLASSES:
        return []
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (ValueError, RuntimeError):  # a file of torch before 1.6
        return []
    return [stand_in(*name.rpartition(".")[::2]) for name in names]


def _load(file: Path, classes: list[type]) -> Any:
    with admitted(classes):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            older = "" if NAMES_CLASSES else " (torch 2.6 or newer is needed to leave objects of other classes out)"
            raise pickle.UnpicklingError(
                f"{file}: holds more than tensors, numbers and containers, and nothing in a file is run{older}: {error}"
            ) from None
