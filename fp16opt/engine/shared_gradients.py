"""Shared gradients: what a GradScaler was handed, and whether the model and the masters hold it still.

A parameter that is its own master is handed over as it is. A 16-bit one takes its master's FP32 gradient for its own
then, so that both hold one tensor, and clipping one of them is clipping the other.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor

from ..kernels import counters
from .dtensors import version
from .gradient_forms import as_master_grad
from .pairs import HALF_DTYPES, Pairs
from .sights import GRAD, Sight, store


class SharedGradients:
    """Which gradients a GradScaler was handed, and which of them 16-bit parameters share with their masters.

    Attributes:
        handed: the model's gradients as they were then, by pair; None where a step has used them, or there are none.
        shown: whether a GradScaler may have decided on them: ours has unscaled them, or ``param_groups``, where torch's
            finds them, were read since they came.
        positions: pairs whose model and master share one; None: the GradScaler was handed none in FP32. The engine
            writes both; where they differ, the user has given the model another.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.handed: Sight | None = None
        self.shown = False
        self.positions: set[int] | None = None

    def share(self) -> None:
        """The model's parameters take the gradients of their masters, where both have one."""
        models, self.positions = self.pairs.models, set[int]()
        held = zip(counters.gradients(models), counters.gradients(self.pairs.masters), self.pairs.are_own, strict=True)
        for position, (grad, made, is_own) in enumerate(held):
            if grad is not None and made is not None and not is_own:
                models[position].grad_dtype = None
                GRAD.__set__(models[position], made)
                self.positions.add(position)

    def assign(self, model: Tensor, grad: Tensor | None) -> None:
        """The gradient of a parameter's master was set: it is the model's too."""
        model.grad_dtype = None
        GRAD.__set__(model, grad)
        self.positions = set[int]() if self.positions is None else self.positions
        self.positions.add(self.pairs.places[id(model)])
        self.handed = Sight(*counters.see(self.pairs.models))

    def hold(self) -> bool:
        """Whether the masters' gradients are the model's, in whatever versions.

        Where they were shared, and the model was given others since, its masters take these.
        """
        pairs = self.pairs
        now, was = counters.gradients(pairs.models), counters.gradients(pairs.masters)
        if all(map(operator.is_, now, was)):
            return True
        given = [i for i, (a, b) in enumerate(zip(now, was, strict=True)) if a is not b]
        if self.positions is None or not all(i in self.positions or was[i] is None for i in given):
            return False
        for position in given:
            pair, grad = pairs.all[position], now[position]
            if grad is not None:
                grad = as_master_grad(grad, pair.master, pair.name)
                pair.model.grad_dtype = None
                self.positions.add(position)
            store(pair.model, grad)
            store(pair.master, grad)
        return True

    def part(self) -> None:
        """Gradients were made that nobody was handed: shared are those that model and masters hold in common still."""
        now, was = counters.gradients(self.pairs.models), counters.gradients(self.pairs.masters)
        self.positions = {i for i in self.positions or () if now[i] is was[i]} or None

    def drop_gone(self) -> None:
        """Where the model's parameter has dropped a shared gradient, its master drops it."""
        for position in self.positions or ():
            if GRAD.__get__(self.pairs.models[position]) is None:
                store(self.pairs.masters[position], None)

    def are_there(self) -> bool:
        """Whether the model holds the very gradients that were handed over."""
        if self.handed is None:
            return False
        now = counters.gradients(self.pairs.models)
        return all(itertools.starmap(operator.is_, itertools.zip_longest(self.handed.grads, now)))

    def are_edited(self) -> bool:
        """Whether the model's gradients are still those of that iteration, some dropped or replaced by the user.

        Some are left then, or others came in FP32 in place of shared ones. Where 16-bit ones came in their place,
        autograd made them, unless what is left was not added to.
        """
        if self.handed is None:
            return False
        now = counters.gradients(self.pairs.models)
        shared = [grad for position in self.positions or () if (grad := now[position]) is not None]
        then = zip(now, self.handed.grads, self.handed.versions, strict=False)
        left = [version(a) == v for a, b, v in then if a is b and a is not None]
        if any(grad.dtype in HALF_DTYPES for grad in shared):
            return any(left)
        return bool(shared or left)

    def as_read(self) -> tuple[list[Tensor | None], list[bool]]:
        """(what was handed over, by pair; whether it is what a GradScaler reads: the model's own, or shared).

        Parameters that came since have None.
        """
        grads = [] if self.handed is None else self.handed.grads
        grads = grads + [None] * (len(self.pairs) - len(grads))
        are_read = list(self.pairs.are_own)
        for position in self.positions or ():
            grad = grads[position]
            are_read[position] = grad is not None and grad.dtype not in HALF_DTYPES
        return grads, are_read

    def withdraw(self, set_to_none: bool) -> None:
        """Gradients were cleared. Those that stay, as zeros, get their parameter's dtype again."""
        for model in () if set_to_none else self.pairs.models:
            grad = GRAD.__get__(model)
            if grad is not None and grad.dtype != model.dtype:
                store(model, torch.zeros_like(grad if grad.is_sparse else model, dtype=model.dtype))
        self.positions = None
        self.forget()

    def forget(self) -> None:
        """What was handed over is used, or gone."""
        self.handed, self.shown = None, False
