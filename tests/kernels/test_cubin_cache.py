"""Compiled kernels on disk: whole, the user's own, made from these sources, and shared by processes."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import cards
import pytest

import fp16opt
from fp16opt import kernels
from fp16opt.kernels import cubin_cache, cuda_devices, cuda_rows
from fp16opt.kernels.cubin_cache import CacheError, Cubins

DIGEST = "0123456789abcdef"
SET = Cubins(90, (12, 9), {"one": b"\0a\nb", "two": b"", "three": bytes(range(256)) * 40})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP16OPT_CACHE", str(tmp_path / "a" / "cache"))
    return tmp_path / "a" / "cache"


def load(release: tuple[int, int] = (12, 9), capability: int = 90) -> tuple[Cubins | None, list[str]]:
    return cubin_cache.load(DIGEST, capability, release)


def test_what_was_stored_is_loaded(folder: Path) -> None:
    assert load() == (None, []), "nothing yet, and nothing to say of it"
    path = cubin_cache.store(DIGEST, 90, SET)
    assert load() == (SET, [])
    assert path.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in folder.iterdir()] == [path.name], "nothing temporary stays"
    assert load(capability=80) == (None, [])
    assert cubin_cache.load("f" * 16, 90, (12, 9)) == (None, []), "other sources"
    assert load((13, 0)) == (None, []), "a driver need not take code of a newer major"


def test_code_of_torchs_own_release_is_preferred() -> None:
    versions = [(12, 1), (12, 9), (12, 10), (13, 0)]
    for version in versions:
        cubin_cache.store(DIGEST, 90, SET._replace(version=version))
    cubin_cache.store(DIGEST, 80, SET._replace(version=(12, 4)))
    for release, wanted in (((12, 1), (12, 1)), ((12, 9), (12, 9)), ((12, 4), (12, 10)), ((13, 1), (13, 0))):
        found, _ = load(release)
        assert found is not None
        assert found.version == wanted, release


def test_the_folder_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    monkeypatch.setenv("FP16OPT_CACHE", "~/mine")
    assert cubin_cache.folder() == tmp_path / "mine"
    monkeypatch.delenv("FP16OPT_CACHE")
    assert cubin_cache.folder() == Path("/x/cache/fp16opt")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cubin_cache.folder() == tmp_path / ".cache" / "fp16opt"


@pytest.mark.parametrize("place", [0, 31, 32, 40, -1])
def test_a_damaged_file_is_not_used(place: int) -> None:
    path = cubin_cache.store(DIGEST, 90, SET)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert load() == (None, [f"{path} is damaged"])
    path.write_bytes(path.read_bytes()[:20])
    assert load() == (None, [f"{path} is damaged"])
    cubin_cache.store(DIGEST, 90, SET)
    assert load() == (SET, []), "it is replaced"


@pytest.mark.parametrize("text", [b"{}\n", b"no json", b'{"arch": 90, "version": [1], "sizes": {}}\n'])
def test_a_whole_file_with_something_else_in_it_is_not_used(text: bytes) -> None:
    path = cubin_cache.store(DIGEST, 90, SET)
    path.write_bytes(hashlib.sha256(text).digest() + text)
    assert load() == (None, [f"{path} is damaged"])


def test_what_another_user_owns_is_not_used(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path = cubin_cache.store(DIGEST, 90, SET)
    me = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: me + 1)
        words = f"{folder} belongs to user {me}, not to {me + 1}: name another folder with FP16OPT_CACHE"
        assert load() == (None, [words])
        with pytest.raises(CacheError, match=words):
            cubin_cache.store(DIGEST, 90, SET)
    if me == 0:
        os.chown(path, 65534, -1)
        found, (said,) = load()
        assert found is None
        assert said.startswith(f"{path} belongs to user 65534, not to 0: ")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_what_others_can_write_is_not_used(folder: Path, mode: int) -> None:
    path = cubin_cache.store(DIGEST, 90, SET)
    path.chmod(mode)
    assert load() == (None, [f"{path} can be written by others (mode {mode:o}): chmod go-w, or remove it"])
    path.chmod(0o600)
    folder.chmod(mode)
    assert load() == (None, [f"{folder} can be written by others (mode {mode:o}): chmod go-w, or remove it"])
    with pytest.raises(CacheError, match="can be written by others"):
        cubin_cache.store(DIGEST, 90, SET)


def test_links_pipes_and_folders_are_no_files(folder: Path, tmp_path: Path) -> None:
    path = cubin_cache.store(DIGEST, 90, SET)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    found, (said,) = load()
    assert found is None
    assert said == f"{path} can't be opened: Too many levels of symbolic links"
    path.unlink()
    os.mkfifo(path, 0o600)
    assert load() == (None, [f"{path} is no file"])
    path.unlink()
    path.mkdir(0o700)
    assert load() == (None, [f"{path} is no file"])


def test_a_folder_that_cannot_be_made_or_written(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP16OPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=r"file/cache can't be used: Not a directory: name another folder with FP16"):
        cubin_cache.store(DIGEST, 90, SET)
    monkeypatch.setenv("FP16OPT_CACHE", str(folder))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CacheError, match=r"cache can't be written: No space left on device: name another folder with"):
        cubin_cache.store(DIGEST, 90, SET)
    assert list(folder.iterdir()) == [], "nothing half done stays"


def test_a_read_only_home_keeps_kernels_in_memory_and_says_so_once(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP16OPT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("FAKE_NVRTC_LOG", str(tmp_path / "log"))
    cards.pretend(libraries, monkeypatch)
    with caplog.at_level(logging.WARNING, "fp16opt"):
        for _ in range(2):
            assert kernels.backend("cuda:0") == "cuda"
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("compiled CUDA kernels are kept in memory, and compiled again in each process: ")
    assert "FP16OPT_CACHE" in said
    assert len((tmp_path / "log").read_text().splitlines()) == cards.FIRST
    assert "compiled by this process" in cuda_devices.served(0).words


def test_a_damaged_cache_is_compiled_again(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    cards.pretend(libraries, monkeypatch)
    assert kernels.backend("cuda:0") == "cuda"
    (path,) = cubin_cache.folder().iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    cards.pretend(libraries, monkeypatch)
    assert kernels.backend("cuda:0") == "cuda"
    assert f"compiled CUDA kernels are not taken from the disk: {path} is damaged" in caplog.text
    found, complaints = cubin_cache.load(cuda_rows.digest(), 90, (14, 3))
    assert found is not None
    assert complaints == []


# -- processes ---------------------------------------------------------------------------------------------------------

# A process whose torch says that there is a card, and whose driver and NVRTC are the pretended ones, by their names.
PROCESS = """
import os, sys, types, torch
faked = dict(is_available=lambda: True, device_count=lambda: 1, get_device_capability=lambda i: (9, 0),
             get_device_name=lambda i: "Pretended", current_device=lambda: 0)
