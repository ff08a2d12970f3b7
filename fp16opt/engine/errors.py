"""The messages of docs/errors.md: what is raised where calls come in the wrong order, what is logged.

Where it is raised or logged, an entry gets what is known there::

    raise errors.WRITTEN_AFTER_THE_FOLD(names=describe(names))
    lines.tell(errors.NO_GRADIENTS, names=describe(names), once=True)

``python docs/errors.py`` makes the page of this file, in the order that is here; a test provokes each message. A line
break in a text is a space. A sentence that not every message of an entry has is a string of its own, above the entry.
What refuses an argument is not here, but where the argument is checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..scaling import LossScaleError


@dataclass(kw_only=True, eq=False, repr=False)
class Chapter:
    """Of the page: the messages that follow are in it."""

    heading: str
    words: str = ""


@dataclass(kw_only=True, eq=False, repr=False)
class Message:
    """One message.

    Attributes:
        key: what it is called in ``<!-- message: KEY -->`` of the page, and in the tests.
        heading: over it.
        text: with places for what is known where it comes, as :meth:`str.format` fills them in.
        what_happened, what_to_do: under it, in Markdown.
        shown: what the page fills in: a model with one layer ``fc``.
    """

    key: str
    heading: str
    text: str
    what_happened: str
    what_to_do: str
    shown: Mapping[str, Any] = field(default_factory=dict)

    def filled(self, **known: object) -> str:
        """The message whole, in one line.

        Args:
            known: by the names of the places.
        """
        return " ".join(self.text.split()).format(**known)


@dataclass(kw_only=True, eq=False, repr=False)
class Refusal(Message):
    """One that is raised, or given to ``warnings.warn``.

    Attributes:
        kind: of the exception, or of the warning.
    """

    kind: type[Exception]

    def __call__(self, **known: object) -> Exception:
        """The exception, with its message.

        Args:
            known: by the names of the places in the text.
        """
        return self.kind(self.filled(**known))


@dataclass(kw_only=True, eq=False, repr=False)
class Line(Message):
    """One that is logged.

    Attributes:
        level: of :mod:`logging`, where the call says no other.
    """

    level: int


def page() -> list[Chapter | Message]:
    """Chapters and messages, in the order of this file."""
    return [one for one in globals().values() if isinstance(one, (Chapter, Message))]


# -- Gradients between backward and step -------------------------------------------------------------------------------

BETWEEN_BACKWARD_AND_STEP = Chapter(
    heading="Gradients between backward and step",
    words="The rules are those of [the engine](engine.md#gradients-between-backward-and-step).",
)

_TRAINERS_THAT_CLIP = (
    "Trainers that clip the model's own: Lightning, Accelerate, transformers, timm have a module in "
    "fp16opt.integrations."
)
_HOW_TO_WRITE = """{clip}To have them count, call update_master_grads(). To clip, call clip_master_grads(max_norm) in
    place of clip_grad_norm_(model.parameters()). To add up micro-batches, call backward(loss) of this optimizer each
    time. To give the step up, call opt.zero_grad().{moved}"""

CLIP_UNDER_A_GRAD_SCALER = f"Under a GradScaler clip opt.master_params(), after unscale_. {_TRAINERS_THAT_CLIP} "
DDP_MOVES_GRADIENTS = (
    " DDP with gradient_as_bucket_view=True moves gradients once, after its first reduction: call "
    "fp16opt.distributed.attach(opt, ddp_model)."
)

WRITTEN_AFTER_BACKWARD = Refusal(
    key="written after backward",
    kind=RuntimeError,
    heading="The model's gradients were written after backward",
    text="the model's gradients were written after backward(loss) had made them: {names}. " + _HOW_TO_WRITE,
    what_happened="""A line between `backward` and `step` has written gradients, which are multiplied by the loss scale
    there (rule 1). Mostly it is a `clip_grad_norm_(model.parameters())`, or a second, plain `loss.backward()`, left in
    a script.""",
    what_to_do="""Clip with `opt.clip_master_grads(max_norm)`. Add up micro-batches with `opt.backward(loss)`. If you
    want the edit, call `opt.update_master_grads()` after it.""",
    shown={"names": "fc.weight, fc.bias", "clip": "", "moved": ""},
)

WRITTEN_AFTER_THE_CHECK = Refusal(
    key="written after the check",
    kind=RuntimeError,
    heading="The model's gradients were written after they were checked",
    text="the model's gradients were written after they were checked: {names}. " + _HOW_TO_WRITE,
    what_happened="""A line after a clip, or after `update_master_grads()`, has written the model's gradients. They are
    not read any more, so the edit would be lost (rule 3). Or the step was given up by `model.zero_grad()`, and a plain
    `loss.backward()` has made new gradients before the engine could see that the old ones were cleared (rule 6).""",
    what_to_do="""Edit before the clip and call `opt.update_master_grads()`. Or edit `.grad` of `opt.master_params()`,
    which holds true gradients. To give a step up after a clip, call `opt.zero_grad()`.""",
    shown={"names": "fc.weight", "clip": "", "moved": ""},
)

WRITTEN_AFTER_THE_FOLD = Refusal(
    key="written after the fold",
    kind=RuntimeError,
    heading="Gradients that were written after FP32 sums took them",
    text="""the model's gradients were written after they were folded into FP32 sums: {names}. Edit the sums, which are
    the gradients of opt.master_params(), or clip by clip_master_grads(max_norm). To have a backward count, run it by
    backward(loss) of this optimizer. To give the step up, call opt.zero_grad().""",
    what_happened="""With `grad_accumulation="fp32"`, or several loss scales in one step, each backward is added to FP32
    sums and its gradients are freed. Something gave the model's parameters gradients after that: a line of the script,
    or a plain `loss.backward()`.""",
    what_to_do="As the message says.",
    shown={"names": "fc.weight"},
)

FOLDED = Refusal(
    key="folded",
    kind=RuntimeError,
    heading="Gradients that FP32 sums have taken",
    text="""the model's gradients were folded into FP32 sums, and can be neither read nor written{name}. The sums are
    the gradients of opt.master_params(). To clip, call opt.clip_master_grads(max_norm) in place of
    clip_grad_norm_(model.parameters()). For a log, read opt.stats(). To have a backward count, run it by backward(loss)
    of this optimizer. To give the step up, call opt.zero_grad().""",
    what_happened="""With `grad_accumulation="fp32"`, or several loss scales in one step, the model's gradients are in
    the masters' sums, and a line clips, divides or reads `p.grad` of the model. It would do nothing there.""",
    what_to_do="""Clip by `opt.clip_master_grads(max_norm)`. Edit and read `.grad` of `opt.master_params()`, which is
    true.""",
    shown={"name": ": fc.weight"},
)

