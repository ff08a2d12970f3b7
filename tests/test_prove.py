"""What `python -m fp16opt prove` compares, where no card is needed to see it."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from fp16opt.tools.prove.trials import Loop


@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_trial_has_read_stays_as_it_was(gradients: bool) -> None:
    """On the host, too, where a tensor of the optimizer's would be overwritten by the next step."""
    loop = Loop(torch.device("cpu"), lambda p: AdamW(p, lr=0.01), fused_step=False)
    loop.step()
    read = loop.tensors(gradients=gradients)
    before = {name: value.clone() for name, value in read.items()}
    loop.factor.fill_(-0.25)
    loop.step()
    assert read.keys() == before.keys()
    for name, value in read.items():
        assert torch.equal(value, before[name]), name
    assert any(not torch.equal(value, before[name]) for name, value in loop.tensors(gradients=gradients).items())
