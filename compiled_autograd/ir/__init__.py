"""The tape graph: its vocabulary, the rules that every such graph keeps, and its views (text, networkx).

A tape graph is an ``fx.Graph`` whose calls are *opaque*: ``ops.MulBackward0(grads, *saved)`` is the engine's own
function for that node, with everything it saved given as an argument. Nothing of one step is baked in: tensors, sizes,
scalars and Python objects are placeholders, handed in at each run. What remains as a constant is the structure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from ..errors import IllegalGraphError
from ..user_code.aot import AOTBackward
from ..user_code.functions import Packed, call_backward
from ..user_code.hooks import cpp_hook, post_accumulate_hook, post_hook, pre_hook, tensor_hook, unpack_hook
from ..user_code.pieces import FITTED

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types whose operators are the tensor's own; any other subclass may do anything."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a strided one of a class whose operators are its own: what can be traced."""
    return type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided


PLACEHOLDERS = ("input", "size", "scalar", "object", "packed")
"""Kinds of placeholders: tensors, sizes (int), scalars (int or float), Python objects (a function's ``ctx``, a hook),
and what saved-tensor hooks packed."""


class OpaqueOp:
    """One function of the engine, bound at the first capture that met it.

    ``function(grads, *saved)`` takes gradients (``None`` where undefined) and saved values, and gives a list of
    gradients, one for each edge to a next node. It reads nothing else, so it can be run later, or under fake tensors.
    """

    __slots__ = ("__name__", "custom", "fitted", "function", "traceable")

    def __init__(self, name: str, function: Callable[..., Any], traceable: bool = True, custom: bool = False) -> None:
        self.__name__ = name
        self.function = function
        self.traceable = traceable
        self.custom = custom  # of a user's C++, which another process may have in another version
        self.fitted = FITTED.get(name)

    __module__ = "compiled_autograd.ops"

    def __call__(self, *args: Any) -> Any:
        return self.function(*(args if self.fitted is None else self.fitted(*args)))

    def __repr__(self) -> str:
        return f"ops.{self.__name__}"


def sum_gradients(*gradients: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of what several edges bring to one input, in the engine's order; undefined ones (None) do not count."""
    total = None
    for gradient in gradients:
        if gradient is None:
            continue
        if total is None:
            total = gradient
        elif total.layout is not torch.strided and gradient.layout is torch.strided:
            total = gradient + total  # a sparse buffer becomes dense; the engine adds in this order
        else:
            total = total + gradient
    return total


def accumulate_grad(leaf: torch.Tensor, old: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor:
    """Vocabulary only: :mod:`compiled_autograd.steps.accumulate` does it for all leaves of a region at once.

    Gives the gradient, which is what the leaf keeps if it can.
    """
    raise NotImplementedError


def copy_slices_prologue(
    grads: Sequence[torch.Tensor | None],
    base_sizes: Sequence[int],
    base_strides: Sequence[int],
    base_offset: int,
    view_sizes: Sequence[int],
    view_strides: Sequence[int],
    view_offset: int,
) -> list[torch.Tensor | None]:
    """The first half of a write into a view: a copy of the base's gradient, the slice in it, and that slice's copy.

    Only the copies are used: a write into the slice would have to be seen in the first.

    The rule is ``CopySlices::apply`` (``torch/csrc/autograd/functions/tensor.cpp``, 2.13).
    """
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    result = grad.new_empty_strided(base_sizes, base_strides)
    result.copy_(grad)
    grad_slice = result.as_strided(view_sizes, view_strides, view_offset - base_offset)
    return [result, grad_slice, grad_slice.clone(memory_format=torch.contiguous_format)]


def copy_slices_epilogue(
    needs_input_grad: Sequence[bool],
    result: torch.Tensor | None,
    inner: Sequence[torch.Tensor | None],
    view_sizes: Sequence[int],
    view_strides: Sequence[int],
    view_offset: int,
    base_offset: int,
) -> list[torch.Tensor | None]:
    """The second half: what was written over gets the written function's gradient, the rest keeps the base's.

    An undefined gradient of the written function leaves the base's undefined too, as the engine does. The slice is
    written out of place, since the written function may lie in another region than the prologue.
    """
    gradients: list[torch.Tensor | None] = [None] * len(needs_input_grad)
    for index, needed in enumerate(needs_input_grad):
        value = inner[index] if needed and index < len(inner) else None
        if value is None:
            continue
        if index > 0:
            gradients[index] = value
        elif result is not None:
            value = value.to(result.dtype).expand(view_sizes)
            offset = result.storage_offset() + view_offset - base_offset  # it need not be the first in its memory
            gradients[0] = result.as_strided_scatter(value, view_sizes, view_strides, offset)
    return gradients


def zeros(size: Sequence[int], options: dict[str, Any]) -> torch.Tensor:
    """The zeros that the engine gives a Python function in place of an undefined gradient."""
    return torch.zeros(size, **options)


USERS_CODE = frozenset(
    {call_backward, Packed, tensor_hook, cpp_hook, pre_hook, post_hook, post_accumulate_hook, unpack_hook}
)
"""Calls that run what a user wrote: never traced, never moved, never run twice."""

_ARITHMETIC = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod})


