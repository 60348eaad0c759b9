"""Anomaly mode in a backward: an error names the node that gave a NaN, and a warning the place of its forward.

The rules are those of ``Engine::evaluate_function`` (``torch/csrc/autograd/engine.cpp``, 2.13), which looks at a node's
results after its post-hooks, and of ``PyAnomalyMetadata::print_stack``
(``torch/csrc/autograd/python_anomaly_mode.cpp``).
"""

from __future__ import annotations

from typing import Any

import torch

from .. import ir
from ..errors import warn_user

_WHOLE_NAMES = {"CopySlices": "torch::autograd::CopySlices"}


def looked_for() -> bool:
    """Return whether anomaly mode is on, and checks for NaNs."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def with_nan_checks(tape: ir.TapeGraph) -> ir.TapeGraph:
    """The tape graph with a check of what each node of the tape gives in the end."""
    tape = tape.copy(tape.calls)
    last = {}
    for node in tape.graph.nodes:
        if ir.hook_kind(node.target) is ir.post_hook or ir.is_validation(node):
            last[node.meta["call"]] = node
    for call, node in last.items():
        with tape.graph.inserting_after(node):
            tape.graph.call_function(ir.check_nan, (node, call)).meta["call"] = call
    return tape


def in_the_engines_words(error: ir.NaNFoundError, name: str) -> RuntimeError:
    """Return the error that the engine would raise.

    Args:
        name: of the node.
    """
    name = _WHOLE_NAMES.get(name, name)
    return RuntimeError(f"Function '{name}' returned nan values in its {error.index}th output.")


def tell_of_forward(node: Any) -> None:
    """Tell where the forward of a node was called whose backward failed, as far as anomaly mode recorded it; then that
    of the node in whose backward it was made, and so on."""
    words = "Error detected in {}. Traceback of forward call that caused the error:\n{}"
    while node is not None:
        name, stack = type(node).name(node), node.metadata.get("traceback_")
        if stack is None:
            warn_user(
                f"Error detected in {name}. No forward pass information available. Enable detect anomaly during "
                "forward pass for more information."
            )
        else:
            warn_user(words.format(name, "".join(stack)))
        words = (
            "\n\nPrevious calculation was induced by {}. Traceback of forward call that induced the previous "
            "calculation:\n{}"
        )
        node = node.metadata.get("parent_")
