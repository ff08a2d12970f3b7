"""What does an average of FP32 masters cost, against torch's own way over the same tensors?

    python benchmarks/averaging.py [--quick] [--json PATH] [--rounds N] [--threads N]

``AveragedMasters.update()`` over the 51 million parameters of a GPT in float16, and ``torch._foreach_lerp_`` from
copies of the same masters into averages of its own: one read of masters, one read and one write of averages, which is
all that there is to do. Also torch's ``AveragedModel``, which averages the 16-bit weights. Before anything is timed,
averages of three updates are compared with numpy's.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import sys
from collections.abc import Callable

import numpy as np
import routes
import torch
from routes import Problem
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fp16opt import AveragedMasters, MixedPrecisionOptimizer, ema

DECAY = 0.999
BYTES = {"AveragedMasters": 12, "torch._foreach_lerp_": 12, "AveragedModel of 16-bit weights": 6, "memory copy": 8}


class Way:
    """One of the contenders: ``run`` is one update."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.name = name
        self.run = run

    def prepare(self) -> None:
        """Nothing: updates can follow each other."""


def check(averaged: AveragedMasters, opt: MixedPrecisionOptimizer, names: list[str]) -> None:
    """Exit where three updates are not numpy's, in the largest tensor and the first."""
    masters = list(opt.master_params())
    for place in (0, max(range(len(masters)), key=lambda i: masters[i].numel())):
        wanted = masters[place].detach().numpy().copy()
        average = averaged.fp32_state_dict()[names[place]]
        average.copy_(torch.from_numpy(wanted))
        averaged.updates = 1
        for _ in range(3):
            with torch.no_grad():
                masters[place].mul_(1.25)
            averaged.update()
            wanted = wanted + np.float32(1.0 - DECAY) * (masters[place].detach().numpy() - wanted)
        if not np.array_equal(average.numpy(), wanted):
            sys.exit(f"the average of parameter {place} is not numpy's")


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "", rounds=31)
    common.print_versions()
    quick = arguments.quick
    shapes = routes.gpt_shapes(2, 64, 500, 64) if quick else routes.gpt_shapes(12, 512, 24000, 1024)
    rounds = 2 if quick else arguments.rounds
    problem = Problem.make(shapes)
    print(f"{len(shapes)} tensors, {problem.elements / 1e6:.1f} million parameters, {rounds} rounds")
    model = torch.nn.ParameterList(routes.leaves(problem.weights, torch.float16))
    opt = MixedPrecisionOptimizer(routes.adamw(list(model)))
    averaged = AveragedMasters(model, opt, ema(DECAY))
    check(averaged, opt, [name for name, _ in model.named_parameters()])
    print("averages of three updates were numpy's, bit for bit")

    masters = [master.detach().clone() for master in opt.master_params()]
    theirs = [master.clone() for master in masters]
    halves = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    contenders = [
        Way("AveragedMasters", averaged.update),
        Way("torch._foreach_lerp_", lambda: torch._foreach_lerp_(theirs, masters, 1.0 - DECAY)),
        Way("AveragedModel of 16-bit weights", lambda: halves.update_parameters(model)),
        common.MemoryCopy(4 * problem.elements),
    ]
    with torch.no_grad():
        timings = common.alternate(contenders, rounds)
    bandwidth = 8 * problem.elements / timings["memory copy"].median
    print(f"memory copy: {bandwidth / 1e9:.1f} GB/s, read and written")
    common.print_timings(list(timings.values()), problem.elements, BYTES, bandwidth)
    bound = None if quick else 0.9
    ours, lerp = timings["AveragedMasters"], timings["torch._foreach_lerp_"]
    rows = [common.ratio_row("AveragedMasters.update / torch._foreach_lerp_", bound, ours, lerp)]
    common.print_rows(rows)
    common.write_json(
        arguments.json,
        rows=rows,
        timings=list(timings.values()),
        elements=problem.elements,
        bytes_per_parameter=BYTES,
        copy_bandwidth=bandwidth,
    )


if __name__ == "__main__":
    main()
