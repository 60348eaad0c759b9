"""Regions that run as CUDA graphs (written against torch 2.13, tried on 2.11), without copies of inputs that stay.

A CUDA graph reads and writes the addresses that it was captured with. So a graph is used again only if all inputs have
the same addresses, except small ones that move, which are copied in; and only while no result of its last run is
referenced. Any other call captures another graph, or runs the generated code.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ... import protocol
from ...protocol import ONLY_FORM, Compiled
from .capture import CAPTURING, CannotCaptureError, Device
from .direct import Run
from .inputs import Inputs
from .one_graph import Graph, bytes_of, captured, layout_of, memory_for

REPLAY = "CUDA graph"
"""The form of a region that runs as one; other forms are those of the generated code."""
FIRST_RUNS = 3
"""So often the generated code runs before anything is captured: the first runs allocate what later ones do not."""
SIGHTINGS = 2
"""Number of earlier calls with the same addresses after which they are captured."""
MAX_GRAPHS = 128
"""The largest number of graphs kept of one region's code."""
MAX_SEEN = 256
"""The largest number of sets of addresses that are remembered without a graph."""
MAX_BYTES = 1 << 30
"""Bytes that the results of one region's graphs may take, at most."""
MAX_SPOILT = 8
"""Number of times that the memory of results may be moved before captures end."""
FREE_CAPTURES = 160
"""Number of free captures. Each further one needs this number of replays:"""
REPLAYS_FOR_A_CAPTURE = 32
PATIENCE = 256
"""Limit of runs of the generated code: this number, plus eight times the replays. Beyond it no graph is looked for."""


class _NoRoomError(Exception):
    """Graphs in use take all memory that results may take."""


class _Thread(threading.local):
    ran = ONLY_FORM


