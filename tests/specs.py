"""Optimizer cases and error cases as data: what the suite is parametrised over."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

Params = Iterable[Any]


@dataclass(frozen=True)
class OptimizerCase:
    """One torch.optim class with one choice of arguments.

    kwargs values that are callables are called for every optimizer that is made, so that no two share a
    tensor.
    """

    id: str
    cls: str
    kwargs: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)
    kind: str = "dense"  # "dense", "matrix" (2-D parameters only), "sparse" (sparse gradients), "closure"

    def make(self, params: Params) -> torch.optim.Optimizer:
        made = {k: v() if callable(v) else v for k, v in self.kwargs.items()}
        return getattr(torch.optim, self.cls)(params, **made)

    def missing(self) -> str | None:
        """Why the installed torch cannot run this case on the CPU; None where it can."""
        return _missing(self)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        if self.kind == "matrix":
            return [(8, 9), (5, 16), (1, 3)]
        if self.kind == "sparse":
            return [(7, 5), (3, 2)]
        shapes: list[tuple[int, ...]] = [(70,), (8, 9), (3, 5, 2), (), (0,), (1,)]
        if self.cls == "Adafactor":  # torch's own divides by the number of elements: no empty params
            shapes.remove((0,))
        return shapes


@cache
def _missing(case: OptimizerCase) -> str | None:
    cls = getattr(torch.optim, case.cls, None)
    if cls is None:
        return f"torch {torch.__version__} has no optim.{case.cls}"
    unknown = set(case.kwargs) - set(inspect.signature(cls.__init__).parameters)
    if unknown:
        return f"torch {torch.__version__}: {case.cls} has no argument {sorted(unknown)}"
    p = torch.nn.Parameter(torch.ones(2, 2))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt = case.make([p])
            p.grad = torch.ones(2, 2).to_sparse(1) if case.kind == "sparse" else torch.ones(2, 2)
            opt.step((lambda: p.grad.sum()) if case.kind == "closure" else None)
    except (AssertionError, RuntimeError, TypeError, ValueError) as err:
        return f"torch {torch.__version__} does not run it on the CPU: {str(err)[:90]}"
    return None


def _lr_tensor(value: float) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(value)


def _variants(cls: str, options: dict[str, dict[str, Any]], impls: Iterable[str]) -> list[OptimizerCase]:
    cases = []
    for name, kwargs in options.items():
        for impl in impls:
            chosen = {"foreach": False} if impl == "forloop" else {impl: True}
            cases.append(OptimizerCase(f"{cls}-{name}-{impl}", cls, {**kwargs, **chosen}))
    return cases


LOOPS = ("forloop", "foreach")
FUSED = ("forloop", "foreach", "fused")
_ADAM = {
    "default": {"lr": 0.01},
    "wd": {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6},
    "amsgrad": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01},
    "maximize": {"lr": 0.01, "maximize": True, "weight_decay": 0.01},
}

CASES: list[OptimizerCase] = [
    *_variants(
        "SGD",
        {
            "plain": {"lr": 0.1},
            "wd": {"lr": 0.1, "weight_decay": 0.05},
            "momentum": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
            "nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
            "maximize": {"lr": 0.01, "momentum": 0.5, "maximize": True},
        },
        FUSED,
    ),
    *_variants("Adam", _ADAM, FUSED),
    *_variants("AdamW", _ADAM, FUSED),
    *_variants(
        "Adagrad",
        {
            "default": {"lr": 0.1},
            "all": {
                "lr": 0.1,
                "lr_decay": 0.1,
                "weight_decay": 0.01,
                "initial_accumulator_value": 0.1,
                "maximize": True,
            },
        },
        FUSED,
    ),
    *_variants("Adadelta", {"default": {}, "wd": {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}}, LOOPS),
    *_variants(
        "Adafactor",
        {
            "default": {},
            "all": {
                "lr": 0.05,
                "beta2_decay": -0.6,
                "d": 1.5,
                "weight_decay": 0.1,
                "maximize": True,
            },
        },
        LOOPS,
    ),
    *_variants("Adamax", {"default": {"lr": 0.01}, "wd": {"lr": 0.01, "weight_decay": 0.1}}, LOOPS),
    *_variants("ASGD", {"default": {"lr": 0.1}, "averaging": {"lr": 0.1, "t0": 1.0, "lambd": 0.01}}, LOOPS),
    *_variants(
        "NAdam",
        {
            "default": {"lr": 0.01},
            "decoupled": {
                "lr": 0.01,
                "weight_decay": 0.1,
                "momentum_decay": 0.01,
                "decoupled_weight_decay": True,
            },
        },
        LOOPS,
    ),
    *_variants(
        "RAdam",
        {
            "default": {"lr": 0.1},
            "wd": {
                "lr": 0.1,
                "weight_decay": 0.1,
                "betas": (0.8, 0.7),
            },
        },
        LOOPS,
    ),
    *_variants(
        "RMSprop",
        {
            "default": {},
            "centered": {
                "lr": 0.01,
                "momentum": 0.9,
                "centered": True,
                "weight_decay": 0.01,
            },
        },
        LOOPS,
    ),
    *_variants("Rprop", {"default": {}, "etas": {"lr": 0.1, "etas": (0.6, 1.3)}}, LOOPS),
    OptimizerCase("SGD-defaults", "SGD", {}),
    OptimizerCase("AdamW-defaults", "AdamW", {}),
    OptimizerCase("SGD-lr_tensor", "SGD", {"lr": _lr_tensor(0.1)}),
    OptimizerCase("Adam-lr_tensor", "Adam", {"lr": _lr_tensor(0.01), "foreach": False}),
    OptimizerCase("AdamW-lr_tensor-fused", "AdamW", {"lr": _lr_tensor(0.01), "fused": True}),
    OptimizerCase("LBFGS-plain", "LBFGS", {"lr": 0.5, "max_iter": 4, "history_size": 3}, "closure"),
    OptimizerCase("LBFGS-strong_wolfe", "LBFGS", {"max_iter": 4, "line_search_fn": "strong_wolfe"}, "closure"),
    OptimizerCase("Muon-default", "Muon", {"lr": 0.02}, "matrix"),
    OptimizerCase(
        "Muon-match_rms",
        "Muon",
        {
            "lr": 0.02,
            "nesterov": False,
            "adjust_lr_fn": "match_rms_adamw",
            "weight_decay": 0.0,
        },
        "matrix",
    ),
    OptimizerCase("SparseAdam-default", "SparseAdam", {"lr": 0.05}, "sparse"),
    OptimizerCase("SparseAdam-maximize", "SparseAdam", {"lr": 0.05, "maximize": True}, "sparse"),
    *[
        OptimizerCase(f"{cls}-capturable", cls, {"capturable": True})
        for cls in ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    ],
]

# Classes that every supported torch has; Adafactor and Muon came later. test_harness checks that none is
# missing.
ALWAYS = {
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
}
LATER = {"Adafactor": (2, 5), "Muon": (2, 9)}


def params_of(cases: Iterable[OptimizerCase]) -> list[Any]:
    """pytest parameters with readable ids; a case that the installed torch lacks is skipped with its
    reason."""
    out = []
    for case in cases:
        why = case.missing()
        marks = [pytest.mark.skip(reason=why)] if why else []
        out.append(pytest.param(case, id=case.id, marks=marks))
    return out


def params_by_class(cases: Sequence[OptimizerCase]) -> list[Any]:
    """The same, of which a user's run takes the first of each class: what is asked is not of a class's settings."""
    first = {case.id for case in one_per_class(cases)}
    params = params_of(cases)
    for number, case in enumerate(cases):
        if case.id not in first:
            params[number] = pytest.param(case, id=case.id, marks=[*params[number].marks, pytest.mark.all])
    return params


def one_per_class(cases: Iterable[OptimizerCase] = CASES) -> list[OptimizerCase]:
    """The first case of each class that runs here."""
    seen: dict[str, OptimizerCase] = {}
    for case in cases:
        if case.missing() is None:
            seen.setdefault(case.cls, case)
    return list(seen.values())


@dataclass(frozen=True)
class ErrorCase:
    """Constructor arguments, the exception they must give, and what its message must say."""

    id: str
    kwargs: dict[str, Any] = field(hash=False, compare=False)
    error: type[Exception] | tuple[type[Exception], ...]
    match: str


INF, NAN = float("inf"), float("nan")
WRONG = (TypeError, ValueError)

ENGINE_ERRORS = [
    ErrorCase(
        "dynamic_and_loss_scale",
        {"dynamic": True, "loss_scale": 8.0},
        ValueError,
        r"(?s)dynamic.*loss_scale|loss_scale.*dynamic",
    ),
    ErrorCase("loss_scale_zero", {"loss_scale": 0.0}, ValueError, r"scale"),
    ErrorCase("loss_scale_negative", {"loss_scale": -2.0}, ValueError, r"scale"),
    ErrorCase("loss_scale_nan", {"loss_scale": NAN}, ValueError, r"scale.*nan"),
    ErrorCase("loss_scale_inf", {"loss_scale": INF}, ValueError, r"scale.*inf"),
    ErrorCase("loss_scale_bool", {"loss_scale": True}, WRONG, r"scale.*(bool|True)"),
    ErrorCase("loss_scale_text", {"loss_scale": "dynamic"}, TypeError, r"^loss_scale.*'dynamic'.*use dynamic=True"),
    ErrorCase("scaler_not_a_scaler", {"scaler": 128.0}, TypeError, r"scaler.*(128|float)"),
    ErrorCase("scaler_class_not_instance", {"scaler": dict}, TypeError, r"scaler"),
    ErrorCase("accumulation_unknown", {"grad_accumulation": "fp64"}, ValueError, r"grad_accumulation.*fp64"),
    ErrorCase("write_mode_unknown", {"on_model_write": "panic"}, ValueError, r"on_model_write.*panic"),
    ErrorCase("names_not_pairs", {"named_parameters": [1, 2]}, WRONG, r"named_parameters"),
    ErrorCase("names_not_iterable", {"named_parameters": 3}, WRONG, r"named_parameters"),
]

# kwargs here are arguments of DynamicLossScaler, reached through the engine's scaler=.
BAD_LOSSES: list[tuple[str, Callable[[torch.Tensor], Any], Any, str]] = [
    ("vector", lambda p: p.float() * 1.0, (*WRONG, RuntimeError), r"(?i)scalar|one element|shape"),
    ("integer", lambda p: torch.tensor(3), WRONG, r"int64|floating"),
    ("complex", lambda p: torch.tensor(1j), WRONG, r"complex|floating"),
    ("python_float", lambda p: 1.5, TypeError, r"float"),
    ("none", lambda p: None, TypeError, r"None"),
    ("list", lambda p: [p.float().sum()], TypeError, r"list"),
]

REFUSED_DTYPES = [torch.complex64, torch.complex128] + [
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)
]

CLIP_ERRORS = [
    ErrorCase("negative", {"max_norm": -1.0}, ValueError, r"max_norm.*-1"),
    ErrorCase("nan", {"max_norm": NAN}, ValueError, r"max_norm.*nan"),
    ErrorCase("text", {"max_norm": "1"}, WRONG, r"max_norm"),
    ErrorCase("norm_type_zero", {"max_norm": 1.0, "norm_type": 0.0}, ValueError, r"norm_type.*0"),
    ErrorCase("norm_type_negative", {"max_norm": 1.0, "norm_type": -2.0}, ValueError, r"norm_type.*-2"),
    ErrorCase("norm_type_nan", {"max_norm": 1.0, "norm_type": NAN}, ValueError, r"norm_type.*nan"),
]
