"""Compile tapes of other autograd systems through the same stages: tape graph, shadow graph, lowering, backend.

A front end records one backward as calls of its own operations. The record then takes the way of a captured tape of
PyTorch: the calls are an FX graph (:mod:`compiled_autograd.ir`), its structure is looked up in the shadow graph of the
process, a variant is selected or made, and its regions are lowered, compiled, proved and run.

>>> @frontend.operation
... def multiply_backward(gradients, a, b):
...     return [gradients[0] * b, gradients[0] * a]
>>> tape = frontend.Tape()
>>> seed, a, b = map(tape.tensor, (torch.ones(3), x, y))
>>> of_a, of_b = tape.call(multiply_backward, [seed], a, b, results=2)
>>> session = ca.enable(backend="eager")
>>> frontend.run(tape, [of_a, of_b], session)  # [y, x]; session.last.outcome is "structure_miss", later "hit"

Two tapes have the same structure if the same operations take the same values, with ``None`` and equal constants at the
same positions. A gradient that is known to be zero is ``None``, so each pattern of zeros has its own graph.
``examples/simple_grad.py`` is a complete front end.
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
"""The name of the first node. It keeps the structures of front ends apart from those of PyTorch's tapes."""
_SUM = "Sum"
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)
_declared: dict[str, Iterator[int]] = PROCESS.register({})

Function = Callable[..., Sequence["torch.Tensor | None"]]


def operation(function: Function) -> ir.OpaqueOp:
    """Declare a function as an operation for tapes. Its qualified name is part of every structure that contains it.

    Args:
        function: ``function(gradients, *saved)`` takes a list of gradients (None where the tape has None), then the
            other arguments of its call. It returns a list of gradients, None for a gradient that is known to be zero.
            It must not read other state, write into its arguments, or read values of tensors: it also runs on fake
            tensors.

    Declaring a function again makes a new operation, for which nothing is compiled yet. Declare operations once, at the
    top level of a module.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    number = next(_declared.setdefault(name, itertools.count(1)))
    if number > 1:
        name += f"#{number}"

    @functools.wraps(function)
    def checked(*arguments: Any) -> Sequence[torch.Tensor | None]:
        found = function(*arguments)
        if not isinstance(found, (list, tuple)):
            raise TypeError(f"operation {name} returned a {type(found).__name__}; it must return a list of gradients")
        return found

    return ir.OpaqueOp(name, checked, custom=True)


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor on a :class:`Tape`, or a None that is known only when the tape runs."""

    node: fx.Node


