"""Record a tape graph: the engine's functions as their operators, and users' code as stand-ins that return made-up
values of the same kinds.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import fx

from .. import ir
from ..capture.grad_dtypes import dtype_of_number
from ..errors import ReproductionError
from ..lowering.fake_tensors import TracingMode
from ..lowering.tracing import plain_tracing
from ..torch_api.version_differences import prepare_fake_tensors
from ..versions import VERSION
from .functions import NotRecordedError, flattened, mapped, recorded
from .records import About, CallRecord, Function, Given, Listed, NodeRecord, Record, Ref, TensorRecord, Value, encoded
from .tensors import Unusual, fakes, records_of

Kinds = Callable[[fx.Node], TensorRecord | str | None]
"""A function that returns the kind of a result of users' code: a record, None if it was undefined, ``""`` if unknown.
"""
VOCABULARY: dict[str, Any] = {
    **{each.__name__: each for each in (ir.sum_gradients, ir.accumulate_grad, operator.getitem)},
    **{each.__name__: each for each in (ir.copy_slices_prologue, ir.copy_slices_epilogue)},
    **{each.__name__: each for each in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)},
}
"""Calls that exist in every process, by name."""
STAND_IN = "stand-in"
FUNCTION = "function"
_GIVES_ONE = (ir.tensor_hook, ir.cpp_hook, ir.unpack_hook)
"""Kinds of users' code that return a tensor, not a list."""


@dataclass
class Sample:
    """The inputs of one backward, without the values of its tensors."""

    tensors: Sequence[TensorRecord | Unusual]
    sizes: Sequence[int]
    scalars: Sequence[Any]

    @staticmethod
    def of(given: Mapping[str, Sequence[Any]]) -> Sample:
        """Return the sample of real inputs, given by kind of placeholder."""
        tensors = records_of(given.get("input", ()))
        return Sample(tensors, list(given.get("size", ())), list(given.get("scalar", ())))


def record_of(tape: ir.TapeGraph, sample: Sample, kinds: Kinds, about: About) -> Record:
    """Return the record of a tape graph.

    Args:
        kinds: the kinds of the results of users' code, as far as known.

    Raises:
        ReproductionError: an input is a tensor that cannot be made up, or a result of users' code is unknown.
    """
    prepare_fake_tensors()
    for index, each in enumerate(sample.tensors):
        if isinstance(each, Unusual):
            raise ReproductionError(f"input_{index} of the tape graph is {each}; such a tensor cannot be made up")
    mode = TracingMode(allow_non_fake_inputs=True)
    with torch.no_grad(), plain_tracing(), mode:
        recording = _Recording(tape, sample, kinds, fakes(mode, sample.tensors), mode)  # type: ignore[arg-type]
        recording.run()
    nodes = [
        NodeRecord(each.name, each.sequence, each.edges, each.parameter, each.module, each.source)
        for each in tape.calls
    ]
    output = tape.graph.find_nodes(op="output")[0].args[0]
    return Record(
        about=msgspec.structs.replace(about, torch=str(torch.__version__), version=VERSION),
        accumulates=tape.accumulates,
        nodes=nodes,
        order=list(tape.order),
        tensors=list(sample.tensors),  # type: ignore[arg-type]
        sizes=list(sample.sizes),
        scalars=[encoded(each, _nothing) for each in sample.scalars],
        functions=recording.functions,
        calls=recording.calls,
        returned=[encoded(each, recording.refs.__getitem__) for each in output],
    )


def _nothing(_: Any) -> Value:
    raise TypeError("a node of a graph")


