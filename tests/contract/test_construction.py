"""Parameters that can't be served are refused by name; what only looks like them is served. Faults of issue 13."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_type_hints

import pytest
import torch
from engine.checks import assert_same_bits, linear_loss
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import tree_map_only

from contract.worlds import HALF, NAMES, SCALES, SINGLE, Mode, World, every_mode, every_scale, values
from fp16opt import MixedPrecisionOptimizer

SIXTEEN = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
BOTH = r"(?s)first\.weight.*second\.weight|second\.weight.*first\.weight"
Pair = tuple[nn.Parameter, nn.Parameter]


def _wrap(params: list[Any], mode: Mode | None = None, names: tuple[str, ...] = NAMES) -> MixedPrecisionOptimizer:
    arguments = {} if mode is None else mode.arguments
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a parameter listed twice
        inner = (SGD if mode is None else mode.make)(params, lr=0.5)
    return MixedPrecisionOptimizer(
        inner, loss_scale=64.0, named_parameters=list(zip(names, _flat(params), strict=False)), **arguments
    )


def _flat(params: list[Any]) -> list[Tensor]:
    return [q for p in params for q in (p["params"] if isinstance(p, dict) else [p])]


# -- overlapping bytes ---------------------------------------------------------------------------------------------


def _same_data(dtype: torch.dtype) -> Pair:
    a, b = nn.Parameter(torch.ones(6, dtype=dtype)), nn.Parameter(torch.ones(6, dtype=dtype))
    a.data = b.data
    return a, b


def _slices(dtype: torch.dtype) -> Pair:
    flat = torch.ones(12, dtype=dtype)
    return nn.Parameter(flat[:8]), nn.Parameter(flat[7:])


def _inside(dtype: torch.dtype) -> Pair:
    flat = torch.ones(12, dtype=dtype)
    return nn.Parameter(flat), nn.Parameter(flat[4:6])


def _transposed(dtype: torch.dtype) -> Pair:
    square = torch.ones(4, 4, dtype=dtype)
    return nn.Parameter(square), nn.Parameter(square.t())


def _columns(dtype: torch.dtype) -> Pair:
    matrix = torch.ones(4, 6, dtype=dtype)
    return nn.Parameter(matrix[:, :2]), nn.Parameter(matrix[:, 2:])


OVERLAPS: dict[str, Callable[[torch.dtype], Pair]] = {
    "data": _same_data,
    "slices": _slices,
    "inside": _inside,
    "transposed": _transposed,
    "columns of one matrix": _columns,
}


@SIXTEEN
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
def test_parameters_whose_bytes_overlap_are_refused_by_both_names(
    dtype: torch.dtype, overlap: str, groups: bool
) -> None:
    params = OVERLAPS[overlap](dtype)
    given = [{"params": [p]} for p in params] if groups else list(params)
    with pytest.raises(ValueError, match=BOTH):
        _wrap(given)


@every_mode
def test_overlapping_parameters_are_refused_in_every_mode(mode: Mode) -> None:
    with pytest.raises(ValueError, match=BOTH):
        _wrap(list(_slices(HALF)), mode)


def test_an_overlap_that_add_param_group_would_make_is_refused_and_changes_nothing() -> None:
    a, b = _slices(HALF)
    opt = _wrap([a])
    with pytest.raises(ValueError, match=r"first\.weight"):
        opt.add_param_group({"params": [b]})
    assert len(opt.param_groups) == 1
    opt.backward(linear_loss([a], [1.0]))
    opt.step()
    assert a.tolist() == [0.5] * 8


@SIXTEEN
def test_a_parameter_listed_twice_is_refused_by_name(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    with pytest.raises(ValueError, match=r"first\.weight"):
        _wrap([p, p], names=("first.weight",))
    with pytest.raises(ValueError, match=r"parameters 'group 0, param 0' and 'group 0, param 2' are one, in the opt"):
        _wrap([p, nn.Parameter(torch.ones(4, dtype=dtype)), p], names=())


@SIXTEEN
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_an_expanded_parameter_is_refused_by_name(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    one = nn.Parameter(torch.ones(1, dtype=dtype).expand(*shape))
    with pytest.raises(ValueError, match=r"first\.weight.*(?i:expand)"):
        _wrap([one])


@every_mode
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_a_parameter_on_the_meta_device_is_refused_by_name(mode: Mode, dtype: torch.dtype) -> None:
    """It has no memory that a master could be made of: the model is materialised first."""
    real, meta = nn.Parameter(torch.ones(4, dtype=dtype)), nn.Parameter(torch.ones(4, dtype=dtype, device="meta"))
    said = r"second\.weight.*meta device\. Materialise the model first"
    with pytest.raises(ValueError, match=said):
        _wrap([real, meta], mode)
    opt = _wrap([real], mode)
    with pytest.raises(ValueError, match=r"meta device\. Materialise the model first"):
        opt.add_param_group({"params": [meta]})
    assert len(opt.param_groups) == 1


@SIXTEEN
@every_mode
def test_disjoint_parts_of_one_flat_buffer_are_fine(mode: Mode, dtype: torch.dtype) -> None:
    """With and without gaps, out of order, one empty: as flattened models and cuDNN's LSTM have them."""
    flat = torch.ones(24, dtype=dtype)
    params = [nn.Parameter(part) for part in (flat[8:12], flat[0:8].view(2, 4), flat[13:24], flat[12:12])]
    opt = _wrap(params, mode)
    opt.backward(linear_loss(params, [1.0, 1.0, 1.0, None]))
    opt.step()
    assert flat[12].item() == 1.0
    assert all(bool((p < 1).all()) for p in params)
    storage = flat.untyped_storage().data_ptr()
    assert all(p.untyped_storage().data_ptr() == storage for p in params)


