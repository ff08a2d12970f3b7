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

from ... import kernels
from ...kernels import host_memory
from ...kernels.backends import captures
from ...kernels.host_memory import CannotLock, Host, in_gib, on_host
from .. import errors
from ..dtensors import as_piece_of, is_sharded, local
from ..fused_registry import FusedStepSpec, steps_on_device
from ..masters import Masters
from ..params import HALF_DTYPES, ParamPair, is_to_be_mastered, labelled

_APART = {"full": torch.float32, "split": torch.int16, "split24": torch.int8}
HOST = torch.device("cpu")


def _stays(name: str) -> bool:
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
    """How a class is stepped, as a :class:`~fp16opt.engine.fused_registry.FusedStepSpec` says it, and kept on the host.

    Args:
        inner: the spec; this one only decides where state lies.
        master_weights: the argument.

    Raises:
        ValueError: a parameter doesn't lie on a card that can step from the host.
        RuntimeError: there is too little memory. Nothing is held then.
    """

    def __init__(self, inner: Any, master_weights: str, groups: list[dict[str, Any]], names: dict[int, str]) -> None:
        check_served('offload="cpu"', labelled(groups, names))
        self.inner = inner
        self._owner, self._host = os.getpid(), Host()
        self._specs: dict[int, FusedStepSpec] = {}
        wanted: list[tuple[torch.device, Tensor]] = []
        for group in groups:
            settings = inner.settings(group)
            for param in filter(is_to_be_mastered, group["params"]):
                made = _made(inner.spec_for(settings, param), settings, param)
                tensors = [value for name, value in made.items() if isinstance(value, Tensor) and not _stays(name)]
                if param.dtype in HALF_DTYPES:
                    tensors.append(_meta(param, _APART[master_weights]))
                wanted += [(local(param).device, local(tensor)) for tensor in tensors]
        asking(self._host.reserve, wanted)

    convert_all = FusedStepSpec.convert_all

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def require_here(self, call: str) -> None:
        """Raise ``RuntimeError`` in a forked child, which has none of this memory."""
        if os.getpid() != self._owner:
            raise errors.OFFLOAD_FORKED(call=call)

    # -- where it lies -----------------------------------------------------------------------------------------------

    def spec_for(self, settings: dict[str, Any], model: Tensor) -> FusedStepSpec:
        """The inner spec's, whose new state lies on the host."""
        spec: FusedStepSpec = self.inner.spec_for(settings, model)
        if id(spec) not in self._specs:
            self._specs[id(spec)] = dataclasses.replace(spec, make_state=functools.partial(self._make, spec))
        return self._specs[id(spec)]

    def _make(self, spec: FusedStepSpec, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
        """Zeros as the spec makes them, in host memory."""
        device, new = local(model).device, _made(spec, settings, model)
        for name, value in new.items():
            if isinstance(value, Tensor):
                stays, like = _stays(name), local(value)
                made = torch.zeros_like(like, device=device) if stays else asking(self._host.like, like, device)
                new[name] = as_piece_of(made, value)
        state.update(new)  # all or nothing, where there is too little memory

    def convert(self, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
        """As the inner spec does, and what it made goes to the host."""
        before = dict(state)
        self.inner.convert(state, settings, model)
        self.bring(state, before, model)

    def bring(self, state: dict[str, Any], before: Mapping[str, Any], model: Tensor) -> None:
        """Put the state of a parameter to where it is to lie, into the memory that it had where it fits.

        Args:
            state: anywhere. Changed.
            before: what it was.
        """
        device = local(model).device
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                old = before.get(name)
                room = local(old) if isinstance(old, Tensor) else None
                piece = local(value)
                made = piece.to(device) if _stays(name) else asking(self._host.put, piece, device, room)
                if made is not piece:
                    state[name] = old if made is room else as_piece_of(made, value)

    def place(self, value: Tensor) -> Tensor:
        """A plain tensor in host memory with the bits of ``value``."""
        placed: Tensor = asking(self._host.put, value, value.device)
        return placed

    # -- what is saved -----------------------------------------------------------------------------------------------

    def read(self, masters: Masters, pair: ParamPair) -> Tensor:
        """The FP32 value of a master with memory of its own, on the host. Waits for the card."""
        value = on_host(local(masters.operand(pair).detach()))
        if value.dtype != torch.float32:
            rest, value = value, torch.empty_like(value, dtype=torch.float32)
            kernels.multi_tensor_join([on_host(local(pair.model.detach()))], [rest], [value])
        return as_piece_of(value, pair.model)

    @staticmethod
    def saved(entry: Any) -> Any:
        """A parameter's state on the host, but for the step counter. Waits for the card."""
        tensors = {k: v for k, v in entry.items() if isinstance(v, Tensor) and k != "step"}
        return {**entry, **{name: as_piece_of(on_host(local(value)), value) for name, value in tensors.items()}}


def _made(spec: FusedStepSpec, settings: dict[str, Any], model: Tensor) -> dict[str, Any]:
    """New state without memory: meta tensors, laid out as the parameter's."""
    made: dict[str, Any] = {}
    spec.make_state(made, settings, as_piece_of(_meta(model, model.dtype), model))
    return made


def _meta(model: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(local(model.detach()), dtype=dtype, device="meta")


def asking(allocate: Callable[..., Any], *given: Any) -> Any:
    """What asks for host memory. Raises ``RuntimeError`` where there is too little, and says what limits it."""
    try:
        return allocate(*given)
    except CannotLock as refusal:
        raise errors.OFFLOAD_MEMORY(asked=in_gib(refusal.asked), facts=refusal.facts) from None