class Replayed:
    """Calls generated code, as a CUDA graph where one was captured of it with the same addresses.

    A graph's results are lent: the graph writes their memory again once nothing refers to them. There are two graphs of
    the same addresses if results of the first are kept, as a ``.grad`` that is added to.

    Args:
        compiled: the generated code, with numbers for sizes, which draws no random numbers.
        device: the device on which the code runs.

    Attributes:
        why_not: the reason why no graph is captured (any more); empty if one may be.
        captures, replays: their numbers.
    """

    def __init__(self, compiled: Compiled, device: Device) -> None:
        self.compiled = compiled
        self.device = device
        self.why_not = ""
        self.captures = self.replays = 0
        self._calls = self._runs = self._spoilt = 0
        self._lock = threading.Lock()
        self._inputs = Inputs(device)
        self._graphs: OrderedDict[Hashable, list[Graph]] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._layouts: list[Any] = []  # of the results: of each tensor its sizes, strides and dtype
        self._spare: dict[int, list[list[Any]]] = {}  # memory of graphs that are gone, by stream
        self._thread = _Thread()

    def another(self) -> Replayed:
        """Return the same code for another region, with graphs of its own."""
        return Replayed(self.compiled, self.device)

    # ---- forms -----------------------------------------------------------------------------------------------------

    def form_for(self, arguments: Sequence[Any]) -> str:
        """Return the form of the next call in this thread."""
        key = self._key(arguments)
        if key is not None and (key in self._graphs or self._is_worth_it(key)):
            return REPLAY
        return protocol.form_for(self.compiled, arguments)

    def is_last(self, form: str) -> bool:
        """Return whether no other form takes over from this one later."""
        return form == REPLAY or (bool(self.why_not) and protocol.is_last(self.compiled, form))

    def form_that_ran(self) -> str:
        """Return the form of the last call in this thread: another than expected if another thread was capturing, for
        example."""
        return self._thread.ran

    def drop(self, form: str) -> bool:
        """Never run a form again. False where nothing takes its place."""
        if form != REPLAY:
            return protocol.drop(self.compiled, form)
        self._give_up("a graph gave something else than the real calls")
        return True

    # ---- running ---------------------------------------------------------------------------------------------------

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run it. The arguments are emptied, as :data:`Compiled` has it."""
        mine = list[bool]()  # whether the lock is: in one go, for Ctrl-C could come before an assignment
        try:
            if not self.why_not:
                mine += map(self._lock.acquire, (False,))  # else another thread runs it
            if mine and mine[0] and not self.device.is_capturing():
                self._calls += 1
                graph = self._graph(arguments)
                if self._inputs.watch(arguments, graph is not None):
                    self._drop_all()  # they read where nothing is copied to
                    graph = None
                if graph is not None:
                    self.replays += 1
                    self._thread.ran = REPLAY
                    self._inputs.copy_in(arguments)
                    return graph.run(arguments)
        finally:
            if mine and mine[0]:
                self._lock.release()
        return self.run_code(arguments)

    def run_code(self, arguments: list[Any], run: Run | None = None) -> Sequence[Any]:
        """Run the generated code as it is, or in another way. The arguments are emptied."""
        self._thread.ran = protocol.form_for(self.compiled, arguments)
        results = self.compiled(arguments) if run is None else run(self.compiled, arguments)
        self._runs += 1
        if self._runs <= FIRST_RUNS:
            self._layouts = [layout_of(each) for each in results]
        elif self._runs > PATIENCE + 8 * self.replays and not self.why_not:
            self._give_up("its inputs lie elsewhere at each call")
        return results

    def _key(self, arguments: Sequence[Any]) -> Hashable | None:
        if self.why_not:
            return None
        if not self._inputs.can_be_replayed(arguments):
            self._give_up("it is given what lies neither on its device nor is one number")
            return None
        return self._inputs.key(arguments)

    def _graph(self, arguments: list[Any]) -> Graph | None:
        """A graph that can run now with these arguments; it is captured if that is worth it."""
        key = self._key(arguments)
        if key is None:
            return None
        known = self._graphs.get(key, [])
        graph = next((each for each in known if each.is_free()), None)
        if graph is None and any(each.is_spoilt() for each in known):
            self._spoilt += 1
            known = self._graphs[key] = [each for each in known if not each.is_spoilt()]
            if not known:
                del self._graphs[key]
            if self._spoilt > MAX_SPOILT:
                self._give_up("the memory of its results is moved")
                return None
        if graph is None and len(known) < 2 and self._is_worth_it(key):
            graph = self._captured(key, arguments)
            if graph is not None:
                self._graphs.setdefault(key, []).append(graph)
        if graph is not None:
            graph.used = self._calls
            self._graphs.move_to_end(key)
            return graph
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return None

    def _is_worth_it(self, key: Hashable) -> bool:
        """Return whether a graph for these addresses is likely to be used again."""
        allowed = FREE_CAPTURES + self.replays // REPLAYS_FOR_A_CAPTURE
        return (
            self._runs >= FIRST_RUNS
            and self.captures < allowed
            and (key in self._graphs or self._seen.get(key, 0) >= SIGHTINGS)
        )

    def _captured(self, key: Hashable, arguments: list[Any]) -> Graph | None:
        mine = list[bool]()  # as in a call
        try:
            mine += map(CAPTURING.acquire, (False,))
            if not mine[0]:
                return None
            self._make_room(key)
            self.captures += 1
            spare = self._spare.get(self.device.stream())
            memory = spare.pop() if spare else [memory_for(each, self.device) for each in self._layouts]
            return captured(self.compiled, self._inputs.placed(arguments), memory, self.device)
        except _NoRoomError:
            return None
        except (CannotCaptureError, torch.OutOfMemoryError) as error:
            self._give_up(str(error).partition("\n")[0])
            return None
        finally:
            if mine and mine[0]:
                CAPTURING.release()

    def _make_room(self, key: Hashable) -> None:
        """Release a graph whose addresses did not occur for a while: the next capture gets its memory.

        New memory would change other addresses, and so on without end.

        Raises:
            CannotCaptureError: the results take too much memory.
            _NoRoomError: the results take too much memory beside those of graphs in use.
        """
        size = sum(bytes_of(each) for each in self._layouts)
        if size > MAX_BYTES:
            raise CannotCaptureError(f"its results take {size} bytes")
        count = sum(len(each) for each in self._graphs.values())
        oldest = next(iter(self._graphs), None)
        if oldest is not None and oldest != key:
            unused = self._calls - max(each.used for each in self._graphs[oldest])
            if unused > 2 * count:
                self._drop(oldest)
        stream = self.device.stream()
        if (self._memories() + 1) * size > MAX_BYTES:
            self._spare = {stream: self._spare.get(stream, [])}
        if len(self._graphs) >= MAX_GRAPHS or (
            not self._spare.get(stream) and (self._memories() + 1) * size > MAX_BYTES
        ):
            raise _NoRoomError

    def _memories(self) -> int:
        """Return the number of memories for results: those of all graphs, and those kept for other graphs."""
        return sum(map(len, self._graphs.values())) + sum(map(len, self._spare.values()))

    def _drop(self, key: Any) -> None:
        for graph in self._graphs.pop(key):
            if graph.is_free():
                self._spare.setdefault(key[-1], []).append(graph.memory)  # what the stream still does reads it

    def _drop_all(self) -> None:
        for key in list(self._graphs):
            self._drop(key)
        for spare in self._spare.values():
            del spare[1:]
        self._seen.clear()

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._drop_all()
        self._spare.clear()
