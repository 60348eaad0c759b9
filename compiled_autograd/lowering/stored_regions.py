"""Compiled regions: made in this process, or loaded from the store on disk; and ATen graphs as text."""

from __future__ import annotations

import math
import operator
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import _get_qualified_name
from torch.overrides import TorchFunctionMode

from ..backends.protocol import Backend, Compiled, another
from ..process_state import PROCESS, WeaklyReferred, free_in_child
from ..steps.steps import RegionRecord
from ..torch_api.fx_graph import Graph

_WRITING = free_in_child(threading.RLock())  # milliseconds


class _Graph(Graph):
    """A graph whose text only one thread at a time writes, also at the first call: FX changes the nodes meanwhile
    (``override_node_repr`` in ``torch/fx/graph.py``, 2.13), so that they give the names of the text."""

    def python_code(self, *how: Any, **named: Any) -> Any:
        """The graph as code of Python."""
        with _WRITING:
            return super().python_code(*how, **named)


@dataclass(slots=True, eq=False)
class Made(WeaklyReferred):
    """Compiled code of a region.

    Attributes:
        artifact: the bytes that it was loaded from, if another process compiled it for this one, since loaded code
            cannot be saved again. None once storing was tried.
        digest: that of the artifact, once it is stored.
        dropped: forms of the code that were found to be wrong.
        taken_by: the region compilers, of several variants, that have regions with this code.
    """

    call: Compiled
    artifact: bytes | None = None
    digest: str = ""
    dropped: tuple[str, ...] = ()
    taken_by: weakref.WeakKeyDictionary[Any, None] = field(default_factory=weakref.WeakKeyDictionary)


MADE: weakref.WeakValueDictionary[Hashable, Made] = weakref.WeakValueDictionary()
"""Compiled code by backend, state of the process and graph hash, as long as a variant has it. Structures that differ
only in their leaves have equal graphs: with and without a ``.grad`` to add to, as in gradient accumulation."""
PROCESS.register(MADE, reset=MADE.clear)


def made_with(call: Compiled) -> list[tuple[Hashable, Made]]:
    """Return the entries of :data:`MADE` with this code, and their keys, at once: other threads add entries."""
    return [(each.key, made) for each in MADE.valuerefs() if (made := each()) is not None and made.call is call]


def give_no_more(call: Compiled) -> None:
    """Give it to no other region."""
    for like, _ in made_with(call):
        MADE.pop(like, None)


@dataclass(slots=True)
class InMemoryGraph:
    """An ATen graph that was made in this process, its compiled code, and the tape's node of each of its nodes, by
    name."""

    module: fx.GraphModule
    made: Made
    origins: Mapping[str, int] = field(default_factory=dict)

    def graph_module(self) -> fx.GraphModule:
        """The graph."""
        return self.module

    def text(self) -> str:
        """The graph as code of Python."""
        return self.module.graph.python_code("self").src

    def functions(self) -> str:
        """The names of the functions that it calls, in a hundredth of the time of :meth:`text`."""
        targets = {node.target for node in self.module.graph.nodes if node.op == "call_function"}
        return "\n".join(map(_get_qualified_name, targets))


@dataclass(slots=True)
class StoredRegion:
    """A compiled region in the store on disk: how it is fed, and the names of its files there."""

    record: RegionRecord
    artifact: str
    lowered: str
    code: str = ""
    origins: Mapping[str, int] = field(default_factory=dict)

    def graph_module(self) -> fx.GraphModule:
        """The ATen graph, made of its text. Constants in it are empty tensors."""
        return graph_of(self.code)

    def text(self) -> str:
        """The graph as code of Python."""
        return self.code

    functions = text


@dataclass(slots=True)
class StoredRegions:
    """The stored regions of one variant by the region's span, and a function that reads a file of the store."""

    regions: Mapping[tuple[int, int], Sequence[StoredRegion]]
    read: Callable[[str], bytes]
    loaded: dict[str, Compiled] = field(default_factory=dict)

    def load(self, backend: Backend, artifact: str) -> Compiled:
        """An artifact, for one region. Several may have the same, with inputs of other sizes and strides.

        Raises:
            StoreError, ArtifactError: it cannot be read, or not be used.
        """
        if artifact not in self.loaded:
            self.loaded[artifact] = backend.load(self.read(artifact))  # type: ignore[attr-defined]
        return another(self.loaded[artifact])


def graph_of(code: str) -> fx.GraphModule:
    """The graph of a text that :meth:`InMemoryGraph.text` gave."""
    namespace: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    namespace.update({"operator": operator, "_operator": operator, "math": math, "fx_pytree": fx._pytree})
    exec(compile(code, "<an ATen graph>", "exec"), namespace)
    forward, graph, module = namespace["forward"], fx.Graph(), torch.nn.Module()
    tracer = fx.proxy.GraphAppendingTracer(graph)  # fx.symbolic_trace changes nn.Module for all threads meanwhile
    for constant in sorted(set(re.findall(r"\bself\.(\w+)", code))):
        module.register_buffer(constant, torch.empty(0))
    names = forward.__code__.co_varnames[1 : forward.__code__.co_argcount]
    with torch._C._EnableTorchFunction(), _Recording(tracer):  # it is off in the backward of a loss of a subclass
        given = [fx.Proxy(graph.placeholder(name), tracer) for name in names]
        results = forward(_Constants(graph, tracer), *given)
    graph.output(tracer.create_arg(results))
    return fx.GraphModule(module, graph)


class _Recording(TorchFunctionMode):
    """Has calls of operators added to a graph, also those whose arguments are no proxies, as of ``aten.full``."""

    def __init__(self, tracer: fx.proxy.GraphAppendingTracer) -> None:
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            return self._tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Constants:
    """Stands for ``self`` while a graph is made of its text: each attribute is a constant."""

    _graph: fx.Graph
    _tracer: fx.proxy.GraphAppendingTracer

    def __getattr__(self, name: str) -> fx.Proxy:
        return fx.Proxy(self._graph.get_attr(name), self._tracer)


def copy_of(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph without the fake tensors in its nodes, since backends change their graph. A node keeps its node of
    the tape (``meta["call"]``), if known."""
    graph = _Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in graph.nodes:
        node.meta = {"call": node.meta["call"]} if "call" in node.meta else {}
    return _LazyGraphModule(graph_module, graph)