PLAIN_BACKWARD = Refusal(
    key="plain backward",
    kind=RuntimeError,
    heading="Gradients that opt.backward(loss) did not make",
    text="""gradients were found that opt.backward(loss) of this optimizer did not make, and its loss scale is
    {scale:g}: {names}. A plain loss.backward() does not scale: call opt.backward(loss) in its place. After
    opt.scale_loss(loss) a zero_grad() forgets the scale: call it before. For a GradScaler to do the scaling, construct
    MixedPrecisionOptimizer without dynamic, loss_scale, scaler.""",
    what_happened="""A plain `loss.backward()` made them, so they were never multiplied by the loss scale. Or you
    multiplied the loss yourself, with `opt.scale_loss(loss)`, and called `zero_grad()` between that and `backward()`.
    """,
    what_to_do="Call `opt.backward(loss)`.",
    shown={"scale": 1024.0, "names": "fc.weight, fc.bias"},
)

ANOTHER_OPTIMIZER = Refusal(
    key="another optimizer",
    kind=RuntimeError,
    heading="Gradients that another optimizer's backward made",
    text="""gradients were found that a backward of this optimizer did not make, and its loss scale is {scale:g}:
    {names}. The last backward was that of another optimizer, over {others}. Where one loss serves both, give both one
    scaler, scaler=fp16opt.DynamicLossScaler(), and call update_master_grads() of this one after that backward. Where a
    plain loss.backward() has made them, call opt.backward(loss).""",
    what_happened="""Two optimizers train one model, and one loss serves both. `backward(loss)` of the first has made
    all gradients, by its scale, and the second can't know which scale that was.""",
    what_to_do="""Make one `scaler = fp16opt.DynamicLossScaler()` and give it to both as `scaler=`. Call
    `first.backward(loss)`, then `second.update_master_grads()`, then both steps.""",
    shown={"scale": 1024.0, "names": "fc.weight, fc.bias", "others": "head.weight and 1 more"},
)

SCALES_THERE = "; where it is in use, {call} scales"

A_TRAINER = Refusal(
    key="a trainer",
    kind=RuntimeError,
    heading="Gradients that a trainer's backward made",
    text="""gradients were found that a backward of this optimizer did not make, and its loss scale is {scale:g}:
    {names}. The step was called by {trainer}, whose own backward does not scale the loss. Use
    fp16opt.integrations.{module}{scales}.""",
    what_happened="""The trainer calls `loss.backward()` itself, and the optimizer that you gave it has a loss scale.
    The same message comes for Lightning and for transformers, with their modules.""",
    what_to_do="""Use the trainer's module: [Lightning](lightning.md), [Accelerate](accelerate.md),
    [transformers](transformers.md), [timm](timm.md).""",
    shown={
        "scale": 1024.0,
        "names": "fc.weight, fc.bias",
        "trainer": "Accelerate",
        "module": "accelerate",
        "scales": SCALES_THERE.format(call="accelerator.backward(loss)"),
    },
)

THE_STEP_IS_OVER = Refusal(
    key="the step is over",
    kind=RuntimeError,
    heading="The step is over",
    text="""the step is over, and the gradients that it has used are still there: {names}. Call zero_grad() after each
    step, and then backward(loss). Clip before step().""",
    what_happened="`step()` was called a second time on the same gradients, or a clip came after it.",
    what_to_do="Clip between `backward` and `step`. Call `opt.zero_grad()` after each step.",
    shown={"names": "fc.weight, fc.bias"},
)

NOT_CLEARED = Refusal(
    key="not cleared",
    kind=RuntimeError,
    heading="Gradients of an earlier step are there",
    text="""gradients are there that this backward would add to, and they were made at another scale: {names}. Call
    zero_grad() after each step, also after a skipped one. Where another optimizer's backward left them, clear them; or,
    where both have one scaler, call update_master_grads() of this one after that backward.""",
    what_happened="""The first `backward` of a step found gradients that were made at another scale. They would be added
    to the new ones (rule 5).""",
    what_to_do="""Call `opt.zero_grad()` after each step, after a skipped one too. If another optimizer's loss left
    them, clear them before this `backward`.""",
    shown={"names": "fc.weight, fc.bias"},
)

BACKWARD_AFTER_A_CLIP = Refusal(
    key="backward after a clip",
    kind=RuntimeError,
    heading="backward after a clip",
    text="""backward was called after master gradients were clipped or edited, which it would undo. Clip and edit after
    the last backward of a step; or call step() or opt.zero_grad() first.""",
    what_happened="The clip went by the norm of the gradients up to then. A further `backward` adds to them (rule 4).",
    what_to_do="Do all backwards of a step first, then clip, then step.",
)

INTERRUPTED = Refusal(
    key="interrupted",
    kind=RuntimeError,
    heading="A backward was interrupted",
    text="""a backward was interrupted while gradients were being added up, so they are incomplete. Call zero_grad() and
    do the step's backwards again.""",
    what_happened="""A `backward` raised, or was stopped by Ctrl-C, so that some gradients are there and others are not
    (rule 6).""",
    what_to_do="""Call `opt.zero_grad()` and do the step's backwards again. Loading a checkpoint does not clear
    gradients.""",
)

MASTER_GRADIENT_SET = Refusal(
    key="master gradient set",
    kind=RuntimeError,
    heading="A master's gradient was set",
    text="""a master's gradient was set while none wait for a step, and the loss scale is {scale:g}. To compute
    gradients yourself, run torch.autograd.grad on opt.scale_loss(loss), set the model's gradients, and call
    update_master_grads(); then edit.""",
    what_happened="""`master.grad = ...` was written while no gradients wait for a step. The engine can't know whether
    the loss was multiplied by the scale.""",
    what_to_do="""Compute gradients of `opt.scale_loss(loss)`, put them into the model's `.grad`, and call
    `opt.update_master_grads()`: [an example](engine.md#examples).""",
    shown={"scale": 1024.0},
)

SCALE_SET = Refusal(
    key="scale set",
    kind=RuntimeError,
    heading="loss_scale was set between backward and step",
    text="""loss_scale was set between backward and step: gradients made with the old scale would be unscaled wrongly.
    Set it after step() or zero_grad().""",
    what_happened="The gradients that wait for the step were made at the old scale.",
    what_to_do="Set `opt.loss_scale` after `step()` or `zero_grad()`.",
)

GROUPS_CHANGED = Refusal(
    key="groups changed",
    kind=RuntimeError,
    heading="param_groups were changed between a check and its step",
    text="""param_groups were changed between a check of this step's gradients (a clip, update_master_grads(), a read of
    a master's .grad) and its step. Put them back as they were; or give the step up by opt.zero_grad(). Change groups
    before the first backward of a step, or after the step.""",
    what_happened="""A parameter came, went or changed its place after the gradients were checked, so that the norm of a
    clip would be another one. Every call raises this, and changes nothing, until the groups are as they were.""",
    what_to_do="""Put the groups back, or give the step up with `opt.zero_grad()`, which takes the groups as they are
    now. Change groups before the first `backward` of a step, or after `step()`.""",
)

