"""PyTorch's structured trace (``TORCH_TRACE``), which tlparse shows: what was captured and compiled here stands there
beside what ``torch.compile`` did, under a number that tells it apart as a compiled backward (``[!10000]``).
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
"""Its name, its encoding, and what gives it: text, or what becomes JSON."""
_numbers = PROCESS.register(itertools.count(10_000))


class Traced(Protocol):
    """A run, with what the trace has it under; None as long as there is nothing of it."""

    compile_id: CompileId | None


def is_on() -> bool:
    """Whether anything reads the trace.

    PyTorch's own handler is there in any case, and goes when nothing was asked. One that the root logger has too takes
    what every logger says, as pytest's does in each test, and does not ask for this.
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
    """What is traced inside, by a backend's compiler too, belongs to one run's compiled backward."""
    if not is_on():
        yield
        return
    with compile_context(CompileContext(_id_of(run))):
        yield


def add(run: Traced, artifacts: Iterable[Artifact]) -> None:
    """Add artifacts to the trace of a run's compiled backward. What fails there, while they are looked for too, costs a
    warning, and no step."""
    try:
        with compile_context(CompileContext(_id_of(run))):
            for name, encoding, give in artifacts:
                trace_structured_artifact(
                    f"compiled_autograd_{name}", encoding, give if encoding == JSON else _utf8(give)
                )
    except Exception as error:  # noqa: BLE001  it is warned of: gradients must not depend on a file that can be written
        raise_what_a_handler_raised(error)
        warn_once(f"the structured trace could not be written ({type(error).__name__}: {error}).")


def _utf8(give: Callable[[], Any]) -> Callable[[], str]:
    """A name of users' may have halves of pairs of surrogates, which no file can."""
    return lambda: give().encode(errors="backslashreplace").decode()


def _id_of(run: Traced) -> CompileId:
    """Told apart by its number from what PyTorch's own compiled autograd traces, which counts from 0."""
    if run.compile_id is None:
        number = next(_numbers)
        run.compile_id = CompileId(frame_id=None, frame_compile_id=None, compiled_autograd_id=number)
    return run.compile_id
