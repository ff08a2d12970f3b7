"""OptimizerGroup: the optimizers that one trainer's backward serves, on one loss scale that follows all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..engine.arguments import make_scaler
from ..engine.missing_scale import WayToScale
from ..engine.outcome import EmptySteps, update_scale
from ..engine.params import HALF_DTYPES
from ..engine.stage import Ready
from ..optimizer import MixedPrecisionOptimizer
from ..scaling import LossScaler


class _Round:
    """One scaler, told once of the steps of several optimizers: when all have stepped, or one steps again."""

    def __init__(self, scaler: LossScaler, members: int) -> None:
        self.scaler = scaler
        self.members = members
        self.found: dict[int, Tensor] = {}

    def note(self, member: int, found_inf: Tensor) -> None:
        """A member has stepped, or skipped. No sync."""
        if member in self.found:
            self.close()
        self.found[member] = found_inf.clone()  # it may be a buffer of the kernels
        if len(self.found) == self.members:
            self.close()

    def close(self) -> None:
        """Everything that was found counts as one step."""
        first, *others = self.found.values()
        found = first if not others else torch.stack([first, *(one.to(first.device) for one in others)]).amax()
        self.found = {}
        update_scale(self.scaler, found)


class SharedLossScaler(LossScaler):
    """One optimizer's view of a scaler that it shares with others.

    The scale follows once for all of them, as ``GradScaler.update()`` does at the end of an iteration: when each has
    stepped or skipped once, or when one comes a second time before the others did. Each skips by its own gradients.
    """

    def __init__(self, of: _Round, member: int) -> None:
        self._round = of
        self._member = member

    @property
    def rule(self) -> LossScaler:
        """The scaler that is shared."""
        return self._round.scaler

    @property
    def dynamic(self) -> bool:  # type: ignore[override]
        """Whether the scale follows the overflows."""
        return self.rule.dynamic

    @property
    def max_consecutive_skips(self) -> int | None:  # type: ignore[override]
        """The limit of the scaler that is shared."""
        return self.rule.max_consecutive_skips

    @property
    def follows_norms(self) -> bool:  # type: ignore[override]
        """Whether the shared scaler looks at the norms of gradients."""
        return self.rule.follows_norms

    def see(self, norm: Tensor) -> None:
        """Tell the shared scaler of this optimizer's gradients. No sync."""
        self.rule.see(norm)

    @property
    def is_default(self) -> bool:  # type: ignore[override]
        """Whether no scale was asked for."""
        return self.rule.is_default

    @property
    def generation(self) -> int:  # type: ignore[override]
        """Grows by one when the scale changed or may have."""
        return self.rule.generation

    @property
    def scale(self) -> Tensor:
        """The loss scale: float32, shape []. Reading it does not sync."""
        return self.rule.scale

    @property
    def consecutive_skips(self) -> Tensor:
        """Rounds in a row with a skip in them: int32, shape []. Reading it does not sync."""
        return self.rule.consecutive_skips

    def to(self, device: torch.device | str) -> SharedLossScaler:
        """Move the shared scaler's tensors to ``device``; returns this view."""
        self.rule.to(device)
        return self

    def set_scale(self, value: float) -> None:
        """Set the scale of all, and count finite rounds from zero again."""
        self.rule.set_scale(value)

    def update(self, found_inf: Tensor) -> None:
        """This optimizer has stepped, or skipped. No sync."""
        self._round.note(self._member, found_inf)

    def back_off(self) -> bool:
        """Lower the scale of all now. Syncs."""
        return self.rule.back_off()

    def at_floor(self) -> bool:
        """Whether the scale can go no lower. Syncs."""
        return self.rule.at_floor()

    def state_dict(self) -> dict[str, Any]:
        """The shared scaler's own, and what this optimizer has found in a round that is open (``round_found``)."""
        found = self._round.found.get(self._member)
        return {**self.rule.state_dict(), "round_found": None if found is None else found.clone()}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the error that `load_state_dict` would raise. Syncs."""
        self.rule.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the state of a scaler that was not shared. Syncs."""
        self.rule.load_state_dict(state_dict)
        found = state_dict.get("round_found")
        self._round.found.pop(self._member, None)
        if found is not None:
            self._round.found[self._member] = found.detach().clone()

    def __repr__(self) -> str:
        return f"SharedLossScaler({self.rule!r}, of {self._round.members} optimizers)"


