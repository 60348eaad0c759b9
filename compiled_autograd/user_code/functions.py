"""Calls the ``backward`` of a Python ``autograd.Function`` with its real ``ctx``, after the engine released the tape.

During the call ``ctx`` has another class (``docs/internals/user_code.md``). Several threads may be in one function of a
kept graph at once, as under eager: so ``ctx`` has a list of its current calls.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ..process_state import PROCESS, free_in_child
from ..torch_api import attributes
from ..torch_api.grad_dtypes import grad_dtypes, grad_dtypes_after
from ..torch_api.input_buffers import BUFFERS, NAMES, no_buffers
from ..torch_api.references import COUNT_OF_UNSHARED, references
from .hooks import Grad, unpacked, with_requires_grad
from .in_place import Watched

TRACEABLE = "_compiled_autograd_traceable"
"""The attribute of a class that :func:`compiled_autograd.traceable` has marked."""
_CALLS = "_compiled_autograd_calls"  # of a ctx: the calls that it is in
_WITH_SAVED = "_compiled_autograd_class"  # of its class: that which it has meanwhile
_FIRST_NUMBER = 1 << 40  # far above those that PyTorch counts
_numbers: dict[tuple[Any, ...], int] = PROCESS.register({})
_partly_packed: set[tuple[Any, ...]] = PROCESS.register(set())
_MAX_PARTLY_PACKED = 1000  # a function that is forgotten is left to eager once more
_changing = free_in_child(threading.RLock())
"""Held while a ``ctx``'s class or its list of calls changes, and never while users' code runs."""


def number_of(ctx: Any) -> int:
    """Return a number of a function's name, for the class in the engine's key.

    PyTorch numbers the classes themselves, so a class made anew at each step would never give a hit. A capture needs
    only the name: each run gets the ``ctx``, with its class.
    """
    function = type(ctx)._forward_cls
    name: tuple[Any, ...] = (function.__module__, function.__qualname__)
    if TRACEABLE in function.__dict__:
        name += (TRACEABLE,)
    if _partly_packed and name in _partly_packed:
        name += (_which_are_packed(ctx),)
    return with_dtypes(name, ctx)


def with_dtypes(name: tuple[Any, ...], ctx: Any) -> int:
    """Return a number for the name of a function's class and for the dtypes that it wants its gradients to have, which
    the engine's key lacks.

    After a compiled forward's function the engine reports no casts, so the dtypes that are wanted of what it gives are
    part of the number: see :mod:`compiled_autograd.capture.grad_dtypes`.

    Raises:
        RuntimeError: see :func:`grad_dtypes`.
    """
    name = (*name, grad_dtypes(ctx))
    if getattr(type(ctx)._forward_cls, "_aot_id", None) is not None:
        name += grad_dtypes_after(ctx)
    return _numbers.setdefault(name, _FIRST_NUMBER + len(_numbers))


def forget_numbers() -> None:
    """Forget all numbers, since the engine's cache of keys was cleared."""
    _numbers.clear()
    if len(_partly_packed) > _MAX_PARTLY_PACKED:
        _partly_packed.clear()


def tell_packed_apart(ctx: Any) -> bool:
    """Have the engine's key say from now on which saved tensors of a function were packed by hooks; False if it already
    does.

    By itself the key says this only if all were packed or none: it has nothing of a packed tensor. The check costs more
    than a microsecond, so only functions with both kinds get it.
    """
    function = type(ctx)._forward_cls
    name = (function.__module__, function.__qualname__)
    known = name in _partly_packed
    _partly_packed.add(name)
    return not known


def _which_are_packed(ctx: Any) -> tuple[bool, ...]:
    try:
        return tuple([saved.unpack_hook is not None for saved in ctx._raw_saved_tensors])
    except RuntimeError:  # they were freed: nothing is captured of it
        return ()


@dataclass(frozen=True, slots=True)
class Packed:
    """A saved tensor that the user packed: unpacked each time the function asks for it, as the engine does."""

    hook: Callable[[Any], Any]
    packed: Any

    def unpack(self) -> torch.Tensor:
        """Call the user's hook."""
        return unpacked(self.hook, self.packed)


Saved = Grad | Packed | Watched


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a function's ``backward``: its thread, the class of the ``ctx``, the saved values."""

    thread: int
    own_class: Any
    saved: tuple[Saved, ...]
    arguments: int
    asked: bool = False


_ASKED_TWICE = (
    "saved_tensors can only be accessed once when clear_saved_tensors_on_access=True is set on the autograd.Function. "
    "Either access saved_tensors only once, or set clear_saved_tensors_on_access=False."
)


