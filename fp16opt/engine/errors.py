"""The messages of docs/errors.md: what is raised where calls come in the wrong order, what is logged.

Where it is raised or logged, a row gets what is known there::

    raise errors.MODEL_WRITTEN(names=describe(names))
    lines.tell(errors.NO_GRADIENTS, names=describe(names), once=True)

A line break in a text is a space. A sentence that not every message of a row has is a string of its own, above the row.
What happened and what to do about it is told by docs/errors.md; a test keeps its sections and these rows equal, and
provokes each. What refuses an argument is not here, but where the argument is checked.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ..scaling import LossScaleError


@dataclass(eq=False, repr=False)
class Message:
    """One message.

    Attributes:
        key: what it is called in ``<!-- message: KEY -->`` of the page, and in the tests.
        kind: the class of the exception or warning; of a line that is logged its level, where the call says no other.
        text: with places for what is known where it comes, as :meth:`str.format` fills them in.
    """

    key: str
    kind: Any
    text: str

    def filled(self, **known: object) -> str:
        """The message whole, in one line."""
        return " ".join(self.text.split()).format(**known)


class Refusal(Message):
    """One that is raised, or given to ``warnings.warn``."""

    def __call__(self, **known: object) -> Exception:
        """The exception, with its message."""
        made: Exception = self.kind(self.filled(**known))
        return made


class Line(Message):
    """One that is logged."""


# -- Gradients between backward and step -------------------------------------------------------------------------------

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

WRITTEN = Refusal(
    "written",
    RuntimeError,
    "the model's gradients were written after {since}: {names}. " + _HOW_TO_WRITE,
)

FOLDED = Refusal(
    "folded",
    RuntimeError,
    """the model's gradients were folded into FP32 sums, and can be neither read nor written{name}. The sums are
    the gradients of opt.master_params(). To clip, call opt.clip_master_grads(max_norm) in place of
    clip_grad_norm_(model.parameters()). For a log, read opt.stats(). To have a backward count, run it by backward(loss)
    of this optimizer; a gradient that came otherwise is in no sum: set it to None. To give the step up, call
    opt.zero_grad().""",
)

TRAINERS_HAVE_MODULES = " (trainers that call it themselves have a module in fp16opt.integrations)"

NOT_OF_THIS_STEP = Refusal(
    "not of this step",
    RuntimeError,
    """gradients were found that opt.backward(loss) of this optimizer did not make for this step, and its loss scale is
    {scale:g}: {names}. Call zero_grad() after each step, then opt.backward(loss) in place of loss.backward()"""
    + TRAINERS_HAVE_MODULES
    + """. Where one loss serves several optimizers, make them with the same scaler, and call update_master_grads() of
    this one after that backward.""",
)

NOT_CLEARED = Refusal(
    "not cleared",
    RuntimeError,
    """gradients are there that this backward would add to, and no backward of this step has made them: {names}. Call
    zero_grad() after each step, also after a skipped one. Where another optimizer's backward left them, clear them; or,
    where both have one scaler, call update_master_grads() of this one after that backward.""",
)

UNDONE = Refusal(
    "undone",
    RuntimeError,
    """{call} was called after {what}, which it would undo. Do so after the last backward of a step: unscale_ there, and
    clip opt.master_params() then; or call step() or opt.zero_grad() first.""",
)

EDITED = "master gradients were clipped or edited"
UNSCALED = "a GradScaler has unscaled this step's gradients"

INTERRUPTED = Refusal(
    "interrupted",
    RuntimeError,
    """a backward was interrupted while gradients were being added up, so they are incomplete. Call zero_grad() and
    do the step's backwards again.""",
)

MASTER_GRADIENT_SET = Refusal(
    "master gradient set",
    RuntimeError,
    """a master's gradient was set while none wait for a step, and the loss scale is {scale:g}. To compute
    gradients yourself, run torch.autograd.grad on opt.scale_loss(loss), set the model's gradients, and call
    update_master_grads(); then edit.""",
)

