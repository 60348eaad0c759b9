"""From the Python code that Inductor generates (torch 2.13) to the instructions of a straight-line program.

An instruction is a tuple:

- ``("call", function, slots, constants, result, has_address)``: call a Python function with the values of ``slots``,
  then ``constants``; keep the result in slot ``result`` (-1: nowhere).
- ``("output", function, sizes, strides, dtype, result, has_address)``: memory that Python sees as a result.
- ``("memory", bytes, result)``: memory that no Python sees, in slot ``result``.
- ``("kernel", address, memory)``: ``memory`` has a slot and an offset in bytes for each argument, one after the other.
- ``("product", address, limit, in_double, transpose_a, transpose_b, m, n, k, lda, ldb, ldc, alpha, beta, memory)``:
  BLAS; ``limit`` is the address of a function that limits it to one thread, or 0.
- ``("copy", bytes, memory)``: to the first from the second.
- ``("drop", slots)``: release the values of these slots.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided_cpu  # type: ignore[attr-defined]

from ...protocol import Compiled
from ..kernels import address_of
from .products import Value, in_blas, is_dense
from .statements import (
    UnknownCodeError,
    arguments_of,
    body_of_call,
    clears_arguments,
    compiled,
    constants_of,
    is_overwritten,
    name_of,
)

MAX_ARGUMENTS = 64
"""The largest number of a kernel's arguments, ``most_arguments`` in the C++ code."""
Instruction = tuple[Any, ...]
MakeProgram = Callable[[int, Sequence[int], list[Instruction], Sequence[int]], Compiled]
"""Number of slots, inputs whose address is needed, instructions, slots of the outputs (-1 for None); gives what runs
it, which takes its arguments in a list and empties it."""


def values_of(arguments: Sequence[Any]) -> tuple[Value, ...]:
    """Return the properties of a run's arguments on which a translation depends: equal ones give equal instructions."""
    return tuple(_value_of_input(slot, value) for slot, value in enumerate(arguments))


def _value_of_input(slot: int, value: Any) -> Value:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if not plain or value.is_neg() or value.is_conj() or value._is_zerotensor():
        return Value(slot)
    return Value(slot, tuple(value.shape), value.stride(), 0, value.dtype)


def translated(
    source: str, namespace: Mapping[str, Any], arguments: Sequence[Any], body: Sequence[ast.stmt] | None = None
) -> Translation:
    """The instructions of the function ``call`` in generated code.

    Args:
        namespace: what its names are.
        arguments: of one run; the sizes and strides of all others must be the same.
        body: the statements of the function, where they were read already.

    Raises:
        UnknownCodeError: there is a statement, or an expression, of a form that is not known.
    """
    body = body_of_call(source) if body is None else body
    translation = Translation(namespace, arguments)
    for position, statement in enumerate(body):
        translation.statement(statement, itertools.islice(body, position + 1, None))
    return translation


