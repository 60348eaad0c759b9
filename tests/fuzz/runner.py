"""Runs a program in all the ways that matter, and says what was not as under eager."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compiled_autograd as ca

from ..helpers import total
from .compare import Finding, differences, judged, rounding_of
from .execute import Seen, State, run_step
from .program import Program
from .values import LEFT_OUT, PLACE, poisoned_memory

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Settings:
    """How programs are run.

    Attributes:
        backend: of the compiled runs.
        check: the setting of that name, where it is not to be the default.
        process: run what asks for one in a second process, too.
        bitwise: compare bit for bit; by default with the backend that gives eager's bits, which it does on the CPU.
    """

    backend: Any = "eager"
    check: Any = None
    process: bool = True
    bitwise: bool | None = None

    def __post_init__(self) -> None:
        if self.bitwise is None:
            self.bitwise = self.backend == "eager" and PLACE.device == "cpu"


@dataclass
class Verdict:
    """What a program showed.

    Attributes:
        findings: what is wrong.
        backwards: how many were counted, by outcome.
        loads: regions that came from the store.
    """

    findings: list[Finding] = field(default_factory=list)
    backwards: Counter[str] = field(default_factory=Counter)
    loads: int = 0


def told(verdict: Verdict, ignored: Sequence[str]) -> list[Finding]:
    """The findings that have none of these texts in them."""
    return [each for each in verdict.findings if not any(text in str(each) for text in ignored)]


def _steps(program: Program) -> list[tuple[bool, int]]:
    """Whether the cousin runs, and the step."""
    turns = (False, True) if program.cousin >= 0 else (False,)
    return [(turn, step) for step in range(len(program.sizes)) for turn in turns]


def trace(program: Program, session: Any, poison: bool) -> list[Seen]:
    """All steps of a program (and of its cousin) in one engine."""
    states = State(program), State(program.varied() if program.cousin >= 0 else program)
    return [run_step(states[turn], step, session, poison) for turn, step in _steps(program)]


def check(program: Program, settings: Settings) -> Verdict:
    """Run a program on eager and compiled, and compare."""
    verdict = Verdict()
    ca.reset()
    with poisoned_memory(), ca.disable():
        wanted = trace(program, ca.disable(), False)
        if all(seen.tape is None for seen in wanted):
            return verdict
        if program.again == "memory":
            _compiled(program, settings, False, wanted, verdict)
        else:
            with tempfile.TemporaryDirectory() as folder:
                _compiled(program, settings, folder, wanted, verdict)
                ca.reset()
                if program.again == "reload" or not settings.process:
                    _compiled(program, settings, folder, wanted, verdict)
                elif not verdict.findings:
                    _in_a_process(program, settings, folder, verdict)
                ca.reset()
    ca.reset()
    return verdict


def _compiled(program: Program, settings: Settings, folder: Any, wanted: list[Seen], verdict: Verdict) -> None:
    more = {} if settings.check is None else {"check": settings.check}
    found: list[list[Seen]] = [[] for _ in range(program.threads)]
    sessions: list[Any] = []

    def run(index: int) -> None:
        every = {"backend": settings.backend, "tune": False, "compile_budget": math.inf}  # no clock decides
        session = ca.enable(cache_dir=folder, dynamic=program.dynamic, **every, **more)
        sessions.append(session)
        found[index] = trace(program, session, True)

    if program.threads == 1:
        run(0)
    else:
        threads = [threading.Thread(target=run, args=(index,)) for index in range(program.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for seen in found:
        _judge(program, settings, seen, wanted, verdict)
    for session in sessions:
        stats = session.stats()
        verdict.loads += stats.loads
        counted = total(stats)
        if counted != stats.backwards:
            verdict.findings.append(Finding("account", str(stats), -1))


def _judge(program: Program, settings: Settings, found: list[Seen], wanted: list[Seen], verdict: Verdict) -> None:
    if len(found) != len(wanted):
        verdict.findings.append(Finding("stopped", f"after {len(found)} of {len(wanted)} steps", len(found)))
        return
    known: Counter[Any] = Counter()
    enough = 1 if len(set(program.sizes)) == 1 else 2  # zeros and ones are compiled beside symbols
    rounding = rounding_of(program, bool(settings.bitwise))
    for index, ((turn, step), one, other) in enumerate(zip(_steps(program), found, wanted, strict=True)):
        verdict.findings += differences(one, other, index, rounding)
        # What a layout or a gradient alternates between comes again at the third step.
        key = (turn, step % 2, step > 0, one.tape)
        if other.error == "":
            allowed = ("other_thread_in_backward",) if program.threads > 1 else ()
            if program.mode == "freed":  # whether anything was saved is for eager to say
                allowed += ("backward through the graph a second time",)
            is_known = known[key] >= enough and program.threads == 1 and program.dynamic is not True
            verdict.findings += judged(one.outcomes, is_known, index, allowed)
        known[key] += 1
        verdict.backwards.update(outcome for outcome, _ in one.outcomes)


def _in_a_process(program: Program, settings: Settings, folder: str, verdict: Verdict) -> None:
    """What another process makes of the folder that this one filled."""
    command = [sys.executable, "-m", "tests.fuzz", "--backend", settings.backend, "--program", "-", "--folder", folder]
    command += ["--device", PLACE.device]
    if LEFT_OUT:
        command += ["--without", *sorted(LEFT_OUT)]
    if settings.check is not None:
        command += ["--check", str(settings.check).lower()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, input=program.to_json(), capture_output=True, text=True, check=False
    )
    if ended.returncode:
        lines = [line for line in ended.stdout.splitlines() if line.startswith("finding: ")]
        what = lines[0] if lines else (ended.stdout + ended.stderr)[-600:]
        kind = what.removeprefix("finding: ").split(" at step ")[0] if lines else "ended"
        verdict.findings.append(Finding(f"process {kind}", what, -1))


def check_in_folder(program: Program, settings: Settings, folder: str) -> Verdict:
    """One compiled run, with a folder that another process may have filled."""
    verdict = Verdict()
    with poisoned_memory():
        with ca.disable():
            wanted = trace(program, ca.disable(), False)
        _compiled(program, settings, folder, wanted, verdict)
    return verdict
