"""The names of parameters: which living module has a leaf of a tape."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.jit._script import OrderedDictWrapper, OrderedModuleDict
from torch.multiprocessing.reductions import StorageWeakRef

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..process_state import PROCESS

_KINDS: dict[str, type[Any]] = {"_modules": torch.nn.Module, "_parameters": torch.Tensor, "_buffers": torch.Tensor}
"""The dicts of a module's parts, and the class of the parts in each."""
_STRINGS = {str}
_DICT = torch.nn.Module.__dict__["__dict__"]


@dataclass(frozen=True, slots=True)
class ParameterName:
    """The path to a parameter: the outermost module and its class, and the names from there to the parameter."""

    path: tuple[str, ...]
    outermost: str
    model: weakref.ref[torch.nn.Module]

    @property
    def name(self) -> str:
        """The name from the outermost module."""
        return ".".join(self.path)

    def said(self) -> ir.Named:
        """Return the record that a tape keeps."""
        return ir.Named(self.name, self.outermost, self.model)

    def parameter(self) -> torch.Tensor | None:
        """Return the parameter that is at this path now."""
        *modules, attribute = self.path
        found: Any = self.model()
        for kind, name in [*(("_modules", each) for each in modules), ("_parameters", attribute)]:
            found = None if found is None else _part(found, kind, name)
        return found


