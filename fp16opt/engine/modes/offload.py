"""State in page-locked memory of the host, which the card steps over the link: ``offload="cpu"``.

Masters or remainders, moments or codes lie there; scales of blocks and step counters stay on the card. The tensors look
like the card's, so steps, clips, skips and shards are those without. Only what is saved and loaded is another: that is
decoded and encoded on the host, by the kernels of the CPU, so that nothing of it needs room on the card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.host_memory import Host, Wanted, on_host
from ..dtensors import as_piece_of, local
from ..masters import REST, Home, Masters
from ..params import HALF_DTYPES, ParamPair, is_to_be_mastered


def _stays(name: str) -> bool:
    """Whether state of this name stays on the card: few numbers, which would be slow to write over the link."""
    return name == "step" or name.endswith("scales")


class OnHost(Home):
    """Where masters and state lie with ``offload="cpu"``: every parameter keeps its memory over loads and new state."""

    saved_on = torch.device("cpu")

    def __init__(self) -> None:
        self._host = Host()

    def prepare(self, spec: Any, masters: Masters, groups: list[dict[str, Any]]) -> None:
        """Ask for one slab a dtype."""
        wanted: list[Wanted] = []
        for group in groups:
            settings = spec.settings(group)
            for model in filter(is_to_be_mastered, group["params"]):
                new = super().new_state(spec.spec_for(settings, model), settings, _without_memory(model, model.dtype))
                if model.dtype in HALF_DTYPES:
                    new[REST] = _without_memory(model, masters.dtype)
                there = {name: value for name, value in new.items() if isinstance(value, Tensor) and not _stays(name)}
                wanted += [(model, name, local(like), local(model).device) for name, like in there.items()]
        self._host.reserve(wanted)

    def new_state(self, spec: Any, settings: dict[str, Any], model: Tensor) -> dict[str, Any]:
        """Zeros."""
        made = super().new_state(spec, settings, _without_memory(model, model.dtype))
        self.bring(made, model)
        return made

    def put(self, model: Tensor, name: str, value: Tensor) -> Tensor:
        """In the parameter's memory under the name; what has no bits is zeros."""
        piece, device = local(value), local(model).device
        if _stays(name):
            return torch.zeros_like(piece, device=device) if piece.is_meta else piece.to(device)
        room = self._host.of(model, name, piece, device)
        if piece.is_meta:
            room.zero_()
        elif piece.data_ptr() != room.data_ptr():
            on_host(room).copy_(piece)
        return as_piece_of(room, value)

    def bring(self, state: dict[str, Any], model: Tensor) -> None:
        """Changes ``state``."""
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = self.put(model, name, value)

    def bring_all(self, masters: Masters, pairs: Sequence[ParamPair], state: Mapping[Any, Any]) -> None:
        """Into the memory that each parameter has."""
        for pair in pairs:
            if pair.is_apart:
                masters.bring_home(pair)
            self.bring(state.get(pair.master, {}), pair.model)

    def to_save(self, value: Tensor) -> Tensor:
        """On the host. Waits for the card."""
        return as_piece_of(on_host(local(value.detach())), value)

    def state_to_save(self, entry: Any) -> Any:
        """On the host. Waits for the card."""
        return {name: self.to_save(value) if isinstance(value, Tensor) else value for name, value in entry.items()}


def _without_memory(model: Tensor, dtype: torch.dtype) -> Tensor:
    """A meta tensor, laid out as a parameter is."""
    return as_piece_of(torch.empty_like(local(model.detach()), dtype=dtype, device="meta"), model)
