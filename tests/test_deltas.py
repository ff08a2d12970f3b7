"""What steps changed, taken as a WeightDelta and applied elsewhere: the models' bits are equal, always."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp16opt import MixedPrecisionOptimizer, WeightDelta
from fp16opt import kernels as k
from fp16opt.engine.modes.changes import Changes
from fp16opt.kernels.changed import ChangedBits

HALF, BFLOAT = torch.float16, torch.bfloat16
MODES: dict[str, dict[str, Any]] = {
    "one pass": {"fused_step": True},
    "wrapped": {"fused_step": False},
    "split": {"master_weights": "split", "fused_step": True},
    "split24": {"master_weights": "split24"},
    "8-bit": {"optimizer_state": "8bit"},
    "8-bit, split24": {"optimizer_state": "8bit", "master_weights": "split24"},
    "released": {"gradient_release": True},
    "no masters": {"master_weights": "none"},
}


class Net(nn.Module):
    """All that a state_dict may have: tied weights, FP32 parameters, buffers, a frozen one, odd sizes and strides."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Linear(67, 65, dtype=dtype)
        self.conv = nn.Conv2d(5, 5, 3, padding=1, dtype=dtype).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(65)
        self.b = nn.Linear(65, 67, bias=False, dtype=dtype)
        self.tied = nn.Linear(65, 67, bias=False, dtype=dtype)
        self.tied.weight = self.b.weight
        self.frozen = nn.Parameter(torch.randn(9, dtype=dtype), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, dtype=dtype))
        self.single = nn.Parameter(torch.tensor(1.5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x).float()).to(self.b.weight.dtype)
        y = self.conv(x[:, :45].reshape(-1, 5, 3, 3)).float().square().mean()
        return self.tied(x).float().square().mean() + y * self.single.float()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_equal(model: nn.Module | dict[str, Any], other: nn.Module | dict[str, Any]) -> None:
    states = [one.state_dict() if isinstance(one, nn.Module) else one for one in (model, other)]
    assert list(states[0]) == list(states[1])
    for name, tensor in states[0].items():
        assert torch.equal(bits(tensor), bits(states[1][name])), name


def step(model: nn.Module, opt: Any, overflows: bool = False) -> None:
    opt.zero_grad()
    dtype = next(p.dtype for p in model.parameters())
    loss = model(torch.randn(4, 67).to(dtype))
    opt.backward(loss * float("inf") if overflows else loss)
    opt.step()


def pair(dtype: torch.dtype = HALF, lr: float = 1e-4, **options: Any) -> tuple[Net, Net, MixedPrecisionOptimizer]:
    model = Net(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(trained, lr=lr), track_changes=True, **options)
    return model, copy.deepcopy(model), opt


def sent(delta: WeightDelta) -> WeightDelta:
    """Through a file."""
    file = io.BytesIO()
    delta.save(file)
    assert file.tell() == delta.nbytes
    file.seek(0)
    return WeightDelta.load(file)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="fp16opt")


# -- equal bits, whatever happens --------------------------------------------------------------------------------------


def write_some(model: Net, rng: random.Random, opt: MixedPrecisionOptimizer) -> None:
    """One of the ways in which other code writes weights and buffers."""
    params = [p for p in model.parameters() if p.numel() > 1]
    param = rng.choice(params)
    place = rng.randrange(param.numel())
    way = rng.randrange(7)
    with torch.no_grad():
        if way == 0:
            param[(0,) * param.dim()] += 1.0
        elif way == 1:
            param.data.mul_(0.5)
        elif way == 2:
            param.data.as_strided((param.numel(),), (1,))[place] = 0.25  # past all counters
        elif way == 3:
            model.norm.running_mean[place % 65] = 7.0
        elif way == 4:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        elif way == 5:
            param.add_(0.125)
            opt.refresh_masters()
        else:
            state = {
                name: value + 0.5 if value.is_floating_point() else value for name, value in model.state_dict().items()
            }
            model.load_state_dict(state)


