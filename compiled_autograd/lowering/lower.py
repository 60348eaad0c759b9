"""A region of the tape graph -> a functional graph of ATen operators, by running it under fake tensors."""

from __future__ import annotations

import functools
import math
import operator
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from ..backends import Backend
from ..errors import IllegalGraphError, OverBudgetError, UntraceableError
from ..guards.shapes import Spec, is_static
from ..ir import check_nan, is_plain, sum_gradients
from ..ir.partition import Region
from ..steps.accumulate import copy_laid_out_as, obeys_layout, own_copy
from ..steps.memory import has_bit
from ..steps.steps import RegionStep, Slots, Wiring
from ..torch_api.cpp_warnings import pass_on, raising
from ..torch_api.version_differences import multiplies_many_sizes, prepare_fake_tensors
from ..user_code.aot import AOTBackward
from .aten import CONSTANT, breaches, constants
from .fake_tensors import TracingMode, fake_of, storage_of
from .functional import made_functional, mutates
from .trace_cache import TracedCalls, last_of, nodes_after
from .tracing import plain_tracing, trace

if TYPE_CHECKING:
    from ..guards.symbolic import Symbols


@dataclass(slots=True)
class Lowered:
    """A region as ATen operators.

    Attributes:
        graph_module: its placeholders are those of the region's inputs that it takes; its output is a list.
        examples: fake tensors, and symbols for sizes that change, for the placeholders.
        wiring: what it takes (other sizes are numbers in it), and what its results are.
        symbols: what stands for sizes that change, and what was found to hold of it; None where nothing does.
        origins: for nodes of the graph, by name, the node of the tape whose call they came from.
    """

    graph_module: fx.GraphModule
    examples: Sequence[Any]
    wiring: Wiring
    symbols: Symbols | None
    origins: Mapping[str, int]


def lower(
    step: RegionStep, slots: Slots, backend: Backend, specs: Mapping[fx.Node, Spec], seconds: float = math.inf
) -> Lowered:
    """Trace a region with the shapes of the values in hand.

    Its fresh leaves, where they are strided, get their gradient in memory of its own, in the leaf's layout, so that the
    leaf can keep it.

    Args:
        step: the region.
        slots: real values: tensors, sizes, or None for an undefined gradient.
        backend: whose decompositions are traced with. Unless it is bitwise, conjugate and negative bits are taken off
            tensors before the graph gets them.
        specs: for inputs and leaves, which of their dimensions change; they become symbols.
        seconds: that may pass until the last call is traced.

    Raises:
        OverBudgetError: more have passed.
        UntraceableError: naming the calls that cannot be run under fake tensors.
    """
    prepare_fake_tensors()
    return _Lowering(step, slots, backend, specs, time.perf_counter() + seconds).lowered()


