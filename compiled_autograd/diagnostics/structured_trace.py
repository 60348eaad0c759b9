"""Add captures and compiles to PyTorch's structured trace (``TORCH_TRACE``), which tlparse shows. They appear beside
those of ``torch.compile``, under ids of compiled backwards (``[!10000]``).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch._guards import CompileContext, CompileId, compile_context
from torch._logging._internal import trace_log, trace_structured_artifact

from ..backends.signal_handlers import raise_what_a_handler_raised
from ..process_state import PROCESS
from .reporting import warn_once

TEXT, JSON = "string", "json"
Artifact = tuple[str, str, Callable[[], Any]]
"""Name, encoding, and a function that returns the text, or the object to encode as JSON."""
_numbers = PROCESS.register(itertools.count(10_000))


class Traced(Protocol):
    """A run with its id in the trace; None as long as the trace has nothing of the run."""

    compile_id: CompileId | None


def is_on() -> bool:
    """Return whether the trace is being recorded.

    PyTorch always installs its own handler, which removes itself if no trace was requested. A handler that the root
    logger has too, such as pytest's in each test, takes the records of all loggers and does not count.
    """
    if not trace_log.handlers:
        return False
    everywhere = logging.getLogger().handlers
    return any(
        getattr(handler, "root_dir", "another handler") is not None and handler not in everywhere
        for handler in trace_log.handlers
    )


@contextmanager
def part_of(run: Traced) -> Iterator[None]:
    """Assign everything traced inside, also by a backend's compiler, to one run's compiled backward."""
    if not is_on():
        yield
        return
    with compile_context(CompileContext(_id_of(run))):
        yield


def add(run: Traced, artifacts: Iterable[Artifact]) -> None:
    """Add artifacts to the trace of a run's compiled backward. A failure, also of making an artifact, gives a warning
    and does not fail the step."""
    try:
        with compile_context(CompileContext(_id_of(run))):
            for name, encoding, give in artifacts:
                trace_structured_artifact(
                    f"compiled_autograd_{name}", encoding, give if encoding == JSON else _utf8(give)
                )
    except Exception as error:  # noqa: BLE001  a warning: gradients must not depend on a writable file
        raise_what_a_handler_raised(error)
        warn_once(f"the structured trace could not be written ({type(error).__name__}: {error}).")


def _utf8(give: Callable[[], Any]) -> Callable[[], str]:
    """Escape lone surrogates: users' names may contain them, and a UTF-8 file cannot."""
    return lambda: give().encode(errors="backslashreplace").decode()


def _id_of(run: Traced) -> CompileId:
    """Return the id of a run in the trace. PyTorch's own compiled autograd counts from 0, this package from 10,000."""
    if run.compile_id is None:
        number = next(_numbers)
        run.compile_id = CompileId(frame_id=None, frame_compile_id=None, compiled_autograd_id=number)
    return run.compile_id
