"""The stages of one graph as linked lines: the tape graph, the ATen graphs, the backend's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from .. import ir
from ..backends.protocol import source_of
from ..cache.stages import calls_of, some_of
from ..cache.variants import Variant
from ..diagnostics.node_names import call_name
from ..shadow_cache.report import data
from ..shadow_cache.report.texts import aten_texts, code_lines, defined
from ..steps.steps import AccumulateStep, CompiledRegion, Executor, OpaqueStep, RegionStep
from .sizes import RegionSizes

_NO_CODE = "The backend keeps no code to show."
_FROM_STORE = "Another process compiled this: the nodes of the lines are not recorded."


@dataclass(slots=True)
class _Lines:
    lines: list[data.Line] = field(default_factory=list)
    blocks: list[data.Block] = field(default_factory=list)

    def add(self, step: int, lines: Sequence[data.Line]) -> None:
        self.blocks.append(data.Block(step, len(self.lines), len(lines)))
        self.lines += lines

    def stage(self, key: str, title: str, note: str) -> data.Stage:
        return data.Stage(key, title, note, tuple(self.lines), tuple(self.blocks))


def newest(step: RegionStep) -> CompiledRegion | None:
    """Return the newest compiled code of a region; None if there is none."""
    found = step.compiled_regions()
    return found[-1] if found else None


def steps_of(variant: Variant) -> list[data.Step]:
    """Return the steps of a variant, in order."""
    tape = variant.program.tape
    return [_step(tape, step, number) for number, step in enumerate(variant.program.schedule.steps)]


def _step(tape: ir.TapeGraph, step: Executor, number: int) -> data.Step:
    if isinstance(step, AccumulateStep):
        names = [tape.calls[call].parameter or f"leaf #{call}" for call in step.calls]
        return data.Step("leaves", "gradients of leaves", some_of(names), len(step.calls), len(step.calls))
    if isinstance(step, OpaqueStep):
        title = f"{ir.target_name(step.node)} of {call_name(tape, step.node.meta['call'])}"
        is_users = ir.runs_users_code(step.node.target)
        why = "a hook or a Python function: runs uncompiled" if is_users else "cannot be traced: runs uncompiled"
        runs = step.spent.runs
        return data.Step("users", title, why, 1, 1, step.spent.seconds / runs if runs else None, step.spent.least, runs)
    calls = calls_of(step)
    kinds = list(dict.fromkeys(tape.calls[call].name for call in calls))
    compiled = newest(step)
    detail = some_of(kinds)
    if compiled is None:
        detail += "; not compiled: its calls run one by one"
    else:  # failures first: a row shows one line
        if compiled.proof.refuted:
            detail = f"its calls run one by one; {detail}"
        if dropped := ", ".join(compiled.proof.dropped):
            detail = f"not equal to the real calls, and dropped: {dropped}; {detail}"
        elif compiled.proof.refuted:
            detail = f"could not be compared with the real calls: {detail}"
    runs = step.spent.runs
    seconds = step.spent.seconds / runs if runs else None
    return data.Step(
        "region", f"region {number}", detail, len(step.region.nodes), len(calls), seconds, step.spent.least, runs
    )


def step_of_calls(variant: Variant) -> dict[int, int]:
    """Return, for each node of the tape, the first step that runs it."""
    steps: dict[int, int] = {}
    for number, step in enumerate(variant.program.schedule.steps):
        for call in calls_of(step):
            steps.setdefault(call, number)
    return steps


def stages_of(variant: Variant, sizes: Mapping[int, RegionSizes]) -> tuple[data.Stage, ...]:
    """Return all stages of a variant.

    Args:
        sizes: the memory use of each region, by the number of its step.
    """
    tape_stage, headers = tape_stage_of(variant.program.tape, _step_of_nodes(variant))
    aten, code = _Lines(), _Lines()
    from_store = without_code = False
    for number, step in enumerate(variant.program.schedule.steps):
        compiled = newest(step) if isinstance(step, RegionStep) else None
        if not isinstance(step, RegionStep) or compiled is None:
            aten.add(number, _as_it_is(variant.program.tape, step, headers))
            continue
        first = len(aten.lines)
        texts = aten_texts(compiled.aten.text())
        aten.add(number, _aten_lines(texts, compiled.aten.origins, headers, sizes.get(number)))
        from_store = from_store or not compiled.aten.origins
        source = source_of(compiled.call)
        without_code = without_code or source is None
        if source is not None:
            code.add(number, code_lines(source, enumerate(texts, first), len(code.lines)))
    return (
        tape_stage,
        aten.stage("aten", "ATen", _FROM_STORE if from_store else ""),
        code.stage("code", "Backend's code", _NO_CODE if without_code else ""),
    )


def _step_of_nodes(variant: Variant) -> dict[fx.Node, int]:
    steps: dict[fx.Node, int] = {}
    accumulate = {}
    for number, step in enumerate(variant.program.schedule.steps):
        if isinstance(step, RegionStep):
            steps.update(dict.fromkeys(step.region.nodes, number))
        elif isinstance(step, OpaqueStep):
            steps.update(dict.fromkeys((step.node, *step.node.users), number))
        else:
            accumulate.update(dict.fromkeys(step.calls, number))
    for node in variant.program.tape.graph.find_nodes(op="call_function", target=ir.accumulate_grad):
        steps[node] = accumulate.get(node.meta["call"], -1)
    return steps


def tape_stage_of(tape: ir.TapeGraph, steps: Mapping[fx.Node, int]) -> tuple[data.Stage, dict[int, int]]:
    """Return the stage of the tape graph, and the first line of each node of the tape."""
    lines: list[data.Line] = []
    blocks: list[data.Block] = []
    headers: dict[int, int] = {}
    header = -1
    inputs: list[data.Line] = []
    for text, about in tape.lines():
        number = len(lines)
        if text.startswith("  input_"):  # last: there may be hundreds of inputs
            inputs.append(data.Line(text))
            continue
        if isinstance(about, ir.TapeCall):
            header = headers.setdefault(about.index, number)
            lines.append(data.Line(text, () if header == number else header, about.index))
        elif about is not None:
            lines.append(data.Line(text, header, about.meta["call"]))
            step = steps.get(about, -1)
            last = blocks[-1] if blocks else None
            if last is not None and last.step == step:
                blocks[-1] = data.Block(step, last.first, number + 1 - last.first)
            elif step >= 0:
                first = number - 1 if lines[-2].links == () and lines[-2].node == about.meta["call"] else number
                blocks.append(data.Block(step, first, number + 1 - first))
        else:
            lines.append(data.Line(text))
    return data.Stage("tape", "Tape graph", "", (*lines, *inputs), tuple(blocks)), headers


def _as_it_is(tape: ir.TapeGraph, step: Executor, headers: Mapping[int, int]) -> list[data.Line]:
    if isinstance(step, AccumulateStep):
        return [
            data.Line(f"    accumulate_grad({tape.calls[call].parameter or f'leaf of #{call}'})", _link(call, headers))
            for call in step.calls
        ]
    nodes = step.region.nodes if isinstance(step, RegionStep) else [step.node]
    return [
        data.Line(f"    {ir.target_name(node)}(...)  # uncompiled", _link(node.meta["call"], headers)) for node in nodes
    ]


def _link(call: int, headers: Mapping[int, int]) -> tuple[int, ...]:
    return (headers[call],) if call in headers else ()


def _aten_lines(
    texts: Sequence[str], origins: Mapping[str, int], headers: Mapping[int, int], sizes: RegionSizes | None
) -> list[data.Line]:
    gave = {} if sizes is None else {use.name: use.gave for use in sizes.uses}
    lines = []
    for text in texts:
        name = defined(text)
        call = None if name is None else origins.get(name)
        shown = f"{text}  # {gave[name]}" if name is not None and gave.get(name) else text
        lines.append(data.Line(shown, () if call is None else _link(call, headers)))
    return lines
