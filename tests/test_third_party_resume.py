"""Resuming by classes of pytorch_optimizer and timm in every mode: N steps, save, load, N steps give the bits of 2N.

What a package lacks here is skipped with a reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest
import torch
from engine import recipes
from integrations.stand_in import import_timm
from test_third_party import Package

SHAPES = [(8, 9), (16,), (6, 4)]

PYTORCH_OPTIMIZER = """
    A2Grad ADOPT AccSGD AdEMAMix AdaBelief AdaFactor AdaPNM Adalite AdamP Adan AggMo Amos CAME DiffGrad FTRL
    GaLore GrokFastAdamW LaProp Lamb Lion MADGRAD NovoGrad Grams SPAM QHAdam Ranger SM3 SOAP
    ScheduleFreeAdamW Shampoo StableAdamW Tiger Yogi
"""
TIMM = """
    AdaBelief Adafactor AdafactorBigVision AdamP Adan Adopt LaProp Lamb Lars Lion MADGRAD Mars Muon NAdamW NvNovoGrad
    RMSpropTF SGDP SGDW
"""
STATIC, DYNAMIC = {"loss_scale": 64.0}, {"init_scale": 64.0, "growth_interval": 3}
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "full, float16": (torch.float16, STATIC),
    "full, bfloat16": (torch.bfloat16, DYNAMIC),
    "float32": (torch.float32, STATIC),
    "none": (torch.bfloat16, {"loss_scale": 1.0, "master_weights": "none"}),
    "sums": (torch.float16, {**DYNAMIC, "grad_accumulation": "fp32"}),
}


def _parameters() -> list[Any]:
    made = []
    for module, names in (("pytorch_optimizer", PYTORCH_OPTIMIZER), ("timm.optim", TIMM)):
        is_lacking = importlib.util.find_spec(module.split(".")[0]) is None
        mark = pytest.mark.skipif(is_lacking, reason=f"{module} is not installed")
        for name in names.split():
            package = Package(f"{module}-{name}", module, name, {"lr": 1e-2}, shapes=list(SHAPES))
            made.append(pytest.param(package, id=package.id, marks=mark))
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("package", _parameters())
def test_resume_bit_exact(package: Package, mode: str) -> None:
    dtype, settings = MODES[mode]
    if package.module == "timm.optim":
        import_timm()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages' own
        recipes.check_resume_bit_exact(recipes.engine, package, settings, model_first=True, dtypes=dtype)
