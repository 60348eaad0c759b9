"""The CUDA streams on which the nodes of a tape were recorded: the tape may run only on the same streams. Private API
of torch; written against 2.13, tried on a GPU with 2.11 alone, and on the CPU with 2.11 to 2.15.

``docs/internals/engine.md`` has the reasons. All functions that change the current streams are watched. For each
thread, the numbers of nodes recorded under each set of streams are kept. The engine's own rules are in
``torch/csrc/autograd/engine.cpp`` and ``input_buffer.cpp``.

Nothing here happens before CUDA is in use. Not known are:

- streams that C++ code of others sets and resets while it records nodes, and ``GreenContext``. Some Pythons do not give
  access to the dictionary of a class made by C++; there also ``with stream:`` (``torch.cuda.stream`` is known);
- nodes recorded before the first ``enable``, in a program whose memory was all on the default stream then: they count
  as the default stream's. With memory on another stream, they count as unknown;
- nodes that another thread recorded on a default stream, if backward is called on another stream; nodes that a hook
  recorded inside a backward of the eager engine; and nodes with a number of the user's own (``_set_sequence_nr``);
- the stream of an ``AccumulateGrad`` node: ``.grad`` is written on the stream on which backward is called. The eager
  engine makes that stream wait for the write, so only a reader of ``.grad`` on a third stream sees a difference.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import gc
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...capture.tape import LEAF_NUMBER, MAX_NODES_READ, first_nodes
from ...diagnostics.bypass import STREAM_CAPTURE, on_other_streams
from ...process_state import PROCESS
from ...shadow_cache import Bypass

Streams = tuple[tuple[int, int], ...] | None
"""Index and stream number of each device whose current stream is not its default one. None: unknown."""
DEFAULT: Streams = ()
UNKNOWN: Streams = None

_MAX_CHANGES = 1024
"""The largest number of changes kept of one thread; of older nodes it is then not known where they were recorded."""
_MAX_THREADS = 64
"""Maximum number of threads with separate accounts, among those that recorded on other streams than default ones."""
_SETTERS = ("_cuda_setStream", "_accelerator_setStream")
"""The functions that ``torch.cuda.stream``, ``torch.cuda.set_stream`` and ``torch.accelerator.set_stream`` call."""

_engines_task = torch._C._current_graph_task_id
"""The engine's own: -1 outside of its backwards, those that are compiled among them."""


def _recorded() -> int:
    """Return how many nodes the calling thread has recorded so far: the number of the next node."""
    return torch._C._autograd._get_sequence_nr()


def _current_streams() -> Streams:
    found = [torch._C._cuda_getCurrentStream(index) for index in range(torch._C._cuda_getDeviceCount())]
    return tuple([(device, number) for number, device, _ in found if number])  # a default stream's number is 0


def _memory_on_other_streams() -> bool:
    """Return whether memory was allocated on another stream than the default one, and not returned to CUDA."""
    try:
        return any(segment["stream"] for segment in torch.cuda.memory_snapshot())
    except RuntimeError:  # an allocator that gives no account
        return True


