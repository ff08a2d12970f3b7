"""apex.normalization and apex.parallel: torch's modules under the old names and arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fp16opt.apex import normalization as norm
from fp16opt.apex.parallel import SyncBatchNorm, convert_syncbn_model

from .runs import python

X = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))


def test_layer_and_rms_norm_are_torchs() -> None:
    weight, bias = torch.linspace(0.5, 1.5, 6), torch.linspace(-1, 1, 6)
    for layer, wanted in (
        (norm.FusedLayerNorm(6, 1e-3), F.layer_norm(X, [6], weight, bias, 1e-3)),
        (norm.FusedRMSNorm(6, 1e-3, memory_efficient=True), F.rms_norm(X, [6], weight, 1e-3)),
    ):
        with torch.no_grad():
            layer.weight.copy_(weight)
            if getattr(layer, "bias", None) is not None:
                layer.bias.copy_(bias)
        assert torch.equal(layer(X), wanted)
    assert isinstance(norm.FusedLayerNorm((2, 3)), nn.LayerNorm)
    assert norm.FusedLayerNorm(6, elementwise_affine=False).weight is None
    assert norm.FusedRMSNorm(6).eps == 1e-5


def test_mixed_norms_give_their_weights_dtype() -> None:
    half = X.half()
    for cls, wanted in (
        (norm.MixedFusedLayerNorm, F.layer_norm(half.float(), [6])),
        (norm.MixedFusedRMSNorm, F.rms_norm(half.float(), [6], eps=1e-5)),
    ):
        layer = cls(6)
        out = layer(half)
        assert out.dtype == torch.float32
        assert torch.equal(out, wanted)
        out.sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        assert layer.half()(X).dtype == torch.float16


def test_functions_and_their_apply_forms() -> None:
    weight, bias = torch.ones(6), torch.zeros(6)
    want, rms = F.layer_norm(X, [6], eps=1e-6), F.rms_norm(X, [6], eps=1e-6)
    assert torch.equal(norm.fused_layer_norm(X, 6), want)
    assert torch.equal(norm.fused_layer_norm_affine(X, weight, bias, (6,)), F.layer_norm(X, [6], weight, bias, 1e-6))
    assert torch.equal(norm.FusedLayerNormAffineFunction.apply(X, weight, bias, (6,), 1e-6), want)
    assert torch.equal(norm.FusedLayerNormFunction.apply(X, (6,), 1e-6), want)
    assert torch.equal(norm.FusedRMSNormAffineFunction.apply(X, weight, (6,), 1e-6), rms)
    assert torch.equal(norm.FusedRMSNormFunction.apply(X, (6,), 1e-6), rms)
    assert norm.mixed_dtype_fused_layer_norm_affine(X.half(), weight, bias, 6).dtype == torch.float32
    assert norm.mixed_dtype_fused_rms_norm_affine(X, weight.half(), 6).dtype == torch.float16


# -- parallel --------------------------------------------------------------------------------------------------------


def test_convert_syncbn_model_keeps_weights_buffers_and_mode() -> None:
    """apex's lost eval mode (quirk 46)."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(3, affine=False)))
    net[1].running_mean.fill_(3.0)
    net[1].weight.data.fill_(2.0)
    net.eval()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    converted = convert_syncbn_model(net)
    assert isinstance(converted[1], nn.SyncBatchNorm)
    assert isinstance(converted[2][0], nn.SyncBatchNorm)
    assert not any(module.training for module in converted.modules())
    for key, value in converted.state_dict().items():
        assert torch.equal(value, state[key]), key
    x = torch.randn(2, 1, 2, 2)
    assert torch.equal(converted[:2](x), F.batch_norm(net[0](x), state["1.running_mean"], state["1.running_var"],
                                                      state["1.weight"], state["1.bias"]))  # fmt: skip


def test_sync_batch_norm_takes_apexs_arguments() -> None:
    bn = SyncBatchNorm(2, channel_last=True, fuse_relu=True).eval()
    x = torch.tensor([[1.0, -2.0]])
    torch.testing.assert_close(bn(x), torch.tensor([[1.0, 0.0]]), rtol=1e-4, atol=0)
    torch.testing.assert_close(bn(x, z=torch.tensor([[0.0, 5.0]])), torch.tensor([[1.0, 3.0]]), rtol=1e-4, atol=0)


