"""What NVRTC makes of the CUDA sources, for every card: exact arithmetic, wide accesses, nothing spilled.

The packages nvidia-cuda-nvrtc-cu12 and nvidia-cuda-nvrtc bring the compilers; there need be no card. A user's run
leaves them out: no install compiles these kernels, and the first use on a card proves each of them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import emulated
import kept
import proving
import ptx_cases
import ptx_faults
import ptx_machine
import pytest
import torch
from ptx import Instruction

from fp16opt.kernels import cuda_devices, cuda_rows, nvrtc, planted, proof
from fp16opt.kernels.cuda_rows import KERNELS, Blocks, Kernel

FINDING = {
    "Unscale": (True, True),
    "Check": (True, False),
    "Norm": (True, False),
    "Cast": (True, True),
    "Sample": (True, False),
    "Split": (True, True),
}
MEASURING = {"Measure": (True, False), "Compare": (True, False)}
MAPPING = {
    "UnscaleClipped": (True, True),
    "Scale": (True, True),
    "Axpby": (True, True),
    "Lerp": (True, True),
    "Take": (True, True),
    "Join": (True, True),
    "Renew": (True, True),
}
STEPS = ("AdamStep", "AmsgradStep", "SgdStep", "MomentumStep", "LionStep", "Adam8Step", "Sgd8Step")
OF_KINDS = [
    f"{name}{w}{kept}Step" for name in ("Adam8", "Sgd8") for w in ("Half", "BFloat16") for kept in ("Full", 32, 24)
]
CODED = ["Adam8Step", "Sgd8Step", "MarkingAdam8Step", "MarkingSgd8Step", *OF_KINDS]  # of 8-bit state
STEPPING = dict.fromkeys((*STEPS, *OF_KINDS), (True, True))
# Those that write weights have one that marks beside them.
MARKING = [f"Marking{name}" for name in ("Cast", "Split", *STEPS)]
FINDING |= dict.fromkeys(MARKING[:2], (True, True))
STEPPING |= dict.fromkeys(MARKING[2:], (True, True))
WIDE = {**FINDING, **MEASURING, **MAPPING, **STEPPING}
REGISTERS = dict.fromkeys(
    (
        "AdamStep",
        "AmsgradStep",
        "MarkingAdamStep",
        "MarkingAmsgradStep",
        "MarkingMomentumStep",
        "MarkingLionStep",
    ),
    128,
)  # two blocks of 256 threads fit on a multiprocessor; else 80, and three
REGISTERS |= dict.fromkeys(
    OF_KINDS, 64
)  # four blocks, three on cards before sm_80; of any kind three, there two of Adam's
TWO_BLOCKS = (100, 120)  # cards on which cuda_entries.cuh reckons with two blocks of every kernel, but three of CODED
SINGLE = {"CaptureScale", "DecideClip", "CloseStep"}  # one block, over a few numbers

# The oldest card, which has the fewest instructions, by `--all`. The others are compiled for with `-m slow`.
QUICK: dict[int, tuple[int, ...]] = {12: (70,), 13: ()}
# By the CUDA release of the compiler: of the later one the oldest, the commonest and the newest.
CARDS: dict[int, tuple[int, ...]] = {12: cuda_devices.CARDS, 13: (75, 90, 120)}


class Compiled(NamedTuple):
    """What NVRTC made for one architecture.

    Attributes:
        kernels: instructions, as PTX, by the name of the functor.
        logs: what ptxas said, by the same.
        size: of all machine code, bytes.
        of: the CUDA release's major and the architecture.
    """

    kernels: dict[str, str]
    logs: dict[str, str]
    size: int
    of: tuple[int, int]


def compilers() -> dict[int, nvrtc.Nvrtc]:
    found = {}
    for major in (12, 13):
        try:
            found[major] = nvrtc.find([major])
        except nvrtc.NvrtcError:
            continue
    return found


COMPILERS = compilers() if emulated.CSRC.is_dir() else {}
pytestmark = pytest.mark.skipif(not COMPILERS, reason="needs NVRTC, of the packages that CI installs, and the sources")


def cases() -> list[object]:
    found: list[object] = []
    for major, compiler in COMPILERS.items():
        for arch in (card for card in CARDS[major] if card in compiler.archs):
            marks = [pytest.mark.all if arch in QUICK[major] else pytest.mark.slow]
            found.append(pytest.param((major, arch), marks=marks, id=f"nvrtc{major}-sm_{arch}"))
    return found or [pytest.param((0, 0), id="none")]


def machine_cases() -> list[object]:
    """Those whose whole grids are executed: CUDA 12's and the newest. Cards of the same instructions cost no more."""
    found: list[Any] = cases()
    served = [case for case in found if case.values[0][0] == 12 or case.values[0][1] == CARDS[13][-1]]
    return served or [pytest.param((0, 0), id="none")]


