"""Optimizer state in codes of 8 bits: ``optimizer_state="8bit"``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import state8
from ...kernels.pieces import WHOLE, Piece
from ..dtensors import as_piece_of, cuts_of, local, piece_of, pieces
from ..fused_registry import FUNCTORS, CannotServe, FusedStepSpec, check_fp32_state, fused_spec_for, new_counter

LEAST, LEAST_ROW = 4096, 64
"""Elements from which on a parameter's state is kept in 8 bits: in all, and in one index of its first dimension."""

_FORMAT, _BLOCK, _LIMIT, _UNIT = "codes_format", "codes_block", "ratio_limit", "codes_unit"
_MOMENTS = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_sq_scales")
_MOMENTUM = ("momentum_codes", "momentum_scales")
_OWN_NAMES = frozenset({*_MOMENTS, *_MOMENTUM, _FORMAT, _BLOCK, _LIMIT, _UNIT})
_LARGEST = {"ratio8": 2.0**62, "block8": 2.0**126}  # scales, as csrc/functors/ratio8.h ends them
_HOW_SAVED = "Pass what state_dict(compact=True) of this class returned."


# -- which parameters --------------------------------------------------------------------------------------------------


def coded_piece(model: Tensor) -> Piece | None:
    """How blocks with one scale lie in this rank's piece of a parameter; None where its state stays FP32.

    Blocks begin anew at each index of the outermost dimension. So shards along it hold whole blocks, and codes don't
    depend on the mesh. Shards along another dimension must begin where blocks do. Which it is depends on the shape of
    the whole and on the mesh alone: every rank finds the same.

    Example:
        >>> coded_piece(torch.ones(64, 256)), coded_piece(torch.ones(64, 100)), coded_piece(torch.ones(8192))
        (Piece(offset=0, unit=0, stride=0), Piece(offset=0, unit=100, stride=100), None)
    """
    numel = model.numel()
    if model.dim() < 2 or numel < LEAST:
        return None
    steps = [step if size > 1 else 0 for step, size in zip(model.stride(), model.shape, strict=True)]
    row = numel // model.shape[0 if model.is_contiguous() else steps.index(max(steps))]
    behind = {dim: count for dim, count in cuts_of(model).items() if dim}
    if row < LEAST_ROW or len(behind) > 1 or not all(_begins_blocks(model, *cut) for cut in behind.items()):
        return None
    piece = piece_of(model)
    if piece is None:
        return None
    if piece.unit:
        return piece
    return Piece(piece.offset, row, row) if row % state8.BLOCK and local(model).numel() else Piece(piece.offset)


