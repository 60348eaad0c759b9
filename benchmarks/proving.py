"""What it costs that compiled code proves itself (`check="new"`): in a first backward, in the next runs, and later.

    python -m benchmarks.proving
    python -m benchmarks.proving --models mlp --pairs 200
    python -m benchmarks.proving --checked

The first backward is that of a process of its own, with Inductor's folder and the cache empty. Later, when nothing more
is to be shown, steps with `check="new"` alternate with steps with `check=False` on the same compiled code.

With --checked, steps on eager, compiled, and compiled with `check=True` take turns, once everything has proved itself:
CPU time of the one thread that computes, and the median of what each third step takes by the two before it together.
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

SECONDS_TO_BUILD = 120.0
"""Seconds after which nobody waits for the extension any more."""
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
    proving = ca.enable(on_miss="compile", tune=False)
    first = backward(proving)
    assert proving.last is not None
    proof = proving.last.seconds.get("prove", 0.0)
    later = []
    for _ in range(PROVED_AFTER):
        backward(proving)
        later.append(proving.last.seconds.get("prove", 0.0))
    trusting = ca.enable(on_miss="compile", tune=False, check=False)
    steps = [(backward(proving), backward(trusting)) for _ in range(pairs)]
    assert proving.stats().failures == 0 and proving.last.outcome == "hit" and "prove" not in proving.last.seconds
    ratio = statistics.median(one / other for one, other in steps)
    return {"eager": eager, "first": first, "proof": proof, "later": [each for each in later if each], "ratio": ratio}


def measure_checked(model: str, triples: int) -> dict[str, Any]:
    """In this process: medians in milliseconds of a backward on eager, compiled and compared, and of their ratio."""
    import torch

    import compiled_autograd as ca
    from benchmarks.models import build
    from compiled_autograd.engine.native_hits import NATIVE_HITS

    torch.set_num_threads(1)  # of one thread the CPU time is all that it costs
    module, make_loss = build(model, 0, "cpu")

    def backward(session: Any) -> float:
        module.zero_grad()
        loss = make_loss(module)
        started = time.thread_time()
        with session:
            loss.backward()
        return 1000 * (time.thread_time() - started)

    eager, compiled, checked = ca.disable(), ca.enable(tune=False, extension="all"), ca.enable(tune=False, check=True)
    deadline = time.monotonic() + SECONDS_TO_BUILD
    while not NATIVE_HITS.hits and time.monotonic() < deadline:
        backward(compiled)
    for _ in range(PROVED_AFTER):
        backward(compiled)
        backward(checked)
    steps = [(backward(eager), backward(compiled), backward(checked)) for _ in range(triples)]
    assert compiled.stats().failures == checked.stats().failures == 0
    assert checked.stats().bypasses == {} and checked.last is not None and "prove" in checked.last.seconds
    ratio = statistics.median(last / (one + other) for one, other, last in steps)
    names = ("eager", "compiled", "checked")
    medians = dict(zip(names, map(statistics.median, zip(*steps, strict=True)), strict=True))
    return {**medians, "ratio": ratio, "native": NATIVE_HITS.hits > 0}


def report_checked(found: dict[str, dict[str, Any]]) -> Table:
    """What :func:`measure_checked` found, by model."""
    table = Table("model", "eager, ms", "compiled, ms", "check=True, ms", "by eager + compiled", "native walk")
    for model, each in found.items():
        cells = [f"{each[name]:.2f}" for name in ("eager", "compiled", "checked", "ratio")]
        table.add_row(model, *cells, "yes" if each["native"] else "no")
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--checked", action="store_true", help="measure check=True instead")
    arguments = parser.parse_args()
    if arguments.checked:
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            given = [(model, arguments.pairs) for model in arguments.models]
            checked = dict(zip(arguments.models, pool.starmap(measure_checked, given, chunksize=1), strict=True))
        Console(file=sys.stdout).print(report_checked(checked))
        return
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
