"""The interface of a backend, which makes a callable of an ATen graph. A backend knows FX graphs and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

Compiled = Callable[[list[Any]], Sequence[Any]]
"""Takes its arguments in a list and empties it, so that each is freed after its last use; gives the outputs.

A callable may say more of itself, in attributes and methods with the names of the functions below. These ask for them,
and have the answer for one that says nothing.
"""
PROVING_RUNS = 2
"""Number of runs of each form that are compared with the real calls. Two, since code that keeps memory from run to run
shows it only at the second."""
SOURCE = "__source__"
"""Name of an artifact's source in the namespace in which it was run."""
ONLY_FORM = "compiled code"
"""Name of the form of compiled code that has only one."""


def keeps_inputs(compiled: Compiled) -> bool:
    """Return whether it leaves its list of arguments unchanged: if it fails, its region can then run another way."""
    return getattr(compiled, "keeps_inputs", False)


def proving_runs(compiled: Compiled) -> int:
    """Return how many of its first runs differ from all later ones, plus one."""
    return getattr(compiled, "proving_runs", PROVING_RUNS)


def form_for(compiled: Compiled, arguments: Sequence[Any]) -> str:
    """The name of what its next call in this thread will run, with these arguments; it is made now if need be.

    Some run one thing at first, and later another that gives the same results sooner. The name is for people too
    (:data:`ONLY_FORM` where there is but one), and ``run_poisoned`` takes it. The arguments stay as they are.
    """
    ask = getattr(compiled, "form_for", None)
    return ONLY_FORM if ask is None else ask(arguments)


def form_that_ran(compiled: Compiled, form: str) -> str:
    """Return the name of the form that its last call in this thread has run; ``form`` was expected."""
    ask = getattr(compiled, "form_that_ran", None)
    return form if ask is None else ask()


def is_last(compiled: Compiled, form: str) -> bool:
    """Return whether no other form takes over from this one by itself at a later call."""
    ask = getattr(compiled, "is_last", None)
    return ask is None or ask(form)


def drop(compiled: Compiled, form: str) -> bool:
    """Never run a form again, for it gave what it should not.

    False where no other takes its place: then the callable must not be called any more.
    """
    never_run = getattr(compiled, "drop", None)
    return never_run is not None and never_run(form)


def another(compiled: Compiled) -> Compiled:
    """Return the same code for another region.

    A callable has this method if its work depends on the sizes and strides of the inputs of its first run. The two
    share everything else.
    """
    make = getattr(compiled, "another", None)
    return compiled if make is None else make()


def source_of(compiled: Compiled) -> str | None:
    """The code that a backend has generated, for people; None where it does not keep it.

    Found in an attribute ``source`` or ``source_code`` of the callable, of what it is a method of or calls, or in its
    graph's code; where it was loaded from an artifact, in the namespace of that.
    """
    seen: list[Any] = []
    while compiled is not None and not any(compiled is each for each in seen):
        seen.append(compiled)
        owner = getattr(compiled, "__self__", compiled)
        for each in (compiled, owner):
            for name in ("source", "source_code"):
                if isinstance(source := getattr(each, name, None), str) and source:
                    return source
        if isinstance(owner, fx.GraphModule):
            return str(owner.code)
        function = getattr(compiled, "__func__", compiled)
        if source := getattr(function, "__globals__", {}).get(SOURCE):
            return str(source)
        compiled = getattr(compiled, "compiled", None)  # type: ignore[assignment]
    return None


class Backend(Protocol):
    """A way to run a region. One that derives from this class has the defaults that stand here."""

    name: str
    bitwise: bool = False
    """True if its results on the CPU are bit for bit those of the graph's operators, run one by one."""
    slow: bool = False
    """True if compiling takes long enough to be worth a process."""
    allocates: bool = False
    """True if the results of each run have memory of their own, which no later run writes."""

    def prepare(self) -> None:
        """Called before a graph is traced that is then compiled in this process."""
        return

    def decompositions(self) -> Mapping[Any, Callable[..., Any]] | None:
        """The decompositions that the ATen graph should be traced with; None for none."""
        return None

    def tracing(self, example_inputs: Sequence[Any]) -> AbstractContextManager[Any]:
        """Entered while a graph is traced with these fake tensors, and symbols for sizes that change."""
        return contextlib.nullcontext()

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        """Make a callable of a functional ATen graph.

        Args:
            graph_module: its placeholders are tensors, its output is a list of tensors and None.
            example_inputs: fake tensors with the shapes, strides, dtypes and devices of the inputs.
        """


@runtime_checkable
class Storing(Protocol):
    """Further methods of a backend whose compiled code can be kept for another process.

    ``isinstance(backend, Storing)`` checks for these methods.
    """

    def save(self, compiled: Compiled) -> bytes | None:
        """Return the result of :meth:`Backend.compile` as bytes; None if it cannot be stored."""

    def why_not_saved(self, compiled: Compiled) -> str | None:
        """Return why :meth:`save` returns None for it; None if it does not."""

    def load(self, data: bytes) -> Compiled:
        """Undo :meth:`save`, in any process with the same :meth:`environment`, without compiling anything.

        The bytes hold code. The caller has made sure that only this user could have written them.

        Raises:
            ArtifactError: they cannot be used.
        """

    def environment(self) -> dict[str, str]:
        """Named parts on which a stored artifact depends, beside the versions of torch and Python."""
