"""Record tensors, and make tensors from records: of the same kinds, with shared storages where the originals shared
them, and with made-up or stored values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..errors import ReproductionError
from ..lowering.fake_tensors import made_fake
from ..steps.memory import extent
from ..torch_api import attributes
from .records import TensorRecord, device_of, dtype_of

SMALL = 32
"""Maximum elements of an integer tensor whose values are all kept: it may be offsets, or a generator's state."""
_LOOKED_AT = 1 << 16
"""Number of first floating-point values that the statistics use. For integers all are used: they may be indices."""
_ALIGNED = 64  # bytes: a tensor keeps its offset modulo this alignment
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Unusual(str):
    """A tensor that cannot be recorded, described in words."""


def records_of(tensors: Sequence[torch.Tensor]) -> list[TensorRecord | Unusual]:
    """Return a record for each tensor.

    Synchronizes with the device: call this only for backwards that are being compiled or written.
    """
    storages: dict[int, tuple[int, int]] = {}  # address -> number, and first byte in use
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for tensor in filter(_has_memory, tensors):
            place, start = tensor.untyped_storage()._cdata, _start(tensor)
            number, before = storages.setdefault(place, (len(storages), start))
            storages[place] = number, min(start, before)
        count = len(storages)
        return [_record(tensor, storages, count + index) for index, tensor in enumerate(tensors)]


def _record(tensor: torch.Tensor, storages: Mapping[int, tuple[int, int]], own: int) -> TensorRecord | Unusual:
    if not ir.is_plain(tensor) or attributes.is_quantized(tensor):
        layout, dtype = attributes.layout(tensor), attributes.dtype(tensor)
        return Unusual(f"a {type(tensor).__name__} of layout {layout} and dtype {dtype}")
    storage, offset = own, 0
    if _has_memory(tensor):
        storage, start = storages[tensor.untyped_storage()._cdata]
        offset = int(tensor.storage_offset()) - start // _ALIGNED * _ALIGNED // tensor.itemsize
    try:
        known = _known(tensor)
    except Exception as error:  # noqa: BLE001  no kernel for the dtype, or out of memory: the values stay unknown
        raise_what_a_handler_raised(error)
        known = {}
    is_view = isinstance(tensor._base, torch.nn.Parameter)
    parameter = "itself" if isinstance(tensor, torch.nn.Parameter) else "view" if is_view else ""
    kind = (str(tensor.dtype), str(tensor.device), list(tensor.shape), list(tensor.stride()))
    bits = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg())
    return TensorRecord(*kind, storage, offset, *bits, parameter, **known)


def _has_memory(tensor: torch.Tensor) -> bool:
    return ir.is_plain(tensor) and tensor.numel() > 0 and not tensor._is_zerotensor()


def _start(tensor: torch.Tensor) -> int:
    """Return the byte offset of a tensor in its storage."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements between the first and the last one in memory."""
    return tensor.detach().as_strided((extent(tensor),), (1,))


def _known(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the statistics of a tensor's values for its record."""
    if tensor.is_neg():
        tensor = tensor._neg_view()  # the values in memory, without the negative bit
    if not _has_memory(tensor):
        return {"low": 0, "high": 0} if tensor.numel() else {}
    dtype, known = tensor.dtype, dict[str, Any]()
    if (dtype in _WHOLE or dtype is torch.bool) and extent(tensor) <= SMALL:
        known["values"] = _flat(tensor).to(torch.int64).tolist()
    if dtype is torch.bool:
        known["ones"] = int(_flat(tensor).count_nonzero())
    elif dtype in _WHOLE:
        known["low"], known["high"] = (int(each) for each in tensor.aminmax())
    elif dtype in _FLOATING:
        values = _flat(tensor)[:_LOOKED_AT]
        values = values if dtype in (torch.float32, torch.float64) else values.to(torch.float32)
        deviation, mean = torch.std_mean(values, correction=0)
        numbers = torch.stack([*values.aminmax(), mean, deviation]).tolist()  # one synchronization with the device
        if all(map(math.isfinite, numbers)):
            known["low"], known["high"] = numbers[:2]
            known["mean"], known["deviation"] = (float(f"{number:.4g}") for number in numbers[2:])
    return known


# ---- from records ----------------------------------------------------------------------------------------------------


def check(record: TensorRecord) -> None:
    """Check that a tensor can be made from a record.

    Raises:
        ReproductionError: a size or a stride is negative, their numbers differ, a conjugate bit does not fit the dtype,
            or an integer is too large.
    """
    numbers = (*record.shape, *record.stride, record.offset, record.storage)
    if len(record.shape) != len(record.stride) or any(number < 0 or number >= 1 << 48 for number in numbers):
        raise ReproductionError(f"it has a tensor of invalid shape {record.shape[:8]} or strides {record.stride[:8]}")
    dtype = dtype_of(record.dtype)
    device_of(record.device)
    if record.conj and not dtype.is_complex:
        raise ReproductionError(f"it has a tensor of {record.dtype} with a conjugate bit")
    whole = [each for each in (record.low, record.high, record.ones, *(record.values or ())) if isinstance(each, int)]
    if any(abs(each) > 1 << 63 for each in whole):
        raise ReproductionError("it has a tensor of integers that are too large for any dtype")


def _extent(record: TensorRecord) -> int:
    if 0 in record.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(record.shape, record.stride, strict=True))


