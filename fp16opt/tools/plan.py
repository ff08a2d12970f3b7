"""What a training needs: memory a rank, bytes and messages a step, and a lower bound of the step's time.

``python -m fp16opt plan --params 7e9 --ranks 64 --shard fsdp2`` prints it, and with ``--budget 24GiB`` which modes fit.
docs/scale.md derives the formulas; tests compare them with the tensors and messages of real ranks.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

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
NOTES = """\
By arithmetic. What fits takes four fifths of each memory at most; the rest is for activations, and for the system.
The link's time is that of all state going there and back, both ways at once, as if nothing hid it.
Released gradients leave no clip, no accumulation, no dynamic scale."""
RELEASED = "In backward the 16-bit gradient of one parameter at a time comes on top, and is freed."
_MOST = 1e24  # of anything that is counted: products of these are finite
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes of gradients in DDP's first message, and in the others
FORMATS = (("full", "fp32"), ("split", "fp32"), ("split", "8bit"), ("split24", "8bit"))
"""Masters and state that :func:`plan` tries, in the order of what they change."""
PCIE = {3: 11.0, 4: 22.0, 5: 45.0}  # GB/s each way, both ways at once, by generation, 16 lanes
FILLED = 0.8  # of a memory: the rest is left to activations, or to the system
_UNITS = {f"{prefix}{b}": base**n for n, prefix in enumerate("KMGTP", 1) for b, base in (("iB", 1024), ("B", 1000))}


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
        offload: "cpu": masters and state lie in the host's memory and are stepped by the card. Scales stay there.
        track_changes: whether one bit a parameter is kept for deltas.
        fused_step: False: the wrapped optimizer's own step, which takes FP32 gradients. Else it is one pass, on shards
            too.
        layers: blocks that FSDP2 gathers one after the other; two are whole at a time.
        clip: whether gradients are clipped, in the worst case with a factor below 1.
        network: bytes/s that a rank sends, and receives.
        memory: bytes/s that a rank reads and writes.
        compute: seconds of forward and backward, which communication may overlap with.
        link: bytes/s between card and host, each way, both at once.
        largest: elements of the largest parameter, whose gradient a released backward holds. 0: not known.
        other: bytes of whatever else there is on the card: frozen weights, buffers, FP32 sums of gradients.

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
    offload: str | None = None
    fused_step: bool = True
    track_changes: bool = False
    layers: int = 32
    clip: bool = True
    network: float = 50e9
    memory: float = 2e12
    compute: float = 0.0
    link: float = PCIE[4] * 1e9
    largest: int = 0
    other: float = 0.0

    def __post_init__(self) -> None:
        check_choice("shard", self.shard, SHARDS)
        check_choice("optimizer", self.optimizer, tuple(OPTIMIZERS))
        check_choice("masters", self.masters, tuple(MASTERS))
        check_choice("state", self.state, STATES)
        if self.offload is not None:
            check_choice("offload", self.offload, ("cpu",))
        for name in ("params", "ranks", "layers", "network", "memory", "link"):
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
        if not self.fused_step and (self.masters != "full" or self.state == "8bit" or self.release or self.offload):
            raise ValueError(
                "fused_step: split masters, 8-bit state and released gradients are forms of the one-pass step, and "
                "offload takes it, got False. Use True."
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

    def host_parts(self) -> dict[str, float]:
        """Bytes of page-locked host memory a rank, by what they hold. A step moves them over the link and back."""
        codes = int(self._state_bytes) if self.state == "8bit" else self._state_bytes
        parts = {"masters": MASTERS[self.masters] * self._stepped, "optimizer state": codes * self._stepped}
        return parts if self.offload else {}

    def memory_parts(self) -> dict[str, float]:
        """Bytes a rank on the card, by what they hold; activations are the model's own business."""
        host = self.host_parts()
        parts = {
            "16-bit weights": HALF * self._kept,
            "16-bit gradients": HALF * (self.largest if self.release else self._kept),
            "masters": MASTERS[self.masters] * self._stepped - host.get("masters", 0.0),
            "FP32 master gradients": 0.0 if self.fused_step else SINGLE * self._stepped,
            "optimizer state": self._state_bytes * self._stepped - host.get("optimizer state", 0.0),
        }
        if self.other:
            parts["other"] = self.other
        if self.track_changes:
            parts["a bit for each weight that changes"] = self._stepped / 8
        if self.shard in ("ddp", "zero"):
            parts["DDP's buckets (none with gradient_as_bucket_view)"] = HALF * self.params
        if self.shard == "fsdp2":
            parts["gathered weights and gradients of two layers"] = 2 * 2 * HALF * self.params / self.layers
        return parts

    def memory_total(self) -> float:
        """Bytes a rank on the card."""
        return sum(self.memory_parts().values())

    def host_total(self) -> float:
        """Bytes a rank on the host."""
        return sum(self.host_parts().values())

    def arguments(self) -> dict[str, Any]:
        """Those of ``MixedPrecisionOptimizer`` that ask for this mode: the ones that are not its defaults."""
        told = {
            "master_weights": self.masters != "full" and self.masters,
            "optimizer_state": self.state != "fp32" and self.state,
            "gradient_release": self.release,
            "offload": self.offload,
        }
        return {name: value for name, value in told.items() if value}

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
        return max(self.step_bytes() / self.memory, self.host_total() / self.link) + max(
            self.traffic() / self.network, self.compute
        )

    def report(self) -> str:
        """All of it as text."""
        shown = (
            f"{count(self.params)} parameters, {self.ranks} rank{'s' * (self.ranks > 1)}, "
            + ("" if self.shard == "none" else f"{self.shard}, ")
            + f"{self.optimizer}, {self.masters} masters"
            + (", 8-bit state" if self.state == "8bit" else "")
            + ("" if self.fused_step else ", stepped by the wrapped optimizer")
            + (", gradients released" if self.release else "")
            + (", state on the host" if self.offload else "")
            + (", changes tracked" if self.track_changes else "")
        )
        times = {
            f"sending at {self.network / 1e9:g} GB/s": self.traffic() / self.network,
            f"optimizer at {self.memory / 1e9:g} GB/s, {size(self.step_bytes())}": self.step_bytes() / self.memory,
        }
        if self.offload:
            times[f"state over the link at {self.link / 1e9:g} GB/s each way"] = self.host_total() / self.link
        times |= {"forward and backward, while sending": self.compute} if self.compute else {}
        lines = [shown, *([RELEASED] if self.release and not self.largest else [])]
        for title, total, parts, words in (
            ("memory a rank", self.memory_total(), self.memory_parts(), size),
            ("memory of the host a rank", self.host_total(), self.host_parts(), size),
            ("sent by a rank in a step", self.traffic(), {f"{k} of": v for k, v in self.payload().items()}, size),
            ("messages in a step", sum(self.messages().values()), self.messages(), str),
            ("shortest step", self.shortest_step(), times, seconds),
        ):
            if parts or "host" not in title:
                lines += ["", f"{title:<52}{words(total):>12}"]
                lines += [f"  {name:<50}{words(value):>12}" for name, value in parts.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Modes:
    """The modes that a training may take, beside the memory that there is; ``print`` shows them.

    Attributes:
        all: in the order in which they are to be tried: what changes no number first (split masters, then offload,
            which takes seconds), then 8-bit state and 24-bit masters, then released gradients, which leave no clip.
        budget: bytes of the card.
        ram: bytes of the host, for each rank.
    """

    all: tuple[Plan, ...]
    budget: float
    ram: float

    def lacks(self, mode: Plan) -> tuple[str, ...]:
        """The memories of which a mode would take more than four fifths: "card", "RAM"."""
        wanted = (("card", mode.memory_total(), self.budget), ("RAM", mode.host_total(), self.ram))
        return tuple(name for name, taken, there in wanted if taken > FILLED * there)

    @property
    def chosen(self) -> Plan | None:
        """The first mode that fits."""
        return next((mode for mode in self.all if not self.lacks(mode)), None)

    def __str__(self) -> str:
        first, chosen = self.all[0], self.chosen
        ranks = "" if first.shard == "none" else f", {first.ranks} ranks, {first.shard}"
        ram = "any" if self.ram == math.inf else size(self.ram)
        lines = [
            f"{count(first.params)} parameters, {first.optimizer}{ranks}: {size(self.budget)} on the card, {ram} of "
            f"RAM, {first.link / 1e9:g} GB/s between them each way",
            "",
            f"  masters  state  released  offload {'card':>11}{'host':>11}{'link, a step':>14}  fits",
        ]
        for mode in self.all:
            host, fits = mode.host_total(), ", ".join(self.lacks(mode))
            moved = (size(host), seconds(host / mode.link)) if mode.offload else ("-", "-")
            lines.append(
                f"{'>' if mode is chosen else ' '} {mode.masters:<9}{mode.state:<7}{'yes' if mode.release else '-':<10}"
                f"{mode.offload or '-':<8}{size(mode.memory_total()):>11}{moved[0]:>11}{moved[1]:>14}  "
                + (f"no: {fits}" if fits else "yes")
            )
        asked = "" if chosen is None else ", ".join(f"{name}={value!r}" for name, value in chosen.arguments().items())
        lines += [
            "",
            "> none fits" if chosen is None else f"> {asked or 'what MixedPrecisionOptimizer does by itself'}",
        ]
        return "\n".join([*lines, "", NOTES, *([] if first.largest or first.shard != "none" else [RELEASED])])


def plan(model: nn.Module | float, budget: float | str, *, ram: float | str = math.inf, **more: Any) -> Modes:
    """Which modes of ``MixedPrecisionOptimizer`` fit a card, and what they take from card, host and time.

    Args:
        model: to be trained in 16 bits, whatever its dtype is now, also on the meta device; or a number of parameters.
        budget: bytes of the card's memory, or a text as in "24GiB".
        ram: bytes of the host's memory, the same; 0 leaves offload out.
        **more: of :class:`Plan`: ``optimizer``, ``ranks``, ``shard``, ``link``, ...; nothing that asks for one mode.

    Raises:
        ValueError: a value is out of range, or asks for one mode.

    Example:
        >>> modes = plan(7e9, "24GiB", ram="32GiB")
        >>> modes.chosen.arguments()["offload"], round(modes.chosen.memory_total() / 2**30, 1)
        ('cpu', 13.2)
    """
    if isinstance(model, nn.Module):
        trained = [param for param in model.parameters() if param.requires_grad]
        every = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        more["largest"] = max((param.numel() for param in trained), default=0)
        more["other"] = more.get("other", 0.0) + every - sum(param.nbytes for param in trained)
        model = sum(param.numel() for param in trained)
    return Modes(tuple(_modes(Plan(params=model, **more))), _bytes("budget", budget), _bytes("ram", ram))


vars(plan)["Plan"] = Plan  # scripts read `fp16opt.plan.Plan` of the time when that name was the module's alone


def _modes(one: Plan) -> Iterator[Plan]:
    """The plan in every mode that there is for its optimizer and its ranks, where none is the better in all."""
    if one.arguments() or not one.fused_step:
        raise ValueError("budget: it tries every mode. Leave out what asks for one, as masters or release do.")
    keeps_none = not OPTIMIZERS[one.optimizer]  # state, in 8 bits neither
    formats = dict.fromkeys([(masters, "fp32" if keeps_none else state) for masters, state in FORMATS])
    for release, (masters, state), offload in itertools.product((False, True), formats, (None, "cpu")):
        if masters != "full" or not (release or offload):
            with suppress(ValueError):
                yield replace(one, masters=masters, state=state, release=release, offload=offload)


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


def _bytes(name: str, given: float | str) -> float:
    """A size in bytes, or a text as in 24GiB or 32GB."""
    found = re.fullmatch(r"([\d.]+) *([KMGTP]i?B)", given) if isinstance(given, str) else None
    with suppress(ValueError):
        value = float(given) if found is None else float(found[1]) * _UNITS[found[2]]
        if value >= 0 and (found is not None or not isinstance(given, str)):
            return value
    raise ValueError(f"{name}: expected a size as in '24GiB', got {given!r}.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command line."""
    parser.add_argument("--params", type=_number, required=True, help="parameters, for instance 7e9 or 125M")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the training; default %(default)s")
    parser.add_argument("--shard", choices=SHARDS, help="default: none for one rank, ddp for more")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="default %(default)s")
    parser.add_argument("--masters", choices=tuple(MASTERS), default="full", help="master_weights; default %(default)s")
    parser.add_argument("--state", choices=STATES, default="fp32", help="optimizer_state; default %(default)s")
    parser.add_argument("--release", action="store_true", help="gradient_release=True")
    parser.add_argument("--offload", action="store_const", const="cpu", help="offload='cpu'")
    parser.add_argument(
        "--no-fused-step", dest="fused_step", action="store_false", help="fused_step=False; no compiled kernels"
    )
    parser.add_argument("--track-changes", action="store_true", help="a bit a parameter, for deltas")
    parser.add_argument(
        "--layers", type=int, default=32, help="blocks that fully_shard is applied to; default %(default)s"
    )
    parser.add_argument("--no-clip", dest="clip", action="store_false", help="gradients are not clipped")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s that a rank sends; default %(default)s")
    parser.add_argument("--memory", type=float, default=2000.0, help="GB/s of a rank's memory; default %(default)s")
    parser.add_argument(
        "--compute", type=float, default=0.0, help="seconds of forward and backward; default %(default)s"
    )
    parser.add_argument("--budget", help="the card's memory, as in 24GiB: tell which modes fit")
    parser.add_argument("--ram", help="a rank's host memory, as in 32GiB; 0GiB leaves offload out")
    parser.add_argument(
        "--pcie", type=int, choices=tuple(PCIE), default=4, help="generation, 16 lanes; default %(default)s"
    )
    parser.add_argument("--link-gbs", type=float, help="in place of --pcie: GB/s between card and host, each way")


def of_arguments(given: argparse.Namespace) -> Plan:
    """The plan that parsed arguments ask for.

    Raises:
        ValueError: a value is out of range.
    """
    told = {one.name: getattr(given, one.name) for one in fields(Plan) if hasattr(given, one.name)}
    told["shard"] = given.shard or ("none" if given.ranks == 1 else "ddp")
    link = PCIE[given.pcie] if given.link_gbs is None else given.link_gbs
    return Plan(**told | {"network": given.network * 1e9, "memory": given.memory * 1e9, "link": link * 1e9})


def answer(given: argparse.Namespace) -> str:
    """What the command line asks for: one mode in full, or which modes fit.

    Raises:
        ValueError: a value is out of range.
    """
    one = of_arguments(given)
    if given.budget is None:
        if given.ram is not None:
            raise ValueError("ram: it is for --budget, which tells which modes fit. Give both.")
        return one.report()
    ram = math.inf if given.ram is None else _bytes("ram", given.ram)
    return str(Modes(tuple(_modes(one)), _bytes("budget", given.budget), ram))
