"""Worlds of two, three and four ranks, for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.world import World


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    """Two ranks."""
    world = World(2)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def three() -> Iterator[World]:
    """Three ranks."""
    world = World(3)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    """Four ranks."""
    world = World(4)
    yield world
    world.stop()