@functools.cache
def _place_of_flag() -> int | None:
    """At which byte of its memory a ``ctx`` keeps whether its function wants zeros; None where that does not show.

    It can be set from Python, and not be read (``THPFunction`` in ``torch/csrc/autograd/python_function.h``, 2.13): so
    it is set, and what changes is looked at.
    """
    ctx: Any = BackwardCFunction()
    seen = []
    for wanted in (True, False, True):
        ctx.materialize_grads = wanted
        seen.append(ctypes.string_at(id(ctx), BackwardCFunction.__basicsize__))
    changed = [place for place, (one, other) in enumerate(zip(seen[0], seen[1], strict=True)) if one != other]
    if seen[0] != seen[2] or len(changed) != 1 or (seen[0][changed[0]], seen[1][changed[0]]) != (1, 0):
        return None
    return changed[0]


def wants_zeros(ctx: Any) -> bool:
    """Return whether a function sees zeros for undefined gradients: not after ``ctx.set_materialize_grads(False)``.

    The engine's key has it, so it is the same for all tapes of a structure.

    Raises:
        RuntimeError: it is unknown.
    """
    place = _place_of_flag()
    if place is None:
        raise RuntimeError("where a function keeps whether it wants zeros for undefined gradients is not known")
    return ctypes.string_at(id(ctx) + place, 1) != b"\0"


_UNPACKED = (Packed, Watched)


def call_backward(
    ctx: Any, saved: Sequence[Saved], expected: Sequence[bool], defined: Sequence[bool | torch.layout], *grads: Grad
) -> list[Grad]:
    """Run a function's ``backward`` or ``vjp``.

    Args:
        ctx: the function's context, an instance of a subclass of ``torch.autograd.function.BackwardCFunction``.
        saved: its saved tensors; such as users' code may have changed in place are looked at when they are asked for.
        expected: for each argument of ``forward``, whether it was a tensor.
        defined: for each output of ``forward``, whether the function sees zeros if the gradient that the tape leads to
            it is undefined in this backward; their layout in place of True, where they are not strided.
        grads: for each output of ``forward``, its gradient, or None.

    Returns:
        For each argument of ``forward`` its gradient, or None.

    Raises:
        RuntimeError: another number of gradients than ``forward`` has arguments, or a gradient for an argument that
            was no tensor, in the words of ``PyNode::apply`` (``torch/csrc/autograd/python_function.cpp``).
    """
    call = _begin(ctx, saved, len(expected))
    own_class = call.own_class
    try:
        results = own_class.apply(ctx, *materialised(own_class, ctx, defined, grads))
    finally:
        _end(ctx, call)
    return checked(own_class.__name__, results, expected)


def _begin(ctx: Any, saved: Sequence[Saved], arguments: int) -> _Call:
    thread, attributes = threading.get_ident(), ctx.__dict__
    with _changing:
        calls = attributes.get(_CALLS)
        if calls:
            call = _Call(thread, calls[0].own_class, tuple(saved), arguments)
            calls.append(call)
        else:
            call = _Call(thread, type(ctx), tuple(saved), arguments)
            attributes[_CALLS] = [call]
            ctx.__class__ = _class_with_saved(call.own_class)
    return call


def _end(ctx: Any, call: _Call) -> None:
    with _changing:
        calls = ctx.__dict__[_CALLS]
        calls.remove(call)
        if not calls:
            ctx.__class__ = call.own_class
            del ctx.__dict__[_CALLS]


def materialised(own_class: Any, ctx: Any, defined: Sequence[bool | torch.layout], grads: Sequence[Grad]) -> list[Grad]:
    """Zeros for gradients that turned out undefined; those that the capture saw as undefined it has dealt with."""
    result = list(grads)
    for index, (grad, known) in enumerate(zip(grads, defined, strict=True)):
        if grad is None and known:
            metadata = own_class._input_metadata.__get__(ctx)[index]
            layout = torch.strided if known is True else known
            result[index] = torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device, layout=layout)
    return result


def _class_with_saved(own_class: Any) -> type:
    # Kept by the class itself: the two refer to each other, and go together, with all that a class of one step holds.
    made = own_class.__dict__.get(_WITH_SAVED)
    if made is None:
        body = {
            "saved_tensors": property(_saved),
            "saved_variables": property(_saved_deprecated),
            "maybe_clear_saved_tensors": _clear,
            "__slots__": (),
        }
        if NAMES:
            body[BUFFERS] = property(_buffers)
        made = type(own_class.__name__, (own_class,), body)
        setattr(own_class, _WITH_SAVED, made)
    return made


