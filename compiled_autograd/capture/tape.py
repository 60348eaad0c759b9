"""Reads the tape from Python, without running it: names, sequence numbers, parameters, source lines.

This module gives names and an order of execution. Only the capture decides which order is legal, and which operations
run. The walk is the engine's own: a worklist, last in first out, over ``next_functions`` with dependency counts
(``_compiled_autograd_impl`` in ``torch/csrc/dynamo/python_compiled_autograd.cpp``, 2.13). So its nodes come in the
order of the seam's report, and can be joined to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from .. import ir
from ..process_state import PROCESS
from ..torch_api import attributes
from .forward_lines import line_of
from .unnamed import name_leaves

LEAF = "AccumulateGrad"
MAX_NODES_READ = 10_000
"""Maximum number of nodes of a tape that Python reads. A node that Python has seen is freed by recursion (2.13). In a
chain of some 50,000 that overflows a stack of 8 MiB, and ends the process."""
LEAF_NUMBER = 2**64 - 1
"""The sequence number of all leaves, which makes them go first."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
Ends = Sequence[torch.Tensor | GradientEdge]
"""The tensors that ``backward`` is called on, or the inputs of ``autograd.grad``."""


@dataclass(frozen=True, slots=True)
class Visited:
    """One node of the tape."""

    node: Any
    name: str
    sequence: int


def root_nodes(outputs: Ends) -> list[Any]:
    """The nodes that the gradients of ``outputs`` enter; an output without a tape, about which the engine complains,
    has none."""
    with torch._C.DisableTorchFunctionSubclass():
        nodes = [output.node if isinstance(output, GradientEdge) else _node(output) for output in outputs]
    return [node for node in nodes if node is not None]


def _node(tensor: torch.Tensor) -> Any:
    node = attributes.grad_fn(tensor)
    if node is None and attributes.requires_grad(tensor):
        return attributes.leaf_node(tensor)
    return node


def walk(outputs: Ends, inputs: Ends = ()) -> list[Visited]:
    """Nodes in the order of the engine's walk, without its root; of those, where there are ``inputs``, the nodes on a
    way to one of them."""
    roots = root_nodes(outputs)
    waits = Counter(roots)
    waits.update(following for _, following in _edges(roots))
    wanted = _leading_to(inputs, roots) if inputs else None
    found: list[Visited] = []
    worklist: list[Any] = []
    entered = roots
    while True:
        for node in entered:
            if node is not None and (wanted is None or node in wanted):
                waits[node] -= 1
                if waits[node] == 0:
                    worklist.append(node)
        if not worklist:
            return found
        node = worklist.pop()
        # Asked of the type: a function's context may have attributes of these names.
        name, sequence = type(node).name(node), type(node)._sequence_nr(node)
        found.append(Visited(node, name.rpartition("::")[2], sequence))
        entered = [following for following, _ in node.next_functions]


FIRST_NODES = 8
"""Number of nodes from which :func:`peek` goes no deeper. Each takes a microsecond."""


def peek(outputs: Ends, inputs: Ends) -> Hashable:
    """Hash the classes of a tape's first nodes, level by level, with their numbers of edges, and the number of inputs.

    Tapes of one structure have one hash, but other tapes may have it too. The extension's ``peek`` is faster, and its
    hashes are others.
    """
    nodes, found = root_nodes(outputs), [len(inputs)]
    for node in nodes:  # it grows meanwhile
        edges = node.next_functions
        found.append(hash((type(node), len(edges))))
        if len(nodes) < FIRST_NODES:
            for following, _ in edges:
                if following is not None and following not in nodes:
                    nodes.append(following)
    return hash(tuple(found))


def fingerprint(outputs: Ends, inputs: Ends = ()) -> int:
    """Hash the names of a tape's nodes: tapes of one structure have one fingerprint, but other tapes may have it too.

    The engine is called afterwards, at each step. This takes some 0.4 microseconds a node.
    """
    names = [type(node).name(node) for node in first_nodes(outputs)]
    return hash((len(inputs), *names))