for name, function in faked.items():
    setattr(torch.cuda, name, function)
torch.version.cuda = "14.3"
from fp16opt import kernels
from fp16opt.kernels import cuda_devices
"""


def environment(libraries: Path, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(fp16opt.__file__).parents[1]), *filter(None, sys.path)]),
        "LD_LIBRARY_PATH": str(libraries),
        "FAKE_NVRTC_LOG": str(tmp_path / "log"),
    }


def start(code: str, libraries: Path, tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROCESS + code]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(libraries, tmp_path), cwd=tmp_path, **streams)


@pytest.mark.all
def test_two_processes_may_compile_at_once(libraries: Path, tmp_path: Path, folder: Path) -> None:
    code = "print(kernels.backend('cuda:0'), cuda_devices.served(0).words)"
    jobs = [start(code, libraries, tmp_path) for _ in range(2)]
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert out.startswith("cuda CUDA kernels for sm_90, NVRTC 14.3, "), err
    found, complaints = cubin_cache.load(cuda_rows.digest(), 90, (14, 3))
    assert found is not None
    assert set(found.code) == set(cuda_rows.FIRST)
    assert complaints == []
    assert len(list(folder.iterdir())) == 1
    lines = len((tmp_path / "log").read_text().splitlines())
    assert lines in (cards.FIRST, 2 * cards.FIRST)
    out, err = start(code, libraries, tmp_path).communicate(timeout=120)
    assert "from the cache" in out, err
    assert len((tmp_path / "log").read_text().splitlines()) == lines


@pytest.mark.all
def test_a_child_forked_after_first_use_finds_out_anew(libraries: Path, tmp_path: Path) -> None:
    """Also while another thread of its parent holds the lock."""
    code = """
import threading
assert kernels.backend("cuda:0") == "cuda"
parent, inside, done = cuda_devices.kernels_on(0), threading.Event(), threading.Event()
def holds():
    with cuda_devices._known._lock:
        inside.set()
        done.wait()
thread = threading.Thread(target=holds)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    good = kernels.backend("cuda:0") == "cuda" and cuda_devices.kernels_on(0) is not parent
    os._exit(0 if good else 3)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
thread.join()
assert cuda_devices.kernels_on(0) is parent
print("child", code, kernels.backend("cuda:0"))
"""
    out, err = start(code, libraries, tmp_path).communicate(timeout=120)
    assert out == "child 0 cuda\n", err
    assert len((tmp_path / "log").read_text().splitlines()) == cards.FIRST, "the child took them from the disk"
