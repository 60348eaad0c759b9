"""Code that its author has marked as traceable: what it consists of, what it depends on, and what else it may do."""

from __future__ import annotations

import builtins
import contextlib
import dis
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

SCALARS = frozenset(
    [
        *(bool, int, float, complex, str, bytes, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)
_LONGEST = 256
"""What has more items, those of its items included, is no plain value: it is looked at in each backward."""
_DEEPEST = 8
"""Of values inside one another, and of functions."""


class NotPlainError(TypeError):
    """Marked code has to do with something that is no plain value, or may do more than compute."""


# ---- what it depends on ----------------------------------------------------------------------------------------------


class Code:
    """What functions consist of, each looked at once. With ``strictly``, what is not plain of closures and defaults
    raises :class:`NotPlainError`.
    """

    def __init__(self, strictly: bool) -> None:
        self.strictly = strictly
        self._seen: dict[int, int] = {}

    def of(self, function: Any, depth: int) -> Any:
        """A function's code with what is plain of its closure, its defaults and the variables of its module. The module
        itself is part of it: another one of the same text may have other functions under the same names."""
        if not isinstance(function, types.FunctionType) or depth == _DEEPEST:
            self._no(f"{function!r} is no function written in Python, or too deep in others")
            return type(function).__qualname__
        if id(function) in self._seen:
            return "again", self._seen[id(function)]
        self._seen[id(function)] = len(self._seen)
        inside = tuple([self._part(each, depth) for each in around(function)])
        known = function.__globals__
        named = [(name, known.get(name)) for name in _named_by(function.__code__, known)]
        return function.__code__, id(known), inside, tuple([(name, self._named(each, depth)) for name, each in named])

    def _named(self, value: Any, depth: int) -> Any:
        """A variable of the module: whether it may be used at all is asked elsewhere, and once."""
        if isinstance(value, types.FunctionType):
            return value.__code__ if self.strictly or of_torch(value) else self.of(value, depth + 1)
        if type(value) is types.ModuleType:
            return value.__name__
        return key(value) if is_plain(value) else (type(value).__qualname__, getattr(value, "__qualname__", ""))

    def _part(self, value: Any, depth: int) -> Any:
        if isinstance(value, types.FunctionType):
            return self.of(value, depth + 1)
        if isinstance(value, types.ModuleType):
            return type(value).__name__, value.__name__
        if isinstance(value, types.BuiltinFunctionType) and _owner_of(value):
            return _owner_of(value), value.__name__
        if is_plain(value):
            return key(value)
        self._no(f"it has a {type(value).__name__} in its closure or defaults")
        return "other", type(value).__qualname__

    def _no(self, why: str) -> None:
        if self.strictly:
            raise NotPlainError(f"traceable: {why}")


def _owner_of(function: types.BuiltinFunctionType) -> str:
    """The module that a function in C belongs to; empty where it is a method of an object."""
    if getattr(torch, function.__name__, None) is function:
        return "torch"
    owner: Any = function.__self__
    return str(owner.__name__) if isinstance(owner, types.ModuleType) else ""


def around(function: types.FunctionType) -> list[Any]:
    """What lies in a function's defaults and closure."""
    values: list[Any] = [*(function.__defaults__ or ())]
    for pair in (function.__kwdefaults__ or {}).items():
        values += pair
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # nothing was put into it yet
            values.append(None)
    return values


def _named_by(code: types.CodeType, known: dict[str, Any]) -> list[str]:
    """The module's variables that a function and those inside it name."""
    named = [name for name in code.co_names if name in known]
    for each in code.co_consts:
        if type(each) is types.CodeType:
            named += _named_by(each, known)
    return named


def of_torch(function: types.FunctionType) -> bool:
    """Whether a function was written in PyTorch. A wrapper takes over the name of the module of what it wraps."""
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"


def is_plain(value: Any) -> bool:
    """Whether it is a number, a string, None, a dtype or the like, or a sequence or dictionary of these: no large one,
    and none with an end that is far."""
    return type(value) in SCALARS or (
        type(value) in (tuple, list, dict, torch.Size) and _is_plain(value, 0, [_LONGEST])
    )


def _is_plain(value: Any, depth: int, left: list[int]) -> bool:
    left[0] -= 1
    kind = type(value)
    if kind in SCALARS:
        return True
    if left[0] < 0 or depth == _DEEPEST:
        return False
    if kind in (tuple, list, torch.Size):
        return len(value) <= left[0] and all(_is_plain(each, depth + 1, left) for each in tuple(value))
    if kind is not dict or len(value) > left[0]:
        return False
    return all(type(name) is str and _is_plain(each, depth + 1, left) for name, each in tuple(value.items()))


def key(value: Any) -> Any:
    """What stands for a plain value, with its type, since 1, 1.0 and True are equal. A NaN, and the sign of a zero, are
    told apart."""
    kind = type(value)
    if kind is float:
        return "float", value.hex()
    if kind is complex:
        return "complex", value.real.hex(), value.imag.hex()
    if kind in (tuple, list, torch.Size):
        return kind.__name__, tuple(map(key, value))
    if kind is dict:
        return "dict", tuple((name, key(each)) for name, each in value.items())
    return kind.__name__, value


def copied(value: Any) -> Any:
    """A plain value that may be changed without harm."""
    if type(value) is dict:
        return {name: copied(each) for name, each in value.items()}
    return type(value)(map(copied, value)) if type(value) in (tuple, list) else value


# ---- what else it may do ---------------------------------------------------------------------------------------------

_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME", "DELETE_NAME"})
_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_HANDLES, _OF_WITH = ("PUSH_EXC_INFO", "SETUP_FINALLY"), "WITH_EXCEPT_START"  # the second one in Python 3.10
_MODULES = frozenset(
    [
        *("torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "torch.autograd"),
        *("math", "cmath", "operator", "functools", "itertools", "typing", "collections.abc", "__future__"),
    ]
)
_NOT_OF_TORCH = frozenset(
    {"distributed", "save", "load", "manual_seed", "seed", "compile", "_C", "backends", "cuda", "utils"}
)
"""What marked code does not take of PyTorch: what communicates, writes files, or changes the state of the process."""
_FUNCTIONS = frozenset(
    [
        *("abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset"),
        *("getattr", "hasattr", "int", "isinstance", "issubclass", "len", "list", "map", "max", "min", "object", "pow"),
        *("range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "type", "zip"),
    ]
)
"""Those of Python's own functions that change nothing."""


def refuse_more_than_computing(marked: Any) -> list[Any]:
    """Look through a function and those that it calls.

    Returns:
        The lists and dictionaries that they can reach, and so change.

    Raises:
        NotPlainError: one sets what may be seen elsewhere, or takes or calls what is not known to change nothing.
    """
    seen: set[int] = set()
    left, containers = [marked], []
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        Code(strictly=True).of(function, 0)
        reached = [("a variable around it", value) for value in around(function)]
        if of_torch(function):  # such as once_differentiable's, around the user's own
            left += [value for _, value in reached if isinstance(value, types.FunctionType)]
            continue
        reached += _read_by(function.__code__, function.__globals__)
        containers += [value for _, value in reached if type(value) in (list, dict, tuple)]
        for name, value in reached:
            left += _called_through(name, value)
    return containers


@contextlib.contextmanager
def left_as_they_were(containers: Sequence[Any]) -> Iterator[None]:
    """Inside, code is traced that can reach some lists and dictionaries.

    Raises:
        NotPlainError: at the end, where one was changed. It is put back.
    """
    before = [copied(each) for each in containers]
    changed = False
    try:
        yield
    finally:
        for now, was in zip(containers, before, strict=True):
            changed = _put_back(now, was) or changed
    if changed:
        raise NotPlainError("traceable: it changes what it depends on: it counts, or keeps something")


def _put_back(now: Any, was: Any) -> bool:
    if is_plain(now) and key(now) == key(was):
        return False
    if type(now) is tuple:
        for one, other in zip(now, was, strict=True):
            if type(one) in (list, dict, tuple):
                _put_back(one, other)
        return True
    now.clear()
    now.extend(was) if type(now) is list else now.update(was)
    return True


def _called_through(name: str, value: Any) -> list[types.FunctionType]:
    """The functions that are to be looked at, since marked code may call them."""
    if isinstance(value, types.FunctionType):
        if not of_torch(value):
            return [value]
        allowed = _is_harmless(value.__module__, value.__name__)
    elif isinstance(value, types.ModuleType):
        allowed = value.__name__ in _MODULES
    elif isinstance(value, types.BuiltinFunctionType):
        owner = _owner_of(value)
        allowed = owner == "torch._C._nn" or _is_harmless(owner, value.__name__)
    elif isinstance(value, type):
        built_in = value.__name__ in _FUNCTIONS and getattr(builtins, value.__name__, None) is value
        allowed = built_in or issubclass(value, Exception) or _is_harmless(value.__module__, value.__name__)
    else:
        allowed = is_plain(value)
    if not allowed:
        raise _refused(f"uses {name}, a {type(value).__name__}")
    return []


def _is_harmless(module: str, name: str) -> bool:
    """Whether something of PyTorch or of Python's mathematics does nothing but compute."""
    parts = module.split(".")
    return (parts[0] == "torch" or module in _MODULES) and _not_harmless((*parts, name)) is None


def _not_harmless(names: Sequence[str]) -> str | None:
    return next((name for name in names if name in _NOT_OF_TORCH or name.startswith(("set_", "use_"))), None)


def _read_by(code: types.CodeType, known: dict[str, Any]) -> list[tuple[str, Any]]:
    """The variables of its module that code reads, with what they are.

    Raises:
        NotPlainError: it sets one, or something else that may be seen elsewhere.
    """
    found: list[tuple[str, Any]] = []
    operations = [each.opname for each in dis.get_instructions(code)]
    if sum(map(operations.count, _HANDLES)) > operations.count(_OF_WITH):
        raise _refused("catches exceptions, such as those that only a trace raises")
    for each in dis.get_instructions(code):
        if each.opname in _STORES or (each.opname in _CELLS and each.argval in code.co_freevars):
            raise _refused(f"sets {each.argval}")
        if each.opname == "IMPORT_NAME" and each.argval not in _MODULES:
            raise _refused(f"imports {each.argval}")
        if each.opname in _READS:
            name = str(each.argval)
            if name in known:
                found.append((name, known[name]))
            elif name not in _FUNCTIONS and not _is_exception(name):
                raise _refused(f"uses {name}")
    wrong = _not_harmless(code.co_names)
    if wrong is not None:
        raise _refused(f"uses {wrong}")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _read_by(constant, known)
    return found


def _is_exception(name: str) -> bool:
    value = getattr(builtins, name, None)
    return isinstance(value, type) and issubclass(value, Exception)


def _refused(what: str) -> NotPlainError:
    return NotPlainError(f"traceable: it {what}, and may do more than compute")
