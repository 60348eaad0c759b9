"""Sums over rows by ATen, and GELU's backward with one exponential, beside Inductor's code for the CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.on_cpu [--rounds 40]

Microseconds of the clock for one, the median of all rounds. A round computes ten, so that a call of the compiled code,
whose own time is taken off, counts for a tenth; both ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from compiled_autograd.backends.inductor.backend import LEAST_WORK
from compiled_autograd.backends.inductor.on_cpu import gelu_backward

Way = Callable[..., list[Tensor]]
TIMES = 10
ROWS = [(64, 2048), (256, 512), (512, 256), (1024, 128), (1024, 512), (4096, 128), (16384, 128), (2048, 2048)]
ELEMENTS = [1 << 13, 1 << 15, 1 << 17, 1 << 19]


def _sums(*given: Tensor) -> list[Tensor]:
    return [each.sum(0) for each in given]


def _gelus(*given: Tensor) -> list[Tensor]:
    return [torch.ops.aten.gelu_backward(each, each) for each in given]


def _shared(*given: Tensor) -> list[Tensor]:
    return [gelu_backward(each, each) for each in given]


def _microseconds(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    taken: list[list[float]] = [[] for _ in functions]
    for turn in range(rounds + 5):
        for function, times in zip(functions, taken, strict=True):
            started = time.perf_counter()
            function()
            times += [(time.perf_counter() - started) * 1e6] * (turn >= 5)
    return [statistics.median(times) for times in taken]


def _row(name: str, function: Way, given: list[Tensor], rounds: int, instead: Way | None = None) -> None:
    """Inductor's code, beside ATen, or beside Inductor's code of something else instead."""
    torch._dynamo.reset()
    compiled, nothing = (torch.compile(each, dynamic=False) for each in (function, lambda x: x + 1))
    other = function if instead is None else torch.compile(instead, dynamic=False)
    one = torch.ones(1)
    here, fused, call = _microseconds([lambda: other(*given), lambda: compiled(*given), lambda: nothing(one)], rounds)
    here, fused = (here - (0 if instead is None else call)) / TIMES, (fused - call) / TIMES
    print(f"{name:>24} {here:>10.1f} {fused:>10.1f} {here / fused:>10.2f}", flush=True)


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    from torch._inductor import config

    setting, _, elements = LEAST_WORK
    print(f"{'':>24} {'here':>10} {'Inductor':>10} {'ratio':>10}")
    with config.patch({setting: elements}):
        for rows, columns in ROWS:
            given = [torch.randn(rows, columns) for _ in range(TIMES)]
            _row(f"sum of {rows} x {columns}", _sums, given, options.rounds)
        for size in ELEMENTS:
            given = [torch.randn(size) for _ in range(TIMES)]
            _row(f"gelu of {size}", _gelus, given, options.rounds, _shared)


if __name__ == "__main__":
    main()
