"""The CUDA kernels, one row each, and how the structs that they read are laid out on the host.

A row says what csrc/ can't know of itself: the kernel's name, the functor that it runs, the fields of that functor as
the host packs them, and over how many blocks it goes. From it come the kernel's entry, assertions in the source, which
fail to compile where the two sides disagree, and the packing.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
from enum import Enum
from pathlib import Path

from .formulas import FORMULAS, Formula
from .installed import remedy

SOURCE = Path(__file__).resolve().parent.parent / "_cuda.cuh"
"""All of the device's code in one text, which setup.py makes out of csrc/."""

OPTIONS = ("--std=c++17", "--fmad=false")
"""Of NVRTC, besides the architecture. No contraction and no fast-math: the bits are those of the CPU."""


class Struct:
    """A struct of the device's code.

    Args:
        name: in C++, in the namespace fp16opt.
        fields: "name:code" with the codes of :mod:`struct`, for an array with its length before it: P address, q int64,
            i int32, I uint32, d double, f float, ? bool.

    Attributes:
        name: as given.
        fields: the name of each.
        packer: what packs values of all fields as the device reads them.

    Example:
        >>> Struct("Chunk", "start:q tensor:i numel:i").packer.size
        16
    """

    def __init__(self, name: str, fields: str) -> None:
        self.name, pairs = name, [field.split(":") for field in fields.split()]
        self.fields, self._codes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        padded = any(code[-1] in "Pqd" for code in self._codes)
        self.packer = struct.Struct("@" + "".join(self._codes) + ("0P" if padded else ""))

    def on_host(self) -> struct.Struct:
        """Of a param_group: what packs the same where the host knows the learning rate, which is then one number."""
        return struct.Struct("@d16x" + "".join(self._codes[3:]) + "0P")

    def assertions(self) -> list[str]:
        """Lines of C++ that fail to compile where the device lays the struct out in another way."""
        lines, before = [f"FP16OPT_SIZE({self.name}, {max(1, self.packer.size)});"], "@"
        for field, code in zip(self.fields, self._codes, strict=True):
            lines.append(f"FP16OPT_FIELD({self.name}, {field}, {struct.calcsize(f'{before}0{code[-1]}')});")
            before += code
        return lines


class Blocks(Enum):
    """How a kernel goes over its lists."""

    FINDING = "a block for each chunk, at least one: empty tensors have statistics too"
    STEPPING = "the same, with the numbers of a step"
    MEASURING = "a block for each chunk; what empty tensors have stays as it is"
    MAPPING = "blocks that take chunk after chunk, none for no chunks"
    SINGLE = "one block, and no lists"


_NO_GROUP = Struct("", "")
_KEEPS_BUSY = 2048
"""Blocks, of kernels that may find nothing to do: as many as keep any GPU busy."""


class Kernel:
    """One kernel.

    Args:
        name: as the host asks for it.
        functor: the struct in csrc/launch/ that has its code.
        fields: of the functor, as in :class:`Struct`. A field ``n`` is filled with the length of the lists.
        blocks: how it goes over its lists.
        group: of steps: the struct with a param_group's numbers. Its first three fields are the learning rate.
        made_of: what the functor's name stands for, where csrc/ has no struct of that name: of a template with its
            arguments, or of the kernel that marks, whose source has the struct under the plain name.
        marks: whether it marks which weights get other bits: it is compiled with FP16OPT_MARKS.

    Attributes:
        name, blocks, group, made_of, marks: as given.
        functor: the struct.
        counted: which of its fields is ``n``; None where there is no such field.
        least, most: blocks of a launch over lists, whatever their length.
    """

    def __init__(
        self,
        name: str,
        functor: str,
        fields: str,
        blocks: Blocks,
        group: Struct = _NO_GROUP,
        made_of: str = "",
        marks: bool = False,
    ) -> None:
        self.name, self.functor, self.blocks = name, Struct(functor, fields), blocks
        self.group, self.made_of, self.marks = group, made_of, marks
        self.counted = self.functor.fields.index("n") if "n" in self.functor.fields else None
        self.least, self.most = (0, _KEEPS_BUSY) if blocks is Blocks.MAPPING else (1, sys.maxsize)

    def entry(self) -> str:
        """C++ that asserts the layout, and makes the entry ``fp16opt_NAME``."""
        structs = [self.functor, self.group] if self.group.name else [self.functor]
        lines = [f"namespace fp16opt {{ using {self.functor.name} = {self.made_of}; }}"] if self.made_of else []
        lines += [line for one in structs for line in one.assertions()]
        return "\n".join([*lines, f"FP16OPT_{self.blocks.name}({self.name}, {self.functor.name})", ""])


