"""Runs a function on fake tensors, and records the operators that it calls as an ATen graph.

The parts and the graph are those of ``make_fx`` (``torch/fx/experimental/proxy_tensor.py``, 2.13), but without
``fx.Tracer.trace``. That function replaces ``__getattr__`` and ``__call__`` of ``torch.nn.Module`` while it runs, to
see modules. There are none here, and changing a class takes time for each of its subclasses: every ``GraphModule`` has
one. In a process with some thousand graphs that alone took four fifths of a trace.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, _MakefxTracer, _set_make_fx_tracer, track_tensor_tree

from ..torch_api.fx_graph import Graph
from ..torch_api.version_differences import decomposing

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def trace(
    function: Callable[..., Sequence[Any]],
    decompositions: Mapping[Any, Callable[..., Any]] | None,
    examples: Sequence[Any],
    names: Sequence[str] | None = None,
) -> fx.GraphModule:
    """The operators that ``function(*examples)`` calls.

    Args:
        function: gives a list of tensors.
        decompositions: operators that are recorded as what these functions call.
        examples: fake tensors, which become the graph's placeholders.
        names: of the placeholders.

    Returns:
        A module whose code is made when it is first asked for.
    """
    making = _MakefxTracer(
        None if decompositions is None else dict(decompositions),
        "real",  # the arguments are fake already
        True,
        False,
        False,
        False,
        True,
        _disable_torch_fn_metadata_mode=True,  # it notes which Python function called an operator: there is none
    )
    with making._init_modes_from_inputs(function, tuple(examples)):
        tracer, mode = making.fx_tracer, making.proxy_mode
        assert isinstance(tracer, PythonKeyTracer) and mode is not None
        tracer.root = torch.nn.Module()
        tracer.graph = Graph(tracer_cls=PythonKeyTracer)
        tracer.tensor_attrs = {}
        names = names or [f"arg{index}_1" for index in range(len(examples))]
        placeholders = [tracer.create_proxy("placeholder", name, (), {}) for name in names]
        track_tensor_tree(list(examples), placeholders, constant=None, tracer=tracer)
        with decomposing(making.decomposition_table), mode, _set_make_fx_tracer(making):
            results = [tracer.unwrap_proxy(result) for result in function(*examples)]
        tracer.create_node("output", "output", (tracer.create_arg(results),), {})
    return _LazyGraphModule(tracer.root, tracer.graph, "region")


@contextlib.contextmanager
def plain_tracing() -> Iterator[None]:
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


def modes_on() -> tuple[int, int]:
    """Return how many modes of PyTorch the thread is in: of operators, and of functions."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
