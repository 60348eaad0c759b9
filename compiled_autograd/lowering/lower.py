"""A region of the tape graph -> a functional graph of ATen operators, by running it under fake tensors."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from ..errors import IllegalGraphError, UntraceableError
from ..guards.shapes import Spec, is_static
from ..ir import is_plain
from ..ir.nan_checks import Flags, ResultIndex
from ..ir.partition import Region
from ..steps.accumulate import copy_laid_out_as, obeys_layout, own_copy
from ..steps.memory import has_bit
from ..torch_api.cpp_warnings import Noting
from ..torch_api.version_differences import prepare_fake_tensors
from ..user_code.aot import AOTBackward
from .aten import CONSTANT, breaches, constants
from .fake_tensors import fake_of
from .functional import made_functional, mutates
from .trace_cache import TracedCalls, last_of, nodes_after
from .tracing import trace

if TYPE_CHECKING:
    from ..guards.symbolic import Symbols


_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(slots=True)
class Lowered:
    """A region as ATen operators.

    Attributes:
        graph_module: its placeholders are the region's tensors, in the order of ``tensors``; its output is a list.
        examples: fake tensors, and symbols for sizes that change, for the placeholders.
        taken: indices into ``region.inputs`` of what the graph takes (other sizes are numbers in it).
        plain: indices into ``taken`` of tensors whose conjugate and negative bits the graph does not know of.
        values: for each of ``region.outputs`` that something but a fresh leaf needs, the index into the graph's
            output, or None where the gradient is undefined.
        apart: of ``values``, those that share memory with nothing that the graph takes or gives.
        leaves: for each fresh leaf's ``accumulate_grad`` call, the index into the graph's output of a gradient that
            the leaf can keep as it is, or None where it is undefined.
        passed: for the others, the index into ``region.inputs`` of what an earlier step made, and goes to the leaf as
            it is; whether the leaf can keep it is known only when it is there.
        flags: where NaNs are looked for: nodes of the tape, and numbers of what they give. If there are any, the last
            output is a boolean tensor with as many elements.
        symbols: what stands for sizes that change, and what was found to hold of it; None where nothing does.
    """

    graph_module: fx.GraphModule
    examples: Sequence[Any]
    taken: list[int]
    plain: list[int]
    values: dict[fx.Node, int | None]
    apart: list[fx.Node]
    leaves: dict[fx.Node, int | None]
    passed: dict[fx.Node, int]
    flags: list[ResultIndex]
    symbols: Symbols | None


def lower(
    region: Region,
    given: Sequence[Any],
    fresh_leaves: Mapping[fx.Node, torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]] | None,
    specs: Mapping[fx.Node, Spec | None] | None = None,
    givers: Mapping[fx.Node, int] = MappingProxyType({}),
    plain: bool = False,
) -> Lowered:
    """Trace a region with the shapes of ``given``.

    Args:
        region: what to trace.
        given: real values for ``region.inputs``: tensors, sizes, or None for an undefined gradient.
        fresh_leaves: ``accumulate_grad`` calls whose leaf (a strided tensor) has no ``.grad`` yet, and that leaf. They
            get their gradient in memory of its own, in the leaf's layout, so that the leaf can keep it.
        decompositions: the table to trace with.
        specs: for inputs and leaves, which of their dimensions change; they become symbols.
        givers: calls in whose results NaNs are looked for, and the nodes of the tape that they belong to.
        plain: conjugate and negative bits are taken off tensors before the graph gets them.

    Raises:
        UntraceableError: naming the calls that cannot be run under fake tensors.
    """
    specs = specs or {}
    _check_plain(region, given)
    prepare_fake_tensors()
    symbols = None if all(is_static(spec) for spec in specs.values()) else _symbols()
    mode = FakeTensorMode(allow_non_fake_inputs=True) if symbols is None else symbols.mode()
    taken_in: list[int] = []
    examples: list[Any] = []
    for index, (node, value) in enumerate(zip(region.inputs, given, strict=True)):
        spec = specs.get(node)
        if isinstance(value, torch.Tensor):
            examples.append(_fake(mode, value, spec, symbols, plain, len(examples)))
        elif symbols is not None and value is not None and not is_static(spec):  # None: an undefined gradient
            examples.append(symbols.size(value, spec, len(examples)))  # type: ignore[arg-type]
        else:
            continue
        taken_in.append(index)
    leaves = {call: _fake(mode, leaf, specs.get(leaf_of(call)), symbols, plain) for call, leaf in fresh_leaves.items()}
    inside = set(region.nodes)
    value_positions: dict[fx.Node, int | None] = {}
    apart: list[fx.Node] = []
    leaf_positions: dict[fx.Node, int | None] = {}
    passed: dict[fx.Node, int] = {}
    flags = Flags(givers)
    origins: dict[fx.Node, fx.Node] = {}

    def run(*fakes: Any) -> list[Any]:
        known: dict[fx.Node, Any] = dict(zip(region.inputs, given, strict=True))
        known.update((region.inputs[index], fake) for index, fake in zip(taken_in, fakes, strict=True))
        _run_calls(region.nodes, known, None if symbols is not None else TracedCalls(decompositions), flags, origins)
        results: list[torch.Tensor] = []
        for node in region.outputs:
            if any(user not in inside and user not in leaves for user in node.users):
                value_positions[node] = _append(results, known[node])
        memory = Counter(_storage(tensor) for tensor in (*fakes, *results) if isinstance(tensor, torch.Tensor))
        apart.extend(node for node, index in value_positions.items() if _is_apart(results, index, memory))
        taken = set(memory)
        for call, leaf in leaves.items():
            grad = known[call.args[2]]  # type: ignore[index]
            source = next((index for index, fake in zip(taken_in, fakes, strict=True) if fake is grad), None)
            if source is not None and region.inputs[source].op != "placeholder":
                passed[call] = source
                continue
            if grad is not None and (_storage(grad) in taken or not _obeys_layout(grad, leaf)):
                copy = own_copy if symbols is None else copy_laid_out_as  # operators which a backend can fuse
                grad = copy(grad, fresh_leaves[call])
            leaf_positions[call] = _append(results, grad)
            if grad is not None:
                taken.add(_storage(grad))
        if flags.found:
            results.append(torch.stack(flags.found))
        return results

    # Operators that take no tensor (full) have no fake one among their arguments that would bring its mode along.
    with torch.no_grad(), _plain_tracing(), mode:
        names = [_name(position, given[index]) for position, index in enumerate(taken_in)]
        graph_module = trace(run, decompositions, examples, names)
        if symbols is not None:
            _made_binary(graph_module.graph)
        graph_module.graph.eliminate_dead_code()
        _leave_opaque_what_is_forbidden(graph_module, origins)
        if any(mutates(node) for node in graph_module.graph.nodes) and not made_functional(graph_module.graph):
            graph_module = trace(torch.func.functionalize(graph_module, remove="mutations"), None, examples, names)
            if symbols is not None:
                _made_binary(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    if symbols is None:  # else a tensor may be there for its sizes
        _take_what_is_used(graph_module.graph, taken_in, examples)
    graph_module.recompile()
    bits = [place for place, index in enumerate(taken_in) if plain and has_bit(given[index])]
    return Lowered(
        graph_module, examples, taken_in, bits, value_positions, apart, leaf_positions, passed, flags.looked_at, symbols
    )


def _symbols() -> Symbols:
    from ..guards.symbolic import Symbols

    return Symbols()


def _leave_opaque_what_is_forbidden(graph_module: fx.GraphModule, origins: Mapping[fx.Node, fx.Node]) -> None:
    """Raise for calls that do with memory what a lowered graph may not, or bring constants.

    Those of a forward that was compiled are left in: they are the graph's that AOTAutograd made of it.

    Args:
        origins: of the graph's nodes, the calls of the region that they came from.
    """
    found = [(each.rule, origins.get(each.memory) or origins.get(each.node)) for each in breaches(graph_module.graph)]
    found += [
        (CONSTANT, origins.get(node))
        for node in constants(graph_module)
        if node not in origins or not isinstance(origins[node].target, AOTBackward)
    ]
    if not found:
        return
    rule = found[0][0]
    calls = dict.fromkeys(call for each, call in found if each == rule)
    named = [call for call in calls if call is not None]
    if len(named) < len(calls):
        raise IllegalGraphError(f"a node that belongs to no call: {rule}")
    raise UntraceableError(named, ValueError(rule), always=False)


def _made_binary(graph: fx.Graph) -> None:
    from ..guards.symbolic import made_binary

    made_binary(graph)


def _check_plain(region: Region, given: Sequence[Any]) -> None:
    """Calls that see a subclass or a sparse tensor, directly or through others, stay as they are."""
    unusual = {
        node
        for node, value in zip(region.inputs, given, strict=True)
        if isinstance(value, torch.Tensor) and not is_plain(value)
    }
    if not unusual:
        return
    example = next(value for node, value in zip(region.inputs, given, strict=True) if node in unusual)
    calls = []
    for node in region.nodes:
        if any(source in unusual for source in node.all_input_nodes):
            unusual.add(node)
            if node.target is not operator.getitem:
                calls.append(node)
    raise UntraceableError(calls, _not_plain(example), always=False)


def _not_plain(tensor: torch.Tensor) -> TypeError:
    kind = type(tensor).__name__
    return TypeError(f"a {kind} of layout {tensor.layout}" if kind in ("Tensor", "FakeTensor") else f"a {kind}")


def _fake(
    mode: FakeTensorMode,
    tensor: torch.Tensor,
    spec: Spec | None,
    symbols: Symbols | None,
    plain: bool,
    position: int | None = None,
) -> torch.Tensor:
    if symbols is not None and spec is not None and not is_static(spec):
        return symbols.tensor(mode, tensor, spec, plain, position)
    return fake_of(mode, tensor, plain)


def leaf_of(call: fx.Node) -> fx.Node:
    """The leaf that an ``accumulate_grad`` call writes to."""
    leaf = call.args[0]
    assert isinstance(leaf, fx.Node)
    return leaf


def _take_what_is_used(graph: fx.Graph, taken_in: list[int], examples: list[Any]) -> None:
    """Drop inputs that nothing is computed of: a backend's code would hold them to its end."""
    for position, placeholder in reversed(list(enumerate(graph.find_nodes(op="placeholder")))):
        if not placeholder.users:
            graph.erase_node(placeholder)
            del taken_in[position], examples[position]


