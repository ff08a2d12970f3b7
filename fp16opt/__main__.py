"""``python -m fp16opt``: what is installed, what serves which device, and why something is missing.

``python -m fp16opt plan``: what a training needs and sends (:mod:`fp16opt.plan`).
``python -m fp16opt report run.jsonl -o report.html``: a page about a run that :class:`fp16opt.Monitor` wrote down.
``python -m fp16opt certify package.module:Class [name=value ...]`` runs :func:`fp16opt.certify` on an optimizer class.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

import torch

from fp16opt import __version__, certify, kernels, plan
from fp16opt.certify import targets
from fp16opt.kernels import native
from fp16opt.reports import page


def _devices() -> list[str]:
    """The kinds of device that this torch can use here."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def report() -> str:
    """The report as text.

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
    facts += [(f"module {name}", state) for name, state in native.status().items()]
    if native.available():
        facts.append(("SIMD level", f"{native.simd_level()} (FP16OPT_SIMD chooses another)"))
    for device in _devices():
        served_by = kernels.backend(device.split()[0])
        words = {"reference": "torch operations (reference.py)", "cpu": "compiled kernels (_cpu)"}
        words["cuda"] = "compiled kernels (_cuda)"
        facts.append((f"device {device}", words.get(served_by, served_by)))
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
    if arguments and arguments[0] == "report":
        status, words = page.main(arguments[1:])
        print(words, file=sys.stderr if status else sys.stdout)
        return status
    print(plan.parse(arguments[1:]).report() if arguments[:1] == ["plan"] else report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
