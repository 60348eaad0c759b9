"""Read a live tape into plain values: each node with its saved tensors and module. Runs and keeps nothing of it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ..backends.garbage_collection import RARELY
from ..capture import tape
from ..capture.grad_dtypes import dtype_of_number
from ..capture.parameter_names import ParameterName, modules_inside, parameter_names_of, parts
from ..torch_api.grad_dtypes import grad_dtypes
from .long_tapes import have_it_freed_in_parts
from .modules import Bare, modules_of
from .nodes import Gradient, TapeNode, shape_of
from .saved import Handles, SavedTensors, handles, owner


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a tape.

    Attributes:
        nodes: the nodes, in the order in which the engine would walk them.
        models: the names of the outermost modules with parameters on the tape.
    """

    nodes: tuple[TapeNode, ...]
    models: tuple[str, ...]


def read(outputs: tape.Ends) -> Reading:
    """Read the tape of some outputs; each must have one. Reading runs no ``__torch_function__`` and no
    ``__torch_dispatch__``, and records no tape."""
    # No generator-based context manager: one interrupted by Ctrl-C would leave torch functions off until it is freed.
    with (
        RARELY,
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        return _read(outputs)


def _read(outputs: tape.Ends) -> Reading:
    have_it_freed_in_parts(outputs)
    visited = tape.walk(outputs)
    index_of = {each.node: index for index, each in enumerate(visited)}
    edges = [
        tuple(
            None if following is None else (index_of[following], int(number))
            for following, number in each.node.next_functions
        )
        for each in visited
    ]
    leaves = {index: each.node.variable for index, each in enumerate(visited) if each.name == tape.LEAF}
    names = parameter_names_of(list(leaves.values()), at_any_cost=True)
    parameters = {index: names[id(leaf)] for index, leaf in leaves.items() if id(leaf) in names}
    models, labels = _models(parameters)
    gradients = [_gradients(each.node) for each in visited]
    held = [handles(each.node) for each in visited]
    frozen = _frozen(models, labels, leaves.values())
    modules = modules_of(
        [
            Bare(
                each.sequence,
                edges[index],
                _elements(gradients[index], leaves.get(index)),
                _owner(parameters.get(index), labels),
                _saved_of(held[index], frozen) if frozen else (),
            )
            for index, each in enumerate(visited)
        ]
    )
    hooks = _hooks(outputs, held, index_of, leaves)
    inside = [module for model in models for _, module in modules_inside(model)]
    saved = SavedTensors(
        [each for module in inside for _, each in parts(module, "_parameters")],
        [each for module in inside for _, each in parts(module, "_buffers")],
        leaves.values(),
        held,
    )
    nodes = tuple(
        TapeNode(
            each.name,
            each.sequence,
            parameters[index].name if index in parameters else None,
            tape.source_line(each.node),
            edges[index],
            ".".join(modules[index]),
            gradients[index],
            saved.of(held[index]),
            tuple(hooks[index]),
        )
        for index, each in enumerate(visited)
    )
    return Reading(nodes, tuple(dict.fromkeys(labels.values())))


def _models(parameters: dict[int, ParameterName]) -> tuple[list[torch.nn.Module], dict[int, str]]:
    """Return the outermost modules, and their names by ``id``: the class, with a number if several have that class."""
    models: list[torch.nn.Module] = []
    labels: dict[int, str] = {}
    for found in parameters.values():
        model = found.model()
        if model is None or id(model) in labels:
            continue
        alike = sum(type(each).__name__ == found.outermost for each in models)
        labels[id(model)] = f"{found.outermost} {alike + 1}" if alike else found.outermost
        models.append(model)
    return models, labels


def _owner(found: ParameterName | None, labels: dict[int, str]) -> tuple[str, ...] | None:
    """Return the path of the module that has a parameter. With several models, it begins with the name of the model."""
    if found is None:
        return None
    return _path(found.path[:-1], labels.get(id(found.model()), found.outermost), labels)


def _path(path: tuple[str, ...], label: str, labels: dict[int, str]) -> tuple[str, ...]:
    if "parametrizations" in path:  # torch.nn.utils.parametrize adds this submodule to the parametrized module
        path = path[: path.index("parametrizations")]
    return (label, *path) if len(labels) > 1 else path


def _frozen(
    models: Sequence[torch.nn.Module], labels: dict[int, str], leaves: Iterable[torch.Tensor]
) -> dict[int, tuple[str, ...]]:
    """Return the frozen parameters of some models: ``id`` of the parameter -> path of its module."""
    trained = {id(leaf) for leaf in leaves}
    found: dict[int, tuple[str, ...]] = {}
    for model in models:
        for path, inside in modules_inside(model):
            for _, each in parts(inside, "_parameters"):
                if id(each) not in trained:
                    found.setdefault(id(each), _path(path, labels[id(model)], labels))
    return found


def _saved_of(held: Handles, frozen: dict[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the paths of the frozen parameters that a node saved, directly or as views."""
    saved = (owner(handle.data) for _, handle in held if handle.unpack_hook is None)
    return [frozen[id(each)] for each in saved if id(each) in frozen]


def _gradients(node: Any) -> tuple[Gradient, ...]:
    wanted = map(dtype_of_number, grad_dtypes(node))
    taken = zip(node._input_metadata, wanted, strict=True)
    return tuple([Gradient(shape_of(each), dtype or each.dtype) for each, dtype in taken])


def _elements(gradients: Sequence[Gradient], leaf: torch.Tensor | None) -> int | None:
    if leaf is None and len(gradients) != 1:
        return None
    elements = 1
    for length in (gradients[0].shape if leaf is None else shape_of(leaf)) or ():
        if not isinstance(length, int):
            return None
        elements *= length
    return elements


def _hooks(
    outputs: tape.Ends, held: Sequence[Handles], index_of: dict[Any, int], leaves: dict[int, torch.Tensor]
) -> dict[int, list[str]]:
    """Return the visible hooks by node: those of tensors that can be reached without unpacking."""
    found: dict[int, list[str]] = defaultdict(list)
    for index, leaf in leaves.items():
        found[index] += _of_tensor(leaf)
        found[index] += [f"after accumulation: {_named(hook)}" for hook in _values(leaf._post_accumulate_grad_hooks)]
    seen: set[tuple[int, int]] = set()
    for tensor in _reachable(outputs, held):
        lines = _of_tensor(tensor)
        index = index_of.get(_node_of(tensor), -1) if lines else -1
        if index >= 0 and (index, tensor.output_nr) not in seen:
            seen.add((index, tensor.output_nr))
            found[index] += lines
    return found


def _node_of(tensor: torch.Tensor) -> Any:
    """Return the node of a tensor; None if PyTorch cannot rebuild the node of a view whose base was written since."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _reachable(outputs: tape.Ends, held: Sequence[Handles]) -> Iterator[torch.Tensor]:
    yield from (output for output in outputs if not isinstance(output, GradientEdge))
    for each in held:
        for _, handle in each:
            if handle.unpack_hook is None and handle.data.requires_grad:
                yield handle.data


def _of_tensor(tensor: torch.Tensor) -> list[str]:
    lines = [f"on the gradient: {_named(hook)}" for hook in _values(tensor._backward_hooks)]
    return [*lines, "retain_grad"] if tensor.retains_grad else lines


def _values(hooks: Any) -> list[Any]:
    return list((hooks or {}).values())


def _named(hook: Any) -> str:
    """Return the name of a hook. Attributes of other objects are not read, as this could run users' code."""
    if isinstance(hook, functools.partial):
        return _named(hook.func)
    if type(hook) is MethodType:
        return _named(hook.__func__)
    return hook.__qualname__ if type(hook) in (FunctionType, BuiltinFunctionType) else type(hook).__name__
