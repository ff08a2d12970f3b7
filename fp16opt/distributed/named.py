"""The optimizer's state by parameter name, in a form that torch.distributed.checkpoint saves, loads and reshards."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine import schema
from ..engine.arguments import clean
from ..engine.dtensors import as_piece_of, is_sharded, local
from ..engine.params import HALF_DTYPES, not_in_model
from ..engine.parts import Wrapper, inside
from ..engine.wrapped_step import HOOKS
from .exchange import gather, together
from .facts import is_zero
from .modules import parameter_names, unwrapped, wrapper_of
from .partial import IncompatibleKeys, completed, merged
from .shards import StageRanks
from .waiting import meet
from .zero import owners, sync

KEYS = ("masters", "state", "scaler", "param_groups")
_NO_SETTINGS = ("params", "fresh")
_HOW = "Pass what fp16opt.distributed.state_dict returned for the same model and optimizer."


def names_of(model: nn.Module, opt: Optimizer) -> dict[int, str]:
    """From ``id(model parameter)`` to its name, for all parameters of the optimizer, on this rank and elsewhere.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the optimizer has a parameter that the model lacks.
    """
    table = wrapper_of(opt).params
    names = parameter_names(model)
    everyone = [*table.models, *table.elsewhere], [*table.names, *table.called_elsewhere]
    for param, called in zip(*everyone, strict=True):
        if id(param) not in names:
            there = {clean(name): one for name, one in unwrapped(model).named_parameters()}
            raise not_in_model("model", called, param, there.get(called))
    return names


def _model_groups(wrapper: Wrapper) -> list[list[Tensor]]:
    """The model's parameters by group, those of other ranks included."""
    if is_zero(wrapper):
        return [list(group["params"]) for group in wrapper.optimizer.param_groups]
    groups: list[list[Tensor]] = [[] for _ in wrapper.optimizer.param_groups]
    for pair in wrapper.params.all:
        groups[pair.group].append(pair.model)
    return groups


def state_dict(model: nn.Module, opt: Optimizer) -> dict[str, Any]:
    """Masters, optimizer state, scaler, param_groups and counts by name; for ``torch.distributed.checkpoint``.

    Tensors are references to the live ones: DTensors where the masters are, and under ZeRO this rank's part; split
    masters are made for this call. Before the first step the state is a template of zeros, so that ``dcp.load`` knows
    what to fill in; param_groups say so (``fresh``), and where it is still all zeros :func:`load_state_dict` leaves
    the state to the first step.

    Args:
        model: the module that ``opt`` trains, or DDP around it. Names are without ``module.``.
        opt: the wrapper. It is not changed.

    Returns:
        ``{'masters': {name: FP32}, 'state': {name: {}}, 'scaler': {}, 'param_groups': [{'params': [name], ...}],
        'counts': {'steps': int, 'skipped_steps': int}}``. Masters that lie on the weights' memory are among them.

    Raises:
        TypeError, ValueError: see :func:`names_of`.

    Syncs: yes. Sends nothing.
    """
    names, wrapper = names_of(model, opt), wrapper_of(opt)
    wrapper.settle("distributed.state_dict")
    wrapper.model_writes.sync()
    inner = wrapper.inner
    fresh = bool(len(wrapper.params)) and not inner.state
    masters, state = {}, {}
    for pair in wrapper.params.all:
        name, master = names[id(pair.model)], pair.master
        masters[name] = wrapper.masters.to_save(pair)
        if fresh and master.requires_grad:
            state[name] = _first_state(inner, inner.param_groups[pair.group], master, wrapper.masters.home.saved_on)
        elif master in inner.state:
            state[name] = dict(wrapper.state_to_save(inner.state[master]))
    groups = []
    for group, members in zip(wrapper.optimizer.param_groups, _model_groups(wrapper), strict=True):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**settings, "params": [names[id(param)] for param in members], "fresh": fresh})
    scaler = wrapper.scaler.state_dict()
    counts = {"steps": wrapper.steps_counted(), "skipped_steps": wrapper.outcome.skipped_steps}
    return {"masters": masters, "state": state, "scaler": scaler, "param_groups": groups, "counts": counts}


