"""Log a line for each node of a tape as it runs, with its incoming gradients (``f32[10,3]``), like
``TORCH_LOGS="+autograd"`` for an eager backward. A region is a block of lines.

Uncompiled calls are logged with their real gradients. Between the nodes of a region there are no gradients: their
shapes and dtypes are those that the engine reported, and a node with only undefined gradients (None) returns None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir.legality import ARITHMETIC
from ..shadow_cache.safe_text import harmless
from ..torch_api.dtype_names import short_name
from ..user_code.functions import call_backward
from .call_misses import SCALAR_TYPES
from .node_names import call_name, title
from .reporting import tell_of_nodes

_FIRST_GRADIENT = 4
"""Index of the first gradient in the call of a Python function, after object, saved tensors and two lists of flags."""
_DTYPE_IN_OPTIONS = 3
_UNKNOWN = "?"
Lookup = Callable[[fx.Node], Any]


class NodeLog:
    """The log of one backward.

    Attributes:
        regions: the number of regions that have run so far.
        value: returns the current value of a placeholder or of a result of a step; ``KeyError`` if there is none.
    """

    def __init__(self) -> None:
        self.regions = 0
        self._tape: ir.TapeGraph | None = None
        self.value: Lookup = _nowhere
        self._sizes: dict[fx.Node, Any] = {}
        self._does: dict[int, fx.Node] = {}

    def begin(self, tape: ir.TapeGraph, value: Lookup) -> None:
        """Log the begin of a tape graph's run."""
        self._tape, self.value = tape, value
        placeholders = tape.graph.find_nodes(op="placeholder")
        self._sizes = {node: self._slot(node) for node in placeholders if node.meta["lifted"].kind == "size"}
        self._does = {node.meta["call"]: node for node in reversed(tape.graph.nodes) if _is_function(node)}
        tell_of_nodes(f"backward of {harmless(title(tape))}")

    def region(self, nodes: Sequence[fx.Node], how: str) -> None:
        """Log calls that are about to run as a region; ``how`` says how in words."""
        self.regions += 1
        lines = [f"  {line}" for line in _Block(self, nodes).lines()]
        head = f"region {self.regions}, {how}: {len(lines)} node{'' if len(lines) == 1 else 's'}, {len(nodes)} calls"
        tell_of_nodes("\n".join([head, *lines]))

    def call(self, node: fx.Node) -> None:
        """Log an uncompiled call: the function of a node of the tape, or a hook. Calls that the engine adds are not
        logged."""
        index = node.meta["call"]
        if self._does.get(index) is node:
            self._tell_node(node, [self.text(each) for each in entering(node)])
        elif ir.hook_kind(node.target) in ir.USERS_CODE:
            tell_of_nodes(f"Executing: {ir.target_name(node)} of {self.name(index)}")

    def leaves(self, calls: Sequence[int]) -> None:
        """Log the leaves that are about to be written."""
        for index in calls:
            node = self._does[index]
            kept = self._slot(node)  # a gradient in memory that the leaf can keep; else the leaf copies its gradient
            self._tell_node(node, [self.text(node.args[2]) if kept is None else of_tensor(kept)])

    def _tell_node(self, node: fx.Node, gradients: Sequence[str]) -> None:
        tell_of_nodes(f"Executing: {self.line(node, gradients)}")

    def line(self, node: fx.Node, gradients: Sequence[str]) -> str:
        """Return the line of a node of the tape, given its function and incoming gradients."""
        return f"{self.name(node.meta['call'])} with grad_outputs: [{', '.join(gradients)}]"

    def name(self, index: int) -> str:
        assert self._tape is not None
        return harmless(call_name(self._tape, index))

    def text(self, value: Any) -> str:
        """Format a gradient. Zeros that the engine makes for an undefined gradient count as None."""
        if isinstance(value, fx.Node) and value.target is ir.zeros:
            return "None"
        return of_tensor(self._slot(value) if isinstance(value, fx.Node) else value)

    def _slot(self, node: fx.Node) -> Any:
        try:
            return self.value(node)
        except KeyError:
            return None

    def does(self, node: fx.Node) -> bool:
        """Return whether a call runs the function of its node of the tape."""
        return self._does.get(node.meta["call"]) is node

    def size(self, value: Any) -> Any:
        """Return a size of the tape graph as a number; ``"?"`` if unknown."""
        if not isinstance(value, fx.Node):
            return value
        if value in self._sizes:
            return self._sizes[value]
        return value.target(*map(self.size, value.args)) if value.target in ARITHMETIC else _UNKNOWN


