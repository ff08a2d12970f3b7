"""Adam's and SGD's steps with the columns of their state named: each is one :func:`multi_tensor_step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fp16opt.kernels.operations import AdamOptions, Factors, SgdOptions, multi_tensor_step

Column = Sequence[Tensor]


def adam_step(
    grads: Column,
    masters: Column,
    exp_avgs: Column,
    exp_avg_sqs: Column,
    steps: Column,
    options: Sequence[AdamOptions],
    group_of: Sequence[int],
    factors: Factors,
    max_exp_avg_sqs: Column | None = None,
    **more: Any,
) -> None:
    """Adam or AdamW; with ``max_exp_avg_sqs`` that of amsgrad."""
    state = [exp_avgs, exp_avg_sqs] if max_exp_avg_sqs is None else [exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    multi_tensor_step("adam", grads, masters, state, options, group_of, factors, steps=steps, **more)


def sgd_step(
    grads: Column,
    masters: Column,
    options: Sequence[SgdOptions],
    group_of: Sequence[int],
    factors: Factors,
    momentum_buffers: Column | None = None,
    **more: Any,
) -> None:
    """SGD; with ``momentum_buffers`` that with momentum."""
    state = [] if momentum_buffers is None else [momentum_buffers]
    multi_tensor_step("sgd", grads, masters, state, options, group_of, factors, **more)
