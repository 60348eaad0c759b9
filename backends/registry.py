"""Names of backends, and what is behind them: ours, those of installed packages, and those of ``torch.compile``.

Nothing is imported before it is asked for. Names of ``torch.compile`` come last: Dynamo's import takes a second.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule  # private in torch 2.13

from .modes import MODES, name_in
from .protocol import Backend, Compiled

ENTRY_POINT_GROUP = "compiled_autograd.backends"
_OURS: dict[str, tuple[str, tuple[str, ...]]] = {
    "eager": (f"{__package__}.eager:EagerBackend", ()),
    **{name_in(mode): (f"{__package__}.inductor.backend:InductorBackend", (mode,)) for mode in MODES},
}
"""By name: a class, and what it is made with."""
_loaded: dict[str, Backend] = {}


class UnknownBackendError(LookupError):
    """A name that no backend has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        close = get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"there is no backend {name!r}.{hint} Known: {', '.join(sorted(known))}.")


class FunctionBackend(Backend):
    """A function ``(GraphModule, example_inputs) -> callable``, as ``torch.compile`` takes it.

    It is no :class:`Storing` one: what a function made is only known to itself.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.is_registered = name is not None  # else no other process finds it by its name

    def decompositions(self) -> Mapping[Any, Callable[..., Any]] | None:
        """Return the function's attribute ``decompositions``; None if it has none."""
        return getattr(self.function, "decompositions", None)

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        """Call the function. The result takes its arguments one by one, as with ``torch.compile``.

        If the result has an attribute ``_boxed_call`` and takes one argument, it gets a list, which it empties.
        """
        _LazyGraphModule.force_recompile(graph_module)  # what keeps its `forward` is to have the real one
        compiled = self.function(graph_module, list(example_inputs))
        if not callable(compiled):
            raise TypeError(f"backend {self.name!r} gave a {type(compiled).__name__}, which cannot be called")
        return compiled if _is_boxed(compiled) else _Unboxed(compiled)


class _Unboxed:
    """Calls a function with the arguments of a list."""

    keeps_inputs = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        outputs = self.function(*arguments)
        return outputs if isinstance(outputs, (list, tuple)) else [outputs]


def _is_boxed(function: Callable[..., Any]) -> bool:
    """AOTAutograd marks functions that take ``*args`` as boxed too, so the mark alone says nothing (2.13)."""
    if not getattr(function, "_boxed_call", False):
        return False
    parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    return len(parameters) == 1 and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL


def list_backends() -> list[str]:
    """The names of backends, sorted. Imports Dynamo to ask it for its own.

    Those of PyTorch's that are for debugging and for its tests are left out; :func:`get_backend` takes them too.
    """
    from torch._dynamo import list_backends as list_dynamo_backends

    installed = (point.name for point in entry_points(group=ENTRY_POINT_GROUP))
    return sorted({*_OURS, *installed, *list_dynamo_backends()})


def get_backend(backend: str | Callable[..., Any]) -> Backend:
    """The backend with a name, or one made of a function. ``inductor:max-autotune`` is Inductor in that mode.

    Raises:
        UnknownBackendError: the name is none that is known; the nearest known one is suggested.
    """
    if not isinstance(backend, str):
        return FunctionBackend(backend)
    if backend not in _loaded:
        _loaded[backend] = _load(backend)
    return _loaded[backend]


def _load(name: str) -> Backend:
    if name in _OURS:
        where, arguments = _OURS[name]
        return pkgutil.resolve_name(where)(*arguments)
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        loaded = point.load()
        return _made(loaded) if isinstance(loaded, type) else FunctionBackend(loaded, name)
    from torch._dynamo import list_backends as list_dynamo_backends
    from torch._dynamo.backends.registry import lookup_backend

    if name not in list_dynamo_backends(exclude_tags=()):
        raise UnknownBackendError(name, list_backends())

    return FunctionBackend(lookup_backend(name), name)


def _made(loaded: type) -> Backend:
    """Make a backend of a class, with the defaults of :class:`Backend` if the class does not derive from it."""
    return loaded() if Backend in loaded.__mro__ else type(loaded.__name__, (loaded, Backend), {})()
