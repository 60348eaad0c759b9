"""Make a tape graph that runs in any process, and its inputs, from a record. The whole record is checked."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..errors import IllegalGraphError, ReproductionError
from ..steps.memory import in_own_memory
from .functions import arguments_of, flattened, function_of
from .recording import FUNCTION, STAND_IN, VOCABULARY
from .records import CallRecord, Given, Record, Ref, decoded
from .tensors import bytes_of, check, tensors

_MAX_NODES = 1_000_000
_SEED_OF_STAND_INS = 1 << 20


def tape_of(record: Record) -> ir.TapeGraph:
    """Return the tape graph of a record. Its functions run ATen operators. Stand-ins for users' code return made-up
    values.

    Raises:
        ReproductionError: the record is invalid.
    """
    _check(record)
    digest = hashlib.sha256(msgspec.json.encode([record.functions, record.calls])).hexdigest()[:8]
    functions = [function_of(each) for each in record.functions]
    needed = [arguments_of(each) for each in record.functions]
    ops: dict[tuple[str, int], ir.OpaqueOp] = {}
    graph = fx.Graph()
    given = _placeholders(graph, record)
    made: list[fx.Node] = []

    def known(value: Any) -> fx.Node:
        if isinstance(value, Given):
            found = given.get((value.kind, value.index))
        else:
            found = made[value.number] if isinstance(value, Ref) and 0 <= value.number < len(made) else None
        if found is None:
            raise ReproductionError(f"a call takes {value}, which does not exist")
        return found

    for number, call in enumerate(record.calls):
        args = [decoded(each, known) for each in call.args]
        if call.target == FUNCTION:
            if not 0 <= call.function < len(functions) or needed[call.function] > len(flattened(args)):
                raise ReproductionError(f"call {number} has a function that does not exist, or too few arguments")
            key = _plain(call.name), call.function
            if key not in ops:
                ops[key] = ir.OpaqueOp(f"{key[0]}_{digest}_{call.function}", functions[call.function])
            target: Any = ops[key]
        elif call.target == STAND_IN:
            name = f"{_plain(call.name)}_{digest}_{number}"
            target = ir.OpaqueOp(name, _standing_in(call, number), traceable=False, custom=True)
        elif call.target in VOCABULARY:
            target = VOCABULARY[call.target]
        else:
            raise ReproductionError(f"{call.target[:40]!r} is no call of a tape graph")
        if target is ir.accumulate_grad and not _is_of_a_leaf(call.args):
            raise ReproductionError(f"call {number} writes the gradient of a value that is no leaf")
        node = graph.create_node("call_function", target, tuple(args), name=f"call_{number}")
        node.meta["call"] = call.call
        made.append(node)
    graph.output([decoded(each, known) for each in record.returned])
    inputs = [
        ir.LiftedTensor(index, each.dtype.removeprefix("torch."), each.device, each.requires_grad)
        for index, each in enumerate(record.tensors)
    ]
    calls = [
        ir.TapeCall(index, each.name, each.sequence, each.edges, ir.Named(each.parameter, each.module), each.source)
        for index, each in enumerate(record.nodes)
    ]
    try:
        ir.verify(graph)
    except (IllegalGraphError, RuntimeError) as error:
        raise ReproductionError(f"its calls are no tape graph: {error}") from error
    return ir.TapeGraph(graph, calls, inputs, record.accumulates, order=list(record.order))


def _is_of_a_leaf(args: Sequence[Any]) -> bool:
    """Return whether the first two arguments of :func:`ir.accumulate_grad` are a leaf and its previous gradient."""
    given = [isinstance(each, Given) and each.kind == "input" for each in args[:2]]
    return len(args) == 3 and given[0] and (given[1] or args[1] is None)


def _check(record: Record) -> None:
    count = len(record.nodes)
    if not 0 < count <= _MAX_NODES or len(record.calls) > 4 * _MAX_NODES:
        raise ReproductionError(
            f"it has {count} nodes and {len(record.calls)} calls; the limits are {_MAX_NODES} and {4 * _MAX_NODES}"
        )
    indices = [*record.order, *(each.call for each in record.calls)]
    indices += [edge for node in record.nodes for edge in node.edges or ()]
    if any(not 0 <= index < count for index in indices):
        raise ReproductionError("it names a node of the tape that does not exist")
    if sorted(record.order) != list(range(count)):
        raise ReproductionError("its order does not have each node exactly once")
    for each in itertools.chain(record.tensors, *(call.results for call in record.calls)):
        if each is not None:
            check(each)
    if any(not isinstance(each, (Ref, Given, type(None))) for each in record.returned):
        raise ReproductionError("one of its results is no gradient")
    for number in record.scalars:
        if isinstance(decoded(number, _none), (list, str, type(None))):
            raise ReproductionError("a scalar is no number")


def _none(value: Any) -> Any:
    raise ReproductionError(f"{value} stands in place of a number")


def _plain(name: str) -> str:
    """Return a name with only characters of a Python name: an untrusted file may have any others."""
    return "".join(each if each.isascii() and (each.isalnum() or each == "_") else "_" for each in name[:60])


def _placeholders(graph: fx.Graph, record: Record) -> dict[tuple[str, int], fx.Node]:
    counts: dict[str, Sequence[Any]] = {"input": record.tensors, "size": record.sizes, "scalar": record.scalars}
    found = {}
    for kind, values in counts.items():
        for index in range(len(values)):
            lifted = ir.Lifted(kind, index)
            node = found[kind, index] = graph.placeholder(str(lifted))
            node.meta["lifted"] = lifted
    return found


def _standing_in(call: CallRecord, number: int) -> Callable[..., list[torch.Tensor | None]]:
    made: list[torch.Tensor | None] = []

    def stand_in(*_: Any) -> list[torch.Tensor | None]:
        if not made:
            values = iter(tensors([each for each in call.results if each is not None], _SEED_OF_STAND_INS + number))
            made.extend(None if each is None else next(values).detach() for each in call.results)
        return [None if each is None else in_own_memory(each) for each in made]

    return stand_in


def given_to(record: Record, stored: dict[int, bytes], seed: int = 0) -> tuple[list[torch.Tensor], Sequence[Any]]:
    """Return new tensors for a tape graph, and its scalars.

    Raises:
        ReproductionError: the tensors cannot be made on this machine.
    """
    needed, there = sum(bytes_of(record.tensors).values()), _memory_of_this_machine()
    if needed > there:
        raise ReproductionError(f"its tensors need {needed:,} bytes, and this machine has {there:,}")
    try:
        made = tensors(record.tensors, seed, stored if record.real else None)
    except Exception as error:  # any error of PyTorch: a dtype without kernels, a missing device
        raise_what_a_handler_raised(error)
        raise ReproductionError(f"its tensors cannot be made here ({type(error).__name__}: {error})") from error
    return made, [decoded(each, _none) for each in record.scalars]


def _memory_of_this_machine() -> int:
    if not hasattr(os, "sysconf"):
        return 1 << 63
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
