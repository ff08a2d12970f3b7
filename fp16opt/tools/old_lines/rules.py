"""Rows of docs/old-lines.md that can be told from a script's text, in the page's words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A row of the page.

    Attributes:
        row: what stands in the script, as the page has it.
        write: what to write.
        is_silent: whether nothing tells of the line while it runs.
    """

    row: str
    write: str
    is_silent: bool


BACKWARD = Rule("`loss.backward()`", "`opt.backward(loss)`", False)
CLIP = Rule(
    "`clip_grad_norm_(model.parameters(), 1.0)`, or",
    "`opt.clip_master_grads(1.0)`; for other edits `opt.update_master_grads()` after them",
    False,
)
CLIP_UNSCALED = Rule(
    "`clip_grad_norm_(model.parameters(), 1.0)` after `scaler", "`clip_grad_norm_(opt.master_params(), 1.0)`", False
)
CLIP_AMP = Rule(
    "`clip_grad_norm_(model.parameters(), 1.0)` after apex",
    "at O2 `clip_grad_norm_(amp.master_params(optimizer), 1.0)`, which serves every level",
    False,
)
SUMMED = Rule(
    "`clip_grad_norm_(model.parameters(), 1.0)`, `p.grad *= 0.25`",
    "`opt.clip_master_grads(1.0)`; edits go to `.grad` of `opt.master_params()`",
    False,
)
GRAD_READ = Rule(
    "`p.grad` of the model",
    '`opt.stats()["grad_norm"]` after a clip; or `.grad` of `opt.master_params()` before the step',
    True,
)
GRAD_DATA = Rule("`p.grad.data.clamp_(-1, 1)`", "`opt.clip_master_values(1.0)`", True)
GRAD_SET = Rule(
    "`p.grad = g`",
    "`torch.autograd.grad(opt.scale_loss(loss), ...)`, then `opt.update_master_grads()`",
    False,
)
HOOK = Rule(
    "`p.register_hook",
    "`opt.clip_master_values(1.0)` after the last backward; `grad / opt.loss_scale` to read",
    True,
)
DATA = Rule(
    "`p.data.clamp_",
    "`with torch.no_grad():` clamp each of `opt.master_params()`; then `opt.write_masters()`",
    True,
)
SCALER = Rule(
    "`scaler.scale(loss).backward()`",
    "drop one: `opt.backward(loss)` and `opt.step()`, or construct `opt` without `dynamic`, `loss_scale`, `scaler`",
    False,
)
SAVED = Rule("`torch.save(model", "`opt.fp32_state_dict(model)` for FP32", True)
AVERAGED = Rule("`AveragedModel(model)`", "[`AveragedMasters`](averages.md)", True)
GET_SCALE = Rule("`scale_before", "`opt.step_was_skipped`, `opt.skipped_steps`", True)
APEX = Rule(
    "`from apex",
    "run it with `python -m fp16opt.apex`, or `from fp16opt import amp`: [from apex](from-apex.md)",
    False,
)
RULES = (
    BACKWARD,
    CLIP,
    CLIP_UNSCALED,
    CLIP_AMP,
    SUMMED,
    GRAD_READ,
    GRAD_DATA,
    GRAD_SET,
    HOOK,
    DATA,
    SCALER,
    SAVED,
    AVERAGED,
    GET_SCALE,
    APEX,
)