def _call_of(ctx: Any) -> _Call | None:
    """Return the call of the calling thread. In another thread of the user or of the engine, return any call: all have
    the same saved values. None after the last call."""
    calls = tuple(ctx.__dict__.get(_CALLS, ()))
    if len(calls) > 1:
        me = threading.get_ident()
        return next((call for call in reversed(calls) if call.thread == me), calls[-1])
    return calls[-1] if calls else None


def _saved(ctx: Any) -> tuple[Grad, ...]:
    call = _call_of(ctx)
    if call is None:
        return BackwardCFunction.saved_tensors.__get__(ctx)  # type: ignore[attr-defined]
    saved = call.saved
    if getattr(call.own_class._forward_cls, "clear_saved_tensors_on_access", False):
        if call.asked:
            raise RuntimeError(_ASKED_TWICE)
        call.asked, call.saved = True, ()
    values: list[Any] = [value.unpack() if isinstance(value, _UNPACKED) else value for value in saved]
    if not any(isinstance(value, Packed) for value in saved):
        return tuple(values)
    for index, required in enumerate(_required_grad(ctx, values)):
        packed = saved[index]
        if not isinstance(packed, Packed):
            continue
        of_somebody_else = packed.packed is not values[index] and references(values, index) > COUNT_OF_UNSHARED
        if not of_somebody_else:  # a user's tensor that is returned unchanged stays the same object
            values[index] = with_requires_grad(values[index], required)
    return tuple(values)


def _required_grad(ctx: Any, values: Sequence[Grad]) -> list[bool]:
    """Return, for each saved tensor, whether it required grad when it was saved. Users' hooks may have returned it
    without.

    The engine remembers this (``SavedVariable::unpack``, ``torch/csrc/autograd/saved_variable.cpp``) but does not
    report it. For a function that saved its arguments in their order, the edges say it. For another function, a tensor
    that looks like an argument or output that requires grad is assumed to be one. Reentrant checkpointing depends on
    it.
    """
    inputs = [None if node is None else node._input_metadata[index] for node, index in ctx.next_functions]
    if len(inputs) == len(values) and all(
        metadata is None or _looks_like(value, metadata) for value, metadata in zip(values, inputs, strict=True)
    ):
        return [metadata is not None for metadata in inputs]
    likely = [metadata for metadata in (*inputs, *ctx._input_metadata) if metadata is not None]
    return [any(_looks_like(value, metadata) for metadata in likely) for value in values]


def _looks_like(value: Grad, metadata: Any) -> bool:
    return (
        value is not None
        and attributes.dtype(value) == metadata.dtype
        and tuple(attributes.shape(value)) == tuple(metadata.shape)
    )


def _buffers(ctx: Any) -> tuple[torch.Tensor | None, ...]:
    """Return None for each argument. The engine answers a thread that is in no call of this ``ctx``."""
    me = threading.get_ident()
    call = next((call for call in tuple(ctx.__dict__.get(_CALLS, ())) if call.thread == me), None)
    if call is None:
        return getattr(BackwardCFunction, BUFFERS).__get__(ctx)
    return no_buffers(ctx, call.arguments)


def _saved_deprecated(ctx: Any) -> tuple[Grad, ...]:
    warnings.warn("'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning, stacklevel=2)
    return _saved(ctx)


def _clear(ctx: Any) -> None:
    """Release the saved values, as the engine does, unless the graph is kept."""
    call = _call_of(ctx)
    if call is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
        call.saved = ()


def checked(name: str, results: Any, expected: Sequence[bool]) -> list[Grad]:
    """Check a function's results as the engine does, and return them; :func:`call_backward` lists the errors."""
    grads = list(results) if isinstance(results, tuple) else [results]
    if len(grads) > len(expected) and all(grad is None for grad in grads[len(expected) :]):
        grads = grads[: len(expected)]
    if len(grads) != len(expected):
        raise RuntimeError(
            f"function {name} returned an incorrect number of gradients (expected {len(expected)}, got {len(grads)})"
        )
    for index, (grad, is_tensor) in enumerate(zip(grads, expected, strict=True)):
        if grad is not None and not is_tensor:
            raise RuntimeError(
                f"function {name} returned a gradient different than None at position {index + 1}, "
                "but the corresponding forward input was not a Variable"
            )
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(grad).__name__})")
    return grads