class Trace:
    """Recognises a parameter, without keeping the parameter or its values alive.

    The trace has a weak reference to the parameter's memory, as C++ has them. As long as the reference exists, no other
    memory can be mistaken for that memory. PyTorch would notice a weak reference to the parameter itself
    (:class:`_Search`). A parameter that got other memory is not recognised. A new parameter made of the memory of one
    that died may be recognised as the old one, since it replaced it.

    Raises:
        RuntimeError: the parameter has no memory of its own.
    """

    __slots__ = ("_described", "_memory", "key")

    def __init__(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():  # nobody's modes are asked
            self.key = id(parameter)
            self._memory = StorageWeakRef(parameter.untyped_storage())
            self._described = _described(parameter)

    def __deepcopy__(self, memo: Any) -> Trace:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("what is known of a parameter in memory is of no use elsewhere")

    def is_of(self, tensor: torch.Tensor | None) -> bool:
        """Return whether a tensor is the parameter of this trace."""
        if tensor is None or id(tensor) != self.key:
            return False
        with torch._C.DisableTorchFunction():
            if _described(tensor) != self._described:
                return False
            return StorageWeakRef(tensor.untyped_storage()) == self._memory


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


@dataclass(slots=True)
class _Search:
    """Results of searches, by ``id`` of the parameter, and parameters that no module has, by ``id`` and memory. A
    search of all living objects takes as long as hundreds of captures, and runs once for each model. Nothing refers to
    a parameter, not even weakly: ``torch.utils.swap_tensors``, with which ``Module.to`` may move parameters, refuses
    one that is.

    ``next`` is the process's time, in seconds, before which no search begins.
    """

    found: dict[int, ParameterName] = field(default_factory=dict)
    in_no_module: set[tuple[int, int]] = field(default_factory=set)
    next: float = 0.0


_search = PROCESS.register(_Search())
_MAX_IN_NO_MODULE = 10_000

_SLOW_SEARCH_SECONDS, _SEARCH_TIME_SHARE = 0.3, 0.05
"""Among millions of objects a search takes as long as a thousand captures. After one that took more than these seconds
of the process's time, another model has no names until searches take no more than this share of that time."""


def parameter_names_of(leaves: Sequence[torch.Tensor], *, at_any_cost: bool = False) -> dict[int, ParameterName]:
    """``id`` of each leaf that is a parameter of a living module -> where it is.

    Args:
        at_any_cost: search also where searches have taken long.
    """
    parameters = [leaf for leaf in leaves if is_parameter(leaf)]
    found = {id(each): name for each in parameters if (name := _known(each)) is not None}
    missing = [each for each in parameters if id(each) not in found and not _is_in_no_module(each)]
    if missing and at_any_cost:
        _search.next = 0.0
    names_by_id = _searched() if missing else None
    if names_by_id is None:
        return found
    if len(_search.in_no_module) > _MAX_IN_NO_MODULE:
        _search.in_no_module.clear()
    for parameter in missing:
        name = names_by_id.get(id(parameter))
        if name is not None:
            found[id(parameter)] = _search.found[id(parameter)] = name
        elif ir.is_plain(parameter):
            _search.in_no_module.add(_place(parameter))
    return found


def names_of_traces(traces: Iterable[Trace]) -> dict[int, ParameterName]:
    """Return the names of parameters that nothing has kept alive meanwhile, if they are found again."""
    found: dict[int, ParameterName] = {}
    missing: list[Trace] = []
    for trace in traces:
        name = _search.found.get(trace.key)
        if name is not None and trace.is_of(name.parameter()):
            found[trace.key] = name
        else:
            missing.append(trace)
    names_by_id = (_searched() if missing else None) or {}
    for trace in missing:
        name = names_by_id.get(trace.key)
        if name is not None and trace.is_of(name.parameter()):
            found[trace.key] = _search.found[trace.key] = name
    return found


def is_known(parameter: torch.Tensor) -> bool:
    """Return whether a parameter was searched for already."""
    return _known(parameter) is not None or _is_in_no_module(parameter)


def _known(parameter: torch.Tensor) -> ParameterName | None:
    name = _search.found.get(id(parameter))
    if name is not None and name.parameter() is not parameter:
        _search.found.pop(id(parameter), None)
        return None
    return name


def _is_in_no_module(parameter: torch.Tensor) -> bool:
    return ir.is_plain(parameter) and _place(parameter) in _search.in_no_module


def _place(parameter: torch.Tensor) -> tuple[int, int]:
    return id(parameter), parameter.data_ptr()


def _searched() -> dict[int, ParameterName] | None:
    """Search all modules, and return the names by ``id``; None if no search may begin yet."""
    started = time.process_time()
    if started < _search.next:
        return None
    names_by_id = all_parameter_names()
    ended = time.process_time()
    _search.next = ended + (ended - started) / _SEARCH_TIME_SHARE if ended - started > _SLOW_SEARCH_SECONDS else 0.0
    found = _search.found.copy()  # a list of its items would be made of tuples, and `gc` lets other threads on between
    _search.found = {key: name for key, name in found.items() if name.model() is not None}
    return names_by_id


def all_parameter_names() -> dict[int, ParameterName]:
    """``id`` of each parameter of each living module -> where it is, seen from the outermost module that has it."""
    modules = _living_modules()
    inner = {id(child) for module in modules for _, child in parts(module, "_modules")}
    names_by_id: dict[int, ParameterName] = {}
    for outermost in modules:
        if id(outermost) in inner:
            continue
        model = weakref.ref(outermost)
        for path, module in modules_inside(outermost):
            for attribute, parameter in parts(module, "_parameters"):
                found = ParameterName((*path, attribute), type(outermost).__name__, model)
                names_by_id.setdefault(id(parameter), found)
    return names_by_id


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, without running a subclass's code for missing attributes."""
    return issubclass(type(tensor), torch.nn.Parameter) or bool(tensor.__dict__.get("_is_param"))


def modules_inside(outermost: torch.nn.Module) -> Iterator[tuple[tuple[str, ...], torch.nn.Module]]:
    """A module and those in it with their paths, as ``named_modules`` has them. That, and ``parameters``, are methods
    that a class may have of its own."""
    seen: set[int] = set()
    worklist: list[tuple[tuple[str, ...], torch.nn.Module]] = [((), outermost)]
    while worklist:
        path, module = worklist.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        worklist += [((*path, name), child) for name, child in reversed(parts(module, "_modules"))]


def parts(module: torch.nn.Module, kind: str) -> list[tuple[str, Any]]:
    """The modules, parameters or buffers that a module has, with their names; what else may be there is passed over,
    and one that is being made has none yet.

    A module of whoever lives in the process must not be what a backward fails of. So nothing is run of what users have
    put in the place of PyTorch's own dicts (that of DeepSpeed gathers parameters), which other threads may change.

    Args:
        kind: a key of :data:`_KINDS`.
    """
    inside, wanted = _inside(module, kind), _KINDS[kind]
    if issubclass(type(inside), dict):
        found = _items(inside)
    elif type(inside) is OrderedDictWrapper:  # of a scripted module
        found = inside.items()
    else:
        return []
    return [each for each in found if issubclass(type(each[1]), wanted)]


def _part(module: torch.nn.Module, kind: str, name: str) -> Any:
    """Return one of the :func:`parts`; None if it is not there."""
    inside = _inside(module, kind)
    found = dict.get(inside, name) if issubclass(type(inside), dict) else None
    return found if issubclass(type(found), _KINDS[kind]) else dict(parts(module, kind)).get(name)


def _inside(module: torch.nn.Module, kind: str) -> Any:
    found = _DICT.__get__(module).get(kind)
    return found._python_modules if type(found) is OrderedModuleDict else found


def _items(inside: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Return the items whose key is a string. If all keys are plain strings, in the order of ``named_parameters``."""
    keys, values = _keys_and_values(inside)
    if not keys:
        return []
    if not {*map(type, keys)} <= _STRINGS:  # no other key is hashed or compared here
        pairs = zip(keys, values, strict=True)
        return [(str.__str__(key), value) for key, value in pairs if issubclass(type(key), str)]
    if issubclass(type(inside), OrderedDict):
        found = dict(zip(keys, values, strict=True))
        try:
            keys = [*dict.fromkeys([*OrderedDict.keys(inside), *keys])]  # type: ignore[arg-type]
        except (KeyError, RuntimeError) as error:  # it was changed by methods of ``dict``, or right now
            raise_what_a_handler_raised(error)
        return [(name, found[name]) for name in keys if name in found]
    return list(zip(keys, values, strict=True))


def _keys_and_values(inside: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    """Read keys and values at one moment. A list of items would be made of tuples, and ``gc`` may switch threads
    meanwhile."""
    while True:
        try:
            both = list(itertools.chain(iter(dict.keys(inside)), iter(dict.values(inside))))
        except RuntimeError as error:  # it was changed before they were read
            raise_what_a_handler_raised(error)
            continue
        return both[: len(both) // 2], both[len(both) // 2 :]


def _living_modules() -> list[torch.nn.Module]:
    """Return all modules, found in one call of C: no other thread runs meanwhile.

    Among all objects are tuples that other threads are making. Python can finish such a tuple only if nothing else
    refers to it (``_PyTuple_Resize``). If a list of all objects lived longer, ``tuple(...)`` would raise there.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # a collection would run destructors in the midst of it
    try:
        return list(_modules_among_all_objects())
    finally:
        if was_enabled:
            gc.enable()


def _modules_among_all_objects() -> Iterator[Any]:
    """To be used up in one call: its first step fills a list with all objects, of which the list is one, and its last
    step empties it."""
    objects: list[Any] = []
    # One call, as an audit hook (``sys.addaudithook``; filelock 4.3 has one) is called first, and may be Python.
    every = itertools.chain.from_iterable(itertools.starmap(gc.get_objects, ((),)))
    fill: Iterator[Any] = filter(None, map(objects.extend, (every,)))  # these two do what they do, and give nothing
    empty: Iterator[Any] = filter(None, map(list.clear, (objects,)))
    # The types are asked, not `isinstance`, which asks objects for `__class__`: some answer by running code.
    are_modules = map(issubclass, map(type, objects), itertools.repeat(torch.nn.Module))
    return itertools.compress(itertools.chain(fill, objects, empty), are_modules)
