"""``python -m fp16opt``: what is installed, what serves which device, and why something is missing.

``python -m fp16opt --help`` lists the commands; each is a function here, which prints its answer.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from fp16opt import __version__, certify, kernels
from fp16opt.kernels import cuda_devices, native
from fp16opt.kernels.nvrtc import NvrtcError
from fp16opt.tools import old_lines, plan, prove
from fp16opt.tools.certify import targets
from fp16opt.tools.reports import page, scripts

_WRONG = 2
"""The exit status of a command line that can't be understood, or asks for what is not there."""


def _devices() -> list[str]:
    """The kinds of device that this torch can use here."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def _served_by(device: str) -> str:
    """What serves a device, in words; where CUDA kernels should and do not, why."""
    served_by, where = kernels.backend(device), torch.device(device)
    plain = "torch operations (reference.py)"
    if where.type == "cuda" and torch.version.cuda is not None:
        words = cuda_devices.served(where.index or 0).words
        return words + cuda_devices.proved(where.index or 0) if served_by == "cuda" else f"{plain}: {words}"
    return {"reference": plain, "cpu": "compiled kernels (_cpu)"}[served_by]


def report() -> str:
    """The report as text. On a machine with a GPU its kernels are compiled, unless they were before.

    Returns:
        One fact a line. Does not sync.

    Example:
        >>> report().splitlines()[0].startswith("fp16opt ")
        True
    """
    cuda = torch.version.cuda or "none"
    facts = [
        ("fp16opt", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__} (built for CUDA: {cuda})"),
        ("threads", f"{torch.get_num_threads()} (torch.get_num_threads)"),
    ]
    facts.append(("module _cpu", native.status()))
    if native.available():
        facts.append(("SIMD level", f"{native.simd_level()} (FP16OPT_SIMD chooses another)"))
    facts += cuda_devices.facts()
    facts += [(f"device {device}", _served_by(device.split()[0])) for device in _devices()]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts += [(f"cuda:{index} refused", words) for words in cuda_devices.refusals(index)]
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG, f"{self.prog}: {message}. See {self.prog} --help\n")


def _refused(words: object) -> int:
    """Say in one line why a command can't answer."""
    print(" ".join(f"fp16opt {words}".split()), file=sys.stderr)
    return _WRONG


def _report(_: argparse.Namespace) -> int:
    print(report())
    return 0


def _certify(given: argparse.Namespace) -> int:
    """Print the report on one optimizer: 0 where it is ok, 1 where not, 2 where it can't be loaded or built."""
    sys.path.insert(0, "")
    try:
        found = certify(targets.load(given.target, given.options))
    except (TypeError, ValueError) as error:
        return _refused(f"certify: {error}")
    print(found)
    return 0 if found.ok else 1


def _check(given: argparse.Namespace) -> int:
    """Print what a check finds: 0, 1 where a finding is an error, 2 where there is nothing that could be checked."""
    try:
        found = scripts.check(given.target, given.steps)
    except scripts.NothingToCheckError as error:
        return _refused(f"check: {error}")
    print(found)
    return 0 if found.ok else 1


def _compile(given: argparse.Namespace) -> int:
    """Compile ahead: 0 where all could be, 1 where one, or without a compiler all, could not."""
    try:
        outcomes = cuda_devices.ahead(given.arch)
    except (NvrtcError, OSError) as error:
        _refused(f"compile: {error}")
        return 1
    for arch, path, words in outcomes:
        print(f"sm_{arch}  {words if path is None else f'{path}  ({words})'}")
    return 0 if outcomes and all(path is not None for _, path, _ in outcomes) else 1


def _plan(given: argparse.Namespace) -> int:
    try:
        words = plan.answer(given)
    except ValueError as error:
        return _refused(f"plan: {error}")
    print(words)
    return 0


def _prove(given: argparse.Namespace) -> int:
    """Prove the CUDA kernels: 0, 1 where a bit is another, 2 without a card."""
    return prove.answer(given, lambda line: print(line, flush=True))


def _old_lines(given: argparse.Namespace) -> int:
    """Print lines that mean something else now: 0 where there is none, 1 where there are some, 2 for no Python."""
    return old_lines.answer(given, print, lambda words: _refused(f"old-lines: {words}"))


def _page(given: argparse.Namespace) -> int:
    """Write the page of a run: 0, or 2 where there is nothing to report on."""
    status, words = page.write(given)
    print(words, file=sys.stderr if status else sys.stdout)
    return status


def _capabilities(text: str) -> list[int]:
    """What ``--arch`` names.

    Example:
        >>> _capabilities("sm_70,90")
        [70, 90]
    """
    found = [re.fullmatch(r"(?:sm_)?(\d{2,3})", name) for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected cards as in sm_70,sm_90, got {text!r}")
    return [int(match[1]) for match in found if match is not None]


def parser() -> argparse.ArgumentParser:
    """Of the command line: without a command it asks for the report."""
    made = _Parser(
        prog="python -m fp16opt",
        description="Without a command: what is installed, what serves which device, and why something is missing.",
    )
    made.add_argument("--version", action="version", version=f"fp16opt {__version__}")
    made.set_defaults(answer=_report)
    commands = made.add_subparsers(title="commands", metavar="command")

    def command(name: str, help: str, answer: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=f"{help[:1].upper()}{help[1:]}.")
        one.set_defaults(answer=answer)
        return one

    one = command("certify", "which kinds of masters an optimizer class can have: tried on small tensors", _certify)
    one.add_argument("target", help="as in torch.optim:SGD or my_package.my_module:MyOptimizer")
    one.add_argument("options", nargs="*", default=[], metavar="name=value", help="the class's own, as in momentum=0.9")
    one = command(
        "check", "some steps of a training before it begins: what 16 bits lose, what the loop does wrong", _check
    )
    one.add_argument(
        "target", help="as in train.py:make: a function that gives (model, loss_fn) or (model, loss_fn, optimizer)"
    )
    one.add_argument("--steps", type=int, default=8, help="how many to run, 4 or more")
    one = command("compile", "compile the CUDA kernels ahead of their first use, with or without a GPU", _compile)
    one.add_argument("--arch", type=_capabilities, default=[], help="as in sm_70,sm_90; this machine's if not given")
    plan.add_arguments(command("plan", "what a training needs: memory, traffic, time of a step", _plan))
    prove.add_arguments(command("prove", "every CUDA kernel against the CPU's bits, on this machine's card", _prove))
    old = command("old-lines", "lines of a script that mean something else once its optimizer is wrapped", _old_lines)
    old_lines.add_arguments(old)
    page.add_arguments(command("report", "write a page about a run that fp16opt.Monitor wrote down", _page))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, or run a command.

    Args:
        arguments: Of the command line; those that Python was given where it is None.

    Returns:
        The exit status: 0; 1 where the answer of ``certify``, ``check``, ``compile`` or ``prove`` is no, or
        ``old-lines`` has found some; 2 where there is no answer.
    """
    try:
        given = parser().parse_args(arguments)
    except SystemExit as ended:  # --help, or a wrong command line
        return int(ended.code or 0)
    status: int = given.answer(given)
    return status


def _end() -> int:
    """:func:`main`, which ends without a traceback where the reader of its output goes away, or at Ctrl-C."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 141  # as the shell says of a program that SIGPIPE has ended
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(_end())
