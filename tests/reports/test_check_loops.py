"""check: sound loops that go on as if they had not been checked, and faults, each with the line that mends it."""

from __future__ import annotations

import copy
import logging
import random
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from engine.checks import assert_same
from torch import nn
from torch.optim import SGD, AdamW

import fp16opt.amp
import fp16opt.fp16_utils
import fp16opt.optim
import fp16opt.optimizers
from fp16opt import MixedPrecisionOptimizer, Preflight
from fp16opt.tools.reports.findings import KEYS

pytestmark = pytest.mark.usefixtures("seeded")
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Net(nn.Sequential):
    """Takes inputs in any dtype, and gives FP32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(next(self.parameters()).dtype)).float()  # type: ignore[no-any-return]


class Rms(nn.Module):
    """Squares in the dtype of what it gets."""

    widens = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float() if self.widens else x
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)


class Gelu(nn.Module):
    """By its usual polynomial, of which the cube overflows: what it gives is right."""

    widens = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float() if self.widens else x
        return (0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.045 * x.pow(3))))).to(dtype)


class Kahan(SGD):
    """Keeps in 16 bits what 16-bit weights lose."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["kahan_sum"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            rest = self.state[p].setdefault("rest", torch.zeros_like(p))
            rest.add_(p.grad, alpha=-self.param_groups[0]["lr"])
            before = p.clone()
            p.add_(rest)
            rest.add_(before.sub_(p))


class TinyGPT(nn.Module):
    """One block, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(24, 16), nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        q, k, v = (part.view(*ids.shape, 2, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.head(x + self.drop(self.out(mixed)))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, which begins at zero."""

    def __init__(self, base: torch.dtype, adapter: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(8, 4).to(base).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False).to(adapter), nn.Linear(2, 4, bias=False).to(adapter)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)  # type: ignore[no-any-return]


