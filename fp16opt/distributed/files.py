"""Checkpoints on disk: whole or not there, read on any number of ranks."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from ..engine.arguments import clean
from ..engine.snapshot import copied
from .exchange import gather, together
from .modules import unwrapped, wrapper_of
from .named import load_state_dict, names_of, of_all_stages, room_like, state_dict
from .partial import IncompatibleKeys, merged
from .waiting import meet

MANIFEST = "fp16opt.json"
_FORMAT = 1
_KEYS = {"format", "saved_at_ns", "files"}
_CHECKED_KEYS = _KEYS | {"blake2b", "manifest_blake2b"}  # manifests of before had no checksums
_BLOCK = 1 << 20  # bytes read at a time
_PARTIAL = re.compile(r"\..*\.partial")
_OURS = re.compile(r"\..+\.[0-9a-f]{32}\.partial")  # as _write names them

_writing: set[str] = set()  # names of folders that this process has begun and not finished, in threads too


def save(path: str | os.PathLike[str], model: nn.Module, opt: Optimizer) -> None:
    """Save model and optimizer into a new folder. Collective: returns when it is complete, else raises on all ranks.

    What :func:`fp16opt.distributed.state_dict` gives, and the model's buffers and parameters that ``opt`` does not
    have, are written by ``torch.distributed.checkpoint`` into a hidden folder beside ``path``, which is then renamed: a
    folder named ``path`` is always whole. Hidden folders beside it that saves have left which were killed are removed:
    a folder of checkpoints belongs to one training.

    Args:
        path: a folder that does not exist, on a file system that all ranks see.
        model: the module that ``opt`` trains, or DDP around it.
        opt: the wrapper.

    Raises:
        FileExistsError: there is something at ``path``. Save every checkpoint under a name of its own.
        RuntimeError: writing failed on some rank, a rank is gone, or has not called this within the time-out of
            ``init_process_group``.

    Syncs: yes.
    """
    wrapper_of(opt).settle("distributed.save")
    meet(f"save({Path(path).name!r})")
    payload = together("save", lambda: _payload(model, opt))
    payload = of_all_stages(opt, payload)
    _write(Path(path), payload, None)


def save_async(path: str | os.PathLike[str], model: nn.Module, opt: Optimizer) -> PendingSave:
    """:func:`save`, while training goes on: copies everything first, then writes in a thread. Collective.

    The thread talks through a process group of its own (gloo), which does not mix with training's messages. Memory: one
    more copy of masters and state until it is done.

    Args:
        path, model, opt: as for :func:`save`.

    Returns:
        What to ask for the outcome. Training may go on at once.

    Raises:
        FileExistsError: there is something at ``path``.
    """
    wrapper_of(opt).settle("distributed.save_async")
    where = Path(path)
    meet(f"save_async({Path(path).name!r})")
    payload = together("save_async", lambda: _copied(_payload(model, opt)))
    payload = of_all_stages(opt, payload)
    together("save_async", lambda: _check_new(where))
    group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
    return PendingSave(where, payload, group)


class PendingSave:
    """A checkpoint that a thread is writing. Made by :func:`save_async`."""

    def __init__(self, path: Path, payload: dict[str, Any], group: Any) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(payload, group), daemon=True)
        self._thread.start()

    def _work(self, payload: dict[str, Any], group: Any) -> None:
        try:
            _write(self.path, payload, group)
        except BaseException as error:
            self._error = error
        if group is not None:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)

    def done(self) -> bool:
        """Whether writing is over, well or not. Does not wait."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it is not.
            RuntimeError, FileExistsError: writing failed.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path}: not complete after {timeout} s.")
        if self._error is not None:
            raise self._error


