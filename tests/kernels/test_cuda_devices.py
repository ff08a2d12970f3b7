"""Which cards the CUDA kernels serve, what the driver is asked for then, and what is said where they do not."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import cards
import emulated
import numpy as np
import pytest
import torch
from step_cases import assert_same_results, random_case

from fp16opt import __main__ as command
from fp16opt import kernels
from fp16opt.kernels import (
    CallCache,
    cubin_cache,
    cuda,
    cuda_devices,
    cuda_driver,
    cuda_rows,
    multi_tensor_l2norm,
    nvrtc,
)

pytestmark = pytest.mark.usefixtures("folder")
STREAM = "7700000000000010"
FIRST = list(cuda_rows.FIRST)


@pytest.fixture
def driver(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = cards.pretend(libraries, monkeypatch)
    yield found
    for name in ("cuModuleLoadData", "cuDevicePrimaryCtxRetain", "cuLaunchKernel", "cuMemcpyHtoDAsync"):
        found.fail(name, 0)


def compiled() -> list[str]:
    """What NVRTC was asked for until now."""
    path = Path(os.environ["FAKE_NVRTC_LOG"])
    return path.read_text().splitlines() if path.exists() else []


# -- compiling, keeping, loading ---------------------------------------------------------------------------------------


def test_the_first_use_compiles_for_the_card_and_says_so_once(driver: Any, folder: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "fp16opt"):
        assert kernels.backend("cuda:0") == "cuda"
        assert kernels.backend("cuda") == "cuda"
    lines = compiled()
    assert sorted(line.split()[1] for line in lines) == sorted(f"fp16opt_{name}" for name in FIRST)
    assert {line.split(maxsplit=2)[2] for line in lines} == {"--gpu-architecture=sm_90 --std=c++17 --fmad=false"}
    (record,) = caplog.records
    assert record.getMessage().startswith(f"compiled {len(FIRST)} CUDA kernels for sm_90 with NVRTC 14.3 (")
    assert record.getMessage().endswith(" s")
    assert [path.name for path in folder.iterdir()] == [f"{cuda_rows.digest()}-sm_90-nvrtc-14.3.bin"]
    assert driver.noted("cuDevicePrimaryCtxRetain") == ["cuDevicePrimaryCtxRetain 0"]


def test_where_the_cache_serves_nvrtc_is_not_opened(
    driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.14").write_text("")  # for the kernels that are not in the cache
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert kernels.backend("cuda:0") == "cuda"
    count = len(compiled())
    driver.noted()

    def refuse(majors: Any) -> None:
        raise nvrtc.NvrtcError("opened")

    monkeypatch.setattr(cuda_devices, "find", refuse)
    monkeypatch.setattr(cuda_devices, "_known", cuda_devices._Known())
    with caplog.at_level(logging.INFO, "fp16opt"):
        assert kernels.backend("cuda:0") == "cuda"
    assert not caplog.records
    assert len(compiled()) == count
    assert len(driver.noted("cuModuleLoadData")) == len(FIRST)
    assert "from the cache" in cuda_devices.served(0).words


def test_other_kernels_are_compiled_when_they_are_launched(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card = cuda_devices.kernels_on(0)
    assert card is not None
    before, given = len(compiled()), bytes(8)
    driver.noted()
    threads = [threading.Thread(target=card.launch, args=("scale", 1, 0, given, given)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line.split()[1] for line in compiled()[before:]] == ["fp16opt_scale"], "once, of several threads"
    called = driver.noted("cuModuleLoadData", "cuLaunchKernel")
    assert [line.split()[0] for line in called] == ["cuModuleLoadData", *["cuLaunchKernel"] * 3]
    assert called[0].endswith("mode 2"), "whatever the thread captures"
    monkeypatch.setattr(cuda_devices, "_known", cuda_devices._Known())
    again = cuda_devices.kernels_on(0)
    assert again is not None
    assert again is not card
    again.launch("scale", 1, 0, given, given)
    assert len(compiled()) == before + 1, "it lies beside the others on the disk"


def test_a_later_kernel_that_does_not_compile_is_an_error(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card = cuda_devices.kernels_on(0)
    assert card is not None
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_NVRTC_BROKEN", "fp16opt_scale")
        with pytest.raises(nvrtc.NvrtcError, match="fp16opt_scale for sm_90: NVRTC_ERROR_COMPILATION"):
            card.launch("scale", 1, 0, bytes(8), bytes(8))
    assert not driver.noted("cuLaunchKernel")
    card.launch("scale", 1, 0, bytes(8), bytes(8))
    assert len(driver.noted("cuLaunchKernel")) == 1


def test_each_device_has_its_context_and_code(driver: Any) -> None:
    for _ in range(2):
        assert kernels.backend("cuda:0") == kernels.backend("cuda:1") == "cuda"
    called = driver.noted()
    assert [line for line in called if "Retain" in line] == [f"cuDevicePrimaryCtxRetain {k}" for k in (0, 1)]
    pushed = [line for line in called if line.startswith(("cuCtxPush", "cuCtxPop"))]
    assert pushed == [f"cuCtx{what}Current {k}" for k in ("0", "1000") for what in ("Push", "Pop")]
    assert sum("cuModuleLoadData" in line for line in called) == 2 * len(FIRST)
    assert {line.split("=")[1].split()[0] for line in compiled()} == {"sm_90", "sm_80"}


def test_a_card_that_nvrtc_does_not_know_takes_the_next_lower_of_its_major(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.pretend(libraries, monkeypatch, [(8, 9), (9, 0), (12, 1)])
    assert kernels.backend("cuda:0") == kernels.backend("cuda:1") == "cuda"
    assert {line.split("=")[1].split()[0] for line in compiled()} == {"sm_86", "sm_90"}
    assert "CUDA kernels for sm_86" in cuda_devices.served(0).words
    assert [name for name, _ in cubin_cache.names(capability=89)], "found again for this card"
    with pytest.warns(RuntimeWarning, match=r"makes no code for sm_121, only for sm_70, .*: install a torch bui"):
        assert kernels.backend("cuda:2") == "reference"


# -- launches ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(driver: Any, emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tensors of the CPU are taken for those of cuda:0, and launches run the emulated kernels."""
    driver.run(emulated_cuda.paths)
    cards.serve_host_tensors(monkeypatch)
    assert kernels.backend("cuda:0") == "reference", "it is for tensors of the CPU"
    norms()  # loads its kernel
    driver.noted()
    return driver


