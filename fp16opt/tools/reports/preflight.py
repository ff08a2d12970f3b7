"""check: some steps on the user's own batch before a training begins, and what is wrong with them, in words."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.arguments import check_number
from .checking import Checking
from .findings import PreflightFinding, worst_first
from .restoring import Others, model_as_it_was, optimizer_as_it_was, quiet
from .rounds import Rounds
from .twins import held_by, params_of


@dataclass(frozen=True)
class Preflight:
    """What :func:`check` found. ``str`` gives a page of plain sentences.

    Attributes:
        findings: The worst first; empty where nothing is to be changed.
        facts: What was measured besides, in sentences.
        steps: How many steps were run.
    """

    findings: list[PreflightFinding]
    facts: list[str] = field(default_factory=list)
    steps: int = 0

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def __str__(self) -> str:
        wrong = sum(finding.level == "error" for finding in self.findings)
        warnings = len(self.findings) - wrong
        counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((wrong, "error"), (warnings, "warning")) if n]
        lines = [f"fp16opt.check: {' and '.join(counts) or 'nothing to change'}."]
        for number, finding in enumerate(self.findings, 1):
            head = f"{number}. {finding.level}: "
            lines += ["", *textwrap.wrap(head + finding.sentence, 110, subsequent_indent="   ", **_UNBROKEN)]
            lines += [f"   -> {line}" for line in finding.line.split("\n")]
        if self.facts:
            lines += [""]
            for fact in self.facts:
                lines += textwrap.wrap(fact, 110, **_UNBROKEN)
        return "\n".join(lines)


_UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def check(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    optimizer: object = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    train_step: Callable[[], Any] | None = None,
    steps: int = 8,
    lr: float = 1e-3,
) -> Preflight:
    """Train for some steps, on your own batch, and say what 16 bits do to the training and what the loop does wrong.

    It looks at gradients that underflow or overflow and at the loss scale, at updates that 16-bit weights lose, at
    activations near the end of FP16, at operations inside of modules and buffers that overflow, at an ``eps`` that is 0
    in FP16, at the dtype of autocast, at parameters that no optimizer holds or that get no gradient, and at weights
    that the forward writes. With ``train_step`` it runs three rounds of your own loop too, one of them with a gradient
    that overflows, and sees a clip that doesn't count, a scheduler that moves although the step was skipped, gradients
    and weights that other lines write, gradients left over from the step before, micro-batches and averages that 16
    bits don't hold, and that there is no step.

    The steps are those of a copy of the optimizer, which has FP32 masters where the optimizer has none: what is lost
    without them shows in it. Afterwards weights, buffers, gradients, modes and random number generators are as they
    were, and so are, after ``train_step``, the optimizers, the scalers and the schedulers that it steps, and other
    modules' buffers. What else ``train_step`` or ``loss_fn`` moves, such as an iterator over data or an average of
    weights, stays moved.

    Args:
        model: In the mode in which it is trained.
        loss_fn: Takes nothing and gives the loss of a batch, one floating element, as for :func:`fp16opt.diagnose`. The
            same batch each time is fine.
        optimizer: A torch optimizer, a ``MixedPrecisionOptimizer`` or one of its faces, or a trainer's that holds one.
            None: AdamW, without masters.
        scaler: The GradScaler of the loop, of torch or of fp16opt.
        train_step: One round of the loop: takes nothing, runs forward, backward, clip, ``optimizer.step()``,
            ``scheduler.step()``.
        steps: How many to run, 4 or more. Steps that a dynamic scale skips while it is found come on top.
        lr: Of the AdamW that is taken where there is no optimizer.

    Returns:
        A :class:`Preflight`.

    Raises:
        TypeError, ValueError: An argument is of another kind; ``loss_fn`` gives no loss that a backward can start from;
            or the optimizer has ``gradient_release``, or was made by ``amp.initialize`` without master weights.
        RuntimeError: Several processes train together.
        Exception: What ``loss_fn`` or ``train_step`` raises.

    Memory: a copy of the weights, of the optimizer's state and of masters. Syncs: often.

    Example:
        >>> model = torch.nn.Linear(4, 4).bfloat16()
        >>> batch = torch.ones(2, 4, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        >>> found = check(model, lambda: model(batch).float().square().mean(), optimizer)
        >>> [finding.key for finding in found.findings], found.ok
        (['lost_updates'], False)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    for name, given in (("loss_fn", loss_fn), ("train_step", train_step)):
        if not (callable(given) or (given is None and name == "train_step")):
            raise TypeError(f"{name}: expected a callable that takes nothing, got {type(given).__name__}.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler: expected a GradScaler, got {type(scaler).__name__}.")
    check_number("lr", lr)
    if not (isinstance(steps, int) and steps >= 4):
        raise ValueError(f"steps: expected an integer of 4 or more, got {steps!r}.")
    held = held_by(optimizer)
    if train_step is not None and held is None:
        raise TypeError("train_step: expected the optimizer that it steps, too, got none. Give it as optimizer=.")
    if held is None and not any(param.requires_grad for param in model.parameters()):
        raise ValueError("model: expected parameters that require grad, got none. Unfreeze those that are to train.")
    _refuse_many_ranks()
    checked = Checking(model, loss_fn, held, scaler)
    outside = [param for param in params_of(held, model) if id(param) not in checked.names]
    with quiet(), Others([*model.modules(), held, optimizer]) as others:
        with model_as_it_was(model, outside):
            checked.train(steps, float(lr))
        if train_step is not None and held is not None:
            with model_as_it_was(model, outside), optimizer_as_it_was(held):
                checked.loop(Rounds(model, train_step, held, scaler, others).run())
    return Preflight(worst_first(checked.findings), checked.facts, checked.steps)


def _refuse_many_ranks() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            "fp16opt.check was called in a training of several processes, whose steps it can't take alone. Check the "
            "model in one process, before it is given to DistributedDataParallel or fully_shard; fp16opt.diagnose "
            "works on several."
        )
