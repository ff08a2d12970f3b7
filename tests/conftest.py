"""Shared settings of the test suite: import path, threads, marks, hypothesis profiles."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # so that `import oracle` works under every pytest import mode
    sys.path.insert(0, HERE)

# The tensors here are small: more threads than this only add noise to the run time.
torch.set_num_threads(min(2, os.cpu_count() or 1))

_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("default", max_examples=60, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "gpu: needs a CUDA device, or the fixture that pretends one")
    config.addinivalue_line("markers", "card: needs a CUDA device itself: its memory, its profiler, its errors")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", action="store_true", help="run every tenth test, for a first look at a change")


@pytest.hookimpl(trylast=True)  # of those that marks and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--tenth"):
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % 10])
        items[:] = items[::10]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and this machine has none")
    for item in items:
        if "card" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def stepping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    """What an optimizer gets that is made without ``fused_step``, where a test asks for it; see `checks.by_step`."""
    mode = getattr(request, "param", "as it is")
    if mode != "as it is":
        from fp16opt import MixedPrecisionOptimizer

        defaults = MixedPrecisionOptimizer.__init__.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "fused_step", mode)
    return mode


@pytest.fixture(scope="session")
def emulated_cuda(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The CUDA kernels' source, running on the CPU."""
    import emulated

    return emulated.build(tmp_path_factory.mktemp("emulated"))
