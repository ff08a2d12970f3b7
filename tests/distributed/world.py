"""Ranks for tests: real processes with gloo between them, started once and given one function after the other."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import fp16opt

TIMEOUT = 60.0  # seconds for one function
GLOO = datetime.timedelta(seconds=20)
IMPORTED_ONCE = [  # by the process from which all ranks are forked; it does nothing else
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "fp16opt.distributed",
    "hypothesis",
    "pytest",
]


@contextlib.contextmanager
def _outside_the_tree() -> Iterator[None]:
    """Not at the top of a clone: what ranks are forked from imports from where it begins, not what is installed."""
    before = os.getcwd()
    os.chdir(Path(__file__).parents[1])
    try:
        yield
    finally:
        os.chdir(before)


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """A rank: does what comes through the pipe until None comes."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # a million objects of torch: a look through them would copy their pages too
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=GLOO)
    while (task := pipe.recv()) is not None:
        module, name, args = task
        torch.manual_seed(0)
        try:
            found = getattr(importlib.import_module(module), name)
            result = getattr(found, "on_ranks", found)(rank, size, *args)
            pipe.send(("done", result))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def leave() -> NoReturn:
    """End a program under torchrun whose work is done, without the interpreter's clearing up.

    ``destroy_process_group`` ends no thread of gloo while something holds a group, as the meshes in torch's caches do.
    Such a thread that frees a tensor while the interpreter ends aborts the process (pytorch/pytorch#190489).
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class World:
    """``size`` processes. A function that fails or hangs ends them; the next one gets new ones.

    Args:
        size: how many ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        with _outside_the_tree():
            forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            here, there = context.Pipe()
            args = (rank, self.size, f"{self._folder.name}/store", there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """``function(rank, size, *args)`` on every rank.

        Args:
            function: at the top of a module of tests.
            args: what pickle takes.
            timeout: seconds.

        Returns:
            What each rank returned. Raises AssertionError with the tracebacks if one failed or took too long.
        """
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function.__module__, function.__name__, args))
        deadline = time.monotonic() + timeout
        results: list[Any] = []
        errors: list[str] = []
        for rank, (_, pipe) in enumerate(self._ranks):
            state, value = "failed", "did not answer in time"
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    state, value = pipe.recv()
            except (EOFError, ConnectionError):
                value = "died"
            results.append(value)
            if state == "failed":
                errors.append(f"rank {rank}: {value}")
        if errors:
            self.stop(kill=True)
            raise AssertionError("\n".join(errors))
        return results

    def stop(self, kill: bool = False) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            if kill:
                process.kill()
            else:
                with contextlib.suppress(OSError):
                    pipe.send(None)
        for process, pipe in self._ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def on_ranks(size: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of ``function(rank, size, ...)``, which as many ranks run. What else it takes it gets from pytest."""
    world = {2: "two", 3: "three", 4: "four"}[size]  # fixtures

    def made(function: Callable[..., Any]) -> Callable[..., None]:
        _, _, *given = inspect.signature(function).parameters

        @functools.wraps(function)
        def test(**fixtures: Any) -> None:
            fixtures[world].run(test, *(fixtures[name] for name in given))

        names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (world, *given)]
        test.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        test.on_ranks = function  # type: ignore[attr-defined]
        return test

    return made


def raised(error: type[BaseException], function: Callable[[], Any]) -> str:
    """The message of the ``error`` that ``function`` raises."""
    try:
        function()
    except error as caught:
        return str(caught)
    raise AssertionError(f"expected {error.__name__}, and nothing was raised", sys._getframe(1).f_lineno)


def of_this_package() -> dict[str, str]:
    """An environment in which interpreters find the package that this one has."""
    roots = [str(Path(fp16opt.__file__).parents[1]), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}


def torchrun(
    folder: Path, script: Path, *arguments: str, ranks: int = 2, restarts: int = 0, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """A script on some ranks, and all that they print. A group of its own, so that a timeout ends all of it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.2", str(script), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=of_this_package(),
        cwd=folder,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, "")
