"""Masters that are spread over ranks: one verdict, one norm, in one message of 16 bytes a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.ranks import Ranks
from .exchange import compare, require_process_group

_EXACT = 2**53  # float64 counts up to here without gaps
_HIGHEST = 7  # (2**128) ** 7 is within float64, with room for a sum, and so are small gradients


class GroupRanks(Ranks):
    """Verdicts and norms are added up over a process group.

    Args:
        group: the ranks that share the masters.
        device: where messages must lie.
        facts: what must be the same on every rank, compared once, before the first message.
    """

    alone = False

    def __init__(self, group: Any, device: torch.device, facts: Callable[[], list[str]]) -> None:
        self.group = group
        self.device = device
        self._facts: Callable[[], list[str]] | None = facts

    def check_alike(self) -> None:
        """Compare, the first time, what must be the same on every rank. A rank that differs would be summed wrongly."""
        require_process_group("an optimizer with masters on several ranks")
        if self._facts is not None:
            compare("the optimizer", self._facts(), self.group)
            self._facts = None

    def check_norm_type(self, norm_type: float) -> None:
        """Sums of higher powers of FP32 numbers leave float64, and one message has no room for their largest."""
        if _HIGHEST < norm_type < math.inf:
            raise ValueError(
                f"norm_type: over ranks expected at most {_HIGHEST}, or inf, got {norm_type:g}: sums of such powers "
                "don't fit into float64."
            )

    def agree(
        self, found: Sequence[Tensor], norm_type: float | None, power_sum: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """See :meth:`fp16opt.engine.ranks.Ranks.agree`. Sends float64 [verdicts, sum]: 16 bytes."""
        self.check_alike()
        home = found[0].device
        flags = torch.stack([flag.double() for flag in found]).to(self.device)
        any_found = flags.amax()
        last = torch.zeros_like(any_found) if power_sum is None else power_sum.to(any_found)
        last = torch.where(any_found > 0, torch.zeros_like(last), last)  # no inf or nan travels
        if norm_type == math.inf:
            total = torch.cat([flags, last.view(1)])
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self.group)
            flags = total[:-1]
        else:
            base = float(dist.get_world_size(self.group) + 1)
            total = torch.cat([_packed(flags, base), last.view(1)])
            dist.all_reduce(total, group=self.group)
            flags = _unpacked(total[:-1], base, len(found))
        verdicts = (flags > 0).float().to(home)
        norm = None
        if norm_type is not None:
            norm = total[-1] if norm_type == math.inf else total[-1].pow(1.0 / norm_type)
            norm = torch.where(flags.amax() > 0, torch.full_like(norm, math.inf), norm).to(home)
        return list(verdicts.unbind()), norm

    def largest(self, norms: Tensor) -> Tensor:
        """See :meth:`fp16opt.engine.ranks.Ranks.largest`. A norm that is not finite travels as 0."""
        there = torch.where(norms.isfinite(), norms, 0.0).to(self.device)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=self.group)
        return there.to(norms.device)


def _digits(base: float) -> int:
    """How many counts below ``base`` one float64 holds exactly."""
    return max(1, int(math.log(_EXACT) / math.log(base)))


def _packed(flags: Tensor, base: float) -> Tensor:
    """Several flags as digits of one number, so that counts of them over the ranks need one slot."""
    digits = _digits(base)
    weights = torch.tensor([base ** (k % digits) for k in range(len(flags))], dtype=flags.dtype, device=flags.device)
    return torch.stack([part.sum() for part in torch.split(flags * weights, digits)])


def _unpacked(slots: Tensor, base: float, count: int) -> Tensor:
    digits = _digits(base)
    found = [torch.floor(slots[k // digits] / base ** (k % digits)) % base for k in range(count)]
    return torch.stack(found)


class MeshRanks(GroupRanks):
    """Masters are DTensors, perhaps with plain tensors among them (a layer norm under tensor parallelism).

    Args:
        params: the model's parameters that the optimizer has.
        facts: see :class:`GroupRanks`.

    Raises:
        ValueError: the meshes are no parts of one mesh.
    """

    def __init__(self, params: Sequence[Tensor], facts: Callable[[], list[str]]) -> None:
        self.root = root_mesh(params)
        self._first = int(self.root.mesh.flatten()[0])
        self._counted: dict[int, tuple[Tensor, bool]] = {}
        super().__init__(_group_of(self.root), _device_of(self.root), facts)

    def counted(self, param: Tensor) -> bool:
        """Once over all ranks: on the first rank of every dimension over which the piece is repeated."""
        known = self._counted.get(id(param))
        if known is None:
            known = self._counted[id(param)] = (param, self._is_counted(param))
        return known[1]

    def _is_counted(self, param: Any) -> bool:
        mesh = getattr(param, "device_mesh", None)
        if mesh is None:
            return dist.get_rank() == self._first
        # The root's ranks fall into meshes like this one, with equal contents: the one with the first rank counts.
        if not bool((mesh.mesh == self._first).any()):
            return False
        places = zip(mesh.get_coordinate(), param.placements, strict=True)
        return all(place == 0 for place, placement in places if placement.is_replicate())


def _dim_names(mesh: Any) -> tuple[Any, ...]:
    return tuple(mesh.mesh_dim_names or range(mesh.ndim))


def _root_of(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch before 2.10

    return _mesh_resources.get_root_mesh(mesh)


def root_mesh(params: Sequence[Tensor]) -> Any:
    """The mesh that the meshes of all DTensors among ``params`` are parts of."""
    meshes = [param.device_mesh for param in params if hasattr(param, "device_mesh")]
    roots: list[Any] = []
    for mesh in meshes:
        root = _root_of(mesh)
        if root not in roots:
            roots.append(root)
    if len(roots) != 1:
        shown = ", ".join(repr(root) for root in roots)
        raise ValueError(
            f"the parameters lie on meshes that are no parts of one mesh: {shown}. Make one mesh with "
            "init_device_mesh and give its dimensions, as in mesh['dp'], to fully_shard and parallelize_module."
        )
    return roots[0]


def _group_of(root: Any) -> Any:
    """The group of all ranks of the mesh; None where these are all ranks."""
    if root.ndim == 1:
        return root.get_group()
    if root.size() == dist.get_world_size():
        return None
    for dim in range(root.ndim):
        if root.size(dim) == root.size():
            return root.get_group(dim)
    # A new group, which torch numbers on the ranks of the mesh alone: the others must make as many.
    return root._flatten("_".join(map(str, _dim_names(root)))).get_group()


def _device_of(root: Any) -> torch.device:
    kind = root.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
