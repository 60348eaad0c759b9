"""Whether what lies in memory is read again, by the statements of generated code that follow."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence


def is_overwritten(names: Sequence[str], statements: Iterable[ast.stmt]) -> bool:
    """Whether the first thing that uses memory, whatever its name is by then, computes a product into it."""
    alive = set(names)
    for statement in statements:
        if not alive:
            return True
        if isinstance(statement, ast.Delete):
            alive.difference_update(map(_name, statement.targets))
            continue
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name) and len(statement.targets) == 1:
            target = _name(statement.targets[0])
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
    function = ast.unparse(statement.value.func)
    is_product = function in ("extern_kernels.mm", "extern_kernels.addmm")
    return out.id if is_product and isinstance(out, ast.Name) else None


def _name(target: ast.expr) -> str:
    """Of a name; for anything else a text that is no name."""
    return target.id if isinstance(target, ast.Name) else ast.unparse(target)
