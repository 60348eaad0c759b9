"""Split the texts of a graph's stages into lines, and link the lines by the names in the texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

from .data import Line

_NODE = re.compile(r"#(\d+) ")
_DEFINES = re.compile(r"\s+(\w+) = ")
_FREES = re.compile(r"(;?  (\w+ = )+None)+;?\s*$")
_OPERATOR = re.compile(r"\baten\.(\w+)")
_PRODUCT = re.compile(r"mm|addmm|bmm|baddbmm|mv|dot|convolution\w*|\w*attention\w*")
"""Operators for which generated code has separate calls."""
_CALLED = re.compile(r"\b(?:extern_kernels|aten)\.(\w+)")
_WORD = re.compile(r"\w+")
_KERNEL = re.compile(r"(\w+) = \w+\.\w+\(.*r?'''$")
_MANY_INPUTS = 12
"""Maximum inputs of a line that is linked; a line with more only unpacks arguments."""


def tape_lines(text: str) -> list[Line]:
    """Split the text of a tape graph into lines, each with its node of the tape. The inputs come last."""
    lines: list[Line] = []
    inputs: list[Line] = []
    node: int | None = None
    for line in text.splitlines():
        found = _NODE.match(line)
        node = int(found[1]) if found else None if line.startswith("  return") else node
        (inputs if line.startswith("  input_") else lines).append(Line(line, (), node))
    return [*lines, *inputs]  # last: there may be hundreds of inputs


def defined(line: str) -> str | None:
    """Return the name that a line of an ATen graph assigns, or None."""
    found = _DEFINES.match(line)
    return found[1] if found else None


def aten_texts(text: str) -> list[str]:
    """Return the lines of an ATen graph without ``torch.ops.`` prefixes, and without the assignments of None at the end
    of a line that free values."""
    lines = (_FREES.sub("", line) for line in text.strip("\n").splitlines() if line.strip())
    return [line.replace("torch.ops.aten.", "aten.") for line in lines]


def code_lines(text: str, aten: Iterable[tuple[int, str]], first: int = 0) -> list[Line]:
    """Split a backend's code into lines, and link them with the lines of its ATen graph.

    A line that assigns a name of the ATen graph is linked with that line of the graph. Inductor uses names of its own,
    so that the code does not say which operators a kernel contains. A kernel call that names inputs of the graph is
    therefore linked with the operators that depend on these inputs without a matrix product in between. A call of one
    operator is linked with those of them that have the operator's name. The lines of a kernel have the links of its
    calls.

    Args:
        aten: the graph's lines, each with its number in its stage.
        first: the number of the first line of the code in the stage of the code.
    """
    return _Linked(aten).lines([_FREES.sub("", line) for line in text.strip("\n").splitlines()], first)


class _Linked:
    """An ATen graph's names with the lines of their definitions, and the inputs on which each line depends."""

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
        """Return the lines of the code with their links."""
        links: dict[int, tuple[int, ...]] = {}
        kernels: dict[str, list[int]] = {}  # by name: the lines of the kernel
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
