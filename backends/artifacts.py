"""Compiled code as bytes: generated Python source with its dependencies, by name or by value.

An artifact is a line that names the format and the backend, a SHA-256, and one msgpack record. Nothing in it is a
pickle. Its source and its libraries are code, which loading runs: the caller of ``load`` has to trust the origin of the
bytes. The checksum here finds damage, not malice.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import pickle
import pkgutil
import types
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from .protocol import SOURCE, Backend, Compiled

_STABLE_MODULES = ("torch", "math", "operator", "_operator")
FORMAT = 3
"""Part of an artifact's first line; another number is another format."""
LINKED = "compiled_region"
"""The name of loaded code in its namespace."""


class ArtifactError(RuntimeError):
    """The bytes of an artifact cannot be used here, so the graph must be compiled again."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a stored artifact cannot be used: {what}; compile its graph again")


class CannotStoreError(Exception):
    """Compiled code cannot be put into bytes; the text has the reason. ``save`` returns None for it."""


class Launch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a kernel for CUDA is launched.

    Attributes:
        library: the SHA-256 of its binary.
        entry: its name there.
        shared: bytes of memory that a block shares.
        device: the index of the device that it was compiled for.
        capability: that device's.
        source: a function ``run``, which takes what generated code gives and hands on what the binary takes.
    """

    library: str
    entry: str
    shared: int
    device: int
    capability: str
    source: str


class Stored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of an artifact.

    Attributes:
        source: Python source, which is run in a namespace of its own.
        names: names in that namespace, and the places from which they are imported (``module:qualified.name``). One
            with a dot is an attribute of a plain namespace object.
        needs: dotted names in the source that must exist, such as those of operators.
        constants: tensors by name, as ``torch.save`` writes them; empty for none.
        kernels: names of compiled functions, the SHA-256 of the library that each is in, and its name there.
        launches: names of kernels for CUDA, and how each is launched.
        libraries: shared libraries and binaries for CUDA by SHA-256.
        aligned: the inputs that generated code assumes to begin at multiples of 16 bytes.
        replayed_on: the index of the CUDA device where it runs as CUDA graphs; None for none.
    """

    source: str
    names: dict[str, str]
    needs: list[str]
    constants: bytes = b""
    kernels: dict[str, tuple[str, str]] = {}
    launches: dict[str, Launch] = {}
    libraries: dict[str, bytes] = {}
    aligned: list[int] = []
    replayed_on: int | None = None


class ArtifactBackend(Backend):
    """A backend whose compiled code is kept as an artifact, as :class:`backends.protocol.Storing` has it."""

    def stored(self, compiled: Compiled) -> Stored:
        """Return the content of an artifact for the result of :meth:`compile`.

        Raises:
            CannotStoreError: it cannot be stored.
        """
        raise NotImplementedError

    def loaded(self, stored: Stored) -> Compiled:
        """Undo :meth:`stored`.

        Raises:
            ArtifactError: something that it needs is not here.
        """
        raise NotImplementedError

    def load(self, data: bytes) -> Compiled:
        """Run the code of an artifact. There is no graph then."""
        return self.loaded(from_bytes(data, self.name))

    def save(self, compiled: Compiled) -> bytes | None:
        """An artifact; None where something in it cannot be kept."""
        try:
            return to_bytes(self.stored(compiled), self.name)
        except CannotStoreError:
            return None

    def why_not_saved(self, compiled: Compiled) -> str | None:
        """Return why :meth:`save` returns None."""
        try:
            self.stored(compiled)
        except CannotStoreError as error:
            return str(error)
        return None


# ---- bytes -------------------------------------------------------------------------------------------------------


def to_bytes(stored: Stored, backend: str) -> bytes:
    """An artifact of the backend with this name."""
    body = msgspec.msgpack.encode(stored)
    return b"".join([_first_line(backend), hashlib.sha256(body).digest(), body])


def from_bytes(data: bytes, backend: str) -> Stored:
    """Undo :func:`to_bytes`.

    Raises:
        ArtifactError: the bytes are damaged, of another format, or another backend's.
    """
    line, _, rest = data[:200].partition(b"\n")
    expected = _first_line(backend)
    if line + b"\n" != expected:
        raise ArtifactError(f"it begins with {line[:60]!r}, not {expected[:-1]!r}" if rest else "it is no artifact")
    checksum, body = data[len(expected) :][:32], data[len(expected) + 32 :]
    if hashlib.sha256(body).digest() != checksum:
        raise ArtifactError(f"it is damaged: its {len(body)} bytes do not have their checksum")
    try:
        return msgspec.msgpack.decode(body, type=Stored)
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"it has no record that is known: {error}") from error


def _first_line(backend: str) -> bytes:
    return f"compiled region, format {FORMAT}, backend {backend}\n".encode()


# ---- names -------------------------------------------------------------------------------------------------------


def reference(name: str, value: Any) -> str:
    """Return the place from which ``value``, named ``name`` in the source, can be imported: a module of torch or
    Python.

    A name in a user's own module, such as ``__main__``, may be another function in another process.

    Raises:
        CannotStoreError: there is no such place.
    """
    if isinstance(value, types.ModuleType):
        return f"{value.__name__}:"
    own = getattr(value, "__name__", "")
    candidates = [
        f"torch:{own}",
        f"math:{name}",
        f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', own)}",
        f"torch:ops.{str(value).replace('::', '.')}",  # an operator, or all its overloads
    ]
    for candidate in candidates:
        if candidate.partition(":")[0].partition(".")[0] not in _STABLE_MODULES:
            continue
        try:
            if resolve(candidate) is value:
                return candidate
        except ArtifactError:
            continue
    raise CannotStoreError(f"its code uses {name} = {value!r}, which neither torch nor Python has under a name")


def resolve(text: str) -> Any:
    """Return the object that :func:`reference` named.

    Raises:
        ArtifactError: it is not there.
    """
    try:
        return pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the text is no name
        raise ArtifactError(f"it needs {text}, which is not here ({error})") from error


def names_in(tree: ast.AST) -> set[str]:
    """The names in code, without what follows a dot."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def dotted_names(trees: Iterable[ast.AST], roots: Iterable[str]) -> list[str]:
    """The longest attribute chains in the code (``torch.ops.aten.mm.default``) that begin with one of ``roots``."""
    known = set(roots)
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {node.value for node in attributes}
    texts = [ast.unparse(node) for node in attributes if node not in inner]
    chains = [text for text in texts if text.replace(".", "").isidentifier() and text.partition(".")[0] in known]
    return list(dict.fromkeys(chains))


