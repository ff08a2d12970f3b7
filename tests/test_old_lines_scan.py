"""``python -m fp16opt old-lines``: what it finds in scripts, line by line, and what it leaves alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fp16opt.__main__ import main
from fp16opt.tools import old_lines
from fp16opt.tools.old_lines import rules

PAGE = Path(__file__).resolve().parents[1] / "docs" / "old-lines.md"

OWN = "opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic=True)\n"
ONE = "opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
SUMS = ONE.replace("))", '), grad_accumulation="fp32")')

# Each line that ends in a comment of capitals is to be found, by that rule. No other is.
SCRIPTS = {
    "a plain loop": """
for batch in data:
    optimizer.zero_grad()
    loss.backward()  # BACKWARD
    total = torch.norm(torch.stack([p.grad.norm(2) for p in model.parameters()]))  # GRAD_READ
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # CLIP
    optimizer.step()
torch.save({"model": model.state_dict()}, "last.pt")  # SAVED
""",
    "backwards": OWN
    + """
from torch import autograd
loss.backward(retain_graph=True)  # BACKWARD
(loss / 4).backward()  # BACKWARD
loss.sum().backward(gradient=g)  # BACKWARD
out.backward(torch.ones_like(out))  # BACKWARD
torch.autograd.backward(loss)  # BACKWARD
torch.autograd.backward(tensors=[a, b])  # BACKWARD
autograd.backward([a, b], grads)  # BACKWARD
""",
    "backwards that scale": OWN
    + """
opt.backward(loss)
opt.backward(loss=loss, retain_graph=True)
opt.scale_loss(loss).backward()
(opt.scale_loss(loss) / 4).backward()
scaled = opt.scale_loss(loss)
scaled.backward()
torch.autograd.backward([opt.scale_loss(one), opt.scale_loss(other)])
accelerator.backward(loss)
self.manual_backward(loss)
model_engine.backward(loss)
self.backward()
super().backward()
with amp.scale_loss(loss, opt) as scaled_loss:
    scaled_loss.backward()
""",
    "clips": OWN
    + """
import timm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
clip_grad_norm_(model.parameters(), 1.0)  # CLIP
clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)  # CLIP
clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)  # CLIP
clip_grad_norm_(opt.model_params(), 1.0)  # CLIP
params = list(itertools.chain(actor.parameters(), critic.parameters()))
clip_grad_value_(params, 1.0)  # CLIP
nn.utils.clip_grads_with_norm_(params, 1.0, norm)  # CLIP
timm.utils.dispatch_clip_grad(model.parameters(), 1.0, mode="agc")  # CLIP
clip_grad_norm_(model.parameters(), 1.0)  # CLIP
opt.update_master_grads()
""",
    "clips of masters": OWN
    + """
from torch.nn.utils import clip_grad_norm_
clip_grad_norm_(opt.master_params(), 1.0)
params = list(opt.master_params())
clip_grad_norm_(params, 1.0)
clip_grad_norm_([p for p in opt.master_params() if p.grad is not None], 1.0)
clip_grad_norm_(opt.param_groups[0]["params"], 1.0)
for group in opt.param_groups:
    clip_grad_norm_(group["params"], 1.0)
class Trainer:
    def __init__(self):
        self.params = list(self.opt.master_params())
    def step(self):
        clip_grad_norm_(self.params, 1.0)
def clip(params):
    clip_grad_norm_(params, 1.0)
clip(opt.master_params())
opt.clip_master_grads(1.0)
accelerator.clip_grad_norm_(model.parameters(), 1.0)
scaler.clip_grad_norm_(opt, 1.0)
self.clip_gradients(opt, gradient_clip_val=1.0)
""",
    "edits of gradients": OWN
    + """
for p in model.parameters():
    p.grad *= 0.5  # CLIP
    p.grad.mul_(0.5)  # CLIP
    p.grad.detach().clamp_(-1, 1)  # CLIP
    p.grad[mask] = 0  # CLIP
    p.grad = p.grad.clamp(-1, 1)  # CLIP
    p.grad = p.grad / 4  # CLIP
    torch.clamp_(p.grad, -1, 1)  # CLIP
    p.grad, q.grad = g, h  # GRAD_SET
    p.grad = torch.autograd.grad(loss, p)[0]  # GRAD_SET
    p.grad: torch.Tensor = g  # GRAD_SET
torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)  # CLIP
model.fc.weight.grad[frozen] = 0  # CLIP
""",
    "edits of gradients' data": OWN
    + """
for name, p in model.named_parameters():
    p.grad.data.clamp_(-1, 1)  # GRAD_DATA
    p.grad.data += noise  # GRAD_DATA
    p.grad.data = p.grad.data.clamp(-1, 1)  # GRAD_DATA
    p.grad.data[rows] = p.grad[rows].clamp(-1, 1)  # GRAD_DATA
    p.grad.data.view(-1).clamp_(-1, 1)  # GRAD_DATA
    torch.clamp_(p.grad.data, -1, 1)  # GRAD_DATA
""",
    "edits that count": OWN
    + """
for p in model.parameters():
    p.grad = None
    p.grad.zero_()
    p.grad.data.zero_()
    p.grad.data /= 4
    p.grad.data[mask] = 0
    p.grad.data.copy_(averages[offset:].view_as(p) / world_size)
    dist.all_reduce(p.grad.data)
    p.grad = torch.zeros_like(p)
    p.grad *= 0.5
    p.grad.div_(4)
    p.grad = torch.autograd.grad(opt.scale_loss(loss), p)[0]
opt.update_master_grads()
for p in opt.master_params():
    p.grad *= 0.5
    p.grad.data.clamp_(-1, 1)
    p.grad = p.grad.clamp(-1, 1)
    norms.append(p.grad.norm())
for p, master in zip(opt.model_params(), opt.master_params()):
    master.grad.add_(p.float(), alpha=0.1)
for name, master in zip(names, opt.master_params()):
    print(name, master.grad.norm())
for group in optimizer.param_groups:
    for p in group["params"]:
        p.grad.data.add_(p.data, alpha=0.1)
        p.data[mask] = 0
if any(not torch.isfinite(p.grad).all() for p in model.parameters()):
    raise ValueError
g = torch.autograd.grad(loss, x)[0].norm()
penalty = torch.autograd.grad(out, x)[0].clamp_(0)
delta.grad.zero_()
step = delta.grad.norm()
self.grad = g
""",
    "reads of gradients": OWN
    + """
for p in model.parameters():
    total += p.grad.data.norm(2).item() ** 2  # GRAD_READ
    total += p.grad.detach().float().pow(2).sum()  # GRAD_READ
    mean = p.grad.abs().mean()  # GRAD_READ
norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])  # GRAD_READ
writer.add_scalar("norm", model.fc.weight.grad.norm())  # GRAD_READ
norm = torch.stack([p.grad.norm() for p in opt.master_params()]).norm()
""",
    "a scale of 1, by the optimizer": ONE
    + """
loss.backward()
opt.backward(loss)
p.grad.data.clamp_(-1, 1)
print(p.grad.norm())
p.register_hook(lambda grad: grad.clamp(-1, 1))
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # CLIP
""",
    "a scale of 1, by plain backwards": ONE
    + """
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
p.grad = g
opt.step()
""",
    "a scale of 1 that is written": ONE.replace("))", "), loss_scale=1.0, dynamic=False, scaler=None)")
    + """
loss.backward()
""",
    "settings from elsewhere": ONE.replace("))", "), **options)")
    + """
loss.backward()  # BACKWARD
""",
    "by class": """
import fp16opt.optim
opt = fp16opt.optim.AdamW(model.parameters(), dynamic=True)
loss.backward()  # BACKWARD
""",
    "FP32 sums": SUMS
    + """
opt.backward(loss)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # SUMMED
p.grad *= 0.25  # SUMMED
p.grad.data.clamp_(-1, 1)  # SUMMED
print(p.grad.norm())  # SUMMED
for p in opt.master_params():
    p.grad *= 0.25
""",
    "torch's GradScaler alone": """
import torch
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.AdamW(model.parameters())
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
for p in model.parameters():
    p.grad.data.clamp_(-1, 1)
    norms.append(p.grad.norm())
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scale = scaler.get_scale()
scaler.step(optimizer)
scaler.update()
skipped = scale > scaler.get_scale()
torch.save(model.state_dict(), "last.pt")
""",
    "torch's GradScaler of a wrapper": ONE
    + """