NO_SYNC = Refusal(
    key="no_sync",
    kind=RuntimeError,
    heading="Gradients made under no_sync",
    text="""the gradients were made under DDP's no_sync and are this rank's own. Run the last backward of a step outside
    of no_sync, or use grad_accumulation="fp32", which averages what is left.""",
    what_happened="""The last `backward` before a clip or a step ran under DDP's `no_sync()`. The ranks have not added
    up their gradients yet.""",
    what_to_do="Leave `no_sync()` for the last `backward` of a step.",
)

SUMS_IN_A_GROUP = Refusal(
    key="sums in a group",
    kind=RuntimeError,
    heading="FP32 sums on several ranks",
    text="""gradients are to be folded into FP32 (grad_accumulation="fp32", or several loss scales in one step) in a
    process group of {ranks} ranks: under DDP's no_sync the ranks would drift apart. Call
    fp16opt.distributed.attach(opt, ddp_model); or attach(opt, None), if ranks don't share gradients.""",
    what_happened="""Gradients are to be added up in FP32 in a training of several ranks, and the optimizer was not told
    which module reduces them.""",
    what_to_do="Call `fp16opt.distributed.attach(opt, ddp_model)`: [several ranks](scale.md).",
    shown={"ranks": 2},
)

# -- With a GradScaler -------------------------------------------------------------------------------------------------

WITH_A_GRAD_SCALER = Chapter(
    heading="With a GradScaler",
    words="""A GradScaler may do the scaling: then the optimizer has no scale of its own. [From
    GradScaler](from-gradscaler.md) shows the loop.""",
)

_ANOTHER_SCALE = (
    "a GradScaler came to unscale gradients by its own scale, and this optimizer has a loss scale of {scale:g}"
)
_DROP_ONE = """Drop one of the two: call opt.backward(loss) and opt.step() without a GradScaler; or construct
    MixedPrecisionOptimizer without dynamic, loss_scale, scaler, and call scaler.scale(loss).backward()."""

TWO_SCALES = Refusal(
    key="two scales",
    kind=RuntimeError,
    heading="Two scales",
    text=f"{_ANOTHER_SCALE}. {_DROP_ONE}",
    what_happened="Both the GradScaler and the optimizer have a loss scale, and gradients would be divided twice.",
    what_to_do="""Keep one. Either call `opt.backward(loss)` and `opt.step()`, and delete the GradScaler; or construct
    the optimizer without `dynamic`, `loss_scale` and `scaler`.""",
    shown={"scale": 65536.0},
)

SCALED_HERE_AND_THERE = Refusal(
    key="scaled here and there",
    kind=RuntimeError,
    heading="opt.backward(loss) under a GradScaler",
    text=f"{_ANOTHER_SCALE}, at which opt.backward(loss) made them. {_DROP_ONE}",
    what_happened="""`opt.backward(loss)` made the gradients, without the GradScaler's scale. The GradScaler would
    divide them by it.""",
    what_to_do="""Call `scaler.scale(loss).backward()`; or delete the GradScaler and construct the optimizer with
    `dynamic=True`.""",
    shown={"scale": 1.0},
)

CLIPPED_THE_MODEL = Refusal(
    key="clipped the model",
    kind=RuntimeError,
    heading="A clip of the model's gradients after unscale_",
    text="""the model's gradients were written after unscale_: {names}. They are not read again before the step. Clip
    opt.master_params(), after unscale_; or give the step up by opt.zero_grad(), which model.zero_grad() does not do
    after a clip. """
    + _TRAINERS_THAT_CLIP
    + " Without a GradScaler, update_master_grads() has edits count.",
    what_happened="""`scaler.unscale_(opt)` makes true gradients of the masters. A clip of `model.parameters()` after it
    does not reach them (rule 3). Or the step was given up by `model.zero_grad()`, and a new backward came at once (rule
    6).""",
    what_to_do="""Write `clip_grad_norm_(opt.master_params(), max_norm)`. To give the step up, call `opt.zero_grad()`.
    In a trainer that clips by itself, use its module in `fp16opt.integrations`.""",
    shown={"names": "fc.weight, fc.bias"},
)

BACKWARD_AFTER_UNSCALE = Refusal(
    key="backward after unscale_",
    kind=RuntimeError,
    heading="A backward after unscale_",
    text="""backward was called after a GradScaler has unscaled this step's gradients, which it would undo. Call
    unscale_ after the last backward of a step; or call step() or opt.zero_grad() first.""",
    what_happened="""`opt.backward(loss)` or `opt.scale_loss(loss)` came after `scaler.unscale_(opt)`. The true
    gradients that the GradScaler has made would be lost.""",
    what_to_do="""Do all backwards of a step first, then `unscale_`, then the clip. Under a GradScaler they are
    `scaler.scale(loss).backward()`.""",
)

UPDATED_AFTER_UNSCALE = Refusal(
    key="updated after unscale_",
    kind=RuntimeError,
    heading="update_master_grads() after unscale_",
    text="""update_master_grads() was called after a GradScaler has unscaled this step's gradients, and would take
    scaled ones in their place. To clip, clip opt.master_params(); to give the step up, call opt.zero_grad().""",
    what_happened="""`scaler.unscale_(opt)` has divided the masters' gradients. The model's, which
    `update_master_grads()` takes, are still multiplied by the GradScaler's scale.""",
    what_to_do="Leave the call out: after `unscale_` the masters' gradients are true. Edit them there.",
)

NEVER_WRAPPED = Refusal(
    key="never wrapped",
    kind=ValueError,
    heading="FP16 weights that were never wrapped",
    text="""Attempting to unscale FP16 gradients. FP16 weights that are stepped without FP32 masters lose every update
    smaller than half a unit in the last place: {names}. Write optimizer = fp16opt.MixedPrecisionOptimizer(optimizer)
    after making it, or GradScaler(allow_16bit_weights=True) to step them as they are.""",
    what_happened="""`fp16opt.GradScaler` was to unscale FP16 gradients of an optimizer without masters, as torch's
    refuses too.""",
    what_to_do="Write `optimizer = MixedPrecisionOptimizer(optimizer)` where the optimizer is made.",
    shown={"names": "group 0, param 0; group 0, param 1"},
)

HALVES_UNDER_A_GRAD_SCALER = Refusal(
    key="halves under a GradScaler",
    kind=UserWarning,
    heading="16-bit weights that a GradScaler steps itself",
    text="""parameters in 16 bits are stepped without FP32 masters: {names}. Updates smaller than half a unit in the
    last place are lost. Wrap the optimizer in fp16opt.MixedPrecisionOptimizer.""",
    what_happened="""`fp16opt.GradScaler` steps a plain optimizer over BF16 weights, or over FP16 ones with
    `allow_16bit_weights=True`. It says so once, as a `UserWarning`.""",
    what_to_do="""Write `optimizer = MixedPrecisionOptimizer(optimizer)` where the optimizer is made: [do I need
    masters?](do-i-need-masters.md) tells what is lost without.""",
    shown={"names": "group 0, param 0; group 0, param 1"},
)

