"""Frozen records of the cache on disk: structures, the entries compiled for them, and misses.

The Python interface, the command line and the store itself all use these records. Times are seconds since the epoch.
"""

from __future__ import annotations

import msgspec

from .records import Miss
from .safe_text import harmless

# gc=False: an entry has hundreds of calls and inputs, and none of them can be part of a cycle. With the garbage
# collector, tracking them takes longer than the rest of listing a thousand entries.


class Call(msgspec.Struct, frozen=True, gc=False):
    """One node of a tape. ``key`` is the node's edge in the trie as text, the node's name first. ``edges`` are the
    indices of the nodes that receive the node's gradients."""

    name: str
    key: tuple[str, ...]
    parameter: str | None = None
    source: str | None = None
    edges: tuple[int, ...] = ()


class Structure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A captured tape.

    Attributes:
        id: hexadecimal digits.
        calls: the nodes.
        end: the last key of the path in the trie, as text.
        text: the whole tape graph.
        record: the path in the trie, in the writer's own format. Empty in stores of earlier versions.
    """

    id: str
    calls: tuple[Call, ...]
    end: tuple[str, ...]
    text: str
    record: bytes = b""

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """The path in the trie, as text."""
        return (*(call.key for call in self.calls), self.end)


class Input(msgspec.Struct, frozen=True, gc=False):
    """A saved tensor: the place of its use on the tape, dtype, device, dimensions as numbers or symbols (``s0``)."""

    where: str
    dtype: str
    device: str
    shape: tuple[str, ...]


class Region(msgspec.Struct, frozen=True):
    """A compiled part of an entry.

    Attributes:
        calls: the number of calls of the tape in the region.
        artifact: the file of the compiled code, named by the SHA-256 of its bytes in hexadecimal.
        lowered: the file of the ATen graph as text, named likewise.
        record: the region's inputs and guards, in the writer's own format; stored under the field's earlier name.
    """

    calls: int
    artifact: str
    lowered: str
    record: bytes = msgspec.field(name="plan")


class Timing(msgspec.Struct, frozen=True, gc=False):
    """The result of a tuning trial: an entry and the eager engine, run alternately and timed.

    Attributes:
        eager: the geometric mean of the eager engine's backwards, in milliseconds.
        compiled: the geometric mean of the compiled backwards, in milliseconds.
        samples: the minimum number of backwards of each.
        when: the time of the decision.
        goes_on: ``"eager"`` or ``"compiled"``: the faster one. It ran later backwards in the process of the trial.
    """

    eager: float
    compiled: float
    samples: int
    when: float
    goes_on: str

    @property
    def on_eager(self) -> bool:
        """True if the eager engine was faster and runs such backwards."""
        return self.goes_on == "eager"

    @property
    def winner(self) -> str:
        """The faster one, in words."""
        return "eager" if self.on_eager else "the compiled graph"

    def __str__(self) -> str:
        figures = f"eager takes {self.eager:.2f} ms, the compiled graph {self.compiled:.2f} ms"
        return f"{figures} (means of {self.samples} each)"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """An :class:`Entry` without its long fields; thirty times faster to read for tapes of hundreds of nodes.

    Attributes:
        id: a few hexadecimal digits.
        structure: the id of the entry's :class:`Structure`.
        loss: the node at which the backward begins.
        module: the class of the outermost module with parameters on the tape, if known.
        source: ``file:line in function`` of the backward's caller.
        nodes: the number of nodes of the tape.
        settings: the backend and the other settings of the compiled code, by name.
        dynamic: True if some dimensions of the saved tensors are symbols.
        miss: the miss for which the entry was compiled.
        seconds: the time to compile the entry.
        created: the time of creation.
        last_used: the time of the last store or load.
        loads: the number of loads by processes.
        size: bytes of the entry's files.
        timing: the last tuning trial; None if there was none.
        program: the file of the program that made the entry; None if there was no file, or in earlier versions.
    """

    id: str
    structure: str
    loss: str
    module: str | None
    source: str | None
    nodes: int
    settings: dict[str, str]
    dynamic: bool
    miss: Miss
    seconds: float
    created: float
    last_used: float = 0.0
    loads: int = 0
    size: int = 0
    timing: Timing | None = None
    program: str | None = None

    @property
    def name(self) -> str:
        """The entry's name for people: loss, module and source line, as far as they are known."""
        return name_of(self.loss, self.module, self.source)

    @property
    def left_to_eager(self) -> Timing | None:
        """The tuning trial, if the eager engine was faster; else None."""
        return self.timing if self.timing is not None and self.timing.on_eager else None


class Entry(Summary, frozen=True, kw_only=True):
    """A structure compiled for one set of shapes, ambient state and settings, on one kind of machine.

    Attributes:
        ambient: state of the process on which the compiled code depends, by name.
        environment: versions, compiler and processor, by name.
        inputs: the saved tensors.
        guards: conditions on the symbols, as text.
        record: the sizes and tensors that it serves, in the writer's own format; stored under the field's earlier name.
        regions: the compiled parts.
    """

    ambient: dict[str, str]
    environment: dict[str, str]
    inputs: tuple[Input, ...]
    guards: tuple[str, ...]
    record: bytes = msgspec.field(name="plan")
    regions: tuple[Region, ...]

    @property
    def sections(self) -> dict[str, dict[str, str]]:
        """Settings, process state and environment of the entry, by title."""
        return {"settings": self.settings, "ambient": self.ambient, "environment": self.environment}


def name_of(loss: str, module: str | None, source: str | None) -> str:
    """Return an entry's name for people: loss, module and source line, as far as they are known."""
    of = f" of {module}" if module else ""
    at = f", {source}" if source else ""
    return harmless(f"{loss}{of}{at}")


class MissEntry(msgspec.Struct, frozen=True):
    """A backward that was no hit: the time, the structure, the entry compiled for it (None: none), and the reason."""

    when: float
    structure: str
    entry: str | None
    name: str
    miss: Miss


class StoreStats(msgspec.Struct, frozen=True):
    """Totals of the store.

    ``misses`` and ``bypasses`` count records by reason. ``seconds_saved`` is the time that compiling the loaded entries
    again would have taken. ``left_to_eager`` is the number of the ``timed`` entries that are slower than eager.
    """

    entries: int
    structures: int
    size: int
    max_size: int
    loads: int
    misses: dict[str, int]
    compile_seconds: float
    seconds_saved: float
    timed: int = 0
    left_to_eager: int = 0
    bypasses: dict[str, int] = {}


class Problem(msgspec.Struct, frozen=True):
    """A problem of the store: ``where`` is an entry's id or a file, ``what`` the problem, ``do`` the remedy."""

    where: str
    what: str
    do: str
