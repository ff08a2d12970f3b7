"""The calls of the CUDA kernels: where their tables lie, and on which stream they work.

A kernel reads the addresses of its tensors from a table in the GPU's memory. The table stays there between calls;
where an address changed, one copy that waits for nothing brings it up to date. Nothing in this file waits for the GPU,
but for one short copy of its own where a CUDA graph is captured: a graph is replayed with the addresses of its capture,
so it gets a table that nothing changes any more.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import cuda_devices, native
from .calls import Call, PointerTables
from .cuda_driver import Card
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


@functools.cache
def _default_handle(index: int) -> int:
    """The address of a device's default stream, which stays what it is."""
    return int(torch.cuda.default_stream(torch.device("cuda", index)).cuda_stream)


class Stream:
    """A device's current stream, as the kernels and torch's allocator know it.

    Attributes:
        handle: its address.
        index: its device's number.
        captures: whether a CUDA graph is being captured on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self.handle: int = self._stream.cuda_stream
        self.index: int = self._stream.device_index
        if self.index == torch.cuda.current_device():  # as a rule; the guard below costs more than the question
            self.captures = torch.cuda.is_current_stream_capturing()
        else:
            with torch.cuda.device(self.index):
                self.captures = torch.cuda.is_current_stream_capturing()
        self._holds = self.handle != _default_handle(self.index) and not self.captures

    def wait_for(self, other: Stream) -> None:
        """Have later work here wait for what the other stream has been given until now. No sync."""
        self._stream.wait_stream(other._stream)

    def hold(self, tensors: Sequence[object]) -> None:
        """Keep the memory of tensors among ``tensors`` from being used again before the work queued here is done.

        Memory is given back in the order of the stream that it was allocated on, as a rule the device's default one.
        Only what is the library's own or may be: tables, numbers, statistics. Tensors in lists are the callers', who
        see to them when they use them on several streams, as with torch's own operations.
        """
        if self._holds:
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    tensor.record_stream(self._stream)

    def staging(self, size: int) -> Tensor:
        """Page-locked host memory. torch keeps it until copies from it are done."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def current_stream(device: torch.device) -> Stream:
    """The stream that work on ``device`` is given to now."""
    return Stream(device)


def device_of(stream: Stream) -> Card:
    """What launches kernels on the stream's device.

    Raises:
        RuntimeError: nothing does; checks before a call see to it that this does not happen.
    """
    device = cuda_devices.kernels_on(stream.index)
    if device is None:
        raise RuntimeError(f"the CUDA kernels do not serve cuda:{stream.index}. See python -m fp16opt.")
    return device


# -- tables ------------------------------------------------------------------------------------------------------------


