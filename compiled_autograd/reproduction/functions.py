"""Record the engine's functions as ATen operators when a reproduction is written, and run these when it is read.

Another process has the engine's functions only after it has captured a tape with them. The record has the operators
that a function calls, without a backend's decompositions: the same kernels, in the same order.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..backends.signal_handlers import raise_what_a_handler_raised
from ..errors import ReproductionError
from ..lowering.trace_cache import last_of, nodes_after
from ..lowering.tracing import trace
from .records import (
    Argument,
    Constant,
    Function,
    Given,
    Listed,
    Operator,
    Ref,
    Result,
    Scalar,
    Value,
    constant,
    decoded,
    dtype_of,
    encoded,
)

_OPERATOR = re.compile(r"(aten|prims|mkldnn)\.(\w{1,100})\.(\w{1,100})")
_OF_FILES = re.compile("file|filename|path")
_ITEM = "getitem"
_MAX_OPERATORS = 100_000
_MAX_TEXT = 100


class NotRecordedError(Exception):
    """A function cannot be recorded; the message says why."""


def flattened(value: Any) -> list[Any]:
    """Flatten nested lists into one list."""
    if isinstance(value, Listed):
        value = value.items
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in flattened(each)]
    return [value]


def mapped(results: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to each tensor, or record of one, in nested lists; keep None and numbers."""
    if isinstance(results, list):
        return [mapped(each, function) for each in results]
    return results if results is None or isinstance(results, (bool, int, float)) else function(results)


def recorded(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Function, Any]:
    """Run a function under fake tensors; return its operators and its results.

    Args:
        arguments: the function's arguments, with fake tensors of one active mode.

    Raises:
        NotRecordedError: the function fails on fake tensors, or calls an operator that cannot be stored.
    """
    given = flattened(list(arguments))
    tensors: dict[int, tuple[int, torch.Tensor]] = {}
    for index, value in enumerate(given):
        if isinstance(value, torch.Tensor):
            tensors.setdefault(id(value), (index, value))
    results: Any = None
    operators: list[fx.Node] = []

    def run(*_: torch.Tensor) -> list[torch.Tensor]:
        nonlocal results
        mode = get_proxy_mode()
        assert mode is not None and isinstance(mode.tracer, fx.Tracer)
        last = last_of(mode.tracer.graph)
        results = function(*arguments)
        operators.extend(nodes_after(last, mode.tracer.graph))
        return [each for each in flattened(results) if isinstance(each, torch.Tensor)]

    try:
        graph_module = trace(run, None, [value for _, value in tensors.values()])
        made = iter(graph_module.graph.find_nodes(op="output")[0].args[0])
        places = {
            node: Argument(index)
            for node, (index, _) in zip(graph_module.graph.find_nodes(op="placeholder"), tensors.values(), strict=True)
        }
        return _function(graph_module, operators, places, results, made), results
    except Exception as error:
        raise_what_a_handler_raised(error)
        raise NotRecordedError(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}") from error


def _function(graph_module: fx.GraphModule, nodes: Sequence[fx.Node], known: Any, results: Any, made: Any) -> Function:
    operators: list[Operator] = []
    for node in nodes:
        if node.op == "get_attr":
            known[node] = _scalar(getattr(graph_module, str(node.target)))
            continue
        args = [encoded(each, known.__getitem__) for each in node.args]
        kwargs = {name: encoded(each, known.__getitem__) for name, each in node.kwargs.items()}
        name = _ITEM if node.target is operator.getitem else str(node.target)
        if name != _ITEM:
            operator_of(name)
        known[node] = Result(len(operators))
        operators.append(Operator(name, args, kwargs))

    def value(result: Any) -> Value:
        if isinstance(result, (list, tuple)):
            return Listed([value(each) for each in result])
        return known[next(made)] if isinstance(result, torch.Tensor) else encoded(result, known.__getitem__)

    return Function(operators, value(results))


def _scalar(tensor: torch.Tensor) -> Scalar:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.device.type != "cpu":
        raise TypeError("it uses a constant tensor")
    number: Any = encoded(tensor.item(), lambda _: None)
    return Scalar(number, str(tensor.dtype), list(tensor.shape))


# ---- run -------------------------------------------------------------------------------------------------------------


def operator_of(name: str) -> Any:
    """Return the operator of PyTorch with this name.

    Raises:
        ReproductionError: there is no such operator, or it is not allowed: it reads or writes files, for example.
    """
    if name == _ITEM:
        return operator.getitem
    found: Any = None
    if match := _OPERATOR.fullmatch(name):
        packet = getattr(getattr(torch.ops, match[1]), match[2], None)
        found = getattr(packet, match[3], None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ReproductionError(f"{name[:100]!r} is no operator of PyTorch {torch.__version__}")
    if any(_OF_FILES.search(each) for each in (name, *(argument.name for argument in found._schema.arguments))):
        raise ReproductionError(f"{name!r} is an operator on files; such operators are not allowed in a reproduction")
    return found


def function_of(record: Function) -> Callable[..., Any]:
    """Return a function that runs the operators of a record one by one, with the arguments of the engine's function.

    Raises:
        ReproductionError: an operator is unknown or not allowed, or takes a missing value.
    """
    if len(record.operators) > _MAX_OPERATORS:
        raise ReproductionError(
            f"a function in it has {len(record.operators)} operators, over the limit of {_MAX_OPERATORS}"
        )
    steps = []
    for number, each in enumerate(record.operators):
        _check([*each.args, *each.kwargs.values()], number)
        steps.append((operator_of(each.name), each.args, each.kwargs))
    _check([record.results], len(steps))

    def run(*arguments: Any) -> Any:
        given, made = flattened(list(arguments)), list[Any]()

        def known(value: Any) -> Any:
            if isinstance(value, Argument):
                return given[value.index]
            if isinstance(value, Result):
                return made[value.number]
            return torch.full(value.shape, decoded(value.value, known), dtype=dtype_of(value.dtype))

        for function, args, kwargs in steps:
            named = {name: decoded(each, known) for name, each in kwargs.items()}
            made.append(function(*[decoded(each, known) for each in args], **named))
        return decoded(record.results, known)

    return run


def arguments_of(record: Function) -> int:
    """Return the number of arguments that a function needs, with lists flattened."""
    used = flattened([[*each.args, *each.kwargs.values()] for each in record.operators] + [record.results])
    return 1 + max((each.index for each in used if isinstance(each, Argument)), default=-1)


def _check(values: Sequence[Value], number: int) -> None:
    for value in flattened(list(values)):
        wrong = isinstance(value, Argument) and value.index < 0
        wrong = wrong or (isinstance(value, Result) and not 0 <= value.number < number)
        wrong = wrong or isinstance(value, (Ref, Given)) or (isinstance(value, str) and len(value) > _MAX_TEXT)
        if wrong:
            raise ReproductionError(f"an operator takes {str(value)[:100]}, which does not exist")
        if isinstance(value, Constant):
            constant(value)
        if isinstance(value, Scalar):
            dtype_of(value.dtype)
            if any(size != 1 for size in value.shape):
                raise ReproductionError(f"it has a tensor of one number with the shape {value.shape[:8]}")
