"""``optimizer._amp_stash``: apex's names for the parameters that the optimizer knows, and nothing of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..kernels import HALF_DTYPES

Pairs = list[list[tuple[Tensor, Tensor]]]
"""Per group, each (model parameter, what is stepped for it)."""


class Stash:
    """A view of an optimizer's model parameters and masters, made when it is asked for.

    Args:
        grouped: Gives those of an optimizer that went through ``initialize``.
    """

    def __init__(self, grouped: Callable[[], Pairs]) -> None:
        self._grouped = grouped

    @property
    def lazy_init_called(self) -> bool:
        """True: masters are there from ``initialize`` on. Setting it changes nothing."""
        return True

    @lazy_init_called.setter
    def lazy_init_called(self, value: bool) -> None:
        """Scripts set it after they called ``_lazy_init_maybe_master_weights``."""

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """16-bit model parameters, by param group."""
        return [[model for model, _ in group if model.dtype in HALF_DTYPES] for group in self._grouped()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their FP32 masters, by param group."""
        return [[master for model, master in group if master.dtype != model.dtype] for group in self._grouped()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """What is stepped for parameters of other dtypes, by param group: masters on the weights' memory, or these."""
        return [[master for model, master in group if model.dtype not in HALF_DTYPES] for group in self._grouped()]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """16-bit model parameters."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their FP32 masters."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """What is stepped for parameters of other dtypes. Their ``.grad`` is the true one."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """As apex named them where there are no masters."""
        return self.all_fp32_from_fp32_params
