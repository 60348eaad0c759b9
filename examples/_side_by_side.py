"""Results of trainings that took their steps in turn: `train_llama.py` prints these."""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

if TYPE_CHECKING:
    from train_llama import Run

    import compiled_autograd as ca

CURVE_ROWS = 6
UNTIL_COMPILED = frozenset({"not_yet", "structure_miss", "compiling"})
"""What becomes of backwards in the background mode until the first compiled code serves."""


def parts(runs: Sequence[Run]) -> Iterator[tuple[str, Run, list[int]]]:
    """The columns of the speeds, each with the numbers of its steps.

    The steps of the compiled training are those before the first hit, and the hits. Later steps on eager, such as those
    that are timed for the setting `tune`, are in neither.
    """
    eager, compiled, *others = runs
    hits = [step for step, outcome in enumerate(compiled.outcomes) if outcome == "hit"]
    every = list(range(len(eager.steps)))
    yield eager.name, eager, every
    yield f"before {compiled.name}", compiled, every[: hits[0] if hits else None]
    yield compiled.name, compiled, hits
    for run in others:
        yield run.name, run, every


def ratio(eager: Run, run: Run, steps: Sequence[int], what: str) -> float | None:
    """The median of the ratios to eager's steps of the same turns, which met the same conditions; None without steps.

    `what` is "whole" or "backward".
    """
    ratios = [getattr(run.steps[step], what) / getattr(eager.steps[step], what) for step in steps]
    return statistics.median(ratios) if ratios else None


def print_speeds(
    runs: Sequence[Run], memory: Sequence[float | None], args: argparse.Namespace, console: Console
) -> None:
    """Medians of steps and of their backwards; for each column beside eager's the ratios, step by step."""
    columns = list(parts(runs))
    table = Table("", *(name for name, _, _ in columns), title="Speed")
    table.caption = "Milliseconds are medians. Ratios are medians too, each step's to eager's of the same turn."

    def row(name: str, values: Sequence[float | None], form: str) -> None:
        table.add_row(name, *("-" if value is None else format(value, form) for value in values))

    def median(run: Run, steps: Sequence[int], what: str) -> float | None:
        return statistics.median(getattr(run.steps[step], what) for step in steps) if steps else None

    row("steps", [len(steps) for _, _, steps in columns], ",")
    for name, what in (("step", "whole"), ("backward", "backward")):
        seconds = [median(run, steps, what) for _, run, steps in columns]
        row(f"{name} ms", [None if each is None else 1e3 * each for each in seconds], ".1f")
        row(f"{name} / eager", [None, *(ratio(runs[0], run, steps, what) for _, run, steps in columns[1:])], ".2f")
    tokens = args.batch_size * args.block_size
    speeds = [median(run, steps, "whole") for _, run, steps in columns]
    row("tokens a second", [None if each is None else tokens / each for each in speeds], ",.0f")
    row("memory of a step MB", [memory[0], None, *memory[1:]], ".0f")
    console.print(table)


def print_curves(runs: Sequence[Run], console: Console) -> None:
    """At most CURVE_ROWS rows of the loss curves, the first and the last step among them."""
    table = Table("step", *(run.name for run in runs), "difference of the first two", title="Loss")
    last = len(runs[0].steps) - 1
    for step in sorted({round(row * last / (CURVE_ROWS - 1)) for row in range(CURVE_ROWS)}):
        losses = [run.steps[step].loss for run in runs]
        table.add_row(str(step), *(f"{loss:.5f}" for loss in losses), f"{abs(losses[0] - losses[1]):.1e}")
    console.print(table)


def memory_of_a_step(run: Run, batch: tuple[Tensor, Tensor]) -> float | None:
    """MB by which memory grows at its highest during one more step: allocated on CUDA, resident elsewhere.

    None where the system does not tell (only Linux does).
    """
    if batch[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.step(*batch)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free, but not given back yet, would hide the growth
        reset.write_text("5")  # the highest is what there is now
    except (OSError, AttributeError):
        return None

    def resident(key: str) -> float:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status.read_text().splitlines() if key in line)

    before = resident("VmRSS")
    run.step(*batch)
    return resident("VmHWM") - before


def draw(runs: Sequence[Run], file: Path) -> str:
    """Draw the loss and the time of each step of all runs to `file`; says where, or what that needs."""
    try:
        import matplotlib
    except ImportError:
        return "No picture of the curves: matplotlib draws it, which `pip install -e '.[examples]'` installs."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, times) = pyplot.subplots(2, sharex=True, figsize=(8, 7), layout="constrained")
    for run, style in zip(runs, ("-", "--", ":"), strict=False):
        curves.plot([step.loss for step in run.steps], style, label=run.name)
        times.plot([1e3 * step.whole for step in run.steps], style, label=run.name, linewidth=0.8)
    curves.set(ylabel="loss", title="Loss, and milliseconds of each step")
    times.set(ylabel="step ms", xlabel="step", yscale="log")
    curves.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:  # an unknown ending is a ValueError
        return f"No picture of the curves at {file}: {error}"
    finally:
        pyplot.close(figure)
    return f"Losses and step times are drawn in {file}."


