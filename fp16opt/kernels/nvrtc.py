"""NVRTC, the compiler that every CUDA build of torch brings along: found, asked what it knows, called.

What is called here: https://docs.nvidia.com/cuda/nvrtc/. Every function has its argument types, or addresses would go
as 32 bits.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

import torch

_LOG_LINES = 12
_SIGNATURES = {
    "nvrtcGetErrorString": (c_int,),
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_char_p)),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
    **{f"nvrtcGet{what}Size": (c_void_p, POINTER(c_size_t)) for what in ("CUBIN", "PTX", "ProgramLog")},
    **{f"nvrtcGet{what}": (c_void_p, c_char_p) for what in ("CUBIN", "PTX", "ProgramLog")},
}


class NvrtcError(RuntimeError):
    """NVRTC is not there, or does not compile; the message says why."""


class Nvrtc:
    """One NVRTC library.

    Args:
        path: of the library, or its name for the loader.
        loaded: take it only if the process has it already.

    Attributes:
        path: as given.
        version: as in (12, 9).
        archs: the compute capabilities that it makes code for, as in [75, 80].

    Raises:
        OSError: it can't be loaded. NvrtcError: it is too old (before CUDA 11.2).
    """

    def __init__(self, path: str, loaded: bool = False) -> None:
        self.path = path
        self._library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY if loaded else ctypes.DEFAULT_MODE)
        for name, types in _SIGNATURES.items():
            if not hasattr(self._library, name):
                raise NvrtcError(f"{path} has no {name}: it is older than CUDA 11.2")
            getattr(self._library, name).argtypes = types
        self._library.nvrtcGetErrorString.restype = c_char_p
        major, minor, count = c_int(), c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        archs = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.version = (major.value, minor.value)
        self.archs = sorted(archs)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise NvrtcError(f"{name} reports {self._library.nvrtcGetErrorString(code).decode()}")

    def _text(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(f"nvrtcGet{what}Size", program, byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def arch_for(self, capability: int) -> int | None:
        """The architecture to compile for: the card's own, else the highest lower one of its major.

        Example:
            A card of 8.9 with an NVRTC that knows 75, 80, 86 and 90 gets code for 86.
        """
        fits = [arch for arch in self.archs if arch <= capability and arch // 10 == capability // 10]
        return max(fits, default=None)

    def compile(
        self, source: str, name: str, arch: int, options: Sequence[str], results: Sequence[str] = ("CUBIN",)
    ) -> list[bytes]:
        """Compile one text. Releases the GIL; several threads may do it at once.

        Args:
            source: the text.
            name: what messages call it.
            arch: as in 90, of those in ``archs``.
            options: besides the architecture.
            results: "CUBIN", "PTX", "ProgramLog".

        Raises:
            NvrtcError: it does not compile; with the first lines that NVRTC says.
        """
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            given = [f"--gpu-architecture=sm_{arch}".encode(), *(option.encode() for option in options)]
            code = self._library.nvrtcCompileProgram(program, len(given), (c_char_p * len(given))(*given))
            if code != 0:
                said = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").splitlines()
                words = self._library.nvrtcGetErrorString(code).decode()
                raise NvrtcError("\n".join([f"{name} for sm_{arch}: {words}", *said[:_LOG_LINES]]))
            return [self._text(program, what) for what in results]
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def __repr__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"


def soname(major: int) -> str:
    """What the library of a CUDA release is called.

    Example:
        >>> soname(11), soname(12)
        ('libnvrtc.so.11.2', 'libnvrtc.so.12')
    """
    return f"libnvrtc.so.{'11.2' if major == 11 else major}"


def _places(major: int) -> Iterator[str]:
    """Where the library of a release may lie, wheels first: what torch was built for is there."""
    folders = [Path(entry) for entry in dict.fromkeys([str(Path(torch.__file__).parents[1]), *sys.path]) if entry]
    names = (f"cu{major}", "cuda_nvrtc")
    places = [folder / "nvidia" / name / "lib" for folder in folders for name in names]
    places += [Path(torch.__file__).parent / "lib"]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places += [Path(home) / lib for home in homes if home for lib in ("lib64", "lib")]
    for place in places:
        # torch's older wheels have a hash in the name: libnvrtc-672ee683.so.11.2
        for pattern in (soname(major), f"libnvrtc-*.so.{soname(major)[12:]}"):
            yield from (str(path) for path in sorted(place.glob(pattern)) if "builtins" not in path.name)
    yield soname(major)


def lies_in_a_folder(major: int) -> bool:
    """Whether a wheel, torch or CUDA_HOME has the library of a release. Opens nothing."""
    return any(map(os.path.exists, _places(major)))


def find(majors: Sequence[int]) -> Nvrtc:
    """The NVRTC that torch has loaded, else that of a wheel, of torch's folder, of CUDA_HOME, or of the system.

    Args:
        majors: releases of CUDA, the first one preferred.

    Raises:
        NvrtcError: there is none, or what there is can't be loaded.
    """
    failures = []
    for major in majors:
        for path, loaded in ((soname(major), True), *((place, False) for place in _places(major))):
            try:
                return Nvrtc(path, loaded)
            except OSError as error:
                if not loaded and os.path.exists(path):
                    failures.append(f"{path} can't be loaded: {error}")
            except NvrtcError as error:
                failures.append(str(error))
    names = " or ".join(soname(major) for major in majors)
    raise NvrtcError("; ".join(failures) or f"{names}, the compiler that torch's CUDA wheels bring, was not found")
