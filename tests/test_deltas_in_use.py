"""What docs/deltas.md says of models with two optimizers and of compiled ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer


class Two:
    """A model of two layers, each with an optimizer of its own, and a copy that follows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).half()
        self.copy = copy.deepcopy(self.model)
        scaler = DynamicLossScaler(2.0**8)
        self.first, self.second = (
            MixedPrecisionOptimizer(torch.optim.SGD(layer.parameters(), lr=1e-3), scaler=scaler, track_changes=True)
            for layer in self.model
        )

    def step(self) -> None:
        self.first.zero_grad()
        self.second.zero_grad()
        self.first.backward(self.model(torch.ones(4, 8).half()).float().square().mean())
        self.second.update_master_grads()
        self.first.step()
        self.second.step()

    def follows(self) -> bool:
        pairs = zip(self.model.state_dict().values(), self.copy.state_dict().values(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


def test_a_delta_of_one_optimizer_has_what_the_other_trains_whole() -> None:
    two = Two()
    for _ in range(3):
        two.step()
        delta = two.first.take_delta(two.model)
        assert {"0.weight", "1.weight"} < set(delta.names())
        assert {change.name for change in delta.changes if change.places is None} >= {"1.weight", "1.bias"}
        delta.apply_(two.copy)
        assert two.follows()
    assert any(change.places is not None for change in delta.changes), "its own come by elements"


def test_a_delta_of_the_other_optimizer_does_not_follow() -> None:
    two = Two()
    two.step()
    two.first.take_delta(two.model).apply_(two.copy)
    two.step()
    with pytest.raises(ValueError, match="is not what it was when delta 1 began"):
        two.second.take_delta(two.model).apply_(two.copy)


def test_each_optimizer_by_its_module() -> None:
    two = Two()
    for _ in range(3):
        two.step()
        for opt, layer, other in zip((two.first, two.second), two.model, two.copy, strict=True):
            opt.take_delta(layer).apply_(other)
        assert two.follows()
    with pytest.raises(ValueError, match=r"model has another tensor .* than parameter 'weight' of this optimizer"):
        two.first.take_delta(two.model[1])


def test_a_compiled_model_is_given_as_the_module_that_was_compiled() -> None:
    two = Two()
    compiled = torch.compile(two.model, backend="eager")
    opt = MixedPrecisionOptimizer(
        torch.optim.SGD(compiled.parameters(), lr=1e-2), loss_scale=2.0**8, track_changes=True
    )
    opt.backward(two.model(torch.ones(4, 8).half()).float().square().mean())  # names are the point: nothing is compiled
    opt.step()
    delta = opt.take_delta(two.model)
    assert "0.weight" in delta.names()
    delta.apply_(two.copy)
    assert two.follows()
    assert all(name.startswith("_orig_mod.") for name in compiled.state_dict())
    two.model.compile(backend="eager")
    assert "0.weight" in two.model.state_dict()
