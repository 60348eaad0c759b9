"""The records of a report, the page's only input.

Frequent records are arrays in JSON. Seconds are wall-clock time, sizes are bytes.
"""

from __future__ import annotations

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """One of the totals. ``note`` adds details; ``bad`` marks a total that needs attention."""

    label: str
    value: str
    note: str = ""
    bad: bool = False


class Reason(msgspec.Struct, frozen=True):
    """Why a backward was no hit: ``text`` is the record's text, ``means`` and ``do`` explain its kind. ``failed`` marks
    a failure of this package, after which the backward took a slower way."""

    kind: str
    text: str
    means: str = ""
    do: str = ""
    failed: bool = False


class Event(msgspec.Struct, frozen=True):
    """One or several backwards on the timeline.

    Attributes:
        number: the number of the (last) backward.
        count: the number of successive backwards that this event stands for.
        outcome: ``"hit"`` (with a failure, or with code compiled in the background), ``"shape_miss"``,
            ``"structure_miss"``, ``"miss"`` (the store does not record which of the two) or ``"bypass"``.
        title: the name for people.
        graph: the id of a :class:`Graph` of the report, or None.
        cost: seconds beyond those of a hit; for a bypass, the seconds of the eager engine.
        seconds: seconds by stage.
        compiles, loads: the number of regions that were compiled, and that were loaded from disk.
        when: seconds since the epoch.
    """

    number: int
    count: int
    outcome: str
    title: str
    graph: str | None
    cost: float
    seconds: dict[str, float]
    compiles: int
    loads: int
    when: float
    reasons: tuple[Reason, ...]


class Took(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Milliseconds of backward ``number``, or the mean of the ``count`` backwards that end with it."""

    number: int
    count: int
    ms: float
    outcome: str


class Timeline(msgspec.Struct, frozen=True):
    """All events, oldest first.

    Attributes:
        total: the number of backwards so far; 0 if not known.
        hits_between: True if the numbers missing between two events are hits.
        left_out: the number of events that were not kept.
        took: the backwards whose time is known, oldest first.
        eager: the median time on the eager engine, in milliseconds, of the structure with most hits; None if not timed.
    """

    events: tuple[Event, ...]
    total: int
    hits_between: bool
    left_out: int = 0
    took: tuple[Took, ...] = ()
    eager: float | None = None


class Verdict(msgspec.Struct, frozen=True):
    """The answer at the top of the page: the result, and what to do ``next``, if anything."""

    text: str
    next: str = ""


class Branch(msgspec.Struct, frozen=True):
    """A line of the trie: ``depth`` 0 is the root, ``guide`` is the text before the line, ``graph`` the id of the graph
    that ends here."""

    depth: int
    guide: str
    text: str
    differs: str = ""
    shared: int = 0
    graph: str | None = None
    title: str = ""


class Node(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A node of the tape: its name, its parameter (if it is a leaf), the source line of its forward, its module, the
    nodes that receive its gradients, and the step that runs it (None: not known)."""

    name: str
    parameter: str | None
    source: str | None
    module: str
    edges: tuple[int, ...]
    step: int | None = None


class Step(msgspec.Struct, frozen=True):
    """A step that runs a part of a tape.

    Attributes:
        kind: ``"region"`` (compiled), ``"users"`` (a hook or a Python function) or ``"leaves"``.
        calls: the number of calls of the tape graph.
        nodes: the number of nodes of the tape.
        seconds: the mean seconds of the runs that a profiler saw; None if it saw none.
        least: the seconds of the shortest of these runs.
        runs: the number of these runs.
    """

    kind: str
    title: str
    detail: str
    calls: int
    nodes: int
    seconds: float | None = None
    least: float | None = None
    runs: int = 0


class Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A line of a stage: its text, and ``links``, the lines of the previous stage from which it was made. ``links`` may
    also be the number of a line of the same stage with equal links."""

    text: str
    links: tuple[int, ...] | int = ()
    node: int | None = None


class Block(msgspec.Struct, frozen=True, array_like=True):
    """The lines of a stage that belong to one step: the step, the first line, and the number of lines."""

    step: int
    first: int
    count: int


class Stage(msgspec.Struct, frozen=True):
    """A graph in one stage of compilation. ``note`` has details, or says why there are no lines."""

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    blocks: tuple[Block, ...] = ()


class Memory(msgspec.Struct, frozen=True):
    """The memory of a backward, in bytes.

    Attributes:
        points: after each operator: live bytes saved by the forward, live bytes made by the backward, and the line of
            the ATen stage (-1: none).
        steps: for each step, the first of its points.
        note: how this was determined, or why there are no points.
    """

    points: tuple[tuple[int, int, int], ...]
    steps: tuple[int, ...]
    note: str


class Variant(msgspec.Struct, frozen=True):
    """The code of a structure for one set of shapes, process state and settings.

    Attributes:
        title: the differences from the other variants.
        facts: names and values for people.
        eager, compiled: geometric means in milliseconds of ``samples`` backwards each; None if not timed.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    eager: float | None = None
    compiled: float | None = None
    samples: int = 0


class Graph(msgspec.Struct, frozen=True):
    """A structure with its stages and variants. In a graph without stages, ``note`` says why."""

    id: str
    title: str
    facts: tuple[tuple[str, str], ...]
    nodes: tuple[Node, ...]
    steps: tuple[Step, ...] = ()
    stages: tuple[Stage, ...] = ()
    memory: Memory | None = None
    variants: tuple[Variant, ...] = ()
    note: str = ""


class Report(msgspec.Struct, frozen=True):
    """A whole page. ``of`` is ``"session"`` or ``"store"``."""

    of: str
    title: str
    made: str
    totals: tuple[Figure, ...]
    timeline: Timeline
    trie: tuple[Branch, ...]
    graphs: tuple[Graph, ...]
    facts: tuple[tuple[str, str], ...] = ()
    verdict: Verdict | None = None
