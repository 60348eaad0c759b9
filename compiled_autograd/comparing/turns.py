"""Turns: which side runs the next step, and what the times of both say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_CALM_STEPS, _CALM_SECONDS = 8, 0.5
"""Consecutive steps in which nothing is compiled, before the turns begin: as many, and as long."""
_BLOCK_SECONDS = 0.3
_BLOCK_STEPS = 3
"""A block has at least as many steps and seconds. The first step is not counted: caches are the other side's then."""
_SURE = 0.98
"""The level of the interval that ends a comparison early: it is looked at again and again."""
_LEVEL = 0.95
_LITTLE = 0.97
"""No gain is worth looking for if all of the interval lies above this ratio."""


def interval(ratios: Sequence[float], level: float) -> tuple[float, float]:
    """Return a rank interval of the median, whatever the distribution; unbounded where there are too few."""
    ordered, count = sorted(ratios), len(ratios)
    tail, outside = 0.0, (1 - level) / 2
    for rank in range(count // 2 + 1):
        tail += math.comb(count, rank) / 2**count
        if tail > outside:
            return (ordered[rank - 1], ordered[count - rank]) if rank else (0.0, math.inf)
    return 0.0, math.inf


@dataclass(slots=True)
class Block:
    """Consecutive steps of one side.

    Attributes:
        ours: whether their backwards ran in the session.
        steps, backwards: seconds of each step, and of the backwards in it.
    """

    ours: bool
    steps: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """The lower quartile of the steps in seconds, without the first one. Other programs on the machine, evaluations
        and checkpoints only make steps longer: beside ten programs on two cores a median was seven times as long."""
        return float(np.percentile(self.steps[1:], 25))

    @property
    def backward(self) -> float:
        """The lower quartile of the seconds of backward in a step."""
        return float(np.percentile(self.backwards[1:], 25))


class Turns:
    """Decides which side runs a step: ours until nothing is compiled any more, then blocks of eager, ours, ours, eager.

    Args:
        is_calm: asked after each step of ours before the blocks; False while something is compiled.
        limit: seconds after which the comparison is over in any case.
        is_compiling: asked after each step of a block. If something new is compiled beside the program, both sides run
            on eager, and the blocks begin again once that is over.

    Attributes:
        ours: whether the next step is to run in the session.
        spent: seconds of all steps so far.
        pairs: neighbouring blocks, (eager, ours).
    """

    def __init__(
        self, is_calm: Callable[[], bool], limit: float, is_compiling: Callable[[], bool] = lambda: False
    ) -> None:
        self.ours = True
        self.spent, self.count = 0.0, 0
        self.pairs: list[tuple[Block, Block]] = []
        self._is_calm, self._limit, self._is_compiling = is_calm, limit, is_compiling
        self._calm: list[float] = []
        self._open: list[Block] = []

    @property
    def is_settling(self) -> bool:
        """True if the turns have not begun yet."""
        return not self._open

    def add(self, step: float, backward: float) -> None:
        """Take the seconds of the step that ran, and of its backwards."""
        self.spent += step
        self.count += 1
        if not self.is_settling and self._is_compiling():
            self.ours, self._open, self._calm = True, [], []
        if self.is_settling:
            self._calm = [*self._calm, step] if self._is_calm() else []
            is_calm = len(self._calm) >= _CALM_STEPS and sum(self._calm) >= _CALM_SECONDS
            if is_calm or (self._calm and self.spent > self._limit / 2):
                self.ours = False
                self._open = [Block(self.ours)]
            return
        block = self._open[-1]
        block.steps.append(step)
        block.backwards.append(backward)
        if len(block.steps) < _BLOCK_STEPS or sum(block.steps) < _BLOCK_SECONDS:
            return
        if len(self._open) == 2:
            first, second = self._open
            self.pairs.append((second, first) if first.ours else (first, second))
            self._open = []
        else:
            self.ours = not self.ours
        self._open.append(Block(self.ours))

    def drop_block(self) -> None:
        """Forget the steps of the block that is not over: something else came between."""
        if not self.is_settling:
            self._open[-1] = Block(self.ours)

    @property
    def is_over(self) -> bool:
        """True if the answer is sure, or the time is up."""
        if self.spent >= self._limit:
            return True
        low, high = interval(self.step_ratios(), _SURE)
        return high < 1 or low > _LITTLE

    def step_ratios(self) -> list[float]:
        """The time of a step by eager's, for each pair."""
        return [ours.step / max(eager.step, 1e-9) for eager, ours in self.pairs]

    def step_interval(self) -> tuple[float, float]:
        """The interval of the median ratio of steps."""
        return interval(self.step_ratios(), _LEVEL)

    def backward_ratio(self) -> float | None:
        """The median ratio of the backwards; None where none were timed."""
        ratios = [ours.backward / eager.backward for eager, ours in self.pairs if eager.backward > 0]
        return float(np.median(ratios)) if ratios else None