class _Block:
    """The incoming gradients of each node of a region.

    ``known`` has a text for each value of the region, and a list of texts for a node with several results.
    """

    def __init__(self, log: NodeLog, nodes: Sequence[fx.Node]) -> None:
        self.log, self.nodes = log, nodes
        self.known: dict[fx.Node, Any] = dict.fromkeys(nodes, _UNKNOWN)

    def lines(self) -> Iterator[str]:
        for node in self.nodes:
            if self.log.does(node):
                gradients = [self._text(each) for each in entering(node)]
                yield self.log.line(node, gradients)
                undefined = isinstance(node.target, ir.OpaqueOp) and {*gradients} == {"None"}
                self.known[node] = "None" if undefined else _UNKNOWN
            else:
                self.known[node] = self._given(node)

    def _given(self, node: fx.Node) -> Any:
        arguments: Any = node.args
        if node.target is operator.getitem:
            made = self.known.get(arguments[0], _UNKNOWN)
            return made[arguments[1]] if isinstance(made, list) else made
        if ir.is_validation(node):
            return [self._handed_on(*each) for each in zip(arguments[0], arguments[1], strict=False)]
        if node.target is ir.sum_gradients:
            texts = [self._text(each) for each in arguments]
            return next((text for text in texts if text != "None"), "None")
        if node.target is ir.zeros:
            return "None"
        return _UNKNOWN

    def _handed_on(self, value: Any, metadata: Any) -> str:
        """Return the text of a gradient after its validation with the metadata that the engine reported."""
        if metadata is None or self._text(value) == "None":
            return "None"
        options, sizes, *_, wanted = metadata
        number = options[_DTYPE_IN_OPTIONS] if wanted is None else wanted
        if not isinstance(number, int) or number >= len(SCALAR_TYPES):
            return self._shaped(_UNKNOWN, sizes)
        return self._shaped(short_name(getattr(torch, SCALAR_TYPES[number])), sizes)

    def _text(self, value: Any) -> str:
        if not isinstance(value, fx.Node) or value not in self.known:
            return self.log.text(value)
        text = self.known[value]
        return text if isinstance(text, str) else _UNKNOWN

    def _shaped(self, dtype: str, sizes: Any) -> str:
        if not isinstance(sizes, (list, tuple)):
            return f"{dtype}[{_UNKNOWN}]"
        return f"{dtype}[{','.join(str(self.log.size(each)) for each in sizes)}]"


def _nowhere(node: fx.Node) -> Any:
    raise KeyError(node)


def _is_function(node: fx.Node) -> bool:
    """Return whether a call runs the function of a node of the tape."""
    if isinstance(node.target, (ir.OpaqueOp, ir.InlinedBackward)):
        return not ir.is_validation(node)
    return node.target in (call_backward, ir.copy_slices_prologue, ir.accumulate_grad)


def entering(node: fx.Node) -> Sequence[Any]:
    """Return the gradients that the function of a node takes."""
    arguments: Any = node.args
    if node.target is ir.accumulate_grad:
        return [arguments[2]]
    if node.target is call_backward or isinstance(node.target, ir.InlinedBackward):
        return arguments[_FIRST_GRADIENT:]
    return arguments[0]


def of_tensor(value: Any) -> str:
    """Format a gradient: ``f32[10,3]``, or ``None`` for an undefined one."""
    if value is None:
        return "None"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape = _UNKNOWN if value.is_nested else ",".join(map(str, value.shape))
    return f"{short_name(value.dtype)}[{shape}]"