def of_all_stages(opt: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict whose ``param_groups`` are those of all stages of a pipeline. Collective on these.

    A stage that has no state yet, while others have some, has none in the file either.
    """
    ranks = wrapper_of(opt).step_state.ranks
    if not isinstance(ranks, StageRanks):
        return state_dict
    groups = state_dict["param_groups"]
    everyone = gather([(group["params"], group["fresh"]) for group in groups], ranks.group)
    merged = []
    for group, told in zip(groups, zip(*everyone, strict=True), strict=True):
        names = list(dict.fromkeys(itertools.chain(*(params for params, _ in told))))
        merged.append({**group, "params": names, "fresh": all(fresh for _, fresh in told)})
    has_none = any(before["fresh"] and not now["fresh"] for before, now in zip(groups, merged, strict=True))
    return {**state_dict, "param_groups": merged, "state": {} if has_none else state_dict["state"]}


def room_like(like: Tensor, dtype: torch.dtype, where: torch.device | None) -> Tensor:
    """Memory for what a checkpoint holds, laid out as a tensor is, over ranks too: on a device, or where that is."""
    piece = local(like.detach())
    return as_piece_of(torch.empty_like(piece, dtype=dtype, device=where or piece.device), like)


def _first_state(
    optimizer: Optimizer, group: dict[str, Any], master: Tensor, where: torch.device | None
) -> dict[str, Any]:
    """The state that the first step gives ``master``, as zeros: a throwaway copy of the optimizer steps zeros."""
    zeros = room_like(master, master.dtype, where).zero_().requires_grad_()
    zeros.grad = torch.zeros_like(zeros)
    lr = group.get("lr")
    throwaway = copy.copy(optimizer)
    throwaway.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k != "step"}  # a scheduler may have patched it
    throwaway.__dict__.update({name: OrderedDict() for name in HOOKS})
    throwaway.param_groups = [
        {**group, "params": [zeros], "lr": torch.zeros_like(lr) if isinstance(lr, Tensor) else 0.0}
    ]
    throwaway.state = defaultdict(dict)
    with torch.no_grad():
        try:
            type(optimizer).step(throwaway)
        except TypeError:  # a closure is required: such state has no form before the first step
            return {}
    return {
        key: torch.zeros_like(value) if isinstance(value, Tensor) else value
        for key, value in throwaway.state[zeros].items()
    }


def load_state_dict(
    model: nn.Module, opt: Optimizer, state_dict: Mapping[str, Any], *, strict: bool = True
) -> IncompatibleKeys:
    """Load what :func:`state_dict` gave, here or on another number of ranks, and write the weights to the model.

    Everything is validated first. Tensors are copied. DTensors and plain tensors go into each other; every rank must
    call this where one of the two is sharded, and under ZeRO.

    Args:
        model: the module that ``opt`` trains, or DDP around it.
        opt: the wrapper.
        state_dict: under ZeRO this rank's part is enough.
        strict: False: take what is there by name, whatever parameters and groups it was saved with. See :func:`load`.

    Returns:
        What was left out, alike on ranks that share masters; nothing with ``strict=True``.

    Raises:
        TypeError, ValueError: names what does not fit; the optimizer is as it was.

    Syncs: yes.
    """
    wrapper = wrapper_of(opt)
    wrapper.settle("distributed.load_state_dict")
    ranks = wrapper.step_state.ranks

    def everywhere(check: Callable[[], Any]) -> Any:
        """Where ranks are about to send each other parts, what one of them refuses all do."""
        return check() if ranks.alone else together("load_state_dict", check, ranks.group)

    if not ranks.alone:
        meet("load_state_dict()", ranks.group)
    names: dict[int, str] = everywhere(lambda: names_of(model, opt))
    everywhere(lambda: _check_outside(state_dict))
    is_filled = _is_filled(state_dict)
    if is_filled if ranks.alone else any(gather(is_filled, ranks.group)):
        groups = [{**group, "fresh": False} for group in state_dict["param_groups"]]
        state_dict = {**state_dict, "param_groups": groups}
    left_out = IncompatibleKeys([], [])
    if not strict:
        members = [[names[id(param)] for param in group] for group in _model_groups(wrapper)]
        if not ranks.alone:
            everyone = gather(members, ranks.group)
            members = [list(dict.fromkeys(itertools.chain(*parts))) for parts in zip(*everyone, strict=True)]
        state_dict, left_out = everywhere(lambda: _completed(model, opt, members, names, state_dict))
    everywhere(lambda: _check(wrapper, names, state_dict))
    saved = state_dict["masters"]
    values = [laid_out(saved[names[id(pair.model)]], pair.master) for pair in wrapper.params.all]
    load_checked: Any = inside(opt).load_checked  # type: ignore[attr-defined]
    load_checked(_positional(state_dict, wrapper, names, values), everywhere)
    with torch.no_grad():
        for pair, value in zip(wrapper.params.all, values, strict=True):
            if not pair.is_apart:
                pair.model.copy_(value)
    if is_zero(wrapper):
        sync(wrapper.optimizer, wrapper.inner)
        wrapper.model_writes.record()
    return left_out if strict or ranks.alone else merged(gather(left_out, ranks.group))


def _completed(
    model: nn.Module, opt: Optimizer, members: list[list[str]], names: dict[int, str], sd: Any
) -> tuple[dict[str, Any], IncompatibleKeys]:
    return completed(sd, state_dict(model, opt), members, wrapper_of(opt), names)


def _check(wrapper: Wrapper, names: dict[int, str], sd: Any) -> None:
    """Raise for what can be seen without sending anything."""
    _check_groups(sd["param_groups"], wrapper, names)
    for pair in wrapper.params.all:
        _check_value(sd["masters"], names[id(pair.model)], pair.master)


def _check_outside(sd: object) -> None:
    if not isinstance(sd, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(sd).__name__}. {_HOW}")
    lacking = [key for key in KEYS if key not in sd]
    if lacking:
        raise ValueError(f"state_dict lacks {', '.join(map(repr, lacking))}. {_HOW}")
    for key in ("masters", "state", "counts"):
        if not isinstance(sd.get(key, {}), Mapping):
            raise TypeError(f"state_dict: {key} must be a dict, got {type(sd[key]).__name__}. {_HOW}")


def _is_filled(sd: Mapping[str, Any]) -> bool:
    """Whether this is the template of an optimizer before its first step, into which the user has put state."""
    groups = sd["param_groups"]
    is_template = isinstance(groups, list) and all(isinstance(one, Mapping) and one.get("fresh") for one in groups)
    values = (value for entry in sd["state"].values() if isinstance(entry, Mapping) for value in entry.values())
    return is_template and any(isinstance(value, Tensor) and bool(local(value).any()) for value in values)


def _check_groups(groups: Any, wrapper: Wrapper, names: dict[int, str]) -> None:
    wanted, is_stage = _model_groups(wrapper), isinstance(wrapper.step_state.ranks, StageRanks)
    if not isinstance(groups, list) or len(groups) != len(wanted):
        found = len(groups) if isinstance(groups, list) else type(groups).__name__
        raise ValueError(
            f"param_groups: expected a list of {len(wanted)} groups, got {found}. {_HOW} To keep these groups and take "
            "what is there by name, pass strict=False."
        )
    for number, (group, members) in enumerate(zip(groups, wanted, strict=True)):
        mine = {names[id(param)] for param in members}
        theirs = set(group.get("params", ())) if isinstance(group, Mapping) else set()
        for name in sorted(mine - theirs if is_stage else mine ^ theirs):  # other stages have the others
            has, lacks = ("the optimizer", "state_dict") if name in mine else ("state_dict", "the optimizer")
            raise ValueError(
                f"group {number}: {has} has the parameter {name!r} and {lacks} does not. Construct the optimizer over "
                "the parameters and groups that it was saved with, or pass strict=False."
            )


def _check_value(saved: Mapping[str, Any], name: str, master: Tensor) -> None:
    """Raise unless there is something to load into ``master``."""
    if name not in saved:
        raise ValueError(f"masters lacks {name!r}. {_HOW}")
    value = saved[name]
    if not isinstance(value, Tensor):
        raise TypeError(f"{name!r}: master must be a tensor, got {type(value).__name__}. {_HOW}")
    if value.shape != master.shape or not value.is_floating_point():
        raise ValueError(
            f"{name!r}: master must be floating with shape {list(master.shape)}, got {value.dtype} "
            f"{list(value.shape)}. Build the model as it was when the checkpoint was saved."
        )


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """``value`` on the mesh and with the placements of ``like``, or plain like it."""
    mesh: Any = getattr(like, "device_mesh", None)
    if mesh is None:
        return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    placements = like.placements  # type: ignore[attr-defined]
    if is_sharded(value):
        if value.device_mesh == mesh and value.placements == placements:  # type: ignore[attr-defined]
            return value
        value = value.full_tensor()  # type: ignore[attr-defined]
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole = value.detach().to(like.device)
    if any(type(p).__name__ == "_StridedShard" for p in placements):  # distribute_tensor knows no strided shards
        return distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None).redistribute(
            mesh, placements
        )
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _positional(sd: Mapping[str, Any], wrapper: Wrapper, names: dict[int, str], values: list[Tensor]) -> dict[str, Any]:
    """The wrapper's own form of state_dict, for what this rank steps."""
    pairs = wrapper.params.all
    groups: list[dict[str, Any]] = []
    counts, no_settings = _counts(sd)
    for number, group in enumerate(wrapper.inner.param_groups):
        settings = {key: value for key, value in sd["param_groups"][number].items() if key not in no_settings}
        kept = {"param_names": group["param_names"]} if "param_names" in group else {}
        groups.append({**settings, **kept, "params": [i for i, p in enumerate(pairs) if p.group == number]})
    fresh = all(group.get("fresh") for group in sd["param_groups"])
    state = {}
    for i, pair in enumerate(pairs):
        entry = sd["state"].get(names[id(pair.model)])
        if entry is not None and not fresh:
            state[i] = {key: _like_master(value, pair.master) for key, value in entry.items()}
    are_apart = wrapper.masters.are_apart
    masters = [
        # What is frozen here, and had a master, gets it: it has all bits, and its moments, when it thaws.
        value.float()
        if pair.is_apart or (are_apart and not pair.has_master and _was_apart(pair.model, value))
        else None
        for pair, value in zip(pairs, values, strict=True)
    ]
    optimizer = {"state": state, "param_groups": groups}
    positional = {"version": schema.VERSION, "optimizer": optimizer, "masters": masters, "scaler": sd["scaler"]}
    return {**positional, **counts}


def _was_apart(model: Tensor, saved: Tensor) -> bool:
    return model.dtype in HALF_DTYPES and saved.dtype not in HALF_DTYPES


def _counts(sd: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(steps taken and skipped, the keys of param_groups that are no settings).

    Files of before ``counts`` say nothing of skips, and have the steps in param_groups where roundings go by them.
    """
    if "counts" in sd:
        return {name: sd["counts"].get(name, 0) for name in ("steps", "skipped_steps")}, _NO_SETTINGS
    steps = max((group.get("steps", 0) for group in sd["param_groups"]), default=0)
    return {"steps": steps}, (*_NO_SETTINGS, "steps")


def _like_master(value: Any, master: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == master.shape and value.dim():
        return laid_out(value, master)
    return value


def fp32_state_dict(model: nn.Module, opt: Optimizer) -> dict[str, Any]:
    """``model.state_dict()`` with masters for 16-bit parameters, whole and plain, on rank 0. Collective.

    Args:
        model: the module that ``opt`` trains, or DDP around it.
        opt: the wrapper.

    Returns:
        On rank 0 copies of everything, under all names (tied ones too); on other ranks an empty dict.

    Raises:
        TypeError, ValueError: see :func:`names_of`.
        RuntimeError: ``opt`` has one stage of a pipeline.

    Syncs: yes. Sends every sharded tensor, one at a time.
    """
    names_of(model, opt)
    wrapper = wrapper_of(opt)
    wrapper.settle("distributed.fp32_state_dict")
    if isinstance(wrapper.step_state.ranks, StageRanks):
        raise RuntimeError(
            "fp32_state_dict: rank 0 has one stage of the pipeline. Save by fp16opt.distributed.save, and load that "
            "into the whole model on one rank."
        )
    meet("fp32_state_dict()")
    wrapper.model_writes.sync()
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    whole: dict[str, Any] = {}
    done: dict[int, Tensor] = {}
    find = _Finder(wrapper)
    for name, value in unwrapped(model).state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            whole[clean(name)] = value
            continue
        if id(value) not in done:
            found = find(value)
            done[id(value)] = found.to(device=wrapper.masters.home.saved_on, copy=True) if rank == 0 else found
        whole[clean(name)] = done[id(value)]
    return whole if rank == 0 else {}


class _Finder:
    """From a model's tensor to the whole master, wherever it is."""

    def __init__(self, wrapper: Wrapper) -> None:
        table = wrapper.params
        self._masters = wrapper.masters
        self._apart = {id(pair.model): pair for pair in table.all if pair.is_apart}
        self._elsewhere = {id(p) for p in table.elsewhere if p.dtype in HALF_DTYPES}
        self._owners = owners(wrapper.optimizer) if is_zero(wrapper) else {}
        self._group = wrapper.step_state.ranks.group

    def __call__(self, value: Tensor) -> Tensor:
        key = id(value)
        found = self._masters.read([self._apart[key]])[0] if key in self._apart else value.detach()
        if key in self._owners and (key in self._apart or key in self._elsewhere):
            if key not in self._apart:
                found = torch.empty_like(found, dtype=torch.float32)
            dist.broadcast(found, src=self._owners[key], group=self._group)
        if is_sharded(found):
            found = found.full_tensor()  # type: ignore[attr-defined]
        return found
