"""The Python code that Inductor generates around its kernels (torch 2.13), cut down to the parts that run a region: the
function ``call`` and the statements that it depends on."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from typing import Any

from ..artifacts import CannotStoreError, Launch, Stored, dotted_names, names_in, reference, tensors_to_bytes
from ..parsing import parsed
from .cuda.kernels import launch_of
from .kernels import KernelId, library_of

_ENTRY = "call"
_INDUCTORS = ("torch._inductor.hooks", "torch._inductor.utils", "torch._inductor.codegen.memory_planning")
"""Modules of Inductor that stored code may import: none of them compiles. (Code that needs none is the rule.)"""
_COMPILED = ("torch._C", "torch._C._dynamo.guards")
"""Modules in C++, which code for CUDA imports."""
_COMPILER = "async_compile"
_EXTERN = "extern_kernels"
"""Operators that are called as they are; most are functions of torch, each under its own name."""


def store(source: str, live: Mapping[str, Any], constants: Mapping[str, Any]) -> Stored:
    """Return the content of an artifact that runs generated code elsewhere.

    Args:
        source: all of Inductor's generated source.
        live: the namespace in which it has been run; its kernels are taken from there.
        constants: tensors that Inductor puts into that namespace.

    Raises:
        CannotStoreError: it needs something that can be neither imported nor copied.
    """
    bindings = _bindings(parsed(source))
    needed = _needed(bindings)
    kept: dict[int, ast.stmt] = {}
    made: dict[str, str] = {}
    for name in needed:
        statement = bindings[name]
        made_by = _made_by(statement)
        if name in constants or name == _EXTERN:
            continue
        if made_by is None:
            _check_import(statement)
            kept[statement.lineno] = statement
        else:
            made[name] = made_by
    statements = [kept[line] for line in sorted(kept)]
    kernels: dict[str, KernelId] = {}
    launches: dict[str, Launch] = {}
    libraries: dict[str, bytes] = {}
    for name, made_by in sorted(made.items()):
        if made_by == "cpp_pybinding":
            library, entry = library_of(name, live.get(name))
            digest = hashlib.sha256(library).hexdigest()
            kernels[name] = digest, entry
        elif made_by == "triton":
            launches[name], library = launch_of(name, live.get(name), statements)
            digest = launches[name].library
        else:
            raise CannotStoreError(f"its kernel {name} was made by {made_by}, and such kernels are not stored")
        libraries[digest] = library
    externs = sorted({name.split(".")[1] for name in dotted_names(statements, [_EXTERN])})
    return Stored(
        source=_text(source, statements),
        names={f"{_EXTERN}.{name}": reference(name, getattr(live[_EXTERN], name)) for name in externs},
        needs=dotted_names(statements, needed - {_EXTERN}),
        constants=tensors_to_bytes(constants),
        kernels=kernels,
        launches=launches,
        libraries=libraries,
    )


def namespace_of(call: Any) -> dict[str, Any] | None:
    """Return the namespace of generated code whose entry is ``call``; None if ``call`` is wrapped, or is no generated
    code."""
    namespace = getattr(getattr(call, "__func__", call), "__globals__", {})
    return namespace if namespace.get(_ENTRY) == call else None


def _bindings(tree: ast.Module) -> dict[str, ast.stmt]:
    """Names that the module's own statements bind, and the statement of each."""
    found: dict[str, ast.stmt] = {}
    for statement in tree.body:
        names: list[str] = []
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names = [statement.name]
        elif isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        if not names and not _is_idle(statement):
            raise CannotStoreError(f"its code has a statement that is not known: {ast.unparse(statement)[:80]}")
        for name in names:
            if ast.dump(found.get(name, statement)) != ast.dump(statement):
                raise CannotStoreError(f"its code binds {name} twice: {ast.unparse(statement)[:80]}")
            found[name] = statement
    return found


def _is_idle(statement: ast.stmt) -> bool:
    """Waiting for the compiler, comments, and what only a script does."""
    if isinstance(statement, ast.If):
        return "__name__" in names_in(statement.test)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    return isinstance(statement, (ast.Delete, ast.Expr)) and _COMPILER in names_in(statement)


def _needed(bindings: Mapping[str, ast.stmt]) -> set[str]:
    """The entry, what its code names, and so on."""
    if _ENTRY not in bindings:
        raise CannotStoreError(f"its code has no function {_ENTRY}")
    needed = {_ENTRY}
    waiting = [_ENTRY]
    while waiting:
        statement = bindings[waiting.pop()]
        if _made_by(statement) is not None:
            continue
        new = (names_in(statement) & bindings.keys()) - needed
        needed |= new
        waiting.extend(new)
    return needed


def _check_import(statement: ast.stmt) -> None:
    """A wrapper in C++ (``cpp_wrapper``) asks ``codecache`` for its library; other devices have other such modules."""
    if isinstance(statement, ast.ImportFrom):
        modules = [statement.module or "."]
    else:
        modules = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
    for module in modules:
        if module not in (*_INDUCTORS, *_COMPILED, "torch", "math", "cmath", "random", "os", "tempfile", "ctypes"):
            raise CannotStoreError(f"its code imports {module}, which may compile when it is run")


def _made_by(statement: ast.stmt) -> str | None:
    """The method of Inductor's compiler that makes what a statement binds; None where it is none of its making."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return function.attr if function.value.id == _COMPILER else None
    return None


def _text(source: str, statements: list[ast.stmt]) -> str:
    lines = source.splitlines()
    parts = []
    for statement in statements:
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
        parts.extend(lines[first - 1 : statement.end_lineno])
    return "\n".join([*parts, ""])