class _Lowering:
    """One region while it is lowered, ``until`` when; the other arguments are those of :func:`lower`."""

    def __init__(
        self, step: RegionStep, slots: Slots, backend: Backend, specs: Mapping[fx.Node, Spec], until: float
    ) -> None:
        self.region, self.until = step.region, until
        self.given = [slots[slot] for slot in step.inputs]
        _check_plain(self.region, self.given)
        self.backend, self.decompositions, self.plain = backend, backend.decompositions(), not backend.bitwise
        self.symbols: Symbols | None = None
        if not all(is_static(spec) for spec in specs.values()):
            from ..guards.symbolic import Symbols

            self.symbols = Symbols()
        env = None if self.symbols is None else self.symbols.env
        self.mode = TracingMode(allow_non_fake_inputs=True, shape_env=env)
        self.examples: list[Any] = []
        # What follows is as in Wiring.
        self.taken: list[int] = []
        self.values: list[tuple[int, int]] = []
        self.apart: list[tuple[int, int]] = []
        self.fresh: list[tuple[int, int]] = []
        self.passed: list[tuple[int, int]] = []
        self.flags: list[tuple[int, int]] = []
        self._take_in(specs)
        self.leaves = {  # strided fresh leaves by their calls: which it is, the leaf, and a fake one
            fresh.call: (position, leaf, self._fake(leaf, specs.get(leaf_of(fresh.call))))
            for position, fresh in enumerate(step.fresh)
            if is_plain(leaf := slots[fresh.leaf])
        }
        self.found: list[torch.Tensor] = []  # for each of the flags, a boolean tensor of one element
        self.looked_at: set[int] = set()  # ids of the tensors
        self.origins: dict[fx.Node, fx.Node] = {}  # of nodes of the ATen graph, the calls that made them

    def lowered(self) -> Lowered:
        # Operators that take no tensor (full) have no fake one among their arguments that would bring its mode along.
        with torch.no_grad(), plain_tracing(), self.backend.tracing(self.examples), self.mode:
            graph_module = self._trace(self._run, self.decompositions)
            graph_module.graph.eliminate_dead_code()
            _leave_opaque_what_is_forbidden(graph_module, self.origins)
            with torch._C._DisableAutocast():  # the graph has its casts in it
                if any(mutates(node) for node in graph_module.graph.nodes) and not made_functional(graph_module.graph):
                    graph_module = self._trace(torch.func.functionalize(graph_module, remove="mutations"), None)
                    graph_module.graph.eliminate_dead_code()
        for node, call in self.origins.items():
            node.meta["call"] = call.meta["call"]
        if self.symbols is None:  # else a tensor may be there for its sizes
            _take_what_is_used(graph_module.graph, self.taken, self.examples)
        graph_module.recompile()
        wiring = Wiring(
            taken=tuple(self.taken),
            values=tuple(self.values),
            fresh=tuple(self.fresh),
            copied=(),
            passed=tuple(self.passed),
            flags=tuple(self.flags),
            apart=tuple(self.apart),
            plain=tuple(place for place, index in enumerate(self.taken) if self.plain and has_bit(self.given[index])),
        )
        origins = {
            node.name: self.origins[node].meta["call"] for node in graph_module.graph.nodes if node in self.origins
        }
        return Lowered(graph_module, self.examples, wiring, self.symbols, origins)

    def _take_in(self, specs: Mapping[fx.Node, Spec]) -> None:
        """Make an example of each tensor, and of each size that changes."""
        for index, (node, value) in enumerate(zip(self.region.inputs, self.given, strict=True)):
            spec, position = specs.get(node), len(self.examples)
            if isinstance(value, torch.Tensor):
                self.examples.append(self._fake(value, spec, position))
            elif self.symbols is not None and value is not None and not is_static(spec):  # None: no gradient
                self.examples.append(self.symbols.size(value, spec, position))  # type: ignore[arg-type]
            else:
                continue
            self.taken.append(index)

    def _fake(self, tensor: torch.Tensor, spec: Spec | None, position: int | None = None) -> torch.Tensor:
        if self.symbols is not None and spec is not None and not is_static(spec):
            return self.symbols.tensor(self.mode, tensor, spec, self.plain, position)
        return fake_of(self.mode, tensor, self.plain)

    def _trace(self, function: Callable[..., Any], decompositions: Any) -> fx.GraphModule:
        names = [_name(position, self.given[index]) for position, index in enumerate(self.taken)]
        graph_module = trace(function, decompositions, self.examples, names)
        if self.symbols is not None and multiplies_many_sizes():
            from ..guards.symbolic import made_binary

            made_binary(graph_module.graph)
        return graph_module

    def _run(self, *fakes: Any) -> list[Any]:
        """Run the region's calls under the trace; gives what the graph gives."""
        known: dict[fx.Node, Any] = dict(zip(self.region.inputs, self.given, strict=True))
        known.update((self.region.inputs[index], fake) for index, fake in zip(self.taken, fakes, strict=True))
        self._run_calls(known)
        inside = set(self.region.nodes)
        results: list[torch.Tensor] = []
        for position, node in enumerate(self.region.outputs):
            needed = any(user not in inside and user not in self.leaves for user in node.users)
            if needed and known[node] is not None:
                self.values.append((position, len(results)))
                results.append(known[node])
        memory = Counter(storage_of(tensor) for tensor in (*fakes, *results) if isinstance(tensor, torch.Tensor))
        self.apart = [pair for pair in self.values if memory[storage_of(results[pair[1]])] == 1]
        self._give_to_leaves(known, fakes, results, set(memory))
        if self.found:
            results.append(torch.stack(self.found))
        return results

    def _run_calls(self, known: dict[fx.Node, Any]) -> None:
        """Run opaque calls one after the other. One that warns stays opaque: it is to warn at each step, as on eager.

        Args:
            known: has the values so far, and gets the new ones.
        """
        traced = TracedCalls(self.decompositions) if self.symbols is None else None
        mode = get_proxy_mode()
        assert mode is not None and isinstance(mode.tracer, fx.Tracer)
        graph = mode.tracer.graph
        caught: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for place, node in enumerate(self.region.nodes):
                    if time.perf_counter() > self.until:
                        raise OverBudgetError("compile_budget is spent")
                    last = last_of(graph)
                    if node.target is operator.getitem:
                        made, index = node.args
                        known[node] = known[made][index]  # type: ignore[index]
                    elif node.target is check_nan:
                        self._look(place, known[node.args[0]])  # type: ignore[index]
                    else:
                        self._run_call(node, known, traced, caught)
                        self.origins.update(dict.fromkeys(nodes_after(last, graph), node))
        finally:
            pass_on(caught)

    def _run_call(
        self,
        node: fx.Node,
        known: dict[fx.Node, Any],
        traced: TracedCalls | None,
        caught: Sequence[warnings.WarningMessage],
    ) -> None:
        function: Any = getattr(node.target, "trace", node.target)
        run = functools.partial(raising, caught, function)
        try:
            arguments = fx.map_arg(node.args, known.__getitem__)
            if traced is None:
                result = run(*arguments)
            elif node.target is sum_gradients:  # term by term: additions repeat, whole sums do not
                result = functools.reduce(lambda total, term: traced.call(sum_gradients, (total, term), run), arguments)
            else:
                result = traced.call(node.target, arguments, run)
        except Exception as error:
            raise UntraceableError([node], error) from error
        known[node] = result
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                raise UntraceableError([node], _not_plain(value))

    def _look(self, place: int, values: Sequence[Any]) -> None:
        """Add flags for what a node of the tape gives. What several nodes hand on is looked at once."""
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor) and id(value) not in self.looked_at:
                self.looked_at.add(id(value))
                self.flags.append((place, index))
                self.found.append(torch.isnan(value).any())

    def _give_to_leaves(
        self, known: Mapping[fx.Node, Any], fakes: Sequence[Any], results: list[torch.Tensor], used: set[int]
    ) -> None:
        """Append to ``results`` a gradient for each fresh leaf, in memory that is not among the ``used``."""
        for call, (position, leaf, fake_leaf) in self.leaves.items():
            grad = known[call.args[2]]  # type: ignore[index]
            source = next((index for index, fake in zip(self.taken, fakes, strict=True) if fake is grad), None)
            if source is not None and self.region.inputs[source].op != "placeholder":
                self.passed.append((position, source))
                continue
            if grad is None:
                continue
            with disable_proxy_modes_tracing():  # sizes and strides of a leaf, which is no argument, no trace knows
                can_be_kept = storage_of(grad) not in used and obeys_layout(grad, fake_leaf)
            if not can_be_kept:
                copy = own_copy if self.symbols is None else copy_laid_out_as  # operators which a backend can fuse
                grad = copy(grad, leaf)
            self.fresh.append((position, len(results)))
            results.append(grad)
            used.add(storage_of(grad))


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


