"""Optimizers that torch.optim lacks: apex's FusedAdam, FusedSGD, FusedLAMB, FusedNovoGrad, FusedAdagrad, LARC; Lion.

They are plain ``torch.optim.Optimizer`` classes in torch operations, apex's with apex's arguments. Their arithmetic and
state are FP32 for FP16 and BF16 parameters too; only the new weight is rounded. Wrap them in
``fp16opt.MixedPrecisionOptimizer`` to keep the weight's FP32 value as well.
"""

from .adagrad import FusedAdagrad
from .adam import FusedAdam
from .lamb import FusedLAMB, FusedMixedPrecisionLamb
from .larc import LARC
from .lion import Lion
from .novograd import FusedNovoGrad
from .sgd import FusedSGD

__all__ = [
    "LARC",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
    "Lion",
]