NO_GRADIENTS_UNDER_A_GRAD_SCALER = Refusal(
    key="no gradients under a GradScaler",
    kind=UserWarning,
    heading="A step of a GradScaler without gradients",
    text="""no parameter of {optimizer} has a gradient, so this step does nothing and the scale stays. Does the loss
    depend on them, and was the model moved or replaced after the optimizer was made?""",
    what_happened="""`scaler.step(optimizer)` found no gradient, where torch's GradScaler raises `No inf checks were
    recorded for this optimizer`. It says so once, as a `UserWarning`.""",
    what_to_do="""Look whether the loss uses these parameters. Make the optimizer after the model is moved, converted or
    replaced.""",
    shown={"optimizer": "SGD"},
)


# -- The wrapped optimizer and the model -------------------------------------------------------------------------------

OPTIMIZER_AND_MODEL = Chapter(
    heading="The wrapped optimizer and the model",
    words="",
)

META = Refusal(
    key="meta",
    kind=ValueError,
    heading="A parameter on the meta device",
    text="""{param}: expected a parameter with memory, got one on the meta device. Materialise the model first
    (to_empty, and its weights), then make the optimizer, then wrap it.""",
    what_happened="""The model was made under `torch.device("meta")`, and has no memory yet. A master could not follow
    when it gets some.""",
    what_to_do="""Call `model.to_empty(device=...)` and load or initialise the weights. Then make the optimizer, and
    wrap it.""",
    shown={"param": "group 0, param 0 ('fc.weight')"},
)

WRAPPED_TWICE = Refusal(
    key="wrapped twice",
    kind=TypeError,
    heading="Wrapped twice",
    text="""optimizer: this {optimizer} is wrapped already, and holds the masters of its wrapper. Use that wrapper, or
    make the optimizer anew over model.parameters() and wrap it once.""",
    what_happened="""The optimizer was wrapped before, and its groups hold the masters of that wrapper. A notebook cell
    that runs twice does this.""",
    what_to_do="Use the first wrapper. Or make the optimizer anew over `model.parameters()`, and wrap it once.",
    shown={"optimizer": "SGD"},
)

BEHIND_THE_BACK = Refusal(
    key="behind the back",
    kind=RuntimeError,
    heading="Used behind the wrapper's back",
    text="""{optimizer}.{method}() was called on an optimizer that {wrapper} wraps, behind its back: masters, gradients
    and the loss scale would not be seen to. Call opt.{method}() of the {wrapper} instead.""",
    what_happened="`step()` or `zero_grad()` was called on the wrapped optimizer, mostly by its old name.",
    what_to_do="Call `opt.step()` and `opt.zero_grad()` of the wrapper. Schedulers made before wrapping go on working.",
    shown={"optimizer": "SGD", "method": "step", "wrapper": "MixedPrecisionOptimizer"},
)

EVALUATED_TWICE = Refusal(
    key="evaluated twice",
    kind=RuntimeError,
    heading="A closure that is evaluated twice",
    text="""the wrapped optimizer evaluates its closure more than once in a step, or after it has moved the weights, as
    SAM does. Construct MixedPrecisionOptimizer with closure="reevaluate"; or evaluate the loss yourself, call
    backward(loss), then step() without a closure.""",
    what_happened="The wrapped class calls its closure more than once in a step, as SAM does.",
    what_to_do='Construct `MixedPrecisionOptimizer(optimizer, closure="reevaluate")`: [closures](engine.md#closures).',
)

MODEL_WRITTEN = Refusal(
    key="model written",
    kind=RuntimeError,
    heading='The model\'s weights were written, with on_model_write="error"',
    text="""the model's weights were written behind the optimizer: {names}. Call refresh_masters() after writing to the
    model, or use on_model_write="refresh".""",
    what_happened="""Other code wrote weights since the last step: `load_state_dict`, a clamp, an average. The message
    comes where `on_model_write="error"` was asked for.""",
    what_to_do="""Call `opt.refresh_masters()` once after a load. To write weights in every step, write
    `opt.master_params()` and call `opt.write_masters()`.""",
    shown={"names": "fc.weight, fc.bias"},
)

MODEL_WRITTEN_AND_TAKEN = Line(
    key="model written and taken",
    level=logging.WARNING,
    heading="The model's weights were written, and masters took them",
    text="""model weights were written by something else than the optimizer; masters take the values: {names}{times}.
    There is nothing to do after a load. To write in every step, as a clamp does, edit master_params() and call
    write_masters(). on_model_write="error" finds the place.""",
    what_happened="""The same with `on_model_write="refresh"`, the default: the masters have taken the new values in the
    elements that differ. The line comes at the 1st, 2nd, 4th, 8th time.""",
    what_to_do="""Nothing, where you loaded weights. If you don't know who writes, construct with
    `on_model_write="error"` and read the traceback.""",
    shown={"names": "fc.weight, fc.bias", "times": ""},
)

MODEL_SWAPPED = Refusal(
    key="model swapped",
    kind=RuntimeError,
    heading="Called while the model holds averages",
    text="""{call} was called while the model holds {values}: masters and weights don't belong together. Leave the
    `with` block first.""",
    what_happened="`step()`, a checkpoint or another call came inside `with averaged.swap():`.",
    what_to_do="""Leave the `with` block first. Save averages with `averaged.fp32_state_dict()`:
    [averages](averages.md).""",
    shown={"call": "MixedPrecisionOptimizer", "values": "averages, inside AveragedMasters.swap()"},
)

SPLIT_MASTER_WRITTEN = Refusal(
    key="split master written",
    kind=RuntimeError,
    heading="A split master was to be written",
    text="""{operation}: a split master was to be written, and there is no FP32 memory of it: it is the model's weight
    and a remainder. Write the model's weight and call refresh_masters(); or wrap with master_weights="full", whose
    masters can be written.""",
    what_happened="""A line writes `opt.master_params()`, or what `opt.param_groups` holds, with
    `master_weights="split"` or `"split24"`. A clamp, an average or Lookahead does so.""",
    what_to_do="""Write the model's weight under `torch.no_grad()`, and call `opt.refresh_masters()` after it. Or use
    `master_weights="full"`.""",
    shown={"operation": "mul_"},
)

MODEL_CONVERTED = Refusal(
    key="model converted",
    kind=RuntimeError,
    heading="A parameter's dtype, shape or device has changed",
    text="""parameter {name!r} had {what} {before} when the optimizer was wrapped and has {now} now. Convert or move the
    model first, then make the optimizer and wrap it.""",
    what_happened="`model.half()`, `model.float()` or `model.to(device)` was called after the optimizer was wrapped.",
    what_to_do="Convert and move the model first. Then make the optimizer, and wrap it.",
    shown={"name": "fc.weight", "what": "dtype", "before": "torch.float16", "now": "torch.float32"},
)

