"""Steps keep their order on a card's streams: torch's race detector finds nothing in what they do, and each wait that
is left out. Recorded on a pretended card: see traces.py."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import traces
from named_steps import sgd_step
from torch import Tensor, nn

import fp16opt
from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels import (
    CallCache,
    GradStats,
    cuda,
    cuda_driver,
    multi_tensor_check,
    multi_tensor_l2norm,
    multi_tensor_scale,
    planted,
    proof,
)
from fp16opt.kernels.operations import Factors, SgdOptions
from fp16opt.tools.prove.trials import MODES, OPTIMIZERS, Loop, Trials

Tracing = Callable[[], AbstractContextManager[traces.Trace]]
HERE = torch.device("cpu")
IN_TIME = {f"AdamW, {mode}" for mode in MODES} | {"SGD momentum, 8-bit state", "Lion, split masters"}


@pytest.fixture
def tracing(libraries: Path, emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Tracing:
    return lambda: traces.traced(libraries, emulated_cuda, monkeypatch)


NAMES = [name for name, _ in Trials(traces.Where(lambda: None)).all()]


@pytest.mark.parametrize(
    "name", [n if n in IN_TIME or "," not in n else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_steps_have_no_race(tracing: Tracing, name: str) -> None:
    """In every mode, with clips and a skip; a graph; two streams by turns. The bits are the CPU's, too."""
    where = traces.Where(tracing)
    found = dict(Trials(where, iterations=5).all())[name]()
    (trace,) = where.traces
    assert trace.races == []
    assert found.words == ""
    assert trace.launches["close_step"] >= 5


# -- the model on a stream of its own ----------------------------------------------------------------------------------


def train_aside(trace: traces.Trace, mode: str, left_out: str = "") -> Loop:
    """Gradients are made on one stream, and steps on another."""
    model, stepping = torch.cuda.Stream(), torch.cuda.Stream()
    loop = Loop(HERE, OPTIMIZERS["AdamW"], **{"fused_step": True, **MODES[mode]})
    model.wait_stream(torch.cuda.default_stream())
    for _ in range(4):
        with torch.cuda.stream(model):
            loop.backward()
        if left_out != "the step's":
            stepping.wait_stream(model)
        with torch.cuda.stream(stepping):
            loop.update()
        if left_out != "the model's":
            model.wait_stream(stepping)
    for stream in (model, stepping):
        torch.cuda.default_stream().wait_stream(stream)
    return loop


@pytest.mark.parametrize("mode", list(MODES))
def test_the_model_may_be_on_another_stream(tracing: Tracing, mode: str) -> None:
    with tracing() as trace:
        loop = train_aside(trace, mode)
        assert trace.races == []
        assert loop.opt.skipped_steps == 0
        del loop
        torch.zeros(3).add_(1.0)  # on the default stream, where all the memory is used again
    assert trace.races == []


@pytest.mark.parametrize("mode", ["full masters", "split masters", "FP32 accumulation"])
@pytest.mark.parametrize("wait", ["the step's", "the model's"])
def test_a_wait_that_the_training_leaves_out_is_found(tracing: Tracing, mode: str, wait: str) -> None:
    with tracing() as trace:
        train_aside(trace, mode, left_out=wait)
    assert trace.races != []


# -- the waits of the library ------------------------------------------------------------------------------------------


def on_streams_by_turns(trace: traces.Trace) -> None:
    """Calls that share a table and nothing else."""
    cache, streams = CallCache(), [torch.cuda.Stream() for _ in range(2)]
    scale, kept = torch.tensor(0.5), []
    for stream in streams:
        stream.wait_stream(torch.cuda.default_stream())
    for k in range(4):
        with torch.cuda.stream(streams[k % 2]):
            grads, stats = [torch.ones(9) for _ in range(3)], GradStats.allocate(3, HERE)
            multi_tensor_check(grads, scale, stats, cache=cache)
            kept.append((grads, stats))
    trace.sync_all()


def table_is_dropped(trace: traces.Trace, first: int = 0) -> None:
    """A table that two streams have used is given back while the second may still read it."""
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    cache, tensors = CallCache(), [torch.ones(100)]
    streams[1].wait_stream(streams[0])
    for stream in streams[first], streams[1 - first]:
        with torch.cuda.stream(stream):
            multi_tensor_l2norm(tensors, cache=cache)
    cache.forget()
    with torch.cuda.stream(streams[first]):
        torch.zeros(3).add_(1.0)
    trace.sync_all()


def number_is_dropped(trace: traces.Trace) -> None:
    """A number of another stream is given back while the kernel may still read it."""
    side, tensors, factor = torch.cuda.Stream(), [torch.ones(100)], torch.tensor(0.5) * 1.0
    side.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(side):
        multi_tensor_scale(tensors, factor)
    del factor
    torch.zeros(3).add_(1.0)
    trace.sync_all()


def rate_is_dropped(trace: traces.Trace) -> None:
    """A learning rate of another stream is replaced while the step may still read it."""
    side, rate, one = torch.cuda.Stream(), torch.tensor(0.5) * 1.0, torch.ones(())
    grads, masters = [torch.ones(100)], [torch.ones(100)]
    side.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(side):
        sgd_step(grads, masters, [SgdOptions(rate, 0.0, 0.0, 0.0, False, False)], [0], Factors(one, one))
    del rate
    torch.zeros(3).add_(1.0)
    trace.sync_all()


