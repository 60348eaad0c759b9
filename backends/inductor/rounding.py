"""Numbers of 16 bits on CUDA, rounded where eager rounds them.

Fused code keeps what lies between two operators in float32 (torch 2.13). With that a gradient may be finite that
overflows on eager: a ``GradScaler`` then takes steps that it skips there, and scales go another way. Inductor has a
setting that has it round as eager does. Which nodes of a graph are to be rounded is noted when the graph is traced:
what an operator decomposes to is computed in float32 on eager, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from .environment import is_chosen

SETTING = "emulate_precision_casts"
"""The setting of Inductor's."""
_SHORT = (torch.float16, torch.bfloat16)


def noting_where_to_round(examples: Sequence[Any]) -> AbstractContextManager[Any]:
    """For a trace: notes in the nodes of its graph which of them eager rounds.

    Args:
        examples: what the graph is traced with.
    """
    on_cuda = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in examples)
    if not on_cuda or is_chosen(SETTING):
        return contextlib.nullcontext()
    from torch._inductor import config

    return config.patch({SETTING: True})


def rounds(graph_module: fx.GraphModule) -> bool:
    """Return whether a graph has 16-bit numbers, and the user has not set their rounding."""
    if is_chosen(SETTING):
        return False
    values = (node.meta.get("val") for node in graph_module.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.dtype in _SHORT for value in values)
