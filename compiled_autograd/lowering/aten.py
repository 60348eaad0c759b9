"""The legality table for lowered graphs: the nodes that an ATen graph may have, and what they may do with memory.

Only the few operators that ask for metadata or overwrite their arguments are listed. The schemas have everything else.
One walk over a graph checks it. A breach of a memory rule is visible before in-place operators are replaced, and names
the call that it came from (:mod:`lower`). The graph that a backend gets must keep all rules.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import IllegalGraphError

_OF_TWO = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.pow),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.and_, operator.or_, builtins.pow, torch.sym_max, torch.sym_min),
)
_OF_ONE = (
    *(operator.neg, operator.abs, operator.not_, builtins.abs, math.floor, math.ceil, math.trunc),
    *(torch.sym_not, torch.sym_float, torch.sym_int),
)
ON_SIZES: dict[Callable[..., Any], int] = {**dict.fromkeys(_OF_TWO, 2), **dict.fromkeys(_OF_ONE, 1), torch.sym_ite: 3}
"""Functions on sizes, and how many arguments they take: whatever it has, FX prints those of ``a * b``."""

_ALLOCATE = frozenset(
    {
        *("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"),
        *("resize", "resize_", "resize_as", "resize_as_"),
    }
)
_ASK_FOR_METADATA = frozenset(
    {
        *("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
        *("sym_size", "sym_stride", "sym_numel"),
    }
)
_OVERWRITE = frozenset({"copy", "copy_", "fill", "fill_", "zero", "zero_"})
"""Operators after which nothing is left of what was in their first argument."""
_VIEWS_OF_ALL = frozenset(
    {
        *("view", "_unsafe_view", "_reshape_alias", "permute", "t", "transpose", "unsqueeze", "squeeze"),
        *("alias", "detach", "view_as_real", "view_as_complex", "_conj", "_neg_view"),
    }
)

UNWRITTEN = "it reads memory that was allocated and not wholly written; C++ may have written it, unseen by the trace"
CONSTANT = "it brings a tensor of its own, which may be one of the step that is traced"
ABSOLUTE = "it looks at a place in the memory of what it is given, counted from where that memory begins"
NO_MEMORY = "it makes zeros that have no memory, which generated code would read"
UNDEFINED = "it is given an undefined tensor where its schema wants one: its trace has results that it does not give"


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken rule of memory: the rule, the node that breaks it, and the node that brought the memory."""

    rule: str
    node: fx.Node
    memory: fx.Node

    def __str__(self) -> str:
        return f"{self.node.name}: {self.rule} ({self.memory.format_node()})"


@dataclass(frozen=True, slots=True)
class _Facts:
    """The effects of an operator on memory, from its schema.

    Attributes:
        name: without namespace and overload; empty for anything but an operator of torch.ops.
        aliases: its result lies in the memory of its first argument.
        writes: it writes into an argument.
        outs: names of the arguments that it writes its results to.
        places: it takes or gives a place in the memory of its first argument.
        tensors: positions of arguments that are tensors, and not optional ones.
    """

    name: str = ""
    aliases: bool = False
    writes: bool = False
    outs: frozenset[str] = frozenset()
    places: bool = False
    tensors: tuple[int, ...] = ()


@functools.cache
def _facts(target: Any) -> _Facts:
    if not isinstance(target, torch._ops.OpOverload):
        return _Facts(aliases=target is operator.getitem)  # one of the views that an operator gave
    schema = target._schema
    name = schema.name.partition("::")[2]
    ends = (*schema.arguments[:1], *schema.returns[:1])
    return _Facts(
        name,
        aliases=len(ends) == 2 and all(end.alias_info is not None for end in ends),
        writes=schema.is_mutable,
        outs=frozenset(each.name for each in schema.arguments if each.is_out),
        places=name == "sym_storage_offset" or any(each.name == "storage_offset" for each in schema.arguments),
        tensors=tuple(index for index, each in enumerate(schema.arguments) if str(each.type) == "Tensor"),
    )


