"""A one-pass optimizer is a functor and a row: a new one in a copy of the tree, made of two files and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_kernel_build import ROOT, needs_build_tools

FUNCTOR = """\
// A step of Signum (Bernstein et al. 2018): the sign of the momentum, each operation rounded.
#pragma once

#include "elementary.h"
#include "formula.h"
#include "scale.h"
#include "unscale.h"

FP16OPT_BEGIN

struct Signum : Formula {
    struct Group {
        Number lr;
        double momentum, weight_decay;
        int32_t maximize, unused;
    };
    struct Scalars {
        float decay, momentum, fresh, step_size;
    };

    FP16OPT_HD static Scalars scalars(const Group& g, double lr, double) {
        return {float(1.0 - lr * g.weight_decay), float(g.momentum), float(1.0 - g.momentum), float(-lr)};
    }

    template <class T>
    struct Terms {
        T inv_scale, coefficient, decay, momentum, fresh, step_size;

        template <class Splat>
        FP16OPT_HD Terms(const GradFactors& g, const Scalars& s, Splat splat)
            : inv_scale(splat(g.inv_scale)), coefficient(splat(g.coefficient)), decay(splat(s.decay)),
              momentum(splat(s.momentum)), fresh(splat(s.fresh)), step_size(splat(s.step_size)) {}
    };

    template <int kPhase, bool kFirst, class T>
    FP16OPT_HD static void step(const Terms<T>& s, T grad, T& p, T& m) {
        m = m * s.momentum + scale(unscale(grad, s.inv_scale), s.coefficient) * s.fresh;
        p = p * s.decay + sign(m) * s.step_size;
    }
};