REPLACED = Refusal(
    key="replaced",
    kind=ValueError,
    heading="A parameter of the model was replaced",
    text="""{argument}: {name!r}, of shape {now}, is another tensor than the one of this optimizer, of shape {shape}: it
    was replaced after the optimizer was made, as where an embedding is resized, and the new one is not trained. Put it
    into opt.param_groups, in the place of the other's master; or make the optimizer anew over model.parameters(), and
    wrap it.""",
    what_happened="""`resize_token_embeddings`, a new head or a conversion has put another tensor under that name. The
    optimizer goes on with the old one, as every torch optimizer does. `take_delta(model)` notices it, and so does
    `fp16opt.distributed`, which names parameters by the model.""",
    what_to_do="""`opt.param_groups[0]["params"][0] = model.fc.weight`, at the place of the old one, gives the new
    parameter a master; its optimizer state begins anew. Copies of the model that apply deltas are resized too. Or make
    and wrap the optimizer anew.""",
    shown={"argument": "model", "name": "fc.weight", "now": (3, 4), "shape": (2, 4)},
)

DELETED = Refusal(
    key="deleted",
    kind=ValueError,
    heading="A parameter is not in the model",
    text="""{argument} has no parameter {name!r} of this optimizer, of shape {shape}. Pass the module that holds all
    parameters that it trains. If it was deleted there, as an adapter is, take it out of opt.param_groups; or make the
    optimizer anew over what is left, and wrap it.""",
    what_happened="""`take_delta(model)`, or a call of `fp16opt.distributed`, got a part of the model, or a parameter of
    the optimizer is gone from it: an adapter was deleted or merged, a head was taken away.""",
    what_to_do="""Give the whole module. For one that is gone: `group["params"] = [p for p in group["params"] if p is
    not master]`, where `zip(opt.model_params(), opt.master_params())` pairs them.""",
    shown={"argument": "model", "name": "fc.bias", "shape": (2,)},
)

ANOTHER_MODULE = Refusal(
    key="another module",
    kind=ValueError,
    heading="Another module than the one that is trained",
    text="""{argument}: none of its tensors is a parameter of this optimizer, which trains {name!r}, of shape {shape}.
    Pass the module that holds all parameters that it trains. If that is this one, and they were replaced since, make
    the optimizer anew over model.parameters(), and wrap it.""",
    what_happened="""`take_delta(model)`, or a call of `fp16opt.distributed`, got a copy, or a module that this
    optimizer does not train. Or all of its parameters were replaced: by a conversion, or by a trainer that made a new
    model.""",
    what_to_do="Give the module whose parameters were handed to the optimizer.",
    shown={"argument": "model", "name": "fc.weight", "shape": (2, 4)},
)

EPS = Line(
    key="eps",
    level=logging.WARNING,
    heading="eps is 0 in FP16",
    text="""master_weights="none", group {group}: eps={eps:g} is 0 in FP16, in which these parameters are stepped: where
    a gradient is 0 the update is 0/0, and the weight becomes nan. Use eps=1e-4 or more, or masters.""",
    what_happened="""Without masters an optimizer computes in the weights' dtype, and the smallest number of FP16 is
    6e-8.""",
    what_to_do='Give the optimizer `eps=1e-4`; or leave `master_weights="none"` out.',
    shown={"group": 0, "eps": 1e-08},
)

GRADIENTS_LOST = (
    ": in this step {zero} of {elements} elements are 0, and {subnormal} more are under {tiny:.1e}, where FP16 loses "
    "digits"
)
BACKWARD_BY = ", and {call} in place of loss.backward()"
TRAINERS_HAVE_MODULES = " (trainers that call it themselves have a module in fp16opt.integrations)"

NO_SCALE = Line(
    key="no scale",
    level=logging.WARNING,
    heading="FP16 weights without a loss scale",
    text="""FP16 weights are trained without loss scaling: {names}. Small gradients underflow{lost}. Write
    {way_out}{calls}; or {meant} to say that this is meant.""",
    what_happened="""None of `dynamic`, `loss_scale` and `scaler` was given, and no GradScaler drives the optimizer: the
    loss scale is 1. FP16 gradients under 3e-8 (2^-25) are 0 then, and those under 6.1e-5 have fewer digits. The line
    comes once, at the first step, whichever way `backward` was called, and counts what that step's gradients have lost.
    A run that goes on so may look healthy and end with a worse loss.""",
    what_to_do="""Construct with `dynamic=True` and call `opt.backward(loss)`. In a trainer that calls `backward` itself
    use its module in `fp16opt.integrations`. Where a scale of 1 is meant, write `loss_scale=1.0`. The message
    has the words of what you use: by `amp.initialize` it names `loss_scale="dynamic"`, in Accelerate, transformers,
    Lightning, Fabric and timm the argument of their module.""",
    shown={
        "names": "fc.weight, fc.bias",
        "lost": GRADIENTS_LOST.format(zero=0, elements=10, subnormal=10, tiny=6.1e-5),
        "way_out": "MixedPrecisionOptimizer(optimizer, dynamic=True)",
        "calls": "",
        "meant": "loss_scale=1.0",
    },
)

HALVES_OUTSIDE_OF_STATE = Line(
    key="halves outside of state",
    level=logging.WARNING,
    heading="16-bit tensors that an optimizer keeps beside its state",
    text="""{optimizer} keeps 16-bit tensors outside of its state: {names}. They stay as they are: if they are more than
    buffers of a step, what is computed with them is rounded. Keep them in state[p], or make them FP32.""",
    what_happened="""The class of the optimizer keeps 16-bit tensors in attributes of its own. Copies of parameters, as
    Lookahead's slow weights, become FP32 where the optimizer is wrapped. These have another shape than any parameter,
    so that nothing tells what they are for.""",
    what_to_do="""Nothing where they are scratch memory that each step writes anew, as Muon's buffer is. Where they live
    on from step to step, have the class keep them in `state[p]`, which is FP32, or make them FP32.
    [`fp16opt.certify`](certify.md) tries the class.""",
    shown={"optimizer": "Buffered", "names": "flat"},
)

NOT_IN_ONE_PASS = Line(
    key="not in one pass",
    level=logging.WARNING,
    heading="The optimizer no longer steps in one pass",
    text="the wrapped optimizer steps itself from here on, and not in one pass: {reason}.",
    what_happened="""A setting that the one-pass step does not know was given to a group, after steps that took one
    pass. The numbers are right: torch's own code steps from now on, with some more passes over memory.""",
    what_to_do="""Nothing; or take the setting back. `fused_step=False` has the wrapped optimizer step by itself from
    the start.""",
    shown={"reason": "group 0 has differentiable=True"},
)

NO_GRADIENTS = Line(
    key="no gradients",
    level=logging.WARNING,
    heading="backward gave no gradient",
    text="""backward gave no gradient to any parameter of this optimizer: {names}. If the model's parameters were
    replaced after the optimizer was made, make and wrap the optimizer anew.""",
    what_happened="""The loss does not depend on the parameters of this optimizer. Mostly the model was replaced, moved
    or wrapped in a way that made new parameters.""",
    what_to_do="Make and wrap the optimizer over the parameters of the model that computes the loss.",
    shown={"names": "fc.weight, fc.bias"},
)

