"""Code marked as traceable by its author: its parts, its dependencies, and its possible side effects."""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Sequence
from typing import Any

import torch

from ..process_state import PROCESS
from ..torch_api.plain_values import is_plain, key
from .functions import TRACEABLE

_DEEPEST = 8
"""Maximum depth of functions that call one another."""


class NotPlainError(TypeError):
    """Marked code has to do with something that is no plain value, or may do more than compute."""


# ---- dependencies ----------------------------------------------------------------------------------------------


class Code:
    """The parts of functions, each read once. With ``strictly``, values in closures, defaults and attributes that are
    not plain raise :class:`NotPlainError`.

    Attributes:
        whole: whether no function was left out because of its depth.
    """

    def __init__(self, strictly: bool) -> None:
        self.strictly = strictly
        self.whole = True
        self._seen: dict[int, int] = {}

    def of(self, function: Any, depth: int) -> Any:
        """A function's code with what is plain of its closure, its defaults and the variables of its module. The module
        itself is part of it: another one of the same text may have other functions under the same names."""
        if not isinstance(function, types.FunctionType) or depth == _DEEPEST:
            self._no(f"{function!r} is no function written in Python, or too deep in others")
            self.whole = False
            return type(function).__qualname__
        if id(function) in self._seen:
            return "again", self._seen[id(function)]
        self._seen[id(function)] = len(self._seen)
        values, known = around(function), function.__globals__
        inside = tuple([self._part(each, depth) for each in values])
        named = [(name, known.get(name)) for name in named_by(function.__code__, known)]
        found = tuple([(name, self._named(each, depth)) for name, each in named])
        modules = [each for each in (*values, *[value for _, value in named]) if type(each) is types.ModuleType]
        taken = () if self.strictly or not modules else taken_of(function.__code__, modules).key
        return function.__code__, id(known), inside, found, taken

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


_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")


def asked_of_the_thread() -> tuple[Any, ...]:
    """Return thread state that marked code may read from PyTorch, and that :mod:`compiled_autograd.guards.ambient`
    lacks since no operator reads it: such as the dtype that autocast would have, which is off in most backwards."""
    return (
        *map(torch.get_autocast_dtype, _DEVICES),
        torch.is_warn_always_enabled(),
        torch.is_anomaly_enabled(),
    )


def _owner_of(function: types.BuiltinFunctionType) -> str:
    """The module that a function in C belongs to; empty where it is a method of an object."""
    if getattr(torch, function.__name__, None) is function:
        return "torch"
    owner: Any = function.__self__
    return str(owner.__name__) if isinstance(owner, types.ModuleType) else ""


def around(function: types.FunctionType) -> list[Any]:
    """Return the values in a function's defaults, attributes and closure."""
    values: list[Any] = [*(function.__defaults__ or ())]
    attributes = [pair for pair in vars(function).items() if pair[0] != TRACEABLE]
    for pair in (*(function.__kwdefaults__ or {}).items(), *attributes):
        values += pair
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # nothing was put into it yet
            values.append(None)
    return values


class Taken:
    """Attributes of modules that marked code may read: all whose name occurs in the code. Other code may replace them.

    Attributes:
        values: by name.
        key: a key of the values.
    """

    def __init__(self, code: types.CodeType, modules: Sequence[types.ModuleType]) -> None:
        self._refers_to = (code, tuple(modules))  # whose `id` leads here
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        left, seen, names = [*modules], set(), _names_of(code)
        while left:
            module = left.pop()
            if module.__name__ in _MODULES and id(module) not in seen:
                seen.add(id(module))
                places = [(vars(module), name, vars(module).get(name, _NOTHING)) for name in names]
                self._places += places
                left += [value for _, _, value in places if type(value) is types.ModuleType]
        self.values = [(name, value) for _, name, value in self._places if value is not _NOTHING]
        self.key = tuple([(name, _of_module(value)) for name, value in self.values])

    def still(self) -> bool:
        """Return whether all attributes are unchanged."""
        return all([module.get(name, _NOTHING) is value for module, name, value in self._places])


_NOTHING = object()
_taken: dict[tuple[int, ...], Taken] = PROCESS.register({})
_MOST_TAKEN = 1000


