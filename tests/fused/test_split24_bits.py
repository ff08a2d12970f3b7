"""Masters in 24 bits against numpy: bounds, all backends, and steps."""

from __future__ import annotations

from typing import Any

import emulated
import numpy as np
import pretended
import pytest
import torch
from named_steps import adam_step, sgd_step

from fp16opt.kernels import (
    CastStats,
    multi_tensor_cast,
    multi_tensor_join,
    multi_tensor_reset_remainders,
    multi_tensor_split,
)
from fp16opt.kernels.operations import AdamOptions, Factors, SgdOptions
from fused import oracle_fused
from fused import oracle_split24 as oracle
from fused.test_fused_bits import ADAM, SGD, spread
from fused.test_state8_bits import CLIP, GIVEN, INV_SCALE, few

KINDS = {"half": torch.float16, "bfloat16": torch.bfloat16}
SIZES = (0, 1, 63, 65, 192, 65536 + 130, 140000)
ODD = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    65519.9,
    65520.0,
    -1e5,
    3e38,
    3.4028234e38,
    -3.4028234e38,
    1e-45,
    -1e-40,
    6e-8,
]


def some(n: int = 100000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(n) * 10.0 ** rng.uniform(-6, 3, n)).astype(np.float32)
    return np.concatenate([bits, near, np.array(ODD, np.float32)])


def both(values: np.ndarray, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    model, rest = torch.zeros(values.size, dtype=KINDS[kind]), torch.zeros(values.size, dtype=torch.int8)
    out, stats = torch.zeros(values.size), CastStats.allocate(1, "cpu")
    multi_tensor_split([torch.from_numpy(values)], [model], [rest], stats)
    multi_tensor_join([model], [rest], [out])
    return model, rest, out, int(stats.overflow)


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))


@pytest.mark.parametrize("kind", KINDS)
def test_splitting_to_nearest_is_the_oracles(kind: str) -> None:
    values = some()
    model, rest, out, flags = both(values, kind)
    weight, remainder = oracle.SPLIT[kind](values, None)
    got = model.view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], weight[~nan])
    assert np.array_equal(rest.numpy(), remainder)
    assert same(out.numpy(), oracle.JOIN[kind](weight, remainder)).all()
    stats = CastStats.allocate(1, "cpu")
    multi_tensor_cast([torch.from_numpy(values)], [torch.zeros_like(model)], stats)
    assert flags == int(stats.overflow)


