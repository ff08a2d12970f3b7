"""What is done to memory on the streams of a pretended card, recorded, and judged by torch's own race detector.

Every call goes the library's whole way to the pretended driver of cards.py, which runs emulated kernels. Recorded are
torch's operations, with what their schemas say of their arguments; kernels, with what lies behind each address that
they are given; copies, events, waits, and where the host waits; and when memory is given back: it is used again by the
next work on the stream that it was allocated on, as torch's allocator allows. What this can't show is how a card and
its driver keep the order that they are asked for.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cards
import pretended
import pytest
import replaying
import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import ArgumentHandler, EventHandler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fp16opt.kernels import cuda, cuda_driver
from fp16opt.kernels.cuda_rows import ENTRY, KERNELS, LISTS, MEMBER, Blocks, Kernel
from fp16opt.kernels.formulas import FORMULAS

DEFAULT, HOST = 0, 1  # streams; the host is one that all work waits for when it is queued
_FIRST = 16
_CHECKED = 2  # launches of each kernel whose writes are compared with what is said of them here

# Of kernels without a step: the fields that they write, and which of their lists: w.
_WRITES = {
    "unscale": ("nonfinite sumsq norm found_inf", "rw"),
    "check": ("nonfinite sumsq norm found_inf", "r"),
    "unscale_clipped": ("", "rw"),
    "scale": ("", "w"),
    "lerp": ("", "wr"),
    "axpby": ("found_inf", "rrw"),
    "cast": ("bits overflow", "rw"),
    "sample": ("samples", "r"),
    "l2norm": ("sumsq norm norms", "r"),
    "measure": ("numbers", "r"),
    "compare": ("numbers", "rr"),
    "split": ("bits overflow", "rww"),
    "join": ("", "rrw"),
    "take": ("taken", "wr"),
    "renew": ("taken", "rw"),
    "capture_scale": ("pair", ""),
    "decide_clip": ("single factor", ""),
    "close_step": ("c.last c.skipped c.scale c.clean c.skips c.kept c.cleared", ""),
}
_STATES = {"adam8": 2, "sgd8": 1} | {
    name: count for formula in FORMULAS.values() for count, name in enumerate(formula.kernels, formula.least())
}


class Block:
    """Memory that was allocated at once.

    Attributes:
        key: of its own, also where the address was another's before.
        start, size: in bytes.
        stream: that it was allocated on; HOST for page-locked memory.
        held: streams whose work it waits for when it is given back.
    """

    def __init__(self, key: int, start: int, size: int, stream: int, storage: StorageWeakRef | None) -> None:
        self.key, self.start, self.size, self.stream, self._storage = key, start, size, stream, storage
        self.held: set[int] = set()

    def is_gone(self) -> bool:
        return self._storage is not None and self._storage.expired()

    def content(self) -> bytes:
        return ctypes.string_at(self.start, self.size)


class _Arguments(ArgumentHandler):
    """What an operation reads and writes, of a trace's blocks."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        block = self._trace.block_of(value, made=is_output) if isinstance(value, Tensor) else None
        if block is None or (metadata_only and not is_write):
            return
        (self.dataptrs_written if is_write else self.dataptrs_read).add(block.key)


