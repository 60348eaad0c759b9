"""The documents and the tree say the same: private API of PyTorch, the files of each room, paths, links."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from .helpers import ROOT

_PACKAGES = ("compiled_autograd", "backends", "shadow_cache")
_CONTRIBUTING = ROOT / "CONTRIBUTING.md"
_INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
_DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
_PAGES = sorted((ROOT / "docs").rglob("*.md"))
_DOCUMENTS += [*_PAGES, *sorted((ROOT / "examples").glob("*.md"))]

_SPAN = re.compile(r"`([^`\n]+)`")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_PATH = re.compile(r"\.?[\w-]+(/[\w.-]+)*/?")
_SUFFIXES = (".py", ".md", ".svg", ".cpp", ".toml")
_MODULE = re.compile(r"torch(\.\w+)+")
_OF_LOCKS = ("_at_fork_reinit", "_is_owned")  # of ``threading``
_OF_PYTORCH = ("torch/", "test/", "nn/", "optim/", "distributed/")


def _by_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _prose(document: Path) -> str:
    return _FENCED.sub("", document.read_text())


# Private API of PyTorch


def _private(module: str) -> str | None:
    """The first part of a dotted name of torch that is private, with all before it; None where no part is."""
    parts = module.split(".")
    for end, part in enumerate(parts, 1):
        if part.startswith("_") and not part.startswith("__"):
            # Of torch._C most is private, but each of its names is a thing of its own.
            return ".".join(parts[: end + 1] if part == "_C" else parts[:end])
    return None


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for, as a dotted name; ours begin with a dot."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                aliases[name.asname or name.name] = f"{'.' * node.level}{node.module or ''}.{name.name}"
    return aliases


def _dotted(node: ast.AST) -> tuple[ast.AST, list[str]]:
    """What an expression begins with, and the attributes that are taken of it."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return node, parts


def _names_of_torch(tree: ast.AST) -> Iterator[str]:
    """Dotted names that begin at torch: imported, reached through what was imported, or written as text."""
    aliases = _aliases(tree)
    yield from aliases.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.Attribute):
            base, parts = _dotted(node)
            if isinstance(base, ast.Name) and base.id in aliases:
                yield ".".join([aliases[base.id], *parts])


def _private_attributes(tree: ast.AST, own: Container[str]) -> Iterator[str]:
    """Private attributes of objects of others: of tensors, nodes of the tape, FX nodes."""
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base, _ = _dotted(node)
            is_imported = isinstance(base, ast.Name) and base.id in aliases
            if not is_imported and node.attr not in own and node.attr not in _OF_LOCKS:
                yield node.attr


def _private_names(source: str, own: Container[str] = ()) -> set[str]:
    """The private API of torch that a file uses.

    Args:
        own: private names that this project defines.
    """
    tree = ast.parse(source)
    names = {name for name in _names_of_torch(tree) if name.partition(".")[0] == "torch"}
    private = {found for name in names if (found := _private(name)) is not None} - {"torch._C"}
    return private | set(_private_attributes(tree, own))


def _own_names() -> set[str]:
    own: set[str] = set()
    for file in _sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                own.add(node.attr)
    return own


def _table() -> tuple[list[Path], set[str]]:
    """What the table in CONTRIBUTING names: files and folders; and the names that every file may use."""
    text = _CONTRIBUTING.read_text()
    rows = text[text.index("| file | what of PyTorch's own |") :].split("\n\n", 1)[0].splitlines()[2:]
    paths: list[Path] = []
    anywhere: set[str] = set()
    for row in rows:
        where, what = row.strip("|").split("|")
        if spans := _SPAN.findall(where):
            paths += [_resolved(span) or ROOT / span for span in spans]
        else:
            anywhere |= set(_SPAN.findall(what))
    return paths, anywhere


def _sources() -> list[Path]:
    return [file for package in _PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def test_the_table_of_private_api_names_what_exists() -> None:
    paths, _ = _table()
    assert paths
    assert [_by_name(path) for path in paths if not path.exists()] == []


def test_every_file_that_uses_private_api_is_in_the_table() -> None:
    paths, anywhere = _table()
    own = _own_names()
    missing = {
        _by_name(file): sorted(names)
        for file in _sources()
        if (names := _private_names(file.read_text(), own) - anywhere)
        and not any(path == file or path in file.parents for path in paths)
    }
    assert missing == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._inductor.config as config", {"torch._inductor"}),
        ("def late():\n    from torch._subclasses.fake_tensor import FakeTensor", {"torch._subclasses"}),
        ("import torch\ntorch._C._set_grad_enabled(True)", {"torch._C._set_grad_enabled"}),
        ("import torch\nfrom torch import fx\nfx._pytree.tree_flatten(())", {"torch.fx._pytree"}),
        ("from torch import _C\n_C._dynamo.compiled_autograd", {"torch._C._dynamo"}),
        ("import sys\nsys.modules.get('torch._dynamo.compiled_autograd')", {"torch._dynamo"}),
        ("def number(node):\n    return node._sequence_nr()", {"_sequence_nr"}),
        ("import sys\nimport torch\ntorch.add, sys._getframe, node._known\n'''torch._C is meant'''\n", set()),
    ],
)
def test_private_api_is_found(source: str, found: set[str]) -> None:
    assert _private_names(source, own={"_known"}) == found


