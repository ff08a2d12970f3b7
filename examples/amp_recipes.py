"""The recipes of torch's automatic mixed precision, with fp16opt.GradScaler in torch's place.

    python examples/amp_recipes.py                       # all recipes, then the comparison; under a minute on a CPU
    python examples/amp_recipes.py --recipe clipping accumulation
    python examples/amp_recipes.py --dtype bfloat16
    python examples/amp_recipes.py --device cuda

Each recipe is one function that stands by itself: copy it and put your model in. All that differs from torch's own
recipes is where GradScaler is imported from, and what torch's has not (``clip_grad_norm_``, ``step_scheduler``,
``overflow_report``). Forward passes run under autocast, in float16 or bfloat16, on CPU and GPU alike. Backward passes
run outside of it: autograd uses for each operation the dtype that its forward pass had.

The comparison at the end trains one model before (float32) and after (mixed precision), and prints time, memory and
accuracy. On a CPU without float16 arithmetic the second is the slower one; on a GPU with tensor cores it is not.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import common
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from tqdm import tqdm

from fp16opt.grad_scaler import GradScaler

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BATCH_SIZE, TEST_SIZE = 64, 450


@dataclass
class Setting:
    """Where and in what precision the recipes run."""

    device: torch.device
    dtype: torch.dtype
    epochs: int = 2
    output: Path = Path("amp-recipes-output")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype)

    def scaler(self, **settings: float) -> GradScaler:
        """float16 needs one; bfloat16 has float32's range, and its scaler is switched off: all calls stay in place."""
        return GradScaler(self.device.type, enabled=self.dtype is torch.float16, **settings)


def digits(device: torch.device, train: bool = True) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: pixels from 0 to 1, float32 [n, 64], and classes, int64 [n]."""
    data = load_digits()
    x = torch.from_numpy(data.data).float().to(device) / 16.0
    y = torch.from_numpy(data.target).long().to(device)
    return (x[:-TEST_SIZE], y[:-TEST_SIZE]) if train else (x[-TEST_SIZE:], y[-TEST_SIZE:])


def batches(setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """``setting.epochs`` epochs of shuffled batches."""
    x, y = digits(setting.device)
    orders = (torch.randperm(len(x)).to(setting.device) for _ in range(setting.epochs))
    return [(x[part], y[part]) for order in orders for part in order.split(BATCH_SIZE)]


def network(setting: Setting, width: int = 128, outputs: int = 10) -> nn.Module:
    """Weights stay in float32: autocast casts what each operation reads."""
    hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs)).to(setting.device)


# -- the recipes -------------------------------------------------------------------------------------------------------


def plain_loop(setting: Setting) -> float:
    """Scale the loss, step, update: three lines around a loop as it was."""
    model = network(setting)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches(setting)))
    scaler = setting.scaler()
    loss = torch.zeros(())
    for x, y in batches(setting):
        optimizer.zero_grad()
        with setting.autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # unscales; does not step where a gradient is inf or nan
        scaler.update()
        scaler.step_scheduler(scheduler)  # moves only with steps that were taken
    return loss.item()


def clipping(setting: Setting) -> float:
    """Clip unscaled gradients. The norm comes from the pass that unscales, so clipping costs one pass less."""
    model = network(setting)
    optimizer, scaler = SGD(model.parameters(), lr=0.1, momentum=0.9), setting.scaler()
    loss = torch.zeros(())
    for x, y in batches(setting):
        optimizer.zero_grad()
        with setting.autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        # torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0) works here as before
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def accumulation(setting: Setting, parts: int = 4) -> float:
    """One step from several backwards. The scale stays the same between them: unscale, step and update come once."""
    model = network(setting)
    optimizer, scaler = AdamW(model.parameters(), lr=2e-3), setting.scaler()
    loss = torch.zeros(())
    for x, y in batches(setting):
        optimizer.zero_grad()
        for micro_x, micro_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with setting.autocast():
                loss = F.cross_entropy(model(micro_x), micro_y) * len(micro_x) / len(x)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item() * parts


def gradient_penalty(setting: Setting, weight: float = 1e-3) -> float:
    """A penalty on gradients: scale for ``autograd.grad``, unscale by hand what belongs to no optimizer, penalise."""
    model = network(setting)
    optimizer, scaler = AdamW(model.parameters(), lr=2e-3), setting.scaler(init_scale=2.0**10)
    loss = torch.zeros(())
    for x, y in batches(setting):
        optimizer.zero_grad()
        with setting.autocast():
            loss = F.cross_entropy(model(x), y)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inv_scale = 1.0 / scaler.get_scale()
        with setting.autocast():
            penalty = torch.stack([(grad.float() * inv_scale).square().sum() for grad in scaled]).sum().sqrt()
            total = loss + weight * penalty
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def several_models_losses_optimizers(setting: Setting) -> float:
    """One scaler: scale every loss, step every optimizer, update once. Each optimizer skips for itself."""
    models = [network(setting), network(setting)]
    optimizers = [Adam(models[0].parameters(), lr=1e-3), SGD(models[1].parameters(), lr=0.05, momentum=0.9)]
    scaler = setting.scaler()
    losses = [torch.zeros(())]
    for x, y in batches(setting):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with setting.autocast():
            first, second = (model(x) for model in models)
            losses = [F.cross_entropy(2 * first + 3 * second, y), F.cross_entropy(3 * first - second, y)]
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        scaler.unscale_(optimizers[0])  # where one wants to look at, or clip, one optimizer's gradients
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return losses[0].item()


class ClampedExp(torch.autograd.Function):
    """exp leaves float16 at 11.1, so this runs in float32 wherever autocast would have it run."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = x.float().clamp(max=20.0).exp()
        context.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        x, y = context.saved_tensors  # type: ignore[attr-defined]
        with torch.autocast(x.device.type, enabled=False):
            return (grad.float() * y * (x.float() < 20.0)).to(x.dtype)


