"""Random lists of tensors for the kernel tests, and their way to numpy and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle_kernels as oracle
import pytest
import torch
from torch import Tensor


def seeds(count: int) -> Any:
    """Of random lists: without ``--all`` two."""
    return pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.all) for n in range(2, count))])


KINDS = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "single", torch.float64: "double"}
SIXTEEN = (torch.float16, torch.bfloat16)
UP_TO_SINGLE = (*SIXTEEN, torch.float32)
BORDERS = [n + d for n in (8, 64, 2048, 65536, 131072) for d in (-1, 0, 1)]
SPECIALS = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-45, 65504.0, 65520.0, 3.39e38, -3.4e38, 6e-8, 1e30, 1e-30]


def values(rng: np.random.Generator, numel: int, special: float = 0.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 of mixed magnitude; a share ``special`` of them is infinite, nan, huge or tiny."""
    result = (rng.standard_normal(numel) * 10.0 ** rng.uniform(-4, 2, numel)).astype(np.float32)
    chosen = rng.random(numel) < special
    result[chosen] = rng.choice(np.array(SPECIALS, dtype=np.float32), int(chosen.sum()))
    return result


def shape_of(rng: np.random.Generator) -> tuple[int, ...]:
    """Empty, zero-dimensional, at the border of a block, or with several dimensions."""
    pick = int(rng.integers(0, 8))
    if pick == 0:
        return [(), (0,), (3, 0, 2), (1,), (1, 1, 5)][int(rng.integers(0, 5))]
    if pick <= 3:
        return (int(rng.choice(BORDERS)),)
    if pick <= 5:
        return tuple(int(n) for n in rng.integers(1, 40, 2))
    return tuple(int(n) for n in rng.integers(1, 9, 4))


LAYOUTS = ("plain", "reversed", "channels_last", "sliced", "odd_ones")


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values at other places in memory."""
    if layout == "reversed":
        order = list(range(tensor.dim()))[::-1]
        return tensor.permute(order).contiguous().permute(order)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "sliced" and tensor.dim() and tensor.numel():
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), 7.0, dtype=tensor.dtype)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if layout == "odd_ones" and 1 in tensor.shape:
        strides = [999 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        return tensor.contiguous().as_strided(tensor.shape, strides) if tensor.is_contiguous() else tensor
    return tensor


def make(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "plain", special: float = 0.0
) -> Tensor:
    """One random tensor."""
    flat = torch.from_numpy(values(rng, int(np.prod(shape, dtype=np.int64)), special))
    if dtype == torch.float64:
        flat = flat.double() * (1 + 2.0**-40)
    return lay_out(flat.to(dtype).reshape(shape), layout)


def place(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy with the same strides and offset, with the memory around it."""
    around = (
        torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()).to(device, copy=True)
    )
    return around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def copies(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """For who writes to tensors that other tests read too."""
    return [None if t is None else place(t, "cpu") for t in tensors]


def raw(tensor: Tensor, like: Tensor | None = None) -> np.ndarray[Any, Any]:
    """The stored values in the memory order of ``like`` (itself where not given), 16-bit ones as uint16. A copy."""
    strides = np.array((like if like is not None else tensor).stride(), dtype=np.int64)
    order = np.argsort(-strides, kind="stable")
    stored = tensor.detach()
    if tensor.dtype in SIXTEEN:
        return stored.contiguous().view(torch.int16).numpy().view("u2").transpose(order).reshape(-1).copy()
    return stored.contiguous().numpy().transpose(order).reshape(-1).copy()


def assert_same_values(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], kind: str, where: str) -> None:
    """Equal bits, but for the payloads of nans."""
    left, right = oracle.decode(found, kind), oracle.decode(wanted, kind)
    as_bits = np.uint64 if kind == "double" else np.uint32
    same = (left.view(as_bits) == right.view(as_bits)) | (np.isnan(left) & np.isnan(right))
    if not same.all():
        place = int(np.flatnonzero(~same)[0])
        raise AssertionError(f"{where}: element {place} of {left.size} is {left[place]!r}, should be {right[place]!r}")


def assert_same_number(found: float, wanted: float, where: str) -> None:
    """Equal, or both nan."""
    if not (found == wanted or (np.isnan(found) and np.isnan(wanted))):
        raise AssertionError(f"{where} is {found!r}, should be {wanted!r}")
