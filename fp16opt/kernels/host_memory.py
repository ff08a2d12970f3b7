"""Page-locked host memory in a card's addresses, as tensors that look like the card's.

Pages are the process's own, locked and mapped by the driver: exactly what is asked, where torch's host allocator rounds
each block up to a power of two. A slab goes back when its last tensor is gone, after the card's work.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import cuda_devices
from .backends import backend
from .cuda_driver import Card, DriverError

ALIGNMENT = 128
"""Bytes at whose multiples tensors begin: a line that a card sends over the link."""
ROOT = Path("/")


class CannotLock(RuntimeError):
    """There is too little host memory, or no card that locks it."""

    @classmethod
    def asked(cls, size: int, more: str = "") -> CannotLock:
        """Of so many bytes.

        Args:
            more: what the system or the driver said.
        """
        return cls(
            f"{in_gib(size)} of page-locked host memory can't be had: {facts()}{more}. Free some, raise the limit, "
            "keep fewer bytes, or leave offload out."
        )


class Slab(mmap.mmap):
    """Pages that a card has locked, all zero. Every tensor of them holds a reference.

    They are no part of a forked child: a kernel that locks pages would copy all of them for it.

    Attributes:
        owner: the process.
        card: which has locked them.
        host_address, card_address: where the host and the card have them.
    """

    owner: int
    card: Card
    host_address: int
    card_address: int

    @classmethod
    def allocate(cls, size: int, card: Card) -> Slab:
        """Ask for ``size`` bytes, in whole pages; first touched by the current thread, so near its processor.

        Raises:
            CannotLock: there is too little memory, or the driver refuses.
        """
        free = available()
        if free is not None and size > free:
            raise CannotLock.asked(size)
        try:
            pages = cls(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CannotLock.asked(size, f": {error}") from None
        pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        pages.owner = os.getpid()
        pages.card, pages.host_address = card, ctypes.addressof(ctypes.c_char.from_buffer(pages))
        ctypes.memset(pages.host_address, 0, len(pages))
        try:
            pages.card_address = card.lock_pages(pages.host_address, len(pages))
        except DriverError as error:
            raise CannotLock.asked(size, f"; {error}") from None
        weakref.finalize(pages, _unlock, pages.owner, card, pages.host_address).atexit = False
        _SLABS[pages.card_address] = pages
        return pages


_SLABS: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()


def _unlock(owner: int, card: Card, address: int) -> None:
    """Before the pages go back to the system; a forked child has none."""
    if os.getpid() == owner:
        with contextlib.suppress(DriverError):
            card.unlock_pages(address)


# -- tensors -----------------------------------------------------------------------------------------------------------


class _Bytes:
    """Bytes of a slab as torch takes memory of a card from others. Torch keeps this object, and it keeps the slab."""

    def __init__(self, slab: Slab, at: int, size: int) -> None:
        self.slab, self.at, self.size = slab, at, size
        address = slab.card_address + at, False
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": address, "version": 2}


def shown(given: _Bytes, device: torch.device) -> Tensor:
    """uint8: the bytes as a tensor of ``device``."""
    return torch.as_tensor(given, device=device)


def laid_out(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor of the dtype and the layout of ``like`` in the storage of ``memory``, with a version of its own."""
    made = torch.empty(0, dtype=like.dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def _slab_of(tensor: Tensor) -> Slab | None:
    address = tensor.untyped_storage().data_ptr()
    for start, slab in list(_SLABS.items()):
        if start <= address < start + len(slab):
            return slab
    return None


def is_on_host(tensor: Tensor) -> bool:
    """Whether a plain tensor, whatever device it says, lies in such memory."""
    return _slab_of(tensor) is not None


def on_host(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU; of any other tensor a copy there. Waits for the card.

    Args:
        tensor: a plain one.

    Raises:
        RuntimeError: this is a forked child, which has none of this memory.
    """
    slab = _slab_of(tensor)
    if slab is None:
        return tensor.detach().cpu()
    if os.getpid() != slab.owner:
        raise RuntimeError(
            "a forked process has no part of the page-locked memory that this optimizer's state lies in. Use it in the "
            'process that wrapped it; start workers by "spawn" or "forkserver" if they train.'
        )
    slab.card.wait()
    storage = tensor.untyped_storage()
    begin = storage.data_ptr() - slab.card_address
    return laid_out(torch.frombuffer(slab, dtype=torch.uint8, count=storage.nbytes(), offset=begin), tensor)


class Room:
    """Where the tensors of one device are put: a slab for each dtype, and more where these are full.

    Args:
        device: a card that compiled kernels serve.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._card = card_of(device)
        self._open: dict[torch.dtype, tuple[Slab, int]] = {}

    def reserve(self, sizes: Mapping[torch.dtype, int]) -> None:
        """Ask for bytes ahead, each tensor's a multiple of :data:`ALIGNMENT`.

        Raises:
            CannotLock: there is too little memory for all of it, or the driver refuses.
        """
        free, asked = available(), sum(sizes.values())
        if free is not None and asked > free:
            raise CannotLock.asked(asked)
        for dtype, size in sizes.items():
            if size:
                self._open[dtype] = Slab.allocate(size, self._card), 0

    def memory(self, dtype: torch.dtype, size: int) -> Tensor:
        """uint8, of ``size`` bytes, for tensors of a dtype; zeros in new slabs.

        Raises:
            CannotLock: as :meth:`reserve`.
        """
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        slab, at = self._open.get(dtype, (None, 0))
        if slab is None or at + size > len(slab):
            slab, at = Slab.allocate(size, self._card), 0
        if at + rounded(size) >= len(slab):  # full: it lives as long as its tensors
            self._open.pop(dtype, None)
        else:
            self._open[dtype] = slab, at + rounded(size)
        return shown(_Bytes(slab, at, size), self.device)

    def like(self, like: Tensor) -> Tensor:
        """Zeros of the dtype and the strides of a dense tensor, which may be meta."""
        size = like.untyped_storage().nbytes()
        return laid_out(self.memory(like.dtype, size), like)


def rounded(size: int) -> int:
    """``size`` bytes up to the next multiple of :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


Wanted = tuple[Tensor, str, Tensor, torch.device]
"""Whose memory it is, its name there, a dense tensor, which may be meta, laid out as it is to be, and the device."""


class Host:
    """Memory of tensors by name: as long as a tensor lives, it keeps what it had. It may be of several cards."""

    def __init__(self) -> None:
        self._rooms: dict[torch.device, Room] = {}
        self._held: Any = WeakTensorKeyDictionary()

    def reserve(self, wanted: Sequence[Wanted]) -> None:
        """Ask for the memory of all at once.

        Raises:
            CannotLock: there is too little memory, or the driver refuses.
        """
        asked: dict[torch.device, dict[torch.dtype, int]] = {}
        for owner, name, like, device in wanted:
            if self._found(owner, name, like) is None:
                sizes = asked.setdefault(device, {})
                sizes[like.dtype] = sizes.get(like.dtype, 0) + rounded(like.untyped_storage().nbytes())
        for device, sizes in asked.items():
            self._room(device).reserve(sizes)
        for each in wanted:
            self.of(*each)

    def of(self, owner: Tensor, name: str, like: Tensor, device: torch.device) -> Tensor:
        """What there is under the name, if it is laid out alike, else new zeros. Raises as :meth:`reserve`."""
        found = self._found(owner, name, like)
        if found is None:
            found = self._room(device).like(like)
            self._held.setdefault(owner, {})[name] = found
        return found

    def _room(self, device: torch.device) -> Room:
        return self._rooms.setdefault(device, Room(device))

    def _found(self, owner: Tensor, name: str, like: Tensor) -> Tensor | None:
        found: Tensor | None = self._held.get(owner, {}).get(name)
        return found if found is not None and _layout(found) == _layout(like) else None


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


class Shelf:
    """Where all tensors of an optimizer go for a while: a slab for each card, kept for the next time.

    Attributes:
        is_taken: whether tensors are there.
    """

    def __init__(self) -> None:
        self.is_taken = False
        self._slabs: dict[torch.device, Slab] = {}

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Their storages move to the slabs; what shared one shares one. Waits for the cards.

        Raises:
            CannotLock: there is too little memory, or the driver refuses. Nothing has moved then.
        """
        found, sizes = _by_storage(tensors, lambda slab: slab is None), dict[torch.device, int]()
        for alike in found:
            device = alike[0].device
            sizes[device] = sizes.get(device, 0) + rounded(alike[0].untyped_storage().nbytes())
        for device, size in sizes.items():
            if device not in self._slabs or len(self._slabs[device]) < size:
                self._slabs.pop(device, None)  # before another one is asked for
                self._slabs[device] = Slab.allocate(size, card_of(device))
        self.is_taken = True
        at = dict.fromkeys(self._slabs, 0)
        for alike in found:
            device, size = alike[0].device, alike[0].untyped_storage().nbytes()
            memory = shown(_Bytes(self._slabs[device], at[device], size), device)
            at[device] += rounded(size)
            on_host(memory).copy_(_bytes_of(alike[0]))
            _give(alike, memory)

    def take_back(self, tensors: Iterable[Tensor]) -> None:
        """The storages of those that are there move to the cards' own memory."""
        for alike in _by_storage(tensors, lambda slab: any(slab is mine for mine in self._slabs.values())):
            held = _bytes_of(alike[0])
            _give(alike, torch.empty_like(held).copy_(on_host(held)))
        self.is_taken = False


def _by_storage(tensors: Iterable[Tensor], wanted: Callable[[Slab | None], bool]) -> list[list[Tensor]]:
    """Plain tensors that have memory, grouped by their storages: those whose slab is ``wanted``, None on the card."""
    found: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and wanted(_slab_of(tensor)):
            found.setdefault((tensor.device, storage.data_ptr()), []).append(tensor)
    return list(found.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    """uint8: the storage of a tensor, whole."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _give(tensors: Iterable[Tensor], memory: Tensor) -> None:
    for tensor in tensors:
        tensor.data = laid_out(memory, tensor)


# -- how much there is -------------------------------------------------------------------------------------------------


def _number(path: str) -> int | None:
    try:
        return int((ROOT / path).read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _group_limit() -> tuple[int, int] | None:
    """(limit, used) of the process's control group; None without a limit."""
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        found, now = _number(limit), _number(used)
        if found is not None and now is not None and found < 1 << 60:
            return found, now - min(now, _cached((ROOT / limit).parent))
    return None


def _cached(folder: Path) -> int:
    """Bytes of files that a control group gives up before it refuses memory."""
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(lines.get("inactive_file", 0))
    return 0


def _machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (ROOT / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def available() -> int | None:
    """Bytes of host memory that can be had; None where the system doesn't say."""
    group, machine = _group_limit(), _machine()
    found = [free for free in (machine, None if group is None else group[0] - group[1]) if free is not None]
    return min(found, default=None)


def facts() -> str:
    """What limits page-locked memory here, in words."""
    import resource  # not there on Windows, where nothing comes here

    group, machine, (lock, _) = _group_limit(), _machine(), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = ["free memory isn't known" if machine is None else f"{in_gib(machine)} are free"]
    words.append("ulimit -l is " + ("unlimited" if lock == resource.RLIM_INFINITY else in_gib(lock)))
    limit = "no limit" if group is None else f"a limit of {in_gib(group[0])}, of which {in_gib(group[1])} are used"
    words.append(f"the cgroup has {limit}")
    with contextlib.suppress(OSError):
        if "microsoft" in (ROOT / "proc/sys/kernel/osrelease").read_text().lower():
            words.append("WSL2 locks less than Linux does (memory= in .wslconfig)")
    return "; ".join(words)


def in_gib(size: int) -> str:
    """A number of bytes, for people."""
    return f"{size / 2**30:.2f} GiB"


def card_of(device: torch.device) -> Any:
    """What launches kernels on a device, and locks pages for it.

    Raises:
        CannotLock: nothing does, or the device has no memory of its own.
    """
    card = cuda_devices.kernels_on(device.index or 0) if backend(device) == "cuda" else None
    if card is None or card.shares_memory():
        raise CannotLock(
            f"{device} is no card with memory of its own that compiled kernels serve, and only one such steps state on "
            "the host. Move the model to one first, or leave offload out. python -m fp16opt says what lacks."
        )
    return card
