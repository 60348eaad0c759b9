"""Recorded sequences of backwards: their fields, their JSON, their repetitions and their noise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

FOLDER = Path(__file__).parent / "sequences"
LONGEST_PERIOD = 64
"""Maximum number of items in a repetition that :func:`encode` looks for."""
DRIFTS = 40
"""Backwards for which a slow or a fast phase of a noisy machine holds."""
DIGITS = 3
"""Significant digits of a number of seconds."""


class Tape(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tape: a structure with shapes. Times are medians in seconds of processor time, unless they say otherwise.

    Attributes:
        structure: the number of the structure.
        shape: the number of the shapes, within the structure.
        fingerprint: the number of the names of the nodes: all that can be known before the engine is asked.
        nodes: the number of nodes.
        root: the name of the first root's class.
        eager: a backward on eager.
        hit: a settled hit; 0 if the tape was never one.
        capture: the engine's report of a new structure, and the walk of a miss.
        lower: tracing and lowering.
        compile: the backend's compile and the proof of its first runs, in the process.
        beside: wall-clock seconds from the request to the code if it is compiled beside the training.
        look: reading the fingerprint.
        gap: seconds of the step outside of backward, before this one.
        spread: standard deviation of the logarithm of the time.
        refused: the reason if the tape cannot be captured.
    """

    structure: int
    shape: int
    fingerprint: int
    nodes: int
    root: str
    eager: float
    hit: float = 0.0
    capture: float = 0.0
    lower: float = 0.0
    compile: float = 0.0
    beside: float = 0.0
    look: float = 0.0
    gap: float = 0.0
    spread: float = 0.0
    refused: str = ""

    @property
    def cost(self) -> float:
        """Seconds from the first miss to the code, in the process, if the structure is new."""
        return self.capture + self.lower + self.compile


