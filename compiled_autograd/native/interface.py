"""What the extension has for Python, as types. Each function that C++ has is described here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

_Result = TypeVar("_Result")

Found = tuple[int, list[torch.Tensor], list[int], list[int | float], list[Any]]
"""What a tape holds: the number of the variant that serves or -1, tensors, sizes, scalars, users' objects."""


class HostedProgram(Protocol):
    """What a region was compiled to, with tensors of C++ as arguments and results; ``is_straight_line`` says whether it
    runs without Python."""

    is_straight_line: bool


class Taken(Protocol):
    """What a tape held that was taken; ``variant`` is the number of the one that serves, or -1; ``reduced`` are the
    leaves that have hooks of DDP's reducer."""

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
    """What was learnt of a tape. Methods give the reason where they refuse a tape, or where it is another."""

    nodes: int

    def compare(
        self, outputs: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any] = (), captures: bool = False
    ) -> Found | str:
        """What a tape holds, if it is the one that was learnt."""

    def add_variant(
        self, outputs: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any] = (), captures: bool = False
    ) -> Found | str:
        """The same; what the tape holds is a variant from then on."""

    def take(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        keep_graph: bool,
        inputs: Sequence[Any] = (),
        captures: bool = False,
    ) -> Taken | str:
        """The same; unless it is to be kept, the tape is freed, as by the engine."""


Question = tuple[Any, str | None, Any]
"""What C++ asks as Python would: (object, name, answer), where the attribute is to be that very object; (function,
None, answer), where a call without arguments is to give something equal."""


class FastHit(Protocol):
    """A hit that Python has served, as C++ may serve it again."""


class FastPath(Protocol):
    """Called as ``run_backward``. What is none of its ``hits`` goes to Python; ``served`` is how many did not."""

    hits: tuple[FastHit, ...]
    served: int

    def __call__(self, *arguments: Any, **named: Any) -> Any: ...

    def serve(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        keep_graph: bool,
        account: Any,
        is_timed: bool,
    ) -> Any:
        """The same for ``loss.backward()``, where Python has asked policies what they ask before.

        Args:
            account: has ``started``, when it was asked for, by ``time.perf_counter``; and ``told``, which is set in the
                same moment as the session counts it.
            is_timed: Python times what is run.

        Returns:
            The variant that has run it, and the seconds that it took in all; else what :meth:`Module.fast_hit` was
            given as ``hand_over`` says of the tape, if that is taken; else None.
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
        tunes: bool,
        questions: tuple[Sequence[Question], Sequence[Question], Sequence[Question]],
        hand_over: Callable[[Taken], Any],
        may_write: Callable[[], bool],
        write: Callable[[list[torch.Tensor | None], list[torch.Tensor | None]], None],
        counter: Any,
    ) -> FastHit:
        """A hit that Python is serving, in this thread and state.

        Args:
            shapes: the number that the plan has for them.
            tunes: a hit at which the variant may be timed is left to Python.
            questions: those of policies, which are not asked where Python has; those asked before the tape is walked;
                and those asked once it is taken.
            hand_over: what it is in Python, where Python has to go on.
            may_write, write: of :meth:`Taken.run`: what is asked, and what is done with what it gives.
            counter: counts hits in its attribute of that name.
        """

    def fast_path(
        self,
        fallback: Callable[..., Any],
        resume: Callable[..., Any],
        interrupted: Callable[..., None],
        thread: Any,
        uses: Iterator[int],
    ) -> FastPath:
        """What serves them.

        Args:
            fallback: the way through Python.
            resume: the same once the tape is taken: (session, arguments, named arguments, when it was asked for,
                hand_over, taken).
            interrupted: told of a backward that was ended before anything ran: (session, when, error).
            thread: what is a thread's own, with ``here``.
            uses: numbers of uses, by which it is known what was used least recently.
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
        """Where it is such a one, the engine knows of all nodes that it runs from then on."""

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

    def program(self, function: Any, arguments: Sequence[int], gives: Sequence[int]) -> HostedProgram:
        """What a region was compiled to, as a step has it.

        Args:
            function: takes a list of arguments, which it empties, and gives a sequence of results.
            arguments: which of a handover's tensors it takes.
            gives: for each leaf the number of its tensor, that of its result, and 1 where it can keep that.
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
        """Whether they have queued something."""

    def unlike(self, wanted: list[torch.Tensor | None], found: list[torch.Tensor | None], relative: float) -> list[int]:
        """Of which pairs of two lists it cannot be told here that no value of the one is further from that of the other
        than ``relative`` times the root mean square: by their number. It can be for plain floats on the CPU alone."""