def _begins_blocks(model: Tensor, dim: int, count: int) -> bool:
    """Whether shards along a dimension behind the first, of which there are ``count``, begin where blocks do."""
    size, inner = model.shape[dim], math.prod(model.shape[dim + 1 :])
    part = -(-size // count)
    if dim == 1:
        return part * inner % state8.BLOCK == 0
    return size % count == 0 and part * inner % state8.BLOCK == 0  # several runs in a row: each ends where a block does


# -- Adam --------------------------------------------------------------------------------------------------------------


def _limit(group: Mapping[str, Any]) -> float:
    beta1, beta2 = group["betas"]
    return state8.ratio_limit(float(beta1), float(beta2))


def _room_for_codes(model: Tensor, names: Sequence[str], device: torch.device | None = None) -> dict[str, Any]:
    """Codes of zeros, laid out as ``model``, their scales, and the length of units, under these names."""
    device = device or local(model).device
    piece = coded_piece(model) or WHOLE
    dtypes = (torch.int8, torch.uint8)[: len(names) - 1]
    here = local(model.detach())
    codes = [as_piece_of(torch.zeros_like(here, dtype=dtype, device=device), model) for dtype in dtypes]
    scales = torch.zeros(piece.block_count(here.numel()), dtype=torch.float32, device=device)
    return {**dict(zip(names, (*codes, scales), strict=True)), _UNIT: piece.unit}


def _make_moments(state: dict[str, Any], group: dict[str, Any], model: Tensor) -> None:
    state["step"] = new_counter(group, model)
    state.update(_room_for_codes(model, _MOMENTS))
    state[_LIMIT] = _limit(group)


def _unit_of(entry: Mapping[str, Any]) -> Piece:
    """How blocks lie in the codes of a parameter's state."""
    unit = entry.get(_UNIT, 0)
    return Piece(0, unit, unit)


def _encode_moments(state: dict[str, Any], exp_avg: Tensor, exp_avg_sq: Tensor, limit: float, model: Tensor) -> None:
    """FP32 moments out of ``state``, codes in."""
    made = _room_for_codes(model, _MOMENTS, local(exp_avg).device)
    first, second, scales = pieces([made[name] for name in _MOMENTS])
    state8.encode_moments(local(exp_avg), local(exp_avg_sq), first, second, scales, limit, _unit_of(made))
    state.update(made)
    state[_LIMIT] = limit


def _decoded_moments(entry: Mapping[str, Any], block: int = state8.BLOCK) -> tuple[Tensor, Tensor]:
    """FP32 moments, laid out over ranks as the codes are."""
    codes = [entry[name] for name in _MOMENTS]
    first, second, scales = pieces(codes)
    made = state8.decode_moments(first, second, scales, entry[_LIMIT], block=block, piece=_unit_of(entry))
    return as_piece_of(made[0], codes[0]), as_piece_of(made[1], codes[0])


def _convert_moments(state: dict[str, Any], group: dict[str, Any], model: Tensor) -> None:
    limit = _limit(group)
    if isinstance(state.get("exp_avg"), Tensor) and isinstance(state.get("exp_avg_sq"), Tensor):
        _encode_moments(state, state.pop("exp_avg").float(), state.pop("exp_avg_sq").float(), limit, model)
    elif _LIMIT in state and state[_LIMIT] != limit:  # the betas were changed: once more, rounded to nearest
        _encode_moments(state, *_decoded_moments(state), limit, model)


# -- SGD ---------------------------------------------------------------------------------------------------------------


def _make_momentum(state: dict[str, Any], group: dict[str, Any], model: Tensor) -> None:
    state.update(_room_for_codes(model, _MOMENTUM))


def _convert_momentum(state: dict[str, Any], group: dict[str, Any], model: Tensor) -> None:
    buffer = state.get("momentum_buffer")
    if isinstance(buffer, Tensor):
        del state["momentum_buffer"]
        state.update(_room_for_codes(model, _MOMENTUM, local(buffer).device))
        codes, scales = pieces([state[name] for name in _MOMENTUM])
        state8.encode_momentum(local(buffer).float(), codes, scales, _unit_of(state))


# -- both --------------------------------------------------------------------------------------------------------------


def _check_codes(name: str, tensor: object, master: Tensor) -> None:
    """Raise :class:`CannotServe` unless this is what a kernel takes."""
    if not isinstance(tensor, Tensor):
        raise CannotServe(f"the state of a parameter has no tensor {name!r}")
    if name == "step":
        return check_fp32_state(name, tensor, master)
    blocks = (coded_piece(master) or WHOLE).block_count(local(master).numel())
    shape = (blocks,) if name.endswith("scales") else tuple(master.shape)
    if tuple(tensor.shape) != shape or tensor.device != master.device or tensor.requires_grad:
        raise CannotServe(f"state {name!r} is of shape {tuple(tensor.shape)} on {tensor.device}")
    return None


def spec_of(asked: str, cls: type) -> FusedStepSpec | None:
    """How optimizers of a class are stepped in one pass, and how their state is kept; None where no kernel steps them.

    Args:
        asked: ``optimizer_state`` of the wrapper.

    Raises:
        ValueError: it has no form of 8 bits.
    """
    spec = fused_spec_for(cls)
    if asked == "fp32":
        return spec
    if spec is None or not any(spec is FUNCTORS[name] for name in ("sgd", "adam", "adamw")):
        raise ValueError(
            f'optimizer_state="8bit" needs the one-pass step, which can\'t be had: {cls.__name__} is not exactly SGD, '
            'Adam or AdamW of torch.optim. Use optimizer_state="fp32".'
        )
    return EightBitSpec(**{each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)})


