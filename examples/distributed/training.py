"""What train_ddp.py and train_fsdp2.py share: ranks, a loop that resumes, progress on rank 0."""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import language_model as lm
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from fp16opt import MixedPrecisionOptimizer, distributed

Shard = Callable[[lm.GPT], nn.Module]
Local = Callable[[nn.Module], AbstractContextManager[object]]


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dtype", choices=["fp16", "bf16"], default="fp16", help="of the weights")
    parser.add_argument("--masters", choices=["full", "split", "split24"], default="full", help="master_weights")
    parser.add_argument("--state", choices=["fp32", "8bit"], default="fp32", help="optimizer_state")
    parser.add_argument("--steps", type=int, default=240, help="length of the schedule")
    parser.add_argument("--output", type=Path, default=Path("distributed-output"), help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--die-at", type=int, help="the last rank kills itself in this step of the first life")
    return parser.parse_args()


def start_rank(output: Path) -> torch.device:
    """Join the process group: NCCL with a GPU for each rank, gloo on the CPU.

    torchrun starts all ranks anew when one has died. Each life gets a store of its own: in torchrun's own one the new
    ranks may find the addresses of the dead ones.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ.get('MASTER_PORT', '0')}"
    output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{(output / f'store-{job}-{life}').resolve()}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )
    return device


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def learning_rate(step: int, steps: int) -> float:
    """Half a cosine, from the language model's rate to a tenth of it. The step alone decides, so it resumes."""
    return lm.LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train_step(model: nn.Module, opt: MixedPrecisionOptimizer, text: lm.Text, step: int, local: Local) -> torch.Tensor:
    """Micro-batches of this rank, added up in FP32; ``local`` is the context of all but the last."""
    opt.zero_grad()
    total = torch.zeros((), device=text.train.device)
    first = (step * dist.get_world_size() + dist.get_rank()) * lm.ACCUMULATE
    for k in range(lm.ACCUMULATE):
        batch = lm.draw_batch(text.train, seed=first + k)
        if k < lm.ACCUMULATE - 1:
            with local(model):
                loss = lm.compute_loss(model, batch) / lm.ACCUMULATE
                opt.backward(loss)
        else:
            loss = lm.compute_loss(model, batch) / lm.ACCUMULATE
            opt.backward(loss)
        total += loss.detach()
    opt.clip_master_grads(lm.MAX_NORM)
    opt.step()
    return total


def train(args: argparse.Namespace, shard: Shard, local: Local) -> None:
    """The whole of one rank."""
    torch.set_num_threads(1)
    run(args, start_rank(args.output), shard, local)
    # DDP's reducer goes before the group: freed last, it waits for gloo's thread with the interpreter's lock held.
    gc.collect()
    dist.destroy_process_group()


def run(args: argparse.Namespace, device: torch.device, shard: Shard, local: Local) -> None:
    """The training of one rank; goes on from the newest complete checkpoint."""
    text = lm.load_text(device)
    torch.manual_seed(0)
    model = shard(lm.GPT(len(text.characters)).to(device, lm.DTYPES[args.dtype]))
    adamw = AdamW(model.parameters(), lr=lm.LEARNING_RATE, betas=lm.BETAS, weight_decay=lm.WEIGHT_DECAY)
    opt = MixedPrecisionOptimizer(
        adamw,
        dynamic=args.dtype == "fp16",
        grad_accumulation="fp32",
        master_weights=args.masters,
        optimizer_state=args.state,
        named_parameters=model.named_parameters(),
    )
    distributed.attach(opt, model, verify_ranks_every=100)
    step = 0
    newest = distributed.latest(args.output)
    if newest is not None:
        distributed.load(newest, model, opt)
        step = int(newest.name.removeprefix("step"))
        say(f"resumed from {newest}")
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    began, here = time.perf_counter(), step
    while step < args.steps:
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        if step == args.die_at and first_life and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(1)
        loss = train_step(model, opt, text, step, local)
        step += 1
        if step % args.save_every == 0 or step == args.steps:
            characters = (step - here) * lm.ACCUMULATE * lm.MICRO_BATCH * lm.CONTEXT * dist.get_world_size()
            rate = characters / (time.perf_counter() - began)
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
            say(f"step {step}: loss {loss.item():.3f}, scale {opt.loss_scale:g}, {rate:,.0f} characters/s")
            distributed.save(args.output / f"step{step}", model, opt)
    say(f"kept by this rank: {opt.memory()}")
    say(f"validation loss {lm.validate(model, text):.3f}, {opt.skipped_steps} steps skipped")
