"""MasterParams: which FP32 master belongs to which model parameter, and the copy of masters down to the model.

A 16-bit parameter gets an FP32 master with its shape and strides; an FP32 or FP64 parameter is its own master. The
wrapped optimizer's ``params`` lists hold the masters, in the places where the model's parameters stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .diagnostics import describe
from .kernels.tables import Entries, is_dense
from .local import check_whole, different_bits, is_sharded, local, quoted, version
from .shard import Shard

HALF_DTYPES = kernels.HALF_DTYPES
OWN_DTYPES = (torch.float32, torch.float64)

Carry = Callable[[Tensor, Tensor], None]


def make_master(param: Tensor) -> torch.nn.Parameter:
    """An FP32 copy of ``param`` as a leaf with the same shape and, where it is dense, the same strides."""
    data = param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
    master = torch.nn.Parameter(data, requires_grad=True)
    # Optimizers such as Muon variants read marks that users set on parameters.
    master.__dict__.update(param.__dict__)
    return master


class MasterParams:
    """Model parameters and their masters, in the order of the wrapped optimizer's param_groups.

    Args:
        groups: The wrapped optimizer's ``param_groups``. Their ``params`` lists are changed in place.
        names: From ``id(parameter)`` to its name; may be empty.
        carry: Called with (model parameter, master) for each new master, to move optimizer state along.
        makes_masters: Whether 16-bit parameters get masters at all. False: they are their own.

    Raises:
        ValueError: A parameter has a dtype that can't be served; nothing has been changed then.

    Attributes:
        keeps_gradients: Whether the memory of FP32 gradients is kept from one step to the next.
    """

    keeps_gradients = True

    def __init__(
        self, groups: list[dict[str, Any]], names: dict[int, str], carry: Carry, makes_masters: bool = True
    ) -> None:
        self.makes_masters = makes_masters
        self.model: list[Tensor] = []
        self.master: list[Tensor] = []
        self.names: list[str] = []
        self.places: list[tuple[int, int]] = []
        self.group_sizes: list[int] = []
        self.shards: list[Shard] = []
        self.watches = True
        self.elsewhere: list[Tensor] = []  # model parameters whose masters are on other ranks
        self._master_versions: list[int] = []
        self._model_versions: list[int] = []
        for number, group in enumerate(groups):
            self.check_group(group, number, names)
        for number, group in enumerate(groups):
            self._append(group, number, names, carry)
        self.rebuild()

    def __len__(self) -> int:
        return len(self.model)

    # -- which parameters ------------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any], number: int, names: dict[int, str]) -> None:
        """Raise ``ValueError`` or ``TypeError`` for the first parameter of ``group`` that can't be served."""
        for place, param in enumerate(group["params"]):
            where = f"group {number}, param {place}{quoted(name_of(group, place, param, names))}"
            if not isinstance(param, Tensor):
                raise TypeError(f"{where}: expected a tensor, got {type(param).__name__}.")
            if param.dtype not in HALF_DTYPES + OWN_DTYPES:
                wanted = "float16, bfloat16, float32 or float64"
                raise ValueError(
                    f"{where}: expected {wanted}, got {str(param.dtype).removeprefix('torch.')}. "
                    "Leave it out of the wrapped optimizer, or convert it first."
                )
            check_whole(param, where)
            if group.get("fused") and param.dtype in OWN_DTYPES and param.numel() and not is_dense(param):
                raise ValueError(
                    f"{where}: torch's fused steps are wrong on parameters whose memory is not dense, got strides "
                    f"{param.stride()} for shape {tuple(param.shape)}. Use fused=False, or make it contiguous."
                )

    def check_new_group(self, group: dict[str, Any], number: int, names: dict[int, str]) -> None:
        """:meth:`check_group`, and ``ValueError`` for a parameter that is here already."""
        self.check_group(group, number, names)
        known = {id(param) for param in self.model}
        for place, param in enumerate(group["params"]):
            if id(param) in known:
                raise ValueError(
                    f"group {number}, param {place}: this parameter is in the optimizer already. Leave it out."
                )
            known.add(id(param))

    def _append(self, group: dict[str, Any], number: int, names: dict[int, str], carry: Carry) -> None:
        params = group["params"]
        for place, param in enumerate(params):
            self.model.append(param)
            self.master.append(param)
            self.names.append(name_of(group, place, param, names) or f"group {number}, param {place}")
            self.places.append((number, place))
            if self.makes_masters and param.dtype in HALF_DTYPES and param.requires_grad:
                self._give_master(len(self.model) - 1, params, carry)
        self.group_sizes.append(len(params))

    def _give_master(self, i: int, params: list[Tensor], carry: Carry) -> None:
        master = make_master(self.model[i])
        carry(self.model[i], master)
        self.master[i] = master
        params[self.places[i][1]] = master

    def append_group(self, group: dict[str, Any], number: int, names: dict[int, str], carry: Carry) -> None:
        """Take in a group whose ``params`` list is the wrapped optimizer's own."""
        self._append(group, number, names, carry)
        self.rebuild()

    def follow(self, groups: list[dict[str, Any]], names: dict[int, str], carry: Carry) -> bool:
        """Notice parameters that changed, were unfrozen, or came through the wrapped optimizer itself.

        Returns:
            Whether parameters or masters came.

        Raises:
            RuntimeError: A known group changed its length.
        """
        known = len(self.group_sizes)
        if [len(group["params"]) for group in groups[:known]] != self.group_sizes:
            raise RuntimeError(
                f"the wrapped optimizer's param_groups were changed: expected groups of {self.group_sizes} parameters, "
                f"got {[len(group['params']) for group in groups]}. Use add_param_group of the wrapper."
            )
        for number, group in enumerate(groups[known:], known):
            self.check_group(group, number, names)
            self.append_group(group, number, names, carry)
        thawing = any(self.model[i].requires_grad for i in self.frozen_halves)
        if thawing:
            self.thaw(groups, carry)
        return thawing or len(groups) > known

    def thaw(self, groups: Sequence[dict[str, Any]], carry: Carry) -> None:
        """Give masters to 16-bit parameters that were frozen when they came and take gradients now."""
        thawed = [
            i
            for i, (model, master) in enumerate(zip(self.model, self.master, strict=True))
            if model is master and model.dtype in HALF_DTYPES and model.requires_grad
        ]
        for i in thawed:
            self._give_master(i, groups[self.places[i][0]]["params"], carry)
        if thawed:
            self.rebuild()

    def rebuild(self) -> None:
        """Sort the parameters by device, keeping what is known of those that were there before."""
        old_shards, old_versions = self.shards, self._master_versions
        old = {i: (shard, k) for shard in self.shards for k, i in enumerate(shard.index)}
        by_device: dict[torch.device, list[int]] = {}
        for i, master in enumerate(self.master):
            by_device.setdefault(master.device, []).append(i)
        self.shards = []
        for device, index in by_device.items():
            shard = Shard.allocate(device, index, self.model, self.master)
            for k, i in enumerate(index):
                if i in old:
                    before, position = old[i]
                    shard.stats.touched = True
                    shard.stats.nonfinite[k] = before.stats.nonfinite[position]
                    shard.stats.sumsq[k] = before.stats.sumsq[position]
            self.shards.append(shard)
        self.copied = [i for shard in self.shards for i in shard.copied]
        self.own = [i for i in range(len(self)) if self.master[i] is self.model[i]]
        self.has_pieces = any(map(is_sharded, self.model))
        self.own_halves = [i for i in self.own if self.model[i].dtype in HALF_DTYPES]
        self.frozen_halves = self.own_halves if self.makes_masters else []
        self._dtypes = [param.dtype for param in self.model]
        self._shapes = [param.shape for param in self.model]
        self._devices = [param.device for param in self.model]
        self._seen = kernels.Seen(None if self.has_pieces else self.model)
        self.record_all()
        self._keep_baseline(old_shards, old_versions)

    def _keep_baseline(self, shards: list[Shard], versions: list[int]) -> None:
        """Writes to older parameters that were not noticed yet must not pass for what their masters stand for."""
        old = {i: shard.cast.hashes[k] for shard in shards for k, i in enumerate(shard.copied)}
        for shard in self.shards:
            for k, i in enumerate(shard.copied):
                if i in old:
                    shard.cast.hashes[k] = old[i]
                    self._master_versions[i] = versions[i]

    def verify(self) -> None:
        """Raise ``RuntimeError`` naming the first parameter whose dtype, shape or device was changed since it came."""
        if self._seen.again(self.model):
            return
        self._verify_each()
        self._seen = kernels.Seen(None if self.has_pieces else self.model)

    def _verify_each(self) -> None:
        if (
            [param.dtype for param in self.model] == self._dtypes
            and [param.shape for param in self.model] == self._shapes
            and [param.device for param in self.model] == self._devices
        ):
            return
        for i, param in enumerate(self.model):
            kinds = HALF_DTYPES if self.master[i] is not param else (self._dtypes[i],)
            if param.dtype not in kinds:
                self._refuse(i, "dtype", self._dtypes[i], param.dtype)
            if param.shape != self._shapes[i]:
                self._refuse(i, "shape", tuple(self._shapes[i]), tuple(param.shape))
            if param.device != self._devices[i]:
                self._refuse(i, "device", self._devices[i], param.device)

    def _refuse(self, i: int, what: str, before: object, now: object) -> None:
        raise RuntimeError(
            f"parameter {self.names[i]!r} had {what} {before} when the optimizer was wrapped and has {now} now. "
            "Convert or move the model first, then make the optimizer and wrap it."
        )

    def take_pieces(self) -> None:
        """To be called before kernels get the model or the masters: where these are DTensors, they get the pieces."""
        if self.has_pieces:
            for shard in self.shards:
                shard.take_pieces(self.model, self.master)

    # -- model <- masters ------------------------------------------------------------------------------------------

    def copy_down(self) -> None:
        """Write every master, rounded to nearest even, into its model parameter. One pass; no host sync."""
        self.take_pieces()
        with torch.no_grad():
            for shard in self.shards:
                if shard.copied:
                    kernels.multi_tensor_cast(shard.masters, shard.models, shard.cast, tables=shard.cast_tables)
        self.record_versions()

    def copy_down_flags(self) -> list[tuple[str, int]]:
        """(name, bits) of the masters that did not fit at the last :meth:`copy_down`. Syncs with the device."""
        found = []
        for shard in self.shards:
            flags = shard.cast.overflow.tolist() if shard.copied else []
            if any(flags):
                found += [(self.names[i], bits) for i, bits in zip(shard.copied, flags, strict=True) if bits]
        return found

    # -- writes behind the wrapper's back ----------------------------------------------------------------------------

    def record_all(self) -> None:
        """Take the model's bits as they are for what the masters stand for (one read of the 16-bit parameters)."""
        self.take_pieces()
        for shard in self.shards:
            if shard.copied:
                kernels.multi_tensor_hash(shard.models, shard.cast.hashes)
        self.record_versions()

    def versions(self) -> list[int]:
        """The masters' version counters."""
        return self._versions_of(self.master)

    def _versions_of(self, tensors: list[Tensor]) -> list[int]:
        return [version(tensor) for tensor in tensors] if self.has_pieces else [t._version for t in tensors]

    def counted_versions(self, groups: list[dict[str, Any]]) -> list[int]:
        """The version counters of those masters whose steps are counted: torch's fused steps leave them as they are."""
        return [param._version for group in groups if not group.get("fused") for param in group["params"]]

    def written_masters(self, versions: Sequence[int]) -> list[int]:
        """Positions whose master the user had written when its version counter was as in ``versions``."""
        return [i for i in self.copied if versions[i] != self._master_versions[i]]

    def record_versions(self) -> None:
        """Remember the version counters: a higher one of a master later means that the user wrote it."""
        self._master_versions = self.versions()
        self._model_versions = self._versions_of(self.model)
        for shard in self.shards:
            shard.passed = False

    def watch(self, shard: Shard) -> kernels.Watch | None:
        """The model's parameters, for an unscaling pass to hash as it goes by; None where nobody wants to know."""
        return shard.watch if self.watches and shard.copied else None

    def written_models(self, passed_by: bool = False) -> list[int]:
        """Positions whose 16-bit parameter holds other bits than the masters were last rounded to.

        A parameter whose master was written by the user is left out: the master wins.

        Args:
            passed_by: Take the hashes of the last unscaling pass, unless a version counter or a sample of the bits says
                that the model was written since. Else 2 bytes a parameter are read.
        """
        self.take_pieces()
        written: list[int] = []
        passed_by = passed_by and self._model_versions == self._versions_of(self.model)
        for shard in self.shards:
            if not shard.copied:
                continue
            now = shard.passing_hashes() if passed_by and self._passed(shard) else self._hashes(shard)
            if not torch.equal(now, shard.cast.hashes):
                moved = (now != shard.cast.hashes).tolist()
                written += [i for i, differs in zip(shard.copied, moved, strict=True) if differs]
        return [i for i in written if version(self.master[i]) == self._master_versions[i] and self.differs(i)]

    @staticmethod
    def _hashes(shard: Shard) -> Tensor:
        now = torch.empty_like(shard.cast.hashes)
        kernels.multi_tensor_hash(shard.models, now, tables=shard.hash_tables)
        return now

    @staticmethod
    def _passed(shard: Shard) -> bool:
        """Whether an unscaling pass went by and a sample of the bits is now as it was then."""
        if not shard.passed:
            return False
        kernels.multi_tensor_hash(shard.watch.params, shard.sampled, sample=True, tables=shard.sample_tables)
        return torch.equal(shard.sampled, shard.watch.samples)

    def take_written(self) -> None:
        """Masters take what something else wrote into their parameters, as far as hashes tell. No host sync.

        As :meth:`written_models` with ``passed_by`` and :meth:`take_from_model` do it, but nobody looks whether there
        was anything to take: ``Shard.taken`` says it. Call :meth:`copy_down` next.
        """
        self.take_pieces()
        passed_by, versions = self._model_versions == self._versions_of(self.model), self.versions()
        for shard in self.shards:
            if not shard.copied:
                continue
            samples, places = None, None
            if passed_by and shard.passed:
                now, places = shard.watch.hashes, shard.rows
                kernels.multi_tensor_hash(shard.watch.params, shard.sampled, sample=True, tables=shard.sample_tables)
                samples = shard.sampled, shard.watch.samples
            else:
                now = self._hashes(shard)
            masters: Entries = shard.masters
            if versions != self._master_versions:  # a master that the user wrote wins
                theirs = [versions[i] != self._master_versions[i] for i in shard.copied]
                masters = [None if his else master for master, his in zip(shard.masters, theirs, strict=True)]
            self._take(shard, masters, now, samples, places)

    def _take(
        self,
        shard: Shard,
        masters: Entries,
        now: Tensor,
        samples: tuple[Tensor, Tensor] | None,
        places: Tensor | None,
    ) -> None:
        """``masters``: those that are as the engine left them; the others as for ``multi_tensor_take``."""
        kernels.multi_tensor_take(
            *(masters, shard.models, now, shard.cast.hashes, shard.taken),
            samples=samples,
            places=places,
            tables=shard.take_tables,
        )

    def _rounded(self, i: int) -> Tensor:
        """This rank's piece of master ``i``, rounded by the kernel that :meth:`copy_down` uses."""
        master = local(self.master[i].detach())
        rounded = torch.empty_like(master, dtype=self.model[i].dtype)
        scratch = kernels.CastStats.allocate(1, rounded.device)
        kernels.multi_tensor_cast([master], [rounded], scratch)
        return rounded

    def differs(self, i: int) -> bool:
        """Whether any element of model parameter ``i`` has other bits than its rounded master."""
        return bool(self._written(i).any())

    def _written(self, i: int) -> Tensor:
        """Element-wise: whether model parameter ``i`` has other bits than its rounded master.

        A model that was trained with split masters rounds ties of bfloat16 away from zero: loading it is no write.
        """
        model = local(self.model[i].detach())
        where = different_bits(self._rounded(i), model)
        if model.dtype == torch.bfloat16 and bool(where.any()):
            away, rest = torch.empty_like(model), torch.empty_like(model, dtype=torch.int16)
            scratch = kernels.CastStats.allocate(1, model.device)
            kernels.multi_tensor_split([local(self.master[i].detach())], [away], [rest], scratch)
            where &= different_bits(away, model)
        return where

    def take_from_model(self, positions: Iterable[int]) -> None:
        """Masters take the model's values in the elements whose bits differ; the others keep their low bits."""
        with torch.no_grad():
            for i in positions:
                model, master = local(self.model[i].detach()), local(self.master[i].detach())
                where = self._written(i)
                master.copy_(torch.where(where, model.float(), master))
        self.record_all()

    def refresh(self) -> None:
        """Every master takes its model parameter's value, in all elements."""
        with torch.no_grad():
            for i in self.copied:
                self.master[i].copy_(self.model[i].detach())
        self.record_all()

    # -- for users ---------------------------------------------------------------------------------------------------

    def like(self, i: int) -> Tensor:
        """New FP32 memory in the shape and strides of master ``i``."""
        return torch.empty_like(self.master[i], requires_grad=False)

    def operand(self, i: int) -> Tensor:
        """What a fused step takes for master ``i``, beside the model's parameter."""
        return self.master[i]

    def value(self, i: int) -> Tensor:
        """Master ``i``, with its values."""
        return self.master[i].detach()

    def lay_out(self, state: Mapping[Any, Any]) -> None:
        """State was loaded for masters that show the strides that it needs."""

    def stepped(self) -> None:
        """A step wrote masters and model."""

    def take_loaded(self, masters: Sequence[Tensor | None]) -> None:
        """A checkpoint was loaded into what :meth:`saved` gave: here, into the masters themselves."""

    def shown(self) -> Iterator[Tensor]:
        """What users get for masters, in order."""
        return iter(list(self.master))

    def saved(self) -> list[Tensor | None]:
        """FP32 masters in order, None where a parameter is its own: a value has one home in a checkpoint."""
        return [
            None if master is model else master.detach() for model, master in zip(self.model, self.master, strict=True)
        ]

    def check_model(self, model: object) -> None:
        """Raise where ``model`` is no module that these parameters are of, or where not all masters are here."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
        if self.elsewhere:
            raise RuntimeError(
                "fp32_state_dict: this rank has a part of the masters only. Use fp16opt.distributed.fp32_state_dict."
            )
        mine = {id(param) for param in self.model}
        if not any(id(param) in mine for param in model.parameters()):
            raise ValueError("model: none of its parameters is in this optimizer. Pass the model that it trains.")

    def fp32_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """``model.state_dict()`` with masters for parameters that have one, under all their names."""
        masters = {id(self.model[i]): self.master[i] for i in self.copied}
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = masters.get(id(value), value).detach()
        return state

    def summary(self) -> str:
        counts: dict[str, int] = {}
        for i, model in enumerate(self.model):
            kind = str(model.dtype).removeprefix("torch.")
            if self.master[i] is not model:
                kind += " with FP32 masters"
            elif model.dtype in HALF_DTYPES:
                kind += " frozen" if self.makes_masters else " without masters"
            counts[kind] = counts.get(kind, 0) + 1
        return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"

    def describe(self, positions: Iterable[int]) -> str:
        return describe([self.names[i] for i in positions])


def name_of(group: dict[str, Any], place: int, param: object, names: dict[int, str]) -> str | None:
    """The name given by ``named_parameters``, else by torch's own named param groups, else None."""
    if id(param) in names:
        return names[id(param)]
    own = group.get("param_names")
    return str(own[place]) if own is not None and place < len(own) else None