class EightBitSpec(FusedStepSpec):
    """Of SGD, Adam or AdamW with codes of 8 bits, and one FP32 scale for each 128 of them.

    Adam and AdamW: ``exp_avg_codes`` (int8), ``exp_avg_sq_codes`` (uint8), ``exp_avg_sq_scales`` and the number
    ``ratio_limit``. SGD: ``momentum_codes`` (int8) and ``momentum_scales``. Where :func:`coded_piece` says so state is
    FP32, and it is the class's own spec.
    """

    needs_number = True

    @functools.cached_property
    def _is_sgd(self) -> bool:
        return "momentum" in self.numbers

    @functools.cached_property
    def _coded(self) -> FusedStepSpec:
        if self._is_sgd:
            parts: dict[str, Any] = {"state_names": lambda _: _MOMENTUM, "make_state": _make_momentum}
        else:
            parts = {"state_names": lambda _: ("step", *_MOMENTS), "make_state": _make_moments}
        return dataclasses.replace(self, step=state8.named_step, check_state=_check_codes, piece=coded_piece, **parts)

    def spec_for(self, settings: dict[str, Any], model: Tensor) -> FusedStepSpec:
        """The coded step where :func:`coded_piece` has one; the class's own FP32 step elsewhere, and for plain SGD."""
        if (self._is_sgd and not settings["momentum"]) or coded_piece(model) is None:
            return self
        return self._coded

    def deciding(self, settings: dict[str, Any]) -> tuple[Any, ...]:
        """Names of state tensors; for Adam also the limit of its codes, which follows from the betas."""
        names = self.state_names(settings)
        return names if self._is_sgd else (*names, _limit(settings))

    def group_obstacle(self, group: dict[str, Any]) -> str:
        """Also AMSGrad's: its maximum of v has no code."""
        amsgrad = "amsgrad=True, whose largest v so far has no 8-bit form" if group.get("amsgrad") else ""
        return amsgrad or super().group_obstacle(group)

    def convert(self, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
        """Encode FP32 state, rounded to nearest; encode anew what was encoded with other betas."""
        if self.spec_for(settings, model) is self._coded:
            (_convert_momentum if self._is_sgd else _convert_moments)(state, settings, model)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def whole_entry(entry: Any) -> Any:
    """A parameter's state with FP32 moments under torch's names in place of codes; others as they are. No host sync."""
    if not isinstance(entry, Mapping) or not _OWN_NAMES & entry.keys():
        return entry
    kept = {key: value for key, value in entry.items() if key not in _OWN_NAMES}
    block = entry.get(_BLOCK, state8.BLOCK)
    if "momentum_codes" in entry:
        codes = [entry[name] for name in _MOMENTUM]
        shares, scales = pieces(codes)
        made = state8.decode_momentum(shares, scales, block=block, piece=_unit_of(entry))
        kept["momentum_buffer"] = as_piece_of(made, codes[0])
    else:
        kept["exp_avg"], kept["exp_avg_sq"] = _decoded_moments(entry, block)
    return kept


def compact_entry(entry: Any) -> Any:
    """A parameter's state with the names of format and block size, which decoding its codes needs."""
    if not isinstance(entry, Mapping) or not _OWN_NAMES & entry.keys():
        return entry
    return {**entry, _FORMAT: "block8" if "momentum_codes" in entry else "ratio8", _BLOCK: state8.BLOCK}


def expanded(state_dict: Any, names: Sequence[str]) -> Any:
    """A checkpoint with FP32 moments where it has codes: of any block size and limit.

    Args:
        state_dict: anything that may be loaded; what has no codes is returned as it is.
        names: of the parameters, for messages.

    Raises:
        TypeError, ValueError: codes are damaged. Nothing is changed.

    Syncs where there are codes.
    """
    state = _state_in(state_dict)
    coded = [key for key, entry in state.items() if isinstance(entry, Mapping) and _OWN_NAMES & entry.keys()]
    if not coded:
        return state_dict
    for key in coded:
        _check_saved(state[key], _label(key, names))
    whole = {key: whole_entry(entry) for key, entry in state.items()}
    if "optimizer" not in state_dict:
        return {**state_dict, "state": whole}
    return {**state_dict, "optimizer": {**state_dict["optimizer"], "state": whole}}


def _state_in(state_dict: Any) -> Mapping[Any, Any]:
    """The state in a checkpoint, ours or the wrapped optimizer's own; empty where there is none."""
    inner = state_dict.get("optimizer", state_dict) if isinstance(state_dict, Mapping) else None
    state = inner.get("state") if isinstance(inner, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def _check_saved(entry: Any, label: str) -> None:
    """Raise ``ValueError`` unless codes of a checkpoint can be decoded."""

    def require(fits: bool, wanted: str, came: object) -> None:
        if not fits:
            raise ValueError(f"{label}: {wanted}, got {came}. {_HOW_SAVED}")

    form, block, unit, limit = [entry.get(key) for key in (_FORMAT, _BLOCK, _UNIT, _LIMIT)]
    names = _MOMENTS if form == "ratio8" else _MOMENTUM
    require(form in ("ratio8", "block8"), f"{_FORMAT} must be 'ratio8' or 'block8'", repr(form))
    is_power = type(block) is int and 0 < block <= 65536 and not block & (block - 1)
    require(is_power, f"{_BLOCK} must be a power of two up to 65536", repr(block))
    shape = tuple(getattr(entry.get(names[0]), "shape", ()))
    numel, unit = math.prod(shape), 0 if unit is None else unit
    is_part = type(unit) is int and unit >= 0 and not (unit and numel % unit)
    require(is_part, f"{_UNIT} must be 0 or divide the {numel} elements", repr(unit))
    kinds = [(dtype, shape) for dtype in (torch.int8, torch.uint8)[: len(names) - 1]]
    kinds.append((torch.float32, (Piece(0, unit, unit).block_count(numel, block),)))
    for name, (dtype, wanted) in zip(names, kinds, strict=True):
        came: Any = entry.get(name)
        is_dense = isinstance(came, Tensor) and came.layout is torch.strided and not came.is_meta
        fits = is_dense and (came.dtype, tuple(came.shape)) == (dtype, wanted)
        require(fits, f"{name} must be a dense tensor, {str(dtype)[6:]} of shape {list(wanted)}", _described(came))
    codes, scales, most = entry[names[0]], entry[names[-1]], _LARGEST[str(form)]
    require(not bool((codes == -128).any()), f"{names[0]} must hold codes", "-128, which is none")
    in_range = bool(((scales >= 0) & (scales <= most)).all())
    require(in_range, f"{names[-1]} must be from 0 to {most:g}", "others")
    is_limit = form == "block8" or (isinstance(limit, float) and 2.0**-20 <= limit <= 2.0**20)
    require(is_limit, f"{_LIMIT} must be a number from 2**-20 to 2**20", repr(limit))


def _described(value: object) -> str:
    """What was refused, in words."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype)[6:]} of shape {list(value.shape)} on {value.device}, {str(value.layout)[6:]}"


def check_moments(state_dict: Any, names: Sequence[str]) -> None:
    """Raise ``ValueError`` for a moment that is to be kept in 8 bits and has no code. Syncs."""
    for key, entry in _state_in(state_dict).items():
        for name in ("exp_avg_sq", "exp_avg", "momentum_buffer") if isinstance(entry, Mapping) else ():
            value = entry.get(name)
            if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
                continue  # the check of the load refuses it
            low = 0.0 if name == "exp_avg_sq" else -torch.inf
            if not bool(((value >= low) & value.isfinite()).all()):
                raise ValueError(
                    f'{_label(key, names)}: {name} holds numbers that optimizer_state="8bit" has no code for: nan or '
                    "inf, or negative ones where there are only squares. Use "
                    'optimizer_state="fp32", or repair it.'
                )


def _label(key: object, names: Sequence[str]) -> str:
    return names[key] if isinstance(key, int) and 0 <= key < len(names) else f"state {key!r}"
