"""Regions that run as CUDA graphs (written against torch 2.13, tried on 2.11): no input is copied, and no result.

A CUDA graph reads and writes the addresses that it was captured with. So a graph is used again only where all inputs
lie where they lay then, as parameters do, and as what a training allocates in each step mostly does; and only while
nobody holds what its last run gave. Any other call captures another graph, or runs the generated code as it is.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...protocol import ONLY_FORM, Compiled
from .capture import CAPTURING, CannotCaptureError, Device, Replayable

REPLAY = "CUDA graph"
"""The form of a region that runs as one; the other one is the generated code."""
FIRST_RUNS = 3
"""So often the generated code runs before anything is captured: the first runs allocate what later ones do not."""
MAX_GRAPHS = 128
"""The largest number of graphs kept of one region's code; the one that was used least recently goes."""
MAX_SEEN = 256
"""So many sets of addresses are remembered that were met once: what is met again is captured."""
FREE_CAPTURES = 160
"""So many captures cost nothing; each further one must have been earned by so many replays:"""
REPLAYS_FOR_A_CAPTURE = 32
PATIENCE = 256
"""After so many calls more than replays, and eight times the replays, no graph is looked for any more."""
Run = Callable[[Compiled, list[Any]], Sequence[Any]]
_OWN, _NUMBER, _OTHER = "own", "number", "other"


@dataclass(slots=True)
class _Graph:
    """One graph, and how its results are given.

    Attributes:
        graph: what is replayed.
        results: of each result the tensor that the graph writes it to; what is no tensor, as it is.
        through: of each result that lies in the memory of an input: its number, that of the input, and where it lies.
        pieces: the memory that the results lie in.
        unused: how many hold each of these while nobody outside does.
    """

    graph: Replayable
    results: list[Any]
    through: list[tuple[int, int, tuple[Any, ...]]]
    pieces: list[torch.UntypedStorage] = field(init=False)
    unused: list[int] = field(init=False)
    _numbers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = [each.untyped_storage() for each in self.results if isinstance(each, torch.Tensor)]
        self._numbers = [each._cdata for each in self.pieces]
        self.unused = self._holders()

    def is_free(self) -> bool:
        """Whether nobody holds what the last run gave, nor anything else in that memory."""
        return self._holders() == self.unused

    def _holders(self) -> list[int]:
        """Tensors and what else in C++ holds each piece; and who has the one object of Python that stands for it."""
        return [*map(torch._C._storage_Use_Count, self._numbers), *map(sys.getrefcount, self.pieces)]

    def run(self, arguments: list[Any]) -> list[Any]:
        """Replay it, and give tensors in its memory that are new to everybody. The arguments are emptied."""
        self.graph.replay()
        given = [each.data if isinstance(each, torch.Tensor) else each for each in self.results]
        for number, source, (size, stride, offset) in self.through:
            given[number] = _lying_in(arguments[source], size, stride, offset)
        arguments.clear()
        return given