class Trace(TorchDispatchMode):
    """Records what happens inside, on all streams.

    Attributes:
        races: what the detector found, in words.
        launches: of kernels, by name.
        host: what is done on this stream is done by the host.
        current: the stream that work goes to.
        replays: whether a CUDA graph is being replayed: what was captured on any stream is work of the current one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.launches: Counter[str] = Counter()
        self.host = Stream(self, HOST)
        self.current, self.replays = DEFAULT, False
        self._handler, self._numbers = EventHandler(), itertools.count(_FIRST)
        self._handler._handle_stream_creation(HOST)
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._given_back: dict[int, list[tuple[Block, int]]] = {}

    # -- memory

    def block_of(self, tensor: Tensor, made: bool = False) -> Block | None:
        """Where a tensor lies; ``made``: it is new, of the current stream."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # of another layout: its parts are seen when they are used
            return None
        if not storage.nbytes():
            return None
        found = self._blocks.get(storage.data_ptr())
        if found is not None and found.is_gone():
            self.give_back(found)
            found = None
        if found is None:
            stream = self.current if made else DEFAULT
            found = self.add(storage.data_ptr(), storage.nbytes(), stream, StorageWeakRef(storage))
        return found

    def blocks(self) -> list[Block]:
        """All memory that is in use."""
        self._sweep()
        return list(self._blocks.values())

    def add(self, start: int, size: int, stream: int, storage: StorageWeakRef | None = None) -> Block:
        """Note memory that was allocated."""
        block = Block(next(self._numbers), start, size, stream, storage)
        self._blocks[start] = block
        bisect.insort(self._starts, start)
        self._handler._handle_memory_allocation(block.key)
        return block

    def pinned(self, memory: Tensor) -> Tensor:
        """Take a tensor for page-locked memory, which the host writes now."""
        block = self.block_of(memory)
        assert block is not None
        block.stream = HOST
        self.work(HOST, set(), {block.key}, "a write of the host")
        return memory

    def give_back(self, block: Block) -> None:
        """Note that memory is free: for the stream that it was allocated on, once those that hold it are done."""
        del self._blocks[block.start]
        self._starts.remove(block.start)
        if block.stream == HOST:
            return
        again = next(self._numbers)  # a stream of its own: others need not wait
        for stream in block.held:
            self.wait(again, stream)
        self._given_back.setdefault(block.stream, []).append((block, again))

    def _sweep(self) -> None:
        for block in [block for block in self._blocks.values() if block.is_gone()]:
            self.give_back(block)

    def at(self, address: int) -> Block:
        """The memory that a kernel is given the address of."""
        place = bisect.bisect_right(self._starts, address) - 1
        block = self._blocks[self._starts[max(place, 0)]]
        assert block.start <= address < block.start + block.size, f"no block holds the memory at {address:#x}"
        return block

    # -- order

    def wait(self, stream: int, other: int) -> None:
        """``stream`` waits for what the other was given until now."""
        event = next(self._numbers)
        self.record(event, other)
        self._handler._handle_event_wait(event, stream)

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream."""
        self._handler._handle_event_record(event, stream)

    def wait_for_event(self, event: int, stream: int) -> None:
        """A stream waits for an event."""
        self._handler._handle_event_wait(event, stream)

    def sync(self, stream: int) -> None:
        """The host waits for a stream."""
        self.wait(HOST, stream)

    def sync_all(self) -> None:
        """The host waits for the card."""
        for stream in list(self._handler.syncs.current_sync_states):
            self.wait(HOST, stream)

    def work(self, stream: int, reads: set[int], writes: set[int], name: str) -> None:
        """Note work that is queued on a stream."""
        self._sweep()
        for block, again in self._given_back.pop(stream, ()):
            self.wait(again, stream)
            self._judge(again, set(), {block.key}, f"memory is used again by what {name} may be the first of")
        if stream != HOST:
            self.wait(stream, HOST)
        self._judge(stream, reads - writes, writes, name)

    def _judge(self, stream: int, reads: set[int], writes: set[int], name: str) -> None:
        aliases: dict[int, list[str]] = {key: [] for key in reads | writes}
        for error in self._handler._handle_kernel_launch(stream, reads, writes, set(), name, aliases):
            before = error.previous_access  # type: ignore[attr-defined]
            self.races.append(f"{name} on stream {stream} does not wait for {before.operator} on {before.stream}")

    # -- what is recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, schema, kwargs = str(func).split(".")[1], func._schema, kwargs or {}
        found, is_factory = _Arguments(self), name.startswith("new_") or name.endswith("_like")
        found.parse_inputs(schema, args, kwargs, is_factory=is_factory)
        outputs = func(*args, **kwargs)
        if name == "empty":  # no work
            self.block_of(outputs, made=True)
            return outputs
        found.parse_outputs(schema, outputs, is_factory=is_factory)
        if found.dataptrs_read or found.dataptrs_written:
            self.work(self.current, found.dataptrs_read, found.dataptrs_written, name)
        if name in pretended.LOOKS and name != "lift_fresh":
            self.sync(self.current)
        return outputs

    def kernel(self, name: str, stream: int, arguments: Sequence[bytes], launch: Callable[[], None]) -> None:
        """Note the launch of a kernel."""
        assert self.replays or stream == self.current, f"{name} is on stream {stream}, and not on {self.current}"
        self._sweep()
        reads, writes = set[Block](), set[Block]()
        for is_written, address in _addresses(KERNELS[name], arguments):
            (writes if is_written else reads).add(self.at(address))
        self.launches[name] += 1
        others = [block for block in self.blocks() if block not in writes]
        is_checked = self.launches[name] <= _CHECKED
        before = [block.content() for block in others] if is_checked else []
        launch()
        if is_checked:
            assert [block.content() for block in others] == before, f"{name} writes more than is said of it"
        keys = ({block.key for block in blocks} for blocks in (reads, writes))
        self.work(self.current, *keys, name)

    def driver(self, name: str, given: Sequence[Any]) -> None:
        """Note a call of CUDA's driver."""
        self._sweep()
        if name == "cuMemAlloc_v2":
            self.add(given[0]._obj.value, given[1], DEFAULT)
        elif name == "cuMemcpyHtoDAsync_v2":
            address, _, _, stream = given
            self.work(stream.value, set(), {self.at(address.value).key}, "a copy of the driver")
        elif name == "cuStreamSynchronize":
            self.sync(given[0].value)
        elif name == "cuMemFree_v2":
            self.sync_all()
            self.give_back(self._blocks[given[0]])

    # -- streams

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        before, self.current = self.current, stream.cuda_stream
        yield
        self.current = before


