"""O1: functions cast their inputs. ``torch.autocast`` where its lists are apex's, wrappers around the rest.

Casts are on in a thread while autocast is. :class:`Casts` turns it on, puts wrappers where autocast does something else
than apex did, and takes everything out again. A wrapper that is called where autocast is off does nothing, so other
threads, ``disable_casts`` and ``torch.autocast(enabled=False)`` are respected.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..kernels import HALF_DTYPES
from .lists import functional_overrides, tensor_overrides, torch_overrides
from .nested import map_tensors
from .policy import AmpError

logger = logging.getLogger("fp16opt.amp")

DEVICES = ("cpu", "cuda")
KINDS = ("half", "float", "promote")

# autocast on the CPU and on CUDA casts these like apex did. Wrappers around them only keep BF16 as it is.
_AUTOCAST_HALF = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "prelu"),
        *("addmm", "matmul", "mm", "bmm", "addbmm", "baddbmm", "__matmul__", "__rmatmul__"),
    }
)
# torch itself promotes these to the widest dtype.
_TORCH_PROMOTES = frozenset(
    {
        *("add", "div", "mul", "addcdiv", "addcmul", "atan2", "eq", "ge", "gt", "le", "lt", "ne", "cat", "stack"),
        *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
        *("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"),
        *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
    }
)
_RNNS = (
    *("rnn_tanh", "rnn_relu", "lstm", "gru"),
    *("rnn_tanh_cell", "rnn_relu_cell", "lstm_cell", "gru_cell"),
)


def autocast_state() -> tuple[bool, ...]:
    """Whether autocast is on in this thread, for each of :data:`DEVICES`."""
    return tuple([torch.is_autocast_enabled(device) for device in DEVICES])


def set_autocast_state(state: tuple[bool, ...]) -> None:
    """Undo with what :func:`autocast_state` gave."""
    for device, enabled in zip(DEVICES, state, strict=True):
        torch.set_autocast_enabled(device, enabled)


class Casts:
    """Function casts: whether they are on, what was registered, and what to put back.

    Attributes:
        active: Whether the process has them.
        registered: (module or class, name, kind) of the user's functions.
        in_backward: Inside ``scale_loss``: autocast is off, so that torch's own formulas stay as they are; functions
            that backwards written in Python call cast all the same.
    """

    def __init__(self) -> None:
        self.active = False
        self.in_backward = False
        self.registered: list[tuple[Any, str, str]] = []
        self.cache: dict[int, tuple[Tensor, int, bool, Tensor]] = {}
        self.verbose = False
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._before: tuple[tuple[bool, ...], tuple[torch.dtype, ...]] | None = None

    # -- on and off --------------------------------------------------------------------------------------------------

    def activate(self, *, verbose: bool = False) -> None:
        """Turn casts on in this thread and put the wrappers in. Turned on already, they are put in anew."""
        self.deactivate()
        self.verbose = verbose
        self._before = (autocast_state(), tuple([torch.get_autocast_dtype(device) for device in DEVICES]))
        try:
            for owner, name, wrapper in self._planned():
                self._replace(owner, name, wrapper)
            for device in DEVICES:
                torch.set_autocast_dtype(device, torch.float16)
                torch.set_autocast_enabled(device, True)
        except BaseException:
            self.deactivate(force=True)
            raise
        self.active = True

    def deactivate(self, force: bool = False) -> None:
        """Put back every function and autocast's settings as they were before :meth:`activate`."""
        if not (self.active or force):
            return
        while self._replaced:
            owner, name, ours, old = self._replaced.pop()
            if getattr(owner, "__dict__", {}).get(name) is not ours:
                continue  # another wrapper was put around ours, which does nothing from now on
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        if self._before is not None:
            set_autocast_state(self._before[0])
            for device, dtype in zip(DEVICES, self._before[1], strict=True):
                torch.set_autocast_dtype(device, dtype)
        self._before = None
        self.active = self.in_backward = False
        self.clear_cache()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        old = vars(owner).get(name, _ABSENT)
        ours = make(getattr(owner, name))
        setattr(owner, name, ours)
        self._replaced.append((owner, name, ours, old))

    def _planned(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """(owner, name, what makes the wrapper), the user's own last, around ours."""
        for lists in (functional_overrides, torch_overrides, tensor_overrides):
            for name in lists.FP16_FUNCS:
                if hasattr(lists.MODULE, name):
                    yield lists.MODULE, name, self._spare_bfloat16 if name in _AUTOCAST_HALF else self.half
            for name in lists.FP32_FUNCS:
                yield lists.MODULE, name, self.float
            for name in getattr(lists, "CASTS", ()):
                if name not in _TORCH_PROMOTES:
                    yield lists.MODULE, name, self.promote
            for name in getattr(lists, "SEQUENCE_CASTS", ()):
                if name not in _TORCH_PROMOTES:
                    yield lists.MODULE, name, self.promote
        for name, reason in functional_overrides.BANNED_FUNCS:
            yield functional_overrides.MODULE, name, functools.partial(self._banned, reason=reason)
        for name, wrapper in self._in_place():
            yield torch.Tensor, name, wrapper
        for name in _RNNS:
            yield torch._VF, name, self._rnn
        for owner, name, kind in self.registered:
            yield owner, name, functools.partial(getattr(self, kind), off_inside=_is_torch(owner))

    def _in_place(self) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        for name in tensor_overrides.FP16_FUNCS:
            if not name.startswith("__") and hasattr(torch.Tensor, f"{name}_"):
                yield f"{name}_", self._like_self
        for name in tensor_overrides.FP32_FUNCS:
            inplace = f"__i{name[2:]}" if name.startswith("__") and not name.startswith("__r") else f"{name}_"
            if hasattr(torch.Tensor, inplace):
                yield inplace, self._refuse_half

    def register(self, owner: Any, name: str, kind: str) -> None:
        """Have ``owner.name`` cast its inputs while casts are on.

        Raises:
            AmpError: There is no such function (a ``ValueError``).
        """
        if not hasattr(owner, name):
            where = getattr(owner, "__name__", repr(owner))
            raise AmpError(f"register_{kind}_function: {where} has no function {name!r}.")
        self.registered = [entry for entry in self.registered if entry[:2] != (owner, name)]
        self.registered.append((owner, name, kind))

    # -- whether and what to cast ------------------------------------------------------------------------------------

    def on_for(self, tensor: Tensor) -> bool:
        """Whether functions of ``tensor`` cast in this thread now."""
        return self.in_backward or torch.is_autocast_enabled(tensor.device.type)

    def on(self) -> bool:
        """Whether any function casts in this thread now."""
        return self.in_backward or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

    def narrowed(self, tensor: Tensor) -> Tensor:
        """An FP32 tensor in FP16; a parameter's is kept until weights may have changed. Others stay."""
        if tensor.dtype is not torch.float32 or not self.on_for(tensor):
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(torch.float16)
        entry = self.cache.get(id(tensor))
        grad_mode = torch.is_grad_enabled()
        if entry is None or entry[0] is not tensor or entry[1] != tensor._version or entry[2] != grad_mode:
            entry = (tensor, tensor._version, grad_mode, tensor.to(torch.float16))
            self.cache[id(tensor)] = entry
        return entry[3]

    def widened(self, tensor: Tensor) -> Tensor:
        """A 16-bit tensor in FP32; others stay."""
        return tensor.float() if tensor.dtype in HALF_DTYPES and self.on_for(tensor) else tensor

    def clear_cache(self) -> None:
        """Forget FP16 copies of weights: autocast's and those made here."""
        self.cache.clear()
        torch.clear_autocast_cache()

    # -- wrappers ----------------------------------------------------------------------------------------------------

    def half(self, function: Callable[..., Any], off_inside: bool = False) -> Callable[..., Any]:
        """``function`` with FP32 tensors cast to FP16."""
        return self._casting(function, lambda args, kwargs: _both(args, kwargs, self.narrowed), off_inside)

    def float(self, function: Callable[..., Any], off_inside: bool = False) -> Callable[..., Any]:
        """``function`` with 16-bit tensors cast to FP32."""
        return self._casting(function, lambda args, kwargs: _both(args, kwargs, self.widened), off_inside)

    def promote(self, function: Callable[..., Any], off_inside: bool = False) -> Callable[..., Any]:
        """``function`` with FP16 tensors cast to the widest floating dtype among its inputs."""
        return self._casting(function, lambda args, kwargs: _widest(self, args, kwargs), off_inside)

    def _casting(
        self, function: Callable[..., Any], cast: Callable[[Any, Any], tuple[Any, Any]], off_inside: bool
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active or not self.on():
                return function(*args, **kwargs)
            given = args
            args, kwargs = cast(args, kwargs)
            if self.verbose and any(a is not b for a, b in zip(given, args, strict=True)):
                logger.info("%s casts its inputs.", getattr(function, "__name__", function))
            if not off_inside:
                return function(*args, **kwargs)
            with self.disabled():
                return function(*args, **kwargs)

        return wrapper

    def _spare_bfloat16(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for arg in args:
                if isinstance(arg, Tensor) and arg.dtype is torch.bfloat16:
                    with self.disabled():
                        return function(*args, **kwargs)
            if self.in_backward:
                args, kwargs = _both(args, kwargs, self.narrowed)
            return function(*args, **kwargs)

        return wrapper

    def _banned(self, function: Callable[..., Any], reason: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active or not self.on():
                return function(*args, **kwargs)
            halves = [t for t in _tensors((*args, *kwargs.values())) if t.dtype in HALF_DTYPES and self.on_for(t)]
            if halves:
                raise NotImplementedError(reason)
            with self.disabled():
                return function(*args, **kwargs)

        return wrapper

    def _like_self(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(itself: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.active or not self.on_for(itself):
                return function(itself, *args, **kwargs)
            args, kwargs = _both(args, kwargs, lambda t: t.to(itself.dtype) if t.is_floating_point() else t)
            with self.disabled():
                return function(itself, *args, **kwargs)

        return wrapper

    def _refuse_half(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(itself: Tensor, *args: Any, **kwargs: Any) -> Any:
            if itself.dtype in HALF_DTYPES and self.active and self.on_for(itself):
                name = getattr(function, "__name__", "this function")
                raise NotImplementedError(
                    f"Tensor.{name} on a 16-bit tensor: it is computed in FP32 under O1 and can't be stored in place. "
                    "Use the function that is not in place, or amp.disable_casts()."
                )
            return function(itself, *args, **kwargs)

        return wrapper

    def _rnn(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """RNNs on the CPU, which autocast leaves alone; on CUDA it casts them itself."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            first = next(iter(_tensors(args)), None)
            if first is None or not self.active or first.is_cuda or not self.on_for(first):
                return function(*args, **kwargs)
            args, kwargs = _both(args, kwargs, self.narrowed)
            with self.disabled():
                return function(*args, **kwargs)

        return wrapper

    # -- contexts ----------------------------------------------------------------------------------------------------

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Casts are off inside, in this thread; afterwards they are as they were. May be nested."""
        state, in_backward = autocast_state(), self.in_backward
        set_autocast_state((False,) * len(DEVICES))
        self.in_backward = False
        try:
            yield
        finally:
            set_autocast_state(state)
            self.in_backward = in_backward and self.active

    def keeping(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """``function`` with casts as they are now, wherever in this thread it is called."""
        state, in_backward = autocast_state(), self.in_backward

        @functools.wraps(function)
        def call() -> Any:
            there = autocast_state(), self.in_backward
            set_autocast_state(state)
            self.in_backward = in_backward
            try:
                return function()
            finally:
                set_autocast_state(there[0])
                self.in_backward = there[1]

        return call

    def enter_backward(self) -> Callable[[], None]:
        """Autocast is off from now on, and functions called from Python cast. Returns what undoes it."""
        if not self.active or not self.on():
            return _nothing
        state, before = autocast_state(), self.in_backward
        set_autocast_state((False,) * len(DEVICES))
        self.in_backward = True

        def leave() -> None:
            if self.active:
                set_autocast_state(state)
                self.in_backward = before

        return leave


_ABSENT = object()


def _nothing() -> None:
    """There is nothing to undo."""


def _is_torch(owner: Any) -> bool:
    """Whether functions of ``owner`` are torch's own, which autocast would cast once more."""
    module = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
    return module == "torch" or module.startswith("torch.")


def _both(args: Any, kwargs: Any, cast: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    cast_kwargs = {name: _cast_one(value, cast) for name, value in kwargs.items()} if kwargs else kwargs
    return tuple([_cast_one(arg, cast) for arg in args]), cast_kwargs


def _cast_one(value: Any, cast: Callable[[Tensor], Any]) -> Any:
    """`map_tensors`, with short ways for what most arguments are."""
    if isinstance(value, Tensor):
        return cast(value)
    return value if value is None or isinstance(value, (int, float, str)) else map_tensors(value, cast)


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tuple(values), note)
    return found


def _widest(casts: Casts, args: Any, kwargs: Any) -> tuple[Any, Any]:
    floating = [t for t in _tensors((*args, *kwargs.values())) if t.is_floating_point() and casts.on_for(t)]
    dtypes = {t.dtype for t in floating}
    if len(dtypes) < 2:
        return args, kwargs
    widest = functools.reduce(torch.promote_types, dtypes)
    return _both(args, kwargs, lambda t: t.to(widest) if t.is_floating_point() and casts.on_for(t) else t)
