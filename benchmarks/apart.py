"""Eager, or another runner, in a process of its own, stepped on demand: eager as it is for whoever has nothing else
installed.

A runner may change its process for the better, and eager in the same process with it: ours lets the C library keep
freed memory, so that neither's buffers are faulted in again at each step. Beside an eager that has this too, a part of
what a user gains would not be seen.

    python -m benchmarks.apart eager mlp 0 cpu     # a line in, a backward's seconds out, until the input ends
"""

import subprocess
import sys
from types import TracebackType

_REST = "rest"


class Apart:
    """The other process, as a context manager: warmed by one step when it is entered, ended when it is left."""

    def __init__(self, runner: str, model: str, seed: int, device: str) -> None:
        self._command = [sys.executable, "-m", "benchmarks.apart", runner, model, str(seed), device]

    def __enter__(self) -> "Apart":
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step()
        self.rest()
        return self

    def step(self) -> float:
        """Seconds of the backward of one step there. Raises RuntimeError if the process has ended."""
        return self._ask("")

    def rest(self) -> None:
        """There is no next step for a while, or none: others may have what memory it kept of the device."""
        self._ask(_REST)

    def _ask(self, line: str) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{' '.join(self._command)} ended with status {self._process.wait()}: see its error above"
            )
        return float(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()


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
