"""The four opt levels, their properties, and which overrides of them make sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

__all__ = ["O0", "O1", "O2", "O3", "AmpError", "Properties", "opt_levels", "resolve"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NAMES = (
    *("enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
    *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
)


class AmpError(RuntimeError, ValueError):
    """A call that amp refuses. Scripts of old catch ``RuntimeError``; for values that make no sense it is both."""


class Properties:
    """What an opt level sets: read as attributes or from the dict ``options``; writing checks.

    Example:
        >>> properties = O2(Properties())
        >>> properties.cast_model_type, properties.options["master_weights"]
        (torch.float16, True)
        >>> properties.loss_scale = "128.0"
        >>> properties.loss_scale
        128.0
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        self.__dict__["options"] = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
        }

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"amp's properties are {', '.join(_NAMES)}; there is no {name!r}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AttributeError(f"amp's properties are {', '.join(_NAMES)}; there is no {name!r}.")
        check = _CHECKS.get(name)
        self.options[name] = value if check is None else check(self, value)

    def __repr__(self) -> str:
        return f"Properties({', '.join(f'{name}={value}' for name, value in self.options.items())})"


def _cast_model_type(properties: Properties, value: Any) -> Any:
    if value is not None and value is not False and value not in _DTYPES:
        raise AmpError(
            f"cast_model_type: expected torch.float16, torch.bfloat16, torch.float32 or False, got {value!r}."
        )
    if properties.opt_level == "O1" and value not in (None, False, torch.float32):
        raise AmpError(
            "cast_model_type: O1 casts around torch functions and leaves the model's weights in FP32, got "
            f"{value}. Leave it out, or use O2, which casts the weights."
        )
    return value


def _patch_torch_functions(properties: Properties, value: Any) -> bool:
    if not isinstance(value, bool):
        raise AmpError(f"patch_torch_functions: expected True or False, got {value!r}.")
    if value and properties.opt_level != "O1":
        raise AmpError(
            f"patch_torch_functions: True is what O1 does, the opt_level is {properties.opt_level}. "
            "Use opt_level='O1' to have functions cast their inputs."
        )
    return value


def _keep_batchnorm_fp32(properties: Properties, value: Any) -> bool | None:
    given = as_bool("keep_batchnorm_fp32", value)
    if properties.opt_level == "O1" and given is not None:
        raise AmpError(
            "keep_batchnorm_fp32: under O1 all weights stay in FP32 and batch norm with them, "
            f"got {value}. Leave it out, or use O2 or O3."
        )
    return given


def _master_weights(properties: Properties, value: Any) -> bool | None:
    given = as_bool("master_weights", value)
    if properties.opt_level == "O1" and given is not None:
        raise AmpError(
            "master_weights: under O1 the model's own weights are FP32 and there is nothing to keep masters of, "
            f"got {value}. Leave it out, or use O2."
        )
    return given


def _loss_scale(properties: Properties, value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise AmpError(f"loss_scale: expected a number, a numeric string or 'dynamic', got {value!r}.") from None


_CHECKS: dict[str, Callable[[Properties, Any], Any]] = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": _master_weights,
    "loss_scale": _loss_scale,
}


def as_bool(name: str, value: Any) -> bool | None:
    """A bool, also from its name; None stays."""
    if value in ("True", "False"):
        return bool(value == "True")
    if value is None or isinstance(value, bool):
        return value
    raise AmpError(f"{name}: expected True, False, 'True' or 'False', got {value!r}.")


class _Level:
    """Sets all properties at once; called with a :class:`Properties`."""

    name: ClassVar[str]
    brief: ClassVar[str]
    settings: ClassVar[dict[str, Any]]

    def __call__(self, properties: Properties) -> Properties:
        """Overwrite ``properties`` with this level's defaults and return it."""
        properties.options.update(enabled=True, opt_level=self.name, **self.settings)
        return properties


class _O0(_Level):
    name = "O0"
    brief = "O0: plain FP32 training."
    settings: ClassVar[dict[str, Any]] = {
        "cast_model_type": torch.float32,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": None,
        "master_weights": False,
        "loss_scale": 1.0,
    }


class _O1(_Level):
    name = "O1"
    brief = "O1: functions cast their inputs, weights stay FP32."
    settings: ClassVar[dict[str, Any]] = {
        "cast_model_type": None,
        "patch_torch_functions": True,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": "dynamic",
    }


class _O2(_Level):
    name = "O2"
    brief = "O2: an FP16 model with FP32 batch norm and FP32 master weights."
    settings: ClassVar[dict[str, Any]] = {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    }


class _O3(_Level):
    name = "O3"
    brief = "O3: FP16 throughout, without master weights."
    settings: ClassVar[dict[str, Any]] = {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    }


O0, O1, O2, O3 = _O0(), _O1(), _O2(), _O3()
opt_levels: dict[str, _Level] = {level.name: level for level in (O0, O1, O2, O3)}


def resolve(opt_level: str, overrides: dict[str, Any], forgive: Callable[[AmpError], None] | None = None) -> Properties:
    """The properties of a level with overrides, where those given are not None.

    Args:
        opt_level: "O0" to "O3".
        overrides: By property name.
        forgive: Called with a refused override instead of raising; the property then keeps the level's default.

    Raises:
        AmpError: The level is unknown, or an override makes no sense there.
    """
    if not isinstance(opt_level, str) or opt_level not in opt_levels:
        raise AmpError(
            f"opt_level: expected one of 'O0', 'O1', 'O2', 'O3', got {opt_level!r}. "
            "The first character is the letter O, not the number zero."
        )
    properties = opt_levels[opt_level](Properties())
    for name, value in overrides.items():
        if value is None:
            continue
        try:
            setattr(properties, name, value)
        except AmpError as refused:
            if forgive is None:
                raise
            forgive(refused)
    return properties