scaler = torch.amp.GradScaler("cuda")
scaler.scale(loss).backward()
scaled = scaler.scale(loss)
scaled.backward()
scaler.unscale_(opt)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # CLIP_UNSCALED
torch.nn.utils.clip_grad_norm_(opt.master_params(), 1.0)
p.grad.data.clamp_(-1, 1)  # GRAD_DATA
p.grad.data /= 4  # GRAD_DATA
skipped = scale > scaler.get_scale()
""",
    "two scales": OWN
    + """
scaler = GradScaler("cuda")
scaler.scale(loss).backward()  # SCALER
scaled = self.scaler.scale(loss)
scaled.backward()  # SCALER
skipped = scale > scaler.get_scale()  # GET_SCALE
""",
    "apex at O2": """
from apex import amp  # APEX
import apex.optimizers as ao  # APEX
model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # CLIP_AMP
torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
""",
    "amp at O1": """
from fp16opt import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
with amp.scale_loss(loss, optimizer) as loss:
    loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
p.grad.data.clamp_(-1, 1)
""",
    "hooks": OWN
    + """
def clamps(grad):
    return grad.clamp(-1, 1)
def masks(grad):
    return grad * mask
for p in model.parameters():
    p.register_hook(lambda grad: grad.clamp(-1, 1))  # HOOK
    p.register_hook(clamps)  # HOOK
    p.register_hook(functools.partial(clamps))  # HOOK
    p.register_hook(Clamp())  # HOOK
    p.register_hook(lambda grad: norms.append(grad))  # HOOK
    p.register_post_accumulate_grad_hook(Release())  # HOOK
    p.register_hook(lambda grad: grad * mask)
    p.register_hook(masks)
    p.register_hook(lambda grad: -grad)
features.register_hook(lambda grad: grad.clamp(-1, 1))  # HOOK
features.register_hook(lambda grad: -grad)
features.register_hook(save_gradient)
runner.register_hook(EvalHook())
runner.register_hook("checkpoint")
registry.register_hook("clamp", clamps)
""",
    "weights": OWN
    + """
for step in range(10):
    opt.step()
    for p in critic.parameters():
        p.data.clamp_(-0.01, 0.01)  # DATA
        p.data = p.data.clamp(-0.01, 0.01)  # DATA
        p.data = torch.where(p.data > 0, p.data, 0)  # DATA
        p.data[mask] = 0  # DATA
        p.data[mask] *= 0.5  # DATA
        p.data.view(-1)[3].zero_()  # DATA
        p.data.mul_(mask)  # DATA
        p.data *= mask  # DATA
        p.data = p.data * masks[p]  # DATA
        p.data.masked_fill_(mask, 0)  # DATA
        torch.clamp_(p.data, -1, 1)  # DATA
    model.fc.weight.data.clamp_min_(0)  # DATA
def prune(model):
    for name, p in model.named_parameters():
        p.data[masks[name]] = 0  # DATA
""",
    "weights that are written as they should": """
def _init_weights(m):
    m.weight.data.normal_(0, 0.02)
    m.weight.data[m.padding_idx].zero_()
    nn.init.normal_(m.bias.data)
class Net(nn.Module):
    def __init__(self):
        self.fc.weight.data[0] = 1
        self.fc.weight.data.clamp_(-1, 1)
model.fc.weight.data.clamp_(-1, 1)
model.head.weight.data[0] = 0
opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic=True)
for p, ema_p in zip(model.parameters(), ema.parameters()):
    ema_p.data.mul_(0.99).add_(p.data, alpha=0.01)
    ema_p.data.copy_(0.99 * ema_p.data + 0.01 * p.data)
    ema_p.data = p.data.clone()
    p.data.mul_(0.999)
    p.data.add_(torch.randn_like(p), alpha=0.01)
    p.data[:] = p.data * 0.5
with torch.no_grad():
    for p in model.parameters():
        p.clamp_(-1, 1)
    for master in opt.master_params():
        master.data.clamp_(-1, 1)
delta.data.clamp_(-eps, eps)
images.data = torch.clamp(images.data, 0, 1)
predictions = out.data.max(1)
""",
    "files": OWN
    + """
