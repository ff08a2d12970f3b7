"""certify: each check told apart by an optimizer that is wrong in exactly that, and by ones that are right."""

from __future__ import annotations

import copy
import importlib.util
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from specs import CASES, params_by_class
from test_third_party import Lookahead
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp16opt import Check, Report, certify
from fp16opt.__main__ import main
from fp16opt.tools.certify import closure_calls, targets
from fp16opt.tools.certify.comparing import same_bits

CHECKS = [
    *["none_grad", "fp32_state", "deterministic"],
    *["closure", "found_inf", "state_dict", "capturable", "fused_step", "wrapped"],
]


class Right(torch.optim.Optimizer):
    """Momentum, with the step counted in a tensor: nothing is wrong with it. Subclasses break one thing each."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.01})

    def begin(self, p: torch.Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(p)}

    def direction(self, p: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        assert p.grad is not None
        state["momentum_buffer"].mul_(0.9).add_(p.grad)
        return state["momentum_buffer"]

    def parameters(self, group: dict[str, Any]) -> list[torch.Tensor]:
        return [p for p in group["params"] if p.grad is not None]

    def before(self) -> None:
        """What a step begins with."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.before()
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in self.parameters(group):
                if p not in self.state:
                    self.state[p] = self.begin(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * self.direction(p, self.state[p]))
        return loss


class DecaysAll(Right):
    def parameters(self, group: dict[str, Any]) -> list[torch.Tensor]:
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return list(group["params"])


