"""diagnose: why a loss is nan, a loss scale falls for ever, or a model does not learn, in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...engine.diagnostics import describe
from ...engine.dtensors import local
from ...engine.parts import inside
from .probing import Broken, Probe, Reach, Run, agreed, range_of

UNDERFLOW = 0.05
"""The share of a parameter's gradients that must underflow for :func:`diagnose` to name it."""

CEILING = 2.0**24
"""The largest scale that :func:`diagnose` speaks of, and the largest that a ``DynamicLossScaler`` takes by default."""

_TRIES = 3  # backwards at lower scales, each 2**-12 times the one before
_STEP = 2.0**-12


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found. ``str`` gives it in words.

    Attributes:
        kind: "weights", "input", "forward" or "loss": there the first number that is not finite was made. "overflow":
            gradients are not finite at the present scale. "underflow": some are zero or subnormal. "elsewhere": another
            rank has one of these. "none": nothing is wrong.
        culprit: The first parameter, module or gradient to blame, by name; None where there is none.
        words: What it is, and what to do.
        scale: The present loss scale.
        largest_scale: The largest power of two, up to 2**24, at which no gradient overflows; None where the forward is
            not finite, or none was found.
        underflow: (name, share) of parameters that lose more than 5 % of their gradients' elements to zero or to the
            subnormal numbers, the worst first.
    """

    kind: str
    culprit: str | None
    words: str
    scale: float
    largest_scale: float | None = None
    underflow: list[tuple[str, float]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.words


def diagnose(model: nn.Module, loss_fn: Callable[[], Tensor], optimizer: object = None) -> Diagnosis:
    """Run forward and backward with hooks and say, in words, what is wrong with the numbers.

    The first of these that is so: a weight is not finite; the model's input is not; a module's output is not, with the
    range of its inputs and whether FP32 would hold it; the loss is not; a gradient overflows at the present loss scale,
    with the largest scale at which none does; parameters' gradients underflow at that scale.

    Weights, gradients, buffers and random number generators are left as they were, and the optimizer is not touched.
    Works under autocast, with ``fp16opt.amp``'s function casts, FSDP2 and DDP: there all ranks call it together.

    Args:
        model: Called by ``loss_fn``. Its modules are the ones that are named.
        loss_fn: Takes nothing and gives the loss, one floating element, of the batch that went wrong: the same in every
            call. It is called once to six times, mostly up to three.
        optimizer: Whose loss scale is the present one: a ``MixedPrecisionOptimizer``, one of its faces, a
            trainer's optimizer that holds one, or a ``GradScaler``. None: the scale is 1.

    Raises:
        TypeError, ValueError: An argument is of another kind, or ``loss_fn`` gives no loss that a backward can start
            from.

    Syncs: often.

    Example:
        >>> model = torch.nn.Linear(4, 4).half()
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(3e4)
        >>> found = diagnose(model, lambda: model(torch.ones(2, 4).half()).float().mean())
        >>> found.kind, found.culprit
        ('forward', 'the model')
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a callable that gives the loss, got {type(loss_fn).__name__}.")
    scale = _scale_of(optimizer)
    probe = Probe(model, loss_fn)
    device = next((local(param).device for param in probe.params.values()), torch.device("cpu"))
    bad = [n for n, p in model.named_parameters() if (found := range_of(p)) is not None and not found.is_finite]
    (anywhere,) = agreed([float(bool(bad))], device)
    if bad:
        words = (
            f"{describe(bad)}: the weight itself holds inf or nan, so that no forward is finite. An earlier step or a "
            "checkpoint brought it there: load one from before. If masters are finite and 16-bit weights are not, "
            "they are too large for FP16."
        )
        return Diagnosis("weights", bad[0], words, scale)
    if anywhere:
        return _elsewhere(scale)
    run = probe.run(scale)
    if not run.is_finite:
        return _forward(run, scale)
    if not run.reaches:  # the forward of another rank
        return _elsewhere(scale)
    first = next((reach for reach in run.reaches if not reach.is_finite), None)
    (overflows,) = agreed([float(first is not None)], device)
    if overflows:
        return _overflow(probe, run, first, scale, device)
    return _underflow(probe, run, scale, device)


def _scale_of(optimizer: object) -> float:
    if optimizer is None:
        return 1.0
    if isinstance(optimizer, torch.amp.GradScaler):
        return float(optimizer.get_scale())
    held = inside(optimizer)
    if isinstance(held, torch.optim.Optimizer) and hasattr(held, "loss_scale"):
        return float(held.loss_scale)
    raise TypeError(
        f"optimizer: expected a MixedPrecisionOptimizer or a GradScaler, for its loss scale, got "
        f"{type(optimizer).__name__}. Without loss scaling leave it out."
    )


def _elsewhere(scale: float) -> Diagnosis:
    words = "On this rank all is finite, on another one it is not: read what diagnose says there."
    return Diagnosis("elsewhere", None, words, scale)


# -- the forward is not finite -----------------------------------------------------------------------------------------


def _forward(run: Run, scale: float) -> Diagnosis:
    if not run.input_is_finite:
        words = "The model's input is not finite: inf or nan comes with the data, and neither scale nor dtype can help."
        return Diagnosis("input", "the model's input", words, scale)
    if run.broken is None:
        words = (
            f"The loss is {run.loss:g}, while the outputs of all modules are finite: it is made in the loss function, "
            "after the model (a logarithm or a division of zero, or a sum in FP16). Give it .float() outputs."
        )
        return Diagnosis("loss", "the loss function", words, scale)
    return Diagnosis("forward", run.broken.name, _of_module(run.broken), scale)


