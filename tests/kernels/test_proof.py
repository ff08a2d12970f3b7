"""Kernels are proved before they serve: what is refused, who serves then, what is kept, and the command that proves."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cards
import emulated
import pretended
import products
import proving
import pytest
import torch
from torch import Tensor

from fp16opt import __main__ as command
from fp16opt.kernels import (
    CastStats,
    GradStats,
    backends,
    cubin_cache,
    cuda,
    cuda_devices,
    cuda_rows,
    multi_tensor_cast,
    multi_tensor_check,
    multi_tensor_scale,
    planted,
    proof,
    verdicts,
)
from fp16opt.kernels.changed import ChangedBits
from fp16opt.kernels.cuda_rows import FIRST, KERNELS
from fp16opt.kernels.proof import Outcome
from fp16opt.kernels.verdicts import Verdicts
from fp16opt.tools import prove
from fp16opt.tools.prove.trials import Trials

pytestmark = pytest.mark.usefixtures("folder")
real_choice = backends.compiled_for


# -- one kernel --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> pretended.Counting:
    """The emulated kernels, whose launches are counted. What is expected of them was asked of the CPU's before."""
    for name in KERNELS:
        planted.expected(name)
    emulated.use(emulated_cuda, monkeypatch)
    return pretended.counting(monkeypatch)


def tables() -> int:
    """How many were brought to the device until now."""
    return len(cuda.Stream.copies)  # type: ignore[attr-defined]


class Touching(proving.HostPlace):
    """Memory in which something happens behind the last kernel's back."""

    def __init__(self, touch: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._touch = touch

    def fetch(self, memory: Tensor) -> Any:
        self._touch(memory)
        return super().fetch(memory)


SOME = [*KERNELS][::12]  # the command proves all of them
some_kernels = pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.all) for n in KERNELS]
)


@some_kernels
def test_kernels_that_are_right_are_not_refused(kernels: pretended.Counting, name: str) -> None:
    found = proof.prove((name,), 0, proving.HostPlace())[name]
    assert found.words == ""
    assert found.bits > 200
    assert set(kernels.launches) == {name}, "it is this kernel that was proved"


def test_the_proof_of_what_adamw_launches_is_short(kernels: pretended.Counting) -> None:
    before = tables()
    assert set(proof.prove(FIRST, 0, proving.HostPlace())) == set(FIRST)
    assert set(kernels.launches) == set(FIRST)
    copied = tables() - before + 2  # and the memory, there and back
    assert sum(kernels.launches.values()) + copied <= 40


def judged(name: str, byte: int, bits: int) -> str:
    """What is said of a kernel that did all as it should, but for some bits of one byte."""
    memory = planted.expected(name).clone()
    memory[byte] ^= bits
    return proof.compare(planted.planted(name).parts, memory, planted.expected(name)).words


