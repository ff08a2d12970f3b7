"""amp's context managers: ``scale_loss``, ``disable_casts``; ``AmpHandle``, which takes casts out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ._amp_state import _amp_state
from .casting import Casts
from .initialised import Initialised, is_initialised
from .optimizers import wrapped_in
from .policy import AmpError
from .scaler import LossScaler

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


@contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Run ``backward`` on the scaled loss inside; on the way out its gradients are unscaled and checked.

    They are added to what the optimizers' parameters held, in FP32 where there are masters. Where one is not finite the
    next ``step`` of every optimizer passed is skipped. Afterwards clip ``amp.master_params(optimizer)``; without master
    weights (O0, O1, O3) these are the model's parameters, whose ``.grad`` is the true one. Under DDP's ``no_sync`` pass
    ``delay_unscale=True``, so that all micro-batches are reduced.

    Args:
        loss: Floating, any shape.
        optimizers: One, or a list of all whose parameters get gradients here.
        loss_id: Which of the ``num_losses`` scalers to use.
        model: Not used.
        delay_unscale: Leave gradients as they are; a later one without it, or ``step``, unscales the sum. Those of
            another scale are unscaled before it begins.
        delay_overflow_check: Unscale; the loss scale follows at the next ``scale_loss`` of this id.

    Yields:
        ``loss.float()`` times the scale, and ``loss`` itself where amp is disabled.

    Raises:
        AmpError: ``initialize`` was not called, ``loss_id`` is out of range, or an optimizer was not passed to it.
        TypeError: The loss is not a floating tensor.

    Syncs: not itself, but where gradients were edited since the last one; ``step`` does once.
    """
    engines = _engines(optimizers)
    if engines is None:
        yield loss
        return
    scaler = _scaler(engines, loss_id)
    entered: list[Initialised] = []
    leave_backward = _amp_state.casts.enter_backward()
    try:
        scaled = loss
        for engine in engines:
            scaled = engine.enter(loss, scaler)
            entered.append(engine)
        yield scaled
    except BaseException:
        for engine in entered:
            engine.abandon()
        raise
    finally:
        leave_backward()
        if _amp_state.casts.active:
            _amp_state.casts.clear_cache()
    if delay_unscale:
        for engine in engines:
            engine.leave()
    else:
        _settle(engines, scaler, delay_overflow_check)


def _engines(optimizers: Any) -> list[Initialised] | None:
    """The engines behind ``optimizers``, each once; None where amp is disabled for them."""
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not given:
        raise AmpError("optimizers: expected one or several, got an empty list. Pass those that the loss trains.")
    found: list[Initialised] = []
    disabled = isinstance(_amp_state.handle, NoOpHandle) and not _amp_state.loss_scalers
    for number, optimizer in enumerate(given):
        inner = wrapped_in(optimizer)
        if not is_initialised(inner) and (disabled or (inner is not None and inner.__dict__.get("_amp_disabled"))):
            continue
        if not is_initialised(inner):
            _not_initialised(number, optimizer)
        if not any(inner is engine for engine in found):
            found.append(inner)
    return found or None


def _not_initialised(number: int, optimizer: object) -> None:
    if not _amp_state.loss_scalers and _amp_state.handle is None:
        raise AmpError(
            "scale_loss was called before amp.initialize. Call model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=...) first."
        )
    raise AmpError(
        f"optimizers: optimizer {number} ({type(optimizer).__name__}) was not passed to amp.initialize. Pass it there, "
        "and use it here."
    )


def _scaler(engines: Sequence[Initialised], loss_id: Any) -> LossScaler:
    scalers = engines[0].amp.scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise AmpError(
            f"loss_id: expected a whole number from 0 to {len(scalers) - 1}, got {loss_id!r}. "
            "Call amp.initialize with num_losses=... to have more."
        )
    return scalers[loss_id]


def _settle(engines: Sequence[Initialised], scaler: LossScaler, postpone: bool) -> None:
    """Unscale in every optimizer; an overflow in one is an overflow in all. No host sync."""
    found: Tensor = engines[0].settle_gradients(scaler)
    if len(engines) > 1:
        each = [found, *(engine.settle_gradients(scaler) for engine in engines[1:])]
        found = torch.stack([flag.to(found.device) for flag in each]).amax()
        for engine in engines:
            engine.blame(scaler, found)
    if postpone:
        scaler.postpone(found)
    else:
        scaler.settle(found)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Functions don't cast inside. May be nested; an exception leaves them as they were."""
    with _amp_state.casts.disabled():
        yield


class AmpHandle:
    """``amp._amp_state.handle``.

    Args:
        casts: The function casts that this handle takes out.
    """

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self._alive: set[int] = set()

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Take the casts out when the last of the models is gone."""
        for model in models:
            self._alive.add(id(model))
            weakref.finalize(model, _forget, weakref.ref(self), id(model)).atexit = False

    def forget(self, model_id: int) -> None:
        """A model that was watched is gone."""
        if model_id in self._alive:
            self._alive.discard(model_id)
            if not self._alive:
                self._deactivate()

    def is_active(self) -> bool:
        """Whether functions cast their inputs."""
        return self._casts.active

    @property
    def _is_active(self) -> bool:
        return self._casts.active

    def _deactivate(self) -> None:
        """Put back everything that was put in: after this torch is as it was."""
        self._alive.clear()
        self._casts.deactivate()

    def disable_casts(self) -> Any:
        """As ``amp.disable_casts()``."""
        return disable_casts()


def _forget(reference: Callable[[], AmpHandle | None], model_id: int) -> None:
    handle = reference()
    if handle is not None:
        handle.forget(model_id)


class NoOpHandle:
    """``amp._amp_state.handle`` after ``amp.initialize(enabled=False)``: there are no casts."""

    def is_active(self) -> bool:
        """Never."""
        return False

    def scale_loss(self, loss: Any, optimizer: Any) -> Any:
        """Gives the loss itself, in ``with``."""
        return nullcontext(loss)

    def disable_casts(self) -> Any:
        """There are no casts."""
        return nullcontext()

    def _deactivate(self) -> None:
        """There is nothing to take out."""