class Replayed:
    """Calls generated code, as a CUDA graph where one was captured of it with the same addresses.

    A graph's results are lent: they lie in memory that it writes to again, when nobody holds them any more. Two graphs
    of the same addresses are there where results of the first are kept, as a ``.grad`` that is added to.

    Args:
        compiled: the generated code, with numbers for sizes, which draws no random numbers.
        device: where it runs.

    Attributes:
        why_not: why no graph is captured (any more); empty where one may be.
        captures, replays: how often each has happened.
    """

    def __init__(self, compiled: Compiled, device: Device) -> None:
        self.compiled = compiled
        self.device = device
        self.why_not = ""
        self.captures = self.replays = 0
        self._runs = 0
        self._lock = threading.Lock()
        self._graphs: OrderedDict[Hashable, list[_Graph]] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._kinds: list[str] | None = None
        self._layouts: list[Any] = []  # of the results: of each tensor its sizes, strides and dtype

    def another(self) -> Replayed:
        """The same code for another region, with graphs of its own."""
        return Replayed(self.compiled, self.device)

    # ---- forms -----------------------------------------------------------------------------------------------------

    def form_for(self, arguments: Sequence[Any]) -> str:
        """What the next call in this thread runs."""
        key = self._key(arguments)
        return REPLAY if key is not None and (key in self._graphs or self._is_worth_it(key)) else ONLY_FORM

    def is_last(self, form: str) -> bool:
        """Whether no other form takes over from this one later."""
        return form == REPLAY or bool(self.why_not)

    def drop(self, form: str) -> bool:
        """Never run a form again. False where nothing takes its place."""
        if form != REPLAY:
            return False
        self._give_up("a graph gave something else than the real calls")
        return True

    # ---- running ---------------------------------------------------------------------------------------------------

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run it. The arguments are emptied, as :data:`Compiled` has it."""
        mine = list[bool]()  # whether the lock is: in one go, for Ctrl-C could come before an assignment
        try:
            if not self.why_not:
                mine += map(self._lock.acquire, (False,))  # else another thread runs it
            if mine and mine[0]:
                key = self._key(arguments)
                graph = None if key is None else self._graph(key, arguments)
                if graph is not None:
                    self.replays += 1
                    return graph.run(arguments)
        finally:
            if mine and mine[0]:
                self._lock.release()
        return self.run_code(arguments)

    def run_code(self, arguments: list[Any], run: Run | None = None) -> Sequence[Any]:
        """Run the generated code as it is, or in another way. The arguments are emptied."""
        results = self.compiled(arguments) if run is None else run(self.compiled, arguments)
        self._runs += 1
        if self._runs <= FIRST_RUNS:
            self._layouts = [_layout(each) for each in results]
        elif self._runs > PATIENCE + 8 * self.replays and not self.why_not:
            self._give_up("its inputs lie elsewhere at each call")
        return results

    def _key(self, arguments: Sequence[Any]) -> Hashable | None:
        """All that a graph has in it of a call: addresses, the stream, and numbers that are read when it is captured.
        None where there can be none."""
        if self.why_not:
            return None
        if self._kinds is None:
            self._kinds = list(map(self._kind, arguments))
            if _OTHER in self._kinds:
                self._give_up("it is given what lies neither on its device nor is one number")
                return None
        parts: list[Any] = [
            each.data_ptr() if kind is _OWN else _number(each)
            for kind, each in zip(self._kinds, arguments, strict=True)
        ]
        parts.append(self.device.stream())
        return tuple(parts)

    def _kind(self, argument: Any) -> str:
        if not isinstance(argument, torch.Tensor):
            return _NUMBER if isinstance(argument, (int, float)) else _OTHER
        if argument.device.type == "cpu" and argument.dim() == 0:
            return _NUMBER
        here = argument.device.type == self.device.kind and argument.device.index in (None, self.device.index)
        return _OWN if here and argument.layout is torch.strided else _OTHER

    def _graph(self, key: Hashable, arguments: list[Any]) -> _Graph | None:
        """A graph that can run now with these arguments; it is captured if that is worth it."""
        known = self._graphs.get(key)
        if known is not None:
            self._graphs.move_to_end(key)
            for graph in known:
                if graph.is_free():
                    return graph
        if len(known or ()) >= 2 or not self._is_worth_it(key):
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            return None
        made = self._captured(arguments)
        if made is not None:
            self._graphs.setdefault(key, []).append(made)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        return made

    def _is_worth_it(self, key: Hashable) -> bool:
        """Whether a graph for these addresses would be used again, as far as one can tell."""
        allowed = FREE_CAPTURES + self.replays // REPLAYS_FOR_A_CAPTURE
        return self._runs >= FIRST_RUNS and self.captures < allowed and (key in self._seen or key in self._graphs)

    def _captured(self, arguments: list[Any]) -> _Graph | None:
        if self.device.is_capturing() or not CAPTURING.acquire(blocking=False):
            return None
        try:
            self.captures += 1
            return _captured(self.compiled, arguments, self._layouts, self.device)
        except (CannotCaptureError, torch.OutOfMemoryError) as error:
            self._give_up(str(error).partition("\n")[0])
            return None
        finally:
            CAPTURING.release()

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._graphs.clear()
        self._seen.clear()


def _number(argument: Any) -> Hashable:
    """A number as part of a key: what is equal is the same to every bit. No NaN equals another."""
    value = argument.item() if isinstance(argument, torch.Tensor) else argument
    return value if value and not isinstance(value, complex) else repr(value)


def _layout(value: Any) -> Any:
    return (value.size(), value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value


def _captured(compiled: Compiled, arguments: Sequence[Any], layouts: Sequence[Any], device: Device) -> _Graph:
    """A graph of a call. Its last part writes the results to memory that no other graph writes to.

    Raises:
        CannotCaptureError: there can be none.
    """
    inputs: dict[int, int] = {}
    for number, each in enumerate(arguments):
        if isinstance(each, torch.Tensor):
            inputs.setdefault(each.untyped_storage().data_ptr(), number)
    inputs.pop(0, None)  # of what has no memory
    results: list[Any] = [_empty(each, device) if isinstance(each, tuple) else each for each in layouts]
    through: list[tuple[int, int, tuple[Any, ...]]] = []

    def run() -> None:
        found = list(compiled(list(arguments)))
        if [_layout(each) for each in found] != list(layouts):
            raise CannotCaptureError("its results lie otherwise at each run")
        for number, each in enumerate(found):
            source = inputs.get(each.untyped_storage().data_ptr()) if isinstance(each, torch.Tensor) else None
            if source is not None:
                through.append((number, source, (each.size(), each.stride(), each.storage_offset())))
                results[number] = found[number] = None
        pairs = [(to, each) for to, each in zip(results, found, strict=True) if isinstance(each, torch.Tensor)]
        if pairs:  # a kernel for all of them, where one can do it
            torch._foreach_copy_([_each_once(to) for to, _ in pairs], [_each_once(each) for _, each in pairs])

    return _Graph(device.capture(run), results, through)


def _empty(layout: tuple[Any, ...], device: Device) -> torch.Tensor:
    size, stride, dtype, place = layout
    if place.type != device.kind:
        raise CannotCaptureError(f"one of its results lies on {place}")
    return torch.empty_strided(size, stride, dtype=dtype, device=place)


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of expanded dimensions, which share memory and cannot be written at once."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _lying_in(source: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    """A tensor in another one's memory, which is no view of it."""
    return source.data.as_strided(size, stride, offset).data