FP16OPT_END
"""

ROW = '''
class SignumOptions(NamedTuple):
    """What a param_group of Signum says."""

    lr: float | Tensor
    momentum: float
    weight_decay: float
    maximize: bool


def _signum(g: Tensor, p: Tensor, state: list[Tensor], o: SignumOptions, t: float, first: bool) -> None:
    (m,) = state
    m.copy_(m * single(o.momentum) + g * single(1.0 - o.momentum))
    p.copy_(p * single(1.0 - float(o.lr) * o.weight_decay) + m.sign() * single(-float(o.lr)))


FORMULAS["signum"] = Formula(
    "Signum",
    SignumOptions,
    ("exp_avg",),
    _signum,
    wanted=("lr", "momentum"),
    neutral=_DECAYED,
    kernels=("signum",),
)
'''

CHECK = '''
import ctypes, os, shlex, shutil, subprocess, sys
from pathlib import Path

import emulated, numpy as np, pytest, torch
import fp16opt
from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels import CallCache, CastStats, backend, cuda_rows, native, nvrtc, operations
from fp16opt.kernels.formulas import SignumOptions

HERE = Path(sys.argv[1])
assert Path(fp16opt.__file__).is_relative_to(HERE), fp16opt.__file__
SIZES, LR, MOMENTUM, DECAY, SCALE = (1, 63, 64, 200, 70_001), 0.01, 0.9, 0.1, 0.25
f = np.float32


def of(name):
    rng = np.random.default_rng(len(name))
    return [torch.from_numpy(rng.standard_normal(n, dtype=np.float32)).half() for n in SIZES]


def numpy_step(p, m, grad, maximize):
    g = f(f(grad.float().numpy() * f(SCALE)) * f(-1.0 if maximize else 1.0))
    m[:] = f(m * f(MOMENTUM)) + f(g * f(1.0 - MOMENTUM))
    p[:] = f(p * f(1.0 - LR * DECAY)) + f(np.sign(m) * f(-LR))


def check_kernels(where, split):
    models, n = of("weights"), len(SIZES)
    whole = [(p.float().numpy().copy(), np.zeros(p.numel(), f)) for p in models]
    masters = [torch.zeros_like(p, dtype=torch.int16) if split else p.float() for p in models]
    averages = [torch.zeros_like(p, dtype=torch.float32) for p in models]
    options = [SignumOptions(LR, MOMENTUM, DECAY, maximize) for maximize in (False, True)]
    group_of, stats, cache = [k % 2 for k in range(n)], CastStats.allocate(n, "cpu"), CallCache()
    factors = operations.Factors(torch.tensor(SCALE), torch.tensor(1.0))
    for step in range(3):
        grads = [g * (step + 1) for g in of("grads")]
        more = {"models": models, "stats": stats, "cache": cache}
        operations.multi_tensor_step("signum", grads, masters, [averages], options, group_of, factors, **more)
        for k, (p, m) in enumerate(whole):
            numpy_step(p, m, grads[k], bool(group_of[k]))
    for (p, m), master, average, model in zip(whole, masters, averages, models):
        assert np.array_equal(average.numpy(), m), where
        assert np.array_equal(model.numpy(), p.astype(np.float16)), where
        if not split:
            assert np.array_equal(master.numpy(), p), where


class Plain(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"rate": LR, "beta": MOMENTUM, "decay": DECAY})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                m.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.mul_(1 - group["rate"] * group["decay"]).add_(m.sign(), alpha=-group["rate"])


def check_engine():
    keys = {"lr": "rate", "momentum": "beta", "weight_decay": "decay"}
    fp16opt.register_one_pass(Plain, "signum", keys)
    params = [torch.nn.Parameter(p) for p in of("weights")]
    whole = [(p.detach().float().numpy().copy(), np.zeros(p.numel(), f)) for p in params]
    opt = MixedPrecisionOptimizer(Plain(params), fused_step=True, loss_scale=1 / SCALE)
    assert "step: fused" in repr(opt), repr(opt)
    for step in range(3):
        grads = of("grads")
        opt.backward(sum((p.float() * g.float()).sum() * (step + 1) for p, g in zip(params, grads)))
        for k, p in enumerate(params):
            numpy_step(*whole[k], p.grad, False)
        opt.step()
        opt.zero_grad()
    for master, (p, _) in zip(opt.master_params(), whole):
        assert np.array_equal(master.detach().numpy(), p)


def emulated_kernel():
    """The CUDA kernel, compiled as plain C++, and by NVRTC where that is installed."""
    kernel = cuda_rows.KERNELS["signum"]
    source = HERE / "signum.cpp"
    source.write_text(cuda_rows.source_of(kernel))
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    subprocess.run([compiler, *emulated.FLAGS, "-shared", source, "-o", source.with_suffix(".so")], check=True)
    try:
        nvrtc.find([12]).compile(cuda_rows.source_of(kernel), "signum", 70, cuda_rows.OPTIONS)
    except nvrtc.NvrtcError as error:
        assert "sm_" not in str(error), error
    return emulated.Emulated([source.with_suffix(".so")])


for level in native.module.simd_levels():
    native.module.use_simd_level(level)
    for split in (False, True):
        check_kernels(level, split)
check_engine()
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(native, "module", None)
    assert backend("cpu") == "reference"
    check_kernels("reference", False)
    check_engine()
with pytest.MonkeyPatch.context() as patch:
    emulated.use(emulated_kernel(), patch)
    assert backend("cpu") == "cuda"
    check_kernels("cuda", False)
    check_kernels("cuda", True)
print("equal bits")
'''


@pytest.mark.slow
@needs_build_tools
def test_a_functor_and_a_row_are_all_that_a_new_formula_takes(tmp_path: Path) -> None:
    """Signum on every SIMD level, in torch operations, as a CUDA kernel and through the engine: numpy's bits."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "_build.json", "_cuda.cuh")
    for folder in ("csrc", "fp16opt"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "setup.py", tmp_path)
    functor = tmp_path / "csrc" / "functors" / "signum.h"
    assert not functor.exists()
    functor.write_text(FUNCTOR)
    with (tmp_path / "fp16opt" / "kernels" / "formulas.py").open("a") as row:
        row.write(ROW)
    environment = {**os.environ, "FP16OPT_CPU": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    check = [sys.executable, "-c", CHECK, str(tmp_path)]
    for command in ([sys.executable, "setup.py", "build_ext", "--inplace"], check):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "equal bits\n"
