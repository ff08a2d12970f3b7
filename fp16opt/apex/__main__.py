"""``python -m fp16opt.apex script.py args...``: run a script for which ``import apex`` is this package."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from . import install_as_apex


def _is_program(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, f"__main__.{ending}")) for ending in ("py", "pyc"))


def main(arguments: list[str]) -> None:
    """Install the aliases, then run the script or module as ``python`` would.

    Args:
        arguments: ``[--replace] script.py args...`` or ``[--replace] -m module args...``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fp16opt.apex",
        description="Run a script that imports apex with fp16opt in apex's place.",
    )
    parser.add_argument("--replace", action="store_true", help="also where an apex with amp is installed")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module instead of a file")
    parser.add_argument("script", help="the script's path, or the module's name")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script sees in sys.argv[1:]")
    given = parser.parse_args(arguments)
    if not given.is_module and not os.path.exists(given.script):
        parser.error(f"no such file: {given.script}")
    if not given.is_module and os.path.isdir(given.script) and not _is_program(given.script):
        parser.error(f"{given.script} is a folder without a __main__.py. Name the script in it, or -m and a module")
    try:
        install_as_apex(replace=given.replace)
    except RuntimeError as error:
        parser.exit(1, f"{error} Or pass --replace before the script.\n")
    sys.argv = [given.script, *given.arguments]
    if given.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(given.script))
        runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
