"""What a step asks of other ranks. The two classes here are the answers of a training that has none.

``fp16opt.distributed`` has the others: :class:`Ranks` where parts of the masters live on other ranks, so that a verdict
and a norm are sums over ranks; :class:`Replicas` where ranks hold the same masters and DDP reduces gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

ELSEWHERE = "fp16opt.distributed.state_dict and load_state_dict, or save and load,"


def refuse_torch_checkpointing(what: str) -> None:
    """Raise ``RuntimeError`` where torch.distributed.checkpoint.state_dict asks for ``what``, a few calls away.

    It can't hold masters. On a fresh optimizer it sets gradients of zeros first, and steps.
    """
    frame = sys._getframe(1)
    for _ in range(8):  # torch puts up to four frames of its own between
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError(
                f"{what}: torch.distributed.checkpoint.state_dict has no place for FP32 masters and the loss scaler. "
                f"Use {ELSEWHERE} instead."
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


class ParamFact(NamedTuple):
    """A parameter in words: the number of its group, its name, itself, and what its holders must have alike of it."""

    group: int
    name: str
    param: Tensor
    line: str


@dataclass
class Facts:
    """What must be alike on several ranks: lines on all of them, parameters on those that hold the same ones."""

    shared: list[str]
    params: list[ParamFact]


class Asked(NamedTuple):
    """What a rank asks the others for, which all must ask for alike.

    Attributes:
        norm_type: p of the norm; None for verdicts alone.
        max_norm: of the clip that wants the norm.
        turn: how many such messages were sent since these gradients were taken.
        steps: how many steps this rank has taken by then, skipped ones included.
        has_grads: whether this rank has gradients.
    """

    norm_type: float | None
    max_norm: float | None = None
    turn: int = 0
    steps: int = 0
    has_grads: bool = True


class Origin(NamedTuple):
    """Which ranks found something that is not finite, in words: "rank 3", "2 of 8 ranks"; "" for none.

    Attributes:
        grads: in gradients.
        losses: those of them that know a loss of their own that is not finite.
    """

    grads: str
    losses: str


class Agreed(NamedTuple):
    """What ranks have added up.

    Attributes:
        found: float32, 0-dim, 0.0 or 1.0 each: the verdicts.
        norm: float64, 0-dim, inf where a verdict is 1.0.
        has_grads: bool, 0-dim: whether some rank has gradients.
        origin: float64: for :meth:`Ranks.origin`.
    """

    found: list[Tensor]
    norm: Tensor | None
    has_grads: Tensor
    origin: Tensor


class Ranks:
    """Masters are all here: what this rank finds in them is the verdict.

    Attributes:
        alone: Whether a verdict needs no message.
        group: The process group that shares the masters; None for all ranks, or none.
        kept_settings: Keys of groups in which each rank's steps keep values of their own.
    """

    alone = True
    group: Any = None
    kept_settings: frozenset[str] = frozenset()

    def check_clip(self, norm_type: float, is_of_all: bool) -> None:
        """Raise where such a norm can't be had. Asked only of classes that are not ``alone``.

        Args:
            norm_type: p of the norm.
            is_of_all: whether it is that of all parameters, and not of some that the user has named.

        Raises:
            ValueError: the norm does not fit into a message.
            RuntimeError: another optimizer of this rank has a part of the gradients.
        """
        raise NotImplementedError("norms of masters that are all here need no message")

    def counted(self, param: Tensor) -> bool:
        """Whether this rank's piece of ``param`` enters the norm: a replicated piece is counted by one rank only."""
        return True

    def agree(
        self,
        found: Sequence[Tensor],
        asked: Asked,
        power_sum: Tensor | None,
        losses: Sequence[Tensor] = (),
    ) -> Agreed:
        """Add up verdicts and a norm over the ranks, in one message. Asked only of classes that are not ``alone``.

        Args:
            found: float32, 0-dim, 0.0 or 1.0 each: the verdicts of this rank.
            asked: what is wanted; settings and this must be alike on all ranks. Gradients may be lacking on those that
                share no parameter with ranks that have some.
            power_sum: float64, 0-dim: the sum of |g|**p over this rank's elements (the largest |g| for p = inf).
            losses: of this rank, unscaled, where they are known.

        Raises:
            RuntimeError: on all ranks: one has asked for something else, or has other settings. Where messages lie on
                a device the host hears of it with the message after.
        """
        raise NotImplementedError("verdicts of masters that are all here need no message")

    def origin(self, numbers: Tensor) -> Origin:
        """Which ranks had something that is not finite, of what :meth:`agree` gave. Syncs."""
        raise NotImplementedError("verdicts of masters that are all here have no other origin")

    def piece_with_copies(self, param: Tensor) -> str | None:
        """Which piece this rank has of a parameter whose pieces other ranks have too; None where it alone has it."""
        return None

    def largest(self, norms: Tensor) -> Tensor:
        """The largest over the ranks of each of ``norms`` (float32, on this rank's device), in one message.

        Asked only of classes that are not ``alone``.
        """
        raise NotImplementedError("norms of masters that are all here need no message")

    def is_anywhere(self, flag: Tensor) -> bool:
        """Whether ``flag`` (bool, 0-dim) is set on a rank that begins a backward with this one. Syncs."""
        return bool(flag)

    def followed_by(self, ask: Callable[[], Ranks]) -> Ranks:
        """What parameters came or went makes of this. ``ask`` gives what the parameters alone tell."""
        return ask()

    @property
    def within(self) -> Ranks:
        """What the parameters alone tell, where the user has said that more ranks share a verdict."""
        return self


@dataclass
class Digest:
    """What ranks hold alike: names and values of masters, and scaler and settings in words.

    Attributes:
        copies: (which piece it is, name, value) of pieces that other ranks have too, in parts of several.
    """

    names: list[str]
    values: list[Tensor]
    scaler: str
    settings: list[str]
    copies: list[tuple[str, str, Tensor]] = field(default_factory=list)


class Sums(Protocol):
    """FP32 sums of gradients, by device, that ranks average."""

    def sums_by_device(self) -> Any:
        """(a device's parameters, sums by row) of each device."""

    def put_sum(self, device: Any, row: int, value: Tensor) -> Tensor:
        """Overwrite a sum, or begin one."""

    def averaged(self, device: Any, stats: Any) -> None:
        """The sums of a device are averages now; what a pass has found in them."""


class Replicas:
    """The user has not said whether ranks share gradients.

    Attributes:
        are_told: Whether the user said which ranks share gradients.
        alone: Whether no rank is known that hears of steps.
        needs_decision: Whether a skip must be known on the host.
        local: Whether the present gradients are this rank's own, to be averaged over the ranks later.
        keeps: Whether gradients that were folded are to stay, as zeros: DDP still reduces them at the next synchronised
            backward, whether they are used there or not.
    """

    are_told = False
    alone = True
    needs_decision = False
    local = False
    keeps = False

    def reduce(self, sums: Sums, verdicts: list[Tensor]) -> list[Tensor]:
        """Average FP32 sums that were made on this rank alone over the ranks; returns the verdicts of all ranks.

        Asked only of a class that sets ``local``.
        """
        raise NotImplementedError("gradients that no rank shares need no average")

    def after_step(self, skipped: bool | Tensor, digest: Callable[[], Digest]) -> None:
        """A step is over. Asked only of classes that are not ``alone``.

        Args:
            digest: gives what may be compared over the ranks.
        """
        raise NotImplementedError("no rank is known that hears of steps")
