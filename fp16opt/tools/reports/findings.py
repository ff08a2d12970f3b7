"""What a check before a training can find, as sentences with the line to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...engine.diagnostics import describe

SHARE = 0.05
"""The share of gradients that underflow, or of updates that are lost, from which on there is a finding."""

WRAP = "optimizer = fp16opt.MixedPrecisionOptimizer(optimizer, named_parameters=model.named_parameters())"
WRAP_DYNAMIC = WRAP.replace("optimizer, named", "optimizer, dynamic=True, named")

KEYS = (
    "not_finite",
    "two_scales",
    "refused",
    "no_loss_scale",
    "overflow",
    "inside",
    "buffers",
    "autocast",
    "eps",
    "lost_updates",
    "underflow",
    "clip",
    "gradients_written",
    "left_over",
    "no_step",
    "weights_written",
    "other_parameters",
    "not_in_optimizer",
    "no_gradient",
    "near_the_end",
    "micro_batches",
    "average",
    "scheduler",
)
"""What :attr:`PreflightFinding.key` may be, the worst first."""


@dataclass(frozen=True)
class PreflightFinding:
    """One thing to change before a training begins.

    Attributes:
        key: What it is, one of ``KEYS``.
        level: "error": the training is worse for it, or does not run; or "warning".
        sentence: What was seen, with its numbers.
        line: What to write in the script, and where.
        layer: The parameter or module that is worst; None where it concerns no one more than others.
        numbers: What was measured, by name.
        by_layer: The number that counts, for each parameter or module that it concerns, the worst first.
    """

    key: str
    level: str
    sentence: str
    line: str
    layer: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    by_layer: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.level}: {self.sentence}\n    {self.line}"


def worst_first(findings: Sequence[PreflightFinding]) -> list[PreflightFinding]:
    """Errors before warnings, each in the order of ``KEYS``."""
    return sorted(findings, key=lambda one: (one.level != "error", KEYS.index(one.key)))


def largest_first(by_layer: Mapping[str, float]) -> dict[str, float]:
    """The same, by size.

    Example:
        >>> largest_first({"a": 0.1, "b": 0.5})
        {'b': 0.5, 'a': 0.1}
    """
    return dict(sorted(by_layer.items(), key=lambda one: -one[1]))


def most_elements_first(shares: Mapping[str, float], elements: Mapping[str, int]) -> dict[str, float]:
    """The layers with a share over ``SHARE``, by how many elements that is.

    Example:
        >>> most_elements_first({"a.bias": 1.0, "a.weight": 0.5, "b": 0.01}, {"a.bias": 2, "a.weight": 8, "b": 100})
        {'a.weight': 0.5, 'a.bias': 1.0}
    """
    bad = [name for name, share in shares.items() if share > SHARE]
    return {name: shares[name] for name in sorted(bad, key=lambda name: -shares[name] * elements[name])}


def percent(share: float) -> str:
    """A share for reading.

    Example:
        >>> percent(0.634), percent(0.0004), percent(0.0), percent(0.9996)
        ('63 %', '0.04 %', '0 %', '99.96 %')
    """
    shown = 100 * share
    return f"{shown:.2g} %" if shown < 99.5 else f"{shown:.4g} %"


def shares_in_words(by_layer: Mapping[str, float], limit: int = 3) -> str:
    """Layers with their shares.

    Example:
        >>> shares_in_words({"fc.weight": 0.5, "fc.bias": 0.25}, limit=1)
        'fc.weight (50 %) and 1 more'
    """
    return describe([f"{name} ({percent(share)})" for name, share in by_layer.items()], limit)


def mean_over(shares: Mapping[str, float], elements: Mapping[str, int]) -> float:
    """The share over all elements of these layers; 0 where there is none.

    Example:
        >>> mean_over({"a": 1.0, "b": 0.0}, {"a": 1, "b": 3})
        0.25
    """
    total = sum(elements[name] for name in shares)
    return sum(share * elements[name] for name, share in shares.items()) / total if total else 0.0