@some_kernels
def test_another_bit_is_found_anywhere(name: str) -> None:
    """The lowest one of the first, of the last and of a middle element of tensors, one at a time."""
    parts = planted.planted(name).parts
    for part in parts[:: max(1, len(parts) // 4)]:
        numel = part.value.numel()
        for at in sorted({0, numel // 2, numel - 1}) if numel else ():
            words = judged(name, part.start + at * part.value.element_size(), 1)
            stored = planted.expected(name)[part.start : part.start + part.value.nbytes].clone()
            if part.value.is_floating_point() and bool(stored.view(part.value.dtype).view(-1)[at].isnan()):
                assert words == "", "nans are equal"
            else:
                assert words.startswith(f"{part.name}: element {at} is ")
                assert words.endswith(f"; 1 of {numel} differ")


@pytest.mark.parametrize("name", ["adam", "scale", "decide_clip"])
def test_a_guard_that_is_touched_is_found(name: str) -> None:
    for part in planted.planted(name).parts[::29]:
        end = part.start + part.value.nbytes
        assert judged(name, part.start - 1, 0x80) == f"it wrote 1 bytes before {part.name}"
        assert judged(name, end, 1) == f"it wrote 1 bytes behind {part.name}"


def test_a_kernel_that_does_nothing_is_refused(kernels: pretended.Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle:
        def launch(self, *given: object) -> None:
            """Nothing."""

    emulated.launch_on(Idle(), monkeypatch)
    found = {
        name: proof.prove((name,), 0, proving.HostPlace())[name].words
        for name in [*KERNELS][:: 4 if products.takes_all else 23]
    }
    assert [name for name, words in found.items() if not words] == []


def test_errors_are_found_and_not_raised(kernels: pretended.Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = kernels.launch

    def broken(name: str, *given: Any) -> None:
        if name == "check":
            raise RuntimeError("CUDA reports CUDA_ERROR_X: something")
        launch(name, *given)

    monkeypatch.setattr(kernels, "launch", broken)
    found = proof.prove(FIRST, 0, proving.HostPlace())
    assert found["check"] == Outcome("RuntimeError: CUDA reports CUDA_ERROR_X: something")
    assert [name for name, outcome in found.items() if outcome.words] == ["check"]

    class Full(proving.HostPlace):
        def bring(self, memory: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    full = proof.prove(FIRST, 0, Full())
    assert {outcome.stays for outcome in full.values()} == {False}, "another time there may be memory"


def test_a_kernel_without_an_answer_is_not_waited_for(kernels: pretended.Counting) -> None:
    class Hanging(proving.HostPlace):
        def __init__(self) -> None:
            super().__init__()
            self.patience = 0.05

        def fetch(self, memory: Tensor) -> Any:
            return memory, lambda: False

    began = time.monotonic()
    found = proof.prove(("adam", "scale"), 0, Hanging())
    assert time.monotonic() - began < 5.0
    assert found == dict.fromkeys(("adam", "scale"), Outcome("it gave no answer within 0.05 s", stays=False))


# -- verdicts ----------------------------------------------------------------------------------------------------------

AROUND = {"kernels": "0123456789abcdef", "card": "T, sm_75", "torch": "2"}


class Prover:
    """Notes what was proved, and refuses some kernels."""

    def __init__(self, **refused: str) -> None:
        self.asked: list[str] = []
        self._refused = refused

    def __call__(self, names: Iterable[str], index: int) -> dict[str, Outcome]:
        time.sleep(0.01)
        self.asked += names
        return {name: Outcome(self._refused.get(name, ""), not name.startswith("sgd")) for name in names}


@pytest.fixture
def prover(monkeypatch: pytest.MonkeyPatch) -> Prover:
    made = Prover(scale="a bit", sgd="no answer")
    monkeypatch.setattr(verdicts, "prove", made)
    return made


def never() -> bool:
    return False


def test_a_verdict_is_kept_and_found_again(prover: Prover, folder: Path) -> None:
    first = Verdicts(0, AROUND)
    assert first.trusts("adam", never)
    with pytest.warns(RuntimeWarning, match=r"cuda:0 \(T, sm_75\) in place of fp16opt's kernel 'scale': a bit"):
        assert not first.trusts("scale", never)
    assert not first.trusts("scale", never), "it was said once"
    with pytest.warns(RuntimeWarning, match="'sgd': no answer"):
        assert not first.trusts("sgd", never)
    assert prover.asked == [*FIRST, "scale", "sgd"]
    assert [path.suffix for path in folder.iterdir()] == [".proof"]
    with pytest.warns(RuntimeWarning, match="'scale': a bit"):
        later = Verdicts(0, AROUND)
    assert later.trusts("adam", never)
    assert not later.trusts("scale", never)
    assert later.found == dict.fromkeys(FIRST, "") | {"scale": "a bit"}
    assert prover.asked == [*FIRST, "scale", "sgd"]
    with pytest.warns(RuntimeWarning, match="'sgd': no answer"):
        assert not later.trusts("sgd", never)
    assert prover.asked[-2:] == ["sgd", "sgd"], "what was not answered is asked again"


@pytest.mark.parametrize("changed", list(AROUND), ids="another {}".format)
def test_after_a_change_kernels_are_proved_again(prover: Prover, changed: str) -> None:
    Verdicts(0, AROUND).trusts("adam", never)
    Verdicts(0, AROUND | {changed: "fedcba9876543210"}).trusts("adam", never)
    assert prover.asked == [*FIRST, *FIRST]


def test_several_threads_wait_for_one_proof(prover: Prover) -> None:
    kept, found = Verdicts(0, AROUND), []
    threads = [threading.Thread(target=lambda: found.append(kept.trusts("adam", never))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert prover.asked == list(FIRST)


def test_processes_that_start_together_keep_each_other_s_verdicts(prover: Prover) -> None:
    one, other = Verdicts(0, AROUND), Verdicts(0, AROUND)
    one.trusts("adam", never)
    other.trusts("cast", never)
    assert len(Verdicts(0, AROUND).found) == len(FIRST) + 1


def test_nothing_is_proved_while_a_graph_is_captured(prover: Prover) -> None:
    kept = Verdicts(0, AROUND)
    with pytest.raises(RuntimeError, match=r"kernel 'adam' was not proved on cuda:0 yet, .* Make one step before"):
        kept.trusts("adam", lambda: True)
    assert prover.asked == []
    kept.trusts("adam", never)
    assert kept.trusts("check", lambda: True), "it is known"


def test_a_damaged_file_is_not_believed(prover: Prover, folder: Path, caplog: Any) -> None:
    Verdicts(0, AROUND).trusts("adam", never)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    Verdicts(0, AROUND).trusts("adam", never)
    assert prover.asked == [*FIRST, *FIRST]
    assert "is damaged" in caplog.text


def test_without_a_folder_each_process_proves(prover: Prover, folder: Path, caplog: Any) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for _ in range(2):
        assert Verdicts(0, AROUND).trusts("adam", never)
    assert prover.asked == [*FIRST, *FIRST]
    assert "can be written by others" in caplog.text


# -- on a card ---------------------------------------------------------------------------------------------------------


class Proofs:
    """Proofs in the host's memory; kernels that were named give another bit."""

    def __init__(self) -> None:
        self.wrong: set[str] = set()
        self.count: Counter[str] = Counter()

    def __call__(self, names: Iterable[str], index: int) -> dict[str, Outcome]:
        asked = list(names)
        self.count.update(asked)
        starts, at = {}, 0
        for name in asked:
            starts[name] = at
            at += planted.planted(name).before.numel()

        def touch(memory: Tensor) -> None:
            for name in self.wrong & set(asked):
                part = planted.planted(name).parts[0]
                memory[starts[name] + part.start] ^= 1

        return proof.prove(asked, index, Touching(touch))


@pytest.fixture
def card(libraries: Path, emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tensors of the CPU are taken for those of a card, which runs emulated kernels, and proves them first."""
    for name in KERNELS:
        planted.expected(name)
    real = cuda_devices.Proof.verdicts_on
    driver = cards.pretend(libraries, monkeypatch)
    monkeypatch.setattr(cuda_devices.Proof, "verdicts_on", real)
    proofs = Proofs()
    monkeypatch.setattr(verdicts, "prove", proofs)
    driver.run(emulated_cuda.paths)
    cards.serve_host_tensors(monkeypatch)
    yield proofs, driver
    driver.run([])


def scaled() -> Tensor:
    values = torch.arange(5000, dtype=torch.float32)
    multi_tensor_scale([values], torch.tensor(0.3))
    return values


def launched(driver: cards.Driver) -> set[str]:
    return {line.split()[1].removeprefix("fp16opt_") for line in driver.noted("cuLaunchKernel")}


def test_a_kernel_is_proved_before_it_serves(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs, driver = card
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = scaled()
        assert launched(driver) == {"scale"}
        assert proofs.count == {"scale": 1}
        scaled()
        assert proofs.count == {"scale": 1}
        monkeypatch.setattr(cuda_devices, "_known", cuda_devices._Known())
        scaled()
        assert proofs.count == {"scale": 1}, "a later process finds the verdict"
        monkeypatch.setattr(torch, "__version__", "9.9")
        monkeypatch.setattr(cuda_devices, "_known", cuda_devices._Known())
        scaled()
        assert proofs.count == {"scale": 2}, "another torch"
    monkeypatch.setattr(backends, "compiled_for", real_choice)
    assert f"1 of {len(KERNELS)} proved here so far" in command._served_by("cuda:0")
    assert torch.equal(first, torch.arange(5000, dtype=torch.float32) * torch.tensor(0.3))


def test_torch_serves_in_place_of_a_kernel_that_was_refused(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs, driver = card
    proofs.wrong = {"scale"}
    with pytest.warns(RuntimeWarning, match=r"kernel 'scale': tensors\[0\] .*: element 0 is ") as noted:
        first = scaled()
    assert len([one for one in noted if issubclass(one.category, RuntimeWarning)]) == 1
    driver.noted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(scaled(), first)
    assert launched(driver) == set()
    assert torch.equal(first, torch.arange(5000, dtype=torch.float32) * torch.tensor(0.3))
    stats = GradStats.allocate(1, "cpu")
    multi_tensor_check([torch.ones(10).half()], torch.tensor(0.5), stats)
    assert "check" in launched(driver), "the others serve"
    monkeypatch.setattr(backends, "compiled_for", real_choice)
    assert cuda_devices.refusals(0)[0].startswith("scale: tensors[0]")
    assert any("refused" in line and "scale: tensors[0]" in line for line in command.report().splitlines())


def test_a_kernel_that_marks_has_a_verdict_of_its_own(card: Any) -> None:
    proofs, driver = card
    proofs.wrong = {"cast_marking"}
    masters, params = [torch.arange(100.0)], [torch.zeros(100).half()]
    multi_tensor_cast(masters, params, CastStats.allocate(1, "cpu"))
    assert "cast" in launched(driver)
    marked = CastStats.allocate(1, "cpu")
    marked.changed = ChangedBits.allocate(params, "cpu")
    params[0].zero_()
    with pytest.warns(RuntimeWarning, match="kernel 'cast_marking'"):
        multi_tensor_cast(masters, params, marked)
    driver.noted()
    params[0].zero_()
    marked.changed.clear()
    multi_tensor_cast(masters, params, marked)
    assert launched(driver) == set()
    assert torch.equal(params[0].float(), masters[0])
    assert marked.changed.places(0).tolist() == list(range(1, 100))


def test_decisions_are_made_by_torch_where_their_kernels_were_refused(card: Any) -> None:
    proofs, driver = card
    proofs.wrong = {"capture_scale", "decide_clip", "close_step"}
    host = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not backends.are_compiled(host)
        driver.noted()
        scale, inverse = backends.capture_scale(torch.tensor(4.0))
        norm, factor = backends.decide_clip(torch.tensor(4.0, dtype=torch.float64), torch.tensor(0.0), 1.0)
        trackers = torch.zeros((), dtype=torch.int32)
        assert backends.follow(torch.tensor(1.0), (torch.tensor(2.0), trackers, None)) is None
    assert (scale.item(), inverse.item(), norm.item()) == (4.0, 0.25, 4.0)
    assert factor.item() == pytest.approx(0.25, rel=1e-6)
    assert launched(driver) == set()


def test_a_step_whose_kernel_was_refused_has_the_same_bits(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from step_cases import assert_same_results, random_case

    proofs, driver = card
    proofs.wrong = {"adam"}
    case = random_case(np.random.default_rng(3), "adam", 0.05)
    with pytest.warns(RuntimeWarning, match="kernel 'adam'"):
        got = case.on("cpu").run()
    assert "adam" not in launched_since_proof(driver, lambda: case.on("cpu").run())
    monkeypatch.undo()
    assert_same_results(got, case.on("cpu").run(), "adam")


def launched_since_proof(driver: cards.Driver, run: Callable[[], object]) -> set[str]:
    driver.noted()
    run()
    return launched(driver)


# -- the command -------------------------------------------------------------------------------------------------------


def test_without_a_card_the_command_says_what_it_would_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["prove"]) == 2
    said = capsys.readouterr().out
    assert said.startswith("fp16opt prove: torch finds no CUDA device here. It would prove 46 kernels")


CHOSEN = {
    "AdamW, split24 masters, 8-bit state",
    "Lion, full masters",
    "torch's own AdamW step: gradients",
    "a skip that stays on the device",
    "a CUDA graph",
    "two streams",
}


@pytest.fixture
def built(emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    every = Trials.all

    def some(self: Trials) -> list[Any]:  # CI makes all of them
        return [task for task in every(self) if task[0] in CHOSEN]

    monkeypatch.setattr(Trials, "all", some)
    return emulated_cuda


def test_the_command_proves_every_kernel_and_step(
    built: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: Counter[str] = Counter()
    launch = type(built).launch

    def noted(self: Any, name: str, *given: Any) -> None:
        launches[name] += 1
        launch(self, name, *given)

    monkeypatch.setattr(type(built), "launch", noted)
    path = tmp_path / "proof.json"
    assert proving.main(built, "--iterations", "5", "--json", str(path)) == 0
    found = json.loads(path.read_text())
    assert [one["name"] for one in found["kernels"]] == list(KERNELS)
    assert all(one["wrong"] == "" and one["bits"] > 0 for one in (*found["kernels"], *found["steps"]))
    assert {one["name"] for one in found["steps"]} == CHOSEN
    assert found["wrong"] == 0
    assert set(launches) >= set(KERNELS), "the emulated kernels were launched, all of them"
    assert min(launches["adam"], launches["lion"]) > 5
    said = capsys.readouterr().out
    assert " 0 wrong, " in said.splitlines()[-1]
    assert "step skipped" not in said


def test_the_command_exits_with_1_where_a_bit_is_another(
    built: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = type(built).launch

    def broken(self: Any, name: str, *given: Any) -> None:
        if name != "lion":
            launch(self, name, *given)

    monkeypatch.setattr(type(built), "launch", broken)
    monkeypatch.setattr(prove, "KERNELS", ("lion", "lion_marking", "adam"))
    assert proving.main(built, "--iterations", "2") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert wrong[0].startswith("WRONG  lion: masters[0] (float32, 10245 elements): element 0 is ")
    assert any("Lion, full masters: parameter" in line for line in wrong)
    assert all("ion" in line for line in wrong)


def test_notes_lie_beside_the_kernels_and_are_no_kernels(folder: Path) -> None:
    cubin_cache.store_notes("0123456789abcdef-x.proof", b"words")
    assert cubin_cache.load_notes("0123456789abcdef-x.proof") == b"words"
    assert cubin_cache.load_notes("0123456789abcdef-y.proof") is None
    assert cubin_cache.names() == []


def test_what_is_missing_is_compiled_before_the_first_use(
    libraries: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.pretend(libraries, monkeypatch)
    cuda_devices.compile_missing(0)
    assert [name for name, _ in cubin_cache.names()] == [path.name for path in folder.iterdir()]
    stored, _ = cubin_cache.load(cuda_rows.digest(), 90, (14, 3))
    assert stored is not None
    assert set(stored.code) == set(KERNELS)
    compiled = (folder.parent / "log").read_text()
    cuda_devices.compile_missing(0)
    assert (folder.parent / "log").read_text() == compiled, "nothing is missing any more"
