"""Writes into a part of a complex tensor, kept from Inductor's pass that makes them writes in place.

That pass turns a scatter into a view and a ``copy_`` into the view (``_decompose_scatter_mutating`` in
``torch/_inductor/fx_passes/reinplace.py``, 2.11 to 2.15). For a complex tensor both are calls of ATen. Then nothing
orders readers of the tensor itself after the ``copy_``: the scheduler knows a write by the name of the written tensor,
which is the view's. An ``index_put`` becomes an in-place one, before 2.15 also into a tensor of which its values are a
view. So here such a scatter is an operator of another name, which does the same and is left unchanged.
"""

from __future__ import annotations

import torch
from torch import fx

_LIBRARY = torch.library.Library("compiled_autograd", "FRAGMENT")


def _under_another_name(scatter: torch._ops.OpOverload) -> torch._ops.OpOverload:
    name = scatter._schema.name.removeprefix("aten::")
    _LIBRARY.define(str(scatter._schema).removeprefix("aten::"))
    _LIBRARY.impl(name, scatter, "CompositeExplicitAutograd")
    return getattr(torch.ops.compiled_autograd, name).default


_SCATTERS = ("as_strided_scatter", "diagonal_scatter", "index_put", "select_scatter", "slice_scatter")
_INSTEAD = {each: _under_another_name(each) for each in (getattr(torch.ops.aten, name).default for name in _SCATTERS)}


def keep_complex_scatters(graph_module: fx.GraphModule) -> None:
    """Replace the scatters of complex tensors in an ATen graph whose nodes have their values in ``meta``."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in _INSTEAD and node.meta["val"].is_complex():
            node.target = _INSTEAD[node.target]
    graph_module.recompile()
