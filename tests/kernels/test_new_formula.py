"""A one-pass optimizer is a functor and a row: a new one in a copy of the tree, made of two files and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_kernel_build import ROOT, needs_build_tools

ROW = """
FORMULAS["twin"] = replace(_LION, struct="Twin", kernels=("twin",), packaged={})
"""

CHECK = '''
import os, shutil, subprocess, sys
from pathlib import Path

import emulated, numpy as np, pytest, torch
import fp16opt
from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels import CallCache, CastStats, backend, cuda_rows, native, nvrtc, operations
from fp16opt.kernels.formulas import LionOptions
from fp16opt.optimizers import Lion

HERE = Path(sys.argv[1])
assert Path(fp16opt.__file__).is_relative_to(HERE), fp16opt.__file__
SIZES = (1, 63, 64, 200, 70_001)


def of(name):
    rng = np.random.default_rng(len(name))
    return [torch.from_numpy(rng.standard_normal(n, dtype=np.float32)).half() for n in SIZES]


def assert_twins(both, where):
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs), where


def stepped(formula, split):
    """Weights, masters and averages after three steps."""
    models, n = of("weights"), len(SIZES)
    masters = [torch.zeros_like(p, dtype=torch.int16) if split else p.float() for p in models]
    averages = [torch.zeros_like(p, dtype=torch.float32) for p in models]
    options = [LionOptions(0.01, 0.9, 0.99, 0.1, maximize) for maximize in (False, True)]
    group_of, factors = [k % 2 for k in range(n)], operations.Factors(torch.tensor(0.25), torch.tensor(1.0))
    more = {"models": models, "stats": CastStats.allocate(n, "cpu"), "cache": CallCache()}
    for step in range(3):
        grads = [g * (step + 1) for g in of("grads")]
        operations.multi_tensor_step(formula, grads, masters, [averages], options, group_of, factors, **more)
    assert not any(torch.equal(model, before) for model, before in zip(models, of("weights")))
    return [*models, *masters, *averages]


def check_kernels(where, split):
    assert_twins([stepped(formula, split) for formula in ("lion", "twin")], where)


class Twin(Lion):
    """Registered by itself."""


fp16opt.register_fused_step(Twin, "twin", {"lr": "lr", "betas": "betas", "weight_decay": "weight_decay"})


def trained(make):
    params = [torch.nn.Parameter(p) for p in of("weights")]
    opt = MixedPrecisionOptimizer(make(params, lr=0.01, weight_decay=0.1), fused_step=True, loss_scale=4.0)
    for step in range(3):
        opt.backward(sum((p.float() * g.float()).sum() * (step + 1) for p, g in zip(params, of("grads"))))
        opt.step()
        opt.zero_grad()
    return [master.detach() for master in opt.master_params()]


def check_engine(where):
    assert_twins([trained(make) for make in (Lion, Twin)], where)


def emulated_kernel():
    """The CUDA kernels, compiled as plain C++, and the new one by NVRTC where that is installed."""
    paths = []
    for name in ("lion", "twin"):
        source = HERE / f"{name}.cpp"
        source.write_text(cuda_rows.source_of(cuda_rows.KERNELS[name]))
        paths.append(source.with_suffix(".so"))
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        subprocess.run([compiler, *emulated.FLAGS, "-shared", source, "-o", paths[-1]], check=True)
    try:
        nvrtc.find([12]).compile(cuda_rows.source_of(cuda_rows.KERNELS["twin"]), "twin", 70, cuda_rows.OPTIONS)
    except nvrtc.NvrtcError as error:
        assert "sm_" not in str(error), error
    return emulated.Emulated(paths)


for level in native.module.simd_levels():
    native.module.use_simd_level(level)
    for split in (False, True):
        check_kernels(level, split)
check_engine("compiled")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(native, "module", None)
    assert backend("cpu") == "reference"
    check_kernels("reference", False)
    check_engine("reference")
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
    """Lion under another name on every SIMD level, in torch operations, as a CUDA kernel and through the engine."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "_build.json", "_cuda.cuh")
    for folder in ("csrc", "fp16opt"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "setup.py", tmp_path)
    functors = tmp_path / "csrc" / "functors"
    (functors / "twin.h").write_text((functors / "lion.h").read_text().replace("Lion", "Twin"))
    with (tmp_path / "fp16opt" / "kernels" / "formulas.py").open("a") as row:
        row.write(ROW)
    environment = {**os.environ, "FP16OPT_CPU": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    check = [sys.executable, "-c", CHECK, str(tmp_path)]
    for command in ([sys.executable, "setup.py", "build_ext", "--inplace"], check):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "equal bits\n"
