"""What a training needs: memory a rank, bytes and messages a step, and a lower bound of the step's time.

``python -m fp16opt plan --params 7e9 --ranks 64 --shard fsdp2`` prints it. docs/scale.md derives the formulas; tests
compare them with the tensors and messages of real ranks.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields

from ..engine.arguments import check_choice
from ..kernels.formulas import FORMULAS

SHARDS = ("none", "ddp", "zero", "fsdp2")
OPTIMIZERS = {"sgd-momentum": 4, **{name: 4 * formula.least() for name, formula in FORMULAS.items()}}
"""Bytes of FP32 state a parameter: with the least state that the formula has, and SGD with all of its."""
_SCALE = 4 / 128  # an FP32 scale for each block of 8-bit state
EIGHT_BITS = {"sgd": 0, "sgd-momentum": 1 + _SCALE, "adam": 2 + _SCALE, "adamw": 2 + _SCALE}  # as OPTIMIZERS, in 8 bits
STATES = ("fp32", "8bit")
MASTERS = {"full": 4, "split": 2, "split24": 1}  # bytes a parameter beside the 16-bit weight
HALF = 2  # bytes of a weight or a gradient in FP16 or BF16
SINGLE = 4
_MOST = 1e24  # of anything that is counted: products of these are finite
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes of gradients in DDP's first message, and in the others


@dataclass(frozen=True)
class Plan:
    """One training.

    Args:
        params: parameters of the model.
        ranks: processes that share it.
        shard: "none" (one rank), "ddp", "zero" (ZeRO-1 around DDP) or "fsdp2".
        optimizer: a key of ``OPTIMIZERS``.
        masters: "full": FP32; "split": 16 bits beside the 16-bit weight; "split24": 8 bits.
        state: "fp32", or "8bit": what ``optimizer_state`` is. Vectors and small matrices, which keep FP32 state, are
            not counted apart.
        release: whether each gradient is used and freed in backward, as with ``gradient_release=True``, on one rank.
        track_changes: whether one bit a parameter is kept for deltas.
        fused_step: False: the wrapped optimizer's own step, which takes FP32 gradients. Else it is one pass, on shards
            too.
        layers: blocks that FSDP2 gathers one after the other; two are whole at a time.
        clip: whether gradients are clipped, in the worst case with a factor below 1.
        network: bytes/s that a rank sends, and receives.
        memory: bytes/s that a rank reads and writes.
        compute: seconds of forward and backward, which communication may overlap with.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> plan = Plan(params=7e9, ranks=64, shard="fsdp2")
        >>> round(plan.memory_total() / 2**30, 1), round(plan.traffic() / 2**30, 1)
        (3.3, 38.5)
    """

    params: float
    ranks: int = 1
    shard: str = "none"
    optimizer: str = "adamw"
    masters: str = "full"
    state: str = "fp32"
    release: bool = False
    fused_step: bool = True
    track_changes: bool = False
    layers: int = 32
    clip: bool = True
    network: float = 50e9
    memory: float = 2e12
    compute: float = 0.0

    def __post_init__(self) -> None:
        check_choice("shard", self.shard, SHARDS)
        check_choice("optimizer", self.optimizer, tuple(OPTIMIZERS))
        check_choice("masters", self.masters, tuple(MASTERS))
        check_choice("state", self.state, STATES)
        for name in ("params", "ranks", "layers", "network", "memory"):
            value = getattr(self, name)
            if not value >= 1:
                raise ValueError(f"{name}: expected a number of 1 or more, got {value}.")
            if value > _MOST:
                raise ValueError(f"{name}: expected a number of at most {_MOST:g}, got {value}.")
        if not (self.compute >= 0 and math.isfinite(self.compute)):
            raise ValueError(f"compute: expected 0 seconds or more, got {self.compute}.")
        if self.shard == "none" and self.ranks > 1:
            raise ValueError(f"ranks: expected 1 where nothing is shared, got {self.ranks}. Choose shard='ddp'.")
        if self.state == "8bit" and self.optimizer not in EIGHT_BITS:
            raise ValueError(
                f"state: {self.optimizer!r} has no 8-bit state. Use 'fp32', or one of {', '.join(EIGHT_BITS)}."
            )
        if self.release and self.shard != "none":
            raise ValueError(f"release: True is for one rank, got shard={self.shard!r}. Use False.")
        if not self.fused_step and (self.masters != "full" or self.state == "8bit" or self.release):
            raise ValueError(
                "fused_step: split masters, 8-bit state and released gradients are forms of the one-pass step, got "
                "False. Use True."
            )

    @property
    def _stepped(self) -> float:
        """Parameters that one rank steps."""
        return self.params / self.ranks if self.shard in ("zero", "fsdp2") else self.params

    @property
    def _state_bytes(self) -> float:
        """Of optimizer state, a parameter."""
        return EIGHT_BITS[self.optimizer] if self.state == "8bit" else OPTIMIZERS[self.optimizer]

    @property
    def _kept(self) -> float:
        """Parameters whose 16-bit weight and gradient one rank keeps from step to step."""
        return self.params / self.ranks if self.shard == "fsdp2" else self.params

    def memory_parts(self) -> dict[str, float]:
        """Bytes a rank, by what they hold; activations are the model's own business."""
        parts = {
            "16-bit weights": HALF * self._kept,
            "16-bit gradients": 0.0 if self.release else HALF * self._kept,
            "masters": MASTERS[self.masters] * self._stepped,
            "FP32 master gradients": 0.0 if self.fused_step else SINGLE * self._stepped,
            "optimizer state": self._state_bytes * self._stepped,
        }
        if self.track_changes:
            parts["a bit for each weight that changes"] = self._stepped / 8
        if self.shard in ("ddp", "zero"):
            parts["DDP's buckets (none with gradient_as_bucket_view)"] = HALF * self.params
        if self.shard == "fsdp2":
            parts["gathered weights and gradients of two layers"] = 2 * 2 * HALF * self.params / self.layers
        return parts

    def memory_total(self) -> float:
        """Bytes a rank."""
        return sum(self.memory_parts().values())

    def payload(self) -> dict[str, float]:
        """Bytes that go into the collectives of one step, by collective: the size of the whole tensor each time."""
        weights = HALF * self.params
        if self.ranks == 1 or self.shard == "none":
            return {}
        if self.shard == "fsdp2":
            return {"all-gather, forward": weights, "all-gather, backward": weights, "reduce-scatter": weights}
        parts = {"all-reduce": weights}
        return {**parts, "broadcast": weights} if self.shard == "zero" else parts

    def traffic(self) -> float:
        """Bytes that a rank sends in one step, by rings: an all-reduce is a reduce-scatter and an all-gather."""
        share = (self.ranks - 1) / self.ranks
        passes = {"all-reduce": 2.0}
        return sum(passes.get(name, 1.0) * share * size for name, size in self.payload().items())

    def messages(self) -> dict[str, int]:
        """Collectives in one step: for gradients and weights, and the optimizer's own of 32 bytes.

        ZeRO's broadcasts of weights, one a tensor, come on top.
        """
        if not self.payload():
            return {}
        if self.shard == "fsdp2":
            return {"gathers and scatters (3 a layer)": 3 * self.layers, "verdict and norm, 32 bytes": 1}
        rest = max(0.0, HALF * self.params - FIRST_BUCKET)
        buckets = {"buckets of gradients": 1 + math.ceil(rest / BUCKET)}
        return {**buckets, "verdict and norm, 32 bytes": 1} if self.shard == "zero" else buckets

    def step_bytes(self) -> float:
        """Bytes that the optimizer's passes read and write on a rank."""
        state = self._state_bytes
        before = HALF if self.track_changes and self.masters == "full" else 0  # the weight, to be compared
        if self.fused_step:  # check the gradient; then read it again, read and write all else
            weight = SINGLE + HALF + SINGLE if self.masters == "full" else 2 * (HALF + MASTERS[self.masters])
            weight += before
            return self._stepped * (2 * HALF + weight + 2 * state)
        unscale = HALF + SINGLE  # read the gradient, write FP32, clipped on the way
        clip = HALF if self.clip else 0  # the norm is needed before: one read of the gradient
        step = SINGLE + 2 * SINGLE + 2 * state  # read the gradient; read and write master and state
        copy = SINGLE + HALF + before
        return self._stepped * (unscale + clip + step + copy)

    def shortest_step(self) -> float:
        """Seconds: the passes of the optimizer after the longer of communication and computation."""
        return self.step_bytes() / self.memory + max(self.traffic() / self.network, self.compute)

    def report(self) -> str:
        """All of it as text."""
        shown = (
            f"{count(self.params)} parameters, {self.ranks} rank{'s' * (self.ranks > 1)}, "
            + ("" if self.shard == "none" else f"{self.shard}, ")
            + f"{self.optimizer}, {self.masters} masters"
            + (", 8-bit state" if self.state == "8bit" else "")
            + ("" if self.fused_step else ", stepped by the wrapped optimizer")
            + (", gradients released" if self.release else "")
            + (", changes tracked" if self.track_changes else "")
        )
        lines = [shown]
        if self.release:
            lines.append("In backward the 16-bit gradient of one parameter at a time comes on top, and is freed.")
        lines += ["", f"{'memory a rank':<52}{size(self.memory_total()):>12}"]
        lines += [f"  {name:<50}{size(value):>12}" for name, value in self.memory_parts().items()]
        lines += ["", f"{'sent by a rank in a step':<52}{size(self.traffic()):>12}"]
        lines += [f"  {name + ' of':<50}{size(value):>12}" for name, value in self.payload().items()]
        lines += ["", f"{'messages in a step':<52}{sum(self.messages().values()):>12}"]
        lines += [f"  {name:<50}{value:>12}" for name, value in self.messages().items()]
        lines += ["", f"{'shortest step':<52}{seconds(self.shortest_step()):>12}"]
        times = {
            f"sending at {self.network / 1e9:g} GB/s": self.traffic() / self.network,
            f"optimizer at {self.memory / 1e9:g} GB/s, {size(self.step_bytes())}": self.step_bytes() / self.memory,
        }
        times |= {"forward and backward, while sending": self.compute} if self.compute else {}
        return "\n".join([*lines, *(f"  {name:<50}{seconds(value):>12}" for name, value in times.items())])


