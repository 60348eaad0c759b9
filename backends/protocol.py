"""What a backend is: something that makes a callable of an ATen graph. A backend knows FX graphs and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

Compiled = Callable[[list[Any]], Sequence[Any]]
"""Takes its arguments in a list and empties it, so that each is freed after its last use; gives the outputs.

One that cannot do that says so in an attribute ``keeps_inputs``: if it fails, its region can then be run another way.
"""


class Backend(Protocol):
    """A way to run a region."""

    name: str
    bitwise: bool
    """Whether what it computes is, on CPU, bit for bit what the graph's operators compute one by one."""

    def decompositions(self) -> Mapping[Any, Callable[..., Any]] | None:
        """The decompositions that the ATen graph should be traced with; None for none."""

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        """Make a callable of a functional ATen graph.

        Args:
            graph_module: its placeholders are tensors, its output is a list of tensors and None.
            example_inputs: fake tensors with the shapes, strides, dtypes and devices of the inputs.
        """
