"""The answer of a comparison, in figures and as a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..shadow_cache.amounts import plural, seconds


@dataclass(frozen=True)
class Comparison:
    """The answer to the question whether compiled backwards pay for a program.

    ``str`` of it is one sentence for people.

    Attributes:
        worth_it: True if steps are faster than eager's, beyond the noise.
        step_ratio: the time of a step by eager's; below 1 is faster. None if it could not be measured.
        step_interval: the ends of its 95 % interval. None if it could not be measured.
        backward_ratio: the time of the backwards of a step by eager's. None on CUDA, and if it could not be measured.
        compile_seconds: seconds that compiling took.
        beside: True if that was on another core (``on_miss="background"``), so that no step waited.
        stored: True if a second run of the program loads what was compiled.
        paid_back_after: the number of steps after which the seconds saved are those of compiling. None if steps are
            not faster.
        reason: why it is not worth it; empty if it is.
        hints: what else would help, a sentence each.
    """

    worth_it: bool
    step_ratio: float | None = None
    step_interval: tuple[float, float] | None = None
    backward_ratio: float | None = None
    compile_seconds: float = 0.0
    beside: bool = True
    stored: bool = False
    paid_back_after: int | None = None
    reason: str = ""
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.step_ratio is None or self.step_interval is None:
            return f"worth it: no answer: {self.reason}."
        low, high = self.step_interval
        end = "just below 1" if self.worth_it and f"{high:.2f}" == "1.00" else f"{high:.2f}"
        sure = f"{low:.2f} to {end}" if high < math.inf else "too few steps for an interval"
        figures = f"Steps {self.step_ratio:.2f} of eager's ({sure})"
        if self.backward_ratio is not None:
            figures += f", backward {self.backward_ratio:.2f}"
        if not self.worth_it:
            return f"worth it: no. {figures}: {self.reason}."
        return f"worth it: yes. {figures}; {self._cost()}{'; a second run starts compiled' if self.stored else ''}."

    def _cost(self) -> str:
        if not self.compile_seconds:
            return "nothing had to be compiled"
        amount = f"{self.compile_seconds:.{0 if self.compile_seconds >= 10 else 1}f}"
        where = "on another core" if self.beside else "while steps waited"
        text = f"{amount} s of compiling {where}"
        if self.paid_back_after is None or self.step_ratio is None:
            return text
        training = self.compile_seconds * self.step_ratio / (1 - self.step_ratio)
        return f"{text}, paid back after {plural(self.paid_back_after, 'step')} or {seconds(training)} of training"
