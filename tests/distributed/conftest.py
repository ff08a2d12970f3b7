"""Worlds of two, three and four ranks, for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distributed.world import World


def _world(size: int) -> Any:
    """Of so many ranks."""

    @pytest.fixture(scope="session")
    def world() -> Iterator[World]:
        world = World(size)
        yield world
        world.stop()

    return world


two, three, four = map(_world, (2, 3, 4))
