"""Train the language model of these examples on several ranks, with FSDP2 (``fully_shard``).

    torchrun --nproc-per-node=2 examples/distributed/train_fsdp2.py                   # a minute on two CPU cores
    torchrun --nproc-per-node=8 examples/distributed/train_fsdp2.py --dtype bf16      # eight GPUs, unchanged
    torchrun --nproc-per-node=2 examples/distributed/train_fsdp2.py --masters split --state 8bit  # fewer bytes
    torchrun --nproc-per-node=2 --max-restarts=1 examples/distributed/train_fsdp2.py --die-at 130

Weights, gradients, masters and optimizer state are spread over the ranks. Gradients are reduced in FP32 and each step
sends one message of 32 bytes besides: whether any rank overflowed, and the norm. Run it again, on any number of ranks,
and it goes on from the newest complete checkpoint in --output, with --masters and --state as you like; checkpoints of
train_ddp.py will do too. In the end it says how many bytes a parameter a rank keeps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import training
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model: nn.Module) -> nn.Module:
    """One piece of every parameter on each rank; blocks are gathered one after the other."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def local(model: nn.Module) -> AbstractContextManager[object]:
    """Every backward is reduced: whole gradients would take the memory that sharding saves."""
    return nullcontext()


if __name__ == "__main__":
    training.train(training.parse_arguments("The language model, with FSDP2."), shard, local)
