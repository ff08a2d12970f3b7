"""The calls into the compiled CUDA module: where its pointer tables lie, and on which stream it works.

A kernel reads the addresses of its tensors from a table in the GPU's memory. The table stays there between calls;
where an address changed, one copy that waits for nothing brings it up to date. Nothing in this file waits for the GPU,
but for one short copy of its own where a CUDA graph is captured: a graph is replayed with the addresses of its capture,
so it gets a table that nothing changes any more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import native
from .calls import Call, PointerTables

Outcome = tuple[Tensor | None, Tensor | None]
"""(float32 []: whether the last step was skipped; float64 []: how many were)."""
ScaleMemory = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(scale; trackers; settings): the tensors that a loss scaler's ``update`` reads and writes."""


@functools.lru_cache(maxsize=64)
def _runs_on(module: Any, index: int) -> bool:
    return bool(module.runs_on(index))


def serves(device: torch.device) -> bool:
    """Whether the compiled CUDA module is there and holds code that runs on ``device``. Does not sync.

    Example:
        >>> serves(torch.device("cpu"))
        False
    """
    module = native.cuda_module()
    if module is None or device.type != "cuda" or torch.version.cuda is None:
        return False
    return _runs_on(module, torch.cuda.current_device() if device.index is None else device.index)


# -- what is asked of torch.cuda, in one place -------------------------------------------------------------------------


