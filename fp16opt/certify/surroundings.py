"""What trials must neither disturb nor depend on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from ..engine.buckets import hooks_muted


@contextlib.contextmanager
def undisturbed(on_cuda: bool = False) -> Iterator[None]:
    """Within, random state, modes, defaults, hooks of all optimizers and warnings are the same for every caller.

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
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
