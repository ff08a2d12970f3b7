"""Optimizer state in codes of 8 bits: ``optimizer_state="8bit"``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...kernels import state8
from ...kernels.pieces import WHOLE, Piece
from ..dtensors import as_piece_of, cuts_of, is_sharded, local, piece_of, pieces
from ..fused_registry import FUNCTORS, CannotServe, FusedStepSpec, check_fp32_state, fused_spec_for, new_counter
from ..schema import HOW_SAVED, check_form, check_outside, is_ours

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


def cut_within_blocks(model: Tensor) -> bool:
    """Whether it is only the mesh that has a parameter's state stay FP32."""
    whole = torch.empty(model.shape, dtype=torch.float32, device="meta")
    return is_sharded(model) and coded_piece(model) is None and coded_piece(whole) is not None


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


def _moments(_: dict[str, Any]) -> tuple[str, ...]:
    return ("step", *_MOMENTS)


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


def _momentum(_: dict[str, Any]) -> tuple[str, ...]:
    return _MOMENTUM


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
            parts: dict[str, Any] = {"state_names": _momentum, "make_state": _make_momentum}
        else:
            parts = {"state_names": _moments, "make_state": _make_moments}
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
    inner = state_dict.get("optimizer", state_dict) if isinstance(state_dict, Mapping) else None
    state = inner.get("state") if isinstance(inner, Mapping) else None
    if not isinstance(state, Mapping):
        return state_dict
    coded = [key for key, entry in state.items() if isinstance(entry, Mapping) and _OWN_NAMES & entry.keys()]
    if not coded:
        return state_dict
    for key in coded:
        _check_saved(state[key], _label(key, names))
    whole = {**inner, "state": {key: whole_entry(entry) for key, entry in state.items()}}  # type: ignore[dict-item]
    return whole if inner is state_dict else {**state_dict, "optimizer": whole}


def optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What a plain optimizer of the wrapped class loads, out of a state_dict of `MixedPrecisionOptimizer`.

    For leaving: the model's weights in FP32 are ``opt.fp32_state_dict(model)``, and this is the optimizer's state over
    them. Does not sync.

    Args:
        state_dict: what ``state_dict()`` of a `MixedPrecisionOptimizer` returned, or a plain state_dict of torch.optim.

    Returns:
        ``{'state': ..., 'param_groups': ...}``, state in FP32 where the parameter was 16-bit; of a class with a
        state_dict of another form, that form. Not a copy: it is the entry of ``state_dict``, and a plain state_dict
        comes back as it is.

    Raises:
        TypeError: ``state_dict`` or a part of it is of another type.
        ValueError: it is neither of the two; names what is lacking.

    Example:
        >>> import fp16opt
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5, momentum=0.9))
        >>> opt.backward(weight.float().sum())
        >>> opt.step()
        >>> plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        >>> plain.load_state_dict(fp16opt.optimizer_state(opt.state_dict()))
        >>> plain.state_dict()["state"][0]["momentum_buffer"], plain.param_groups[0]["lr"]
        (tensor([1., 1.]), 0.5)
    """
    state_dict = expanded(state_dict, ())
    check_outside(state_dict)
    found: Any = state_dict["optimizer"] if is_ours(state_dict) else state_dict
    if not isinstance(found, Mapping):
        raise TypeError(f"optimizer must be a dict, got {type(found).__name__}. {HOW_SAVED}")
    if found is state_dict or not found or "state" in found or "param_groups" in found:
        check_form(found)
    return cast("dict[str, Any]", found)


def _check_saved(entry: Mapping[str, Any], label: str) -> None:
    """Raise unless codes of a checkpoint can be decoded."""
    form, block = entry.get(_FORMAT), entry.get(_BLOCK)
    known = {"ratio8": _MOMENTS, "block8": _MOMENTUM}
    if not isinstance(form, str) or form not in known:
        raise ValueError(
            f"{label}: {_FORMAT} must be 'ratio8' or 'block8', got {form!r}. Save it with state_dict(), which holds "
            "FP32, with the fp16opt release that wrote it."
        )
    if not isinstance(block, int) or isinstance(block, bool) or not 0 < block <= 65536 or block & (block - 1):
        raise ValueError(f"{label}: {_BLOCK} must be a power of two up to 65536, got {block!r}. {_HOW_SAVED}")
    whole = [name for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in entry]
    if whole:
        raise ValueError(f"{label}: {whole[0]} is there beside its codes. {_HOW_SAVED}")
    for name in known[form]:
        if not isinstance(entry.get(name), Tensor):
            raise TypeError(f"{label}: {name} must be a tensor, got {type(entry.get(name)).__name__}. {_HOW_SAVED}")
    codes: list[Tensor] = [entry[name] for name in known[form][:-1]]
    scales: Tensor = entry[known[form][-1]]
    for name, code, dtype in zip(known[form], codes, (torch.int8, torch.uint8), strict=False):
        if code.dtype != dtype or code.shape != codes[0].shape or code.layout != torch.strided or code.is_meta:
            raise ValueError(
                f"{label}: {name} must be {str(dtype)[6:]} of shape {list(codes[0].shape)}, got {_described(code)}. "
                f"{_HOW_SAVED}"
            )
    if bool((codes[0] == -128).any()):
        raise ValueError(f"{label}: {known[form][0]} holds -128, which is no code. {_HOW_SAVED}")
    unit, numel, name = entry.get(_UNIT, 0), codes[0].numel(), known[form][-1]
    if not isinstance(unit, int) or isinstance(unit, bool) or unit < 0 or (unit and numel % unit):
        raise ValueError(f"{label}: {_UNIT} must be 0 or divide the {numel} elements, got {unit!r}. {_HOW_SAVED}")
    wanted = Piece(0, unit, unit).block_count(numel, block)
    has_form = (scales.dtype, tuple(scales.shape), scales.layout) == (torch.float32, (wanted,), torch.strided)
    if not has_form or scales.is_meta:
        raise ValueError(
            f"{label}: {name} must be float32 of shape [{wanted}], one for every {block} elements of a unit, got "
            f"{_described(scales)}. {_HOW_SAVED}"
        )
    if not bool(((scales >= 0) & (scales <= _LARGEST[form])).all()):
        raise ValueError(f"{label}: {name} must be from 0 to {_LARGEST[form]:g}. {_HOW_SAVED}")
    limit = entry.get(_LIMIT)
    if form == "ratio8" and not (isinstance(limit, float) and 2.0**-20 <= limit <= 2.0**20):
        raise ValueError(f"{label}: {_LIMIT} must be a number from 2**-20 to 2**20, got {limit!r}. {_HOW_SAVED}")


def _described(tensor: Tensor) -> str:
    """A refused tensor, in words."""
    odd = "meta " if tensor.is_meta else "" if tensor.layout == torch.strided else f"{str(tensor.layout)[6:]} "
    return f"{odd}{str(tensor.dtype)[6:]} of shape {list(tensor.shape)}"


def check_moments(state_dict: Any, names: Sequence[str]) -> None:
    """Raise ``ValueError`` for a moment that is to be kept in 8 bits and has no code. Syncs."""
    inner = state_dict.get("optimizer", state_dict) if isinstance(state_dict, Mapping) else None
    state = inner.get("state") if isinstance(inner, Mapping) else None
    for key, entry in state.items() if isinstance(state, Mapping) else ():
        moments = (
            {k: entry.get(k) for k in ("exp_avg_sq", "exp_avg", "momentum_buffer")}
            if isinstance(entry, Mapping)
            else {}
        )
        for name, value in moments.items():
            if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
                continue  # the plan of the load refuses it
            low = 0.0 if name == "exp_avg_sq" else -torch.inf
            if not bool(((value >= low) & value.isfinite()).all()):
                raise ValueError(
                    f'{_label(key, names)}: {name} holds numbers that optimizer_state="8bit" has no code for: nan or '
                    "inf, or negative ones where there are only squares. Use "
                    'optimizer_state="fp32", or repair it.'
                )


def _label(key: object, names: Sequence[str]) -> str:
    return names[key] if isinstance(key, int) and 0 <= key < len(names) else f"state {key!r}"
