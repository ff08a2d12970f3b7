"""The multi-tensor operations: one typed function each, over lists of tensors.

All lists of a call have the same length n, and all tensors live on one device. An entry may be None: it is skipped,
and its statistics stay as they are. Results are written into tensors that the caller gives, on the device, and
nothing waits for the device. Tensors may have any strides; those that one index can walk through memory together
are served by a compiled kernel where there is one (:func:`backend`), all others by :mod:`fp16opt.kernels.reference`,
with the same bits.

Version counters move for the tensors that autograd or users see change: ``outs``, tensors scaled in place, 16-bit
params, parameters that are their own masters, statistics; not for optimizer state, step counters and float32 masters
where 16-bit models are stepped along with them, as in torch's own fused steps.

Every function takes ``tables``, a :class:`PointerTables` of the call site, to save time by skipping checks made before.
"""

from __future__ import annotations

from .averages import multi_tensor_lerp
from .backends import backend
from .calls import PointerTables
from .held import HELD_BLOCK, multi_tensor_decode, multi_tensor_encode
from .measures import COMPARED, MEASURED, Snapshots, multi_tensor_compare, multi_tensor_measure
from .operations import (
    is_host,
    multi_tensor_axpby,
    multi_tensor_cast,
    multi_tensor_check,
    multi_tensor_join,
    multi_tensor_l2norm,
    multi_tensor_sample,
    multi_tensor_scale,
    multi_tensor_split,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
)
from .stats import INF, NAN, NOT_FINITE, TOO_LARGE, CastStats, GradStats
from .tables import HALF_DTYPES, Seen
from .written import multi_tensor_renew, multi_tensor_take

__all__ = [
    "COMPARED",
    "HALF_DTYPES",
    "HELD_BLOCK",
    "INF",
    "MEASURED",
    "NAN",
    "NOT_FINITE",
    "TOO_LARGE",
    "CastStats",
    "GradStats",
    "PointerTables",
    "Seen",
    "Snapshots",
    "backend",
    "is_host",
    "multi_tensor_axpby",
    "multi_tensor_cast",
    "multi_tensor_check",
    "multi_tensor_compare",
    "multi_tensor_decode",
    "multi_tensor_encode",
    "multi_tensor_join",
    "multi_tensor_l2norm",
    "multi_tensor_lerp",
    "multi_tensor_measure",
    "multi_tensor_renew",
    "multi_tensor_sample",
    "multi_tensor_scale",
    "multi_tensor_split",
    "multi_tensor_take",
    "multi_tensor_unscale",
    "multi_tensor_unscale_clipped",
]


# TEMPORARY
def _alias(f):
    import functools

    @functools.wraps(f)
    def g(*a, cache=None, **k):
        if cache is not None:
            k["tables"] = cache
        return f(*a, **k)

    return g


for _n in list(globals()):
    if _n.startswith("multi_tensor_"):
        globals()[_n] = _alias(globals()[_n])
CallCache = PointerTables
multi_tensor_refresh_masters = globals()["multi_tensor_take"]
multi_tensor_reset_remainders = globals()["multi_tensor_renew"]
from . import calls as _c
from . import operations as _o
from . import state8 as _s8

_c.CallCache = PointerTables
for _m in (_s8, _o):
    for _n in list(vars(_m)):
        if _n.startswith("multi_tensor_") or _n == "step_columns":
            setattr(_m, _n, _alias(getattr(_m, _n)))
