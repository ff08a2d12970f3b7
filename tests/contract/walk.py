"""Runs a program on the library and on the oracle, statement by statement, and compares what a user can see."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from contract.oracle import UNKNOWN, WORDS, Param, Planned, Refused, Unspecified, same_bits
from contract.programs import HELPERS, MODES, Setting, Statement, Stumbling
from contract.reference import rounded


class Difference(AssertionError):
    """The library does something else than the oracle says. ``kind`` is the same for failures of one kind."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind


class Over(Exception):
    """The program can't go on: what was done until a refusal, or whether a call is refused, is left open."""


@functools.lru_cache(None)
def compiled(text: str) -> CodeType:
    return compile(text, "<program>", "exec")


class Walk:
    """One run.

    Args:
        wrap: The class under test in place of ``MixedPrecisionOptimizer``, so that broken ones are seen to be found.

    Attributes:
        ran: Texts of the statements that were not left out, with the message of the error or None.
    """

    def __init__(self, setting: Setting, wrap: type | None = None) -> None:
        self.setting, self.mode = setting, MODES[setting.mode]
        self.room: dict[str, Any] = {"Planned": Planned, "Stumbling": Stumbling}
        for text in (setting.imports, *HELPERS.values()):
            exec(compiled(text), self.room)
        if wrap is not None:
            self.room["MixedPrecisionOptimizer"] = wrap
        exec(compiled(setting.text), self.room)
        self.oracle, self.driver = setting.oracle(dict(self.room["model"].items()))
        self.ran: list[tuple[Statement, str | None]] = []

    def run(self, statements: Sequence[Statement]) -> bool:
        """Whether it came to the end."""
        for statement in statements:
            try:
                self._do(statement)
            except Over:
                return False
        return True

    def _do(self, statement: Statement) -> None:
        sides = self.driver or self.oracle
        before = sides.now()
        self.oracle.may_refuse = ()
        self.oracle.last_clip = None
        target: Any = self.oracle
        name = statement.does
        if name.startswith("scaler."):
            target, name = self.driver, name.removeprefix("scaler.")
        refused = None
        try:
            expected = getattr(target, name)(*statement.args, **statement.options)
        except Unspecified:
            sides.put_back(before)
            return
        except Refused as refusal:
            refused = refusal
        message = self._run_text(statement)
        self.ran.append((statement, message))
        self._compare_outcomes(statement, refused, message)
        if refused is None:
            self._compare_results(statement, expected)
            self._compare_models(statement)
            if statement.compares:
                self._compare_counts(statement)
                self._compare_masters(statement)
        elif statement.ends:
            raise Over
        else:
            self.oracle.lagging = frozenset(self.oracle.params)  # whether it wrote masters down before it raised
            self._compare_models(statement)

    def _run_text(self, statement: Statement) -> str | None:
        self.room.pop("result", None)
        try:
            exec(compiled(statement.text), self.room)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            return str(error) or type(error).__name__
        except Exception as error:
            self.ran.append((statement, str(error)))
            raise Difference(f"{statement.does} crashes, {type(error).__name__}", str(error)) from error
        return None

    def _compare_outcomes(self, statement: Statement, refused: Refused | None, message: str | None) -> None:
        if message is None and refused is None:
            return
        if refused is None:
            assert message is not None
            if any(word in message for kind in self.oracle.may_refuse for word in WORDS[kind]):
                raise Over
            raise Difference(f"{statement.does} must not raise", message)
        if message is None:
            raise Difference(f"{statement.does} must raise ({refused.kind})")
        if any(word in message for kind in self.oracle.may_refuse for word in WORDS[kind]):
            raise Over
        if not any(word in message for word in WORDS[refused.kind]):
            raise Difference(f"{statement.does} must say one of {WORDS[refused.kind]}", message)
        named = refused.names if self.oracle.has_names else ()
        if named and not any(name in message for name in named):
            raise Difference(f"{statement.does} must name one of {named}", message)

    # -- what is compared ----------------------------------------------------------------------------------------------

    def _compare_results(self, statement: Statement, expected: Any) -> None:
        if "result" not in statement.text or expected is UNKNOWN:
            return
        result = self.room["result"]
        if not self._agree(result, expected):
            raise Difference(f"{statement.does} returns something else", f"{result}, must be {expected}")
        if statement.does == "clip":
            self.oracle.clip_by(result)

    def _agree(self, found: Any, expected: Any) -> bool:
        if isinstance(expected, list):
            return len(found) == len(expected) and all(map(self._agree, found, expected))
        if isinstance(expected, Tensor):
            return isinstance(found, Tensor) and near(found, expected, self.mode.tolerance or 2.0**-21)
        return bool(found == expected)

    def _compare_models(self, statement: Statement) -> None:
        """Weights with their gradients, which are read without any call of the optimizer."""
        for name, p in self.oracle.params.items():
            theirs = self.room["model"][name]
            if name not in self.oracle.lagging and not p.is_master_written and not self._is_weight(theirs, p):
                raise Difference(
                    f"{statement.does}: a weight in {short(p)}", f"{theirs.tolist()}, must be {p.weight.tolist()}"
                )
            if self._shows_grad(p) and not same_bits(theirs.grad, p.grad):
                raise Difference(
                    f"{statement.does}: the model's gradient in {short(p)}", f"{theirs.grad}, must be {p.grad}"
                )

    def _is_weight(self, theirs: Tensor, p: Param) -> bool:
        if not self.mode.tolerance:
            return same_bits(theirs.detach(), p.weight)
        ulp = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}.get(p.dtype, 0.0)
        return near(theirs, p.weight, self.mode.tolerance + ulp)

    def _shows_grad(self, p: Param) -> bool:
        """Whether a gradient that was folded into FP32 sums still lies there is left open."""
        return not self.mode.folds or (p.grad is not None and self.driver is None)

    def _compare_counts(self, statement: Statement) -> None:
        oracle, opt = self.oracle, self.room["opt"]
        pairs = {
            "loss_scale": (opt.loss_scale, oracle.scale.value),
            "skipped_steps": (opt.skipped_steps, oracle.skipped_steps),
            "steps": (opt.stats()["steps_taken"], oracle.steps),
        }
        if self.driver is not None:
            pairs["the GradScaler's scale"] = self.room["scaler"].get_scale(), self.driver.scale.value
        if "other" in self.room:
            pairs["the other scale"] = self.room["other"].scale, oracle.other.value  # type: ignore[attr-defined]
        for what, (found, expected) in pairs.items():
            if float(found) != expected:
                raise Difference(f"{statement.does}: {what}", f"{float(found)}, must be {expected}")

    def _compare_masters(self, statement: Statement) -> None:
        if self.oracle.lagging:
            return
        opt = self.room["opt"]
        params, found = list(opt.model_params()), list(opt.master_params())
        if len(params) != len(found):
            raise Difference(f"{statement.does}: {len(params)} parameters have {len(found)} masters")
        if len(opt.state) > len(params):
            raise Difference(f"{statement.does}: there is state of what is in no group")
        masters = dict(zip(map(id, params), found, strict=True))
        for p in self.oracle.stepped():
            weight = self.room["model"][p.name]
            if id(weight) not in masters:
                raise Difference(f"{statement.does}: {p.name} is in no group")
            if p.is_weight_written:
                continue
            master = masters[id(weight)]
            shares = master.data_ptr() == weight.data_ptr()
            if master is weight or (shares != p.shares and not self.mode.masters.startswith("split")):
                raise Difference(f"{statement.does}: the master's memory in {short(p)}")
            if not near(master, p.value, 2e-2 if p.lost_remainder else self.mode.tolerance):
                raise Difference(
                    f"{statement.does}: a master of {short(p)}", f"{master.tolist()}, must be {p.value.tolist()}"
                )
            if self.mode.tolerance:
                self._go_on_from(statement, p, weight.detach(), master.detach())
            else:
                self._compare_state(statement, p, opt.state[master])

    def _go_on_from(self, statement: Statement, p: Param, weight: Tensor, master: Tensor) -> None:
        """The oracle takes the library's numbers within the tolerance, so that these do not add up."""
        if p.is_master_written:
            return
        is_rounded = same_bits(weight, rounded(master, p.dtype))
        if not self.mode.masters.startswith("split") and not is_rounded:
            raise Difference(
                f"{statement.does}: {p.name} is not its master, rounded", f"{weight.tolist()}, {master.tolist()}"
            )
        p.put(master)
        p.weight, p.lost_remainder = weight.clone(), False
        p.note()

    def _compare_state(self, statement: Statement, p: Param, state: dict[str, Any]) -> None:
        assert p.stepper is not None
        for key, expected in p.stepper.state.get(p.master, {}).items():
            if isinstance(expected, Tensor) and not near(state.get(key), expected, 0.0):
                raise Difference(f"{statement.does}: the state {key!r}", f"{state.get(key)}, must be {expected}")

    # -- as a text -----------------------------------------------------------------------------------------------------

    def program(self) -> str:
        """What ran, as a program of its own."""
        lines = []
        for number, (statement, message) in enumerate(self.ran):
            if message is None or number == len(self.ran) - 1:
                lines.append(statement.text)
            else:
                body = "\n".join("    " + line for line in statement.text.splitlines())
                lines.append(f"try:\n{body}\nexcept Exception as error: print('refused:', error)")
        text = "\n".join([self.setting.text, *lines])
        helpers = [code for name, code in HELPERS.items() if re.search(rf"\b{name}\(|\({name}\)", text)]
        if "loss(" in text:
            helpers.append(HELPERS["pattern"])
        if "Stumbling(" in text:
            helpers = ["from typing import Any\n\n", inspect.getsource(Stumbling), *helpers]
        if any("Planned" in part for part in (text, *helpers)):
            helpers = ["class Planned(Exception): pass\n", *helpers]
        return "\n".join([self.setting.imports, "\n", *helpers, "", text])


