"""Checkpoints in one file, told apart by their keys: apex, Megatron-LM, FairSeq, FlashOptim, Lightning, Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...saved_objects import read
from .found import Found, Scale, entry, refuse, tensors, torch_scale

_MANTISSA = {torch.float16: (10, -14), torch.bfloat16: (7, -126)}


def is_own(state: Any) -> bool:
    """Whether this is what ``MixedPrecisionOptimizer.state_dict()`` gave."""
    return isinstance(state, Mapping) and {"version", "optimizer", "masters", "scaler"} <= set(state)


def has_own(saved: Any) -> bool:
    """Whether a file's content is such, or has it as an entry."""
    return is_own(saved) or (isinstance(saved, Mapping) and any(map(is_own, saved.values())))


def recognise(saved: Any) -> str:
    """The kind of a file's content; "" for none of these."""
    if not isinstance(saved, Mapping):
        return ""
    optimizer = saved.get("optimizer", saved)
    if not isinstance(optimizer, Mapping):
        return ""
    if "fp32_from_fp16" in optimizer:
        return "apex"
    if "fp32_from_fp16_params" in optimizer:
        return "megatron"
    if "amp" in saved and "optimizer" in saved:
        return "amp"
    if "last_optimizer_state" in saved:
        return "fairseq"
    if "pytorch-lightning_version" in saved or "optimizer_states" in saved:
        return "lightning"
    return "flashoptim" if _is_flash(optimizer) else ""


def _is_flash(optimizer: Mapping[str, Any]) -> bool:
    groups = optimizer.get("param_groups")
    return isinstance(groups, Sequence) and any(isinstance(g, Mapping) and "master_bytewidth" in g for g in groups)


def apex(saved: Any, path: Path) -> Found:
    """FP16_Optimizer of ``apex.fp16_utils``, by itself or as the entry "optimizer"."""
    state = saved.get("optimizer", saved) if isinstance(saved, Mapping) else saved
    inner = entry(state, "optimizer_state_dict", path)
    masters = entry(state, "fp32_from_fp16", path, Sequence)
    from ...fp16_utils.saved_files import engine_scaler  # a face, which ``import fp16opt`` alone does not load

    scaler = engine_scaler(state["loss_scaler"]) if state.get("loss_scaler") is not None else None
    scale = None if scaler is None else Scale(float(scaler.scale), int(scaler.state_dict().get("growth_tracker", 0)))
    return Found("apex", _model(saved), masters, optimizer=inner, groups=inner.get("param_groups", ()), scale=scale)


def amp(saved: Any, path: Path) -> Found:
    """Scripts of apex.amp: "model" (in FP32 under O2), "optimizer" over masters, "amp"."""
    scalers = entry(saved, "amp", path)
    scaler: Mapping[str, Any] = next(iter(scalers.values()), {})
    scale = Scale(float(scaler["loss_scale"]), int(scaler.get("unskipped", 0))) if "loss_scale" in scaler else None
    return _by_position("amp", entry(saved, "model", path), entry(saved, "optimizer", path), scale)


def megatron(saved: Any, path: Path) -> Found:
    """Megatron-LM's Float16OptimizerWithFloat16Params."""
    state = saved.get("optimizer", saved)
    inner = entry(state, "optimizer", path)
    masters = entry(state, "fp32_from_fp16_params", path, Sequence)
    scale = torch_scale(state.get("grad_scaler"))
    return Found("megatron", _model(saved), masters, optimizer=inner, groups=inner.get("param_groups", ()), scale=scale)


def fairseq(saved: Any, path: Path) -> Found:
    """FairSeq's FP16 optimizers. Masters are not in its files: it makes them anew of the model's weights, as here."""
    state = entry(saved, "last_optimizer_state", path)
    found = _by_position("fairseq", entry(saved, "model", path), state, None)
    if "loss_scale" in state:
        found.scale = Scale(float(state["loss_scale"]))
    groups = state.get("param_groups", ())
    found.flat = len(groups) == 1 and len(groups[0].get("params", ())) == 1 and len(tensors(saved["model"])) > 1
    return found


def lightning(saved: Any, path: Path) -> Found:
    """A Lightning checkpoint of an FP32 run, with one optimizer."""
    optimizers = entry(saved, "optimizer_states", path, Sequence)
    if len(optimizers) != 1:
        raise refuse(path, f"has {len(optimizers)} optimizers", "Load each with its own optimizer's load_state_dict.")
    scale = torch_scale(saved.get("MixedPrecision", saved.get("native_amp_scaling_state")))
    return _by_position("lightning", entry(saved, "state_dict", path), optimizers[0], scale)


