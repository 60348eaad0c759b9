"""The ways to run a backward that are compared, each as a context to enter around `loss.backward()`.

Written against torch 2.13, whose own compiled autograd is the private module `torch._dynamo.compiled_autograd`.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

if TYPE_CHECKING:
    from compiled_autograd import Session


class NotApplicable(Exception):
    """This measurement means nothing for this runner and model; the message says why."""


Compute = Callable[..., Tensor]
"""A loss, or a module."""


def as_it_is(compute: Compute) -> Compute:
    return compute


def no_counts() -> dict[str, Any]:
    return {}


def no_wait() -> None:
    """Nothing is built beside the training."""


@dataclass(frozen=True)
class Runner:
    """How to compute the loss, what to enter around each backward, what it counted, and how to wait for what it builds
    beside the training."""

    around: Callable[[], contextlib.AbstractContextManager]
    prepare: Callable[[Compute], Compute] = as_it_is
    counts: Callable[[], dict[str, Any]] = no_counts
    wait: Callable[[], None] = no_wait


def eager() -> Runner:
    return Runner(contextlib.nullcontext)


def aot(mode: str | None = None) -> Runner:
    """torch.compile of the model and its loss, so that the whole tape is AOTAutograd's."""
    return Runner(contextlib.nullcontext, prepare=lambda compute: torch.compile(compute, mode=mode))


def aot_with(ours: Runner) -> Runner:
    """The same, and its backward under this project: one node, whose graph is taken apart and compiled once more."""
    return replace(ours, prepare=aot().prepare)


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


def ours(backend: str | Callable[..., Any], extension: str = "all", **settings: Any) -> Runner:
    """compiled_autograd over `backend`; the counts leave out what stayed zero.

    Unless `extension="off"`, the extension was built before (`backward.build_extension`): else it would set in at
    some step.
    """
    import compiled_autograd as ca

    # Nothing kept on disk, so that the first backward is as cold as that of the others; and no step left to eager.
    given = {"on_miss": "compile", "cache_dir": False, "tune": False, **settings}
    return of_session(ca.enable(backend=backend, extension=extension, **given))


def default() -> Runner:
    """compiled_autograd as it is where nothing is set, but that steps wait for compiles."""
    import compiled_autograd as ca

    return of_session(ca.enable(on_miss="compile"))


def of_session(session: "Session") -> Runner:
    """All backwards in a session of this project."""
    names = (
        "hits",
        "captures",
        "shape_misses",
        "structure_misses",
        "compiles",
        "loads",
        "tuning",
        "bypasses",
        "failures",
    )

    def counts() -> dict[str, Any]:
        stats = session.stats()
        return {name: value for name in names if (value := getattr(stats, name))}

    def wait() -> None:
        from compiled_autograd.native.library import Library

        if Library.LATEST is not None:
            Library.LATEST.built()

    return Runner(lambda: session, counts=counts, wait=wait)


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
    "default": default,
    "ours-eager": lambda: ours("eager"),
    "ours-inductor": lambda: ours("inductor"),
    "ours-seam": lambda: ours("inductor", extension="off"),
    "ours-cuda-graphs": lambda: ours("inductor:reduce-overhead"),
    "torch-ca-dynamic": lambda: torch_own(dynamic=True),
    "torch-ca-static": lambda: torch_own(dynamic=False),
    "aot": aot,
    "aot-ours": lambda: aot_with(ours("inductor")),
    "aot-default": lambda: aot_with(default()),
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
    "ours-seam": lambda: ours(empty_program_backend, extension="off", check=False),
    "ours-cuda-graphs": lambda: ours(empty_backend, check=False),
    "torch-ca-dynamic": lambda: torch_own(dynamic=True, compiler=empty_torch_function),
    "torch-ca-static": lambda: torch_own(dynamic=False, compiler=empty_torch_function),
}
