"""Types of the extension, for Python. Each function of C++ is described here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

_Result = TypeVar("_Result")

Found = tuple[int, list[torch.Tensor], list[int], list[int | float], list[Any]]
"""The values of a tape: the number of the variant that serves or -1, tensors, sizes, scalars, users' objects."""


class HostedProgram(Protocol):
    """The compiled code of a region, with C++ tensors as arguments and results; ``is_straight_line`` says whether it
    runs without Python."""

    is_straight_line: bool


class Taken(Protocol):
    """The values of a tape that was taken. ``variant`` is the number of the variant that serves, or -1. ``reduced`` are
    the leaves with hooks of DDP's reducer."""

    variant: int
    reduced: list[torch.Tensor]

    def lists(self) -> tuple[list[torch.Tensor], list[int], list[int | float], list[Any]]:
        """Tensors, sizes, scalars, users' objects. It has nothing afterwards."""

    def run(
        self, program: HostedProgram, may_write: Callable[[], bool]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]] | None:
        """Run a program on the tensors, and give the leaves their gradients. It has nothing afterwards.

        Args:
            may_write: asked before anything is written; no other thread of Python comes in from then on.

        Returns:
            None; or where Python has to write, what the program gave, and the tensors, those that are leaves.
        """


class Plan(Protocol):
    """A tape that was learnt. Methods return a reason if they refuse a tape, or if it is another one."""

    nodes: int

    def compare(
        self, outputs: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any] = (), captures: bool = False
    ) -> Found | str:
        """Return the values of a tape, if it is the one that was learnt."""

    def add_variant(
        self, outputs: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any] = (), captures: bool = False
    ) -> Found | str:
        """Return the values of a tape, and add their properties as a variant of the plan."""

    def take(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        keep_graph: bool,
        inputs: Sequence[Any] = (),
        captures: bool = False,
    ) -> Taken | str:
        """Take the values of a tape, and free the tape as the engine would, unless it must be kept."""


Question = tuple[Any, str | None, Any]
"""A condition that C++ checks: (object, name, answer) if the attribute must be that very object, (function, None,
answer) if a call without arguments must return an equal value."""


class FastHit(Protocol):
    """A hit that Python has served, as C++ may serve it again."""


class FastPath(Protocol):
    """Called as ``run_backward``. Other backwards than its ``hits`` go to Python; ``served`` counts the hits."""

    hits: tuple[FastHit, ...]
    served: int

    def __call__(self, *arguments: Any, **named: Any) -> Any: ...

    def serve(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        keep_graph: bool,
        account: Any,
    ) -> Any:
        """Serve a ``loss.backward()`` that Python's policies have looked at.

        Args:
            account: has ``started``, the time of the call by ``time.perf_counter``; and ``told``, which is set together
                with the session's count.

        Returns:
            The variant that has run it, and the seconds in all. If the tape was taken but not run: the result of
            ``hand_over``, see :meth:`Module.fast_hit`. Else None.
        """


