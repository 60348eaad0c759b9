"""Fake tensors: made from metadata without running an operator, in a tenth of the time of ``FakeTensorMode``; and
queries about them during a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..steps.memory import extent


class TracingMode(FakeTensorMode):
    """Fake tensors of which each result of an operator is another one.

    A trace knows a result by its fake tensor. Some operators' fake implementations give one for two results, as that of
    ``mkldnn_rnn_layer_backward`` does (``torch/_meta_registrations.py``, 2.13), where the operator gives two that share
    no memory: both would become the last one.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().dispatch(func, types, args, kwargs or {})
        if not isinstance(results, (tuple, list)) or len({*map(id, results)}) == len(results):
            return results
        if any(each.alias_info is not None for each in func._schema.returns):  # it hands on what it was given
            return results
        made: list[Any] = []
        for index, result in enumerate(results):
            again = isinstance(result, torch.Tensor) and any(result is other for other in results[:index])
            made.append(self._another(result) if again else result)
        return type(results)(made)

    def _another(self, tensor: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def made_fake(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | torch.SymInt,
    dtype: torch.dtype,
    device: torch.device,
    conj: bool,
    neg: bool,
) -> FakeTensor:
    """Return a fake tensor that lies in ``storage``, a storage on the meta device. Call this with no mode on."""
    tensor = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)
    if conj:
        torch._C._set_conj(tensor, True)
    if neg:
        torch._C._set_neg(tensor, True)
    return FakeTensor(mode, tensor, device)


def metadata_of(fake: FakeTensor) -> tuple[Any, ...]:
    """Return the arguments, beside the memory, with which :func:`made_fake` makes an equal fake tensor."""
    placed = (fake.shape, fake.stride(), fake.storage_offset())
    return (*placed, fake.dtype, fake.fake_device, fake.is_conj(), fake.is_neg())


def fake_of(mode: FakeTensorMode, tensor: torch.Tensor, plain: bool = False) -> torch.Tensor:
    """Return a fake tensor for a real one, without history and ``.grad``. It requires grad as the real one does, since
    some of the engine's functions ask.

    The fake tensor lies at the beginning of its own memory, just as large as its elements need. A trace with it must
    hold for any tensor of that kind, at any place in any memory (:data:`compiled_autograd.lowering.aten.ABSOLUTE`).

    Args:
        plain: without conjugate and negative bit, and with memory for zeros that have none.
    """
    if tensor.is_quantized or (tensor._is_zerotensor() and not plain):  # more is to be known of it than its metadata
        return mode.from_tensor(tensor.detach().requires_grad_(tensor.requires_grad), static_shapes=True)
    conj, neg = tensor.is_conj() and not plain, tensor.is_neg() and not plain
    with torch._C._DisableTorchDispatch():
        storage = torch.UntypedStorage(extent(tensor) * tensor.itemsize, device="meta")
        fake = made_fake(mode, storage, tensor.shape, tensor.stride(), 0, tensor.dtype, tensor.device, conj, neg)
        return fake.requires_grad_() if tensor.requires_grad else fake


def storage_of(tensor: torch.Tensor) -> int:
    """Return the id of the memory of a (fake) tensor."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata
