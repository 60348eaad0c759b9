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

import contextlib
import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from . import ir
from .cache.graphs import GRAPHS, CompiledGraph
from .cache.variants import Handover
from .capture.capture import described
from .diagnostics.bypass import before_capture, reason_of_end
from .engine.account import Account
from .engine.call import Call, HandedOver
from .engine.cuda.devices import cuda_device
from .engine.decide import is_policy
from .engine.execution import depth, execute
from .engine.handles import KEPT, may_be_kept
from .engine.session import Session
from .errors import CacheMissError, CaptureRefusedError, UnsupportedBackwardError
from .process_state import PROCESS
from .runtime.interpret import interpret
from .settings import Settings
from .shadow_cache import Bypass, Miss, unsupported
from .torch_api.dynamo import keep_from_dynamo, not_compiled

_ROOT = "FrontEnd"
"""The name of the first node, so that no tape of PyTorch's has the structure of a front end's."""
_SUM = "Sum"
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)
_declared: dict[str, Iterator[int]] = PROCESS.register({})

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
    number = next(_declared.setdefault(name, itertools.count(1)))
    if number > 1:
        name += f"#{number}"

    @functools.wraps(function)
    def checked(*arguments: Any) -> Sequence[torch.Tensor | None]:
        found = function(*arguments)
        if not isinstance(found, (list, tuple)):
            raise TypeError(f"operation {name} gave a {type(found).__name__}: it is to give a list of gradients")
        return found

    return ir.OpaqueOp(name, checked, custom=True)


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """What stands for a tensor on a :class:`Tape`, or for None that is known only when the tape runs."""

    node: fx.Node