def count(number: float) -> str:
    """A number of parameters as it is said.

    Example:
        >>> count(125e6), count(7e9), count(900), count(1.5e12)
        ('125M', '7B', '900', '1.5T')
    """
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:.4g}"


def size(count: float) -> str:
    """Bytes for reading.

    Example:
        >>> size(3 * 2**30), size(16)
        ('3.0 GiB', '16 B')
    """
    for unit, factor in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def seconds(value: float) -> str:
    """Seconds for reading.

    Example:
        >>> seconds(0.0123), seconds(4.2e-5), seconds(75.0)
        ('12.3 ms', '42 us', '75 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _number(text: str) -> float:
    """A number, also with K, M, B or T for thousands, millions, billions, trillions.

    Example:
        >>> _number("125M"), _number("7e9")
        (125000000.0, 7000000000.0)
    """
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        return float(text[:-1] if factor > 1.0 else text) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number as in 7e9 or 125M, got {text!r}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command line."""
    parser.add_argument("--params", type=_number, required=True, help="parameters, for instance 7e9 or 125M")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the training")
    parser.add_argument("--shard", choices=SHARDS, help="default: none for one rank, ddp for more")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    parser.add_argument("--masters", choices=tuple(MASTERS), default="full", help="master_weights")
    parser.add_argument("--state", choices=STATES, default="fp32", help="optimizer_state")
    parser.add_argument("--release", action="store_true", help="gradient_release=True")
    parser.add_argument(
        "--no-fused-step", dest="fused_step", action="store_false", help="fused_step=False; no compiled kernels"
    )
    parser.add_argument("--track-changes", action="store_true", help="a bit a parameter, for deltas")
    parser.add_argument("--layers", type=int, default=32, help="blocks that fully_shard is applied to")
    parser.add_argument("--no-clip", dest="clip", action="store_false", help="gradients are not clipped")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s that a rank sends")
    parser.add_argument("--memory", type=float, default=2000.0, help="GB/s of a rank's memory")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of forward and backward")


def of_arguments(given: argparse.Namespace) -> Plan:
    """The plan that parsed arguments ask for.

    Raises:
        ValueError: a value is out of range.
    """
    told = {one.name: getattr(given, one.name) for one in fields(Plan)}
    told["shard"] = given.shard or ("none" if given.ranks == 1 else "ddp")
    return Plan(**told | {"network": given.network * 1e9, "memory": given.memory * 1e9})