def made_when(outputs: Ends) -> tuple[int, ...]:
    """When the nodes of a tape were made, counted from the first: tapes of one structure for which this is the same run
    in the same order. Some 0.5 microseconds a node."""
    numbers = [type(node)._sequence_nr(node) for node in first_nodes(outputs)]
    return tuple([number - numbers[0] if number < LEAF_NUMBER else 0 for number in numbers])


def first_nodes(outputs: Ends) -> list[Any]:
    """Nodes of the tape, one more than :data:`MAX_NODES_READ` at most, in no order of any meaning."""
    worklist = root_nodes(outputs)
    seen = set(worklist)
    found: list[Any] = []
    while worklist and len(found) <= MAX_NODES_READ:
        node = worklist.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                worklist.append(following)
    return found


def _edges(roots: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each edge of the tape below some nodes: the node that it leaves, and the one that it enters."""
    seen = set(roots)
    worklist = list(seen)
    while worklist:
        node = worklist.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            yield node, following
            if following not in seen:
                seen.add(following)
                worklist.append(following)


def freed_at_the_end(inputs: Ends) -> bool:
    """Return whether a walk for the gradients of ``inputs`` ends at a node inside the tape that would lose something if
    it were released, with no requested gradient below. True for more than :data:`MAX_NODES_READ` nodes below."""
    with torch._C.DisableTorchFunctionSubclass():
        inside = [*map(attributes.entered, inputs)]
    asked = {node for node in inside if node is not None and not type(node).name(node).endswith(LEAF)}
    if not any(map(_loses, asked)):
        return False
    ends = _ends_among(asked, inputs)
    return ends is None or any(map(_loses, ends))


def does_not_run(node: Any, inputs: Ends) -> bool:
    """Return True if a walk for the gradients of ``inputs`` ends at a node inside the tape. With more than
    :data:`MAX_NODES_READ` nodes below, the answer is False."""
    return bool(inputs) and _belongs_to(inputs)(node) and bool(_ends_among({node}, inputs))


def _ends_among(asked: set[Any], inputs: Ends) -> set[Any] | None:
    """Return the nodes, among those whose gradients are asked for, that have no other such node below; None where more
    than :data:`MAX_NODES_READ` nodes are below."""
    below = first_nodes([GradientEdge(node, 0) for node in asked])
    return None if len(below) > MAX_NODES_READ else asked - _above(filter(_belongs_to(inputs), below), asked)


def all_freed_at_the_end(inputs: Ends) -> bool:
    """Return whether each of ``inputs`` is inside the tape, at a node that would lose something. A walk ends at one of
    them then, whatever the tape is. It takes some microseconds, most of them where the answer is yes."""
    for each in inputs:
        if type(each) is torch.Tensor:
            node = attributes.grad_fn(each)
        else:
            with torch._C.DisableTorchFunctionSubclass():
                node = attributes.entered(each)
        if not _loses(node):
            return False
    return True


def _above(targets: Iterable[Any], roots: Iterable[Any]) -> set[Any]:
    """Return the nodes, among ``roots`` and the nodes below, from which one or more edges lead to ``targets``."""
    came_from: dict[Any, list[Any]] = {}
    for node, following in _edges(roots):
        came_from.setdefault(following, []).append(node)
    worklist, above = list(targets), set()
    while worklist:
        for before in came_from.get(worklist.pop(), ()):
            if before not in above:
                above.add(before)
                worklist.append(before)
    return above


def _loses(node: Any) -> bool:
    """Return whether a node inside the tape that is released loses something: tensors, or what is not known of here."""
    if node is None:
        return False
    names = _saved_names.get(type(node)) or saved_names(type(node))
    for _, is_tensor in names:  # a generator takes longer
        if is_tensor:
            return True
    return not names and not type(node).name(node).endswith(LEAF)


def _leading_to(inputs: Ends, roots: Sequence[Any]) -> set[Any]:
    """The nodes from which one of ``inputs`` can be reached, those of ``inputs`` included."""
    is_target = _belongs_to(inputs)
    nodes = {*roots, *(following for _, following in _edges(roots))}
    targets = set(filter(is_target, nodes))
    return targets | _above(targets, roots)


def _belongs_to(inputs: Ends) -> Callable[[Any], bool]:
    """Return a function that says whether a node is that of one of ``inputs``."""
    with torch._C.DisableTorchFunctionSubclass():  # for leaves the tensors: to ask for a leaf's node runs an operator
        targets = {id(attributes.entered(each) or each) for each in inputs}
    return lambda node: id(node) in targets or (type(node).name(node).endswith(LEAF) and id(node.variable) in targets)


def description(outputs: Ends, inputs: Ends, accumulates: bool) -> int:
    """A number for what can be read of a tape from Python: nodes, their constants, and which leaves have a ``.grad``.

    Tapes with one structure and one set of sizes have one number. Hooks, dtypes and undefined gradients are not in it.
    """
    if len(first_nodes(outputs)) > MAX_NODES_READ:
        return fingerprint(outputs, inputs)
    parts: list[Any] = [accumulates]
    for visited in walk(outputs, inputs):
        parts.append(visited.name)
        if visited.name == LEAF:
            parts.append(attributes.grad(visited.node.variable) is None)
        else:
            parts.extend(saved_by(visited.node))
    return hash(tuple(parts))


def join_order(calls: Sequence[ir.TapeCall], visited: Sequence[Visited], outputs: Ends) -> bool:
    """Join sequence numbers and edges to what the engine reported; False, and nothing joined, where the two differ."""
    if len(calls) != len(visited) + 1 or any(a.name != b.name for a, b in zip(calls[1:], visited, strict=True)):
        return False
    index_of = {each.node: call.index for call, each in zip(calls[1:], visited, strict=True)}
    calls[0].edges = [index_of[node] for node in root_nodes(outputs) if node in index_of]
    for call, each in zip(calls[1:], visited, strict=True):
        call.sequence = each.sequence
        call.edges = [index_of[node] for node, _ in each.node.next_functions if node in index_of]
    return True


def join_names(calls: Sequence[ir.TapeCall], visited: Sequence[Visited]) -> None:
    """Join source lines, and parameters' names when they are asked for, after :func:`join_order` has found that the two
    agree."""
    leaves = [(call, each.node.variable) for call, each in zip(calls[1:], visited, strict=True) if each.name == LEAF]
    name_leaves([call for call, _ in leaves], [leaf for _, leaf in leaves])
    for call, each in zip(calls[1:], visited, strict=True):
        call.source = source_line(each.node)
        call.saved = saved_by(each.node)


_saved_names: dict[type, tuple[tuple[str, bool], ...]] = PROCESS.register({})


def saved_by(node: Any) -> tuple[ir.SavedValue, ...]:
    """Return the values that a built-in node saved, with the node's names for them, in the node's order.

    Tensors are not read, since reading would run the hooks that pack them.
    """
    return tuple(
        ir.SavedValue(
            name.removeprefix("_saved_"),
            is_tensor,
            None if is_tensor else ir.argument_of(_signed(getattr(node, name)), {}),
        )
        for name, is_tensor in saved_names(type(node))
    )


def saved_names(cls: type) -> tuple[tuple[str, bool], ...]:
    """The attributes of a class of built-in nodes for what its nodes saved, and whether each is of tensors."""
    found = _saved_names.get(cls)
    if found is None:
        names = [name for name in vars(cls) if name.startswith("_saved_")]
        found = tuple((name, f"_raw{name}" in vars(cls)) for name in names)
        if not issubclass(cls, BackwardCFunction):  # those of the user's functions come and go
            _saved_names[cls] = found
    return found


def _signed(value: Any) -> Any:
    """Negative numbers in lists come as unsigned ones of 64 bits."""
    if isinstance(value, tuple):
        return [_signed(each) for each in value]
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


def source_line(node: Any) -> str | None:
    """``file:line in function`` of the forward that made a node, where anomaly mode or ``trace_sources`` noted it."""
    frames = _FRAME.findall("".join(node.metadata.get("traceback_") or ()))
    own = [frame for frame in frames if "/torch/" not in frame[0]]
    if not own:
        return line_of(type(node)._sequence_nr(node))
    file, line, function = own[-1]
    return f"{file}:{line} in {function}"
