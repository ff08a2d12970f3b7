"""Shared settings of the test suite: import path, threads, marks, hypothesis profiles; what is done once for many."""

import gc
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Idle threads must not spin on cores that other workers want; OpenMP reads this when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch
from hypothesis import HealthCheck, settings

from fp16opt.engine.diagnostics import Lines

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # so that `import oracle` works under every pytest import mode
    sys.path.insert(0, HERE)

# The tensors here are small: more threads than this only add noise to the run time.
torch.set_num_threads(min(2, os.cpu_count() or 1))

# torch keeps each seed for a card that may come, with the stack that it is told on: a tenth of a small training.
if not torch.cuda.is_available():
    torch.cuda.manual_seed_all = lambda seed: None

# pytest attaches its handlers to each logger that does not propagate, three times a test, and torch has forty of these.
for _logger in logging.root.manager.loggerDict.values():
    if isinstance(_logger, logging.Logger):
        _logger.propagate = True

_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("default", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("all", max_examples=60, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=1000, **_COMMON)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "all: run by --all alone")
    config.addinivalue_line("markers", "cells(which): 'every' or 'each', without --all; see tests/products.py")
    import kept
    import products

    products.takes_all = config.getoption("--all")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "all" if products.takes_all else "default"))
    cache = getattr(config, "cache", None)
    kept.home = None if cache is None else cache.mkdir("fp16opt")
    config.addinivalue_line("markers", "missing_scale: hears the warning of FP16 weights without a loss scale")
    config.addinivalue_line("markers", "gpu: needs a CUDA device, or the fixture that pretends one")
    config.addinivalue_line("markers", "card: needs a CUDA device itself: its memory, its profiler, its errors")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", action="store_true", help="run every tenth test, for a first look at a change")
    parser.addoption("--all", action="store_true", help="run every cell of every product, and what is marked all")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The garbage collector leaves out a million objects that stay to the end: torch, and the tests themselves."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # of those that marks and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        _take_some(config, items)
    if config.getoption("--tenth"):
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % 10])
        items[:] = items[::10]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and this machine has none")
    for item in items:
        if "card" in item.keywords:
            item.add_marker(skip)


def _take_some(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of all items those that a user's run takes; of tests that were named with their parameters, all."""
    if any("[" in argument for argument in config.args):
        return
    import products

    left = [item for item in items if "all" not in item.keywords]
    kept = {id(left[place]) for place in products.chosen(list(map(_cell, left)))}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _cell(item: pytest.Item) -> tuple[str, str, dict[str, Any]]:
    """The name of an item's test, what its mark `cells` says, its axes: see `products.chosen`. Slow ones are whole."""
    import products

    spec, mark = getattr(item, "callspec", None), item.get_closest_marker("cells")
    asked = "every" if "slow" in item.keywords else mark.args[0] if mark else ""
    words = [table.args[0] for table in item.iter_markers("parametrize")]
    tables = [one.replace(",", " ").split() if isinstance(one, str) else one for one in words]
    return item.nodeid.partition("[")[0], asked, products.axes_of(tables, spec.params if spec else {})


@pytest.fixture(autouse=True)
def stepping(request: pytest.FixtureRequest) -> object:
    """What an optimizer gets that is made without ``fused_step``, where a test asks for it; see `checks.by_step`."""
    mode = getattr(request, "param", "as it is")
    if mode != "as it is":
        from fp16opt import MixedPrecisionOptimizer

        defaults = MixedPrecisionOptimizer.__init__.__kwdefaults__
        assert defaults is not None
        request.getfixturevalue("monkeypatch").setitem(defaults, "fused_step", mode)
    return mode


@pytest.fixture(scope="session")
def emulated_cuda(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The CUDA kernels' source, running on the CPU; compiled by the first worker that asks, and kept."""
    import emulated
    import kept

    with kept.folder("emulated", emulated.made_of(), tmp_path_factory) as folder:
        return emulated.build(folder)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pretended driver and NVRTC; compiled as the kernels are."""
    import cards
    import kept

    with kept.folder("cards", cards.made_of(), tmp_path_factory) as folder:
        return cards.build(folder)


def _tells_of_another_thing(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("FP16 weights are trained without loss scaling")


@pytest.fixture(autouse=True)
def no_missing_scale(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most FP16 optimizers here have no loss scale, as their gradients are not small: nothing says so, but where a test
    asks for it by the mark ``missing_scale``."""
    logger = logging.getLogger("fp16opt")
    if request.node.get_closest_marker("missing_scale") is None:
        logger.addFilter(_tells_of_another_thing)
    yield
    logger.removeFilter(_tells_of_another_thing)


@pytest.fixture(autouse=True)
def only_optimizers_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that other tests left alive would be told apart in the log from those of this one, and be blamed."""
    monkeypatch.setattr(Lines, "_living", weakref.WeakSet())


@pytest.fixture
def of_another_library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes objects with these fields that pickle under another library's name, as long as the test runs."""

    def make(module: str, name: str, **fields: Any) -> Any:
        made = type(name, (), {"__module__": module, "__qualname__": name})
        parts = module.split(".")
        for path in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        monkeypatch.setattr(sys.modules[module], name, made, raising=False)
        held = made()
        vars(held).update(fields)
        return held

    return make
