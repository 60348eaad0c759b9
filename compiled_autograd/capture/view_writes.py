"""The function that wrote a part of a tensor in place, which the engine's key lacks.

The engine's node for a write into a view (``CopySlices``) has the function that wrote as a member. Its key has the
function's saved values, but not the function (``CopySlices::compiled_args``,
``torch/csrc/autograd/functions/tensor.cpp``, 2.13): ``part.sin_()`` and ``part.cos_()`` have one key. Nor does Python
show the function. So its C++ class is read from the node's memory, where a pointer to the class's table of methods
identifies it.

The function has to be read before the engine is called, since the engine releases the tape once it has the key.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ..process_state import PROCESS
from . import tape

NAME = "CopySlices"
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_NODE_IN_OBJECT = object.__basicsize__
"""Offset of the pointer to the C++ node in the node's Python object (``THPCppFunction``)."""
_LARGEST = 2048


class ViewWrites:
    """For each tape with such writes that was captured, the classes of their functions."""

    def __init__(self) -> None:
        self._classes: dict[int, tuple[int | None, ...]] = {}
        self._roots: set[Any] = set()

    def keep(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Note a captured tape with such writes, before the engine keeps it. False if the functions are unknown."""
        described = _described(outputs, inputs)
        if described is None:
            return False
        self._classes[described[0]] = described[1]
        self._roots.update(map(_kind, tape.root_nodes(outputs)))
        return True

    def differ(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Return whether the engine may confuse a tape with a captured one, though other functions may have written in
        it."""
        if not self._classes or self._roots.isdisjoint(map(_kind, tape.root_nodes(outputs))):
            return False
        described = _described(outputs, inputs)
        return described is None or self._classes.get(described[0], described[1]) != described[1]

    def forget(self) -> None:
        """Forget all, since the engine's cache was cleared."""
        self._classes.clear()
        self._roots.clear()


def _described(outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[int, tuple[int | None, ...]] | None:
    """A number that tapes with one key of the engine's have in common, and the classes; None where they are unknown."""
    nodes = tape.first_nodes(outputs)
    if len(nodes) > tape.MAX_NODES_READ:
        return None
    if inputs:  # of the others the key says nothing
        nodes = [visited.node for visited in tape.walk(outputs, inputs)]
    writes = [node for node in nodes if type(node).__name__ == NAME]
    place = _place_of_function() if writes else 0
    if place is None:
        return None
    return hash(tuple(map(_kind, nodes))), tuple([_class_of_function(node, place) for node in writes])


def _kind(node: Any) -> Any:
    return BackwardCFunction if isinstance(node, BackwardCFunction) else type(node)


def _class_of_function(node: Any, place: int) -> int | None:
    function = _read(_read(id(node) + _NODE_IN_OBJECT) + place)  # type: ignore[operator]
    return _read(function) if function else None  # it has none once the tape was freed


def _read(address: int) -> int | None:
    return ctypes.c_void_p.from_address(address).value


@functools.cache
def _place_of_function() -> int | None:
    """At which byte of its memory the node has the pointer to the function; None where that does not show.

    It is looked for in nodes whose function is known, and accepted where there is one place alone that fits them all.
    """
    try:
        with Path("/proc/self/mem").open("rb", buffering=0) as memory, torch.inference_mode(False), torch.enable_grad():
            found = [_places(memory, name) for name in ("neg", "frac", "deg2rad")]  # they save nothing
    except OSError:  # no such file, or not to be read
        return None
    common = set.intersection(*found)
    return common.pop() if len(common) == 1 else None


def _places(memory: Any, name: str) -> set[int]:
    """Return the possible offsets of the pointer to a function, read so that a wrong address gives an error, not a
    crash."""
    leaf = torch.zeros(2, 2, device="cpu", requires_grad=True)
    whole, other = leaf * 1, getattr(leaf, name)()
    getattr(whole[0], f"{name}_")()
    write, alike = whole.grad_fn, other.grad_fn

    def read(address: int) -> int:
        memory.seek(address)
        return int.from_bytes(memory.read(_POINTER), "little")

    wanted = read(read(id(alike) + _NODE_IN_OBJECT))
    node = read(id(write) + _NODE_IN_OBJECT)
    found = set()
    for place in range(0, _LARGEST, _POINTER):
        try:
            if read(read(node + place)) == wanted:
                found.add(place)
        except (OSError, OverflowError, ValueError):
            continue
    return found


VIEW_WRITES = PROCESS.register(ViewWrites())
