"""certify: property tests on any optimizer, that say how it may be wrapped."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ...optimizer import MixedPrecisionOptimizer
from .closures import closure_calls
from .comparing import difference, everything, same_bits, states_of, tensors_of
from .fused import fused_step
from .report import Check, Report
from .surroundings import undisturbed
from .trials import Factory, Trial, check_factory, quote, setting_for

__all__ = ["certify"]

_STEPS = 12  # rectified Adam moves nothing in its first five


def certify(optimizer_factory: Factory) -> Report:
    """Run property tests on an optimizer, on small FP32 tensors of the CPU. Takes about a second.

    The checks: ``none_grad`` (a parameter without gradient is left alone, its state too), ``fp32_state`` (state of FP32
    parameters is no narrower), ``deterministic`` (the same
    gradients give the same bits, whatever the random state), ``closure`` (it steps without one; what
    :func:`closure_calls` says is told), ``found_inf`` (torch's protocol for skipping on the device is honoured, on the
    first step too), ``state_dict`` (a round trip goes on alike), ``capturable`` (a step can be captured in a CUDA
    graph), ``fused_step`` (a class given to :func:`fp16opt.register_fused_step` steps as the functor does), ``wrapped``
    (in the wrapper, at a loss scale, it steps FP32 weights to the same bits as alone). All but ``capturable`` run on
    the CPU.

    Args:
        optimizer_factory: Called with a list of FP32 parameters, returns an optimizer over them. Called many times.
            Optimizers that have a ``train`` method get it called.

    Returns:
        A :class:`Report`. A step that raises is a failed check that quotes the error. torch's global random state is
        left as it was.

    Raises:
        TypeError: ``optimizer_factory`` is not callable, or what it returns is no torch optimizer.
        ValueError: It raised an error for every kind of parameters.

    Example:
        >>> report = certify(lambda params: torch.optim.AdamW(params, lr=1e-3))
        >>> report.ok, report.checks["state_dict"].passed, report.checks["found_inf"].passed
        (True, True, None)
    """
    check_factory(optimizer_factory)
    with undisturbed(on_cuda=True):
        setting, name = setting_for(optimizer_factory)
        trial = Trial(optimizer_factory, setting)
        return Report(name, setting.words, {check: _outcome(test, trial) for check, test in _CHECKS.items()})


# -- the checks ------------------------------------------------------------------------------------------------------


def _outcome(test: Callable[[Trial], Check], trial: Trial) -> Check:
    if trial.setting.on_cuda_only:
        return Check(None, "not testable: with capturable=True torch steps nothing on the CPU")
    if trial.setting.error is not None:
        return Check(False, f"step raised {quote(trial.setting.error)}")
    try:
        return test(trial)
    except Exception as error:
        return Check(False, f"raised {quote(error)}")


def _none_grad(trial: Trial) -> Check:
    cases = [(0, "that never had a gradient"), (_STEPS, "whose gradient is None after steps with one")]
    coupled = trial.setting.kind == "closure"  # LBFGS moves all parameters along one direction, made of its history
    for had_some, words in cases[:1] if coupled else cases:
        params, optimizer = trial.make()
        trial.train(params, optimizer, had_some)
        left = frozenset(range(0, len(params), 2))
        before = [copy.deepcopy((params[i].detach(), states_of(params, optimizer)[i])) for i in sorted(left)]
        trial.train(params, optimizer, _STEPS, first=had_some, without=left)
        for i, (value, state) in zip(sorted(left), before, strict=True):
            if not same_bits(params[i], value):
                return Check(False, f"a parameter {words} was changed")
            now = states_of(params, optimizer)[i]
            if had_some and now is not None and not same_bits(now, state):
                return Check(False, f"the state of a parameter {words} was changed")
    which = " that never had one" if coupled else ""
    return Check(True, f"parameters without gradient{which} keep their value and state")


def _fp32_state(trial: Trial) -> Check:
    params, optimizer = trial.make()
    trial.train(params, optimizer, _STEPS)
    found = [entry for state in states_of(params, optimizer) for entry in tensors_of(state)]
    narrow = {f"{key} is {str(t.dtype)[6:]}" for key, t in found if t.is_floating_point() and t.element_size() < 4}
    if narrow:
        return Check(False, f"of FP32 parameters: {', '.join(sorted(narrow))}")
    codes = {key for key, t in found if not t.is_floating_point() and not t.is_complex() and t.numel() > 1}
    if codes:
        return Check(True, f"floating state is FP32 or wider; quantised: {', '.join(sorted(codes))}")
    return Check(True, "floating state is FP32 or wider" if found else "there is no state")


def _deterministic(trial: Trial) -> Check:
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        run = trial.make()
        trial.train(*run, _STEPS)
        runs.append(everything(*run))
    differs = difference(*runs)
    if not differs:
        return Check(True, "two runs give the same bits")
    return Check(False, f"{differs} differs between two runs with other random states")


_CALLS = {
    "never": "ignores one that it is given",
    "once": "calls one once, before anything else",
    "elsewhere": "calls one once, but not in every step, or not before it moves or clears something",
    "several": "calls one more than once in a step",
    "untested": "how often it calls one can't be tested here",
}


def _closure(trial: Trial) -> Check:
    calls = _CALLS[closure_calls(trial.factory)]
    if trial.setting.kind == "closure":
        return Check(False, f"does not step without a closure; {calls}")
    params, optimizer = trial.make()
    before = copy.deepcopy(params)
    trial.train(params, optimizer, _STEPS)
    if same_bits(params, before):
        return Check(False, f"step() without a closure moved no parameter; {calls}")
    return Check(True, f"steps without a closure; {calls}")


@contextlib.contextmanager
def _memory_filled() -> Iterator[None]:
    """New memory holds nan instead of whatever it held: what is left uninitialised then shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _skipping_step(optimizer: Optimizer, found_inf: float, grad_scale: float | None = None) -> None:
    """A step by torch's protocol: the optimizer itself looks at the flag, and divides by the scale."""
    single: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale, **single)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(found_inf, **single)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _found_inf(trial: Trial) -> Check:
    params, optimizer = trial.make()
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return Check(None, "does not take found_inf: whether to skip is decided on the host")
    whole = trial.make()
    with _memory_filled():
        for step in range(_STEPS):
            for found_inf in (1.0, 0.0):
                before = copy.deepcopy([param.detach() for param in params])
                trial.give(params, step)
                _skipping_step(optimizer, found_inf)
                if found_inf and not same_bits([param.detach() for param in params], before):
                    return Check(False, f"step {step + 1} changed a parameter although found_inf was 1")
            trial.train(*whole, 1, first=step)
            if difference(everything(params, optimizer), everything(*whole)):
                return Check(False, f"skipping step {step + 1} with found_inf = 1 left something behind in its state")
        trial.give(params, _STEPS)
        for param in params:
            param.grad = None if param.grad is None else param.grad * 4.0
        _skipping_step(optimizer, 0.0, grad_scale=4.0)
        trial.train(*whole, 1, first=_STEPS)
        if not same_bits(params, whole[0]):
            return Check(False, "a step with grad_scale = 4 is not a step with gradients divided by 4")
    return Check(True, "skips where found_inf is 1, on the first step too, and divides by grad_scale")