def conclusion(
    runs: Sequence[Run], session: ca.Session, args: argparse.Namespace, stopped: bool = False
) -> tuple[str, bool]:
    """One sentence with the result, and whether compiled code served and the loss curves agree.

    `stopped` is whether Ctrl-C ended the training.
    """
    eager, compiled = runs[:2]
    difference = largest_difference(eager, compiled)
    served = session.stats().compiles + session.stats().loads > 0
    good = bool(eager.steps) and served and difference <= args.tolerance
    failed = "" if good or stopped else "FAILED: "
    if not eager.steps:
        text = "the first step had not ended, and there is nothing to compare"
    elif difference > args.tolerance:
        text = f"FAILED: the loss curves differ by {difference:.1e}, more than --tolerance {args.tolerance:g}"
    elif not served:
        text = f"{failed}no step ran compiled, {why_none(compiled, session)}"
    else:
        text = f"{speed_and_cost(eager, compiled, session)}; the loss curves differ by {difference:.1e} at most"
    if stopped:
        text = f"stopped by Ctrl-C after {plural(eager)}: {text}"
    return f"{text[0].upper()}{text[1:]}.", good


def plural(run: Run) -> str:
    return f"{len(run.steps)} step{'' if len(run.steps) == 1 else 's'}"


def largest_difference(eager: Run, compiled: Run) -> float:
    """The largest absolute difference of the two loss curves; infinite when either holds a NaN."""
    differences = [abs(a.loss - b.loss) for a, b in zip(eager.steps, compiled.steps, strict=True)]
    return max((math.inf if math.isnan(each) else each for each in differences), default=0.0)


def why_none(compiled: Run, session: ca.Session) -> str:
    """Why compiled code has not served."""
    if session.settings.on_miss == "background" and set(compiled.outcomes) <= UNTIL_COMPILED:
        trained = f"{plural(compiled)}, {sum(step.whole for step in compiled.steps):.0f} s"
        return f"since the training ended before compiling did ({trained}; --seconds gives it longer)"
    return f"{session.stats()}: `next` above says what to do"


def speed_and_cost(eager: Run, compiled: Run, session: ca.Session) -> str:
    """The speed of hits, the cost of compiling, and whether the training as a whole was faster than eager's."""
    stats = session.stats()
    hits = next(steps for name, _, steps in parts([eager, compiled]) if name == compiled.name)
    where = "beside the training" if session.settings.on_miss == "background" else "in the first step"
    cost = f"compiling took {stats.compile_seconds:.0f} s {where}"
    if compiled.waited >= 0.5:
        cost += f", and at last {compiled.waited:.0f} s with all steps waiting"
    if not stats.compiles:
        cost = "the code was on disk, where an earlier run had left it"
    whole, backward = (ratio(eager, compiled, hits, what) for what in ("whole", "backward"))
    if whole is None:
        return f"no step was left to be timed with compiled code; {cost}"
    speed = f"compiled steps took {whole:.2f} of eager's (backward {backward:.2f}); {cost}"
    step, left = paid_back_after(eager, compiled), compiled.outcomes.count("not_worth_it")
    if left > len(hits) or (step is None and compiled.outcomes[-1] == "not_worth_it"):
        return f"{speed}; {what_was_lost(eager, compiled, left)}"
    return f"{speed}; " + (f"paid back after step {step}" if step is not None else why_not(eager, compiled, hits))


def paid_back_after(eager: Run, compiled: Run) -> int | None:
    """The first hit from which on the training so far took less time than eager's; None where there is none."""
    ahead = -compiled.waited
    since: int | None = None
    for step, (a, b) in enumerate(zip(eager.steps, compiled.steps, strict=True)):
        ahead += a.whole - b.whole
        if ahead <= 0:
            since = None
        elif since is None and compiled.outcomes[step] == "hit":
            since = step
    return since


def what_was_lost(eager: Run, compiled: Run, left: int) -> str:
    """Say that `left` backwards were left to eager, and how much longer the other steps took than eager's."""
    steps = zip(eager.steps, compiled.steps, compiled.outcomes, strict=True)
    others = sum(b.whole - a.whole for a, b, outcome in steps if outcome != "not_worth_it")
    text = "timed against eager's, the compiled backward was slower, and the session left"
    lost = max(compiled.waited + others, 0.0)
    return f"{text} {left} of {plural(eager)} to eager; {lost:.1f} s were lost in the others"


def why_not(eager: Run, compiled: Run, hits: Sequence[int]) -> str:
    """Why the training as a whole was not faster than eager's."""
    behind = compiled.waited + sum(b.whole - a.whole for a, b in zip(eager.steps, compiled.steps, strict=True))
    text = f"not paid back, {behind:.1f} s behind eager after {plural(eager)}: "
    gain = statistics.median(eager.steps[step].whole - compiled.steps[step].whole for step in hits)
    return text + (
        f"some {math.floor(behind / gain) + 1:,} more steps would do" if gain > 0 else "compiled steps were no faster"
    )