@pytest.mark.parametrize("kind", ["adam", "own momentum"])
def test_a_step_has_the_right_bytes_at_the_driver(host: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    case = random_case(np.random.default_rng(1), kind, 0.05)
    got = case.on("cpu").run().run()
    name = kind.removeprefix("own ")
    launched = host.noted("cuLaunchKernel")
    assert len(launched) == 2
    for line in launched:
        assert line.startswith(f"cuLaunchKernel fp16opt_{name} blocks ")
        assert line.endswith(f" threads 256 shared 0 stream {STREAM} context 0")
    monkeypatch.undo()
    assert_same_results(got, case.on("cpu").run().run(), kind)


def norms() -> float:
    return multi_tensor_l2norm([torch.ones(70_000), torch.ones(3)])[0].item()


def test_a_launch_pushes_the_context_where_the_thread_has_none_or_another(host: Any) -> None:
    launch = f"cuLaunchKernel fp16opt_l2norm blocks 3 threads 256 shared 0 stream {STREAM} context 0"
    for current, wanted in ((0, [launch]), (1, None), (-1, None)):
        host.context(current)
        assert norms() == 70_003**0.5
        called = host.noted()
        assert called == (wanted or ["cuCtxPushCurrent 0", launch, "cuCtxPopCurrent 0"]), current
    host.context(0)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(norms()))
    thread.start()
    thread.join()
    assert found == [70_003**0.5]
    assert host.noted() == ["cuCtxPushCurrent 0", launch, "cuCtxPopCurrent 0"], "a new thread has none"