def resume(model: Net, opt: MixedPrecisionOptimizer, saved: list[Any], rng: random.Random) -> None:
    """Save, or go back to what was saved, in one of the two orders."""
    if not saved:
        saved[:] = [copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())]
        return
    loads = [lambda: model.load_state_dict(saved[0]), lambda: opt.load_state_dict(saved[1])]
    for load in loads if rng.random() < 0.5 else reversed(loads):
        load()
    saved.clear()


def test_a_delta_has_what_changed_and_no_more() -> None:
    """Against a copy of the model, element by element."""
    torch.manual_seed(0)
    model = nn.Linear(300, 700, bias=False, dtype=BFLOAT)
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1e-7), track_changes=True)
    for _ in range(3):
        before = model.weight.detach().clone()
        opt.zero_grad()
        opt.backward(model(torch.randn(5, 300).to(BFLOAT)).float().square().sum())
        opt.step()
        differ = int((model.weight.view(torch.int16) != before.view(torch.int16)).sum())
        delta = opt.take_delta(model)
        assert 0 < differ < before.numel() // 4
        assert delta.num_changed == differ
        assert delta.nbytes < 6 * differ + 1000
    assert opt.take_delta(model).num_changed == 0


def test_the_first_delta_goes_from_the_model_as_it_was_wrapped() -> None:
    model, sampler, opt = pair()
    model.norm.running_mean += 1
    assert {name for name in opt.take_delta(model).names() if "running" not in name and "num_" not in name} == set()
    step(model, opt)
    second = opt.take_delta(model)
    with pytest.raises(ValueError, match=r"'norm\.running_mean' is not what it was .* this one follows number 1"):
        second.apply_(sampler)  # which has the buffers that the first one had brought


def test_parameters_that_come_and_go() -> None:
    model, sampler, opt = pair()
    step(model, opt)
    opt.take_delta(model).apply_(sampler)
    model.frozen.requires_grad_(True)
    opt.add_param_group({"params": [model.frozen]})
    opt.param_groups[0]["params"].pop(0)
    step(model, opt)
    opt.take_delta(model).apply_(sampler)
    assert_equal(model, sampler)
    with torch.no_grad():
        model.a.weight.add_(1.0)  # it is no longer trained
    step(model, opt)
    opt.take_delta(model).apply_(sampler)
    assert_equal(model, sampler)


def test_other_strides_send_a_weight_whole() -> None:
    model, sampler, opt = pair()
    step(model, opt)
    opt.take_delta(model).apply_(sampler)
    step(model, opt)
    model.a.weight.data = model.a.weight.data.t().contiguous().t()
    for _ in range(2):  # and so from there on
        step(model, opt)
        delta = opt.take_delta(model)
        delta.apply_(sampler)
        assert_equal(model, sampler)
        assert delta.num_changed >= model.a.weight.numel() + model.conv.weight.numel(), "that is in channels-last"


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_from_the_same_delta(way: str) -> None:
    model, sampler, opt = pair()
    step(model, opt)
    opt.take_delta(model).apply_(sampler)
    step(model, opt)
    copied = copy.deepcopy if way == "deepcopy" else lambda both: pickle.loads(pickle.dumps(both))
    model, opt = copied((model, opt))
    step(model, opt)
    delta = opt.take_delta(model)
    delta.apply_(sampler)
    assert delta.sequence == 2
    assert_equal(model, sampler)


def test_a_fresh_wrapper_begins_anew() -> None:
    """state_dict has no bits: a sampler that is to go on after a restart gets the weights that were resumed."""
    model, _, opt = pair()
    step(model, opt)
    assert not any("change" in name for name in opt.state_dict())
    fresh, sampler, resumed = pair()
    resumed.load_state_dict(opt.state_dict())
    step(fresh, resumed)
    delta = resumed.take_delta(fresh)
    delta.apply_(sampler)
    assert delta.sequence == 1
    assert_equal(fresh, sampler)


# -- where a delta is applied ------------------------------------------------------------------------------------------


