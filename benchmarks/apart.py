"""Eager, or another runner, in a process of its own, stepped on demand: eager as it is for whoever has nothing else
installed.

A runner may change its process for the better, and eager in the same process with it: ours lets the C library keep
freed memory, so that neither's buffers are faulted in again at each step. Beside an eager that has this too, a part of
what a user gains would not be seen.

    python -m benchmarks.apart eager mlp 0 cpu     # a line in, a backward's seconds out, until the input ends
"""

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

_REST = "rest"


class Answering:
    """A process that answers each line with a line, as a context manager: begun on entry, ended on exit."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        errors: IO[str] | None = None,
    ) -> None:
        self._command, self._environment, self._errors = command, environment, errors

    def __enter__(self) -> "Answering":
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        return self

    def ask(self, line: str) -> str:
        """The answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            print(line, file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> str:
        """The next line that it says. Raises RuntimeError if the process has ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise RuntimeError(f"{' '.join(self._command)} ended with status {self._process.wait()}: see its error above")

    def __exit__(self, *error: object) -> None:
        # Not communicate(), which waits until its children have closed the pipe too. What it has not read is lost.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


class Apart(Answering):
    """The other process, as a context manager: warmed by one step when it is entered, ended when it is left."""

    def __init__(self, runner: str, model: str, seed: int, device: str) -> None:
        super().__init__([sys.executable, "-m", "benchmarks.apart", runner, model, str(seed), device])

    def __enter__(self) -> "Apart":
        super().__enter__()
        self.step()
        self.rest()
        return self

    def step(self) -> float:
        """Seconds of the backward of one step there. Raises RuntimeError if the process has ended."""
        return float(self.ask(""))

    def rest(self) -> None:
        """There is no next step for a while, or none: others may have what memory it kept of the device."""
        self.ask(_REST)


def main() -> None:
    runner, model, seed, device = sys.argv[1:]
    # Not at the top: whoever only asks need not load it, and torch is loaded by then.
    from benchmarks.sides import eager_side, give_back

    side = eager_side(model, int(seed), device)
    side.use(runner)
    for line in sys.stdin:
        if line.strip() == _REST:
            give_back(device)
        print(0.0 if line.strip() == _REST else side.step(), flush=True)


if __name__ == "__main__":
    main()
