"""What must be the same on every rank: as lines to compare before the first message, and as values to compare later."""

from __future__ import annotations

from dataclasses import asdict

from torch import Tensor

from ..engine.dtensors import is_sharded, local
from ..engine.parts import Wrapper
from ..engine.ranks import Digest, Facts, ParamFact
from .settings import setting_lines, shown


def facts(wrapper: Wrapper) -> Facts:
    """What must be the same on several ranks, in an order in which the first difference tells most."""
    groups = wrapper.optimizer.param_groups
    lines = [f"the wrapped optimizer {type(wrapper.optimizer).__name__}", f"{len(groups)} param_groups"]
    lines += setting_lines(groups, wrapper.step_state.ranks.kept_settings)
    chosen = asdict(wrapper.config)
    del chosen["on_model_write"]  # each rank may look at its own
    lines += [f"{option}={value!r}" for option, value in chosen.items()]
    lines += [f"a scaler with {key}={shown(value)}" for key, value in wrapper.scaler.state_dict().items()]
    params = []
    for number, name, param in _everywhere(wrapper) if is_zero(wrapper) else _here(wrapper):
        layout = f" {getattr(param, 'placements', '')}".rstrip()
        line = f"{name} as {param.dtype} {list(param.shape)}{layout}, requires_grad={param.requires_grad}"
        params.append(ParamFact(number, name, param, line))
    return Facts(lines, params)


def digest(wrapper: Wrapper) -> Digest:
    """What ranks hold alike: masters that are whole, pieces that have copies, the scaler and the settings."""
    scaler = repr({key: shown(value) for key, value in wrapper.scaler.state_dict().items()})
    if is_zero(wrapper):  # the message of every step compares settings
        labelled = _everywhere(wrapper)
        return Digest([name for _, name, _ in labelled], [param for *_, param in labelled], scaler, [])
    settings = setting_lines(wrapper.optimizer.param_groups)
    names: list[str] = []
    values: list[Tensor] = []
    copies: list[tuple[str, str, Tensor]] = []
    for pair in wrapper.params.all:
        operand = wrapper.masters.operand(pair)
        is_split = operand is not pair.master  # then weight and remainder are the master
        parts = [pair.model, operand] if is_split else [operand]
        name = f"the master of {pair.name!r}"
        if not is_sharded(pair.model):
            names += [name] * len(parts)
            values += parts
            continue
        piece = wrapper.step_state.ranks.piece_with_copies(pair.model)
        if piece is not None:
            copies += [(piece, name, local(part)) for part in parts]
    return Digest(names, values, scaler, settings, copies)


def is_zero(wrapper: Wrapper) -> bool:
    """Whether the wrapped optimizer is a ZeroRedundancyOptimizer, which holds another one."""
    return wrapper.inner is not wrapper.optimizer


def _here(wrapper: Wrapper) -> list[tuple[int, str, Tensor]]:
    """(group, name, parameter) of each."""
    return [(pair.group, repr(pair.name), pair.model) for pair in wrapper.params.all]


def _everywhere(wrapper: Wrapper) -> list[tuple[int, str, Tensor]]:
    """As :func:`_here`, of the parameters on all ranks, by names that are the same on all of them."""
    table = wrapper.params
    names: dict[int, str] = {}
    if table.names_elsewhere is not None:  # else ranks have numbered theirs, each for itself
        names = {id(pair.model): repr(pair.name) for pair in table.all}
        names |= {id(p): repr(n) for p, n in zip(table.elsewhere, table.names_elsewhere, strict=True)}
    numbered = [(n, param) for n, group in enumerate(wrapper.optimizer.param_groups) for param in group["params"]]
    return [(n, names.get(id(param), f"parameter {i}"), param) for i, (n, param) in enumerate(numbered)]