SCALE_SET = Refusal(
    "scale set",
    RuntimeError,
    """loss_scale was set between backward and step: gradients made with the old scale would be unscaled wrongly.
    Set it after step() or zero_grad().""",
)

GROUPS_CHANGED = Refusal(
    "groups changed",
    RuntimeError,
    """param_groups were changed between a check of this step's gradients (a clip, update_master_grads(), a read of
    a master's .grad; FP32 sums of them) and its step. Put them back as they were; or give the step up by
    opt.zero_grad(). Change groups before the first backward of a step, or after the step.""",
)

NO_SYNC = Refusal(
    "no_sync",
    RuntimeError,
    """the gradients were made under DDP's no_sync and are this rank's own. Run the last backward of a step outside
    of no_sync, or use grad_accumulation="fp32", which averages what is left.""",
)

SUMS_IN_A_GROUP = Refusal(
    "sums in a group",
    RuntimeError,
    """gradients are to be folded into FP32 (grad_accumulation="fp32", or several loss scales in one step) in a
    process group of {ranks} ranks: under DDP's no_sync the ranks would drift apart. Call
    fp16opt.distributed.attach(opt, ddp_model); or attach(opt, None), if ranks don't share gradients.""",
)

# -- With a GradScaler -------------------------------------------------------------------------------------------------

TWO_SCALES = Refusal(
    "two scales",
    RuntimeError,
    """a GradScaler came to unscale gradients by its own scale, and this optimizer has a loss scale of {scale:g}{made}.
    Drop one of the two: call opt.backward(loss) and opt.step() without a GradScaler; or construct
    MixedPrecisionOptimizer without dynamic, loss_scale, scaler, and call scaler.scale(loss).backward().""",
)

MADE_HERE = ", at which opt.backward(loss) made them"

CLIPPED_THE_MODEL = Refusal(
    "clipped the model",
    RuntimeError,
    """the model's gradients were written after unscale_: {names}. They are not read again before the step. Clip
    opt.master_params(), after unscale_; or give the step up by opt.zero_grad(), which model.zero_grad() does not do
    after a clip. """
    + _TRAINERS_THAT_CLIP
    + " Without a GradScaler, update_master_grads() has edits count.",
)

NEVER_WRAPPED = Refusal(
    "never wrapped",
    ValueError,
    """Attempting to unscale FP16 gradients. FP16 weights that are stepped without FP32 masters lose every update
    smaller than half a unit in the last place: {names}. Write optimizer = fp16opt.MixedPrecisionOptimizer(optimizer)
    after making it, or GradScaler(allow_16bit_weights=True) to step them as they are.""",
)

HALVES_UNDER_A_GRAD_SCALER = Refusal(
    "halves under a GradScaler",
    UserWarning,
    """parameters in 16 bits are stepped without FP32 masters: {names}. Updates smaller than half a unit in the
    last place are lost. Wrap the optimizer in fp16opt.MixedPrecisionOptimizer.""",
)

NO_GRADIENTS_UNDER_A_GRAD_SCALER = Refusal(
    "no gradients under a GradScaler",
    UserWarning,
    """no parameter of {optimizer} has a gradient, so this step does nothing and the scale stays. Does the loss
    depend on them, and was the model moved or replaced after the optimizer was made?""",
)


# -- The wrapped optimizer and the model -------------------------------------------------------------------------------


META = Refusal(
    "meta",
    ValueError,
    """{param}: expected a parameter with memory, got one on the meta device. Materialise the model first
    (to_empty, and its weights), then make the optimizer, then wrap it.""",
)

WRAPPED_TWICE = Refusal(
    "wrapped twice",
    TypeError,
    """optimizer: this {optimizer} is wrapped already, and holds the masters of its wrapper. Use that wrapper, or
    make the optimizer anew over model.parameters() and wrap it once.""",
)

