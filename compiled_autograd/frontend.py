"""Tapes that are not PyTorch's, through the same stages: tape graph, shadow graph, lowering, backend.

A front end writes down one backward as calls of its own operations. What stands behind that is what a captured tape of
PyTorch goes through: the calls are an FX graph (:mod:`compiled_autograd.ir`), its structure is looked up in the shadow
graph of the process, a variant is selected or made, and its regions are lowered, compiled, proved and run.

>>> @frontend.operation
... def multiply_backward(gradients, a, b):
...     return [gradients[0] * b, gradients[0] * a]
>>> tape = frontend.Tape()
>>> seed, a, b = map(tape.tensor, (torch.ones(3), x, y))
>>> of_a, of_b = tape.call(multiply_backward, [seed], a, b, results=2)
>>> session = ca.enable(backend="eager")
>>> frontend.run(tape, [of_a, of_b], session)  # [y, x]; session.last.outcome is "structure_miss", later "hit"

Two tapes have one structure where the same operations take values from the same places, with ``None`` and constants at
the same places. A gradient that is known to be zero is ``None``, so each pattern of zeros has a graph of its own.
``examples/simple_grad.py`` is a whole front end.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shadow_cache import Miss

from . import ir
from .cache.graphs import GRAPHS, CompiledGraph
from .cache.variants import Handover
from .capture.capture import described
from .engine.account import Account
from .engine.call import Call, HandedOver
from .engine.devices import cuda_device
from .engine.execution import execute
from .engine.handles import KEPT, may_be_kept
from .engine.session import Session
from .errors import CacheMissError
from .guards.ambient import ambient
from .process_state import PROCESS

_ROOT = "FrontEnd"
"""The name of the first node, so that no tape of PyTorch's has the structure of a front end's."""
_SUM = "Sum"
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)
_declared: Counter[str] = PROCESS.register(Counter())

Function = Callable[..., Sequence["torch.Tensor | None"]]


def operation(function: Function) -> ir.OpaqueOp:
    """Declare a function that calls on tapes run. Its qualified name is part of every structure in which it stands.

    Args:
        function: ``function(gradients, *saved)`` takes a list of gradients, None at the places at which the tape has
            None, and then what else its call was given. It gives a list of gradients, None for one that is known to be
            zero. It reads nothing else, writes into nothing that it was given, and does not ask a tensor for its
            values: it is also run on tensors that have none.

    One that is declared again is another operation, and finds nothing of what was compiled with the one before it: so
    declare operations once, at the top level of a module.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    _declared[name] += 1
    if _declared[name] > 1:
        name += f"#{_declared[name]}"
    return ir.OpaqueOp(name, function, custom=True)


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """What stands for a tensor on a :class:`Tape`, or for None that is known only when the tape runs."""

    tape: Tape
    node: fx.Node


