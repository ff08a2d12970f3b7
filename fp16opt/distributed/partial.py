"""A checkpoint of other parameters or groups than this training has: what is in both is taken by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..engine.parts import Wrapper

_NO_SETTINGS = ("params", "param_names")


class IncompatibleKeys(NamedTuple):
    """What a load with ``strict=False`` has left out, as ``torch.nn.Module.load_state_dict`` tells it.

    Attributes:
        missing_keys: what this training has and the checkpoint lacks: ``"masters.NAME"``, ``"state.NAME"``,
            ``"model.NAME"``, ``"param_groups.NUMBER"`` of a group that keeps its settings. It stayed as it was.
        unexpected_keys: what the checkpoint has and was not taken, in the same words; also ``"scaler"``, ``"counts"``.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def merged(parts: Iterable[IncompatibleKeys]) -> IncompatibleKeys:
    """What several ranks, or several looks, have left out, each key once."""
    missing: dict[str, None] = {}
    unexpected: dict[str, None] = {}
    for part in parts:
        missing.update(dict.fromkeys(part.missing_keys))
        unexpected.update(dict.fromkeys(part.unexpected_keys))
    return IncompatibleKeys(list(missing), list(unexpected))


def completed(
    sd: Mapping[str, Any],
    own: Mapping[str, Any],
    members: Sequence[Sequence[str]],
    wrapper: Wrapper,
    names: Mapping[int, str],
) -> tuple[dict[str, Any], IncompatibleKeys]:
    """A state_dict of exactly what this optimizer has: from ``sd`` what is there by name, the rest from ``own``.

    A group takes its settings from a group of ``sd`` where the two have parameters in common, and neither has any in
    common with a third one: else it keeps its own, as nothing tells which are meant. Scaler and counts are taken where
    a parameter is, and the scaler is of the same kind.

    Args:
        sd: as :func:`.named.state_dict` gives it, of any parameters; checked outside.
        own: of this optimizer, as it is.
        members: names by group, of all ranks that share a verdict: settings are alike on these.
        names: from ``id(model parameter)`` to its name.

    Raises:
        ValueError: the groups of ``sd`` are damaged.
    """
    missing: list[str] = []
    unexpected: list[str] = []
    theirs = _groups(sd["param_groups"])
    mine = own["param_groups"]
    is_known = any(not set(group["params"]).isdisjoint(ours) for group in theirs for ours in members)
    masters, state = {}, {}
    was_stepped = not all(group.get("fresh") for group in theirs)
    has_state = not all(group["fresh"] for group in mine)
    for pair in wrapper.params.all:
        name = names[id(pair.model)]
        is_there = name in sd["masters"]
        masters[name] = (sd if is_there else own)["masters"][name]
        entry = sd["state"].get(name) if was_stepped else None
        if not is_there:
            missing.append(f"masters.{name}")
            entry = own["state"].get(name) if has_state else None
        elif entry is None and was_stepped and own["state"].get(name):
            missing.append(f"state.{name}")
        if entry is not None:
            state[name] = entry
    for kind in ("masters", "state"):
        unexpected += [f"{kind}.{name}" for name in sd[kind] if name not in masters]
    groups, taken = [], set()
    for number, group in enumerate(mine):
        at = _counterpart(number, members, theirs)
        if at is None:
            missing.append(f"param_groups.{number}")
        else:
            taken.add(at)
        settings = group if at is None else theirs[at]
        kept = {key: value for key, value in settings.items() if key not in _NO_SETTINGS}
        groups.append({**kept, "params": group["params"], "fresh": not state})
    unexpected += [f"param_groups.{number}" for number in range(len(theirs)) if number not in taken]
    full = {"masters": masters, "state": state, "param_groups": groups, "scaler": sd["scaler"]}
    if not (is_known and _kind(sd["scaler"]) == _kind(own["scaler"])):
        full["scaler"] = own["scaler"]
        unexpected.append("scaler")
    if is_known and "counts" in sd:
        full["counts"] = sd["counts"]
    else:
        full["counts"] = own["counts"]
        unexpected += ["counts"] * ("counts" in sd)
    return full, IncompatibleKeys(missing, unexpected)


def _groups(groups: Any) -> list[Mapping[str, Any]]:
    are_groups = isinstance(groups, list) and all(isinstance(one, Mapping) and "params" in one for one in groups)
    if not are_groups:
        raise ValueError("param_groups: expected a list of dicts with 'params', the parameters' names.")
    found: list[Mapping[str, Any]] = groups
    return found


def _counterpart(number: int, members: Sequence[Sequence[str]], theirs: Sequence[Mapping[str, Any]]) -> int | None:
    """The one group of ``theirs`` that shares parameters with ours, and with no other one of ours."""
    sharing = [at for at, group in enumerate(theirs) if not set(group["params"]).isdisjoint(members[number])]
    if len(sharing) != 1:
        return None
    there = set(theirs[sharing[0]]["params"])
    others = [k for k, ours in enumerate(members) if k != number and not there.isdisjoint(ours)]
    return None if others else sharing[0]


def _kind(scaler: Any) -> Any:
    return scaler.get("type") if isinstance(scaler, Mapping) else None
