"""Progress of a compiled region's proof: which of its forms have run beside the real calls, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..backends.protocol import PROVING_RUNS

PROVING_SIZES = 3
"""Number of sets of sizes, beside the first, that are compared if sizes are symbols."""
MAX_WEAK = 8
"""Number of uncounted runs with a gradient that is zero or not finite; further such runs count."""
Sizes = tuple[int, ...]
"""The values of the symbols of compiled code."""


@dataclass(slots=True)
class Proof:
    """The state of the comparisons of one compiled region.

    Attributes:
        left: by form, how many runs are still to be compared.
        sizes: the sets of sizes that were compared.
        weak: the number of runs that have shown little.
        unjudged: the number of runs that could not be compared, since the last comparison.
        unfit: by sizes, the number of such runs of a form that had proved itself.
        settled: no more comparisons are needed, so the next run need not ask.
        refuted: no form is right, or none could be compared, and the region's calls run one by one.
        dropped: forms that were found to be wrong.
        noise: for results that float64 has shown to be zero but for rounding, by name: the limit of the rounding,
            relative to the largest value beside them.
        overwritten: arguments that the region's own calls write into: where there are some, both ways run on copies.
        draws: whether the region draws random numbers; None before the first request.
        held: small results of the last compared run, and copies of them: no later run may write there.
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
        """Return whether the next run has to be compared.

        Args:
            form: the form that the run will execute.
            runs: the number of runs of a form that are compared.
            sizes: the values of symbolic sizes in this run; None if all sizes are numbers.
            final: no other form will replace this one by itself. Otherwise nothing is settled.
        """
        if self.left.setdefault(form, runs) > 0:
            return True
        if sizes is not None and len(self.sizes) <= PROVING_SIZES:
            return sizes not in self.sizes
        self.settled = final
        self.held.clear()
        return False

    def waits(self) -> bool:
        """Return whether runs have shown little, and one more such run must not count yet."""
        return 0 < self.weak < MAX_WEAK

    def is_given_up(self, form: str, sizes: Sizes | None) -> bool:
        """Count a run that could not be compared, and return whether to give the form up. False for a form that proved
        itself."""
        if self.left.get(form) == 0:
            self.unfit[sizes] = self.unfit.get(sizes, 0) + 1
            return False
        self.unjudged += 1
        return self.unjudged >= MAX_WEAK

    def fits(self, form: str, sizes: Sizes | None) -> bool:
        """Return whether a comparison is worth a try: False for sizes at which runs of this form did not fit into
        memory."""
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
