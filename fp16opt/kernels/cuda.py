"""The calls of the CUDA kernels: where their tables lie, and on which stream they work.

A kernel reads the addresses of its tensors from a table in the GPU's memory. The table stays there between calls;
where an address changed, one copy that waits for nothing brings it up to date. Nothing in this file waits for the GPU,
but for one short copy of its own where a CUDA graph is captured: a graph is replayed with the addresses of its capture,
so it gets a table that nothing changes any more.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import cuda_devices, native
from .calls import Call, CallCache
from .changed import Marks
from .cuda_driver import Card
from .cuda_rows import CHUNK, ENTRY, FOUND, KERNELS, LISTS, NUMBERS, Kernel, marking, of_kind
from .pieces import WHOLE
from .reference import SAMPLED_WHOLE, sample_stride

Outcome = tuple[Tensor | None, Tensor | None]
"""(float32 []: whether the last step was skipped; float64 []: how many were)."""
ScaleMemory = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(scale; trackers; settings): the tensors that a loss scaler's ``update`` reads and writes."""

_MOST_LISTS = 8
"""For which an entry of a table has dtypes."""
OF_DTYPES = {
    (dtype, master, dtype): f"{name}_{kept}"
    for name, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16))
    for kept, master in (("full", torch.float32), ("32", torch.int16), ("24", torch.int8))
}
"""Which of the kernels' kinds lists are, by the dtypes of gradients, masters and models."""


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


def trusted(name: str, device: torch.device) -> bool:
    """Whether a kernel may serve ``device``, which the CUDA kernels serve. Its first use there proves it.

    Raises:
        RuntimeError: it was not proved yet, and a CUDA graph is being captured.
    """
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index or 0
    verdicts = cuda_devices.served(index).verdicts
    return verdicts is None or verdicts.trusts(name, lambda: Stream(device).captures)


