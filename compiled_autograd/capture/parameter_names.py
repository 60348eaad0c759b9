"""The names of parameters: which living module has a leaf of a tape."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import ir
from ..process_state import PROCESS


@dataclass(frozen=True, slots=True)
class ParameterName:
    """Where a parameter was found: its name from the outermost module, that one's class, the module that has it as
    ``attribute``, and the outermost one itself."""

    name: str
    outermost: str
    module: weakref.ref[torch.nn.Module]
    attribute: str
    model: weakref.ref[torch.nn.Module]

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether it is still there."""
        module = self.module()
        return module is not None and module._parameters.get(self.attribute) is parameter


@dataclass(slots=True)
class _Search:
    """What was found of parameters, by ``id``, and those that were looked for in vain, by ``id`` and memory: to search
    all living objects takes as long as hundreds of captures, and is done once for each model. No parameter is referred
    to, not even weakly: ``torch.utils.swap_tensors``, by which ``Module.to`` may move them, refuses one that is.

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


class Unnamed:
    """Leaves of a tape whose names are looked for when somebody asks, or at the end of the backward at the latest.

    Until then it holds the leaves, so that they are found as what they were.
    """

    def __init__(self, calls: Sequence[ir.TapeCall], leaves: Sequence[torch.Tensor]) -> None:
        self._leaves: list[tuple[ir.TapeCall, torch.Tensor]] = list(zip(calls, leaves, strict=True))
        for call in calls:
            call.look_up = self.look_up

    def look_up(self) -> None:
        """Look for them, unless that was done. Two threads may do so at once: they find the same."""
        leaves = self._leaves
        names = parameter_names_of([leaf for _, leaf in leaves])
        for call, leaf in leaves:
            found = names.get(id(leaf))
            if found is not None:
                call.named = found.name, found.outermost
        for call, _ in leaves:  # from here on nobody waits for them
            call.look_up = None
        self._leaves = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.unnamed: list[Unnamed] = []


_thread = PROCESS.register(_Thread())


def name_leaves(calls: Sequence[ir.TapeCall], leaves: Sequence[torch.Tensor]) -> None:
    """Join the names of parameters to the leaves of a tape: at once where they are known, else by
    :func:`name_the_unnamed` at the latest, which whoever asks for a name comes before."""
    unnamed = Unnamed(calls, leaves)
    if all(_is_known(leaf) for leaf in leaves if is_parameter(leaf)):
        unnamed.look_up()
    else:
        _thread.unnamed.append(unnamed)


def name_the_unnamed() -> None:
    """Look for all names of this thread's tapes that nobody has asked for yet."""
    while _thread.unnamed:
        _thread.unnamed[-1].look_up()
        _thread.unnamed.pop()


def parameter_names_of(leaves: Sequence[torch.Tensor], *, at_any_cost: bool = False) -> dict[int, ParameterName]:
    """``id`` of each leaf that is a parameter of a living module -> where it is.

    Args:
        at_any_cost: search also where searches have taken long.
    """
    parameters = [leaf for leaf in leaves if is_parameter(leaf)]
    if not all(_is_known(parameter) for parameter in parameters):
        if at_any_cost:
            _search.next = 0.0
        _look_for(parameters)
    return {key: _search.found[key] for key in map(id, parameters) if key in _search.found}


def _is_known(parameter: torch.Tensor) -> bool:
    key = id(parameter)
    if key in _search.found and not _search.found[key].has(parameter):
        del _search.found[key]
    return key in _search.found or (ir.is_plain(parameter) and (key, parameter.data_ptr()) in _search.in_no_module)


def _look_for(parameters: Sequence[torch.Tensor]) -> None:
    started = time.process_time()
    if started < _search.next:
        return
    names_by_id = all_parameter_names()
    ended = time.process_time()
    _search.next = ended + (ended - started) / _SEARCH_TIME_SHARE if ended - started > _SLOW_SEARCH_SECONDS else 0.0
    if len(_search.in_no_module) > _MAX_IN_NO_MODULE:
        _search.in_no_module.clear()
    _search.found = {key: found for key, found in _search.found.items() if found.module() is not None}
    for parameter in parameters:
        if id(parameter) in names_by_id:
            _search.found[id(parameter)] = names_by_id[id(parameter)]
        elif ir.is_plain(parameter):
            _search.in_no_module.add((id(parameter), parameter.data_ptr()))


def all_parameter_names() -> dict[int, ParameterName]:
    """``id`` of each parameter of each living module -> where it is, seen from the outermost module that has it."""
    modules = _living_modules()
    inner = {id(child) for module in modules for child in list(module.__dict__["_modules"].values())}
    names_by_id: dict[int, ParameterName] = {}
    for outermost in modules:
        if id(outermost) in inner:
            continue
        model = weakref.ref(outermost)
        for path, module in modules_inside(outermost):
            for attribute, parameter in list(module.__dict__["_parameters"].items()):
                if parameter is not None:
                    name = f"{path}.{attribute}" if path else attribute
                    names_by_id.setdefault(
                        id(parameter),
                        ParameterName(name, type(outermost).__name__, weakref.ref(module), attribute, model),
                    )
    return names_by_id


def is_parameter(tensor: torch.Tensor) -> bool:
    """As ``isinstance`` says, without running what a subclass has for missing attributes."""
    return issubclass(type(tensor), torch.nn.Parameter) or bool(tensor.__dict__.get("_is_param"))


def modules_inside(outermost: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """A module and those in it with their paths, as ``named_modules`` has them. That, and ``parameters``, are methods
    that a class may have of its own."""
    seen: set[int] = set()
    worklist = [("", outermost)]
    while worklist:
        path, module = worklist.pop()
        if id(module) in seen or "_parameters" not in module.__dict__:  # one that is being made has none
            continue
        seen.add(id(module))
        yield path, module
        inner = [each for each in list(module.__dict__["_modules"].items()) if each[1] is not None]
        worklist += [(f"{path}.{name}" if path else name, child) for name, child in reversed(inner)]


def _living_modules() -> list[torch.nn.Module]:
    """All modules, found in one call of C: no other thread runs meanwhile.

    Among all objects are tuples that other threads are making, which Python can finish only where nobody else refers to
    them (``_PyTuple_Resize``): if a list of all objects lived for longer, ``tuple(...)`` would raise there.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # a collection would move objects from one generation to the next
    try:
        found = list(_modules_among_all_objects())
    finally:
        if was_enabled:
            gc.enable()
    return [each for each in found if "_modules" in each.__dict__]  # one that is being made may have none


def _modules_among_all_objects() -> Iterator[Any]:
    """To be used up in one call: its first step fills a list with all objects, of which the list is one, and its last
    step empties it."""
    objects: list[Any] = []
    every = itertools.chain.from_iterable(map(gc.get_objects, (2, 1, 0)))
    fill: Iterator[Any] = filter(None, map(objects.extend, (every,)))  # these two do what they do, and give nothing
    empty: Iterator[Any] = filter(None, map(list.clear, (objects,)))
    # The types are asked, not `isinstance`, which asks objects for `__class__`: some answer by running code.
    are_modules = map(issubclass, map(type, objects), itertools.repeat(torch.nn.Module))
    return itertools.compress(itertools.chain(fill, objects, empty), are_modules)