def custom_function(setting: Setting) -> float:
    """A function of one's own under autocast: it says itself in which dtype it computes, forward and backward."""
    model = network(setting)
    optimizer, scaler = AdamW(model.parameters(), lr=2e-3), setting.scaler()
    loss = torch.zeros(())
    for x, y in batches(setting):
        optimizer.zero_grad()
        with setting.autocast():
            weights = ClampedExp.apply(model(x))
            loss = F.nll_loss((weights / weights.sum(1, keepdim=True)).clamp(min=1e-12).log(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


class AutocastInside(nn.Module):
    """For DataParallel: its threads do not see the caller's autocast, so the model's own forward switches it on."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__()
        self.model, self.setting = model, setting

    def forward(self, x: Tensor) -> Tensor:
        with self.setting.autocast():
            return self.model(x)


def data_parallel(setting: Setting) -> float:
    """DataParallel: autocast inside of forward; the loss comes back to one device, and one scaler serves.

    DistributedDataParallel, one process per GPU, is the plain loop: autocast around the forward pass, a scaler in each
    process. Gradients are averaged while they are scaled, so an inf on one rank is an inf on all, and the scalers stay
    equal. With accumulation, put all but the last backward under ``model.no_sync()``.
    """
    model = nn.DataParallel(AutocastInside(network(setting), setting))  # without GPUs it calls the module itself
    optimizer, scaler = AdamW(model.parameters(), lr=2e-3), setting.scaler()
    loss = torch.zeros(())
    for x, y in batches(setting):
        optimizer.zero_grad()
        output = model(x)
        with setting.autocast():
            loss = F.cross_entropy(output, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def saving_and_resuming(setting: Setting) -> float:
    """Model, optimizer and scaler, saved after ``update``. What is resumed goes on bit for bit."""
    work = batches(setting)
    setting.output.mkdir(parents=True, exist_ok=True)
    path = setting.output / "checkpoint.pt"

    def train(model: nn.Module, optimizer: AdamW, scaler: GradScaler, part: list[tuple[Tensor, Tensor]]) -> float:
        loss = torch.zeros(())
        for x, y in part:
            optimizer.zero_grad()
            with setting.autocast():
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.item()

    def parts() -> tuple[nn.Module, AdamW, GradScaler]:
        model = network(setting)
        return model, AdamW(model.parameters(), lr=2e-3), setting.scaler(growth_interval=20)

    first = parts()
    train(*first, work[:10])
    names = ("model", "optimizer", "scaler")
    common.save_checkpoint(path, {name: part.state_dict() for name, part in zip(names, first, strict=True)})
    straight_on = train(*first, work[10:])

    second = parts()
    checkpoint = torch.load(path, map_location=setting.device, weights_only=True)  # torch's GradScaler loads it too
    for name, part in zip(names, second, strict=True):
        part.load_state_dict(checkpoint[name])
    resumed = train(*second, work[10:])
    if resumed != straight_on:
        raise SystemExit(f"the resumed run's loss is {resumed}, the other's {straight_on}")
    return resumed


def inspecting_gradients(setting: Setting) -> float:
    """Look at true gradients after ``unscale_``; ask what overflowed after a skipped step."""
    model = network(setting)
    named = [{"params": list(model.parameters()), "param_names": [name for name, _ in model.named_parameters()]}]
    optimizer = AdamW(named, lr=2e-3)
    scaler = setting.scaler(init_scale=2.0**24)  # too high for float16, so that something overflows
    largest, loss = 0.0, torch.zeros(())
    for x, y in batches(setting):
        optimizer.zero_grad()
        with setting.autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        magnitudes = [p.grad.abs().max().item() for p in model.parameters() if p.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        if scaler.step_was_skipped(optimizer):
            names = ", ".join(str(overflow) for overflow in scaler.overflow_report(optimizer))
            print(f"  step {scaler.skipped_steps} skipped, the scale is {scaler.get_scale():g} now: {names}")
        else:
            largest = max(largest, *magnitudes)
    print(f"  largest gradient of all steps taken: {largest:.3g}")
    return loss.item()


RECIPES: dict[str, Callable[[Setting], float]] = {
    "plain": plain_loop,
    "clipping": clipping,
    "accumulation": accumulation,
    "penalty": gradient_penalty,
    "several": several_models_losses_optimizers,
    "function": custom_function,
    "parallel": data_parallel,
    "resuming": saving_and_resuming,
    "inspecting": inspecting_gradients,
}


# -- before and after --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one training of the comparison took and gave."""

    name: str
    seconds: float = 0.0
    megabytes: float = 0.0
    accuracy: float = 0.0
    losses: list[float] = field(default_factory=list)


def train_once(name: str, setting: Setting, mixed: bool, width: int) -> Run:
    """One training, in float32 or in mixed precision: one loop, with autocast and scaler switched on or off."""
    torch.manual_seed(0)
    model, run = network(setting, width), Run(name)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler(setting.device.type, enabled=mixed and setting.dtype is torch.float16)
    saved = 0
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    start = time.perf_counter()
    for x, y in tqdm(batches(setting), desc=name, leave=False):
        optimizer.zero_grad()
        saved = 0
        precision = torch.autocast(setting.device.type, setting.dtype, enabled=mixed)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), precision:
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(loss.item())
    run.seconds = time.perf_counter() - start
    # On a GPU the peak of all memory; elsewhere what the forward pass of the last batch kept for the backward pass.
    peak = torch.cuda.max_memory_allocated() if setting.device.type == "cuda" else saved
    run.megabytes = peak / 1e6
    x, y = digits(setting.device, train=False)
    with torch.no_grad(), torch.autocast(setting.device.type, setting.dtype, enabled=mixed):
        run.accuracy = (model(x).argmax(1) == y).float().mean().item()
    return run


def compare(setting: Setting, width: int = 512) -> list[Run]:
    """Default precision against mixed precision: a table, and ``comparison.png`` in ``setting.output``."""
    dtype = str(setting.dtype).removeprefix("torch.")
    runs = [train_once("float32", setting, False, width), train_once(f"autocast {dtype}", setting, True, width)]
    memory = "peak MB" if setting.device.type == "cuda" else "MB kept for backward"
    rows = [
        [run.name, f"{run.seconds:.2f}", f"{run.megabytes:.2f}", f"{run.losses[-1]:.4f}", f"{run.accuracy:.1%}"]
        for run in runs
    ]
    print(common.format_table(["precision", "seconds", memory, "last loss", "test accuracy"], rows))
    plot(runs, memory, setting.output / "comparison.png")
    return runs


def plot(runs: list[Run], memory: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=True):
        axes[0].plot(run.losses, style, label=run.name)
    axes[0].set(xlabel="step", ylabel="loss", yscale="log")
    axes[0].legend()
    names = [run.name for run in runs]
    axes[1].bar(names, [run.seconds for run in runs], color=["C0", "C1"])
    axes[1].set_ylabel("seconds")
    axes[2].bar(names, [run.megabytes for run in runs], color=["C0", "C1"])
    axes[2].set_ylabel(memory)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="*", choices=[*RECIPES, "compare"], help="some of them (default: all)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float16", help="of autocast (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="over the digits, for each recipe (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("amp-recipes-output"), help="a folder for what is written")
    given = parser.parse_args(arguments)
    setting = Setting(common.choose_device(given.device), DTYPES[given.dtype], given.epochs, given.output)
    wanted = given.recipe or [*RECIPES, "compare"]
    warnings.filterwarnings("ignore", message="Using backward.. with create_graph")
    for name in wanted:
        if name == "compare":
            compare(setting)
            continue
        recipe = RECIPES[name]
        torch.manual_seed(0)
        print(f"{recipe.__name__}: {(recipe.__doc__ or '').splitlines()[0]}")
        print(f"  loss after {given.epochs} epochs: {recipe(setting):.4f}")


if __name__ == "__main__":
    main()
