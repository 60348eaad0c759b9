"""Runs a region operator by operator: the reference that every other backend is compared with."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

# Private in torch 2.13: modules whose code is made when it is asked for, and the boxed calling convention of that code.
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen

from .artifacts import (
    ArtifactBackend,
    CannotStoreError,
    Stored,
    dotted_names,
    link,
    names_in,
    reference,
    tensors_from_bytes,
    tensors_to_bytes,
)
from .parsing import parsed
from .protocol import Compiled


class EagerBackend(ArtifactBackend):
    """Bitwise equal to the eager engine on CPU: the same operators, in the same order, on the same values."""

    name = "eager"
    bitwise = True
    allocates = True

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        """The graph's own generated code, which frees each value after its last use."""
        graph_module.graph.set_codegen(_BoxedCodeGen())
        for node in graph_module.graph.nodes:
            if node.type is not None:
                node.type = None  # else the code has annotations, with types that only this process may know
        graph_module.recompile()
        _LazyGraphModule.force_recompile(graph_module)
        for node in graph_module.graph.nodes:
            node.meta = {}  # fake tensors, and much else that nobody needs any more
        return graph_module.forward

    def stored(self, compiled: Any) -> Stored:
        """The generated code and the graph's constants."""
        graph_module = getattr(compiled, "__self__", None)
        if not isinstance(graph_module, fx.GraphModule):
            raise CannotStoreError(f"it is of type {type(compiled).__name__}, without a graph (or was loaded itself)")
        graph = graph_module.graph
        for node in graph.find_nodes(op="call_module"):
            raise CannotStoreError(f"its graph calls a module, {node.target}")
        constants = [str(node.target) for node in graph.find_nodes(op="get_attr")]
        code = graph.python_code("self")
        tree = parsed(code.src)
        used = names_in(tree) & code.globals.keys()
        return Stored(
            source=code.src,
            names={name: reference(name, code.globals[name]) for name in sorted(used)},
            needs=dotted_names([tree], used),
            constants=tensors_to_bytes({name: getattr(graph_module, name, None) for name in constants}),
        )

    def loaded(self, stored: Stored) -> Compiled:
        """The function of the code."""
        forward = link(stored, {})["forward"]
        return types.MethodType(forward, types.SimpleNamespace(**tensors_from_bytes(stored.constants)))

    def environment(self) -> dict[str, str]:
        """Return nothing: calls of operators are the same on every machine."""
        return {}
