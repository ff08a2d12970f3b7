"""install_as_apex(): what resolves, what is refused with which message, and that uninstall undoes it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp16opt
import fp16opt.apex
from fp16opt import install_as_apex
from fp16opt.apex import table
from fp16opt.apex.__main__ import main

from .runs import python

HAS_AMP = importlib.util.find_spec("fp16opt.amp") is not None
NAMES = {
    "apex.fp16_utils": "FP16_Optimizer network_to_half convert_network convert_module BN_convert_float tofp16 "
    "FP16Model prep_param_lists model_grads_to_master_grads master_params_to_model_params to_python_float "
    "clip_grad_norm LossScaler DynamicLossScaler",
    "apex.fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "apex.fp16_utils.fp16util": "network_to_half prep_param_lists to_python_float",
    "apex.fp16_utils.loss_scaler": "LossScaler DynamicLossScaler",
    "apex.parallel": "DistributedDataParallel convert_syncbn_model LARC SyncBatchNorm create_syncbn_process_group",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.distributed": "flat_dist_call DistributedDataParallel",
    "apex.optimizers": "FusedAdam FusedSGD FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad FusedAdagrad FP16_Optimizer",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.normalization": "FusedLayerNorm MixedFusedLayerNorm FusedRMSNorm MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": "FusedLayerNorm FusedLayerNormAffineFunction fused_layer_norm_affine",
    "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply",
    "amp_C": "multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_unscale_l2norm multi_tensor_adam "
    "multi_tensor_sgd multi_tensor_lamb update_scale_hysteresis",
    "apex_C": "flatten unflatten",
}


def ours() -> dict[str, types.ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in table.ROOTS}


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Each test starts without apex and ends so."""
    assert not ours()
    path = list(sys.meta_path)
    yield
    fp16opt.apex.uninstall()
    assert not ours(), "modules of apex's are left"
    assert sys.meta_path == path


@pytest.fixture
def installed(leaves_nothing: None) -> Any:
    return install_as_apex()


# -- what resolves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", NAMES)
def test_every_promised_name_resolves(installed: Any, module: str) -> None:
    found = importlib.import_module(module)
    for name in NAMES[module].split():
        assert getattr(found, name) is not None
        assert name in vars(found), "timm asks for names in __dict__"


