"""FusedStep: steps the wrapped SGD, Adam or AdamW in one pass, in place of its own step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..kernels import steps
from .deferred import stored_grad
from .eligibility import obstacle, of_groups
from .lists import CannotServe, Lists, options_of, state_of

if TYPE_CHECKING:
    from ..masters import MasterParams, Shard
    from .deferred import DeferredGrads

CHOICES = (False, True, "auto")
logger = logging.getLogger("fp16opt")


class FusedStep:
    """Decides at every step whether a kernel takes it, and takes it.

    Args:
        wanted: ``fused_step`` of the wrapper.
        optimizer: the wrapped optimizer. Its state is used and filled under torch's names.
        params: the engine's parameters.

    Raises:
        ValueError: ``wanted`` is True and the optimizer can't be served; says why.
    """

    def __init__(self, wanted: bool | str, optimizer: Optimizer, params: MasterParams) -> None:
        if not any(wanted is choice or wanted == choice and choice == "auto" for choice in CHOICES):
            raise ValueError(f"fused_step: expected one of {', '.join(map(repr, CHOICES))}, got {wanted!r}.")
        self.wanted = wanted
        self.optimizer = optimizer
        self.params = params
        self.rebuild()
        if wanted is True and self._fixed:
            raise ValueError(
                f"fused_step=True can't be served: {self._fixed}. Use fused_step='auto' or False, which step this "
                "optimizer itself."
            )

    def rebuild(self) -> None:
        """Look at the parameters again; to be called when some came."""
        self._fixed = "fused_step=False"
        if self.wanted:
            self._fixed = obstacle(self.optimizer, self.params.master, self.params.names)
        self._warned = False
        self._tables: dict[Any, steps.StepTables] = {}
        self._written: list[int] | None = None

    def reason(self) -> str:
        """Why the wrapped optimizer steps itself; "" where the kernel serves. No sync."""
        if self._fixed and self.wanted:  # what stood in the way may be gone: an option, a replaced step
            self._fixed = obstacle(self.optimizer, self.params.master, self.params.names)
        return self._fixed or of_groups(self.optimizer)

    def describe(self) -> str:
        """For the wrapper's repr."""
        reason = self.reason()
        return f"general ({reason})" if reason else "fused"

    def serves(self) -> bool:
        """Whether the next step is fused. Where True was asked for, one warning says why it is not."""
        reason = self.reason()
        if reason:
            self._warn(reason)
        return not reason

    def _warn(self, reason: str) -> None:
        if self.wanted and not self._warned and not (self.wanted == "auto" and self._fixed):
            self._warned = True
            logger.warning("the optimizer steps itself from here on, not in the fused kernel: %s.", reason)

    # -- the step ----------------------------------------------------------------------------------------------------

    def hooked(self, grads: DeferredGrads, found_inf: Tensor | None) -> Callable[..., Any]:
        """A stand-in for ``optimizer.step`` that fires the optimizer's hooks and takes a closure like it."""

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            try:
                with torch.no_grad():
                    self._run(grads, found_inf)
            except CannotServe as reason:
                self._warn(str(reason))
                grads.make()
                unhooked = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
                unhooked(optimizer)
            return loss

        self._written = None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler's patch of step would set
        run = Optimizer.profile_hook_step(step)
        return lambda *closure: run(self.optimizer, *closure)

    def wrote_models(self) -> bool:
        """Whether every 16-bit parameter holds its rounded master since the last step, so that no copy is needed."""
        return self._written is not None and self._written == self.params.versions()

    def _run(self, grads: DeferredGrads, found_inf: Tensor | None) -> None:
        """All lists are made, and with them all that can't be served is found, before the first is stepped."""
        reason = of_groups(self.optimizer)
        if reason:
            raise CannotServe(reason)
        options = options_of(self.optimizer)
        calls = [(shard, key, lists) for shard in self.params.shards for key, lists in self._collect(shard, grads).items()]
        before = self.params.versions()
        for shard, key, lists in calls:
            factors = grads.factors(shard.device)
            if not key[0]:
                one = torch.ones_like(factors.inv_scale)
                factors = steps.Factors(one, one)
            self._call(shard, lists, options, factors, found_inf, self._tables.setdefault((shard.device, key), steps.StepTables()))
        self._written = self._versions_if_clean(before, calls)

    def _versions_if_clean(self, before: list[int], calls: list[Any]) -> list[int] | None:
        """The masters' versions after the step, or None where one that was not stepped had been written by the user."""
        stepped = {id(t) for _, _, lists in calls for t in lists.columns["masters"]}
        recorded = self.params._master_versions
        for i in self.params.copied:
            if before[i] != recorded[i] and id(self.params.master[i]) not in stepped:
                return None
        return self.params.versions()

    def _collect(self, shard: Shard, grads: DeferredGrads) -> dict[tuple[bool, bool, tuple[str, ...]], Lists]:
        """By (gradient waits, is its own master, names of the state): the entries of one call."""
        found: dict[tuple[bool, bool, tuple[str, ...]], Lists] = {}
        params, groups = self.params, self.optimizer.param_groups
        own = {i: k for k, i in enumerate(i for i in shard.index if params.master[i] is params.model[i])}
        places = {**own, **{i: k for k, i in enumerate(shard.copied)}}
        for i in shard.index:
            waits = i in grads.waiting
            grad = params.model[i].grad if waits else stored_grad(params.master[i])
            if grad is None or (i in own and params.model[i].dtype != torch.float32):
                continue
            if grad.layout is not torch.strided:
                raise CannotServe(f"the gradient of {params.names[i]!r} is sparse")
            group = params.places[i][0]
            state, new = state_of(self.optimizer, groups[group], params.master[i])
            key = (waits, i in own, tuple(state))
            lists = found.setdefault(key, Lists(len(own) if i in own else len(shard.copied)))
            entries = {"grads": grad.detach(), "masters": params.master[i], **state}
            if i not in own:
                entries["models"] = params.model[i]
            lists.put(places[i], group, entries)
            lists.first[places[i]] = new and type(self.optimizer) is SGD
        return found

    def _call(
        self,
        shard: Shard,
        lists: Lists,
        options: list[Any],
        factors: steps.Factors,
        found_inf: Tensor | None,
        tables: steps.StepTables,
    ) -> None:
        """One kernel call."""
        c = lists.columns
        models = c.get("models")
        common: dict[str, Any] = {
            "models": models,
            "stats": None if models is None else shard.cast,
            "found_inf": None if found_inf is None else found_inf.to(shard.device),
            "tables": tables,
        }
        if type(self.optimizer) is not SGD:
            lead = (c["grads"], c["masters"], c["exp_avg"], c["exp_avg_sq"], c["step"])
            largest = c.get("max_exp_avg_sq")
            steps.multi_tensor_adam(*lead, options, lists.group_of, factors, max_exp_avg_sqs=largest, **common)
            return
        buffers = c.get("momentum_buffer")
        lead = (c["grads"], c["masters"])
        first = lists.first if buffers is not None else None
        steps.multi_tensor_sgd(*lead, options, lists.group_of, factors, momentum_buffers=buffers, first=first, **common)
        for master, buffer, new in zip(c["masters"], buffers or [], lists.first, strict=False):
            if new:
                self.optimizer.state[master]["momentum_buffer"] = buffer
