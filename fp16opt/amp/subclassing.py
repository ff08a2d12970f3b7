"""A mixin for an object that keeps its identity: how models and optimizers change in place.

``amp.initialize`` returns the objects that it was given. Grafting bound methods on them would tie every copy to the
original and stop them from being pickled; here the object's class becomes one made of a mixin and its own class, which
copies and pickles follow.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def combined(mixin: type[T], base: Any) -> type[T]:
    """The class of ``mixin`` before ``base``, under the name of ``base``; always the same one for the same two."""
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (mixin, base), {**namespace, "__amp_parts__": (mixin, base)})


def parts_of(instance: object) -> tuple[type, type] | None:
    """(mixin, own class) of an object that was given a mixin, else None."""
    parts: tuple[type, type] | None = getattr(type(instance), "__amp_parts__", None)
    return parts


def rebuild(mixin: type, base: type) -> Any:
    """An instance without content, for pickle and copy."""
    cls: Any = combined(mixin, base)
    return cls.__new__(cls)


class Reducible:
    """Base of mixins: pickles and copies by mixin and own class, since the combined class has no importable name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        parts = parts_of(self)
        if parts is None or not isinstance(reduced, tuple):
            return reduced
        return (rebuild, parts, *reduced[2:])