def test_import_apex_brings_its_parts_as_attributes(installed: Any) -> None:
    import apex

    assert apex.fp16_utils.FP16_Optimizer is fp16opt.fp16_utils.FP16_Optimizer
    assert apex.optimizers.FusedAdam is fp16opt.optimizers.FusedAdam
    assert isinstance(apex.parallel.LARC, type), "a class, although a module has the same name"
    assert isinstance(sys.modules["apex.parallel.LARC"], types.ModuleType)
    assert issubclass(apex.parallel.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
    assert issubclass(apex.normalization.FusedLayerNorm, torch.nn.LayerNorm)
    assert not hasattr(apex, "contrib")
    assert not hasattr(apex, "__version__")


@pytest.mark.skipif(not HAS_AMP, reason="fp16opt.amp is not in this tree")
def test_amp_resolves_with_its_private_names(installed: Any) -> None:
    import apex
    from apex import amp
    from apex.amp._amp_state import _amp_state

    assert apex.amp is amp
    assert amp.initialize is fp16opt.amp.initialize
    assert amp._amp_state is _amp_state
    assert not isinstance(amp._amp_state, types.ModuleType)
    assert "state_dict" in amp.__dict__
    for name in table.AMP_MODULES:
        assert isinstance(importlib.import_module(f"apex.amp.{name}"), types.ModuleType)


# -- what does not ---------------------------------------------------------------------------------------------------

MISSING = [
    ("import apex.contrib.multihead_attn", r"apex\.contrib\.?\w* is not provided.*scaled_dot_product_attention"),
    ("from apex.contrib.optimizers import FP16_Optimizer", r"apex\.contrib.* is not provided.*the apex of today"),
    ("from apex import contrib", r"apex\.contrib is not provided"),
    ("from apex import pyprof", r"apex\.pyprof is not provided.*Use torch\.profiler"),
    ("from apex.transformer import parallel_state", r"apex\.transformer is not provided.*Use Megatron-Core"),
    ("from apex.RNN import LSTM", r"apex\.RNN is not provided.*torch\.nn\.LSTM"),
    ("from apex.mlp import MLP", r"apex\.mlp is not provided"),
    ("from apex.reparameterization import apply_weight_norm", r"parametrizations\.weight_norm"),
    ("from apex.fused_dense import FusedDense", r"apex\.fused_dense is not provided.*torch\.nn\.Linear"),
    ("from apex.parallel import Reducer", r"apex\.parallel\.Reducer is not provided.*all_reduce"),
    ("from apex.parallel import nothing_like_it", r"apex\.parallel\.nothing_like_it is not provided.*docs/from-apex"),
    ("from amp_C import multi_tensor_novograd", r"amp_C\.multi_tensor_novograd is not provided.*fp16opt\.kernels"),
    ("import amp_C; amp_C.multi_tensor_novograd", r"amp_C\.multi_tensor_novograd is not provided"),
    ("import apex; apex.contrib", r"apex\.contrib is not provided"),
]


@pytest.mark.parametrize(("code", "message"), MISSING)
def test_what_is_not_provided_says_which_and_what_to_use(installed: Any, code: str, message: str) -> None:
    with pytest.raises(AttributeError if ";" in code else ImportError, match=message):
        exec(code, {})


def test_other_imports_are_left_alone(installed: Any) -> None:
    assert importlib.util.find_spec("apexlike") is None
    with pytest.raises(ModuleNotFoundError, match="No module named 'amp_C_other'"):
        importlib.import_module("amp_C_other")


# -- installing ------------------------------------------------------------------------------------------------------


def test_nothing_happens_without_the_call(tmp_path: Path) -> None:
    """And with it one line is seen, without any logging setup."""
    program = """
import fp16opt, importlib.util, sys
print([m for m in sys.modules if "fp16_utils" in m], importlib.util.find_spec("apex"), sys.meta_path)
fp16opt.install_as_apex()
"""
    done = python(tmp_path, "-c", program)
    assert done.stdout.startswith("[] None ")
    assert "ApexFinder" not in done.stdout
    assert done.stderr.count("\n") == 1
    assert "serves `import apex`" in done.stderr


def test_it_logs_one_line_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        first = install_as_apex()
        assert install_as_apex() is first
        import apex  # noqa: F401
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "fp16opt"
    assert "fp16opt serves `import apex` in this process from now on. fp16opt.apex.uninstall()" in caplog.text
    assert sum(finder is first for finder in sys.meta_path) == 1


def test_uninstall_undoes_it() -> None:
    before = set(sys.modules)
    handle = install_as_apex()
    import apex.optimizers  # noqa: F401
    import apex_C  # noqa: F401

    handle.uninstall()
    handle.uninstall()
    fp16opt.apex.uninstall()
    assert {name for name in set(sys.modules) - before if not name.startswith("fp16opt")} == set()
    with pytest.raises(ModuleNotFoundError, match="No module named 'apex'"):
        importlib.import_module("apex")
    with install_as_apex():
        importlib.import_module("apex.parallel")
    assert importlib.util.find_spec("apex") is None


# -- beside or in place of a real apex -------------------------------------------------------------------------------


def make_apex(folder: Path, *parts: str) -> str:
    """An installed apex with these subpackages, each with WHO = "real"."""
    for part in ("", *parts):
        package = folder / "apex" / part
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text('WHO = "real"\n')
    return str(folder)


def test_a_real_apex_with_amp_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(make_apex(tmp_path, "amp"))
    path = list(sys.meta_path)
    with pytest.raises(
        RuntimeError, match=r"apex is installed at .*apex and has amp: .*install_as_apex\(replace=True\)"
    ):
        install_as_apex()
    assert sys.meta_path == path
    import apex.amp

    assert apex.amp.WHO == "real"
    with pytest.raises(RuntimeError, match="and has amp"):
        install_as_apex()
    assert apex.amp.WHO == "real"
    with install_as_apex(replace=True):
        import apex.fp16_utils as mine

        assert mine.FP16_Optimizer is fp16opt.fp16_utils.FP16_Optimizer
        assert not hasattr(sys.modules["apex"], "WHO")
    import apex.amp

    assert apex.amp.WHO == "real", "what was imported before is back"
    for name in ours():
        del sys.modules[name]


def test_beside_an_apex_without_amp_the_rest_stays_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(make_apex(tmp_path, "optimizers", "contrib", "parallel"))
    import apex
    import apex.parallel as real_parallel

    install_as_apex()
    assert "(amp, fp16_utils and parallel; the rest is the apex at " in caplog.text
    import apex.contrib
    import apex.optimizers
    from apex.fp16_utils import FP16_Optimizer
    from apex.parallel import LARC

    assert FP16_Optimizer is fp16opt.fp16_utils.FP16_Optimizer
    assert apex.fp16_utils.FP16_Optimizer is FP16_Optimizer
    assert LARC is fp16opt.optimizers.LARC
    assert apex.WHO == apex.contrib.WHO == apex.optimizers.WHO == "real"
    assert importlib.import_module("apex.normalization").FusedLayerNorm is not None, "it lacks this one"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'apex\.nothing'"):
        importlib.import_module("apex.nothing")
    fp16opt.apex.uninstall()
    assert sys.modules["apex.parallel"] is real_parallel is apex.parallel
    assert not hasattr(apex, "fp16_utils")
    for name in ours():
        del sys.modules[name]


def test_a_real_apex_that_fails_to_import_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(make_apex(tmp_path))
    (tmp_path / "apex" / "__init__.py").write_text("raise OSError('libcudart.so is missing')\n")
    path = list(sys.meta_path)
    with pytest.raises(OSError, match="libcudart"):
        install_as_apex()
    assert sys.meta_path == path


def test_a_clone_of_apexs_repository_beside_the_script_is_no_apex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apex" / "amp").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    install_as_apex()
    from apex.fp16_utils import FP16_Optimizer

    assert FP16_Optimizer is fp16opt.fp16_utils.FP16_Optimizer


# -- python -m fp16opt.apex ------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from apex.fp16_utils import FP16_Optimizer
from helper import VALUE
if __name__ == "__main__":
    print(FP16_Optimizer.__module__, VALUE, sys.argv[1:], sys.argv[0].endswith("train.py"))
    sys.exit(3)
"""


def write_script(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("VALUE = 7\n")


def test_running_an_unchanged_script(tmp_path: Path) -> None:
    write_script(tmp_path / "project")
    done = python(tmp_path, "-m", "fp16opt.apex", "project/train.py", "--lr", "0.1", "-m", "x")
    assert done.stdout.split(" ", 1)[1].strip() == "7 ['--lr', '0.1', '-m', 'x'] True", done.stderr
    assert done.stdout.startswith("fp16opt.fp16_utils")
    assert done.returncode == 3
    assert done.stderr.count("serves `import apex`") == 1

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys, apex; print(apex.__name__, sys.argv[1:])")
    done = python(tmp_path, "-m", "fp16opt.apex", "folder", "--epochs")
    assert "apex ['--epochs']" in done.stdout, done.stderr


@pytest.mark.all
def test_running_a_module(tmp_path: Path) -> None:
    write_script(tmp_path / "project")
    done = python(tmp_path / "project", "-m", "fp16opt.apex", "-m", "train", "--epochs", "1")
    assert "7 ['--epochs', '1'] True" in done.stdout, done.stderr
    assert done.returncode == 3


def test_running_where_a_real_apex_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_script(tmp_path / "project")
    real = make_apex(tmp_path / "site", "amp")
    monkeypatch.syspath_prepend(real)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "project" / "train.py")])
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "has amp: this would hide it" in said
    assert "pass --replace before the script" in said
    done = python(tmp_path, "-m", "fp16opt.apex", "--replace", "project/train.py", path=(real,))
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: script"),
        (["none.py"], "no such file: none.py"),
        (["folder"], "folder is a folder without a __main__.py. Name the script in it, or -m and a module"),
    ],
)
def test_bad_usage(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
