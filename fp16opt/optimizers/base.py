"""What the optimizers of this room share: FP32 arithmetic and FP32 state for parameters of any floating dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import kernels
from ..kernels import HALF_DTYPES

WIDE = (torch.float32, torch.float64)


@dataclass
class Batch:
    """The parameters of one group that have gradients.

    ``values`` are what an update steps: the parameters themselves, or FP32 stand-ins for 16-bit ones. ``grads`` have
    the dtype and the strides of ``values``, and are the parameters' own where those fit: they are not to be written.
    """

    group: dict[str, Any]
    params: list[Tensor]
    values: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]

    def write_back(self) -> None:
        """Round the stand-ins into their parameters."""
        for param, value in zip(self.params, self.values, strict=True):
            if param is not value:
                param.copy_(value)

    def count_steps(self) -> list[int]:
        """Count this step for each parameter; returns the new counts."""
        for state in self.states:
            state["step"] = int(state["step"]) + 1
        return [state["step"] for state in self.states]


_SETTINGS = (bool, int, float, str, torch.dtype)  # kinds of what a constructor keeps beside groups and state


class FP32StateOptimizer(Optimizer):
    """An optimizer whose state stays FP32 when a checkpoint is loaded for 16-bit parameters.

    A subclass that sets ``_step_supports_amp_scaling`` is driven by ``torch.amp.GradScaler`` with 16-bit gradients: the
    scaler hands over ``found_inf``, by which a step is left out, and ``grad_scale``, by which gradients are divided in
    FP32.

    Args:
        params: As for ``torch.optim.Optimizer``.
        defaults: Of the groups. ``lr``, ``eps``, ``momentum``, ``weight_decay`` and ``betas`` are checked, here and in
            each group. Without ``lr`` each group must bring its own.
        set_grad_none: What ``zero_grad`` does when not told.

    Raises:
        ValueError: A setting is negative or not finite, or a beta is not from 0 to under 1; a group has no ``lr``.
    """

    KEEPS_MASTERS = False

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool) -> None:
        check_settings(defaults)
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        """What torch copies and pickles, and what the constructor of the class was told."""
        told = {name: value for name, value in self.__dict__.items() if value is None or isinstance(value, _SETTINGS)}
        return {**told, **super().__getstate__()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and the group's settings are checked.

        Raises:
            ValueError: A setting is out of range, or there is no ``lr``. Nothing has been changed then.
        """
        if isinstance(param_group, dict):  # torch refuses others by type
            where = f"group {len(self.param_groups)}: "
            if "lr" not in {**self.defaults, **param_group}:
                raise ValueError(
                    f"{where}lr: expected a number, here or for all groups, got none. Add 'lr' to the group, or lr=... "
                    f"to the arguments of {type(self).__name__}."
                )
            check_settings(param_group, where)
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: to None where ``set_to_none``, or where the constructor said so."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The closure's loss, or None. No host sync, but for one where a GradScaler hands over ``found_inf``.

        Raises:
            RuntimeError: A gradient is sparse. Nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_dense()
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is not None and bool(found):
            return loss
        batches = [batch for batch in map(self._gather, self.param_groups) if batch.params]
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            self._unscale(batches, scale)
        if batches:
            self._update(batches)
        for batch in batches:
            batch.write_back()
        return loss

    def _unscale(self, batches: list[Batch], scale: Tensor) -> None:
        """Divide the gradients that will be stepped by a GradScaler's scale. The parameters' own stay as they are."""
        for batch in batches:
            batch.grads = [grad * (1.0 / scale).to(grad) for grad in batch.grads]

    def _update(self, batches: list[Batch]) -> None:
        """Step ``values`` and states of all groups; a subclass's formula."""
        raise NotImplementedError(f"{type(self).__name__} defines no _update.")

    def _new_state(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter before its first step; a subclass's."""
        raise NotImplementedError(f"{type(self).__name__} defines no _new_state.")

    def _check_dense(self) -> None:
        for number, group in enumerate(self.param_groups):
            for place, param in enumerate(group["params"]):
                if param.grad is not None and param.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"group {number}, param {place}: {type(self).__name__} takes dense gradients, got layout "
                        f"{param.grad.layout}. Use torch.optim.SparseAdam for this parameter."
                    )

    def _gather(self, group: dict[str, Any]) -> Batch:
        batch = Batch(group, [], [], [], [])
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            value = self._value(param, state)
            if not any(key != "master_param" for key in state):
                state.update(self._new_state(value, group))
            elif "step" not in state and "step" in group:
                state["step"] = group["step"]  # apex counted steps by group
            grad = param.grad.to(value.dtype)
            if grad.stride() != value.stride():  # torch's fused steps are wrong on these
                grad = torch.empty_like(value).copy_(grad)
            batch.params.append(param)
            batch.values.append(value)
            batch.grads.append(grad)
            batch.states.append(state)
        return batch

    def _dtype(self, param: Tensor) -> torch.dtype:
        """What ``param`` is stepped in, and its state kept in."""
        return torch.float32 if param.dtype in HALF_DTYPES else param.dtype

    def _value(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        if self._dtype(param) == param.dtype:
            return param
        if not self.KEEPS_MASTERS:
            return param.float()
        if "master_param" not in state:
            state["master_param"] = param.detach().to(torch.float32, copy=True)
        master: Tensor = state["master_param"]
        return master

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, and the FP32 state of 16-bit parameters stays FP32 (torch rounds it to their dtype)."""
        super().load_state_dict(state_dict)
        saved = dict(state_dict["state"])
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key, value in saved.get(i, {}).items():
                dtype = self._dtype(param)
                if dtype != param.dtype and isinstance(value, Tensor) and value.is_floating_point():
                    self.state[param][key] = value.detach().to(param.device, dtype, copy=True)


def check_settings(settings: dict[str, Any], where: str = "") -> None:
    """Raise ``ValueError`` for a learning rate, eps, momentum or weight decay under 0, or betas outside [0, 1).

    Args:
        where: Begins the message.
    """
    for name in ("lr", "eps", "weight_decay", "momentum"):
        if name in settings and not 0.0 <= float(settings[name]) < math.inf:
            raise ValueError(f"{where}{name}: expected a finite number that is not negative, got {settings[name]!r}.")
    for place, beta in enumerate(settings.get("betas", ())):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{where}betas[{place}]: expected a number from 0 to under 1, got {beta!r}.")


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """apex's fused optimizers have the argument and refuse it."""
    if amsgrad:
        raise RuntimeError(f"{name} has no AMSGrad variant. Use torch.optim.AdamW(..., amsgrad=True).")


def norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor: float64, shape [n], on the first one's device. No host sync where all are on one."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1:
        return kernels.multi_tensor_l2norm(tensors)[1]
    return torch.stack([kernels.multi_tensor_l2norm([tensor])[1][0].to(tensors[0].device) for tensor in tensors])


def total_norm(each: Tensor) -> Tensor:
    """The 2-norm over all, from the norms of each: float64, shape []."""
    return each.square().sum().sqrt()
