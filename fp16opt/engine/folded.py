"""What stands in ``.grad`` of a weight whose gradient was folded into an FP32 sum: a tensor that refuses to be used."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import errors
from .dtensors import raw_grad, raw_grads, set_raw_grad


class FoldedGradient(Tensor):
    """In the place of a gradient that is in its master's sum. It has no memory.

    With None a line that clips or divides the model's gradients would silently skip this parameter. Where it is cleared
    the sum is given up; its dtype, shape and device can be read. A backward that adds to it, without the optimizer,
    leaves its own gradient, and the optimizer's next call refuses that. All else raises.
    """

    called: str
    param: weakref.ref[Tensor]
    made_way: bool
    """Whether a backward has put a gradient in its place. Else it was the user who has taken it away."""

    @staticmethod
    def __new__(cls: Any, param: Tensor, name: str) -> FoldedGradient:
        """In the place of the gradient of ``param``, which messages call ``name``."""
        dtype = getattr(param, "grad_dtype", None) or param.dtype  # what torch lets stand there
        made: FoldedGradient = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=dtype, device=param.device, storage_size=0
        )
        made.called, made.param, made.made_way = name, weakref.ref(param), False
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give itself back where it is detached, and way where it is cleared or autograd adds to it.

        Raises:
            RuntimeError: it was to be read or written.
        """
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.zero_.default:
            return args[0]._cleared()
        given = args[0] if args else None
        first = given[0] if isinstance(given, (list, tuple)) and given else given
        if isinstance(first, cls) and func in _ADDS and torch._C._current_graph_task_id() != -1:
            return first._give_way(args[1], in_place=func is torch.ops.aten.add_.Tensor)
        raise _refused(first)

    def _cleared(self) -> FoldedGradient:
        """By ``model.zero_grad(set_to_none=False)``: the sum goes as where ``.grad`` is set to None."""
        param = self.param()
        if param is not None and raw_grad(param) is self:
            set_raw_grad(param, None)
        return self

    def __dlpack__(self, **_: Any) -> Any:
        """Raises RuntimeError."""
        raise _refused(self)

    def _give_way(self, grad: Tensor, in_place: bool) -> Tensor:
        """Autograd's AccumulateGrad has made a gradient: in place where no graph is made of it."""
        param, made, self.made_way = self.param(), grad.clone(), True
        if in_place and param is not None:
            set_raw_grad(param, made)
        return self if in_place else made


def _refused(first: object) -> Exception:
    name = f": {first.called}" if isinstance(first, FoldedGradient) else ""
    return errors.FOLDED(name=name)


_ADDS = {torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor}


def takes_place(param: Tensor) -> bool:
    """Whether one can stand in ``.grad`` of this parameter: of a plain tensor."""
    return type(param) in (Tensor, torch.nn.Parameter)


def is_folded(grad: object) -> bool:
    """Whether this is one."""
    return type(grad) is FoldedGradient


def unmark(params: Sequence[Tensor]) -> None:
    """Take them away."""
    for param, grad in zip(params, raw_grads(params), strict=True):
        if is_folded(grad):
            set_raw_grad(param, None)