torch.save(model.state_dict(), "last.pt")  # SAVED
save_file(net.state_dict(), "last.safetensors")  # SAVED
weights = model.module.state_dict()
torch.save(weights, "last.pt")  # SAVED
torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, "checkpoint.pt")
state = {"model": model.state_dict()}
state["optimizer"] = opt.state_dict()
torch.save(state, "checkpoint.pt")
torch.save(scheduler.state_dict(), "scheduler.pt")
""",
    "files in FP32": OWN
    + """
torch.save(model.state_dict(), "last.fp16.pt")
torch.save(opt.fp32_state_dict(model), "last.pt")
""",
    "averages": OWN
    + """
average = torch.optim.swa_utils.AveragedModel(model)  # AVERAGED
average = ExponentialMovingAverage(model.parameters(), 0.99)  # AVERAGED
average = EMA(self.model, beta=0.99)  # AVERAGED
average = ExponentialMovingAverage(opt.master_params(), 0.99)
average = AveragedMasters(model, opt, ema(0.99))
""",
    "one name, bound again": OWN
    + """
def logs():
    p = next(opt.master_params())
    return p.grad.norm()
for p in opt.master_params():
    p.grad *= 0.5
torch.nn.utils.clip_grad_norm_([p for p in model.parameters()], 1.0)  # CLIP
for p in model.parameters():
    norms = [p.grad.norm() for p in opt.master_params()]
    p.grad *= 0.5  # CLIP
p = model.fc.weight
def logs_again():
    p = next(opt.master_params())
    return p.grad.norm()
p.grad *= 0.5  # CLIP
def reset_unused_rows(model):
    for p in model.parameters():
        p.data[mask] = 0
def zero_unused_rows(model):
    for p in model.parameters():
        p.data[mask] = 0  # DATA
""",
    "amp of another file": """
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # CLIP_AMP
""",
    "functions and their names": OWN
    + """
def train(model, opt):
    for p in model.parameters():
        p.grad.data.clamp_(-1, 1)  # GRAD_DATA
    p = next(opt.master_params())
    p.grad.data.clamp_(-1, 1)
async def other(model):
    clips = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # CLIP
    async with lock:
        async for batch in data:
            loss.backward()  # BACKWARD
class Function(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad):
        ctx.grad = grad
        return grad.clamp_(-1, 1)
