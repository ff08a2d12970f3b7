"""The loop that every trainer is compared with: FP32 masters and GradScaler's rules, written out in plain torch.

And what is trained: a small network on batches that are the same wherever they are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from contract import reference
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, kernels
from fp16opt.distributed import fp32_state_dict

HALF, BF16 = torch.float16, torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])
STEPS = 24
ONE_PASS = 2 * STEPS  # units in the last place: a kernel's step and torch's each round once a step, see tests/fused
LIGHTNING = {  # arguments of a Trainer that trains here and writes nothing
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
OVERFLOWING = 2.0**22  # a loss scale at which the first gradients of `network` do not fit into FP16


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two layers and a norm between, so that parameters differ in shape and in the size of gradients."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))
    return net.to(dtype)


def batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """``count`` micro-batches of 4, in FP32."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, 8, generator=rng)
    return list(zip(x, x.sin().sum(dim=2, keepdim=True), strict=True))


def loss_of(net: Callable[[Tensor], Tensor], batch: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """FP32, of 16-bit inputs and targets."""
    x, y = (each.to(dtype) for each in batch)
    return mse_loss(net(x).float(), y.float())


def adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    """torch's plain loop, to be compared to the bit."""
    return torch.optim.AdamW(params, **{"lr": 2.0**-6, "weight_decay": 0.125, "foreach": False, **options})


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that is another at every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.25 * step))


