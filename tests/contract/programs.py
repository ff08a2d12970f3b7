"""Programs for the random walk: what a user writes around a few small parameters, drawn from a seed.

A program is a setting with a list of statements. A statement is a text, which runs on the library as it stands, with
the oracle's method of the same meaning. Half of the programs are training loops as users write them, half are calls in
any order; the oracle leaves out what the contract leaves open.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, RMSprop

from contract.oracle import Driver, Make, Oracle, OwnDriver, Planned, SummingOracle, TorchDriver
from contract.reference import Scale

DTYPES = {"h": torch.float16, "b": torch.bfloat16, "f": torch.float32, "d": torch.float64}
SHAPES = {"p0": (3,), "p1": (2, 3), "p2": (), "p3": (5,)}
NAMES = list(SHAPES)
RATE_OF_ADDED = 0.0625


class Stumbling(torch.optim.Optimizer):
    """SGD with momentum that raises where it comes to a parameter."""

    stumbles_at: int | None = None

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        there = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for number, (group, p) in enumerate(there):
            if number == self.stumbles_at:
                raise Planned
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            p.sub_(momentum.mul_(0.5).add_(p.grad) * group["lr"])


OPTIMIZERS: dict[str, tuple[Make, str]] = {
    "sgd": (
        lambda params: SGD(params, lr=0.125, momentum=0.5, weight_decay=0.0625),
        "SGD({}, lr=0.125, momentum=0.5, weight_decay=0.0625)",
    ),
    "adamw": (lambda params: AdamW(params, lr=0.0078125, eps=0.001), "AdamW({}, lr=0.0078125, eps=0.001)"),
    "rmsprop": (lambda params: RMSprop(params, lr=0.0078125), "RMSprop({}, lr=0.0078125)"),
    "stumbling": (lambda params: Stumbling(params, lr=0.125), "Stumbling({}, lr=0.125)"),
}
GENERAL = ("sgd", "adamw", "rmsprop", "stumbling")
ONE_PASS = ("sgd", "adamw")


@dataclass(frozen=True)
class Mode:
    """One way to run the engine.

    Attributes:
        arguments: Of the wrapper, besides its scale.
        tolerance: How far a master may be off after a step, relative to 1 plus its magnitude; 0: no bit.
        programs: How many `pytest --all` runs, and a third of them without. The table of stages is the same in all
            modes, so that most are of the quick ones.
    """

    name: str
    arguments: dict[str, Any]
    optimizers: Sequence[str]
    tolerance: float = 0.0
    driven_by: str | None = None
    dtypes: str = "hhhbbffd"
    programs: int = 26

    @property
    def folds(self) -> bool:
        return self.arguments.get("grad_accumulation") == "fp32"

    @property
    def masters(self) -> str:
        return str(self.arguments.get("master_weights", "full"))

    def under(self, scaler: str) -> Mode:
        # torch's GradScaler refuses FP16 gradients, which masters of "none" have.
        dtypes = self.dtypes.replace("h", "b") if scaler == "torch" and self.masters == "none" else self.dtypes
        return Mode(
            f"{self.name}, {scaler} GradScaler", self.arguments, self.optimizers, self.tolerance, scaler, dtypes
        )


WRAPPED = {"fused_step": False}
ALONE = [
    Mode("wrapped step", WRAPPED, GENERAL, programs=250),
    Mode("one pass", {}, ONE_PASS, 3e-5, programs=120),
    Mode("split, one pass", {"master_weights": "split"}, ONE_PASS, 2e-4, dtypes="hhhbbff"),
    Mode("none", {"master_weights": "none"}, ("sgd", "adamw"), 3e-2),
    Mode("FP32 sums, wrapped step", {**WRAPPED, "grad_accumulation": "fp32"}, GENERAL, programs=80),
    Mode("FP32 sums, one pass", {"grad_accumulation": "fp32"}, ONE_PASS, 3e-5),
]
MODES = {
    mode.name: mode
    for mode in [
        *ALONE,
        *[mode.under(scaler) for scaler in ("torch", "own") for mode in ALONE],
        Mode("model writes refused", {**WRAPPED, "on_model_write": "error"}, GENERAL),
        Mode("model writes ignored", {**WRAPPED, "on_model_write": "ignore"}, GENERAL),
    ]
}


# -- what a program begins with ----------------------------------------------------------------------------------------


def loss(**gradients):  # type: ignore[no-untyped-def]
    """With these gradients, times 1, 2, 3, 4, 1, ... by element."""
    return sum((p.float() * pattern(p) * gradients[n]).sum() for n, p in model.items() if n in gradients)  # noqa: F821


def pattern(p):  # type: ignore[no-untyped-def]
    return (torch.arange(p.numel()) % 4 + 1).reshape(p.shape)


def master(name):  # type: ignore[no-untyped-def]
    return next(m for p, m in zip(opt.model_params(), opt.master_params(), strict=True) if p is model[name])  # noqa: F821


def without(name):  # type: ignore[no-untyped-def]
    order = iter(list(opt.model_params()))  # noqa: F821
    for group in opt.param_groups:  # noqa: F821
        group["params"] = [m for m in group["params"] if next(order) is not model[name]]  # noqa: F821


def halve(optimizer, *_):  # type: ignore[no-untyped-def]
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.5)


def stop(*_):  # type: ignore[no-untyped-def]
    raise Planned


def interrupt(*_):  # type: ignore[no-untyped-def]
    raise KeyboardInterrupt


def resumed(optimizer_first):  # type: ignore[no-untyped-def]
    names = {id(p): name for name, p in model.items()}  # noqa: F821
    order = iter([names[id(p)] for p in opt.model_params()])  # noqa: F821
    groups = [[next(order) for _ in group["params"]] for group in opt.param_groups]  # noqa: F821
    saved = copy.deepcopy((opt.state_dict(), model.state_dict()))  # noqa: F821
    frozen = [name for name, p in model.items() if not p.requires_grad]  # noqa: F821
    new, new_opt = build(groups, [])  # noqa: F821
    loads = [(new_opt, saved[0]), (new, saved[1])]
    for made, state in loads if optimizer_first else loads[::-1]:
        made.load_state_dict(state)
    for name in frozen:
        new[name].requires_grad_(False)
    return new, new_opt


_FUNCTIONS = (loss, pattern, master, without, halve, stop, interrupt, resumed)
HELPERS = {f.__name__: re.sub("  # (type: ignore|noqa).*", "", inspect.getsource(f)) for f in _FUNCTIONS}


@dataclass(frozen=True)
class Setting:
    """What a program begins with.

    Attributes:
        scale: The wrapper's own: (value, whether it moves).
        driver_scale: Where a GradScaler drives it, that one's.
    """

    mode: str
    optimizer: str
    dtypes: dict[str, str]
    groups: list[list[str]]
    frozen: list[str] = field(default_factory=list)
    scale: tuple[float, bool] = (1.0, False)
    driver_scale: float = 1024.0

    @property
    def text(self) -> str:
        """Makes ``model`` and ``opt``, and what drives them."""
        mode = MODES[self.mode]
        weights = "".join(f'\n        "{n}": {_weight_text(n, letter)},' for n, letter in self.dtypes.items())
        groups = '[{"params": [model[name] for name in names]} for names in groups]'
        arguments = "".join(f", {key}={value!r}" for key, value in mode.arguments.items())
        lines = [
            "def build(groups, frozen):",
            f"    model = torch.nn.ParameterDict({{{weights}\n    }})",
            "    for name in frozen:",
            "        model[name].requires_grad_(False)",
            f"    inner = {OPTIMIZERS[self.optimizer][1].format(groups)}",
            "    named = model.named_parameters()",
            f"    return model, MixedPrecisionOptimizer(inner, {self._scaler}, named_parameters=named{arguments})",
            "",
            f"model, opt = build({self.groups}, {self.frozen})",
        ]
        if mode.driven_by:
            lines.append(f'scaler = GradScaler("cpu", init_scale={self.driver_scale}, growth_interval=3)')
        if mode.folds and not mode.driven_by:
            lines.append("other = DynamicLossScaler(16.0, growth_interval=2)")
        return "\n".join(lines)

    @property
    def _scaler(self) -> str:
        value, moves = self.scale
        return f"scaler=DynamicLossScaler({value}, growth_interval=3)" if moves else f"loss_scale={value}"

    @property
    def imports(self) -> str:
        mode = MODES[self.mode]
        lines = [
            "import copy, pickle, torch",
            "from math import inf, nan",
            "from torch.optim import SGD, AdamW, RMSprop",
            "from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer",
        ]
        if mode.driven_by:
            lines.append(f"from {'torch.amp' if mode.driven_by == 'torch' else 'fp16opt'} import GradScaler")
        return "\n".join(lines)

    def oracle(self, weights: dict[str, Tensor]) -> tuple[Oracle, Driver | None]:
        mode = MODES[self.mode]
        value, moves = self.scale
        made = (SummingOracle if mode.folds else Oracle).of(
            weights,
            self.groups,
            self.frozen,
            make=OPTIMIZERS[self.optimizer][0],
            scale=Scale(value, growth_interval=3 if moves else None),
            masters=mode.masters,
            on_model_write=mode.arguments.get("on_model_write", "refresh"),
            driven_by=mode.driven_by,
        )
        if mode.driven_by is None:
            return made, None
        driver = TorchDriver if mode.driven_by == "torch" else OwnDriver
        return made, driver(made, Scale(self.driver_scale, growth_interval=3))


def _weight_text(name: str, letter: str) -> str:
    shape = SHAPES[name]
    size = nn.init.torch.Size(shape).numel()
    values = f"torch.linspace(-1, 1, {size}).reshape({shape})" if shape else "torch.tensor(0.7)"
    return f"{values}.to({DTYPES[letter]})"


# -- statements --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """One thing that the user does.

    Attributes:
        text: As it runs on the library. What it returns is assigned to ``result``, where that is compared.
        does: The same on the oracle: the name of a method with its arguments. "scaler." before it: of the driver.
        compares: Whether masters, counts and state are compared after it, which looks at groups.
        ends: Whether the program ends where it is refused, as what was done until then is left open.
    """

    text: str
    does: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    compares: bool = False
    ends: bool = False


REGROUPINGS = {
    "another group": 'opt.param_groups.append({{**opt.param_groups[0], "params": [model.{name}]}})',
    "one more": 'opt.param_groups[0]["params"].append(model.{name})',
    "in place of the first": 'opt.param_groups[0]["params"][0] = model.{name}',
    "a group less": "del opt.param_groups[-1]",
    "one less": 'opt.param_groups[-1]["params"].pop()',
    "groups reversed": "opt.param_groups.reverse()",
    "reversed": 'opt.param_groups[0]["params"].reverse()',
    "without one": 'without("{name}")',
    "all of the model": 'opt.param_groups[0]["params"] = list(model.values())',
}

FACTORS = (0.5, -0.25, 0.3, 1.0, -2.0)
BAD = (float("inf"), float("nan"), 1e5)

S = Statement


def tried(call: str, error: str, before: str = "", last: str = "") -> str:
    lines = [before, f"try: {call}", f"except {error}: pass" if error else "", f"finally: {last}" if last else ""]
    return "\n".join(line for line in lines if line)


class Writer:
    """Draws statements for a setting. Each method is one kind."""

    def __init__(self, draw: random.Random, setting: Setting) -> None:
        self.draw, self.setting, self.mode = draw, setting, MODES[setting.mode]
        self.names = list(setting.dtypes)

    def name(self) -> str:
        return self.draw.choice(self.names)

    def chance(self, of: float) -> bool:
        return self.draw.random() < of

    def terms(self, bad: float = 0.1) -> tuple[tuple[str, float], ...]:
        chosen = [name for name in self.names if self.chance(0.75)] or [self.name()]
        terms = [(name, 0.0 if self.chance(0.06) else self.draw.choice(FACTORS)) for name in chosen]
        if self.chance(bad):
            spoilt = self.draw.randrange(len(terms))
            terms[spoilt] = (terms[spoilt][0], self.draw.choice(BAD))
        return tuple(terms)

    @staticmethod
    def loss(terms: Iterable[tuple[str, float]]) -> str:
        return f"loss({', '.join(f'{name}={factor!r}' for name, factor in terms)})"

    # backwards

    def backward(self, unstamped: float = 0.25) -> Statement:
        terms = self.terms()
        by = {"by": "other"} if self.mode.folds and self.chance(0.15) else {}
        other = ", scaler=other" if by else ""
        if not self.chance(unstamped * 1.6):
            return S(f"opt.backward({self.loss(terms)}{other})", "backward", (terms,), by)
        if self.chance(0.5):
            text = f"opt.backward({self.loss(terms)}, update_master_grads=False{other})"
            return S(text, "backward", (terms,), {"stamp": False, **by})
        return S(f"opt.scale_loss({self.loss(terms)}{other}).backward()", "scale_loss", (terms,), by)

    def plain_backward(self) -> Statement:
        terms = self.terms()
        return S(f"{self.loss(terms)}.backward()", "plain_backward", (terms,))

    def stopped_backward(self) -> Statement:
        terms = ((self.name(), 0.5),)
        if self.chance(0.4):
            text = tried("opt.backward(value)", "Planned", f"value = {self.loss(terms)}\nvalue.register_hook(stop)")
            return S(text, "stopped_backward", (terms,), {"reaches": False})
        hook = f"handle = model.{terms[0][0]}.register_post_accumulate_grad_hook(stop)"
        text = tried(f"opt.backward({self.loss(terms)})", "Planned", hook, "handle.remove()")
        return S(text, "stopped_backward", (terms,))

    # the model's gradients

    def edit_grad(self) -> Statement:
        name, form = self.name(), self.draw.choice(["in place", "in place", "replaced", "replaced", "by data"])
        grad = f"model.{name}.grad"
        if form == "replaced":
            return S(f"{grad} = {grad} * 0.5", "edit_grad", (name, 0.5), {"in_place": False})
        if form == "in place":
            return S(f"{grad}.mul_(0.5)", "edit_grad", (name, 0.5), {"in_place": True})
        return S(f"{grad}.data.mul_(0.5)", "edit_grad", (name, 0.5), {"in_place": True, "by_data": True})

    def give_grad(self) -> Statement:
        name = self.name()
        return S(f"model.{name}.grad = torch.ones_like(model.{name})", "give_grad", (name,))

    def drop_grad(self) -> Statement:
        name = self.name()
        return S(f"model.{name}.grad = None", "drop_grads", ((name,),))

    def model_zero_grad(self) -> Statement:
        if self.chance(0.3):
            return S("model.zero_grad(set_to_none=False)", "zero_model_grads")
        return S("model.zero_grad()", "drop_grads", (tuple(self.names),))

    def zero_grad(self) -> Statement:
        if self.chance(0.2) and not self.mode.folds:
            return S("opt.zero_grad(set_to_none=False)", "zero_grad", (False,))
        return S("opt.zero_grad()", "zero_grad")

    # master gradients

    def read_master_grads(self) -> Statement:
        if self.chance(0.5):
            return S("result = [m.grad for m in opt.master_params()]", "read_master_grads")
        return S('result = [m.grad for group in opt.param_groups for m in group["params"]]', "read_master_grads")

    def hold(self) -> Statement:
        name = self.name()
        return S(f'held = master("{name}")', "hold", (name,))

    def read_held(self) -> Statement:
        return S("result = held.grad", "read_held")

    def edit_master_grad(self) -> Statement:
        name, form = self.name(), self.draw.choice(["in place", "replaced", "dropped"])
        text = f'm = master("{name}")\n'
        if form == "in place":
            return S(text + "m.grad.mul_(0.5)", "edit_master_grad", (name, 0.5))
        if form == "replaced":
            return S(text + "m.grad = m.grad * 0.5", "edit_master_grad", (name, 0.5))
        return S(text + "if m.grad is not None: m.grad = None", "edit_master_grad", (name, None))

    def torch_clip(self) -> Statement:
        limit = self.draw.choice([0.125, 1.0, 100.0])
        return S(f"result = torch.nn.utils.clip_grad_norm_(opt.master_params(), {limit})", "torch_clip", (limit,))

    def clip(self) -> Statement:
        limit = self.draw.choice([0.125, 1.0, 1e4])
        if self.chance(0.2):
            norm_type = self.draw.choice([1.0, float("inf")])
            return S(f"result = opt.clip_master_grads({limit}, {norm_type})", "clip", (limit, norm_type))
        if self.chance(0.2):
            names = [name for name in self.names if self.chance(0.6)] or [self.name()]
            text = f"result = opt.clip_master_grads({limit}, params=[model[n] for n in {names}])"
            return S(text, "clip", (limit, 2.0, names))
        return S(f"result = opt.clip_master_grads({limit})", "clip", (limit,))

    def clip_values(self) -> Statement:
        limit = self.draw.choice([0.25, 10.0])
        return S(f"opt.clip_master_values({limit})", "clip_values", (limit,))

    def door(self) -> Statement:
        return S("opt.update_master_grads()", "update_master_grads")

    # steps

    def step(self) -> Statement:
        """Plain ones, for the most part."""
        kind = self.draw.random()
        if kind < 0.05:
            return self.stopped_step()
        if kind < 0.15:
            return self._with_hook("hooked_step", self.draw.choice(["opt", "inner"]), "post", "halve", "")
        if self.mode.driven_by:
            return S("scaler.step(opt)", "scaler.step", compares=True, ends=True)
        if kind < 0.4 and self.setting.optimizer == "stumbling":
            return self.stumbling_step()
        return S("opt.step()", "step", compares=True)

    def stopped_step(self) -> Statement:
        owner, when = self.draw.choice([("opt", "pre"), ("opt", "post"), ("inner", "pre"), ("inner", "post")])
        hook, error = self.draw.choice([("stop", "Planned"), ("interrupt", "KeyboardInterrupt")])
        return self._with_hook("stopped_step", owner, when, hook, error)

    def step_stopped_before(self) -> Statement:
        """By which nothing is changed, so that it may be tried again."""
        return self._with_hook("stopped_step", self.draw.choice(["opt", "inner"]), "pre", "stop", "Planned")

    def _with_hook(self, does: str, owner: str, when: str, hook: str, error: str) -> Statement:
        target = {"opt": "opt", "inner": "opt.optimizer"}[owner]
        call = "scaler.step(opt)" if self.mode.driven_by else "opt.step()"
        text = tried(call, error, f"handle = {target}.register_step_{when}_hook({hook})", "handle.remove()")
        prefix = "scaler." if self.mode.driven_by else ""
        args = (owner, when) if does == "stopped_step" else (owner,)
        return S(text, prefix + does, args, compares=does == "hooked_step", ends=bool(prefix))

    def stumbling_step(self) -> Statement:
        at = self.draw.randrange(3)
        text = f"opt.optimizer.stumbles_at = {at}\n"
        text += tried("opt.step()", "Planned", last="opt.optimizer.stumbles_at = None")
        text += "\nsaved = copy.deepcopy(opt.state_dict())\nopt.zero_grad()"
        return S(text, "stumbling_step", (at,), compares=True, ends=True)

    def closure_step(self) -> Statement:
        terms = self.terms()
        text = f"def closure():\n    opt.zero_grad()\n    opt.backward({self.loss(terms)})\n    return 1.5\n"
        return S(text + "result = opt.step(closure)", "step_with_closure", (terms,), compares=True, ends=True)

    def behind(self) -> Statement:
        return S(f"opt.optimizer.{self.draw.choice(['step', 'zero_grad'])}()", "use_behind")

    # weights and masters

    def write_weight(self) -> Statement:
        name = self.name()
        if self.chance(0.3):
            text = f"with torch.no_grad(): model.{name}.view(-1)[:1].mul_(0.5)"
            return S(text, "write_weight", (name, 0.5), {"first_only": True})
        form = self.draw.choice(
            [
                "with torch.no_grad(): model.{0}.mul_(0.5)",
                "model.{0}.data.mul_(0.5)",
                "model.{0}.data = model.{0}.data * 0.5",
                'model.load_state_dict({{**model.state_dict(), "{0}": model.{0}.detach() * 0.5}})',
            ]
        )
        return S(form.format(name), "write_weight", (name, 0.5))

    def edit_master(self) -> Statement:
        name = self.name()
        return S(f'with torch.no_grad(): master("{name}").mul_(0.75)', "edit_master", (name, 0.75))

    def refresh(self) -> Statement:
        return S("opt.refresh_masters()", "refresh_masters")

    def write_masters(self) -> Statement:
        return S("opt.write_masters()", "write_masters")

    # state

    def save(self) -> Statement:
        return S("saved = copy.deepcopy(opt.state_dict())", "save")

    def load(self) -> Statement:
        return S("opt.load_state_dict(copy.deepcopy(saved))", "load", compares=True)

    def reload(self) -> Statement:
        return S(
            "saved = copy.deepcopy(opt.state_dict())\nopt.load_state_dict(copy.deepcopy(saved))",
            "reload",
            compares=True,
            ends=True,
        )

    def resume(self) -> Statement:
        return S(f"model, opt = resumed(optimizer_first={self.chance(0.5)})", "resume", compares=True, ends=True)

    def copy(self) -> Statement:
        form = self.draw.choice(["copy.deepcopy((model, opt))", "pickle.loads(pickle.dumps((model, opt)))"])
        return S(f"model, opt = {form}", "copy", compares=True)

    def set_scale(self) -> Statement:
        value = self.draw.choice([1.0, 64.0, 512.0])
        return S(f"opt.loss_scale = {value}", "set_scale", (value,))

    def order(self) -> Statement:
        text = "result = [[n for n, p in model.items() if p is q][0] for q in opt.model_params()]"
        return S(text, "read_order")

    # groups

    @property
    def spare(self) -> str:
        """The last parameter, which often is in no group."""
        return self.names[-1] if self.chance(0.8) else self.name()

    def out_and_in(self) -> list[Statement]:
        """A parameter leaves its group and comes back, which makes its state anew."""
        name = self.name()
        again = self.draw.choice(["another group", "one more"])
        looks = [self.read_master_grads()] if self.chance(0.3) else []
        return [self._regroup("without one", name), *looks, self._regroup(again, name)]

    def add_group(self) -> Statement:
        name = self.spare
        text = f'opt.add_param_group({{"params": [model.{name}], "lr": {RATE_OF_ADDED}}})'
        return S(text, "add_param_group", (name, RATE_OF_ADDED))

    def regroup(self) -> Statement:
        return self.add_group() if self.chance(0.25) else self._regroup(self.draw.choice(list(REGROUPINGS)))

    def _regroup(self, how: str, name: str | None = None) -> Statement:
        if name is None:
            name = self.spare if "{name}" in REGROUPINGS[how] else ""
        return S(REGROUPINGS[how].format(name=name), "regroup", (how, name))

    def rate(self) -> Statement:
        return S('for group in opt.param_groups: group["lr"] *= 0.5', "change_rate", (0.5,))

    def freeze(self) -> Statement:
        name, trains = self.name(), self.chance(0.6)
        return S(f"model.{name}.requires_grad_({trains})", "set_trains", (name, trains))

    # under a GradScaler

    def driven_backward(self) -> Statement:
        terms = self.terms()
        return S(f"scaler.scale({self.loss(terms)}).backward()", "scaler.backward", (terms,))

    def unscale(self) -> Statement:
        return S("scaler.unscale_(opt)", "scaler.unscale", ends=True)

    def update(self) -> Statement:
        return S("scaler.update()", "scaler.update")

    # -- programs ------------------------------------------------------------------------------------------------------

    def some(self, chance: float, kinds: Sequence[Callable[[], Statement]]) -> list[Statement]:
        """None, or one, or more."""
        made = []
        while self.chance(chance):
            made.append(self.draw.choice(kinds)())
        return made

    @property
    def _odd(self) -> list[Callable[[], Statement]]:
        """Between a backward and its step."""
        kinds = [self.drop_grad, self.freeze, self.regroup, self.write_weight, self.rate, self.hold, self.read_held]
        kinds += [self.order, self.save, self.edit_master, self.edit_grad]
        return kinds if self.mode.folds else [*kinds, self.give_grad]

    @property
    def _shaping(self) -> list[Callable[[], Statement]]:
        """What users do to gradients before they step."""
        kinds = [self.clip, self.clip, self.clip_values, self.torch_clip, self.torch_clip]
        return [*kinds, self.edit_master_grad, self.read_master_grads, self.door]

    @property
    def _between(self) -> list[Callable[[], Statement]]:
        """Between a step and the next backward."""
        kinds = [self.rate, self.regroup, self.regroup, self.freeze, self.write_weight, self.edit_master, self.save]
        kinds += [self.reload, self.load, self.read_master_grads, self.refresh, self.write_masters]
        return kinds if self.mode.driven_by else [*kinds, self.copy, self.resume, self.set_scale]

    def clear(self) -> Statement:
        return self.zero_grad() if self.mode.folds or self.chance(0.65) else self.model_zero_grad()

    @property
    def _incidents(self) -> list[list[Callable[[], Statement]]]:
        """What happens in some steps of a loop after the backward, and is not just one thing more."""
        backward = self.driven_backward if self.mode.driven_by else self.backward
        shape, change = self.draw.choice(self._shaping), self.draw.choice([self.regroup, self.add_group])
        incidents = [
            [shape, change],
            [shape, self.drop_grad],
            [self.clip, self.drop_grad],
            [shape, backward],
            [shape, self.freeze],
            [self.freeze, self.freeze],
            [self.add_group, backward, shape],
            [self.freeze, shape],
            [change, shape],
            [self.edit_master_grad, self.edit_master_grad],
            [self.torch_clip, self.door],
            [self.read_master_grads, self.torch_clip],
            [self.hold, self.read_held],
            [self.write_weight, self.edit_master],
            [self.step_stopped_before],
            [self.step_stopped_before, shape],
        ]
        if self.mode.driven_by:
            incidents.append([self.step_stopped_before, self.unscale])
        if self.mode.folds:
            incidents += [
                [self.model_zero_grad],
                [self.model_zero_grad, backward],
                [shape, self.model_zero_grad, backward],
                [self.drop_grad, backward],
                [self.clip, self.drop_grad],
            ]
        else:
            incidents += [
                [shape, self.model_zero_grad],
                [shape, self.model_zero_grad, backward],
                [shape, self.model_zero_grad, self.plain_backward],
                [self.clip, self.door],
                [self.edit_grad, self.door],
                [self.edit_grad],
                [self.edit_grad],
                [shape, self.edit_grad],
                [shape, self.give_grad],
                [self.model_zero_grad, backward],
            ]
        if not self.mode.driven_by:
            incidents += [[self.stopped_backward, self.clear, backward], [self.stopped_backward, backward]]
        return incidents

    def loop(self) -> list[Statement]:
        """A training loop as a user writes it."""
        driven = self.mode.driven_by is not None
        is_plain = not driven and self.setting.scale == (1.0, False) and self.chance(0.3)
        first, clears = self.chance(0.5), not self.chance(0.1)
        backward = self.driven_backward if driven else self.plain_backward if is_plain else self.backward
        out: list[Statement] = []
        for _ in range(self.draw.randint(2, 6)):
            out += [self.clear()] if first and clears else []
            out += [backward() for _ in range(self.draw.choice([1, 1, 1, 2, 2, 3]))]
            out += self.some(0.15, self._odd)
            if driven and self.chance(0.6):
                out += [self.unscale()]
            if self.chance(0.65):
                out += [make() for make in self.draw.choice(self._incidents)]
            elif self.chance(0.2):
                out += self.out_and_in()
            elif self.chance(0.3):
                out += [self.draw.choice(self._shaping)()]
            if self.chance(0.06):  # the batch is given up
                out += [self.clear(), *([self.update()] if driven else [])]
                continue
            out += [self.step(), *([self.update()] if driven else [])]
            out += [] if first or not clears else [self.clear()]
            out += self.some(0.3, self._between)
            out += self.out_and_in() if self.chance(0.06) else []
        return out

    def any_order(self) -> list[Statement]:
        kinds: dict[Callable[[], Statement], int] = {
            self.zero_grad: 8,
            self.clip: 6,
            self.door: 5,
            self.edit_grad: 5,
            self.drop_grad: 5,
            self.regroup: 5,
            self.freeze: 4,
            self.read_master_grads: 4,
            self.edit_master_grad: 4,
            self.torch_clip: 3,
            self.write_weight: 3,
            self.edit_master: 2,
            self.clip_values: 2,
            self.read_held: 2,
            self.save: 2,
        }
        ones = [self.hold, self.refresh, self.write_masters, self.order, self.reload, self.load, self.rate, self.behind]
        kinds.update(dict.fromkeys(ones, 1))
        if self.mode.driven_by:
            kinds |= {self.driven_backward: 28, self.unscale: 10, self.step: 18, self.update: 12}
        else:
            kinds |= {self.backward: 26, self.step: 20, self.stopped_backward: 2, self.closure_step: 2, self.copy: 1}
            kinds |= {self.resume: 1, self.set_scale: 2}
        if self.mode.folds:
            kinds |= {self.model_zero_grad: 3, self.drop_grad: 3}
        else:
            kinds |= {self.model_zero_grad: 5, self.plain_backward: 2, self.give_grad: 2}
        return [make() for make in self.draw.choices(list(kinds), list(kinds.values()), k=self.draw.randint(5, 22))]


def make_setting(draw: random.Random, mode: Mode) -> Setting:
    names = NAMES[: draw.choice([1, 2, 3, 3, 4, 4])]
    spare = names[-1] if len(names) > 1 and draw.random() < 0.6 else None
    grouped = [name for name in names if name != spare]
    draw.shuffle(grouped)
    cut = draw.randint(1, len(grouped))
    if mode.driven_by or draw.random() < 0.5:
        scale = draw.choice([(1.0, False), (1.0, False), (64.0, False)])
    else:
        scale = draw.choice([128.0, 1024.0, 2.0**15]), True
    return Setting(
        mode=mode.name,
        optimizer=draw.choice(mode.optimizers),
        dtypes={name: draw.choice(mode.dtypes) for name in names},
        groups=[part for part in (grouped[:cut], grouped[cut:]) if part],
        frozen=[name for name in names if draw.random() < 0.2] if draw.random() < 0.4 else [],
        scale=(1.0, False) if mode.driven_by else scale,
        driver_scale=draw.choice([1.0, 128.0, 1024.0, 65536.0]),
    )


def make_program(mode: str, seed: int) -> tuple[Setting, list[Statement]]:
    """Loops only where a GradScaler drives FP32 sums: of other orders the contract says too little."""
    draw = random.Random(f"{mode} {seed}")
    setting = make_setting(draw, MODES[mode])
    writer = Writer(draw, setting)
    is_loop = draw.random() < 0.5 or (MODES[mode].folds and MODES[mode].driven_by)
    return setting, writer.loop() if is_loop else writer.any_order()
