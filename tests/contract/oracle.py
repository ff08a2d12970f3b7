"""What each call must do, by value: the contract's table of stages and its rules in plain torch, for small parameters.

It is written from the text of the contract alone and knows nothing of the library. The user's own acts are methods
too (an edit of a gradient, a group that is added), so that nothing has to be found out: what was done since the stamp
is noted where it is done. Tensors are replaced and never written, so that a copy of the fields is a copy of the state.

A method returns what the call returns, or raises one of two. `Refused`: the library must raise, with words that
`WORDS` lists. `Unspecified`: the contract leaves open what happens, so that the call isn't made on either side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from contract.reference import Scale, clip_factor, found_inf, rounded, scaled, total_norm, unscaled, wide

HALVES = (torch.float16, torch.bfloat16)
Terms = Sequence[tuple[str, float]]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

WORDS = {
    "written": ("update_master_grads()", "zero_grad()"),
    "given up": ("zero_grad()",),
    "unscaled by others": ("opt.zero_grad()",),
    "interrupted": ("interrupted",),
    "plain": ("backward(loss)",),
    "left over": ("zero_grad()",),
    "closed": ("clipped", "edited"),
    "groups": ("group",),
    "groups of sums": ("group", "clipped", "edited"),
    "door": ("opt.master_params()", "opt.zero_grad()"),
    "scale": ("between backward and step",),
    "model write": ("written",),
    "stopped": ("stopped",),
    "behind": ("opt.step()", "opt.zero_grad()", "behind"),
    "split": ("split",),
}
"""By kind of refusal: the message has at least one of these."""


class Refused(Exception):
    """The library must raise. ``names``: of parameters, at least one of which the message must have."""

    def __init__(self, kind: str, names: Sequence[str] = ()) -> None:
        super().__init__(kind)
        self.kind, self.names = kind, names


class Unspecified(Exception):
    """The contract leaves open what happens here."""


class Planned(Exception):
    """What programs raise on purpose: in a backward, in a hook, in the middle of a step."""


UNKNOWN = object()
"""In place of a result that the contract leaves open."""


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal dtype, shape and values; nan equals nan."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def pattern(weight: Tensor) -> Tensor:
    """What the term of a parameter in a loss has as gradient by element, before the term's own factor."""
    return (torch.arange(weight.numel()) % 4 + 1).reshape(weight.shape)


# -- parameters --------------------------------------------------------------------------------------------------------


@dataclass
class Param:
    """One parameter of the model, with its master.

    Attributes:
        shares: The master lies on the weight's own memory.
        master: In FP32, or FP64 of an FP64 parameter; None while no master is made.
        grad: The model's gradient. true: The master's.
        weight_seen, master_seen: Values as the engine left them, by which it knows what others wrote.
        is_stamped, had_grad: It is in the stamp, with or without a gradient.
        touched, replaced: Since the stamp the user wrote the gradient, or put another (or None) in its place.
        has_edit: The user wrote the master's gradient since the engine looked.
        is_used: A step has used this gradient. is_left: It was there when a loss was scaled for another step.
        stepper: The wrapped optimizer's class, over this one master.
    """

    name: str
    weight: Tensor
    shares: bool
    trains: bool = True
    grad: Tensor | None = None
    true: Tensor | None = None
    master: nn.Parameter | None = None
    weight_seen: Tensor | None = None
    master_seen: Tensor | None = None
    is_stamped: bool = False
    had_grad: bool = False
    touched: bool = False
    replaced: bool = False
    has_edit: bool = False
    is_used: bool = False
    is_left: bool = False
    lost_remainder: bool = False
    stepper: torch.optim.Optimizer | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def value(self) -> Tensor:
        assert self.master is not None
        return self.master.detach()

    @property
    def has_changed(self) -> bool:
        """Whether the gradient is another than stamped."""
        if not self.is_stamped:
            return False
        return self.had_grad if self.grad is None else self.touched or not self.had_grad

    @property
    def is_written_down(self) -> bool:
        """Whether the weight has what the master has, as far as the engine knows."""
        return not self.is_weight_written and not self.is_master_written

    @property
    def is_weight_written(self) -> bool:
        return self.master is not None and not self.shares and not same_bits(self.weight, self.weight_seen)

    @property
    def is_master_written(self) -> bool:
        return self.master is not None and not self.shares and not same_bits(self.value, self.master_seen)

    def adopt(self, make: Make) -> None:
        self.master = nn.Parameter(self.weight.to(wide(self.dtype), copy=True))
        self.stepper = make([self.master])
        self.note()

    def forget(self) -> None:
        self.master = self.true = self.stepper = None
        self.is_stamped = False

    def note(self) -> None:
        self.weight_seen, self.master_seen = self.weight, self.value.clone()

    def put(self, value: Tensor) -> None:
        """Another value of the master, in a tensor of its own; nothing is noted."""
        assert self.master is not None
        self.master.data = value.detach().to(self.master.dtype, copy=True)
        if self.shares:
            self.round_down()

    def round_down(self) -> None:
        """The weight becomes the master's value, and where they are one memory the master the weight's."""
        self.weight = rounded(self.value, self.dtype)
        if self.shares and self.master is not None:
            self.master.data = self.weight.to(self.master.dtype, copy=True)
        self.note()

    def write_weight(self, value: Tensor) -> None:
        """Others write the weight."""
        self.weight = value
        if self.shares and self.master is not None:
            self.put(value)

    def set_grad(self, value: Tensor | None, *, in_place: bool = False) -> None:
        """The user, or a backward, leaves this gradient."""
        self.grad, self.touched, self.is_used = value, True, False
        if not in_place:
            self.replaced, self.is_left = True, False

    def stamp(self) -> None:
        self.is_stamped, self.had_grad = True, self.grad is not None
        self.touched = self.replaced = self.has_edit = False
        self.is_used = self.is_left = False


@dataclass
class Group:
    lr: float
    names: list[str]


# -- what is known of a step -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """Nothing of this step."""


@dataclass(frozen=True)
class Scaled:
    """The model's gradients, made at ``scale``; with a stamp edits are refused, without it they count."""

    scale: float
    is_stamped: bool = False


