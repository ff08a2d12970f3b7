"""``python -m fp16opt``: what is installed, what serves which device, and why something is missing.

``python -m fp16opt compile [--arch sm_70,sm_90]`` compiles the CUDA kernels ahead of their first use; it needs no GPU.
``python -m fp16opt plan``: what a training needs and sends (:mod:`fp16opt.plan`).
``python -m fp16opt report run.jsonl -o report.html``: a page about a run that :class:`fp16opt.Monitor` wrote down.
``python -m fp16opt certify package.module:Class [name=value ...]`` runs :func:`fp16opt.certify` on an optimizer class.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence

import torch

from fp16opt import __version__, certify, kernels, plan
from fp16opt.certify import targets
from fp16opt.kernels import cuda_devices, native
from fp16opt.kernels.nvrtc import NvrtcError
from fp16opt.reports import page


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
        return words if served_by == "cuda" else f"{plain}: {words}"
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
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts)


def _certify(arguments: Sequence[str]) -> int:
    """Print the report on one optimizer: 0 where it is ok, 1 where not, 2 where it can't be loaded or built."""
    if not arguments:
        print("usage: python -m fp16opt certify package.module:Class [name=value ...]", file=sys.stderr)
        return 2
    sys.path.insert(0, "")
    try:
        found = certify(targets.load(arguments[0], arguments[1:]))
    except (TypeError, ValueError) as error:
        print(" ".join(f"fp16opt certify: {error}".split()), file=sys.stderr)
        return 2
    print(found)
    return 0 if found.ok else 1


def _compile(arguments: Sequence[str]) -> int:
    """Compile ahead: 0 where all could be, 1 where one could not, 2 for a wrong command line."""
    given = " ".join(arguments).replace("=", " ").split()
    names = given[1].split(",") if len(given) == 2 and given[0] == "--arch" else []
    found = [re.fullmatch(r"(?:sm_)?(\d+)", name) for name in names]
    if (given and not names) or not all(found):
        print("usage: python -m fp16opt compile [--arch sm_70,sm_90]", file=sys.stderr)
        return 2
    try:
        outcomes = cuda_devices.ahead([int(match[1]) for match in found if match is not None])
    except (NvrtcError, OSError) as error:
        print(f"fp16opt compile: {error}", file=sys.stderr)
        return 1
    for capability, path, words in outcomes:
        print(f"sm_{capability}  {words if path is None else f'{path}  ({words})'}")
    return 0 if outcomes and all(path is not None for _, path, _ in outcomes) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, or run a command.

    Args:
        arguments: Of the command line; those that Python was given where it is None.

    Returns:
        The exit status; 0 for the report.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "certify":
        return _certify(arguments[1:])
    if arguments and arguments[0] == "compile":
        return _compile(arguments[1:])
    if arguments and arguments[0] == "report":
        status, words = page.main(arguments[1:])
        print(words, file=sys.stderr if status else sys.stdout)
        return status
    print(plan.parse(arguments[1:]).report() if arguments[:1] == ["plan"] else report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