# The rooms


def _room(page: Path) -> Path:
    """The folder that a page of docs/internals is about."""
    inside = ROOT / "compiled_autograd" / page.stem
    return inside if inside.is_dir() else ROOT / page.stem


def test_every_room_has_a_page() -> None:
    rooms = {file.parent.name for file in (ROOT / "compiled_autograd").glob("*/__init__.py")}
    assert {page.stem for page in _INTERNALS} == rooms | {"backends", "shadow_cache"}


@pytest.mark.parametrize("page", _INTERNALS, ids=lambda page: page.stem)
def test_the_page_of_a_room_lists_its_files(page: Path) -> None:
    room = _room(page)
    listed = re.findall(r"^\| `([^`]+)` \|", page.read_text(), re.MULTILINE)
    files = [file for suffix in ("*.py", "*.cpp") for file in room.rglob(suffix) if file.name != "__init__.py"]
    assert {name for name in listed if name.endswith((".py", ".cpp"))} >= {
        file.relative_to(room).as_posix() for file in files
    }


# Paths and links


def _resolved(span: str, document: Path | None = None) -> Path | None:
    """The file or folder that a code span names: from the root, from the main package, or from the page's room."""
    bases = [ROOT, ROOT / "compiled_autograd"]
    if document in _INTERNALS:
        bases.append(_room(document))
    return next((base / span for base in bases if (base / span).exists()), None)


def _paths(document: Path) -> Iterator[str]:
    """Code spans that look like a path of this repository: a file or a folder below one of its folders.

    Some are paths of PyTorch's own sources and tests. A name without a folder counts on the page of a room alone:
    elsewhere it may be anybody's.
    """
    for span in _SPAN.findall(_prose(document)):
        if _PATH.fullmatch(span) and not span.startswith(("/", *_OF_PYTORCH)):
            is_file = span.endswith(_SUFFIXES) and ("/" in span or document in _INTERNALS)
            if is_file or (span.endswith("/") and span.count("/") >= 1):
                yield span


@pytest.mark.parametrize("document", _DOCUMENTS, ids=_by_name)
def test_paths_in_documents_exist(document: Path) -> None:
    assert [path for path in _paths(document) if _resolved(path, document) is None] == []


def test_the_promises_name_what_exists() -> None:
    """Of each name in the table of promises, every part is written somewhere in the sources."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("## Promises") :]
    words = {word for file in _sources() for word in re.findall(r"\w+", file.read_text())} | {
        part for file in _sources() for part in file.relative_to(ROOT).with_suffix("").parts
    }
    names = [span for span in _SPAN.findall(table) if re.fullmatch(r"\w[\w.]*", span) and not span.endswith(_SUFFIXES)]
    assert names
    assert [name for name in names if not set(name.split(".")) <= words] == []


def _anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in _HEADING.findall(_prose(document))]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", _DOCUMENTS, ids=_by_name)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _LINK.findall(_prose(document)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


# The site


def _in_the_nav() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r"^ +- (?:.+: )?([\w/]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)


def test_every_page_is_in_the_nav_of_the_site_once() -> None:
    of_the_repository = ["index.md", "contributing.md", "changelog.md"]  # made by docs/mkdocs_hook.py
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in _PAGES]
    assert sorted(_in_the_nav()) == sorted(pages + of_the_repository)


@pytest.mark.parametrize("document", _DOCUMENTS, ids=_by_name)
def test_headings_of_a_page_have_anchors_of_their_own(document: Path) -> None:
    """GitHub and the site number anchors that come twice in different ways."""
    titles = _HEADING.findall(_prose(document))
    if document.name != "CHANGELOG.md":  # its form has "Added" for each version
        assert len(_anchors(document)) == len(titles)


def test_an_anchor_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n\n## `code` and, more\n\n```\n# no heading\n```\n")
    assert _anchors(page) == {"a-title", "code-and-more"}