class _Thread:
    """The streams under which a thread recorded its nodes.

    Attributes:
        changes: the number of the first node, and the streams that were current from then on.
        seen: the number of the next node at the last look at the thread.
        listed: whether other threads look at this account: only if it has more than default streams.
    """

    def __init__(self, before: Streams, seen: int, streams: Streams) -> None:
        self.changes: list[tuple[int, Streams]] = [(0, before)]
        self.seen = seen
        self.listed = False
        self.change(seen, streams)

    def look(self, number: int, streams: Streams) -> None:
        """Note that the thread has recorded ``number`` nodes, and that these streams are current."""
        if streams != self.changes[-1][1]:  # something that is not watched has set them, some time ago
            self.change(self.seen, UNKNOWN)
            self.change(number, streams)
        self.seen = number

    def change(self, number: int, streams: Streams) -> None:
        """Note that these streams are current from the node of this number on."""
        if self.changes[-1][0] == number:
            self.changes.pop()  # nothing was recorded there
        if not self.changes or self.changes[-1][1] != streams:
            self.changes.append((number, streams))
        if len(self.changes) > _MAX_CHANGES:
            self.changes[: _MAX_CHANGES // 2] = [(0, UNKNOWN)]

    def at(self, number: int) -> Streams:
        """Return the streams under which a node was recorded."""
        return self.changes[self._find(number)][1]

    def during(self, lowest: int, highest: int) -> set[Streams]:
        """Return all streams under which the nodes from one number to another were recorded."""
        return {streams for _, streams in self.changes[self._find(lowest) : self._find(highest) + 1]}

    def _find(self, number: int) -> int:
        return bisect.bisect_right(self.changes, number, key=lambda change: change[0]) - 1

    def only(self, streams: Streams) -> bool:
        """Return whether all nodes were recorded under these streams."""
        return len(self.changes) == 1 and self.changes[0][1] == streams


class StreamWatch:
    """Knows on which streams the nodes of the process were recorded."""

    def __init__(self) -> None:
        self.in_use = False  # CUDA is not: there is nothing to ask
        self._asked = False
        self._local = threading.local()
        self._lock = threading.RLock()
        self._threads: list[_Thread] = []
        self._unsure: set[int] = set()
        self._by_engine: set[Streams] = set()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Begin to watch as soon as CUDA is in use; at once where it is."""
        if self._asked or not hasattr(torch._C, _SETTERS[0]):
            return
        self._asked = True
        torch.cuda._lazy_call(self.start)

    def start(self) -> None:
        """CUDA is in use from now on."""
        if self.in_use:
            return
        streams = _current_streams()
        if streams != DEFAULT or (torch.cuda._initialized and _memory_on_other_streams()):
            self._unsure = set(sys._current_frames())  # the threads whose nodes so far may lie on any stream
        self.in_use = True
        self._look()
        for name in _SETTERS:
            if hasattr(torch._C, name):
                self._replace(torch._C, name)
        for name in ("__enter__", "__exit__"):  # a stream is a context manager, written in C++
            self._replace(torch.Stream, name)

    def reason(self, outputs: Sequence[Any]) -> Bypass | None:
        """Return why a backward from ``outputs``, called now in this thread, cannot be compiled; None if it can.

        Call this only if CUDA is in use. It takes some microseconds, and 0.5 more for each node of the tape if nodes
        were recorded on different streams.
        """
        if torch._C._cuda_isCurrentStreamCapturing():
            return STREAM_CAPTURE
        return self._elsewhere(outputs)

    def differentiable(self, outputs: Sequence[Any]) -> None:
        """Note that the eager engine is about to run a backward that records nodes, in its own threads, on the tape's
        streams."""
        streams = self._look().changes[-1][1] if self._elsewhere(outputs) is None else UNKNOWN
        if streams != DEFAULT:
            self._by_engine.add(streams)

    def reset_after_fork(self) -> None:
        """A forked child cannot use CUDA where its parent did."""
        self.in_use = False
        self._lock = threading.RLock()

    def stop(self) -> None:
        """Watch no more; for tests."""
        while self._undo:
            self._undo.pop()()
        self.in_use = self._asked = False

    def _elsewhere(self, outputs: Sequence[Any]) -> Bypass | None:
        mine = self._look()
        now = mine.changes[-1][1]
        with self._lock:
            others = [*filter(functools.partial(operator.is_not, mine), self._threads)]
        if any(streams != now for streams in self._by_engine):
            return on_other_streams("a node that another backward recorded (create_graph)")
        if mine.only(now) and not others:
            return None
        nodes = first_nodes(outputs)
        if len(nodes) > MAX_NODES_READ:
            return on_other_streams(f"some node of a tape of more than {MAX_NODES_READ} nodes")
        numbered = [(number, node) for node in nodes if (number := type(node)._sequence_nr(node)) != LEAF_NUMBER]
        if not numbered:
            return None
        numbers = [number for number, _ in numbered]
        lowest, highest = min(numbers), max(numbers)
        here = {DEFAULT, now}
        if mine.during(lowest, highest) == {now} and all(each.during(lowest, highest) <= here for each in others):
            return None
        for number, node in numbered:
            if mine.at(number) != now or any(each.at(number) not in here for each in others):
                return on_other_streams(type(node).name(node).rpartition("::")[2])
        return None

    def _look(self) -> _Thread:
        """Note the streams that are current in the calling thread; gives its account."""
        number, streams = _recorded(), _current_streams()
        mine: _Thread | None = getattr(self._local, "thread", None)
        if mine is not None:
            mine.look(number, streams)
        else:
            # The watch saw no change of this thread's streams, but does not see those that the engine sets.
            unsure = _engines_task() != -1 or threading.get_ident() in self._unsure
            before = UNKNOWN if unsure else streams
            mine = self._local.thread = _Thread(before, number, streams)
        self._list(mine)
        return mine

    def _list(self, mine: _Thread) -> None:
        if mine.listed or mine.only(DEFAULT):
            return
        with self._lock:
            mine.listed = True
            self._threads.append(mine)
            if len(self._threads) > _MAX_THREADS:
                self._merge_threads()

    def _merge_threads(self) -> None:
        """Merge the older half of the threads that are back on default streams into one account, whose streams are
        unknown."""
        older, newer = self._threads[: _MAX_THREADS // 2], self._threads[_MAX_THREADS // 2 :]
        done = [each for each in older if each.changes[-1][1] == DEFAULT]
        if done:
            for each in done:
                each.listed = False  # one that goes on comes back when it is looked at again
            merged = _Thread(UNKNOWN, max(each.changes[-1][0] for each in done), DEFAULT)
            self._threads = [merged, *(each for each in older if each.changes[-1][1] != DEFAULT), *newer]

    def _replace(self, owner: Any, name: str) -> None:
        """Look at the streams before and after each call of a function."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # In a backward of the engine's, streams are its own, and what it records is seen to in `differentiable`.
            if not self.in_use or _engines_task() != -1:
                return original(*args, **kwargs)
            mine = self._look()
            try:
                return original(*args, **kwargs)
            finally:
                mine.change(_recorded(), _current_streams())
                self._list(mine)

        _set(owner, name, watched)
        self._undo.append(functools.partial(_set, owner, name, original))


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, also of a class that C++ made and that allows no change."""
    try:
        setattr(owner, name, value)
    except TypeError:
        for attributes in gc.get_referents(owner.__dict__):
            if type(attributes) is dict:
                attributes[name] = value
                ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


STREAMS = StreamWatch()
PROCESS.register(STREAMS, after_fork=STREAMS.reset_after_fork)