class SAM(SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
            loss = closure()
        super().step()
        return loss


def net(dtype: torch.dtype = FP32, sizes: tuple[int, int] = (8, 4), middle: nn.Module | None = None) -> Net:
    return Net(nn.Linear(sizes[0], 16), middle or nn.Tanh(), nn.Linear(16, sizes[1])).to(dtype)


def wrap(model: nn.Module, inner: Any = AdamW, lr: float = 1e-3, **options: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(inner(model.parameters(), lr=lr), **options)


def fp16(loss_fn: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return torch.autocast("cpu", torch.float16)(loss_fn)  # type: ignore[no-any-return]


IMPORTS = """
import copy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
"""


def made(source: str) -> dict[str, Any]:
    """A loop's names."""
    names: dict[str, Any] = {**globals(), "max_norm": 1.0, "max_value": 0.1}
    exec(IMPORTS, names)
    names |= {"x": torch.randn(16, 8), "y": torch.randn(16, 4)}
    exec(textwrap.dedent(source), names)
    return names


def checked(names: dict[str, Any]) -> Preflight:
    given = ("model", "loss_fn", "optimizer", "scaler", "train_step", "lr")
    return fp16opt.check(**{name: names[name] for name in given if name in names})


def everything(names: dict[str, Any]) -> dict[str, Any]:
    """What check puts back: of modules, optimizers, schedulers and scalers that are no average or copy of weights."""
    kinds = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
    held = {
        name: one
        for name, one in names.items()
        if isinstance(one, kinds) and name not in ("averaged", "averages", "target")
    }
    grads = [None if p.grad is None else p.grad.to_dense() for p in names["model"].parameters()]
    found = {name: one.state_dict() for name, one in held.items()}
    found |= {"grads": grads, "modes": [module.training for module in names["model"].modules()]}
    return copy.deepcopy({**found, "random": (torch.get_rng_state(), random.getstate())})


# Loops for CI alone: a mechanism of another row in another mode or class, or what the mended loop of a fault is.
AGAIN = set(
    """
    FP32, wrapped
    split masters
    a GradScaler, with accumulation
    BF16 autocast
    accumulation, plain
    set to zero, plain
    a GAN with one GradScaler
    a WGAN's clamp, plain
    an FP32 average of BF16
    a copy of the weights
    LBFGS, wrapped
    FP64
    Lion
    a frozen part
    schedule-free
    8 bits
    cleared by the model
    torch's average of FP32
    apex's FP16_Optimizer with a closure and a scheduler
    many micro-batches, plain
    an average in BF16, by hand and plain
    a schedule that runs ahead of a GradScaler
    gradients left over under a GradScaler
    LoRA on FP16 without a scale
    plain BF16 at a small rate
    a disabled GradScaler
    set to zero
    an RNN under autocast
    """.strip().split("\n    ")
)


def rows(loops: Iterable[str]) -> list[Any]:
    """Parameters for these loops."""
    return [pytest.param(name, marks=pytest.mark.all) if name in AGAIN else name for name in loops]


# -- sound loops -------------------------------------------------------------------------------------------------------

LOSS = """
loss_fn = lambda: (model(x) - y).square().mean()
"""
ROUND = """
def train_step():
    optimizer.zero_grad()
    optimizer.backward(loss_fn())
    optimizer.step()
"""
OWN_ROUND = ROUND.replace("train_step", "own_round")  # which check is not given
PLAIN_ROUND = ROUND.replace("optimizer.backward(loss_fn())", "loss_fn().backward()")
SCALED_ROUND = """
loss_fn = fp16(loss_fn)
def train_step():
    optimizer.zero_grad()
    scaler.scale(loss_fn()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def before_step(source: str, line: str, stepping: str = "optimizer") -> str:
    """A loop with one line more."""
    return source.replace(f"    {stepping}.step(", f"    {line}\n    {stepping}.step(")


def micro_batches(source: str, count: int) -> str:
    """A loop that accumulates."""
    return re.sub(r"    (.*loss_fn\(\))(.*)", rf"    for _ in range({count}): \1 / {count}\2", source)


FP16 = "model = net(HALF); optimizer = wrap(model, dynamic=True)" + LOSS
PLAIN_BF16 = "model = net(BF16); optimizer = AdamW(model.parameters(), lr=1e-3)" + LOSS
WITH_MASTERS = "model = net(BF16); optimizer = wrap(model)" + LOSS
PLAIN_FP32 = "model = net(); optimizer = AdamW(model.parameters(), lr=1e-3)" + LOSS
WITH_SCALER = PLAIN_FP32 + 'scaler = torch.amp.GradScaler("cpu")'
GAN = """
real, noise = torch.randn(16, 8), torch.randn(16, 4)
critic, maker = net({0}, (8, 1)), net({0}, (4, 8), nn.BatchNorm1d(16))
model, loss_fn = critic, lambda: (critic(maker(noise).detach()) - critic(real)).tanh().mean()
of_maker = lambda: -critic(maker(noise)).tanh().mean()
"""
TWO = """
def train_step():
    for opt, loss in ((optimizer, loss_fn), (second, of_maker)):
        opt.zero_grad()
        {0}
        opt.step()
"""
AFTER = ROUND + "    {0}\n"
SETS_TO_ZERO = ROUND.replace("zero_grad()", "zero_grad(set_to_none=False)")
LORA = """
model = Adapted({0})
optimizer = AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
loss_fn = lambda: (model(x.to({0})).float() - y).square().mean()
"""
CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = loss_fn()
    optimizer.backward(loss)
    return loss
train_step = lambda: optimizer.step(closure)
"""
FP16_OPTIMIZER = (
    """
model = net(HALF)
plain = SGD(model.parameters(), lr=0.1)
optimizer = fp16opt.fp16_utils.FP16_Optimizer(plain, dynamic_loss_scale=True, verbose=False)
"""
    + LOSS
)

SOUND = {
    "FP16, dynamic": FP16 + ROUND,
    "BF16 with masters": WITH_MASTERS + ROUND,
    "BF16, plain, at a large rate": PLAIN_BF16 + PLAIN_ROUND,
    "BF16, plain, with a Kahan sum": "model = net(BF16); optimizer = Kahan(model.parameters(), 1e-5)"
    + LOSS
    + PLAIN_ROUND,
    "FP32": PLAIN_FP32 + PLAIN_ROUND,
    "FP32, wrapped": "model = net(); optimizer = wrap(model)" + LOSS + ROUND,
    "split masters": 'model = net(BF16); optimizer = wrap(model, master_weights="split")' + LOSS + ROUND,
    "torch's GradScaler": WITH_SCALER + SCALED_ROUND,
    "our GradScaler": PLAIN_FP32 + 'scaler = fp16opt.GradScaler("cpu")' + SCALED_ROUND,
    "a disabled GradScaler": WITH_SCALER.replace('"cpu"', '"cpu", enabled=False')
    + SCALED_ROUND.replace("loss_fn = fp16(loss_fn)", ""),
    "a GradScaler, with a clip": WITH_SCALER
    + before_step(SCALED_ROUND, "scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 1.0)", "scaler"),
    "a GradScaler, with accumulation": WITH_SCALER + micro_batches(SCALED_ROUND, 4),
    "BF16 autocast": PLAIN_FP32 + "loss_fn = torch.autocast('cpu', BF16)(loss_fn)" + PLAIN_ROUND,
    "a clip of masters": FP16 + before_step(ROUND, "optimizer.clip_master_grads(1.0)"),
    "a clip at a scale of 1": WITH_MASTERS + before_step(PLAIN_ROUND, "clip_grad_norm_(model.parameters(), 1.0)"),
    "accumulation": FP16 + micro_batches(ROUND, 4),
    "accumulation, plain": PLAIN_BF16 + PLAIN_ROUND.replace("    loss_fn()", "    for _ in range(8): (loss_fn() / 8)"),
    "a step every other round": WITH_MASTERS
    + """
rounds = []
def train_step():
    rounds.append(1)
    optimizer.backward(loss_fn() / 2)
    if len(rounds) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "cleared after the step": FP16
    + "def train_step(): optimizer.backward(loss_fn()); optimizer.step(); optimizer.zero_grad()",
    "cleared by the model": FP16 + ROUND.replace("optimizer.zero_grad", "model.zero_grad"),
    "set to zero": WITH_MASTERS + SETS_TO_ZERO,
    "set to zero, plain": PLAIN_FP32 + SETS_TO_ZERO.replace("optimizer.backward(loss_fn())", "loss_fn().backward()"),
    "a schedule from 0": FP16
    + "schedule = LambdaLR(optimizer, lambda step: step / 10)"
    + AFTER.format("optimizer.step_was_skipped or schedule.step()"),
    "a frozen part": "model = net(BF16); model[0].requires_grad_(False); optimizer = wrap(model)" + LOSS + ROUND,
    "a frozen FP16 base": """
base, model = net(HALF).requires_grad_(False), net(FP32, (4, 4))
whole, model = model, nn.ModuleList([base, model])
optimizer = wrap(model, dynamic=True)
loss_fn = lambda: (whole(base(x)) - y).square().mean()
"""
    + ROUND,
    "a GAN": GAN.format("HALF")
    + "optimizer, second = wrap(critic, Adam, dynamic=True), wrap(maker, Adam, dynamic=True)"
    + TWO.format("opt.backward(loss())"),
    "a GAN with one GradScaler": GAN.format("FP32")
    + "optimizer, second = Adam(critic.parameters()), Adam(maker.parameters())"
    + "\nscaler = torch.amp.GradScaler('cpu')\nloss_fn, of_maker = fp16(loss_fn), fp16(of_maker)"
    + TWO.format("scaler.scale(loss()).backward(); scaler.step(opt); scaler.update(); continue"),
    "a WGAN's clamp": FP16
    + AFTER.format("with torch.no_grad(): [p.clamp_(-0.1, 0.1) for p in optimizer.master_params()]")
    + "    optimizer.write_masters()\n",
    "a WGAN's clamp, plain": PLAIN_FP32 + PLAIN_ROUND + "    for p in model.parameters(): p.data.clamp_(-0.1, 0.1)\n",
    "an average of masters": FP16
    + "averaged = fp16opt.AveragedMasters(model, optimizer, fp16opt.ema(0.999))"
    + AFTER.format("averaged.update()"),
    "torch's average of FP32": PLAIN_FP32
    + "averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))"
    + PLAIN_ROUND
    + "    averaged.update_parameters(model)\n",
    "an FP32 average of BF16": WITH_MASTERS
    + "averages = [p.detach().float() for p in model.parameters()]"
    + AFTER.format("for a, p in zip(averages, model.parameters()): a.mul_(0.999).add_(p.detach(), alpha=0.001)"),
    "a copy of the weights": WITH_MASTERS
    + "target = copy.deepcopy(model)"
    + AFTER.format("target.load_state_dict(model.state_dict())"),
    "schedule-free": """
import schedulefree
model = net(BF16)
optimizer = MixedPrecisionOptimizer(schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3))
"""
    + LOSS
    + ROUND.replace("    optimizer.zero_grad", "    optimizer.train(); optimizer.zero_grad")
    + "    optimizer.eval()\n",
    "LBFGS": "model = net(); optimizer = torch.optim.LBFGS(model.parameters(), 0.5, 4)"
    + LOSS
    + CLOSURE.replace("optimizer.backward(loss)", "loss.backward()"),
    "LBFGS, wrapped": "model = net(BF16); optimizer = wrap(model, torch.optim.LBFGS, lr=0.5)" + LOSS + CLOSURE,
    "no optimizer": "model = net()" + LOSS,
    "LoRA": LORA.format("BF16") + PLAIN_ROUND,
    "FP64": "model = net(torch.float64); optimizer = AdamW(model.parameters(), lr=1e-3)" + LOSS + PLAIN_ROUND,
    "a scale that follows headroom": "model = net(HALF)"
    + "\noptimizer = wrap(model, scaler=fp16opt.DynamicLossScaler(policy='headroom'))"
    + "\nloss_fn = lambda: 1e-3 * (model(x) - y).square().mean()"
    + ROUND,
    "Lion": "model = net(BF16); optimizer = wrap(model, fp16opt.optimizers.Lion, lr=1e-4)" + LOSS + ROUND,
    "8 bits": "model = Net(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 4)).to(BF16)"
    + "\noptimizer = wrap(model, master_weights='split24', optimizer_state='8bit')"
    + LOSS
    + ROUND,
    "FP32 sums": "model = net(HALF); optimizer = wrap(model, dynamic=True, grad_accumulation='fp32')"
    + LOSS
    + before_step(micro_batches(ROUND, 3), "optimizer.clip_master_grads(1.0)"),
    "SAM": "model = net(HALF); optimizer = wrap(model, SAM, dynamic=True, closure='reevaluate')" + LOSS + CLOSURE,
    "sparse gradients": "model = nn.Embedding(24, 8, sparse=True).bfloat16(); ids = torch.randint(0, 24, (6, 4))"
    + "\noptimizer = wrap(model, SGD, lr=0.1); loss_fn = lambda: model(ids).float().square().sum()"
    + OWN_ROUND,
    "a GPT, tied and dropped out": """
model, ids = TinyGPT().bfloat16(), torch.randint(0, 24, (4, 8))
optimizer = wrap(model, lr=3e-4)
scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
loss_fn = lambda: nn.functional.cross_entropy(model(ids).float().flatten(0, 1)[:-1], ids.flatten()[1:])
"""
    + before_step(AFTER.format("optimizer.step_was_skipped or scheduler.step()"), "optimizer.clip_master_grads(1.0)"),
    "an RNN under autocast": "model, x = nn.LSTM(8, 8), torch.randn(5, 3, 8)"
    + "\noptimizer = AdamW(model.parameters(), lr=1e-3)"
    + "\nloss_fn = torch.autocast('cpu', BF16)(lambda: model(x)[0].float().square().mean())"
    + PLAIN_ROUND,
    "masters under a GradScaler, with a clip": "model = net(HALF); optimizer = wrap(model)"
    + "\nscaler = fp16opt.GradScaler('cpu')"
    + LOSS
    + before_step(
        SCALED_ROUND.replace("loss_fn = fp16(loss_fn)", ""),
        *("scaler.unscale_(optimizer); clip_grad_norm_(optimizer.master_params(), 1.0)", "scaler"),
    ),
    "apex's FP16_Optimizer": FP16_OPTIMIZER + before_step(ROUND, "optimizer.clip_master_grads(1.0)"),
    "apex's FP16_Optimizer with a closure and a scheduler": FP16_OPTIMIZER
    + "scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))"
    + CLOSURE.replace("optimizer.step(closure)", "(optimizer.step(closure), scheduler.step())"),
    "apex's O2": "model = net(); plain = AdamW(model.parameters(), lr=1e-3)"
    + "\nmodel, optimizer = fp16opt.amp.initialize(model, plain, opt_level='O2', verbosity=0)"
    + LOSS
    + """
def own_round():
    optimizer.zero_grad()
    with fp16opt.amp.scale_loss(loss_fn(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
""",
    "by class path, with an average": "model = net(BF16)"
    + "\noptimizer = fp16opt.optim.AdamW(model.named_parameters(), lr=1e-3)"
    + "\naveraged = fp16opt.AveragedMasters(model, optimizer, fp16opt.ema(0.9))"
    + LOSS
    + before_step(PLAIN_ROUND, "clip_grad_norm_(model.parameters(), 1.0)")
    + "    averaged.update()\n    with averaged.swap(): pass\n",
    "two optimizers of one model": """
model = net(BF16)
optimizer, second = (MixedPrecisionOptimizer(AdamW(part.parameters(), lr=1e-3)) for part in (model[0], model[2]))
"""
    + LOSS
    + """
def train_step():
    loss_fn().backward()
    for one in (optimizer, second):
        one.step()
        one.zero_grad()
""",
    "a batch norm in FP32": "model = net(HALF, middle=nn.BatchNorm1d(16)); model[1].float()"
    + "\noptimizer = wrap(model, dynamic=True)"
    + LOSS
    + ROUND,
    "a norm in FP32": "model = net(HALF, middle=Rms()); model[1].widens = True; x *= 600"
    + "\noptimizer = wrap(model, dynamic=True)"
    + LOSS
    + ROUND,
    "a mask of inf": FP16
    + "mask = torch.ones(16, 4).triu(1).bool()"
    + "\nloss_fn = lambda: (model(x).half().masked_fill(mask, -torch.inf).softmax(-1).float() - y).square().mean()"
    + ROUND,
    "weight decay by hand": WITH_MASTERS
    + before_step(PLAIN_ROUND, "[p.grad.add_(p.detach(), alpha=0.1) for p in model.parameters()]"),
    "weights that a forward scales": WITH_MASTERS
    + "other = torch.randn(4, 16, dtype=BF16)"
    + "\nweight = lambda: 0.5 * model[2].weight + other"
    + "\nlinear = lambda h: nn.functional.linear(h, weight(), model[2].bias)"
    + "\nloss_fn = lambda: linear(model[1](model[0](x.bfloat16()))).float().square().mean()"
    + ROUND,
}
WARNED = {"BF16, plain, at a large rate", "accumulation, plain"}  # that masters would keep more, and nothing else


COUNTS = {"a step every other round"}  # of its own, which check does not put back


@pytest.mark.parametrize("name", rows(SOUND))
def test_a_sound_loop_has_no_error_and_goes_on_as_if_it_had_not_been_checked(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a training, between two steps; bit for bit, and without a word in its log."""
    ends = []
    for is_checked in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        names = made(SOUND[name])
        loop = names.get("train_step") or names.get("own_round", lambda: None)
        for _ in range(2):
            loop()
        if is_checked:
            before = everything(names)
            with caplog.at_level(logging.DEBUG):
                caplog.clear()
                found = checked(names)
                assert caplog.messages == []
            assert found.ok, str(found)
            assert {one.key for one in found.findings} <= ({"lost_updates"} if name in WARNED else set()), str(found)
            assert name in WARNED or "nothing to change" in str(found)
            assert_same(everything(names), before)
        for _ in range(3):
            loop()
        ends.append(everything(names))
    if name not in COUNTS:
        assert_same(*ends)


def test_fifty_loops_are_sound() -> None:
    assert len(SOUND) >= 50


# -- faults, and the lines that mend them ------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A loop with a fault.

    Attributes:
        key: of the finding that names it.
        source: of the loop, with each faulty piece between « and ».
        mend: gives, from the finding's line without what stands in its comments, the pieces in their place; None where
            it is not tried.
        words: of the sentence or of the line to change.
        layer: that is named.
    """

    key: str
    source: str
    mend: Callable[[str], list[str]] | None = None
    words: str = ""
    layer: str | None = None


def as_it_is(line: str) -> list[str]:
    return [line]


def each_line(line: str) -> list[str]:
    return line.split("\n")


def below(line: str) -> list[str]:
    """In the body of train_step."""
    return [textwrap.indent(line, "    ").strip()]


def as_argument(line: str) -> list[str]:
    return [f", {line}"]


def fp32_in_forward(line: str) -> list[str]:
    """The module casts its input, as the line says."""
    assert line == "x = x.float()"
    return ["model[1].widens = True"]


SETUP = "\n«»\n"
FAULTY_ROUND = ROUND.replace("optimizer.backward(loss_fn())", "loss = loss_fn(); «loss.backward()»")
WITH_FP16 = "model = net(HALF)" + SETUP + "optimizer = wrap(model, dynamic=True)" + LOSS + ROUND
SUMMED = "loss_fn = lambda: (model(x) - y).square().sum() * 1e4\n"

FAULTS = {
    "plain BF16": Fault("lost_updates", PLAIN_BF16 + SETUP + PLAIN_ROUND, as_it_is),
    "plain BF16 at a small rate": Fault(
        "lost_updates", PLAIN_BF16.replace("1e-3", "1e-5") + SETUP + PLAIN_ROUND, as_it_is
    ),
    "masters turned off": Fault(
        "lost_updates",
        'model = net(BF16); optimizer = wrap(model, lr=1e-5«, master_weights="none"»)' + LOSS + ROUND,
        lambda line: ["", *re.findall(r"leave (?!master_weights=\"none\" out)", line)],
    ),
    "FP16 without a scale": Fault(
        "no_loss_scale",
        PLAIN_BF16.replace("BF16", "HALF").replace("1e-3", "1e-3, eps=1e-4") + SETUP + FAULTY_ROUND,
        each_line,
    ),
    "autocast without a scaler": Fault(
        "no_loss_scale",
        PLAIN_FP32 + "loss_fn = fp16(loss_fn)" + SETUP + FAULTY_ROUND.replace("\n    optimizer.step()", ""),
        each_line,
    ),
    "LoRA on FP16 without a scale": Fault("no_loss_scale", LORA.format("HALF") + SETUP + FAULTY_ROUND, each_line),
    "a scale that is too high": Fault(
        "overflow", "model = net(HALF); optimizer = wrap(model«, loss_scale=2.0**24»)" + LOSS + ROUND, as_argument
    ),
    "a sum that overflows at any scale": Fault(
        "overflow",
        "model = net(HALF); optimizer = wrap(model, loss_scale=1.0)\n"
        "loss_fn = lambda: model(x * 1e-3).square().mul(1e6).add(1e7 * model(x)).«sum()»\n" + ROUND,
        lambda line: [re.findall(r"float\(\)\.(mean\(\))", line)[0] + " * 1e-5"],
    ),
    "a scale that is too low": Fault(
        "underflow",
        "model = net(HALF); optimizer = wrap(model«, loss_scale=2.0»)\n"
        + "loss_fn = lambda: (model(x) - y).square().mean() * 1e-7\n"
        + ROUND,
        as_argument,
    ),
    "no scale is high enough": Fault(
        "underflow",
        "model = net(HALF); model[2].weight.data.mul_(1e-5); x *= 1e-4"
        + SETUP
        + "optimizer = wrap(model, lr=1e-9, loss_scale=1.0)\nloss_fn = lambda: 1e3 * (model(x) - y).square().sum()\n"
        + ROUND,
        as_it_is,
    ),
    "a norm that squares in FP16": Fault(
        "inside", WITH_FP16.replace("net(HALF)", "net(HALF, middle=Rms()); x *= 1500"), fp32_in_forward
    ),
    "a cube whose gradient is nan": Fault(
        "inside", WITH_FP16.replace("net(HALF)", "net(HALF, middle=Gelu()); x *= 100"), fp32_in_forward
    ),
    "a batch norm in FP16": Fault(
        "buffers", WITH_FP16.replace("net(HALF)", "net(HALF, middle=nn.BatchNorm1d(16)); x *= 1500"), as_it_is
    ),
    "FP16 weights under BF16 autocast": Fault(
        "autocast", WITH_FP16.replace(LOSS, LOSS + "loss_fn = torch.autocast('cpu', BF16)(loss_fn)\n"), as_it_is
    ),
    "eps in FP16": Fault(
        "eps",
        "model = net(HALF); optimizer = AdamW(model.parameters())\n"
        + "scaler = fp16opt.GradScaler('cpu', allow_16bit_weights=True)"
        + SETUP
        + LOSS
        + SCALED_ROUND.replace("loss_fn = fp16(loss_fn)", ""),
        as_it_is,
    ),
    "a clip of scaled gradients": Fault(
        "clip", FP16 + before_step(ROUND, "«clip_grad_norm_(model.parameters(), max_norm)»"), below
    ),
    "a clip before unscale_": Fault(
        "clip",
        WITH_SCALER + before_step(SCALED_ROUND, "«»\n    clip_grad_norm_(model.parameters(), 1.0)", "scaler"),
        below,
    ),
    "gradients clamped through data": Fault(
        "gradients_written",
        FP16.replace("dynamic=True", "loss_scale=1024.0")
        + before_step(ROUND, "«for p in model.parameters(): p.grad.data.clamp_(-1, 1)»"),
        below,
    ),
    "a schedule that runs ahead": Fault(
        "scheduler",
        FP16 + "scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))" + AFTER.format("«scheduler.step()»"),
        below,
    ),
    "a schedule that runs ahead of a GradScaler": Fault(
        "scheduler",
        WITH_SCALER
        + "; scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))"
        + SCALED_ROUND.replace("scaler.update()", "«scaler.update(); scheduler.step()»"),
        below,
    ),
    "weights clamped": Fault(
        "weights_written",
        WITH_MASTERS + AFTER.format("«for p in model.parameters(): p.data.clamp_(-0.1, 0.1)»"),
        lambda line: below(line.replace("...", "p.clamp_(-0.1, 0.1)")),
    ),
    "weights tied by a copy": Fault(
        "weights_written",
        "model = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(BF16); y = torch.randn(16, 8)\n"
        "a, b = model[2], model[0]\n«»\n"
        "optimizer = wrap(model)\n"
        "def loss_fn():\n    «b.weight.data.copy_(a.weight)»\n    return (model(x) - y).square().mean()\n" + ROUND,
        *(lambda line: [line, "pass"], "a.weight = b.weight", "0.weight"),
    ),
    "gradients left over": Fault("left_over", WITH_MASTERS + ROUND.replace("optimizer.zero_grad()", "«pass»"), below),
    "gradients left over under a GradScaler": Fault(
        "left_over",
        WITH_SCALER + SCALED_ROUND.replace("optimizer.zero_grad()", "«pass»"),
        below,
    ),
    "gradients cleared before the step": Fault(
        "no_step",
        WITH_MASTERS + before_step(ROUND, "«pass»\n    optimizer.zero_grad()"),
        below,
    ),
    "no step": Fault("no_step", WITH_MASTERS + ROUND.replace("optimizer.step()", "«pass»"), below),
    "many micro-batches": Fault(
        "micro_batches",
        "model = net(BF16); optimizer = wrap(model«»)" + LOSS + micro_batches(ROUND, 16),
        as_argument,
    ),
    "many micro-batches, plain": Fault(
        "micro_batches",
        PLAIN_BF16
        + SETUP
        + PLAIN_ROUND.replace("loss_fn().backward()", "for _ in range(16): loss = loss_fn() / 16; «loss.backward()»"),
        each_line,
    ),
    "an average in BF16": Fault(
        "average",
        WITH_MASTERS
        + "averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))\n«»"
        + AFTER.format("«averaged.update_parameters(model)»"),
        each_line,
    ),
    "an average in BF16, by hand and plain": Fault(
        "average",
        PLAIN_BF16
        + "averages = copy.deepcopy(model)\n«»\n«»"
        + PLAIN_ROUND
        + "    with torch.no_grad():\n"
        + "        «for a, p in zip(averages.parameters(), model.parameters()): a.mul_(0.9).add_(p, alpha=0.1)»\n",
        each_line,
    ),
    "a parameter in no optimizer": Fault(
        "not_in_optimizer",
        "model = net(); optimizer = AdamW(model[0].parameters(), lr=1e-3)" + LOSS + SETUP + PLAIN_ROUND,
        as_it_is,
    ),
    "a branch that is detached": Fault(
        "no_gradient",
        PLAIN_FP32
        + "loss_fn = lambda: (model[2](model[1](model[0](x)).detach()) - y).square().mean()"
        + SETUP
        + PLAIN_ROUND,
        as_it_is,
    ),
    "an optimizer of another copy": Fault(
        "other_parameters",
        "model = net(); optimizer = AdamW(copy.deepcopy(model).parameters(), lr=1e-3)" + SETUP + LOSS + PLAIN_ROUND,
        lambda line: [line.replace("...", "lr=1e-3")],
    ),
    "two scales": Fault(
        "two_scales",
        FP16
        + "scaler = fp16opt.GradScaler('cpu')\ndel «loss»\n".replace("loss", "HALF")
        + ROUND.replace(
            "optimizer.backward(loss_fn())\n    optimizer.step()",
            "loss = loss_fn(); «scaler.scale(loss).backward(); scaler.step(optimizer)»",
        ),
        lambda line: ["scaler", line],
    ),
    "a plain backward at a scale": Fault("refused", FP16 + FAULTY_ROUND, as_it_is),
    "a backward that adds to another scale's": Fault(
        "refused", FP16 + ROUND.replace("    optimizer.zero_grad()", "    «pass»"), below
    ),
    "no scale and a small loss": Fault(
        "no_loss_scale",
        "model = net(HALF); optimizer = wrap(model)\nloss_fn = lambda: (model(x) - y).square().mean() * 1e-6\n",
        *(None, "of the gradients' elements underflow", "0.weight"),
    ),
    "autocast and a small loss": Fault(
        "no_loss_scale",
        PLAIN_FP32 + "loss_fn = fp16(lambda: (model(x) - y).square().mean() * 1e-6)\n",
        *(None, "% of the gradients' elements underflow in this", "0.weight"),
    ),
    "BF16 and no optimizer yet": Fault(
        "lost_updates",
        "model, lr = net(BF16), 1e-5" + LOSS,
        *(None, "MixedPrecisionOptimizer", "0.weight"),
    ),
    "eps without masters": Fault(
        "eps",
        "model = net(HALF); optimizer = wrap(model, loss_scale=1024.0, master_weights='none')" + LOSS,
        *(None, "eps=1e-08 is 0 in FP16"),
    ),
    "a nan in a weight": Fault(
        "not_finite",
        "model = net(BF16); model[2].weight.data[0, 0] = float('nan'); optimizer = wrap(model)" + LOSS,
        *(None, "the weight itself holds inf or nan", "2.weight"),
    ),
    "an optimizer made before a new layer": Fault(
        "other_parameters",
        FP16 + "model[2] = copy.deepcopy(model[2])\n",
        *(None, "2 of the optimizer's parameters are"),
    ),
    "a clip hidden by FP32 sums": Fault(
        "clip",
        FP16.replace("dynamic=True", "dynamic=True, grad_accumulation='fp32'")
        + before_step(ROUND, "clip_grad_norm_(model.parameters(), 1.0)"),
        *(None, "clip_master_grads(max_norm)"),
    ),
    "a clip of the model under a GradScaler": Fault(
        "clip",
        "model = net(HALF); optimizer = wrap(model); scaler = fp16opt.GradScaler('cpu')"
        + LOSS
        + before_step(
            SCALED_ROUND.replace("loss_fn = fp16(loss_fn)", ""),
            *("scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 1.0)", "scaler"),
        ),
        *(None, "clip_grad_norm_(optimizer.master_params(), max_norm)"),
    ),
    "an activation beyond FP16": Fault(
        "not_finite", WITH_FP16.replace("model(x)", "(1e-4 * model(1e5 * x.clamp(-0.6, 0.6)))"), as_it_is
    ),
    "an activation near the end of FP16": Fault(
        "near_the_end", WITH_FP16.replace("net(HALF)", "net(HALF); model[0].bias.data += 5e4"), as_it_is
    ),
}


WARNINGS = {"near_the_end", "not_in_optimizer", "no_gradient", "scheduler", "micro_batches", "average", "no_step"}


def put(source: str, pieces: list[str]) -> str:
    """The source with these in the place of what stands between « and »."""
    assert len(pieces) == source.count("«")
    given = iter(pieces)
    return re.sub("«.*?»", lambda _: next(given), source)


@pytest.mark.parametrize("name", rows(FAULTS))
def test_a_fault_is_named_and_the_advised_line_mends_its_loop(name: str) -> None:
    """What is there is put back, as it is after a check that finds nothing: gradients are those that were there."""
    fault = FAULTS[name]
    names = made(fault.source.replace("«", "").replace("»", ""))
    params = [*names["model"].train(fault.key == "buffers").parameters()]
    grads = [torch.ones_like(param) for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    before = everything(names)
    found = checked(names)
    assert_same(everything(names), before)
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    named = {one.key: one for one in found.findings}
    assert fault.key in named, str(found)
    one = named[fault.key]
    assert one.level == ("warning" if fault.key in WARNINGS or name == "plain BF16" else "error")
    assert fault.layer is None or one.layer == fault.layer
    assert fault.words in one.sentence or fault.words in one.line
    assert one.sentence in " ".join(str(found).split()) or "`" in one.sentence
    assert found.ok is all(finding.level != "error" for finding in found.findings)
    if fault.mend is not None:
        line = re.sub(r"\s+# .*", "", one.line)
        after = checked(made(put(fault.source, fault.mend(line))))
        assert fault.key not in {one.key for one in after.findings}, f"{found}\n{after}"
        assert after.ok, str(after)


def test_every_key_is_planted() -> None:
    assert {fault.key for fault in FAULTS.values()} == {*KEYS}


# -- what overflows in a forward, and which scales are offered ---------------------------------------------------------

SQUARES = "model = net(HALF, middle=Rms()); x *= 1500; optimizer = wrap(model«»)" + LOSS


def test_no_scale_is_offered_at_which_a_step_was_skipped() -> None:
    names = made(put(SQUARES, [", dynamic=True"]))
    found, optimizer, scales = checked(names), names["optimizer"], [float("inf")]
    while scales[-1] == float("inf") or optimizer.step_was_skipped:
        scales.append(float(optimizer.loss_scale))
        optimizer.zero_grad()
        optimizer.backward(names["loss_fn"]())
        optimizer.step()
    assert len(scales) > 2
    (told,) = re.findall(r"the largest possible is ([\d,]+)", " ".join(found.facts))
    offered = [one.numbers["largest_scale"] for one in found.findings if "largest_scale" in one.numbers]
    assert {*offered, float(told.replace(",", ""))} == {scales[-1]}


def test_a_scale_that_is_offered_was_tried() -> None:
    names = made(put(SQUARES, [""]))
    scale = next(one for one in checked(names).findings if one.key == "no_loss_scale").numbers["largest_scale"]
    for factor, is_finite in ((1.0, True), (2.0, False)):
        grads = torch.autograd.grad(names["loss_fn"]() * (scale * factor), list(names["model"].parameters()))
        assert all(bool(grad.isfinite().all()) for grad in grads) is is_finite


@pytest.mark.parametrize(
    ("operation", "name"),
    [("h.clone().mul_(h)", "mul_"), ("h * h", "mul"), ("torch.zeros_like(h).copy_(h.float() ** 2)", "copy_")],
)
def test_the_operation_and_the_place_are_named(operation: str, name: str) -> None:
    source = f"loss_fn = lambda: (lambda h: {operation})(model[0](x.half())).clamp(max=60000.0).float().mean()"
    (one,) = (one for one in checked(made(put(SQUARES, [""]) + source)).findings if one.key == "inside")
    assert one.layer == "the loss function"
    assert f"{name} makes inf" in one.sentence


@pytest.mark.parametrize(
    "mask",
    [
        "torch.zeros_like(h).masked_fill(h > 0, -torch.inf)",
        "torch.full(h.shape, torch.finfo(FP32).min).triu(2).clamp(max=0.0).to(h.dtype)",
        "torch.full_like(h, -65504.0).tril()",
    ],
)
def test_masks_are_no_overflow(mask: str) -> None:
    attend = f"lambda h: torch.cat([h + {mask}, torch.zeros_like(h[:, :1])], 1).softmax(-1)[:, :-1]"
    source = f"attend = {attend}\nloss_fn = lambda: (attend(model(x).half()).float() - y).square().mean()"
    assert checked(made(FP16 + source)).findings == []
