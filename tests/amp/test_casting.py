"""O1: what functions cast, what they refuse, caches, threads, and that torch is as it was afterwards."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp16opt import amp
from fp16opt.amp import _amp_state
from fp16opt.amp.handle import AmpHandle
from fp16opt.amp.lists import functional_overrides, tensor_overrides, torch_overrides

from .nets import X, made, net, sgd, train

HALF, FULL = torch.float16, torch.float32
BOTH = pytest.mark.parametrize("dtype", [HALF, FULL])


def casts_on(verbose: bool = False) -> AmpHandle:
    _amp_state.casts.activate(verbose=verbose)
    _amp_state.handle = AmpHandle(_amp_state.casts)
    return _amp_state.handle


@pytest.fixture
def casts() -> AmpHandle:
    return casts_on()


def like_x(function: Callable[[Tensor], Tensor], dtype: torch.dtype, shape: tuple[int, ...], expected: Any) -> None:
    x = torch.rand(shape).to(dtype).requires_grad_()
    y = function(x)
    assert y.dtype == (dtype if expected == "keep" else expected)
    y.float().sum().backward()
    assert x.grad.dtype == dtype
    assert bool(x.grad.isfinite().all())


BASIC: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], Any]] = {
    "linear": (nn.Linear(4, 3), (2, 4), HALF),
    "conv2d": (nn.Conv2d(3, 2, 2), (1, 3, 4, 4), HALF),
    "conv1d": (nn.Conv1d(3, 2, 2), (1, 3, 4), HALF),
    "conv3d": (nn.Conv3d(1, 2, 2), (1, 1, 4, 4, 4), HALF),
    "conv_transpose1d": (nn.ConvTranspose1d(3, 2, 2), (1, 3, 4), HALF),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 2, 2), (1, 3, 4, 4), HALF),
    "prelu": (nn.PReLU(), (2, 4), HALF),
    "softmax": (lambda x: F.softmax(x, dim=1), (2, 4), FULL),
    "log_softmax": (lambda x: F.log_softmax(x, dim=1), (2, 4), FULL),
    "gelu": (lambda x: F.gelu(x), (2, 4), FULL),
    "softplus": (lambda x: F.softplus(x), (2, 4), FULL),
    "layer_norm": (nn.LayerNorm(4), (2, 4), FULL),
    "group_norm": (nn.GroupNorm(2, 4), (2, 4, 3), FULL),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), (1, 4, 3), FULL),
    "normalize": (lambda x: F.normalize(x), (2, 4), FULL),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x + 1), (2, 4), FULL),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0), (1, 1, 4), FULL),
    "mse_loss": (lambda x: F.mse_loss(x, torch.ones(2, 4).half()), (2, 4), FULL),
    "l1_loss": (lambda x: F.l1_loss(x, torch.ones(2, 4)), (2, 4), FULL),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1])), (2, 4), FULL),
    "kl_div": (lambda x: F.kl_div(x, torch.ones(2, 4), reduction="batchmean"), (2, 4), FULL),
    "bce_with_logits": (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(2, 4)), (2, 4), FULL),
    "smooth_l1": (lambda x: F.smooth_l1_loss(x, torch.ones(2, 4)), (2, 4), FULL),
    "relu": (F.relu, (2, 4), "keep"),
    "dropout": (F.dropout, (2, 4), "keep"),
    "batch_norm": (nn.BatchNorm1d(4), (3, 4), "keep"),
    "max_pool": (lambda x: F.max_pool1d(x, 2), (1, 2, 4), "keep"),
}


V = torch.rand(4)
M = torch.rand(4, 4)
TENSOR: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], Any]] = {
    "matmul": (lambda x: x.matmul(M), (2, 4), HALF),
    "@": (lambda x: x @ M, (2, 4), HALF),
    "r@": (lambda x: M @ x, (4, 2), HALF),
    "mm": (lambda x: torch.mm(x, M), (2, 4), HALF),
    "mv": (lambda x: x.mv(V), (2, 4), HALF),
    "addmv": (lambda x: torch.addmv(torch.ones(2), x, V), (2, 4), HALF),
    "addr": (lambda x: torch.addr(M, x, V), (4,), HALF),
    "addmm": (lambda x: torch.addmm(M, x, M), (4, 4), HALF),
    "bmm": (lambda x: torch.bmm(x, torch.rand(2, 4, 3)), (2, 3, 4), HALF),
    "baddbmm": (lambda x: torch.baddbmm(torch.ones(2, 3, 3), x, torch.rand(2, 4, 3)), (2, 3, 4), HALF),
    "addbmm": (lambda x: torch.addbmm(torch.ones(3, 3), x, torch.rand(2, 4, 3)), (2, 3, 4), HALF),
    "pow": (lambda x: x.pow(2), (2, 4), FULL),
    "**": (lambda x: x**3, (2, 4), FULL),
    "r**": (lambda x: 2**x, (2, 4), FULL),
    "exp": (lambda x: torch.exp(x), (2, 4), FULL),
    "torch.sum": (lambda x: torch.sum(x, dim=1), (2, 4), FULL),
    "var": (lambda x: torch.var(x), (2, 4), FULL),
    "cumsum": (lambda x: x.cumsum(0), (2, 4), FULL),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (2, 4), FULL),
    "dist": (lambda x: x.dist(torch.zeros(2, 4)), (2, 4), FULL),
    "log": (lambda x: (x + 1).log(), (2, 4), FULL),
    "reciprocal": (lambda x: (x + 1).reciprocal(), (2, 4), FULL),
    **{name: (methodcaller(name), (2, 4), FULL) for name in ("sum", "norm", "std", "prod", "cpu")},
}


@BOTH
@pytest.mark.parametrize("name", [*BASIC, *TENSOR])
def test_functions_and_methods(name: str, dtype: torch.dtype, casts: Any) -> None:
    function, shape, expected = {**BASIC, **TENSOR}[name]
    like_x(function, dtype, shape, expected)


WIDEST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atan2": lambda a, b: torch.atan2(a, b),
    "mul": lambda a, b: torch.mul(a, b),
    "*": lambda a, b: a * b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "/": lambda a, b: a / (b + 1),
    "addcmul": lambda a, b: torch.addcmul(a, b, a),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a + 1),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack((a, b)),
    "cross": lambda a, b: torch.cross(a, b, dim=1),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "Tensor.dot": lambda a, b: a[0].dot(b[0]),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 3, 3)),
}


@pytest.mark.parametrize("name", WIDEST)
def test_the_widest_input_decides(name: str, casts: Any) -> None:
    function = WIDEST[name]
    for first in (HALF, FULL):
        for second in (HALF, FULL):
            a = torch.rand(2, 3).to(first).requires_grad_()
            b = torch.rand(2, 3).to(second).requires_grad_()
            out = function(a, b)
            widest = FULL if FULL in (first, second) or name == "bilinear" else HALF
            assert out.dtype == widest
            out.float().sum().backward()
            assert (a.grad.dtype, b.grad.dtype) == (first, second)
    assert torch.equal(torch.ones(3).half(), torch.ones(3))
    assert (torch.ones(3).half() == torch.ones(3)).all()
    assert (torch.ones(3).half() >= torch.ones(3)).dtype == torch.bool
    assert (torch.ones(3).half() * torch.ones(3, dtype=torch.float64)).dtype == torch.float64


def test_in_place(casts: Any) -> None:
    half, full = torch.ones(2, 2).half(), torch.ones(2, 2)
    for name in ("add_", "mul_", "div_", "sub_", "atan2_"):
        assert getattr(half.clone(), name)(full).dtype == HALF
        assert getattr(full.clone(), name)(half).dtype == FULL
    half.clone().addcmul_(full, full)
    x = half.clone()
    x += full
    assert x.dtype == HALF
    assert half.clone().addmm_(full, full).dtype == HALF
    assert full.clone().addmm_(half, full).dtype == FULL
    assert torch.ones(2).addmv_(half, torch.ones(2)).dtype == FULL
    for name in ("exp_", "log_", "reciprocal_", "pow_", "cumsum_"):
        args = (2,) if name == "pow_" else (0,) if name == "cumsum_" else ()
        with pytest.raises(NotImplementedError, match=f"Tensor.{name} on a 16-bit tensor"):
            getattr(half.clone(), name)(*args)
        assert getattr(full.clone(), name)(*args).dtype == FULL
        with amp.disable_casts():
            assert getattr(half.clone(), name)(*args).dtype == HALF


def test_binary_cross_entropy_is_refused_with_the_way_out(casts: Any) -> None:
    probabilities, target = torch.full((2,), 0.25), torch.ones(2)
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(probabilities.half(), target)
    with pytest.raises(NotImplementedError, match="register_float_function"):
        nn.BCELoss()(probabilities.half(), target.half())
    assert F.binary_cross_entropy(probabilities, target).dtype == FULL
    casts._deactivate()
    amp.register_float_function(torch, "sigmoid")
    casts_on()
    assert nn.BCELoss()(torch.sigmoid(torch.zeros(2).half()), target).dtype == FULL


def test_other_dtypes_stay(casts: Any) -> None:
    double = torch.ones(2, 2, dtype=torch.float64)
    assert double.sum().dtype == torch.float64
    assert (double @ double).dtype == torch.float64
    assert (double * torch.ones(2, 2)).dtype == torch.float64
    brain = torch.ones(2, 2, dtype=torch.bfloat16)
    assert (brain @ brain).dtype == torch.bfloat16
    assert F.linear(brain, brain).dtype == torch.bfloat16
    assert torch.arange(4).sum().dtype == torch.int64
    assert (torch.arange(4) ** 2).dtype == torch.int64


# -- RNNs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_rnns(kind: str, layers: int, bidirectional: bool, dtype: torch.dtype, casts: Any) -> None:
    rnn = getattr(nn, kind)(4, 3, num_layers=layers, bidirectional=bidirectional)
    x = torch.randn(5, 2, 4).to(dtype).requires_grad_()
    out, hidden = rnn(x)
    assert out.dtype == HALF
    assert all(h.dtype == HALF for h in (hidden if isinstance(hidden, tuple) else [hidden]))
    out.float().sum().backward()
    assert x.grad.dtype == dtype
    assert all(p.dtype == FULL and p.grad.dtype == FULL and p.grad.abs().sum() > 0 for p in rnn.parameters())
    with amp.disable_casts():
        reference = getattr(nn, kind)(4, 3, num_layers=layers, bidirectional=bidirectional)
        reference.load_state_dict(rnn.state_dict())
        expected = reference(x.detach().float())[0]
    assert torch.allclose(out.float(), expected, atol=2e-2)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_packed_sequences(kind: str, casts: Any) -> None:
    rnn = getattr(nn, kind)(4, 3)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    out, _ = rnn(packed)
    assert out.data.dtype == HALF
    out.data.float().sum().backward()
    assert all(p.grad.dtype == FULL for p in rnn.parameters())


@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("kind", ["RNNCell", "LSTMCell", "GRUCell"])
def test_cells(kind: str, dtype: torch.dtype, casts: Any) -> None:
    cell = getattr(nn, kind)(4, 3)
    hidden: Any = None
    for _ in range(3):
        hidden = cell(torch.randn(2, 4).to(dtype), hidden)
    out = hidden[0] if kind == "LSTMCell" else hidden
    assert out.dtype == HALF
    out.float().sum().backward()
    assert all(p.grad.dtype == FULL for p in cell.parameters())


# -- the cache of FP16 weights ---------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """One weight, used twice in a forward."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.arange(64).reshape(8, 8).to(dtype) / 64)

    def ops(self, x: Tensor, w: Tensor) -> Tensor:
        if self.kind == "half":
            return x.mm(w).mm(w).sum()
        if self.kind == "float":
            return (x + torch.pow(w, 2) + torch.pow(w, 2)).sum()
        return ((x * w) * w).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.ops(x, self.weight)


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("kind", ["half", "float", "widest"])
def test_train_eval_train_gives_the_gradients_of_an_uncached_run(kind: str, dtype: torch.dtype) -> None:
    model = Weighted(kind, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 / 64)
    _amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    x = torch.ones(2, 8).half() if kind == "half" else torch.ones(8, 8).half()

    def reference() -> Tensor:
        w = model.weight.detach().float().half().float().requires_grad_() if kind == "half" else (
            model.weight.detach().float().requires_grad_())  # fmt: skip
        with amp.disable_casts():
            (grad,) = torch.autograd.grad(model.ops(x.float(), w), w)
        return grad

    def training_step() -> None:
        model.weight.grad = None
        _amp_state.loss_scalers[0]._loss_scale = 1.0
        loss = model(x)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert model.weight.grad.dtype == dtype
        assert torch.allclose(model.weight.grad.float(), reference(), rtol=4e-3, atol=1e-2)
        optimizer.step()

    training_step()
    with torch.no_grad():
        model(x)
    training_step()