def marking(name: str) -> str:
    """What the kernel that marks is called, beside one that doesn't."""
    return f"{name}_marking"


KINDS = {
    f"{dtype}_{kept}": (weight, beside, suffix)
    for dtype, weight in (("half", "Half"), ("bfloat16", "BFloat16"))
    for kept, beside, suffix in (("full", "float", "Full"), ("32", "uint16_t", "32"), ("24", "uint8_t", "24"))
}
"""Kinds of masters that some steps have kernels of their own for, without branches for others: weights of one dtype and
gradients of the same, with FP32 masters or with remainders of 16 or 8 bits, as OneKind in csrc/ has them."""


def of_kind(name: str, kind: str) -> str:
    """What the kernel for one of KINDS is called, beside the one for any masters."""
    return f"{name}_{kind}"


def _coded(name: str, functor: str, group: Struct) -> list[Kernel]:
    """The kernels of a step with 8-bit state: for any masters, without and with marks, and for some kinds of them."""
    step = functor.replace("Step", "Of")
    return [
        *_both(name, functor, _STEP, Blocks.STEPPING, group, f"{step}<AnyKind>"),
        *(
            Kernel(
                of_kind(name, kind),
                functor.replace("Step", f"{weight}{suffix}Step"),
                _STEP,
                Blocks.STEPPING,
                group,
                f"{step}<OneKind<{weight}, {beside}>>",
            )
            for kind, (weight, beside, suffix) in KINDS.items()
        ),
    ]


def _both(
    name: str, functor: str, fields: str, blocks: Blocks, group: Struct = _NO_GROUP, made_of: str = ""
) -> list[Kernel]:
    """Of an operation that writes weights, the kernel without marks, and the one that marks."""
    plain = Kernel(name, functor, fields, blocks, group, made_of)
    made_of = made_of or functor
    return [
        plain,
        Kernel(marking(name), f"Marking{functor}", f"{_MARKING} {fields}", blocks, group, made_of, marks=True),
    ]


_WITH_MARKS = "#define FP16OPT_MARKS\n"
_MARKING = "bits:P offsets:P"
_UNSCALE = "inv_scale:P nonfinite:P sumsq:P n:q norm:P found_inf:P write:?"
_RATE = "lr.value:d lr.at:P lr.is_wide:q"
_STEP = "inv_scale:P coefficient:P found_inf:P members:P table:P overflow:P model_list:i number:I groups:P"
_DIGESTS = "now:P then:P taken:P"
_CLIP = "norm:P found_inf:P max_norm:d only_finite:? single:P factor:P"
_DECIDED = "c.found_inf:P c.last:P c.skipped:P c.scale:P c.clean:P c.skips:P c.settings:P"
_CLEARED = "c.flags:P c.kept:P c.n:q c.cleared:P c.words:q"


def _group(formula: Formula) -> str:
    """The fields of a formula's ``Group``."""
    return " ".join([_RATE, *(f"{name}:{'i' if kind is bool else 'd'}" for name, kind in formula.fields.items())])


_ADAM, _SGD = _group(FORMULAS["adam"]), _group(FORMULAS["sgd"])


def _steps_of(formula: Formula) -> list[Kernel]:
    """The kernels of a formula: one for each number of lists that its state may have."""
    group, least = Struct(f"{formula.struct}::Group", _group(formula)), formula.least()
    return [
        kernel
        for count, name in enumerate(formula.kernels, least)
        for kernel in _both(
            name, f"{name.title()}Step", _STEP, Blocks.STEPPING, group, f"StepOf<{formula.struct}, {count}>"
        )
    ]