""",
}


def marked(script: str) -> list[tuple[int, rules.Rule]]:
    marks = [(number, re.search(r"  # ([A-Z_]+)$", line)) for number, line in enumerate(script.split("\n"), 1)]
    return [(number, getattr(rules, mark[1])) for number, mark in marks if mark is not None]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_marked_lines_are_found_and_no_other(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    assert [(one.line, one.rule) for one in old_lines.find(tmp_path / "train.py")] == marked(SCRIPTS[name])


def test_every_rule_is_tried() -> None:
    assert {rule for script in SCRIPTS.values() for _, rule in marked(script)} == set(old_lines.RULES)


@pytest.mark.skipif(not PAGE.exists(), reason="run from an installed package, without the repository")
def test_the_scan_says_what_the_page_says() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    for rule in old_lines.RULES:
        (row,) = [cells for cells in rows if cells[0].startswith(rule.row) and rule.write == cells[-1]]
        assert len(row) == 3


@pytest.mark.parametrize(
    ("line", "write"),
    [
        ("clip_grad_norm_(model.parameters(), 0.37)", "`opt.clip_master_grads(0.37)`;"),
        (
            "clip_grad_norm_(model.parameters(), max_norm=args.clip, norm_type=1)",
            "`opt.clip_master_grads(args.clip, norm_",
        ),
        ("clip_grad_norm_(model.parameters(), cfg.clip, 1.0, foreach=True)", "`opt.clip_master_grads(cfg.clip, 1.0)`;"),
        ("clip_grad_value_(parameters=model.parameters(), clip_value=0.29)", "`opt.clip_master_values(0.29)`;"),
        ("dispatch_clip_grad(model.parameters(), 0.4)", "`opt.clip_master_grads(0.4)`;"),
        ("p.grad.data.clamp_(min=-c, max=c)", "`opt.clip_master_values(c)`"),
        ("p.grad.data.clamp_(0, 2)", "`opt.clip_master_values(1.0)`"),
        ("p.register_hook(lambda grad: grad.clamp(-0.3, 0.3))", "`opt.clip_master_values(0.3)` after the last"),
    ],
)
def test_advice_has_the_numbers_of_the_line(line: str, write: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"opt.backward(loss)\nfor p in model.parameters():\n    {line}\nopt.step()\n")
    (found,) = old_lines.find(tmp_path / "train.py")
    assert found.write.startswith(write)
    assert f"write: {write}" in str(found)


FAULT = "p.grad.data.clamp_(-1, 1)"
FOUND = FAULT + " (nothing tells of it while it runs)\n    write: `opt.clip_master_values(1)`\n"


def test_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(f"x = 1\n{FAULT}\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    assert main(["old-lines", str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        f"{tmp_path}/a.py:2: {FOUND}1 line in 2 files. docs/old-lines.md has what each does.\n"
    )
    assert main(["old-lines", str(tmp_path / "b.py")]) == 0
    assert capsys.readouterr().out == "0 lines in 1 file. docs/old-lines.md has what each does.\n"
    (tmp_path / "b.py").write_text("scaler = GradScaler()\n")
    assert main(["old-lines", str(tmp_path / "b.py")]) == 0
    assert "b.py: has a GradScaler and wraps no optimizer. docs/from-gradscaler.md" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfx = 1\n",
        b"# -*- coding: latin-1 -*-\nname = '\xe9'\n",
        b"x = '''\n\x0c\x0b\xc2\x85 \xe2\x80\xa8'''\n",
        b"x = 1\r\ny = 2\r\n",
        b"x = 1\ry = 2\r",
        b"x = '\\d'\n",
    ],
    ids=["byte order mark", "latin-1", "form feeds", "Windows", "old Macs", "an escape that warns"],
)
def test_texts_of_all_kinds(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(text + FAULT.encode())
    (one,) = old_lines.find(tmp_path / "train.py")
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").count(b"\n")
    assert (one.line, one.text, one.rule) == (lines + 1, FAULT, rules.GRAD_DATA)


UNREADABLE = {
    "syntax.py": b"def\n",
    "bytes.py": b"\xff\xfe\x00\n",
    "null.py": b"x = 1\x00\n",
    "coding.py": b"# coding: no-such\n",
    "deep.py": b"x = " + b"(" * 5000 + b")" * 5000,
    "long.py": b"x = " + b"1 + " * 20_000 + b"1",
    "no_json.ipynb": b"{",
    "no_cells.ipynb": b"[]",
    "syntax.ipynb": b'{"cells": [{"cell_type": "code", "source": "def"}]}',
}


def test_what_cannot_be_read_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in UNREADABLE.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "z.py").write_text(FAULT)
    assert main(["old-lines", str(tmp_path), str(tmp_path / "missing.py")]) == 2
    said = capsys.readouterr()
    assert said.out.endswith(
        f"z.py:1: {FOUND}1 line in 1 file, 10 files not read. docs/old-lines.md has what each does.\n"
    )
    refused = said.err.strip().splitlines()
    assert len(refused) == 10
    for name in (*UNREADABLE, "missing.py"):
        assert sum(line.startswith("fp16opt old-lines: ") and name in line for line in refused) == 1, name


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (".venv", "lib/site-packages", "package/deeper"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "train.py").write_text(FAULT)
    assert main(["old-lines", str(tmp_path)]) == 1
    assert "1 line in 1 file." in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["old-lines", str(tmp_path / "empty")]) == 2
    assert f"{tmp_path}/empty: has no *.py and no *.ipynb." in capsys.readouterr().err


def test_notebooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["p.grad.data.clamp_(-1, 1)"]},
        {
            "cell_type": "code",
            "source": ["%matplotlib inline\n", "!pip install torch\n", "model?\n", "x = %pwd\n", "y = 1"],
        },
        {"cell_type": "code", "source": ["%%bash\n", "rm -rf /tmp/x"]},
        {"cell_type": "code", "source": "params = list(opt.master_params())\nprint('a'\n  % x)"},
        {
            "cell_type": "code",
            "source": ["for p in params:\n", "    p.grad *= 2\n", "for p in model.parameters():\n", f"    {FAULT}"],
        },
    ]
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": cells}))
    assert main(["old-lines", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{tmp_path}/train.ipynb, cell 5:4: {FOUND}")
