"""Which cards the CUDA kernels serve, each compiled for the card when it is needed, or found on disk; or why not."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from . import cubin_cache
from .cubin_cache import CacheError, Cubins
from .cuda_driver import Card, Driver, DriverError
from .cuda_rows import FIRST, KERNELS, OPTIONS, digest, source_of
from .nvrtc import Nvrtc, NvrtcError, find, lies_in_a_folder

logger = logging.getLogger("fp16opt")

OLDEST = 70
"""The compute capability, times ten, from which on cards are served: V100 (PTX of older ones lacks what is used)."""
CARDS = (70, 75, 80, 86, 89, 90, 100, 120)
"""What ``python -m fp16opt compile`` compiles for where there is no card to ask."""
_MOST_THREADS = 8


class Verdicts(Protocol):
    """What a card's kernels were found to be; see :class:`.verdicts.Verdicts`."""

    around: dict[str, str]
    found: dict[str, str]

    def trusts(self, name: str, captures: Callable[[], bool]) -> bool:
        """Whether a kernel may serve."""

    def note(self, outcomes: dict[str, Any]) -> None:
        """Take in what was found."""


class Proof:
    """The hook of the proof, which is made of the operations: none of them imports it.

    Attributes:
        verdicts_on: from a card's number and capability, and the versions of compiler and driver, to who says which
            kernels may serve; None: all may. :mod:`.verdicts` puts itself here.
    """

    verdicts_on: ClassVar[Callable[[int, int, tuple[int, int], tuple[int, int]], Verdicts | None]]


class Served(NamedTuple):
    """What became of one device.

    Attributes:
        device: what launches kernels there, or None: torch operations serve.
        words: what serves, or why not and what mends it.
        verdicts: on its kernels; None: all may serve.
    """

    device: Card | None
    words: str
    verdicts: Verdicts | None = None


def release() -> tuple[int, int] | None:
    """The CUDA release that torch was built for, as in (12, 8); None without one, and for ROCm."""
    if torch.version.cuda is None:
        return None
    major, _, minor = torch.version.cuda.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def compile_kernels(nvrtc: Nvrtc, capability: int, names: Iterable[str] = tuple(KERNELS)) -> Cubins:
    """Compile kernels for a card, in as many threads as there are processors, up to 8.

    Args:
        capability: of the card, as in 86.
        names: of the kernels; as a rule all.

    Raises:
        NvrtcError: this NVRTC makes no code for such cards, or a kernel does not compile.
    """
    arch = nvrtc.arch_for(capability)
    if arch is None:
        known = ", ".join(f"sm_{known}" for known in nvrtc.archs)
        raise NvrtcError(
            f"{nvrtc} makes no code for sm_{capability}, only for {known}: "
            f"install a torch built for {'CUDA 12' if capability < nvrtc.archs[0] else 'a newer CUDA'}"
        )
    began = time.perf_counter()
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        jobs = {
            name: pool.submit(nvrtc.compile, source_of(KERNELS[name]), f"fp16opt_{name}", arch, OPTIONS)
            for name in names
        }
        code = {name: job.result()[0] for name, job in jobs.items()}
    took = time.perf_counter() - began
    logger.info("compiled %d CUDA kernels for sm_%d with %r in %.1f s", len(code), arch, nvrtc, took)
    return Cubins(arch, nvrtc.version, code)


class _Code:
    """The machine code of a card's kernels: what there is, and what is compiled when it is asked for.

    Args:
        capability: of the card, as in 86.
        cuda: the release that torch was built for.
        cubins: what the disk had; None compiles what every training needs.
    """

    def __init__(self, capability: int, cuda: tuple[int, int], cubins: Cubins | None) -> None:
        self._capability, self._cuda = capability, cuda
        self._can_store = True
        self._origin = "compiled by this process" if cubins is None else "from the cache"
        self.cubins = self._compiled({}, FIRST) if cubins is None else cubins

    def __call__(self, name: str) -> bytes:
        if name not in self.cubins.code:
            self.cubins = self._compiled(self.cubins.code, FIRST if name in FIRST else (name,))
        return self.cubins.code[name]

    def _compiled(self, there: dict[str, bytes], names: Iterable[str]) -> Cubins:
        made = compile_kernels(find([self._cuda[0]]), self._capability, names)
        cubins = Cubins(made.arch, made.version, there | made.code)
        try:
            if self._can_store:
                cubin_cache.store(digest(), self._capability, cubins)
        except CacheError as error:
            self._can_store = False
            logger.warning("compiled CUDA kernels are kept in memory, and compiled again in each process: %s", error)
        return cubins

    def words(self) -> str:
        """What serves, for people."""
        version = _dotted(self.cubins.version)
        return f"CUDA kernels for sm_{self.cubins.arch}, NVRTC {version}, {self._origin}"