class Stream:
    """A device's current stream, as the kernels and torch's allocator know it.

    Attributes:
        handle: its address.
        index: its device's number.
        captures: whether a CUDA graph is being captured on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._device = device
        self.handle = int(self._stream.cuda_stream)
        self.index = int(self._stream.device_index)
        if self.index == torch.cuda.current_device():  # as a rule; the guard below costs more than the question
            self.captures = torch.cuda.is_current_stream_capturing()
        else:
            with torch.cuda.device(self.index):
                self.captures = torch.cuda.is_current_stream_capturing()

    def wait_for(self, other: Stream) -> None:
        """Have later work here wait for what the other stream has been given until now. No sync."""
        self._stream.wait_stream(other._stream)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of ``tensors`` from being used again before the work queued here is done with it.

        Memory is given back in the order of the stream that it was allocated on, as a rule the device's default one.
        Only what is the library's own or may be: tables, numbers, statistics. Tensors in lists are the callers', who
        see to them when they use them on several streams, as with torch's own operations.
        """
        if self.handle != torch.cuda.default_stream(self._device).cuda_stream and not self.captures:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def staging(self, size: int) -> Tensor:
        """Page-locked host memory. torch keeps it until copies from it are done."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


# -- tables ------------------------------------------------------------------------------------------------------------


class Site:
    """The table of one call site in the GPU's memory.

    Attributes:
        numbers: the site of a step's numbers, or None.
    """

    numbers: Site | None = None

    def __init__(self, call: Call) -> None:
        self.table = native.cuda_module().Table(*native.table_arguments(call))
        self._memory: Tensor | None = None
        self._stream: Stream | None = None

    def place(self, lists: Any, add: bool | Sequence[bool] | None, device: torch.device, stream: Stream) -> Any:
        """Bring the table up to date, in the order of ``stream``. Returns where kernels find it."""
        size = self.table.point(lists, add)
        with torch.inference_mode(False):
            if self._memory is None:
                self._memory = torch.empty(self.table.all_bytes(), dtype=torch.uint8, device=device)
            if self._stream is not None and self._stream.handle != stream.handle:
                stream.wait_for(self._stream)  # the kernel before this one may still read it there
            stream.hold([self._memory])
            self._stream = stream
            if size:
                staging = stream.staging(size)
                self.table.fill(staging.data_ptr())
                self._memory[:size].copy_(staging, non_blocking=True)
        return native.cuda_module().Where(self._memory.data_ptr(), stream.index, stream.handle)

    def place_for_graph(
        self, lists: Any, add: bool | Sequence[bool] | None, stream: Stream, owner: PointerTables | None
    ) -> Any:
        """Write the table to memory of its own, for the graph that is being captured. Returns where it is.

        It stays as long as ``owner``: replays need the tensors and buffers of whoever made the call, so they end with
        it. Where a call has no owner nothing tells when the graph is gone, and the memory is never given back.
        """
        self.table.point(lists, add)
        kept = self.table.keep(stream.index)
        memory = kept.memory()
        if owner is None:
            kept.forever()
        else:
            owner.captured.append(kept)
        return native.cuda_module().Where(memory, stream.index, stream.handle)


class Queued:
    """A call ready to be launched: its table, where that is, and what to do once it is in the stream.

    Args:
        call: the lists.
        add: which of them are added to.
    """

    def __init__(
        self,
        call: Call,
        add: bool | Sequence[bool] | None = None,
    ) -> None:
        self._call = call
        device = call.plan.device
        self._stream = Stream(device)
        lists = native.addresses_of(call)
        if self._stream.captures:
            site = Site(call)
            self.where = site.place_for_graph(lists, add, self._stream, call.owner)
        else:
            site = self._site()
            try:
                self.where = site.place(lists, add, device, self._stream)
            except BaseException:
                call.plan.compiled = None  # what of the table arrived is not known
                raise
        self.table = site.table

    def _site(self) -> Site:
        site = self._call.plan.compiled
        if not isinstance(site, Site):
            site = self._call.plan.compiled = Site(self._call)
        return site

    def done(self, used: Sequence[object], results: Sequence[object], *, writes: bool = True) -> None:
        """After the launch: hold what was used beside the lists, for a side stream, and count what was written."""
        self._stream.hold([value for value in used if isinstance(value, Tensor)])
        native.count_writes(self._call, results, lists=writes)


# -- operations --------------------------------------------------------------------------------------------------------


def launch(
    call: Call,
    function: str,
    *arguments: object,
    results: Sequence[object] = (),
    flags: bool | Sequence[bool] | None = None,
    writes: bool = True,
) -> None:
    """:func:`fp16opt.kernels.native.launch` for the compiled CUDA module, which has the flags in its table."""
    queued = Queued(call, flags)
    given = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    getattr(native.cuda_module(), function)(queued.table, queued.where, call.plan.count, *given)
    queued.done(arguments, results, writes=writes)


# -- decisions ---------------------------------------------------------------------------------------------------------


def _place(device: torch.device, *tensors: Tensor) -> Any:
    """Where a kernel without tables runs; ``tensors``, which it uses, are held for a side stream."""
    stream = Stream(device)
    stream.hold(tensors)
    return native.cuda_module().Where(0, stream.index, stream.handle)


def capture_scale(scale: Tensor, pair: Tensor) -> None:
    """:func:`fp16opt.kernels.decisions.capture_scale`."""
    native.cuda_module().capture_scale(_place(scale.device, scale, pair), scale.data_ptr(), pair.data_ptr())


def decide_clip(norm: Tensor, found_inf: Tensor | None, max_norm: float, only_finite: bool, results: Tensor) -> None:
    """:func:`fp16opt.kernels.decisions.decide_clip`; ``results``: float32, [2]."""
    where = _place(norm.device, norm, results, *([] if found_inf is None else [found_inf]))
    flag, address = 0 if found_inf is None else found_inf.data_ptr(), results.data_ptr()
    native.cuda_module().decide_clip(where, norm.data_ptr(), flag, max_norm, only_finite, address, address + 4)


def close_step(
    device: torch.device,
    memory: Tensor | None,
    flags: Tensor | None,
    kept: Tensor | None,
    found_inf: Tensor | None,
    outcome: Outcome,
    scaler: ScaleMemory,
) -> None:
    """:func:`fp16opt.kernels.decisions.close_step`, with None in place of what is not asked for."""
    (last, skipped), (scale, trackers, settings) = outcome, scaler
    if settings is None:
        scale = None  # a static one
    tensors = [found_inf, last, skipped, scale, trackers, settings, flags, kept, memory]
    at = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    clean, skips = (0, at[4]) if settings is None else (at[4], at[4] + 4)
    native.cuda_module().close_step(
        _place(device, *(tensor for tensor in tensors if tensor is not None)),
        *(at[0], at[1], at[2], at[3], clean, skips, at[5], at[6], at[7], 0 if kept is None else kept.numel()),
        *(at[8], 0 if memory is None else memory.numel() // 4),
    )
    written = (last, skipped, scale, trackers, kept, memory)
    native.count_versions([tensor for tensor in written if tensor is not None])
