"""``optimizer._amp_stash``: apex's names for the parameters that the engine knows, and nothing of its own."""

from __future__ import annotations

import itertools

from torch import Tensor

from ..kernels import HALF_DTYPES
from ..optimizer import MixedPrecisionOptimizer


class Stash:
    """A view of an optimizer's model parameters and masters, made when it is asked for.

    Args:
        optimizer: One that went through ``initialize``.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def lazy_init_called(self) -> bool:
        """True: masters are there from ``initialize`` on. Setting it changes nothing."""
        return True

    @lazy_init_called.setter
    def lazy_init_called(self, value: bool) -> None:
        """Scripts set it after they called ``_lazy_init_maybe_master_weights``."""

    def _grouped(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Per group, each (model parameter, master); the same one twice where it has none."""
        pairs = zip(self._optimizer.model_params(), self._optimizer.master_params(), strict=True)
        return [list(itertools.islice(pairs, len(group["params"]))) for group in self._optimizer.param_groups]

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
        """The model's parameters of other dtypes, on whose memory their masters lie, by param group."""
        return [[model for model, _ in group if model.dtype not in HALF_DTYPES] for group in self._grouped()]

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
        """The model's parameters of other dtypes."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """As apex named them where there are no masters."""
        return self.all_fp32_from_fp32_params