@dataclass
class _Recording:
    tape: ir.TapeGraph
    sample: Sample
    kinds: Kinds
    tensors: Sequence[torch.Tensor]
    mode: TracingMode
    calls: list[CallRecord] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    refs: dict[fx.Node, Value] = field(default_factory=dict)
    known: dict[fx.Node, Any] = field(default_factory=dict)  # fake tensors, and real sizes
    _numbers: dict[bytes, int] = field(default_factory=dict)  # encoded function -> its number
    _like: dict[Any, tuple[Function, Any]] = field(default_factory=dict)  # kind of a call -> its function and results

    def __post_init__(self) -> None:
        records = [each for each in self.sample.tensors if isinstance(each, TensorRecord)]
        self._storages = itertools.count(1 + max((each.storage for each in records), default=-1))

    def run(self) -> None:
        """Record all calls, in order."""
        given = {"input": self.tensors, "size": self.sample.sizes, "scalar": self.sample.scalars}
        for node in self.tape.graph.nodes:
            if node.op == "placeholder":
                lifted = node.meta["lifted"]
                is_kept = lifted.kind in given  # objects are not kept: no operator takes one
                self.refs[node] = Given(lifted.kind, lifted.index) if is_kept else None
                self.known[node] = given[lifted.kind][lifted.index] if is_kept else None
            elif node.op == "call_function" and node.target not in (ir.Packed, ir.check_nan):
                self._call(node)

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        if ir.hook_kind(target) in ir.USERS_CODE:
            self._stand_in(node, ir.target_name(node))
        elif isinstance(target, (ir.OpaqueOp, ir.InlinedBackward)) or target is ir.zeros:
            self._function(node)
        else:
            arguments = self._arguments(node.args)
            self.known[node] = arguments[2] if target is ir.accumulate_grad else target(*arguments)
            self._add(node, ir.target_name(node), [encoded(each, self.refs.__getitem__) for each in node.args])

    def _arguments(self, args: Any) -> Any:
        return fx.map_arg(args, self.known.get)

    def _function(self, node: fx.Node) -> None:
        """Record a function of the engine: its operators, or a stand-in if it cannot be recorded."""
        target: Any = node.target
        try:
            if isinstance(target, ir.OpaqueOp) and not target.traceable:
                raise NotRecordedError("it is not traceable")
            function, self.known[node] = self._recorded(target, self._arguments(node.args))
        except NotRecordedError as error:
            self._stand_in(node, f"{target.__name__}, {error}")
            return
        number = self._numbers.setdefault(msgspec.msgpack.encode(function), len(self.functions))
        if number == len(self.functions):
            self.functions.append(function)
        is_inlined = isinstance(target, ir.InlinedBackward)
        takes = [flattened(list(node.args))] if is_inlined else node.args  # gradients as a list, as other functions
        args = [_or_as_text(each, self.refs) for each in takes]
        self._add(node, FUNCTION, args, target.__name__, number)

    def _recorded(self, target: Any, arguments: Sequence[Any]) -> tuple[Function, Any]:
        """Return a function and its results. Of calls of the same kind, as in repeated layers, only one is traced."""
        given = flattened(arguments)
        places = {id(each): place for place, each in reversed(list(enumerate(given)))}
        kind = target, repr([_kind_of(each, places) for each in given]), repr([type(each) for each in arguments])
        if kind not in self._like:
            function, results = recorded(getattr(target, "trace", target), arguments)
            tensors = [each for each in flattened(results) if isinstance(each, torch.Tensor)]
            if all(each.layout is torch.strided for each in tensors):
                self._like[kind] = function, mapped(results, lambda each: (places.get(id(each)), _record_like(each)))
            return function, results
        function, like = self._like[kind]

        def again(made: Any) -> Any:
            place, record = made
            return given[place] if place is not None else fakes(self.mode, [record])[0]

        return function, mapped(like, again)

    def _add(self, node: fx.Node, target: str, args: list[Value], name: str = "", *rest: Any) -> None:
        self.refs[node] = Ref(len(self.calls))
        self.calls.append(CallRecord(node.meta["call"], target, args, name, *rest))

    # ---- users' code -------------------------------------------------------------------------------------------------

    def _stand_in(self, node: fx.Node, name: str) -> None:
        """Record a stand-in that returns made-up values in place of a call that cannot be recorded. It takes the same
        tensors, so that the order of the calls stays the same."""
        target: Any = ir.hook_kind(node.target)
        is_single = target in _GIVES_ONE
        if target is ir.post_accumulate_hook:
            records: list[TensorRecord | None] = []
        elif is_single:
            records = [self._kind(node, self.known.get(node.args[1]))]  # type: ignore[arg-type]
        else:
            like = self._arguments(node.args[1]) if target in (ir.pre_hook, ir.post_hook) else []
            items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            count = max([len(like), *(index + 1 for index in items)], default=0)
            records = [
                self._kind(items[index], like[index] if index < len(like) else None) if index in items else None
                for index in range(count)
            ]
        records = [each and msgspec.structs.replace(each, storage=next(self._storages)) for each in records]
        made: list[Any] = [None if each is None else fakes(self.mode, [each])[0] for each in records]
        takes = [self.refs[each] for each in node.all_input_nodes if isinstance(self.known.get(each), torch.Tensor)]
        self._add(node, STAND_IN, [Listed(takes)], name, -1, records)
        self.known[node] = made
        if is_single:  # a stand-in gives a list
            self._add(node, "getitem", [self.refs[node], 0])
            self.known[node] = made[0]

    def _kind(self, value: fx.Node, like: torch.Tensor | None) -> TensorRecord | None:
        """Return the kind of a result of users' code.

        Raises:
            ReproductionError: the kind is unknown.
        """
        found = self.kinds(value)
        if not isinstance(found, str):
            return found
        if isinstance(like, torch.Tensor):
            return _record_like(like)
        validated = self._validated(value)
        if validated is not None or not value.users:
            return validated
        name = self.tape.calls[value.meta["call"]].name
        raise ReproductionError(
            f"the results of users' code in {name} are unknown; run a compiled backward of this structure first"
        )

    def _validated(self, value: fx.Node) -> TensorRecord | None:
        """Return the kind that a value must have according to the engine's metadata of its edge; None if unknown."""
        for user in value.users:
            if ir.is_validation(user):
                outputs: Any = user.args[0]
                metadata: Any = user.args[1]
                metadata = metadata[list(outputs).index(value)]
                if metadata is None:
                    return None
                shape = [int(each) for each in self._arguments(metadata[1])]
                strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
                dtype = dtype_of_number(metadata[0][3] if metadata[-1] is None else metadata[-1])
                return TensorRecord(str(dtype), str(metadata[0][2]), shape, strides, 0)
            if ir.hook_kind(user.target) in (ir.post_hook, ir.pre_hook):
                place = list(user.args[1]).index(value)  # type: ignore[arg-type]
                items = [each for each in user.users if each.target is operator.getitem and each.args[1] == place]
                return self._validated(items[0]) if items else None
            if ir.hook_kind(user.target) in (ir.tensor_hook, ir.cpp_hook, ir.sum_gradients):
                return self._validated(user)
        return None


def _or_as_text(value: Any, refs: Mapping[fx.Node, Value]) -> Value:
    """Encode an argument of a function. Arguments that cannot be stored become text: only tensors matter, the recorded
    operators contain the rest."""
    try:
        return encoded(value, refs.__getitem__)
    except TypeError:
        return str(value)


def _kind_of(value: Any, places: Mapping[int, int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return places[id(value)], _record_like(value), value.requires_grad


def _record_like(fake: torch.Tensor) -> TensorRecord:
    kind = (str(fake.dtype), str(fake.device), list(fake.shape), list(fake.stride()))
    return TensorRecord(*kind, 0, conj=fake.is_conj(), neg=fake.is_neg())