def test_weights_loaded_or_swapped_between_calls_are_seen() -> None:
    model, _ = made("O1")
    model.eval()
    with torch.no_grad():
        before = model(X)
        model[3].bias.data.add_(1.0)  # as an EMA swap does
        assert torch.allclose(model(X), before + 1.0, atol=1e-2)
        model.load_state_dict({k: v * 0 for k, v in model.state_dict().items()})
        assert not model(X).any()


def test_a_weight_used_many_times_is_cast_once(casts: Any) -> None:
    made_of: list[Tensor] = []

    @amp.half_function
    def note(x: Tensor, weights: list[Tensor]) -> None:
        made_of.extend(weights)

    weight = nn.Parameter(torch.ones(2))
    for _ in range(3):
        note(torch.ones(1), [weight, weight])  # a list of parameters as well
    assert all(w is made_of[0] for w in made_of)
    assert made_of[0].dtype == HALF


# -- the user's functions --------------------------------------------------------------------------------------------


def test_registered_functions() -> None:
    module = types.ModuleType("users")
    module.f = lambda x, y=None: (x, y)  # type: ignore[attr-defined]
    module.g = lambda x, y=None: (x, y)  # type: ignore[attr-defined]
    module.h = lambda x, y=None: (x, y)  # type: ignore[attr-defined]
    originals = dict(vars(module))
    amp.register_half_function(module, "f")
    amp.register_float_function(module, "g")
    amp.register_float_function(module, "h")
    amp.register_promote_function(module, "h")  # the last one counts
    for register in (amp.register_half_function, amp.register_float_function, amp.register_promote_function):
        with pytest.raises(ValueError, match="users has no function 'missing'"):
            register(module, "missing")
    half, full = torch.ones(1).half(), torch.ones(1)
    assert module.f(full)[0].dtype == FULL  # nothing while amp is off
    handle = casts_on(verbose=True)
    assert module.f(full, y=full)[0].dtype == HALF
    assert module.f(full, y=[full])[1][0].dtype == HALF
    assert module.g(half, y={"k": half})[1]["k"].dtype == FULL
    assert [t.dtype for t in module.h(half, full)] == [FULL, FULL]
    assert [t.dtype for t in module.h(half, half)] == [HALF, HALF]
    handle._deactivate()
    assert dict(vars(module)) == originals


