"""The parameters of one device, as kernel calls take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .local import local


@dataclass
class Shard:
    """The parameters of one device: positions in :class:`MasterParams`, and what kernel calls on them need.

    ``copied`` are the positions whose parameter has a master apart from itself; ``models``, ``masters`` and ``cast``
    have one entry for each of them, in that order. ``stats`` and ``watch`` have one for every position of the shard.

    Attributes:
        watch: The hashes that the last unscaling pass found in the model. Old news once ``passed`` is False.
        rows: Where the entries of ``copied`` are in ``index``; None where the two are the same.
        found: int32, [2, copied]: ``cast.overflow`` and ``taken``, together so that one copy reads both.
    """

    device: torch.device
    index: list[int]
    copied: list[int]
    models: list[Tensor]
    masters: list[Tensor]
    stats: kernels.GradStats
    cast: kernels.CastStats
    watch: kernels.Watch
    sampled: Tensor
    rows: Tensor | None
    found: Tensor
    passed: bool = False
    unscale_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    waiting_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    cast_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    hash_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    sample_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    scale_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    take_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    norm_tables: kernels.PointerTables = field(default_factory=kernels.PointerTables)

    @classmethod
    def allocate(cls, device: torch.device, index: list[int], model: list[Tensor], master: list[Tensor]) -> Shard:
        """For the positions ``index`` of ``model`` and ``master``."""
        copied = [i for i in index if master[i] is not model[i]]
        watched = [model[i] if master[i] is not model[i] else None for i in index]
        places = [k for k, param in enumerate(watched) if param is not None]
        found = torch.zeros(2, len(copied), dtype=torch.int32, device=device)
        hashes = torch.zeros(len(copied), dtype=torch.int64, device=device)
        return cls(
            device,
            index,
            copied,
            [model[i] for i in copied],
            [master[i] for i in copied],
            kernels.GradStats.allocate(len(index), device),
            kernels.CastStats(found[0], hashes),
            kernels.Watch.allocate(watched, device),
            torch.zeros(len(index), dtype=torch.int64, device=device),
            None if len(copied) == len(index) else torch.tensor(places, dtype=torch.int64, device=device),
            found,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Pickle made two memories of ``found`` and ``cast.overflow``; make them one again."""
        self.__dict__.update(state)
        self.cast = kernels.CastStats(self.found[0], self.cast.hashes)

    @property
    def taken(self) -> Tensor:
        """int32, one for each of ``copied``: 1 where a master took values of the model, until somebody clears it."""
        return self.found[1]

    def take_pieces(self, model: list[Tensor], master: list[Tensor]) -> None:
        """Give kernels this rank's pieces as they are now: FSDP2 makes new ones where a model is moved or loaded."""
        self.models = [local(model[i]) for i in self.copied]
        self.masters = [local(master[i]) for i in self.copied]
        self.watch.params = [local(model[i]) if master[i] is not model[i] else None for i in self.index]

    def passing_hashes(self) -> Tensor:
        """int64, one for each of ``copied``: the model's content hashes when the last unscaling pass went by."""
        return self.watch.hashes if self.rows is None else self.watch.hashes[self.rows]
