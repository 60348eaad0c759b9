"""The tensors that a node saved, as plain values. No hook of the user runs, and nothing is unpacked.

What is read is the ``SavedTensor`` of PyTorch (``torch/csrc/autograd/saved_variable.h``, 2.13), whose ``data`` is the
tensor or what a hook made of it; ``_saved_result`` and ``ctx.saved_tensors`` would call the hook that unpacks it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..capture import tape
from .nodes import Kind, SavedTensor


class SavedTensors:
    """Reads what nodes of one tape saved, and tells memory apart that is there anyway."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor]
    ) -> None:
        self._there_anyway: dict[int, Kind] = {}
        groups: tuple[tuple[Kind, Iterable[torch.Tensor]], ...] = (
            ("input", leaves),
            ("buffer", buffers),
            ("parameter", parameters),
        )
        for kind, tensors in groups:
            self._there_anyway.update((key, kind) for tensor in tensors for key, _ in _memory(tensor))
        self._numbers: dict[int | tuple[int, ...], int] = {}
        self._of_the_tape = _references_of_the_tape()

    def of(self, handles: Handles) -> tuple[SavedTensor, ...]:
        """What a node saved, in its order. What a backward has freed is not there any more."""
        return tuple([self._record(name, handle) for name, handle in handles])

    def _record(self, name: str, handle: Any) -> SavedTensor:
        is_held = _is_held_by_the_program(handle, self._of_the_tape)  # asked first: `data` below is one more reference
        data = handle.data
        if handle.unpack_hook is not None:
            return self._packed(name, data)
        parts = _memory(data)
        kind: Kind = "input" if is_held else "kept"
        if _is_parameter(data):
            kind = "parameter"
        elif parts and all(key in self._there_anyway for key, _ in parts):
            kind = self._there_anyway[parts[0][0]]
        number, count = self._counted(parts)
        return SavedTensor(name, tuple(data.shape), data.dtype, str(data.device), count, number, kind)

    def _packed(self, name: str, data: Any) -> SavedTensor:
        """A hook may have made anything. What is known are tensors, of which one that is there anyway costs nothing."""
        parts = [part for tensor in _tensors(data) for part in _memory(tensor)]
        number, count = self._counted([part for part in parts if part[0] not in self._there_anyway])
        return SavedTensor(name, None, None, None, 0 if parts and count is None else count, number, "packed")

    def _counted(self, parts: list[tuple[int, int]]) -> tuple[int | None, int | None]:
        if not parts:
            return None, None
        key = parts[0][0] if len(parts) == 1 else tuple(sorted(dict(parts)))
        return self._numbers.setdefault(key, len(self._numbers)), sum(dict(parts).values())


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A tensor that a Python function keeps as an attribute of its ``ctx``, in the form of a ``SavedTensor``."""

    ctx: Any
    name: str
    unpack_hook: None = None

    @property
    def data(self) -> torch.Tensor:
        return vars(self.ctx)[self.name]


Handles = list[tuple[str, Any]]
"""The names of what a node saved, each with an object whose ``data`` is the tensor, or what a hook packed if it has an
``unpack_hook``."""


def handles(node: Any) -> Handles:
    """What a node saved, unread."""
    found: Handles = []
    if isinstance(node, torch._C._FunctionBase):
        with contextlib.suppress(RuntimeError):  # freed by a backward: nothing is saved any more
            found += _of_list("saved_tensors", node._raw_saved_tensors)
        kept = vars(node)
        found += [(f"ctx.{name}", _Attribute(node, name)) for name in kept if isinstance(kept[name], torch.Tensor)]
        return found
    for attribute, is_tensor in tape.saved_names(type(node)):
        if not is_tensor:
            continue
        name = attribute.removeprefix("_saved_")
        try:
            saved = getattr(node, f"_raw{attribute}")
        except RuntimeError:  # of a list that a backward has freed
            continue
        if isinstance(saved, tuple):
            found += _of_list(name, saved)
        elif _is_there(saved):
            found.append((name, saved))
    return found


def _of_list(name: str, saved: Any) -> Handles:
    return [(f"{name}[{number}]", each) for number, each in enumerate(saved or ()) if _is_there(each)]


def _is_there(saved: Any) -> bool:
    """Not so for an argument that was not given, and after a backward."""
    return saved is not None and (saved.unpack_hook is not None or saved.data is not None)


def _tensors(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    return [each for each in data if isinstance(each, torch.Tensor)] if type(data) in (tuple, list) else []


def _memory(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The pieces of memory of a tensor: what tells each apart, and its bytes. None where it has no storage."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            if tensor.layout is torch.sparse_coo:
                return [part for each in (tensor._indices(), tensor._values()) for part in _memory(each)]
            if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
                parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
                return [part for each in parts for part in _memory(each)]
            storage = tensor.untyped_storage()
            return [(storage._cdata, storage.nbytes())]
        except (RuntimeError, NotImplementedError):  # a subclass or a layout that has none
            return []


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def _is_held_by_the_program(handle: Any, of_the_tape: int) -> bool:
    """Whether a tensor without gradient, or what it is a view of, is an object that the program refers to as well: a
    batch, a mask. Others have as few references as what only a tape holds."""
    if handle.unpack_hook is not None or handle.data.requires_grad or type(handle.data) is not torch.Tensor:
        return False
    return _references(handle) > of_the_tape


def _references(handle: Any) -> int:
    if handle.data._base is None:
        return sys.getrefcount(handle.data)
    return sys.getrefcount(handle.data._base)


def _references_of_the_tape() -> int:
    """How many references an object of Python has whose tensor only C++ holds: a matter of PyTorch's version."""
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        view = torch.ones(2, device="cpu")[0]
    return sys.getrefcount(view._base)
