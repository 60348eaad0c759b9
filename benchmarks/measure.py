"""What one child process measures: one model under one runner, side by side with eager on a second copy of the model,
or with another runner.

Times are taken around `loss.backward()` alone. Steps of both alternate, and which of them goes first
changes too, so that whatever else the machine does falls on all.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks import floor, memory
from benchmarks.apart import Apart
from benchmarks.children import alone
from benchmarks.runners import EMPTY_RUNNERS, NotApplicable
from benchmarks.sides import Side, eager_side, give_back, now, sides

# Steps after the first one in which a runner may still compile, as the recording of a CUDA graph does.
LATE_STEPS = 5
# Ours are captured when addresses have come again, or when some steps have shown what moves.
LATE_STEPS_OF_GRAPHS = 60
WARM_PAIRS = 3
# In a turn, steps that are not counted, and steps that are. After another's turn, of another process above all, caches
# are cold and the other's threads are still looking for work: the first steps are up to twice as slow.
SETTLING_STEPS = 3
TURN_STEPS = 2
MEMORY_STEPS = 3
QUICK_FLOOR_STEPS = 3
# A gradient is compared with its own size, but not with less than this part of the model's largest gradient: one that
# would be zero but for rounding has no size of its own.
SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class What:
    """What to measure, and beside which runner; `quick` without eager in the same process, `floor` whether to measure
    that too."""

    model: str
    runner: str
    pairs: int = 30
    seed: int = 0
    device: str = "cpu"
    beside: str = "eager"
    quick: bool = False
    floor: bool = True

    def times(self, all_sides: Sequence["Steps"]) -> tuple[float, float, float]:
        """What `compare` says of two sides that take turns, after some that are not counted."""
        alternate(all_sides, WARM_PAIRS)
        return compare(*alternate(all_sides, self.pairs))


def count_nodes(loss: Tensor) -> int:
    """The nodes of the tape behind `loss`, those that accumulate into parameters included."""
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return len(seen)


def gradient_difference(eager: nn.Module, other: nn.Module) -> float:
    """Largest relative difference of two modules' gradients, by the largest absolute element of each parameter."""
    return largest_difference(*({name: each.grad for name, each in m.named_parameters()} for m in (eager, other)))


def largest_difference(expected: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]) -> float:
    """The same of gradients by the names of their parameters."""
    scales = {name: grad.abs().max().item() for name, grad in expected.items() if grad is not None}
    smallest = SMALLEST_SCALE * max(scales.values())
    worst = 0.0
    for name, other in found.items():
        grad = expected[name]
        if grad is None or other is None:
            worst = worst if grad is other else float("inf")
            continue
        difference = (other - grad).abs().max().item()
        worst = max(worst, difference / max(scales[name], smallest))
    return worst


class Steps(Protocol):
    """Something that makes one step after the other."""

    def step(self) -> float:
        """Seconds of one backward."""


def turn(side: Steps) -> float:
    """Seconds of a backward among others of its kind, as in training: the mean of a few, after some to settle."""
    times = [side.step() for _ in range(SETTLING_STEPS + TURN_STEPS)]
    return statistics.mean(times[SETTLING_STEPS:])


def alternate(all_sides: Sequence[Steps], rounds: int) -> list[list[float]]:
    """Seconds of each side's backwards, turn by turn; in each round of turns another side goes first."""
    times: list[list[float]] = [[] for _ in all_sides]
    for number in range(rounds):
        for index in range(len(all_sides)):
            which = (index + number) % len(all_sides)
            times[which].append(turn(all_sides[which]))
    return times