@dataclass
class ByHand:
    """A training of a 16-bit model by FP32 masters, one :meth:`step` at a time.

    Attributes:
        scale: GradScaler's rule. ``reference.Scale(1.0)`` stays.
        micro: The micro-batches of a step; each loss is divided by their number.
        clip: The norm that gradients of all parameters are brought to.
        clip_value: The size that their elements are brought to, after the clip by norm.
        waits: Whether the scheduler stays where it is on skipped steps.
    """

    model: nn.Module
    make: Callable[..., torch.optim.Optimizer] = adamw
    scale: reference.Scale = field(default_factory=lambda: reference.Scale(1.0))
    schedule: Callable[[Any], Any] | None = None
    micro: int = 1
    clip: float | None = None
    clip_value: float | None = None
    waits: bool = False

    def __post_init__(self) -> None:
        self.models = [param for param in self.model.parameters() if param.requires_grad]
        self.masters = [nn.Parameter(param.detach().to(reference.wide(param.dtype)).clone()) for param in self.models]
        self.optimizer = self.make(self.masters)
        self.scheduler = self.schedule(self.optimizer) if self.schedule else None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.skipped: list[bool] = []

    def step(self, losses: Sequence[Callable[[], Tensor]]) -> None:
        """One step of the micro-batches whose losses these give."""
        for param in self.models:
            param.grad = None
        scale = self.scale.value
        for loss in losses:
            value = loss()
            self.losses.append(value.item())
            ((value / len(losses)).float() * scale).backward()
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        grads = [None if p.grad is None else reference.unscaled(p.grad, scale) for p in self.models]
        overflow = reference.found_inf(grads)
        if not overflow:
            self._take(grads, norm_of(self.models, grads, scale))
        self.skipped.append(overflow)
        self.scale.update(overflow)
        if self.scheduler is not None and not (overflow and self.waits):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a skipped first step is no wrong order
            self.scheduler.step()

    def _take(self, grads: Sequence[Tensor | None], norm: float) -> None:
        self.norms.append(norm)
        if self.clip is not None:
            grads = reference.clipped(grads, norm, self.clip)
        for master, grad in zip(self.masters, grads, strict=True):
            if grad is not None and self.clip_value is not None:
                grad = grad.clamp(-self.clip_value, self.clip_value)
            master.grad = grad
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.models, self.masters, strict=True):
                param.copy_(master)

    def train(self, data: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> ByHand:
        """All of ``data``, ``micro`` batches a step."""
        for start in range(0, len(data), self.micro):
            parts = itertools.islice(data, start, start + self.micro)
            self.step([lambda part=part: loss_of(self.model, part, dtype) for part in parts])
        return self


def norm_of(models: Sequence[Tensor], grads: Sequence[Tensor | None], scale: float) -> float:
    """The norm that the engine has of true ``grads``, which may be two roundings to FP32 off the exact one.

    It adds squares in another order than torch, and a clip's factor is to be the same to the bit.
    """
    stats = kernels.GradStats.allocate(len(grads), torch.device("cpu"))
    halves = [p.grad if p.dtype in (HALF, BF16) else None for p in models]
    wide = [g if p.dtype not in (HALF, BF16) else None for p, g in zip(models, grads, strict=True)]
    kernels.multi_tensor_check(halves, torch.tensor(1.0 / scale), stats)
    if any(g is not None for g in wide):
        kernels.multi_tensor_unscale(wide, wide, torch.tensor(1.0), stats, write=False)
    norm = float(stats.norm.float())
    exact = reference.total_norm(grads)
    assert abs(norm - exact) <= 2.0**-22 * exact
    return norm


def assert_same_weights(model: nn.Module, optimizer: Any, hand: ByHand, ulps: int = 0) -> None:
    """The model's weights and the masters are those of the loop by hand.

    Args:
        ulps: How many FP32 units in the last place of a master's largest element its elements may be off, for steps
            that round otherwise than torch's; the model then is its masters, rounded. 0: to the bit.
    """
    masters = [tensor.detach() for tensor in optimizer.master_params()]
    models = [param for param in model.parameters() if param.requires_grad]
    assert len(masters) == len(hand.masters) == len(models)
    for number, (param, got, want) in enumerate(zip(models, masters, hand.masters, strict=True)):
        largest = want.detach().abs().amax()
        unit = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
        off = ((got - want.detach()).abs().amax() / unit).item()
        assert off <= ulps, f"master {number} is {off:g} units in the last place off, at most {ulps} were expected"
        assert torch.equal(param.detach(), got.to(param.dtype)), f"model weight {number} is not its master, rounded"


def scale_of(dtype: torch.dtype) -> reference.Scale:
    """The rule of a scale that overflows at first where there is FP16, and of none elsewhere."""
    return reference.Scale(OVERFLOWING, 5) if dtype == HALF else reference.Scale(1.0)


def scaled(dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """The wrapper's options for :func:`scale_of`."""
    return {"scaler": DynamicLossScaler(OVERFLOWING, growth_interval=5), **options} if dtype == HALF else options


def by_hand(dtype: torch.dtype, data: Sequence[Sequence[Tensor]], **told: Any) -> ByHand:
    """The loop by hand over ``data``, with the scale of :func:`scale_of` unless another one is told."""
    return ByHand(network(dtype), **{"scale": scale_of(dtype), **told}).train(data, dtype)


def assert_same_run(losses: Sequence[float], model: nn.Module, optimizer: Any, hand: ByHand) -> None:
    """Every loss, the weights and masters, the skips and the scale are those of the loop by hand."""
    assert losses == hand.losses
    assert_same_weights(model, optimizer, hand)
    assert optimizer.skipped_steps == sum(hand.skipped)
    assert optimizer.loss_scale == hand.scale.value


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the pieces of all ranks. Collective."""
    full = getattr(tensor.detach(), "full_tensor", None)
    return tensor.detach() if full is None else full()


@dataclass
class Trained:
    """What a trainer has trained.

    Attributes:
        made: What the trainer has of it: its loop, itself.
        norms: Before clips, of steps that were taken. None where the trainer doesn't tell, as for the skips.
    """

    losses: list[float]
    model: nn.Module
    optimizer: MixedPrecisionOptimizer
    made: Any
    norms: list[float] | None = None
    skipped: list[bool] | None = None


# -- checks of programs for ranks ------------------------------------------------------------------------------------


def check_masters(what: str, got: Any, want: Any) -> None:
    for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if not torch.equal(whole(mine), whole(theirs)):
            raise SystemExit(f"{what}: master {number} is off by {(whole(mine) - whole(theirs)).abs().max()}")


def exported(model: nn.Module, optimizer: Any) -> tuple[list[Tensor], int]:
    """(whole FP32 weights on the first rank, the steps that the optimizer has counted). Collective."""
    found = fp32_state_dict(model, optimizer)
    inner = optimizer if isinstance(optimizer, MixedPrecisionOptimizer) else optimizer.optimizer
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]  # of DDP
    return [found[name] for name in names if name in found], inner.steps_counted()


def raised(error: type[Exception], message: str, call: Any) -> None:
    try:
        call()
    except error as caught:
        if message not in str(caught):
            raise
    else:
        raise SystemExit(f"{message!r} was not raised")
