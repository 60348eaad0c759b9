"""Reverse-mode automatic differentiation from nothing, and then compiled: an essay in code.

It is read from top to bottom. PyTorch's autograd does nothing here but say what is right. Sections 1 to 4 build a tape,
gradients, gradients of gradients, and operators made of others with what is easily got wrong in them. Section 5 hands
the same tape to `compiled_autograd.frontend`, where it becomes a tape graph, is cached with one graph for each pattern
of gradients that are known to be zero, and is compiled by the backend that compiles PyTorch's tapes.

    python examples/simple_grad.py [--backend inductor]
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import compiled_autograd as ca
from compiled_autograd import frontend

# ---- 1. Variables, and the tape --------------------------------------------------------------------------------------
#
# What is differentiated is a program of operations on tensors. An operation is a function from a list of tensors to a
# list of tensors. The decorator is for section 5 alone: here they are functions like any other.


@frontend.operation
def add(terms: Sequence[Tensor]) -> list[Tensor]:
    return [terms[0] + terms[1]]


@frontend.operation
def mul(factors: Sequence[Tensor]) -> list[Tensor]:
    return [factors[0] * factors[1]]


@frontend.operation
def total(terms: Sequence[Tensor]) -> list[Tensor]:
    return [terms[0].sum()]


@frontend.operation
def expand(terms: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    return [terms[0].expand_as(like)]


@frontend.operation
def sigmoid(terms: Sequence[Tensor]) -> list[Tensor]:
    return [terms[0].sigmoid()]


class Variable:
    """A tensor, known to the tape by itself: two variables with equal values are two.

    In section 5 `value` is a `frontend.Value`: what stands for a tensor that will be there when the tape runs.
    """

    def __init__(self, value: Tensor | frontend.Value) -> None:
        self.value = value

    def __add__(self, other: Variable) -> Variable:
        result = Variable(apply(add, self, other))
        TAPE.append(Entry([self, other], [result], lambda grads: [grads[0], grads[0]]))
        return result

    def __mul__(self, other: Variable) -> Variable:
        result = Variable(apply(mul, self, other))
        # The rule is written in variables, so what it computes is on the tape again: gradients have gradients.
        TAPE.append(Entry([self, other], [result], lambda grads: [grads[0] * other, grads[0] * self]))
        return result

    def sum(self) -> Variable:
        result = Variable(apply(total, self))
        TAPE.append(Entry([self], [result], lambda grads: [grads[0].expand_as(self)]))
        return result

    def expand_as(self, like: Variable) -> Variable:
        """One number, in every place of `like`."""
        result = Variable(apply(expand, self, saved=[like]))
        TAPE.append(Entry([self], [result], lambda grads: [grads[0].sum()]))
        return result


Gradients = list[Variable | None]
"""None is a gradient that is known to be zero."""


class Entry(NamedTuple):
    """One line of the tape. `propagate` goes from the gradients of the outputs to those of the inputs."""

    inputs: list[Variable]
    outputs: list[Variable]
    propagate: Callable[[Gradients], Gradients]


TAPE: list[Entry] = []


class Machine:
    """What an operation does when it is applied: it computes; in section 5, it is written down on a tape of calls."""

    operations = 0
    calls: frontend.Tape | None = None


def apply(operation: Callable, *inputs: Variable, saved: Sequence[Variable] = ()) -> Tensor | frontend.Value:
    Machine.operations += 1
    terms, kept = [each.value for each in inputs], [each.value for each in saved]
    if Machine.calls is None:
        return operation(terms, *kept)[0]
    return Machine.calls.call(operation, list(map(lifted, terms)), *map(lifted, kept), results=1)[0]


def lifted(value: Tensor | frontend.Value) -> frontend.Value:
    """A tensor of the forward becomes an input of what is written down, and is no part of it."""
    return value if isinstance(value, frontend.Value) else Machine.calls.tensor(value)


# ---- 2. The loop that goes back --------------------------------------------------------------------------------------


def gradients(outputs: Sequence[Variable], seeds: Gradients, wanted: Sequence[Variable]) -> Gradients:
    """Of `outputs`, weighted by `seeds`, with respect to `wanted`: the tape from its end to its beginning.

    Most of a tape leads nowhere near `outputs`: all that such an entry would bring is zero. Zeros are not made and not
    multiplied; they are None, and an entry whose outputs all have None is passed over, with the work behind it.
    """
    found: dict[Variable, Variable] = {}

    def collect(variable: Variable, gradient: Variable | None) -> None:
        if gradient is not None:
            found[variable] = found[variable] + gradient if variable in found else gradient

    for output, seed in zip(outputs, seeds, strict=True):
        collect(output, seed)
    for entry in TAPE[::-1]:  # a copy: what is computed here is appended
        grads = [found.get(output) for output in entry.outputs]
        if any(grad is not None for grad in grads):
            for variable, gradient in zip(entry.inputs, entry.propagate(grads), strict=True):
                collect(variable, gradient)
    return [found.get(variable) for variable in wanted]


# ---- 3. An operator made of others -----------------------------------------------------------------------------------
#
# swish(x) = x * sigmoid(x) could be two entries. As one, it says itself what its gradient is, and what is kept for
# that: the sigmoid, a temporary of the forward. There are three ways to come by it, and the first one is wrong where
# gradients are differentiated again.


def swish_of_a_plain_value(x: Variable) -> Variable:
    """The temporary is captured as a value. The tape takes it for a constant: second derivatives miss a term."""
    s = Variable(apply(sigmoid, x))
    result = Variable(apply(mul, x, s))

    def propagate(grads: Gradients) -> Gradients:
        constant = Variable(s.value)  # as good as `s` itself, of which no entry says where it comes from
        return [grads[0] * swish_slope(x, constant)]

    TAPE.append(Entry([x], [result], propagate))
    return result


def swish_computed_again(x: Variable) -> Variable:
    """The temporary is made anew from the input, on the tape: right, and the sigmoid is computed in each backward."""
    result = Variable(apply(mul, x, Variable(apply(sigmoid, x))))
    TAPE.append(Entry([x], [result], lambda grads: [grads[0] * swish_slope(x, recorded_sigmoid(x))]))
    return result


def swish(x: Variable) -> Variable:
    """The temporary is a second output of the entry, which nobody outside sees. In a first backward its gradient is
    None. Where a gradient that was computed from it is differentiated, it has one."""
    s = Variable(apply(sigmoid, x))
    result = Variable(apply(mul, x, s))

    def propagate(grads: Gradients) -> Gradients:
        of_result, of_s = grads
        terms = []
        if of_result is not None:
            terms.append(of_result * swish_slope(x, s))
        if of_s is not None:
            terms.append(of_s * sigmoid_slope(s))
        return [terms[0] if len(terms) == 1 else terms[0] + terms[1]]

    TAPE.append(Entry([x], [result, s], propagate))
    return result


def recorded_sigmoid(x: Variable) -> Variable:
    s = Variable(apply(sigmoid, x))
    TAPE.append(Entry([x], [s], lambda grads: [grads[0] * sigmoid_slope(s)]))
    return s


def sigmoid_slope(s: Variable) -> Variable:
    """s * (1 - s)"""
    return s + MINUS_ONE * s * s


def swish_slope(x: Variable, s: Variable) -> Variable:
    """s + x * s * (1 - s)"""
    return s + x * sigmoid_slope(s)


MINUS_ONE = Variable(torch.tensor(-1.0, dtype=torch.float64))

# ---- 4. Right? -------------------------------------------------------------------------------------------------------


def second_derivative(function: Callable[[Variable], Variable], at: Tensor) -> tuple[Tensor, int]:
    """Of `sum(function(x))`, with ones; and how many operations both backwards took."""
    TAPE.clear()
    x = Variable(at)
    y, ones, before = function(x).sum(), Variable(torch.ones_like(at)), Machine.operations
    (first,) = gradients([y], [Variable(torch.tensor(1.0, dtype=torch.float64))], [x])
    (second,) = gradients([first], [ones], [x])
    return second.value, Machine.operations - before


def compare_operators() -> None:
    at = torch.linspace(-3, 3, 7, dtype=torch.float64)
    x = at.clone().requires_grad_()
    (first,) = torch.autograd.grad((x * x.sigmoid()).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), x)
    step = 1e-5
    slope = torch.func.vmap(torch.func.grad(lambda x: x * x.sigmoid()))
    assert torch.allclose((slope(at + step) - slope(at - step)) / (2 * step), wanted)  # finite differences
    counts = []
    for function, is_right in ((swish_of_a_plain_value, False), (swish_computed_again, True), (swish, True)):
        second, operations = second_derivative(function, at)
        assert torch.allclose(second, wanted) == is_right
        counts.append(operations)
        print(f"{function.__name__}: second derivative {'right' if is_right else 'wrong'}, {operations} operations")
    assert counts[2] < counts[1]


def compare_with_zeros() -> None:
    """What None saves: of two outputs one is asked for, once with None for the other, and once with zeros."""
    counts = []
    for other in (None, Variable(torch.zeros(3, dtype=torch.float64))):
        TAPE.clear()
        a, b = (Variable(torch.randn(3, dtype=torch.float64)) for _ in range(2))
        outputs = model(a, b)
        before = Machine.operations
        gradients(outputs, [Variable(torch.ones(3, dtype=torch.float64)), other], [a, b])
        counts.append(Machine.operations - before)
    assert counts[0] < counts[1]
    print(f"a gradient of zero: {counts[0]} operations where it is None, {counts[1]} where it is a tensor of zeros")


def model(a: Variable, b: Variable) -> list[Variable]:
    product = a * b
    return [swish(product), product + a * a]


# ---- 5. The same tape, compiled --------------------------------------------------------------------------------------
#
# A compiler does not compute: it writes down. So the loop of section 2 runs as it is, with seeds that stand for
# tensors which are not there yet, and each operation that a rule applies becomes a call on a `frontend.Tape`. What is
# written down depends on which seeds are None: `if of_s is not None` is decided while it is written, and no graph has
# the question in it. So there is one graph for each pattern of None, and the key by which it is found says the
# pattern.

SETTINGS = {"on_miss": "compile", "compile_budget": math.inf, "cache_dir": False}  # each pattern is compiled at once


def compiled_gradients(
    session: ca.Session, outputs: Sequence[Variable], seeds: Sequence[Tensor | None], wanted: Sequence[Variable]
) -> list[Tensor | None]:
    Machine.calls = calls = frontend.Tape()
    try:
        found = gradients(outputs, [None if seed is None else Variable(calls.tensor(seed)) for seed in seeds], wanted)
    finally:
        Machine.calls = None
    return frontend.run(calls, [None if each is None else each.value for each in found], session)


def numeric(outputs: Callable[[Tensor, Tensor], list[Tensor]], seeds: list[Tensor | None], at: list[Tensor]) -> Tensor:
    """Finite differences of the weighted sum of the outputs, with respect to each element of the first of `at`."""

    def weighted(a: Tensor) -> Tensor:
        terms = zip(outputs(a, *at[1:]), seeds, strict=True)
        return sum((y * seed).sum() for y, seed in terms if seed is not None)

    steps = 1e-6 * torch.eye(len(at[0]), dtype=torch.float64)
    return torch.stack([(weighted(at[0] + step) - weighted(at[0] - step)) / 2e-6 for step in steps])


def reference(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a * b * (a * b).sigmoid(), a * b + a * a]


def compile_patterns(backend: str) -> None:
    session = ca.enable(backend=backend, dynamic=False, **SETTINGS)
    patterns = [(True, False), (False, True), (True, True)]
    for run, pattern in itertools.product((1, 2), patterns):
        at = [torch.randn(5, dtype=torch.float64) for _ in range(2)]
        seeds = [torch.randn(5, dtype=torch.float64) if asked else None for asked in pattern]
        TAPE.clear()
        variables = [Variable(each) for each in at]
        found = compiled_gradients(session, model(*variables), seeds, variables)

        leaves = [each.clone().requires_grad_() for each in at]
        asked = [(y, seed) for y, seed in zip(reference(*leaves), seeds, strict=True) if seed is not None]
        wanted = torch.autograd.grad([y for y, _ in asked], leaves, [seed for _, seed in asked], allow_unused=True)
        assert all(torch.allclose(ours, its) for ours, its in zip(found, wanted, strict=True))
        assert torch.allclose(found[0], numeric(reference, seeds, at), atol=1e-6)
        assert session.last.outcome == ("structure_miss" if run == 1 else "hit")
        print(f"run {run}, outputs asked for {pattern}: {session.last.outcome}, gradients equal torch's")
    stats = session.stats()
    assert (stats.backwards, stats.structure_misses, stats.hits, len(session.graphs())) == (6, 3, 3, 3)
    for pattern, graph in zip(patterns, session.graphs(), strict=True):
        names = [call.name for call in graph.tape.calls[1:]]
        print(f"{pattern}: {len(names)} operations, {' '.join(names)}")
    print(session.graphs()[1].readable())


def compile_second_order(backend: str) -> None:
    """A gradient of a gradient: the first backward computes, and so its tape can be written down like any other."""
    session = ca.enable(backend=backend, **SETTINGS)
    for _ in range(2):
        at, direction = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
        TAPE.clear()
        x = Variable(at)
        (first,) = gradients([swish(x)], [Variable(torch.ones_like(at))], [x])
        (second,) = compiled_gradients(session, [first], [direction], [x])

        def slope(x: Tensor) -> Tensor:
            return torch.autograd.grad((x * x.sigmoid()).sum(), x, create_graph=True)[0]

        leaf = at.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(slope(leaf), leaf, direction)
        assert torch.allclose(second, wanted)
        difference = (slope(leaf + 1e-6 * direction) - slope(leaf - 1e-6 * direction)) / 2e-6
        assert torch.allclose(second, difference, atol=1e-6)  # its Hessian is diagonal
    assert session.last.outcome == "hit"
    print(f"second order: {session.last.outcome}, equal to torch's and to finite differences")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="eager")
    backend = parser.parse_args().backend
    torch.manual_seed(0)
    compare_operators()
    compare_with_zeros()
    compile_patterns(backend)
    compile_second_order(backend)


if __name__ == "__main__":
    main()