def _state_dict(trial: Trial) -> Check:
    whole = trial.make()
    trial.train(*whole, _STEPS)
    saved = copy.deepcopy(whole[1].state_dict())
    params = [Parameter(param.detach().clone()) for param in whole[0]]
    resumed = params, trial.over(params)
    resumed[1].load_state_dict(saved)
    trial.train(*whole, _STEPS, first=_STEPS)
    trial.train(*resumed, _STEPS, first=_STEPS)
    differs = difference(everything(*whole), everything(*resumed))
    if differs:
        return Check(False, f"training goes on differently after a round trip: {differs} differs")
    return Check(True, "training goes on with the same bits after a round trip")


class _HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that are read from tensors: in a CUDA graph they would be frozen, or refused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _capturable(trial: Trial) -> Check:
    if trial.setting.kind == "closure":
        return Check(False, "needs a closure")
    params, optimizer = trial.make()
    if any(group.get("capturable") is False for group in optimizer.param_groups):
        return Check(False, "torch refuses to capture a step of an optimizer made with capturable=False")
    trial.train(params, optimizer, 1)
    trial.give(params, 1)
    numbers = [_numbers(state) for state in states_of(params, optimizer)]
    with _HostReads() as reads:
        optimizer.step()
    if reads.count:
        return Check(False, "a step reads numbers from tensors on the host")
    if [_numbers(state) for state in states_of(params, optimizer)] != numbers:
        return Check(False, "a step counts in Python numbers, which a CUDA graph would freeze")
    if not torch.cuda.is_available():
        return Check(None, "no CUDA device here; nothing in a step on the CPU stands against it")
    return _captures(trial)


def _numbers(state: Any) -> dict[Any, Any]:
    if not isinstance(state, dict):
        return {}
    return {key: value for key, value in state.items() if isinstance(value, int | float)}


def _captures(trial: Trial) -> Check:
    """A captured step, replayed, against one that is not."""
    trial = Trial(trial.factory, trial.setting, "cuda")
    eager, captured = trial.make(), trial.make()
    trial.train(*eager, 2)
    trial.train(*captured, 2)
    params, optimizer = captured
    trial.give(params, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in (2, 3):
        trial.train(*eager, 1, first=step)
        for param, grad in zip(params, trial.gradients(params, step), strict=True):
            if param.grad is not None:
                param.grad.copy_(grad)
        graph.replay()
    torch.cuda.synchronize()
    if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(eager[0], params, strict=True)):
        return Check(False, "a captured step, replayed twice, moves parameters otherwise than two steps do")
    return Check(True, "a captured step can be replayed")


def _wrapped(trial: Trial) -> Check:
    if trial.setting.kind == "closure":
        return Check(None, "needs a closure")
    alone, (params, inner) = trial.make(), trial.make()
    wrapped = MixedPrecisionOptimizer(inner, loss_scale=64.0, fused_step=False)
    for step in range(_STEPS):
        torch.manual_seed(step)
        trial.train(*alone, 1, first=step)
        for param, grad in zip(params, trial.gradients(params, step), strict=True):
            param.grad = grad * 64.0
        torch.manual_seed(step)
        wrapped.update_master_grads()
        wrapped.step()
        wrapped.zero_grad()
        if not same_bits([param.detach() for param in params], [param.detach() for param in alone[0]]):
            told = f"step {step + 1} in the wrapper, at a loss scale of 64, moves parameters otherwise: it holds "
            return Check(False, f"{told}parameters elsewhere than in param_groups, or works on the model's gradients")
    return Check(True, "steps to the same bits in the wrapper, at a loss scale of 64")


_CHECKS: dict[str, Callable[[Trial], Check]] = {
    "none_grad": _none_grad,
    "fp32_state": _fp32_state,
    "deterministic": _deterministic,
    "closure": _closure,
    "found_inf": _found_inf,
    "state_dict": _state_dict,
    "capturable": _capturable,
    "fused_step": fused_step,
    "wrapped": _wrapped,
}
