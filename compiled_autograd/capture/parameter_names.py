"""The names of parameters: which living module has a leaf of a tape."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import ir
from ..process_state import PROCESS


@dataclass(frozen=True, slots=True)
class ParameterName:
    """Where a parameter was found: its name from the outermost module, that one's class, and the module that has it as
    ``attribute``."""

    name: str
    outermost: str
    module: weakref.ref[torch.nn.Module]
    attribute: str

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


def parameter_names_of(leaves: Sequence[torch.Tensor]) -> dict[int, ParameterName]:
    """``id`` of each leaf that is a parameter of a living module -> where it is."""
    parameters = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
    if not all(_is_known(parameter) for parameter in parameters):
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
    modules = [each for each in gc.get_objects() if _is_module(each)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    names_by_id: dict[int, ParameterName] = {}
    for outermost in modules:
        if id(outermost) in inner:
            continue
        for path, module in outermost.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{path}.{attribute}" if path else attribute
                    names_by_id.setdefault(
                        id(parameter), ParameterName(name, type(outermost).__name__, weakref.ref(module), attribute)
                    )
    return names_by_id


def _is_module(candidate: Any) -> bool:
    # The type, not isinstance: that asks the object for __class__, and some objects answer by running code.
    return issubclass(type(candidate), torch.nn.Module) and "_modules" in candidate.__dict__