def load(path: str | os.PathLike[str], model: nn.Module, opt: Optimizer, *, strict: bool = True) -> IncompatibleKeys:
    """Load what :func:`save` wrote, on any number of ranks, sharded in any way. Collective.

    Every file is read once more first, by one of the ranks, and compared with the checksum that was written with it.
    Memory: one more copy of this rank's masters and state while it loads.

    Args:
        path: the folder.
        model: the module that ``opt`` trains, or DDP around it; the same parameters as when it was saved.
        opt: the wrapper, fresh or used.
        strict: False: take what is there by name, where parameters were frozen, added or left out since, or groups are
            others. A parameter that ``opt`` does not have takes the value of its master, one that was not trained then
            gives its value to its master. Shapes must be the same. A group takes its settings from the one group of the
            file that it shares parameters with, unless another group here shares some, too: then it keeps its own.

    Returns:
        What was left out on both sides, the same on all ranks; nothing with ``strict=True``.

    Raises:
        FileNotFoundError: there is no complete checkpoint at ``path``.
        ValueError: a file has other bytes than when it was saved; or parameters, shapes, groups or settings are others.
            Model and optimizer are as they were.
        RuntimeError: a file can't be read.

    Syncs: yes.
    """
    wrapper_of(opt).settle("distributed.load")
    meet(f"load({Path(path).name!r})")
    where = Path(path)
    manifest = together("load", lambda: check_complete(where))
    together("load", lambda: _check_sums(where, manifest))  # before torch unpickles anything
    reading = together("load", lambda: _template(where, model, opt, strict))
    with checkpoint_errors(f"load {where}"):
        dcp_load({**reading.template, "model": reading.rest}, checkpoint_id=str(where))
    left_out = IncompatibleKeys([], [])
    if not strict:
        _exchange(reading, model, opt)
        left_out = _left_out(reading, gather((reading.trained, reading.others)))
    told = load_state_dict(model, opt, reading.template, strict=strict)
    _load_rest(model, reading.rest)
    return told if strict else merged(itertools.chain(*gather((told, left_out))))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints.

    Args:
        directory: of the folders that :func:`save` was given. It need not exist.

    Returns:
        Its path, or None. Half-written ones, and those where a file has another size, are passed over; checksums are
        for :func:`load`.

    Example:
        >>> latest("no such folder") is None
        True
    """
    folder = Path(directory)
    if not folder.is_dir():
        return None
    found = []
    for path in sorted(folder.iterdir()):
        if _PARTIAL.fullmatch(path.name):  # of a rank that died just before it gave the folder its name
            continue
        with contextlib.suppress(FileNotFoundError):
            found.append((check_complete(path)["saved_at_ns"], path))
    return max(found)[1] if found else None


def check_complete(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint. Reads no other file.

    Raises:
        FileNotFoundError: there is none, it is damaged, or a file is missing or has another size.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        sizes: dict[str, int] = manifest["files"]
        if manifest["format"] != _FORMAT:
            raise FileNotFoundError(
                f"{path}: expected format {_FORMAT}, got {manifest['format']}. Use a newer fp16opt."
            )
        keys = set(manifest)
        if keys != _KEYS and (keys != _CHECKED_KEYS or manifest["manifest_blake2b"] != _own_sum(manifest)):
            raise FileNotFoundError(f"{path}: {MANIFEST} is damaged. Load an older checkpoint.")
        wrong = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileNotFoundError(f"{path}: no complete checkpoint there ({error}). Load latest(directory).") from error
    if wrong:
        raise FileNotFoundError(
            f"{path}: {wrong[0]} has another size than when it was saved. Load an older checkpoint."
        )
    return manifest


# -- writing -----------------------------------------------------------------------------------------------------


def _payload(model: nn.Module, opt: Optimizer) -> dict[str, Any]:
    return {**state_dict(model, opt), "model": _rest(model, opt)}


def _rest(model: nn.Module, opt: Optimizer) -> dict[str, Any]:
    """What of the model the optimizer does not have: buffers, and parameters that were left out of it."""
    mine, table = names_of(model, opt), wrapper_of(opt).params
    ours = {id(param) for param in [*table.models, *table.elsewhere]} & set(mine)
    every = unwrapped(model).state_dict(keep_vars=True)
    values = {clean(name): value for name, value in every.items() if id(value) not in ours}
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}


def _load_rest(model: nn.Module, rest: dict[str, Any]) -> None:
    module = unwrapped(model)
    called = {clean(name): name for name in module.state_dict()}
    module.load_state_dict({called[name]: value for name, value in rest.items()}, strict=False)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _check_new(path: Path) -> None:
    if path.exists():
        raise FileExistsError(
            f"{path} exists: a checkpoint is never written over another. Save under a name of its own."
        )


def _write(path: Path, payload: dict[str, Any], group: Any) -> None:
    """Write into a hidden folder, then rename it."""
    tag = gather(uuid.uuid4().hex, group)[0]
    partial = path.parent / f".{path.name}.{tag}.partial"  # see _PARTIAL
    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) == 0
    _writing.add(partial.name)
    try:
        together("save", lambda: _check_new(path), group)
        if first:
            _remove_killed(path.parent)
        with checkpoint_errors(f"save {path}"):
            writer = FileSystemWriter(str(partial), overwrite=False)
            dcp_save(payload, storage_writer=writer, process_group=group)
        sums = _sums_together(partial, group)
        together("save", lambda: _complete(partial, path, sums) if first else None, group)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        _writing.discard(partial.name)


def _remove_killed(folder: Path) -> None:
    """What saves that were killed have left there: no process of this training is writing it."""
    for found in folder.glob(".*.partial"):
        if _OURS.fullmatch(found.name) and found.name not in _writing:
            shutil.rmtree(found, ignore_errors=True)


def _complete(partial: Path, path: Path, sums: dict[str, str]) -> None:
    """The manifest goes in last; the rename makes the checkpoint appear. Both reach the disk."""
    sizes = {name: (partial / name).stat().st_size for name in sums}
    manifest: dict[str, Any] = {"format": _FORMAT, "saved_at_ns": time.time_ns(), "files": sizes, "blake2b": sums}
    manifest["manifest_blake2b"] = _own_sum(manifest)
    with open(partial / MANIFEST, "w") as file:
        json.dump(manifest, file, separators=(",", ":"))  # every byte counts: none can be flipped unseen
        file.flush()
        os.fsync(file.fileno())
    _check_new(path)
    os.rename(partial, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- checksums ---------------------------------------------------------------------------------------------------


def _sums_together(folder: Path, group: Any) -> dict[str, str]:
    """The checksum of every file in ``folder``, on every rank; each file is read by one of them. Collective."""
    listed = together("save", lambda: _by_size({file.name: file.stat().st_size for file in folder.iterdir()}), group)
    names = gather(listed, group)[0]  # another rank's file system may list late
    mine = together("save", lambda: {name: _sum(folder / name) for name in _share(names, group)}, group)
    found = {name: total for part in gather(mine, group) for name, total in part.items()}
    return {name: found[name] for name in sorted(found)}


def _check_sums(path: Path, manifest: dict[str, Any]) -> None:
    """Raise ``ValueError`` where this rank's share of the files has other bytes than when it was saved."""
    sums: dict[str, str] = manifest.get("blake2b", {})
    for name in _share(_by_size({name: manifest["files"][name] for name in sums}), None):
        if _sum(path / name) != sums[name]:
            raise ValueError(
                f"{path}: {name} has other bytes than when it was saved (blake2b). Load an older checkpoint."
            )


