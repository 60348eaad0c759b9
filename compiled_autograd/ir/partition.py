"""The tape graph cut into steps: regions that compile, and between them the calls that run as they are.

What the leaves receive is accumulated after the region that made it, before anything of the user's runs.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from torch import fx

from .. import ir
from ..torch_api.version_differences import NOT_TRACED
from ..user_code.inlined import Inlined


@dataclass(slots=True, eq=False)
class Region:
    """Calls that are lowered and compiled together.

    Attributes:
        nodes: in the order in which they run.
        inputs: values from outside: placeholders, and what earlier steps made.
        outputs: values that later steps, the leaves or the caller need.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Opaque:
    """One call that runs as it is, and the items taken from what it gives."""

    node: fx.Node
    items: list[fx.Node]


@dataclass(slots=True, eq=False)
class Accumulate:
    """Gradients of leaves, in the engine's order: calls of :func:`ir.accumulate_grad`."""

    nodes: list[fx.Node]


Step = Region | Opaque | Accumulate

MAX_CALLS_OF_SLOW_REGION = 6_000
"""Maximum number of calls in a region for a slow compiler. Inductor takes about 15 seconds for that many."""
MAX_CALLS_OF_REPEATED_REGION = 1_000
"""Maximum for tapes that repeat, such as loops, with at least eight such regions. Equal regions are compiled once."""


BRANCHES_ON_FAKE_TENSORS = frozenset({"ProdBackward0", "ProdBackward1", "MaskedFillBackward1"})
"""Functions of the engine that compute another way, equal but for rounding, where they see a tensor subclass
(``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp``), and a fake tensor is one."""


def is_opaque(node: fx.Node, bitwise: bool, untraceable: Container[fx.Node] = ()) -> bool:
    """Return whether a call runs as it is, uncompiled.

    Args:
        bitwise: traced code must compute the engine's results bit for bit.
        untraceable: calls that failed to trace.
    """
    if node.target in ir.USERS_CODE or node in untraceable:
        return True
    if node.target is ir.check_nan:
        return is_opaque(node.args[0], bitwise, untraceable)  # type: ignore[arg-type]
    if isinstance(node.target, Inlined):
        return bitwise  # what was compiled together is not taken apart, and users' code is called
    if not isinstance(node.target, ir.OpaqueOp):
        return False
    if not node.target.traceable or node.target.__name__ in NOT_TRACED:
        return True
    return bitwise and node.target.__name__ in BRANCHES_ON_FAKE_TENSORS


def partition(
    graph: fx.Graph, bitwise: bool = False, untraceable: Container[fx.Node] = (), max_calls: int | None = None
) -> list[Step]:
    """All steps of a tape graph, in the order in which they run."""
    return cut([node for node in graph.nodes if node.op == "call_function"], bitwise, untraceable, max_calls)


def cut(
    nodes: Sequence[fx.Node],
    bitwise: bool = False,
    untraceable: Container[fx.Node] = (),
    max_calls: int | None = None,
) -> list[Step]:
    """Steps for a run of calls. Values used by calls that are not among ``nodes`` become outputs.

    Args:
        max_calls: the largest number of calls of a region, not counting checks for NaNs and the other items that its
            last call gives.
    """
    steps: list[Step] = []
    region: list[fx.Node] = []
    leaves: list[fx.Node] = []
    cuts = frozenset[fx.Node]() if max_calls is None else _cuts(nodes, max_calls)

    def flush() -> None:
        if region:
            steps.append(_region(list(region)))
            region.clear()
        if leaves:
            steps.append(Accumulate(list(leaves)))
            leaves.clear()

    for node in nodes:
        if node in cuts:
            flush()
        if node.target is ir.accumulate_grad:
            leaves.append(node)
        elif node.target is operator.getitem and is_opaque(node.args[0], bitwise, untraceable):  # type: ignore[arg-type]
            continue  # taken by the opaque step itself
        elif is_opaque(node, bitwise, untraceable):
            flush()
            items = [user for user in node.users if user.target is operator.getitem]
            steps.append(Opaque(node, items))
        else:
            region.append(node)
    flush()
    return steps


def _cuts(nodes: Sequence[fx.Node], max_calls: int) -> frozenset[fx.Node]:
    """The calls before which a region ends. A list of gradients stays in the region that takes them from it."""
    nodes = [node for node in nodes if node.target is not ir.check_nan]
    stretch = _stretch(nodes, max_calls)
    if len(nodes) <= stretch:
        return frozenset()
    positions = {node: position for position, node in enumerate(nodes)}
    cuts, due, taken = [], False, -1
    for position, node in enumerate(nodes):
        due = due or position % stretch == 0
        if due and position > taken:
            cuts.append(node)
            due = False
        if ir.value_kind(node) == "list":
            taken = max([taken, *(positions.get(user, -1) for user in node.users)])
    return frozenset(cuts)


def _stretch(nodes: Sequence[fx.Node], max_calls: int) -> int:
    """Return the length of a region: whole repetitions if the middle of the tape repeats, else ``max_calls``."""
    repeated = min(max_calls, MAX_CALLS_OF_REPEATED_REGION)
    if len(nodes) < 8 * repeated:
        repeated = max_calls
    if len(nodes) <= repeated:
        return max_calls
    quarter = len(nodes) // 4
    middle = [node.target for node in nodes[quarter : len(nodes) - quarter]]
    border = [0] * len(middle)  # of each beginning, how long a piece it begins and ends with (Knuth, Morris, Pratt)
    length = 0
    for position in range(1, len(middle)):
        while length and middle[position] != middle[length]:
            length = border[length - 1]
        length += middle[position] == middle[length]
        border[position] = length
    period = len(middle) - border[-1]
    largest = repeated if period <= repeated else max_calls
    return largest // period * period or max_calls


def _region(nodes: list[fx.Node]) -> Region:
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    outputs: list[fx.Node] = []
    for node in nodes:
        kind, outside = ir.value_kind(node), [user for user in node.users if user not in inside]
        if kind == "tensor" and outside:
            outputs.append(node)
        elif kind == "list" and any(user.target is not operator.getitem for user in outside):
            raise ir.IllegalGraphError(f"{node.name}: a list of gradients leaves its region whole")
    return Region(nodes, list(inputs), outputs)