def flashoptim(saved: Any, path: Path) -> Found:
    """FlashOptim: 16-bit weights in "model", and what they lack of their masters in the optimizer's state."""
    weights, optimizer = _model(saved), entry(saved, "optimizer", path)
    if not weights:
        raise refuse(path, "lacks 'model', and masters are weights and error bits", "Save both into one file.")
    entries: dict[Any, dict[str, Any]] = {}
    bits: dict[Any, Tensor] = {}
    for i, held in entry(optimizer, "state", path).items():
        packed = [key for key in held if "::" in key]
        if packed:
            raise refuse(
                path, f"parameter {i} has {packed[0]!r}: 8-bit moments", "Save with compress_state_dict=False."
            )
        entries[i] = {key: value for key, value in held.items() if key != "error_bits"}
        if "error_bits" in held:
            bits[i] = held["error_bits"]
    found = _by_position("flashoptim", weights, {**optimizer, "state": entries}, None)
    found.weights = dict(weights)
    order = [i for group in optimizer["param_groups"] for i in group["params"]]
    widths = {i: int(g.get("master_bytewidth") or 0) for g in optimizer["param_groups"] for i in g["params"]}
    named = _in_order(weights, optimizer["param_groups"], order, path)
    for i, name in named.items():
        if i in bits:
            found.weights[name] = with_error_bits(weights[name], bits[i], widths[i])
    return found


def _in_order(
    weights: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]], order: Sequence[Any], path: Path
) -> dict[Any, str]:
    """Names of the parameters that an optimizer's state has by number: its own, or those of the model in order."""
    names = [name for group in groups for name in group.get("param_names", ())]
    if len(names) != len(order):
        names = list(weights)
    if len(names) != len(order):
        raise refuse(
            path,
            f"has {len(weights)} tensors in 'model' and {len(order)} parameters in 'optimizer', without names",
            "Construct the optimizer over model.named_parameters() before saving.",
        )
    return dict(zip(order, names, strict=True))


def with_error_bits(weight: Tensor, bits: Tensor, master_bytes: int) -> Tensor:
    """A FlashOptim master: the weight and a fraction of half its unit in the last place, in 1 or 2 bytes.

    Args:
        weight: float16 or bfloat16.
        bits: int8 or int16; or as saved: 2 bytes as the weight's dtype, 1 byte converted to it.
        master_bytes: of weight and fraction together, 3 or 4.

    Returns:
        float32.
    """
    mantissa, least = _MANTISSA[weight.dtype]
    if bits.dtype not in (torch.int8, torch.int16):
        bits = bits.to(torch.int8) if master_bytes == 3 else bits.view(torch.int16)
    most = 127 if bits.dtype == torch.int8 else 32767
    wide = weight.float()
    exponent = torch.frexp(wide)[1] - 1
    exponent = torch.where(wide == 0, torch.full_like(exponent, least), exponent.clamp(min=least))
    return wide + torch.ldexp(bits.float() / most, exponent - mantissa - 1)


def trainer_folder(path: Path) -> Found:
    """A checkpoint folder of Hugging Face's Trainer, of an FP32 run: optimizer.pt, weights, scaler.pt."""
    if (path / "model.safetensors").is_file():
        weights = _safetensors(path / "model.safetensors")
    elif (path / "pytorch_model.bin").is_file():
        weights = tensors(read(path / "pytorch_model.bin"))
    else:
        raise refuse(path, "has neither model.safetensors nor pytorch_model.bin", "Save the model in one piece.")
    scale = torch_scale(read(path / "scaler.pt")) if (path / "scaler.pt").is_file() else None
    return _by_position("trainer", weights, read(path / "optimizer.pt"), scale)


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError:
        raise refuse(path, "is read by the package safetensors", "Install it: pip install safetensors") from None
    found: dict[str, Tensor] = load_file(str(path))
    return found


def _by_position(kind: str, model: Any, optimizer: Any, scale: Scale | None) -> Found:
    groups = optimizer.get("param_groups", ()) if isinstance(optimizer, Mapping) else ()
    return Found(kind, tensors(model), optimizer=optimizer, groups=groups, scale=scale)


def _model(saved: Any) -> dict[str, Tensor]:
    """The model's state_dict beside the optimizer's, under one of its usual names."""
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
            return tensors(saved[key])
    return {}
