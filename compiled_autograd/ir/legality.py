"""The legality table: arguments and results of each kind of call in a tape graph, and the check of a whole graph."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..errors import IllegalGraphError
from ..user_code.aot import AOTBackward
from ..user_code.functions import Packed, call_backward
from ..user_code.hooks import cpp_hook, post_accumulate_hook, post_hook, pre_hook, tensor_hook, unpack_hook
from ..user_code.inlined import InlinedBackward
from ..user_code.reducers import reducer_hooks
from ..user_code.traceable import TracedBackward
from ..user_code.traced_hooks import TracedHook
from .operations import (
    PLACEHOLDERS,
    OpaqueOp,
    accumulate_grad,
    check_nan,
    copy_slices_epilogue,
    copy_slices_prologue,
    sum_gradients,
    zeros,
)

ARITHMETIC = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod})
"""Functions that compute sizes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The arguments and the result that one kind of call may have. Kinds of values: see :func:`value_kind`."""

    takes: tuple[frozenset[str], ...]
    gives: str
    variadic: bool = False


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


_TENSOR = _kinds("tensor", "none")
_TENSORS = _kinds("list")
_SIZE = _kinds("size", "constant")
_ANYTHING = _kinds("tensor", "none", "size", "scalar", "constant", "list")

_FUNCTION = Rule((_kinds("object"), _TENSORS, _TENSORS, _TENSORS, _TENSOR), gives="list", variadic=True)

RULES: dict[Any, Rule] = {
    OpaqueOp: Rule((_TENSORS, _ANYTHING), gives="list", variadic=True),
    sum_gradients: Rule((_TENSOR,), gives="tensor", variadic=True),
    accumulate_grad: Rule((_kinds("tensor"), _TENSOR, _TENSOR), gives="tensor"),
    AOTBackward: _FUNCTION,
    TracedBackward: _FUNCTION,
    call_backward: _FUNCTION,
    tensor_hook: Rule((_kinds("object"), _TENSOR), gives="tensor"),
    cpp_hook: Rule((_kinds("constant"), _TENSOR), gives="tensor"),
    pre_hook: Rule((_kinds("object"), _TENSORS), gives="list"),
    post_hook: Rule((_kinds("object"), _TENSORS, _TENSORS), gives="list"),
    post_accumulate_hook: Rule((_kinds("object"), _kinds("tensor")), gives="nothing"),
    reducer_hooks: Rule((_kinds("tensor"),), gives="nothing", variadic=True),
    Packed: Rule((_kinds("object"), _kinds("packed")), gives="packed"),
    unpack_hook: Rule((_kinds("object"), _kinds("packed")), gives="tensor"),
    copy_slices_prologue: Rule(
        (_TENSORS, _TENSORS, _TENSORS, _SIZE, _TENSORS, _TENSORS, _SIZE),
        gives="list",
    ),
    copy_slices_epilogue: Rule(
        (_TENSORS, _kinds("tensor"), _TENSORS, _TENSORS, _TENSORS, _SIZE, _SIZE),
        gives="list",
    ),
    check_nan: Rule((_TENSORS, _kinds("constant")), gives="nothing"),
    zeros: Rule((_TENSORS, _kinds("constant")), gives="tensor"),
    operator.getitem: Rule((_TENSORS, _kinds("constant")), gives="tensor"),
    **{function: Rule((_SIZE, _SIZE), gives="size") for function in ARITHMETIC},
}
"""The legality table: a rule for each kind of call."""


def rule_of(node: fx.Node) -> Rule | None:
    """The rule for a call; None where the vocabulary has no such call."""
    target = node.target.kind if isinstance(node.target, TracedHook) else node.target
    return RULES.get(type(target) if isinstance(target, (OpaqueOp, InlinedBackward)) else target)


def is_validation(call: fx.Node) -> bool:
    """Return whether a call fits the results of a node to the next nodes: to their shapes, dtypes and devices."""
    return isinstance(call.target, OpaqueOp) and "validate_outputs" in call.target.__name__


def value_kind(value: Any) -> str:
    """``tensor``, ``size``, ``scalar``, ``object``, ``packed``, ``list``, ``none``, ``nothing`` or ``constant``."""
    if isinstance(value, fx.Node):
        if value.op == "placeholder":
            kind = value.meta["lifted"].kind
            return "tensor" if kind == "input" else kind
        rule = rule_of(value)
        return rule.gives if rule is not None else "nothing"
    if value is None:
        return "none"
    return "list" if isinstance(value, (list, tuple)) else "constant"


def verify(graph: fx.Graph) -> None:
    """Check every call of a tape graph against :data:`RULES`.

    Raises:
        IllegalGraphError: naming the node, the argument, the kind found and the kinds allowed.
    """
    graph.lint()
    for node in graph.nodes:
        if node.op == "placeholder":
            lifted = node.meta.get("lifted")
            if lifted is None or lifted.kind not in PLACEHOLDERS:
                raise IllegalGraphError(f"placeholder {node.target!r} is none of {', '.join(PLACEHOLDERS)}")
        elif node.op == "call_function":
            _verify_call(node)
        elif node.op != "output":
            raise IllegalGraphError(f"{node.name}: a tape graph has no {node.op!r} nodes")


def _verify_call(node: fx.Node) -> None:
    rule = rule_of(node)
    if rule is None:
        raise IllegalGraphError(f"{node.name}: {node.target!r} is not in the vocabulary of the tape graph")
    if len(node.args) < len(rule.takes) - rule.variadic:
        raise IllegalGraphError(f"{node.name}: takes {len(rule.takes)} arguments, got {len(node.args)}")
    takes = itertools.chain(rule.takes, itertools.repeat(rule.takes[-1] if rule.variadic else frozenset()))
    for position, (argument, allowed) in enumerate(zip(node.args, takes, strict=False)):
        found = value_kind(argument)
        if found not in allowed:
            wanted = " or ".join(sorted(allowed)) or "nothing"
            raise IllegalGraphError(f"{node.name}: argument {position} is a {found} ({argument}), allowed: {wanted}")
    if "call" not in node.meta:
        raise IllegalGraphError(f"{node.name}: does not say which node of the tape it belongs to (meta['call'])")