def compare(eager: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Median milliseconds of both, and the median over rounds of the second's time by the first's."""
    ratios = [second / first for first, second in zip(eager, other, strict=True)]
    return 1e3 * statistics.median(eager), 1e3 * statistics.median(other), statistics.median(ratios)


def grown_bytes(side: Side) -> int | None:
    """Median over a few steps of what one whole step adds, gradients included; None where it cannot be read."""
    growths = []
    try:
        for _ in range(MEMORY_STEPS):
            side.module.zero_grad(set_to_none=True)
            growths.append(memory.growth(side.step, side.device))
    except (OSError, NotApplicable) as error:
        print(f"peak memory not measured: {error}", file=sys.stderr)
        return None
    return int(statistics.median(growths))


def allocated_bytes(side: Side) -> int:
    """Median over a few steps of the most that is allocated at once during the backward."""
    peaks = []
    for _ in range(MEMORY_STEPS):
        side.module.zero_grad(set_to_none=True)
        peaks.append(memory.peak_of_backward(side.forward, side.runner.around(), side.device))
    return int(statistics.median(peaks))


def held_before(side: Side) -> int:
    """Bytes of the GPU that are held between the steps of `side`; 0 on the CPU."""
    side.module.zero_grad(set_to_none=True)
    return memory.held() if side.device == "cuda" else 0


def held_bytes(side: Side, before: int) -> int | None:
    """The most bytes of the GPU that are held during a few steps, beyond those `before`; None on the CPU."""
    return memory.most_held(side.step, MEMORY_STEPS) - before if side.device == "cuda" else None


def measure_steady(what: What) -> dict[str, Any]:
    """The first step, the steady state, peak memory and gradients of a runner, and the floor of its model.

    Eager, or the runner `beside`, is timed in a process of its own (beside_ms, ratio); eager also in this one
    (eager_here_ms, ratio_here).

    Seconds: setup_seconds is what it takes to import and make the runner, first_forward_seconds and
    first_backward_seconds are its first step, with nothing compiled before.
    """
    device = what.device
    eager, other = sides(what.model, what.seed, device)
    held = held_before(eager)
    started = now(device)
    other.use(what.runner)
    set_up = now(device)
    loss = other.forward()
    forward_done = now(device)
    first = {
        "setup_seconds": set_up - started,
        "first_forward_seconds": forward_done - set_up,
        "first_backward_seconds": other.backward(loss),
    }
    eager.step()
    difference = gradient_difference(eager.module, other.module)
    del eager, loss  # what one copy holds on to changes what the C library gives back after the other's step
    for _ in range(LATE_STEPS_OF_GRAPHS if what.runner == "ours-cuda-graphs" else LATE_STEPS):
        other.step()
    give_back(device)
    with Apart(what.beside, what.model, what.seed, device) as apart, alone():
        beside_ms, runner_ms, ratio = what.times([apart, other])
        apart.rest()
        found = first | {"beside_ms": beside_ms, "runner_ms": runner_ms, "ratio": ratio}
        found |= measure_beside_eager(what, other, difference, held)
        give_back(device)
        return found


def measure_beside_eager(what: What, other: Side, difference: float, held: int) -> dict[str, Any]:
    """What a second copy in the same process is needed for.

    Args:
        other: the runner's copy, with which everything is compiled.
        difference: that of the first gradients.
        held: bytes of the GPU that were held before the runner was there.
    """
    eager = eager_side(what.model, what.seed, what.device)
    eager_here_ms, ratio_here = None, None
    if what.quick:
        eager.step()
    else:
        eager_here_ms, _, ratio_here = what.times([eager, other])
    found = {
        "eager_here_ms": eager_here_ms,
        "ratio_here": ratio_here,
        # The first backward and a late one may run different code.
        "gradient_difference": max(difference, gradient_difference(eager.module, other.module)),
        "eager_peak_bytes": grown_bytes(eager),
        "runner_peak_bytes": grown_bytes(other),
        "eager_held_bytes": held_bytes(eager, held_before(eager)),
    }
    eager.module.zero_grad(set_to_none=True)
    found["runner_held_bytes"] = held_bytes(other, held)
    if what.floor:
        # The profiler last: it leaves memory of its own behind, and slows whatever runs under it.
        steps = QUICK_FLOOR_STEPS if what.quick else None
        found |= floor.measure(eager.step, eager.forward, what.device, steps)
    return {
        **found,
        "eager_allocated_bytes": allocated_bytes(eager),
        "runner_allocated_bytes": allocated_bytes(other),
        "counts": other.runner.counts(),
    }


def measure_hit(what: What) -> dict[str, Any]:
    """What a hit costs when the compiled function is empty: milliseconds, and microseconds a node of the tape.

    Freeing what the tape saved is part of it, and with large activations the larger part. `hit_ratio` is by eager's
    whole backward, whatever the steady state is measured beside.
    """
    if what.runner not in EMPTY_RUNNERS:
        raise NotApplicable(f"{what.runner} has no cache of tapes")
    eager, other = sides(what.model, what.seed, what.device)
    nodes = count_nodes(eager.forward())
    other.runner = EMPTY_RUNNERS[what.runner]()
    for _ in range(LATE_STEPS):
        other.step()
    before = other.runner.counts()
    give_back(what.device)
    with alone():
        _, hit_ms, hit_ratio = what.times([eager, other])
        give_back(what.device)
    after = other.runner.counts()
    # Whatever else was counted, bypasses above all, would not be the cost of a hit.
    changed = sorted(name for name in after if name != "hits" and after[name] != before.get(name))
    if changed:
        raise NotApplicable(f"not every backward was a hit: {', '.join(f'{n} {after[n]}' for n in changed)}")
    return {
        "nodes": nodes,
        "hit_ms": hit_ms,
        "hit_us_per_node": 1e3 * hit_ms / nodes,
        "hit_ratio": hit_ratio,
        "hit_counts": after,
    }


MEASUREMENTS: dict[str, Callable[[What], dict[str, Any]]] = {"steady": measure_steady, "hit": measure_hit}


def run(measurement: str, what: What) -> dict[str, Any]:
    """One measurement as a JSON object; `not_applicable` holds the reason where there is none."""
    result: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if what.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    try:
        return result | MEASUREMENTS[measurement](what)
    except NotApplicable as reason:
        return result | {"not_applicable": str(reason)}
