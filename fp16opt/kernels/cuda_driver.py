"""CUDA's driver: kernels are loaded into torch's context and launched there.

What is called here: https://docs.nvidia.com/cuda/cuda-driver-api/. Every function has its argument types, or addresses
would go as 32 bits. Nothing waits for the GPU, but where it says so.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

_ONE, _NONE, _THREADS = c_uint(1), c_uint(0), c_uint(256)  # of a launch; to make them anew takes longer than the call
_ARGUMENTS = [c_char_p * count for count in range(3)]
_NAME = "libcuda.so.1"
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ADDRESS = c_uint64  # a CUdeviceptr
_SIGNATURES = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(_ADDRESS), c_void_p, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_char_p, c_size_t, c_void_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_char_p), POINTER(c_void_p)),
}
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_LOCKED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, for all contexts; CU_MEMHOSTREGISTER_DEVICEMAP, in the card's addresses
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED


class DriverError(RuntimeError):
    """The driver is not there, or refuses a call; the message has its own words."""


class Driver:
    """The driver's library.

    Args:
        path: of the library, or its name for the loader.

    Attributes:
        version: the newest CUDA release whose code it takes for sure, as in (13, 0).

    Raises:
        DriverError: it can't be loaded, or finds no card.
    """

    def __init__(self, path: str = _NAME) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise DriverError(f"{_NAME}, NVIDIA's driver, can't be loaded: {error}") from None
        for name, types in _SIGNATURES.items():
            if not hasattr(self._library, name):
                raise DriverError(f"NVIDIA's driver has no {name}: it is too old")
            getattr(self._library, name).argtypes = types
        self.launch_kernel = self._library.cuLaunchKernel
        self.current_context = self._library.cuCtxGetCurrent
        self.call("cuInit", 0)
        number = c_int()
        self.call("cuDriverGetVersion", byref(number))
        self.version = (number.value // 1000, number.value % 1000 // 10)

    def check(self, code: int, what: str) -> None:
        """Raise DriverError unless ``code`` is CUDA_SUCCESS."""
        if code == 0:
            return
        texts = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = c_char_p()
            function(code, byref(text))
            texts.append((text.value or str(code).encode()).decode())
        raise DriverError(f"{what}: CUDA reports {texts[0]}: {texts[1]}")

    def call(self, name: str, *arguments: object) -> None:
        """Call one function. Raises DriverError where it fails."""
        self.check(getattr(self._library, name)(*arguments), name)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Calls that a capture on this thread would forbid are allowed: what they do is no part of the graph."""
        mode = c_int(_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))


class Card:
    """Kernels loaded into the context that torch uses on one device: its primary one.

    Args:
        driver: the driver.
        index: the device's number, in torch as in CUDA.
        code: gives a kernel's machine code, once, by its name.
        first: the kernels that are loaded now; others are when they are first launched.

    Raises:
        DriverError: the driver refuses the code, or the device.
    """

    def __init__(self, driver: Driver, index: int, code: Callable[[str], bytes], first: Iterable[str]) -> None:
        self._driver, self._code, self._lock = driver, code, threading.Lock()
        device, context = c_int(), c_void_p()
        driver.call("cuDeviceGet", byref(device), index)
        driver.call("cuDevicePrimaryCtxRetain", byref(context), device.value)
        self._context, self._device = context.value, device.value
        self._functions: dict[str, c_void_p] = {}
        with self._here(), driver.relaxed():
            for name in first:
                self._load(name)

    def _load(self, name: str) -> c_void_p:
        with self._lock:  # of several threads that launch a new kernel one loads it
            if name not in self._functions:
                module, function = c_void_p(), c_void_p()
                self._driver.call("cuModuleLoadData", byref(module), self._code(name))
                self._driver.call("cuModuleGetFunction", byref(function), module, f"fp16opt_{name}".encode())
                self._functions[name] = function
            return self._functions[name]

    @contextmanager
    def _here(self) -> Iterator[None]:
        """The device's context is the thread's."""
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def launch(self, name: str, blocks: int, stream: int, *arguments: bytes) -> None:
        """Queue a kernel; the structs are copied before this returns. Does not wait, but for a new kernel's code.

        Args:
            name: of the kernel.
            blocks: how many.
            stream: the address of a stream of this device.
            arguments: packed structs, at most two.

        Raises:
            DriverError: with CUDA's words; also for what kernels before this one did. ValueError: too many blocks.
        """
        if blocks > 0x7FFFFFFF:
            raise ValueError(f"{name}: more than 2^31 chunks in one call, {blocks}. Make several calls.")
        current = c_void_p()
        code = self._driver.current_context(byref(current))
        if code != 0:
            self._driver.check(code, "cuCtxGetCurrent")
        if current.value != self._context:
            with self._here():
                self.launch(name, blocks, stream, *arguments)
            return
        function = self._functions.get(name)
        if function is None:
            with self._driver.relaxed():
                function = self._load(name)
        given = _ARGUMENTS[len(arguments)](*arguments)
        code = self._driver.launch_kernel(
            function, blocks, _ONE, _ONE, _THREADS, _ONE, _ONE, _NONE, stream, given, None
        )
        if code != 0:
            self._driver.check(code, f"multi_tensor_{name}")

    def keep(self, content: bytes, size: int) -> int:
        """Memory of the device, for a graph that is being captured. Waits for the copy, not for the capturing stream.

        Returns:
            Its address, until :meth:`give_back`.
        """
        call, memory, stream = self._driver.call, _ADDRESS(), c_void_p()
        with self._here(), self._driver.relaxed(), ExitStack() as undo:
            call("cuMemAlloc_v2", byref(memory), max(1, size))
            undo.callback(self.give_back, memory.value)
            call("cuStreamCreate", byref(stream), _NON_BLOCKING)
            with ExitStack() as after:
                after.callback(call, "cuStreamDestroy_v2", stream)
                call("cuMemcpyHtoDAsync_v2", memory, content, len(content), stream)
                call("cuStreamSynchronize", stream)
            undo.pop_all()
        return int(memory.value)

    def give_back(self, address: int) -> None:
        """Free what :meth:`keep` gave. Waits for the device."""
        with self._here(), self._driver.relaxed():
            self._driver.call("cuMemFree_v2", address)

    # -- memory of the host --------------------------------------------------------------------------------------------

    def lock_pages(self, address: int, size: int) -> int:
        """Lock whole pages of the host and map them into the addresses of all cards.

        Returns:
            Where this card has them, until :meth:`unlock_pages`.
        """
        call, mapped = self._driver.call, _ADDRESS()
        with self._here(), self._driver.relaxed(), ExitStack() as undo:
            call("cuMemHostRegister_v2", address, size, _LOCKED)
            undo.callback(call, "cuMemHostUnregister", address)
            call("cuMemHostGetDevicePointer_v2", byref(mapped), address, 0)
            undo.pop_all()
        return int(mapped.value)

    def unlock_pages(self, address: int) -> None:
        """Undo :meth:`lock_pages`. Waits for the device, whose queued work may write there."""
        with self._here(), self._driver.relaxed():
            self._driver.call("cuCtxSynchronize")
            self._driver.call("cuMemHostUnregister", address)

    def wait(self) -> None:
        """Wait for all that was queued on the device."""
        with self._here():
            self._driver.call("cuCtxSynchronize")

    def shares_memory(self) -> bool:
        """Whether the card's memory is the host's: it has none of its own."""
        found = c_int()
        self._driver.call("cuDeviceGetAttribute", byref(found), _INTEGRATED, self._device)
        return bool(found.value)
