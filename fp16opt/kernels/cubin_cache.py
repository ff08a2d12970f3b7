"""Compiled CUDA kernels on disk, so that they are compiled once a machine.

What lies there runs in the process that reads it: the folder and its files must be the user's own, and no other user
may write them. A file is replaced in one move, so that readers and other writers see a whole one. Its name says what it
was made from, a checksum in front of it whether it is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CHECKSUM = 32
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheError(RuntimeError):
    """The folder can't be used, or a file in it; the message says which, why, and what to do."""


class Cubins(NamedTuple):
    """The kernels' machine code.

    Attributes:
        arch: of the code, as in 90. It runs on cards of the same major and at least this minor.
        version: of the NVRTC that made it, as in (12, 9).
        code: by the kernel's name.
    """

    arch: int
    version: tuple[int, int]
    code: dict[str, bytes]


def folder() -> Path:
    """Where compiled kernels are kept: ``FP16OPT_CACHE``, else ``fp16opt`` in the user's folder for caches."""
    named = os.environ.get("FP16OPT_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "fp16opt" if base else Path("~/.cache/fp16opt").expanduser()


def file_name(digest: str, capability: int, version: tuple[int, int]) -> str:
    """What the code for a card is called.

    Example:
        >>> file_name("0123456789abcdef", 90, (12, 9))
        '0123456789abcdef-sm_90-nvrtc-12.9.bin'
    """
    return f"{digest}-sm_{capability}-nvrtc-{version[0]}.{version[1]}.bin"


def _check_owner(where: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        owner = f"belongs to user {found.st_uid}, not to {os.geteuid()}"
        raise CacheError(f"{where} {owner}: name another folder with FP16OPT_CACHE")
    if found.st_mode & _OTHERS_WRITE:
        raise CacheError(f"{where} can be written by others (mode {found.st_mode & 0o777:o}): chmod go-w, or remove it")


@contextlib.contextmanager
def _opened(path: Path, make: bool) -> Iterator[int]:
    """The folder, proved to be the user's own, for calls with ``dir_fd``."""
    try:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CacheError(f"{path} can't be used: {error.strerror}: name another folder with FP16OPT_CACHE") from None
    try:
        _check_owner(str(path), os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _read(path: Path, name: str, directory: int) -> bytes:
    """What was written to one file. Raises CacheError where it is another's or damaged."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        raise CacheError(f"{path / name} can't be opened: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CacheError(f"{path / name} is no file")
        _check_owner(str(path / name), found)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
    finally:
        os.close(descriptor)
    if hashlib.sha256(content[_CHECKSUM:]).digest() != content[:_CHECKSUM]:
        raise CacheError(f"{path / name} is damaged")
    return content[_CHECKSUM:]


def _cubins(path: Path, name: str, directory: int) -> Cubins:
    """The kernels in one file. Raises CacheError as :func:`_read`."""
    line, _, blobs = _read(path, name, directory).partition(b"\n")
    try:
        index = json.loads(line)
        (major, minor), sizes = index["version"], index["sizes"]
        code, at = {}, 0
        for kernel, size in sizes.items():
            code[kernel] = blobs[at : at + size]
            at += size
        return Cubins(index["arch"], (major, minor), code)
    except (ValueError, KeyError):
        raise CacheError(f"{path / name} is damaged") from None


def names(digest: str = "", capability: int | None = None) -> list[tuple[str, tuple[int, int]]]:
    """(name, NVRTC's version) of the files in the folder, newest version first. Unreadable folders have none."""
    card = r"\d+" if capability is None else str(capability)
    pattern = re.compile(rf"{digest or '[0-9a-f]{16}'}-sm_{card}-nvrtc-(\d+)\.(\d+)\.bin")
    try:
        matches = [pattern.fullmatch(name) for name in os.listdir(folder())]
    except OSError:
        return []
    found = [(match[0], (int(match[1]), int(match[2]))) for match in matches if match is not None]
    return sorted(found, key=lambda one: one[1], reverse=True)


def load(digest: str, capability: int, release: tuple[int, int]) -> tuple[Cubins | None, list[str]]:
    """The code for a card, made by an NVRTC of this CUDA release, or else by another of its major.

    Args:
        digest: of the sources and options.
        capability: of the card, as in 90.
        release: of CUDA, as in (12, 8).

    Returns:
        (the code or None, what was found and is not used, in words)
    """
    candidates = [(name, version) for name, version in names(digest, capability) if version[0] == release[0]]
    candidates.sort(key=lambda one: one[1] != release)
    complaints: list[str] = []
    path = folder()
    for name, _ in candidates:
        try:
            with _opened(path, make=False) as directory:
                return _cubins(path, name, directory), complaints
        except CacheError as error:
            complaints.append(str(error))
    return None, complaints


def store(digest: str, capability: int, cubins: Cubins) -> Path:
    """Keep the code for a card.

    Returns:
        The file.

    Raises:
        CacheError: the folder can't be made or written, or is another's.
    """
    index = {"arch": cubins.arch, "version": cubins.version, "sizes": {k: len(c) for k, c in cubins.code.items()}}
    rest = json.dumps(index).encode() + b"\n" + b"".join(cubins.code.values())
    return _write(file_name(digest, capability, cubins.version), rest)


def load_notes(name: str) -> bytes | None:
    """What :func:`store_notes` wrote; None where there is nothing.

    Raises:
        CacheError: folder or file can't be used.
    """
    path = folder()
    if not (path / name).exists():
        return None
    with _opened(path, make=False) as directory:
        return _read(path, name, directory)


def store_notes(name: str, content: bytes) -> Path:
    """Keep a few bytes beside the kernels, under a name of their own.

    Returns:
        The file.

    Raises:
        CacheError: as :func:`store`.
    """
    return _write(name, content)


def _write(name: str, rest: bytes) -> Path:
    path = folder()
    with _opened(path, make=True) as directory:
        try:
            temporary = f".new-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
            try:
                with open(descriptor, "wb") as file:
                    file.write(hashlib.sha256(rest).digest() + rest)
                os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                os.unlink(temporary, dir_fd=directory)
                raise
        except OSError as error:
            raise CacheError(
                f"{path} can't be written: {error.strerror}: name another folder with FP16OPT_CACHE"
            ) from None
    return path / name
