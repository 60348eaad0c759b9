"""Stands where a CUDA device does, on the CPU: what is captured runs when it is replayed, on the memory that it had."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from backends.inductor.cuda.capture import CannotCaptureError, Device


class StandIn(Device):
    """A device whose graphs are Python.

    Attributes:
        number: of the current stream.
        refuses: why nothing can be captured; empty where it can.
        captured: how many graphs were.
        replaying: a graph runs.
    """

    kind = "cpu"

    def __init__(self) -> None:
        super().__init__(0)
        self.number, self.refuses, self.captured = 0, "", 0
        self.replaying = self.somebody_captures = False

    def stream(self) -> int:
        return self.number

    def is_capturing(self) -> bool:
        return self.somebody_captures

    def capture(self, run: Callable[[], None]) -> Any:
        if self.refuses:
            raise CannotCaptureError(self.refuses)
        run()  # how results lie is seen
        graph = _Graph(self, run)
        graph.spoil()  # but nothing has been computed
        self.captured += 1
        return graph


class _Graph:
    def __init__(self, device: StandIn, run: Callable[[], None]) -> None:
        self.device, self.run = device, run
        names = inspect.getclosurevars(run).nonlocals
        self.results, self.through = names["memory"], names["through"]
        cells = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
        cells["arguments"].cell_contents = list(names["arguments"])  # whoever called empties the list

    def spoil(self) -> None:
        for each in self.results:
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                each.fill_(torch.nan)

    def replay(self) -> None:
        through = list(self.through)
        self.device.replaying = True
        self.run()
        self.device.replaying = False
        self.through[:] = through  # it was written down once more