class OptimizerGroup:
    """Wraps a trainer's optimizers, and does for all of them what its backward and its clipping do.

    Args:
        optimizers: Those that are wrapped already stay. The others are wrapped; several share one scaler.
        names: ``(name, parameter)`` of the models, for messages.
        options: Of ``MixedPrecisionOptimizer``, for those that are wrapped here.
        way_to_scale: The trainer's words for the line that gives those a loss scale.

    Attributes:
        optimizers: All of them, wrapped, in the order given.

    Raises:
        ValueError: Wrapped ones have scales that differ, so that one backward can't serve them; or one has none of
            the parameters in ``names``.
        TypeError, ValueError: As ``MixedPrecisionOptimizer`` raises them.

    Example:
        >>> weights = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2)]
        >>> both = OptimizerGroup([torch.optim.SGD([w], lr=0.5) for w in weights], options={"loss_scale": 64.0})
        >>> with both.backward((weights[0] * weights[1]).sum()) as scaled:
        ...     scaled.backward()
        >>> for opt in both.optimizers:
        ...     opt.step()
        >>> weights[0].tolist(), weights[1].tolist()
        ([0.5, 0.5], [0.5, 0.5])
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Iterable[tuple[str, Tensor]] = (),
        options: Mapping[str, Any] | None = None,
        way_to_scale: WayToScale | None = None,
    ) -> None:
        known = list(names)
        settings = {"named_parameters": known, **(options or {})}
        bare = [one for one in optimizers if not isinstance(one, MixedPrecisionOptimizer)]
        wrapped = [one for one in optimizers if isinstance(one, MixedPrecisionOptimizer)]
        check_alike(wrapped)
        if known:
            check_trains(optimizers, {id(param) for _, param in known})
        if bare and (len(bare) > 1 or wrapped):
            settings = self._sharing(settings, len(bare), wrapped)
        made = [MixedPrecisionOptimizer(one, **mine) for one, mine in zip(bare, _each(settings), strict=False)]
        for one in made:
            if way_to_scale is not None and not one.gradient_release:  # which takes no dynamic scale
                one.way_to_scale = way_to_scale
        others = iter(made)
        self.optimizers = [one if isinstance(one, MixedPrecisionOptimizer) else next(others) for one in optimizers]
        together = EmptySteps(len(self.optimizers))
        for one in self.optimizers:
            one.outcome.empty = together
        self._used: list[MixedPrecisionOptimizer] = []  # whose gradients the present backward must not add to

    def _sharing(
        self, settings: dict[str, Any], count: int, wrapped: Sequence[MixedPrecisionOptimizer]
    ) -> dict[str, Any]:
        """The settings with one scaler for all, instead of one each."""
        given = {name: settings.pop(name) for name in ("dynamic", "loss_scale", "scaler") if name in settings}
        if wrapped:
            return {**settings, "scaler": wrapped[0].scaler}
        scaler = make_scaler(given.get("dynamic", False), given.get("loss_scale"), given.get("scaler"))
        of = _Round(scaler, count)
        return {**settings, "scaler": [SharedLossScaler(of, member) for member in range(count)]}

    def attach(self, model: nn.Module) -> None:
        """Tell all of them that ``model`` reduces their gradients, where it is under DDP.

        Raises:
            ValueError: One has parameters that the model lacks; or ranks differ.
        """
        if isinstance(model, DistributedDataParallel):
            from ..distributed import attach

            for one in self.optimizers:
                attach(one, model)

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[Tensor]:
        """Yields the scaled loss, float32. Run autograd on it inside; on the way out gradients are up to date.

        Raises:
            TypeError: The loss is not a floating tensor.
            RuntimeError: As ``MixedPrecisionOptimizer.backward`` raises it; a backward inside that raises is taken note
                of, and nothing is stepped before gradients were cleared.
        """
        scaled = self.scale(loss)
        try:
            yield scaled
        except BaseException:
            self.interrupt()
            raise
        self.arrived()

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss, float32; every optimizer knows that gradients made with it are coming. No host sync.

        Optimizers whose gradients a step has used and nothing has cleared are passed by: the loss may be another
        network's.
        """
        self._used = [one for one in self.optimizers if _has_used_gradients(one)]
        first, *others = [one for one in self.optimizers if one not in self._used] or self.optimizers
        scaled = first.scale_loss(loss)
        for one in others:
            one.scale_loss(loss.detach())
        return scaled

    def arrived(self) -> None:
        """The backward is over. No host sync.

        Raises:
            RuntimeError: It has added to gradients that a step had used.
        """
        for one in self._used:
            if one.step_state.has_new():
                raise RuntimeError(
                    f"a backward has added to gradients that the last step of optimizer {self.optimizers.index(one)} "
                    f"({type(one.optimizer).__name__}) has used. Call its zero_grad() after each step, also after a "
                    "skipped one."
                )
        for one in self.optimizers:
            if one not in self._used:
                one.step_state.end_backward(stamp=True)

    def interrupt(self) -> None:
        """The backward has raised, so gradients are incomplete."""
        for one in self.optimizers:
            one.step_state.interrupt()

    def clip_grad_norm(self, params: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the master gradients of the model's parameters ``params`` to one norm over all of them.

        One optimizer's by its ``clip_master_grads``, those of several by torch's ``clip_grad_norm_`` on masters.

        Returns:
            The norm before: float32, 0-dim.

        Raises:
            ValueError: One of them has a gradient and is in no optimizer here.
        """
        given = [params] if isinstance(params, Tensor) else list(params)
        of = self._owners(given)
        if len(of) == 1:
            return of[0].clip_master_grads(max_norm, norm_type, params=given)
        for one in of:
            check_not_released(one, "a clip by one norm over several optimizers")
        masters = [master for one in of for master in masters_of(one, given)]
        norm = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None], norm_type)
        # An overflow is left to the steps: at a norm of 0 nothing is made a number.
        nn.utils.clip_grads_with_norm_(masters, max_norm, torch.where(norm.isfinite(), norm, 0.0))
        return norm

    def clip_grad_value(self, params: Iterable[Tensor] | Tensor, max_value: float) -> None:
        """Clip the master gradients of the model's parameters ``params`` by value.

        Raises:
            ValueError: One of them has a gradient and is in no optimizer here.
        """
        given = [params] if isinstance(params, Tensor) else list(params)
        for one in self._owners(given):
            mine = {id(param) for param in one.model_params()}
            one.clip_master_values(max_value, params=[param for param in given if id(param) in mine])

    def _owners(self, params: Sequence[Tensor]) -> list[MixedPrecisionOptimizer]:
        """The optimizers that have some of these parameters; the first one where none has."""
        asked = {id(param) for param in params}
        of = [one for one in self.optimizers if any(id(param) in asked for param in one.model_params())]
        if len(of) > 1:
            known = {id(param) for one in of for param in one.model_params()}
            for place, param in enumerate(params):
                if id(param) not in known and param.grad is not None:
                    raise ValueError(
                        f"parameters: number {place}, of shape {tuple(param.shape)}, has a gradient and is in none of "
                        "the prepared optimizers, so its loss scale is not known. Leave it out."
                    )
        return of or self.optimizers[:1]


def _has_used_gradients(optimizer: MixedPrecisionOptimizer) -> bool:
    """Whether gradients of its last step are still there, and would not add up with the next ones."""
    state = optimizer.step_state
    if type(state.stage) is not Ready or state.is_one():
        return False
    return any(param.grad is not None for param in optimizer.model_params()) and not state.has_new()


def _each(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings of one optimizer after another."""
    scalers = settings.get("scaler")
    if not isinstance(scalers, list):
        while True:
            yield dict(settings)
    for scaler in scalers:
        yield {**settings, "scaler": scaler}


def check_alike(optimizers: Sequence[MixedPrecisionOptimizer]) -> None:
    """Raise ``ValueError`` where optimizers have scales of their own, so that one loss can't be scaled for all."""
    first = optimizers[0].scaler if optimizers else None
    for number, one in enumerate(optimizers):
        same = one.scaler is first or (
            isinstance(one.scaler, SharedLossScaler)
            and isinstance(first, SharedLossScaler)
            and one.scaler.rule is first.rule
        )
        static = first is not None and not (first.dynamic or one.scaler.dynamic)
        if not same and not (static and first is not None and float(first.scale) == one.loss_scale):
            raise ValueError(
                f"optimizer {number} has a loss scaler of its own, and one backward serves all {len(optimizers)}. Wrap "
                "them with one scaler=fp16opt.DynamicLossScaler(), or leave them unwrapped."
            )


def check_not_released(optimizer: MixedPrecisionOptimizer, what: str) -> None:
    """Raise ``RuntimeError`` where gradients are freed in backward, so that a clip on masters would find none."""
    if optimizer.gradient_release:
        raise RuntimeError(
            f"{what}: with gradient_release={optimizer.gradient_release!r} masters have no gradients. Use "
            "clip_master_grads of one optimizer where that goes, or gradient_release=False."
        )


def check_trains(optimizers: Sequence[Optimizer], known: set[int]) -> None:
    """Raise ``ValueError`` for the first optimizer that has none of the parameters with these ids.

    One that was wrapped for an earlier training holds masters. Wrapped again it would train these, and not the model.
    """
    for number, one in enumerate(optimizers):
        if isinstance(one, MixedPrecisionOptimizer):
            params: list[Tensor] = list(one.model_params())
        else:
            params = [param for group in one.param_groups for param in group["params"]]
        if params and not any(id(param) in known for param in params):
            raise ValueError(
                f"optimizer {number} ({type(one).__name__}) has none of the model's parameters. Make it anew over "
                "model.parameters(): one that was wrapped before holds masters."
            )


def masters_of(optimizer: MixedPrecisionOptimizer, params: Sequence[Tensor]) -> list[Tensor]:
    """The masters of those of the model's parameters ``params`` that the optimizer has, in its order."""
    asked = {id(param) for param in params}
    pairs = zip(optimizer.model_params(), optimizer.master_params(), strict=True)
    return [master for model, master in pairs if id(model) in asked]


def scaled_by_dtype(options: Mapping[str, Any], params: Iterable[Tensor]) -> dict[str, Any]:
    """Options of the wrapper, with a dynamic scale where there are FP16 parameters, unless they say otherwise."""
    if says_scale(options) or not has_fp16(params):
        return dict(options)
    return {"dynamic": True, **options}


def says_scale(options: Mapping[str, Any]) -> bool:
    """Whether options of the wrapper say what scales the loss."""
    return not {"dynamic", "loss_scale", "scaler"}.isdisjoint(options)


def has_halves(params: Iterable[Tensor]) -> bool:
    """Whether one of them is in 16 bits."""
    return any(param.dtype in HALF_DTYPES for param in params)


def has_fp16(params: Iterable[Tensor]) -> bool:
    """Whether one of them is in FP16."""
    return any(param.dtype == torch.float16 for param in params)


def params_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """What their groups hold."""
    return [param for one in optimizers for group in one.param_groups for param in group["params"]]


def named_parameters(*models: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, parameter) of models, without what DDP puts before the names."""
    inside = [model.module if isinstance(model, DistributedDataParallel) else model for model in models]
    return [pair for model in inside for pair in model.named_parameters()]


class WaitingScheduler:
    """A learning-rate scheduler that stays where it is when the step before was skipped.

    Everything but ``step`` is the scheduler's own.

    Args:
        scheduler: Any with ``step``.
        was_skipped: Whether the last step of its optimizer was skipped.
    """

    def __init__(self, scheduler: Any, was_skipped: Callable[[], bool]) -> None:
        self.scheduler = scheduler
        self._was_skipped = was_skipped

    def step(self, *args: Any, **kwargs: Any) -> None:
        """The scheduler's, or nothing after a skipped step. May sync with the device."""
        if not self._was_skipped():
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)
