"""Hooks that their author has marked as traceable: which they are, what they depend on, and how they are traced.

A hook that prints, counts or keeps something would do so no more. So its code is looked at before it is traced, and
what it could change, it is given copies of (``docs/internals/user_code.md``).
"""

from __future__ import annotations

import builtins
import dis
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .functions import TRACEABLE
from .inlined import Marked
from .plain_values import Code, NotPlainError, copied, is_plain, of_torch

_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME", "DELETE_NAME"})
_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_MODULES = frozenset({"torch", "math", "cmath", "operator", "functools", "itertools", "typing", "__future__"})
_NOT_OF_TORCH = frozenset(
    {"distributed", "save", "load", "manual_seed", "seed", "compile", "_C", "backends", "cuda", "utils"}
)
"""What a hook does not take of PyTorch: what communicates, writes files, or changes the state of the process."""
_FUNCTIONS = frozenset(
    [
        *(
            "abs",
            "all",
            "any",
            "bool",
            "complex",
            "dict",
            "divmod",
            "enumerate",
            "filter",
            "float",
            "frozenset",
            "getattr",
        ),
        *("hasattr", "int", "isinstance", "issubclass", "len", "list", "map", "max", "min", "object", "pow", "range"),
        *("reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "type", "zip"),
    ]
)
"""Those of Python's own functions that change nothing."""


def mark_hook(hook: types.FunctionType) -> None:
    """Mark a function as a hook that may be traced. A wrapper that takes over its attributes is not marked: its code is
    another."""
    hook.__dict__[TRACEABLE] = hook.__code__


def is_marked(hook: Any) -> bool:
    """Whether a hook was marked itself."""
    return type(hook) is types.FunctionType and hook.__dict__.get(TRACEABLE) is hook.__code__


class TracedHook(Marked):
    """A call of a marked hook, at one place of a tape.

    Args:
        kind: what calls it: one of the functions of :mod:`compiled_autograd.user_code.hooks`.
        defined: which of its gradients the tape leads to it, one after the other.
    """

    def __init__(self, kind: Callable[..., Any], defined: Sequence[bool]) -> None:
        super().__init__(f"traced_{kind.__name__}")
        self.kind = kind
        self.defined = tuple(defined)

    def __call__(self, *args: Any) -> Any:
        return self.kind(*args)

    def described(self, owner: Any) -> tuple[Any, Any, tuple[Any, ...]] | None:
        """What a marked hook depends on beside its gradients; None for one that is not marked."""
        return (Code(strictly=False).of(owner, 0), (), ()) if is_marked(owner) else None

    def trace(self, hook: Any, *args: Any) -> Any:
        """Call it with copies of the plain values that it can reach."""
        grads = _flat(args)
        if any(grad is None and wanted for grad, wanted in zip(grads, self.defined, strict=True)):
            raise NotPlainError("traceable: a gradient that the tape leads to the hook is undefined in this backward")
        refuse_more_than_computing(hook)
        copy = _with_own_values(hook)
        depends_on, given = self._description(copy), [grad for grad in grads if grad is not None]
        versions = [grad._version for grad in given]
        result = self.kind(copy, *args)
        if versions != [grad._version for grad in given]:
            raise NotPlainError("traceable: the hook writes into what it is given")
        if self._description(copy) != depends_on:
            raise NotPlainError("traceable: the hook changes what it depends on: it counts, or keeps something")
        return result

    def _description(self, function: types.FunctionType) -> Any:
        return Code(strictly=False).of(function, 0)


def _flat(args: Sequence[Any]) -> list[Any]:
    return [*itertools.chain(*[each if isinstance(each, (list, tuple)) else (each,) for each in args])]


# ---- what else a hook does -------------------------------------------------------------------------------------------


def refuse_more_than_computing(hook: Any) -> None:
    """Raise for a hook whose code, or that of a function that it calls, can do more than compute.

    Raises:
        NotPlainError: it sets what may be seen elsewhere, or takes or calls what is not known to change nothing.
    """
    seen: set[int] = set()
    left = [hook]
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        Code(strictly=True).of(function, 0)
        closed = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        around = [*closed, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        named = [*(("a variable around it", value) for value in around)]
        for name, value in (*named, *_read_by(function.__code__, function.__globals__)):
            if function is not hook and is_plain(value) and not _is_fixed(value):
                raise _refused(f"calls {function.__name__}, which uses {name}, a {type(value).__name__}")
            left += _looked_through(name, value)


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # nothing was put into it yet
        return False
    return True


def _looked_through(name: str, value: Any) -> list[types.FunctionType]:
    """The functions that are to be looked at, since a hook calls them."""
    if isinstance(value, types.ModuleType):
        if value.__name__ in _MODULES or value.__name__.startswith("torch.nn.functional"):
            return []
        raise _refused(f"uses the module {value.__name__}")
    if is_plain(value) or (
        isinstance(value, (type, types.FunctionType)) and of_torch(value) and not _may_do_more(value)
    ):
        return []
    if isinstance(value, types.FunctionType):
        return [value]
    if isinstance(value, types.BuiltinFunctionType):
        module = value.__self__
        owner = module.__name__ if isinstance(module, types.ModuleType) else getattr(module, "__module__", "")
        if owner in _MODULES or str(owner).startswith("torch.") or owner == "builtins":
            return []
    if isinstance(value, type) and (issubclass(value, Exception) or getattr(builtins, value.__name__, None) is value):
        return []
    raise _refused(f"uses {name}, a {type(value).__name__}")


def _may_do_more(value: Any) -> bool:
    return bool(_NOT_OF_TORCH.intersection((*value.__module__.split("."), value.__name__)))


def _is_fixed(value: Any) -> bool:
    """Whether nothing can be changed in a plain value."""
    return all(map(_is_fixed, value)) if type(value) is tuple else type(value) not in (list, dict)


def _read_by(code: types.CodeType, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The variables of its module that code reads, with what they are.

    Raises:
        NotPlainError: it sets one, or something else that may be seen elsewhere.
    """
    for each in dis.get_instructions(code):
        if each.opname in _STORES or (each.opname in _CELLS and each.argval in code.co_freevars):
            raise _refused(f"sets {each.argval}")
        if each.opname == "IMPORT_NAME" and str(each.argval).partition(".")[0] not in _MODULES:
            raise _refused(f"imports {each.argval}")
        if each.opname not in _READS:
            continue
        name = str(each.argval)
        if name in known:
            yield name, known[name]
        elif name not in _FUNCTIONS and not _is_exception(name):
            raise _refused(f"uses {name}")
    taken = sorted({*code.co_names} & _NOT_OF_TORCH)
    if taken:
        raise _refused(f"uses {taken[0]}")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _read_by(constant, known)


def _is_exception(name: str) -> bool:
    value = getattr(builtins, name, None)
    return isinstance(value, type) and issubclass(value, Exception)


def _refused(what: str) -> NotPlainError:
    return NotPlainError(f"traceable: the hook {what}, and may do more than compute")


def _with_own_values(function: types.FunctionType) -> types.FunctionType:
    """The same function with copies of the lists and dictionaries that it could change."""
    cells = tuple(
        types.CellType(copied(cell.cell_contents)) if _is_filled(cell) and is_plain(cell.cell_contents) else cell
        for cell in function.__closure__ or ()
    )
    known = {name: copied(value) if is_plain(value) else value for name, value in function.__globals__.items()}
    defaults = None if function.__defaults__ is None else tuple(map(_own, function.__defaults__))
    made = types.FunctionType(function.__code__, known, function.__name__, defaults, cells)
    made.__kwdefaults__ = (
        None if function.__kwdefaults__ is None else {n: _own(v) for n, v in function.__kwdefaults__.items()}
    )
    return made


def _own(value: Any) -> Any:
    return copied(value) if is_plain(value) else value
