"""Where a monitor's records go: JSON lines, TensorBoard, Weights & Biases, or any callable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

Record = dict[str, Any]
Sink = Callable[[Record], object]


class JsonLines:
    """One record a line, written and flushed at once: what was written stays readable if the process dies.

    A number that is not finite is the string "inf", "-inf" or "nan". A run that goes on adds to its file, in place of a
    last line that was cut short.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def __call__(self, record: Record) -> None:
        """Write one."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_cut_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(written(record), separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a further record opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _drop_cut_line(path: Path) -> None:
    """Take away what a process that died while writing left behind the last whole line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = at = file.seek(0, os.SEEK_END)
        while at > 0:
            start = max(0, at - 65536)
            file.seek(start)
            line_ends = file.read(at - start).rfind(b"\n")
            at = start + line_ends + 1 if line_ends >= 0 else start
            if line_ends >= 0:
                break
        if at < end:
            file.truncate(at)


def written(value: Any) -> Any:
    """``value`` as JSON takes it.

    Example:
        >>> written({"norm": float("inf"), "steps": [1, 2.5]})
        {'norm': 'inf', 'steps': [1, 2.5]}
    """
    if isinstance(value, dict):
        return {str(key): written(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [written(part) for part in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_back(value: Any) -> Any:
    """What :func:`written` was given."""
    if isinstance(value, dict):
        return {key: read_back(part) for key, part in value.items()}
    if isinstance(value, list):
        return [read_back(part) for part in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


def read(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file. A last line that is cut short, as of a process that died while writing, is left out.

    Raises:
        ValueError: Another line is no record.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = read_back(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: expected a JSON record, got {line[:40]!r}.") from None
        if not isinstance(record, dict) or "kind" not in record:
            raise ValueError(f"{path}, line {number}: expected a record of fp16opt.Monitor, got {line[:40]!r}.")
        records.append(record)
    return records


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    """(name, value) of the numbers of a record, as loggers draw them."""
    for name, value in record.items():
        if isinstance(value, (int, float)) and name != "step":
            yield name, float(value)
    for row, numbers in record.get("rows", {}).items():
        for name, value in numbers.items():
            if isinstance(value, (int, float)):
                yield f"{name}/{row}", float(value)


def to_tensorboard(writer: Any) -> Sink:
    """To a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar``."""

    def sink(record: Record) -> None:
        for name, value in _scalars(record) if "step" in record else ():
            writer.add_scalar(f"fp16opt/{name}", value, record["step"])

    return sink


def to_wandb(run: Any) -> Sink:
    """To a run of Weights & Biases, or the module ``wandb`` after its ``init``: all of a record in one ``log``."""

    def sink(record: Record) -> None:
        if "step" in record:
            run.log({"fp16opt/step": record["step"], **{f"fp16opt/{name}": value for name, value in _scalars(record)}})

    return sink


def make_sink(to: Any) -> Sink:
    """The sink that is meant by a path, a TensorBoard writer, a run of Weights & Biases, or a callable.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(to, (str, os.PathLike)):
        return JsonLines(to)
    if hasattr(to, "add_scalar"):
        return to_tensorboard(to)
    if hasattr(to, "log") and not callable(to):
        return to_wandb(to)
    if callable(to):
        sink: Sink = to
        return sink
    raise TypeError(
        f"to: expected a path, a TensorBoard SummaryWriter, a Weights & Biases run or a callable, got "
        f"{type(to).__name__}."
    )
