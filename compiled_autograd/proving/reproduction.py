"""Writes a script that shows a difference: the ATen graph that was compiled, on made-up inputs of the same kinds."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..process_state import PROCESS

_MAX_REPRODUCTIONS = 20
"""The largest number of reproductions that a process writes."""
_numbers = PROCESS.register(itertools.count())
_log = logging.getLogger(__name__)

_SCRIPT = '''\
"""{where}:
{difference}.

The graph below was compiled by the backend {backend!r}, torch {version}. The inputs are made up, of the same sizes,
strides, offsets and dtypes. Prints how far the compiled graph is from its operators run one by one, run by run.
"""

import torch
from torch import device, fx
from torch.fx.experimental.proxy_tensor import make_fx

from backends import get_backend


class Region(torch.nn.Module):
{graph}


def made(shape, stride, offset, dtype, where, conj, neg):
    """Numbers from 0 to 1 (0 or 1 where the dtype has no others), in a piece of memory that ends where they do."""
    elements = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if 0 not in shape else 0
    memory = torch.rand(max(elements, 0), dtype=torch.float64)
    memory = memory.to(dtype) if dtype.is_floating_point or dtype.is_complex else (memory > 0.5).to(dtype)
    value = memory.to(where).as_strided(shape, stride, offset if elements else 0)
    value = value.conj() if conj else value
    return value._neg_view() if neg else value


torch.manual_seed(0)
inputs = [
{inputs}
]
region = Region()


def traced():
    """The same graph: tracing adds detaches, and forgets the names of the inputs, which Inductor's order depends on."""
    graph_module = make_fx(lambda *given: region(*given), tracing_mode="fake")(*inputs)
    names = Region.forward.__code__.co_varnames[1:]
    for node, name in zip(graph_module.graph.find_nodes(op="placeholder"), names):
        node.name = node.target = name
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


graph_module = traced()
want = graph_module(*inputs)
if __name__ == "__main__":
    examples = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    compiled = get_backend({backend!r}).compile(graph_module, examples)
    for run in range(4):
        found = compiled(list(inputs))
        pairs = [(a, b) for a, b in zip(want, found) if a is not None and a.numel()]
        print(run, *("%.3g" % float((a.cdouble() - b.cdouble()).abs().max()) for a, b in pairs))
'''


def reproduction(graph: str, backend: str, arguments: Sequence[Any], where: str, difference: str) -> str:
    """Write the script into a new folder that only this user can enter.

    Args:
        graph: a function ``forward(self, ...)`` as text.
        backend: the name of what compiled it.
        arguments: what it was given; nothing of their content is written.
        where: which region of which tape it is.
        difference: what was found.

    Returns:
        Where the script is, in words; or why there is none.
    """
    if next(_numbers) >= _MAX_REPRODUCTIONS:
        return f"{_MAX_REPRODUCTIONS} reproductions were written before, and no more are"
    inputs = "".join(f"    {_described(value)},\n" for value in arguments)
    body = "".join(f"    {line}\n" if line.strip() else "\n" for line in graph.strip("\n").splitlines())
    text = _SCRIPT.format(
        where=_safe(where),
        difference=_safe(difference),
        backend=backend,
        version=torch.__version__,
        graph=body.rstrip("\n"),
        inputs=inputs.rstrip("\n"),
    )
    try:
        path = Path(tempfile.mkdtemp(prefix="compiled-autograd-")) / "mismatch.py"
        path.write_text(text)
    except OSError as error:
        _log.debug("no reproduction: %s", error)
        return f"a reproduction could not be written ({error})"
    return f"a reproduction is {path}"


def _safe(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    kind = (str(value.dtype), f"{str(value.device)!r}", value.is_conj(), value.is_neg())
    shape, stride = tuple(value.shape), tuple(value.stride())
    return f"made({shape}, {stride}, {value.storage_offset()}, {', '.join(map(str, kind))})"
