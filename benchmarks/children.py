"""Processes that measure something each, with nothing compiled before; one after the other, or some at once, which
compile together and then measure one at a time.

A child that is one of several says with `alone` what it measures: there it waits until none of the others compiles any
more, and until it is the only one that measures. torch is not imported.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.targets import Result
from compiled_autograd import shadow_cache

CACHE_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_TURNS = "BENCHMARK_TURNS"  # the folder by which children of one batch know of each other
_LOOKS_EVERY = 0.1  # seconds
_SECONDS_TO_END = 60.0


def caches_in(folder: Path) -> dict[str, str]:
    """The environment of a process whose compilers keep everything in a folder."""
    found = {variable: str(folder / variable.lower()) for variable in CACHE_FOLDERS}
    return found | {"TMPDIR": str(folder)}  # where Inductor keeps headers that it has compiled


def store_in(folder: Path) -> dict[str, str]:
    """The environment of a process where this project's store is in a folder too; the store is made if it is new."""
    store = folder / "store"
    store.mkdir(mode=0o700, exist_ok=True)  # of others' folders it makes no use
    return {"COMPILED_AUTOGRAD_CACHE_DIR": str(store)}


class Child:
    """A command that prints a JSON object as its last line, started with empty caches.

    With `cold_store`, the folder where this project keeps what it compiled is a new one too, with the extension that
    was built in it.
    """

    def __init__(self, command: Sequence[str], cold_store: bool = False, more: Mapping[str, str] | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)
        folder = self._folder = Path(self._scratch.name)
        environment = dict(os.environ) | caches_in(folder)
        if cold_store:
            environment |= store_in(folder)
            if (built := shadow_cache.default_dir() / "native").is_dir():
                shutil.copytree(built, folder / "store" / "native")
        self._started = time.monotonic()
        # Files, not pipes: nobody reads before the child has ended.
        with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                command,
                env=environment | dict(more or {}),
                stdout=output,
                stderr=errors,
                # A group of its own, so that the compilers it started can be stopped with it.
                start_new_session=True,
            )

    def result(self, timeout: float) -> Result:
        """What it printed, if it ends within `timeout` seconds; `failed` says what went wrong. Then it is no more."""
        try:
            if self.process.wait(timeout):
                return {"failed": last_line((self._folder / "errors").read_text(errors="replace"))}
            return json.loads(last_line((self._folder / "output").read_text()))
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer in {time.monotonic() - self._started:.0f} s"}
        finally:
            self.end()

    def end(self) -> None:
        """Stop it if it runs, and remove what it left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._scratch.cleanup()


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run_apart(command: Sequence[str], timeout: float, cold_store: bool = False) -> Result:
    """What the one child prints that runs `command`; `failed` says what went wrong."""
    return Child(command, cold_store).result(timeout)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In a child: what is measured inside runs while no other child of its batch measures, compiles, starts or ends."""
    if _TURNS not in os.environ:
        yield
        return
    folder = Path(os.environ[_TURNS])
    _say(folder, "compiled")
    _wait_for(folder / "all compiled")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when it is closed, also by the end of the process
        yield
    _say(folder, "measured")
    _wait_for(folder / "all measured")


def _say(folder: Path, what: str) -> None:
    (folder / f"{os.getpid()} {what}").touch()


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(_LOOKS_EVERY)


def run_together(commands: Sequence[Sequence[str]], timeout: float) -> list[Result]:
    """What children print that compile at the same time and measure in turn.

    They have `timeout` seconds to compile, together, and as long again to measure. Whoever is not done by then is
    ended.
    """
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-turns-") as folder:
        more = {_TURNS: folder}
        if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
            more["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(commands)))
        try:
            for command in commands:
                children.append(Child(command, more=more))
            failed: dict[Child, Result] = {}
            for what in ("compiled", "measured"):
                for child in _all_say(what, children, Path(folder), time.monotonic() + timeout):
                    child.end()
                    failed.setdefault(child, {"failed": f"not {what} in {timeout:g} s"})
                Path(folder, f"all {what}").touch()
            return [failed[child] if child in failed else child.result(_SECONDS_TO_END) for child in children]
        finally:
            for child in children:
                child.end()


def _all_say(what: str, children: list[Child], folder: Path, deadline: float) -> list[Child]:
    """Wait for children until they said so or ended; gives those that by the deadline did neither."""
    waiting = children
    while waiting and time.monotonic() < deadline:
        time.sleep(_LOOKS_EVERY)
        running = [child for child in waiting if child.process.poll() is None]
        waiting = [child for child in running if not (folder / f"{child.process.pid} {what}").exists()]
    return waiting