def graph_is_replayed(trace: traces.Trace) -> None:
    """A graph reads the table that was copied for it on a stream of its own."""
    cache, tensors, graph = CallCache(), [torch.ones(100)], torch.cuda.CUDAGraph()
    multi_tensor_l2norm(tensors, cache=cache)
    with torch.cuda.graph(graph):
        multi_tensor_l2norm(tensors, cache=cache)
    graph.replay()
    graph.replay()
    del cache
    trace.sync_all()


def kernel_is_proved(trace: traces.Trace) -> None:
    """What the proof's stream has found is read by the host."""
    name, place, empty = "decide_clip", proof.Place(0), torch.empty
    place.device = HERE

    def pin_memory(tensor: Tensor) -> Tensor:
        with torch.cuda.stream(trace.host):
            return trace.pinned(tensor.clone())

    with pytest.MonkeyPatch.context() as patch, torch.cuda.stream(trace.host):
        patch.setattr(Tensor, "pin_memory", pin_memory)
        patch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: empty(*shape, **more))
        planted.expected(name)
        assert proof.prove((name,), 0, place)[name].words == ""


class LeftOut:
    """Leaves one thing out, where a function of the library asks for it.

    Args:
        owner, method: what is left out.
        caller: the function that asks.
        which: the first argument; None for any.
    """

    def __init__(self, owner: Any, method: str, caller: str, which: str | None = None) -> None:
        self.owner, self.method, self.caller, self.which = owner, method, caller, which
        self.count = 0

    def leave_out(self, patch: pytest.MonkeyPatch) -> None:
        real = getattr(self.owner, self.method)

        def method(*given: Any, **more: Any) -> Any:
            if sys._getframe(1).f_code.co_name != self.caller or (self.which and self.which != given[1]):
                return real(*given, **more)
            self.count += 1
            return None

        patch.setattr(self.owner, self.method, method)


WAITS: dict[str, tuple[Callable[[traces.Trace], None], LeftOut]] = {
    "a table's for its last stream": (on_streams_by_turns, LeftOut(cuda.Stream, "wait_for", "_copy")),
    "a table's memory for its streams": (table_is_dropped, LeftOut(cuda.Stream, "hold", "_copy")),
    "a number's memory for a kernel": (number_is_dropped, LeftOut(cuda.Stream, "hold", "queue")),
    "a learning rate's memory for a step": (rate_is_dropped, LeftOut(cuda.Stream, "hold", "launch")),
    "the host's for a graph's table": (
        graph_is_replayed,
        LeftOut(cuda_driver.Driver, "call", "keep", "cuStreamSynchronize"),
    ),
    "the host's for a proof": (kernel_is_proved, LeftOut(traces.Event, "record", "fetch")),
}


@pytest.mark.parametrize("wait", list(WAITS))
def test_every_wait_that_is_left_out_is_found(tracing: Tracing, monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    run, left_out = WAITS[wait]
    with tracing() as trace:
        run(trace)
    assert trace.races == []
    with tracing() as trace, monkeypatch.context() as patch:
        left_out.leave_out(patch)
        run(trace)
    assert left_out.count > 0, "it is asked for"
    assert trace.races != []


def test_every_wait_of_the_library_is_among_them() -> None:
    torchs, ours, found = {"wait_stream", "wait_event", "record_stream"}, {"wait_for", "hold"}, set()
    for path in Path(fp16opt.__file__).parent.rglob("*.py"):
        names = torchs | ours if path.name.startswith("cuda") else set() if path.parent.name == "prove" else torchs
        text = path.read_text()
        for function in ast.walk(ast.parse(text)) if any(name in text for name in names) else ():
            for call in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names:
                    found.add((call.func.attr, function.name))
    asked = {(one.method, one.caller) for _, one in WAITS.values() if one.owner is cuda.Stream}
    inside = {("wait_stream", "wait_for"), ("record_stream", "hold")}
    assert found == asked | inside


def test_a_table_of_a_side_stream_waits_for_the_default_one(tracing: Tracing) -> None:
    with tracing() as trace:
        table_is_dropped(trace, first=1)
    assert trace.races == []


def test_a_staging_buffer_that_is_written_again_is_found(tracing: Tracing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of a table has one of its own, which torch keeps until it is done."""

    def run(kept: dict[int, Tensor] | None) -> list[str]:
        with tracing() as trace, monkeypatch.context() as patch:
            real = cuda.Stream.staging
            if kept is not None:

                def staging(stream: Any, size: int) -> Tensor:
                    return trace.pinned(kept.setdefault(size, real(stream, size)))

                patch.setattr(cuda.Stream, "staging", staging)
            cache = CallCache()
            for k in range(3):
                multi_tensor_l2norm([torch.ones(9) for _ in range(k + 1)][-1:], cache=cache)
            trace.sync_all()
        return trace.races

    assert run(None) == []
    assert any("a write of the host" in race for race in run({}))


def test_other_ways_to_train_have_no_race(tracing: Tracing) -> None:
    """A GradScaler, averages of masters, and deltas, with the model on a stream of its own."""
    with tracing() as trace:
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).half()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        opt, side = MixedPrecisionOptimizer(inner, track_changes=True), torch.cuda.Stream()
        average = fp16opt.AveragedMasters(model, opt, fp16opt.ema(0.5))
        scaler = fp16opt.GradScaler(HERE.type, init_scale=64.0)
        for _ in range(3):
            side.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(side):
                scaler.scale(model(torch.ones(8, 40).half()).float().mean()).backward()
            torch.cuda.default_stream().wait_stream(side)
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            average.update()
        assert opt.take_delta(model).num_changed > 0
        assert trace.races == []
        assert {"lerp", "adam_marking"} <= set(trace.launches)
