"""The calls of the CUDA kernels: where their tables lie, and on which stream they work.

A kernel reads the addresses of its tensors from a table in the GPU's memory. The table stays there between calls;
where an address changed, one copy that waits for nothing brings it up to date. Nothing in this file waits for the GPU,
but for one short copy of its own where a CUDA graph is captured: a graph is replayed with the addresses of its capture,
so it gets a table that nothing changes any more.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import cuda_devices, native
from .calls import Call, Plan, PointerTables
from .cuda_driver import Device
from .cuda_rows import CHUNK, ENTRY, FOUND, KERNELS, LISTS, NUMBERS, Blocks, Kernel
from .reference import CHUNK as CHUNK_ELEMENTS
from .reference import SAMPLED_WHOLE, sample_stride

Outcome = tuple[Tensor | None, Tensor | None]
"""(float32 []: whether the last step was skipped; float64 []: how many were)."""
ScaleMemory = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(scale; trackers; settings): the tensors that a loss scaler's ``update`` reads and writes."""

_MOST_MAPPING_BLOCKS = 2048
"""Of kernels that may find nothing to do: as many as keep any GPU busy."""
_MOST_LISTS = 8
"""For which an entry of a table has dtypes."""


def serves(device: torch.device) -> bool:
    """Whether the CUDA kernels serve ``device``. The first call for a card loads what AdamW needs; does not sync.

    Example:
        >>> serves(torch.device("cpu"))
        False
    """
    if device.type != "cuda" or cuda_devices.release() is None or not torch.cuda.is_available():
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return cuda_devices.kernels_on(index) is not None


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

    def hold(self, tensors: Sequence[object]) -> None:
        """Keep the memory of tensors among ``tensors`` from being used again before the work queued here is done.

        Memory is given back in the order of the stream that it was allocated on, as a rule the device's default one.
        Only what is the library's own or may be: tables, numbers, statistics. Tensors in lists are the callers', who
        see to them when they use them on several streams, as with torch's own operations.
        """
        if self.handle != torch.cuda.default_stream(self._device).cuda_stream and not self.captures:
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    tensor.record_stream(self._stream)

    def staging(self, size: int) -> Tensor:
        """Page-locked host memory. torch keeps it until copies from it are done."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def current_stream(device: torch.device) -> Stream:
    """The stream that work on ``device`` is given to now."""
    return Stream(device)


def device_of(stream: Stream) -> Device:
    """What launches kernels on the stream's device.

    Raises:
        RuntimeError: nothing does; checks before a call see to it that this does not happen.
    """
    device = cuda_devices.kernels_on(stream.index)
    if device is None:
        raise RuntimeError(f"the CUDA kernels do not serve cuda:{stream.index}. See python -m fp16opt.")
    return device


# -- tables ------------------------------------------------------------------------------------------------------------


class Content:
    """Bytes in host memory of which the GPU has a copy.

    Attributes:
        host: them.
        size: of the GPU's memory: it may go on behind the copy.
    """

    def __init__(self, copied: int, size: int) -> None:
        self.host = ctypes.create_string_buffer(max(1, copied))
        self.copied, self.size = copied, size
        self.address = ctypes.addressof(self.host)

    def put(self, at: int, content: bytes) -> bool:
        """Write ``content``; whether it is other than what was there."""
        end = at + len(content)
        view = memoryview(self.host).cast("B")
        if view[at:end] == content:
            return False
        view[at:end] = content
        return True


def _behind(start: int, count: int, size: int) -> int:
    return (start + count * size + 15) // 16 * 16


class Table(Content):
    """Lists of tensors as kernels read them: first what changes with the addresses, then what does not.

    Behind these, memory that a kernel's blocks share: counters, which begin at 0, and what chunks were found to hold.

    Attributes:
        chunk_count: how many chunks the lists are cut into.
        entries: where the tensors' rows of it begin.
    """

    def __init__(self, call: Call) -> None:
        plan = call.plan
        self._places = None if len(plan.direct) == len(plan.rows) else plan.direct
        self._rows = [plan.rows[place] for place in plan.direct]
        self._flags: object = None
        self._width, count = plan.operation.tables, len(plan.direct)
        if self._width > _MOST_LISTS:
            raise ValueError(
                f"{plan.operation.name}: {self._width} lists, the CUDA kernels take up to {_MOST_LISTS}. Widen Entry."
            )
        columns = [call.column(which) for which in range(self._width)]
        numels = [columns[0][place].numel() for place in plan.direct]
        codes = [[native.CODES[column[place].dtype] for column in columns] for place in plan.direct]
        chunks = [
            CHUNK.packer().pack(start, entry, min(numel - start, CHUNK_ELEMENTS))
            for entry, numel in enumerate(numels)
            for start in range(0, numel, CHUNK_ELEMENTS)
        ]
        self.chunk_count, self._count = len(chunks), count
        self._filled = sum(numel > 0 for numel in numels)
        self._add = _behind(0, self._width * count, 8)
        self._chunks = _behind(self._add, count, 1)
        self.entries = _behind(self._chunks, len(chunks), CHUNK.packer().size)
        self._counters = _behind(self.entries, count + 1, ENTRY.packer().size)
        self._partial = _behind(self._counters, count + 1, 4)
        found = max(FOUND.packer().size, NUMBERS.packer().size)
        super().__init__(self._partial, _behind(self._partial, len(chunks), found))
        self.put(self._chunks, b"".join(chunks))
        self.put(self.entries, b"".join(self._packed_entries(numels, codes)))

    def _packed_entries(self, numels: list[int], codes: list[list[int]]) -> list[bytes]:
        pack, first, packed = ENTRY.packer().pack, 0, []
        for row, numel, dtypes in zip(self._rows, numels, codes, strict=True):
            stride = 0 if numel <= SAMPLED_WHOLE else sample_stride(numel)
            packed.append(pack(row, first, stride, bytes(dtypes)))
            first += -(-numel // CHUNK_ELEMENTS)
        return [*packed, pack(0, first, 0, b"")]

    def point(self, call: Call, flags: bool | Sequence[bool] | None) -> tuple[int, int] | None:
        """Take in addresses and flags: from where to where bytes changed, or None."""
        moved = native.put_addresses(call, range(self._width), self._places, self.address, 8)
        if flags != self._flags:
            one = flags is None or isinstance(flags, bool)
            self._flags = flags if one else list(flags)  # type: ignore[arg-type]
            each = [bool(flags if one else flags[row]) for row in self._rows]  # type: ignore[index]
            moved = self.put(self._add, bytes(each)) or moved
        return (0, self._chunks) if moved else None

    def lists(self, memory: int) -> bytes:
        """The kernels' argument that says where in the GPU's memory everything is."""
        offsets = (0, self._add, self._chunks, self.entries, self._partial, self._counters)
        return LISTS.packer().pack(*(memory + at for at in offsets), self.chunk_count, self._count, self._filled)


class Site:
    """The content of one call site in the GPU's memory.

    Args:
        content: of the host.

    Attributes:
        content: the same.
        numbers: the site of a step's numbers, or None.
        lists: what kernels are told of a table at this place.
    """

    numbers: Site | None = None
    lists: bytes = b""

    def __init__(self, content: Content) -> None:
        self.content: Any = content
        self._memory: Tensor | None = None
        self._stream: Stream | None = None
        self.memory = 0

    def place(self, changed: tuple[int, int] | None, device: torch.device, stream: Stream) -> None:
        """Bring the GPU's copy up to date, in the order of ``stream``."""
        content = self.content
        if changed is None and self._stream is not None and self._stream.handle == stream.handle:
            return
        with torch.inference_mode(False):
            if self._memory is None:
                self._memory = torch.empty(content.size, dtype=torch.uint8, device=device)
                self._settle(self._memory.data_ptr())
                changed = (0, content.copied)
            if self._stream is not None and self._stream.handle != stream.handle:
                stream.wait_for(self._stream)  # the kernel before this one may still read it there
            stream.hold([self._memory])
            self._stream = stream
            if changed is not None:
                begin, end = changed
                staging = stream.staging(end - begin)
                ctypes.memmove(staging.data_ptr(), content.address + begin, end - begin)
                self._memory[begin:end].copy_(staging, non_blocking=True)

    def place_for_graph(self, stream: Stream, owner: PointerTables | None) -> None:
        """Write the content to memory of its own, for the graph that is being captured.

        It stays as long as ``owner``: replays need the tensors and buffers of whoever made the call, so they end with
        it. Where a call has no owner nothing tells when the graph is gone, and the memory is never given back. It is
        the driver's and not torch's. Torch would take it from the graph's own pool, whose memory is the graph's alone
        (with ``backend:cudaMallocAsync`` it is there only while the graph runs), or on another stream from the common
        one, where it would be lent again at once while a last replay may still read it; the driver's is freed when
        the device is done.
        """
        device = device_of(stream)
        memory = device.keep(self.content.host.raw[: self.content.copied], self.content.size)
        self._settle(memory)
        if owner is not None:
            weakref.finalize(owner, device.give_back, memory).atexit = False  # a process's end frees all

    def _settle(self, memory: int) -> None:
        self.memory = memory
        if isinstance(self.content, Table):
            self.lists = self.content.lists(memory)