def _addresses(kernel: Kernel, arguments: Sequence[bytes]) -> Iterator[tuple[bool, int]]:
    """(whether it is written, address) of all memory that a kernel reaches."""
    name, functor = kernel.name.removesuffix("_marking"), kernel.functor
    if name.startswith(("adam8_", "sgd8_")):  # for one kind of masters
        name = name.partition("_")[0]
    fields = dict(zip(functor.fields, functor.packer.unpack(arguments[0][: functor.packer.size]), strict=True))
    steps = kernel.blocks is Blocks.STEPPING
    if steps:
        width = 2 + _STATES[name] + (fields["model_list"] >= 0) + name.endswith("8")
        written, lists = {"bits", "overflow"}, "r" + "w" * (width - 1)
    else:
        words, lists = _WRITES[name]
        written = set(words.split())
    for (field, value), code in zip(fields.items(), functor._codes, strict=True):
        if code == "P" and value:
            yield field in written, value
    if len(arguments) == 1:
        return
    pointers, _, _, table, *_, entries, _ = LISTS.packer.unpack(arguments[1])
    yield True, pointers  # which begin the table's memory, and with it what blocks have found
    firsts = [
        ENTRY.packer.unpack_from(_memory(table, (entries + 1) * ENTRY.packer.size), 32 * k)[1]
        for k in range(entries + 1)
    ]
    given = (ctypes.c_uint64 * (len(lists) * entries)).from_address(pointers)
    for k, letter in enumerate(lists):
        for entry in range(entries):
            if firsts[entry] < firsts[entry + 1]:
                yield letter == "w", given[k * entries + entry]
    if not steps:
        return
    size, group = MEMBER.packer.size, kernel.group.packer
    for k in range(entries):
        step, _, of = MEMBER.packer.unpack(_memory(fields["members"] + k * size, size))
        if step:
            yield True, step
        rate = group.unpack(_memory(fields["groups"] + of * group.size, group.size))[1]
        if rate:
            yield False, rate