BEHIND_THE_BACK = Refusal(
    "behind the back",
    RuntimeError,
    """{optimizer}.{method}() was called on an optimizer that {wrapper} wraps, behind its back: masters, gradients
    and the loss scale would not be seen to. Call opt.{method}() of the {wrapper} instead.""",
)

EVALUATED_TWICE = Refusal(
    "evaluated twice",
    RuntimeError,
    """the wrapped optimizer evaluates its closure more than once in a step, or after it has moved the weights, as
    SAM does. Construct MixedPrecisionOptimizer with closure="reevaluate"; or evaluate the loss yourself, call
    backward(loss), then step() without a closure.""",
)

MODEL_WRITTEN = Refusal(
    "model written",
    RuntimeError,
    """the model's weights were written behind the optimizer: {names}. Call refresh_masters() after writing to the
    model, or use on_model_write="refresh".""",
)

ALSO_IN_ANOTHER = (
    "Another optimizer, {others}, wraps them too: where both step them, each passes the other rounded weights. Train "
    'them by one optimizer, or keep master_weights="full" in both. '
)

MODEL_WRITTEN_AND_TAKEN = Line(
    "model written and taken",
    logging.WARNING,
    """model weights were written by something else than the optimizer; masters take the values: {names}{times}.
    {also}There is nothing to do after a load. To write in every step, as a clamp does, edit master_params() and call
    write_masters(). on_model_write="error" finds the place.""",
)

MODEL_SWAPPED = Refusal(
    "model swapped",
    RuntimeError,
    """{call} was called while the model holds {values}: masters and weights don't belong together. Leave the
    `with` block first.""",
)

SPLIT_MASTER_WRITTEN = Refusal(
    "split master written",
    RuntimeError,
    """{operation}: a split master was to be written, and there is no FP32 memory of it: it is the model's weight
    and a remainder. Write the model's weight and call refresh_masters(); or wrap with master_weights="full", whose
    masters can be written.""",
)

MODEL_CONVERTED = Refusal(
    "model converted",
    RuntimeError,
    """parameter {name!r} had {what} {before} when the optimizer was wrapped and has {now} now. Convert or move the
    model first, then make the optimizer and wrap it.""",
)

MEMORY_FREED = Refusal(
    "memory freed",
    RuntimeError,
    """parameter {name!r} has no memory: its storage was resized to 0. Give it its memory and its values back before any
    call of the optimizer.""",
)

NOT_IN_THE_MODEL = Refusal(
    "not in the model",
    ValueError,
    """{argument} {has} parameter {name!r} of this optimizer, of shape {shape}. Pass the module that holds all
    parameters that it trains. If it was replaced there, as where an embedding is resized, put the new one into
    opt.param_groups, in the place of the other's master; if it was deleted, as an adapter is, take it out of these. Or
    make the optimizer anew over model.parameters(), and wrap it.""",
)

HAS_ANOTHER = "has another tensor of that name, of shape {shape}, than"

EPS = Line(
    "eps",
    logging.WARNING,
    """master_weights="none", group {group}: eps={eps:g} is 0 in FP16, in which these parameters are stepped: where
    a gradient is 0 the update is 0/0, and the weight becomes nan. Use eps=1e-4 or more, or masters.""",
)

BACKWARD_BY = ", and {call} in place of loss.backward()"

NO_SCALE = Line(
    "no scale",
    logging.WARNING,
    """FP16 weights are trained without loss scaling: {names}. Small gradients underflow. Write
    {way_out}{calls}; or {meant} to say that this is meant.""",
)

HALVES_OUTSIDE_OF_STATE = Line(
    "halves outside of state",
    logging.WARNING,
    """{optimizer} keeps 16-bit tensors outside of its state: {names}. They stay as they are: if they are more than
    buffers of a step, what is computed with them is rounded. Keep them in state[p], or make them FP32.""",
)

NOT_IN_ONE_PASS = Line(
    "not in one pass",
    logging.WARNING,
    "the wrapped optimizer steps itself from here on, and not in one pass: {reason}.",
)

