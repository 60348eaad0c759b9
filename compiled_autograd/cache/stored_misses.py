"""Why what the store on disk has of a structure does not serve a backward, in the user's terms."""

from __future__ import annotations

import msgspec

from shadow_cache import Miss

from .. import ir
from ..diagnostics.node_names import title
from ..diagnostics.variant_misses import TensorKind, layout_miss, scalar_miss, shape_miss, tensor_kind, tensor_miss
from .records import VariantRecord
from .variants import Handover, TensorRecord

_OTHER_SIZES = "what is stored serves other sizes; one more variant"


def stored_miss(tape: ir.TapeGraph, record: VariantRecord, handover: Handover) -> Miss:
    """Why what the store has of a structure, made under the same state, does not serve a backward."""
    kinds = [tensor_kind(tensor) for tensor in handover.tensors]
    stored = [_kind_of_record(tensor) for tensor in record.tensors]
    sizes = [tuple(tensor.shape) for tensor in handover.tensors]
    miss = tensor_miss(tape, stored, kinds)
    if [len(tensor.spec) for tensor in record.tensors] == [len(size) for size in sizes]:
        before = [tensor.spec for tensor in record.tensors], record.sizes
        miss = shape_miss(tape, before, (sizes, tuple(handover.sizes)), dynamic=False) or miss
        strides = [tensor.strides for tensor in record.tensors]
        now = [None if old is None else new.stride() for old, new in zip(strides, handover.tensors, strict=True)]
        miss = miss or layout_miss(tape, strides, now)
    miss = miss or scalar_miss(tape, record.scalars, handover.scalars)
    miss = miss or Miss("layout", f"a saved tensor of {title(tape)}", "a kind of tensor", "another kind")
    return msgspec.structs.replace(miss, hint=_OTHER_SIZES if miss.kind == "shape" else miss.hint)


def _kind_of_record(record: TensorRecord) -> TensorKind:
    """As :func:`tensor_kind`, of a tensor in the store."""
    found = {"Conjugate": "conjugated", "Negative": "negated", "ZeroTensor": "zeros without memory"}
    properties = [words for key, words in found.items() if key in record.kind]
    name = record.kind.partition(" ")[0]
    return TensorKind(len(record.spec), tuple(properties if name == "Tensor" else [*properties, name]))
