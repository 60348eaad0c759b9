"""Why a variant, in this process or in the store on disk, does not serve values, in the user's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..capture.unnamed import name_again
from ..diagnostics.call_misses import NUMBER_HINT
from ..diagnostics.node_names import title
from ..diagnostics.variant_misses import TensorKind, shape_miss, tensor_miss, value_miss
from ..shadow_cache import Miss
from .records import VariantRecord
from .variants import Handover, Shapes

_STRIDES_HINT = "call contiguous() where the tensor is made to keep one layout"
_DYNAMIC_STRIDES_HINT = "the stride is now dynamic; others are hits"
_OTHER_SIZES = "the stored code serves other sizes; one more variant"


def values_miss(
    tape: ir.TapeGraph, old: Shapes, scalars: Sequence[Any], handover: Handover, comparable: bool, dynamic: bool = False
) -> Miss:
    """Return why a variant that was made under the same state does not serve a backward.

    Args:
        old: the shapes of the variant, as ``scalars`` are its scalars.
        comparable: as many tensors of as many dimensions were handed over, so sizes and strides can be compared too.
        dynamic: whether sizes that changed are symbols from now on.
    """
    new = Shapes.of(handover)
    miss = tensor_miss(tape, old.kinds, new.kinds)
    if comparable:
        miss = shape_miss(tape, (old.tensors, old.sizes), (new.tensors, new.sizes), dynamic) or miss
        added_to = tape.added_to()
        pairs = zip(old.strides, new.strides, strict=True)
        strides = [was if was is None or index in added_to else now for index, (was, now) in enumerate(pairs)]
        if dynamic and miss is None:
            wide = old.widened(handover, added_to).tensors
            found = [
                now if one == other else was
                for was, now, one, other in zip(old.strides, strides, old.tensors, wide, strict=True)
            ]
            miss = value_miss("layout", tape, "input", found, strides, ", strides", _DYNAMIC_STRIDES_HINT)
        miss = miss or value_miss("layout", tape, "input", old.strides, strides, ", strides", _STRIDES_HINT)
    miss = miss or value_miss("node_attribute", tape, "scalar", scalars, handover.scalars, hint=NUMBER_HINT)
    return miss or Miss("layout", f"a saved tensor of {title(tape)}", "a kind of tensor", "another kind")


def stored_miss(tape: ir.TapeGraph, entry: str, record: VariantRecord, handover: Handover) -> Miss:
    """Return why an entry in the store does not serve a backward."""
    name_again(tape, handover.tensors)
    tensors = record.tensors
    try:
        kinds = [TensorKind(len(tensor.spec), tensor.properties) for tensor in tensors]
        old = Shapes([tensor.spec for tensor in tensors], record.sizes, [tensor.strides for tensor in tensors], kinds)
        miss = values_miss(tape, old, record.scalars, handover, old.fits(handover))
    except Exception as error:  # noqa: BLE001  the tape is released by now: it is compiled again, and says so
        raise_what_a_handler_raised(error)
        return corrupt_entry(entry, error)
    return msgspec.structs.replace(miss, hint=_OTHER_SIZES if miss.kind == "shape" else miss.hint)


def corrupt_entry(entry: str, error: Exception) -> Miss:
    """Make the miss of a stored entry that cannot be read."""
    return Miss("corrupt", f"entry {entry}", "stored", f"{type(error).__name__}: {error}", "it is compiled again")
