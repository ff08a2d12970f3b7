"""DeepSpeed's checkpoints of ZeRO: each rank has a file with its part of masters and moments, one has names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...saved_objects import SavedObject, read
from .found import Found, Scale, entry, refuse, tensors

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_WHOLE = "Gather it with DeepSpeed's zero_to_fp32.py, or load it with DeepSpeed."


def folder_of(path: Path) -> Path | None:
    """The folder of ``*_optim_states.pt`` files that ``path`` is, is in, or points to with its file ``latest``."""
    if path.is_file():
        return path.parent if _RANK.search(path.name) else None
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(encoding="utf-8").strip()
        path = path / tag if tag and Path(tag).name == tag else path
    return path if any(_RANK.search(file.name) for file in path.glob("*_optim_states.pt")) else None


def find(path: Path) -> Found:
    """Masters and moments by name, out of all ranks' files."""
    folder = folder_of(path)
    if folder is None:
        raise refuse(path, "no zero_pp_rank_*_optim_states.pt is there", "Pass the folder of a ZeRO 1 or 2 checkpoint.")
    ranks: dict[int, Path] = {}
    for file in folder.glob("*_optim_states.pt"):
        found = _RANK.search(file.name)
        if found and int(found[2]) > 0:
            raise refuse(file, "is of tensor or pipeline parallelism", _WHOLE)
        if found:
            ranks[int(found[1])] = file
    saved = [entry(read(ranks[rank]), "optimizer_state_dict", ranks[rank]) for rank in sorted(ranks)]
    where = folder / ranks[min(ranks)].name
    stage = _plain(saved[0].get("zero_stage", 1))
    if stage not in (0, 1, 2):
        raise refuse(where, f"is of ZeRO stage {stage}", _WHOLE)
    counts = _plain(saved[0].get("partition_count", len(saved)))
    expected = max(counts) if isinstance(counts, Sequence) else counts
    if sorted(ranks) != list(range(int(expected))):
        raise refuse(folder, f"has files of ranks {sorted(ranks)} of {expected}", "Copy the files of all ranks.")
    named = _names(folder)
    shapes = entry(named, "param_shapes", folder, Sequence)
    paddings = saved[0].get("param_alignment_paddings") or [None] * len(shapes)
    weights: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    bases = [entry(each, "base_optimizer_state", where) for each in saved]
    for number, group in enumerate(shapes):
        parts = [entry(each, "single_partition_of_fp32_groups", where, Sequence)[number] for each in saved]
        weights |= _cut(torch.cat([part.reshape(-1) for part in parts]), group, paddings[number], where)
        for name, entries in _moments(bases, number, group, paddings[number], where).items():
            state[name] = entries
    for name, value in tensors(entry(named, "module", folder)).items():
        weights.setdefault(name, value)
    settings = entry(bases[0], "param_groups", where, Sequence)
    return Found("deepspeed", weights, state=state, groups=settings, scale=_scale(saved[0].get("loss_scaler")))


def _names(folder: Path) -> Any:
    """The file of the model: names and shapes in the order of the flat masters, and weights."""
    files = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not files:
        raise refuse(folder, "has no mp_rank_00_model_states.pt, which has the names", "Copy it too.")
    return read(files[0])


def _moments(
    bases: Sequence[Any], number: int, group: Mapping[str, Any], padding: Sequence[int] | None, where: Path
) -> dict[str, dict[str, Any]]:
    """The optimizer's state of one group, by name."""
    held = [entry(base, "state", where) for base in bases]
    settings = entry(bases[0], "param_groups", where, Sequence)
    ids = [settings[number]["params"][0] if settings[number].get("params") else number] * len(held)
    states = [each.get(i, {}) for each, i in zip(held, ids, strict=True)]
    result: dict[str, dict[str, Any]] = {name: {} for name in group}
    for key, first in states[0].items():
        if isinstance(first, Tensor) and first.dim():
            for name, value in _cut(
                torch.cat([each[key].reshape(-1) for each in states]), group, padding, where
            ).items():
                result[name][key] = value
        else:
            for name in group:
                result[name][key] = first.clone() if isinstance(first, Tensor) else first
    if "step" in settings[number] and states[0]:
        for name in group:
            step = torch.tensor(float(settings[number]["step"]), dtype=torch.float32, device="cpu")
            result[name].setdefault("step", step)
    return {name: entries for name, entries in result.items() if entries}


def _cut(flat: Tensor, group: Mapping[str, Any], padding: Sequence[int] | None, where: Path) -> dict[str, Tensor]:
    """Parameters out of a flat tensor, in order, by name."""
    found, start = {}, 0
    for place, (name, shape) in enumerate(group.items()):
        size = torch.Size(_shape(shape))
        if start + size.numel() > flat.numel():
            raise refuse(where, f"ends before {name!r}: {flat.numel()} elements", "Copy the files of all ranks.")
        found[name] = flat[start : start + size.numel()].reshape(size).clone()
        start += size.numel() + (int(padding[place]) if padding is not None else 0)
    return found


def _shape(shape: Any) -> Any:
    return shape.made_with[0] if isinstance(shape, SavedObject) else shape


def _plain(value: Any) -> Any:
    """The number that an enum stands for."""
    return value.made_with[0] if isinstance(value, SavedObject) and value.made_with else value


def _scale(scaler: Any) -> Scale | None:
    """Of DeepSpeed's dynamic loss scaler; BF16 has a static one."""
    fields = vars(scaler) if isinstance(scaler, SavedObject) else {}
    if "cur_scale" not in fields or not fields.get("dynamic"):
        return None
    window = int(fields.get("scale_window", 0))
    clean = int(fields.get("cur_iter", 0)) - 1 - int(fields.get("last_overflow_iter", -1))
    return Scale(float(fields["cur_scale"]), clean % window if window else 0)