def check_bounds(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """What the page of formats promises, and that what was kept is kept as it is. Returns (remainders, masters)."""
    weight, remainder = oracle.SPLIT[kind](values, None)
    kept = oracle.JOIN[kind](weight, remainder)
    again = oracle.SPLIT[kind](kept, None)
    nan = np.isnan(values)
    assert np.array_equal(np.isnan(kept), nan)
    assert np.array_equal(np.signbit(kept[~nan]), np.signbit(values[~nan]))
    assert np.array_equal(again[0][~nan], weight[~nan]), "the weight moved"
    assert np.array_equal(again[1][~nan], remainder[~nan]), "the remainder moved"
    assert np.array_equal(np.isinf(kept), np.isinf(values)), "finite stays finite"
    finite = np.isfinite(values)
    wide, near = values[finite].astype(np.float64), kept[finite].astype(np.float64)
    if kind == "half":
        inside = np.abs(wide) < 65520
        place = oracle.last_place(weight.view(np.float16)[finite].astype(np.float64))
        held = np.abs(remainder[finite].astype(np.int64)) == 127
        bound = place * np.where(held, 2.0**-8, 2.0**-9)
        assert (np.abs(wide - near)[inside] <= bound[inside]).all()
        assert (np.abs(wide)[~inside] < 1.5 * np.abs(near)[~inside]).all()
    else:
        _, exponent = np.frexp(wide)
        place = 2.0 ** (np.maximum(exponent - 1, -126) - 15.0)
        at_the_end = np.abs(wide) > float.fromhex("0x1.fffep127")
        assert (np.abs(wide - near) <= np.where(at_the_end, place, place / 2)).all()
    return remainder, kept


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_and_fixed_points(kind: str) -> None:
    check_bounds(some(seed=1), kind)


@pytest.mark.slow
@pytest.mark.parametrize("sixteenth", range(16))
@pytest.mark.parametrize("kind", KINDS)
def test_all_floats(kind: str, sixteenth: int) -> None:
    size = 2**18  # numpy's arrays of it stay in the processor's caches
    for first in range(sixteenth * 2**28, (sixteenth + 1) * 2**28, size):
        values = np.arange(first, first + size, dtype=np.uint32).view(np.float32)
        remainder, kept = check_bounds(values, kind)
        _, rest, out, _ = both(values, kind)
        assert np.array_equal(rest.numpy(), remainder), hex(first)
        assert same(out.numpy(), kept).all(), hex(first)


def test_every_weight_and_remainder_of_bfloat16_decodes_and_encodes_to_itself() -> None:
    """As masters: what a step leaves can be any of them, but those that no master is rounded to."""
    weights = np.repeat(np.arange(0, 2**16, 5, dtype=np.uint16), 256)
    rests = np.tile(np.arange(256, dtype=np.uint8).view(np.int8), weights.size // 256)
    values = oracle.join_bfloat16(weights, rests)
    alone = (weights.astype(np.uint32) << 16).view(np.float32)
    left_over = (alone == 0) & (rests < 0)  # of a weight before the zero
    assert np.array_equal(values[left_over].view(np.uint32), alone[left_over].view(np.uint32))
    ordinary = np.isfinite(values) & np.isfinite(alone) & ~left_over
    weight, rest = oracle.split_bfloat16(values, None)
    assert np.array_equal(weight[ordinary], weights[ordinary])
    assert np.array_equal(rest[ordinary], rests[ordinary])


@few
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["adamw", "sgd"])
def test_steps_have_the_bits_of_the_oracle(which: str, kind: str, implementation: str) -> None:
    rng = np.random.default_rng(0)
    values = [spread(rng, n, -6, 4.9) for n in SIZES]
    for v in values[4:]:
        v[:14] = ODD
    models = [torch.zeros(n, dtype=KINDS[kind]) for n in SIZES]
    rests = [torch.zeros(n, dtype=torch.int8) for n in SIZES]
    stats = CastStats.allocate(len(SIZES), "cpu")
    multi_tensor_split([torch.from_numpy(v) for v in values], models, rests, stats)
    kept = [oracle.JOIN[kind](*oracle.SPLIT[kind](v, None)) for v in values]
    m, v, steps = ([torch.zeros(n) for n in SIZES], [torch.zeros(n) for n in SIZES], [torch.zeros(()) for _ in SIZES])
    elements = [oracle_fused.Element(k, np.zeros_like(k), np.zeros_like(k)) for k in kept]
    for number in (1, 2, 0xFFFFFFFF + 9):
        grads = [torch.from_numpy(spread(rng, n, -3, 3)).to(KINDS[kind]) for n in SIZES]
        more = {"models": models, "stats": stats, "number": number}
        if which == "adamw":
            o = {**ADAM, "lr": 1e-4, "weight_decay": 0.1}
            options = [AdamOptions(o["lr"], *o["betas"], o["eps"], o["weight_decay"], True, False)]
            adam_step(grads, rests, m, v, steps, options, [0] * len(SIZES), GIVEN, **more)
        else:
            o = {**SGD, "lr": 1e-3}
            sgd_step(grads, rests, [SgdOptions(**o)], [0] * len(SIZES), GIVEN, **more)
        for k, (e, grad) in enumerate(zip(elements, grads, strict=True)):
            step = oracle_fused.adam if which == "adamw" else oracle_fused.sgd
            step(e, grad.float().numpy(), INV_SCALE, CLIP, **o)
            weight, rest = oracle.SPLIT[kind](e.p, number)
            with np.errstate(all="ignore"):
                flags = int(np.isinf(oracle_weight(weight, kind)[np.isfinite(e.p)]).any()) | 2 * int(
                    not np.isfinite(e.p).all()
                )
            nan = np.isnan(e.p)
            got = models[k].view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(got[~nan], weight[~nan]), f"step {number}, weights of {e.p.size}"
            assert np.array_equal(rests[k].numpy()[~nan], rest[~nan]), f"step {number}, remainders of {e.p.size}"
            assert int(stats.overflow[k]) == flags
            e.p = oracle.JOIN[kind](weight, rest)


def oracle_weight(weight: np.ndarray, kind: str) -> np.ndarray:
    if kind == "half":
        return weight.view(np.float16).astype(np.float32)
    return (weight.astype(np.uint32) << np.uint32(16)).view(np.float32)


@few
def test_the_dither_carries_what_is_less_than_half_a_place(implementation: str) -> None:
    """Of bfloat16: 1,024 steps of a 128th of the last place move masters by 8 places, to nearest by none."""
    n, steps, lr = 256, 1024, 2.0**-15 / 128  # an update that float32 adds exactly
    model, rest, stats = [torch.ones(n).bfloat16()], [torch.zeros(n, dtype=torch.int8)], CastStats.allocate(1, "cpu")
    one, options = torch.tensor(1.0), [SgdOptions(-lr, 0.0, 0.0, 0.0, False, False)]
    for number in range(256 if implementation == "reference" else steps):
        sgd_step(
            [torch.ones(n)], rest, options, [0], Factors(one, one), models=model, stats=stats, number=number
        )  # fmt: skip
    out = [torch.zeros(n)]
    multi_tensor_join(model, rest, out)
    wanted = lr * (number + 1)
    assert float(out[0].mean() - 1) == pytest.approx(wanted, rel=0.03)
    assert float((out[0] - 1 - wanted).abs().max()) <= 2 * 2.0**-15, "two places"


def test_a_weight_that_was_written_stands_for_itself() -> None:
    for dtype in KINDS.values():
        rest, digests = torch.tensor([5, 5, 5], dtype=torch.int8), torch.zeros(2, 1, dtype=torch.int64)
        weight = torch.tensor([1.0, torch.inf, -torch.inf], dtype=dtype)
        digests[0] = 1
        multi_tensor_reset_remainders([weight], [rest], *digests, torch.zeros(1, dtype=torch.int32))
        out = torch.zeros(3)
        multi_tensor_join([weight], [rest], [out])
        assert torch.equal(out, weight.float())


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_splits_joins_and_renews_as_torch_operations_do(
    emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    values = some(5003, seed=4)
    wanted = both(values, kind)
    weight, rest, digests = wanted[0].clone(), wanted[1].clone(), torch.tensor([[1], [0]])
    multi_tensor_reset_remainders([weight], [rest], *digests, torch.zeros(1, dtype=torch.int32))
    emulated.use(emulated_cuda, monkeypatch)
    count = pretended.counting(monkeypatch)
    got = both(values, kind)
    assert count.launches == {"split": 1, "join": 1}
    nan = np.isnan(values)
    bits = [one.view(torch.int16).numpy() for one in (got[0], wanted[0])]
    assert np.array_equal(bits[0][~nan], bits[1][~nan])
    assert torch.equal(got[1], wanted[1])
    assert same(got[2].numpy(), wanted[2].numpy()).all()
    assert got[3] == wanted[3] == 3
    taken = torch.zeros(1, dtype=torch.int32)
    multi_tensor_reset_remainders([wanted[0]], [got[1]], *digests, taken)
    assert torch.equal(got[1], rest)
    assert int(taken) == 1
    assert count.launches["renew"] == 1