class Copied:
    """Bytes in host memory, and the GPU's copy of them.

    Args:
        copied: how many.
        size: of the GPU's memory: it may go on behind the copy.

    Attributes:
        host: the bytes.
        address: of these.
        memory: the address of the copy; 0 before there is one.
        point: takes a call's values in: from where to where bytes changed, or None.
    """

    point: Callable[..., tuple[int, int] | None]

    def __init__(self, copied: int, size: int) -> None:
        self.host = ctypes.create_string_buffer(max(1, copied))
        self.address, self.memory = ctypes.addressof(self.host), 0
        self._copied, self._size = copied, size
        self._view = memoryview(self.host).cast("B")
        self._tensor: Tensor | None = None
        self._stream: Stream | None = None

    def put(self, at: int, content: bytes) -> None:
        """Write ``content``."""
        self._view[at : at + len(content)] = content

    def bring(self, call: Call, stream: Stream, *given: Any) -> None:
        """Take in what changed, by :meth:`point`, and have it in the GPU's memory, in the order of ``stream``."""
        try:
            changed = self.point(call, *given)
            if stream.captures:
                self._keep(stream, call.owner)
            elif changed is not None or self._stream is None or self._stream.handle != stream.handle:
                self._copy(changed, call.plan.device, stream)
        except BaseException:
            call.plan.compiled = None  # what of it arrived is not known
            raise

    def _copy(self, changed: tuple[int, int] | None, device: torch.device, stream: Stream) -> None:
        if self._tensor is None:
            with torch.inference_mode(False):  # steps of any mode write to it
                self._tensor = torch.empty(self._size, dtype=torch.uint8, device=device)
            self._settle(self._tensor.data_ptr())
            changed = (0, self._copied)
        if self._stream is not None and self._stream.handle != stream.handle:
            stream.wait_for(self._stream)  # the kernel before this one may still read it there
        stream.hold((self._tensor,))
        self._stream = stream
        if changed is not None:
            begin, end = changed
            staging = stream.staging(end - begin)
            ctypes.memmove(staging.data_ptr(), self.address + begin, end - begin)
            self._tensor[begin:end].copy_(staging, non_blocking=True)

    def _keep(self, stream: Stream, owner: PointerTables | None) -> None:
        """Write the bytes to memory of their own, for the graph that is being captured.

        It stays as long as ``owner``: replays need the tensors and buffers of whoever made the call, so they end with
        it. Where a call has no owner nothing tells when the graph is gone, and the memory is never given back. It is
        the driver's and not torch's. Torch would take it from the graph's own pool, whose memory is the graph's alone
        (with ``backend:cudaMallocAsync`` it is there only while the graph runs), or on another stream from the common
        one, where it would be lent again at once while a last replay may still read it; the driver's is freed when
        the device is done.
        """
        device = device_of(stream)
        self._settle(device.keep(self.host.raw[: self._copied], self._size))
        if owner is not None:
            weakref.finalize(owner, device.give_back, self.memory).atexit = False  # a process's end frees all

    def _settle(self, memory: int) -> None:
        self.memory = memory


def _behind(start: int, count: int, size: int) -> int:
    return (start + count * size + 15) // 16 * 16


