"""Generated code for a CUDA device whose kernels are launched directly from its second run on.

In the process that has compiled it, Inductor's own objects launch kernels. Each call checks for tuning, profiling and
logging (``CachingAutotuner.run``, torch 2.13), which takes several times as long as the launch itself. Code stored for
other processes has only the launch. Here it runs in this process too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...artifacts import ArtifactError, CannotStoreError
from ...garbage_collection import RARELY
from ...protocol import Compiled
from ...signal_handlers import raise_what_a_handler_raised

GENERATED_CODE, LAUNCHED_DIRECTLY = "generated code", "generated code, launched directly"
"""The forms of a :class:`Direct`."""
Run = Callable[[Compiled, list[Any]], Sequence[Any]]
_log = logging.getLogger(__name__)


class Direct:
    """Calls generated code; from the second run on the same code with other launchers.

    Kernels that are tuned are so at the first run.

    Args:
        compiled: what Inductor made.
        make: makes the other form of it, once it has run. It may raise :class:`CannotStoreError`.

    Attributes:
        direct: the other form; None as long as there is none, and ``why_not`` says why.
    """

    def __init__(self, compiled: Any, make: Callable[[Any], Compiled]) -> None:
        self.compiled = compiled
        self.direct: Compiled | None = None
        self.why_not = "it has not run yet"
        self._make = make
        self._has_run = self._is_settled = self._is_dropped = False

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run it. The arguments are emptied, as :data:`Compiled` has it."""
        return self.run_form(self.form_for(arguments), arguments)

    def form_for(self, arguments: Sequence[Any]) -> str:
        """Return the form of the next call in this thread, and make the other form when it is time."""
        if self._has_run and not self._is_settled:
            self._settle()
        looked_at = self.direct is None or torch.autograd.profiler._is_profiler_enabled  # Inductor tells it of kernels
        return GENERATED_CODE if looked_at else LAUNCHED_DIRECTLY

    def run_form(self, form: str, arguments: list[Any], run: Run | None = None) -> Sequence[Any]:
        """Run one of the forms, whichever is in use, as it is or in another way. The arguments are emptied."""
        direct = self.direct  # another thread may drop it meanwhile
        if form == LAUNCHED_DIRECTLY and direct is not None:
            return direct(arguments) if run is None else run(direct, arguments)
        results = self.compiled(arguments) if run is None else run(self.compiled, arguments)
        self._has_run = True  # and has not failed
        return results

    def is_last(self, form: str) -> bool:
        """Return whether no other form takes over from this one later."""
        return form == LAUNCHED_DIRECTLY or (self._is_settled and self.direct is None)

    def drop(self, form: str) -> bool:
        """Never run a form again. False where nothing takes its place."""
        if form != LAUNCHED_DIRECTLY:
            return False
        self._is_dropped = True
        self.direct, self._is_settled, self.why_not = None, True, "it was dropped"
        return True

    def _settle(self) -> None:
        """Two threads may do it at once, and one of the results is used."""
        try:
            with RARELY:
                made = self._make(self.compiled)
        except Exception as error:  # noqa: BLE001  the generated code goes on
            raise_what_a_handler_raised(error)
            known = isinstance(error, (CannotStoreError, ArtifactError))
            why_not = str(error) if known else f"{type(error).__name__}: {error}"
            _log.debug("kernels are launched by Inductor: %s", why_not)
            if not self._is_dropped:
                self.why_not = why_not
        else:
            if not self._is_dropped:  # as another thread may have, meanwhile; no call comes between this and the next
                self.direct, self.why_not = made, ""
        self._is_settled = True
