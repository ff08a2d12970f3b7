"""What an optimizer class keeps in attributes of its own: FP32, and of masters, where its parameters have masters."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from engine.checks import by_step, linear_loss
from fp16opt import MixedPrecisionOptimizer

LR = 2.0**-14  # an update that FP16 and BF16 weights near 1 lose


class Lookahead(SGD):
    """Slow weights that are made with the optimizer, in lists beside the groups; one more for each group that comes."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        self.slow: list[list[torch.Tensor]] = []
        self.count = 0
        super().__init__(params, lr=lr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.slow.append([p.detach().clone() for p in self.param_groups[-1]["params"]])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.add_(p.data - q, alpha=0.5)
                    p.data.copy_(q)


def _ones(dtype: torch.dtype, *shape: int) -> Any:
    return nn.Parameter(torch.ones(shape or (3,), dtype=dtype))


def _train(opt: Any, params: list[Any], steps: int = 10) -> None:
    for _ in range(steps):
        opt.zero_grad()
        loss = linear_loss(params, [1.0] * len(params))
        opt.backward(loss) if isinstance(opt, MixedPrecisionOptimizer) else loss.backward()
        opt.step()


@by_step
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_slow_weights_follow_in_fp32(dtype: torch.dtype) -> None:
    params, plain = [_ones(dtype, 4), _ones(dtype)], [_ones(torch.float32, 4), _ones(torch.float32)]
    opt, beside = MixedPrecisionOptimizer(Lookahead([params[0]])), Lookahead([plain[0]])
    opt.add_param_group({"params": [params[1]]})
    beside.add_param_group({"params": [plain[1]]})
    _train(opt, params)
    _train(beside, plain)
    assert [slow.dtype for group in opt.optimizer.slow for slow in group] == [torch.float32] * 2  # type: ignore[attr-defined]
    for master, wanted in zip(opt.master_params(), plain, strict=True):
        assert torch.equal(master, wanted)
        assert 1.0 - wanted[0].item() > LR


class Around(Optimizer):
    """Built around another optimizer, whose groups and state it shares, with copies in a dict by parameter."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        everything = [p for group in self.param_groups for p in group["params"]]
        self.start = {p: p.detach().clone() for p in everything}
        self.order = tuple(everything)
        self.inner.marked = [everything[0]]  # type: ignore[attr-defined]
        self.param_groups[0]["anchors"] = [p.detach().clone() for p in everything]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        with torch.no_grad():
            for p in self.order:
                p.add_(self.start[p] - p, alpha=0.25)


def test_parameters_and_copies_are_found_in_containers_and_optimizers_inside() -> None:
    params, plain = [_ones(torch.float16, 2)], [_ones(torch.float32, 2)]
    opt, beside = MixedPrecisionOptimizer(Around(SGD(params, lr=LR))), Around(SGD(plain, lr=LR))
    _train(opt, params)
    _train(beside, plain)
    (master,) = opt.master_params()
    assert torch.equal(master, plain[0])
    around: Any = opt.optimizer
    assert around.order[0] is master
    assert around.inner.marked == [master]
    assert list(around.start) == [master]
    assert opt.param_groups[0]["anchors"][0].dtype == torch.float32


class Block:
    def __init__(self, param: Any) -> None:
        self.param = param
        self.start = param.detach().clone()


class Blocks(SGD):
    """Steps by objects of its own, which an object holds; and knows the model, which keeps its parameters."""

    def __init__(self, model: nn.Module, lr: float = LR) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.model = model
        self.table = Block(self.param_groups[0]["params"][0])
        self.table.blocks = [Block(p) for p in model.parameters()]  # type: ignore[attr-defined]
        self.table.itself = self.table  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for block in self.table.blocks:  # type: ignore[attr-defined]
            block.param.add_(block.param.grad, alpha=-self.param_groups[0]["lr"])


@by_step
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_parameters_in_objects_give_place_to_masters(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    nn.init.ones_(model.weight)
    opt = MixedPrecisionOptimizer(Blocks(model), loss_scale=64.0)
    mine = list(model.parameters())
    _train(opt, mine)
    first = next(opt.master_params())
    assert torch.equal(first, torch.full((2, 3), 1.0 - 10 * LR))
    table = opt.optimizer.table  # type: ignore[attr-defined]
    assert table.blocks[0].param is first
    assert table.start.dtype == torch.float32
    assert opt.optimizer.model.weight is mine[0]  # type: ignore[attr-defined]
    opt.optimizer.scheduler = LambdaLR(opt, lambda _: 1.0)  # type: ignore[attr-defined]  # leads to the wrapper
    opt.add_param_group({"params": [_ones(dtype)]})
    assert next(opt.model_params()) is mine[0]


class Multiplied(SGD):
    """Reads an attribute of each parameter, and counts in one that its constructor has made."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for p in self.param_groups[0]["params"]:
            p.times = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.times += 1
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"] * getattr(p, "lr_mul", 1.0))


@by_step
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_attributes_set_later_reach_the_master(dtype: torch.dtype) -> None:
    weight = _ones(dtype)
    opt = MixedPrecisionOptimizer(Multiplied([weight], lr=0.125), loss_scale=64.0)
    left = []
    for step in range(4):
        if step in (1, 2):
            weight.lr_mul = 2.0 if step == 1 else 0.0
        if step == 3:
            del weight.lr_mul
        _train(opt, [weight], steps=1)
        left.append(weight[0].item())
    assert left == [0.875, 0.625, 0.625, 0.5]
    (master,) = opt.master_params()
    assert master.times == 4  # type: ignore[attr-defined]


def test_fp32_parameters_and_halves_without_masters_leave_attributes_alone() -> None:
    for param, options in ((_ones(torch.float32), {}), (_ones(torch.float16), {"master_weights": "none"})):
        inner = Lookahead([param])
        held = inner.slow[0][0]
        MixedPrecisionOptimizer(inner, **options)
        assert inner.slow[0][0] is held


def test_buffers_of_16_bits_stay_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Parts of one buffer, as Muon has them, would no longer be parts of it."""
    inner = SGD([_ones(torch.bfloat16, 6)], lr=LR)
    flat = torch.zeros(12, dtype=torch.bfloat16)
    inner.flat, inner.views = flat, [flat[:6], flat[6:]]  # type: ignore[attr-defined]
    caplog.set_level(logging.WARNING, logger="fp16opt")
    opt = MixedPrecisionOptimizer(inner)
    opt.add_param_group({"params": [_ones(torch.bfloat16)]})
    assert inner.flat is flat  # type: ignore[attr-defined]
    assert all(view.data_ptr() - flat.data_ptr() in (0, 12) for view in inner.views)  # type: ignore[attr-defined]
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("SGD keeps 16-bit tensors outside of its state: flat, views[0], views[1]. They stay")


class GoesRound(torch.optim.Optimizer):
    """Reads its parameters through a function of its own, where wrapping does not find them."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        held = list(params)
        super().__init__(held, {"lr": lr})
        self.held = lambda: held

    def moved(self) -> list[torch.Tensor]:
        return self.held()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.moved():
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class PreconditionsModules(GoesRound):
    """As K-FAC: gradients of the model are written, parameters of the groups are stepped."""

    def moved(self) -> list[torch.Tensor]:
        for p in self.held():
            p.grad.data.mul_(0.5)  # type: ignore[union-attr]
        return self.param_groups[0]["params"]


class MovesData(GoesRound):
    """By ``p.data``, of which no version tells."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad.data)


class BeginsLate(GoesRound):
    """As AdaShift: gradients are kept for some steps before the first one moves a parameter."""

    def moved(self) -> list[torch.Tensor]:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("kept", []).append(p.grad.clone())
        return []


class ClearsGradients(GoesRound):
    """A step that clears the model's gradients at its end, and reads its own groups."""

    def moved(self) -> list[torch.Tensor]:
        for p in self.held():
            p.grad = None
        return self.param_groups[0]["params"]


def lines_of_steps(
    cls: Any, caplog: pytest.LogCaptureFixture, steps: int = 6, lr: float = 0.125, **settings: Any
) -> list[str]:
    """What is logged of some steps of a class."""
    params = [nn.Parameter(torch.ones(4, 3).half()), nn.Parameter(torch.ones(3))]
    opt = MixedPrecisionOptimizer(cls(params, lr), loss_scale=64.0, **settings)
    for _ in range(steps):
        opt.zero_grad()
        opt.backward(sum((p.float().sum() for p in params), torch.zeros(())))
        opt.step()
    return [record.getMessage() for record in caplog.records if "of its param_groups" in record.getMessage()]


def test_a_class_that_writes_the_models_gradients_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of_steps(PreconditionsModules, caplog)
    assert line.startswith("three steps of PreconditionsModules in a row have written the model's gradients, by which")


def test_a_class_that_moves_no_master_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """FP32 weights beside 16-bit ones move by the scaled gradient: they say nothing of its masters."""
    assert lines_of_steps(GoesRound, caplog, steps=2) == []
    (line,) = lines_of_steps(GoesRound, caplog)
    assert line.startswith("three steps of GoesRound in a row have moved no master. It holds parameters elsewhere")


@pytest.mark.parametrize("cls", [MovesData, BeginsLate, ClearsGradients])
@pytest.mark.parametrize("sums", ["model", "fp32"])
def test_a_class_that_reads_its_groups_is_believed(cls: Any, sums: str, caplog: pytest.LogCaptureFixture) -> None:
    if cls is ClearsGradients and sums == "fp32":
        pytest.skip("what stands in the place of a summed gradient is cleared by the engine")
    assert lines_of_steps(cls, caplog, grad_accumulation=sums) == []


def test_steps_with_an_lr_of_0_say_nothing_of_a_class(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of_steps(GoesRound, caplog, lr=0.0) == []
