"""Short programs, told by hand: rules of a step as rows, each in every mode and at every scale that it names.

A row is a rule with the calls of a program. ``{a|b}`` stands for either, so that a row is as many programs as there are
choices. ``call !kind`` must be refused, with words of ``SAYS``. The oracle of the random walk says what must come of
each call; it must not leave one out.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import products
import pytest
import torch

from contract.oracle import Terms
from contract.programs import MODES, RATE_OF_ADDED, REGROUPINGS, Setting, Statement, Writer, tried
from contract.walk import Difference, Walk

INF, NAN = float("inf"), float("nan")
A, B, C = "p0", "p1", "p3"
GRADS, MORE = {A: 0.5, B: 1.0, C: -0.5}, {A: 1.0, B: -0.25, C: 2.0}
S = Statement


def terms(grads: dict[str, float], **other: float) -> Terms:
    return tuple({**grads, **other}.items())


LOSSES: dict[str, Terms] = {
    "": terms(GRADS),
    " more": terms(MORE),
    " zeros": terms(dict.fromkeys(GRADS, 0.0)),
    " nans": terms(dict.fromkeys(GRADS, NAN)),
    " without a": terms({B: 1.0, C: -0.5}),
    " without b": terms({A: 0.5, C: -0.5}),
    " of a": terms({A: 0.25}),
    " of a and b": terms({A: 0.5, B: 1.0}),
    " inf a": terms(GRADS, p0=INF),
    " -inf a": terms(GRADS, p0=-INF),
    " inf b": terms(GRADS, p1=INF),
    " nan a": terms(GRADS, p0=NAN),
    " nan b": terms(GRADS, p1=NAN),
    " nan c": terms(GRADS, p3=NAN),
}

STOP = "model.p0.register_post_accumulate_grad_hook(stop)"
CALLS: dict[str, Statement] = {
    "step": S("opt.step()", "step", compares=True),
    "step of a closure": S("opt.step(lambda: 1.0)", "step", compares=True),
    "zero": S("opt.zero_grad()", "zero_grad"),
    "zero to zeros": S("opt.zero_grad(set_to_none=False)", "zero_grad", (False,)),
    "model zero": S("model.zero_grad()", "drop_grads", ((A, B, C),)),
    "model zero to zeros": S("model.zero_grad(set_to_none=False)", "zero_model_grads"),
    "door": S("opt.update_master_grads()", "update_master_grads"),
    "read": S("result = [m.grad for m in opt.master_params()]", "read_master_grads"),
    "read held": S("result = held.grad", "read_held"),
    "hand out": S("list(opt.master_params())", "read_order"),
    "order": S("result = [[n for n, p in model.items() if p is q][0] for q in opt.model_params()]", "read_order"),
    "repr": S("repr(opt)", "read_order"),
    "set scale": S("opt.loss_scale = 512.0", "set_scale", (512.0,)),
    "save": S("saved = copy.deepcopy(opt.state_dict())", "save", compares=True),
    "load": S("opt.load_state_dict(copy.deepcopy(saved))", "load", compares=True),
    "reload": S("saved = opt.state_dict()\nopt.load_state_dict(copy.deepcopy(saved))", "reload", compares=True),
    "write masters": S("opt.write_masters()", "write_masters"),
    "torch clip": S("result = torch.nn.utils.clip_grad_norm_(opt.master_params(), 1.0)", "torch_clip", (1.0,)),
    "clip of masters a and c": S(
        'result = opt.clip_master_grads(1.0, params=[master("p0"), master("p3")])', "clip", (1.0, 2.0, (A, C))
    ),
    "values": S("opt.clip_master_values(0.75)", "clip_values", (0.75,)),
    "stop before": S(
        "value = loss(p0=0.5)\nvalue.register_hook(stop)\ntry: opt.backward(value)\nexcept Planned: pass",
        "stopped_backward",
        (terms({A: 0.5}),),
        {"reaches": False},
    ),
    "stop": S(
        f"handle = {STOP}\ntry: opt.backward(loss(p0=0.5))\nexcept Planned: pass\nfinally: handle.remove()",
        "stopped_backward",
        (terms({A: 0.5}),),
    ),
    "unscale": S("scaler.unscale_(opt)", "scaler.unscale", ends=True),
    "scaler step": S("scaler.step(opt)", "scaler.step", compares=True, ends=True),
    "update": S("scaler.update()", "scaler.update"),
    "copy": S("model, opt = copy.deepcopy((model, opt))", "copy", compares=True),
    "pickle": S("model, opt = pickle.loads(pickle.dumps((model, opt)))", "copy", compares=True),
    "resume": S("model, opt = resumed(optimizer_first=True)", "resume", compares=True),
    "refresh": S("opt.refresh_masters()", "refresh_masters"),
    "rate": S('for group in opt.param_groups: group["lr"] *= 0.5', "change_rate", (0.5,)),
    "step behind": S("opt.optimizer.step()", "use_behind"),
    "zero behind": S("opt.optimizer.zero_grad()", "use_behind"),
    "frozen c": S("", "set_trains", (C, False)),
    "c by the wrapped one": S(
        f'opt.optimizer.add_param_group({{"params": [model.p3], "lr": {RATE_OF_ADDED}}})',
        "add_param_group",
        (C, RATE_OF_ADDED),
    ),
    "add c": S(
        f'opt.add_param_group({{"params": [model.p3], "lr": {RATE_OF_ADDED}}})', "add_param_group", (C, RATE_OF_ADDED)
    ),
}
for word, how in {
    "c leaves": "without one",
    "c in another group": "another group",
    "c beside them": "one more",
    "c in place of a": "in place of the first",
    "the last leaves": "one less",
    "another order": "reversed",
    "all of the model": "all of the model",
}.items():
    name = C if "{name}" in REGROUPINGS[how] else ""
    CALLS[word] = S(REGROUPINGS[how].format(name=name), "regroup", (how, name))
for word, owner in {"our": "opt", "its": "inner"}.items():
    for when in ("pre", "post"):
        hooks = f"handle = {'opt' if word == 'our' else 'opt.optimizer'}.register_step_{when}_hook(stop)"
        for prefix, call in {"": "opt.step()", "scaler ": "scaler.step(opt)"}.items():
            text = tried(call, "Planned", hooks, "handle.remove()")
            does = "scaler.stopped_step" if prefix else "stopped_step"
            CALLS[f"{prefix}step stopped by {word} {when} hook"] = S(text, does, (owner, when))
    text = tried("opt.step()", "", hooks.replace("stop", "halve"), "handle.remove()")
    CALLS[f"step halved by {word} post hook"] = S(text, "hooked_step", (owner,), compares=True)
for word, of in LOSSES.items():
    value = Writer.loss(of)
    CALLS[f"backward{word}"] = S(f"opt.backward({value})", "backward", (of,))
    CALLS[f"unstamped{word}"] = S(
        f"opt.backward({value}, update_master_grads=False)", "backward", (of,), {"stamp": False}
    )
    CALLS[f"other backward{word}"] = S(f"opt.backward({value}, scaler=other)", "backward", (of,), {"by": "other"})
    CALLS[f"scale_loss{word}"] = S(f"opt.scale_loss({value}).backward()", "scale_loss", (of,))
    CALLS[f"plain{word}"] = S(f"{value}.backward()", "plain_backward", (of,))
    closure = (
        f"def closure():\n    opt.zero_grad()\n    opt.backward({value})\n    return 1.5\nresult = opt.step(closure)"
    )
    CALLS[f"closure{word}"] = S(closure, "step_with_closure", (of,), compares=True)
    CALLS[f"scaler backward{word}"] = S(f"scaler.scale({value}).backward()", "scaler.backward", (of,))
for limit in (0.125, 0.5, 1.0, 2.0, 1e6):
    CALLS[f"clip {limit:g}"] = S(f"result = opt.clip_master_grads({limit})", "clip", (limit,))
    for kind in (1.0, INF):
        text = f'result = opt.clip_master_grads({limit}, float("{kind}"))'
        CALLS[f"clip {limit:g} by {kind:g}"] = S(text, "clip", (limit, kind))
    for word, names in {"a": (A,), "b": (B,), "c": (C,), "a and c": (A, C)}.items():
        text = f"result = opt.clip_master_grads({limit}, params=[model[n] for n in {names}])"
        CALLS[f"clip {limit:g} of {word}"] = S(text, "clip", (limit, 2.0, names))
for word, name in {"a": A, "b": B, "c": C}.items():
    grad, factor = f"model.{name}.grad", GRADS[name]
    kept = f"new = ({grad} * 0.5).detach()\nwhile new._version < {grad}._version: new.mul_(1.0)\n{grad} = new"
    CALLS |= {
        f"edit {word}": S(f"{grad}.mul_(0.5)", "edit_grad", (name, 0.5), {"in_place": True}),
        f"double {word}": S(f"{grad}.mul_(2.0)", "edit_grad", (name, 2.0), {"in_place": True}),
        f"mend {word}": S(f"{grad}.zero_()", "edit_grad", (name, 0.0), {"in_place": True}),
        f"spoil {word}": S(f"{grad}.mul_(inf)", "edit_grad", (name, INF), {"in_place": True}),
        f"replace {word}": S(f"{grad} = {grad} * 0.5", "edit_grad", (name, 0.5), {"in_place": False}),
        f"replace {word} by a tensor of its version": S(kept, "edit_grad", (name, 0.5), {"in_place": False}),
        f"edit data of {word}": S(
            f"{grad}.data.mul_(0.5)", "edit_grad", (name, 0.5), {"in_place": True, "by_data": True}
        ),
        f"drop {word}": S(f"{grad} = None", "drop_grads", ((name,),)),
        f"give {word}": S(f"{grad} = torch.ones_like(model.{name})", "give_grad", (name,)),
        f"hold {word}": S(f'held = master("{name}")', "hold", (name,)),
        f"edit master {word}": S(f'master("{name}").grad.mul_(0.5)', "edit_master_grad", (name, 0.5)),
        f"spoil master {word}": S(f'master("{name}").grad.mul_(inf)', "edit_master_grad", (name, INF)),
        f"assign master {word}": S(
            f'm = master("{name}")\nm.grad = pattern(m) * {2 * factor}', "edit_master_grad", (name, 2.0)
        ),
        f"forget master {word}": S(f'master("{name}").grad = None', "edit_master_grad", (name, None)),
        f"write master {word}": S(f'with torch.no_grad(): master("{name}").mul_(0.75)', "edit_master", (name, 0.75)),
        f"write {word}": S(f"with torch.no_grad(): model.{name}.mul_(0.5)", "write_weight", (name, 0.5)),
        f"write data of {word}": S(f"model.{name}.data.mul_(0.5)", "write_weight", (name, 0.5)),
        f"freeze {word}": S(f"model.{name}.requires_grad_(False)", "set_trains", (name, False)),
        f"thaw {word}": S(f"model.{name}.requires_grad_(True)", "set_trains", (name, True)),
    }

SAYS = {
    "groups": r"param_groups were changed between a check .*Put them back as they were; or .*opt\.zero_grad\(\)",
    "behind": r"opt\.(step|zero_grad)\(.*MixedPrecisionOptimizer",
    "written": r"\bp\d\b.*update_master_grads\(\)",
    "plain": r"opt\.backward\(loss\)",
    "left": r"zero_grad\(\)",
    "interrupted": r"zero_grad\(\)",
    "closed": "after the last backward of a step",
    "scale": "loss_scale",
    "given up": r"opt\.zero_grad\(\)",
    "given up after unscale_": r"give the step up by opt\.zero_grad\(\)",
    "clipped after unscale_": r"fp16opt\.integrations",
    "divided": r"\bp\d\b.*Clip opt\.master_params\(\).*opt\.zero_grad\(\)",
}

ALONE = [name for name, mode in MODES.items() if mode.driven_by is None and "on_model_write" not in mode.arguments]
KEEPS = [name for name in ALONE if not MODES[name].folds]
FOLDS = [name for name in ALONE if MODES[name].folds]
FULL = [name for name in ALONE if MODES[name].masters == "full"]
DRIVEN = [name for name, mode in MODES.items() if mode.driven_by]
DRIVEN_KEEPS = [name for name in DRIVEN if not MODES[name].folds]
DRIVEN_BY_TORCH = [name for name in DRIVEN_KEEPS if MODES[name].driven_by == "torch"]
DRIVEN_FULL = [name for name in DRIVEN_KEEPS if MODES[name].masters == "full"]

ONE, STATIC, DYNAMIC = (1.0, False), (64.0, False), (64.0, True)
EVERY, OTHERS = (ONE, STATIC, DYNAMIC), (STATIC, DYNAMIC)
Row = tuple[str, str, Sequence[str], Sequence[tuple[float, bool]]]

WAY = "{backward|unstamped|scale_loss}"
LOOK = "{|clip 2|door|read}"
CLIP = "{clip 0.5|clip 1e+06|values}"
WRITE = "{edit|replace}"
LIMITS = "{clip 2|clip 1e+06|clip 0.125}"

# fmt: off
ROWS: list[Row] = [
    # -- backward --
    ("one step after another", f"zero; {WAY}; step; zero; {WAY} more; step; zero; {WAY} inf b; step; zero; {WAY}; step",
     ALONE, EVERY),
    ("several add up", f"{WAY}; {WAY} more; step; zero; {WAY} of a and b; {WAY} of a; step", ALONE, EVERY),
    ("an overflow in any of them skips", "{backward inf b; backward; backward|backward; backward inf b; backward"
     "|backward; backward; backward inf b}; step; zero; backward; step", ALONE, EVERY),
    ("infs of opposite sign are noticed", "backward inf a; backward -inf a; step", ALONE, EVERY),
    ("looks don't end it", "backward; {door|read|save|hand out|repr}; backward more; {door|read|save}; backward; read; "
     "step", ALONE, EVERY),
    ("a clip ends it", f"backward; {CLIP}; backward !closed; backward !closed; zero; backward; step", ALONE, EVERY),
    ("an edit of a master's gradient ends it",
     "backward; {torch clip|edit master a|assign master a}; backward !closed; backward !closed; zero; backward; step",
     FULL, EVERY),
    ("after that refusal what was clipped is stepped",
     "backward; values; backward more !closed; step; zero; backward; values; step", ALONE, EVERY),
    ("zero_grad reopens it", f"backward; {CLIP}; zero; backward; backward; step", ALONE, EVERY),
    ("it takes no gradient that was written",
     "backward; {edit a|replace b|plain more}; backward more !written; zero; backward; step", KEEPS, EVERY),
    ("nor those of a plain backward", "plain; {backward more|unstamped} !left; zero; backward; step", KEEPS, OTHERS),
    ("which scale_loss leaves to the step", "plain; scale_loss more; step !left; zero; backward; step", KEEPS, OTHERS),
    ("nor those of the last step", "{backward|backward inf a}; step; backward more !left; zero; backward; step",
     KEEPS, OTHERS),
    ("those that scale_loss has added to are refused wherever they are needed",
     "backward; step; scale_loss more; {backward|step|clip 1|door|scale_loss} !left; step !left; zero; backward; step",
     KEEPS, OTHERS),
    ("at a scale of one it adds to them", "plain; backward more; step; backward; step; backward; step", KEEPS, [ONE]),
    ("zeros are what it adds to", f"{WAY}; step; zero to zeros; {WAY}; step; zero to zeros; {WAY}; step", KEEPS, EVERY),
    ("FP32 sums are used up by a step and by a skip",
     f"{WAY}; step; {WAY} more; step; {WAY} inf a; step; {WAY}; step; backward; step", FOLDS, EVERY),
    ("an abandoned batch leaves nothing", f"backward nans; {LOOK}; {{zero|model zero}}; backward without a; step",
     KEEPS, EVERY),
    ("after an exception all is refused until gradients are cleared",
     "{|backward}; stop; {backward|clip 1|values|step|door} !interrupted; step !interrupted; "
     "{zero|model zero}; backward; step", KEEPS, EVERY),
    ("also with FP32 sums", "{|backward}; stop; {backward|clip 1|values|step} !interrupted; zero; backward; step",
     FOLDS, EVERY),
    ("which needs no gradient to be there", "stop before; step; zero; backward; step", KEEPS, EVERY),

    ("each loss with a scaler of its own",
     "{backward; other backward more|other backward; backward more}; {|read}; step; zero; "
     "{backward inf a; other backward|backward; other backward inf b|backward; other backward; backward inf a"
     "|other backward; backward; other backward inf b}; step; zero; other backward; backward; step",
     FOLDS, EVERY),
    ("an edit blames none of them", "{backward inf a; other backward|backward; other backward inf b}; "
     "{torch clip|edit master c}; step; zero; backward; step", FOLDS, EVERY),

    # -- step --
    ("without gradients it does nothing", "step; step; door; step; backward; step; zero; step", ALONE, EVERY),
    ("and is no skip", "backward inf a; step; zero; step", ALONE, EVERY),
    ("after all gradients were dropped too", f"{WAY} nan a; {LOOK}; model zero; step; backward; step", KEEPS, EVERY),
    ("after a second backward too", "backward; {door|read}; backward nans; model zero; step; backward; step",
     KEEPS, EVERY),
    ("at a scale of one it takes a plain backward",
     "zero; plain; step; zero; plain more; step; zero; plain nan a; step",
     ALONE, [ONE]),
    ("at another it refuses one", "plain; {step|clip 1|values} !plain; step !plain; zero; backward; step",
     KEEPS, OTHERS),
    ("clearing those of the step before makes it no other",
     "backward; step; model zero; plain; step !plain; {zero|model zero}; backward; step; model zero; plain; "
     "step !plain", KEEPS, OTHERS),
    ("a gradient that was written is refused",
     "backward; {edit a|edit b|replace a|replace b|replace a by a tensor of its version|plain}; "
     "{step|step of a closure|clip 1|values} !written; step !written; zero; backward; step", KEEPS, EVERY),
    ("and one where there was none", "backward without {a; give a|b; give b}; step !written", KEEPS, EVERY),
    ("also after the check", "{backward|unstamped}; {clip 1e+06|clip 0.5|door|read}; edit {a|b}; step !written; "
     "zero; backward; step", KEEPS, EVERY),
    ("without a stamp writes count", "{unstamped|scale_loss|backward; scale_loss more}; "
     "{edit|replace|edit data of} {a|b}; edit c; step",
     KEEPS, EVERY),
    ("and overflows of theirs, and what takes one away",
     "{unstamped|scale_loss}{; spoil| inf a; mend| nan a; mend} a; step", KEEPS, EVERY),
    ("a second step is torch's at a scale of one",
     "{backward|plain}; step; step; step; zero; backward; step", KEEPS, [ONE]),
    ("at another it is refused", "backward; step; {step|clip 1} !left; step !left; zero; backward; step",
     KEEPS, OTHERS),
    ("zeros take part in a step",
     "{|backward; step|backward; {clip 2|read|door}|backward without a}; zero to zeros; step; zero to zeros; "
     "backward; step", KEEPS, EVERY),
    ("of gradients that a checkpoint finds nothing is known",
     "save; backward; {|clip 0.5}; load; {step|clip 1} !plain; step !plain; zero; backward; step", KEEPS, OTHERS),
    ("incomplete ones stay so", "save; stop; load; step !interrupted; zero; backward; step", KEEPS, OTHERS),
    ("a parameter whose gradient is None is left alone", f"{WAY} nan a; {LOOK}; drop a; step", KEEPS, EVERY),
    ("whenever that was", f"{WAY} nan b; {LOOK}; drop b; step; zero; backward; drop a; drop b; step", KEEPS, EVERY),
    ("no gradient is stale", "backward; step; {zero|model zero}; backward without a; step; {zero|model zero}; "
     "backward; step", ALONE, EVERY),
    ("a skip changes nothing but counts", "backward; step; zero; backward nan {a|b|c}; step; zero; backward; step",
     ALONE, EVERY),

    # -- clips --
    ("what was clipped is stepped", f"{WAY}; {LIMITS}; step; zero; {WAY}; {LIMITS}; read; step", ALONE, EVERY),
    ("values too", f"{WAY}; values; read; step", ALONE, EVERY),
    ("a second clip measures what the first left", "backward; clip 2; clip 1e+06; clip 0.5; clip 1e+06; step",
     ALONE, EVERY),
    ("one by norm and one by value", "backward; {clip 2; values|values; clip 1}; step", ALONE, EVERY),
    ("sums are clipped", "backward; backward; backward; {clip 1|values}; step", ALONE, EVERY),
    ("edited gradients of masters are measured anew", "backward; {edit|assign} master {a|b}; clip 1; step",
     FULL, EVERY),
    ("a dropped gradient goes with its part of the norm",
     f"backward {{nan a; {LOOK}; drop a|nan b; {LOOK}; drop b}}; clip 2; read; step", KEEPS, EVERY),
    ("one that is dropped after a clip leaves the others clipped", "backward; clip 2; drop {a|b}; step", KEEPS, EVERY),
    ("a plain backward is clipped at a scale of one", "plain; clip 1; step", ALONE, [ONE]),
    ("without gradients nothing is closed", "{clip 1|values}; backward; step", ALONE, EVERY),
    ("what is not finite stays so", "backward {inf|nan} b; {clip 0.5|clip 0.5 by 1|clip 0.5 by inf|values}; read; "
     "step; zero; backward; step", ALONE, EVERY),
    ("some by their own norm", "backward; {clip 1 of a and c|clip 2; clip 0.5 of b; clip 0.125 of c}; read; step",
     ALONE, EVERY),
    ("some by their masters", "backward; clip of masters a and c; read; step", FULL, EVERY),
    ("an overflow of any skips then too", "backward {inf|nan} {a|b}; clip 1 of a; step", ALONE, EVERY),

    # -- gradients of masters --
    ("handing masters out computes nothing", "unstamped; {hand out|order|repr}; edit data of {a|b}; step",
     KEEPS, EVERY),
    ("any may be read first", "backward; hold {a|b|c}; read held; step", ALONE, EVERY),
    ("also by one that was held", "hold {a|b}; backward; read held; step; zero; backward more; read held; step",
     FULL, EVERY),
    ("reading changes nothing", f"{WAY}; read; read; step", ALONE, EVERY),
    ("those of a plain backward are shown", "backward; read; step; model zero; plain more; read; step", KEEPS, [ONE]),
    ("what is edited there is stepped", "{backward|scale_loss}; {edit|assign|forget|spoil} master {a|b}; read; step",
     [*FULL, "split, one pass"], EVERY),
    ("torch's clip of masters clips", "{backward|scale_loss}; {|clip 2}; torch clip; step", FULL, EVERY),
    ("a master that the user writes wins", "write master a; write masters; backward; step", FULL, EVERY),

    ("a sum that is given up shows none", "backward; {drop a|drop a; drop c|model zero}; read; step; backward; step",
     FOLDS, EVERY),
    ("and is no part of the next step", "backward; model zero; {|backward; backward more}; clip 1; step", FOLDS, EVERY),

    # -- the door --
    ("it takes what was written", f"{WAY}; {WRITE} a; {WRITE} b; edit c; door; read; step", KEEPS, EVERY),
    ("it is the way on after a refusal",
     "backward; {|clip 1e+06|door|read}; {edit|double} {a|b}; {step|clip 1|backward more} !written; door; read; step",
     KEEPS, EVERY),
    ("again it gives the same bits", "backward; door; read; door; read; door; step", ALONE, EVERY),
    ("it undoes a clip", "backward; {clip 0.125|values}; door; read; {backward; read|}; step", KEEPS, EVERY),
    ("and edits", "backward; {torch clip|edit master a}; door; read; step",
     [name for name in FULL if not MODES[name].folds], EVERY),
    ("gradients that came otherwise have the present scale", "give a; give b; give c; door; read; step", KEEPS, EVERY),
    ("an overflow that was written is judged, and one that was taken away is not",
     "{backward|unstamped}; spoil a; door; step", KEEPS, EVERY),
    ("a dropped gradient drops its master's", "backward inf a; door; drop a; door; read; step", KEEPS, EVERY),
    ("backwards add up after it", "backward; edit a; replace b; door; backward more; step", KEEPS, EVERY),

    # -- zero_grad --
    ("what was found is forgotten, or counted", f"{WAY} nans; {LOOK}; zero; step; {WAY}; step", KEEPS, EVERY),
    ("the model's may leave zeros", f"backward; {LOOK}; model zero to zeros; backward; step", KEEPS, EVERY),
    ("a step given up by the model's after a clip names opt.zero_grad",
     "backward; {clip 0.5|values}; model zero; plain; {step|clip 1} !given up; zero; plain; step", KEEPS, [ONE]),
    ("but for the wrapper's backward", "backward; {clip 0.5|values}; model zero; backward; step", KEEPS, EVERY),

    # -- groups --
    ("what comes into a group is stepped on a master",
     "c leaves; {|backward of a and b; step; zero; {|backward of a and b; step; zero}}; "
     "{add c|c by the wrapped one|c in another group|c beside them|c in place of a|all of the model}; backward; step; "
     "zero; backward more; order; step", ALONE, OTHERS),
    ("what leaves one is let go", "backward; step; zero; {c leaves|the last leaves|another order}; backward; step; "
     "zero; backward more; step; order", ALONE, EVERY),
    ("one that is thawed has a master", "frozen c; backward of a and b; step; zero; thaw c; order; backward; step",
     ALONE, EVERY),
    ("a frozen one that has a gradient is stepped as in torch", "frozen c; give a; give c; "
     "{|clip 1e+06|values|door|read}; step; order", KEEPS, [ONE]),
    ("one that is frozen after its backward is stepped", "backward; {|door}; freeze c; step; zero; backward; step",
     KEEPS, EVERY),
    ("between a check and its step groups may not change", "c leaves; backward of a and b; {clip 1e+06|values}; "
     "{add c !groups; step|{c beside them|c in another group|the last leaves|another order|c in place of a}; "
     "{step|clip 1|door} !groups; step !groups}; zero; backward; step", ALONE, [DYNAMIC]),
    ("nor between the door and its step", "c leaves; backward of a and b; {door|read}; {add c !groups; step|"
     "{c beside them|the last leaves|another order}; step !groups; step !groups}; zero; backward; step", KEEPS, EVERY),
    ("between a backward and its step they may", "c leaves; backward of a and b; {add c|c in another group}; "
     "{|backward more|backward nan c}; step; zero; backward; step", KEEPS, EVERY),
    ("a rate counts from the next step on", "backward; rate; step; rate; zero; backward; step", ALONE, EVERY),
    ("the wrapped optimizer's own step is refused",
     "{|backward; step}; {|copy|pickle}; {step|zero} behind !behind; zero; backward; {step|zero} behind !behind; step",
     ALONE, [STATIC]),

    # -- closures --
    ("a closure is evaluated once, its loss returned", "closure; closure more; closure inf b; closure", ALONE, EVERY),
    ("one that makes no gradients steps those there", "step of a closure; backward; step of a closure; zero; "
     "backward nan a; step of a closure", KEEPS, EVERY),

    # -- weights and masters that others write --
    ("a written master wins over weights written beside it",
     "backward; step; zero; {write master a; write c|write c; write master a|write master a; write data of c}; "
     "{|save|zero}; backward; step", FULL, EVERY),
    ("copies keep it", "write master a; {|write c}; {copy|pickle}; {|write data of c}; backward; step", FULL, EVERY),
    ("it reaches the model with the next call",
     "write master a; {zero|save|write masters|door|values|step}; backward; step", FULL, EVERY),
    ("a written weight is taken at the step", "{|backward; step; zero}; {write|write data of} {a|b}; "
     "{|refresh}; backward; step; zero; backward; step", ALONE, EVERY),
    ("write_masters undoes it", "backward; step; zero; {write|write data of} a; write masters; backward; step",
     [*FULL, "none"], EVERY),

    # -- steps that are stopped, copies, checkpoints --
    ("a hook before the step stops it, and it may be tried again",
     "backward; {|clip 1}; step stopped by {our|its} pre hook; step; zero; backward; step", ALONE, EVERY),
    ("with a master that was written before", "backward; write master a; step stopped by its pre hook; step",
     FULL, EVERY),
    ("what a hook after it writes to masters is in the model",
     "backward; step halved by {our|its} post hook; zero; backward; step; save", [*FULL, "none"], EVERY),
    ("one after it stops nothing", "backward; step stopped by {our|its} post hook; zero; backward; step",
     ALONE, EVERY),
    ("copies and checkpoints go on", "{backward|backward nan a}; step; zero; {copy|pickle|resume|reload}; backward; "
     "step; zero; backward more; step", ALONE, EVERY),
    ("a load writes the model at once",
     "save; backward of a; {|step; zero; backward of a}; step; zero; load; backward; step",
     [*FULL, "split, one pass"], EVERY),
    ("a copy has no gradients", f"{WAY}; {{|clip 1}}; {{copy|pickle}}; step; backward; step", KEEPS, EVERY),

    ("they take part in a step at a scale of one", "backward; {|step}; zero to zeros; read; step", KEEPS, [ONE]),
    ("zeros are clipped to zeros", "backward zeros; clip 1; step", ALONE, EVERY),

    # -- the loss scale --
    ("it may not be written between backward and step", f"{WAY}; {LOOK}; set scale !scale; step", KEEPS, EVERY),
    ("nor over FP32 sums", f"backward; {LOOK}; set scale !scale; step", FOLDS, EVERY),
    ("it may be written in between steps, which count anew",
     "{|backward; step; zero|backward; zero|backward; model zero}; set scale; backward; step; zero; backward; step; "
     "zero; backward more; step", ALONE, EVERY),
    ("it grows after clean steps and backs off after an overflow",
     "backward; step; zero; backward; step; zero; backward; step; zero; backward; step; zero; backward inf a; step; "
     "zero; backward nan b; step; zero; backward; step; zero; backward; step; zero; backward; step", ALONE, EVERY),

    # -- under a GradScaler --
    ("steps and skips under a GradScaler", "scaler backward; {|unscale}; scaler step; update; {zero|model zero}; "
     "scaler backward inf b; {|unscale}; scaler step; update; zero; reload; scaler backward more; scaler step; update",
     DRIVEN_KEEPS, [ONE]),
    ("micro-batches add up under it", "scaler backward; scaler backward more; {|unscale}; scaler step; update",
     DRIVEN, [ONE]),
    ("after unscale_ masters show true gradients", "scaler backward; unscale; read; save; order; scaler step; update",
     DRIVEN_FULL, [ONE]),
    ("and may be clipped or edited",
     "scaler backward; unscale; {torch clip|edit master a|spoil master a|values|clip 1}; scaler step; update; zero; "
     "scaler backward; scaler step", DRIVEN_FULL, [ONE]),
    ("after unscale_ groups may not change",
     "c leaves; scaler backward of a and b; unscale; add c !groups; scaler step; update; zero; scaler backward; "
     "unscale; the last leaves; scaler step !groups", DRIVEN_KEEPS, [ONE]),
    ("one that is thawed has a master at once",
     "frozen c; scaler backward of a and b; {|unscale}; scaler step; update; zero; thaw c; scaler backward; "
     "{|unscale}; scaler step; update", DRIVEN, [ONE]),
    ("a hook that raises leaves nothing of the GradScaler's behind", "scaler backward; {|unscale}; "
     "scaler step stopped by {our|its} pre hook; zero; update; scaler backward more; scaler step; update",
     DRIVEN_KEEPS, [ONE]),
    ("a sum that a parameter lacks is divided once",
     "scaler backward {without b|of a}; {|unscale; clip 1e+06|unscale; read}; scaler step; update", DRIVEN, [ONE]),
    ("a gradient that is dropped is left alone", "scaler backward; drop a; {|unscale}; scaler step; update",
     DRIVEN_KEEPS, [ONE]),
    ("also after unscale_", "scaler backward; unscale; drop a; scaler step; update", DRIVEN_KEEPS, [ONE]),
    ("after unscale_ a clip of the model's gradients is refused",
     "scaler backward; unscale; {edit|replace} {a|b}; scaler step !clipped after unscale_", DRIVEN_KEEPS, [ONE]),
    ("naming what to clip", "scaler backward; unscale; edit {a|b}; scaler step !divided", DRIVEN_KEEPS, [ONE]),
    ("a new backward after the model's zero_grad names opt.zero_grad",
     "scaler backward; unscale; model zero; update; scaler backward more; scaler step !given up after unscale_",
     DRIVEN_BY_TORCH, [ONE]),
]
# fmt: on


def programs(row: str) -> dict[str, dict[Any, str]]:
    """All that the choices in braces make of it, the innermost first; and of each, what was chosen where."""
    found = re.search(r"{([^{}]*)}", row)
    if found is None:
        return {row: {}}
    before, after = row[: found.start()], row[found.end() :]
    made: dict[str, dict[Any, str]] = {}
    for choice in found[1].split("|"):
        for program, chosen in programs(before + choice + after).items():
            made.setdefault(program, {**chosen, len(after): choice})
    return made


def setting(mode: str, scale: tuple[float, bool], frozen: list[str]) -> Setting:
    """The first optimizer of the mode; torch's GradScaler takes no FP16 gradients where there are no masters."""
    half = "b" if "h" not in MODES[mode].dtypes else "h"
    dtypes = {A: half, B: "f", C: half}
    return Setting(mode, MODES[mode].optimizers[0], dtypes, [[A, B, C]], frozen, scale=scale, driver_scale=64.0)