def test_a_wrong_model_is_refused_unchanged() -> None:
    model, sampler, opt = pair()
    step(model, opt)
    delta = opt.take_delta(model)
    for alter, match in (
        (lambda m: m.a.weight.data.view(-1)[5].add_(1), r"'a\.weight' is not what it was when delta 1 began"),
        (lambda m: m.frozen.data[3].add_(1), r"'frozen' is not what it was when delta 1 began"),
        (lambda m: setattr(m, "a", nn.Linear(67, 64, dtype=HALF)), r"'a\.weight' is float16 of shape \(64, 67\)"),
        (lambda m: m.a.bfloat16(), r"'a\.weight' is bfloat16 of shape"),
        (lambda m: m.register_buffer("more", torch.ones(1)), "the delta's model has no 'more'"),
        (lambda m: delattr(m, "frozen"), "the model has no 'frozen'"),
    ):
        other = copy.deepcopy(sampler)
        alter(other)
        before = copy.deepcopy(other)
        with pytest.raises(ValueError, match=match):
            delta.apply_(other)
        assert_equal(other, before)
    with pytest.raises(TypeError, match="apply_: expected a Module or a state_dict, got list"):
        delta.apply_([])
    with pytest.raises(TypeError, match="expected a state_dict of tensors, got int for 'a'"):
        delta.apply_({"a": 3})


def test_deltas_out_of_order_are_refused_unchanged() -> None:
    model, sampler, opt = pair()
    deltas = []
    for _ in range(3):
        step(model, opt)
        deltas.append(opt.take_delta(model))
    deltas[0].apply_(sampler)
    before = copy.deepcopy(sampler)
    for delta in (deltas[2], deltas[0]):
        with pytest.raises(ValueError, match=f"when delta {delta.sequence} began. Apply deltas in order"):
            delta.apply_(sampler)
        assert_equal(sampler, before)
    for wrong in ([deltas[0], deltas[2]], [deltas[1], deltas[0]]):
        with pytest.raises(ValueError, match="Give consecutive ones, the earliest first"):
            WeightDelta.merge(wrong)
    with pytest.raises(ValueError, match="merge: expected one delta or more, got none"):
        WeightDelta.merge([])
    WeightDelta.merge(deltas[1:]).apply_(sampler)
    assert_equal(model, sampler)


def test_deltas_of_other_optimizers_are_not_merged() -> None:
    firsts, seconds = [], []
    for lr in (1e-4, 1e-3):
        model, _, opt = pair(lr=lr)
        step(model, opt)
        firsts.append(opt.take_delta(model))
        step(model, opt)
        seconds.append(opt.take_delta(model))
    with pytest.raises(ValueError, match="merge: 'single' begins with other values"):
        WeightDelta.merge([firsts[0], seconds[1]])
    small = nn.Linear(2, 2, dtype=HALF)
    opt = MixedPrecisionOptimizer(torch.optim.SGD(small.parameters(), lr=1.0), track_changes=True)
    opt.take_delta(small)
    with pytest.raises(ValueError, match="models with different tensors"):
        WeightDelta.merge([firsts[0], opt.take_delta(small)])


# -- models that can't be written --------------------------------------------------------------------------------------


def small(**options: Any) -> tuple[nn.Linear, nn.Linear, MixedPrecisionOptimizer]:
    model = nn.Linear(8, 8, dtype=HALF)
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), track_changes=True, **options)
    return model, copy.deepcopy(model), opt


def step_small(model: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(model(torch.ones(1, 8, dtype=HALF)).float().sum())
    opt.step()


def test_weights_that_are_tied_there_alone_are_refused() -> None:
    """Equal values went in, so digests before are right; two different ones can't be in one place."""
    model = nn.Sequential(nn.Linear(8, 8, dtype=HALF), nn.Linear(8, 8, dtype=HALF))
    model[1].load_state_dict(model[0].state_dict())
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), track_changes=True)
    sampler = copy.deepcopy(model)
    sampler[1].weight = sampler[0].weight
    before = copy.deepcopy(sampler)
    empty = opt.take_delta(model)
    step_small(model, opt)
    empty.apply_(sampler)  # as long as they are equal
    with pytest.raises(ValueError, match=r"apply_: '0\.weight' and '1\.weight' share memory"):
        opt.take_delta(model).apply_(sampler)
    assert_equal(sampler, before)


