"""docs/errors.md: each message is provoked here, and is what the page shows, to the letter."""

from __future__ import annotations

import ast
import datetime
import functools
import logging
import re
import string
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

import fp16opt
import fp16opt.amp
import fp16opt.distributed
from fp16opt import AveragedMasters, DynamicLossScaler, GradScaler, LossScaleError, MixedPrecisionOptimizer, ema
from fp16opt.distributed import settings, waiting
from fp16opt.engine import errors
from fp16opt.engine.diagnostics import Lines
from fp16opt.engine.ranks import Asked
from fp16opt.kernels import backends, cuda, host_memory

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="run from an installed package, without the repository")


class Training:
    """A model of one layer, ``fc``, in FP16 and its optimizer."""

    def __init__(self, optimizer: Callable[..., Any] = SGD, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(OrderedDict(fc=nn.Linear(4, 2))).half()
        self.inner = optimizer(self.model.parameters(), lr=0.1)
        self.opt = MixedPrecisionOptimizer(self.inner, named_parameters=self.model.named_parameters(), **options)

    def loss(self, factor: float = 1.0) -> Tensor:
        """A finite loss, times ``factor``."""
        return (self.model(torch.ones(3, 4).half()).float() - 1.0).square().mean() * factor

    def step(self, factor: float = 1.0) -> None:
        """One step of the loop, as it should be."""
        self.opt.zero_grad()
        self.opt.backward(self.loss(factor))
        self.opt.step()

    def overflow(self, times: int = 1) -> None:
        """Steps whose loss is finite and whose gradients are not."""
        for _ in range(times):
            self.opt.zero_grad()
            self.opt.backward(self.loss())
            with torch.no_grad():
                for param in self.model.parameters():
                    param.grad = torch.full_like(param, float("inf"))
            self.opt.update_master_grads()
            self.opt.step()


# -- gradients between backward and step -------------------------------------------------------------------------------


def written() -> None:
    one = Training(dynamic=True)
    one.opt.backward(one.loss())
    clip_grad_norm_(one.model.parameters(), 0.1)
    one.opt.step()


def folded() -> None:
    one = Training(dynamic=True, grad_accumulation="fp32")
    one.opt.backward(one.loss())
    clip_grad_norm_(one.model.parameters(), 0.1)


def not_of_this_step() -> None:
    one = Training(loss_scale=1024.0)
    one.step()
    one.opt.zero_grad()
    one.loss().backward()
    one.opt.step()


def not_cleared() -> None:
    one = Training(loss_scale=1024.0)
    one.opt.backward(one.loss())
    one.opt.step()
    one.opt.backward(one.loss())


def undone() -> None:
    one = Training(dynamic=True)
    one.opt.backward(one.loss())
    one.opt.clip_master_grads(1.0)
    one.opt.backward(one.loss())


def interrupted() -> None:
    one = Training(dynamic=True)

    class Stop(Exception):
        pass

    def stop(_: Tensor) -> None:
        raise Stop

    hook = one.model.fc.weight.register_hook(stop)  # type: ignore[union-attr]
    with pytest.raises(Stop):
        one.opt.backward(one.loss())
    hook.remove()
    one.opt.step()


def master_gradient_set() -> None:
    one = Training(loss_scale=1024.0)
    for master in one.opt.master_params():
        master.grad = torch.ones_like(master)


def scale_set() -> None:
    one = Training(dynamic=True)
    one.opt.backward(one.loss())
    one.opt.loss_scale = 8.0


def groups_changed() -> None:
    one = Training(dynamic=True)
    one.opt.backward(one.loss())
    one.opt.clip_master_grads(1.0)
    one.opt.add_param_group({"params": nn.Linear(2, 2).half().parameters()})


class Alone:
    """A process group of this process."""

    def __enter__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def no_sync() -> None:
    with Alone():
        one = Training(dynamic=True)
        ddp = DistributedDataParallel(one.model)
        fp16opt.distributed.attach(one.opt, ddp)
        with ddp.no_sync():
            one.opt.backward(ddp(torch.ones(3, 4).half()).float().square().mean())
            one.opt.step()


def sums_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with Alone():
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        one = Training(grad_accumulation="fp32")
        one.opt.backward(one.loss())


# -- with a GradScaler -------------------------------------------------------------------------------------------------


def two_scales() -> None:
    one = Training(dynamic=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(one.loss()).backward()
    scaler.step(one.opt)


def clipped_the_model() -> None:
    one = Training()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(one.loss()).backward()
    scaler.unscale_(one.opt)
    clip_grad_norm_(one.model.parameters(), 0.1)
    scaler.step(one.opt)


def never_wrapped() -> None:
    model = nn.Linear(4, 2).half()
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(3, 4).half()).float().sum()).backward()
    scaler.step(SGD(model.parameters(), lr=0.1))


