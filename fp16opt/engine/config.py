"""How the wrapper is asked to train: its arguments that choose one of several ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .arguments import check_choice

GradAccumulation = Literal["model", "fp32"]
OnModelWrite = Literal["refresh", "error", "ignore"]
MasterWeights = Literal["full", "none", "split", "split24"]
OptimizerState = Literal["fp32", "8bit"]
OffloadTo = Literal["cpu"]

_CHOICES: dict[str, tuple[bool | str | None, ...]] = {
    "grad_accumulation": get_args(GradAccumulation),
    "on_model_write": get_args(OnModelWrite),
    "fused_step": (False, True, "auto"),
    "master_weights": get_args(MasterWeights),
    "optimizer_state": get_args(OptimizerState),
    "gradient_release": (False, True),
    "track_changes": (False, True),
    "offload": (None, *get_args(OffloadTo)),
}

INSTEAD = {
    'optimizer_state="8bit"': 'optimizer_state="fp32"',
    'master_weights="split24"': 'master_weights="full"',
    'master_weights="split"': 'master_weights="full"',
    "gradient_release=True": "gradient_release=False",
    'offload="cpu"': "offload=None",
    "fused_step=True": "fused_step=False, the class's own step, or \"auto\", which takes that where a kernel can't",
}
"""Arguments that ask for the one-pass step, and what to give in the place of each."""

NO_MASTERS = "there are no FP32 masters (master_weights='none')"


@dataclass(frozen=True)
class Config:
    """The arguments of ``MixedPrecisionOptimizer`` that are one of several, under their names there.

    Raises:
        ValueError: one is none of these.
    """

    grad_accumulation: GradAccumulation
    on_model_write: OnModelWrite
    fused_step: bool | str
    master_weights: MasterWeights
    optimizer_state: OptimizerState
    gradient_release: bool
    closure: str | None = None
    track_changes: bool = False
    offload: OffloadTo | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.grad_accumulation == "fp32" and not self.makes_masters:
            raise ValueError(
                'grad_accumulation="fp32" does not go with master_weights="none": there are no FP32 masters to '
                'hold sums. Use master_weights="full", or grad_accumulation="model".'
            )
        if self.closure is not None:
            check_choice("closure", self.closure, ("once", "reevaluate"))
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.splits and self.on_model_write == "ignore":
            raise ValueError(
                f'on_model_write="ignore" does not go with master_weights="{self.master_weights}": the model\'s '
                'weights are part of the masters, so a write to them can\'t be ignored. Use "refresh" or "error".'
            )
        if self.gradient_release and self.grad_accumulation != "model":
            raise ValueError(
                f"gradient_release=True frees each gradient when it comes, so grad_accumulation="
                f'{self.grad_accumulation!r} has nothing to add up. Use grad_accumulation="model" and one backward a '
                "step, or gradient_release=False."
            )

    @property
    def makes_masters(self) -> bool:
        """Whether 16-bit parameters get masters."""
        return self.master_weights != "none"

    @property
    def rules_one_pass_out(self) -> str:
        """The argument that has the wrapped optimizer step itself, in words; "" where there is none."""
        if self.fused_step is False:
            return "fused_step=False"
        if self.closure == "reevaluate":
            return 'with closure="reevaluate" the wrapped optimizer steps itself'
        return "" if self.makes_masters else NO_MASTERS

    @property
    def splits(self) -> bool:
        """Whether the weights are part of the masters."""
        return self.master_weights in ("split", "split24")

    @property
    def arguments_that_scale(self) -> str:
        """The arguments that give a loss scale, beside those that were given, as the user writes them."""
        return "gradient_release=True, loss_scale=1024.0" if self.gradient_release else "dynamic=True"

    @property
    def required_by(self) -> str:
        """The argument that leaves no step but the one-pass step, as the user writes it; "" where there is none."""
        if self.optimizer_state == "8bit":
            return 'optimizer_state="8bit"'
        if self.splits:
            return f'master_weights="{self.master_weights}"'
        if self.gradient_release:
            return "gradient_release=True"
        return 'offload="cpu"' if self.offload else ""
