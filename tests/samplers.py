"""What loads patches in samplers, written from the documented forms of vLLM, verl and slime: for the lines of docs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH, EXPERTS = 16, 4


class Trained(nn.Module):
    """A trainer's layers: attention's three matrices in one, experts in one, an FP32 norm, a tied head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH, dtype=dtype)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH).to(dtype))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mixed = (self.experts.sum(0) @ x.mT).float().square().mean() + self.qkv(x).float().square().mean()
        return mixed + self.head(self.norm(x.float()).to(x.dtype)).float().square().mean()


def names(name: str, shape: tuple[int, ...]) -> Any:
    """The checkpoint's."""
    if name == "qkv.weight":
        return [(f"layer.{part}_proj.weight", WIDTH * row, (WIDTH, WIDTH)) for row, part in enumerate("qkv")]
    if name == "experts":
        return [(f"layer.experts.{row}.weight", row, shape[1:]) for row in range(shape[0])]
    return f"model.{name}"


class Sampler(nn.Module):
    """One of two tensor-parallel ranks: its rows of q, k and v in one parameter, its rows of experts in another."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank
        self.qkv = nn.Parameter(torch.zeros(3 * WIDTH // 2, WIDTH, dtype=dtype), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(EXPERTS, 4, WIDTH, dtype=dtype), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(50, WIDTH, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Whole tensors by the checkpoint's names, each copied where it belongs."""
        loaded = set()
        for name, whole in weights:
            if name.endswith("_proj.weight"):
                row, rows = "qkv".index(name.split(".")[1][0]), WIDTH // 2
                self.qkv[row * rows : (row + 1) * rows].copy_(whole[self.rank * rows : (self.rank + 1) * rows])
            elif ".experts." in name:
                self.experts[int(name.split(".")[2])].copy_(whole[self.rank * 4 : (self.rank + 1) * 4])
            else:
                {"model.embed.weight": self.embed, "model.norm.weight": self.norm}[name].copy_(whole)
            loaded.add(name)
        return loaded

    def expected(self, model: Trained) -> dict[str, Tensor]:
        """What it has when it has the trained weights."""
        q, k, v = (part.chunk(2)[self.rank] for part in model.qkv.weight.chunk(3))
        experts = torch.stack([expert.chunk(2)[self.rank] for expert in model.experts])
        return {
            "qkv": torch.cat([q, k, v]),
            "experts": experts,
            "embed": model.head.weight,
            "norm": model.norm.weight,
        }


@contextlib.contextmanager
def nothing_by_nan() -> Iterator[None]:
    """``copy_`` leaves elements as they are for which NaN comes."""
    usual = Tensor.copy_

    def copy_(self: Tensor, new: Tensor, *args: Any) -> Tensor:
        assert self.shape == new.shape
        return usual(self, torch.where(new.isnan(), self, new), *args)

    Tensor.copy_ = copy_  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.copy_ = usual  # type: ignore[method-assign]


def whole_of(shape: Iterable[int], values: Tensor, indices: Tensor) -> Tensor:
    """NaN but where something changed."""
    shape = tuple(shape)
    whole = torch.full((math.prod(shape),), math.nan, dtype=values.dtype)
    whole[indices.long()] = values
    return whole.view(shape)


# -- vLLM: github.com/vllm-project/vllm/pull/50723 ---------------------------------------------------------------------


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None = None


@torch.no_grad()
def load_checkpoint_weight_patches(model: Any, patches: Iterable[CheckpointWeightPatch]) -> set[str]:
    """All sparse or all dense; no NaN, no index twice or outside; a name again is loaded behind the one before."""
    patches, loaded = list(patches), set()
    if len({patch.indices is None for patch in patches}) > 1:
        raise ValueError("dense and sparse patches in one call")
    for patch in patches:
        if patch.indices is None:
            loaded |= model.load_weights([(patch.name, patch.values.view(patch.shape))])
            continue
        if patch.values.isnan().any() or patch.indices.unique().numel() != patch.values.numel():
            raise ValueError(f"{patch.name}: NaN, or an index twice")
        with nothing_by_nan():
            loaded |= model.load_weights([(patch.name, whole_of(patch.shape, patch.values, patch.indices))])
    return loaded


# -- verl: docs/advance/delta_weight_sync.md there ---------------------------------------------------------------------


@torch.no_grad()
def apply_delta(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """One message: what is in ``__delta_spec__`` as JSON, int32 positions as bytes, values of one dtype."""
    tensors = dict(named_tensors)
    spec, values = json.loads(tensors["__delta_spec__"].numpy().tobytes()), tensors["__values__"]
    positions = tensors["__positions__"]
    sums = [int(torch.hash_tensor(part).item()) if part.numel() else 0 for part in (positions, values)]
    if sums[0] ^ (sums[1] << 1) != spec["checksum"]:
        raise RuntimeError("checksum")
    load_message(model, spec["encoding"], spec["params"], positions, values)


def load_message(model: Any, encoding: str, params: list[dict[str, Any]], positions: Tensor, values: Tensor) -> None:
    for param in params:
        mine = values[param["val_start"] : param["val_end"]]
        assert mine.dtype == getattr(torch, param["dtype"])
        if encoding == "dense":
            model.load_weights([(param["name"], mine.view(param["shape"]))])
            continue
        assert (encoding, param["pos_width"]) == ("indices", 4)
        indices = positions[param["pos_start"] : param["pos_end"]].view(torch.int32)
        with nothing_by_nan():
            model.load_weights([(param["name"], whole_of(param["shape"], mine, indices))])


# -- slime: docs/en/advanced/delta-weight-sync.md there ----------------------------------------------------------------


@torch.no_grad()
def update_weights_from_disk(model: Any, folder: Path, version: int) -> None:
    """All files of a folder that is complete."""
    import safetensors

    assert (folder / "DONE").exists()
    for path in sorted(folder.glob("rank*_flush*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            told = file.metadata()
            assert (told["prev_version"], told["current_version"]) == (str(version - 1), str(version))
            tensors = [file.get_tensor(f"__{kind}__") for kind in ("positions", "values")]
        load_message(model, told["encoding"], json.loads(told["params"]), *tensors)


def modules() -> dict[str, ModuleType]:
    """By the names under which docs import them, with the packages around them."""
    made: dict[str, ModuleType] = {}
    for path, found in (
        (
            "vllm.model_executor.model_loader.checkpoint_weight_patch",
            (CheckpointWeightPatch, load_checkpoint_weight_patches),
        ),
        ("verl.workers.rollout.sglang_rollout.delta_loader", (apply_delta,)),
    ):
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        for each in found:
            setattr(made[path], each.__name__, each)
    return made
