"""Training on several ranks: DDP, FSDP2, tensor parallelism, ZeRO-1, and checkpoints that reshard."""

from .attach import attach
from .files import PendingSave, latest, load, save, save_async
from .named import fp32_state_dict, load_state_dict, state_dict
from .partial import IncompatibleKeys

__all__ = [
    "IncompatibleKeys",
    "PendingSave",
    "attach",
    "fp32_state_dict",
    "latest",
    "load",
    "load_state_dict",
    "save",
    "save_async",
    "state_dict",
]
