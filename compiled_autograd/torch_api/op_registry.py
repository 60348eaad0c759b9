"""Functions and structures that the engine hands out once in a process, shared with PyTorch's own compiled autograd
(``torch._dynamo``, 2.13).

The engine binds each of its functions once, to the first capture, and keeps one cache of structures for all. So this
module registers functions bound here with PyTorch's own, and looks up those that were bound there. PyTorch's module
takes more than a second to import. Until other code imports it, the registrations are kept here.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ..process_state import PROCESS

_OTHERS = "torch._dynamo.compiled_autograd"
_pending: list[tuple[str, Callable[..., Any], bool, bool]] = PROCESS.register([])
_custom: Counter[str] = PROCESS.register(Counter())


def _others() -> ModuleType | None:
    """The module of PyTorch's own compiled autograd, once all of it has been imported: another thread may be at it."""
    module = sys.modules.get(_OTHERS)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    if _pending and not hasattr(type(module.ops), "knows_of_ours"):  # it was being imported when the first was bound
        _tell_when_asked(module)
    return module


def share_op(name: str, function: Callable[..., Any], is_custom: bool, traceable: bool) -> str:
    """Share a function that was bound here. Return its name on both sides."""
    others = _others()
    if others is not None and not _pending:
        return str(others.ops.add(name, function, is_custom, traceable))
    _pending.append((name, function, is_custom, traceable))
    if not any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook())
    if not is_custom:
        return name
    counted = f"CppNode{name}"  # as OpNamespace.add names it, and will when it is told
    _custom[counted] += 1
    return f"{counted}{_custom[counted] - 1}"


def find_op(name: str) -> Callable[..., Any] | None:
    """A function that the engine bound for PyTorch's own compiled autograd before we were there."""
    others = _others()
    found = getattr(others.ops, name, None) if others is not None else None
    return found if callable(found) else None


def others_are_on() -> bool:
    """Return whether PyTorch's own compiled autograd runs the backwards of the process."""
    others = _others()
    return others is not None and bool(others.compiled_autograd_enabled)


def captures_of_others() -> int:
    """Return how often PyTorch's own compiled autograd has captured."""
    others = _others()
    return 0 if others is None else int(repr(others.COMPILE_COUNTER).strip("count()"))


_others_if_imported = functools.partial(sys.modules.get, _OTHERS)


def questions_about_others() -> list[tuple[Any, str | None, Any]]:
    """Return questions with which C++ checks that neither of these two has changed. For the form see
    ``native.interface.Question``."""
    others = _others()
    if others is None:
        return [(_others_if_imported, None, None)]  # does not hold while it is imported
    counter = others.COMPILE_COUNTER
    return [
        (others, "compiled_autograd_enabled", others.compiled_autograd_enabled),
        (others, "COMPILE_COUNTER", counter),
        (counter.__repr__, None, repr(counter)),
    ]


def _tell_when_asked(others: ModuleType) -> None:
    """Have PyTorch's own look here for functions that it misses: it is asked to know them only after all of
    ``torch._dynamo`` has been imported."""
    namespace = type(others.ops)

    class Shared(namespace):  # type: ignore[misc, valid-type]
        knows_of_ours = True

        def __getattr__(self, name: str) -> Any:
            if not _pending:
                raise AttributeError(name)
            waiting = list(_pending)
            _pending.clear()
            for each in waiting:
                super().add(*each)
            return getattr(self, name)

    others.ops.__class__ = Shared


class _ImportHook(importlib.abc.MetaPathFinder):
    """Waits for the module to be imported, and tells it then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _OTHERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _tell_when_asked(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
