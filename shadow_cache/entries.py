"""What the cache on disk holds, as frozen records: structures, the entries made for them, and misses.

The Python interface, the command line and the store itself all speak in these. Times are seconds since the epoch.
"""

from __future__ import annotations

import msgspec

from .records import Miss
from .safe_text import harmless

# Of calls and inputs there are hundreds in an entry, and no cycle can begin at one (gc=False): to list a thousand
# entries takes the garbage collector longer than everything else otherwise.


class Call(msgspec.Struct, frozen=True, gc=False):
    """One node of a tape. ``key`` is its edge in the trie as text, the node's name first; ``edges`` are indices of the
    nodes its gradients go to."""

    name: str
    key: tuple[str, ...]
    parameter: str | None = None
    source: str | None = None
    edges: tuple[int, ...] = ()


class Structure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tape as it was captured.

    Attributes:
        id: of hexadecimal digits.
        calls: its nodes.
        end: the last key of its path in the trie, as text.
        text: the whole tape graph.
        record: its path in the trie; only who wrote it reads it. Empty in stores of before.
    """

    id: str
    calls: tuple[Call, ...]
    end: tuple[str, ...]
    text: str
    record: bytes = b""

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """Its path in the trie, as text."""
        return (*(call.key for call in self.calls), self.end)


class Input(msgspec.Struct, frozen=True, gc=False):
    """A saved tensor: where the tape uses it, its dtype and device, and its dimensions: numbers or symbols (``s0``)."""

    where: str
    dtype: str
    device: str
    shape: tuple[str, ...]


class Region(msgspec.Struct, frozen=True):
    """A compiled part of an entry.

    Attributes:
        calls: how many calls of the tape it holds.
        artifact: the compiled code: SHA-256 of a file of the store, in hexadecimal.
        lowered: the ATen graph as text: likewise.
        record: how it is fed and what it serves; only who wrote it reads it. It is stored under an earlier name.
    """

    calls: int
    artifact: str
    lowered: str
    record: bytes = msgspec.field(name="plan")


class Timing(msgspec.Struct, frozen=True, gc=False):
    """What ``tune`` found when it ran an entry and the eager engine in turn.

    Attributes:
        eager: the median of the eager engine's backwards, in milliseconds.
        compiled: that of the entry's.
        samples: the number of backwards of each, at least.
        when: it was decided.
        goes_on: ``"eager"`` or ``"compiled"``: what such backwards ran on from then on, in the process that timed them.
    """

    eager: float
    compiled: float
    samples: int
    when: float
    goes_on: str

    @property
    def on_eager(self) -> bool:
        """The eager engine goes on."""
        return self.goes_on == "eager"

    @property
    def winner(self) -> str:
        """What goes on, in words."""
        return "eager" if self.on_eager else "the compiled graph"

    def __str__(self) -> str:
        figures = f"eager takes {self.eager:.2f} ms, the compiled graph {self.compiled:.2f} ms"
        return f"{figures} (medians of {self.samples} each)"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """An :class:`Entry` without what is long in it: thirty times as fast to read where tapes have hundreds of nodes.

    Attributes:
        id: short, of hexadecimal digits.
        structure: the id of its :class:`Structure`.
        loss: the node that the backward begins at.
        module: the class of the outermost module whose parameters it reaches, where that is known.
        source: ``file:line in function`` of the backward's caller.
        nodes: how many nodes the tape has.
        settings: backend and what else the compiled code depends on, by name.
        dynamic: some dimensions of the saved tensors are symbols.
        miss: why it was made.
        seconds: what making it cost.
        created: when.
        last_used: when it was stored or loaded last.
        loads: how often a process found it here.
        size: of its files, in bytes.
        timing: how it did against the eager engine, when it was last timed; None where it never was.
        program: the file of the program that made it; None where it was no file, or an earlier version stored it.
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
        """What people know it by: loss, module and source line, as far as they are known."""
        return name_of(self.loss, self.module, self.source)

    @property
    def left_to_eager(self) -> Timing | None:
        """How it was timed, where the eager engine is faster and goes on; else None."""
        return self.timing if self.timing is not None and self.timing.on_eager else None


class Entry(Summary, frozen=True, kw_only=True):
    """A structure compiled for one set of shapes, ambient state and settings, on one kind of machine.

    Attributes:
        ambient: state of the process that it depends on, by name.
        environment: versions, compiler and processor, by name.
        inputs: the saved tensors.
        guards: what must hold of the symbols, as text.
        record: what it serves; only who wrote it reads it. It is stored under an earlier name.
        regions: its compiled parts.
    """

    ambient: dict[str, str]
    environment: dict[str, str]
    inputs: tuple[Input, ...]
    guards: tuple[str, ...]
    record: bytes = msgspec.field(name="plan")
    regions: tuple[Region, ...]

    @property
    def sections(self) -> dict[str, dict[str, str]]:
        """What it was made under, under titles."""
        return {"settings": self.settings, "ambient": self.ambient, "environment": self.environment}


def name_of(loss: str, module: str | None, source: str | None) -> str:
    """What people know an entry by: loss, module and source line, as far as they are known."""
    of = f" of {module}" if module else ""
    at = f", {source}" if source else ""
    return harmless(f"{loss}{of}{at}")


class MissEntry(msgspec.Struct, frozen=True):
    """A backward that was no hit: when, what was made for it (None where nothing was), and why."""

    when: float
    structure: str
    entry: str | None
    name: str
    miss: Miss


class StoreStats(msgspec.Struct, frozen=True):
    """The store in figures.

    ``misses`` and ``bypasses`` count records by reason. ``seconds_saved`` is what its loads would have cost to compile
    anew. ``left_to_eager`` is the number of the ``timed`` entries that are slower than eager, which goes on for them.
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
    """Something wrong with the store: ``where`` is an entry's id or a file, ``what`` is wrong, and what to ``do``."""

    where: str
    what: str
    do: str