def _check_plain(region: Region, given: Sequence[Any]) -> None:
    """Calls that see a subclass or a sparse tensor, directly or through others, stay as they are."""
    pairs = zip(region.inputs, given, strict=True)
    unusual = {node: value for node, value in pairs if isinstance(value, torch.Tensor) and not is_plain(value)}
    if not unusual:
        return
    example, seers = next(iter(unusual.values())), set(unusual)
    calls = []
    for node in region.nodes:
        if any(source in seers for source in node.all_input_nodes):
            seers.add(node)
            if node.target is not operator.getitem:
                calls.append(node)
    raise UntraceableError(calls, _not_plain(example), always=False)


def _not_plain(tensor: torch.Tensor) -> TypeError:
    kind = type(tensor).__name__
    return TypeError(f"a {kind} of layout {tensor.layout}" if kind in ("Tensor", "FakeTensor") else f"a {kind}")


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
    """Name a placeholder. Inductor assumes that inputs named ``arg`` outlive the graph, and orders its kernels so that
    the other inputs can be freed early (``is_nonfreeable_buffers`` in ``torch/_inductor/utils.py``, 2.13)."""
    owner = value._base if isinstance(value, torch.Tensor) and value._is_view() else value
    return f"{'arg' if isinstance(owner, torch.nn.Parameter) else 'saved'}{position}_1"