class Module(Protocol):
    """The extension."""

    built_for: str

    def apart(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in the state that PyTorch gives a new thread, and restore the state of the calling thread.

        The state is that of ``at::ThreadLocalState``: grad and inference mode, modes, transforms, autocast, profilers,
        hooks of saved tensors and of created nodes. Anomaly mode and the default dtype belong to the process.

        Raises:
            OSError: no thread could be started.
        """

    def fast_hit(
        self,
        plan: Plan,
        program: HostedProgram,
        shapes: int,
        settings: Any,
        structure: weakref.ref[Any],
        variant: weakref.ref[Any],
        watched: dict[Any, Any],
        number: int,
        questions: tuple[Sequence[Question], Sequence[Question]],
        hand_over: Callable[[Taken], Any],
        may_write: Callable[[], bool],
        write: Callable[[list[torch.Tensor | None], list[torch.Tensor | None]], None],
        counter: Any,
    ) -> FastHit:
        """Make a hit that Python is serving known, in this thread and state.

        Args:
            shapes: the number that the plan has for the hit's shapes.
            watched: keys of tapes that are left to Python, unless Python has looked them up.
            number: that of the session's settings: see :meth:`peek`.
            questions: those checked before the walk, and those checked once the tape is taken.
            hand_over: makes the Python object for a tape with which Python has to go on.
            may_write, write: of :meth:`Taken.run`: the check before, and the function for its results.
            counter: counts hits in its attribute of that name.
        """

    def fast_path(
        self,
        fallback: Callable[..., Any],
        resume: Callable[..., Any],
        interrupted: Callable[..., None],
        thread: Any,
        uses: Iterator[int],
        engine: tuple[Callable[..., Any], list[int], list[int], list[int]],
    ) -> FastPath:
        """Make the callable that serves known hits, and runs on eager what skips a look.

        Args:
            fallback: the way through Python.
            resume: the way through Python once the tape is taken: (session, arguments, named arguments, time of the
                call, hand_over, taken).
            interrupted: records a backward that ended before anything ran: (session, time, error).
            thread: the thread's state, as attribute ``here``.
            uses: numbers uses, to find the least recently used.
            engine: ``run_backward`` of the eager engine, and the threads that are in the engine, that write leaves, and
                that have a tape walked. While there is one of the last two kinds, no look is skipped here.
        """

    def in_own_loop(
        self, outputs: Sequence[Any], gradients: Sequence[Any], keep_graph: bool, least_nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor] | str:
        """A number and its gradient. The backward of the number on the eager engine is that of the outputs, run without
        the engine's queue; it can be run once. The reason where the engine is to run it itself, as it is where the tape
        has fewer nodes than ``least_nodes``."""

    def node_in_own_loop(self) -> Any:
        """The node that runs, where the innermost backward of the calling thread is such a one; else None."""

    def buffers_in_own_loop(self, ctx: Any) -> list[torch.Tensor | None] | None:
        """Return a sum of gradients or None for each tensor among the arguments of ``forward``. The own loop has to be
        running the node of ``ctx``, and the node must have no hooks of ``Node.register_hook``; else return None.

        Raises:
            RuntimeError: the engine would show none either, in its words.
        """

    def show_own_loop(self) -> None:
        """Have the engine know all nodes that the own loop runs from then on, if the innermost backward runs in the
        loop."""

    def order_in_own_loop(self) -> list[Any] | None:
        """The nodes of such a one in the order in which they run, as the engine tells it; else None."""

    def learn(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        order_shows: bool,
        inputs: Sequence[Any] = (),
        captures: bool = False,
    ) -> Plan | str:
        """Learn a tape, or the reason why not.

        Args:
            outputs, gradients, inputs: as ``run_backward`` has them; no inputs are all leaves.
            order_shows: a tape whose nodes were made in another order is another.
            captures: the gradients of inputs are asked for, and not added to theirs.
        """

    def peek(self, outputs: Sequence[Any], inputs: int, number: int) -> int | None:
        """Return a hash of a number, of the number of inputs, and of the classes and numbers of edges of the tape's
        first nodes, at most 64, level by level. None if an output is no tensor. About a microsecond.

        Args:
            number: the number of the session's settings in the ledger: under other settings it is another tape.
        """

    def program(self, function: Any, arguments: Sequence[int], gives: Sequence[int]) -> HostedProgram:
        """Make the compiled code of a region.

        Args:
            function: takes a list of arguments, which it empties, and returns a sequence of results.
            arguments: the indices of a handover's tensors that it takes.
            gives: for each leaf the index of its tensor, that of its result, and 1 if it can keep the result.
        """

    def move_aside(self, outputs: Sequence[Any]) -> object | None:
        """Keep the hooks of DDP's reducer on the leaves of a tape from refusing a walk, until what this gives is put
        back or gone. None where there are none, or something is there that is not known; then nothing was changed."""

    def put_back(self, moved: object) -> list[torch.Tensor]:
        """Have them refuse again; gives the leaves."""

    def tape_of_hooks(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """A number whose backward, on the eager engine, calls these hooks of the leaves, in their order. A second
        backward calls what they have queued for the end of a backward."""

    def has_queued(self, number: torch.Tensor) -> bool:
        """Return whether the hooks have queued callbacks."""

    def unlike(self, wanted: list[torch.Tensor | None], found: list[torch.Tensor | None], relative: float) -> list[int]:
        """Return the numbers of the pairs of two lists that may differ. All other pairs differ by at most ``relative``
        times the root mean square, in each value. Only plain floats on the CPU can be compared here."""
