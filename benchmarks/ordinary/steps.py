"""One training under one runner, in a process of its own that is stepped by another: a line in, a line of JSON out.

python -m benchmarks.ordinary.steps default vit 0 full
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import largest_difference
from benchmarks.ordinary.trainings import TINY, TRAININGS
from benchmarks.runners import RUNNERS

State = dict[str, dict[str, Tensor]]


class Steps:
    """A training, the runner's ways for it, and what its first step gave.

    Attributes:
        setup_seconds: what the runner took before the first step, its imports included.
    """

    def __init__(self, runner: str, model: str, seed: int, size: str) -> None:
        started = time.perf_counter()
        self.runner = RUNNERS[runner]()
        self.setup_seconds = time.perf_counter() - started
        self._backward_seconds = 0.0
        self._first: State | None = None
        torch.manual_seed(seed)
        self.training = TRAININGS[model](self, **(TINY[model] if size == "tiny" else {}))
        self._begun = {name: each.detach().clone() for name, each in self._parameters().items()}

    def _parameters(self) -> dict[str, nn.Parameter]:
        modules = enumerate(self.training.modules)
        return {f"{index}.{name}": each for index, module in modules for name, each in module.named_parameters()}

    # ---- the ways of the runner ----

    def compiled(self, module: nn.Module) -> Callable[..., Any]:
        started = time.perf_counter()
        found = self.runner.prepare(module)
        self.setup_seconds += time.perf_counter() - started
        return found

    def backward(self, loss: Tensor) -> None:
        """As it is written in a training: entering the runner's context counts."""
        started = time.perf_counter()
        with self.runner.around():
            loss.backward()
        self._backward_seconds += time.perf_counter() - started

    # ---- what can be asked for ----

    def steps(self, count: str) -> list[tuple[float, float]]:
        """Seconds of each of `count` steps, and of all backwards in it."""
        found = []
        for _ in range(int(count)):
            self._backward_seconds, started = 0.0, time.perf_counter()
            self.training.step()
            found.append((time.perf_counter() - started, self._backward_seconds))
            self._first = self._first or self._state()
        return found

    def _state(self) -> State:
        parameters = self._parameters()
        grads = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
        moved = {name: each.detach() - self._begun[name] for name, each in parameters.items()}
        return {"grads": grads, "moved": moved}

    def save(self, path: str) -> None:
        """Write what the first step gave."""
        torch.save(self._first, path)

    def compare(self, path: str) -> dict[str, float]:
        """What the first step gave, beside what another process has written of its own.

        largest: the largest difference of a gradient, by the largest element of its parameter's.
        gradients, moved: the length of the difference of all gradients, and of the steps that all parameters made, by
            the length of the other's.
        """
        expected, found = torch.load(path), self._first
        assert found is not None
        names = expected["grads"].keys() | found["grads"].keys()
        return {
            "largest": largest_difference(
                *({name: each["grads"].get(name) for name in names} for each in (expected, found))
            ),
            "gradients": _apart(expected["grads"], found["grads"]),
            "moved": _apart(expected["moved"], found["moved"]),
        }

    def wait(self) -> None:
        """Until nothing is built any more beside the training."""
        self.runner.wait()

    def counts(self) -> dict[str, Any]:
        return self.runner.counts()


def _apart(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    if expected.keys() != found.keys():
        return float("inf")
    one, other = (torch.cat([each[name].flatten() for name in expected]) for each in (expected, found))
    return ((other - one).norm() / one.norm()).item()


def main() -> None:
    runner, model, seed, size = sys.argv[1:]
    # What others print is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    side = Steps(runner, model, int(seed), size)
    ready = {"setup_seconds": side.setup_seconds, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        what, *given = line.rstrip("\n").split(" ", 1)
        print(json.dumps(getattr(side, what)(*given)), file=answers, flush=True)


if __name__ == "__main__":
    main()
