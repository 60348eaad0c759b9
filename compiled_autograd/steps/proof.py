"""How far a compiled region has proved itself: which of its forms have run beside the real calls, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..backends.protocol import PROVING_RUNS

PROVING_SIZES = 3
"""Where sizes are symbols: the number of sets of them, beside the first, that are compared too."""
MAX_WEAK = 8
"""The number of runs that show little, since a gradient was zero or not finite, before such runs count all the same."""
Sizes = tuple[int, ...]
"""The values of the symbols that something was compiled with."""


@dataclass(slots=True)
class Proof:
    """What was shown of one compiled region, and what is still to be.

    Attributes:
        left: by form, how many runs are still to be compared.
        sizes: the sets of sizes that were compared.
        weak: how many runs have shown little.
        unjudged: how many runs since the last that was compared could not be compared.
        unfit: how many of a form that had proved itself could not, by sizes.
        settled: nothing more is to be shown: the next run need not ask.
        refuted: no form of it is right, or could be compared: the region's calls run one by one.
        dropped: forms that were found to be wrong.
        noise: by the names of results that float64 has shown to be zero but for rounding, how large that may make them,
            by the largest value beside them.
        overwritten: arguments that the region's own calls write into: where there are some, both ways run on copies.
        draws: whether the region draws random numbers; None as long as nobody has asked.
        held: small results of the last run that was compared, and copies of them: no later run may write there.
    """

    left: dict[str, int] = field(default_factory=dict)
    sizes: set[Sizes] = field(default_factory=set)
    weak: int = 0
    unjudged: int = 0
    unfit: dict[Sizes | None, int] = field(default_factory=dict)
    settled: bool = False
    refuted: bool = False
    dropped: tuple[str, ...] = ()
    noise: dict[str, float] = field(default_factory=dict)
    overwritten: frozenset[int] = frozenset()
    draws: bool | None = None
    held: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def due(self, form: str, runs: int, sizes: Sizes | None, final: bool = True) -> bool:
        """Whether the next run is to be compared.

        Args:
            form: what it will execute.
            runs: how many of such are compared.
            sizes: where some are symbols, those at hand; None where all are numbers.
            final: no other form will take over from this one by itself; where one may, nothing is settled.
        """
        if self.left.setdefault(form, runs) > 0:
            return True
        if sizes is not None and len(self.sizes) <= PROVING_SIZES:
            return sizes not in self.sizes
        self.settled = final
        self.held.clear()
        return False

    def waits(self) -> bool:
        """Whether runs have shown little, and one more such is not to count yet."""
        return 0 < self.weak < MAX_WEAK

    def is_given_up(self, form: str, sizes: Sizes | None) -> bool:
        """Whether one more run that could not be compared is one too many. Never of a form that has proved itself."""
        if self.left.get(form) == 0:
            self.unfit[sizes] = self.unfit.get(sizes, 0) + 1
            return False
        self.unjudged += 1
        return self.unjudged >= MAX_WEAK

    def fits(self, form: str, sizes: Sizes | None) -> bool:
        """Whether it is worth a try to compare, as it no more is of some sizes where runs of this form did not fit."""
        return self.left.get(form) != 0 or self.unfit.get(sizes, 0) < MAX_WEAK

    def shown(self, form: str, sizes: Sizes | None, telling: bool) -> None:
        """A run of ``form`` was compared, and nothing found. One that is not ``telling`` counts only after many."""
        self.unjudged = 0
        if not telling and self.weak < MAX_WEAK:
            self.weak += 1
            return
        self.left[form] = max(0, self.left.get(form, PROVING_RUNS) - 1)
        if sizes is not None:
            self.sizes.add(sizes)
