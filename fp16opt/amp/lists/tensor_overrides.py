"""The lists for ``torch.Tensor``; in-place methods (with a trailing underscore) follow from them."""

import torch

from . import torch_overrides

MODULE = torch.Tensor

FP16_FUNCS = [
    *(name for name in torch_overrides.FP16_FUNCS if hasattr(torch.Tensor, name)),
    *("__matmul__", "__rmatmul__"),
]

FP32_FUNCS = [
    *(name for name in torch_overrides.FP32_FUNCS if hasattr(torch.Tensor, name)),
    *("__pow__", "__rpow__", "cpu"),
]

CASTS = [
    *(name for name in torch_overrides.CASTS if hasattr(torch.Tensor, name)),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
]

SEQUENCE_CASTS: list[str] = []
