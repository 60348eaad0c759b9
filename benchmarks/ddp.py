"""What a backward of `DistributedDataParallel` takes, compiled, by eager's; and when it communicates.

    OMP_NUM_THREADS=1 python -m benchmarks.ddp [--ranks 2] [--models mlp gpt resnet] [--rounds 30]

Processes on gloo, each with three copies of a model: eager's, compiled, and eager's once more. Their backwards take
turns in any order, all ranks wait for one another before each, and a time is until `backward` has returned on all
ranks, which is after the communication. A ratio is the median over rounds of compiled by eager; that of both eager ones
says what is noise. `issued` says at which part of the backward each all-reduce was issued, read from a profile of one
backward: what is issued before the end overlaps with what is computed after it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import distributed, multiprocessing, nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

import compiled_autograd as ca
from benchmarks.backward import build_extension
from benchmarks.measure import gradient_difference
from benchmarks.models import FACTORIES, MakeLoss, build

WARM_STEPS = 6
ISSUES = ("c10d::allreduce_", "c10d::allreduce_coalesced_")


def backward(model: nn.Module, make_loss: MakeLoss, session: ca.Session | None) -> float:
    """Seconds of one backward, which all ranks begin together."""
    model.zero_grad()
    loss = make_loss(model)
    distributed.barrier()
    started = time.perf_counter()
    if session is None:
        loss.backward()
    else:
        with session:
            loss.backward()
    return time.perf_counter() - started


def issued(model: nn.Module, make_loss: MakeLoss, session: ca.Session | None) -> list[float]:
    """Parts of a backward after which its all-reduces were issued."""
    model.zero_grad()
    loss = make_loss(model)
    distributed.barrier()
    with torch.profiler.profile() as profile, record_function("whole backward"):
        if session is None:
            loss.backward()
        else:
            with session:
                loss.backward()
    events = profile.events()
    whole = next(event.time_range for event in events if event.name == "whole backward")
    return sorted(
        (event.time_range.start - whole.start) / whole.elapsed_us() for event in events if event.name in ISSUES
    )


def measure(rank: int, ranks: int, folder: str, options: argparse.Namespace, name: str) -> None:
    """One rank's figures."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    built = [build(name, 0, "cpu") for _ in range(3)]
    make_loss = built[0][1]
    eager, ours, _ = sides = [DistributedDataParallel(model) for model, _ in built]
    session = ca.enable(backend=options.backend, on_miss="compile", extension="all", tune=False, cache_dir=False)
    sessions = [None, session, None]
    for _ in range(WARM_STEPS):
        for each, inside in zip(sides, sessions, strict=True):
            backward(each, make_loss, inside)
    difference = gradient_difference(eager, ours)
    seconds = []
    for order in itertools.islice(itertools.cycle(itertools.permutations(range(len(sides)))), options.rounds):
        taken = [0.0] * len(sides)
        for side in order:
            taken[side] = backward(sides[side], make_loss, sessions[side])
        seconds.append(taken)
    stats = session.stats()
    figures = {
        "seconds": seconds,
        "difference": difference,
        "hits": stats.hits,
        "bypasses": stats.tuning + sum(stats.bypasses.values()),
        "eager_issued": issued(eager, make_loss, None),
        "issued": issued(ours, make_loss, session),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(figures))
    distributed.barrier()
    distributed.destroy_process_group()


def run(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """The figures of each rank; an error of one is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (options.ranks, folder, options, name), nprocs=options.ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.ranks)]


def parts(issued: list[float]) -> str:
    """As they are shown."""
    return ", ".join(format(part, ".2f") for part in issued)


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=FACTORIES, default=["mlp", "gpt", "resnet"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    build_extension(Console())
    for name in options.models:
        ranks = run(options, name)
        slowest = [
            [max(times) for times in zip(*taken, strict=True)]
            for taken in zip(*(figures["seconds"] for figures in ranks), strict=True)
        ]
        ratio, noise = (statistics.median(taken[side] / taken[0] for taken in slowest) for side in (1, 2))
        first = ranks[0]
        print(
            f"{name}: {ratio:.3f} of eager's {1000 * statistics.median(taken[0] for taken in slowest):.1f} ms, eager "
            f"again {noise:.3f}; {first['hits']} hits, {first['bypasses']} bypasses; gradients "
            f"{max(figures['difference'] for figures in ranks):.0e}; issued at {parts(first['issued'])} (eager: "
            f"{parts(first['eager_issued'])})"
        )


if __name__ == "__main__":
    main()
