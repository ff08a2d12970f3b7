"""One forward with its backward, watched by hooks: who made the first number that is not finite, how large all are."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...engine.dtensors import is_sharded, local, raw_grads, set_raw_grad

_OFF = 0.05
"""The share of a module's range in FP32 by which its FP16 output may differ."""


@dataclass
class Range:
    """The least and the largest of some numbers; nan where one is nan."""

    least: float
    largest: float

    @property
    def is_finite(self) -> bool:
        """Whether all of them are."""
        return abs(self.least) < float("inf") and abs(self.largest) < float("inf")

    def __str__(self) -> str:
        return f"{self.least:.4g} to {self.largest:.4g}"


@dataclass
class Broken:
    """The first module whose output is not finite.

    Attributes:
        inputs: of its floating inputs; None where it has none.
        in_fp32: of its output in FP32 from the same inputs; None where that could not be had.
        dtype: of its output.
    """

    name: str
    kind: str
    inputs: Range | None
    in_fp32: Range | None
    dtype: torch.dtype
    has_children: bool


@dataclass
class Inside:
    """An operation in a forward that makes inf of finite FP16 numbers, where FP32 would hold what it makes.

    Attributes:
        name: of the module in whose forward it stands.
        operation: in torch's name.
        largest: what it makes in FP32.
        output: of the module.
        in_fp32: of its output in FP32 from the same inputs; None where that could not be had.
    """

    name: str
    operation: str
    largest: float
    output: Range | None = None
    in_fp32: Range | None = None

    @property
    def is_harmless(self) -> bool:
        """Whether the module gives what it would give in FP32, as a ``tanh`` does of inf."""
        if self.output is None or self.in_fp32 is None:
            return False
        off = max(abs(self.output.least - self.in_fp32.least), abs(self.output.largest - self.in_fp32.largest))
        return off < _OFF * max(abs(self.in_fp32.least), abs(self.in_fp32.largest))


@dataclass
class Reach:
    """How large one tensor is: the output of a module, or a scaled gradient.

    Attributes:
        name: in words.
        largest: its largest magnitude, inf or nan where it is not finite.
    """

    name: str
    largest: float
    dtype: torch.dtype

    @property
    def is_finite(self) -> bool:
        """Whether all of it is."""
        return self.largest < float("inf")


@dataclass
class Run:
    """What one forward, and where it was finite one backward, gave.

    Attributes:
        loss: unscaled.
        input_is_finite: what the model was called with.
        reaches: of gradients, in the order in which the backward made them; empty where there was none.
        gradients: by parameter name, this rank's pieces of the scaled ones.
        outputs: of modules, in the order in which the forward made them, up to one that is not finite.
        autocast: the dtypes that autocast chose, wherever a module ran under it.
        inside: operations that overflow, where that was asked for.
    """

    loss: float
    loss_dtype: torch.dtype
    input_is_finite: bool
    broken: Broken | None
    reaches: list[Reach]
    gradients: dict[str, Tensor]
    outputs: list[Reach]
    autocast: set[torch.dtype]
    inside: list[Inside]

    @property
    def is_finite(self) -> bool:
        """Whether the forward was."""
        return self.broken is None and self.input_is_finite and abs(self.loss) < float("inf")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors with elements in nested containers and dataclasses, as models return them."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout is torch.strided and local(value).numel():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


def range_of(values: Any) -> Range | None:
    """The range of all floating tensors in ``values``; None where there are none. Syncs."""
    with without_casts():  # autocast on a CPU refuses to stack FP16 numbers
        found = [torch.stack(local(value.detach()).aminmax()).double().cpu() for value in tensors_in(values)]
    if not found:
        return None
    least, largest = torch.stack(found).unbind(1)
    return Range(least.amin().item(), largest.amax().item())


def shares_gradients(model: nn.Module) -> bool:
    """Whether other ranks take part in the backward."""
    dist = sys.modules.get("torch.distributed")
    many = dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return many or any(map(is_sharded, model.parameters()))


