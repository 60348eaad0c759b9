"""Checks that compiled code leaves unchanged: its inputs, and the state of the random generators."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..steps.memory import is_out_of_memory

if TYPE_CHECKING:
    from ..steps.steps import CompiledRegion, RegionStep, Slots

Fingerprint = Any
_SMALL, _MOST_COPIED = 1 << 16, 1 << 24
"""Maximum numbers of bytes of a tensor that is copied, and of all copies: copying is faster than hashing."""
_OTHER_VALUE, _PERIOD = 0.37, 97
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(values: Sequence[Any]) -> list[Fingerprint]:
    """Return a fingerprint of each tensor among ``values``. A write changes it, with near certainty."""
    return [each.clone() if is_whole else each for each, is_whole in _looked_at(values)]


def _looked_at(values: Sequence[Any]) -> Iterator[tuple[Fingerprint, bool]]:
    """Yield fingerprints, without copying: those of small tensors are the tensors themselves, as integers. Views of the
    same bytes share one: a loop saves its weights in each of its steps."""
    copied = 0
    known: dict[Hashable, torch.Tensor] = {}
    for value in values:
        if not isinstance(value, torch.Tensor) or not _has_bytes(value):
            yield None, False
            continue
        size = value.numel() * value.element_size()
        if size <= _SMALL and copied + size <= _MOST_COPIED:
            copied += size
            yield _fingerprint(value, is_whole=True), True
            continue
        bits = value.is_conj(), value.is_neg()
        view = value.data_ptr(), value.device, value.dtype, value.shape, value.stride(), bits
        if view not in known:
            known[view] = _fingerprint(value, is_whole=False)
        yield known[view], False


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and ir.is_plain(tensor) and not tensor.is_quantized and not tensor._is_zerotensor()


def _fingerprint(tensor: torch.Tensor, is_whole: bool) -> Fingerprint:
    tensor = tensor.detach()
    tensor = tensor._neg_view() if tensor.is_neg() else tensor  # the bits as they lie in memory
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    if is_whole:
        return tensor.view(_WHOLE[tensor.element_size()])
    if tensor.element_size() == 1:
        return torch.stack(_places(tensor.view(torch.uint8)))  # of so few values a hash would cancel
    if not tensor.is_floating_point():
        tensor = tensor.view(_WHOLE[tensor.element_size()])  # of those without a sign there is no hash
    hashed = torch.hash_tensor(tensor).view(torch.int64)
    numbers = tensor.view(_WHOLE[tensor.element_size()])
    return torch.stack([hashed, *_places(numbers)])  # the hash alone cancels where values are equal


def _places(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Sums of whole numbers in which each has a weight, by its place in the first dimension, and in the last."""
    sums = [numbers.sum(dim) if numbers.dim() > 1 else numbers for dim in (0, -1)]
    return [(each.flatten() * torch.arange(1, each.numel() + 1, device=each.device)).sum() for each in sums]


def written(before: Sequence[Fingerprint], values: Sequence[Any]) -> list[int]:
    """Return the indices of the values that have changed since their fingerprints were taken."""
    pairs = zip(before, _looked_at(values), strict=True)
    return [index for index, (old, (new, _)) in enumerate(pairs) if old is not None and not torch.equal(old, new)]