@dataclass(frozen=True, slots=True)
class Rule:
    """What one kind of call may take and give. Kinds of values: see :func:`value_kind`."""

    takes: tuple[frozenset[str], ...]
    gives: str
    variadic: bool = False

    def takes_at(self, position: int) -> frozenset[str] | None:
        if position < len(self.takes):
            return self.takes[position]
        return self.takes[-1] if self.variadic else None


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


_TENSOR = _kinds("tensor", "none")
_TENSORS = _kinds("list")
_SIZE = _kinds("size", "constant")
_ANYTHING = _kinds("tensor", "none", "size", "scalar", "constant", "list")

_FUNCTION = Rule((_kinds("object"), _TENSORS, _TENSORS, _TENSORS, _TENSOR), gives="list", variadic=True)

RULES: dict[Any, Rule] = {
    OpaqueOp: Rule((_TENSORS, _ANYTHING), gives="list", variadic=True),
    sum_gradients: Rule((_TENSOR,), gives="tensor", variadic=True),
    accumulate_grad: Rule((_kinds("tensor"), _TENSOR, _TENSOR), gives="tensor"),
    AOTBackward: _FUNCTION,
    call_backward: _FUNCTION,
    tensor_hook: Rule((_kinds("object"), _TENSOR), gives="tensor"),
    cpp_hook: Rule((_kinds("constant"), _TENSOR), gives="tensor"),
    pre_hook: Rule((_kinds("object"), _TENSORS), gives="list"),
    post_hook: Rule((_kinds("object"), _TENSORS, _TENSORS), gives="list"),
    post_accumulate_hook: Rule((_kinds("object"), _kinds("tensor")), gives="nothing"),
    Packed: Rule((_kinds("object"), _kinds("packed")), gives="packed"),
    unpack_hook: Rule((_kinds("object"), _kinds("packed")), gives="tensor"),
    copy_slices_prologue: Rule(
        (_TENSORS, _TENSORS, _TENSORS, _SIZE, _TENSORS, _TENSORS, _SIZE),
        gives="list",
    ),
    copy_slices_epilogue: Rule(
        (_TENSORS, _kinds("tensor"), _TENSORS, _TENSORS, _TENSORS, _SIZE, _SIZE),
        gives="list",
    ),
    zeros: Rule((_TENSORS, _kinds("constant")), gives="tensor"),
    operator.getitem: Rule((_TENSORS, _kinds("constant")), gives="tensor"),
    **{function: Rule((_SIZE, _SIZE), gives="size") for function in _ARITHMETIC},
}
"""The legality table: for each kind of call, what it may take and what it gives."""


def rule_of(node: fx.Node) -> Rule | None:
    """The rule for a call; None where the vocabulary has no such call."""
    target = node.target
    return RULES.get(type(target) if isinstance(target, (OpaqueOp, AOTBackward)) else target)


def is_validation(call: fx.Node) -> bool:
    """Whether a call fits what a node gives to the nodes after it: their shapes, dtypes and devices."""
    return isinstance(call.target, OpaqueOp) and "validate_outputs" in call.target.__name__


def value_kind(value: Any) -> str:
    """``tensor``, ``size``, ``scalar``, ``object``, ``packed``, ``list``, ``none``, ``nothing`` or ``constant``."""
    if isinstance(value, fx.Node):
        if value.op == "placeholder":
            kind = str(value.target).split("_")[0]
            return "tensor" if kind == "input" else kind
        rule = rule_of(value)
        return rule.gives if rule is not None else "nothing"
    if value is None:
        return "none"
    return "list" if isinstance(value, (list, tuple)) else "constant"