WROTE_GRADIENTS = "written the model's gradients, by which masters are not stepped"
MOVED_NOTHING = "moved no master"

GOES_ROUND = Line(
    "goes round",
    logging.WARNING,
    """three steps of {optimizer} in a row have {what}. It holds parameters elsewhere than in its param_groups, or works
    on the gradients of the model. Have it read p and p.grad of its param_groups in every step, or train with another
    optimizer. fp16opt.certify tries one.""",
)

NO_GRADIENTS = Line(
    "no gradients",
    logging.WARNING,
    """four steps in a row found no gradient of any parameter of this optimizer: {names}. Was it made before
    fully_shard, to_empty or a new layer? These replace parameters: make the optimizer after them, over
    model.parameters(), and wrap it then.""",
)

SUMS_WITHOUT_BACKWARD = Line(
    "sums without backward",
    logging.WARNING,
    """grad_accumulation="fp32" has no effect: gradients came by a plain loss.backward(), which adds up
    micro-batches in 16 bits. Use backward(loss) of this optimizer, or fp16opt.integrations in a trainer.""",
)

TOO_LARGE = Line(
    "too large",
    logging.WARNING,
    "FP32 masters are too large for their 16-bit parameters, which became inf: {names}.",
)

NOT_FINITE = Line(
    "not finite",
    logging.WARNING,
    "FP32 masters hold inf or nan: {names}.",
)

# -- Stopped steps -----------------------------------------------------------------------------------------------------

STEP_STOPPED = Line(
    "step stopped",
    logging.WARNING,
    """an exception has stopped a step in the middle: some parameters may have been stepped and others not, and the
    loss scale may not have followed. The model holds the masters as they are, and the step counts. To be exact, load
    the last checkpoint.""",
)

WITHIN_A_STEP = Refusal(
    "within a step",
    RuntimeError,
    """{call} was called within a step of this optimizer, by a hook of it, a signal handler or another thread: it
    would see some parameters from before the step and others from after it. Call it after step(): set a flag in the
    handler.""",
)

UNSCALED_AFTER_A_STOP = Refusal(
    "unscaled after a stop",
    RuntimeError,
    """unscale_ was called after a step that an exception has stopped, and that step had unscaled these gradients.
    Call scaler.step(optimizer) again, or give the step up by opt.zero_grad().""",
)

# -- Skipped steps -----------------------------------------------------------------------------------------------------


CALIBRATING = Line(
    "calibrating",
    logging.INFO,
    """calibrating the loss scale: step skipped, the scale is now {scale:g}. The first steps of a dynamic scaler
    are expected to overflow.""",
)

RARE = Line(
    "rare",
    logging.WARNING,
    "step skipped, loss scale {change}: a rare overflow, non-finite gradients in {where}.",
)

ONLY_GRADIENTS = "the loss is finite and gradients are not"
GRADIENTS = "gradients are not finite"

IN_A_ROW = Line(
    "in a row",
    logging.WARNING,
    """{what}, {times} times in a row: step skipped, loss scale {change}, non-finite gradients in {where}. See
    fp16opt.diagnose(model, loss_fn, optimizer): it says where they overflow, and at which scale they would not.""",
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
    "loss not finite",
    logging.WARNING,
    """step skipped, loss scale {change}: the loss itself is not finite{ranks} ({times} in a row){hopeless};
    non-finite gradients in {where}. {advice}""",
)

SKIPPED = "step skipped"
LEFT_ALONE = "parameters left alone while the others were stepped"
LOWER_OR_DYNAMIC = "Use a lower scale or dynamic=True."
LOWER = "Use a lower scale."

STATIC = Line(
    "static",
    logging.WARNING,
    "{what}, static loss scale {scale:g} ({times} so far): non-finite gradients in {where}. {advice}",
)

LOSSES = {
    True: "its loss was finite",
    False: "its loss was not finite",
    None: "whether its loss was finite isn't known",
}

