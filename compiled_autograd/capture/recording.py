"""The tape graph under construction, and stand-ins: empty tensors that the engine gets for the graph's values. An
argument of a later report that is a stand-in is recognised by identity.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..errors import CaptureRefusedError
from ..shadow_cache import unsupported
from ..torch_api.fx_graph import Graph
from . import symbols

_STAND_INS_AT_ONCE = 512
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(slots=True)
class Sum:
    """A sum of gradients that nothing has used so far. A call for each term that comes, with all terms before it, would
    take a time that grows with the square of their number.

    Attributes:
        terms: the gradients added so far.
        call: the index of the node of the tape that brought the last term.
    """

    terms: list[fx.Node]
    call: int


def keeps_failures(method: _Method) -> _Method:
    """Keep an exception for the next safe point, and give the engine the stand-ins that it waits for."""

    @functools.wraps(method)
    def wrapper(self: Recording, *args: Any, **kwargs: Any) -> Any:
        if self.failure is None:
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001  kept and raised at the next safe point, Ctrl-C too
                self.failure = error
        return self._blank_result(method.__name__, args)

    return wrapper  # type: ignore[return-value]


class Recording:
    """A tape graph that is being made.

    Attributes:
        graph: what was recorded so far.
        calls: the nodes of the tape that the engine came to, the one that is reporting last.
        asked: what the engine asked about the values of sizes and scalars; see :class:`symbols.Symbol`.
        failure: what went wrong, and is to be raised at the next safe point.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.calls: list[ir.TapeCall] = []
        self.asked: list[str] = []
        self.failure: BaseException | None = None
        self._placeholders: dict[ir.Lifted, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None
        self._values: dict[int, fx.Node | tuple[fx.Node, int] | Sum] = {}
        self._alive: list[torch.Tensor] = []
        self._spare: list[torch.Tensor] = []

    # ---- failures --------------------------------------------------------------------------------------------------

    def refuse(self, what: str) -> None:
        """Give up at the next safe point."""
        if self.failure is None:
            self.failure = CaptureRefusedError(unsupported(what))

    def _raise_failure(self) -> None:
        if self.failure is None:
            return
        if isinstance(self.failure, CaptureRefusedError) or not isinstance(self.failure, Exception):
            raise self.failure
        raise_what_a_handler_raised(self.failure)
        what = f"capture failed: {type(self.failure).__name__}: {self.failure}"
        raise CaptureRefusedError(unsupported(what)) from self.failure

    def _blank_result(self, method: str, args: Sequence[Any]) -> Any:
        """After a failure: blank stand-ins in the number that the engine expects of ``method``."""
        if method in ("tensor_pre_hook", "cpp_tensor_pre_hook", "pre_hook", "post_hook", "post_acc_grad_hook"):
            return list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
        if method in ("accumulate", "accumulate_grad", "record_zeros", "unpack_hook"):
            return self._blank()
        if method == "proxy_call_backward":  # a tuple, and None for what was no tensor: the engine insists on both
            return tuple(None if each is None else self._blank() for each in args[1])
        counted = {"apply_functional": 3, "validate_outputs": 1, "call_copy_slices_epilogue": 0}
        count = len(args[counted[method]]) if method in counted else 3
        return [self._blank() for _ in range(count)]

    def spoil(self) -> None:
        """Mark the stand-ins as changed in place, so that unpacking one raises. A report that ends within a
        node may leave some in the tape."""
        torch.autograd.graph.increment_version(self._alive)

    # ---- nodes and stand-ins ---------------------------------------------------------------------------------------

    def _call(self, target: Any, args: Sequence[Any]) -> fx.Node:
        return self._called(target, tuple(self._lift(list(args))), self.calls[-1].index)

    def _called(self, target: Any, arguments: tuple[Any, ...], call: int) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        node.meta["call"] = call
        return node

    @keeps_failures
    def record_zeros(self, size: Sequence[Any], options: dict[str, Any]) -> torch.Tensor:
        """Zeros that the engine makes for an undefined gradient of a Python function."""
        return self._stand_in(self._call(ir.zeros, (list(size), options)))

    def _results(self, node: fx.Node, count: int) -> list[torch.Tensor]:
        return [self._stand_in((node, index)) for index in range(count)]

    def _refill(self, count: int) -> None:
        with _disable_current_modes():
            self._spare.extend(torch.empty(count).unbind(0))

    def _blank(self) -> torch.Tensor:
        if not self._spare:
            self._refill(_STAND_INS_AT_ONCE)
        stand_in = self._spare.pop()
        self._alive.append(stand_in)
        return stand_in

    def _stand_in(self, value: fx.Node | tuple[fx.Node, int] | Sum) -> torch.Tensor:
        stand_in = self._blank()
        self._values[id(stand_in)] = value
        return stand_in

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        value = self._values.get(id(tensor))
        if value is None:
            raise CaptureRefusedError(unsupported(f"a tensor that {self.calls[-1].name} keeps for itself"))
        if isinstance(value, tuple):
            value = self._values[id(tensor)] = self._item(*value)
        elif isinstance(value, Sum):
            value = self._values[id(tensor)] = self._called(ir.sum_gradients, tuple(value.terms), value.call)
        return value

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        with self.graph.inserting_after(node):
            return self._called(operator.getitem, (node, index), node.meta["call"])

    def _placeholder(self, kind: str, index: int) -> fx.Node:
        lifted = ir.Lifted(kind, index)
        node = self._placeholders.get(lifted)
        if node is None:
            last = self._last_placeholder
            with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
                name = str(lifted)
                node = self.graph.create_node("placeholder", name, name=name)  # else it is searched for a name for it
            node.meta["lifted"] = lifted
            self._placeholders[lifted] = self._last_placeholder = node
        return node

    def _symbol(self, symbol: symbols.Symbol) -> Any:
        kind, *parts = symbol.origin
        if kind == "constant":
            return parts[0]
        if kind in ir.PLACEHOLDERS:
            return self._placeholder(kind, parts[0])
        return self._call(kind, [self._symbol(part) for part in parts])

    def _lift(self, value: Any) -> Any:
        """An argument as the engine gives it -> as the graph has it."""
        if isinstance(value, torch.Tensor):
            return self._node(value)
        if isinstance(value, (list, tuple)):
            return [self._lift(each) for each in value]
        symbol = symbols.symbol_of(value)
        return value if symbol is None else self._symbol(symbol)