class Tape:
    """One backward: tensors that are given, and calls in the order in which they run."""

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._calls = [ir.TapeCall(0, _ROOT)]
        self._tensors: list[torch.Tensor] = []
        self._values: dict[int, Value] = {}
        self._last: fx.Node | None = None

    def tensor(self, tensor: torch.Tensor) -> Value:
        """A tensor that is given: a gradient to begin with, or a value of the forward. One tensor is one value.

        Raises:
            TypeError: it is no tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a tensor is needed, not {type(tensor).__name__}: a constant is given to a call as it is")
        value = self._values.get(id(tensor))
        if value is None:
            lifted = ir.Lifted("input", len(self._tensors))
            with self._graph.inserting_before() if self._last is None else self._graph.inserting_after(self._last):
                self._last = self._graph.placeholder(str(lifted))
            self._last.meta["lifted"] = lifted
            self._tensors.append(tensor)
            value = self._values[id(tensor)] = Value(self, self._last)
        return value

    def call(
        self, function: ir.OpaqueOp, gradients: Sequence[Value | None], *saved: Any, results: int
    ) -> tuple[Value, ...]:
        """Write down a call of an operation.

        Args:
            function: what :func:`operation` gave.
            gradients: None for one that is known to be zero.
            saved: what else the operation takes: values, None, constants (bool, int, float, str, dtype, device), and
                lists of them. Constants are part of the structure.
            results: how many gradients it gives.

        Raises:
            TypeError, ValueError: something of it cannot stand on this tape.
        """
        if not isinstance(function, ir.OpaqueOp):
            raise TypeError(f"{function!r} is no operation: declare it with compiled_autograd.frontend.operation")
        arguments = [self._node(each) for each in (list(gradients), *saved)]
        node = self._add(function.__name__.rpartition(".")[2], function, arguments)
        return tuple([self._item(node, index) for index in range(results)])

    def add(self, *gradients: Value | None) -> Value | None:
        """The sum of gradients that meet, added in this order; None, which is zero, does not count.

        Raises:
            TypeError, ValueError: something of it cannot stand on this tape.
        """
        terms = [each for each in gradients if each is not None]
        if len(terms) < 2:
            return terms[0] if terms else None
        return Value(self, self._add(_SUM, ir.sum_gradients, [self._node(each) for each in terms]))

    def graph(self, results: Sequence[Value | None]) -> ir.TapeGraph:
        """The tape graph of what was written down so far, which gives ``results``. The tape can go on.

        Raises:
            TypeError, ValueError: a result is no value of this tape.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self._graph, copies)
        graph.output([None if each is None else copies[self._node(each)] for each in results])
        inputs = [described(index, tensor) for index, tensor in enumerate(self._tensors)]
        found = ir.TapeGraph(graph, list(self._calls), inputs, accumulates=False)
        found.order = [call.index for call in self._calls]
        found.cuda_device = cuda_device(found)
        return found

    def handover(self) -> Handover:
        """The tensors that were given."""
        return Handover(list(self._tensors), [], [], (), ())

    def _add(self, name: str, target: Callable[..., Any], arguments: Sequence[Any]) -> fx.Node:
        call = ir.TapeCall(len(self._calls), name)
        self._calls.append(call)
        node = self._graph.call_function(target, tuple(arguments))
        node.meta["call"] = call.index
        return node

    def _item(self, node: fx.Node, index: int) -> Value:
        item = self._graph.call_function(operator.getitem, (node, index))
        item.meta["call"] = node.meta["call"]
        return Value(self, item)

    def _node(self, value: Any) -> Any:
        """What the graph has for an argument."""
        if isinstance(value, Value):
            if value.tape is not self:
                raise ValueError("a value of another tape: each tape has values of its own, which Tape.tensor gives")
            return value.node
        if isinstance(value, (list, tuple)):
            return [self._node(each) for each in value]
        if value is None or isinstance(value, _CONSTANTS):
            return value
        hint = "lift it with Tape.tensor" if isinstance(value, torch.Tensor) else "make it part of the operation"
        raise TypeError(f"a {type(value).__name__} cannot stand on a tape: {hint}")


def run(tape: Tape, results: Sequence[Value | None], session: Session) -> list[torch.Tensor | None]:
    """Run a tape compiled, from what an earlier tape of its structure left behind where there was one.

    Args:
        results: what is asked for, of what the tape has computed or was given.
        session: of :func:`compiled_autograd.enable`. It need not be entered; the tape counts as one backward of it.

    Returns:
        A tensor for each of the results; None where the tape has None, or an operation gave None.

    Raises:
        TypeError, ValueError: a result is no value of this tape.
        CacheMissError: ``on_miss="raise"``, and it is no hit.
        GradientMismatchError: as for a backward of PyTorch's, see :func:`compiled_autograd.enable`.
        CaptureRefusedError: the tensors lie on several CUDA devices.
    """
    graph, handover, miss = _find(tape, results, session)
    call = Call((), (), False, False, (), True, False, graph.identity)
    with torch.autograd.set_detect_anomaly(False):  # that mode looks at the nodes of PyTorch's tapes
        return list(execute(call, Account(session), HandedOver(graph, handover, miss, miss is not None)))


def _find(tape: Tape, results: Sequence[Value | None], session: Session) -> tuple[CompiledGraph, Handover, Miss | None]:
    captured, handover, settings = tape.graph(results), tape.handover(), session.settings
    keys = captured.structure()
    graph, miss = GRAPHS.find(keys), None
    if graph is None:
        ir.verify(captured.graph)
        miss = GRAPHS.explain(captured, keys, [tuple(tensor.shape) for tensor in handover.tensors])
        kept = may_be_kept(settings, captured, keys)
        graph = KEPT.new_graph(captured, keys) if kept else CompiledGraph(captured)
    if settings.on_miss == "raise" and graph.find(settings.key, ambient(), handover) is None:
        raise CacheMissError([miss] if miss is not None else graph.explain(settings, ambient(), handover))
    return graph, handover, miss