def taken_of(code: types.CodeType, modules: Sequence[types.ModuleType]) -> Taken:
    """Return the attributes of modules that code may read."""
    ids = (id(code), *map(id, modules))
    found = _taken.get(ids)
    if found is None or not found.still():
        if len(_taken) >= _MOST_TAKEN:
            _taken.clear()
        found = _taken[ids] = Taken(code, modules)
    return found


def _of_module(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return value.__code__
    return key(value) if is_plain(value) else (type(value).__qualname__, getattr(value, "__qualname__", ""))


def _names_of(code: types.CodeType) -> set[str]:
    """Return all names in code, and in code inside it."""
    return {*code.co_names}.union(*[_names_of(each) for each in code.co_consts if type(each) is types.CodeType])


def named_by(code: types.CodeType, known: dict[str, Any]) -> list[str]:
    """The variables of a module that a function and those inside it name."""
    named = [name for name in code.co_names if name in known]
    for each in code.co_consts:
        if type(each) is types.CodeType:
            named += named_by(each, known)
    return named


def of_torch(function: types.FunctionType) -> bool:
    """Return whether a function was written in PyTorch. A wrapper takes over the module name of the function that it
    wraps."""
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"


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
    [
        *("distributed", "save", "load", "manual_seed", "seed", "compile", "_C", "backends", "cuda", "utils"),
        *("initial_seed", "default_generator", "get_rng_state", "random", "Generator", "multiprocessing", "futures"),
        *("monitor", "hub", "__dict__", "__globals__", "__closure__", "__defaults__", "__kwdefaults__", "__code__"),
        *("__builtins__", "__setattr__", "__delattr__", "__subclasses__", "is_autocast_cache_enabled"),
    ]
)
"""Names of PyTorch that marked code may not use: those that communicate, write files, read or set the state of the
process, or differ during a trace. Also names that lead around the checks here."""
_FUNCTIONS = frozenset(
    [
        *("abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset"),
        *("getattr", "hasattr", "int", "isinstance", "issubclass", "len", "list", "map", "max", "min", "object", "pow"),
        *("range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "type", "zip"),
    ]
)
"""Python's own functions without side effects."""


def refuse_more_than_computing(marked: Any) -> None:
    """Check a function and those that it calls for side effects.

    Raises:
        NotPlainError: one sets a value that other code can see, or uses anything that may have side effects; or their
            dependencies are not all in :class:`Code`.
    """
    seen: set[int] = set()
    left = [marked]
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
        for name, value in reached:
            left += _called_through(name, value)
        modules = [value for _, value in reached if type(value) is types.ModuleType]
        for name, value in taken_of(function.__code__, modules).values:
            _refuse_what_was_put_there(name, value)
    depends_on = Code(strictly=False)
    depends_on.of(marked, 0)
    if not depends_on.whole:
        raise NotPlainError(f"traceable: its calls of functions are nested more than {_DEEPEST} deep")


def _refuse_what_was_put_there(name: str, value: Any) -> None:
    """Modules of PyTorch and of Python have functions of their own, and what their users have put into them."""
    if (
        isinstance(value, types.FunctionType)
        and not of_torch(value)
        and value.__globals__.get("__name__") not in _MODULES
    ):
        raise _refused(f"uses {name}, which a module has from elsewhere")


def _called_through(name: str, value: Any) -> list[types.FunctionType]:
    """Return the functions that must be checked, since marked code may call them."""
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
        allowed = built_in or _is_exception(value.__name__, value) or _is_harmless(value.__module__, value.__name__)
    else:
        allowed = is_plain(value)
    if not allowed:
        raise _refused(f"uses {name}, a {type(value).__name__}")
    return []


def _is_harmless(module: str, name: str) -> bool:
    """Return whether a name of PyTorch or of Python's mathematics only computes."""
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
    texts = [each for each in code.co_consts if type(each) is str] if "getattr" in code.co_names else []
    wrong = _not_harmless((*code.co_names, *texts))
    if wrong is not None:
        raise _refused(f"uses {wrong}")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _read_by(constant, known)
    return found


def _is_exception(name: str, found: Any = None) -> bool:
    """Return whether a name is one of Python's own exceptions: others may count, or have attributes that change."""
    value = getattr(builtins, name, None)
    return isinstance(value, type) and issubclass(value, Exception) and found in (None, value)


def _refused(what: str) -> NotPlainError:
    return NotPlainError(f"traceable: it {what}, and may have side effects")
