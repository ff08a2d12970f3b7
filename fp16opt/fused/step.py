"""FusedStep: steps the wrapped SGD, Adam or AdamW in one pass, in place of its own step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..kernels import steps
from . import counters
from .deferred import has_grad, stored_grad
from .eligibility import SERVED, changing_obstacle, obstacle
from .lists import CannotServe, Lists, options_of, state_of
from .remembered import Key, Remembered

if TYPE_CHECKING:
    from ..masters import MasterParams
    from ..shard import Shard
    from .deferred import DeferredGrads

CHOICES = (False, True, "auto")
logger = logging.getLogger("fp16opt")

_NO_MASTERS = "there are no FP32 masters (master_weights='none')"


def check_fused_step(wanted: object, optimizer: Optimizer, master_weights: str = "full") -> None:
    """Raise unless ``fused_step=wanted`` can be had for an optimizer that is about to be wrapped.

    Args:
        wanted: False, True or "auto".
        optimizer: it still holds the model's parameters.
        master_weights: of the wrapper.

    Raises:
        ValueError: it is none of the three, or True and the optimizer can't be served; says why.
    """
    if not isinstance(wanted, (bool, str)) or wanted not in CHOICES:
        raise ValueError(f"fused_step: expected one of {', '.join(map(repr, CHOICES))}, got {wanted!r}.")
    if wanted is not True:
        return
    places = [(g, k, p) for g, group in enumerate(optimizer.param_groups) for k, p in enumerate(group["params"])]
    names = [f"group {g}, param {k}" for g, k, _ in places]
    reason = obstacle(optimizer, [param for _, _, param in places], names)
    if master_weights == "none":
        reason = reason or _NO_MASTERS
    if reason:
        raise ValueError(
            f"fused_step=True can't be served: {reason}. Use fused_step=False, which steps the wrapped optimizer "
            'itself, or "auto", which does so where a fused step does not apply.'
        )


class FusedStep:
    """Decides at every step whether a kernel takes it, and takes it.

    Args:
        wanted: ``fused_step`` of the wrapper, checked.
        optimizer: the wrapped optimizer. Its state is used and filled under torch's names.
        params: the engine's parameters.
    """

    def __init__(self, wanted: bool | str, optimizer: Optimizer, params: MasterParams) -> None:
        self.wanted = wanted
        self.optimizer = optimizer
        self.params = params
        self._fixed = ""
        self._known: object = None
        self._warned = False
        self._served = False
        self.fallback: Callable[..., None] | None = None  # what steps masters that the optimizer can't step by itself
        self._tables: dict[tuple[torch.device, Key], steps.StepTables] = {}
        self._written: list[int] | None = None
        self._remembered: dict[torch.device, Remembered] = {}

    def reason(self) -> str:
        """Why the wrapped optimizer steps itself; "" where the kernel serves. No sync."""
        if not self.wanted:
            return "fused_step=False"
        if self._fixed or self._known is not self.params.shards:  # parameters came, or what was in the way may be gone
            self._fixed = obstacle(self.optimizer, self.params.model, self.params.names)
            self._known = self.params.shards
            if not self.params.makes_masters and self.params.own_halves:
                self._fixed = _NO_MASTERS
        return self._fixed or changing_obstacle(self.optimizer)

    def may_serve(self) -> bool:
        """Whether any step can be fused, whatever becomes of groups and parameters."""
        return bool(self.wanted) and type(self.optimizer) in SERVED

    def describe(self) -> str:
        """For the wrapper's repr."""
        reason = self.reason()
        return f"general ({reason})" if reason else "fused"

    def serves(self) -> bool:
        """Whether the next step is fused. Where one was, a warning says once why it is not any more."""
        reason = self.reason()
        if reason:
            self._warn(reason)
        else:
            self._served = True
        return not reason

    def _warn(self, reason: str) -> None:
        if not self._warned and (self.wanted is True or (self.wanted and self._served)):
            self._warned = True
            logger.warning("the wrapped optimizer steps itself from here on, and not in one pass: %s.", reason)

    def skips_on_device(self) -> bool:
        """Whether the kernel itself can leave the next step out. No sync.

        A momentum buffer that is new is none where the step was left out, which only the host can remember.
        """
        if self.reason() or not all(counters.serves(shard.device) for shard in self.params.shards):
            return False
        state = self.optimizer.state
        groups = self.optimizer.param_groups if type(self.optimizer) is SGD else []
        members = [param for group in groups if group["momentum"] for param in group["params"] if has_grad(param)]
        return all(state.get(param, {}).get("momentum_buffer") is not None for param in members)

    # -- the step ----------------------------------------------------------------------------------------------------

    def stand_in(self, grads: DeferredGrads, found_inf: Tensor | None) -> Callable[..., Any]:
        """What to call in place of ``optimizer.step``, with a closure or without.

        It fires the optimizer's step hooks. Gradients that wait are made where the optimizer steps itself.

        Args:
            grads: the engine's.
            found_inf: float32, 0-dim: where it is not 0 the kernel writes nothing. None: decided already.
        """
        self._written = None
        if not self.serves():
            grads.make()
            if self._served:
                counters.to_host(self.optimizer)
            return lambda *closure: self._by_itself(grads, self.optimizer.step, *closure)

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            try:
                self._run(grads, found_inf)
            except CannotServe as reason:
                self._warn(str(reason))
                if found_inf is not None:
                    if bool(found_inf):
                        return loss
                    optimizer.found_inf = None  # type: ignore[attr-defined]  # decided; most steps want no flag at all
                counters.to_host(optimizer)
                if self.fallback is not None:
                    self.fallback(optimizer, self.params, grads)
                    return loss
                grads.make()
                unhooked = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
                self._by_itself(grads, unhooked, optimizer)
            return loss

        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's patch of step would set it
        hooked = Optimizer.profile_hook_step(step)
        return lambda *closure: hooked(self.optimizer, *closure)

    @staticmethod
    def _by_itself(grads: DeferredGrads, step: Callable[..., Any], *args: Any) -> Any:
        """The wrapped optimizer's own step, of ordinary parameters."""
        with grads.plain():
            return step(*args)

    def copy_down(self) -> None:
        """After a step: bring masters to the model, unless the kernel did and nobody wrote a master since."""
        written, self._written = self._written, None
        if written is not None and written == self.params.versions():
            self.params.record_versions()
        else:
            self.params.copy_down()

    def _run(self, grads: DeferredGrads, found_inf: Tensor | None) -> None:
        """All lists are made, and with them all that can't be served is found, before the first is stepped."""
        reason = changing_obstacle(self.optimizer)
        if reason:
            raise CannotServe(reason)
        options = options_of(self.optimizer)
        calls = [
            (shard, key, lists) for shard in self.params.shards for key, lists in self._lists(shard, grads).items()
        ]
        before = self.params.versions()
        with torch.no_grad():
            for shard, key, lists in calls:
                factors = grads.factors(shard.device, waiting=key[0])
                self._call(shard, key, lists, options, factors, found_inf)
        self._written = self._versions_if_clean(before, [lists for _, _, lists in calls])
        for remembered in self._remembered.values():
            remembered.rest()
        self.params.stepped()

    def _versions_if_clean(self, before: list[int], stepped: list[Lists]) -> list[int] | None:
        """The masters' versions after the step, or None where one that was not stepped had been written by the user."""
        done = {id(master) for lists in stepped for master in lists.columns["masters"]}
        written = self.params.written_masters(before)
        if any(id(self.params.master[i]) not in done for i in written):
            return None
        return self.params.versions()

    def _lists(self, shard: Shard, grads: DeferredGrads) -> dict[Key, Lists]:
        """What :meth:`_collect` gives, as the last step had it where that is proved to hold."""
        known = self._remembered.get(shard.device)
        calls = None if known is None else known.again(shard, grads.waiting)
        if calls is None:
            calls = self._collect(shard, grads)
            self._remembered.pop(shard.device, None)
            if not any(any(lists.first) for lists in calls.values()):
                self._remembered[shard.device] = Remembered(shard, self.optimizer, self.params, grads.waiting, calls)
        return calls

    def _collect(self, shard: Shard, grads: DeferredGrads) -> dict[Key, Lists]:
        """By (gradient waits, is its own master, names of the state): the entries of one call."""
        found: dict[Key, Lists] = {}
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
            state, new = state_of(self.optimizer, groups[group], params.master[i], params.model[i])
            key = (waits, i in own, tuple(state))
            lists = found.setdefault(key, Lists(list(own) if i in own else shard.copied))
            entries = {"grads": grad.detach(), "masters": params.operand(i), **state}
            if i not in own:
                entries["models"] = params.model[i]
            lists.put(places[i], group, entries)
            lists.first[places[i]] = new and type(self.optimizer) is SGD
        return found

    def _call(
        self,
        shard: Shard,
        key: Key,
        lists: Lists,
        options: list[Any],
        factors: steps.Factors,
        found_inf: Tensor | None,
    ) -> None:
        """One kernel call."""
        c = lists.columns
        models = c.get("models")
        common: dict[str, Any] = {
            "models": models,
            "stats": None if models is None else shard.cast,
            "found_inf": None if found_inf is None else found_inf.to(shard.device),
            "tables": self._tables.setdefault((shard.device, key), steps.StepTables()),
        }
        if type(self.optimizer) is not SGD:
            state = (c["exp_avg"], c["exp_avg_sq"], c["step"])
            common["max_exp_avg_sqs"] = c.get("max_exp_avg_sq")
            steps.multi_tensor_adam(c["grads"], c["masters"], *state, options, lists.group_of, factors, **common)
            return
        buffers = c.get("momentum_buffer")
        if buffers is not None:
            common.update(momentum_buffers=buffers, first=lists.first)
        steps.multi_tensor_sgd(c["grads"], c["masters"], options, lists.group_of, factors, **common)
        if any(lists.first) and (found_inf is None or not bool(found_inf)):  # a step that skips leaves nothing in them
            self._keep_buffers(lists)

    def _keep_buffers(self, lists: Lists) -> None:
        """Put momentum buffers that were filled for the first time into the state."""
        for i, buffer, new in zip(lists.positions, lists.columns["momentum_buffer"], lists.first, strict=True):
            if new and buffer is not None:
                self.optimizer.state[self.params.master[i]]["momentum_buffer"] = buffer