TWO_RANKS = """
import gc
import sys
import fp16opt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
fp16opt.install_as_apex()
from apex import amp
from apex.fp16_utils import FP16_Optimizer, convert_network
from apex.parallel import DistributedDataParallel, create_syncbn_process_group
from apex.parallel.distributed import flat_dist_call


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    train(rank)
    for level in ("O1", "O2"):
        train_by_amp(rank, level)
    gc.collect()  # a reducer that is freed last waits for gloo's thread with the interpreter's lock held
    dist.barrier()  # a rank that leaves early breaks the connections of one that still makes its groups
    dist.destroy_process_group()
    print("rank done", flush=True)


def train(rank):
    torch.manual_seed(rank)  # ranks begin with other weights: rank 0's win
    model = DistributedDataParallel(convert_network(Branches(), torch.float16), message_size=1, delay_allreduce=True)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5), static_loss_scale=16.0)
    first = model.module.used.weight.detach().float().clone()
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(model(torch.full((1, 3), 1.0 + rank).half()).float().sum())
        optimizer.step()
    gathered = [torch.zeros(2, 3) for _ in range(2)]
    dist.all_gather(gathered, model.module.used.weight.detach().float())
    assert torch.equal(*gathered), "ranks differ"
    # the mean of the inputs' gradients, 1 and 2, over three steps of 0.5
    assert torch.allclose(gathered[0], first - 3 * 0.5 * 1.5, atol=2e-3), (gathered, first)
    for model_param, master in zip(optimizer.model_params(), optimizer.master_params()):
        assert torch.equal(model_param, master.half())
    tensors = [torch.full((2,), float(rank)), torch.full((3,), float(rank)).double(), torch.full((1,), 4.0 * rank)]
    flat_dist_call(tensors, dist.all_reduce)
    assert [t.tolist() for t in tensors] == [[0.5] * 2, [0.5] * 3, [2.0]]
    flat_dist_call(tensors, dist.broadcast, (0,))
    assert create_syncbn_process_group(0) is None
    assert dist.get_world_size(create_syncbn_process_group(2)) == 2
    assert dist.get_world_size(create_syncbn_process_group(1)) == 1
    for size in (3, -1):
        try:
            create_syncbn_process_group(size)
        except ValueError as error:
            assert f"group_size: expected a divisor of the 2 ranks, or 0, got {size}." in str(error)
        else:
            raise SystemExit("not refused")
    for bad in ({"gradient_average": False}, {"shared_param": 1}):
        try:
            DistributedDataParallel(torch.nn.Linear(1, 1), **bad)
        except ValueError as error:
            assert next(iter(bad)) in str(error)
        else:
            raise SystemExit("not refused")


def train_by_amp(rank, level):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    x, y, skips = torch.randn(16, 8), torch.randint(0, 3, (16,)), []
    for i in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(parallel(x).float(), y)
        with amp.scale_loss(loss * (float("inf") if (i, rank) == (2, 1) else 1.0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        skips.append(optimizer.step_was_skipped)
    assert skips == [False, False, True, False, False], "an inf on one rank skips on both"
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 2}}
    for param, master in zip(model.parameters(), amp.master_params(optimizer)):
        assert torch.equal(param, master.to(param.dtype))
        assert (param.dtype, master.dtype) == (torch.float16 if level == "O2" else torch.float32, torch.float32)
        gathered = [torch.zeros_like(master) for _ in range(2)]
        dist.all_gather(gathered, master.detach())
        assert torch.equal(*gathered), "ranks differ"


if __name__ == "__main__":
    mp.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")  # torch is imported once
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_ranks_train_alike(tmp_path: Path) -> None:
    """Broadcast from rank 0, averaged gradients, equal weights on all ranks, model = half(master); at O1 and O2 too."""
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    done = python(tmp_path, "ranks.py", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("rank done") == 2
