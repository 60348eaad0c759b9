"""What a report shows, as records: the page knows nothing else.

Records of which there are many are arrays in JSON. Seconds are of the wall clock, sizes are bytes.
"""

from __future__ import annotations

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """One of the totals: ``note`` says what more there is to know of it, ``bad`` that it is to be looked into."""

    label: str
    value: str
    note: str = ""
    bad: bool = False


class Reason(msgspec.Struct, frozen=True):
    """Why a backward was no hit: ``text`` is the record's own, ``means`` and ``do`` explain its kind; ``failed`` says
    that something did, and a slower way was taken."""

    kind: str
    text: str
    means: str = ""
    do: str = ""
    failed: bool = False


class Event(msgspec.Struct, frozen=True):
    """Something on the timeline.

    Attributes:
        number: of the (last) backward.
        count: how many backwards one after the other this stands for.
        outcome: ``"hit"`` (something failed, or was compiled beside it), ``"shape_miss"``, ``"structure_miss"``,
            ``"miss"`` (the store does not know which of the two) or ``"bypass"``.
        title: what it was, for people.
        graph: the id of a :class:`Graph` of the report, or None.
        cost: seconds that a hit would not have taken; of a bypass, those of the eager engine.
        seconds: by stage.
        compiles, loads: regions that were compiled, and found on disk.
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
    """Milliseconds of a backward, or the mean of ``count`` that ended with the one of this ``number``."""

    number: int
    count: int
    ms: float
    outcome: str


class Timeline(msgspec.Struct, frozen=True):
    """All events, oldest first. Between two of them lie hits, as many as their numbers say, where ``hits_between``.

    Attributes:
        total: the number of backwards so far; 0 where that is not known.
        left_out: events that are not kept.
        took: the backwards whose time is known, oldest first.
        eager: milliseconds, the median of the eager engine's backwards of the structure that was hit most; None where
            it was not timed.
    """

    events: tuple[Event, ...]
    total: int
    hits_between: bool
    left_out: int = 0
    took: tuple[Took, ...] = ()
    eager: float | None = None


class Verdict(msgspec.Struct, frozen=True):
    """The answer at the top: what it came to, and what to do ``next``, if anything."""

    text: str
    next: str = ""


class Branch(msgspec.Struct, frozen=True):
    """A line of the trie: ``depth`` 0 is the first, ``guide`` is what stands before it, ``graph`` where it ends in
    one."""

    depth: int
    guide: str
    text: str
    differs: str = ""
    shared: int = 0
    graph: str | None = None
    title: str = ""


class Node(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A node of the tape: its name, the parameter it writes to, its line of the forward, the module it belongs to, the
    nodes that its gradients go to, and the step that runs it (None: not known)."""

    name: str
    parameter: str | None
    source: str | None
    module: str
    edges: tuple[int, ...]
    step: int | None = None


class Step(msgspec.Struct, frozen=True):
    """What runs a part of a tape: ``"region"`` (compiled), ``"users"`` (a hook or a Python function), ``"leaves"``.

    Attributes:
        calls: how many calls of the tape graph it has.
        nodes: how many nodes of the tape.
        seconds: the mean of the runs that a profiler saw; None where it saw none.
        least: the shortest of them.
        runs: how many.
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
    """A line of a stage: its text, and the lines of the stage before that it comes from; or the number of a line of its
    own stage that has the same links."""

    text: str
    links: tuple[int, ...] | int = ()
    node: int | None = None


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Lines of a stage that one step has: which step, the first line, and how many."""

    step: int
    first: int
    count: int


class Stage(msgspec.Struct, frozen=True):
    """What a graph is at one point of its way: ``note`` says what is to be known of it, or why it has no lines."""

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    blocks: tuple[Block, ...] = ()


class Memory(msgspec.Struct, frozen=True):
    """Bytes that are held while a backward runs.

    Attributes:
        points: after each operator: the bytes that the forward saved and nobody has let go of, those that the backward
            made and still holds, and the line of the ATen stage (-1: none).
        steps: for each step, the first of its points.
        note: how this was found, or why there is nothing.
    """

    points: tuple[tuple[int, int, int], ...]
    steps: tuple[int, ...]
    note: str


class Variant(msgspec.Struct, frozen=True):
    """What was compiled of a structure for one set of shapes, state and settings.

    Attributes:
        title: what tells it from the others.
        facts: what more is known of it.
        eager, compiled: medians in milliseconds, where it was timed; ``samples`` of each.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    eager: float | None = None
    compiled: float | None = None
    samples: int = 0


class Graph(msgspec.Struct, frozen=True):
    """A structure with what was made of it. A graph without stages has ``note`` to say why."""

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
