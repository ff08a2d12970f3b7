"""The multi-tensor operations: one typed function each, over lists of tensors.

All lists of a call have the same length n, and all tensors live on one device. An entry may be None: it is skipped,
and its statistics stay as they are. Results are written into tensors that the caller gives, on the device, and
nothing waits for the device. Tensors may have any strides; those that one index can walk through memory together
are served by a compiled kernel where there is one (:func:`backend`), all others by :mod:`fp16opt.kernels.reference`,
with the same bits.

Version counters move for the tensors that autograd or users see change: ``outs``, tensors scaled in place, 16-bit
params, weights that are stepped where they lie, statistics; not for optimizer state, step counters and float32 masters
where 16-bit models are stepped along with them, as in torch's own fused steps.

Every function takes ``cache``, a :class:`CallCache` of the call site, to save time by skipping checks made before.
"""

from __future__ import annotations

from . import verdicts
from .averages import multi_tensor_lerp
from .backends import backend
from .calls import CallCache
from .lists import is_dense, same_walk
from .measures import COMPARED, MEASURED, Snapshots, multi_tensor_compare, multi_tensor_measure
from .operations import (
    AwaitedFlag,
    is_host,
    moved,
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
from .pieces import WHOLE, Piece
from .stats import INF, NAN, NOT_FINITE, TOO_LARGE, CastStats, GradStats
from .table import HALF_DTYPES
from .written import multi_tensor_refresh_masters, multi_tensor_reset_remainders

__all__ = [
    "COMPARED",
    "HALF_DTYPES",
    "INF",
    "MEASURED",
    "NAN",
    "NOT_FINITE",
    "TOO_LARGE",
    "WHOLE",
    "AwaitedFlag",
    "CallCache",
    "CastStats",
    "GradStats",
    "Piece",
    "Snapshots",
    "backend",
    "is_dense",
    "is_host",
    "moved",
    "multi_tensor_axpby",
    "multi_tensor_cast",
    "multi_tensor_check",
    "multi_tensor_compare",
    "multi_tensor_join",
    "multi_tensor_l2norm",
    "multi_tensor_lerp",
    "multi_tensor_measure",
    "multi_tensor_refresh_masters",
    "multi_tensor_reset_remainders",
    "multi_tensor_sample",
    "multi_tensor_scale",
    "multi_tensor_split",
    "multi_tensor_unscale",
    "multi_tensor_unscale_clipped",
    "same_walk",
    "verdicts",
]