OTHER_PARAMETERS = Refusal(
    key="other parameters",
    kind=RuntimeError,
    heading="The model has other parameters",
    text="""the model has other parameters by now, with gradients, in the place of {count} that this optimizer steps,
    which have none: {names}. fully_shard, parallelize_module, to_empty and some conversions replace parameters. Make
    the optimizer after them, over model.parameters(), and wrap it then.""",
    what_happened="""The optimizer was made too early. The parameters that it has belong to no module any more, and
    would get no gradient in a whole run. The first step finds that.""",
    what_to_do="Shard, move or convert the model first, then make the optimizer and wrap it.",
    shown={"count": 2, "names": "fc.weight, fc.bias"},
)

SUMS_WITHOUT_BACKWARD = Line(
    key="sums without backward",
    level=logging.WARNING,
    heading='grad_accumulation="fp32" without opt.backward(loss)',
    text="""grad_accumulation="fp32" has no effect: gradients came by a plain loss.backward(), which adds up
    micro-batches in 16 bits. Use backward(loss) of this optimizer, or fp16opt.integrations in a trainer.""",
    what_happened="Gradients came by a plain `loss.backward()`. Torch adds them up in 16 bits.",
    what_to_do="""Call `opt.backward(loss)`. In a trainer use its module in `fp16opt.integrations`. Or leave
    `grad_accumulation` out.""",
)

TOO_LARGE = Line(
    key="too large",
    level=logging.WARNING,
    heading="Masters that are too large for FP16",
    text="FP32 masters are too large for their 16-bit parameters, which became inf: {names}.",
    what_happened="An FP32 master is beyond 65504, and its FP16 weight became inf. The next loss will not be finite.",
    what_to_do="Train with a lower learning rate, clip, or keep the named layer in FP32 or BF16.",
    shown={"names": "fc.weight, fc.bias"},
)

NOT_FINITE = Line(
    key="not finite",
    level=logging.WARNING,
    heading="Masters that are not finite",
    text="FP32 masters hold inf or nan: {names}.",
    what_happened="""A step wrote inf or nan into masters. Gradients were finite, so the optimizer's own arithmetic did
    it, or other code wrote them.""",
    what_to_do="Go back to a checkpoint. Look at `eps`, the learning rate and code that writes `opt.master_params()`.",
    shown={"names": "fc.weight, fc.bias"},
)

# -- Stopped steps -----------------------------------------------------------------------------------------------------

STOPPED_STEPS = Chapter(
    heading="Stopped steps",
    words="""Ctrl-C, a signal, a timer or an error of a hook may stop `step()` anywhere. The engine finishes what it
    can: [a step is whole, or known not to be](engine.md#a-step-is-whole-or-known-not-to-be).""",
)

STEP_STOPPED = Line(
    key="step stopped",
    level=logging.WARNING,
    heading="A step was stopped in the middle",
    text="""an exception has stopped a step in the middle: some parameters may have been stepped and others not, and the
    loss scale may not have followed. The model holds the masters as they are, and the step counts. To be exact, load
    the last checkpoint.""",
    what_happened="""The exception came when the step had begun to write, or to count, and wasn't done. The engine does
    not find out which parameters were stepped. A class of your own that raises in the first line of its `step` counts
    too: the engine can't see that it has written nothing.""",
    what_to_do="""Load the last checkpoint. Going on is possible: the model, the masters and the count agree, and one
    update that some parameters lack is often no harm.""",
)

WITHIN_A_STEP = Refusal(
    key="within a step",
    kind=RuntimeError,
    heading="A call within a step",
    text="""{call} was called within a step of this optimizer, by a hook of it, a signal handler or another thread: it
    would see some parameters from before the step and others from after it. Call it after step(): set a flag in the
    handler.""",
    what_happened="""While `step()` runs, masters, state and model hold values of before and of after it. So what
    saves, copies, loads, clips, takes a delta, runs a backward or steps is refused there. Reading `param_groups`,
    `state` and `master_params()`, `zero_grad()` and `write_masters()` are not.""",
    what_to_do="""In a signal handler set a flag, and save where the loop finds it set, after `step()`. A thread that
    saves gets a copy that the loop makes between steps: [within a step](engine.md#within-a-step) has both. A hook of
    the wrapped optimizer that saves is registered on the wrapper instead, by `opt.register_step_post_hook`: that one
    runs when the step is over.""",
    shown={"call": "state_dict"},
)

UNSCALED_AFTER_A_STOP = Refusal(
    key="unscaled after a stop",
    kind=RuntimeError,
    heading="unscale_ after a step that was stopped",
    text="""unscale_ was called after a step that an exception has stopped, and that step had unscaled these gradients.
    Call scaler.step(optimizer) again, or give the step up by opt.zero_grad().""",
    what_happened="""An exception stopped `scaler.step(opt)` before any parameter was stepped. By then the wrapper had
    divided the masters' gradients by the GradScaler's scale, and could not make them anew: they are FP32 sums, or were
    edited before the step. A `scaler.unscale_(opt)` now would divide them a second time.""",
    what_to_do="Call `scaler.step(opt)` again without `unscale_`; or call `opt.zero_grad()` and begin the step anew.",
)

# -- Skipped steps -----------------------------------------------------------------------------------------------------

SKIPPED_STEPS = Chapter(
    heading="Skipped steps",
    words="""A step whose gradients are not finite is skipped: weights and state stay. Each skip is one line. [Reading a
    run](reading-a-run.md) has more.""",
)

CALIBRATING = Line(
    key="calibrating",
    level=logging.INFO,
    heading="Calibrating",
    text="""calibrating the loss scale: step skipped, the scale is now {scale:g}. The first steps of a dynamic scaler
    are expected to overflow.""",
    what_happened="""A dynamic scaler finds its scale by overflowing. A skip is called so until ten steps were taken.
    The line is of level INFO.""",
    what_to_do="Nothing. A few such skips at the start are normal.",
    shown={"scale": 32768.0},
)

RARE = Line(
    key="rare",
    level=logging.WARNING,
    heading="A rare overflow",
    text="step skipped, loss scale {change}: a rare overflow, non-finite gradients in {where}.",
    what_happened="One step overflowed, and the scale was lowered.",
    what_to_do="Nothing, if it comes every few thousand steps. The names say where to look if it comes more often.",
    shown={"change": "1024 -> 512", "where": "fc.weight (inf), fc.bias (inf)"},
)

ONLY_GRADIENTS = "the loss is finite and gradients are not"
GRADIENTS = "gradients are not finite"

IN_A_ROW = Line(
    key="in a row",
    level=logging.WARNING,
    heading="Several overflows in a row",
    text="""{what}, {times} times in a row: step skipped, loss scale {change}, non-finite gradients in {where}. See
    fp16opt.diagnose(model, loss_fn, optimizer): it says where they overflow, and at which scale they would not.""",
    what_happened="Three steps or more in a row were skipped. The line comes at the 3rd, 4th, 8th, 16th.",
    what_to_do="""Call `print(fp16opt.diagnose(model, loss_fn, optimizer))`. It says where gradients overflow, and at
    which scale they would not.""",
    shown={
        "what": ONLY_GRADIENTS,
        "times": 3,
        "change": "256 -> 128",
        "where": "fc.weight (inf), fc.bias (inf)",
    },
)

