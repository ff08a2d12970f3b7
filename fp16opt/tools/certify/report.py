"""What certify found, as values that print as a table."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

__all__ = ["Check", "Report"]

_NEEDED = ("none_grad", "fp32_state", "deterministic", "state_dict", "wrapped")


@dataclass(frozen=True)
class Check:
    """The outcome of one property test.

    Attributes:
        passed: None where the property does not apply, or can't be tested here.
        detail: What was seen, in words.
    """

    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Report:
    """What :func:`certify` found.

    Attributes:
        optimizer: The class, with its module.
        tested_with: The kind of parameters and gradients that the optimizer was stepped with.
        checks: The outcomes, by name.
    """

    optimizer: str
    tested_with: str
    checks: dict[str, Check] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether none_grad, fp32_state, deterministic, state_dict and wrapped didn't fail. The others choose modes."""
        return all(self.checks[name].passed is not False for name in _NEEDED if name in self.checks)

    def __str__(self) -> str:
        words = {True: "pass", False: "FAIL", None: "n/a"}
        width = max(map(len, self.checks), default=0)
        lines = [f"{self.optimizer}: {'ok' if self.ok else 'not ok'} ({self.tested_with})"]
        for name, check in self.checks.items():
            head = f"  {name:<{width}}  {words[check.passed]}  "
            lines += textwrap.wrap(check.detail, 118, initial_indent=head, subsequent_indent=" " * len(head)) or [head]
        return "\n".join(lines)