def test_registered_torch_functions_go_before_the_lists() -> None:
    amp.register_float_function(torch, "matmul")
    amp.register_half_function(torch, "softmax")
    casts_on()
    x = torch.ones(2, 2)
    assert torch.matmul(x.half(), x).dtype == FULL
    assert torch.softmax(x, 0).dtype == HALF


def test_decorators() -> None:
    @amp.half_function
    def halved(x: Tensor) -> Tensor:
        """Documented."""
        return x

    @amp.float_function
    def floated(x: Tensor) -> Tensor:
        return x

    @amp.promote_function
    def promoted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    half, full = torch.ones(1).half(), torch.ones(1)
    assert (halved.__name__, halved.__doc__) == ("halved", "Documented.")
    assert (halved(full).dtype, floated(half).dtype) == (FULL, HALF)
    handle = casts_on()
    assert (halved(full).dtype, floated(half).dtype) == (HALF, FULL)
    assert [t.dtype for t in promoted(half, full)] == [FULL, FULL]
    with amp.disable_casts():
        assert (halved(full).dtype, floated(half).dtype) == (FULL, HALF)
    handle._deactivate()
    assert (halved(full).dtype, floated(half).dtype) == (FULL, HALF)


class Product(torch.autograd.Function):
    """Calls functions that cast in both directions, as code written for apex does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return torch.mm(grad, w.t()).to(x.dtype), torch.mm(x.t(), grad).to(w.dtype)


def test_custom_autograd_functions() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((8, 4), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.w)

    model = Net()
    optimizer = sgd(model, lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    out = model(X)
    assert out.dtype == HALF
    with amp.scale_loss(out.float().mean(), optimizer) as scaled:
        scaled.backward()
    with amp.disable_casts():
        expected = X.half().float().t() @ torch.full((32, 4), 1 / 128)
    assert torch.allclose(model.w.grad, expected, rtol=1e-2, atol=1e-4)


def test_backward_formulas_of_torch_stay_in_fp32() -> None:
    """Where casts were off in forward, autocast must not round the backward."""
    model, optimizer = made("O1")
    weight = model[0].weight
    x = torch.full((4, 8), 1.0 + 2.0**-14)
    _amp_state.loss_scalers[0]._loss_scale = 1.0
    with amp.disable_casts():
        loss = F.linear(x, weight).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert torch.equal(weight.grad, torch.full((16, 8), 4.0 + 2.0**-12))


# -- leaving ---------------------------------------------------------------------------------------------------------


def namespaces() -> dict[str, dict[str, Any]]:
    owners = {"torch": torch, "functional": F, "Tensor": torch.Tensor, "_VF": torch._VF, "rnn": nn.modules.rnn,
              "Module": nn.Module, "TensorBase": torch._C.TensorBase, "Optimizer": torch.optim.Optimizer}  # fmt: skip
    found = {name: dict(vars(owner)) for name, owner in owners.items()}
    for held in found.values():
        held.pop("__warningregistry__", None)
    state = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    dtypes = [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")]
    found["autocast"] = {"enabled": state, "dtypes": dtypes}
    return found


def test_leaving_o1_leaves_torch_as_it_was() -> None:
    torch.sigmoid(torch.ones(1))
    before = namespaces()
    amp.register_half_function(torch, "sigmoid")
    for _ in range(2):
        model, optimizer = made("O1")
        train(model, optimizer, 2)
        assert namespaces() != before
    casts_on()
    _amp_state.handle._deactivate()
    assert namespaces() == before
    _amp_state.handle._deactivate()  # once more does nothing
    assert namespaces() == before
    assert F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype == FULL
    train(model, optimizer, 1)  # the model works on without casts
    assert model(X).dtype == FULL


def test_casts_go_when_the_last_model_is_gone() -> None:
    before = namespaces()
    a, _ = made("O1")
    b = amp.initialize(net(), opt_level="O1", verbosity=0)
    del a
    assert namespaces() != before
    del b
    import gc

    gc.collect()
    assert namespaces() == before
    assert not _amp_state.handle.is_active()


def test_an_exception_anywhere_leaves_nothing_half_done() -> None:
    before = namespaces()
    model, optimizer = made("O1")
    active = namespaces()
    with pytest.raises(KeyError), amp.disable_casts(), amp.disable_casts():
        raise KeyError
    assert namespaces() == active
    with amp.disable_casts():
        with amp.disable_casts():
            pass
        assert torch.mm(X, X.t()).dtype == FULL  # still off
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    with pytest.raises(KeyError), amp.scale_loss(model(X).sum(), optimizer):
        raise KeyError
    assert namespaces() == active
    _amp_state.handle._deactivate()
    assert namespaces() == before


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    monkeypatch.setattr(functional_overrides, "FP32_FUNCS", [*functional_overrides.FP32_FUNCS, "no_such_function"])
    with pytest.raises(AttributeError, match="no_such_function"):
        casts_on()
    assert namespaces() == before
    assert not _amp_state.casts.active


def test_somebody_elses_patch_on_top_is_not_undone(casts: Any) -> None:
    ours = F.softmax
    F.softmax = lambda *args, **kwargs: ours(*args, **kwargs)
    theirs = F.softmax
    try:
        casts._deactivate()
        assert F.softmax is theirs
        assert F.softmax(torch.ones(2).half(), 0).dtype == HALF  # what is inside does nothing now
    finally:
        F.softmax = ours.__wrapped__


def test_other_threads_are_left_alone(casts: Any) -> None:
    found: list[torch.dtype] = []

    def work() -> None:
        found.extend([torch.mm(X, X.t()).dtype, F.softmax(X.half(), 0).dtype])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [FULL, HALF]


def test_the_lists_are_in_force_and_can_be_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for lists in (functional_overrides, torch_overrides, tensor_overrides):
        for name in (*lists.FP16_FUNCS, *lists.FP32_FUNCS, *getattr(lists, "CASTS", ())):
            assert hasattr(lists.MODULE, name), name
    monkeypatch.setattr(functional_overrides, "FP32_FUNCS", [*functional_overrides.FP32_FUNCS, "relu"])
    casts_on()
    assert F.relu(torch.ones(1).half()).dtype == FULL
