"""FP16_Optimizer in a minimal script, as apex users wrote it: only the import line is new.

    python examples/apex/fp16_optimizer_minimal.py
    python examples/apex/fp16_optimizer_minimal.py --dynamic-loss-scale --clip 1.0
    python examples/apex/fp16_optimizer_minimal.py --steps 250 --checkpoint run.pt   # then again with --resume run.pt
    python -m fp16opt.apex script.py                                                 # for a script that says `apex`

A layer in FP16 learns the weights of another one. The learning rate is so small in the end that most updates are below
half the distance between an FP16 weight and its neighbour: without FP32 masters (``--no-masters``) the loss stays
higher.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from fp16opt.fp16_utils import FP16_Optimizer  # was: from apex.fp16_utils import FP16_Optimizer

ROWS, INPUTS, OUTPUTS = 64, 32, 16


def data(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The layer to be trained, in FP16, its inputs, and what it should answer."""
    torch.manual_seed(0)
    teacher, model = nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, OUTPUTS)
    x = torch.randn(ROWS, INPUTS)
    return model.to(device).half(), x.to(device).half(), teacher(x).detach().to(device)


def arguments() -> argparse.Namespace:
    """What the command line asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--static-loss-scale", type=float, default=128.0)
    parser.add_argument("--dynamic-loss-scale", action="store_true")
    parser.add_argument("--clip", type=float, help="largest norm of the gradients")
    parser.add_argument("--no-masters", action="store_true", help="step the FP16 weights themselves, to compare")
    parser.add_argument("--checkpoint", type=Path, help="write model, optimizer and step there at the end")
    parser.add_argument("--resume", type=Path, help="go on from such a file")
    return parser.parse_args()


def main() -> None:
    """Train, and print the loss."""
    given = arguments()
    model, x, y = data(given.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500, eta_min=1e-4)
    if not given.no_masters:
        optimizer = FP16_Optimizer(
            optimizer, static_loss_scale=given.static_loss_scale, dynamic_loss_scale=given.dynamic_loss_scale
        )
    first = 0
    if given.resume:
        saved = torch.load(given.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]
    for _ in range(first, given.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        if given.no_masters:
            loss.backward()
        else:
            optimizer.backward(loss)
            if given.clip:
                optimizer.clip_master_grads(given.clip)
        optimizer.step()
        schedule.step()
    print(f"loss after {given.steps} steps: {nn.functional.mse_loss(model(x).float(), y).item():.3e}")
    if given.checkpoint:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**state, "step": given.steps}, given.checkpoint)


if __name__ == "__main__":
    main()
