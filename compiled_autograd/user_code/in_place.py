"""Whether a saved tensor was changed in place since the engine handed it over, and what the engine says of it.

A node looks at the versions of what it saved when it is about to run. The engine has done so for us at the handover,
for all nodes at once; where users' code runs in the middle of the backward, we do it again. The rules and the words are
those of ``SavedVariable::unpack`` (``torch/csrc/autograd/saved_variable.cpp``, 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

_Place = TypeVar("_Place", bound=Hashable)


def version_of(value: Any) -> int | None:
    """How often a tensor was changed in place; None where that is not counted: for an inference tensor, or none."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version


def versions_of(places: Collection[_Place], values: Any) -> dict[_Place, int]:
    """The versions of what lies at some places, as far as they are counted."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return {place: values[place]._version for place in places}
        except (AttributeError, RuntimeError):  # there is one without
            found = {place: version_of(values[place]) for place in places}
            return {place: version for place, version in found.items() if version is not None}


def changed(places: Iterable[_Place], values: Any, versions: Mapping[_Place, int]) -> bool:
    """Whether a tensor at one of some places was changed since."""
    with torch._C.DisableTorchFunctionSubclass():
        for place in places:
            version = versions.get(place)
            if version is not None and values[place]._version != version:
                return True
    return False


def check(tensor: torch.Tensor, version: int, node: str = "") -> None:
    """See that a saved tensor is as it was.

    Args:
        node: the name of the node that saved it, where that is known: of its own output it says which.

    Raises:
        RuntimeError: it was changed in place, in the engine's words.
    """
    with torch._C.DisableTorchFunctionSubclass():
        now = tensor._version
        if now == version:
            return
        kind = f"[{tensor.type()} {list(tensor.shape)}]"
        origin = None if tensor.grad_fn is None else tensor.grad_fn.name()
        number = tensor.output_nr if origin == node else 0
    raise RuntimeError(_in_the_engines_words(kind, origin, number, now, version))


def _in_the_engines_words(kind: str, origin: str | None, number: int, now: int, version: int) -> str:
    """Its words differ between versions of PyTorch: so it is brought to say them of a tensor of ours."""
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
    """A saved tensor of a Python function, which is looked at each time the function asks for it."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        check(self.tensor, self.version)
        return self.tensor