def placed(call: Call, stream: Stream, known: Site | None, make: Callable[[], Content], *given: Any) -> Site:
    """The site of a call's content, brought up to date on the device: the known one, or in a capture one of its own.

    Args:
        known: None makes one.
        make: its content.
        given: to :meth:`point` of that, behind the call.
    """
    if stream.captures or known is None:
        known = Site(make())
    if stream.captures:
        known.content.point(call, *given)
        known.place_for_graph(stream, call.owner)
        return known
    try:
        known.place(known.content.point(call, *given), call.plan.device, stream)
    except BaseException:
        call.plan.compiled = None  # what of it arrived is not known
        raise
    return known


def site_of(call: Call, stream: Stream, flags: bool | Sequence[bool] | None) -> Site:
    """The table of a call."""
    known = call.plan.compiled
    site = placed(call, stream, known if isinstance(known, Site) else None, lambda: Table(call), flags)
    if not stream.captures:
        call.plan.compiled = site
    return site


# -- operations --------------------------------------------------------------------------------------------------------


@functools.cache
def _packing(kernel: Kernel) -> tuple[struct.Struct, int | None]:
    """What packs the functor's fields, and which of them is the length of the lists."""
    names = [field.partition(":")[0] for field in kernel.fields.split()]
    return kernel.struct.packer(), names.index("n") if "n" in names else None