def verify(graph: fx.Graph) -> None:
    """Check every call of a tape graph against :data:`RULES`.

    Raises:
        IllegalGraphError: naming the node, the argument, what was found and what is allowed there.
    """
    graph.lint()
    for node in graph.nodes:
        if node.op == "placeholder":
            if str(node.target).split("_")[0] not in PLACEHOLDERS:
                raise IllegalGraphError(f"placeholder {node.target!r} is none of {', '.join(PLACEHOLDERS)}")
        elif node.op == "call_function":
            _verify_call(node)
        elif node.op != "output":
            raise IllegalGraphError(f"{node.name}: a tape graph has no {node.op!r} nodes")


def _verify_call(node: fx.Node) -> None:
    rule = rule_of(node)
    if rule is None:
        raise IllegalGraphError(f"{node.name}: {node.target!r} is not in the vocabulary of the tape graph")
    if len(node.args) < len(rule.takes) - rule.variadic:
        raise IllegalGraphError(f"{node.name}: takes {len(rule.takes)} arguments, got {len(node.args)}")
    for position, argument in enumerate(node.args):
        allowed = rule.takes_at(position)
        found = value_kind(argument)
        if allowed is None or found not in allowed:
            wanted = "nothing" if allowed is None else " or ".join(sorted(allowed))
            raise IllegalGraphError(f"{node.name}: argument {position} is a {found} ({argument}), allowed: {wanted}")
    if "call" not in node.meta:
        raise IllegalGraphError(f"{node.name}: does not say which node of the tape it belongs to (meta['call'])")


@dataclass(slots=True)
class TapeCall:
    """One node of the tape, as the engine reported it, with what was read of it from Python.

    Attributes:
        index: its place in the engine's walk; 0 is the root.
        name: the engine's.
        sequence: its sequence number; None where it could not be read.
        edges: indices of the nodes that its gradients go to, edge by edge; None where they could not be read.
        parameter: for a leaf, the name of the parameter that it writes to, where a living module has it.
        module: the class of the outermost module that has it.
        source: ``file:line in function`` of the forward, where anomaly mode recorded it.
        saved: names of what the node saved, with its text; None for tensors. Only for people: nothing is decided by it.
    """

    index: int
    name: str
    sequence: int | None = None
    edges: list[int] | None = None
    parameter: str | None = None
    module: str | None = None
    source: str | None = None
    saved: tuple[tuple[str, str | None], ...] = ()