class Tape:
    """One backward: tensors that are given, and calls in the order in which they run."""

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._calls = [ir.TapeCall(0, _ROOT)]
        self._tensors: list[torch.Tensor] = []
        self._values: dict[int, Value] = {}
        self._last: fx.Node | None = None

    @not_compiled
    def tensor(self, tensor: torch.Tensor) -> Value:
        """A tensor that is given: a gradient to begin with, or a value of the forward. One tensor is one value.

        Raises:
            TypeError: it is no tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a tensor is needed, not {type(tensor).__name__}: a constant is given to a call as it is")
        if tensor.is_nested:
            raise TypeError("a nested tensor cannot stand on a tape: give its parts")
        value = self._values.get(id(tensor))
        if value is None:
            lifted = ir.Lifted("input", len(self._tensors))
            with self._graph.inserting_before() if self._last is None else self._graph.inserting_after(self._last):
                self._last = self._graph.placeholder(str(lifted))
            self._last.meta["lifted"] = lifted  # counted anew among those that are used
            self._tensors.append(tensor)
            value = self._values[id(tensor)] = Value(self._last)
        return value

    @not_compiled
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

    @not_compiled
    def add(self, *gradients: Value | None) -> Value | None:
        """The sum of gradients that meet, added in this order; None, which is zero, does not count.

        Raises:
            TypeError, ValueError: something of it cannot stand on this tape.
        """
        terms = [each for each in gradients if each is not None]
        if len(terms) < 2:
            return terms[0] if terms else None
        return Value(self._add(_SUM, ir.sum_gradients, [self._node(each) for each in terms]))

    @not_compiled
    def captured(self, results: Sequence[Value | None]) -> tuple[ir.TapeGraph, list[torch.Tensor]]:
        """The tape graph of what was written down so far, which gives ``results``, and the tensors that it takes: those
        that something uses. The tape can go on.

        Raises:
            TypeError, ValueError: a result is no value of this tape.
        """
        if wrong := [each for each in results if not isinstance(each, Value | None)]:
            raise TypeError(f"a result is a value of the tape or None, not {type(wrong[0]).__name__}")
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self._graph, copies)
        graph.output([None if each is None else copies[self._node(each)] for each in results])
        tensors: list[torch.Tensor] = []
        for node, tensor in zip(graph.find_nodes(op="placeholder"), self._tensors, strict=True):
            if node.users:
                node.meta["lifted"] = ir.Lifted("input", len(tensors))
                tensors.append(tensor)
            else:
                graph.erase_node(node)
        with torch._C.DisableTorchFunctionSubclass():
            inputs = [described(index, tensor) for index, tensor in enumerate(tensors)]
        order = [call.index for call in self._calls]
        return ir.TapeGraph(graph, list(self._calls), inputs, accumulates=False, order=order), tensors

    def _add(self, name: str, target: Callable[..., Any], arguments: Sequence[Any]) -> fx.Node:
        call = ir.TapeCall(len(self._calls), name)
        self._calls.append(call)
        node = self._graph.call_function(target, tuple(arguments))
        node.meta["call"] = call.index
        return node

    def _item(self, node: fx.Node, index: int) -> Value:
        item = self._graph.call_function(operator.getitem, (node, index))
        item.meta["call"] = node.meta["call"]
        return Value(item)

    def _node(self, value: Any) -> Any:
        """What the graph has for an argument."""
        if isinstance(value, Value):
            if value.node.graph is not self._graph:
                raise ValueError("a value of another tape: each tape has values of its own, which Tape.tensor gives")
            return value.node
        if isinstance(value, (list, tuple)):
            return [self._node(each) for each in value]
        if value is None or type(value) in _CONSTANTS:
            return value
        hint = "lift it with Tape.tensor" if isinstance(value, torch.Tensor) else "make it part of the operation"
        raise TypeError(f"a {type(value).__name__} cannot stand on a tape: {hint}")


def run(tape: Tape, results: Sequence[Value | None], session: Session) -> list[torch.Tensor | None]:
    """Run a tape compiled, from what an earlier tape of its structure left behind where there was one.

    What cannot be compiled runs call by call, and is a bypass: inside of a functional transform, a dual level, a
    dispatch mode or what is being traced, and with tensor subclasses. There is nothing to time it against, whatever
    ``tune`` says.

    Args:
        results: what is asked for, of what the tape has computed or was given.
        session: of :func:`compiled_autograd.enable`. It need not be entered; the tape counts as one backward of it.

    Returns:
        A tensor for each of the results, which no gradient of PyTorch's flows through; None where the tape has None, or
        an operation gave None.

    Raises:
        TypeError, ValueError: a result is no value of this tape.
        CacheMissError: ``on_miss="raise"``, and it is no hit.
        UnsupportedBackwardError: ``on_unsupported="raise"``, and it cannot be compiled.
        GradientMismatchError: as for a backward of PyTorch's, see :func:`compiled_autograd.enable`.
    """
    captured, tensors = tape.captured(results)
    return run_captured(captured, Handover(tensors, [], [], (), ()), session)


def run_captured(captured: ir.TapeGraph, handover: Handover, session: Session) -> list[torch.Tensor | None]:
    """The same for a tape graph; gives what it returns, and writes to its leaves where it has any."""
    account = Account(session, replace(session.settings, tune=False))
    try:
        reason = before_capture(False, handover.tensors, depth()) or _cannot_be_compiled(captured, handover.tensors)
        if reason is not None:
            return _one_by_one(captured, handover, account, reason)
        graph, miss = _find(captured, handover, account.settings)
        call = Call((), (), False, False, (), True, captured.accumulates, _fingerprint=graph.identity)
        return list(execute(call, account, HandedOver(graph, handover, miss, miss is not None)))
    except BaseException as error:
        if not account.told:
            account.bypass(*reason_of_end(error))
        raise


keep_from_dynamo(run.__code__)
keep_from_dynamo(run_captured.__code__)


def _cannot_be_compiled(captured: ir.TapeGraph, tensors: Sequence[torch.Tensor]) -> Bypass | None:
    try:
        captured.cuda_device = cuda_device(captured)
    except CaptureRefusedError as refused:
        return refused.reason
    other = next((tensor for tensor in tensors if type(tensor) not in ir.PLAIN_TENSORS), None)
    return None if other is None else unsupported(f"a tensor of the class {type(other).__name__}")


def _one_by_one(
    captured: ir.TapeGraph, handover: Handover, account: Account, reason: Bypass
) -> list[torch.Tensor | None]:
    """Run its calls as Python would; functional transforms see them."""
    if account.settings.on_unsupported == "raise" and not is_policy(reason):
        raise UnsupportedBackwardError(reason)
    started = time.perf_counter()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    try:
        with contextlib.nullcontext() if transformed else torch.no_grad():
            return interpret(captured, handover.by_kind())
    finally:
        account.bypass(reason, since=started)


def _find(captured: ir.TapeGraph, handover: Handover, settings: Settings) -> tuple[CompiledGraph, Miss | None]:
    keys = captured.structure()
    graph, miss = GRAPHS.find(keys), None
    if graph is None:
        ir.verify(captured.graph)
        miss = GRAPHS.explain(captured, keys, [tuple(tensor.shape) for tensor in handover.tensors])
        kept = may_be_kept(settings, captured, keys)
        graph = KEPT.new_graph(captured, keys) if kept else CompiledGraph(captured)
    if settings.on_miss == "raise":
        state = graph.state(handover, settings)
        if graph.find(settings.key, state, handover) is None:
            raise CacheMissError([miss] if miss is not None else graph.explain(settings, state, handover))
    return graph, miss
