"""``optimizer._amp_stash``: apex's names for the parameters that the engine knows, and nothing of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..masters import HALF_DTYPES

if TYPE_CHECKING:
    from .optimizers import AmpOptimizer


class Stash:
    """A view of an optimizer's model parameters and masters, made when it is asked for.

    Args:
        optimizer: One that went through ``initialize``.
    """

    def __init__(self, optimizer: AmpOptimizer) -> None:
        self._params = optimizer._params

    @property
    def lazy_init_called(self) -> bool:
        """True: masters are there from ``initialize`` on. Setting it changes nothing."""
        return True

    @lazy_init_called.setter
    def lazy_init_called(self, value: bool) -> None:
        """Scripts set it after they called ``_lazy_init_maybe_master_weights``."""

    def _groups(self, wanted: str) -> list[list[Tensor]]:
        params = self._params
        groups: list[list[Tensor]] = [[] for _ in params.group_sizes]
        for i, (group, _) in enumerate(params.places):
            model, master = params.model[i], params.master[i]
            if master is not model:
                if wanted != "own":
                    groups[group].append(model if wanted == "model" else master)
            elif model.dtype in HALF_DTYPES:
                if wanted == "model":
                    groups[group].append(model)
            elif wanted == "own":
                groups[group].append(model)
        return groups

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """16-bit model parameters, by param group."""
        return self._groups("model")

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their FP32 masters, by param group."""
        return self._groups("master")

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """Parameters that are their own masters, by param group."""
        return self._groups("own")

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
        """Parameters that are their own masters."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """As apex named them where there are no masters."""
        return self.all_fp32_from_fp32_params