CHUNK = Struct("Chunk", "start:q tensor:i numel:i index:I block:I")
ENTRY = Struct("Entry", "row:q first_chunk:q stride:q dtypes:8s")
FOUND = Struct("Found", "sumsq:d digest:q flags:I")
NUMBERS = Struct("Numbers", "v:8d")
LISTS = Struct("Lists", "pointers:P add:P chunks:P table:P counters:P partial:P chunk_count:q entries:i filled:i")
MEMBER = Struct("Member", "step:P number:f group:i")

# Those that take longest to compile come first.
KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("unscale", "Unscale", _UNSCALE, Blocks.FINDING),
        Kernel("check", "Check", _UNSCALE, Blocks.FINDING),
        *(kernel for formula in FORMULAS.values() for kernel in _steps_of(formula)),
        *_coded("adam8", "Adam8Step", Struct("Adam8Group", f"{_ADAM} limit:f")),
        *_coded("sgd8", "Sgd8Step", Struct("SgdGroup", _SGD)),
        Kernel("l2norm", "Norm", "sumsq:P n:q norm:P norms:P", Blocks.FINDING),
        Kernel("compare", "Compare", "before:P offsets:P numbers:P", Blocks.MEASURING),
        Kernel("measure", "Measure", "numbers:P", Blocks.MEASURING),
        Kernel("unscale_clipped", "UnscaleClipped", "inv_scale:P factor:P", Blocks.MAPPING),
        Kernel("scale", "Scale", "factor:P", Blocks.MAPPING),
        Kernel("axpby", "Axpby", "a:f b:f check:I found_inf:P", Blocks.MAPPING),
        Kernel("lerp", "Lerp", "part:f from_average:i", Blocks.MAPPING),
        *_both("cast", "Cast", "overflow:P", Blocks.FINDING),
        Kernel("sample", "Sample", "samples:P", Blocks.FINDING),
        Kernel("take", "Take", _DIGESTS, Blocks.MAPPING),
        *_both("split", "Split", "overflow:P", Blocks.FINDING),
        Kernel("join", "Join", "", Blocks.MAPPING),
        Kernel("renew", "Renew", _DIGESTS, Blocks.MAPPING),
        Kernel("capture_scale", "CaptureScale", "scale:P pair:P", Blocks.SINGLE),
        Kernel("decide_clip", "DecideClip", _CLIP, Blocks.SINGLE),
        Kernel("close_step", "CloseStep", f"{_DECIDED} {_CLEARED}", Blocks.SINGLE),
    )
}

FIRST = ("adam", "check", "sample", "take", "capture_scale", "decide_clip", "close_step")
"""What training with AdamW launches: loaded together at a card's first use, every other kernel when it is launched."""


def shared_assertions() -> str:
    """C++ that asserts the layout of the structs that all kernels with lists read."""
    structs = (CHUNK, ENTRY, FOUND, LISTS, MEMBER, NUMBERS)
    return "\n".join(line for one in structs for line in one.assertions()) + "\n"


@functools.cache
def device_code(path: Path = SOURCE) -> str:
    """All of the device's code.

    Raises:
        OSError: this install was made without it.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OSError(f"{path}, the source of the CUDA kernels, is missing: {remedy(path.parent)}") from None


def source_of(kernel: Kernel, code: str = "") -> str:
    """What NVRTC compiles for one kernel; ``code``: all of the device's code, where it is not :func:`device_code`."""
    return f"{_WITH_MARKS if kernel.marks else ''}{code or device_code()}{shared_assertions()}{kernel.entry()}"


@functools.cache
def digest() -> str:
    """Of all sources and options, as 16 hexadecimal digits: other code has other ones."""
    parts = [device_code(), shared_assertions(), *(kernel.entry() for kernel in KERNELS.values()), *OPTIONS]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