class Translation:
    """Instructions in the making, and what the names stand for at this point of the code.

    Attributes:
        instructions: as the docstring of this module has them.
        outputs: the slot of each output, -1 for None.
    """

    def __init__(self, namespace: Mapping[str, Any], arguments: Sequence[Any]) -> None:
        self.instructions: list[Instruction] = []
        self.outputs: list[int] | None = None
        self._namespace = dict(namespace)
        self._inputs = values_of(arguments)
        self._names: dict[str, Value] = {}
        self._held: Counter[int] = Counter()  # by slot, how many names it has
        self._objects = [*self._inputs]  # by slot, what lies there
        self._addressed: set[int] = set()
        self._allocations: dict[int, int] = {}  # by slot of memory that no Python has seen: the index of its allocation
        self._following: Iterable[ast.stmt] = ()

    def made_by(self, make_program: MakeProgram) -> Compiled:
        """The program."""
        if self.outputs is None:
            raise UnknownCodeError("it returns nothing")
        inputs = [slot for slot in range(len(self._inputs)) if slot in self._addressed]
        seen = frozenset(slot for each in self.instructions if each[0] == "call" for slot in each[2])
        instructions = [*filter(None, (self._settled(each, seen) for each in self.instructions))]
        return make_program(len(self._objects), tuple(inputs), instructions, tuple(self.outputs))

    def _settled(self, instruction: Instruction, seen: Container[int]) -> Instruction | None:
        """An instruction, now that all uses of its result are known. None: it has none.

        Args:
            seen: slots that Python takes in some instruction.
        """
        if instruction[0] != "call":
            return instruction
        _, function, _, constants, result, _ = instruction
        has_address = result in self._addressed
        if function is not empty_strided_cpu or result in seen:  # another function may do more than to allocate
            return None if result in self._allocations and not has_address else (*instruction[:-1], has_address)
        assert self.outputs is not None
        if result in self.outputs:
            return ("output", function, *constants, result, has_address)
        return ("memory", self._objects[result].bytes, result) if has_address else None

    def statement(self, statement: ast.stmt, following: Iterable[ast.stmt] = ()) -> None:
        """Translate one statement, after which ``following`` come."""
        self._following = following
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._forget(name_of(target))
        elif isinstance(statement, ast.Return):
            self._return(statement.value)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Expr):
            self._expression(statement.value)
        else:
            raise UnknownCodeError(f"a statement: {ast.unparse(statement)[:80]}")

    # ---- statements

    def _assign(self, target: ast.expr, expression: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(expression, ast.Name) and expression.id == "args":
            if len(target.elts) != len(self._inputs):
                raise UnknownCodeError(f"it takes {len(target.elts)} arguments of {len(self._inputs)}")
            for each, value in zip(target.elts, self._inputs, strict=True):
                self._bind(name_of(each), value)
            return
        name = name_of(target)
        value = self._allocated(expression) or self._known(expression) or self._called(expression)
        self._bind(name, value)

    def _expression(self, expression: ast.expr) -> None:
        if isinstance(expression, ast.Constant) or clears_arguments(expression):
            return
        if isinstance(expression, ast.Call):
            instructions = self._kernel(expression) or self._product(expression)
            if instructions:
                self.instructions.extend(instructions)
                return
        self._called(expression, is_kept=False)

    def _return(self, expression: ast.expr | None) -> None:
        if not isinstance(expression, ast.Tuple):
            raise UnknownCodeError("it returns no tuple")
        self.outputs = []
        for each in expression.elts:
            if isinstance(each, ast.Constant) and each.value is None:
                self.outputs.append(-1)
            else:
                self.outputs.append(self._object(self._known(each) or self._called(each)))

    def _bind(self, name: str, value: Value) -> None:
        self._held[value.slot] += 1
        if name in self._names:
            self._forget(name)
        self._names[name] = value

    def _forget(self, name: str) -> None:
        if name not in self._names:
            raise UnknownCodeError(f"{name} is not known where it is deleted")
        slot = self._names.pop(name).slot
        self._held[slot] -= 1
        if not self._held[slot]:
            self._drop([slot])

    def _drop(self, slots: Sequence[int]) -> None:
        if self.instructions and self.instructions[-1][0] == "drop":
            slots = (*self.instructions.pop()[1], *slots)
        self.instructions.append(("drop", tuple(slots)))

    # ---- expressions

    def _known(self, expression: ast.expr) -> Value | None:
        """Return the value of a name, or of other sizes and strides over its memory; None for any other expression."""
        if isinstance(expression, ast.Name):
            return self._names.get(expression.id)
        arguments = arguments_of(expression, "reinterpret_tensor")
        if arguments is None or len(arguments) != 4:
            return None
        of, constants = self._known(arguments[0]), constants_of(arguments[1:])
        if of is None or of.dtype is None or constants is None:
            return None
        sizes, strides, offset = constants
        return Value(of.slot, sizes, strides, of.offset + offset, of.dtype)

    def _allocated(self, expression: ast.expr) -> Value | None:
        """New memory of known sizes."""
        arguments = arguments_of(expression, "empty_strided_cpu")
        if arguments is None or len(arguments) != 3:
            return None
        constants, dtype = constants_of(arguments[:2]), self._namespace_value(arguments[2])
        if constants is None or not isinstance(dtype, torch.dtype):
            return None
        sizes, strides = constants
        value = self._new(Value(-1, sizes, strides, 0, dtype))
        self._allocations[value.slot] = len(self.instructions)
        self.instructions.append(self._allocation(value))
        return value

    def _allocation(self, value: Value) -> Instruction:
        function = self._namespace["empty_strided_cpu"]
        return ("call", function, (), (value.sizes, value.strides, value.dtype), value.slot, False)

    def _new(self, value: Value) -> Value:
        """Return the value in a slot of its own."""
        made = Value(len(self._objects), value.sizes, value.strides, 0, value.dtype)
        self._objects.append(made)
        return made

    def _object(self, value: Value) -> int:
        """Return the slot of a Python object with the properties of ``value``."""
        there = self._objects[value.slot]
        allocation = self._allocations.pop(value.slot, None)
        if value == there:
            return value.slot
        if allocation is not None and value.offset == 0 and value.bytes == there.bytes:
            self.instructions[allocation] = self._allocation(value)  # nobody has seen what it was
            self._objects[value.slot] = value
            return value.slot
        made = self._new(value)
        constants = (value.sizes, value.strides, value.offset)
        function = self._namespace["reinterpret_tensor"]
        self.instructions.append(("call", function, (value.slot,), constants, made.slot, False))
        return made.slot

    def _called(self, expression: ast.expr, is_kept: bool = True) -> Value:
        """Whatever else: Python computes it, from the objects that it names."""
        for node in ast.walk(expression):
            if isinstance(node, (ast.Lambda, ast.NamedExpr, ast.comprehension, ast.Await, ast.Yield, ast.YieldFrom)):
                raise UnknownCodeError(f"an expression: {ast.unparse(expression)[:80]}")
        named = dict.fromkeys(node.id for node in ast.walk(expression) if isinstance(node, ast.Name))
        taken = [name for name in named if name in self._names]
        text = f"lambda {', '.join(taken)}: {ast.unparse(expression)}"
        function = eval(compiled(text), self._namespace)
        slots = [self._object(self._names[name]) for name in taken]
        value = self._new(Value(-1)) if is_kept else None
        result = -1 if value is None else value.slot
        self.instructions.append(("call", function, tuple(slots), (), result, False))
        views = [slot for name, slot in zip(taken, slots, strict=True) if slot != self._names[name].slot]
        if views:
            self._drop(views)
        return value or Value(-1)

    def _namespace_value(self, expression: ast.expr) -> Any:
        """Return the object of a dotted name that the code did not make itself; None if there is none."""
        if isinstance(expression, ast.Attribute):
            return getattr(self._namespace_value(expression.value), expression.attr, None)
        if isinstance(expression, ast.Name) and expression.id not in self._names:
            return self._namespace.get(expression.id)
        return None

    # ---- calls by address

    def _memory(self, values: Sequence[Value]) -> tuple[int, ...]:
        self._addressed.update(value.slot for value in values)
        return tuple(number for value in values for number in value.memory)

    def _kernel(self, call: ast.Call) -> list[Instruction] | None:
        """A kernel of Inductor's, of which all arguments are addresses."""
        address = address_of(self._namespace_value(call.func))
        values = [self._known(argument) for argument in call.args]
        tensors = [value for value in values if value is not None and value.dtype is not None]
        if address is None or call.keywords or len(tensors) != len(values) or len(values) > MAX_ARGUMENTS:
            return None
        return [("kernel", address, self._memory(tensors))]

    def _product(self, call: ast.Call) -> list[Instruction] | None:
        """``mm`` and ``addmm`` as BLAS computes them."""
        function = self._namespace_value(call.func)
        if function is not torch.mm and function is not torch.addmm:
            return None
        values = [self._known(argument) for argument in call.args]
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        out = self._known(keywords.pop("out")) if "out" in keywords else None
        tensors = [value for value in (out, *values) if value is not None and value.dtype is not None]
        factors = {name: constants_of([value]) for name, value in keywords.items()}
        if len(tensors) != len(values) + 1 or not factors.keys() <= {"alpha", "beta"} or None in factors.values():
            return None
        alpha, beta = (float((factors.get(name) or (1,))[0]) for name in ("alpha", "beta"))
        to, *added, left, right = tensors
        if len(added) > 1 or not self._may_be_written(to, added, (left, right)):
            return None
        product = in_blas(to, left, right, alpha, 0.0 if function is torch.mm else beta)
        if product is None or any(value.dtype != to.dtype for value in tensors):
            return None
        copy: list[Instruction] = []
        for term in added:
            if not is_dense(to) or (term.sizes, term.strides) != (to.sizes, to.strides):
                return None
            if term.memory == to.memory or beta == 0:
                continue
            if term.slot not in (left.slot, right.slot) and self._exchange(term, to):
                to = term
            else:
                copy = [("copy", to.bytes, self._memory([to, term]))]
        *plain, first, second = product
        return [*copy, ("product", *plain, self._memory([first, second, to]))]

    def _may_be_written(self, to: Value, added: Sequence[Value], factors: Sequence[Value]) -> bool:
        """Return whether a product can be written to memory while it is computed, with the added term copied there
        before.

        Two slots that this code allocated never share memory; inputs may. The factors must lie elsewhere, and the added
        term exactly there or elsewhere. Otherwise ``torch`` is called.
        """
        if to.slot < len(self._inputs) or to.slot in {value.slot for value in factors}:
            return False
        return all(term.slot != to.slot or term.memory == to.memory for term in added)

    def _exchange(self, one: Value, other: Value) -> bool:
        """Exchange two pieces of memory if neither has been seen, and one of them is not read again.

        A sum can then be computed in the memory of its first term, unless that is a factor too.
        """
        names = {
            value: [name for name in self._names if self._names[name].slot == value.slot] for value in (one, other)
        }
        for value in (one, other):
            alike = all(self._names[name] == value for name in names[value])
            if value.slot not in self._allocations or value != self._objects[value.slot] or not alike:
                return False
        if not is_overwritten(names[one], self._following):
            return False
        for value, place in ((one, other), (other, one)):
            self._names.update(dict.fromkeys(names[value], place))
            self._held[place.slot] = len(names[value])
        return True