def trusts(call: Call, marks: Marks | None) -> bool:
    """Whether the kernel of a call may serve: as :func:`trusted`."""
    return trusted(kernel_of(call, marks)[0].name, call.plan.device)


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

    def hold(self, tensors: Sequence[object], of_any: bool = False) -> None:
        """Keep the memory of tensors among ``tensors`` from being used again before the work queued here is done.

        Memory is given back in the order of the stream that it was allocated on, as a rule the device's default one:
        work there holds nothing, but ``of_any``, where another one may have been the current one.
        Only what is the library's own or may be: tables, numbers, statistics. Tensors in lists are the callers', who
        see to them when they use them on several streams, as with torch's own operations.
        """
        if self._holds or (of_any and not self.captures):
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    tensor.record_stream(self._stream)

    def staging(self, size: int) -> Tensor:
        """Page-locked host memory. torch keeps it until copies from it are done."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


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


_WITH_KINDS = frozenset(name for name in KERNELS if of_kind(name, "half_full") in KERNELS)
"""Kernels that have others beside them for lists of one kind of masters."""


class Table:
    """Lists of tensors as kernels read them: in front what may change between calls, then what does not.

    The GPU's copy goes on behind it: what a call's blocks found their chunks to hold.

    Args:
        call: the lists.
        more: bytes in front for a subclass.

    Attributes:
        host: the bytes.
        address: of these.
        memory: the address of the GPU's copy; 0 before there is one.
        more: where the bytes for a subclass begin.
        entries: where the tensors' rows begin.
        chunk_count: how many chunks the lists are cut into.
        length: of the lists.
        lists: what kernels are told of it.
        name: of the kernel that serves them, without marks.
    """

    def __init__(self, call: Call, more: int = 0) -> None:
        plan = call.plan
        width, count = plan.operation.width, len(plan.direct)
        if width > _MOST_LISTS:
            raise ValueError(
                f"{plan.operation.name}: {width} lists, the CUDA kernels take up to {_MOST_LISTS}. Widen Entry."
            )
        self._which, self._places = range(width), None if count == plan.count else plan.direct
        self._rows = plan.direct
        self._flags: object = None
        self._packed = bytes(count)
        self.name = _name_for(call)
        chunks: list[bytes] = []
        entries: list[bytes] = []
        filled = 0
        for entry, row in enumerate(self._rows):
            tensors = call.row(row)[:width]
            numel, codes = tensors[0].numel(), bytes(native.CODES[tensor.dtype] for tensor in tensors)
            stride = 0 if numel <= SAMPLED_WHOLE else sample_stride(numel)
            entries.append(ENTRY.packer.pack(row, len(chunks), stride, codes))
            filled += numel > 0
            piece = WHOLE if plan.pieces is None else plan.pieces[row]
            for start, count_here, index, block in piece.chunks(numel):
                chunks.append(CHUNK.packer.pack(start, entry, count_here, index & 0xFFFFFFFF, block))
        entries.append(ENTRY.packer.pack(0, len(chunks), 0, b""))
        self.length, self.chunk_count, self._counts = plan.count, len(chunks), (len(chunks), count, filled)
        fixed = [b"".join(chunks), b"".join(entries)]
        found = len(chunks) * max(FOUND.packer.size, NUMBERS.packer.size)
        sizes = [8 * width * count, count, more, *map(len, fixed), 4 * (count + 1), found]
        *starts, self._size = itertools.accumulate(((size + 15) // 16 * 16 for size in sizes), initial=0)
        self._add, self.more, self._changing, self.entries, _, self._copied = starts[1:]
        self._told = (*starts[:2], *starts[3:])
        self.host = ctypes.create_string_buffer(self._copied)
        self.address, self.memory = ctypes.addressof(self.host), 0
        self._view = memoryview(self.host).cast("B")
        self._front: Tensor | None = None
        self._stream: Stream | None = None
        self.put(self._changing, fixed[0])
        self.put(self.entries, fixed[1])

    def put(self, at: int, content: bytes) -> None:
        """Write ``content``."""
        self._view[at : at + len(content)] = content

    def point(self, call: Call, flags: bool | Sequence[bool] | None, *given: Any) -> bool:
        """Take in addresses and flags, and in a subclass what else is given: whether bytes changed."""
        moved = native.put_addresses(call, self._which, self._places, self.address, 8)
        if flags != self._flags:
            one = flags is None or isinstance(flags, bool)
            self._flags = flags if one else list(flags)  # type: ignore[arg-type]
            packed = bytes([bool(flags if one else flags[row]) for row in self._rows])  # type: ignore[index]
            moved = packed != self._packed or moved
            self._packed = packed
            self.put(self._add, packed)
        return moved

    def bring(self, call: Call, stream: Stream, *given: Any) -> None:
        """Take in what changed, by :meth:`point`, and have it in the GPU's memory, in the order of ``stream``."""
        changed = self.point(call, *given)
        if stream.captures:
            self._keep(stream, call.owner)
        elif changed or self._stream is None or self._stream.handle != stream.handle:
            self._copy(changed, call.plan.device, stream)

    def _copy(self, changed: bool, device: torch.device, stream: Stream) -> None:
        if self._front is None:
            with torch.inference_mode(False):  # steps of any mode write to it
                memory = torch.empty(self._size, dtype=torch.uint8, device=device)
                self._front, to = memory[: self._changing], memory[: self._copied]
            self._settle(memory.data_ptr())
            changed = True
        else:
            to = self._front
        is_elsewhere = self._stream is not None and self._stream.handle != stream.handle
        if self._stream is not None and is_elsewhere:
            stream.wait_for(self._stream)  # the kernel before this one may still read it there
        stream.hold((to,), of_any=is_elsewhere)
        self._stream = stream
        if changed:
            size = to.numel()
            staging = stream.staging(size)
            ctypes.memmove(staging.data_ptr(), self.address, size)
            to.copy_(staging, non_blocking=True)

    def _keep(self, stream: Stream, owner: CallCache | None) -> None:
        """Write the bytes to memory of their own, for the graph that is being captured.

        It stays as long as ``owner``: replays need the tensors and buffers of the call site, so they end with it. Where
        a call has no owner nothing tells when the graph is gone, and the memory is never given back. It is the driver's
        and not torch's. Torch would take it from the graph's own pool, whose memory is the graph's alone (with
        ``backend:cudaMallocAsync`` it is there only while the graph runs), or on another stream from the common one,
        where it would be lent again at once while a last replay may still read it; the driver's is freed when the
        device is done.
        """
        device = device_of(stream)
        self._settle(device.keep(self.host.raw, self._size))
        if owner is not None:
            weakref.finalize(owner, device.give_back, self.memory).atexit = False  # a process's end frees all

    def _settle(self, memory: int) -> None:
        self.memory = memory
        self.lists = LISTS.packer.pack(*(memory + start for start in self._told), *self._counts)


