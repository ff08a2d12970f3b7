"""A plain FP32 run that torch.distributed.checkpoint saved, by get_state_dict: its weights and state by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .found import refuse

_KEPT = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize"}  # how, not what


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
    """Read each rank's pieces, and load them by name. Collective, where the model is sharded.

    Returns:
        How many masters were taken, and how many parameters' state.

    Raises:
        ValueError: see :func:`.loading.load_foreign`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    from ... import distributed
    from ...distributed.files import blank, checkpoint_errors, put

    own = distributed.state_dict(model, optimizer)
    masters: dict[str, Tensor] = own["masters"]
    held = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    stored: Any = FileSystemReader(str(path)).read_metadata()
    paths: dict[str, tuple[Any, ...]] = stored.planner_data
    weights = _root(path, masters, paths)
    states = next((where[0] for where in paths.values() if len(where) > 2 and where[1] == "param_groups"), None)
    if states is None:
        raise refuse(path, "has no optimizer state of get_state_dict", 'Save {"model": model, "optim": optim} of it.')
    template: dict[Any, Any] = {}
    for flat, where in paths.items():
        if where[0] not in (weights, states):
            continue
        name = where[1] if where[0] == weights else where[2] if where[1] == "state" else ""
        put(template, where, blank(stored.state_dict_metadata[flat], masters.get(name, held.get(name))))
    with checkpoint_errors(f"load_foreign {path}"):
        dcp_load(template, checkpoint_id=str(path))
    saved, state = template[weights], template[states].get("state", {})
    groups = template[states]["param_groups"]
    if len(groups) != len(own["param_groups"]):
        what = f"has {len(groups)} param groups, expected {len(own['param_groups'])}"
        raise refuse(path, what, "Group parameters as they were.")
    for group, mine in zip(groups, own["param_groups"], strict=True):
        kept = {key: value for key, value in mine.items() if key in _KEPT}
        group.update({**mine, **group, **kept, "params": group["params"], "fresh": False})
    loaded = {name: saved[name] for name in masters}
    distributed.load_state_dict(model, optimizer, {**own, "masters": loaded, "state": state, "param_groups": groups})
    for name in held.keys() - masters.keys() & saved.keys():
        held[name].copy_(saved[name])
    return len(loaded), sum(name in masters for name in state)


def _root(path: Path, masters: Mapping[str, Tensor], paths: Mapping[str, tuple[Any, ...]]) -> Any:
    """The entry of the file that has the model's weights."""
    roots: dict[Any, set[Any]] = {}
    for where in paths.values():
        if len(where) == 2:
            roots.setdefault(where[0], set()).add(where[1])
    lacking = next(iter(masters), "")
    for root, names in roots.items():
        missing = [name for name in masters if name not in names]
        if not missing:
            return root
        lacking = missing[0]
    raise refuse(path, f"has no {lacking!r}, which the optimizer trains", "Build the model as it was.")