# -- the wrapped optimizer, the model ----------------------------------------------------------------------------------


def meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(fc=nn.Linear(4, 2)))
    MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())


def wrapped_twice() -> None:
    MixedPrecisionOptimizer(Training().inner)


def behind_the_back() -> None:
    one = Training()
    one.opt.backward(one.loss())
    one.inner.step()


class SAM(SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        loss = closure()
        super().step()
        return loss


def evaluated_twice() -> None:
    one = Training(SAM)

    def closure() -> Tensor:
        one.opt.zero_grad()
        loss = one.loss()
        one.opt.backward(loss)
        return loss

    one.opt.step(closure)


def model_written() -> None:
    one = Training(on_model_write="error")
    one.model.load_state_dict({name: value + 1.0 for name, value in one.model.state_dict().items()})
    one.step()


def model_written_and_taken() -> None:
    one = Training()
    one.model.load_state_dict({name: value + 1.0 for name, value in one.model.state_dict().items()})
    one.step()


def model_swapped() -> None:
    one = Training()
    averaged = AveragedMasters(one.model, one.opt, ema(0.9))
    averaged.update()
    with averaged.swap():
        one.step()


def split_master_written() -> None:
    one = Training(master_weights="split")
    with torch.no_grad():
        next(one.opt.master_params()).mul_(0.5)


def model_converted() -> None:
    one = Training()
    one.model.float()
    one.opt.step()


def memory_freed() -> None:
    one = Training()
    one.loss().backward()
    one.model.fc.weight.untyped_storage().resize_(0)
    one.opt.step()


def not_in_the_model() -> None:
    one = Training(track_changes=True)
    one.model.fc.weight = nn.Parameter(torch.ones(3, 4).half())
    one.opt.take_delta(one.model)


def eps() -> None:
    Training(AdamW, master_weights="none")


def no_scale() -> None:
    Training().step(1e-6)


class Buffered(SGD):
    """Keeps parts of one buffer beside its state, as Muon does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flat = torch.zeros(10, dtype=torch.float16)


def halves_outside_of_state() -> None:
    Training(Buffered)


def not_in_one_pass() -> None:
    one = Training(dynamic=True)
    one.step()
    one.opt.param_groups[0]["differentiable"] = True
    one.step()


def halves_under_a_grad_scaler() -> None:
    layer = nn.Linear(4, 2).bfloat16()
    scaler, plain = GradScaler("cpu"), SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(3, 4).bfloat16()).float().sum()).backward()
    scaler.step(plain)


def no_gradients_under_a_grad_scaler() -> None:
    scaler, layer, other = GradScaler("cpu"), nn.Linear(4, 2), nn.Linear(4, 2)
    scaler.scale(other(torch.ones(3, 4)).sum()).backward()
    scaler.step(SGD(layer.parameters(), lr=0.1))


class Shampoo(torch.optim.Optimizer):
    """Holds the parameters where wrapping does not find them."""

    def __init__(self, params: Any) -> None:
        held = list(params)
        super().__init__(held, {"lr": 0.1})
        self.held = lambda: held

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.held():
            p.sub_(p.grad)


def goes_round() -> None:
    model = nn.Linear(4, 2).half()
    opt = MixedPrecisionOptimizer(Shampoo(model.parameters()), loss_scale=8.0)
    for _ in range(3):
        opt.zero_grad()
        opt.backward(model(torch.ones(3, 4).half()).float().sum())
        opt.step()


def no_gradients() -> None:
    one = Training()
    other = nn.Linear(4, 2)
    for _ in range(4):
        one.opt.backward(other(torch.ones(3, 4)).sum())
        one.opt.step()


def sums_without_backward() -> None:
    one = Training(grad_accumulation="fp32")
    one.loss().backward()
    one.opt.step()


def too_large() -> None:
    one = Training()
    for master in one.opt.master_params():
        master.data.fill_(1e6)
    one.opt.write_masters()


def not_finite() -> None:
    one = Training()
    for master in one.opt.master_params():
        master.data.fill_(float("nan"))
    one.opt.write_masters()


# -- stopped steps -----------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """For Ctrl-C."""


class Slow(SGD):
    """Is stopped after it has stepped some parameters."""

    left: float = float("inf")

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if self.left == 0:
                        raise Stopped
                    self.left -= 1
                    with torch.no_grad():
                        param.sub_(param.grad, alpha=group["lr"])


def step_stopped() -> None:
    one = Training(Slow)
    one.inner.left = 1
    one.opt.backward(one.loss())
    with pytest.raises(Stopped):
        one.opt.step()


def within_a_step() -> None:
    one = Training()
    one.inner.register_step_post_hook(lambda *_: one.opt.state_dict())
    one.step()


def unscaled_after_a_stop() -> None:
    one = Training(grad_accumulation="fp32")

    def stop(*_: Any) -> None:
        raise Stopped

    one.inner.register_step_pre_hook(stop)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss()).backward()
    with pytest.raises(Stopped):
        scaler.step(one.opt)
    scaler.unscale_(one.opt)


# -- skipped steps -----------------------------------------------------------------------------------------------------


def calibrating() -> None:
    Training(dynamic=True).overflow()


def rare() -> None:
    one = Training(scaler=DynamicLossScaler(init_scale=1024.0))
    for _ in range(10):
        one.step()
    one.overflow()


def in_a_row() -> None:
    one = Training(scaler=DynamicLossScaler(init_scale=1024.0))
    one.step()
    one.overflow(3)


def loss_not_finite() -> None:
    Training(dynamic=True).step(float("inf"))


def static() -> None:
    Training(loss_scale=1024.0).overflow()


def below_one() -> None:
    one = Training(scaler=DynamicLossScaler(init_scale=1.0))
    one.step()
    one.overflow()


def floor() -> None:
    one = Training(scaler=DynamicLossScaler(init_scale=1.0, min_scale=1.0))
    one.step()
    one.overflow()


def under_a_grad_scaler() -> None:
    one = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf")):
        one.opt.zero_grad()
        scaler.scale(one.loss(factor)).backward()
        scaler.step(one.opt)
        scaler.update()


def too_many_in_a_row() -> None:
    one = Training(scaler=DynamicLossScaler(init_scale=1024.0, max_consecutive_skips=2))
    one.step()
    one.overflow(2)


# -- in trainers -------------------------------------------------------------------------------------------------------


def prepare(precision: str, master_weights: dict[str, Any] | None) -> None:
    accelerate = pytest.importorskip("fp16opt.integrations.accelerate", exc_type=ImportError)
    from accelerate.state import AcceleratorState, GradientState

    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, master_weights=master_weights)
        model = nn.Linear(4, 2).half()
        accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    finally:  # Accelerate keeps its settings in the process
        AcceleratorState._reset_state(True)  # type: ignore[no-untyped-call]
        GradientState._reset_state()  # type: ignore[no-untyped-call]


def prepared_without_masters() -> None:
    prepare("no", None)


def halves_under_bf16() -> None:
    prepare("bf16", {"dynamic": True})


R, T, V, L = RuntimeError, TypeError, ValueError, None  # L: logged, not raised
W = UserWarning


CLIP = Asked(2.0, 1.0)


def apart(monkeypatch: pytest.MonkeyPatch, lr: float, asked: Asked, mine: Asked = CLIP) -> None:
    """Another rank has this rate, and asks for this where this one asks for ``mine``."""
    one = Training()

    def gathered(told: Any, _group: Any) -> list[Any]:
        other = [(key, line.replace("lr=0.1", f"lr={lr}")) for key, line in told[1]]
        return [told, (settings.words_of(asked), other, set(), (asked.has_grads, True, {(0, 1)}))]

    monkeypatch.setattr(settings, "gather", gathered)
    settings.Settings(one.inner).refuse(mine, lambda _: (0, 1), None, False)


def settings_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch, 0.01, Asked(2.0, 1.0))


def another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch, 0.1, CLIP._replace(steps=2), CLIP._replace(steps=3))


def no_gradients_here(monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch, 0.1, Asked(None, steps=2, has_grads=False), Asked(None, steps=2))


def saved_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two trains on."""
    store: Any = dist.HashStore()
    store.set("at/1", "a forward of the model")
    with Alone():
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
        monkeypatch.setattr(waiting, "_store", lambda: store)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
        waiting.meet("save('step100')")


# -- state on the host -------------------------------------------------------------------------------------------------


class StubCard:
    """What locks pages, and runs nothing."""

    def shares_memory(self) -> bool:
        return False

    def lock_pages(self, address: int, size: int) -> int:
        return address

    def unlock_pages(self, address: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def launch(self, *given: Any) -> None:
        pass


def on_a_stub(monkeypatch: pytest.MonkeyPatch, card: StubCard) -> Callable[[], Training]:
    """Tensors of the CPU are taken for those of a card."""

    monkeypatch.setattr(cuda, "Stream", emulated.HostStream)
    monkeypatch.setattr(backends, "compiled_for", lambda device: cuda if device.type == "cpu" else None)
    monkeypatch.setattr(host_memory, "shown", emulated.shown)
    emulated.launch_on(card, monkeypatch)
    return lambda: Training(offload="cpu")


def offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_stub(monkeypatch, StubCard())
    one = Training()
    one.opt.offload()
    one.opt.step()


def offload_between_backward_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_stub(monkeypatch, StubCard())
    one = Training()
    one.opt.backward(one.loss())
    one.opt.offload()


KINDS: dict[type[BaseException] | None, str] = {  # where it is no RuntimeError
    V: "never wrapped, meta, not in the model",
    W: "halves under a GradScaler, no gradients under a GradScaler",
    T: "wrapped twice",
    L: (
        "model written and taken, eps, no scale, halves outside of state, not in one pass, goes round, no gradients, "
        "sums without backward, too large, not finite, step stopped, calibrating, rare, in a row, loss not finite, "
        "static, below one, floor, under a GradScaler, prepared without masters, halves under BF16"
    ),
    LossScaleError: "too many in a row",
}
ENTRIES = {name: one for name, one in vars(errors).items() if isinstance(one, errors.Message)}


def provoker(key: str) -> Callable[..., None]:
    """The function above that is named like the message."""
    name = re.sub(r"\W+", "_", key.replace("GradScaler", "grad_scaler")).lower().strip("_")
    return globals()[name]  # type: ignore[no-any-return]


PROVOKED = {
    one.key: (next((kind for kind, keys in KINDS.items() if one.key in keys.split(", ")), R), provoker(one.key))
    for one in ENTRIES.values()
}


class Last(logging.Handler):
    """Keeps the last line."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def said(key: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of one case."""
    error, provoke = PROVOKED[key]
    given = (monkeypatch,) if "monkeypatch" in provoke.__annotations__ else ()
    if error is W:
        with pytest.warns(W) as warned:
            provoke(*given)
        return str(warned[0].message)
    if error is not None:
        with pytest.raises(error) as caught:
            provoke(*given)
        assert type(caught.value) is error
        return str(caught.value)
    handler, logger = Last(), logging.getLogger("fp16opt")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        provoke(*given)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return handler.text


def shown() -> dict[str, str]:
    """The page's messages by key, in one line each."""
    found = re.findall(r"^<!-- message: ([^\n]+) -->\n```text\n(.+?)\n```$", PAGE.read_text("utf-8"), re.M | re.S)
    return {key: " ".join(text.split()) for key, text in found}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of other tests that still live are not told apart from these."""
    monkeypatch.setattr(Lines, "_signature", lambda _: "")


HEARD = [pytest.param(key, marks=[pytest.mark.missing_scale] if key == "no scale" else []) for key in PROVOKED]


@pytest.mark.parametrize("key", HEARD)
def test_the_page_shows_the_message(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown().get(key) == " ".join(said(key, monkeypatch).split())


def test_the_page_has_all_of_them_in_this_order() -> None:
    assert list(shown()) == list(PROVOKED)


# -- the table of messages ---------------------------------------------------------------------------------------------

PARTS = {
    name: one for name, one in vars(errors).items() if isinstance(one, str) and re.fullmatch("[A-Z][A-Z0-9_]*", name)
}


def places(text: str) -> set[str]:
    """Names of what is filled in."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


@functools.cache
def uses() -> list[tuple[str, set[str | None] | None, str]]:
    """(name, what is filled in, where) of each use of the table; None where that can't be read there."""
    package, found = Path(fp16opt.__file__).parent, []
    for path in sorted(package.rglob("*.py")):
        if "errors." not in (text := path.read_text("utf-8")):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        filled: dict[int, set[str | None]] = {}
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            entry, names = call.func, {word.arg for word in call.keywords}
            if isinstance(entry, ast.Attribute) and entry.attr == "filled":
                entry = entry.value
            elif isinstance(entry, ast.Attribute) and entry.attr == "tell" and call.args:
                entry = call.args[0]
            if None not in names:  # of **known
                filled[id(entry)] = names - {"level", "nth", "once"}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "errors":
                found.append((node.attr, filled.get(id(node)), f"{path.relative_to(package)}:{node.lineno}"))
    return found


def test_the_table_has_the_kinds_that_are_provoked() -> None:
    kinds = {one.key: one.kind if isinstance(one, errors.Refusal) else None for one in ENTRIES.values()}
    assert kinds == {key: error for key, (error, _) in PROVOKED.items()}


def test_the_library_uses_the_whole_table() -> None:
    used = {name for name, _, _ in uses()}
    assert sorted({*ENTRIES, *PARTS} - used) == []


def test_every_use_fills_in_what_the_text_has() -> None:
    wanted = {name: places(one.text) for name, one in ENTRIES.items()}
    calls = [(where, name, known) for name, known, where in uses() if name in ENTRIES and known is not None]
    assert len(calls) > 40
    assert [call for call in calls if call[2] != wanted[call[1]]] == []


def test_each_message_says_what_to_do() -> None:
    """Under each stand two paragraphs: what happened, what to do."""
    parts = PAGE.read_text("utf-8").split("<!-- message: ")[1:]
    for part in parts:
        below = part.partition("```\n\n")[2].partition("\n#")[0]
        assert below.startswith("**What happened.** "), part[:40]
        assert "\n\n**What to do.** " in below, part[:40]


NOT_THERE = (
    "FP32 sums under DDP's no_sync need every master on every rank",  # of ZeRO: docs/scale.md
    "() of an optimizer that was freed was called.",  # of a method that outlives its optimizer
    "() of a copied optimizer was called.",  # of one that was copied without its wrapper
)


def test_every_refusal_of_the_stages_is_on_the_page() -> None:
    """The files that keep the rules raise nothing but what is in the table."""
    missing = []
    for name in ("gradients", "true_gradients", "model_writes", "wrapped_step"):
        tree = ast.parse((Path(fp16opt.__file__).parent / "engine" / f"{name}.py").read_text("utf-8"))
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            first = node.exc.args[0]
            parts = first.values if isinstance(first, ast.JoinedStr) else [first]
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            longest = max(texts, key=len, default="")
            if longest and not any(one in longest for one in NOT_THERE):
                missing.append((name, node.lineno, longest[:60]))
    assert missing == []


IN_THE_LOG = (
    "engine",
    "certify",
    "distributed",
    "integrations",
    "grad_scaler",
    "optimizer.py",
    "averaging.py",
    "deltas.py",
)
"""What speaks to who trains. Kernels that can't serve are docs/gpu.md's, and apex's faces log in apex's words."""

OTHER_LINES = (
    "fp16opt.register_one_pass is called fp16opt.register_fused_step now",  # an old name: says all
    "is outside [min_scale, max_scale]",  # a loaded scale: says all
)


def warned_of(tree: ast.Module) -> list[tuple[int, str]]:
    """The longest plain piece of each text that is logged or warned of, by line."""
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        texts = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            words = _words_of(call, ast.unparse(call.func))
            if words is None:
                continue
            words = texts.get(words.id, words) if isinstance(words, ast.Name) else words
            constants = [one.value for one in ast.walk(words) if isinstance(one, ast.Constant)]
            pieces = [piece for text in constants if isinstance(text, str) for piece in re.split(r"%[a-z]|%%", text)]
            found.append((call.lineno, " ".join(max(pieces, key=len, default="").split())))
    return [(line, piece) for line, piece in found if piece]


def _words_of(call: ast.Call, name: str) -> ast.expr | None:
    if name.endswith("lines.say"):
        return None if "DEBUG" in ast.unparse(call.args[0]) or "INFO" in ast.unparse(call.args[0]) else call.args[1]
    if name.endswith(("logger.warning", "logger.error", "warnings.warn")):
        return call.args[0]
    return call.args[1] if name.endswith("_warn_once") else None


def test_every_line_of_the_log_is_in_the_table() -> None:
    root = Path(fp16opt.__file__).parent
    heard = {}
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] in IN_THE_LOG:
            for line, piece in warned_of(ast.parse(path.read_text("utf-8"))):
                heard[f"{path.relative_to(root)}:{line}"] = piece
    assert all(any(one in piece for piece in heard.values()) for one in OTHER_LINES), "lines are found"
    assert {at: piece for at, piece in heard.items() if not any(one in piece for one in OTHER_LINES)} == {}