def twins(values: Sequence[Any], other: Sequence[int] = ()) -> list[Any]:
    """Copies of tensors that lie in memory as those do: in one piece where those share one, at the same offsets.

    Args:
        other: of which of them the copies hold other values. Whole numbers may be indices, so that 0 is the only other
            one: those that are 0 stay so, unless they take a byte.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    copies: list[Any] = []
    for value in values:
        if not isinstance(value, torch.Tensor) or not ir.is_plain(value) or value._is_zerotensor():
            copies.append(value)
            continue
        storage = value.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        own = storages[storage._cdata]
        twin = torch.empty(0, dtype=value.dtype, device=value.device)
        twin.set_(own, value.storage_offset(), value.shape, value.stride())
        if value.is_conj():
            twin = twin.conj()
        copies.append(twin._neg_view() if value.is_neg() else twin)
        if len(copies) - 1 in other:
            whole = torch.empty(0, dtype=value.dtype, device=value.device)
            _change(whole.set_(own, 0, (own.nbytes() // value.element_size(),), (1,)))
    return copies


def taken(compiled: CompiledRegion, slots: Slots) -> list[Any]:
    """Return the arguments of a region, as they lie in its slots."""
    return [slots[slot] for slot in compiled.arguments]


def copied(step: RegionStep, compiled: CompiledRegion, slots: Slots, other: Sequence[int] = ()) -> Slots:
    """Slots with copies of what a region takes; of the arguments ``other``, copies that hold other values."""
    places, slots_of_other = step.inputs, {compiled.arguments[index] for index in other}
    others = [at for at, slot in enumerate(places) if slot in slots_of_other]
    copies = list(slots)
    for slot, copy in zip(places, twins([slots[slot] for slot in places], others), strict=True):
        copies[slot] = copy
    return copies


@dataclass(frozen=True, slots=True)
class Apart:
    """If the real calls write into their arguments: copies of the original arguments, the arguments that the real calls
    ran on, and their results. The compiled code then runs on other copies."""

    given: Slots
    written: Slots
    wanted: Slots


def written_by(
    run: Callable[[Slots], object], step: RegionStep, compiled: CompiledRegion, slots: Slots, changed: Sequence[int]
) -> frozenset[int]:
    """Return the arguments that a function writes into. It runs on copies, until it returns or raises (but not for lack
    of memory).

    The first run has other values in the changed arguments, the second has the original ones: the function may write
    equal values, or accept no others.
    """
    found: frozenset[int] = frozenset()
    for other in (changed, ()):
        if not found.issuperset(changed):
            arguments = taken(compiled, copies := copied(step, compiled, slots, other))
            before = fingerprints(arguments)
            try:
                run(copies)
            except Exception as error:  # its writes until then are examined
                raise_what_a_handler_raised(error)
                if is_out_of_memory(error):
                    raise
            found |= {*written(before, arguments)}
    return found


def is_clean(before: Sequence[Fingerprint], compiled: CompiledRegion, slots: Slots) -> bool:
    """Return whether only those arguments changed that the real calls are known to write. False if that cannot be
    checked."""
    try:
        return compiled.proof.overwritten.issuperset(written(before, taken(compiled, slots)))
    except Exception as error:  # noqa: BLE001
        raise_what_a_handler_raised(error)
        return False


def put_back(compiled: CompiledRegion, slots: Slots, copies: Slots) -> None:
    """Give arguments that the real calls write into what lies in their :func:`twins`."""
    for slot in (compiled.arguments[index] for index in compiled.proof.overwritten):
        slots[slot].untyped_storage().copy_(copies[slot].untyped_storage())


def _change(tensor: torch.Tensor) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten()
    if not tensor.is_floating_point():
        tensor.copy_(tensor == 0) if tensor.element_size() == 1 else tensor.zero_()
        return
    tensor.fill_(_OTHER_VALUE)
    if tensor.element_size() > 1:  # not all the same: somebody may only have moved them
        steps = torch.arange(_PERIOD, dtype=tensor.dtype, device=tensor.device) / 100
        whole = tensor.numel() // _PERIOD * _PERIOD
        tensor[:whole].view(-1, _PERIOD).add_(steps)
        tensor[whole:].add_(steps[: tensor.numel() - whole])


_RANDOM = re.compile(
    "rand|seed|rng|bernoulli|dropout|normal|uniform|multinomial|exponential|geometric|cauchy|poisson|binomial"
)


def names_random(text: str) -> bool:
    """Return whether a text names operators that draw random numbers."""
    return _RANDOM.search(text) is not None


def may_draw(compiled: CompiledRegion) -> bool:
    """Return whether an operator of a region draws random numbers, by its name or its tag."""
    proof = compiled.proof
    if proof.draws is None:
        text = compiled.aten.functions()
        proof.draws = names_random(text) or is_seeded(text)
    return proof.draws


_OPERATOR = re.compile(r"\bops\.(\w+)\.(\w+)(?:\.(\w+))?")


def is_seeded(text: str) -> bool:
    """Return whether operators in the text of a graph draw random numbers. PyTorch's own operators have a tag that says
    so (``nondeterministic_seeded``). Others may lack the tag, so their names count too."""
    return any(_draws(*operator) for operator in set(_OPERATOR.findall(text)))


def _draws(namespace: str, name: str, overload: str) -> bool:
    if namespace not in ("aten", "prims"):
        if names_random(f"{namespace}.{name}"):
            return True
    elif name.endswith("_backward"):
        return False  # attention's have the tag, and are given what the forward drew from
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload or "default", None)
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


class Draws:
    """The states of the random generators that a region may draw from: the CPU's, and those of its devices.

    None for a region that draws nothing: then they are left alone, since other threads draw from them too.
    """

    def __init__(self, values: Iterable[Any] | None) -> None:
        self._generators: list[torch.Generator] = []
        if values is not None:
            devices = {value.device for value in values if isinstance(value, torch.Tensor)}
            indices = {device.index or 0 for device in devices if device.type == "cuda"}
            self._generators = [torch.default_generator, *(torch.cuda.default_generators[each] for each in indices)]
        self._states = [generator.get_state() for generator in self._generators]

    def restore(self) -> None:
        """Set them back to what they were, as often as this is called."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