@dataclass(frozen=True)
class Checked:
    """Masters have the true ones. ``closed``: clipped or edited. ``divided``: by torch's GradScaler."""

    scale: float
    closed: bool = False
    divided: bool = False


@dataclass(frozen=True)
class Interrupted:
    """A backward raised: gradients are incomplete."""


Stage = Ready | Scaled | Checked | Interrupted


@dataclass(frozen=True)
class Saved:
    groups: list[list[tuple[str, bool]]]
    masters: dict[str, Tensor]
    states: dict[str, Any]
    rates: list[float]
    scale: tuple[float, int]
    counts: tuple[int, int]


@dataclass
class Oracle:
    """One wrapper with its model.

    Attributes:
        params: All of the model's, by name, whether or not a group has them.
        groups: As they are now. seen: Names in each group, as the engine last looked.
        holds_models: A list in a group was made anew from the model's own parameters.
        masters: ``master_weights``. on_model_write: As the argument.
        driven_by: "torch" or "own": the GradScaler that drives it.
        may_refuse: Kinds of refusals that are as good as going on, in this call.
        lagging: Names of weights that the next call brings up to their masters.
        is_half_driven: A step under torch's GradScaler was stopped before gradients were divided. It may be tried
            again; whether they count as checked by then is left open.
        has_names: Whether the optimizer knows them of all parameters; a copy does only of those that its groups had.
        last_clip: The limit of the clip in this call, and gradients before it: see `clip_by`.
    """

    params: dict[str, Param]
    groups: list[Group]
    make: Make
    scale: Scale
    masters: str = "full"
    on_model_write: str = "refresh"
    driven_by: str | None = None
    stage: Stage = Ready()
    seen: list[list[str]] = field(default_factory=list)
    holds_models: bool = False
    steps: int = 0
    skipped_steps: int = 0
    hook: tuple[str, str, Callable[[], None]] | None = None
    stumbles_at: int | None = None
    held: tuple[str, nn.Parameter] | None = None
    saved: Saved | None = None
    is_half_driven: bool = False
    has_names: bool = True
    may_refuse: tuple[str, ...] = ()
    lagging: frozenset[str] = frozenset()
    last_clip: tuple[float, dict[str, Tensor]] | None = None

    @classmethod
    def of(
        cls, weights: Mapping[str, Tensor], groups: Sequence[Sequence[str]], frozen: Sequence[str], **options: Any
    ) -> Oracle:
        is_none = options.get("masters") == "none"
        params = {
            name: Param(name, w.detach().clone(), is_none or w.dtype not in HALVES, trains=name not in frozen)
            for name, w in weights.items()
        }
        rate = options["make"]([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
        made = cls(params, [Group(rate, list(names)) for names in groups], **options)
        made._follow()
        return made

    # -- copies of the state -------------------------------------------------------------------------------------------

    def now(self) -> tuple[Any, ...]:
        """For `put_back`, where a call turns out half-way to be left out."""
        groups = [Group(g.lr, list(g.names)) for g in self.groups]
        scale = dict(vars(self.scale))
        values = {name: p.value for name, p in self.params.items() if p.master is not None}
        return dict(vars(self)), groups, scale, {name: dict(vars(p)) for name, p in self.params.items()}, values

    def put_back(self, before: tuple[Any, ...]) -> None:
        fields, groups, scale, params, masters = before
        vars(self).update(fields)
        self.groups = groups
        vars(self.scale).update(scale)
        for name, values in params.items():
            vars(self.params[name]).update(values)
        for name, value in masters.items():
            self.params[name].master.data = value  # type: ignore[union-attr]

    # -- groups --------------------------------------------------------------------------------------------------------

    def stepped(self) -> Iterator[Param]:
        """Those with a master, in the order of the groups as they were seen."""
        for names in self.seen:
            for name in names:
                if self.params[name].master is not None:
                    yield self.params[name]

    def with_grad(self) -> list[Param]:
        return [p for p in self.stepped() if p.grad is not None]

    @property
    def _groups_now(self) -> list[list[str]]:
        return [list(g.names) for g in self.groups]

    @property
    def _groups_changed(self) -> bool:
        return self._groups_now != self.seen

    @property
    def _holds_groups(self) -> bool:
        """Between a check and its step groups may not change."""
        return isinstance(self.stage, Checked)

    @property
    def _is_given_up(self) -> bool:
        """The user has cleared what was checked."""
        return not self.with_grad()

    def _follow(self, may_change: bool = False) -> None:
        """Masters for all that train or have a gradient by now; those that are in no group any more are let go."""
        if self._holds_groups and not may_change:
            if self._groups_changed:
                if not self._is_given_up:
                    raise Refused("groups")
                self.may("groups")  # which of the two the engine looks at first is left open
                self._begin_anew()
            elif self.holds_models:
                self.may("groups")  # the model's own parameter where its master was
        now = self._groups_now
        there = {name for names in now for name in names}
        for name, p in self.params.items():
            if name not in there and p.master is not None:
                p.forget()
            elif name in there and p.master is None and (p.trains or p.grad is not None):
                p.adopt(self.make)
        self.seen, self.holds_models = now, False

    def may(self, kind: str) -> None:
        self.may_refuse = (*self.may_refuse, kind)

    def _is_grouped(self, name: str) -> bool:
        return any(name in g.names for g in self.groups)

    def read_groups(self) -> None:
        """``opt.param_groups``"""
        if isinstance(self.stage, Checked) and (self._groups_changed or self.holds_models):
            raise Unspecified
        self._follow()

    def read_order(self) -> list[str]:
        """Names of ``opt.model_params()``."""
        self.read_groups()
        return [name for names in self.seen for name in names]

    def add_param_group(self, name: str, lr: float) -> None:
        if self._is_grouped(name) or self.is_half_driven:
            raise Unspecified
        self._begin()
        self._follow()
        if self._holds_groups:
            self._refuse_groups()
        if isinstance(self.stage, Scaled) and any(p.has_changed for p in self.stepped()):
            raise Unspecified
        self.groups.append(Group(lr, [name]))
        self._follow()

    def _refuse_groups(self) -> None:
        raise Refused("groups")

    def regroup(self, how: str, name: str = "") -> None:
        """``opt.param_groups`` is written; see `programs.REGROUPINGS`."""
        if self.is_half_driven:
            raise Unspecified
        self.read_groups()
        self._regroup(how, name)
        if any(p.is_master_written and not self._is_grouped(p.name) for p in self.stepped()):
            raise Unspecified  # whether it is written down before it goes

    def _regroup(self, how: str, name: str) -> None:
        if how == "without one":
            self._find_master(name)
            rest = [Group(g.lr, [n for n in g.names if n != name]) for g in self.groups]
            if not all(g.names for g in rest):
                raise Unspecified
            self.groups = rest
            return
        if name and self._is_grouped(name):
            raise Unspecified  # a parameter twice
        first, last = self.groups[0], self.groups[-1]
        if how == "another group":
            self.groups = [*self.groups, Group(first.lr, [name])]
        elif how == "one more":
            self.groups = [Group(first.lr, [*first.names, name]), *self.groups[1:]]
        elif how == "in place of the first":
            self.groups = [Group(first.lr, [name, *first.names[1:]]), *self.groups[1:]]
        elif how == "a group less" and len(self.groups) > 1:
            self.groups = self.groups[:-1]
        elif how == "one less" and len(last.names) > 1:
            self.groups = [*self.groups[:-1], Group(last.lr, last.names[:-1])]
        elif how == "groups reversed" and len(self.groups) > 1:
            self.groups = self.groups[::-1]
        elif how == "reversed" and len(first.names) > 1:
            self.groups = [Group(first.lr, first.names[::-1]), *self.groups[1:]]
        elif how == "all of the model" and len(self.groups) == 1:
            self.groups, self.holds_models = [Group(first.lr, list(self.params))], True
        else:
            raise Unspecified

    def change_rate(self, factor: float) -> None:
        self.read_groups()
        self.groups = [replace(g, lr=g.lr * factor) for g in self.groups]

    def set_trains(self, name: str, trains: bool) -> None:
        self.params[name].trains = trains

    # -- what every call begins with -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The model gets what others wrote to masters, and what a step that was stopped left behind.

        Where a loss is already made of the model's weights, as before a backward, whether it gets that is left open.
        """
        self.lagging = frozenset()
        self._round_written()

    def _round_written(self) -> None:
        for p in self.stepped():
            if p.is_master_written:
                if p.is_weight_written:
                    raise Unspecified
                p.round_down()

    def _are_zeros(self) -> bool:
        return not any(bool((p.grad != 0).any()) for p in self.with_grad() if p.grad is not None)

    def _look(self) -> None:
        """The table of what was seen since the stamp."""
        stage = self.stage
        if isinstance(stage, Ready):
            return
        there = self.with_grad()
        if not there:
            self._begin_anew()
            return
        if isinstance(stage, Interrupted):
            if not self._are_zeros():
                raise Refused("interrupted")
            self._begin_anew()
            return
        if any(p.is_left for p in there):
            raise Refused("left over")
        if isinstance(stage, Scaled) and not stage.is_stamped:
            return
        changed = [p for p in self.stepped() if p.has_changed]
        written = [p for p in changed if p.grad is not None]
        if written and self._are_zeros():
            stamped = [p for p in self.stepped() if p.is_stamped and p.had_grad]
            if any(p.replaced for p in written) or len(changed) < len(stamped):
                raise Unspecified  # zeros, and not by zero_grad(set_to_none=False)
            self._begin_anew()
        elif written:
            raise Refused(self._kind_of_write(written), [p.name for p in written])
        else:
            for p in there:
                p.has_edit = False
            if isinstance(stage, Checked):
                for p in changed:
                    p.true, p.had_grad, p.touched = None, False, False
            if any(not p.is_stamped for p in there):
                self.may("written")  # of a parameter that had no master yet: written since, or there before

    def _kind_of_write(self, written: Sequence[Param]) -> str:
        if isinstance(self.stage, Checked):
            if self.stage.divided:
                return "unscaled by others"
            if all(p.replaced for p in self.with_grad()):
                return "given up"
        return "written"

    def _begin_anew(self) -> None:
        for p in self.params.values():
            p.true, p.is_stamped, p.is_left = None, False, False
        self.stage, self.is_half_driven = Ready(), False

    def _stamp_all(self) -> None:
        for p in self.params.values():
            p.is_stamped = False
        for p in self.stepped():
            p.stamp()

    def _take_plain(self) -> bool:
        """In Ready: what is there was made by a plain backward. Whether anything is."""
        there = self.with_grad()
        if not there:
            return False
        is_used = any(p.is_used for p in there)
        if is_used and self.driven_by:
            raise Unspecified
        if not self.scale.is_one and not self._are_zeros():
            raise Refused("left over" if is_used else "plain")
        self.stage = Scaled(1.0)
        return True

    def _need(self) -> bool:
        """Masters get their true gradients, where there are any."""
        self._follow()
        self._look()
        if isinstance(self.stage, Ready) and not self._take_plain():
            return False
        if isinstance(self.stage, Scaled):
            self._unscale(self.stage.scale)
        return True

    def _true_of(self, p: Param, scale: float) -> Tensor | None:
        if p.grad is None:
            return None
        true = unscaled(p.grad, scale)
        return true.to(p.dtype) if p.shares else true

    def _unscale(self, scale: float) -> None:
        for p in self.stepped():
            p.true = self._true_of(p, scale)
        self._stamp_all()
        self.stage = Checked(scale)

    # -- backwards -----------------------------------------------------------------------------------------------------

    def _accumulate(self, terms: Terms, scale: float) -> None:
        for name, factor in terms:
            p = self.params[name]
            if not p.trains:
                continue
            # In autograd's own order: the loss's scale, the term's factor, the pattern.
            new = torch.full((), scale).mul(factor) * pattern(p.weight)
            new = scaled(new, 1.0, p.dtype)
            p.set_grad(new if p.grad is None else p.grad + new, in_place=p.grad is not None)

    def _need_graph(self, terms: Terms) -> None:
        if not any(self.params[name].trains for name, _ in terms):
            raise Unspecified

    def _open(self, *, may_clear: bool = False) -> None:
        """A loss is scaled: what was there before it?"""
        self._follow()
        self._look()
        if isinstance(self.stage, Ready) and not self.scale.is_one and not self._are_zeros():
            if not may_clear:
                raise Refused("left over")
            self.may("left over")  # now, or where they are needed
            for p in self.with_grad():
                p.is_left = True
        if isinstance(self.stage, Checked):
            if self.stage.divided:
                raise Unspecified
            if self.stage.closed:
                raise Refused("closed")
        for p in self.params.values():
            p.true = None
        self.stage = Scaled(self.scale.value)

    def backward(self, terms: Terms, *, stamp: bool = True, by: str = "") -> None:
        self._need_graph(terms)
        self._open()
        self._accumulate(terms, self.scale.value)
        if stamp:
            self._stamp_all()
            self.stage = Scaled(self.scale.value, is_stamped=True)

    def scale_loss(self, terms: Terms, *, by: str = "") -> None:
        """``opt.scale_loss(loss).backward()``"""
        self._need_graph(terms)
        self._open(may_clear=True)
        self._accumulate(terms, self.scale.value)

    def plain_backward(self, terms: Terms) -> None:
        self._need_graph(terms)
        if any(p.is_left for p in self.params.values()):
            raise Unspecified
        self._accumulate(terms, 1.0)

    def stopped_backward(self, terms: Terms, *, reaches: bool = True) -> None:
        """An exception comes before any gradient, or (``reaches``) after that of the loss's one parameter."""
        self._need_graph(terms)
        self._open()
        if reaches:
            self._accumulate(terms, self.scale.value)
        self.stage = Interrupted()

    # -- what the user does to the model's gradients -------------------------------------------------------------------

    def edit_grad(self, name: str, factor: float, *, in_place: bool, by_data: bool = False) -> None:
        p = self.params[name]
        if p.grad is None or p.is_left:
            raise Unspecified
        is_stamped = p.is_used or isinstance(self.stage, Checked) or self.stage == Scaled(self.scale.value, True)
        if by_data and is_stamped:
            raise Unspecified  # no version tells of it
        p.set_grad(p.grad * factor if factor else torch.zeros_like(p.grad), in_place=in_place)

    def give_grad(self, name: str) -> None:
        p = self.params[name]
        if p.grad is not None:
            raise Unspecified
        p.set_grad(torch.ones_like(p.weight))

    def drop_grads(self, names: Sequence[str]) -> None:
        if any(self.params[name].has_edit for name in names) and self.with_grad():
            raise Unspecified  # whether an edit that goes with its gradient closes the step
        for name in names:
            self.params[name].set_grad(None)

    def zero_model_grads(self) -> None:
        """``model.zero_grad(set_to_none=False)``"""
        for p in self.params.values():
            if p.is_left:
                raise Unspecified
            if p.grad is not None:
                p.set_grad(torch.zeros_like(p.grad), in_place=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        gives_up = self._gives_up()
        self._begin()
        self._follow(may_change=True)
        if gives_up:
            self._record(True)
        for name in (name for names in self.seen for name in names):
            p = self.params[name]
            if p.grad is not None:
                p.set_grad(None if set_to_none else torch.zeros_like(p.grad), in_place=not set_to_none)
        self._begin_anew()

    def _gives_up(self) -> bool:
        """Whether a call of the user's has found what is cleared now not to be finite."""
        if not isinstance(self.stage, Checked) or self.stage.divided:
            return False
        if not found_inf(list(self._trues().values())) or not self.with_grad():
            return False
        if self.driven_by or any(p.has_edit or p.touched for p in self.params.values()) or self.hook is not None:
            raise Unspecified
        return True

    # -- master gradients ----------------------------------------------------------------------------------------------

    def _find_master(self, name: str) -> Param:
        self.read_groups()
        p = self.params[name]
        if p.master is None or not self._is_grouped(name):
            raise Unspecified
        return p

    def _read(self) -> bool:
        """``.grad`` of all masters is read. Whether there are gradients to be shown."""
        if self.is_half_driven:
            raise Unspecified
        if not any(True for _ in self.stepped()):
            return False
        if isinstance(self.stage, Interrupted):
            raise Unspecified
        if isinstance(self.stage, Checked):
            changed = [p for p in self.stepped() if p.has_changed]
            if self._groups_changed or self._is_given_up or any(p.grad is not None for p in changed):
                raise Unspecified
            self._look()
            return True
        there = self.with_grad() if isinstance(self.stage, Ready) else []
        if there and (not self.scale.is_one or any(p.is_used for p in there)):
            raise Unspecified  # those of a step that is over may still be there
        return self._need()

    def read_master_grads(self) -> Any:
        self.read_groups()
        if not self._read():
            return UNKNOWN  # those of a step that is over may still be there
        return [self.params[name].true for names in self.seen for name in names]

    def hold(self, name: str) -> None:
        master = self._find_master(name).master
        assert master is not None
        self.held = name, master

    def read_held(self) -> Any:
        """A master that the user has kept."""
        if self.held is None or self.params[self.held[0]].master is not self.held[1]:
            raise Unspecified
        if not self._is_grouped(self.held[0]):
            raise Unspecified
        return self.params[self.held[0]].true if self._read() else UNKNOWN

    def edit_master_grad(self, name: str, factor: float | None, *, in_place: bool = False) -> None:
        p = self._find_master(name)
        if not self._read() or p.true is None:
            raise Unspecified
        if factor is None and all(q.true is None for q in self.stepped() if q is not p):
            raise Unspecified  # none is left
        p.true, p.has_edit = None if factor is None else p.true * factor, True
        self._close(by_user=True)

    def _close(self, *, by_user: bool = False) -> None:
        assert isinstance(self.stage, Checked)
        self.stage = replace(self.stage, closed=True)

    def torch_clip(self, max_norm: float) -> Any:
        """``torch.nn.utils.clip_grad_norm_(opt.master_params(), max_norm)``"""
        self.read_groups()
        if not self._read():
            return UNKNOWN
        there = [p for p in self.stepped() if p.true is not None]
        stand_ins = []
        for p in there:
            assert p.true is not None
            stand_ins.append(torch.empty_like(p.true).requires_grad_())
            stand_ins[-1].grad = p.true.clone()
        norm = nn.utils.clip_grad_norm_(stand_ins, max_norm)
        for p, stand_in in zip(there, stand_ins, strict=True):
            p.true = stand_in.grad
        self._close(by_user=True)
        return norm

    def update_master_grads(self) -> None:
        self._begin()
        self._follow()
        stage = self.stage
        if isinstance(stage, Checked):
            if stage.divided:
                raise Refused("door")
            if self.driven_by:
                self.may("door")
        there = self.with_grad()
        if isinstance(stage, Scaled | Checked) and there and not any(p.is_left for p in there):
            is_stamped = isinstance(stage, Checked) or stage.is_stamped
            if is_stamped and any(p.has_changed for p in self.stepped()) and self._are_zeros():
                raise Unspecified
            self._unscale(stage.scale)
            return
        self._look()
        if not there or not isinstance(self.stage, Ready):
            return
        if self.driven_by or self._are_zeros() or any(p.is_used for p in there):
            raise Unspecified
        self._unscale(self.scale.value)

    # -- clips ---------------------------------------------------------------------------------------------------------

    def _begin_clip(self, names: Sequence[str] | None) -> bool:
        if self.is_half_driven or (names is not None and not all(self._is_grouped(name) for name in self.params)):
            raise Unspecified
        self._begin()
        if self.driven_by and isinstance(self.stage, Ready) and self.with_grad():
            raise Unspecified  # before unscale_ the scale isn't known
        return self._need()

    def _trues(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        return {p.name: p.true for p in self.stepped() if p.true is not None and (names is None or p.name in names)}

    def clip(self, max_norm: float, norm_type: float = 2.0, names: Sequence[str] | None = None) -> Tensor:
        """Returns the norm. The factor must have the library's own bits of it: `clip_by` follows."""
        if not self._begin_clip(names):
            return torch.zeros(())
        chosen = self._trues(names)
        if not found_inf(list(self._trues().values())):
            self.last_clip = max_norm, chosen
        self._close()
        return torch.tensor(total_norm(list(chosen.values()), norm_type))

    def clip_by(self, norm: Tensor) -> None:
        if self.last_clip is not None:
            max_norm, chosen = self.last_clip
            factor = clip_factor(float(norm), max_norm)
            for name, true in chosen.items():
                self.params[name].true = (true.to(wide(true.dtype)) * factor).to(true.dtype)

    def clip_values(self, max_value: float) -> None:
        if not self._begin_clip(None):
            return
        if not found_inf(list(self._trues().values())):
            for name, true in self._trues().items():
                self.params[name].true = true.clamp(-max_value, max_value)
        self._close()

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, told: bool | None = None, divide_by: float = 1.0) -> None:
        """``told``: what a GradScaler found. ``divide_by``: its scale, where it has not divided yet."""
        self._call_hook("opt", "pre")
        self._begin()
        self._step(told, divide_by)
        self._call_hook("opt", "post")
        self._round_written()

    def _call_hook(self, owner: str, when: str) -> None:
        if self.hook is not None and self.hook[:2] == (owner, when):
            self.hook[2]()

    def _step(self, told: bool | None, divide_by: float) -> None:
        if not self._need():
            return
        grads = {name: true * (1.0 / divide_by) for name, true in self._trues().items()}
        found = self._judge(told, grads)
        if not found:
            self._take_model_writes()
            self._step_masters(grads)
        self._record(found)

    def _judge(self, told: bool | None, grads: Mapping[str, Tensor]) -> bool:
        return bool(told) or found_inf(list(grads.values()))

    def _record(self, found: bool) -> None:
        self.steps += not found
        self.skipped_steps += found
        self.scale.update(found)
        for p in self.params.values():
            p.is_stamped = False
        for p in self.with_grad():
            p.is_used = True
        self.stage, self.is_half_driven = Ready(), False

    def _step_masters(self, grads: Mapping[str, Tensor]) -> None:
        self._call_hook("inner", "pre")
        rates = {name: g.lr for g in self.groups for name in g.names}
        try:
            for number, (name, grad) in enumerate(grads.items()):
                if number == self.stumbles_at:
                    raise Planned
                self._step_one(self.params[name], grad, rates[name])
            self._call_hook("inner", "post")
        except Planned:  # it counts, whether or not all were stepped
            self._round_all()
            self._record(False)
            raise
        self._round_all()

    def _step_one(self, p: Param, grad: Tensor, rate: float) -> None:
        assert p.master is not None
        assert p.stepper is not None
        p.stepper.param_groups[0]["lr"] = rate
        p.master.grad = grad.to(p.master.dtype, copy=True)
        p.stepper.step()
        p.master.grad = None

    def _round_all(self) -> None:
        for p in self.stepped():
            p.round_down()

    def hooked_step(self, owner: str, step: Callable[[], None] | None = None) -> None:
        """A hook after the step halves all that groups hold."""
        if self.masters.startswith("split"):
            raise Unspecified  # such a write is refused in the middle of the step

        def halve() -> None:
            for p in (self.params[name] for names in self.seen for name in names):
                if owner == "opt" and (p.is_weight_written or p.is_master_written):
                    raise Unspecified
                if p.master is None:
                    p.write_weight(p.weight * 0.5)
                else:
                    p.put(p.value * 0.5)

        self._step_with((owner, "post", halve), step)

    def stopped_step(self, owner: str, when: str, step: Callable[[], None] | None = None) -> None:
        """A hook raises."""

        def stop() -> None:
            raise Planned

        try:
            self._step_with((owner, when, stop), step)
        except Planned:
            self.lagging = frozenset(self.params)

    def _step_with(self, hook: tuple[str, str, Callable[[], None]], step: Callable[[], None] | None) -> None:
        self.hook = hook
        try:
            (step or self.step)()
        finally:
            self.hook = None

    def stumbling_step(self, at: int) -> None:
        """The wrapped optimizer raises at a parameter; then the state is saved, and gradients are cleared."""
        if any(not p.is_written_down for p in self.stepped()):
            raise Unspecified
        self.stumbles_at = at
        try:
            self.step()
        except Planned:
            pass
        finally:
            self.stumbles_at = None
        self.save()
        self.zero_grad()

    def step_with_closure(self, terms: Terms) -> Any:
        self._need_graph(terms)
        if any(not p.is_written_down for p in self.stepped()):
            raise Unspecified
        self._begin()
        self.zero_grad()
        self.backward(terms)
        self.step()
        return 1.5

    def use_behind(self) -> None:
        """``opt.optimizer.step()`` or ``.zero_grad()``"""
        raise Refused("behind")

    # -- under a GradScaler --------------------------------------------------------------------------------------------

    def driven_backward(self, terms: Terms, scale: float) -> None:
        if self.is_half_driven:
            raise Unspecified
        self._need_graph(terms)
        self._accumulate(terms, scale)

    def meet_driver(self, *, steps: bool) -> None:
        """It comes to look at gradients, or to have them stepped. Where they are gone, what it finds is left open."""
        if not isinstance(self.stage, Checked):
            return
        changed = any(p.has_changed for p in self.stepped())
        if self._is_given_up or (changed and self._are_zeros()):
            raise Unspecified
        if not steps and (changed or self._groups_changed or self.holds_models):
            raise Unspecified

    def show_to_torch(self) -> bool:
        """It reads all masters' gradients. Whether one isn't finite."""
        if isinstance(self.stage, Checked):
            if any(p.has_changed and p.grad is None for p in self.stepped()):
                raise Unspecified  # whether it still sees those that were dropped
        else:
            self.read_groups()
            if not self._need():
                raise Unspecified
        if not self._trues():
            raise Unspecified
        return found_inf(list(self._trues().values()))

    def divide(self, scale: float) -> None:
        for name, true in self._trues().items():
            self.params[name].true = true * (1.0 / scale)
        assert isinstance(self.stage, Checked)
        self.stage, self.is_half_driven = replace(self.stage, divided=True), False

    def check_external(self, scale: float) -> bool:
        """fp16opt's own comes: gradients were made at its scale."""
        self._follow()
        if not isinstance(self.stage, Ready) or not self._take_plain():
            raise Unspecified
        self._unscale(scale)
        return found_inf(list(self._trues().values()))

    # -- weights and masters that others write -------------------------------------------------------------------------

    def write_weight(self, name: str, factor: float, *, first_only: bool = False) -> None:
        p = self.params[name]
        if p.is_master_written or self.lagging:
            raise Unspecified
        value = p.weight * factor
        if first_only:
            value = p.weight.clone()
            value.view(-1)[:1] *= factor
        p.write_weight(value)

    def edit_master(self, name: str, factor: float) -> None:
        p = self._find_master(name)
        if p.is_weight_written or self.lagging:
            raise Unspecified
        if self.masters.startswith("split") and not p.shares:
            raise Refused("split")
        p.put(p.value * factor)

    def _take_model_writes(self) -> None:
        """Before masters are stepped or saved."""
        if self.on_model_write == "ignore":
            return
        written = [p for p in self.stepped() if p.is_weight_written]
        differ = [p for p in written if not same_bits(p.weight, rounded(p.value, p.dtype))]
        if differ and self.on_model_write == "error":
            raise Refused("model write", [p.name for p in differ])
        for p in differ:
            p.put(torch.where(p.weight == rounded(p.value, p.dtype), p.value, p.weight.to(p.value.dtype)))
            p.lost_remainder = self.masters.startswith("split")
        for p in written:
            p.note()

    def refresh_masters(self) -> None:
        if any(p.is_master_written for p in self.stepped()):
            raise Unspecified  # rounded into the model first, or lost
        self._begin()
        self._follow()
        for p in self.stepped():
            if not p.shares:
                p.put(p.weight.to(p.value.dtype))
            p.note()

    def write_masters(self) -> None:
        if self.masters.startswith("split") and any(p.is_weight_written for p in self.stepped()):
            raise Unspecified  # half of the master was written with it
        self._begin()
        self._follow()
        for p in self.stepped():
            if p.is_weight_written or p.is_master_written:
                p.round_down()

    # -- scale, files, copies ------------------------------------------------------------------------------------------

    def set_scale(self, value: float) -> None:
        if self._groups_changed:
            raise Unspecified
        try:
            self._look()
        except Refused:
            raise Unspecified from None
        if not isinstance(self.stage, Ready):
            raise Refused("scale")
        if self.with_grad():
            raise Unspecified
        self.scale.write(value)

    def _structure(self) -> list[list[tuple[str, bool]]]:
        """By group, names, and whether there is a master."""
        return [[(name, self.params[name].master is not None) for name in names] for names in self.seen]

    def save(self) -> None:
        """``opt.state_dict()``"""
        if self._holds_groups and self._groups_changed:
            raise Unspecified
        self._begin()
        self._follow()
        self._take_model_writes()
        self.saved = Saved(
            groups=self._structure(),
            masters={p.name: p.value.clone() for p in self.stepped()},
            states={p.name: copy.deepcopy(p.stepper.state_dict()) for p in self.stepped() if p.stepper is not None},
            rates=[g.lr for g in self.groups],
            scale=(self.scale.value, self.scale.clean),
            counts=(self.steps, self.skipped_steps),
        )

    def load(self) -> None:
        """``opt.load_state_dict(saved)``, of a state with the same groups. Nothing is known of gradients there."""
        if (
            self.saved is None
            or self.lagging
            or (self.scale.is_one and any(p.grad is not None for p in self.params.values()))
        ):
            raise Unspecified
        self._begin()
        self._follow(may_change=True)
        if self._structure() != self.saved.groups:
            raise Unspecified
        if any(p.shares and not same_bits(p.value, self.saved.masters[p.name]) for p in self.stepped()):
            raise Unspecified  # where the master is the weight itself, it comes back with the model's own state
        for p in self.stepped():
            p.put(self.saved.masters[p.name])
            assert p.stepper is not None
            p.stepper.load_state_dict(copy.deepcopy(self.saved.states[p.name]))
        self._round_all()
        for group, rate in zip(self.groups, self.saved.rates, strict=True):
            group.lr = rate
        self.scale.value, self.scale.clean = self.saved.scale
        self.steps, self.skipped_steps = self.saved.counts
        if not isinstance(self.stage, Interrupted) or not self.with_grad():
            self._begin_anew()

    def reload(self) -> None:
        """``opt.load_state_dict(opt.state_dict())``"""
        self.save()
        self.load()

    def resume(self) -> None:
        """All is made anew and loaded, the optimizer before the model or after it."""
        if self.lagging or any(p.grad is not None or p.is_weight_written for p in self.params.values()):
            raise Unspecified
        saved = self.saved
        self.save()
        if any(self.params[name].master is None for names in self.seen for name in names):
            raise Unspecified  # what was frozen when it was saved trains in the new one
        self.load()
        self.saved, self.held = saved, None

    def copy(self) -> None:
        """Model and optimizer by ``copy.deepcopy`` or ``pickle``: all but gradients and hooks."""
        if self.lagging:
            raise Unspecified
        for p in self.params.values():
            p.set_grad(None)
        self._begin_anew()
        self._follow()
        self.held = None
        self.has_names = False


# -- FP32 sums ---------------------------------------------------------------------------------------------------------


@dataclass
class SummingOracle(Oracle):
    """``grad_accumulation="fp32"``: each backward is divided by its scale, added to FP32 sums on masters, and freed.

    Attributes:
        other: The scale of a second loss.
        pending: The scale of a backward that is not folded yet, as the user may edit its gradients.
        heard: By each scale that had a backward in this step, whether that was not finite.
        has_new_edit: Master gradients were edited since the engine looked.
        has_unseen_drop: Sums were given up since the engine looked: a plain backward before it does is refused later.
    """

    other: Scale = field(default_factory=lambda: Scale(16.0, growth_interval=2))
    pending: Scale | None = None
    heard: dict[str, bool] = field(default_factory=dict)
    has_new_edit: bool = False
    has_unseen_drop: bool = False

    def now(self) -> tuple[Any, ...]:
        return *super().now(), dict(vars(self.other)), dict(self.heard)

    def put_back(self, before: tuple[Any, ...]) -> None:
        super().put_back(before[:-2])
        vars(self.other).update(before[-2])
        self.heard = before[-1]

    @property
    def _holds_groups(self) -> bool:
        return isinstance(self.stage, Checked)

    @property
    def _is_given_up(self) -> bool:
        return False  # freed gradients aren't cleared ones

    def _refuse_groups(self) -> None:
        if self.has_new_edit:
            raise Unspecified
        raise Refused("groups")

    def _follow(self, may_change: bool = False) -> None:
        if self.has_unseen_drop and self._groups_changed:
            raise Unspecified  # whether sums that were closed hold the groups until the engine looks
        if self._holds_groups and self._groups_changed and not may_change:
            raise Refused("groups of sums")
        super()._follow(may_change)

    def _look(self) -> None:
        if isinstance(self.stage, Interrupted):
            if self._are_zeros():
                raise Unspecified
            raise Refused("interrupted")
        self.has_new_edit = self.has_unseen_drop = False
        if self.pending is not None:
            self._fold(self.pending)
        if isinstance(self.stage, Checked):
            if self.with_grad():
                raise Refused("written", [p.name for p in self.with_grad()])
            if not self._trues():
                raise Unspecified

    def _fold(self, scale: Scale) -> None:
        self.pending = None
        parts = {p.name: self._true_of(p, scale.value) for p in self.with_grad()}
        for name, part in parts.items():
            p = self.params[name]
            p.true = part if p.true is None else p.true + part
            p.grad, p.is_used = None, False
        if not self._trues():
            self.stage = Ready()
            return
        key = "other" if scale is self.other else "own"
        self.heard = {**self.heard, key: self.heard.get(key, False) or found_inf(list(parts.values()))}
        closed = isinstance(self.stage, Checked) and self.stage.closed
        self.stage = Checked(scale.value, closed)

    def _open(self, *, may_clear: bool = False) -> None:
        self._follow()
        self._look()
        if isinstance(self.stage, Checked) and self.stage.closed:
            raise Refused("closed")
        if isinstance(self.stage, Ready):
            if self.with_grad():
                raise Unspecified
            self._begin_anew()
            self.heard = {}

    def backward(self, terms: Terms, *, stamp: bool = True, by: str = "") -> None:
        self._need_graph(terms)
        self._open()
        scale = self.other if by else self.scale
        self._accumulate(terms, scale.value)
        if stamp:
            self._fold(scale)
        else:
            self.pending = scale

    def scale_loss(self, terms: Terms, *, by: str = "") -> None:
        self.backward(terms, stamp=False, by=by)

    def stopped_backward(self, terms: Terms, *, reaches: bool = True) -> None:
        super().stopped_backward(terms, reaches=reaches)
        self.pending = None

    def _need(self) -> bool:
        self._follow()
        self._look()
        if isinstance(self.stage, Ready) and self.with_grad():
            if not self.scale.is_one:
                raise Unspecified
            self._take_plain()
            self._begin_anew()
            self.heard = {}
            self._fold(self.scale)
        return isinstance(self.stage, Checked)

    def update_master_grads(self) -> None:
        self._begin()
        if self.driven_by:
            raise Unspecified
        self._follow()
        there = self.with_grad() and self.pending is None
        if isinstance(self.stage, Checked) and (self.stage.closed or there):
            raise Unspecified
        if isinstance(self.stage, Ready) and there:
            if any(p.is_used for p in self.with_grad()) or not self.scale.is_one:
                raise Unspecified  # a backward may have made them before their parameter joined the sums
            self._begin_anew()
            self.heard, self.pending = {}, self.scale
        self._look()

    def plain_backward(self, terms: Terms) -> None:
        if self.pending is not None or self.has_unseen_drop or isinstance(self.stage, Checked):
            raise Unspecified  # whose scale it has
        super().plain_backward(terms)

    def _read(self) -> bool:
        if self.is_half_driven:
            raise Unspecified
        if not any(True for _ in self.stepped()):
            return False
        if isinstance(self.stage, Ready | Checked) and self.pending is not None and self._groups_changed:
            raise Unspecified
        if isinstance(self.stage, Interrupted):
            raise Unspecified
        if isinstance(self.stage, Checked) and self.with_grad() and self.pending is None:
            raise Unspecified
        if isinstance(self.stage, Ready) and self.with_grad() and self.pending is None and not self.scale.is_one:
            raise Unspecified
        return self._need()

    def _close(self, *, by_user: bool = False) -> None:
        was_closed = isinstance(self.stage, Checked) and self.stage.closed
        self.has_new_edit = self.has_new_edit or (by_user and not was_closed)
        super()._close()

    def load(self) -> None:
        super().load()
        self.pending = None

    def drop_grads(self, names: Sequence[str]) -> None:
        """What stands for a sum is cleared: the sum is given up. Not while a backward is not folded yet."""
        if self.pending is not None or isinstance(self.stage, Interrupted) or self.with_grad():
            raise Unspecified
        if self.has_new_edit or self._groups_changed or self._holds_divided():
            raise Unspecified
        super().drop_grads(names)
        if not isinstance(self.stage, Checked):
            return
        for name in names:
            if self._is_grouped(name):
                self.params[name].true = None
        self.has_unseen_drop = True
        if not self._trues():
            self._begin_anew()
            self.heard = {}

    def _holds_divided(self) -> bool:
        return isinstance(self.stage, Checked) and self.stage.divided

    def edit_grad(self, name: str, factor: float, *, in_place: bool, by_data: bool = False) -> None:
        if self.pending is None:
            raise Unspecified  # of a parameter that no group had when it came
        super().edit_grad(name, factor, in_place=in_place, by_data=by_data)

    def give_grad(self, name: str) -> None:
        raise Unspecified

    def zero_model_grads(self) -> None:
        raise Unspecified

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            raise Unspecified
        super().zero_grad()
        self.pending, self.heard = None, {}

    def _gives_up(self) -> bool:
        """Folding is no check, so that who has asked since is not known here."""
        if isinstance(self.stage, Checked) and found_inf(list(self._trues().values())):
            raise Unspecified
        return False

    def copy(self) -> None:
        self.pending, self.heard = None, {}
        super().copy()

    def set_scale(self, value: float) -> None:
        if self.pending is not None or self.with_grad():
            raise Unspecified
        super().set_scale(value)

    def driven_backward(self, terms: Terms, scale: float) -> None:
        if self.has_unseen_drop or isinstance(self.stage, Checked):
            raise Unspecified
        super().driven_backward(terms, scale)

    def check_external(self, scale: float) -> bool:
        self._follow()
        if not isinstance(self.stage, Ready) or not self._take_plain():
            raise Unspecified
        self._begin_anew()
        self.heard = {}
        self._fold(Scale(scale))
        return found_inf(list(self._trues().values()))

    def _judge(self, told: bool | None, grads: Mapping[str, Tensor]) -> bool:
        found = super()._judge(told, grads)
        if any(self.heard.values()) and not found:
            raise Unspecified  # what wasn't finite has left the groups, or the user has put another in its place
        return found

    def _record(self, found: bool) -> None:
        self.steps += not found
        self.skipped_steps += found
        is_edited = not any(self.heard.values())  # found where no backward had it: all hear of it
        for key, its_own in self.heard.items():
            (self.other if key == "other" else self.scale).update(found and (its_own or is_edited))
        self.heard, self.stage, self.is_half_driven = {}, Ready(), False


# -- GradScalers -------------------------------------------------------------------------------------------------------


@dataclass
class Driver:
    """A GradScaler with the oracle that it drives. What it refuses by itself, called out of order, is left out.

    Attributes:
        stage: "ready", "unscaled" or "stepped", as torch's keeps it for each optimizer.
        found: Whether it has found an inf in this iteration, None before it has looked.
    """

    oracle: Oracle
    scale: Scale
    stage: str = "ready"
    found: bool | None = None
    has_scaled: bool = False

    def now(self) -> tuple[Any, ...]:
        return dict(vars(self)), dict(vars(self.scale)), self.oracle.now()

    def put_back(self, before: tuple[Any, ...]) -> None:
        vars(self).update(before[0])
        vars(self.scale).update(before[1])
        self.oracle.put_back(before[2])

    def backward(self, terms: Terms) -> None:
        """``scaler.scale(loss).backward()``"""
        self.oracle.driven_backward(terms, self.scale.value)
        self.has_scaled = True

    def unscale(self) -> None:
        if self.stage != "ready" or not self.has_scaled:
            raise Unspecified
        self.oracle.meet_driver(steps=False)
        self._unscale()
        self.stage = "unscaled"

    def _unscale(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        if self.stage == "stepped" or not self.has_scaled:
            raise Unspecified
        self.oracle.meet_driver(steps=True)
        self._step()
        self.stage = "stepped"

    def _step(self) -> None:
        raise NotImplementedError

    def hooked_step(self, owner: str) -> None:
        self.oracle.hooked_step(owner, self.step)

    def stopped_step(self, owner: str, when: str) -> None:
        self.oracle.stopped_step(owner, when, self.step)

    def update(self) -> None:
        if self.found is None:
            raise Unspecified
        self.scale.update(self.found)
        self.stage, self.found = "ready", None


class TorchDriver(Driver):
    """``torch.amp.GradScaler``: to it masters are parameters like any, whose gradients it divides where it is asked."""

    def _unscale(self) -> None:
        if self.oracle.is_half_driven:
            self.oracle.may("stopped")
        self.found = self.oracle.show_to_torch()
        self.oracle.divide(self.scale.value)

    def _step(self) -> None:
        if self.stage == "unscaled":
            self.oracle.step(told=self.found)
            return
        self.found = self.oracle.show_to_torch()
        try:
            self.oracle.step(told=self.found, divide_by=self.scale.value)
        except Planned:
            self.oracle.is_half_driven = isinstance(self.oracle.stage, Checked)
            raise


class OwnDriver(Driver):
    """``fp16opt.GradScaler``: it has the optimizer check the model's gradients at its scale."""

    def _unscale(self) -> None:
        self.found = self.oracle.check_external(self.scale.value)

    def _step(self) -> None:
        if self.stage == "ready":
            self.unscale()
        self.oracle.step(told=self.found)
