"""Read the tensors that a node saved, as plain values. No hook of the user runs, and nothing is unpacked.

This module reads PyTorch's ``SavedTensor`` (``torch/csrc/autograd/saved_variable.h``, 2.13). Its ``data`` is the tensor
or the result of the pack hook. ``_saved_result`` and ``ctx.saved_tensors`` would call the unpack hook.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any

import torch

from ..capture import tape
from ..capture.parameter_names import is_parameter
from .nodes import COUNTED, Kind, SavedTensor, shape_of

_COMPRESSED = "crow_indices", "col_indices", "values"
_COMPRESSED_COLUMNS = "ccol_indices", "row_indices", "values"
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED,
    torch.sparse_bsr: _COMPRESSED,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
"""The methods that return the component tensors of a tensor with this layout."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEEPEST = 3
"""Maximum depth of nested lists in an attribute of a ``ctx`` that are searched for tensors."""


class SavedTensors:
    """Reads the saved tensors of one tape's nodes, and recognizes memory that the program keeps alive anyway."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        buffers: Iterable[torch.Tensor],
        leaves: Iterable[torch.Tensor],
        held: Iterable[Handles],
    ) -> None:
        self._there_anyway: dict[int, Kind] = {}
        groups: tuple[tuple[Kind, Iterable[torch.Tensor]], ...] = (
            ("input", leaves),
            ("buffer", buffers),
            ("parameter", parameters),
        )
        for kind, tensors in groups:
            self._there_anyway.update((key, kind) for tensor in tensors for key, _ in _memory(tensor))
        self._numbers: dict[int, int] = {}
        self._references = _References(held)

    def of(self, handles: Handles) -> tuple[SavedTensor, ...]:
        """Return the saved tensors of a node, in order, without those that a backward has freed."""
        return tuple([self._record(name, handle) for name, handle in handles])

    def _record(self, name: str, handle: Any) -> SavedTensor:
        is_held = self._references.has_more(handle)  # first: `data` below adds a reference
        data = handle.data
        if handle.unpack_hook is not None:
            return self._packed(name, data)
        parts = _memory(data)
        beside = [part for part in parts if part[0] not in self._there_anyway]
        kind: Kind = "input" if is_held else "kept"
        if is_parameter(data) or (data._base is not None and is_parameter(data._base)):
            kind = "parameter"
        elif parts and not beside:
            kind = self._there_anyway[parts[0][0]]
        memory = self._numbered(beside if kind in COUNTED else parts)
        count = sum(bytes for _, bytes in memory) if parts else None
        return SavedTensor(name, shape_of(data), data.dtype, str(data.device), count, memory, kind)

    def _packed(self, name: str, data: Any) -> SavedTensor:
        """Return the record of a packed tensor. Of the hook's result, only tensors count that the tape keeps alive."""
        parts = [part for tensor in _tensors(data) for part in _memory(tensor)]
        memory = self._numbered([part for part in parts if part[0] not in self._there_anyway])
        count = sum(bytes for _, bytes in memory) if parts else None
        return SavedTensor(name, None, None, None, count, memory, "packed")

    def _numbered(self, parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple([(self._numbers.setdefault(key, len(self._numbers)), count) for key, count in dict(parts).items()])


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor in an attribute of a Python function's ``ctx``, with the interface of a ``SavedTensor``."""

    holder: Any
    key: Any
    unpack_hook: None = None

    @property
    def data(self) -> torch.Tensor:
        return self.holder[self.key]


Handles = list[tuple[str, Any]]
"""Pairs of a saved tensor's name and an object whose ``data`` is the tensor, or the result of the pack hook if the
object has an ``unpack_hook``."""


def handles(node: Any) -> Handles:
    """Return the handles of a node's saved tensors."""
    found: Handles = []
    if isinstance(node, torch._C._FunctionBase):
        with contextlib.suppress(RuntimeError):  # freed by a backward
            found += _of_list("saved_tensors", node._raw_saved_tensors)
        return [*found, *_kept_in("ctx", vars(node), _DEEPEST)]
    for attribute, is_tensor in tape.saved_names(type(node)):
        if not is_tensor:
            continue
        name = attribute.removeprefix("_saved_")
        try:
            saved = getattr(node, f"_raw{attribute}")
        except RuntimeError:  # a list freed by a backward
            continue
        if isinstance(saved, tuple):
            found += _of_list(name, saved)
        elif _is_there(saved):
            found.append((name, saved))
    return found


def _of_list(name: str, saved: Any) -> Handles:
    return [(f"{name}[{number}]", each) for number, each in enumerate(saved or ()) if _is_there(each)]


def _is_there(saved: Any) -> bool:
    """Return whether a saved tensor exists: not for an omitted argument, and not after a backward."""
    return saved is not None and (saved.unpack_hook is not None or saved.data is not None)


def _kept_in(name: str, holder: Any, deep: int) -> Handles:
    """Return the tensors in the attributes of a ``ctx``, also in nested lists, tuples and dictionaries."""
    found: Handles = []
    for key, value in list(holder.items() if type(holder) is dict else enumerate(holder)):
        if not _is_tensor(value) and not (deep and type(value) in (list, tuple, dict)):
            continue
        place = name + (f".{key}" if name == "ctx" else f"[{key!r}]" if type(key) in (int, str) else "[...]")
        found += [(place, _Kept(holder, key))] if _is_tensor(value) else _kept_in(place, value, deep - 1)
    return found


def _is_tensor(value: Any) -> bool:
    """Return whether an object is a tensor, by its type: ``isinstance`` reads ``__class__``, a possible property."""
    return issubclass(type(value), torch.Tensor)


def _tensors(data: Any) -> list[torch.Tensor]:
    if _is_tensor(data):
        return [data]
    return list(filter(_is_tensor, data)) if type(data) in (tuple, list) else []


def _memory(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the storages of a tensor as pairs of identity and bytes; empty if it has none."""
    try:
        if type(tensor) not in _PLAIN and any("__tensor_flatten__" in vars(cls) for cls in type(tensor).__mro__):
            return [part for each in _wrapped(tensor) for part in _memory(each)]
        if tensor.layout in _PARTS:
            return [part for name in _PARTS[tensor.layout] for part in _memory(getattr(tensor, name)())]
        storage = tensor.untyped_storage()
        count = storage.nbytes()
        return [(storage._cdata, count)] if type(count) is int else []  # else the size is a symbol
    except (RuntimeError, NotImplementedError):  # a subclass or a layout without storage
        return []


def _wrapped(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in the attributes of a wrapper subclass, without running its code."""
    slots = [each for cls in type(tensor).__mro__ for each in vars(cls).values() if type(each) is MemberDescriptorType]
    values = list(vars(tensor).values())
    for slot in slots:
        with contextlib.suppress(AttributeError):  # an empty slot
            values.append(slot.__get__(tensor))
    return [each for each in values if _is_tensor(each) and each is not tensor]


class _References:
    """Recognizes tensors without gradient to which the program also has references, directly or to the base of a view:
    a batch, a mask. Other tensors have only the tape's references."""

    def __init__(self, held: Iterable[Handles]) -> None:
        every = [handle for each in held for _, handle in each if handle.unpack_hook is None]
        kept = {(id(each.holder), each.key): each for each in every if type(each) is _Kept}
        self._kept = Counter(id(owner(each.data)) for each in kept.values())
        self._by_both = {id(owner(each.data)) for each in every if kept and type(each) is not _Kept}
        view = torch.ones(2, device="cpu")[0]
        self._one = sys.getrefcount(view._base)
        of_python = view._base
        self._second = sys.getrefcount(view._base) - self._one  # 0 or 1: does C++'s reference count too? By version
        del of_python

    def has_more(self, handle: Any) -> bool:
        """Return whether a tensor has references other than the tape's."""
        if handle.unpack_hook is not None or handle.data.requires_grad:
            return False
        key = id(owner(handle.data))
        own = self._one
        if key in self._kept:
            own += self._kept[key] - 1 + (self._second if key in self._by_both else 0)
        if handle.data._base is None:
            return sys.getrefcount(handle.data) > own
        return sys.getrefcount(handle.data._base) > own


def owner(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base
