"""The calls into the compiled CUDA module: where its pointer tables lie, and on which stream it works.

A kernel reads the addresses of its tensors from a table in the GPU's memory. The table stays there between calls;
where an address changed, one copy that waits for nothing brings it up to date. Nothing in this file waits for the GPU,
but for one short copy of its own where a CUDA graph is captured: a graph is replayed with the addresses of its capture,
so it gets a table that nothing changes any more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import native
from .stats import CastStats, GradStats

if TYPE_CHECKING:
    from .decisions import Outcome, ScaleMemory
    from .tables import Call, PointerTables, Watch


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
        watched: the plan of the tensors that are hashed in passing, which the table was made for too; or None.
        numbers: the site of a step's numbers, or None.
    """

    numbers: Site | None = None

    def __init__(self, call: Call, watched: Call | None) -> None:
        self.watched = None if watched is None else watched.plan
        module = native.cuda_module()
        self.table = module.Table(
            [tensor.numel() for tensor in call.columns[0]],
            call.plan.rows,
            [[native._CODES[tensor.dtype] for tensor in column] for column in call.columns],
            call.plan.direct,
        )
        if watched is not None:
            numels = [tensor.numel() for tensor in watched.columns[0]]
            self.table.watch(numels, watched.plan.rows, watched.plan.direct)
        self._memory: Tensor | None = None
        self._stream: Stream | None = None

    def place(self, lists: Sequence[Any], add: bool | list[bool] | None, device: torch.device, stream: Stream) -> Any:
        """Bring the table up to date, in the order of ``stream``. Returns where kernels find it."""
        size = self.table.point(list(lists), add)
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
        self, lists: Sequence[Any], add: bool | list[bool] | None, stream: Stream, owner: PointerTables | None
    ) -> Any:
        """Write the table to memory of its own, for the graph that is being captured. Returns where it is.

        It stays as long as ``owner``: replays need the tensors and buffers of whoever made the call, so they end with
        it. Where a call has no owner nothing tells when the graph is gone, and the memory is never given back.
        """
        self.table.point(list(lists), add)
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
        watched: tensors to be hashed in passing.
    """

    def __init__(
        self,
        call: Call,
        add: bool | list[bool] | None = None,
        watched: Call | None = None,
    ) -> None:
        self._call, self._watched = call, watched
        device = _device(call, watched)
        self._stream = Stream(device)
        lists = list(native._addresses(call))
        if watched is not None:
            lists += native._addresses(watched)
        if self._stream.captures:
            site = Site(call, watched)
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
        watched = None if self._watched is None else self._watched.plan
        # One that was made with watched tensors for another operation on the same lists will do without them too.
        if not isinstance(site, Site) or (watched is not None and site.watched is not watched):
            site = self._call.plan.compiled = Site(self._call, self._watched)
        return site

    def done(self, written: int | None, *results: Tensor) -> None:
        """After the launch: hold tensors for a side stream, tell autograd that a list and ``results`` were written."""
        for call in (self._call, self._watched):
            if call is not None:
                for column in call.columns:
                    self._stream.hold(column)
        self._stream.hold(results)
        if written is None:
            native._bump(list(results))
        else:
            native._written(self._call, written, *results)


def _device(call: Call, watched: Call | None) -> torch.device:
    device = call.plan.device or (None if watched is None else watched.plan.device)
    return torch.device("cuda", torch.cuda.current_device()) if device is None else device


# -- operations --------------------------------------------------------------------------------------------------------


def unscale(
    call: Call,
    inv_scale: Tensor,
    accumulate: bool | list[bool],
    write: bool,
    stats: GradStats,
    watched: Call | None,
    watch: Watch | None,
) -> None:
    """:func:`fp16opt.kernels.multi_tensor_unscale` for the direct entries, then the totals over all rows."""
    queued = Queued(call, accumulate, watched)
    found = () if watch is None or watched is None else (watch.hashes, watch.samples)
    native.cuda_module().unscale(
        queued.table,
        queued.where,
        inv_scale.data_ptr(),
        stats.nonfinite.data_ptr(),
        stats.sumsq.data_ptr(),
        call.plan.count,
        stats.norm.data_ptr(),
        stats.found_inf.data_ptr(),
        *((0, 0) if not found else (tensor.data_ptr() for tensor in found)),
        write,
    )
    queued.done(1 if write else None, stats.nonfinite, stats.sumsq, stats.norm, stats.found_inf, *found)


def unscale_clipped(call: Call, inv_scale: Tensor, factor: Tensor, watched: Call | None, watch: Watch | None) -> None:
    """:func:`fp16opt.kernels.multi_tensor_unscale_clipped` for the direct entries."""
    queued = Queued(call, False, watched)
    found = () if watch is None or watched is None else (watch.hashes, watch.samples)
    native.cuda_module().unscale_clipped(
        queued.table,
        queued.where,
        inv_scale.data_ptr(),
        factor.data_ptr(),
        *((0, 0) if not found else (tensor.data_ptr() for tensor in found)),
        call.plan.count,
    )
    queued.done(1, *found)


def l2norm(call: Call, sumsq: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`fp16opt.kernels.multi_tensor_l2norm`; ``sumsq`` holds the rows of the indirect entries, else zeros."""
    norm, norms = sumsq.new_empty(()), torch.empty_like(sumsq)
    queued = Queued(call)
    count = call.plan.count
    native.cuda_module().l2norm(queued.table, queued.where, sumsq.data_ptr(), count, norm.data_ptr(), norms.data_ptr())
    queued.done(None, sumsq)
    return norm, norms


