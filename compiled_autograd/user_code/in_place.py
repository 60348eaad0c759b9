"""Checks whether a saved tensor was changed in place since the handover, and raises the engine's error.

The rules and texts are those of ``SavedVariable::unpack`` (``torch/csrc/autograd/saved_variable.cpp``, 2.13);
``docs/internals/steps.md`` says when tensors are checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..torch_api import attributes

_Place = TypeVar("_Place", bound=Hashable)


def versions_of(places: Collection[_Place], values: Any) -> dict[_Place, int]:
    """Return the versions of tensors at some places; inference tensors have none."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return {place: attributes.version(values[place]) for place in places}
        except (TypeError, RuntimeError):  # there is one without
            return dict(_counted(places, values))


def _counted(places: Iterable[_Place], values: Any) -> Iterator[tuple[_Place, int]]:
    for place in places:
        if isinstance(values[place], torch.Tensor) and not attributes.is_inference(values[place]):
            yield place, attributes.version(values[place])


def all_versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the version of each tensor; 0 for inference tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return [*map(attributes.version, tensors)]
        except RuntimeError:
            return [0 if attributes.is_inference(each) else attributes.version(each) for each in tensors]


def changed(places: Iterable[_Place], values: Any, versions: Mapping[_Place, int]) -> bool:
    """Return whether a tensor at one of some places was changed since."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            attributes.version(values[place]) != version
            for place in places
            if (version := versions.get(place)) is not None
        )


def check(tensor: torch.Tensor, version: int, node: str = "") -> None:
    """Check that a saved tensor is unchanged.

    Args:
        node: the name of the node that saved it, if known: for its own output the error says which.

    Raises:
        RuntimeError: it was changed in place, in the engine's words.
    """
    with torch._C.DisableTorchFunctionSubclass():
        now = attributes.version(tensor)
        if now == version:
            return
        kind = f"[{tensor.type()} {list(attributes.shape(tensor))}]"
        made_by = attributes.grad_fn(tensor)
        origin = None if made_by is None else type(made_by).name(made_by)
        number = attributes.output_nr(tensor) if origin == node else 0
    raise RuntimeError(_in_the_engines_words(kind, origin, number, now, version))


def _in_the_engines_words(kind: str, origin: str | None, number: int, now: int, version: int) -> str:
    """Return the engine's error text, which differs between versions of PyTorch. So the engine is made to raise it for
    a tensor of ours."""
    words = _of_a_tensor_of_ours()
    match = re.search(r", which is output 0 of (\w+),", words)
    if origin is not None and match is not None:
        name = origin if match[1] == "TanhBackward0" else re.sub(r"Backward\d*$", "", origin)
        words = words.replace(match[0], f", which is output {number} of {name},")
    elif match is not None:
        words = words.replace(match[0], "")
    words = words.replace(f"[torch.FloatTensor [{_SIZE}]]", kind)
    return words.replace("is at version 1; expected version 0", f"is at version {now}; expected version {version}")


_SIZE = 7


def _of_a_tensor_of_ours() -> str:
    with torch.enable_grad():
        ours = torch.zeros(_SIZE, dtype=torch.float32, device="cpu", requires_grad=True).tanh()
    with torch.no_grad():
        ours.mul_(0)
    try:
        _ = ours.grad_fn._saved_result  # type: ignore[union-attr]
    except RuntimeError as error:
        return str(error)
    return _WORDS  # saved-tensor hooks of the user's are on, and nothing is looked at


_WORDS = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    f"[torch.FloatTensor [{_SIZE}]], which is output 0 of Tanh, is at version 1; expected version 0 instead."
)


@dataclass(frozen=True, slots=True)
class Watched:
    """A saved tensor of a Python function, checked at each access by the function."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        check(self.tensor, self.version)
        return self.tensor