@dataclass(slots=True)
class TapeGraph:
    """A capture: the graph, the nodes of the tape it was made of, and what the lifted tensors are.

    Attributes:
        graph: calls in the order in which they run; ``node.meta["call"]`` is the index into ``calls``.
        calls: the tape's nodes in the engine's walk; index 0 is the root.
        inputs: for each lifted tensor, dtype, device and ``requires_grad``: all that the structure says of it.
        order: indices into ``calls`` in the order in which the eager engine would run them.
        accumulates: True for ``backward``, False for ``autograd.grad``.
        needs_engine: it has calls that can be run only while the engine's own call is under way.
        cuda_device: the index of the CUDA device that it lies on; None where it lies on none.
    """

    graph: fx.Graph
    calls: list[TapeCall]
    inputs: list[str]
    accumulates: bool
    needs_engine: bool = False
    order: list[int] = field(default_factory=list)
    cuda_device: int | None = None

    def by_call(self) -> dict[int, list[fx.Node]]:
        """The graph's calls, grouped by the node of the tape that they belong to, in the graph's order."""
        groups: dict[int, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function":
                groups.setdefault(node.meta["call"], []).append(node)
        return groups

    @property
    def runs_users_code(self) -> bool:
        """Whether it has hooks or Python functions."""
        return any(node.target in USERS_CODE for node in self.graph.nodes)

    def copy(self, calls: list[TapeCall]) -> TapeGraph:
        """The same calls of a graph of its own, with other facts about the tape's nodes."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return replace(self, graph=graph, calls=calls)

    def readable(self) -> str:
        """The one text form: stable, and complete but for tensors, sizes and scalars, which are no part of it."""
        lines = [f"tape graph: {len(self.calls)} nodes, {len(self.inputs)} tensors"]
        for node in self.graph.find_nodes(op="placeholder"):
            lines.extend(f"  {line}" for line in self._described(node))
        last = None
        for node, line in self._lines():
            call = node.meta.get("call")
            if call is not None and call != last:
                lines.append(f"{self._title(self.calls[call])}")
                last = call
            lines.append("  " + line)
        return "\n".join(lines) + "\n"

    def _title(self, call: TapeCall) -> str:
        title = f"#{call.index} {call.name}"
        if call.parameter is not None:
            title += f" parameter={call.parameter}"
        if call.source is not None:
            title += f" at {call.source}"
        return title

    def _lines(self, by_call: bool = False) -> Iterator[tuple[fx.Node, str]]:
        """Each call with its text. Values are numbered as they come; ``by_call``, within the node they belong to."""
        names = {node: str(node.target) for node in self.graph.nodes if node.op == "placeholder"}
        placeholders = len(names)
        counts: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                yield node, f"return {_text(node.args[0], names)}"
            elif by_call and node.target is operator.getitem:
                names[node] = f"{names[node.args[0]]}.{node.args[1]}"  # in whatever order they are taken
            elif node.op == "call_function":
                call = node.meta.get("call")
                counts[call] = counts.get(call, -1) + 1
                names[node] = f"%{call}.{counts[call]}" if by_call else f"%{len(names) - placeholders}"
                arguments = ", ".join(_text(argument, names) for argument in node.args)
                yield node, f"{names[node]} = {target_name(node)}({arguments})"

    def structure(self) -> list[tuple[str, ...]]:
        """The key parts of each node of the tape, in the order of the engine's walk, and of its end.

        A lifted tensor is described where it is first used, and a value is named after its node, so that tapes share
        their keys as far as they agree. Of the order in which nodes run it says what users' code can see.
        """
        lines: dict[int | None, list[tuple[fx.Node, str]]] = {}
        for node, line in self._lines(by_call=True):
            lines.setdefault(node.meta.get("call"), []).append((node, line))
        described: set[fx.Node] = set()

        def key(call: int | None, *begin: str) -> tuple[str, ...]:
            parts = list(begin)
            for node, line in lines.get(call, ()):
                parts.append(line)
                for source in node.all_input_nodes:
                    if source.op == "placeholder" and source not in described:
                        described.add(source)
                        parts.extend(self._described(source))
            return tuple(parts)

        root, *others = self.calls
        keys = [key(0, root.name, f"accumulates={self.accumulates}"), *(key(call.index, call.name) for call in others)]
        return [*keys, (*key(None, "end"), *self._seen_order())]

    def _seen_order(self) -> list[str]:
        """Where users' code runs, the order of nodes that have some, or write to a leaf; unless it is the walk's."""
        if not self.runs_users_code:
            return []
        shows = {
            node.meta["call"]
            for node in self.graph.nodes
            if node.target in USERS_CODE or node.target is accumulate_grad
        }
        seen = [index for index in self.order if index in shows]
        return [] if seen == sorted(seen) else [f"order: {seen}"]

    def _described(self, placeholder: fx.Node) -> list[str]:
        kind, index = str(placeholder.target).split("_")
        return [f"{placeholder.target}: {self.inputs[int(index)]}"] if kind == "input" else []

    def to_networkx(self) -> nx.DiGraph:
        """The tape as a directed graph: nodes are indices into ``calls``; edges go along the flow of gradients.

        Node attributes: ``name``, ``sequence``, ``parameter``, ``source``.
        """
        result = nx.DiGraph()
        for call in self.calls:
            result.add_node(
                call.index, name=call.name, sequence=call.sequence, parameter=call.parameter, source=call.source
            )
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            for source in node.all_input_nodes:
                before, after = source.meta.get("call"), node.meta["call"]
                if before is not None and before != after:
                    result.add_edge(before, after)
        return result


def target_name(node: fx.Node) -> str:
    """How the text form names a call."""
    if isinstance(node.target, OpaqueOp):
        return repr(node.target)
    return str(getattr(node.target, "__name__", node.target))


def text_of(value: Any) -> str:
    """A constant, as the text form has it."""
    return _text(value, {})


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(each, names) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(each, names)}" for key, each in sorted(value.items())) + "}"
    return str(value)