by_machine = pytest.mark.parametrize("compiled", machine_cases(), indirect=True)


@pytest.fixture(scope="module", params=cases())
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """All kernels for one architecture, from the sources of this tree; kept between runs."""
    major, arch = request.param
    version = f"{COMPILERS[major].version}"
    sources = [
        version,
        *cuda_rows.OPTIONS,
        *(cuda_rows.source_of(one, emulated.flattened()) for one in KERNELS.values()),
    ]
    with kept.folder(f"nvrtc{major}-sm_{arch}", sources, tmp_path_factory) as folder:
        file = folder / "compiled"
        if not file.exists():
            file.write_bytes(pickle.dumps(compiled_for(major, arch)))
        found: Compiled = pickle.loads(file.read_bytes())
    return found


def compiled_for(major: int, arch: int) -> Compiled:
    code, flags = emulated.flattened(), [*cuda_rows.OPTIONS, "--ptxas-options=-v"]

    def compile_one(kernel: Kernel) -> list[bytes]:
        wanted = ("CUBIN", "PTX", "ProgramLog")
        return COMPILERS[major].compile(cuda_rows.source_of(kernel, code), kernel.name, arch, flags, wanted)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(KERNELS.values(), pool.map(compile_one, KERNELS.values()), strict=True))
    texts = {k.functor.name: [part.rstrip(b"\0").decode() for part in parts[1:]] for k, parts in results.items()}
    # From the body's brace on: before it stand how many blocks there are, and cards differ in these alone.
    kernels = {name: ptx[ptx.index("{", ptx.index(".visible .entry ")) :] for name, (ptx, _) in texts.items()}
    logs = {name: log for name, (_, log) in texts.items()}
    return Compiled(kernels, logs, sum(len(parts[0]) for parts in results.values()), (major, arch))


def instructions(body: str) -> Counter[str]:
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)+)", body, re.MULTILINE))


