"""The interface of apex.amp on this library's engine: ``from fp16opt import amp``.

``amp._amp_state`` is the session object; ``fp16opt.amp._amp_state``, imported, the module that holds it.
"""

from ._amp_state import _amp_state, master_params
from .amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss
from .policy import AmpError

__all__ = [
    "AmpError",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
