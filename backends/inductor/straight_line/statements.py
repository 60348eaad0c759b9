"""Statements of Inductor's generated code (torch 2.13), read to make a program of them."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
import types
from collections.abc import Iterable, Sequence
from typing import Any

from ...parsing import parsed


class UnknownCodeError(Exception):
    """Generated code has something that this file does not know; it runs as Python then."""


def body_of_call(source: str) -> list[ast.stmt]:
    """The statements of the function ``call``. Most of the code is kernels, and is not read.

    Raises:
        UnknownCodeError: there is not one such function.
    """
    found = list(re.finditer(r"^( *)def call\(.*\):\n", source, re.MULTILINE))
    if len(found) != 1:
        raise UnknownCodeError(f"it has {len(found)} functions named call")
    lines = source[found[0].start() :].splitlines()
    indented = f"{found[0][1]} "
    end = next((at for at, line in enumerate(lines) if at and line.strip() and not line.startswith(indented)), None)
    (function,) = parsed(textwrap.dedent("\n".join(lines[:end]))).body
    assert isinstance(function, ast.FunctionDef)
    return function.body


def name_of(target: ast.expr) -> str:
    """Return the name that a statement assigns or deletes.

    Raises:
        UnknownCodeError: it is no name.
    """
    if not isinstance(target, ast.Name):
        raise UnknownCodeError(f"it assigns to {ast.unparse(target)[:80]}")
    return target.id


@functools.lru_cache(maxsize=1024)
def compiled(text: str) -> types.CodeType:
    """An expression as code. Layers that are alike, and a program and its proof, have the same expressions."""
    return compile(text, "<generated code>", "eval")


def dotted(expression: ast.expr) -> str | None:
    """``extern_kernels.mm`` for just that; None for what is no name of a name."""
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        return f"{expression.value.id}.{expression.attr}"
    return None


def clears_arguments(expression: ast.expr) -> bool:
    """Return whether an expression is ``args.clear()``."""
    if not isinstance(expression, ast.Call) or expression.args or expression.keywords:
        return False
    return dotted(expression.func) == "args.clear"


def arguments_of(expression: ast.expr, name: str) -> list[ast.expr] | None:
    """Return the arguments of a call of the function ``name``, without keywords; None for any other expression."""
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name) or expression.keywords:
        return None
    return expression.args if expression.func.id == name else None


def constants_of(expressions: Sequence[ast.expr]) -> list[Any] | None:
    """The values of expressions that are constants; None where one is none."""
    try:
        return [_constant(expression) for expression in expressions]
    except ValueError:
        return None


def _constant(expression: ast.expr) -> Any:
    """Evaluate as ``ast.literal_eval``, which is slow for the most common values: numbers, and tuples of them."""
    if type(expression) is ast.Constant:
        return expression.value
    if type(expression) is ast.Tuple and all(type(each) is ast.Constant for each in expression.elts):
        return tuple([each.value for each in expression.elts])  # type: ignore[attr-defined]
    return ast.literal_eval(expression)


def is_overwritten(names: Sequence[str], statements: Iterable[ast.stmt]) -> bool:
    """Return whether the first use of memory, under any name, computes a product into it."""
    alive = set(names)
    for statement in statements:
        if not alive:
            return True
        if isinstance(statement, ast.Delete):
            alive.difference_update(map(name_of, statement.targets))
            continue
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name) and len(statement.targets) == 1:
            target = name_of(statement.targets[0])
            if statement.value.id in alive:
                alive.add(target)
            else:  # the name stands for something else from here on
                alive.discard(target)
            continue
        used = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id in alive]
        if used:
            return len(used) == 1 and _product_into(statement) == used[0]
    return True


def _product_into(statement: ast.stmt) -> str | None:
    """The name of what a product is computed into; None for other statements."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    out = {keyword.arg: keyword.value for keyword in statement.value.keywords}.get("out")
    is_product = dotted(statement.value.func) in ("extern_kernels.mm", "extern_kernels.addmm")
    return out.id if is_product and isinstance(out, ast.Name) else None
