"""Which CUDA kernels may serve on a card: each is proved there before its first use, and its verdict kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from . import cubin_cache, cuda_devices
from .cubin_cache import CacheError
from .cuda_rows import FIRST, KERNELS, digest
from .proof import Outcome, is_proving, prove

logger = logging.getLogger("fp16opt")

_DRIVER = Path("/proc/driver/nvidia/version")
_PROOF = ("planted.py", "proof.py")


def surroundings(index: int, capability: int, nvrtc: tuple[int, int], driver: tuple[int, int]) -> dict[str, str]:
    """What a verdict holds for: where one of these is another, kernels are proved again.

    Args:
        index: the card's number.
        capability: of the card, as in 90.
        nvrtc: the version of the compiler that made its kernels.
        driver: the newest CUDA release that the driver is made for.
    """
    here = Path(__file__).resolve().parent
    proof = hashlib.sha256(b"\0".join((here / name).read_bytes() for name in _PROOF)).hexdigest()[:16]
    try:
        build = " ".join(_DRIVER.read_text(encoding="utf-8").split("\n")[0].split())
    except OSError:
        build = ""
    return {
        "kernels": digest(),
        "proof": proof,
        "card": f"{torch.cuda.get_device_name(index)}, sm_{capability}",
        "nvrtc": ".".join(map(str, nvrtc)),
        "driver": f"{driver[0]}.{driver[1]} {build}".strip(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    }


class Verdicts:
    """The verdicts on one card's kernels.

    Args:
        index: the card's number.
        around: what they hold for, as :func:`surroundings` gives it.

    Attributes:
        around: as given.
        found: by the kernel's name, why torch operations serve in its place; "" where it was found to be right.
    """

    def __init__(self, index: int, around: dict[str, str]) -> None:
        self._index, self.around = index, around
        self._lock = threading.RLock()
        key = hashlib.sha256(json.dumps(around, sort_keys=True).encode()).hexdigest()[:16]
        self._name = f"{around['kernels']}-{key}.proof"
        self.found = self._kept()
        for name, words in self.found.items():
            self._warn(name, words)

    def trusts(self, name: str, captures: Callable[[], bool]) -> bool:
        """Whether a kernel may serve. Where it is not known it is proved now, and the host waits for that.

        Args:
            name: of the kernel.
            captures: whether a CUDA graph is being captured on the stream at hand.

        Raises:
            RuntimeError: it is not known, and a CUDA graph is being captured.
        """
        if is_proving():
            return True
        words = self.found.get(name)
        if words is None:
            words = self._asked(name, captures)
        return not words

    def note(self, outcomes: dict[str, Outcome]) -> None:
        """Take in what was found, keep it, and warn of kernels that may not serve."""
        with self._lock:
            self._keep({name: found.words for name, found in outcomes.items() if found.stays})
            for name, found in outcomes.items():
                self._warn(name, found.words)
                self.found[name] = found.words

    def _asked(self, name: str, captures: Callable[[], bool]) -> str:
        if captures():
            raise RuntimeError(
                f"the CUDA kernel {name!r} was not proved on cuda:{self._index} yet, and a CUDA graph is being "
                "captured. Make one step before the capture, as torch's examples do."
            )
        with self._lock:  # other threads wait for the verdict
            if name not in self.found:
                self.note(prove(FIRST if name in FIRST else (name,), self._index))
            return self.found[name]

    def _warn(self, name: str, words: str) -> None:
        if words:
            warnings.warn(
                f"slower torch operations serve cuda:{self._index} ({self.around['card']}) in place of fp16opt's "
                f"kernel {name!r}: {words}. `python -m fp16opt prove` tries all kernels",
                RuntimeWarning,
                stacklevel=2,
            )

    def _kept(self) -> dict[str, str]:
        """What earlier processes found."""
        try:
            content = cubin_cache.load_notes(self._name)
            found = {} if content is None else json.loads(content)["verdicts"]
        except (CacheError, ValueError, KeyError) as error:
            logger.warning("verdicts on CUDA kernels are not taken from the disk: %s", error)
            return {}
        return {name: str(words) for name, words in found.items() if name in KERNELS}

    def _keep(self, new: dict[str, str]) -> None:
        """Beside those of other processes; where two write at once one's are lost, and proved again."""
        try:
            verdicts = self._kept() | new
            content = json.dumps({"for": self.around, "verdicts": verdicts}, indent=1).encode()
            cubin_cache.store_notes(self._name, content)
        except CacheError as error:
            logger.warning("verdicts on CUDA kernels are not kept, and made again in each process: %s", error)


cuda_devices.Proof.verdicts_on = lambda index, *versions: Verdicts(index, surroundings(index, *versions))