def _load(index: int, cuda: tuple[int, int]) -> Served:
    """Have the kernels on one card.

    Raises:
        DriverError, NvrtcError, OSError: it can't be, and why.
    """
    if sys.platform != "linux":
        raise DriverError(f"the CUDA kernels are launched on Linux only, this is {sys.platform}")
    major, minor = torch.cuda.get_device_capability(index)
    capability = 10 * major + minor
    if capability < OLDEST:
        raise DriverError(f"it is of compute capability {major}.{minor}, and the CUDA kernels need 7.0 or newer")
    driver = Driver()
    stored, complaints = cubin_cache.load(digest(), capability, cuda)
    for complaint in complaints:
        logger.warning("compiled CUDA kernels are not taken from the disk: %s", complaint)
    if stored is not None and len(stored.code) < len(KERNELS) and not lies_in_a_folder(cuda[0]):
        find([cuda[0]])  # it will be needed in the midst of a training
    for cubins in (None,) if stored is None else (stored, None):
        code = _Code(capability, cuda, cubins)
        try:
            card = Card(driver, index, code, FIRST)
            verdicts = Proof.verdicts_on(index, capability, code.cubins.version, driver.version)
            return Served(card, code.words(), verdicts)
        except DriverError as error:
            refusal = str(error)
            if cubins is not None:
                logger.warning("compiled CUDA kernels from the disk are compiled again: %s", error)
    arch, version = code.cubins.arch, _dotted(code.cubins.version)
    raise DriverError(
        f"the driver, made for CUDA {_dotted(driver.version)}, refuses code for sm_{arch} of NVRTC {version} "
        f"({refusal}): update it, or install a torch built for a CUDA that it knows"
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


class _Known:
    """What is known of the devices, in this process: a forked child finds out anew.

    What the driver gave a parent is of no use to its child, and a lock that another of the parent's threads held when
    it forked would never be given back.
    """

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._found: dict[int, Served] = {}
        self._said: set[str] = set()

    def of(self, index: int) -> Served:
        found = self._found.get(index)
        if found is not None:
            return found
        with self._lock:
            if index not in self._found:
                self._found[index] = self._asked(index)
            return self._found[index]

    def _asked(self, index: int) -> Served:
        cuda = release()
        if cuda is None or not torch.cuda.is_available() or not 0 <= index < torch.cuda.device_count():
            return Served(None, "torch finds no such CUDA device")
        try:
            return _load(index, cuda)
        except (DriverError, NvrtcError, OSError) as error:
            words = str(error)
        if words not in self._said:
            self._said.add(words)
            name = torch.cuda.get_device_name(index)
            warnings.warn(
                f"slower torch operations serve cuda:{index} ({name}) in place of fp16opt's kernels: {words}",
                RuntimeWarning,
                stacklevel=2,
            )
        return Served(None, words)


_known = _Known()


def served(index: int) -> Served:
    """What serves a device. Its first call compiles, if need be, and loads what AdamW launches; does not sync.

    Args:
        index: the device's number.
    """
    return _known.of(index)


def kernels_on(index: int) -> Card | None:
    """What launches kernels on a device; None where torch operations serve it. As :func:`served`."""
    return _known.of(index).device


def refusals(index: int) -> list[str]:
    """The kernels that torch operations replace on a device that is served, each with the reason. As :func:`served`."""
    verdicts = _known.of(index).verdicts
    return [] if verdicts is None else [f"{name}: {words}" for name, words in verdicts.found.items() if words]


def proved(index: int) -> str:
    """How many kernels were proved on a device, in words. As :func:`served`."""
    verdicts = _known.of(index).verdicts
    if verdicts is None:
        return ""
    count = sum(not words for words in verdicts.found.values())
    return f"; {count} of {len(KERNELS)} proved here so far"


def compile_missing(index: int) -> None:
    """Compile side by side, before a card's first use, the kernels that are not on disk.

    A kernel that is missing later is compiled alone, when it is launched. Does nothing where it can't: the first use
    says why.
    """
    cuda = release()
    if cuda is None:
        return
    major, minor = torch.cuda.get_device_capability(index)
    stored, _ = cubin_cache.load(digest(), 10 * major + minor, cuda)
    if stored is None or len(stored.code) < len(KERNELS):
        with contextlib.suppress(NvrtcError, OSError):
            ahead([10 * major + minor])


# -- for people --------------------------------------------------------------------------------------------------------


def facts() -> list[tuple[str, str]]:
    """What there is to compile, keep and launch kernels with, as (name, words). Compiles nothing."""
    cuda = release()
    if cuda is None:
        return [("CUDA kernels", "this torch is built without CUDA")]
    try:
        compiler = repr(find([cuda[0]]))
    except NvrtcError as error:
        compiler = f"missing: {error}"
    try:
        driver = f"for CUDA up to {_dotted(Driver().version)}"
    except DriverError as error:
        driver = f"missing: {error}"
    try:
        kept = len(cubin_cache.names(digest()))
    except OSError as error:
        return [("CUDA kernels", f"missing: {error}")]
    cache = f"{cubin_cache.folder()} ({kept} {'card' if kept == 1 else 'cards'} compiled for)"
    return [("CUDA compiler", compiler), ("CUDA driver", driver), ("CUDA cache", cache)]


def ahead(capabilities: Sequence[int] = ()) -> list[tuple[int, Path | None, str]]:
    """Compile all kernels ahead of their first use, and keep them on disk; there need be no GPU.

    Args:
        capabilities: of the cards, as in [70, 90]. None given: those of this machine's cards, and where there are none
            all that NVRTC knows of :data:`CARDS`.

    Returns:
        For each card: its capability, the file, or None and why not.

    Raises:
        NvrtcError: there is no NVRTC.
    """
    cuda = release()
    majors = [13, 12, 11] if cuda is None else [cuda[0]]
    nvrtc = find(majors)
    if not capabilities and cuda is not None and torch.cuda.is_available():
        found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
        capabilities = sorted({10 * major + minor for major, minor in found})
    outcomes: list[tuple[int, Path | None, str]] = []
    for capability in capabilities or [card for card in CARDS if card in nvrtc.archs]:
        began = time.perf_counter()
        try:
            if capability < OLDEST:
                raise NvrtcError(f"sm_{capability} is older than sm_{OLDEST}, the oldest that is served")
            path = cubin_cache.store(digest(), capability, compile_kernels(nvrtc, capability))
            outcomes.append((capability, path, f"{nvrtc!r}, {time.perf_counter() - began:.1f} s"))
        except (NvrtcError, CacheError) as error:
            outcomes.append((capability, None, str(error)))
    return outcomes