def _name(position: int, value: Any) -> str:
    """Of a placeholder. Inductor takes it that what is named ``arg`` outlives the graph, and plans the order of what it
    runs so that all else can be freed early (``is_nonfreeable_buffers`` in ``torch/_inductor/utils.py``, 2.13)."""
    owner = value._base if isinstance(value, torch.Tensor) and value._is_view() else value
    return f"{'arg' if isinstance(owner, torch.nn.Parameter) else 'saved'}{position}_1"


def _obeys_layout(grad: torch.Tensor, leaf: torch.Tensor) -> bool:
    """The same, of fake tensors during a trace: it compares sizes and strides, and those of the leaf, which is none of
    the arguments, the trace does not know."""
    with disable_proxy_modes_tracing():
        return obeys_layout(grad, leaf)


def _is_apart(results: Sequence[torch.Tensor], index: int | None, memory: Mapping[int, int]) -> bool:
    return index is not None and memory[_storage(results[index])] == 1


def _append(results: list[torch.Tensor], value: torch.Tensor | None) -> int | None:
    if value is None:
        return None
    results.append(value)
    return len(results) - 1


def _run_calls(
    nodes: Sequence[fx.Node],
    known: dict[fx.Node, Any],
    traced: TracedCalls | None,
    flags: Flags,
    origins: dict[fx.Node, fx.Node],
) -> None:
    """Run opaque calls one after the other.

    Args:
        known: has the values so far, and gets the new ones.
        origins: gets, of each node of the graph that is being traced, the call that made it.
    """
    mode = get_proxy_mode()
    assert mode is not None and isinstance(mode.tracer, fx.Tracer)
    graph = mode.tracer.graph
    with Noting() as noting:
        for node in nodes:
            last = last_of(graph)
            if node.target is operator.getitem:
                made, index = node.args
                known[node] = known[made][index]  # type: ignore[index]
                continue
            function: Any = getattr(node.target, "trace", node.target)
            run = functools.partial(_warned, noting, function)
            try:
                arguments = fx.map_arg(node.args, known.__getitem__)
                result = run(*arguments) if traced is None else traced.call(node.target, arguments, run)
            except Exception as error:
                raise UntraceableError([node], error) from error
            known[node] = result
            origins.update(dict.fromkeys(nodes_after(last, graph), node))
            for value in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                    raise UntraceableError([node], _not_plain(value))
            flags.look(node, result)


def _warned(noting: Noting, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; what C++ code warns of is raised: it is to warn at each step, as under eager."""
    result, warning = noting.call(function, *arguments)
    if warning is not None:
        raise warning
    return result


@contextlib.contextmanager
def _plain_tracing() -> Iterator[None]:
    """Autocast's cache must not keep fake tensors, and an operator that has no fake result is no error to be logged:
    the call stays opaque, and says so."""
    before, disabled = torch.is_autocast_cache_enabled(), _FAKE_LOG.disabled
    torch.set_autocast_cache_enabled(False)
    _FAKE_LOG.disabled = True
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        _FAKE_LOG.disabled = disabled


def _storage(tensor: torch.Tensor) -> int:
    """Which memory a (fake) tensor lies in."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata
