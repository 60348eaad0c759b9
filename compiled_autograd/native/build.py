"""Compiles the extension, in a process of its own that outlives its parent: ``build.py TARGET COMMAND...``.

The command writes its result to the path after ``-o``, which is added here. The complete result then replaces the
target. Of several processes with one target, one compiles. The others end at once, or wait. If the compiler fails, a
file beside the target has the reason. A compiler that was killed is started again in a later process, but only a few
times: if memory is short, it stays short.

It is run by itself, and imports nothing but Python's own modules.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

FAILED = ".failed"
MOST_ENDED = 3
"""Number of times that a compiler may be killed; then this counts as a failure."""
_ENDED = re.compile(r"\b(Killed|Terminated)\b")
"""Text of g++ and clang if a signal ended one of their programs; the exit status does not show it."""
_LEAST_PRIORITY = 19
_LONGEST = 2000


def build(target: Path, command: list[str], waits: bool = False) -> None:
    """Compile, unless that was done or another process does it; with ``waits``, return when that one has ended."""
    with target.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            return
        if target.exists() or target.with_suffix(FAILED).exists():
            return
        made = target.with_suffix(".new")  # the lock's holder is the only one who writes here
        ended = subprocess.run(
            [*command, "-o", str(made)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            pass_fds=(lock.fileno(),),  # a compiler that goes on when this process is killed holds the lock
            env={**os.environ, "LC_ALL": "C"},
        )
        if ended.returncode == 0:
            made.replace(target)
            target.with_suffix(".ended").unlink(missing_ok=True)
            return
        said = ended.stderr or ended.stdout or f"it ended with {ended.returncode}"
        if (ended.returncode > 0 and not _ENDED.search(said)) or _times_ended(target) >= MOST_ENDED:
            _fail(target, said)


def _times_ended(target: Path) -> int:
    """Return how often the compiler of a target was killed, with this time."""
    with target.with_suffix(".ended").open("a+") as file:
        file.write(".")
        return file.tell()


def _fail(target: Path, said: str) -> None:
    whole = target.with_suffix(".said")
    whole.write_text(said[:_LONGEST])
    whole.replace(target.with_suffix(FAILED))
    target.with_suffix(".ended").unlink(missing_ok=True)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # whoever asked has no child that it would have to wait for
    os.umask(0o077)
    os.nice(_LEAST_PRIORITY)
    build(Path(sys.argv[1]), sys.argv[2:])
