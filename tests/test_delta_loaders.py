"""docs/deltas.md's lines that send deltas to vLLM, verl and slime and load them there: the sampler's bits are right."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samplers
import torch
from samplers import Sampler, Trained

from fp16opt import MixedPrecisionOptimizer, WeightDelta, WeightPatch

PAGE = Path(__file__).parents[1] / "docs" / "deltas.md"
LOADERS = {
    "vLLM": "vllm.model_executor.model_loader.checkpoint_weight_patch",
    "verl": "verl.workers.rollout.sglang_rollout.delta_loader",
}
SYNCS = 4


def lines_of(project: str) -> dict[str, Any]:
    """What the python blocks define below the project's heading, and below those before it that they continue."""
    text = PAGE.read_text()
    found: dict[str, Any] = {}
    for heading in ("verl", "slime") if project == "slime" else (project,):
        section = re.split(r"^#{2,3} ", text[text.index(f"### {heading}") + 4 :], maxsplit=1, flags=re.MULTILINE)[0]
        for code in re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            exec(compile(code, str(PAGE), "exec"), found)
    return found


@pytest.fixture
def lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], dict[str, Any]]:
    def lines(project: str, whose: str) -> dict[str, Any]:
        if whose == "installed":
            pytest.importorskip(LOADERS[project], reason=f"{project} is not installed: its loader is not tried")
        else:
            for name, module in samplers.modules().items():
                monkeypatch.setitem(sys.modules, name, module)
        return lines_of(project)

    return lines


def follow(dtype: torch.dtype, sync: Callable[[WeightDelta, list[Sampler]], None]) -> None:
    """Train; after each delta both tensor-parallel ranks of the sampler have the trained bits."""
    model = Trained(dtype)
    opt = MixedPrecisionOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), loss_scale=128.0, track_changes=True, optimizer_state="8bit"
    )
    sampler = [Sampler(rank, dtype) for rank in range(2)]
    for each in sampler:
        for name, value in each.expected(model).items():
            getattr(each, name).copy_(value.detach())
    for number in range(SYNCS):
        for _ in range(1 + number % 3):
            opt.zero_grad()
            opt.backward(model(torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(number))))
            opt.step()
        if number == 2:
            model.qkv.weight.data[5, 5] = 3.0  # a write that comes whole
        sync(opt.take_delta(model), sampler)
        for each in sampler:
            for name, value in each.expected(model).items():
                assert torch.equal(getattr(each, name).view(torch.uint8), value.view(torch.uint8)), (number, name)


def messages(delta: WeightDelta) -> list[list[WeightPatch]]:
    """Of one dtype and one kind."""
    key = lambda patch: (patch.indices is None, str(patch.dtype))  # noqa: E731
    patches = sorted(delta.patches(chunk_bytes=600, names=samplers.names), key=key)
    return [list(found) for _, found in itertools.groupby(patches, key)]


@pytest.mark.parametrize("whose", ["installed", "stand-in"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vllm(dtype: torch.dtype, whose: str, lines: Any) -> None:
    page = lines("vLLM", whose)

    def sync(delta: WeightDelta, sampler: list[Sampler]) -> None:
        for each in sampler:
            page["load"](each, page["send"](delta, samplers.names))

    follow(dtype, sync)


@pytest.mark.parametrize("whose", ["installed", "stand-in"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_verl(dtype: torch.dtype, whose: str, lines: Any) -> None:
    if not hasattr(torch, "hash_tensor"):
        pytest.skip("verl's checksum is torch.hash_tensor, which this torch has not")
    page = lines("verl", whose)

    @torch.no_grad()
    def sync(delta: WeightDelta, sampler: list[Sampler]) -> None:
        for each in sampler:
            for patches in messages(delta):
                page["load"](each, page["send"](patches))

    follow(dtype, sync)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slime(dtype: torch.dtype, lines: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch", reason="slime's files are written by the safetensors package")
    page = lines("slime", "stand-in")
    versions = itertools.count(1)

    def sync(delta: WeightDelta, sampler: list[Sampler]) -> None:
        version = next(versions)
        folder = tmp_path / f"weight_v{version:06d}"
        folder.mkdir()
        for number, patches in enumerate(messages(delta)):
            sparse = [
                patch
                if patch.indices is not None
                else patch._replace(indices=torch.arange(patch.values.numel(), dtype=torch.int32))
                for patch in patches
            ]
            page["write"](sparse, folder, version, number)
        (folder / "DONE").touch()
        for each in sampler:
            samplers.update_weights_from_disk(each, folder, version)

    follow(dtype, sync)
