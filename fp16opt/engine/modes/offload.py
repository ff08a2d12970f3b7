"""State in page-locked memory of the host, which the card steps over the link: ``offload="cpu"``.

Masters or remainders, moments or codes lie there; scales of blocks and step counters stay on the card. The tensors look
like the card's, so steps, clips, skips and shards are those without. Only what is saved and loaded is another: that is
decoded and encoded on the host, by the kernels of the CPU, so that nothing of it needs room on the card.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ... import kernels
from ...kernels import host_memory
from ...kernels.backends import captures
from ...kernels.host_memory import CannotLock, Room, in_gib, is_on_host, on_host, rounded
from .. import errors
from ..dtensors import as_piece_of, is_sharded, local
from ..fused_registry import FusedStepSpec, steps_on_device
from ..masters import Masters
from ..params import HALF_DTYPES, ParamPair, is_to_be_mastered, labelled
from ..state_format import StateFormat

SAID = 'offload="cpu"'
"""The argument, as the user writes it."""
_APART = {"full": torch.float32, "split": torch.int16, "split24": torch.int8}
HOST = torch.device("cpu")


def stays(name: str) -> bool:
    """Whether state of this name stays on the card: few numbers, which would be slow to write over the link."""
    return name == "step" or name.endswith("scales")


def check_served(what: str, params: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ``ValueError`` unless all parameters lie on cards with memory of their own that compiled kernels serve.

    Args:
        what: the argument or the call that asks for it.
        params: with what messages call them.
    """
    for name, param in params:
        device = local(param).device
        if not steps_on_device(device):
            row = errors.OFFLOAD_SHARDS if is_sharded(param) else errors.OFFLOAD_ON_CPU
            raise (row if device.type == "cpu" else errors.OFFLOAD_UNSERVED)(what=what, name=name, device=device)
        if host_memory.card_of(device).shares_memory():
            raise errors.OFFLOAD_UNIFIED(what=what, device=device)
        if captures(device):
            raise errors.OFFLOAD_CAPTURED(what=what)


