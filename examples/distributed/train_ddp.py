"""Train the language model of these examples on several ranks, with DistributedDataParallel.

    torchrun --nproc-per-node=2 examples/distributed/train_ddp.py                     # a minute on two CPU cores
    torchrun --nproc-per-node=8 examples/distributed/train_ddp.py --dtype bf16        # eight GPUs, unchanged
    torchrun --nproc-per-node=2 --max-restarts=1 examples/distributed/train_ddp.py --die-at 130

Every rank keeps all masters and all optimizer state. The micro-batches of a step are added up in FP32 on each rank,
under ``no_sync``; ``distributed.attach`` has them averaged with the last one. Run it again, on any number of ranks, and
it goes on from the newest complete checkpoint in --output.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import training
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def shard(model: nn.Module) -> nn.Module:
    """The same model on every rank; gradients are views of the buckets that DDP sends."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def local(model: nn.Module) -> AbstractContextManager[object]:
    """Gradients stay on this rank."""
    return model.no_sync()


if __name__ == "__main__":
    training.train(training.parse_arguments("The language model, with DDP."), shard, local)