BELOW_ONE = Line(
    "below one",
    logging.WARNING,
    """the loss scale has fallen below 1, to {scale:g}, by a step that was skipped; {losses}. The lower it is, the more
    of small FP16 gradients becomes 0. fp16opt.diagnose(model, loss_fn, optimizer) says where they overflow;
    DynamicLossScaler(min_scale=1.0) keeps the scale at 1.""",
)

FLOOR = Line(
    "floor",
    logging.ERROR,
    """step skipped at the lowest loss scale, {scale:g} ({times} so far): non-finite gradients in {where}. Look for
    inf or nan in the loss or the data, or give DynamicLossScaler a lower min_scale.""",
)

UNDER_A_GRAD_SCALER = Line(
    "under a GradScaler",
    logging.WARNING,
    "step skipped by the GradScaler: non-finite gradients in {where}.",
)

TOO_MANY_IN_A_ROW = Refusal(
    "too many in a row",
    LossScaleError,
    """{times} steps in a row had non-finite gradients (max_consecutive_skips={limit}); the loss scale is
    {scale:g}. Last in: {where}. Lowering the scale did not help: look for inf or nan in the loss and in the data.""",
)

# -- In trainers -------------------------------------------------------------------------------------------------------


PREPARED_WITHOUT_MASTERS = Line(
    "prepared without masters",
    logging.WARNING,
    """an optimizer that steps FP16 weights was prepared, and master_weights was not given: small updates are lost,
    and the loss is not scaled. Write Accelerator(master_weights={{"dynamic": True}}).""",
)

HALVES_UNDER_BF16 = Line(
    "halves under BF16",
    logging.WARNING,
    """FP16 weights run under BF16 autocast (bf16=True, which TRL's configs have by default, or
    mixed_precision="bf16"): every product casts them to BF16 and loses 3 of their 11 bits. Write bf16=False: 16-bit
    weights need no autocast. Or load the model in BF16.""",
)


# -- On several ranks --------------------------------------------------------------------------------------------------


NOTHING_WAS_STEPPED = "Nothing was clipped or stepped by this call"
STEPPED_BEFORE = "The step before was taken so: load the last checkpoint"
MAY_DIFFER = "Weights may differ by now: the last checkpoint's are alike"

SETTINGS_DRIFTED = Refusal(
    "settings drifted",
    RuntimeError,
    """settings drifted apart: rank {first} has {one}, rank {rank} has {other}. {when}. Change settings alike on
    every rank: a scheduler must go by numbers that all ranks have, such as the step, or a loss that was averaged over
    the ranks.""",
)

ANOTHER_ORDER = Refusal(
    "another order",
    RuntimeError,
    """ranks called in another order: rank 0 has come to {one}, rank {rank} to {other}. {when}. Call
    clip_master_grads, with one max_norm and norm_type, and step alike on every rank, also where a rank has no
    gradients. A rank that has left a step out is a step behind: load the last checkpoint.""",
)

NO_GRADIENTS_HERE = Refusal(
    "no gradients here",
    RuntimeError,
    """rank {rank} has come to {one}, without gradients, and rank {first} has some of the same parameters. {when}. Clear
    gradients and give steps up on all ranks alike; a rank without data of its own calls backward on a loss times 0.""",
)

SAME_CALLS = "Every rank must make the same calls in the same order; put no `if rank == 0:` around save, load or step."

SAVED_BY_ONE = Refusal(
    "saved by one",
    RuntimeError,
    "{call} was not called by all ranks within {time}: {late}. " + SAME_CALLS,
)

# -- State on the host -------------------------------------------------------------------------------------------------

OFFLOADED = Refusal(
    "offloaded",
    RuntimeError,
    "{call} needs what opt.offload() has brought to the host. Call opt.onload() before it.",
)

OFFLOAD_BETWEEN = Refusal(
    "offload between backward and step",
    RuntimeError,
    "opt.offload() was called between a backward and its step. Call it after step(), or give that up by zero_grad().",
)