@every_mode
def test_tied_weights_are_one_parameter(mode: Mode) -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False), "second": nn.Linear(3, 3, bias=False)}).half()
    model["second"].weight = model["first"].weight
    opt = MixedPrecisionOptimizer(mode.make(model.parameters()), loss_scale=64.0, **mode.arguments)
    assert len(list(opt.model_params())) == 1


# -- a dtype that changes after wrapping ---------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("back", [False, True], ids=["float16 to bfloat16", "bfloat16 to float16"])
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("call", ["step", "state_dict", "update_master_grads"])
def test_another_16_bit_dtype_after_wrapping_is_refused_by_name(mode: Mode, back: bool, when: str, call: str) -> None:
    """It is no write: masters keep their values."""
    old, new = (torch.bfloat16, torch.float16) if back else (torch.float16, torch.bfloat16)
    if call == "state_dict" and when == "between":
        pytest.skip("once is enough")
    world_mode = Mode(mode.name, mode.make, (old, old, old), mode.arguments, mode.exact, mode.folds, mode.has_masters)
    world = World(world_mode, "one")
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    world.opt.step()
    kept = [m.detach().clone() for m in world.masters]
    if when == "between":
        world.backward(grads)
    p = world.params[1]
    p.grad = None
    was, p.data = p.data, p.data.to(new)

    def use() -> None:
        if when == "before" and call != "state_dict":
            world.backward(grads)
        getattr(world.opt, call)()

    with pytest.raises(RuntimeError, match=rf"second\.weight.*{str(new).removeprefix('torch.')}"):
        use()
    p.data = was
    for m, want in zip(world.masters, kept, strict=True):
        assert m.detach().tolist() == want.tolist()


# -- torch's defaults ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@every_mode
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("made", [False, True], ids=["made before", "made under it"])
def test_no_result_depends_on_torchs_default_dtype(mode: Mode, scale: str, dtype: torch.dtype, made: bool) -> None:
    """Steps, a clip, a skip, zeros, a state_dict: the same bits as under float32."""

    def run(world: World) -> None:
        for k in range(3):
            world.opt.zero_grad(set_to_none=k != 1)
            world.backward(values(0.5, -0.25 * k, 1.0) if k != 1 else [float("inf"), 1.0, 1.0])
            world.opt.clip_master_grads(2.0)
            world.opt.step()
            world.opt.load_state_dict(copy.deepcopy(world.opt.state_dict()))

    plain = World(mode, scale)
    run(plain)
    outside = None if made else World(mode, scale)
    with default_dtype(dtype):
        # the reference's tensors are float32 by name; the loss is made in the default dtype and holds small integers
        other = outside or World(mode, scale)
        for p, q in zip(other.params, plain.params, strict=True):
            assert p.dtype == q.dtype
        run(other)
    for a, b in zip([*plain.params, *plain.masters], [*other.params, *other.masters], strict=True):
        assert_same_bits(b, a)
    assert float(plain.opt.loss_scale) == float(other.opt.loss_scale)


