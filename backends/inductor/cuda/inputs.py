"""Inputs of a region that runs as CUDA graphs: some stay at their addresses, and others are copied in."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .capture import Device

WINDOW = 16
"""Number of calls without a replay whose addresses show which inputs stay."""
ENOUGH = 64
"""Number of replays meanwhile from which nothing is changed."""
MAX_COPIED = 32 << 20
"""Bytes that are copied in at a call, at most, which takes a GPU ten or twenty microseconds. Where more moves, no graph
runs but where all lies where it lay."""
HERE, NUMBER, ELSEWHERE = "here", "number", "elsewhere"


class Inputs:
    """Facts about a region's inputs.

    Attributes:
        copied: the indices of inputs that are copied into memory of their own before a graph runs.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.copied: tuple[int, ...] = ()
        self._kinds: list[str] = []
        self._lay: deque[tuple[int, ...]] = deque(maxlen=WINDOW)
        self._replays = 0
        self._buffers: dict[int, dict[int, torch.Tensor]] = {}  # by stream

    def can_be_replayed(self, arguments: Sequence[Any]) -> bool:
        """Return whether all inputs are on the device, or are numbers."""
        self._kinds = self._kinds or list(map(self._kind, arguments))
        return ELSEWHERE not in self._kinds

    def key(self, arguments: Sequence[Any]) -> Hashable:
        """Return the parts of a call that a graph contains: addresses, the stream, and numbers, which are read here."""
        pairs = zip(self._kinds, arguments, strict=True)
        parts: list[Any] = [each.data_ptr() if kind is HERE else _number(each) for kind, each in pairs]
        for index in self.copied:
            parts[index] = None
        parts.append(self.device.stream())
        return tuple(parts)

    def watch(self, arguments: Sequence[Any], was_replayed: bool) -> bool:
        """Note where those of a call lay that was no replay. Whether some are copied from now on that were not.

        An input that stays has as few addresses as any; several, where several regions share their code.
        """
        if was_replayed:
            self._replays += 1
            return False
        here = [index for index, kind in enumerate(self._kinds) if kind is HERE]
        self._lay.append(tuple([arguments[index].data_ptr() for index in here]))
        if len(self._lay) < WINDOW:
            return False
        places = [len({*column}) for column in zip(*self._lay, strict=True)]
        self._lay.clear()
        enough, self._replays = self._replays >= ENOUGH, 0
        least = min(places, default=0)
        copied = {*self.copied, *(index for index, count in zip(here, places, strict=True) if count > least)}
        if enough or copied == {*self.copied} or sum(arguments[index].nbytes for index in copied) > MAX_COPIED:
            return False
        self.copied = tuple(sorted(copied))
        self._buffers.clear()
        return True

    def placed(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the inputs for a capture: memory of our own replaces inputs that are copied."""
        placed = list(arguments)
        if self.copied:
            buffers = self._buffers.get(self.device.stream())
            if buffers is None:
                buffers = {index: _like(arguments[index]) for index in self.copied}
                self._buffers[self.device.stream()] = buffers
            for index, buffer in buffers.items():
                placed[index] = buffer
        return placed

    def copy_in(self, arguments: Sequence[Any]) -> None:
        """Copy what a graph has memory for."""
        if self.copied:
            buffers = self._buffers[self.device.stream()]
            copy_all([*buffers.values()], [arguments[index] for index in buffers])

    def _kind(self, argument: Any) -> str:
        if not isinstance(argument, torch.Tensor):
            return NUMBER if isinstance(argument, (int, float)) else ELSEWHERE
        if argument.device.type == "cpu" and argument.dim() == 0:
            return NUMBER
        here = argument.device.type == self.device.kind and argument.device.index in (None, self.device.index)
        return HERE if here and argument.layout is torch.strided else ELSEWHERE


def _number(argument: Any) -> Hashable:
    """Return a number as part of a key: equal keys are equal in every bit. No NaN equals another."""
    value = argument.item() if isinstance(argument, torch.Tensor) else argument
    return value if value and not isinstance(value, complex) else repr(value)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def copy_all(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy tensors of the same sizes and strides: those of a dtype in one kernel, where they are dense."""
    groups: dict[torch.dtype | None, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for one, other in zip(to, source, strict=True):
        if 0 in one.stride():
            one, other = _each_once(one), _each_once(other)
        group = groups.setdefault(one.dtype if _is_dense(one) and one.stride() == other.stride() else None, ([], []))
        group[0].append(one)
        group[1].append(other)
    for pair in groups.values():
        torch._foreach_copy_(*pair)


_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of expanded dimensions, which share memory and cannot be written at once."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
