"""The ways to run a backward that are compared, each as a context to enter around `loss.backward()`.

Written against torch 2.13, whose own compiled autograd is the private module `torch._dynamo.compiled_autograd`.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from benchmarks.models import MakeLoss


class NotApplicable(Exception):
    """This measurement means nothing for this runner and model; the message says why."""


def plain_loss(make_loss: MakeLoss) -> MakeLoss:
    return make_loss


def no_counts() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Runner:
    """How to make the loss, what to enter around each backward, and what it counted."""

    around: Callable[[], contextlib.AbstractContextManager]
    prepare: Callable[[MakeLoss], MakeLoss] = plain_loss
    counts: Callable[[], dict[str, Any]] = no_counts


def eager() -> Runner:
    return Runner(contextlib.nullcontext)


def aot(mode: str | None = None) -> Runner:
    """torch.compile of the model and its loss, so that the whole tape is AOTAutograd's."""
    return Runner(contextlib.nullcontext, prepare=lambda make_loss: torch.compile(make_loss, mode=mode))


def aot_ours() -> Runner:
    """The same, and its backward under this project: one node, whose graph is taken apart and compiled once more."""
    return replace(ours("inductor"), prepare=aot().prepare)


def torch_own(dynamic: bool, compiler: Callable[[GraphModule], Callable[..., Any]] | None = None) -> Runner:
    """PyTorch's own compiled autograd over Inductor, or over `compiler` where one is given."""
    from torch._dynamo import compiled_autograd as torch_compiled_autograd

    captures = 0

    def compile_graph(graph_module: GraphModule) -> Callable[..., Any]:
        nonlocal captures
        captures += 1
        if compiler is not None:
            return compiler(graph_module)
        return torch.compile(graph_module, backend="inductor", fullgraph=True, dynamic=dynamic)

    return Runner(
        lambda: torch_compiled_autograd._enable(compile_graph, dynamic=dynamic),
        counts=lambda: {"captures": captures},
    )


def ours(backend: str | Callable[..., Any], native: bool = True, **settings: Any) -> Runner:
    """compiled_autograd over `backend`; the counts leave out what stayed zero.

    With `native` the extension is there already (`backward.build_extension`): else it would set in at some step.
    """
    import compiled_autograd as ca

    # Nothing kept on disk, so that the first backward is as cold as that of the others; and no step left to eager.
    session = ca.enable(backend=backend, cache_dir=False, tune=False, native=native, **settings)
    names = ("hits", "captures", "shape_misses", "structure_misses", "compiles", "bypasses", "failures")

    def counts() -> dict[str, Any]:
        stats = session.stats()
        return {name: value for name in names if (value := getattr(stats, name))}

    return Runner(lambda: session, counts=counts)


def empty_torch_function(graph_module: GraphModule) -> Callable[..., list[Tensor]]:
    """What PyTorch's own compiled autograd calls instead of compiled code: it does nothing and returns nothing.

    `.grad` is written inside PyTorch's graph, so a graph made for `loss.backward()` has no outputs.
    """
    outputs = graph_module.graph.output_node().args[0]
    if outputs:
        raise NotApplicable(f"the captured graph returns {outputs}, which an empty function cannot")
    # A list and nothing else: the engine checks the type.
    return lambda *_: []


def empty_backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of ours that computes nothing and gives no gradients: none are written, as in PyTorch's case."""
    count = len(graph_module.graph.output_node().args[0])

    def run(inputs: list[Any]) -> Sequence[None]:
        inputs.clear()
        return (None,) * count

    # PyTorch's mark of a function that takes its inputs in one list and empties it.
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


RUNNERS: dict[str, Callable[[], Runner]] = {
    "eager": eager,
    "ours-eager": lambda: ours("eager"),
    "ours-inductor": lambda: ours("inductor"),
    "ours-seam": lambda: ours("inductor", native=False),
    "ours-cuda-graphs": lambda: ours("inductor:reduce-overhead"),
    "torch-ca-dynamic": lambda: torch_own(dynamic=True),
    "torch-ca-static": lambda: torch_own(dynamic=False),
    "aot": aot,
    "aot-ours": aot_ours,
    "aot-cuda-graphs": lambda: aot("reduce-overhead"),
}


def empty_program_backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The same as a straight-line program, which is what the inductor backend calls for a region on the CPU."""
    if any(isinstance(each, Tensor) and each.is_cuda for each in example_inputs):
        return empty_backend(graph_module, example_inputs)
    from compiled_autograd.backends.inductor.straight_line import program_library
    from compiled_autograd.backends.inductor.straight_line.straight_line import StraightLine

    library = program_library.begin().result()
    if library is None:
        raise NotApplicable("there is no compiler for straight-line programs")
    count = len(example_inputs)
    outputs = (-1,) * len(graph_module.graph.output_node().args[0])
    line = StraightLine(empty_backend(graph_module, example_inputs), "", {}, library.make_program)
    line.program = library.make_program(count, (), [("drop", tuple(range(count)))], outputs)
    line.has_run = line._is_settled = True
    line._boxed_call = True  # type: ignore[attr-defined]
    return line


# The same runners with an empty compiled function: what is left of a backward is the cost of a hit. Ours differ in
# nothing else. What an empty function gives is wrong, which nobody is to look at.
EMPTY_RUNNERS: dict[str, Callable[[], Runner]] = {
    "ours-eager": lambda: ours(empty_backend, check=False),
    "ours-inductor": lambda: ours(empty_program_backend, check=False),
    "ours-seam": lambda: ours(empty_program_backend, native=False, check=False),
    "ours-cuda-graphs": lambda: ours(empty_backend, check=False),
    "torch-ca-dynamic": lambda: torch_own(dynamic=True, compiler=empty_torch_function),
    "torch-ca-static": lambda: torch_own(dynamic=False, compiler=empty_torch_function),
}
