"""multi_tensor_encode and multi_tensor_decode against numpy, bit for bit, on every backend."""

from __future__ import annotations

from typing import Any

import emulated
import numpy as np
import oracle_kernels as oracle
import pytest
import torch
from kernel_cases import UP_TO_SINGLE
from test_cuda_alignment import around, carved
from torch import Tensor

from fp16opt.kernels import PointerTables, multi_tensor_decode, multi_tensor_encode

BLOCK = oracle.HELD_BLOCK
SIZES = (0, 1, 63, 65, 255, 256, 257, 1000, 65536 + 130, 140_000)  # the last for threads
by_dtype = pytest.mark.parametrize("dtype", UP_TO_SINGLE, ids=str)


def drawn(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Gradients of all sizes within blocks; a block of zeros, one with a single value, negative zeros, subnormals."""
    rng = np.random.default_rng(seed)
    found = []
    for n in SIZES:
        values = rng.standard_normal(n) * np.exp(3.0 * rng.standard_normal(n)) * 0.01
        values[256:512] = 0.0
        values[600:1100:7] = -0.0
        values[512:768] *= 2.0**-18  # of float16 the smallest subnormals
        if n > 2000:
            values[1024:1280] = 0.0
            values[1027] = -3.0
        found.append(torch.from_numpy(values.astype(np.float32)).to(dtype))
    return found


def room(grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    codes = [torch.full_like(grad, 77, dtype=torch.int8) for grad in grads]
    return codes, [torch.full((-(-grad.numel() // BLOCK),), 7.0) for grad in grads]


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


# -- every implementation


@by_dtype
def test_codes_and_what_they_mean_have_the_bits_of_the_oracle(dtype: torch.dtype, implementation: str) -> None:
    tables = PointerTables(), PointerTables()
    for seed in (0, 1):  # the second time the lists are known
        grads = drawn(dtype, seed)
        codes, scales = room(grads)
        multi_tensor_encode(grads, codes, scales, tables=tables[0])
        outs = [torch.full_like(grad, 7.0) for grad in grads]
        multi_tensor_decode(codes, outs, scales, tables=tables[1])
        for grad, code, scale, out in zip(grads, codes, scales, outs, strict=True):
            wanted, wanted_scales = oracle.held_codes(grad.float().numpy())
            assert np.array_equal(code.numpy(), wanted), f"codes of {grad.numel()}"
            assert np.array_equal(scale.numpy(), wanted_scales), f"scales of {grad.numel()}"
            assert same_bits(out, torch.from_numpy(oracle.held_values(wanted, wanted_scales)).to(dtype)), (
                f"{grad.numel()} decoded"
            )


@by_dtype
def test_tensors_of_any_strides_are_coded_in_the_memory_order_of_the_codes(dtype: torch.dtype, level: str) -> None:
    rng = np.random.default_rng(3)
    image = torch.from_numpy(rng.standard_normal((5, 6, 7, 8))).to(dtype).to(memory_format=torch.channels_last)
    wide = torch.from_numpy(rng.standard_normal((40, 60))).to(dtype)
    grads = [image, wide.t(), wide[:, ::2], wide]
    codes = [
        torch.full_like(image, 77, dtype=torch.int8),
        *(torch.full(g.shape, 77, dtype=torch.int8) for g in grads[1:]),
    ]
    scales = [torch.full((-(-grad.numel() // BLOCK),), 7.0) for grad in grads]
    multi_tensor_encode(grads, codes, scales)
    outs = [torch.full_like(grad, 7.0) for grad in grads]
    multi_tensor_decode(codes, outs, scales)
    orders = [(0, 2, 3, 1), (0, 1), (0, 1), (0, 1)]
    for grad, code, scale, out, order in zip(grads, codes, scales, outs, orders, strict=True):
        wanted, wanted_scales = oracle.held_codes(grad.permute(order).contiguous().float().numpy().reshape(-1))
        assert np.array_equal(code.permute(order).contiguous().numpy().reshape(-1), wanted)
        assert np.array_equal(scale.numpy(), wanted_scales)
        decoded = torch.from_numpy(oracle.held_values(wanted, wanted_scales)).to(dtype)
        assert same_bits(out.permute(order).contiguous().view(-1), decoded)


@by_dtype
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_any_address_serves_and_nothing_beside_it_is_written(dtype: torch.dtype, offset: int, level: str) -> None:
    sizes = (1, 7, 9, 255, 257, 2049, 4093)
    rng = np.random.default_rng(offset)
    grads = [torch.from_numpy(rng.standard_normal(n)).to(dtype) for n in sizes]
    codes, scales = room(grads)
    multi_tensor_encode(grads, codes, scales)
    given, made = [carved(grad, offset) for grad in grads], [carved(torch.zeros_like(code), offset) for code in codes]
    found = [carved(torch.zeros_like(scale), offset) for scale in scales]
    outs = [carved(torch.zeros_like(grad), offset) for grad in grads]
    before = [[around(one) for one in of] for of in (made, found, outs)]
    multi_tensor_encode(given, made, found)
    multi_tensor_decode(made, outs, found)
    assert all(map(torch.equal, made, codes))
    assert all(map(torch.equal, found, scales))
    assert all(
        map(
            torch.equal,
            outs,
            (
                torch.from_numpy(oracle.held_values(c.numpy(), s.numpy())).to(dtype)
                for c, s in zip(codes, scales, strict=True)
            ),
        )
    )
    assert all(
        torch.equal(around(a), b)
        for of, was in zip((made, found, outs), before, strict=True)
        for a, b in zip(of, was, strict=True)
    )


@by_dtype
def test_what_is_not_finite_has_some_code_and_harms_no_other_block(dtype: torch.dtype, level: str) -> None:
    grad = torch.linspace(-1.0, 1.0, 1024).to(dtype)
    codes, scales = room([grad])
    multi_tensor_encode([grad], codes, scales)
    spoiled = grad.clone()
    spoiled[300:303] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    again, found = room([grad])
    multi_tensor_encode([spoiled], again, found)
    elsewhere = torch.ones(1024, dtype=torch.bool)
    elsewhere[256:512] = False
    assert torch.equal(again[0][elsewhere], codes[0][elsewhere])
    assert torch.equal(found[0][[0, 2, 3]], scales[0][[0, 2, 3]])


def test_on_a_card_one_launch_serves_all_in_any_order(emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = drawn(torch.float16)
    codes, scales = room(grads)
    multi_tensor_encode(grads, codes, scales)
    outs = [torch.zeros_like(grad) for grad in grads]
    multi_tensor_decode(codes, outs, scales)
    emulated.use(emulated_cuda, monkeypatch)
    state = emulated.shuffle(emulated_cuda)
    for seed in (0, 5, 2**40 + 1):
        state.value = seed
        again, found = room(grads)
        multi_tensor_encode(grads, again, found)
        decoded = [torch.full_like(grad, 7.0) for grad in grads]
        multi_tensor_decode(again, decoded, found)
        assert (state.value != seed) == (seed != 0), "the launch was shuffled"
        assert all(map(torch.equal, again, codes))
        assert all(map(torch.equal, found, scales))
        assert all(map(torch.equal, decoded, outs))


# -- what is refused


def test_what_does_not_fit_is_refused_by_name() -> None:
    grad, codes, scales = torch.ones(300).half(), torch.zeros(300, dtype=torch.int8), torch.full((2,), 7.0)
    with pytest.raises(
        TypeError, match=r"wants float16, bfloat16 or float32 gradients into int8 codes, got grads\[0\] float64"
    ):
        multi_tensor_encode([grad.double()], [codes], [scales])
    with pytest.raises(TypeError, match=r"codes\[0\] uint8"):
        multi_tensor_encode([grad], [codes.to(torch.uint8)], [scales])
    with pytest.raises(ValueError, match=r"scales\[0\] must be contiguous with 2 elements, one for every 256"):
        multi_tensor_encode([grad], [codes], [scales[:1]])
    with pytest.raises(ValueError, match=r"codes has 0 entries, grads has 1"):
        multi_tensor_encode([grad], [], [scales])
    with pytest.raises(TypeError, match="wants int8 codes into float16, bfloat16 or float32"):
        multi_tensor_decode([codes], [grad.double()], [scales])
    assert not codes.any()
    assert scales.tolist() == [7.0, 7.0]