def scale(call: Call, factor: Tensor) -> None:
    """:func:`fp16opt.kernels.multi_tensor_scale` for the direct entries. The kernel looks at the factor."""
    queued = Queued(call)
    native.cuda_module().scale(queued.table, queued.where, factor.data_ptr())
    queued.done(0)


def axpby(call: Call, a: float, b: float, found_inf: Tensor | None, check: str) -> None:
    """:func:`fp16opt.kernels.multi_tensor_axpby` for the direct entries."""
    queued = Queued(call)
    checked, flag = (0, 0) if found_inf is None else (native._CHECKS[check], found_inf.data_ptr())
    native.cuda_module().axpby(queued.table, queued.where, a, b, checked, flag)
    queued.done(2, *([] if found_inf is None else [found_inf]))


def cast(call: Call, stats: CastStats) -> None:
    """:func:`fp16opt.kernels.multi_tensor_cast` for the direct entries."""
    queued = Queued(call)
    overflow, hashes = stats.overflow.data_ptr(), stats.hashes.data_ptr()
    native.cuda_module().cast(queued.table, queued.where, overflow, hashes, call.plan.count)
    queued.done(1, stats.overflow, stats.hashes)


def content_hash(call: Call, hashes: Tensor, sample: bool) -> None:
    """:func:`fp16opt.kernels.multi_tensor_hash` for the direct entries."""
    queued = Queued(call)
    module = native.cuda_module()
    operation = module.content_sample if sample else module.content_hash
    operation(queued.table, queued.where, hashes.data_ptr(), call.plan.count)
    queued.done(None, hashes)


def take(
    call: Call,
    now: Tensor,
    then: Tensor,
    samples: tuple[Tensor, Tensor] | None,
    places: Tensor | None,
    taken: Tensor,
) -> None:
    """:func:`fp16opt.kernels.multi_tensor_take` for the direct entries."""
    queued = Queued(call)
    sampled = (0, 0) if samples is None else tuple(tensor.data_ptr() for tensor in samples)
    native.cuda_module().take(
        *(queued.table, queued.where, now.data_ptr(), then.data_ptr()),
        *sampled,
        0 if places is None else places.data_ptr(),
        *(taken.data_ptr(), call.plan.count),
    )
    queued.done(0, taken)


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
    native._bump([tensor for tensor in written if tensor is not None])
