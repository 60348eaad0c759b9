"""Compiles the extension, in a process of its own that outlives the one that asked: ``build.py TARGET COMMAND...``.

The command writes its result where ``-o`` says, which is added here. The result takes its place only when all of it is
there. Of several processes with one target, one compiles; the others end at once. Where the compiler fails, a file
beside the target says why.

It is run by itself, and imports nothing but Python's own modules.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

FAILED = ".failed"
_LEAST_PRIORITY = 19
_LONGEST = 2000


def build(target: Path, command: list[str]) -> None:
    """Compile, unless that was done or another process does it."""
    with target.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        failed = target.with_suffix(FAILED)
        if target.exists() or failed.exists():
            return
        made = target.with_suffix(".new")  # the lock's holder is the only one who writes here
        ended = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, errors="replace", check=False
        )
        if ended.returncode == 0:
            made.replace(target)
        elif ended.returncode > 0:  # else something ended it, and another time may do better
            said = made.with_suffix(".said")
            said.write_text((ended.stderr or ended.stdout)[:_LONGEST])
            said.replace(failed)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # whoever asked has no child that it would have to wait for
    os.umask(0o077)
    os.nice(_LEAST_PRIORITY)
    build(Path(sys.argv[1]), sys.argv[2:])