class WithTensorState(nn.Linear):
    extra = 1.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.extra)

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = float(state)


def test_a_module_that_gives_copies_is_refused() -> None:
    """What is written into a copy would never reach the module: extra state, and hooks that clone."""
    model = WithTensorState(8, 8, dtype=HALF)
    sampler = copy.deepcopy(model)
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), track_changes=True)
    opt.take_delta(model).apply_(sampler)  # the same state there
    step_small(model, opt)
    model.extra = 2.0
    delta, state = opt.take_delta(model), sampler.state_dict()
    before = copy.deepcopy(sampler)
    with pytest.raises(ValueError, match=r"apply_: '_extra_state' of the module's state_dict is a copy"):
        delta.apply_(sampler)
    assert_equal(sampler, before)
    delta.apply_(state)
    assert_equal(model, state)

    plain, sampler, opt = small()
    sampler._register_state_dict_hook(lambda module, state, *_: {name: t.clone() for name, t in state.items()})
    step_small(plain, opt)
    with pytest.raises(ValueError, match=r"apply_: 'weight' of the module's state_dict is a copy"):
        opt.take_delta(plain).apply_(sampler)


def test_an_expanded_tensor_is_refused_before_anything_is_written() -> None:
    model, _, opt = small()
    model.register_buffer("scales", torch.zeros(3).expand(2, 3))
    sampler = copy.deepcopy(model)
    sampler.scales = torch.zeros(3).expand(2, 3)
    before = copy.deepcopy(sampler)
    opt.take_delta(model).apply_(sampler)  # the same values there
    step_small(model, opt)
    model.scales = torch.ones(3).expand(2, 3)
    delta = opt.take_delta(model)
    with pytest.raises(ValueError, match=r"apply_: elements of 'scales' share memory.* \.clone\(\)"):
        delta.apply_(sampler)
    assert_equal(sampler, before)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "a sparse_coo"),
        (lambda: torch.empty(3, device="meta"), "a meta"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "a conjugated"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "a negated"),
    ],
)
def test_tensors_without_bits_of_their_own_are_refused(made: Any, kind: str) -> None:
    model, sampler, opt = small()
    delta = opt.take_delta(model)
    for module in (model, sampler):
        module.register_buffer("odd", made())
    match = f"model: expected a state_dict of plain dense tensors, got {kind} one for 'odd'"
    with pytest.raises(TypeError, match=match):
        opt.take_delta(model)
    with pytest.raises(TypeError, match=match):
        delta.apply_(sampler)


# -- files -------------------------------------------------------------------------------------------------------------


def test_damage_is_refused(tmp_path: Path) -> None:
    """A bit that flipped anywhere, an end that is missing, and other files."""
    model, sampler, opt = pair()
    step(model, opt)
    path = tmp_path / "delta.safetensors"
    opt.take_delta(model).save(path)
    whole = path.read_bytes()
    rng = random.Random(0)
    places = [*range(0, 12), *(rng.randrange(len(whole)) for _ in range(60)), len(whole) - 1]
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << rng.randrange(8)
        with pytest.raises(ValueError, match="load: the file holds no WeightDelta, or is damaged"):
            WeightDelta.load(io.BytesIO(bytes(data)))
    for size in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"load: .*delta\.safetensors holds no WeightDelta, or is damaged"):
            WeightDelta.load(path)
    path.write_bytes(whole)
    WeightDelta.load(path).apply_(sampler)
    assert_equal(model, sampler)


class Unbuffered(io.RawIOBase):
    """Takes a part of what it is given, as pipes, sockets and files of more than 2 GiB do."""

    def __init__(self) -> None:
        self.taken = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data[:1000])
        self.taken += part
        return len(part)


def test_all_of_it_is_written_and_flushed() -> None:
    """To a file that takes parts; and the other end of a buffered pipe need not wait for the next one."""
    model, sampler, opt = pair()
    step(model, opt)
    delta = opt.take_delta(model)
    raw = Unbuffered()
    delta.save(raw)
    assert len(raw.taken) == delta.nbytes
    assert not raw.closed
    buffered = io.BufferedWriter(Unbuffered(), 1 << 24)
    delta.save(buffered)
    assert buffered.raw.taken == raw.taken
    WeightDelta.load(io.BytesIO(raw.taken)).apply_(sampler)
    assert_equal(model, sampler)