def test_a_launch_is_few_functions_and_none_for_each_argument(host: Any) -> None:
    """What it costs is the number of functions: by the next launch each is out of the processor's caches again."""
    host.context(0)
    grads, scale, site = [torch.ones(64).half() for _ in range(5)], torch.ones(()), CallCache()
    stats, folder, called = kernels.GradStats.allocate(5, "cpu"), cuda.__file__.removesuffix(".py"), list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            called.append(frame.f_code.co_name)

    for _ in range(2):
        called.clear()
        sys.setprofile(note)
        try:
            kernels.multi_tensor_check(grads, scale, stats, cache=site)
        finally:
            sys.setprofile(None)
    assert called[0] == "launch"
    assert len(called) <= 13, called


def test_launches_go_to_the_current_stream(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.dtype] = []
    other = SimpleNamespace(cuda_stream=0x1234567800000000, device_index=0, wait_stream=lambda s: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: other)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: held.append(self.dtype))
    norms()
    assert "stream 1234567800000000" in host.noted("cuLaunchKernel")[0]
    assert held == [torch.uint8, *[torch.float64] * 3], "the table and the results, and no tensor of the lists"


def test_a_captured_call_has_memory_of_its_own(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    host.context(0)
    tables = CallCache()
    assert multi_tensor_l2norm([torch.ones(9)], cache=tables)[0].item() == 3.0
    called = [line for line in host.noted() if not line.startswith("cuCtx")]
    assert [line.split()[0] for line in called] == [
        *("cuThreadExchangeStreamCaptureMode", "cuMemAlloc", "cuStreamCreate", "cuMemcpyHtoDAsync"),
        *("cuStreamSynchronize", "cuStreamDestroy", "cuThreadExchangeStreamCaptureMode", "cuLaunchKernel"),
    ]
    assert called[1].endswith("mode 2")
    assert called[2] == "cuStreamCreate 1", "it does not wait for the default stream"
    del tables
    gc.collect()
    assert [line.split()[0] for line in host.noted() if not line.startswith("cuCtx")][1] == "cuMemFree"


def test_a_failed_copy_of_a_captured_table_gives_its_memory_back(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    host.fail("cuMemcpyHtoDAsync", 700)
    with pytest.raises(cuda_driver.DriverError, match=r"cuMemcpyHtoDAsync_v2: CUDA reports CUDA_ERROR_OTHER: some"):
        norms()
    called = [line.split()[0] for line in host.noted()]
    assert called.count("cuMemFree") == called.count("cuMemAlloc") == 1
    assert called.count("cuStreamDestroy") == 1


def test_a_launch_that_fails_has_cudas_words(host: Any) -> None:
    host.fail("cuLaunchKernel", 701)
    with pytest.raises(cuda_driver.DriverError, match=r"multi_tensor_l2norm: CUDA reports CUDA_ERROR_OTHER: some"):
        norms()
    card = cuda_devices.kernels_on(0)
    assert card is not None
    with pytest.raises(ValueError, match=r"scale: more than 2\^31 chunks in one call, 2147483648. Make several calls."):
        card.launch("scale", 2**31, 0)


def test_a_stream_of_a_device_that_nothing_serves_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"the CUDA kernels do not serve cuda:5. See python -m fp16opt."):
        cuda.device_of(SimpleNamespace(index=5))  # type: ignore[arg-type]


# -- where something is missing ----------------------------------------------------------------------------------------


def refused(match: str) -> None:
    """cuda:0 takes torch operations, and one warning says why."""
    with pytest.warns(RuntimeWarning, match=match) as caught:
        assert kernels.backend("cuda:0") == "reference"
    assert len(caught) == 1
    words = "slower torch operations serve cuda:0 (Pretended 0) in place of fp16opt's kernels: "
    assert str(caught[0].message).startswith(words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.backend("cuda:0") == "reference", "said once"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other card
        report = command.report()
    assert "torch operations (reference.py): " in report
    assert cuda_devices.served(0).words in report


def test_a_driver_that_refuses_the_code(driver: Any) -> None:
    driver.fail("cuModuleLoadData", 209)
    refused(
        r"the driver, made for CUDA 12.4, refuses code for sm_90 of NVRTC 14.3 \(cuModuleLoadData: CUDA reports "
        r"CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image .*\): update it, or install a torch built for a CUDA that"
    )


def test_code_from_the_disk_that_the_driver_refuses_is_compiled_again(
    driver: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    bad = cubin_cache.Cubins(90, (14, 3), dict.fromkeys([*FIRST, "scale"], b"FAKE old"))
    cubin_cache.store(cuda_rows.digest(), 90, bad)
    assert kernels.backend("cuda:0") == "cuda", "the driver takes what it is given"
    assert not compiled()
    real = cuda_devices.Card

    def card(driver: Any, index: int, code: Any, first: Any) -> Any:
        if code("adam") == b"FAKE old":
            raise cuda_driver.DriverError("old")
        return real(driver, index, code, first)

    monkeypatch.setattr(cuda_devices, "Card", card)
    monkeypatch.setattr(cuda_devices, "_known", cuda_devices._Known())
    assert kernels.backend("cuda:0") == "cuda"
    assert len(compiled()) == len(FIRST)
    assert "compiled CUDA kernels from the disk are compiled again: old" in caplog.text
    found, _ = cubin_cache.load(cuda_rows.digest(), 90, (14, 3))
    assert found is not None
    assert set(found.code) == set(FIRST), "none of the old code is left"


def test_where_kernels_are_not_all_on_disk_nvrtc_must_be_there(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step in the midst of a training would raise, that needs another one."""
    assert kernels.backend("cuda:0") == "cuda"
    count = len(compiled())
    monkeypatch.setattr(cuda_devices, "find", nvrtc.find)  # of another CUDA than the pretended one
    monkeypatch.setattr(cuda_devices, "_known", cuda_devices._Known())
    refused(r"libnvrtc.so.14, the compiler that torch's CUDA wheels bring, was not found")
    assert len(compiled()) == count
    whole = cubin_cache.Cubins(90, (14, 3), dict.fromkeys(cuda_rows.KERNELS, b"FAKE here"))
    cubin_cache.store(cuda_rows.digest(), 90, whole)
    monkeypatch.setattr(cuda_devices, "_known", cuda_devices._Known())
    assert kernels.backend("cuda:0") == "cuda"


def test_a_part_of_the_first_kernels_on_disk_is_made_whole(driver: Any) -> None:
    cubin_cache.store(cuda_rows.digest(), 90, cubin_cache.Cubins(90, (14, 3), {"adam": b"FAKE here", "scale": b"FAKE"}))
    assert kernels.backend("cuda:0") == "cuda"
    found, _ = cubin_cache.load(cuda_rows.digest(), 90, (14, 3))
    assert found is not None
    assert set(found.code) == {*FIRST, "scale"}


def test_an_old_card(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards.pretend(libraries, monkeypatch, [(6, 1)])
    refused(r"it is of compute capability 6.1, and the CUDA kernels need 7.0 or newer")


LACKING: dict[str, tuple[Any, str, Any, str]] = {
    "NVRTC": (
        *(cuda_devices, "find", lambda _: nvrtc.find),
        r"libnvrtc.so.14, the compiler that torch's CUDA wheels bring, was not found",
    ),
    "a driver": (
        *(cuda_devices, "Driver", lambda _: lambda: cuda_driver.Driver("libcuda-gone.so.1")),
        r"libcuda.so.1, NVIDIA's driver, can't be loaded: libcuda-gone.so.1: cannot open",
    ),
    "a newer driver": (
        *(cuda_devices, "Driver", lambda at: lambda: cuda_driver.Driver(str(at / cards.LIBRARIES["fake_nvrtc"]))),
        r"NVIDIA's driver has no cuInit: it is too old",
    ),
    "Linux": (
        *(cuda_devices.sys, "platform", lambda _: "win32"),
        r"the CUDA kernels are launched on Linux only, this is win32",
    ),
    "the source": (
        *(cuda_devices, "digest", lambda _: lambda: cuda_rows.device_code(Path("/gone/_cuda.cuh"))),
        r"/gone/_cuda.cuh, the source of the CUDA kernels, is missing: reinstall fp16opt",
    ),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_is_lacking(driver: Any, libraries: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    of, name, made, match = LACKING[what]
    monkeypatch.setattr(of, name, made(libraries))
    refused(match)
    if what == "a driver":
        assert re.search(r"^CUDA driver +missing: libcuda.so.1, ", command.report(), re.MULTILINE)


def test_an_nvrtc_that_is_too_old(libraries: Path) -> None:
    with pytest.raises(nvrtc.NvrtcError, match=r"has no nvrtcGetErrorString: it is older than CUDA 11.2"):
        nvrtc.Nvrtc(str(libraries / cards.LIBRARIES["fake_cuda"]))


def test_a_kernel_that_does_not_compile(driver: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("FAKE_NVRTC_BROKEN", "fp16opt_take")
    refused(r"fp16opt_take for sm_90: NVRTC_ERROR_COMPILATION\nline 7: error: nothing good")
    assert not folder.exists(), "half a set is not kept"


def test_a_failure_of_nvrtc_has_its_words(libraries: Path) -> None:
    compiler = nvrtc.Nvrtc(str(libraries / cards.LIBRARIES["fake_nvrtc"]))
    with pytest.raises(nvrtc.NvrtcError, match="nvrtcCreateProgram reports NVRTC_ERROR_OTHER"):
        compiler.compile("no kernel", "x", 90, ())


def test_machines_without_cards_hear_nothing(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.backend("cuda:2") == "reference", "there are two"
        monkeypatch.setattr(torch.version, "cuda", None)  # ROCm calls its devices cuda too
        assert kernels.backend("cuda:0") == "reference"
        monkeypatch.setattr(torch.version, "cuda", cards.RELEASE)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert kernels.backend("cuda:0") == "reference"
    assert not compiled()


# -- the command -------------------------------------------------------------------------------------------------------


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = command.main(["compile", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_compiling_ahead(driver: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "--arch", "sm_70,86")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["sm_70", "sm_86"]
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{cuda_rows.digest()}-sm_{arch}-nvrtc-14.3.bin" for arch in (70, 86)
    ]
    assert all(str(folder / f"{cuda_rows.digest()}-sm_{arch}-nvrtc-14.3.bin") in out for arch in (70, 86))
    assert run(capsys)[0] == 0
    assert {line.split("=")[1].split()[0] for line in compiled()} == {"sm_70", "sm_86", "sm_80", "sm_90"}, "the cards"
    count = len(compiled())
    assert kernels.backend("cuda:0") == kernels.backend("cuda:1") == "cuda"
    assert len(compiled()) == count
    assert "(4 cards compiled for)" in command.report()


def test_compiling_ahead_without_a_card(driver: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    code, out, _ = run(capsys)
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90"])


def test_what_compiling_ahead_refuses(driver: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, _ = run(capsys, "--arch=sm_61,sm_100,sm_80")
    assert code == 1
    assert "sm_61  sm_61 is older than sm_70, the oldest that is served" in out
    assert "makes no code for sm_100" in out
    assert "sm_80  /" in out
    monkeypatch.setattr(cuda_devices, "find", nvrtc.find)
    code, _, err = run(capsys)
    assert (code, err) == (
        1,
        "fp16opt compile: libnvrtc.so.14, the compiler that torch's CUDA wheels bring, was not found\n",
    )
