"""load_foreign: what was found in a checkpoint of another library, checked whole, then taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...engine.params import ParamPair
from ...engine.parts import inside
from ...engine.schema import state_keys
from ...optimizer import MixedPrecisionOptimizer
from ...saved_objects import read
from ...scaling import DynamicLossScaler
from . import dcp, deepspeed, single_files
from .found import Found, Scale, refuse

_FILES: dict[str, Callable[[Any, Path], Found]] = {
    "apex": single_files.apex,
    "amp": single_files.amp,
    "megatron": single_files.megatron,
    "fairseq": single_files.fairseq,
    "flashoptim": single_files.flashoptim,
    "lightning": single_files.lightning,
}
KINDS = ("auto", "deepspeed", "trainer", "dcp", *_FILES)
_PREFIXES = ("", "module.", "model.", "_forward_module.", "_orig_mod.")
_KEPT = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize"}  # how, not what


class Loaded(NamedTuple):
    """What :func:`load_foreign` took.

    Attributes:
        kind: the format of the file.
        masters: how many parameters got their FP32 value from it.
        states: how many got optimizer state from it.
        loss_scale: the scale that was taken; None where the file has none, or the optimizer's scale is static.
    """

    kind: str
    masters: int
    states: int
    loss_scale: float | None


def load_foreign(path: Any, model: torch.nn.Module, optimizer: Optimizer, kind: str = "auto") -> Loaded:
    """Go on from a checkpoint of another library: masters, moments, step counts, settings and loss scale.

    Where the file has parameters' names they are matched by name, else by their order in the param groups. The
    optimizer must be of the class and with the groups that the file is of. The model gets the masters, rounded; its
    buffers and parameters that the optimizer does not have get the file's values, where it has them.

    Args:
        path: A file of ``torch.save``; or a folder: of DeepSpeed (ZeRO 1 or 2, all ranks' files), of Hugging Face's
            Trainer, or of torch.distributed.checkpoint.
        model: The module that ``optimizer`` trains, on one rank; of kind "dcp" sharded in any way,
            with a call on all ranks.
        optimizer: The wrapper, or a trainer's optimizer that holds it. Its own ``load_state_dict`` does the loading,
            and checks every shape and setting.
        kind: "auto" tells it by the keys. "deepspeed"; "megatron": ``Float16OptimizerWithFloat16Params``; "fairseq":
            FP16 optimizers, flat or not, whose masters are the 16-bit weights; "apex": FP16_Optimizer; "amp": apex.amp,
            O2; "flashoptim"; "trainer" and "lightning": FP32 runs, with or without a GradScaler; "dcp": an FP32 run
            that saved torch's ``get_state_dict`` by torch.distributed.checkpoint.

    Returns:
        What was taken.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The file is of no known kind; or something in it can't be mapped: named. Nothing is changed then.
        FileNotFoundError: There is nothing at ``path``.
        pickle.UnpicklingError: The file needs code to be run. Nothing in a file is: objects of classes, scalers and
            arguments say, are read as empty stand-ins with attributes, and their libraries are not imported.

    Syncs: yes.

    Example:
        >>> import tempfile, os
        >>> from fp16opt.fp16_utils import FP16_Optimizer
        >>> old = torch.nn.Linear(2, 1).half()
        >>> apex = FP16_Optimizer(torch.optim.SGD(old.parameters(), lr=0.5))
        >>> file = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
        >>> torch.save({"model": old.state_dict(), "optimizer": apex.state_dict()}, file)
        >>> new = torch.nn.Linear(2, 1).half()
        >>> opt = MixedPrecisionOptimizer(torch.optim.SGD(new.parameters(), lr=0.1))
        >>> load_foreign(file, new, opt)
        Loaded(kind='apex', masters=2, states=0, loss_scale=None)
        >>> torch.equal(new.weight, old.weight), opt.param_groups[0]["lr"]
        (True, 0.5)
    """
    wrapper = inside(optimizer)
    if not isinstance(wrapper, MixedPrecisionOptimizer):
        raise TypeError(
            f"optimizer: expected a fp16opt.MixedPrecisionOptimizer, got {type(optimizer).__name__}. Wrap it first."
        )
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(map(repr, KINDS))}, got {kind!r}.")
    where = Path(path)
    if not where.exists():
        raise FileNotFoundError(f"path: expected a checkpoint, there is nothing at {where}.")
    from ...distributed.modules import parameter_names, unwrapped
    from ...engine.arguments import clean

    if kind in ("auto", "dcp") and (where / ".metadata").is_file() and not _is_ours(where):
        return Loaded("dcp", *dcp.load(where, model, optimizer), None)
    names = parameter_names(model)
    found = _find(where, kind)
    if single_files.is_own(found.optimizer):
        raise _own(where)
    plan = _Plan(where, found, wrapper, names)
    held = {clean(name): value for name, value in unwrapped(model).state_dict(keep_vars=True).items()}
    rest = plan.rest(held)
    wrapper.load_state_dict(plan.state_dict())
    with torch.no_grad():
        for target, value in [*plan.own, *rest]:
            target.detach().copy_(value)
    return plan.loaded


def _find(path: Path, kind: str) -> Found:
    if kind == "deepspeed" or (kind == "auto" and deepspeed.folder_of(path) is not None):
        return deepspeed.find(path)
    if path.is_dir():
        if _is_ours(path):
            raise refuse(path, "was saved by fp16opt.distributed", "Load it with fp16opt.distributed.load.")
        if kind not in ("auto", "trainer") or not (path / "optimizer.pt").is_file():
            raise refuse(path, "this folder has neither DeepSpeed's files nor an optimizer.pt", "Pass the file itself.")
        return single_files.trainer_folder(path)
    if kind in ("trainer", "dcp"):
        raise refuse(path, "is a file", "Pass the folder that was written, of a Trainer checkpoint-NUMBER.")
    saved = read(path)
    if single_files.has_own(saved):
        raise _own(path)
    kind = single_files.recognise(saved) if kind == "auto" else kind
    if not kind:
        keys = ", ".join(sorted(map(repr, saved))[:8]) if isinstance(saved, Mapping) else type(saved).__name__
        raise refuse(path, f"is of no known kind; it holds {keys}", f"Name its kind: one of {', '.join(KINDS[1:])}.")
    return _FILES[kind](saved, path)


def _is_ours(folder: Path) -> bool:
    from ...distributed.files import MANIFEST

    return (folder / MANIFEST).is_file()


def _own(path: Path) -> ValueError:
    return refuse(
        path,
        "holds a state_dict of fp16opt's own, which needs no conversion",
        "Load it with optimizer.load_state_dict, or the trainer that saved it; load_foreign is for files of others.",
    )


class _Plan:
    """Everything that is to be loaded, made and checked before anything is changed.

    Attributes:
        own: (parameter whose master lies on its memory, its value).
        loaded: for the caller.
    """

    def __init__(self, path: Path, found: Found, optimizer: MixedPrecisionOptimizer, names: dict[int, str]) -> None:
        self._path = path
        self._found = found
        self._pairs = optimizer.params.all
        self._names = [names.get(id(pair.model), "") for pair in self._pairs]
        if "" in self._names:
            nameless = self._pairs[self._names.index("")].name
            raise ValueError(f"model: parameter {nameless!r} of the optimizer is not in it. Pass the model it trains.")
        self._current = optimizer.state_dict()
        self._weights = self._without_prefix()
        values = self._masters_found()
        self.own: list[tuple[Tensor, Tensor]] = []
        self._masters: list[Tensor | None] = []
        for pair, before, value in zip(self._pairs, self._current["masters"], values, strict=True):
            if before is None:
                self.own.append((pair.model, value))
                self._masters.append(None)
            else:
                self._masters.append(value.float())
        named = found.state if found.state is not None else _named_state(found)
        self._state = self._by_position() if named is None else self._by_name(named)
        self._check_keys(optimizer.optimizer)
        scale = found.scale if isinstance(optimizer.scaler, DynamicLossScaler) else None
        self._scaler = self._current["scaler"] if scale is None else _scaled(self._current["scaler"], scale)
        taken = None if scale is None else float(self._scaler["scale"])
        self.loaded = Loaded(found.kind, len(values), len(self._state), taken)

    def state_dict(self) -> dict[str, Any]:
        """In our own form."""
        optimizer = {**self._current["optimizer"], "state": self._state, "param_groups": self._groups()}
        return {**self._current, "optimizer": optimizer, "masters": self._masters, "scaler": self._scaler}

    def rest(self, held: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """(what else the model has, the file's value)."""
        mine = {id(pair.model) for pair in self._pairs}
        result = []
        for name, value in self._weights.items():
            target = held.get(name)
            if not isinstance(target, Tensor):
                raise refuse(self._path, f"has {name!r}, which is not in the model", "Build the model as it was.")
            if id(target) not in mine:
                self._check_shape(name, value, target)
                result.append((target, value))
        return result

    # -- masters -----------------------------------------------------------------------------------------------------

    def _without_prefix(self) -> dict[str, Tensor]:
        weights = self._found.weights
        for prefix in _PREFIXES:
            cut = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            if len(cut) == len(weights) and all(name in cut for name in self._names):
                return cut
        if self._found.masters is None:
            missing = next(name for name in self._names if name not in weights)
            raise refuse(self._path, f"has no {missing!r}, which the optimizer trains", "Build the model as it was.")
        return {}

    def _masters_found(self) -> list[Tensor]:
        """Of each parameter, in order."""
        by_name = self._found.masters is None
        values = [self._weights[name] for name in self._names] if by_name else self._in_order()
        for pair, name, value in zip(self._pairs, self._names, values, strict=True):
            self._check_shape(name, value, pair.model)
        return values

    def _in_order(self) -> list[Tensor]:
        """Masters of 16-bit parameters, group by group; the others' values are the model's."""
        current = self._current["masters"]
        values: list[Tensor] = []
        saved = [list(group) for group in self._found.masters or ()]
        wanted: dict[int, int] = {}
        for pair, master in zip(self._pairs, current, strict=True):
            wanted[pair.group] = wanted.get(pair.group, 0) + (master is not None)
        if [len(group) for group in saved] != [wanted[group] for group in sorted(wanted)]:
            raise refuse(
                self._path,
                f"has masters of {[len(group) for group in saved]} parameters in the groups, expected "
                f"{[wanted[group] for group in sorted(wanted)]}",
                "Build and convert model and groups as they were.",
            )
        for pair, name, master in zip(self._pairs, self._names, current, strict=True):
            if master is not None:
                values.append(saved[pair.group].pop(0))
            elif name in self._weights:
                values.append(self._weights[name])
            else:
                raise refuse(self._path, f"has no {name!r}, which is its own master", "Save the model with it.")
        return values

    def _check_shape(self, name: str, value: object, target: Tensor) -> None:
        if not isinstance(value, Tensor) or value.shape != target.shape:
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            what = f"{name!r} is {came}, and {tuple(target.shape)} in the model"
            raise refuse(self._path, what, "Build the model as it was.")

    # -- optimizer state -----------------------------------------------------------------------------------------------

    def _by_name(self, named: Mapping[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        unknown = [
            name for name in named if name.removeprefix("module.") not in self._names and name not in self._names
        ]
        if unknown:
            raise refuse(
                self._path, f"has state of {unknown[0]!r}, which the optimizer does not train", "Train what it was of."
            )
        held = {name if name in self._names else name.removeprefix("module."): state for name, state in named.items()}
        return {i: held[name] for i, name in enumerate(self._names) if name in held}

    def _by_position(self) -> dict[int, dict[str, Any]]:
        saved = self._found.optimizer
        if saved is None or not isinstance(saved.get("state"), Mapping):
            raise refuse(self._path, "has no optimizer state of torch's form", "Pass the checkpoint as it was saved.")
        state = saved["state"]
        if self._found.flat:
            return _unflattened(next(iter(state.values()), {}), self._pairs, self._path)
        sizes = [len(group.get("params", ())) for group in self._found.groups]
        mine = [len(group["params"]) for group in self._current["optimizer"]["param_groups"]]
        if sizes != mine:
            raise refuse(
                self._path,
                f"is of an optimizer with groups of {sizes} parameters, here are {mine}",
                "Group them alike.",
            )
        result = {}
        steps = {i: group.get("step") for group in self._found.groups for i in group["params"]}
        for place, i in enumerate(i for group in self._found.groups for i in group["params"]):
            if i in state:
                result[place] = dict(state[i])
                step = steps[i]
                if "step" not in result[place] and step is not None:  # where apex's and Megatron's fused ones keep it
                    result[place]["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        unknown = [i for i in state if i not in steps]
        if unknown:
            raise refuse(self._path, f"has state of parameter {unknown[0]!r}, which is in no group", "Save it anew.")
        return result

    def _check_keys(self, wrapped: Optimizer) -> None:
        """Another class's state must not be passed over silently."""
        known = state_keys(wrapped)
        for i, held in self._state.items() if known is not None else ():
            for key in held:
                if key not in (known or ()):
                    what = f"state of {self._names[i]!r} has {key!r}, which {type(wrapped).__name__} does not keep"
                    raise refuse(self._path, what, "Wrap an optimizer of the class that it is of.")

    def _groups(self) -> list[dict[str, Any]]:
        """This optimizer's groups, with the file's settings where it has as many groups."""
        groups: list[dict[str, Any]] = [dict(group) for group in self._current["optimizer"]["param_groups"]]
        start = 0
        for number, group in enumerate(groups):
            group["params"] = list(range(start, start + len(group["params"])))
            start += len(group["params"])
            if len(groups) == len(self._found.groups):
                theirs = self._found.groups[number]
                group.update({key: theirs[key] for key in group if key in theirs and key not in _KEPT})
        return groups


def _named_state(found: Found) -> dict[str, dict[str, Any]] | None:
    """The state by name, where torch's own named param groups tell it; None elsewhere."""
    ids = [i for group in found.groups for i in group.get("params", ())]
    names = [str(name) for group in found.groups for name in group.get("param_names") or ()]
    state = (found.optimizer or {}).get("state")
    if not names or len(names) != len(ids) or not isinstance(state, Mapping) or not set(state) <= set(ids):
        return None
    return {name: dict(state[i]) for i, name in zip(ids, names, strict=True) if i in state}


def _scaled(state: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """A dynamic scaler's state with this scale inside its bounds."""
    value = min(max(scale.value, float(state["min_scale"])), float(state["max_scale"]))
    return {**state, "scale": value, "growth_tracker": min(scale.clean, int(state["growth_interval"]) - 1)}


def _unflattened(flat: Mapping[str, Any], pairs: list[ParamPair], path: Path) -> dict[int, dict[str, Any]]:
    """State of one parameter that held all, in order."""
    result: dict[int, dict[str, Any]] = {i: {} for i in range(len(pairs))}
    whole = sum(pair.model.numel() for pair in pairs)
    for key, value in flat.items():
        is_one = not isinstance(value, Tensor) or value.dim() == 0
        if not is_one and value.numel() != whole:
            raise refuse(
                path, f"{key!r} has {value.numel()} elements, the optimizer's parameters {whole}", "Train all."
            )
        start = 0
        for i, pair in enumerate(pairs):
            size = pair.model.numel()
            result[i][key] = value if is_one else value[start : start + size].reshape(pair.model.shape)
            start += size
    return {i: held for i, held in result.items() if held}