def edited(data: bytes, edit: Any) -> bytes:
    """A file with another header, or other numbers in place of a tensor's, and the checksum of these."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    own = json.loads(header["__metadata__"]["fp16opt"])
    edit(header, own, {told["name"]: told for told in own["tensors"]}, body)
    header["__metadata__"].update(fp16opt=json.dumps(own), crc32="0" * 8)
    text = json.dumps(header, separators=(",", ":")).encode()
    sum_ = zlib.crc32(body, zlib.crc32(text))
    text = text.replace(b'"crc32":"00000000"', f'"crc32":"{sum_:08x}"'.encode())
    return len(text).to_bytes(8, "little") + text + bytes(body)


def put(header: Any, body: bytearray, key: str, numbers: Any) -> None:
    """Other numbers at the front of a tensor of the file."""
    begin = header[key]["data_offsets"][0]
    body[begin : begin + 4 * len(numbers)] = torch.tensor(numbers, dtype=torch.int32).numpy().tobytes()


EDITS: dict[str, Any] = {
    "offsets beyond all integers": lambda h, o, t, b: h["values:k"].update(data_offsets=[0, 1 << 70]),
    "offsets beyond memory": lambda h, o, t, b: h["values:k"].update(data_offsets=[0, 1 << 60]),
    "negative offsets": lambda h, o, t, b: h["values:k"].update(data_offsets=[-8, 12]),
    "offsets within an element": lambda h, o, t, b: h["values:k"].update(data_offsets=[0, 3]),
    "offsets backwards": lambda h, o, t, b: h["values:k"].update(data_offsets=[20, 0]),
    "a huge shape": lambda h, o, t, b: h["values:k"].update(data_offsets=[0, 0], shape=[1 << 40]),
    "another shape": lambda h, o, t, b: h["values:k"].update(shape=[7]),
    "two dimensions": lambda h, o, t, b: h["values:k"].update(shape=[5, 1]),
    "another dtype": lambda h, o, t, b: t["k"].update(dtype="float64"),
    "no dtype": lambda h, o, t, b: t["frozen"].update(dtype="nn"),
    "a part that is too small": lambda h, o, t, b: t["k"].update(region=[[5], [0], [4]]),
    "a part before the tensor": lambda h, o, t, b: t["k"].update(region=[[5], [-1], [5]]),
    "sizes of fractions": lambda h, o, t, b: t["k"].update(region=[[5.0], [0], [5.0]]),
    "a huge tensor of few bits": lambda h, o, t, b: t["few"].update(region=[[1 << 40], [0], [1 << 40]]),
    "a name that is none": lambda h, o, t, b: t["frozen"].update(name=5),
    "a name twice": lambda h, o, t, b: o["tensors"].append(t["frozen"]),
    "tied to letters": lambda h, o, t, b: t["frozen"].update(tied="k"),
    "no digest": lambda h, o, t, b: t["k"].update(after=None),
    "a digest of letters": lambda h, o, t, b: t["many"].update(before="3"),
    "a digest of 65 bits": lambda h, o, t, b: t["many"].update(before=2**64),
    "no sequence": lambda h, o, t, b: o.update(sequence=None),
    "a sequence before its start": lambda h, o, t, b: o.update(since=7),
    "places without values": lambda h, o, t, b: h.pop("values:many"),
    "values without places": lambda h, o, t, b: h.pop("places:many"),
    "a tensor of no name": lambda h, o, t, b: h.update({"values:x": h["values:k"]}),
    "places of another kind": lambda h, o, t, b: h["places:many"].update(dtype="F32"),
    "a negative place": lambda h, o, t, b: put(h, b, "places:many", [-1]),
    "a place twice": lambda h, o, t, b: put(h, b, "places:many", [0, 0]),
    "places backwards": lambda h, o, t, b: put(h, b, "places:many", [7, 3]),
    "a place beyond the tensor": lambda h, o, t, b: put(h, b, "places:many", [2**31 - 1]),
    "a bit too many": lambda h, o, t, b: put(h, b, "places:few", [-1]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_that_does_not_fit_together_is_refused(edit: str, tmp_path: Path) -> None:
    """With the right checksum: written by another program, or by hand."""
    model = nn.Module()
    model.many, model.few = (nn.Parameter(torch.ones(count, dtype=HALF)) for count in (1000, 40))
    model.register_buffer("k", torch.zeros(5))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    opt = MixedPrecisionOptimizer(torch.optim.SGD([model.many, model.few], lr=1.0), track_changes=True)
    opt.backward((model.many[[1, 7, 999]].sum() + model.few[::3].sum()).float())
    opt.step()
    file = io.BytesIO()
    opt.take_delta(model).save(file)
    assert WeightDelta.load(io.BytesIO(edited(file.getvalue(), lambda *_: None))).num_changed == 3 + 14 + 5
    data = edited(file.getvalue(), EDITS[edit])
    (tmp_path / "delta").write_bytes(data)
    for place in (io.BytesIO(data), tmp_path / "delta"):
        with pytest.raises(ValueError, match="holds no WeightDelta, or is damaged"):
            WeightDelta.load(place)


@pytest.mark.parametrize("header", [b"[" * 200_000, b"[]", b"NaN", b"\xff\xfe", b'{"__metadata__":3}'])
def test_headers_that_are_none_are_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="the file holds no WeightDelta, or is damaged"):
        WeightDelta.load(io.BytesIO(len(header).to_bytes(8, "little") + header))


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, _, opt = pair()
    step(model, opt)
    opt.take_delta(model).save(tmp_path / "delta.safetensors")
    tensors = safetensors.load_file(tmp_path / "delta.safetensors")
    assert tensors["values:a.weight"].dtype == HALF
    assert tensors["places:a.weight"].dtype in (torch.int32, torch.uint8) if "places:a.weight" in tensors else True


# -- what is refused, and what it costs --------------------------------------------------------------------------------


def test_take_delta_refuses() -> None:
    model, _, opt = pair()
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got OrderedDict"):
        opt.take_delta(model.state_dict())
    sampler = copy.deepcopy(model)
    step(model, opt)
    with pytest.raises(ValueError, match=r"model has no parameter .* of this optimizer.*Pass the module"):
        opt.take_delta(model.a)
    opt.take_delta(model).apply_(sampler)  # nothing was taken
    assert_equal(model, sampler)
    model.__class__ = type("WithState", (Net,), {"get_extra_state": lambda self: 3})
    with pytest.raises(TypeError, match="expected a state_dict of tensors, got int"):
        opt.take_delta(model)
    untracked = MixedPrecisionOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match=r"take_delta: changes are not tracked\. Wrap with track_changes=True"):
        untracked.take_delta(model)
    with pytest.raises(ValueError, match="track_changes: expected one of False, True, got 1"):
        MixedPrecisionOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), track_changes=1)


def _step_words(model: nn.ModuleDict, opt: MixedPrecisionOptimizer) -> None:
    words = model["words"](torch.tensor([1, 2])) if "words" in model else torch.ones(2, 4, dtype=HALF)
    opt.zero_grad()
    opt.backward(model["head"](words).float().square().mean())
    opt.step()


@pytest.mark.parametrize("is_named", [True, False], ids=["names", "no names"])
def test_a_resized_embedding_and_a_deleted_module(is_named: bool) -> None:
    """What the error says to do goes: the next deltas bring a copy that was changed alike to the same bits."""
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "head": nn.Linear(4, 4)}).to(HALF)
    sampler, names = copy.deepcopy(model), model.named_parameters() if is_named else None
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    opt = MixedPrecisionOptimizer(inner, loss_scale=8.0, track_changes=True, named_parameters=names)
    _step_words(model, opt)
    opt.take_delta(model).apply_(sampler)
    model["words"], sampler["words"] = nn.Embedding(6, 4).to(HALF), nn.Embedding(6, 4).to(HALF)
    replaced = r"model has another .* of shape \(6, 4\), than parameter 'words\.weight' .* of shape \(5, 4\)"
    with pytest.raises(ValueError, match=replaced):
        opt.take_delta(model)
    opt.param_groups[0]["params"][0] = model["words"].weight
    _step_words(model, opt)
    opt.take_delta(model).apply_(sampler)
    assert_equal(model, sampler)
    gone = next(opt.master_params())
    del model["words"], sampler["words"]
    with pytest.raises(ValueError, match=r"model has no parameter 'words\.weight' .* as an adapter is"):
        opt.take_delta(model)
    group = opt.param_groups[0]
    group["params"] = [param for param in group["params"] if param is not gone]
    _step_words(model, opt)
    opt.take_delta(model).apply_(sampler)
    assert_equal(model, sampler)


def test_memory_counts_one_bit_a_parameter() -> None:
    weights = [nn.Parameter(torch.zeros(1000, 1000, dtype=HALF)) for _ in range(2)]
    kept = [
        MixedPrecisionOptimizer(torch.optim.AdamW(weights), track_changes=tracks).memory().engine
        for tracks in (False, True)
    ]
    assert 0.125 <= (kept[1] - kept[0]) / 2e6 <= 0.126


def test_float8_and_bool_buffers() -> None:
    model = nn.Linear(4, 4, dtype=HALF)
    model.register_buffer("codes", torch.zeros(5).to(torch.float8_e4m3fn))
    model.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
    model.register_buffer("waves", torch.zeros(3, dtype=torch.complex64))
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), track_changes=True)
    sampler = copy.deepcopy(model)
    for value in (1.0, 2.0):
        model.codes.copy_(torch.full((5,), value).to(torch.float8_e4m3fn))
        model.mask[int(value)] = True
        model.waves += 1j
        delta = sent(opt.take_delta(model))
        assert set(delta.names()) == {"codes", "mask", "waves"}
        delta.apply_(sampler)
        assert_equal(model, sampler)


# -- the tests can fail ------------------------------------------------------------------------------------------------


def broken_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ways to break marking, each in place while the caller looks."""
    from fp16opt.kernels import reference_changed

    def loses_the_or(words: Tensor, before: Tensor, after: Tensor) -> None:
        words[1:].zero_()
        reference_changed_mark(words, before, after)

    def skips_the_tail(words: Tensor, before: Tensor, after: Tensor) -> None:
        whole = before.numel() // 64 * 64
        reference_changed_mark(words, before[:whole], after[:whole])

    reference_changed_mark = reference_changed.mark
    for broken in (loses_the_or, skips_the_tail):
        with monkeypatch.context() as patch:
            patch.setattr(reference_changed, "mark", broken)
            patch.setattr(k.native, "module", None)
            yield broken.__name__


