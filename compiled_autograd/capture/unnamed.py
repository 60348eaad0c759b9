"""Parameters on tapes whose names were not requested yet."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch

from .. import ir
from ..process_state import PROCESS, OfThread
from .parameter_names import Trace, is_known, is_parameter, names_of_traces, parameter_names_of


class Unnamed:
    """Parameters on a tape whose names are looked up at the first request.

    While the backward runs, this object holds the parameters, so that they are found unchanged. Afterwards it holds
    their traces, which recognise parameters that still exist. The nodes without a name refer to this object, but not
    conversely.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._held: Sequence[torch.Tensor] = parameters
        self._traces: Sequence[Trace] = ()
        self._names: Sequence[ir.Named] | None = None

    def named(self, number: int) -> ir.Named:
        """The name of one of them, and the class of the outermost module that has it; None where no living one has."""
        self.look_up()
        assert self._names is not None
        return self._names[number]

    def look_up(self) -> None:
        """Look for them, unless that was done. Of two threads that do so at once, the first to find them tells."""
        held, traces = self._held, self._traces  # in this order: it is let go of in the other one
        if self._names is not None:
            return
        if held:
            keys, found = list(map(id, held)), parameter_names_of(held)
        else:
            keys, found = [trace.key for trace in traces], names_of_traces(traces)
        names = [found[key].said() if key in found else ir.Named() for key in keys]
        if self._names is None:
            self._names = names
        self._held = self._traces = ()

    def let_go(self) -> None:
        """Hold none of them from now on. Those that leave no trace are looked for first."""
        with torch._C.DisableTorchFunction():  # nobody's modes are asked
            if not all(map(ir.is_plain, self._held)):
                self.look_up()
            elif self._names is None:
                self._traces = list(map(Trace, self._held))
        self._held = ()


class _Thread(threading.local):
    unnamed = OfThread[list[Unnamed]](list)


_thread = PROCESS.register(_Thread())


def name_leaves(calls: Sequence[ir.TapeCall], leaves: Sequence[torch.Tensor]) -> None:
    """Join the names of parameters to the leaves of a tape: at once where they are known, else when one is asked
    for."""
    pairs = [(call, leaf) for call, leaf in zip(calls, leaves, strict=True) if is_parameter(leaf)]
    unnamed = Unnamed([leaf for _, leaf in pairs])
    if all(is_known(leaf) for _, leaf in pairs):
        for number, (call, _) in enumerate(pairs):
            call.named, call.look_up = unnamed.named(number), None
        return
    for number, (call, _) in enumerate(pairs):
        call.look_up = functools.partial(unnamed.named, number)
    _thread.unnamed.append(unnamed)


def name_again(tape: ir.TapeGraph, tensors: Sequence[torch.Tensor]) -> None:
    """Look up names again for a structure that occurred again and will be described, if no name was found before: the
    model died before the first request. The leaves of the current tape are used.

    Args:
        tensors: the tensors that were handed over.
    """
    if tape.calls[0].edges is None or any(call.named.parameter is not None for call in tape.calls):
        return  # of what was not read from Python there are none
    written = tape.graph.find_nodes(op="call_function", target=ir.accumulate_grad)
    lifted = [(tape.calls[node.meta["call"]], node.args[0].meta["lifted"]) for node in written]
    leaves = [(call, tensors[leaf.index]) for call, leaf in lifted if leaf.kind == "input"]
    name_leaves([call for call, _ in leaves], [leaf for _, leaf in leaves])


def name_the_unnamed() -> None:
    """Look up all names of this thread's tapes that were not requested yet."""
    _with_each(Unnamed.look_up)


def let_go_of_the_unnamed() -> None:
    """Release the parameters at the end of a backward."""
    _with_each(Unnamed.let_go)


def _with_each(do: Callable[[Unnamed], None]) -> None:
    """Do something with each of this thread's, the last one first. It goes when that is done: Ctrl-C may come before;
    and so may a backward that ``gc`` runs, after which none is left."""
    unnamed = _thread.unnamed
    while last := unnamed[-1:]:
        do(last[0])
        if unnamed[-1:] == last:
            del unnamed[-1]