def follow(made: Setting, program: str) -> None:
    """Runs it, and fails where a call does something else than the oracle and the row say."""
    walk, goes_on = Walk(made), True
    for told in filter(str.strip, program.split(";")):
        word, _, kind = (part.strip() for part in told.partition("!"))
        assert goes_on, f"before {word!r}: the contract leaves open what was done until the refusal"
        before, skipped = len(walk.ran), walk.oracle.skipped_steps
        goes_on = walk.run([CALLS[word]])
        assert len(walk.ran) > before, f"{word!r}: the contract leaves open what happens"
        message = walk.ran[-1][1]
        if kind:
            assert re.search(SAYS[kind], message or ""), f"{word!r} must say {SAYS[kind]!r}: {message}"
            continue
        assert message is None, f"{word!r}: {message}"
        if CALLS[word].does.endswith("step"):
            assert bool(walk.room["opt"].step_was_skipped) == (walk.oracle.skipped_steps > skipped)


@functools.lru_cache(None)
def cells() -> dict[str, list[tuple[str, tuple[float, bool], str]]]:
    """By mode: rules, each with a scale and a program. Without ``--all`` each choice is made once, at any scale."""
    found: dict[str, list[tuple[str, tuple[float, bool], str]]] = {mode: [] for mode in (*ALONE, *DRIVEN)}
    for rule, row, modes, scales in ROWS:
        made = programs(row)
        every = list(itertools.product(modes, scales, made))
        axes = [{"mode": mode, "scale": scale, **made[program]} for mode, scale, program in every]
        names = dict.fromkeys(itertools.chain(*axes))
        taken = products.covering(list(enumerate(axes)), [("", name) for name in names], rule)
        for mode, scale, program in every if products.takes_all else [every[place] for place in taken]:
            found[mode].append((rule, scale, program))
    return found


@pytest.mark.parametrize("mode", [*ALONE, *DRIVEN])
def test_rules(mode: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rule, scale, program in cells()[mode]:
            try:
                follow(setting(mode, scale, [C] if "frozen c" in program else []), program)
            except (AssertionError, Difference) as found:
                pytest.fail(f"{rule}, at scale {scale}, {program}: {found}", pytrace=False)
    finally:
        torch.set_num_threads(threads)
