"""The stages that a structure goes through, as text for people; and what a reproduction has to know of a variant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..backends.protocol import source_of
from ..diagnostics.node_names import call_name, layer_of, leaf_name, node_name, title
from ..lowering.stored_regions import InMemoryGraph
from ..reproduction.recording import Kinds
from ..reproduction.records import About, TensorRecord
from ..shadow_cache import VariantKey
from ..steps.steps import AccumulateStep, CompiledRegion, Executor, OpaqueStep, RegionStep
from .variants import Variant

STAGES = ("tape", "aten", "regions", "code")
_TITLE = re.compile(r"#(\d+) ")
_MAX_NAMES = 6
"""Maximum number of modules, or of other names, that the text of one step shows."""


def readable(tape: ir.TapeGraph, variant: Variant | None, stage: str) -> str:
    """The text of a stage, see :meth:`CompiledGraph.readable`."""
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r} is not possible; stage is one of {', '.join(map(repr, STAGES))}")
    if stage == "tape":
        return "\n".join(_commented_tape(tape)) + "\n"
    if variant is None:
        return "# nothing is compiled of it\n"
    if stage == "regions":
        return "\n".join(_steps(tape, variant)) + "\n"
    regions = variant.regions
    blocks = []
    for number, step in enumerate(regions):
        heading = f"# region {number} of {len(regions)}: {_of(tape, step)}"
        compiled = step.compiled_regions()
        if not compiled:
            blocks.append(f"{heading}\n# it is not compiled: its calls run one by one\n")
        for each in compiled:
            text = _aten(tape, each) if stage == "aten" else _code(tape, step, each)
            blocks.append(f"{heading}\n{text.strip()}\n")
    return "\n\n".join(blocks)


def _commented_tape(tape: ir.TapeGraph) -> Iterator[str]:
    for line in tape.readable().splitlines():
        yield line
        index = int(match[1]) if (match := _TITLE.match(line)) else 0
        if index and tape.calls[index].parameter is None and (where := layer_of(tape, index)) is not None:
            yield f"  # {where}"


def _of(tape: ir.TapeGraph, step: RegionStep) -> str:
    """Return the calls of a region and their layers, in words."""
    calls = calls_of(step)
    names = list(dict.fromkeys(filter(None, (layer_of(tape, call) for call in calls))))
    named = f", {some_of(names)}" if names else ""
    count = len(step.region.nodes)
    return f"{count} call{'' if count == 1 else 's'}, of nodes #{min(calls)} to #{max(calls)}{named}"


def calls_of(step: Executor) -> list[int]:
    """The nodes of the tape that a step runs, each once."""
    if isinstance(step, AccumulateStep):
        return list(step.calls)
    nodes = step.region.nodes if isinstance(step, RegionStep) else [step.node]
    return list(dict.fromkeys(node.meta["call"] for node in nodes))


def some_of(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _aten(tape: ir.TapeGraph, compiled: CompiledRegion) -> str:
    """The graph as code, with a comment where operators of another node of the tape begin."""
    if not isinstance(compiled.aten, InMemoryGraph):
        return f"# from the cache on disk, without the node that each operator comes from\n{compiled.aten.text()}"
    calls = {node.name: node.meta.get("call") for node in compiled.aten.module.graph.nodes}
    lines, last = [], None
    for line in compiled.aten.text().strip("\n").splitlines():
        call = calls.get(line.partition(" = ")[0].strip())
        if call is not None and call != last:
            lines.append(f"    # {call_name(tape, call)}")
            last = call
        lines.append(line)
    return "\n".join(lines)


def _code(tape: ir.TapeGraph, step: RegionStep, compiled: CompiledRegion) -> str:
    """Return the backend's generated code, below a list of the calls that it computes."""
    heading = "".join(f"# {call_name(tape, call)}\n" for call in calls_of(step))
    source = source_of(compiled.call)
    return heading + (source or "# its backend does not say what it has generated").strip("\n")


def _steps(tape: ir.TapeGraph, variant: Variant) -> Iterator[str]:
    yield f"# {title(tape)}"
    regions = iter(range(len(variant.regions)))
    for step in variant.program.schedule.steps:
        yield from _step(tape, step, regions)


def _step(tape: ir.TapeGraph, step: Executor, regions: Iterator[int]) -> Iterator[str]:
    if isinstance(step, AccumulateStep):
        yield f"accumulate into {', '.join(leaf_name(tape, call) for call in step.calls)}"
    elif isinstance(step, OpaqueStep):
        yield f"call {ir.target_name(step.node)} as it is  # {call_name(tape, step.node.meta['call'])}"
    else:
        yield f"region {next(regions)}  # {_of(tape, step)}"
        for call in calls_of(step):
            yield f"  {call_name(tape, call)}"
        for node in step.region.inputs:
            if node.op != "placeholder":
                yield f"  takes {node_name(tape, node)}"
        for node, _ in step.outputs:
            if any(user.target is not ir.accumulate_grad for user in node.users):
                yield f"  hands on {node_name(tape, node)}"
        for each in step.compiled_regions():
            yield f"  compiled: {len(each.arguments)} arguments, {len(each.aten.text().splitlines())} lines of ATen"


# ---- for a reproduction ----------------------------------------------------------------------------------------------


def about(tape: ir.TapeGraph, key: VariantKey) -> About:
    """Return the origin of a reproduction."""
    settings = dict(key.settings)
    backend = settings["backend"]
    name, _, mode = (backend if isinstance(backend, str) else backend.__name__).partition(":")
    state = {name: str(value) for name, value in key.ambient}
    return About(backend=name, mode=mode or "default", dynamic=settings["dynamic"], where=title(tape), state=state)


def handed_on(variant: Variant | None) -> Kinds:
    """Return a function that says the kind of users' values between the regions of a variant, from the newest compiled
    code. Without a variant all kinds are unknown."""
    found: dict[fx.Node, TensorRecord | None] = {}
    if variant is None:
        return lambda _: ""
    for step in variant.regions:
        kinds: Any = next(reversed(step.compiled), None)
        made = dict(step.made())
        for (node, _), kind in zip(step.asked(), kinds or (), strict=False):
            if node in made and (kind is None or isinstance(kind, tuple)):
                found[node] = None if kind is None else _of_kind(kind, variant.program.region_compiler.specs.get(node))
    return lambda node: found.get(node, "")


def _of_kind(kind: Any, spec: Any) -> TensorRecord:
    """A record of what :func:`guards.value_kinds.kind_of_value` says; of sizes that change, those that were first."""
    _, shape, stride, dtype, device, _, conj, neg, _ = kind
    first = [part if isinstance(part, int) else part[0] for part in spec or ()]
    sizes = [first[dim] if size is None else size for dim, size in enumerate(shape)]
    strides = torch.empty(sizes, device="meta").stride() if stride is None else stride
    return TensorRecord(str(dtype), str(device), sizes, list(strides), 0, conj=conj, neg=neg)