def test_lost_marks_are_noticed_and_the_weight_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes fail to mark shows in the digest of what is not marked: nothing is ever left out."""
    for broken in broken_runs(monkeypatch):
        model, sampler, opt = pair(lr=1e-2, fused_step=True)
        model.eval()
        opt.take_delta(model).apply_(sampler)
        for _ in range(2):
            step(model, opt)
        delta = opt.take_delta(model)
        entries = _entries(delta)
        assert "values:a.weight" in entries, broken
        assert "places:a.weight" not in entries, broken
        delta.apply_(sampler)
        assert_equal(model, sampler)


def _entries(delta: WeightDelta) -> dict[str, Any]:
    file = io.BytesIO()
    delta.save(file)
    data = file.getvalue()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


@pytest.mark.parametrize("where", ["clear", "_remember", "WeightDelta.__init__"])
def test_a_take_that_is_cut_takes_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampler, opt = pair()
    step(model, opt)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    of = {"clear": ChangedBits, "_remember": Changes, "WeightDelta.__init__": WeightDelta}[where]
    with monkeypatch.context() as patched:
        patched.setattr(of, where.split(".")[-1], stop)
        with pytest.raises(KeyboardInterrupt):
            opt.take_delta(model)
    step(model, opt)
    opt.take_delta(model).apply_(sampler)
    assert_equal(model, sampler)
