"""What a step asks of other ranks. These two classes are the answers of a training that has none.

``fp16opt.distributed`` has the others: :class:`Ranks` where parts of the masters live on other ranks, so that a verdict
and a norm are sums over ranks; :class:`Replicas` where ranks hold the same masters and DDP reduces gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .gradients import MasterGrads
    from .optimizer import MixedPrecisionOptimizer


class Ranks:
    """Masters are all here: what this rank finds in them is the verdict.

    Attributes:
        alone: Whether a verdict needs no message.
    """

    alone = True

    def check_norm_type(self, norm_type: float) -> None:
        """Raise ``ValueError`` where such a norm can't be had."""

    def counted(self, param: Tensor) -> bool:
        """Whether this rank's piece of ``param`` enters the norm: a replicated piece is counted by one rank only."""
        return True

    def agree(
        self, found: Sequence[Tensor], norm_type: float | None, power_sum: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Add up verdicts and a norm over the ranks, in one message.

        Args:
            found: float32, 0-dim, 0.0 or 1.0 each: the verdicts of this rank.
            norm_type: p of the norm; None for verdicts alone.
            power_sum: float64, 0-dim: the sum of |g|**p over this rank's elements (the largest |g| for p = inf).

        Returns:
            (the verdicts over all ranks; the norm, float64, 0-dim, inf where a verdict is 1.0).
        """
        raise NotImplementedError


class Replicas:
    """Nobody said whether gradients are shared with other ranks.

    Attributes:
        needs_decision: Whether a skip must be known on the host.
        local: Whether the present gradients are this rank's own, to be averaged over the ranks later.
        keeps: Whether DDP wants to find gradients that were folded, as zeros: one that was used under ``no_sync`` it
            reduces at the next synchronised backward, be it used there or not.
    """

    needs_decision = False
    local = False
    keeps = False

    def check_folding(self) -> None:
        """Raise where gradients are about to be folded into FP32 sums that DDP might never reduce."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        raise RuntimeError(
            'gradients are to be folded into FP32 (grad_accumulation="fp32", or several loss scales in one step) in a '
            f"process group of {dist.get_world_size()} ranks: under DDP's no_sync the ranks would drift apart. Call "
            "fp16opt.distributed.attach(opt, ddp_model); or attach(opt, None), if ranks don't share gradients."
        )

    def reduce(self, grads: MasterGrads, verdicts: list[Tensor]) -> list[Tensor]:
        """Average FP32 sums that were made on this rank alone over the ranks; returns the verdicts of all ranks.

        Asked only of a class that sets ``local``.
        """
        raise NotImplementedError

    def after_step(self, skipped: bool | Tensor, engine: MixedPrecisionOptimizer) -> None:
        """A step is over."""