def agreed(values: list[float], device: torch.device) -> list[float]:
    """The largest of each over all ranks, so that all do the same next. One message where there are others."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    together = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    found: list[float] = together.tolist()
    return found


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which operations of a forward make inf of finite numbers in FP16. It waits for each."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: list[str] = []
        """Those whose forwards are running, the innermost last."""
        self.found: dict[str, Inside] = {}
        """By module: its first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs = args, kwargs or {}
        operation = getattr(func, "__name__", str(func)).split(".")[0]
        if operation.endswith("_") and isinstance(args[0], Tensor) and args[0].dtype == torch.float16:
            given = _widened(given, copies=True)
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.dtype != torch.float16:
            return made
        name = self.modules[-1] if self.modules else "the loss function"
        if name not in self.found and "empty" not in operation:
            with contextlib.suppress(Exception):  # whatever can't be looked at is no reason to stop
                halves = [one for one in tensors_in(made) if one.dtype == torch.float16]
                if any(map(_is_beyond, halves)) and not any(map(_has_inf, tensors_in(given))):
                    wide = range_of(func(*_widened(given[0]), **_widened(given[1])))
                    if wide is not None and wide.is_finite:
                        self.found[name] = Inside(name, operation, wide.largest)
        return made


class Probe:
    """Watches forwards and backwards of a model, and leaves the model as it was.

    Args:
        model: Its parameters' gradients, its buffers and all random number generators stay as they are.
        loss_fn: Gives the loss: one floating element.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[], Tensor]) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.names = {id(module): name for name, module in model.named_modules()}
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._shares = shares_gradients(model)
        self._busy = False

    def run(self, scale: float, inside: bool = False) -> Run:
        """One forward, and one backward of the loss times ``scale`` where the forward was finite on all ranks. Syncs.

        Args:
            inside: whether to look at each operation of the forward, too.

        Raises:
            TypeError, ValueError: ``loss_fn`` gave no floating tensor, or not one element that requires grad.
        """
        self._broken: Broken | None = None
        self._input_is_finite = True
        self._reached: list[tuple[str, Tensor, torch.dtype]] = []
        self._outputs: list[Reach] = []
        self._autocast: set[torch.dtype] = set()
        self._operations = _Operations()
        with as_it_was(self.model, self._shares), torch.inference_mode(False), torch.enable_grad():
            hooks = [self.model.register_forward_pre_hook(self._enter, with_kwargs=True)]
            hooks += [m.register_forward_pre_hook(self._begin) for m in self.model.modules()]
            hooks += [m.register_forward_hook(self._leave, with_kwargs=True) for m in self.model.modules()]
            try:
                with self._operations if inside else contextlib.nullcontext():
                    loss = self.loss_fn()
            finally:
                for hook in hooks:
                    hook.remove()
            check_loss(loss)
            forward = self._input_is_finite, self._broken
            inner = list(self._operations.found.values())
            run = Run(float(loss.detach()), loss.dtype, *forward, [], {}, self._outputs, self._autocast, inner)
            (worst,) = agreed([float(not run.is_finite)], local(loss).device)
            if worst:
                gather_in(self.model)
            else:
                run.gradients = self._backward(loss.float() * scale)
                run.reaches = [Reach(name, g.item(), dtype) for name, g, dtype in self._reached]
                run.reaches += [
                    Reach(f"{name} (its weight's gradient)", _largest(g).item(), g.dtype)
                    for name, g in run.gradients.items()
                    if g.numel()
                ]
        return run

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        found = None if self._busy else range_of([args, kwargs])
        self._input_is_finite = self._input_is_finite and (found is None or found.is_finite)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._operations.modules.append(self.names.get(id(module), "") or "the model")

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._operations.modules.pop()
        if self._busy or self._broken is not None:
            return
        outputs = list(tensors_in(output))
        found = range_of(outputs)
        inner = self._operations.found.get(name)
        if inner is not None and inner.output is None:
            inner.output, inner.in_fp32 = found, self._in_fp32(module, args, kwargs)
        if found is not None and not found.is_finite:
            in_fp32 = self._in_fp32(module, args, kwargs)
            kind, has_children = type(module).__name__, next(module.children(), None) is not None
            inputs = range_of([args, kwargs])
            self._broken = Broken(name, kind, inputs, in_fp32, outputs[0].dtype, has_children)
            return
        if found is not None:
            self._outputs.append(Reach(name, max(-found.least, found.largest), outputs[0].dtype))
            kind = outputs[0].device.type
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                self._autocast.add(torch.get_autocast_dtype(kind))
        for each in outputs:
            if each.requires_grad:
                each.register_hook(self._reacher(name))  # type: ignore[no-untyped-call]

    def _reacher(self, name: str) -> Callable[[Tensor], None]:
        def reach(grad: Tensor) -> None:
            if grad.layout is torch.strided and grad.numel():
                self._reached.append((f"{name} (its output's gradient)", _largest(local(grad)), grad.dtype))

        return reach

    def _backward(self, scaled: Tensor) -> dict[str, Tensor]:
        """By name: this rank's pieces of the gradients that parameters got."""
        grads: list[Tensor | None]
        if not self._shares:
            # Nothing accumulates: neither .grad nor the hooks of those who step while the backward runs are touched.
            grads = list(torch.autograd.grad(scaled, list(self.params.values()), allow_unused=True))
        else:
            scaled.backward()  # type: ignore[no-untyped-call]
            grads = raw_grads(self.params.values())
        named = zip(self.params, grads, strict=True)
        dense = {
            name: grad.to_dense() if grad.layout is not torch.strided else grad
            for name, grad in named
            if grad is not None
        }
        return {name: local(grad.detach()) for name, grad in dense.items()}

    def _in_fp32(self, module: nn.Module, args: Any, kwargs: Any) -> Range | None:
        """The output of a module in FP32, from the same inputs; None where it can't be had."""
        if self._shares and not _is_alone(module):
            return None
        self._busy = True
        try:
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            wide = {name: _widened(value.detach().clone()) for name, value in tensors.items()}
            with torch.no_grad(), without_casts():
                found = torch.func.functional_call(module, wide, _widened(args), _widened(kwargs))
            return range_of(found)
        except Exception:  # whatever keeps a module from running in FP32 is no reason not to name it
            return None
        finally:
            self._busy = False


