"""Runs a region operator by operator: the reference that every other backend is compared with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import fx

# Private in torch 2.13: modules whose code is made when it is asked for, and the boxed calling convention of that code.
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen

from .protocol import Compiled


class EagerBackend:
    """Bitwise equal to the eager engine on CPU: the same operators, in the same order, on the same values."""

    name = "eager"
    bitwise = True

    def decompositions(self) -> None:
        """None: every operator stays as the engine's functions call it."""

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        """The graph's own generated code, which frees each value after its last use. Of the graph, nothing is kept."""
        graph_module.graph.set_codegen(_BoxedCodeGen())
        graph_module.recompile()
        _LazyGraphModule.force_recompile(graph_module)
        constants = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
        module = SimpleNamespace(**{name: getattr(graph_module, name) for name in constants})
        return functools.partial(type(graph_module).forward, module)
