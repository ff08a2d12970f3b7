"""What the two examples share: a device, checkpoint files, tables and memory figures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Both are read when torch starts. The first keeps idle CPU threads from spinning, which slows small models
# down many times where cores are shared. Only with the second does cuBLAS give the same bits every time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def choose_device(name: str) -> torch.device:
    """The device of that name. Makes torch repeatable, so that a resumed run matches bit for bit."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"--device {name}: torch finds no GPU here. Use --device cpu.")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(name)


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write beside ``path``, then rename: a run that is killed while saving keeps its last checkpoint."""
    partial = path.with_name(path.name + ".partial")
    torch.save(checkpoint, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint and refuse one that was made with other settings.

    It is read as it is used: ``load_state_dict`` of model and optimizer copy it to where their tensors are.
    """
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if checkpoint["settings"] != settings:
        raise SystemExit(f"{path} was made with {checkpoint['settings']}, not {settings}. Use another --output.")
    return checkpoint


def bytes_per_parameter(model: nn.Module, optimizer: Optimizer) -> tuple[float, float]:
    """Bytes of the weights, and of all that training keeps: weights, gradients, masters, optimizer state.

    Call it between ``step`` and ``zero_grad``, while the gradients are there. Activations are not counted.
    """
    weights = list(model.parameters())
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    # As they are: reading ``.grad`` of a master would make one.
    stored = [Tensor.grad.__get__(param) for param in weights + stepped]
    gradients = [grad for grad in stored if grad is not None]
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    state = [value for value in values if isinstance(value, Tensor)]
    count = sum(weight.numel() for weight in weights)
    return total_bytes(weights) / count, total_bytes(weights + stepped + gradients + state) / count


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors, each counted once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that a terminal shows well too: first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join([first.lstrip().ljust(widths[0]), *others]) + " |"

    ruler = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), ruler, *(line(row) for row in rows)])


def format_spread(values: Sequence[float], digits: int) -> str:
    """The mean, and from several values on their standard deviation (n - 1)."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