def breaches(graph: fx.Graph) -> Iterator[Breach]:
    """Yield each place where a graph breaks a rule of memory. Its in-place operators may be replaced or not.

    - No memory is read that was allocated and not wholly written before. Some of PyTorch's functions fill memory that
      they allocated through a data pointer, as ``at::tensor`` does. A trace sees only the allocation.
    - No operator counts from the beginning of an input's memory (``as_strided``). Inputs are traced as if they began
      there, but a tensor at run time may be a part of another one.
    - No zeros are made without memory (``_efficientzerotensor``): code that Inductor generates takes their address, 0.
    - No operator is given an undefined tensor that it needs. Kernels may then return undefined tensors too
      (``_scaled_dot_product_flash_attention_for_cpu_backward``), but the functions that make fake tensors do not.
    """
    base: dict[fx.Node, fx.Node] = {}  # of a tensor, the input or the allocation whose memory it lies in
    parts: set[fx.Node] = set()  # those that need not be all of it
    unwritten: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            base[node] = node
        if node.op not in ("call_function", "output"):
            continue
        facts = _facts(node.target)
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        memory = base.get(first) if first is not None else None
        if any(node.args[index] is None for index in facts.tensors if index < len(node.args)):
            yield Breach(UNDEFINED, node, node)
        if facts.name == "_efficientzerotensor":
            yield Breach(NO_MEMORY, node, node)
        if facts.places and memory is not None and memory.op == "placeholder":
            yield Breach(ABSOLUTE, node, memory)
        if unwritten and facts.name not in _ASK_FOR_METADATA:
            read = _read_by(node, first, facts)
            sources = [source for source in node.all_input_nodes if base.get(source) in unwritten]
            yield from (Breach(UNWRITTEN, node, base[source]) for source in sources if source in read)
            if facts.writes:
                unwritten.difference_update(base[source] for source in {*sources} - read - parts)
        if facts.name in _ALLOCATE:
            if not _has_no_elements(node):
                base[node] = node
                unwritten.add(node)
        elif first is not None and memory is not None and facts.aliases:
            base[node] = memory
            if first in parts or not (facts.writes or facts.name in _VIEWS_OF_ALL):
                parts.add(node)


def _read_by(node: fx.Node, first: fx.Node | None, facts: _Facts) -> set[fx.Node]:
    """The nodes whose memory a node reads."""
    read: set[fx.Node] = set()
    rest = node.args if first is None else node.args[1:]
    fx.map_arg((rest, [each for name, each in node.kwargs.items() if name not in facts.outs]), read.add)
    if first is not None and facts.name not in _OVERWRITE and (facts.writes or not facts.aliases):
        read.add(first)
    return read


def _has_no_elements(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return any(type(size) is int and size == 0 for size in value.shape)
    return any(isinstance(each, (list, tuple)) and 0 in each for each in node.args[:2])


def verify(graph_module: fx.GraphModule) -> None:
    """Check a lowered graph before a backend gets it.

    The graph may have:

    - placeholders, and one output, which is a list of nodes;
    - operators of torch.ops that write into none of their arguments; no later step of the run expects a write;
    - functions on sizes, as in :data:`ON_SIZES`, and items of lists of results;
    - attributes: tensors with values, and graphs that operators of higher order take.

    Raises:
        IllegalGraphError: naming the node and the rule.
    """
    for node in graph_module.graph.nodes:
        why = _why_not(node, graph_module)
        if why:
            raise IllegalGraphError(f"{node.name}: {why}, in {node.format_node() or node}")
    for breach in breaches(graph_module.graph):
        raise IllegalGraphError(str(breach))


def constants(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Attributes that are tensors of more than one element. A number that PyTorch's own functions make a tensor of is
    the same at each step, as all numbers in a graph are; a larger tensor that they bring comes from somewhere else."""
    nodes = graph_module.graph.find_nodes(op="get_attr")
    values = [(node, _attribute(graph_module, str(node.target))) for node in nodes]
    return [node for node, value in values if isinstance(value, torch.Tensor) and value.numel() != 1]


def _why_not(node: fx.Node, graph_module: fx.GraphModule) -> str:
    """The rule that a node breaks by what it is; empty where it breaks none."""
    target: Any = node.target
    if node.op == "placeholder":
        return ""
    if node.op == "get_attr":
        value = _attribute(graph_module, target)
        right = isinstance(value, (torch.Tensor, fx.GraphModule)) and not isinstance(value, FakeTensor)
        return "" if right else "an attribute is a tensor with values or a graph"
    if node.op == "output":
        values = node.args[0]
        is_list = isinstance(values, (list, tuple)) and all(isinstance(each, fx.Node) for each in values)
        return "" if is_list else "the output is a list of nodes"
    if node.op != "call_function":
        return f"a lowered graph has no {node.op!r} nodes"
    if isinstance(target, torch._ops.OpOverload):
        return "no operator writes into its arguments" if _facts(target).writes else ""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return ""
    if target is operator.getitem:
        right = len(node.args) == 2 and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int)
        return "" if right else "an item is taken by its number"
    if target not in ON_SIZES:
        return "it is neither an operator of torch.ops nor a function on sizes that is known"
    wanted = ON_SIZES[target]
    return "" if len(node.args) == wanted and not node.kwargs else f"this function on sizes takes {wanted} of them"


def _attribute(graph_module: fx.GraphModule, name: str) -> Any:
    try:
        return operator.attrgetter(name)(graph_module)
    except AttributeError:
        return None