class Tape:
    """One backward: its input tensors, and its calls in order."""

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._calls = [ir.TapeCall(0, _ROOT)]
        self._tensors: list[torch.Tensor] = []
        self._values: dict[int, Value] = {}
        self._last: fx.Node | None = None

    @not_compiled
    def tensor(self, tensor: torch.Tensor) -> Value:
        """Add an input: an initial gradient, or a value of the forward. Repeated calls with a tensor return one value.

        Raises:
            TypeError: ``tensor`` is no tensor, or a nested one.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Tape.tensor takes a tensor, not {type(tensor).__name__}; pass constants directly to call")
        if tensor.is_nested:
            raise TypeError("a nested tensor cannot be on a tape; pass its parts")
        value = self._values.get(id(tensor))
        if value is None:
            lifted = ir.Lifted("input", len(self._tensors))
            with self._graph.inserting_before() if self._last is None else self._graph.inserting_after(self._last):
                self._last = self._graph.placeholder(str(lifted))
            self._last.meta["lifted"] = lifted  # renumbered in `captured`, without unused inputs
            self._tensors.append(tensor)
            value = self._values[id(tensor)] = Value(self._last)
        return value

    @not_compiled
    def call(
        self, function: ir.OpaqueOp, gradients: Sequence[Value | None], *saved: Any, results: int
    ) -> tuple[Value, ...]:
        """Record a call of an operation.

        Args:
            function: the result of :func:`operation`.
            gradients: the gradients; None for a gradient that is known to be zero.
            saved: the other arguments: values, None, constants (bool, int, float, str, dtype, device), and lists of
                these. Constants are part of the structure.
            results: the number of gradients that the operation returns.

        Returns:
            The values of the returned gradients.

        Raises:
            TypeError: an argument cannot be on a tape.
            ValueError: an argument is a value of another tape.
        """
        if not isinstance(function, ir.OpaqueOp):
            raise TypeError(f"{function!r} is no operation; declare it with compiled_autograd.frontend.operation")
        arguments = [self._node(each) for each in (list(gradients), *saved)]
        node = self._add(function.__name__.rpartition(".")[2], function, arguments)
        return tuple([self._item(node, index) for index in range(results)])

    @not_compiled
    def add(self, *gradients: Value | None) -> Value | None:
        """Return the sum of gradients, added in this order. None counts as zero; the sum of only None is None.

        Raises:
            TypeError, ValueError: see :meth:`call`.
        """
        terms = [each for each in gradients if each is not None]
        if len(terms) < 2:
            return terms[0] if terms else None
        return Value(self._add(_SUM, ir.sum_gradients, [self._node(each) for each in terms]))

    @not_compiled
    def captured(self, results: Sequence[Value | None]) -> tuple[ir.TapeGraph, list[torch.Tensor]]:
        """Return the tape graph of the calls so far, with these ``results``, and the input tensors that it uses. More
        calls may be added afterwards.

        Raises:
            TypeError, ValueError: a result is no value of this tape.
        """
        if wrong := [each for each in results if not isinstance(each, Value | None)]:
            raise TypeError(f"a result must be a value of the tape or None, not {type(wrong[0]).__name__}")
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
        """Return the argument in the form of the FX graph."""
        if isinstance(value, Value):
            if value.node.graph is not self._graph:
                raise ValueError("this value belongs to another tape; make a value of this tape with Tape.tensor")
            return value.node
        if isinstance(value, (list, tuple)):
            return [self._node(each) for each in value]
        if value is None or type(value) in _CONSTANTS:
            return value
        hint = "add it with Tape.tensor" if isinstance(value, torch.Tensor) else "make it part of the operation"
        raise TypeError(f"a {type(value).__name__} cannot be an argument on a tape; {hint}")


def run(tape: Tape, results: Sequence[Value | None], session: Session) -> list[torch.Tensor | None]:
    """Run a tape compiled, with the cached code of its structure if there is any.

    A tape that cannot be compiled runs call by call, and is a bypass: inside a functional transform, a forward AD
    level, a dispatch mode or a trace, and with tensor subclasses. ``tune`` has no effect: there is no eager engine to
    time against.

    Args:
        results: the requested values of the tape.
        session: a session of :func:`compiled_autograd.enable`. It need not be entered; the tape counts as one of its
            backwards.

    Returns:
        A tensor without a PyTorch tape for each result; None if the tape has None, or if an operation returned None.

    Raises:
        TypeError, ValueError: a result is no value of this tape.
        CacheMissError: ``on_miss="raise"``, and the tape is no hit.
        UnsupportedBackwardError: ``on_unsupported="raise"``, and the tape cannot be compiled.
        GradientMismatchError: see ``check`` of :func:`compiled_autograd.enable`.
    """
    captured, tensors = tape.captured(results)
    return run_captured(captured, Handover(tensors, [], [], (), ()), session)


def run_captured(captured: ir.TapeGraph, handover: Handover, session: Session) -> list[torch.Tensor | None]:
    """Run a tape graph like :func:`run`: return its results, and write to its leaves if it has any."""
    account = Account(session, replace(session.settings, tune=False))
    try:
        reason = before_capture(False, handover.tensors, depth()) or _cannot_be_compiled(captured, handover.tensors)
        if reason is not None:
            return _one_by_one(captured, handover, account, reason)
        graph, miss = _find(captured, handover, account.settings)
        call = Call((), (), False, False, (), True, captured.accumulates, key=("captured", graph.identity))
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
    """Run the calls in Python one by one, visible to functional transforms."""
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
