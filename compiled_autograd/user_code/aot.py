"""The backward of a forward that ``torch.compile`` compiled: its graph, to be inlined into the region around it.

The inlined graph fuses with hooks, accumulation and its neighbours. The attributes of AOTAutograd that are read here
are private (``torch/_functorch/_aot_autograd/runtime_wrappers.py``, 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..torch_api.version_differences import aot_epilogue, aot_prologue, has_aot_prologue
from .functions import checked, materialised
from .hooks import Grad
from .inlined import InlinedBackward


class AOTBackward(InlinedBackward):
    """The backward of one compiled forward."""

    def __init__(self, function: Any, graph_module: fx.GraphModule) -> None:
        super().__init__(f"AOTBackward{function._aot_id}")
        self.function = function
        self.graph_module = graph_module

    def trace(
        self,
        ctx: Any,
        saved: Sequence[Grad],
        expected: Sequence[bool],
        defined: Sequence[bool | torch.layout],
        *grads: Grad,
    ) -> list[Grad]:
        """Run its graph, operator by operator. Of ``ctx`` nothing is used but what all calls have in common."""
        tangents = materialised(type(ctx), ctx, defined, grads)
        with torch._C._DisableAutocast():  # the graph has its casts in it
            arguments = aot_prologue(self.function, saved, tangents)
            results = aot_epilogue(self.function, _Reshaping(self.graph_module).run(*arguments))
        return checked(self.__name__, tuple(results), expected)


class _Reshaping(fx.Interpreter):
    """Runs the graph, which was made for gradients with the strides that AOTAutograd guessed. The forward may give
    others."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A node of the graph."""
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def aot_backward(ctx: Any) -> AOTBackward | None:
    """The backward to inline for a function's ``ctx``; None for others, and where it needs more than tensors."""
    function = type(ctx)._forward_cls
    if getattr(function, "_aot_id", None) is None or not has_aot_prologue(function):
        return None
    metadata = function.metadata
    # A backward that is differentiated again has no symints: PyTorch refuses it, and says so when it runs.
    if getattr(ctx, "symints", True) or function.maybe_subclass_metadata is not None:
        return None
    if metadata.is_rng_op_functionalized or metadata.num_graphsafe_rng_states or metadata.num_backward_tokens:
        return None
    from torch._dynamo.compiled_autograd import extract_bw_module

    graph_module = extract_bw_module(function)
    if not isinstance(graph_module, fx.GraphModule) or graph_module.graph.find_nodes(op="call_module"):
        return None
    return AOTBackward(function, graph_module)
