"""Runs a region operator by operator: the reference that every other backend is compared with."""

from __future__ import annotations

from collections.abc import Sequence

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
        """The graph's own generated code, which frees each value after its last use."""
        graph_module.graph.set_codegen(_BoxedCodeGen())
        graph_module.recompile()
        _LazyGraphModule.force_recompile(graph_module)
        for node in graph_module.graph.nodes:
            node.meta = {}  # fake tensors, and much else that nobody needs any more
        return graph_module.forward