def _of_module(broken: Broken) -> str:
    words = f"{broken.name} ({broken.kind}) is the first module whose output is not finite. "
    if broken.inputs is None:
        words += "It has no floating inputs. "
    elif broken.inputs.is_finite:
        words += f"Its inputs are: {broken.inputs}. "
    else:
        return words + (
            "Its input is not finite already, and no module before it made that: look at the operations between "
            "modules, in the forward of the one around it (a residual sum, a softmax, a division)."
        )
    if broken.has_children:
        words += "Those inside of it are finite: it is made in the code of its own forward. "
    kind = str(broken.dtype).removeprefix("torch.")
    if broken.in_fp32 is None:
        return words + "Whether FP32 would hold it could not be tried."
    if not broken.in_fp32.is_finite:
        return words + "In FP32 it is not finite either: it is the operation, not the dtype."
    most = max(abs(broken.in_fp32.least), abs(broken.in_fp32.largest))
    held = f"FP32 would hold it: the output is {broken.in_fp32}"
    if broken.dtype == torch.float16 and most > torch.finfo(torch.float16).max:
        return words + f"{held}, and FP16 ends at 65504. Run this module in FP32 or BF16, or make its inputs smaller."
    return words + f"{held}. Something inside of it is too large for {kind}: run this module in FP32."


# -- gradients overflow ------------------------------------------------------------------------------------------------


def _overflow(probe: Probe, run: Run, first: Reach | None, scale: float, device: torch.device) -> Diagnosis:
    largest = _largest_scale(probe, scale, device)
    seed = run.loss_dtype == torch.float16 and scale * 1.0 >= 65520.0
    name = "the loss" if seed else "a gradient of another rank" if first is None else first.name
    if seed:
        words = (
            f"The loss is FP16, and its own gradient is the loss scale: {scale:g} is infinite there. End the model "
            "with .float(), or keep the scale at 2**15 or less. "
        )
    else:
        words = f"The first gradient that overflows at the loss scale of {scale:g} is that of {name}. "
    if largest is None:
        words += (
            f"At {scale * _STEP**_TRIES:g} some are not finite either: it is the operation's own backward (a square "
            "root or a division at zero, a logarithm), not the scale."
        )
    else:
        words += f"The largest scale at which none does is {largest:g}."
        if largest < 1.0:
            words += " Below 1 gradients are too large as they are: use a smaller loss (a mean in place of a sum)."
    return Diagnosis("overflow", name, words, scale, largest)


def _largest_scale(probe: Probe, scale: float, device: torch.device) -> float | None:
    """The largest power of two at which no gradient overflows, tried; None where none was found."""
    tried = scale
    for _ in range(_TRIES):
        tried *= _STEP
        candidate = room(probe.run(tried).reaches, tried, device)
        if candidate is None:
            continue
        for lower in (1.0, 0.5, 0.25):  # gradients inside of modules are not seen, and may be larger
            run = probe.run(candidate * lower)
            if not any(agreed([float(not all(reach.is_finite for reach in run.reaches))], device)):
                return candidate * lower
        return None
    return None


def room(reaches: list[Reach], scale: float, device: torch.device) -> float | None:
    """The largest power of two up to ``CEILING`` at which these gradients of ``scale`` are finite; None: none is."""
    share = max((reach.largest / torch.finfo(reach.dtype).max for reach in reaches if reach.is_finite), default=0.0)
    worst, share = agreed([float(not all(reach.is_finite for reach in reaches)), share], device)
    if worst:
        return None
    return CEILING if share <= scale / CEILING else 2.0 ** math.floor(math.log2(scale / share))


# -- gradients underflow -----------------------------------------------------------------------------------------------


def _underflow(probe: Probe, run: Run, scale: float, device: torch.device) -> Diagnosis:
    most = room(run.reaches, scale, device) or scale
    zeros = {name: grad == 0 for name, grad in run.gradients.items()}
    subnormal = {name: _subnormal(grad) for name, grad in run.gradients.items()}
    run.gradients = {}
    if most > scale:  # zeros that are none there had a value, and the loss depends on it
        above = probe.run(most).gradients
        zeros = {name: zero & (above[name] != 0) if name in above else zero for name, zero in zeros.items()}
    else:
        zeros = {name: torch.zeros_like(zero) for name, zero in zeros.items()}
    shares = {n: (zeros[n] | subnormal[n]).double().mean().item() for n in zeros if zeros[n].numel()}
    lost = sorted(((n, share) for n, share in shares.items() if share > UNDERFLOW), key=lambda one: -one[1])
    words = f"All is finite. The largest loss scale at which no gradient overflows is {most:g}. "
    if not lost:
        return Diagnosis("none", None, words + f"At {scale:g} gradients do not underflow.", scale, most)
    listed = describe([f"{name} ({share:.0%})" for name, share in lost])
    words += f"At {scale:g} gradients underflow, to zero or to subnormal numbers, in {listed}. "
    words += (
        "A larger scale, or dynamic=True, would keep them."
        if most > scale
        else "No larger scale is possible: use BF16."
    )
    return Diagnosis("underflow", lost[0][0], words, scale, most, lost)


def _subnormal(grad: Tensor) -> Tensor:
    if grad.dtype not in (torch.float16, torch.bfloat16):
        return torch.zeros_like(grad, dtype=torch.bool)
    return (grad != 0) & (grad.abs() < torch.finfo(grad.dtype).tiny)