def _memory(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


class Stream:
    """``torch.cuda.Stream``, of a trace."""

    device_index = 0

    def __init__(self, trace: Trace, handle: int) -> None:
        self._trace, self.cuda_stream = trace, handle

    def wait_stream(self, other: Stream) -> None:
        self._trace.wait(self.cuda_stream, other.cuda_stream)


class Event:
    """``torch.cuda.Event``, of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._number = trace, next(trace._numbers)

    def record(self) -> None:
        self._trace.record(self._number, self._trace.current)

    def query(self) -> bool:
        """It is there: the host, which asked, goes on behind it."""
        self._trace.wait_for_event(self._number, HOST)
        return True


class Graph:
    """``torch.cuda.CUDAGraph``, of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.recorded: replaying.Graph

    def replay(self) -> None:
        self._trace.replays = True
        self.recorded.replay()
        self._trace.replays = False


class _NoLines:
    """What the sanitizer asks of `traceback` for each access: lines that no race is told with here."""

    walk_stack = staticmethod(traceback.walk_stack)

    class StackSummary(traceback.StackSummary):
        @classmethod
        def extract(cls, frames: Any, **options: Any) -> traceback.StackSummary:
            return traceback.StackSummary()


@contextlib.contextmanager
def traced(libraries: Path, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Record what the library does inside, as on a card.

    Args:
        libraries: the pretended driver's, as :func:`cards.build` makes them.
        emulated: the emulated kernels.
    """
    trace = Trace()
    with monkeypatch.context() as patch:
        patch.setattr(_sanitizer, "traceback", _NoLines)
        driver = cards.pretend(libraries, patch)
        cards.serve_host_tensors(patch)
        driver.run(emulated.paths)
        driver.context(0)
        default, real_launch, real_call = Stream(trace, DEFAULT), cuda_driver.Card.launch, cuda_driver.Driver.call
        known = {DEFAULT: default, HOST: trace.host}

        def new_stream(device: object = None) -> Stream:
            made = Stream(trace, next(trace._numbers))
            return known.setdefault(made.cuda_stream, made)

        def launch(card: Any, name: str, blocks: int, stream: int, *arguments: bytes) -> None:
            trace.kernel(name, stream, arguments, lambda: real_launch(card, name, blocks, stream, *arguments))

        def call(driver: Any, name: str, *given: Any) -> None:
            if name == "cuMemFree_v2":
                trace.driver(name, given)
            real_call(driver, name, *given)
            if name != "cuMemFree_v2":
                trace.driver(name, given)

        def staging(stream: Any, size: int) -> Tensor:
            return trace.pinned(torch.empty(size, dtype=torch.uint8))

        @contextlib.contextmanager
        def graph(made: Graph) -> Iterator[None]:
            kept = [(block, block.content()) for block in trace.blocks()]
            with replaying.record(monkeypatch) as made.recorded:
                yield
            there = set(trace.blocks())
            for block, content in kept:  # a capture does nothing
                if block in there:
                    ctypes.memmove(block.start, content, block.size)

        def hold(tensor: Tensor, stream: Any) -> None:
            block = trace.block_of(tensor)
            if block is not None:
                block.held.add(stream.cuda_stream)

        faked: dict[str, Any] = {
            "Stream": new_stream,
            "Event": lambda: Event(trace),
            "CUDAGraph": lambda: Graph(trace),
            "graph": graph,
            "stream": trace.on,
            "current_stream": lambda device=None: known[trace.current],
            "default_stream": lambda device=None: default,
            "is_current_stream_capturing": lambda: cuda.Stream.capturing,  # type: ignore[attr-defined]
            "synchronize": lambda device=None: trace.sync_all(),
            "device": lambda device: contextlib.nullcontext(),
            "set_sync_debug_mode": lambda mode: None,
            "get_sync_debug_mode": lambda: 0,
            "_sleep": lambda cycles: None,
        }
        for name, value in faked.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(cuda.Stream, "capturing", False, raising=False)
        patch.setattr(cuda.Stream, "staging", staging)
        patch.setattr(cuda, "_default_handle", lambda index: DEFAULT)
        patch.setattr(cuda_driver.Card, "launch", launch)
        patch.setattr(cuda_driver.Driver, "call", call)
        patch.setattr(Tensor, "record_stream", hold)
        patch.setattr(pretended.who_waits(), "is_host", lambda device: False)
        with trace:
            try:
                yield trace
            finally:
                driver.run([])


class Where:
    """What :class:`fp16opt.tools.prove.trials.Trials` runs on: a traced card."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.device, self._make = torch.device("cpu"), make
        self.traces: list[Trace] = []

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with self._make() as trace:
            self.traces.append(trace)
            yield
