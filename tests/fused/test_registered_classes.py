"""Lion in one pass, and classes that users register: what is served, what is refused, what differs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import interpreters
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fp16opt import MixedPrecisionOptimizer, certify, register_fused_step, register_one_pass
from fp16opt.engine import fused_registry
from fused import oracle_fused as oracle
from fused.oracle_fused import Element
from fused.test_fused_steps import give_grads, parameters


class PlainLion(Optimizer):
    """Written from the paper, with keys of its own."""

    def __init__(self, params: Any, lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, decay: float = 0.0) -> None:
        super().__init__(params, {"rate": lr, "b1": b1, "b2": b2, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                update = torch.sign(m * group["b1"] + p.grad * (1 - group["b1"]))
                p.mul_(1 - group["rate"] * group["decay"]).sub_(update * group["rate"])
                m.mul_(group["b2"]).add_(p.grad * (1 - group["b2"]))


LION_KEYS = {"lr": "rate", "betas": ("b1", "b2"), "weight_decay": "decay"}
TORCHS = {name: name for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
register_fused_step(PlainLion, "lion", LION_KEYS)


def half() -> Tensor:
    return torch.nn.Parameter(torch.ones(3, dtype=torch.float16))


def lion_of_package() -> Any:
    return pytest.importorskip("lion_pytorch").Lion


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["package", "registered"])
def test_lion_in_one_pass_has_the_recipes_bits(kind: str, split: bool) -> None:
    params = parameters(dtypes=(torch.float16, torch.bfloat16) if split else (torch.float16, torch.float32))
    if kind == "package":
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.03}]
        inner = lion_of_package()(groups, lr=0.01, weight_decay=0.1)
    else:
        inner = PlainLion([{"params": params[:2]}, {"params": params[2:], "rate": 0.03}], lr=0.01, decay=0.1)
    opt = MixedPrecisionOptimizer(
        inner, fused_step=True, loss_scale=8.0, master_weights="split" if split else "full"
    )  # fmt: skip
    assert "step: fused" in repr(opt)
    state = opt.state_dict()["masters"]
    values = [p.detach() if m is None else m for p, m in zip(params, state, strict=True)]
    want = [Element(v.float().numpy().reshape(-1).copy(), np.zeros(v.numel(), np.float32)) for v in values]
    for step in range(4):
        give_grads(opt, params, step)
        stored = [p.grad.float().numpy().reshape(-1).copy() for p in params]
        norm = opt.clip_master_grads(0.5)
        clip = float(np.float32(0.5) / (np.float32(norm) + np.float32(1e-6)))
        opt.step()
        for k, (e, grad) in enumerate(zip(want, stored, strict=True)):
            lr = 0.01 if k < 2 else 0.03
            oracle.lion(e, grad, 1 / 8.0, clip, lr=lr, betas=(0.9, 0.99), weight_decay=0.1, maximize=False)
    got = opt.state_dict()["masters"]
    keys = [key for group in opt.param_groups for key in group["params"]]
    for e, p, master, held in zip(want, params, got, keys, strict=True):
        assert np.array_equal((p if master is None else master).detach().float().numpy().reshape(-1), e.p)
        assert np.array_equal(opt.state[held]["exp_avg"].numpy().reshape(-1), e.m)


def test_a_copy_where_the_class_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It steps itself; released gradients have no other step, and say so."""
    plain = MixedPrecisionOptimizer(PlainLion([half()]))
    released = MixedPrecisionOptimizer(PlainLion([half()]), gradient_release=True)
    monkeypatch.delitem(fused_registry._SPECS, PlainLion)
    assert "step: general (PlainLion is not exactly SGD" in repr(copy.deepcopy(plain))
    with pytest.raises(
        ValueError, match=r"gradient_release=True needs the one-pass step, .*PlainLion is not exactly SGD"
    ):
        copy.deepcopy(released)


# -- what a class must be ----------------------------------------------------------------------------------------------


def test_a_decoupled_lion_of_the_package_is_not_taken_for_a_plain_one() -> None:
    inner = lion_of_package()([half()], lr=1e-4, weight_decay=0.1, decoupled_weight_decay=True)
    with pytest.raises(ValueError, match=r"fused_step=True needs the one-pass step, .*: Lion has decoupled_wd=True"):
        MixedPrecisionOptimizer(inner, fused_step=True)
    assert "step: general (Lion has decoupled_wd=True" in repr(MixedPrecisionOptimizer(inner))


def test_the_package_is_not_imported_for_us() -> None:
    code = "import sys, fp16opt; print('lion_pytorch' in sys.modules)"
    assert interpreters.python("-c", code, cwd=Path.cwd()).stdout == "False\n"


