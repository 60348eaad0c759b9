"""Makes a failing program smaller: what can be left out, while it still fails in the same way, is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from .program import SKIP, Leaf, Program


def smaller(program: Program) -> Iterator[Program]:
    """Programs with something less in them, those with much less first."""
    yield from (program.replace(**change) for change in _plainer(program))
    for index, operator in reversed(list(enumerate(program.operators))):
        if operator.name != SKIP:
            yield _with(program, index, dataclasses.replace(operator, name=SKIP, hook=0, packed=0, salt=0))
    if len(program.outputs) > 1:
        for index in range(len(program.outputs)):
            yield program.replace(outputs=program.outputs[:index] + program.outputs[index + 1 :])
    for index, operator in enumerate(program.operators):
        if operator.hook:
            yield _with(program, index, dataclasses.replace(operator, hook=0))
        if operator.packed:
            yield _with(program, index, dataclasses.replace(operator, packed=0))
        if operator.first:
            yield _with(program, index, dataclasses.replace(operator, first=0))
        if operator.second:
            yield _with(program, index, dataclasses.replace(operator, second=0))
    for index, leaf in enumerate(program.leaves):
        for change in ({"hook": 0}, {"layout": "contiguous"}, {"trained": False}):
            less = Leaf(**{**dataclasses.asdict(leaf), **change})
            if less != leaf:
                yield program.replace(leaves=(*program.leaves[:index], less, *program.leaves[index + 1 :]))


def _plainer(program: Program) -> Iterator[dict]:  # type: ignore[type-arg]
    plain = (("again", "memory"), ("threads", 1), ("cousin", -1), ("grads", "none"), ("gradient", "contiguous"))
    for name, value in (*plain, ("hold", True), ("dynamic", None), ("dtype", "float64"), ("mode", "sum")):
        if getattr(program, name) != value:
            yield {name: value}
    for count in (1, 2, 3):
        if len(program.sizes) > count:
            yield {"sizes": program.sizes[:count]}
    for letter, _ in program.sizes[0]:
        if len({dict(step)[letter] for step in program.sizes}) > 1:
            first = {letter: dict(program.sizes[0])[letter]}
            yield {"sizes": tuple(tuple(sorted({**dict(step), **first}.items())) for step in program.sizes)}


def _with(program: Program, index: int, operator: object) -> Program:
    return program.replace(operators=(*program.operators[:index], operator, *program.operators[index + 1 :]))


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """The smallest program that was found in that time and still fails."""
    end = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < end:
        found = False
        for less in smaller(program):
            if time.monotonic() > end:
                break
            if fails(less):
                program, found = less, True
                break
    return program
