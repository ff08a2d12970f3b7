"""Lightning's finetuning callbacks, which look for the model's own parameters in the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning

from ..optimizer import MixedPrecisionOptimizer

_HOOKS = ("on_fit_start", "on_train_epoch_start")


class _Group(dict[str, Any]):
    """A param group with the model's parameters in the place of masters. What is written goes into the group itself."""

    def __init__(self, group: dict[str, Any], params: list[Any]) -> None:
        super().__init__(group, params=params)
        self._group = group

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._group[key] = value


class OfModel:
    """A ``MixedPrecisionOptimizer`` as finetuning callbacks know optimizers: groups hold the model's parameters.

    Everything but ``param_groups`` is the optimizer's own.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, in order."""
        groups = self.optimizer.param_groups
        models = iter(self.optimizer.model_params())
        return [_Group(group, [next(models) for _ in group["params"]]) for group in groups]

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Those of a checkpoint: they begin with the groups that are there, and the rest is added.

        Raises:
            ValueError: They don't.
        """
        for number, (mine, saved) in enumerate(zip(self.param_groups, groups, strict=False)):
            if [id(param) for param in mine["params"]] != [id(param) for param in saved["params"]]:
                raise ValueError(
                    f"group {number} of the checkpoint has other parameters than that of configure_optimizers. Leave "
                    "configure_optimizers as it was when the checkpoint was saved."
                )
            for key, value in saved.items():
                if key != "params":
                    mine[key] = value
        for group in groups[len(self.param_groups) :]:
            self.optimizer.add_param_group(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class _Seen:
    """A Trainer whose optimizers are :class:`OfModel`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def optimizers(self) -> list[Any]:
        """The Trainer's, seen so."""
        found: list[Any] = self._trainer.optimizers
        return [OfModel(one) if isinstance(one, MixedPrecisionOptimizer) else one for one in found]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_trainer"], name)


def adapt(trainer: Any) -> Callable[[], None]:
    """Have the Trainer's finetuning callbacks see such optimizers while their own hooks run.

    Returns:
        What to call when the training is over.
    """
    adapted = [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]
    for callback in adapted:
        for name in _HOOKS:
            setattr(callback, name, _seeing_model(getattr(callback, name)))

    def undo() -> None:
        for callback in adapted:
            for name in _HOOKS:
                vars(callback).pop(name, None)

    return undo


def _seeing_model(hook: Callable[..., None]) -> Callable[..., None]:
    def call(trainer: Any, module: Any) -> None:
        hook(_Seen(trainer), module)

    return call
