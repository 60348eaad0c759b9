"""The engine's report of a backward, call by call, recorded as a tape graph.

The engine calls the methods of :class:`Capture` (the protocol of ``torch/csrc/dynamo/python_compiled_autograd.cpp``,
2.13; PyTorch's own user of it is ``torch/_dynamo/compiled_autograd.py``).

Nothing here raises into the engine but :meth:`Capture.set_node_origin` and :meth:`Capture.end_capture`
(``docs/internals/capture.md`` says why). Only Ctrl-C at the very beginning of a method cannot be postponed: stand-ins
stay in the tape, and :meth:`Capture.spoil` ensures that they are never used as saved tensors.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _pop_mode, _push_mode

from .. import ir
from ..diagnostics.bypass import OVER_BUDGET
from ..errors import CaptureRefusedError
from ..process_state import PROCESS
from ..shadow_cache import unsupported
from ..torch_api import attributes
from ..torch_api.op_registry import find_op, share_op
from ..torch_api.version_differences import reports_leaf
from ..user_code.aot import aot_backward
from ..user_code.functions import tell_packed_apart, wants_zeros
from ..user_code.split_gradients import UNBIND
from ..user_code.traceable import traced_backward
from . import symbols
from .grad_dtypes import edges_of
from .hook_reports import HookReports, as_captured
from .recording import Sum, keeps_failures
from .tape import Ends, does_not_run
from .zeros import RecordZeros, layout_of

OPS: dict[str, ir.OpaqueOp] = PROCESS.register({})
"""Every engine function that was bound so far; the engine binds each one once in a process."""

_MAX_EDGES = 2000
"""The engine keeps the length of a node's key in 16 bits (``CacheKey::key_size``), and an edge takes about 15 bytes of
it: above some 4,000 edges two different structures could be taken for one."""
_BUILT_IN = r"(torch::autograd::)?\w+?(Backward|BackwardAutogradNestedTensor)\d*|validate_outputs"


class Capture(HookReports):
    """One capture. Made by the engine through the factory that :mod:`compiled_autograd.engine.seam` sets.

    ``finish`` is called while the tape is still whole; it gives what the engine will keep for the structure and call at
    each hit. After ``until`` the capture is refused.
    """

    def __init__(
        self, finish: Callable[[ir.TapeGraph, Capture], tuple[Callable[..., Any], Any]], inputs_asked_for: Ends = ()
    ) -> None:
        super().__init__()
        self.finish = finish
        self._inputs_asked_for = inputs_asked_for
        self.inputs: list[ir.LiftedTensor] = []
        self.shapes: list[tuple[int, ...]] = []
        self.accumulates = True
        self.reporting = False
        self.began = time.perf_counter()
        self.until = math.inf  # by the same clock
        self._view: tuple[Any, ...] = ()
        self._mode: RecordZeros | None = None

    def so_far(self) -> tuple[str, str]:
        """Return the words for the node that the capture is at, and for its tape."""
        nodes = self.calls[1:]
        return f"capturing node {len(nodes)}", nodes[0].name if nodes else "a tape"

    # ---- what the engine calls -------------------------------------------------------------------------------------

    def begin_capture(
        self,
        inputs: list[torch.Tensor],
        sizes: Sequence[int],
        scalars: list[Any],
        origins: Any,
        accumulate_grad: bool,
        check_nans: bool,
    ) -> tuple[None, list[torch.Tensor], list[Any], list[Any]]:
        """The lifted tensors (real ones), sizes and scalars; gives back what stands for them during the capture."""
        self.accumulates = accumulate_grad
        stand_ins = []
        for index, tensor in enumerate(inputs):
            with torch._C.DisableTorchFunctionSubclass():
                if attributes.is_nested(tensor):
                    self.refuse("a nested tensor")
                self.inputs.append(described(index, tensor))
                self.shapes.append(tuple(attributes.shape(tensor)))
            stand_ins.append(self._stand_in(self._placeholder("input", index)))
        return (
            None,
            stand_ins,
            symbols.sym_ints("size", sizes, self.asked),
            symbols.sym_ints("scalar", scalars, self.asked),
        )

    def set_node_origin(self, name: str, index: int, function: Any) -> None:
        """The engine comes to node ``index`` of its walk: a safe point."""
        self._leave_mode()
        self.reporting = False
        self._raise_failure()
        if time.perf_counter() > self.until:
            raise CaptureRefusedError(OVER_BUDGET)
        if function is not None:
            self._refuse_if_freed(function)
        self.calls.append(ir.TapeCall(index, name.rpartition("::")[2]))
        self.reporting = True
        if function is not None:
            # Before it reports a Python function, the engine makes zeros for undefined gradients.
            self._mode = RecordZeros(self)
            self._refill(64)
            _push_mode(self._mode)

    def bind_function(self, name: str, function: Callable[..., Any], is_custom: bool, traceable: bool) -> str:
        """The engine hands over the function of a kind of node, once in a process: also when we have given up."""
        known = name
        try:
            if not is_custom:  # first: after an interruption here, such tapes can still be captured
                OPS[name] = ir.OpaqueOp(name, function, traceable)
            known = share_op(name, function, is_custom, traceable)
            if is_custom:
                OPS[known] = ir.OpaqueOp(known, function, traceable, custom=True)
        except BaseException as error:  # noqa: BLE001  as in keeps_failures
            self.failure = self.failure or error
        return known

    @keeps_failures
    def apply_functional(
        self, name: str, grads: Sequence[Any], saved: Sequence[Any], metadata: Sequence[Any]
    ) -> list[torch.Tensor]:
        """A built-in node, or a C++ custom function: ``ops.<name>(grads, *saved)``, one gradient for each edge."""
        if self._partly_packed(saved, torch.Tensor):
            self.refuse(f"hooks on some of the tensors that {self.calls[-1].name} saved, and not on others")
        node = self._call(self._op(name), (list(grads), *saved))
        return self._results(node, len(metadata))

    @keeps_failures
    def validate_outputs(
        self, name: str, outputs: Sequence[Any], saved: Sequence[Any], metadata: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Record the reduction of gradients to the shape, and the cast to the dtype, that the next node expects, after
        each node."""
        if len(outputs) > _MAX_EDGES:
            raise CaptureRefusedError(unsupported(f"a node with more than {_MAX_EDGES} edges"))
        if not any(isinstance(output, torch.Tensor) for output in outputs):
            return list(outputs)
        node = self._call(self._op(name), (list(outputs), *saved))
        self._tell_size(node)
        return self._replaced(node, outputs)

    @keeps_failures
    def accumulate(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """A second edge brings a gradient to the same input of a node."""
        before = self._values.get(id(old))
        if isinstance(before, Sum):
            del self._values[id(old)]  # the engine keeps the new sum alone
        else:
            before = Sum([self._node(old)], 0)
        before.terms.append(self._node(new))
        before.call = self.calls[-1].index
        return self._stand_in(before)

    @reports_leaf
    @keeps_failures
    def accumulate_grad(
        self,
        variable: torch.Tensor,
        variable_grad: torch.Tensor | None,
        grad: torch.Tensor | None,
        has_post_hooks: bool,
    ) -> torch.Tensor:
        """Record the gradient of a leaf. The engine uses the result as the leaf's new ``.grad``."""
        if grad is not None:
            self._leaves.append(self._call(ir.accumulate_grad, (variable, variable_grad, grad)))
        return self._blank()

    @keeps_failures
    def proxy_call_backward(
        self,
        grads: Sequence[Any],
        metadata: Sequence[Any],
        saved: Sequence[Any],
        ctx_index: int,
        ctx: Any,
        state_index: int | None,
        opaque_indices: list[int],
    ) -> tuple[torch.Tensor | None, ...]:
        """A Python ``autograd.Function``: one gradient for each argument of its ``forward``."""
        if self._partly_packed(saved, object) and tell_packed_apart(ctx):
            self.refuse(f"{self.calls[-1].name} for this once, since hooks packed some of what it saved, and not all")
        expected = [meta is not None for meta in metadata]
        zeros = wants_zeros(ctx)
        defined = [grad is not None and zeros for grad in grads]
        arguments = (self._placeholder("object", ctx_index), list(saved), expected, defined, *grads)
        node = self._call(ir.call_backward, arguments)
        wanted = zip(defined, node.args[4:], strict=True)
        node.update_arg(3, [zeros_wanted and layout_of(grad) for zeros_wanted, grad in wanted])
        sources = [value for value in node.args[1] if isinstance(value, fx.Node)]  # type: ignore[union-attr]
        packed = [source for source in sources if source.target is ir.unpack_hook]
        for value in packed:
            value.target = ir.Packed  # the function unpacks it when it asks for it
        if not packed and state_index is None and not opaque_indices:
            node.target = aot_backward(ctx) or traced_backward(ctx) or ir.call_backward
        results = self._replaced(node, metadata)
        told = edges_of(ctx, metadata)
        if told is not None:
            node = self._call(self._op("validate_outputs"), (results, told))
            results = self._replaced(node, results)
        return tuple(results)

    @keeps_failures
    def call_copy_slices_prologue(self, *args: Any) -> list[torch.Tensor]:
        """The first half of a write into a view."""
        _, _, _, base_offset, sizes, strides, offset = args
        self._view = (sizes, strides, offset, base_offset)
        return self._results(self._call(ir.copy_slices_prologue, args), 3)

    @keeps_failures
    def call_copy_slices_epilogue(
        self, needs_input_grad: Sequence[bool], result: Any, inner: Sequence[Any], grad_slice: Any
    ) -> list[torch.Tensor]:
        """The second half of a write into a view."""
        node = self._call(ir.copy_slices_epilogue, (list(needs_input_grad), result, list(inner), *self._view))
        return self._results(node, len(needs_input_grad))

    def bind_backward_state(self, index: int) -> Any:
        self.refuse("a compiled forward's backward state")
        return object()

    def log_compile_reasons(self, reasons: list[str]) -> None:
        """The engine's own account of why it missed; ours is made from the structures."""

    def end_capture(self, outputs: Sequence[Any]) -> tuple[Callable[..., Any], Any]:
        """Finish the capture, once every node has reported: the last safe point before the engine releases saved
        tensors."""
        self._leave_mode()
        self.reporting = False
        self._raise_failure()
        if len(self.calls) == 1 and not any(isinstance(each, torch.Tensor) for each in outputs):
            # Eager calls the hooks of such an output where it is the only one (``evaluate_function``, of its first
            # node), and the engine does not report them.
            raise CaptureRefusedError(unsupported("no output leads to any of the inputs: there is nothing to compile"))
        self.graph.output([as_captured(each) for each in self._lift(list(outputs))])
        if self.asked:
            raise CaptureRefusedError(unsupported(f"a capture that depends on sizes: {self.asked[0]}"))
        return self.finish(ir.TapeGraph(self.graph, self.calls, self.inputs, self.accumulates, self.needs_engine), self)

    def close(self) -> None:
        """End the capture. After an error of its own the engine has restored the thread's modes itself."""
        self._leave_mode()

    # ---- recording -------------------------------------------------------------------------------------------------

    def _leave_mode(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None and torch._C._len_torch_dispatch_stack():  # no other is on while we capture
            _pop_mode()

    def _refuse_if_freed(self, function: Any) -> None:
        """Refuse a Python function that runs and whose saved tensors were freed. The engine would find that out after
        putting symbols in place of the node's sizes, with which eager cannot go on. Eager does not ask unless the
        function does (2.13, ``torch/csrc/autograd/python_function.cpp``). A function at which the walk ends does not
        run."""
        try:
            _ = function._raw_saved_tensors  # does not unpack them
        except RuntimeError as error:
            if does_not_run(function, self._inputs_asked_for):
                return
            what = f"RuntimeError: {str(error).partition('. ')[0][:120]}"
            raise CaptureRefusedError(unsupported(what), True) from error

    def _op(self, name: str) -> ir.OpaqueOp:
        op = OPS.get(name)
        if op is None:
            function = find_op(name)
            if function is None:
                raise CaptureRefusedError(unsupported(f"{name}, which the engine has handed to someone else"))
            op = OPS[name] = ir.OpaqueOp(name, function, custom=not re.fullmatch(_BUILT_IN, name))
        return op

    def _tell_size(self, validate: fx.Node) -> None:
        """Tell the size of what a forward cut to a function that must know it, and of which only its output says it."""
        outputs: Any = validate.args[0]
        node: Any = outputs[0].args[0] if isinstance(outputs[0], fx.Node) and outputs[0].args else None
        if node is None or getattr(node.target, "__name__", None) not in UNBIND:
            return
        metadata: Any = validate.args[1]
        size = metadata[0][1][node.args[2]]
        if not isinstance(size, fx.Node) or size.op == "placeholder":  # else it is worked out after this call
            node.args = (*node.args, size)


def described(index: int, tensor: torch.Tensor) -> ir.LiftedTensor:
    """Return the description of a lifted tensor in the structure."""
    kind = ""
    if type(tensor) not in ir.PLAIN_TENSORS:
        kind = type(tensor).__qualname__
    elif attributes.layout(tensor) is not torch.strided:
        kind = str(attributes.layout(tensor)).removeprefix("torch.")
    dtype = str(attributes.dtype(tensor)).removeprefix("torch.")
    return ir.LiftedTensor(index, dtype, str(attributes.device(tensor)), attributes.requires_grad(tensor), kind)