def _address(value: object) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else 0 if value is None else value


def queue(kernel: Kernel, stream: Stream, plan: Plan, site: Site, values: Sequence[object]) -> None:
    """Launch one kernel over lists; ``values`` are the fields of its functor."""
    chunks = site.content.chunk_count
    if kernel.blocks is Blocks.MAPPING:
        if chunks == 0:
            return
        blocks = min(chunks, _MOST_MAPPING_BLOCKS)
    else:
        blocks = max(chunks, 1)
    packer, counted = _packing(kernel)
    given = [_address(value) for value in values]
    if counted is not None:
        given.insert(counted, plan.count)
    device_of(stream).launch(kernel.name, blocks, stream.handle, packer.pack(*given) or b"\0", site.lists)


def launch(
    call: Call,
    function: str,
    *arguments: object,
    results: Sequence[object] = (),
    flags: bool | Sequence[bool] | None = None,
    writes: bool = True,
) -> None:
    """:func:`fp16opt.kernels.native.launch` for the CUDA kernels, which have the flags in their table."""
    stream = current_stream(call.plan.device)
    queue(KERNELS[function], stream, call.plan, site_of(call, stream, flags), arguments)
    stream.hold(arguments)
    native.count_writes(call, results, lists=writes)


# -- decisions ---------------------------------------------------------------------------------------------------------


def _queue_single(name: str, device: torch.device, *values: object) -> None:
    """Launch a kernel without tables."""
    stream = current_stream(device)
    packed = _packing(KERNELS[name])[0].pack(*(_address(value) for value in values))
    device_of(stream).launch(name, 1, stream.handle, packed)
    stream.hold(values)


def capture_scale(scale: Tensor, pair: Tensor) -> None:
    """:func:`fp16opt.kernels.decisions.capture_scale`."""
    _queue_single("capture_scale", scale.device, scale, pair)


def decide_clip(norm: Tensor, found_inf: Tensor | None, max_norm: float, only_finite: bool, results: Tensor) -> None:
    """:func:`fp16opt.kernels.decisions.decide_clip`; ``results``: float32, [2]."""
    _queue_single("decide_clip", norm.device, norm, found_inf, max_norm, only_finite, results, results.data_ptr() + 4)


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
    clean: Tensor | None = None
    skips: Tensor | int | None = trackers
    if settings is not None and trackers is not None:
        clean, skips = trackers, trackers.data_ptr() + 4
    _queue_single(
        "close_step",
        device,
        *(found_inf, last, skipped, scale, clean, skips, settings, flags, kept, 0 if kept is None else kept.numel()),
        *(memory, 0 if memory is None else memory.numel() // 4),
    )
    written = (last, skipped, scale, trackers, kept, memory)
    native.count_versions([tensor for tensor in written if tensor is not None])