class Recording(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one program did.

    Attributes:
        name: the program's.
        source: what the program is, how it was recorded and what was extended.
        tapes: the tapes that came.
        order: see :func:`decode`.
        widens: the structures of which the second variant serves all sizes.
        start: seconds of importing the backend before the first compile.
        times: how often the order is repeated. Tapes that came once are new ones in each repetition.
    """

    name: str
    source: str
    tapes: list[Tape]
    order: list[Any]
    widens: list[int] = []
    start: float = 0.0
    times: int = 1


class Event(NamedTuple):
    """One backward: the tape, seconds outside of backward before it, and factors of both times."""

    tape: Tape
    gap: float
    of_eager: float
    of_hit: float


def load(path: Path) -> Recording:
    """Read a sequence.

    Raises:
        msgspec.ValidationError: the file has another form.
        ValueError: a number in it is impossible.
    """
    sequence = msgspec.json.decode(path.read_bytes(), type=Recording)
    check(sequence)
    return sequence


def load_all(folder: Path = FOLDER) -> list[Recording]:
    """Read the stored sequences, by name."""
    return [load(path) for path in sorted(folder.glob("*.json"))]


def save(sequence: Recording, folder: Path = FOLDER) -> Path:
    """Write a sequence with rounded times. Returns the file."""
    check(sequence)
    path = folder / f"{sequence.name}.json"
    tapes = [msgspec.json.encode(_rounded(tape)).decode() for tape in sequence.tapes]
    lines = [f'"{name}": {msgspec.json.encode(getattr(sequence, name)).decode()}' for name in ("name", "source")]
    lines.append('"tapes": [\n  ' + ",\n  ".join(tapes) + "\n ]")
    for name in ("order", "widens", "start", "times"):
        lines.append(f'"{name}": {msgspec.json.encode(getattr(sequence, name)).decode()}')
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")
    return path


def check(sequence: Recording) -> None:
    """Raise ValueError if a number is impossible."""
    if not sequence.tapes or not sequence.order or not sequence.source:
        raise ValueError(f"{sequence.name}: a source, a tape and a backward are needed")
    for tape in sequence.tapes:
        times = (tape.hit, tape.capture, tape.lower, tape.compile, tape.beside, tape.look, tape.gap, tape.spread)
        if tape.eager <= 0 or min(times) < 0:
            raise ValueError(f"{sequence.name}: {tape} has times that are not positive")
        if not tape.refused and not (tape.hit and tape.beside and tape.cost):
            raise ValueError(f"{sequence.name}: {tape} was neither compiled nor refused")
    used = {index for index, _ in decode(sequence.order)}
    if used != set(range(len(sequence.tapes))):
        raise ValueError(f"{sequence.name}: the order names the tapes {sorted(used)}")


def events(sequence: Recording, scatter: float = 0.0, seed: int = 0) -> list[Event]:
    """The backwards of a sequence in order.

    Args:
        scatter: standard deviation of the logarithm of times that is added to what was recorded, as on a machine with
            other work.
        seed: of the noise.
    """
    order = list(decode(sequence.order))
    counts = Counter(index for index, _ in order)
    shared = Counter(tape.fingerprint for tape in sequence.tapes)
    draw = random.Random(f"{sequence.name} {seed}")
    found: list[Event] = []
    drift = 0.0
    for repetition in range(sequence.times):
        for index, gap in order:
            tape = sequence.tapes[index]
            if repetition and counts[index] == 1:
                tape = _another(tape, shared[tape.fingerprint] > 1, repetition * len(sequence.tapes) + index)
            if len(found) % DRIFTS == 0:
                drift = draw.gauss(0.0, 1.0)
            sigma = (tape.spread**2 + scatter**2) ** 0.5
            noise = [2.718281828 ** (sigma * (0.8 * draw.gauss(0.0, 1.0) + 0.6 * drift)) for _ in range(2)]
            found.append(Event(tape, tape.gap if gap is None else gap, *noise))
    return found


def _another(tape: Tape, shares: bool, number: int) -> Tape:
    """A tape that never came, with the times of one that came once: other shapes where its fingerprint came more often,
    else another structure."""
    new = 10**6 + number
    if shares:
        return msgspec.structs.replace(tape, shape=new)
    return msgspec.structs.replace(tape, structure=new, fingerprint=new)


def decode(order: Sequence[Any]) -> Iterator[tuple[int, float | None]]:
    """Unfold an order: a number is a tape, with its usual gap; ``[tape, gap]`` has a gap of its own, and
    ``{"times": n, "of": [...]}`` repeats."""
    for item in order:
        if isinstance(item, dict):
            inner = list(decode(item["of"]))
            for _ in range(item["times"]):
                yield from inner
        elif isinstance(item, list):
            yield int(item[0]), float(item[1])
        else:
            yield item, None


def encode(items: Sequence[int | tuple[int, float]]) -> list[Any]:
    """Fold an order: the longest repetitions first found from the left, of at most :data:`LONGEST_PERIOD` items."""
    found: list[Any] = []
    at = 0
    while at < len(items):
        period, times = _repetition(items, at)
        if times > 1:
            found.append({"times": times, "of": encode(items[at : at + period])})
        else:
            found.append(_item(items[at]))
        at += period * times
    return found


def _repetition(items: Sequence[Hashable], at: int) -> tuple[int, int]:
    """Return the period and the number of repetitions that cover most from ``at`` on, or (1, 1)."""
    best, gain = (1, 1), 4
    for period in range(1, min(LONGEST_PERIOD, (len(items) - at) // 2) + 1):
        times = 1
        first = items[at : at + period]
        while items[at + period * times : at + period * (times + 1)] == first:
            times += 1
        if period * (times - 1) > gain:
            best, gain = (period, times), period * (times - 1)
    return best


def _item(item: int | tuple[int, float]) -> Any:
    return item if isinstance(item, int) else [item[0], rounded(item[1])]


def rounded(number: float) -> float:
    """Return a number with :data:`DIGITS` significant digits."""
    return float(f"{number:.{DIGITS}g}")


def _rounded(tape: Tape) -> Tape:
    values = {name: rounded(value) for name, value in msgspec.structs.asdict(tape).items() if isinstance(value, float)}
    return msgspec.structs.replace(tape, **values)