@pytest.fixture(scope="module")
def machine_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ptx_machine.build(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def executed(compiled: Compiled, machine_library: ctypes.CDLL) -> dict[str, list[ptx_cases.Executed]]:
    """What grids of each kernel that writes tensors do, by the name of the functor. All tensors are aligned."""
    found: dict[str, list[ptx_cases.Executed]] = {}
    missing = {name: text for name, text in compiled.kernels.items() if (name, text) not in EXECUTED}
    texts = {name: missing[k.functor.name] for name, k in KERNELS.items() if k.functor.name in missing}
    machine = ptx_machine.Machine(machine_library, texts)
    for case, twin in zip(ptx_cases.all_cases(), ptx_cases.all_cases(), strict=True) if missing else ():
        if case.kernel in missing:
            found.setdefault(case.kernel, []).append(ptx_cases.execute(case, twin, machine))
    EXECUTED.update({(name, missing[name]): ran for name, ran in found.items()})
    return {name: EXECUTED[name, text] for name, text in compiled.kernels.items() if (name, text) in EXECUTED}


EXECUTED: dict[tuple[str, str], list[ptx_cases.Executed]] = {}
"""By functor and PTX: once where several cards have the same."""


def test_every_operation_is_one_kernel(compiled: Compiled) -> None:
    assert set(compiled.kernels) == {*WIDE, *SINGLE}
    for blocks, names in zip(Blocks, (FINDING, STEPPING, MEASURING, MAPPING, SINGLE), strict=True):
        assert {kernel.functor.name for kernel in KERNELS.values() if kernel.blocks is blocks} == set(names)
    assert compiled.size < 86_500 * len(KERNELS)  # at most 84,700 a kernel were seen, for sm_120


def test_arithmetic_is_exact(compiled: Compiled) -> None:
    for name, body in compiled.kernels.items():
        used = instructions(body)
        assert sum(used.values()) > (10 if name in SINGLE else 50), "the reader sees instructions"
        guesses = {"rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32"} if name in CODED else set()
        inexact = [op for op in used if re.search(r"approx|ftz|\.full|^ex2|^lg2|^rsqrt|^rcp(?!\.rn)|^sin|^cos", op)]
        assert set(inexact) <= guesses, f"{name} uses {inexact}"
        floors = {"add.rm.f32"} if name in CODED else set()
        rounded = [op for op in used if re.match(r"(add|sub|mul|div|sqrt|fma)\..*f(32|64)$", op)]
        assert all(".rn." in op or op in floors for op in rounded), f"{name} uses {rounded}"


def test_nothing_is_fused(compiled: Compiled) -> None:
    """But for what puts guesses of roots and quotients right, and an exact product: see csrc/functors/quick.h."""
    for name, body in compiled.kernels.items():
        fused = {op for op in instructions(body) if op.startswith("fma")}
        assert fused <= ({"fma.rn.f32"} if name in CODED else set()), f"{name} uses {fused}"


def test_sums_of_squares_add_floats_where_they_may(compiled: Compiled) -> None:
    """Consumer GPUs have one unit for doubles beside 32 or 64 for floats; doubles in numbers are for groups that leave
    float32's range."""
    norm = instructions(compiled.kernels["Norm"])
    assert norm["mul.rn.f32"] >= 8
    assert norm["add.rn.f32"] >= 7


def test_steps_divide_and_take_roots_as_the_cpu_does(compiled: Compiled) -> None:
    """A correctly rounded instruction each, for every one of a thread's eight elements."""
    for name in ("AmsgradStep", "AdamStep"):
        used = instructions(compiled.kernels[name])
        assert (used["sqrt.rn.f32"], used["div.rn.f32"]) == (8, 16)
    assert used["sqrt.rn.f64"] == 1, "of the bias correction, which one thread of a block computes"
    assert used["cvt.rn.f16.f32"] > 0, "float16 weights are rounded in the pass"
    assert not instructions(compiled.kernels["SgdStep"])["div.rn.f32"]
    assert not instructions(compiled.kernels["MomentumStep"])["div.rn.f32"]


def test_steps_of_8_bit_state_put_guesses_right(compiled: Compiled) -> None:
    """Where eight elements allow it: else, and behind the last whole row, a loop goes over them."""
    for name in ("Adam8Step", "Adam8Half32Step", "Adam8BFloat16FullStep"):
        used = instructions(compiled.kernels[name])
        l2 = 2  # with L2 and without
        assert used["rsqrt.approx.ftz.f32"] == l2 * 8 + 8, "of v, and of its share of the block's largest"
        assert used["rcp.approx.ftz.f32"] == l2 * 8 + 1, "of what the move is divided by, and of the scale"
        assert used["fma.rn.f32"] >= l2 * 8 * (2 + 2 + 2 + 2 + 1 + 2 + 2) + 8 * 2 + 2
        assert used["sqrt.rn.f32"] == 2 * 2
        assert used["div.rn.f32"] == 2 * 3, "the bias correction, the move, the ratio"
        barriers = re.findall(r"bar\.sync", compiled.kernels[name])
        assert len(barriers) < 30, "none in a loop over rows"


@pytest.mark.parametrize("name", list(WIDE))
def test_loads_and_stores_are_16_bytes_wide(compiled: Compiled, name: str) -> None:
    used = instructions(compiled.kernels[name])
    wide = [
        sum(n for op, n in used.items() if re.match(rf"{kind}\.global(\.wb)?\.v4\.[fub]32", op))
        for kind in ("ld", "st")
    ]
    loads, stores = WIDE[name]
    assert (wide[0] > 0) >= loads
    assert (wide[1] > 0) >= stores
    generic = [op for op in used if re.match(r"(ld|st)\.(v\d\.)?[fubs]\d+$", op)]
    assert not generic, f"addresses that the compiler does not know to be global: {generic}"


def test_kernels_that_write_tensors_are_executed(executed: dict[str, list[ptx_cases.Executed]]) -> None:
    assert set(executed) == {name for name, (_, stores) in WIDE.items() if stores}


@pytest.mark.parametrize("name", [name for name, (_, stores) in WIDE.items() if stores])
def test_aligned_elements_are_stored_as_wide_as_they_are_loaded(
    executed: dict[str, list[ptx_cases.Executed]], name: str
) -> None:
    """Of the bytes that are written at least 95% go in stores of sixteen; of lists of one byte, of which a thread has
    eight elements, in stores of eight."""
    for one in executed[name]:
        assert one.missing == 0, f"{one.name}: elements of the thread that it did not write"
        assert one.wide >= 0.95 * one.total, f"{one.name}: {one.wide} of {one.total} bytes in stores that are wide"


@pytest.mark.parametrize("name", [name for name, (_, stores) in WIDE.items() if stores])
def test_a_grid_writes_the_bits_of_the_cpu(executed: dict[str, list[ptx_cases.Executed]], name: str) -> None:
    """Instruction by instruction, and not as the emulated source does it."""
    assert {one.name: one.other for one in executed[name]} == {one.name: 0 for one in executed[name]}


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """None may work while the process is doubled."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texts_of(compiled: Compiled, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """PTX by the name of the kernel, of some."""
    return tuple((name, compiled.kernels[KERNELS[name].functor.name]) for name in names)


class Proved(NamedTuple):
    """What the proof at first use said of a kernel on whole grids.

    Attributes:
        words: "" where it passed.
        executed: instructions, in all.
        never: how many of the kernel's instructions were not executed.
        count: how many there are.
    """

    words: str
    executed: int
    never: int
    count: int


@functools.cache
def proved(library: ctypes.CDLL, name: str, text: str) -> Proved:
    """Once where several cards have the same instructions."""
    planted.expected(name)
    machine = ptx_machine.Machine(library, {name: text})
    with pytest.MonkeyPatch.context() as patch:
        ptx_faults.serve(machine, patch)
        words = proof.prove((name,), 0, proving.HostPlace())[name].words
    seen = bytes(machine.code(name).seen)
    return Proved(words, machine.executed, seen.count(0), len(seen))


@functools.cache
def outcomes_of_faults(library: ctypes.CDLL, kernels: tuple[tuple[str, str], ...]) -> dict[str, Counter[str]]:
    """A few of those that ptx_faults.py plants: by their kind, what became of them."""
    machine, outcomes = ptx_machine.Machine(library, dict(kernels)), dict[str, Counter[str]]()
    trials = [ptx_faults.Trial(machine, name, others=1) for name, _ in kernels]
    with pytest.MonkeyPatch.context() as patch:
        ptx_faults.serve(machine, patch)
        for trial in trials:
            assert trial.right() == ""
            for fault in ptx_faults.chosen(machine.code(trial.name), 3, seed=1):
                outcomes.setdefault(fault.kind, Counter())[trial.outcome(fault)] += 1
    return outcomes


# Of the instructions of a kernel, those that no call of the library reaches: masters in 32 bits where there are
# remainders, counters of steps where a formula counts none; and of 8-bit state those of weights that are infinite.
NEVER = {
    **{name: 0.016 for name in KERNELS if "8_" in name},
    **{"adam8": 0.046, "adam8_marking": 0.046, "sgd8": 0.037, "sgd8_marking": 0.037, "adam8_half_24": 0.02},
    **{"split": 0.13, "split_marking": 0.11, "join": 0.07, "compare": 0.015, "sgd_marking": 0.011},
}
MORE_COPIES = 0.08
"""As much more of the kernels for sm_100 and later, and of CUDA 13's, whose compilers copy such paths more often."""
OTHERS = [name for name in KERNELS if name not in (*cuda_rows.FIRST, "cast", "split", "join", "l2norm")]


@by_machine
@pytest.mark.parametrize(
    "names", [[name for name in KERNELS if name not in OTHERS], pytest.param(OTHERS, marks=pytest.mark.slow)]
)
def test_whole_grids_pass_the_proof(compiled: Compiled, machine_library: ctypes.CDLL, names: list[str]) -> None:
    """Every block and thread, barriers and shuffles, instruction by instruction: what a card does at first use."""
    found = {name: proved(machine_library, name, compiled.kernels[KERNELS[name].functor.name]) for name in names}
    assert {name: one.words for name, one in found.items()} == dict.fromkeys(names, "")
    assert sum(one.executed for one in found.values()) > 20_000_000
    more = MORE_COPIES if compiled.of[0] > 12 or compiled.of[1] >= 100 else 0.0
    too_many = {
        name: (one.never, one.count)
        for name, one in found.items()
        if one.never > (NEVER.get(name, 0.008) + more) * one.count + 1
    }
    assert too_many == {}, "instructions without a proof, of how many"


@by_machine
def test_faults_in_an_instruction_are_refused(
    compiled: Compiled, machine_library: ctypes.CDLL, one_torch_thread: None
) -> None:
    """A few of those that ptx_faults.py plants; it counts them all."""
    outcomes = outcomes_of_faults(machine_library, texts_of(compiled, ("take", "decide_clip", "renew")))
    assert set(outcomes) == set(ptx_faults.KINDS)
    missed, refused = (sum(found[what] for found in outcomes.values()) for what in ("missed", "refused"))
    assert missed <= 0.05 * (missed + refused)
    assert refused > 40


@by_machine
def test_a_fault_that_never_ends_is_refused(
    compiled: Compiled, machine_library: ctypes.CDLL, one_torch_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = ptx_machine.Machine(machine_library, dict(texts_of(compiled, ["decide_clip"])))
    trial = ptx_faults.Trial(machine, "decide_clip", others=0)
    ptx_faults.serve(machine, monkeypatch)
    assert trial.right() == ""
    code = machine.code("decide_clip")
    here = Instruction("", "bra", ["bra"], [next(iter(code.program.labels))])
    place = code.program.labels[here.operands[0]]
    assert trial.outcome(ptx_faults.Fault("branch", place, here)) == "refused"


@pytest.mark.parametrize("name", [name for name, (_, stores) in WIDE.items() if stores])
def test_addresses_and_dtypes_are_loaded_once_a_chunk(executed: dict[str, list[ptx_cases.Executed]], name: str) -> None:
    """Up to three times where block, threads and marks need them: not for every row, of which the chunk has more."""
    assert ptx_cases.ROWS > 3
    assert {one.name: one.again for one in executed[name] if one.again > 3} == {}


def test_threads_store_together_what_is_not_aligned(compiled: Compiled) -> None:
    """But for weights that others wrote, which not every thread of a warp takes."""
    writers = {name for name, (_, stores) in WIDE.items() if stores} - {"Take"}
    together = {name for name, body in compiled.kernels.items() if instructions(body)["shfl.sync.up.b32"] > 0}
    assert together == writers


def test_nothing_is_spilled_and_no_atomic_adds_numbers(compiled: Compiled) -> None:
    for name, log in compiled.logs.items():
        spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert spills == [("0", "0", "0")], f"{name}: {log}"
        (registers,) = re.findall(r"Used (\d+) registers", log)
        most = 128 if compiled.of[1] in TWO_BLOCKS else REGISTERS.get(name, 80)
        if name in CODED and (compiled.of[1] in TWO_BLOCKS or compiled.of[1] < 80):
            most = 80
        if name.endswith("Adam8Step") and compiled.of[1] < 80:
            most = 128
        assert int(registers) <= most, f"{name}: fewer blocks fit than were reckoned with"
    for name, body in compiled.kernels.items():
        used = instructions(body)
        assert not [op for op in used if re.match(r"(ld|st)\.local", op)], name
        atomics = {op for op in used if op.startswith(("atom", "red"))}
        known = r"add\.u32|or\.b32" if name in MARKING else r"add\.u32"
        numbers = {op for op in atomics if not re.fullmatch(rf"atom(\.relaxed\.gpu)?(\.global)?\.({known})", op)}
        assert not numbers, f"{name} uses {numbers}"


def test_options_are_those_that_keep_the_bits() -> None:
    assert "--fmad=false" in cuda_rows.OPTIONS
    assert not [option for option in cuda_rows.OPTIONS if re.search(r"fast|ftz=true|prec-.*=false", option)]


def test_a_struct_of_another_layout_does_not_compile() -> None:
    compiler, code = next(iter(COMPILERS.values())), emulated.flattened() + cuda_rows.shared_assertions()
    swapped = "max_norm:d found_inf:P norm:P only_finite:? single:P factor:P"
    for kernel, complaint in (
        (Kernel("scale", "Scale", "factor:P more:q", Blocks.MAPPING), "Scale has another size on the host"),
        (Kernel("scale", "Sample", "factor:P", Blocks.MAPPING), 'has no member "factor"'),
        (Kernel("decide_clip", "DecideClip", swapped, Blocks.SINGLE), "is elsewhere on the host"),
    ):
        with pytest.raises(nvrtc.NvrtcError, match=complaint):
            compiler.compile(code + kernel.entry(), "wrong", 90, cuda_rows.OPTIONS)
    wrong = emulated.flattened() + "\n".join(cuda_rows.Struct("Chunk", "start:q numel:i tensor:i").assertions())
    with pytest.raises(nvrtc.NvrtcError, match=r"Chunk\.numel is elsewhere on the host"):
        compiler.compile(wrong, "wrong", 90, cuda_rows.OPTIONS)


def test_cards_get_the_next_lower_code_of_their_major() -> None:
    for major, compiler in COMPILERS.items():
        for card in compiler.archs:
            assert compiler.arch_for(card) == card
        assert compiler.arch_for(69) in (None, 62)
        assert compiler.arch_for(129) == 121
        assert compiler.arch_for(70) == (70 if major == 12 else None), "V100 needs CUDA 12"
        assert compiler.arch_for(199) is None
