"""Fake tensors of given metadata, made without running an operator: in a tenth of the time of ``FakeTensorMode``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def made_fake(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | torch.SymInt,
    dtype: torch.dtype,
    device: torch.device,
    conj: bool = False,
    neg: bool = False,
) -> FakeTensor:
    """A fake tensor that lies in ``storage``, which is one of the meta device. To be called with no mode on."""
    tensor = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)
    if conj:
        torch._C._set_conj(tensor, True)
    if neg:
        torch._C._set_neg(tensor, True)
    return FakeTensor(mode, tensor, device)


class Fakes:
    """Makes fake tensors of real ones: what shares memory does so again."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor without history and ``.grad``; but some of the engine's functions ask what requires grad."""
        if tensor._is_zerotensor() or tensor.is_quantized:  # more is to be known of it than its metadata
            return self.mode.from_tensor(tensor.detach().requires_grad_(tensor.requires_grad), static_shapes=True)
        storage = tensor.untyped_storage()
        own = self._storages.get(storage._cdata)
        if own is None:
            own = self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        with torch._C._DisableTorchDispatch():
            fake = made_fake(
                self.mode,
                own,
                tensor.shape,
                tensor.stride(),
                tensor.storage_offset(),
                tensor.dtype,
                tensor.device,
                tensor.is_conj(),
                tensor.is_neg(),
            )
            return fake.requires_grad_() if tensor.requires_grad else fake