LOOK_AT_THE_DATA = "Look for inf or nan in the data{there}, or see fp16opt.diagnose(model, loss_fn)."
ON_THOSE_RANKS = " there, and in the weights, which the logs of their ranks name"
LOSS_IN_FP16 = "The loss is FP16, which ends at 65504: compute it in FP32, with .float() on the model's outputs."
MAY_FIT_A_LOWER_SCALE = (
    "A part of it that was scaled may be finite at a lower scale. If this goes on, look for inf or nan in the "
    "data{there}, or see fp16opt.diagnose(model, loss_fn)."
)
BAD_WEIGHTS = (
    "Weights hold inf or nan: {names}. An earlier step, or a checkpoint, has brought it there: load one from before."
)
NO_SCALE_CAN_HELP = ", so that no loss scale can help"

LOSS_NOT_FINITE = Line(
    key="loss not finite",
    level=logging.WARNING,
    heading="The loss itself is not finite",
    text="""step skipped, loss scale {change}: the loss itself is not finite{ranks} ({times} in a row){hopeless};
    non-finite gradients in {where}. {advice}""",
    what_happened="The loss was inf or nan before any scale was applied.",
    what_to_do="""Look at the batch, at the learning rate, and at a loss that is summed in FP16: write `logits.float()`
    before it.""",
    shown={
        "change": "65536 -> 32768",
        "ranks": "",
        "times": 1,
        "hopeless": "",
        "where": "fc.weight (inf), fc.bias (inf)",
        "advice": MAY_FIT_A_LOWER_SCALE.format(there=""),
    },
)

WEIGHTS_NOT_FINITE = Line(
    key="weights not finite",
    level=logging.WARNING,
    heading="The loss is not finite because weights are not",
    text=LOSS_NOT_FINITE.text,
    what_happened="""A weight is inf or nan, so that every loss is. With `master_weights="none"` it is mostly `eps`,
    which is 0 in FP16.""",
    what_to_do="Go back to a checkpoint. Look at `eps`, the learning rate, and code that writes weights.",
    shown={
        "change": "65536 -> 32768",
        "ranks": "",
        "times": 1,
        "hopeless": NO_SCALE_CAN_HELP,
        "where": "fc.weight (nan), fc.bias (nan)",
        "advice": BAD_WEIGHTS.format(names="fc.weight"),
    },
)

SKIPPED = "step skipped"
LEFT_ALONE = "parameters left alone while the others were stepped"
LOWER_OR_DYNAMIC = "Use a lower scale or dynamic=True."
LOWER = "Use a lower scale."

STATIC = Line(
    key="static",
    level=logging.WARNING,
    heading="Skipped at a static scale",
    text="{what}, static loss scale {scale:g} ({times} so far): non-finite gradients in {where}. {advice}",
    what_happened="""The gradients overflow at the scale that you gave, which never moves. The line comes at the 1st,
    2nd, 4th, 8th skip.""",
    what_to_do="Use `dynamic=True`, or a lower `loss_scale`.",
    shown={
        "what": SKIPPED,
        "scale": 1024.0,
        "times": 1,
        "where": "fc.weight (inf), fc.bias (inf)",
        "advice": LOWER_OR_DYNAMIC,
    },
)

FLOOR = Line(
    key="floor",
    level=logging.ERROR,
    heading="Skipped at the lowest scale",
    text="""step skipped at the lowest loss scale, {scale:g} ({times} so far): non-finite gradients in {where}. Look for
    inf or nan in the loss or the data, or give DynamicLossScaler a lower min_scale.""",
    what_happened="""The scale can't go lower than `min_scale`, and gradients still overflow. Every further step will be
    skipped.""",
    what_to_do="""Look for inf or nan in the loss and the data with `fp16opt.diagnose`. A lower `min_scale` helps only
    where the loss is very large.""",
    shown={"scale": 1.0, "times": 1, "where": "fc.weight (inf), fc.bias (inf)"},
)

UNDER_A_GRAD_SCALER = Line(
    key="under a GradScaler",
    level=logging.WARNING,
    heading="Skipped by a GradScaler",
    text="step skipped by the GradScaler: non-finite gradients in {where}.",
    what_happened="The GradScaler found a gradient that is not finite, and lowers its own scale.",
    what_to_do="As for the lines above: nothing where it is rare.",
    shown={"where": "fc.weight (inf), fc.bias (inf)"},
)

TOO_MANY_IN_A_ROW = Refusal(
    key="too many in a row",
    kind=LossScaleError,
    heading="max_consecutive_skips",
    text="""{times} steps in a row had non-finite gradients (max_consecutive_skips={limit}); the loss scale is
    {scale:g}. Last in: {where}. Lowering the scale did not help: look for inf or nan in the loss and in the data.""",
    what_happened="`max_consecutive_skips` steps in a row were skipped. The error is an `fp16opt.LossScaleError`.",
    what_to_do="""Look at the named parameters, the loss and the data. `fp16opt.diagnose(model, loss_fn, optimizer)`
    tries scales.""",
    shown={"times": 2, "limit": 2, "scale": 256.0, "where": "fc.weight (inf), fc.bias (inf)"},
)

# -- In trainers -------------------------------------------------------------------------------------------------------

IN_TRAINERS = Chapter(
    heading="In trainers",
)

PREPARED_WITHOUT_MASTERS = Line(
    key="prepared without masters",
    level=logging.WARNING,
    heading="FP16 weights were prepared without masters",
    text="""an optimizer that steps FP16 weights was prepared, and master_weights was not given: small updates are lost,
    and the loss is not scaled. Write Accelerator(master_weights={{"dynamic": True}}).""",
    what_happened="""`fp16opt.integrations.accelerate.Accelerator` was made without `master_weights`, and is
    Accelerate's own then: the optimizer steps FP16 weights themselves.""",
    what_to_do='Give `master_weights={"dynamic": True}`. [Accelerate](accelerate.md) has a whole loop.',
)

HALVES_UNDER_BF16 = Line(
    key="halves under BF16",
    level=logging.WARNING,
    heading="FP16 weights under BF16 autocast",
    text="""FP16 weights run under BF16 autocast (bf16=True, which TRL's configs have by default, or
    mixed_precision="bf16"): every product casts them to BF16 and loses 3 of their 11 bits. Write bf16=False: 16-bit
    weights need no autocast. Or load the model in BF16.""",
    what_happened="The model was loaded in FP16, and the trainer's arguments ask for BF16 autocast.",
    what_to_do="Write `bf16=False`, in TRL's configs too; or load the model with `dtype=torch.bfloat16`.",
)

