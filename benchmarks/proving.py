"""What it costs that compiled code proves itself (`check="new"`): in a first backward, in the next runs, and later.

    python -m benchmarks.proving
    python -m benchmarks.proving --models mlp --pairs 200

The first backward is that of a process of its own, with Inductor's folder and the cache empty. Later, when nothing more
is to be shown, steps with `check="new"` alternate with steps with `check=False` on the same compiled code.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.targets import MODELS

PROVED_AFTER = 6
"""Runs after which both forms of Inductor's code for the CPU have proved themselves."""


def measure(model: str, pairs: int) -> dict[str, Any]:
    """In this process: seconds of the first backward and of the comparison in it, and the medians of later steps."""
    import torch

    import compiled_autograd as ca
    from benchmarks.models import build

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    module, make_loss = build(model, 0, "cpu")

    def backward(session: Any) -> float:
        module.zero_grad()
        loss = make_loss(module)
        started = time.perf_counter()
        with session:
            loss.backward()
        return time.perf_counter() - started

    eager = statistics.median(backward(ca.disable()) for _ in range(10))
    proving = ca.enable(tune=False)
    first = backward(proving)
    assert proving.last is not None
    proof = proving.last.seconds.get("prove", 0.0)
    later = []
    for _ in range(PROVED_AFTER):
        backward(proving)
        later.append(proving.last.seconds.get("prove", 0.0))
    trusting = ca.enable(tune=False, check=False)
    steps = [(backward(proving), backward(trusting)) for _ in range(pairs)]
    assert proving.stats().failures == 0 and proving.last.outcome == "hit" and "prove" not in proving.last.seconds
    ratio = statistics.median(one / other for one, other in steps)
    return {"eager": eager, "first": first, "proof": proof, "later": [each for each in later if each], "ratio": ratio}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=100)
    arguments = parser.parse_args()
    columns = (
        "model",
        "first backward, s",
        "of it comparing",
        "share",
        "later comparisons, of eager",
        "a hit, by check=False",
    )
    table = Table(*columns)
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
            os.environ["COMPILED_AUTOGRAD_CACHE_DIR"] = f"{folder}/cache"
            with get_context("spawn").Pool(1) as pool:
                found = pool.apply(measure, (model, arguments.pairs))
        later = ", ".join(f"{each / found['eager']:.1f}" for each in found["later"])
        cells = (f"{found['first']:.1f}", f"{found['proof']:.3f} s", f"{found['proof'] / found['first']:.1%}")
        table.add_row(model, *cells, later, f"{found['ratio']:.3f}")
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    main()