@every_mode
@every_scale
def test_no_result_depends_on_torchs_default_device(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    losses = [world.loss(values(0.5, -0.25 * k, 1.0) if k != 1 else [float("inf"), 1.0, 1.0]) for k in range(3)]
    with torch.device("meta"):
        for k, loss in enumerate(losses):
            world.opt.zero_grad(set_to_none=k != 1)
            world.opt.backward(loss)
            world.opt.clip_master_grads(1e6)
            world.opt.step()
            world.opt.load_state_dict(copy.deepcopy(world.opt.state_dict()))
    for k in range(3):
        world.reference.step(values(0.5, -0.25 * k, 1.0) if k != 1 else values(float("inf"), 1.0, 1.0))
    world.check()


@every_mode
@every_scale
def test_no_result_depends_on_inference_mode_around_step(mode: Mode, scale: str) -> None:
    """The first step makes the optimizer's state; the second writes it where tensors of inference can't be written."""
    world = World(mode, scale)
    for k in range(4):
        grads = values(0.5, -0.25 * k, 1.0)
        world.opt.zero_grad()
        world.backward(grads)
        if k % 2 == 0:
            with torch.inference_mode():
                world.opt.clip_master_grads(1e6)
                world.opt.step()
            world.expect_stepped(grads)
        else:
            world.expect_step(grads)
    assert not any(m.is_inference() for m in world.masters)
    for state in world.opt.state.values():
        assert not any(v.is_inference() for v in state.values() if isinstance(v, Tensor))


# -- arguments and gradients that are strange ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf"), True, "8"], ids=repr)
def test_a_bad_loss_scale_is_named_as_it_was_given(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^loss_scale\b"):
        MixedPrecisionOptimizer(SGD([nn.Parameter(torch.ones(3, dtype=HALF))], lr=0.1), loss_scale=value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "8", 2.0**30], ids=repr)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bad_loss_scale_that_is_set_is_named_as_it_was_set(value: Any, dynamic: bool) -> None:
    opt = MixedPrecisionOptimizer(SGD([nn.Parameter(torch.ones(3, dtype=HALF))], lr=0.1), dynamic=dynamic)
    before = opt.loss_scale
    if not dynamic and value == 2.0**30:
        opt.loss_scale = value  # a static one has no limits of its own
        return
    with pytest.raises((TypeError, ValueError), match=r"^loss_scale must"):
        opt.loss_scale = value
    assert opt.loss_scale == before


NO_MASTERS = {"master_weights": "none"}


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("clip", [False, True])
def test_without_masters_sparse_gradients_are_stepped(scale: float, dtype: torch.dtype, clip: bool) -> None:
    weight = nn.Parameter(torch.ones(5, 2, dtype=dtype))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=0.5), loss_scale=scale, **NO_MASTERS)
    rows = torch.tensor([1, 3, 3])
    opt.backward((nn.functional.embedding(rows, weight, sparse=True).float() * 0.5).sum())
    if clip:
        assert float(opt.clip_master_grads(1e6)) == pytest.approx((2 * 0.25 + 2 * 1.0) ** 0.5, rel=1e-6)
    opt.step()
    assert weight.tolist() == [[1.0] * 2, [0.75] * 2, [1.0] * 2, [0.5] * 2, [1.0] * 2]


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="from torch 2.10 on")
@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("clip", [False, True])
def test_without_masters_fp32_gradients_are_stepped(scale: float, dtype: torch.dtype, clip: bool) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    weight.grad_dtype = SINGLE
    opt = MixedPrecisionOptimizer(SGD([weight], lr=0.5), loss_scale=scale, **NO_MASTERS)
    opt.backward(linear_loss([weight], [0.5]))
    assert weight.grad is not None
    assert weight.grad.dtype is SINGLE
    if clip:
        assert float(opt.clip_master_grads(1e6)) == pytest.approx(1.0, rel=1e-6)
    opt.step()
    assert weight.tolist() == [0.75] * 4


class Subclass(torch.Tensor):
    """A weight with operations of its own, as torchao's float8 ones: the numbers lie in a tensor inside."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Subclass:
        made: Subclass = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = tree_map_only(Subclass, lambda one: one.inner, (args, kwargs or {}))
        result = func(*found[0], **found[1])
        return Subclass(result) if func is torch.ops.aten.detach.default else result


def test_trained_tensor_subclasses_are_refused_by_name_and_frozen_ones_stay() -> None:
    def make(trains: bool) -> Any:
        return nn.Parameter(Subclass(torch.ones(4, dtype=torch.bfloat16)), requires_grad=trains)

    plain, refusal = nn.Parameter(torch.ones(4, dtype=HALF)), r"first\.weight.*Subclass.*operations of its own"
    with pytest.raises(ValueError, match=refusal):
        _wrap([make(True), plain])
    frozen = make(False)
    opt = _wrap([frozen, plain])
    with pytest.raises(ValueError, match=r"group 1, param 0.*Subclass"):
        opt.add_param_group({"params": [make(True)]})
    opt.backward(linear_loss([plain], [1.0]))
    opt.step()
    assert plain.tolist() == [0.5] * 4
    frozen.requires_grad_(True)
    with pytest.raises(ValueError, match=refusal):
        opt.step()


# -- words -------------------------------------------------------------------------------------------------------------


def test_type_checkers_know_the_words_of_an_argument() -> None:
    hints = get_type_hints(MixedPrecisionOptimizer.__init__)
    assert hints["master_weights"] == Literal["full", "none", "split", "split24"]
    assert hints["optimizer_state"] == Literal["fp32", "8bit"]
    assert hints["grad_accumulation"] == Literal["model", "fp32"]
    assert hints["on_model_write"] == Literal["refresh", "error", "ignore"]