class Offload:
    """The memory of one optimizer on the host, by device.

    Attributes:
        inner: the form in which state is kept, of which this one only decides where.
    """

    def __init__(self, inner: StateFormat, master_weights: str) -> None:
        self.inner = inner
        self._dtype = _APART[master_weights]
        self._owner = os.getpid()
        self._rooms: dict[torch.device, Room] = {}

    def require_here(self, call: str) -> None:
        """Raise ``RuntimeError`` in a forked child, which has none of this memory."""
        if os.getpid() != self._owner:
            raise errors.OFFLOAD_FORKED(call=call)

    # -- room --------------------------------------------------------------------------------------------------------

    def begin(self, groups: list[dict[str, Any]], names: dict[int, str]) -> HostState:
        """Ask for all memory that masters and state of groups of the model's parameters will take.

        Raises:
            ValueError: a parameter doesn't lie on a card that can step from the host.
            RuntimeError: there is too little memory. Nothing is held then.
        """
        check_served(SAID, labelled(groups, names))
        asked: dict[torch.device, dict[torch.dtype, int]] = {}
        for group in groups:
            settings = self.inner.spec.settings(group)
            for param in group["params"]:
                if not is_to_be_mastered(param):
                    continue
                sizes = asked.setdefault(local(param).device, {})
                made = self._made(self.inner.spec_for(settings, param), settings, param)
                tensors = [
                    local(value) for name, value in made.items() if isinstance(value, Tensor) and not stays(name)
                ]
                if param.dtype in HALF_DTYPES:
                    tensors.append(_meta(param, self._dtype))
                for tensor in tensors:
                    size = rounded(tensor.numel() * tensor.element_size())
                    sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + size
        for device, sizes in asked.items():
            _asking(self._room(device).reserve, sizes)
        return HostState(self)

    def _room(self, device: torch.device) -> Room:
        if device not in self._rooms:
            self._rooms[device] = Room(device)
        return self._rooms[device]

    def place(self, value: Tensor) -> Tensor:
        """A plain tensor in host memory with the bits of ``value``: itself where it lies there."""
        if is_on_host(value) or not value.numel():
            return value
        made: Tensor = _asking(self._room(value.device).like, value)
        on_host(made).copy_(value)
        return made

    # -- state -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _made(spec: FusedStepSpec, settings: dict[str, Any], model: Tensor) -> dict[str, Any]:
        """New state without memory: meta tensors, laid out as the parameter's."""
        made: dict[str, Any] = {}
        spec.make_state(made, settings, as_piece_of(_meta(model, model.dtype), model))
        return made

    def make(self, spec: FusedStepSpec, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
        """As the spec makes new state, zeros, in host memory."""
        piece = local(model)
        for name, value in self._made(spec, settings, model).items():
            if isinstance(value, Tensor):
                meta = local(value)
                if stays(name):
                    made = torch.zeros_like(meta, device=piece.device)
                else:
                    made = _asking(self._room(piece.device).like, meta)
                value = as_piece_of(made, value) if is_sharded(value) else made
            state[name] = value

    def bring(self, entry: dict[str, Any], there: Mapping[str, Any], device: torch.device) -> None:
        """Put the state of a parameter where it is to lie, in the memory that it had where it fits.

        Args:
            entry: its state, anywhere. Changed.
            there: what it was before.
        """
        for name, value in entry.items():
            if not isinstance(value, Tensor) or not value.numel() or is_on_host(local(value)):
                continue
            if stays(name):
                entry[name] = value if name == "step" else value.to(device)
                continue
            piece, before = local(value), there.get(name)
            old = local(before) if isinstance(before, Tensor) else None
            if old is None or not is_on_host(old) or _layout(old) != _layout(piece):
                old, before = _asking(self._room(device).like, piece), None
            on_host(old).copy_(piece)
            entry[name] = as_piece_of(old, value) if before is None else before

    def bring_all(
        self, pairs: Iterable[ParamPair], optimizer: Optimizer, there: Mapping[Any, Mapping[str, Any]]
    ) -> None:
        """:meth:`bring` of all parameters; ``there`` by master."""
        for pair in pairs:
            if pair.master in optimizer.state:
                entry = optimizer.state[pair.master]
                self.bring(entry, there.get(pair.master, {}), local(pair.model).device)

    # -- what is saved -----------------------------------------------------------------------------------------------

    def read(self, masters: Masters, pair: ParamPair) -> Tensor:
        """The FP32 value of a master with memory of its own, on the host. Waits for the card."""
        operand = local(masters.operand(pair).detach())
        value = on_host(operand)
        if operand.dtype != torch.float32:
            rest, value = value, torch.empty_like(value, dtype=torch.float32)
            kernels.multi_tensor_join([on_host(local(pair.model.detach()))], [rest], [value])
        return as_piece_of(value, pair.model)

    @staticmethod
    def saved(entry: Any) -> Any:
        """A parameter's state on the host, but for the step counter. Waits for the card."""
        if not isinstance(entry, Mapping):
            return entry
        return {
            name: as_piece_of(on_host(local(value)), value) if isinstance(value, Tensor) and name != "step" else value
            for name, value in entry.items()
        }


class HostState:
    """A form of state that is kept in host memory; see :class:`~fp16opt.engine.state_format.StateFormat`."""

    def __init__(self, offload: Offload) -> None:
        self.spec, self.needs_number = offload.inner.spec, offload.inner.needs_number
        self._offload, self._inner = offload, offload.inner
        self._specs: dict[int, FusedStepSpec] = {}

    def spec_for(self, settings: dict[str, Any], model: Tensor) -> FusedStepSpec:
        """The inner form's, whose new state lies on the host."""
        spec = self._inner.spec_for(settings, model)
        if id(spec) not in self._specs:
            make = functools.partial(self._offload.make, spec)
            self._specs[id(spec)] = dataclasses.replace(spec, make_state=make)
        return self._specs[id(spec)]

    def deciding(self, settings: dict[str, Any]) -> tuple[Any, ...]:
        """The inner form's."""
        return self._inner.deciding(settings)

    def obstacle(self, group: dict[str, Any]) -> str:
        """The inner form's."""
        return self._inner.obstacle(group)

    def convert(self, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
        """As the inner form does, and what it made goes to the host."""
        before = dict(state)
        self._inner.convert(state, settings, model)
        self._offload.bring(state, before, local(model).device)


def _meta(model: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(local(model.detach()), dtype=dtype, device="meta")


def _layout(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride()


def _asking(allocate: Callable[..., Any], *given: Any) -> Any:
    try:
        return allocate(*given)
    except CannotLock as refusal:
        raise errors.OFFLOAD_MEMORY(asked=in_gib(refusal.asked), facts=refusal.facts) from None
