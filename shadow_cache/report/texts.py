"""Texts of a graph's stages as lines, linked as far as the texts themselves tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .data import Line

_NODE = re.compile(r"#(\d+) ")
_DEFINES = re.compile(r"\s+(\w+) = ")
_FREES = re.compile(r"(;?  (\w+ = )+None)+;?\s*$")
_WORD = re.compile(r"\w+")
_KERNEL = re.compile(r"(\w+) = \w+\.\w+\(.*r?'''$")
_MANY_INPUTS = 12
"""A line that names more inputs than this only takes them in."""


def tape_lines(text: str) -> list[Line]:
    """Of a tape graph's text: each line knows the node of the tape that it belongs to."""
    lines: list[Line] = []
    inputs: list[Line] = []
    node: int | None = None
    for line in text.splitlines():
        found = _NODE.match(line)
        node = int(found[1]) if found else None if line.startswith("  return") else node
        (inputs if line.startswith("  input_") else lines).append(Line(line, (), node))
    return [*lines, *inputs]  # of which there may be hundreds


def defined(line: str) -> str | None:
    """The name that a line of an ATen graph gives its value."""
    found = _DEFINES.match(line)
    return found[1] if found else None


def aten_texts(text: str) -> list[str]:
    """The lines of an ATen graph, shortened: without where operators are found, and without what only lets go of
    values at the end of a line."""
    lines = (_FREES.sub("", line) for line in text.strip("\n").splitlines() if line.strip())
    return [line.replace("torch.ops.aten.", "aten.") for line in lines]


def code_lines(text: str, aten: Iterable[tuple[int, str]]) -> list[Line]:
    """A backend's own code, linked with the lines of the ATen graph that it was made of.

    A line is linked with the operator whose name it has. Where the backend names things in its own way, as Inductor
    does, a line that names inputs of the graph is linked with the operators that take these, and the lines of a kernel
    with those that its calls are linked with.

    Args:
        aten: the graph's lines, each with its number in its stage.
    """
    names: dict[str, int] = {}
    users: dict[str, list[int]] = {}
    returns: list[int] = []
    for number, line in aten:
        if line.lstrip().startswith("def forward("):
            users = {word: [] for word in _WORD.findall(line.partition("(")[2]) if word != "self"}
            continue
        own = defined(line)
        if own is not None:
            names[own] = number
        elif line.lstrip().startswith("return "):
            returns.append(number)
        for word in set(_WORD.findall(line)) & users.keys():
            users[word].append(number)
    return _joined([_FREES.sub("", line) for line in text.strip("\n").splitlines()], names, users, returns)


def _joined(
    texts: list[str], names: Mapping[str, int], users: Mapping[str, list[int]], returns: list[int]
) -> list[Line]:
    links: dict[int, tuple[int, ...]] = {}
    kernels: dict[str, list[int]] = {}  # the lines of each
    body: list[int] | None = None
    for number, text in enumerate(texts):
        begins = _KERNEL.match(text)
        if begins:
            body = kernels[begins[1]] = []
        if body is not None:
            body.append(number)
            if text.startswith("'''"):
                body = None
            continue
        own, words = defined(text), set(_WORD.findall(text))
        if own is not None and own in names:
            links[number] = (names[own],)
        elif text.lstrip().startswith("return ") and text.startswith(" "):
            links[number] = tuple(returns)
        elif "def " not in text and 0 < len(taken := words & users.keys()) <= _MANY_INPUTS:
            if text.lstrip().startswith("del ") or "rand_strided" in text:
                continue
            links[number] = tuple(sorted({user for word in taken for user in users[word]}))
        for kernel in words & kernels.keys():
            first = kernels[kernel][0]
            links[first] = tuple(sorted({*links.get(first, ()), *links.get(number, ())}))
    like = {number: lines[0] for lines in kernels.values() for number in lines[1:]}
    return [Line(text, like.get(number, links.get(number, ()))) for number, text in enumerate(texts)]
