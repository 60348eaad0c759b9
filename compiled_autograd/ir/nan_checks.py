"""What anomaly mode does in a backward: the node that gave a NaN is named, and where its forward was called is told.

The rules are those of ``Engine::evaluate_function`` (``torch/csrc/autograd/engine.cpp``, 2.13), which looks at whatever
a node gives after its post-hooks, and of ``PyAnomalyMetadata::print_stack``
(``torch/csrc/autograd/python_anomaly_mode.cpp``). In a compiled region the question is one more result: a flag for each
gradient that a node gives. It is read when the region has run, before anything else does.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir

_OURS = "compiled_autograd"
_WHOLE_NAMES = {"CopySlices": "torch::autograd::CopySlices"}
ResultIndex = tuple[int, int]
"""A node of the tape, as an index into ``TapeGraph.calls``, and the number of what it gave."""


def looked_for() -> bool:
    """Whether anomaly mode is on, and checks for NaNs."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def givers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Of a tape graph, the calls that make what the nodes of the tape give in the end, and these nodes."""
    last = {}
    for node in graph.nodes:
        if node.target is ir.post_hook or ir.is_validation(node):
            last[node.meta["call"]] = node
    return {node: call for call, node in last.items()}


class Flags:
    """Within a trace: for each gradient that nodes of the tape give, whether there is a NaN in it.

    Args:
        givers: what :func:`givers` gave.

    Attributes:
        looked_at: where was looked.
        found: for each of them, a boolean tensor of one element.
    """

    def __init__(self, givers: Mapping[fx.Node, int]) -> None:
        self._givers = givers
        self._seen: list[torch.Tensor] = []
        self._ids: set[int] = set()
        self.looked_at: list[ResultIndex] = []
        self.found: list[torch.Tensor] = []

    def look(self, node: fx.Node, given: Any) -> None:
        """A call was traced, and gave this. What several nodes hand on is looked at once."""
        call = self._givers.get(node)
        if call is None:
            return
        for index, value in enumerate(given):
            if isinstance(value, torch.Tensor) and id(value) not in self._ids:
                self._seen.append(value)  # else another one may come to have its id
                self._ids.add(id(value))
                self.looked_at.append((call, index))
                self.found.append(torch.isnan(value).any())


class NaNFoundError(Exception):
    """A node gave a NaN. Within a run only: the user sees the engine's own words."""

    def __init__(self, which: ResultIndex) -> None:
        super().__init__(which)
        self.call, self.index = which


def check(call: int, given: Sequence[Any]) -> None:
    """Look at what a node of the tape gave.

    Raises:
        NaNFoundError: there is a NaN in it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for index, value in enumerate(given):
            if isinstance(value, torch.Tensor) and bool(torch.ops.aten._is_any_true(torch.isnan(value))):
                raise NaNFoundError((call, index))


def in_the_engines_words(error: NaNFoundError, name: str) -> RuntimeError:
    """What the user sees.

    Args:
        name: of the node.
    """
    name = _WHOLE_NAMES.get(name, name)
    return RuntimeError(f"Function '{name}' returned nan values in its {error.index}th output.")


def tell_of_forward(node: Any) -> None:
    """Tell where the forward of a node was called whose backward failed, as far as anomaly mode recorded it."""
    for index, (name, stack) in enumerate(_induced(node)):
        if stack is None:
            _warn(
                f"Error detected in {name}. No forward pass information available. Enable detect anomaly during "
                "forward pass for more information."
            )
        elif index == 0:
            _warn(f"Error detected in {name}. Traceback of forward call that caused the error:\n{''.join(stack)}")
        else:
            _warn(
                f"\n\nPrevious calculation was induced by {name}. Traceback of forward call that induced the previous "
                f"calculation:\n{''.join(stack)}"
            )


def _induced(node: Any) -> Iterator[tuple[str, list[str] | None]]:
    """A node and those in whose backward it was made, with the tracebacks of their forwards."""
    while node is not None:
        metadata = node.metadata
        yield type(node).name(node), metadata.get("traceback_")
        node = metadata.get("parent_")


def _warn(message: str) -> None:
    """Issue a warning for the line that asked the engine, as the engine's own are."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__package__")).partition(".")[0] == _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
