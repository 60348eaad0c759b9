"""Texts of a graph's stages as lines, linked as far as the texts themselves tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

from .data import Line

_NODE = re.compile(r"#(\d+) ")
_DEFINES = re.compile(r"\s+(\w+) = ")
_FREES = re.compile(r"(;?  (\w+ = )+None)+;?\s*$")
_OPERATOR = re.compile(r"\baten\.(\w+)")
_PRODUCT = re.compile(r"mm|addmm|bmm|baddbmm|mv|dot|convolution\w*|\w*attention\w*")
"""Operators that are calls of their own in generated code."""
_CALLED = re.compile(r"\b(?:extern_kernels|aten)\.(\w+)")
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


def code_lines(text: str, aten: Iterable[tuple[int, str]], first: int = 0) -> list[Line]:
    """A backend's own code, linked with the lines of the ATen graph that it was made of.

    A line is linked with the operator whose name it has. Where the backend names things in its own way, as Inductor
    does, nothing says which operators a kernel holds: a call that names inputs of the graph is linked with the
    operators that depend on these, as far as no product lies between, and a call of one operator with those of that
    name. The lines of a kernel are linked as its calls are.

    Args:
        aten: the graph's lines, each with its number in its stage.
        first: the number that the first line of the code gets in its own stage.
    """
    return _Linked(aten).lines([_FREES.sub("", line) for line in text.strip("\n").splitlines()], first)


class _Linked:
    """What is known of an ATen graph: where each name is defined, and on which of its inputs each line depends."""

    def __init__(self, aten: Iterable[tuple[int, str]]) -> None:
        self.names: dict[str, int] = {}
        self.returns: list[int] = []
        self.direct: dict[str, list[int]] = {}
        self.users: dict[str, list[int]] = {}
        self.operators: dict[int, str] = {}
        reach: dict[str, set[str]] = {}
        for number, line in aten:
            if line.lstrip().startswith("def forward("):
                inputs = [word for word in _WORD.findall(line.partition("(")[2]) if word != "self"]
                self.direct = {name: [] for name in inputs}
                self.users = {name: [] for name in inputs}
                continue
            own, operator = defined(line), _OPERATOR.search(line)
            words = set(_WORD.findall(line.partition(" = ")[2]))
            found = words & self.direct.keys()
            for name in found:
                self.direct[name].append(number)
            for word in words & reach.keys():
                found = found | reach[word]
            if own is None:
                self.returns += [number] if line.lstrip().startswith("return ") else []
                continue
            self.names[own] = number
            self.operators[number] = operator[1] if operator else ""
            for name in found:
                self.users[name].append(number)
            reach[own] = set() if _PRODUCT.fullmatch(self.operators[number]) else found

    def lines(self, texts: list[str], start: int) -> list[Line]:
        """The code, linked."""
        links: dict[int, tuple[int, ...]] = {}
        kernels: dict[str, list[int]] = {}  # the lines of each
        body: list[int] | None = None
        for number, text in enumerate(texts):
            begins = _KERNEL.match(text)
            if begins:
                body = kernels[begins[1]] = []
            if body is not None:
                body.append(number)
                body = None if text.startswith("'''") else body
                continue
            words = set(_WORD.findall(text))
            found = self._links(text, words, words & kernels.keys())
            if found:
                links[number] = found
            for kernel in words & kernels.keys():
                first = kernels[kernel][0]
                links[first] = tuple(sorted({*links.get(first, ()), *found}))
        like = {number: start + lines[0] for lines in kernels.values() for number in lines[1:]}
        return [Line(text, like.get(number, links.get(number, ()))) for number, text in enumerate(texts)]

    def _links(self, text: str, words: Set[str], kernels: Set[str]) -> tuple[int, ...]:
        own = defined(text)
        if own is not None and own in self.names:
            return (self.names[own],)
        if text.startswith(" ") and text.lstrip().startswith("return "):
            return tuple(self.returns)
        taken = words & self.direct.keys()
        if "def " in text or "rand_strided" in text or text.lstrip().startswith("del ") or len(taken) > _MANY_INPUTS:
            return ()
        called = _CALLED.search(text)
        if kernels or called:
            found = {number for name in taken for number in self.users[name]}
            if called:
                found = {number for number in found if self.operators[number] == called[1]}
            else:
                found = {number for number in found if not _PRODUCT.fullmatch(self.operators[number])}
        else:
            found = {number for name in taken for number in self.direct[name]}
        return tuple(sorted(found))