class Table(Copied):
    """Lists of tensors as kernels read them: first what changes with the addresses, then what does not.

    Behind these, memory that a kernel's blocks share: counters, which begin at 0, and what chunks were found to hold.

    Attributes:
        chunk_count: how many chunks the lists are cut into.
        entries: where the tensors' rows of it begin.
        length: of the lists.
        lists: what kernels are told of it.
        numbers: those of a step over these lists, or None.
    """

    numbers: Copied | None = None

    def __init__(self, call: Call) -> None:
        plan = call.plan
        self._places = None if len(plan.direct) == len(plan.rows) else plan.direct
        self._rows = [plan.rows[place] for place in plan.direct]
        self._flags: object = None
        self._packed = bytes(len(self._rows))
        width, count = plan.operation.tables, len(plan.direct)
        if width > _MOST_LISTS:
            raise ValueError(
                f"{plan.operation.name}: {width} lists, the CUDA kernels take up to {_MOST_LISTS}. Widen Entry."
            )
        self._which = range(width)
        columns = [call.column(which) for which in self._which]
        numels = [columns[0][place].numel() for place in plan.direct]
        codes = [[native.CODES[column[place].dtype] for column in columns] for place in plan.direct]
        chunks = [
            CHUNK.packer.pack(start, entry, min(numel - start, CHUNK_ELEMENTS))
            for entry, numel in enumerate(numels)
            for start in range(0, numel, CHUNK_ELEMENTS)
        ]
        self.length, self.chunk_count, self._count = plan.count, len(chunks), count
        self._filled = sum(numel > 0 for numel in numels)
        self._add = _behind(0, width * count, 8)
        self._chunks = _behind(self._add, count, 1)
        self.entries = _behind(self._chunks, len(chunks), CHUNK.packer.size)
        self._counters = _behind(self.entries, count + 1, ENTRY.packer.size)
        self._partial = _behind(self._counters, count + 1, 4)
        found = max(FOUND.packer.size, NUMBERS.packer.size)
        super().__init__(self._partial, _behind(self._partial, len(chunks), found))
        self.put(self._chunks, b"".join(chunks))
        self.put(self.entries, b"".join(self._packed_entries(numels, codes)))

    def _packed_entries(self, numels: list[int], codes: list[list[int]]) -> list[bytes]:
        pack, first, packed = ENTRY.packer.pack, 0, []
        for row, numel, dtypes in zip(self._rows, numels, codes, strict=True):
            stride = 0 if numel <= SAMPLED_WHOLE else sample_stride(numel)
            packed.append(pack(row, first, stride, bytes(dtypes)))
            first += -(-numel // CHUNK_ELEMENTS)
        return [*packed, pack(0, first, 0, b"")]

    def point(self, call: Call, flags: bool | Sequence[bool] | None) -> tuple[int, int] | None:
        """Take in addresses and flags: from where to where bytes changed, or None."""
        moved = native.put_addresses(call, self._which, self._places, self.address, 8)
        if flags != self._flags:
            one = flags is None or isinstance(flags, bool)
            self._flags = flags if one else list(flags)  # type: ignore[arg-type]
            packed = bytes([bool(flags if one else flags[row]) for row in self._rows])  # type: ignore[index]
            moved = packed != self._packed or moved
            self._packed = packed
            self.put(self._add, packed)
        return (0, self._chunks) if moved else None

    def _settle(self, memory: int) -> None:
        super()._settle(memory)
        offsets = (0, self._add, self._chunks, self.entries, self._partial, self._counters)
        self.lists = LISTS.packer.pack(*(memory + at for at in offsets), self.chunk_count, self._count, self._filled)


def table_of(call: Call, stream: Stream, flags: bool | Sequence[bool] | None) -> Table:
    """The table of a call, brought up to date on the device: the known one, or in a capture one of its own."""
    table = call.plan.compiled
    if stream.captures or not isinstance(table, Table):
        table = Table(call)
    table.bring(call, stream, flags)
    if not stream.captures:
        call.plan.compiled = table
    return table


# -- operations --------------------------------------------------------------------------------------------------------


def queue(kernel: Kernel, stream: Stream, values: Sequence[object], table: Table | None = None) -> None:
    """Launch one kernel, over the lists of ``table`` if it has any; ``values`` are the fields of its functor."""
    given: list[Any] = [v.data_ptr() if isinstance(v, Tensor) else 0 if v is None else v for v in values]
    lists: tuple[bytes, ...] = ()
    blocks = 1
    if table is not None:
        lists, blocks = (table.lists,), table.chunk_count
        if kernel.blocks is Blocks.MAPPING:
            if blocks == 0:
                return
            blocks = min(blocks, _MOST_MAPPING_BLOCKS)
        if kernel.counted is not None:
            given.insert(kernel.counted, table.length)
    packed = kernel.functor.packer.pack(*given) or b"\0"
    device_of(stream).launch(kernel.name, max(1, blocks), stream.handle, packed, *lists)
    stream.hold(values)


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
    queue(KERNELS[function], stream, arguments, table_of(call, stream, flags))
    native.count_writes(call, results, lists=writes)


# -- decisions ---------------------------------------------------------------------------------------------------------


def capture_scale(scale: Tensor, pair: Tensor) -> None:
    """:func:`fp16opt.kernels.decisions.capture_scale`."""
    queue(KERNELS["capture_scale"], current_stream(scale.device), (scale, pair))


def decide_clip(norm: Tensor, found_inf: Tensor | None, max_norm: float, only_finite: bool, results: Tensor) -> None:
    """:func:`fp16opt.kernels.decisions.decide_clip`; ``results``: float32, [2]."""
    values = (norm, found_inf, max_norm, only_finite, results, results.data_ptr() + 4)
    queue(KERNELS["decide_clip"], current_stream(norm.device), values)


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
    sizes = [0 if tensor is None else tensor.numel() for tensor in (kept, memory)]
    decided = (found_inf, last, skipped, scale, clean, skips, settings)
    values = (*decided, flags, kept, sizes[0], memory, sizes[1] // 4)
    queue(KERNELS["close_step"], current_stream(device), values)
    written = (last, skipped, scale, trackers, kept, memory)
    native.count_versions([tensor for tensor in written if tensor is not None])