def bytes_of(records: Sequence[TensorRecord]) -> dict[int, int]:
    """Return the bytes of each storage."""
    sizes: dict[int, int] = {}
    for record in records:
        end = (record.offset + _extent(record)) * dtype_of(record.dtype).itemsize
        sizes[record.storage] = max(end, sizes.get(record.storage, 0))
    return sizes


def fakes(mode: FakeTensorMode, records: Sequence[TensorRecord]) -> list[torch.Tensor]:
    """Return fake tensors of the same kinds, each with its own storage (:func:`lowering.fake_tensors.fake_of`)."""
    made = []
    for record in records:
        dtype = dtype_of(record.dtype)
        storage = torch.UntypedStorage(_extent(record) * dtype.itemsize, device="meta")
        bits = (record.conj, record.neg)
        with torch._C._DisableTorchDispatch():
            fake = made_fake(mode, storage, record.shape, record.stride, 0, dtype, device_of(record.device), *bits)
        made.append(fake.requires_grad_() if record.requires_grad else fake)
    return made


def tensors(
    records: Sequence[TensorRecord], seed: int = 0, stored: Mapping[int, bytes] | None = None
) -> list[torch.Tensor]:
    """Return tensors with made-up values, determined by the seed, or with stored values.

    Made-up numbers have the mean, the deviation and the bounds of the record. Without these, they lie between 0 and 1,
    so that they can be probabilities and have a logarithm.

    Args:
        stored: the bytes of each storage; None for made-up values.
    """
    memory: dict[int, torch.Tensor] = {}
    devices = {record.storage: device_of(record.device) for record in records}
    for storage, size in bytes_of(records).items():
        room = -(-size // 16) * 16  # a multiple of every dtype's size
        if stored is None:
            memory[storage] = torch.zeros(room, dtype=torch.uint8)
        else:
            data = bytearray(stored.get(storage, b"")[:room].ljust(room, b"\0"))
            memory[storage] = torch.frombuffer(data, dtype=torch.uint8) if room else torch.zeros(0, dtype=torch.uint8)
    if stored is None:
        generator = torch.Generator().manual_seed(seed)
        for record in records:
            _fill(memory[record.storage], record, generator)
    placed = {storage: each.to(devices[storage]) for storage, each in memory.items()}
    return [_placed(placed[record.storage], record) for record in records]


def _fill(memory: torch.Tensor, record: TensorRecord, generator: torch.Generator) -> None:
    dtype, count = dtype_of(record.dtype), _extent(record)
    flat = memory.view(dtype)[record.offset : record.offset + count]
    if record.values is not None and len(record.values) == count:
        flat.copy_(torch.tensor(record.values, dtype=torch.int64))
    elif dtype is torch.bool:
        ones = count // 2 if record.ones is None else record.ones
        flat.copy_(torch.randperm(count, generator=generator) < ones)
    elif dtype.is_complex:
        drawn = torch.rand((count, 2), dtype=torch.float64, generator=generator)
        flat.copy_(torch.view_as_complex(drawn))
    elif dtype.is_floating_point:
        flat.copy_(_drawn(count, record, generator))
    else:
        low, high = int(record.low or 0), int(1 if record.high is None else record.high)
        drawn = torch.rand(count, dtype=torch.float64, generator=generator) * (high - low + 1)
        flat.copy_((drawn.floor().to(torch.int64) + low).clamp(low, high))


def _drawn(count: int, record: TensorRecord, generator: torch.Generator) -> torch.Tensor:
    if record.mean is None or record.low is None or record.high is None:
        return torch.rand(count, dtype=torch.float64, generator=generator)
    drawn = torch.randn(count, dtype=torch.float64, generator=generator) * record.deviation + record.mean
    return drawn.clamp(record.low, record.high)


def _placed(memory: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    dtype, storage = dtype_of(record.dtype), memory.untyped_storage()
    if (record.offset + _extent(record)) * dtype.itemsize > storage.nbytes():
        raise ReproductionError(f"a tensor of shape {record.shape[:8]} does not fit into its storage")
    tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(
        storage, record.offset, tuple(record.shape), tuple(record.stride)
    )
    differentiable = dtype.is_floating_point or dtype.is_complex
    if record.parameter == "view" and differentiable:
        whole = torch.nn.Parameter(memory.view(dtype), requires_grad=record.requires_grad)
        with torch.set_grad_enabled(record.requires_grad):
            return _with_bits(whole.as_strided(record.shape, record.stride, record.offset), record)
    tensor = _with_bits(tensor, record)
    if record.parameter == "itself" and differentiable:
        return torch.nn.Parameter(tensor, requires_grad=record.requires_grad)
    return tensor.requires_grad_(record.requires_grad and differentiable)


def _with_bits(tensor: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    if record.conj:
        torch._C._set_conj(tensor, True)
    if record.neg:
        torch._C._set_neg(tensor, True)
    return tensor


def stored_bytes(tensors: Sequence[torch.Tensor], records: Sequence[TensorRecord]) -> dict[int, bytes]:
    """Return the bytes of each storage, as far as the tensors of these records reach."""
    sizes, found = bytes_of(records), dict[int, bytes]()
    for tensor, record in zip(tensors, records, strict=True):
        if record.storage in found or not _has_memory(tensor):
            continue
        start = (tensor.storage_offset() - record.offset) * tensor.itemsize
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage(), start, (sizes[record.storage],), (1,))
        found[record.storage] = memory.cpu().numpy().tobytes()
    return found
