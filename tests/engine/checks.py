"""Comparisons and small problems used all over the engine's tests. test_harness.py shows that they can
fail."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

SIXTEEN = (torch.float16, torch.bfloat16)

by_step = pytest.mark.parametrize("stepping", [False, "auto"], ids=["wrapped", "auto"], indirect=True)
"""A test, or with ``pytestmark`` a file, whose optimizers step by either path: the wrapped optimizer's own step, and
what the default takes. For what must hold whichever of the two it is."""


def steps_in_one_pass(opt: Any) -> bool:
    """Whether the next step is taken by our kernels, as ``repr`` tells users."""
    return "step: fused" in repr(opt)


def stored_grad(master: Tensor) -> Tensor | None:
    """``master.grad`` as it lies in memory. Reading the attribute itself has it made where it isn't there."""
    grad: Any = torch.Tensor.grad
    return grad.__get__(master)  # type: ignore[no-any-return]


def tensor_bytes(*more: Tensor | None) -> int:
    """Bytes of all tensors that are alive in Python, and of ``more``; memory that several share counts once.

    Tensors that only C++ holds (a gradient that nobody has read) are not seen: give them. Fake ones, which the
    compiler keeps, have no memory.
    """
    gc.collect()
    alive = [t for t in gc.get_objects() if issubclass(type(t), Tensor)] + [t for t in more if t is not None]
    storages = {}
    for tensor in alive:
        if tensor.layout is torch.strided and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bits(t: Tensor) -> bytes:
    """The elements' bits in logical order, whatever the strides."""
    t = t.detach()
    if t.layout != torch.strided:
        t = t.coalesce().to_dense()
    return t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def assert_same_bits(got: Tensor, want: Tensor, what: str = "tensor") -> None:
    """Same dtype, same shape, same bits; says where they first part."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(f"{what}: {got.dtype}{list(got.shape)}, wanted {want.dtype}{list(want.shape)}")
    if bits(got) == bits(want):
        return
    g, w = got.detach().reshape(-1), want.detach().reshape(-1)
    for i in range(g.numel()):
        if bits(g[i]) != bits(w[i]):
            raise AssertionError(f"{what}[{i}] of {g.numel()}: {g[i].item()!r}, wanted {w[i].item()!r}")
    raise AssertionError(f"{what}: bits differ")


class Flat(dict[str, Any]):
    """What `flatten` returns; flattening it again changes nothing."""


def flatten(obj: Any, path: str = "") -> Flat:
    """A nested structure as {path: leaf}; tensors become (dtype, shape, bits)."""
    if isinstance(obj, Flat):
        return obj
    if isinstance(obj, Tensor):
        return Flat({path: (str(obj.dtype), tuple(obj.shape), bits(obj))})
    if isinstance(obj, dict):
        items: Iterable[tuple[Any, Any]] = obj.items()
    elif isinstance(obj, (list, tuple)):
        items = enumerate(obj)
    else:
        return Flat({path: repr(obj)})
    out = Flat({path + "/": f"{type(obj).__name__}[{len(obj)}]"})
    for key, value in items:
        out.update(flatten(value, f"{path}/{key}"))
    return out


def assert_same(got: Any, want: Any, what: str = "structure") -> None:
    """Two nested structures are equal leaf by leaf, bit by bit. Both may be results of `flatten` already."""
    a, b = flatten(got), flatten(want)
    if a.keys() != b.keys():
        raise AssertionError(f"{what}: only on one side: {sorted(a.keys() ^ b.keys())[:8]}")
    for key in a:
        if a[key] != b[key]:
            raise AssertionError(f"{what}{key}: {_show(a[key])}, wanted {_show(b[key])}")


def _show(leaf: Any) -> str:
    if isinstance(leaf, tuple) and len(leaf) == 3 and isinstance(leaf[2], bytes):
        return f"{leaf[0]}{list(leaf[1])} {leaf[2][:24].hex()}"
    return str(leaf)[:120]


def groups_params(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def snapshot(opt: Any, model: Iterable[Tensor] = (), scaler: bool = False) -> Flat:
    """Everything that a refused or skipped call must leave alone, copied: weights, masters, state, groups.

    With ``scaler`` also the scaler's own state.
    """
    stepped = groups_params(opt)
    out: dict[str, Any] = {
        "model": [p.detach().clone() for p in model],
        "stepped": [p.detach().clone() for p in stepped],
        "state": [copy.deepcopy(dict(opt.state[p])) if p in opt.state else {} for p in stepped],
        "groups": [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in opt.param_groups],
    }
    if hasattr(opt, "master_params"):
        out["model"] += [p.detach().clone() for p in opt.model_params()]
        out["masters"] = [p.detach().clone() for p in opt.master_params()]
    if scaler:
        out["scaler"] = copy.deepcopy(opt.scaler.state_dict())
    return flatten(out)


def assert_model_is_rounded_masters(opt: Any) -> None:
    """Each 16-bit parameter is its FP32 master rounded to nearest even; the others' masters lie on their memory."""
    pairs = list(zip(opt.model_params(), opt.master_params(), strict=True))
    if not pairs:
        raise AssertionError("the optimizer has no parameters")
    for i, (p, m) in enumerate(pairs):
        if p.dtype in SIXTEEN:
            if m.dtype != torch.float32:
                raise AssertionError(f"master {i} is {m.dtype}")
            assert_same_bits(p, m.detach().to(p.dtype), f"model param {i}")
        elif m is p or m.data_ptr() != p.data_ptr() or not torch.equal(m, p):
            raise AssertionError(f"the master of param {i} ({p.dtype}) does not lie on its memory")


def array(values: Any, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32)).to(dtype)


def normal(shape: Sequence[int], dtype: torch.dtype, seed: int, spread: float = 1.0) -> Tensor:
    """Normal numbers from numpy (the same bits on every CPU), rounded to the dtype."""
    x = np.random.default_rng(seed).normal(0.0, spread, tuple(shape)).astype(np.float32)
    return torch.from_numpy(np.asarray(x)).to(dtype)


def parameters(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype] | torch.dtype = torch.float16,
    seed: int = 0,
) -> list[nn.Parameter]:
    """One Parameter for each shape; dtypes are used in turn."""
    kinds = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
    return [nn.Parameter(normal(s, kinds[i % len(kinds)], 1000 * seed + i)) for i, s in enumerate(shapes)]


def ones(n: int = 4, dtype: torch.dtype = torch.float16) -> nn.Parameter:
    return nn.Parameter(torch.ones(n, dtype=dtype))


def linear_loss(params: Iterable[Tensor], grads: Iterable[Tensor | float | None]) -> Tensor:
    """A loss whose gradient with respect to each param is `grad`: the scaled gradient reaches a 16-bit param
    as round(scale * grad). Params whose grad is None take no part."""
    total = torch.zeros(())
    for p, g in zip(params, grads, strict=True):
        if g is not None:
            c = g.detach().to(torch.promote_types(p.dtype, torch.float32)) if isinstance(g, Tensor) else g
            total = total + (p.to(torch.promote_types(p.dtype, torch.float32)) * c).sum().float()
    return total


def one_step(opt: Any, params: Sequence[Tensor], grads: Sequence[Tensor | float | None]) -> None:
    opt.zero_grad()
    opt.backward(linear_loss(params, grads))
    opt.step()


class Problem:
    """A sum of quadratics with another curvature for each element: gradients depend on the weights."""

    def __init__(self, params: Sequence[Tensor], seed: int = 0, sparse: bool = False) -> None:
        self.sparse = sparse
        self.curvature = [normal(p.shape, torch.float32, 7000 + seed + i).abs() + 0.25 for i, p in enumerate(params)]
        self.target = [normal(p.shape, torch.float32, 9000 + seed + i) for i, p in enumerate(params)]
        self.rows = [torch.tensor([0, 2, 2, p.shape[0] - 1]) % p.shape[0] for p in params] if sparse else []

    def loss(self, params: Sequence[Tensor], factor: float = 1.0) -> Tensor:
        total = torch.zeros(())
        for i, p in enumerate(params):
            if self.sparse:
                # Small integers, so that summing a row that was looked up twice is exact in 16 bits.
                weight = torch.round(4 * self.target[i]).clamp(-8, 8)[self.rows[i]]
                total = total + (nn.functional.embedding(self.rows[i], p, sparse=True).float() * weight).sum()
            else:
                wide = p.to(torch.promote_types(p.dtype, torch.float32))
                total = total + (0.5 * self.curvature[i] * (wide - self.target[i]) ** 2).sum().float()
        return total * factor


class Twin:
    """Hand-written mixed precision: FP32 copies stepped by the plain torch optimizer with the same gradients.

    The model is rounded from the copies before each evaluation; gradients are computed on it, upcast, and
    multiplied by 1/scale.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        problem: Problem,
        scale: float = 1.0,
    ) -> None:
        self.dtypes = [p.dtype for p in params]
        self.masters = [
            nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)) for p in params
        ]
        self.opt = make(self.masters)
        self.problem, self.scale = problem, scale

    def model(self) -> list[Tensor]:
        return [m.detach().to(d) for m, d in zip(self.masters, self.dtypes, strict=True)]

    def evaluate(self) -> Tensor:
        model = [p.clone().requires_grad_() for p in self.model()]
        loss = self.problem.loss(model)
        (loss * self.scale).backward()
        inv = float(np.float32(1.0) / np.float32(self.scale))
        for master, p in zip(self.masters, model, strict=True):
            grad = p.grad
            if grad is not None and grad.is_sparse:
                master.grad = grad.to(master.dtype).coalesce() * inv
            else:
                master.grad = None if grad is None else torch.empty_like(master).copy_(grad) * inv
        return loss.detach()

    def step(self) -> None:
        with torch.enable_grad():
            self.opt.step(self.evaluate)


def train(opt: Any, params: Sequence[Tensor], problem: Problem, closure: bool = False, factor: float = 1.0) -> None:
    """One training step on the problem, through the closure form where asked."""

    def evaluate() -> Tensor:
        opt.zero_grad()
        loss = problem.loss(params, factor)
        opt.backward(loss)
        return loss.detach()

    if closure:
        opt.step(evaluate)
    else:
        evaluate()
        opt.step()