def near(found: Any, expected: Tensor, tolerance: float) -> bool:
    """Within the tolerance, relative to 1 plus the magnitude; at 0 equal values."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if found.dtype == expected.dtype and torch.equal(found, expected):
        return True
    one, other = found.detach().double(), expected.detach().double()
    equal = (one == other) | (one.isnan() & other.isnan())
    return bool((equal | ((one - other).abs() <= tolerance * (1 + other.abs()))).all())


def short(p: Param) -> str:
    return str(p.dtype).removeprefix("torch.")


def difference(
    setting: Setting, statements: Sequence[Statement], wrap: type | None = None
) -> tuple[Walk, Difference | None]:
    walk = Walk(setting, wrap)
    try:
        walk.run(statements)
    except Difference as found:
        return walk, found
    return walk, None


def shrunk(setting: Setting, statements: Sequence[Statement], kind: str, wrap: type | None = None) -> list[Statement]:
    """Statements are left out for as long as the difference stays of the same kind."""
    kept, size = list(statements), len(statements) // 2
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            _, found = difference(setting, fewer, wrap)
            if found is not None and found.kind == kind:
                kept = fewer
            else:
                start += size
        size //= 2
    return kept


def complaint(setting: Setting, statements: Sequence[Statement], wrap: type | None = None) -> str | None:
    """What differs, with a small program that shows it; None where nothing does."""
    _, found = difference(setting, statements, wrap)
    if found is None:
        return None
    walk, found = difference(setting, shrunk(setting, statements, found.kind, wrap), wrap)
    what = str(found).replace("\n", " ")
    return f"{what}\n\n{walk.program()}"
