"""``traceable``: an ``autograd.Function`` or a hook whose author says that it may be traced instead of called.

Its dependencies are read at each run (:meth:`Marked.described`), and are part of the state of a variant, or of the kind
of a region. Access to forbidden values raises during a trace. Then the function is called at each step, like any other.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from ..torch_api.input_buffers import NAMES, no_buffers
from ..torch_api.plain_values import is_plain, key
from .functions import TRACEABLE, checked
from .hooks import Grad
from .inlined import InlinedBackward, Marked
from .marked_code import Code, NotPlainError, asked_of_the_thread, refuse_more_than_computing
from .marked_copies import Copies, RefuseSideEffects
from .traced_hooks import mark_hook

F = TypeVar("F", bound=type[torch.autograd.Function] | Callable[..., Any])
_OWN = "_compiled_autograd"  # what begins so is ours
_OTHER = ("other", "no plain value")


def traceable(function: F) -> F:
    """Say that the ``backward`` of an ``autograd.Function``, or a hook, may be traced into the compiled code around it.

    What is compiled stands in for all later calls: the ``backward`` or the hook is then called no more. So it must
    compute its results with PyTorch's operators and do nothing else: no printing, no counting, no communication, no
    writing into what it is given. A ``backward`` computes them from its gradients, from ``ctx.saved_tensors``,
    ``ctx.needs_input_grad`` and plain attributes of ``ctx`` (numbers, strings, None, dtypes, devices, sequences and
    dictionaries of these) alone. Attributes of other kinds (tensors, modules) may be there, and may not be read. A hook
    (of ``Tensor.register_hook``, ``Node.register_prehook`` or ``Node.register_hook``) computes them from its gradients.
    Both may use plain values around them: of closures, of defaults, attributes of functions, and variables of their
    module; no attributes of other objects and of classes.

    Plain values that change are compiled for once each, also where users' code of the same backward changes them. What
    depends on new ones at each step, or cannot be traced, is called at each step, and a `Failure` says why. As all
    compiled code, what was traced is compared with the real calls at its first runs.

    Args:
        function: the class, whose subclasses are not marked; or the hook, a function of Python. Others that are
            registered as hooks are called, marked or not: those of ``register_post_accumulate_grad_hook`` and of
            modules, methods, and objects that can be called.

    Returns:
        The class or the function itself.

    Raises:
        TypeError: it is no subclass of ``torch.autograd.Function``, and no function.
    """
    if isinstance(function, types.FunctionType):
        mark_hook(function)
    elif isinstance(function, type) and issubclass(function, torch.autograd.Function):
        setattr(function, TRACEABLE, True)
    else:
        which = "a subclass of torch.autograd.Function, or a hook function"
        raise TypeError(f"traceable takes {which}, not {function!r}")
    return function


def traced_backward(ctx: Any) -> TracedBackward | None:
    """For the ``ctx`` of a function whose class was marked itself; None for others."""
    return TracedBackward() if TRACEABLE in type(ctx)._forward_cls.__dict__ else None


class TracedBackward(InlinedBackward, Marked):
    """The ``backward`` of a marked function, at one place of a tape: no two places are equal."""

    def __init__(self) -> None:
        super().__init__("traced_backward")

    def described(self, owner: Any) -> tuple[Any, Any, tuple[Any, ...]] | None:
        """See :func:`described`."""
        return described(owner)

    def trace(
        self,
        ctx: Any,
        saved: Sequence[Grad],
        expected: Sequence[bool],
        defined: Sequence[bool | torch.layout],
        *grads: Grad,
    ) -> list[Grad]:
        own_class = type(ctx)
        if any(grad is None and wanted for grad, wanted in zip(grads, defined, strict=True)):
            raise NotPlainError("traceable: one of its incoming gradients is undefined in this backward")
        backward = _backward_of(own_class._forward_cls)
        given = [each for each in (*saved, *grads) if each is not None]
        versions = [each._version for each in given]
        refuse_more_than_computing(backward)
        copies = Copies()
        with RefuseSideEffects():
            results = copies.of_function(backward)(_Context(ctx, saved, len(expected), copies), *grads)
        copies.refuse_changes()
        if versions != [each._version for each in given]:
            raise NotPlainError("traceable: the backward writes into its arguments")
        return checked(own_class.__name__, results, expected)


class _Context:
    """The ``ctx`` that a ``backward`` gets while it is traced."""

    __slots__ = ("_compiled_autograd_buffers", "_compiled_autograd_rest", "needs_input_grad", "saved_tensors")

    def __init__(self, ctx: Any, saved: Sequence[Grad], arguments: int, copies: Copies) -> None:
        plain = {name: copies.of(value) for name, value in _attributes(ctx) if is_plain(value)}
        others = {name: type(value).__name__ for name, value in _attributes(ctx) if name not in plain}
        buffers = functools.partial(no_buffers, ctx, arguments)
        values = (buffers, (type(ctx), others, plain), ctx.needs_input_grad, tuple(saved))
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        real_class, others, plain = self._compiled_autograd_rest
        if name in plain:
            return plain[name]
        if name in others:
            raise NotPlainError(f"traceable: the backward reads ctx.{name}, a {others[name]}, which is no plain value")
        if name in NAMES:
            return self._compiled_autograd_buffers()
        if name == "__dict__":
            raise NotPlainError("traceable: the backward reads all attributes of ctx")
        if hasattr(real_class, name):
            raise NotPlainError(f"traceable: the backward uses ctx.{name}")
        raise AttributeError(f"ctx.{name} is not there")

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotPlainError(f"traceable: the backward sets ctx.{name}")


def described(ctx: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the dependencies of a marked function's ``backward``, beside tensors. These are its code, with the plain
    values of closures and defaults and of the module's variables that it names; the inputs that need a gradient; the
    plain attributes of ``ctx``, and the names of the others; and the thread state that it may read from PyTorch."""
    attributes = sorted(_attributes(ctx), key=_name)
    parts = tuple([(name, key(value) if is_plain(value) else _OTHER) for name, value in attributes])
    code = Code(strictly=False).of(_backward_of(type(ctx)._forward_cls), 0)
    return code, (ctx.needs_input_grad, asked_of_the_thread()), parts


def _name(attribute: tuple[str, Any]) -> str:
    return attribute[0]


def _attributes(ctx: Any) -> Iterable[tuple[str, Any]]:
    return [(name, value) for name, value in tuple(ctx.__dict__.items()) if not name.startswith(_OWN)]


def _backward_of(function: Any) -> Callable[..., Any]:
    """Choose the method as ``BackwardCFunction.apply`` does (``torch/autograd/function.py``, 2.13)."""
    base = torch.autograd.Function
    return function.vjp if function.backward is base.backward else function.backward