MIXIN_BEHIND = Refusal(
    key="mixin behind",
    kind=TypeError,
    heading="The mixin stands behind its Trainer",
    text="""{mine}: MasterWeightsMixin stands behind {trainer}, and would change nothing. Write class
    {mine}(MasterWeightsMixin, {trainer}).""",
    what_happened="""Python takes a method from the first base class that has it. Behind the Trainer the mixin's are
    never called.""",
    what_to_do="Name the mixin first: `class Tuning(MasterWeightsMixin, SFTTrainer)`.",
    shown={"mine": "Tuning", "trainer": "Trainer"},
)


# -- On several ranks --------------------------------------------------------------------------------------------------

ON_SEVERAL_RANKS = Chapter(
    heading="On several ranks",
    words="",
)

NOTHING_WAS_STEPPED = "Nothing was clipped or stepped by this call"
STEPPED_BEFORE = "The step before was taken so: load the last checkpoint"
MAY_DIFFER = "Weights may differ by now: the last checkpoint's are alike"

SETTINGS_DRIFTED = Refusal(
    key="settings drifted",
    kind=RuntimeError,
    heading="Settings drifted apart",
    text="""settings drifted apart: rank {first} has {one}, rank {rank} has {other}. {when}. Change settings alike on
    every rank: a scheduler must go by numbers that all ranks have, such as the step, or a loss that was averaged over
    the ranks.""",
    what_happened="""Masters are spread over ranks, and two ranks would step their parts by different settings. Every
    rank raises this. Mostly a scheduler goes by the rank's own loss, as `ReduceLROnPlateau` does.""",
    what_to_do="""Average the loss over the ranks before the scheduler gets it. After a change that all ranks make, call
    `step()` again.""",
    shown={
        "first": 0,
        "one": "group 0 with lr=0.1",
        "rank": 1,
        "other": "group 0 with lr=0.01",
        "when": NOTHING_WAS_STEPPED,
    },
)

ANOTHER_ORDER = Refusal(
    key="another order",
    kind=RuntimeError,
    heading="Ranks called in another order",
    text="""ranks called in another order: rank 0 has come to {one}, rank {rank} to {other}. {when}. Call
    clip_master_grads, with one max_norm and norm_type, and step alike on every rank, also where a rank has no
    gradients.""",
    what_happened="A clip or a step stands under a condition that holds on some ranks only, or `max_norm` differs.",
    what_to_do="""Have every rank make the same calls: conditions must go by what all ranks know. A rank without data of
    its own calls `backward` on a loss times 0.""",
    shown={
        "one": "clip_master_grads(1, norm_type=2)",
        "rank": 1,
        "other": "step()",
        "when": NOTHING_WAS_STEPPED,
    },
)

SAME_CALLS = "Every rank must make the same calls in the same order; put no `if rank == 0:` around save, load or step."

SAVED_BY_ONE = Refusal(
    key="saved by one",
    kind=RuntimeError,
    heading="A call that not all ranks make",
    text="{call} was not called by all ranks within {time}: {late}. " + SAME_CALLS,
    what_happened="""`save`, `load`, `attach`, a step or a forward waited for a rank that made another call, until the
    time-out of `init_process_group`. Where that rank says so, the message tells which call it is in.""",
    what_to_do="""Have every rank call `distributed.save`: rank 0 has only a part of the masters, and each rank writes
    its own. Under DDP too, as ranks wait for each other there.""",
    shown={"call": "save('step100')", "time": "1 s", "late": "rank 1 is in a forward of the model"},
)

# -- Calling fp16opt.check ---------------------------------------------------------------------------------------------

CALLING_CHECK = Chapter(
    heading="Calling fp16opt.check",
    words="What [the check](check.md) finds is in its report; these are the calls that it refuses.",
)

CHECK_ON_MANY_RANKS = Refusal(
    key="check on many ranks",
    kind=RuntimeError,
    heading="A check in a training of several processes",
    text="""fp16opt.check was called in a training of several processes, whose steps it can't take alone. Check the
    model in one process, before it is given to DistributedDataParallel or fully_shard; fp16opt.diagnose works on
    several.""",
    what_happened="""`torch.distributed` is initialised with more than one process. The check steps a copy of the
    optimizer, and there is no copy of the others' shards.""",
    what_to_do="Run it in a program of one process, with the same model and batch, smaller if need be.",
)

CHECK_OF_RELEASED_GRADIENTS = Refusal(
    key="check of released gradients",
    kind=ValueError,
    heading="A check of released gradients",
    text="""optimizer: gradient_release=True steps parameters in every backward, and leaves no gradient to look at.
    Check the same model with an optimizer that was made without it.""",
    what_happened="With `gradient_release=True` each backward of the model steps the optimizer, a trial's too.",
    what_to_do="Make a second optimizer with `gradient_release=False` for the check.",
)

CHECK_OF_APEX_O1 = Refusal(
    key="check of apex's O1",
    kind=TypeError,
    heading="A check of apex's optimizers without masters",
    text="""optimizer: amp.initialize has made this {optimizer}, at a level without master weights, and its scale is
    amp's. Check model and optimizer before amp.initialize, or at O2.""",
    what_happened="At O0, O1 and O3 `fp16opt.amp` keeps your optimizer and scales by itself, around `amp.scale_loss`.",
    what_to_do="Check before `amp.initialize`, with the model in the dtype that it will have.",
    shown={"optimizer": "SGD"},
)

CHECK_OF_WHAT_CANNOT_BE_COPIED = Refusal(
    key="check of what can't be copied",
    kind=TypeError,
    heading="An optimizer that can't be copied",
    text="""optimizer: no copy of this {optimizer} could be made ({error}), and the check trains with a copy. Leave the
    optimizer out, and say lr=.""",
    what_happened="The class keeps something that Python can't copy, such as a lock or an open file.",
    what_to_do="`fp16opt.check(model, loss_fn, lr=...)` takes AdamW in its place.",
    shown={"optimizer": "Uncopied", "error": "TypeError: cannot pickle '_thread.lock' object"},
)

CHECK_OF_A_CLOSURE = Refusal(
    key="check of a closure",
    kind=TypeError,
    heading="An optimizer that needs a closure",
    text="""optimizer: {optimizer}.step() raised {error}. One that evaluates a closure itself, as SAM does, is checked
    as MixedPrecisionOptimizer(optimizer, closure="reevaluate").""",
    what_happened="""The class calls the closure that it is given, and the check steps without one; it knows of LBFGS by
    itself.""",
    what_to_do="Wrap the optimizer as for the training, and give that to the check.",
    shown={"optimizer": "SAM", "error": "TypeError: 'NoneType' object is not callable"},
)

CHECK_OF_A_LOOP_ALONE = Refusal(
    key="check of a loop alone",
    kind=TypeError,
    heading="A round of a loop without its optimizer",
    text="train_step: expected the optimizer that it steps, too, got none. Give it as optimizer=.",
    what_happened="The check puts back what `train_step` moves, and can't know of an optimizer that it was not given.",
    what_to_do="`fp16opt.check(model, loss_fn, optimizer, train_step=train_step)`.",
)
