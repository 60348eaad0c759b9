"""From which size on work is worth a second thread: matrix products by BLAS, and kernels of Inductor's on the CPU.

    OMP_NUM_THREADS=2 python -m benchmarks.threads [--rounds 15]

Times are microseconds of the clock, least of all rounds, of one call from Python, which takes some 20 us of a kernel's:
the difference between the columns is what counts. Other threads are awake here, since they have just been used; where
they have gone to sleep, waking them takes longer.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch._inductor import config

from compiled_autograd.backends.inductor.straight_line.products import limit_threads

_PRODUCTS = [(32, 32, 32), (32, 64, 64), (64, 64, 64), (32, 256, 64), (64, 256, 64), (128, 128, 128), (256, 256, 256)]
_ROWS = [16, 64, 128, 256, 512, 1024]
_COLUMNS = 64
_NEVER, _ALWAYS = 1 << 30, 1
"""Of Inductor's ``cpp.min_chunk_size``."""


def _where(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > 0, y, 0.0)


def _erf_and_exp(x: Tensor, y: Tensor) -> Tensor:
    return y * (torch.erf(x) + torch.exp(-x * x) * x)


def _softmax(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x * y, -1)


def _sum_of_rows(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(0)


def _microseconds(function: Callable[[], object], rounds: int, calls: int = 300) -> float:
    """Of one call."""
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        found.append((time.perf_counter() - started) / calls)
    return min(found) * 1e6


def products(rounds: int) -> None:
    """Print what products take with one thread and with all."""
    address = limit_threads()
    if not address:
        print("PyTorch is built without MKL: its products cannot be limited to one thread")
        return
    limit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(address)
    print(f"{'product':>16} {'multiplications':>16} {'one thread':>12} {'all':>8}")
    for m, n, k in _PRODUCTS:
        a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
        found = []
        for threads in (1, 0):
            before = limit(threads)
            found.append(_microseconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), rounds))  # type: ignore[misc]
            limit(before)
        print(f"{f'{m} x {k} x {n}':>16} {m * n * k:>16,} {found[0]:>12.1f} {found[1]:>8.1f}", flush=True)


def kernels(rounds: int) -> None:
    """Print what kernels take that are never split among threads, and always."""
    print(f"{'kernel':>16} {'elements':>16} {'one thread':>12} {'all':>8}")
    for function in (_where, _erf_and_exp, _softmax, _sum_of_rows):
        for rows in _ROWS:
            x, y = torch.randn(rows, _COLUMNS), torch.randn(rows, _COLUMNS)
            found = []
            for least in (_NEVER, _ALWAYS):
                torch._dynamo.reset()
                with config.patch({"cpp.min_chunk_size": least, "fx_graph_cache": False}):
                    compiled = torch.compile(function, dynamic=False)
                    compiled(x, y)
                    found.append(_microseconds(lambda c=compiled, x=x, y=y: c(x, y), rounds))  # type: ignore[misc]
            name = function.__name__.strip("_").replace("_", " ")
            print(f"{name:>16} {x.numel():>16,} {found[0]:>12.1f} {found[1]:>8.1f}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    products(rounds)
    print()
    kernels(rounds)


if __name__ == "__main__":
    main()