# ---- tensors -----------------------------------------------------------------------------------------------------


def tensors_to_bytes(tensors: Mapping[str, Any]) -> bytes:
    """Constants, with their strides and whatever memory they share.

    Raises:
        CannotStoreError: one of them is no plain tensor with values.
    """
    for name, value in tensors.items():
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise CannotStoreError(f"its constant {name} is of type {type(value).__name__}, not a plain tensor")
    if not tensors:
        return b""
    buffer = io.BytesIO()
    torch.save({name: value.detach() for name, value in tensors.items()}, buffer)
    return buffer.getvalue()


def tensors_from_bytes(data: bytes) -> dict[str, torch.Tensor]:
    """Undo :func:`tensors_to_bytes`; other objects than tensors are refused.

    Raises:
        ArtifactError: they cannot be read here, as those for a device that is not there.
    """
    if not data:
        return {}
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise ArtifactError(f"its constants cannot be read ({error})") from error


# ---- running the source ------------------------------------------------------------------------------------------


def link(stored: Stored, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run the source in a new namespace that has ``given`` and whatever the artifact names.

    Raises:
        ArtifactError: something that it needs is not here, or the source cannot be run.
    """
    namespace: dict[str, Any] = {"__name__": LINKED, SOURCE: stored.source, **given}
    filename = f"<stored region {hashlib.sha256(stored.source.encode()).hexdigest()[:16]}>"
    try:
        for name, where in stored.names.items():
            owner, _, attribute = name.rpartition(".")
            if owner:
                setattr(namespace.setdefault(owner, types.SimpleNamespace()), attribute, resolve(where))
            else:
                namespace[name] = resolve(where)
        exec(compile(stored.source, filename, "exec"), namespace)
        for name in stored.needs:
            root, *parts = name.split(".")
            functools.reduce(getattr, parts, namespace[root])
    except ArtifactError:
        raise
    except Exception as error:
        raise ArtifactError(f"its code cannot be run here ({type(error).__name__}: {error})") from error
    return namespace
