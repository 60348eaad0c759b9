"""The difference of two entries, as records."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..entries import Call, Entry, Input, Structure, Summary, Timing
from ..trie import differing_parts
from . import render


class Change(msgspec.Struct, frozen=True):
    """One named part that differs; the empty string stands for a part that one of the two entries lacks."""

    section: str
    name: str
    old: str
    new: str


class Parting(msgspec.Struct, frozen=True):
    """The first node at which two tapes differ.

    Attributes:
        index: the index of the node on both tapes; also the number of equal nodes before it.
        old: the node of the first tape; None if the first tape has ended.
        new: the node of the second tape; None if the second tape has ended.
        old_part: the first differing part of the old node's key.
        new_part: the first differing part of the new node's key.
    """

    index: int
    old: Call | None
    new: Call | None
    old_part: str
    new_part: str


class Difference(msgspec.Struct, frozen=True):
    """Two entries by id, their differing parts, and the place where their tapes part (None: the tapes are equal)."""

    old: str
    new: str
    changes: tuple[Change, ...]
    parting: Parting | None


def difference(old: Entry, new: Entry, old_structure: Structure, new_structure: Structure) -> Difference:
    """Compare two entries and their structures."""
    same = old.structure == new.structure
    changes = [
        *(change for title, values in old.sections.items() for change in _changes(title, values, new.sections[title])),
        *_changes("inputs", inputs(old), inputs(new), only_common=not same),
        *_changes("variant", _serves(old), _serves(new)),
    ]
    return Difference(old.id, new.id, tuple(changes), None if same else parting(old_structure, new_structure))


def varying(entries: Sequence[Entry]) -> dict[str, list[Change]]:
    """Return, by entry id, the parts that differ among entries of one structure, as changes without ``old``."""
    parts: list[dict[tuple[str, str], str]] = []
    for entry in entries:
        flat = {(section, name): value for section, values in entry.sections.items() for name, value in values.items()}
        for name, each in _named(entry).items():
            flat["inputs", f"{name} shape"] = f"[{', '.join(each.shape)}]"
            flat["inputs", f"{name} dtype"] = f"{each.dtype} {each.device}"
        parts.append(flat)
    names = dict.fromkeys(name for each in parts for name in each)
    differing = [name for name in names if len({each.get(name) for each in parts}) > 1]
    return {
        entry.id: [Change(*name, "", each[name]) for name in differing if name in each]
        for entry, each in zip(entries, parts, strict=True)
    }


def variant(entry: Summary) -> str:
    """Return ``static`` or ``dynamic``."""
    return "dynamic" if entry.dynamic else "static"


def timed(timing: Timing, now: float) -> str:
    """Format a tuning trial: its time, its means and the faster one."""
    return f"{render.ago(timing.when, now)}: {timing}; {timing.winner} is used"


def inputs(entry: Entry) -> dict[str, str]:
    """Return the saved tensors by the place of their use."""
    return {name: describe(each) for name, each in _named(entry).items()}


def describe(each: Input) -> str:
    """Format a saved tensor: ``float32[32, 64] cpu``."""
    return f"{each.dtype}[{', '.join(each.shape)}] {each.device}"


def parting(old: Structure, new: Structure) -> Parting | None:
    """Return the first node at which two tapes differ; None if the tapes are equal."""
    for index, (one, other) in enumerate(zip(old.keys, new.keys, strict=False)):
        if one != other:
            return Parting(index, _call(old, index), _call(new, index), *differing_parts((one, other)))
    return None


def _named(entry: Entry) -> dict[str, Input]:
    """Name the inputs by the place of their use; number those of the same place."""
    named: dict[str, Input] = {}
    for each in entry.inputs:
        name, number = each.where, 2
        while name in named:
            name, number = f"{each.where} ({number})", number + 1
        named[name] = each
    return named


def _call(structure: Structure, index: int) -> Call | None:
    return structure.calls[index] if index < len(structure.calls) else None


def _serves(entry: Entry) -> dict[str, str]:
    return {"shapes": variant(entry), "guards": ", ".join(entry.guards)}


def _changes(section: str, old: dict[str, str], new: dict[str, str], only_common: bool = False) -> list[Change]:
    names = [name for name in dict.fromkeys((*old, *new)) if not only_common or (name in old and name in new)]
    return [
        Change(section, name, old.get(name, ""), new.get(name, ""))
        for name in names
        if old.get(name, "") != new.get(name, "")
    ]
