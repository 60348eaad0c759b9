"""Entries whose every byte follows from their number, so that any process can say what should have been stored."""

from __future__ import annotations

import hashlib

import msgspec

from shadow_cache.entries import Call, Entry, Input, Region, Structure, Timing
from shadow_cache.records import Miss

Made = tuple[Structure, Entry, dict[str, bytes]]


def content(number: int, size: int) -> bytes:
    """``size`` bytes that no other number has."""
    block = hashlib.sha256(f"content {number}".encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def made(number: int, size: int = 2000, structures: int = 5) -> Made:
    """What to give to ``Store.add``. Every third entry shares its lowered graph with others."""
    artifact = content(number, size)
    lowered = f"graph {number // 3}".encode()
    names = [hashlib.sha256(data).hexdigest() for data in (artifact, lowered)]
    structure = Structure(
        f"s{number % structures}", (Call("MulBackward0", ("Mul", "a"), edges=(1,)),), ("end",), "tape\n" * 50
    )
    entry = Entry(
        id=f"{number:06x}",
        structure=structure.id,
        loss="MseLossBackward0",
        module="Net",
        source="train.py:10 in step",
        nodes=40,
        settings={"backend": "inductor"},
        ambient={"autocast": "off"},
        environment={"torch": "2.13"},
        inputs=tuple(Input(f"node {index}", "float32", "cpu", ("s0", "8")) for index in range(5)),
        dynamic=True,
        guards=("s0 > 1",),
        record=content(number, 300),
        regions=(Region(40, names[0], names[1], content(number, 100)),),
        miss=Miss("shape", "size 0", "3", "5"),
        seconds=2.0,
        created=1.7e9,
    )
    return structure, entry, dict(zip(names, (artifact, lowered), strict=True))


def stored(entry: Entry) -> Entry:
    """An entry without what the store counts, to be compared with what was given."""
    return msgspec.structs.replace(entry, size=0, loads=0, last_used=0.0, timing=None)


def timed(number: int) -> Timing:
    """What to give to ``Store.timed``. Eager goes on for odd numbers."""
    return Timing(2.0 + number, 4.0, 7, 1.7e9 + number, "eager" if number % 2 else "compiled")
