"""What trials must neither disturb nor depend on."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def _eager() -> contextlib.AbstractContextManager[object]:
    """Steps that are compiled run eagerly: trials would use up the recompilations that torch grants each function."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch from 2.6 on
    if set_stance is None or "torch._dynamo" not in sys.modules:  # which takes a second to import
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = set_stance("force_eager")
    return stance


@contextlib.contextmanager
def hooks_muted() -> Iterator[None]:
    """Within, step hooks of all optimizers don't run."""
    tables: list[dict[Any, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [(table, dict(table)) for table in tables]
    try:
        for table, _ in kept:
            table.clear()
        yield
    finally:
        for table, hooks in kept:
            now = {**hooks, **table}
            table.clear()
            table.update(now)


@contextlib.contextmanager
def undisturbed(on_cuda: bool = False) -> Iterator[None]:
    """Within, random state, modes, defaults, hooks of all optimizers and warnings are the same for every caller, and
    nothing is compiled.

    After it they are as they were.

    Args:
        on_cuda: Whether what runs within uses CUDA devices. Without it CUDA is not initialised where it was not yet,
            because a context takes memory and forbids to fork.
    """
    used = torch.cuda.is_available() and (on_cuda or torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    dtype = torch.get_default_dtype()
    elsewhere = torch.empty(()).device.type != "cpu"  # torch calls Python for every operation under a default device
    with (
        torch.random.fork_rng(devices=range(torch.cuda.device_count()) if used else ()),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu") if elsewhere else contextlib.nullcontext(),
        hooks_muted(),
        _eager(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