def _by_size(sizes: dict[str, int]) -> list[str]:
    return sorted(sizes, key=lambda name: (-sizes[name], name))


def _share(names: list[str], group: Any) -> list[str]:
    """This rank's part of the work on ``names``."""
    if not (dist.is_available() and dist.is_initialized()):
        return names
    return names[dist.get_rank(group) :: dist.get_world_size(group)]


def _sum(file: Path) -> str:
    total = hashlib.blake2b(digest_size=32)
    block = memoryview(bytearray(_BLOCK))
    with open(file, "rb", buffering=0) as opened:
        while count := opened.readinto(block):
            total.update(block[:count])
    return total.hexdigest()


def _own_sum(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest, without the entry that holds it."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_blake2b"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=32).hexdigest()


@contextlib.contextmanager
def checkpoint_errors(what: str) -> Iterator[None]:
    """torch's CheckpointException is no Exception, and ``except Exception`` would let it pass."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{what}: rank {rank} failed: {cause!r}.") from error


# -- reading -----------------------------------------------------------------------------------------------------


class _Reading(NamedTuple):
    """What this rank is about to read from a file.

    Attributes:
        template: what :func:`load_state_dict` takes, to be filled.
        rest: what else the model has, to be filled.
        trained, others: names of what the optimizer has, over its ranks, and of what else the model has.
        there: names in the file, by kind: "masters", "state", "model".
    """

    template: dict[str, Any]
    rest: dict[str, Any]
    trained: set[str]
    others: set[str]
    there: dict[str, dict[str, None]]


def _template(path: Path, model: nn.Module, opt: Optimizer, strict: bool) -> _Reading:
    """Tensors of the right shapes for everything in the checkpoint that this rank needs.

    Raises:
        ValueError: see :func:`load`.
    """
    names = names_of(model, opt)
    stored: Any = FileSystemReader(str(path)).read_metadata()
    paths: dict[str, tuple[Any, ...]] = stored.planner_data
    there: dict[str, dict[str, None]] = {"masters": {}, "state": {}, "model": {}}
    for where in paths.values():
        if where[0] in there:
            there[where[0]][where[1]] = None
    table, on = wrapper_of(opt).params, wrapper_of(opt).masters.home.saved_on
    mine = {names[id(pair.model)]: pair.master for pair in table.all}
    trained = {names[id(param)] for param in (*table.models, *table.elsewhere)}
    masters: dict[str, Any] = dict(mine)
    rest = _copied(_rest(model, opt))
    others = set(rest)
    if strict:
        _check_names(path, mine, rest, there["model"], there["masters"])
    else:
        every = {**rest, **mine}
        masters = {name: value for name, value in every.items() if name in there["masters"]}
        rest = {name: value for name, value in every.items() if name in there["model"] and name not in masters}
    for kind, values in (("masters", masters), ("model", rest)):
        for name, value in values.items():
            size = getattr(stored.state_dict_metadata.get(f"{kind}.{name}"), "size", None)
            if isinstance(value, Tensor) and size is not None and tuple(size) != tuple(value.shape):
                raise ValueError(f"{path}: {name!r} has shape {list(size)}, the model's has {list(value.shape)}.")
    for name in set(rest) & set(mine):
        rest[name] = blank(stored.state_dict_metadata[f"model.{name}"], mine[name], on)
    template: dict[str, Any] = {"masters": {}, "state": {}, "scaler": {}, "param_groups": []}
    if any(where[0] == "counts" for where in paths.values()):  # files of before have none
        template["counts"] = {}
    for flat, where in paths.items():
        kind, name = where[0], where[1] if len(where) > 1 else None
        if (
            kind not in template
            or (kind == "masters" and name not in masters)
            or (kind == "state" and name not in mine)
        ):
            continue
        put(template, where, blank(stored.state_dict_metadata[flat], masters.get(name) if name else None, on))
    return _Reading(template, rest, trained, others, there)


def _check_names(
    path: Path, masters: Iterable[str], rest: Iterable[str], there: Container[str], trained: Container[str]
) -> None:
    """Raise where file and training differ in what they have, and say on which side it is missing.

    Args:
        masters, rest: names of what the optimizer has, and of what else the model has.
        there, trained: names of what the file has as not trained, and as trained.
    """
    by_name = ", or pass strict=False to take what is there by name."
    for name in masters:
        if name not in trained:
            how = "has it as one that was not trained" if name in there else "lacks it"
            raise ValueError(
                f"{path} has no master of {name!r}, which this optimizer trains: the file {how}. Make the optimizer "
                f"over the parameters that it was saved with{by_name}"
            )
    for name in rest:
        if name in trained:
            raise ValueError(
                f"{path} has {name!r} as a parameter that was trained, and this optimizer does not have it. Make the "
                "optimizer over the parameters that it was saved with, load, and freeze after that: what does not "
                "require a gradient is left alone. Or pass strict=False to take what is there by name."
            )
        if name not in there:
            raise ValueError(
                f"{path} has no buffer or parameter {name!r}. Build the model that it was saved from{by_name}"
            )


def _left_out(reading: _Reading, everyone: list[tuple[set[str], set[str]]]) -> IncompatibleKeys:
    """Of what :func:`load_state_dict` does not see: what file or model has alone.

    Args:
        everyone: what the ranks train and what else their models have, which may be stages of one.
    """
    there = reading.there
    trained = set().union(*(names for names, _ in everyone))
    here = trained.union(*(names for _, names in everyone))
    missing = [f"model.{name}" for name in reading.others if name not in {**there["masters"], **there["model"]}]
    unexpected = [f"{kind}.{name}" for kind in ("masters", "model") for name in there[kind] if name not in here]
    unexpected += [f"state.{name}" for name in there["state"] if name not in trained]
    return IncompatibleKeys(sorted(missing), unexpected)


def _exchange(reading: _Reading, model: nn.Module, opt: Optimizer) -> None:
    """Weights that are trained in one of the file and this training alone go to where they are here."""
    names, masters = names_of(model, opt), reading.template["masters"]
    mine = {names[id(pair.model)] for pair in wrapper_of(opt).params.all}
    for name in mine & set(reading.rest):
        masters[name] = reading.rest.pop(name)
    for name in set(masters) - mine:
        reading.rest[name] = masters.pop(name)


def blank(stored: Any, master: Tensor | None, on: torch.device | None = None) -> Any:
    """Something for dcp.load to fill: like the master if it has its shape."""
    size = getattr(stored, "size", None)
    if size is None:
        return None
    dtype = stored.properties.dtype
    if master is not None and tuple(size) == tuple(master.shape) and master.dim():
        return room_like(master, dtype, on)
    return torch.empty(size, dtype=dtype, device="cpu")


def put(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """``root[path[0]][path[1]]... = value``, with dicts and lists made on the way."""
    for key, following in itertools.pairwise(path):
        root = _entry(root, key, [] if isinstance(following, int) else {})
    if isinstance(root, list):
        root.extend([None] * (path[-1] + 1 - len(root)))
    root[path[-1]] = value


def _entry(root: Any, key: Any, empty: Any) -> Any:
    if isinstance(root, list):
        root.extend([None] * (key + 1 - len(root)))
        if root[key] is None:
            root[key] = empty
        return root[key]
    return root.setdefault(key, empty)