class Bold(AdamW):
    """Steps twice as far."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        super().step()


class OwnState(PlainLion):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["velocity"] = state["exp_avg"]


class Counting(Adam):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["step"] = torch.tensor(float(state["step"]))
            state["step"] = int(state["step"])


class Raising(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise OSError("not here")


class Renamed(SGD):
    pass


class Nested(Renamed):
    pass


register_fused_step(Bold, "adamw", TORCHS)
register_fused_step(OwnState, "lion", LION_KEYS)
register_fused_step(Counting, "adam", TORCHS)
register_fused_step(Raising, "sgd", {"lr": "lr"})
register_fused_step(Renamed, "sgd", {"lr": "rate"})

DIFFERENT: dict[type[Optimizer], str] = {
    Bold: "Bold gives other .* after 1 step",
    OwnState: r"keeps state \['exp_avg', 'velocity'\] where \['exp_avg'\] is wanted, after 1 step",
    Counting: "Counting keeps 'step' as int where a tensor is wanted, after 1 step",
    Raising: "step raised OSError: not here",
    Renamed: "Renamed has no 'rate' in its groups",
}


@pytest.mark.parametrize("cls", DIFFERENT, ids=lambda cls: cls.__name__)
def test_certify_says_where_a_registered_class_steps_otherwise(cls: Any) -> None:
    check = certify(lambda params: cls(params, lr=0.01)).checks["fused_step"]
    assert check.passed is False
    assert re.search(DIFFERENT[cls], check.detail), check.detail


def test_certify_says_that_a_registered_class_steps_alike() -> None:
    assert certify(lambda params: PlainLion(params, decay=0.1)).checks["fused_step"].passed is True
    assert certify(AdamW).checks["fused_step"].passed is None
    assert certify(Nested).checks["fused_step"].detail == "has no fused step"


def test_a_registered_class_is_trusted_and_another_is_not_served() -> None:
    assert "step: fused" in repr(MixedPrecisionOptimizer(Bold([half()]), fused_step=True))
    for cls, message in ((Renamed, "group 0 has no 'rate'"), (Nested, "Nested is not exactly SGD")):
        with pytest.raises(ValueError, match=f"fused_step=True needs the one-pass step, .*: {message}"):
            MixedPrecisionOptimizer(cls([half()], lr=0.01), fused_step=True)
        assert "step: general (" in repr(MixedPrecisionOptimizer(cls([half()], lr=0.01)))


def test_the_old_name_warns() -> None:
    with pytest.warns(DeprecationWarning, match="register_one_pass is called fp16opt.register_fused_step now"):
        register_one_pass(PlainLion, "lion", LION_KEYS)


REFUSED: list[tuple[type[Exception], str, tuple[Any, Any, Any]]] = [
    (TypeError, "cls: expected a subclass of torch.optim.Optimizer, got int", (int, "sgd", {"lr": "lr"})),
    (TypeError, "cls: expected a subclass of torch.optim.Optimizer, got Optimizer", (Optimizer, "sgd", {"lr": "lr"})),
    (TypeError, "cls: expected a subclass of torch.optim.Optimizer, got str", ("SGD", "sgd", {"lr": "lr"})),
    (ValueError, "functor: expected one of 'sgd', 'adam', 'adamw', 'lion', got 'lamb'", (Nested, "lamb", {"lr": "lr"})),
    (TypeError, "hyperparameters: expected a dict from settings to keys .*, got list", (Nested, "sgd", [])),
    (ValueError, "functor 'lion' has lr, betas, weight_decay, maximize, and no 'eps'",
     (Nested, "lion", {"eps": "eps"})),
    (ValueError, "functor 'adam' needs betas, eps too", (Nested, "adam", {"lr": "lr"})),
    (TypeError, r"hyperparameters\['lr'\]: expected a key of the class's param groups, got 0.1",
     (Nested, "sgd", {"lr": 0.1})),
    (TypeError, r"hyperparameters\['betas'\]: expected a key .*, or a tuple of two, got \('b1',\)",
     (Nested, "lion", {"lr": "lr", "betas": ("b1",)})),
    (ValueError, "cls: AdamW has a fused step already", (AdamW, "adamw", TORCHS)),
    (ValueError, "cls: PlainLion has a fused step already, with other settings",
     (PlainLion, "lion", {"lr": "rate", "betas": ("b1", "b2")})),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "given"), REFUSED, ids=[message[:60] for _, message, _ in REFUSED])
def test_what_registering_refuses(error: type[Exception], message: str, given: tuple[Any, Any, Any]) -> None:
    with pytest.raises(error, match=message):
        register_fused_step(*given)
    register_fused_step(PlainLion, "lion", LION_KEYS)  # the same again changes nothing
