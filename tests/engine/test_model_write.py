"""Weights written behind the wrapper's back: noticed, merged element by element, never reverted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from engine.checks import (
    array,
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    by_step,
    linear_loss,
    one_step,
    snapshot,
)
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step

LOW = 2.0**-13  # a part of the master that the 16-bit weight cannot hold
CHANGED = (0, 5)
NEW = 3.0


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=dtype))
        self.other = nn.Parameter(torch.ones(3, dtype=dtype))


def _written(net: Net) -> Tensor:
    value = net.weight.detach().clone()
    value[list(CHANGED)] = NEW
    return value


def _load_state_dict(net: Net) -> None:
    net.load_state_dict({"weight": _written(net), "other": net.other.detach().clone()})


def _data_copy(net: Net) -> None:
    net.weight.data.copy_(_written(net))


def _no_grad_copy(net: Net) -> None:
    with torch.no_grad():
        net.weight.copy_(_written(net))


def _new_data(net: Net) -> None:
    net.weight.data = _written(net)


def _index_write(net: Net) -> None:
    for i in CHANGED:
        net.weight.data[i] = NEW


WRITERS: list[Callable[[Net], None]] = [_load_state_dict, _data_copy, _no_grad_copy, _new_data, _index_write]
PLACES = [
    "before_first_backward",
    "before_backward",
    "between_backward_and_step",
    "after_update",
    "after_clip",
    "after_step",
    "before_state_dict",
    "before_fp32_state_dict",
    "around_a_skipped_step",
]
by_writer = pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__.strip("_"))
by_place = pytest.mark.parametrize("place", PLACES)
by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def _make(dtype: torch.dtype = torch.float16, **kwargs: Any) -> tuple[Net, MixedPrecisionOptimizer]:
    net = Net(dtype)
    opt = MixedPrecisionOptimizer(
        SGD(net.parameters(), lr=1.0), loss_scale=8.0, named_parameters=net.named_parameters(), **kwargs
    )
    return net, opt


def _loss(net: Net, g: float) -> Tensor:
    return linear_loss([net.weight, net.other], [g, g])


def _play(net: Net, opt: MixedPrecisionOptimizer, place: str, write: Callable[[Net], None]) -> int:
    """Writes at the given place of a loop with gradient LOW; returns how many steps the new value took
    part in,
    after the write. Before the write, masters hold low bits (unless the write comes first of all)."""
    if place != "before_first_backward":
        one_step(opt, [net.weight, net.other], [LOW, LOW])
    opt.zero_grad()
    if place in ("before_first_backward", "before_backward"):
        write(net)
    if place == "around_a_skipped_step":
        opt.backward(_loss(net, float("inf")))
        write(net)
        opt.step()
        opt.zero_grad()
    opt.backward(_loss(net, LOW), update_master_grads=place != "between_backward_and_step")
    if place == "between_backward_and_step":
        write(net)
    if place in ("after_update", "after_clip"):
        opt.update_master_grads()
        if place == "after_clip":
            opt.clip_master_grads(1e6)
        write(net)
    opt.step()
    if not place.startswith(("before_state", "before_fp32", "after_step")):
        return 1
    write(net)
    if place == "after_step":
        one_step(opt, [net.weight, net.other], [LOW, LOW])
        return 1
    return 0


@by_dtype
@by_place
@by_writer
def test_model_write_not_reverted(
    write: Callable[[Net], None], place: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    net, opt = _make(dtype)
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        steps_after = _play(net, opt, place, write)
        if place == "before_fp32_state_dict":
            got = opt.fp32_state_dict(net)["weight"]
        else:
            got = opt.state_dict()["masters"][0]
    total = {"before_first_backward": 1, "after_step": 3}.get(place, 2)
    want = torch.full((6,), 1.0 - total * LOW)
    want[list(CHANGED)] = NEW - steps_after * LOW
    assert_same_bits(got.detach(), want, "masters: new values taken, low bits of the others kept")
    assert_same_bits(net.weight, want.to(dtype), "model")
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and "skipped" not in r.getMessage()]
    assert len(warnings) == 1, "one warning for one write"
    text = warnings[0].getMessage()
    assert "weight" in text
    assert "other" not in text
    one_step(opt, [net.weight, net.other], [0.0, 0.0])
    assert_same_bits(net.weight, want.to(dtype), "model one step later")
    assert_model_is_rounded_masters(opt)


@by_writer
def test_write_of_equal_bits_is_no_write(write: Callable[[Net], None], caplog: pytest.LogCaptureFixture) -> None:
    net, opt = _make()
    with torch.no_grad():
        net.weight[list(CHANGED)] = NEW
    opt.refresh_masters()
    one_step(opt, [net.weight, net.other], [2.0**-14, 2.0**-14])
    assert float(net.weight[0]) == NEW
    with caplog.at_level(logging.DEBUG, logger="fp16opt"):
        write(net)
        one_step(opt, [net.weight, net.other], [0.0, 0.0])
        masters = opt.state_dict()["masters"]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert float(masters[0][1]) == 1.0 - 2.0**-14
    assert float(masters[0][0]) == NEW - 2.0**-14


@by_writer
@pytest.mark.parametrize("call", ["step", "state_dict", "fp32_state_dict"])
def test_error_mode_raises_by_name_and_changes_nothing(call: str, write: Callable[[Net], None]) -> None:
    net, opt = _make(on_model_write="error")
    one_step(opt, [net.weight, net.other], [LOW, LOW])
    opt.zero_grad()
    write(net)
    if call == "step":
        opt.backward(_loss(net, LOW), update_master_grads=False)
    before = snapshot(opt, net.parameters(), scaler=True)
    with pytest.raises(RuntimeError, match="weight") as err:
        opt.fp32_state_dict(net) if call == "fp32_state_dict" else getattr(opt, call)()
    assert "other" not in str(err.value).replace("otherwise", "")
    assert_same(snapshot(opt, net.parameters(), scaler=True), before)
    opt.refresh_masters()
    opt.zero_grad()
    one_step(opt, [net.weight, net.other], [LOW, LOW])
    assert float(next(iter(opt.master_params()))[0]) == NEW - LOW


@by_writer
def test_ignore_mode_lets_the_masters_win(write: Callable[[Net], None], caplog: pytest.LogCaptureFixture) -> None:
    net, opt = _make(on_model_write="ignore")
    one_step(opt, [net.weight, net.other], [LOW, LOW])
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        write(net)
        one_step(opt, [net.weight, net.other], [LOW, LOW])
    assert not caplog.records
    assert_same_bits(net.weight, torch.full((6,), 1 - 2 * LOW).half())
    assert_same_bits(next(iter(opt.master_params())), torch.full((6,), 1 - 2 * LOW))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0], ids=str)
def test_special_values_written_into_the_model_are_taken(value: float) -> None:
    net, opt = _make()
    with torch.no_grad():
        net.weight.fill_(0.0)
    opt.refresh_masters()
    with torch.no_grad():
        net.weight[2] = value
    master = opt.state_dict()["masters"][0]
    assert_same_bits(master[2], torch.tensor(value, dtype=torch.float16).float())
    assert_same_bits(master[:2], torch.zeros(2))


WHOLE = 16_384  # elements of a tensor that is looked at whole; of larger ones, one in about a thousand


@pytest.mark.parametrize("position", [0, 1, 3, 4, 7, 8, 63, 64, 1000, 8191, 8192, WHOLE - 2, WHOLE - 1])
def test_a_single_changed_element_is_found_wherever_it_is(position: int) -> None:
    p = nn.Parameter(torch.ones(WHOLE, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.0))
    p.data[position] = NEW
    one_step(opt, [p], [0.0])
    assert float(p[position]) == NEW
    assert float(p.detach().sum(dtype=torch.float64)) == WHOLE - 1 + NEW


def _large() -> nn.Parameter:
    return nn.Parameter(torch.ones(2000, 150, dtype=torch.float16))


LARGE: dict[str, Callable[[Tensor], Any]] = {
    "copy": lambda data: data.copy_(torch.full_like(data, NEW)),
    "mask": lambda data: data.masked_fill_(torch.arange(data.numel()).view_as(data) % 3 == 0, NEW),
    "column": lambda data: data[:, 77].fill_(NEW),
    "rows": lambda data: data[17:37].fill_(NEW),
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("when", ["before_backward", "between_backward_and_step"])
def test_a_write_through_data_into_a_large_parameter_is_found(kind: str, when: str) -> None:
    """Of larger tensors a lattice is looked at: it meets all columns of a matrix with more rows than its stride, and
    what is longer than that. All that was written is taken, not the sample alone."""
    p = _large()
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0))
    one_step(opt, [p], [LOW])
    opt.zero_grad()
    if when == "before_backward":
        LARGE[kind](p.data)
        opt.backward(linear_loss([p], [LOW]))
    else:
        opt.backward(linear_loss([p], [LOW]))
        LARGE[kind](p.data)
    want = torch.full((2000, 150), 1.0 - LOW)
    LARGE[kind](want)
    opt.step()
    (m,) = opt.master_params()
    assert_same_bits(m, want - LOW)


@pytest.mark.parametrize("kind", ["channels_last", "every_second", "zero_dim"])
def test_model_writes_into_strided_params_are_noticed(kind: str) -> None:
    values = {
        "channels_last": torch.ones(2, 3, 4, 5, dtype=torch.float16).to(memory_format=torch.channels_last),
        "every_second": torch.ones(40, dtype=torch.float16)[::2],
        "zero_dim": torch.tensor(1.0, dtype=torch.float16),
    }[kind]
    p = nn.Parameter(values)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0))
    p.data.fill_(2.0)
    one_step(opt, [p], [0.5])
    assert_same_bits(p, torch.full(tuple(p.shape), 1.5).half())


def test_frozen_and_unused_params_written_are_saved_with_their_new_value() -> None:
    net, opt = _make()
    net.weight.requires_grad_(False)
    net.other.data.fill_(5.0)
    net.weight.data.fill_(4.0)
    out = opt.fp32_state_dict(net)
    assert_same_bits(out["other"].detach().float(), torch.full((3,), 5.0))
    assert_same_bits(out["weight"].detach().float(), torch.full((6,), 4.0))
    net.weight.requires_grad_(True)
    one_step(opt, [net.weight, net.other], [1.0, 1.0])
    assert_same_bits(net.weight, array([3.0] * 6))


def test_write_inside_a_closure_step_is_noticed() -> None:
    net, opt = _make()
    net.weight.data.fill_(2.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = _loss(net, 1.0)
        opt.backward(loss)
        return loss

    opt.step(closure)
    assert_same_bits(net.weight, array([1.0] * 6))


@pytest.mark.parametrize("place", [0, 64, 4000, 65535, 65536, 70000])
@pytest.mark.parametrize("when", ["before_backward", "between_backward_and_step"])
def test_a_single_element_of_a_large_parameter_is_noticed_by_the_version_counter(place: int, when: str) -> None:
    """Through ``.data`` it may go unseen."""
    p = nn.Parameter(torch.ones(70001, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0))
    one_step(opt, [p], [LOW])
    opt.zero_grad()
    if when == "between_backward_and_step":
        opt.backward(linear_loss([p], [LOW]))
    with torch.no_grad():
        p[place] = NEW
    if when == "before_backward":
        opt.backward(linear_loss([p], [LOW]))
    opt.step()
    (m,) = opt.master_params()
    assert float(m[place]) == NEW - LOW
    assert float(m[place - 1]) == 1.0 - 2 * LOW


def test_weights_loaded_before_a_plain_optimizer_checkpoint_stay() -> None:
    """A checkpoint without masters does not bring the model back to what the masters held before it was loaded."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    plain = torch.optim.SGD([weight], lr=0.5, momentum=0.5).state_dict()
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5, momentum=0.5))
    weight.data.fill_(3.0)
    optimizer.load_state_dict(plain)
    assert weight.tolist() == [3.0] * 4
    assert next(optimizer.master_params()).tolist() == [3.0] * 4


def test_the_line_names_a_second_optimizer_that_wraps_the_weight(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fp16opt")
    shared, own = (nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2))
    first = MixedPrecisionOptimizer(SGD([shared, own], lr=1.0))
    second = MixedPrecisionOptimizer(torch.optim.AdamW([shared], lr=0.5))
    one_step(first, [shared], [NEW])
    one_step(second, [shared], [NEW])
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(r'Another optimizer, optimizer \d+ \(SGD\), wraps them too.*master_weights="full" in both', line)
    caplog.clear()
    with torch.no_grad():
        own.fill_(NEW)  # of this one alone
    first.refresh_masters()
    del first
    with torch.no_grad():
        shared.fill_(NEW)
    one_step(second, [shared], [NEW])
    assert "Another" not in "".join(record.getMessage() for record in caplog.records)