def gather_in(model: nn.Module) -> None:
    """FSDP2 shows whole weights after a forward until its backward: where there is none, go back to the pieces."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard) and any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            reshard()


def _is_alone(module: nn.Module) -> bool:
    """Whether a forward of this module sends no messages: a plain one of torch's, with whole weights."""
    plain = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.SyncBatchNorm)
    return plain and next(module.children(), None) is None and not any(map(is_sharded, module.parameters()))


def _largest(grad: Tensor) -> Tensor:
    """The largest magnitude: 0-dim, nan where one is nan."""
    least, most = grad.detach().aminmax()
    return torch.maximum(-least, most)


def _is_beyond(value: Tensor) -> bool:
    """Whether it holds inf. What is -inf may be a mask, of which a softmax makes 0."""
    return bool((value == float("inf")).any())


def _has_inf(value: Tensor) -> bool:
    return bool(value.isinf().any())


def _widened(value: Any, copies: bool = False) -> Any:
    """Floating tensors in nested containers as FP32, and that dtype where FP16 is asked for."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float32, copy=copies) if value.is_floating_point() else value
    if value is torch.float16:
        return torch.float32
    if isinstance(value, dict):
        return {key: _widened(part, copies) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_widened(part, copies) for part in value)
    return value


@contextlib.contextmanager
def without_casts() -> Iterator[None]:
    """Within, neither autocast nor the function casts of ``fp16opt.amp`` choose a dtype."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        amp = sys.modules.get("fp16opt.amp")
        if amp is not None:
            stack.enter_context(amp.disable_casts())
        yield


def check_loss(loss: object) -> None:
    """Raise where a backward can't start from ``loss``."""
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        got = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn: expected it to return a floating tensor, the loss, got {got}.")
    if loss.numel() != 1:
        raise ValueError(f"loss_fn: expected a loss of one element, got shape {tuple(loss.shape)}. Reduce it first.")
    if not loss.requires_grad:
        raise ValueError("loss_fn: the loss does not require grad, so that there is no backward. Leave out no_grad.")


@contextlib.contextmanager
def buffers_as_they_were(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards these modules have the buffers of before, with their bits."""
    buffers = [
        (module._buffers, name, value, value.clone())
        for module in modules
        for name, value in module._buffers.items()
        if value is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for place, name, value, copy in buffers:
                place[name] = value
                if not same_bits(value, copy):
                    value.copy_(copy)


@contextlib.contextmanager
def as_it_was(model: nn.Module, with_gradients: bool) -> Iterator[None]:
    """Afterwards buffers and random number generators are as before, and, where asked for, parameters' gradients."""
    params = list(model.parameters()) if with_gradients else []
    grads = raw_grads(params)
    # DDP writes the next gradients where the present ones are views of its buckets.
    copies = [None if grad is None or not grad._is_view() else grad.clone() for grad in grads]
    for param in params:
        set_raw_grad(param, None)
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    try:
        with torch.random.fork_rng(devices=devices), buffers_as_they_were(model.modules()):
            yield
    finally:
        random.setstate(state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        with torch.no_grad():
            for param, grad, kept in zip(params, grads, copies, strict=True):
                set_raw_grad(param, grad)
                if kept is not None and grad is not None:
                    grad.data.copy_(kept)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, nan for nan. Syncs."""
    a, b = local(a), local(b)
    if a.layout is not torch.strided or a.numel() == 0:
        return True
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
