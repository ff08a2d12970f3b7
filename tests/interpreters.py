"""Python as a user starts it, but that torch is imported: each process is forked from one that has done no more, and
saves the two seconds of the import. For what a process imports, sees or leaves behind, not for how it starts; nor, but
where a test asks for it, for how the interpreter clears up at its end, which takes as long as most of what is asked."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def _server() -> subprocess.Popen[str]:
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, __file__], env=given, **pipes)  # type: ignore[call-overload]
    atexit.register(server.communicate)  # ends with its input
    return server


def python(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120.0, clears_up: bool = False
) -> subprocess.CompletedProcess[str]:
    """``python arguments...``: a script, or -c or -m, and what follows. ``env`` is this process's where not given.

    After its last statement, threads that it waits for and what is registered with atexit, the process ends at once;
    with ``clears_up``, or after an exception, the interpreter deletes what is left, as it does for users.
    """
    server, given = _server(), dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        asked = {"arguments": arguments, "cwd": str(cwd), "env": given, "folder": folder, "clears_up": clears_up}
        print(json.dumps(asked), file=server.stdin, flush=True)
        child = int(server.stdout.readline())
        late = not select.select([server.stdout], [], [], timeout)[0]
        if late:
            os.kill(child, signal.SIGKILL)
        code = int(server.stdout.readline())
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    if late:
        raise subprocess.TimeoutExpired([sys.executable, *arguments], timeout, out, err)
    return subprocess.CompletedProcess([sys.executable, *arguments], code, out, err)


def serve() -> tuple[list[str], bool]:
    """Answers each request with the number of a new process and then with how it ended; returns in the new one."""
    import torch._dynamo  # noqa: F401  torch, and what the first step of any optimizer imports

    roots = sys.path[1:]
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child:
            print(child, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        writes = os.O_WRONLY | os.O_CREAT
        for stream, path, flags in ((0, os.devnull, os.O_RDONLY), (1, "out", writes), (2, "err", writes)):
            os.dup2(os.open(os.path.join(asked["folder"], path), flags), stream)
        if not asked["clears_up"]:
            atexit.register(gc.freeze)  # at its end Python looks through all objects twice: for these a second
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        script = asked["arguments"][0]
        first = os.getcwd() if script == "-m" else "" if script == "-c" else os.path.dirname(os.path.abspath(script))
        sys.path[:] = [first, *filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep)), *roots]
        return list(asked["arguments"]), bool(asked["clears_up"])
    raise SystemExit


def run() -> None:
    """What ``sys.argv`` says, as Python would."""
    if sys.argv[0] == "-c":
        code = compile(sys.argv.pop(1), "<string>", "exec")
        exec(code, {"__name__": "__main__"})
    elif sys.argv[0] == "-m":
        name = sys.argv.pop(1)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def run_and_leave() -> None:
    """:func:`run`, and end at once but where that raises."""
    code = 0
    try:
        run()
    except SystemExit as end:
        if not isinstance(end.code, (int, type(None))):
            raise
        code = int(end.code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    sys.argv, clears_up = serve()
    run() if clears_up else run_and_leave()
