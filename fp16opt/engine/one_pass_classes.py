"""Classes that users register for one-pass steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.optim import Optimizer

from .one_pass_rows import FUNCTORS, ROWS, OnePassRow, row_of

Keys = Mapping[str, "str | tuple[str, ...]"]


def register_one_pass(cls: type[Optimizer], functor: str, hyperparameters: Keys) -> None:
    """Have optimizers of exactly this class stepped in one pass, by a kernel that is compiled already.

    For classes that step as SGD, Adam, AdamW or Lion do and are none of torch's: a copy of one, a subclass that logs.
    It holds for optimizers that are wrapped from now on, in this process; a subclass of ``cls`` is another class. It
    is not taken on trust: when such an optimizer is wrapped, some small tensors are stepped both ways, and where
    weights or state differ the class steps itself (``fused_step="auto"``) or is refused, with what differed
    (``fused_step=True``).

    Args:
        cls: An optimizer class. It keeps its state in tensors under torch's names: "momentum_buffer"; "step",
            "exp_avg", "exp_avg_sq" and, with amsgrad, "max_exp_avg_sq"; Lion's "exp_avg". Those are FP32 and of the
            parameter's shape, "step" a float32 tensor of one element.
        functor: "sgd", "adam", "adamw" or "lion".
        hyperparameters: From the functor's settings to the keys of the class's param groups; for "betas" one key for
            both or a tuple of two keys. Settings that are left out are switched off:

            - "sgd": lr; momentum, dampening, weight_decay, nesterov, maximize.
            - "adam", "adamw": lr, betas, eps; weight_decay, amsgrad, maximize.
            - "lion": lr, betas; weight_decay, maximize.

    Raises:
        TypeError: ``cls`` is no optimizer class, or ``hyperparameters`` no mapping to keys.
        ValueError: There is no such functor or setting, one is missing, or the class has another row already.

    Example:
        >>> import torch
        >>> from fp16opt import MixedPrecisionOptimizer
        >>> class Logged(torch.optim.AdamW):
        ...     pass
        >>> same = {name: name for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
        >>> register_one_pass(Logged, "adamw", same)
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> "step: fused" in repr(MixedPrecisionOptimizer(Logged([weight]), fused_step=True))
        True
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        shown = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        raise TypeError(f"cls: expected a subclass of torch.optim.Optimizer, got {shown}.")
    if functor not in FUNCTORS:
        raise ValueError(f"functor: expected one of {', '.join(map(repr, FUNCTORS))}, got {functor!r}.")
    row = FUNCTORS[functor]
    _check_keys(row, functor, hyperparameters)
    made = replace(row, keys=dict(hyperparameters))
    known = row_of(cls)
    if known is not None and known != made:
        raise ValueError(f"cls: {cls.__name__} has a one-pass step already, with other settings. Leave the call out.")
    ROWS[cls] = made


def _check_keys(row: OnePassRow, functor: str, hyperparameters: object) -> None:
    if not isinstance(hyperparameters, Mapping):
        kind = type(hyperparameters).__name__
        raise TypeError(f"hyperparameters: expected a dict from settings to keys of param groups, got {kind}.")
    known = dict.fromkeys((*row.wanted, *row.neutral))
    for name, key in hyperparameters.items():
        if name not in known:
            has = ", ".join(known)
            raise ValueError(f"hyperparameters: functor {functor!r} has {has}, and no {name!r}. Leave it out.")
        pair = name == "betas" and isinstance(key, tuple) and len(key) == 2
        if not (isinstance(key, str) or (pair and all(isinstance(part, str) for part in key))):
            wanted = "a key of the class's param groups" + (", or a tuple of two" if name == "betas" else "")
            raise TypeError(f"hyperparameters[{name!r}]: expected {wanted}, got {key!r}.")
    missing = [name for name in row.wanted if name not in hyperparameters]
    if missing:
        needed = ", ".join(missing)
        raise ValueError(f"hyperparameters: functor {functor!r} needs {needed} too. Say which keys they have.")