class MovesOnMomentum(Right):
    """Right at first; moves a parameter that loses its gradient."""

    def parameters(self, group: dict[str, Any]) -> list[torch.Tensor]:
        return [p for p in group["params"] if p.grad is not None or p in self.state]

    def direction(self, p: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if p.grad is None:
            return state["momentum_buffer"]
        return super().direction(p, state)


class CountsWithoutGradient(Right):
    def before(self) -> None:
        for state in self.state.values():
            state["age"] = state.get("age", 0) + 1


class HalfState(Right):
    def begin(self, p: torch.Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(p, dtype=torch.bfloat16)}


class Quantised(Right):
    def begin(self, p: torch.Tensor) -> dict[str, Any]:
        return {**super().begin(p), "codes": torch.zeros(p.shape, dtype=torch.uint8)}


class CountsInItself(Right):
    """Its count is in no state_dict."""

    calls = 0

    def before(self) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.calls


class CountsInGroup(Right):
    """As schedule-free optimizers do: each sub-group starts from the group's settings, so this is no fault."""

    def before(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["counted"] = group.get("counted", torch.zeros(())).add_(1)
            group["lr"] = 0.1 / group["k"] / float(group["counted"])


class Noisy(Right):
    def direction(self, p: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return super().direction(p, state) + 1e-3 * torch.rand_like(p)


class NeedsClosure(Right):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step()


class DoesNothing(Right):
    def step(self, closure: Any = None) -> Any:
        return None


class IgnoresFlag(Right):
    _step_supports_amp_scaling = True


class HonoursFlag(Right):
    _step_supports_amp_scaling = True
    leaves_behind = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        skip, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if skip is not None and float(skip):
            if self.leaves_behind:
                for p in self.param_groups[0]["params"]:
                    self.state[p] = {"momentum_buffer": torch.empty_like(p)}
            return None
        if scale is not None:
            for p in self.param_groups[0]["params"]:
                p.grad = p.grad / scale
        return super().step(closure)


class LeavesGarbage(HonoursFlag):
    leaves_behind = True


class IgnoresScale(HonoursFlag):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if hasattr(self, "grad_scale"):
            self.grad_scale = None
        return super().step(closure)


class LosesMomentum(Right):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class ForgetsLr(Right):
    """What a step needs is outside of state and groups."""

    pace = 0.1

    def before(self) -> None:
        self.pace *= 0.5
        for group in self.param_groups:
            group["lr"] = self.pace


class ReadsOnHost(Right):
    def direction(self, p: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return super().direction(p, state) * min(1.0, p.abs().sum().item())


class CountsInPython(Right):
    def direction(self, p: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["step"] = state.get("step", 0) + 1
        return super().direction(p, state)


class HoldsParameters(Right):
    """In a place where wrapping does not find them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        held = list(params)
        super().__init__(held, lr)
        self.held = lambda: held

    def parameters(self, group: dict[str, Any]) -> list[torch.Tensor]:
        return [p for p in self.held() if p.grad is not None]


class WritesGradients(HoldsParameters):
    """As K-FAC does with the gradients of modules."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.held():
            if p.grad is not None:
                p.grad.mul_(0.5)
        return Right.step(self, closure)

    def parameters(self, group: dict[str, Any]) -> list[torch.Tensor]:
        return Right.parameters(self, group)


class Raises(Right):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("the 13th of the month")


class RaisesOnNone(Right):
    def parameters(self, group: dict[str, Any]) -> list[torch.Tensor]:
        if any(p.grad is None for p in group["params"]):
            raise KeyError("no gradient for you")
        return list(group["params"])


def failed(report: Report) -> set[str]:
    return {name for name, check in report.checks.items() if check.passed is False}


def test_nothing_is_wrong_with_the_right_one() -> None:
    report = certify(Right)
    assert failed(report) == set(), report
    assert list(report.checks) == CHECKS
    assert report.ok is True
    assert report.checks["found_inf"].passed is None
    if not torch.cuda.is_available():
        assert report.checks["capturable"].passed is None
        assert "no CUDA device" in report.checks["capturable"].detail


WRONG: list[tuple[type[Right], set[str], str]] = [
    (DecaysAll, {"none_grad"}, "never had a gradient was changed"),
    (MovesOnMomentum, {"none_grad"}, "gradient is None after steps with one was changed"),
    (CountsWithoutGradient, {"none_grad", "capturable"}, "state of a parameter"),
    (HalfState, {"fp32_state", "state_dict"}, "momentum_buffer is bfloat16"),
    (CountsInItself, {"state_dict"}, "goes on differently"),
    (Noisy, {"deterministic", "state_dict"}, "other random states"),
    (NeedsClosure, {"closure", "capturable"}, "does not step without a closure"),
    (DoesNothing, {"closure"}, "moved no parameter"),
    (HoldsParameters, {"wrapped"}, "holds parameters elsewhere than in param_groups"),
    (WritesGradients, {"wrapped"}, "or works on the model's gradients"),
    (IgnoresFlag, {"found_inf"}, "step 1 changed a parameter although found_inf was 1"),
    (LeavesGarbage, {"found_inf"}, "left something behind"),
    (IgnoresScale, {"found_inf"}, "grad_scale = 4"),
    (LosesMomentum, {"state_dict"}, "goes on differently"),
    (ForgetsLr, {"state_dict"}, "goes on differently"),
    (ReadsOnHost, {"capturable"}, "reads numbers"),
    (CountsInPython, {"capturable"}, "Python numbers"),
    (RaisesOnNone, {"none_grad"}, "KeyError: 'no gradient for you'"),
]


@pytest.mark.parametrize(("cls", "checks", "words"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_each_fault_fails_its_check(cls: type[Right], checks: set[str], words: str) -> None:
    report = certify(cls)
    assert failed(report) == checks, report
    assert any(words in check.detail for check in report.checks.values() if check.passed is False), report
    assert report.ok is (not checks & {"none_grad", "fp32_state", "deterministic", "state_dict", "wrapped"})


@pytest.mark.parametrize("cls", [HonoursFlag, CountsInGroup, Quantised])
def test_no_fault_is_found_where_there_is_none(cls: type[Right]) -> None:
    report = certify(cls)
    assert ("codes" in report.checks["fp32_state"].detail) is (cls is Quantised), "that is told"
    # torch's load_state_dict gives integer state the parameter's dtype, so a plain round trip is not one.
    expected = {CountsInGroup: {"capturable"}, Quantised: {"state_dict"}}.get(cls, set())
    assert failed(report) == expected, report
    assert report.checks["found_inf"].passed is (True if cls is HonoursFlag else None)


def short_lbfgs(params: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(params, max_iter=2)


@pytest.mark.parametrize("make", [short_lbfgs, pytest.param(HonoursFlag, marks=pytest.mark.all)])
def test_it_is_the_same_on_another_default_device_and_in_inference_mode(make: Any) -> None:
    wanted = certify(make)
    with torch.device("meta"):
        assert certify(make).checks == wanted.checks
    with torch.inference_mode():
        assert certify(make).checks == wanted.checks


def test_a_step_that_always_raises_fails_all_and_is_quoted() -> None:
    report = certify(Raises)
    assert failed(report) == set(CHECKS)
    assert all("ArithmeticError: the 13th of the month" in check.detail for check in report.checks.values())
    assert not report.ok
    assert "not ok" in str(report)


def test_the_report_is_a_table() -> None:
    report = certify(HalfState)
    lines = str(report).splitlines()
    assert "HalfState: not ok" in lines[0]
    assert [line.split()[0] for line in lines[1:] if line.startswith("  ") and not line.startswith("   ")] == CHECKS
    assert "FAIL" in next(line for line in lines if "fp32_state" in line)
    assert max(map(len, lines)) <= 120


def test_ok_looks_at_five_checks() -> None:
    passed = {name: Check(True, "") for name in CHECKS}
    for name in CHECKS:
        report = Report("Some", "", {**passed, name: Check(False, "why")})
        assert report.ok is (name not in ("none_grad", "fp32_state", "deterministic", "state_dict", "wrapped"))
        assert Report("Some", "", {**passed, name: Check(None, "why")}).ok


def test_random_state_settings_and_arguments_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    random.seed(5)
    before, other = torch.get_rng_state(), random.getstate()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with torch.no_grad():
        certify(Noisy)
        certify(lambda params: (torch.manual_seed(1), HonoursFlag(params))[1])
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == other
    assert torch.are_deterministic_algorithms_enabled() is deterministic is False
    assert torch.utils.deterministic.fill_uninitialized_memory is fills


@pytest.mark.parametrize("case", params_by_class(CASES))
def test_every_torch_optimizer(case: Any) -> None:
    began = time.process_time()
    report = certify(case.make)
    assert time.process_time() - began < 30
    assert report.ok, report
    expected: dict[str, bool | None] = {"found_inf": None}
    expected["closure"] = case.kind != "closure"
    if case.kwargs.get("fused"):
        faulty = case.cls == "SGD" and case.kwargs.get("momentum") and torch.__version__ >= "2.4"
        expected["found_inf"] = not faulty
    for name, passed in expected.items():
        assert report.checks[name].passed is passed, report
    calls = "calls one more than once in a step" if case.cls == "LBFGS" else "calls one once, before anything else"
    assert report.checks["closure"].detail.endswith(calls)


THIRD_PARTY: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("lion_pytorch", "Lion", {}, set()),
    ("schedulefree", "AdamWScheduleFree", {}, set()),
    ("schedulefree", "RAdamScheduleFree", {}, set()),
    ("pytorch_optimizer", "Lamb", {}, set()),
    ("pytorch_optimizer", "AdaFactor", {}, {"fp32_state"}),
    ("optimi", "StableAdamW", {"lr": 1e-2}, set()),
    ("prodigyopt", "Prodigy", {}, set()),
]


@pytest.mark.parametrize(("module", "cls", "kwargs", "wrong"), THIRD_PARTY, ids=lambda value: str(value))
def test_third_party_packages(module: str, cls: str, kwargs: dict[str, Any], wrong: set[str]) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    report = certify(lambda params: getattr(importlib.import_module(module), cls)(params, **kwargs))
    assert failed(report) - {"capturable"} == wrong, report


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_quantised_optimizers_of_packages(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "bitsandbytes":
        from bitsandbytes.optim import AdamW8bit as Quantising
    else:
        from torchao.optim import AdamW8bit as Quantising
    report = certify(Quantising)
    assert report.checks["none_grad"].passed is not False, report


# -- closures --------------------------------------------------------------------------------------------------------


class IgnoresClosure(Right):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class Sam(Right):
    """Two evaluations a step: at the parameters, and where the loss rises."""

    evaluations = 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure() if self.evaluations == 2 else None
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        climbs = [1e-2 * p.grad for p in params]
        torch._foreach_add_(params, climbs)
        loss = closure() if loss is None else (loss, closure())[0]
        torch._foreach_sub_(params, climbs)
        super().step()
        return loss


class SamAfterBackward(Sam):
    """As the first implementation for torch has it: the first gradients come from a backward before the step."""

    evaluations = 1


class LazySam(Right):
    """A second evaluation in every tenth step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        loss = super().step(closure)
        return closure() if self.calls % 10 == 0 else loss


class ClearsFirst(Right):
    def before(self) -> None:
        self.zero_grad()


class DecaysFirst(Right):
    def before(self) -> None:
        torch._foreach_mul_(self.param_groups[0]["params"], 0.9)


class EverySecond(Right):
    """Evaluates in every second step, and steps on the gradients that it finds in the others."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure if self.calls % 2 else None)


class ReturnsItsOwn(Right):
    """Returns what is not the loss, but needs no more than it."""

    def step(self, closure: Any = None) -> Any:
        return 2 * super().step(closure)


class ReturnsTheLossAfter(Right):
    def step(self, closure: Any = None) -> Any:
        super().step()
        return closure()


class KeepsTrying(Right):
    """Takes whatever its closure raises for a reason to call it again."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(3):
            try:
                super().step(closure)
                closure()
            except BaseException:
                continue
        return None


class PutsItInItsOwnWords(Right):
    def step(self, closure: Any = None) -> Any:
        closure()
        try:
            closure()
        except BaseException as error:
            raise RuntimeError("no luck") from error


class RaisesAfterTheFirst(Right):
    def step(self, closure: Any = None) -> Any:
        closure()
        raise ArithmeticError("the 13th of the month")


class TakesNoClosure(Right):
    def step(self) -> Any:  # type: ignore[override]
        return super().step()


class MatricesOnly(Right):
    def __init__(self, params: Any) -> None:
        params = list(params)
        if any(p.dim() != 2 for p in params):
            raise ValueError("matrices, please")
        super().__init__(params)


CLOSURES: list[tuple[Any, str]] = [
    (Right, "once"),
    (NeedsClosure, "once"),
    (Noisy, "once"),  # draws the same numbers again
    (MatricesOnly, "once"),
    (ReturnsItsOwn, "once"),
    (DoesNothing, "never"),
    (IgnoresClosure, "never"),
    (SamAfterBackward, "elsewhere"),
    (ClearsFirst, "elsewhere"),
    (DecaysFirst, "elsewhere"),
    (EverySecond, "elsewhere"),
    (ReturnsTheLossAfter, "elsewhere"),
    (Sam, "several"),
    (LazySam, "several"),
    (KeepsTrying, "several"),
    (PutsItInItsOwnWords, "several"),
    (Raises, "untested"),
    (RaisesAfterTheFirst, "untested"),
    (TakesNoClosure, "untested"),
    (lambda params: Lookahead(Right(params)), "once"),
    (lambda params: Lookahead(Sam(params)), "several"),
    (lambda params: torch.optim.LBFGS(params, max_iter=1), "once"),
    (lambda params: torch.optim.LBFGS(params, max_iter=2), "several"),
    (lambda params: torch.optim.LBFGS(params, max_iter=1, line_search_fn="strong_wolfe"), "several"),
    (lambda params: torch.optim.Adam(params, capturable=True), "once"),
]


@pytest.mark.parametrize(("factory", "wanted"), CLOSURES, ids=lambda value: getattr(value, "__name__", value))
def test_how_often_a_class_calls_its_closure(factory: Any, wanted: str) -> None:
    assert closure_calls(factory) == wanted


@pytest.mark.parametrize(("cls", "wanted"), [("AdamWScheduleFree", "once"), ("AdamWScheduleFreeClosure", "elsewhere")])
def test_how_often_schedule_free_optimizers_call_their_closure(cls: str, wanted: str) -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    assert closure_calls(getattr(schedulefree, cls)) == wanted


CLOSURE_WORDS: list[tuple[Any, bool, str]] = [
    (Right, True, "steps without a closure; calls one once, before anything else"),
    (IgnoresClosure, True, "steps without a closure; ignores one that it is given"),
    (ClearsFirst, False, "moved no parameter; calls one once, but not in every step, or not before"),
    (Sam, False, "does not step without a closure; calls one more than once in a step"),
    (TakesNoClosure, True, "steps without a closure; how often it calls one can't be tested here"),
]


@pytest.mark.parametrize(
    ("factory", "passed", "words"), CLOSURE_WORDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_report_says_how_often(factory: Any, passed: bool, words: str) -> None:
    check = certify(factory).checks["closure"]
    assert check.passed is passed, check
    assert words in check.detail


@pytest.mark.parametrize("factory", [Noisy, Sam, Raises, lambda params: (torch.manual_seed(1), Right(params))[1]])
def test_trying_closures_leaves_everything_as_it_was(factory: Any) -> None:
    heard: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *args: heard.append(args))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    wanted = closure_calls(factory)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert closure_calls(factory) == wanted
            assert torch.is_inference_mode_enabled()
            assert torch.empty(()).device.type == "meta"
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert closure_calls(factory) == wanted
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        handle.remove()
    assert heard == []
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupt_while_closures_are_tried_comes_through() -> None:
    class Interrupted(Right):
        def step(self, closure: Any = None) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        closure_calls(Interrupted)


# -- steps that are compiled -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch before 2.6 has no stance")
@pytest.mark.parametrize("trial", ["certify", "closure_calls"])
def test_a_trial_uses_up_no_recompilation_of_a_compiled_step(trial: str) -> None:
    """torch grants each function a few. Where they are used up a step with ``fullgraph=True`` raises."""
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(dynamic=False, fullgraph=True, backend=backend)
    def update(p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        p.sub_(grad * lr)

    class Compiled(Right):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            for group in self.param_groups:
                for p in self.parameters(group):
                    update(p, p.grad, group["lr"])
            return loss

    if trial == "certify":
        certify(Compiled)
    else:
        assert closure_calls(Compiled) == "once"
    assert compiled == []


# -- refusals --------------------------------------------------------------------------------------------------------


def _refuses(_: Any) -> torch.optim.Optimizer:
    raise LookupError("not today")


@pytest.mark.parametrize(
    ("factory", "error", "match"),
    [
        (3, TypeError, r"optimizer_factory: expected a callable .* got int"),
        (lambda params: "Adam", TypeError, r"expected it to return a torch.optim.Optimizer, got str"),
        (_refuses, ValueError, r"could not make an optimizer: LookupError: not today"),
    ],
)
def test_refusals(factory: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        certify(factory)
    if error is TypeError:
        with pytest.raises(error, match=match):
            closure_calls(factory)
    else:
        assert closure_calls(factory) == "untested"


def test_targets_with_options() -> None:
    made = targets.load("torch.optim:AdamW", ["betas=(0.5, 0.75)", "amsgrad=True"])([torch.ones(2)])
    assert made.defaults["betas"] == (0.5, 0.75)
    assert made.defaults["amsgrad"] is True

    class NoDefault(Right):
        def __init__(self, params: Any, lr: float, word: str = "") -> None:
            super().__init__(params, lr)
            self.word = word

    module = type(sys)("certify_target_of_this_test")
    module.NoDefault = NoDefault  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        made = targets.load(f"{module.__name__}:NoDefault", ["word=fast"])([torch.ones(2)])
    finally:
        del sys.modules[module.__name__]
    assert (made.defaults["lr"], made.word) == (1e-3, "fast")  # type: ignore[attr-defined]


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "certified_half.py").write_text(
        "import torch\n"
        "class Half(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        super().step(closure)\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            self.state[p]['low'] = torch.zeros(3, dtype=torch.float16)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["certify", "certified_half:Half"]) == 1
    assert "low is float16" in capsys.readouterr().out
    assert main(["certify", "torch.optim:SGD", "momentum=0.9", "fused=True"]) == 0
    printed = capsys.readouterr().out
    assert "torch.optim.sgd.SGD: ok" in printed
    assert "FAIL" in printed  # torch's fused momentum step, under found_inf: chooses a mode and no more


def test_the_harness_compares_bits() -> None:
    """`same_bits` is what all checks rest on."""
    same = same_bits
    nan = float("nan")
    tensor = torch.tensor([1.0, nan, -0.0])
    for a in (tensor, {"a": [1, (tensor, None)]}, nan, [], "x", torch.eye(3).to_sparse()):
        assert same(a, copy.deepcopy(a))
    other = torch.tensor([1.0, nan, 0.0])
    zeros = torch.zeros(2)
    for a, b in (
        (zeros, zeros.int()),
        (zeros, zeros.half()),
        (tensor, other),
        (tensor, tensor[:2]),
        (1, 2),
        (1, 1.0),
        ([1], [1, 1]),
        ({"a": 1}, {"b": 1}),
    ):
        assert not same(a, b)