Made = TypeVar("Made", bound=Table)


def table_of(call: Call, stream: Stream, make: Callable[[Call], Made], *given: Any) -> Made:
    """The table of a call, brought up to date on the device: the known one, or in a capture one of its own.

    Args:
        call: the lists.
        stream: on which they are worked on.
        make: makes a table.
        given: what it is to take in beside the addresses.
    """
    known, call.plan.compiled = call.plan.compiled, None  # where something is raised what arrived is not known
    table: Made = make(call) if stream.captures or known is None else known
    table.bring(call, stream, *given)
    call.plan.compiled = known if stream.captures else table
    return table


# -- operations --------------------------------------------------------------------------------------------------------


def queue(kernel: Kernel, stream: Stream, values: Sequence[object], table: Table | None = None) -> None:
    """Launch one kernel, over the lists of ``table`` if it has any; ``values`` are the fields of its functor."""
    given: list[Any] = [v.data_ptr() if isinstance(v, Tensor) else 0 if v is None else v for v in values]
    blocks: int = 1
    lists: tuple[bytes, ...] = ()
    if table is not None:
        blocks, lists = min(max(kernel.least, table.chunk_count), kernel.most), (table.lists,)
        if kernel.counted is not None:
            given.insert(kernel.counted, table.length)
    if blocks > 0:
        functor = kernel.functor.packer.pack(*given) or b"\0"
        device_of(stream).launch(kernel.name, blocks, stream.handle, functor, *lists)
    stream.hold(values)


def _name_for(call: Call) -> str:
    """The kernel without marks for a call's lists: one for the kind that all of them are, if there is one."""
    operation = call.operation
    if operation.cuda not in _WITH_KINDS or operation.lists[-1] != "models":
        return operation.cuda
    lists = (0, 1, len(operation.lists) - 1)
    found = {tuple(call.row(row)[which].dtype for which in lists) for row in call.plan.direct}
    kind = OF_DTYPES.get(found.pop()) if len(found) == 1 else None  # type: ignore[arg-type]
    return operation.cuda if kind is None else of_kind(operation.cuda, kind)


def kernel_of(call: Call, marks: Marks | None) -> tuple[Kernel, tuple[Tensor | int, ...]]:
    """The kernel of a call, and the first fields of its functor: those of one that marks what it changes."""
    name, table = call.operation.cuda, call.plan.compiled
    if marks is not None and isinstance(marks[0], Tensor):
        return KERNELS[marking(name)], marks
    if name in _WITH_KINDS:  # else operations may share the table of a site
        name = table.name if isinstance(table, Table) else _name_for(call)
    return KERNELS[name], ()


def launch(
    call: Call,
    values: Sequence[Any],
    *,
    written: Sequence[Tensor] = (),
    marks: Marks | None = None,
    flags: bool | Sequence[bool] | None = None,
    writes: bool = True,
) -> None:
    """:func:`fp16opt.kernels.native.launch` for the CUDA kernels, which have the flags in their table."""
    stream = Stream(call.plan.device)
    kernel, first = kernel_of(call, marks)
    table = table_of(call, stream, Table, flags)
    queue(kernel, stream, (*first, *values), table)
    native.count_writes(call, written, lists=writes)


# -- decisions ---------------------------------------------------------------------------------------------------------


def capture_scale(scale: Tensor, pair: Tensor) -> None:
    """:func:`fp16opt.kernels.backends.capture_scale`."""
    queue(KERNELS["capture_scale"], Stream(scale.device), (scale, pair))


def decide_clip(
    norm: Tensor, found_inf: Tensor | None, max_norm: float, only_finite: bool, single: Tensor, factor: Tensor
) -> None:
    """:func:`fp16opt.kernels.backends.decide_clip`, into ``single`` and ``factor``."""
    queue(KERNELS["decide_clip"], Stream(norm.device), (norm, found_inf, max_norm, only_finite, single, factor))


def close_step(
    device: torch.device,
    memory: Tensor | None,
    flags: Tensor | None,
    kept: Tensor | None,
    found_inf: Tensor | None,
    outcome: Outcome,
    scaler: ScaleMemory,
) -> None:
    """:func:`fp16opt.kernels.backends.close_step`, with None in place of what is not asked for."""
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
    queue(KERNELS["close_step"], Stream(device), values)
    written = (last, skipped, scale, trackers, kept, memory)
    native.count_versions([tensor for tensor in written if tensor is not None])
