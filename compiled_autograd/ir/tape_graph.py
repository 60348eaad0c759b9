"""A capture: the graph, the nodes of the tape that it was made of, and its views (text, keys, networkx)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import networkx as nx
from torch import fx

from .operations import USERS_CODE, OpaqueOp, accumulate_grad, sum_gradients
from .structure_keys import (
    Accumulates,
    Argument,
    CallPart,
    Constant,
    LiftedTensor,
    Part,
    Returned,
    RunOrder,
    SavedValue,
    StructureKey,
    Value,
    argument_of,
)


class Named(NamedTuple):
    """A leaf's parameter, where a living module has it: its name, the class of the outermost module that has it, and a
    weak reference to that module, one object for one module."""

    parameter: str | None = None
    module: str | None = None
    model: object | None = None


_NO_PARAMETER = Named()
PART_OF_SUM = "part_of_sum"
"""Key in the ``meta`` of a sum that is a part of a longer sum, and its first argument."""


@dataclass(slots=True)
class TapeCall:
    """One node of the tape, as the engine reported it, with facts that were read from Python.

    Attributes:
        index: its place in the engine's walk; 0 is the root.
        name: the engine's.
        sequence: its sequence number; None where it could not be read.
        edges: indices of the nodes that its gradients go to, edge by edge; None where they could not be read.
        named: the parameter of a leaf: :attr:`parameter`, :attr:`module` and :attr:`model`.
        source: ``file:line in function`` of the forward, where anomaly mode recorded it.
        saved: values that the node saved, by name. Only for people: no decision depends on them.
        look_up: finds its names, at the first request; None afterwards.
    """

    index: int
    name: str
    sequence: int | None = None
    edges: list[int] | None = None
    named: Named = _NO_PARAMETER
    source: str | None = None
    saved: tuple[SavedValue, ...] = ()
    look_up: Callable[[], Named] | None = None

    @property
    def parameter(self) -> str | None:
        """The name of the parameter that a leaf is; None where it is none, or no leaf."""
        return self._names().parameter

    @property
    def module(self) -> str | None:
        """The class of the outermost module that has the parameter."""
        return self._names().module

    @property
    def model(self) -> object | None:
        """A weak reference to that module."""
        return self._names().model

    def made_at(self, sequence: int | None) -> TapeCall:
        """Return this node for a tape whose nodes were made in another order."""
        return replace(self, sequence=sequence, look_up=self.look_up)  # this is read before the name

    def _names(self) -> Named:
        look_up = self.look_up  # another thread may find it out meanwhile
        if look_up is not None:
            self.named = look_up()
            self.look_up = None
        return self.named


@dataclass(slots=True)
class TapeGraph:
    """A capture: the graph, the nodes of its tape, and the lifted tensors.

    Attributes:
        graph: calls in the order in which they run; ``node.meta["call"]`` is the index into ``calls``, and a
            placeholder's ``node.meta["lifted"]`` has its meaning.
        calls: the tape's nodes in the engine's walk; index 0 is the root.
        inputs: for each lifted tensor, all that the structure says of it.
        order: indices into ``calls`` in the order in which the eager engine would run them.
        accumulates: True for ``backward``, False for ``autograd.grad``.
        needs_engine: it has calls that can be run only while the engine's own call is under way.
        cuda_device: the index of the CUDA device that it lies on; None where it lies on none.
        hook_places: of the runtime, see ``runtime.late_hooks.HookPlaces``; found at the first request.
    """

    graph: fx.Graph
    calls: list[TapeCall]
    inputs: list[LiftedTensor]
    accumulates: bool
    needs_engine: bool = False
    order: list[int] = field(default_factory=list)
    cuda_device: int | None = None
    hook_places: Any = field(default=None, init=False, compare=False)

    def by_call(self) -> dict[int, list[fx.Node]]:
        """The graph's calls, grouped by the node of the tape that they belong to, in the graph's order."""
        groups: dict[int, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function":
                groups.setdefault(node.meta["call"], []).append(node)
        return groups

    @property
    def runs_users_code(self) -> bool:
        """Return whether the graph has hooks or Python functions."""
        return any(node.target in USERS_CODE for node in self.graph.nodes)

    def added_to(self) -> frozenset[int]:
        """Return the lifted tensors that are only ``.grad`` of leaves: their strides do not matter."""
        return frozenset(
            node.meta["lifted"].index
            for node in self.graph.find_nodes(op="placeholder")
            if node.meta["lifted"].kind == "input"
            and all(user.target is accumulate_grad and user.args.index(node) == 1 for user in node.users)
        )

    def is_unnamed(self) -> bool:
        """Return whether the names of parameters were not looked up yet."""
        return any(call.look_up is not None for call in self.calls)

    def copy(self, calls: list[TapeCall]) -> TapeGraph:
        """Copy the graph, with other facts about the tape's nodes."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return replace(self, graph=graph, calls=calls)

    def readable(self) -> str:
        """Return the one text form: stable, and complete except for tensors, sizes and scalars."""
        return "".join(f"{line}\n" for line, _ in self.lines())

    def lines(self) -> Iterator[tuple[str, fx.Node | TapeCall | None]]:
        """The lines of :meth:`readable`, and what each is about: a call, a node of the tape, or neither."""
        yield f"tape graph: {len(self.calls)} nodes, {len(self.inputs)} tensors", None
        values: dict[fx.Node, Argument] = {}
        number, last = itertools.count(), None
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = lifted = node.meta["lifted"]
                if lifted.kind == "input":
                    yield f"  {self.inputs[lifted.index]}", None
                continue
            call = node.meta.get("call")
            if call is not None and call != last:
                yield self._title(self.calls[call]), self.calls[call]
                last = call
            if node.op == "output":
                yield f"  return {argument_of(node.args[0], values)}", None
            else:
                arguments = ", ".join(str(argument_of(each, values)) for each in node.args)
                values[node] = Constant("value", f"%{next(number)}")
                yield f"  {values[node]} = {target_name(node)}({arguments})", node

    def _title(self, call: TapeCall) -> str:
        title = f"#{call.index} {call.name}"
        if call.parameter is not None:
            title += f" parameter={call.parameter}"
        if call.source is not None:
            title += f" at {call.source}"
        return title

    def structure(self) -> list[StructureKey]:
        """The key of each node of the tape, in the order of the engine's walk, and of its end.

        A lifted tensor is described where it is first used, and a value is named after its node, so that tapes share
        their keys as far as they agree. Of the order in which nodes run it says what users' code can see.
        """
        values: dict[fx.Node, Argument] = {}
        parts: dict[int, dict[fx.Node, CallPart]] = {}
        tensors: dict[fx.Node, LiftedTensor] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = lifted = node.meta["lifted"]
                if lifted.kind == "input":
                    tensors[node] = self.inputs[lifted.index]
            elif node.target is operator.getitem:  # in whatever order they are taken
                source, edge = node.args
                whole = values[source]
                assert isinstance(whole, Value)
                values[node] = Value(whole.call, whole.number, edge)
            elif node.op == "output":
                output, returned = node, Returned(tuple(argument_of(each, values) for each in node.args[0]))
            else:
                of_call = parts.setdefault(node.meta["call"], {})
                values[node] = result = Value(node.meta["call"], len(of_call))
                arguments = tuple([argument_of(each, values) for each in node.args])
                of_call[node] = CallPart(result, target_name(node), arguments)

        def key(index: int, *begin: str | Part) -> StructureKey:
            key = list(begin)
            for node, part in parts.get(index, {}).items():
                key.append(part)
                key.extend(first_used(node))
            return tuple(key)

        def first_used(node: fx.Node) -> list[LiftedTensor]:
            return [tensors.pop(source) for source in node.all_input_nodes if source in tensors]

        root, *others = self.calls
        keys = [key(0, root.name, Accumulates(self.accumulates)), *(key(call.index, call.name) for call in others)]
        unused = tensors.values()  # of a leaf whose .grad another thread took away after the walk
        return [*keys, ("end", returned, *first_used(output), *self._seen_order(), *unused)]

    def _seen_order(self) -> list[RunOrder]:
        """Return the order of nodes with users' code or a write to a leaf, if the tape has users' code. Empty for the
        walk's."""
        if not self.runs_users_code:
            return []
        shows = {
            node.meta["call"]
            for node in self.graph.nodes
            if node.target in USERS_CODE or node.target is accumulate_grad
        }
        seen = [index for index in self.order if index in shows]
        return [] if seen == sorted(seen) else [RunOrder(tuple(seen))]

    def to_networkx(self) -> nx.DiGraph:
        """The tape as a directed graph: nodes are indices into ``calls``; edges go along the flow of gradients.

        Node attributes: ``name``, ``sequence``, ``parameter``, ``source``.
        """
        result = nx.DiGraph()
        for call in self.calls:
            result.add_node(
                call.index, name=call.name, sequence=call.sequence, parameter=call.parameter, source=call.source
            )
        for after, nodes in self.by_call().items():
            sources = {
                source.meta.get("call")
                for node in nodes
                if PART_OF_SUM not in node.meta
                for source in (terms(node) if node.target is sum_gradients else node.all_input_nodes)
            }
            result.add_edges_from((before, after) for before in sources - {None, after})
        return result


def terms(total: fx.Node) -> list[fx.Node]:
    """Return the gradients that a sum adds up, those of its parts included."""
    found: list[fx.Node] = []
    while True:
        first, *others = total.all_input_nodes
        found += reversed(others)
        if PART_OF_SUM not in first.meta:
            return [first, *reversed(found)]
        total = first


def target_name(node: fx.Node) -> str:
    """Return the name of a call in the text form."""
    if isinstance(node.target, OpaqueOp):
        return repr(node.target)
    return str(getattr(node.target, "__name__", node.target))
