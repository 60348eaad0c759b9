"""What the site has beside the pages of docs/: README, CONTRIBUTING, the changes, the license, and the examples.

Links are written as they hold in the repository, where GitHub follows them. Here they are made links between pages.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
_TUTORIALS = "tutorials.md"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "examples/README.md": _TUTORIALS,
}
"""Files outside of docs/, and the page that each is."""
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py"))
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc):(?=<code>|`)")
_LIST_HERE = "<!-- the site puts the list of the examples here -->"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made of files outside of docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text() if (ROOT / source).exists() else ""
        if source == "LICENSE":
            text = _fenced(text, "text", "License")
        if page != _TUTORIALS:
            files.append(File.generated(config, page, content=text))
    for name in EXAMPLES:
        text = (ROOT / "examples" / name).read_text()
        files.append(File.generated(config, f"examples/{name[:-3]}.md", content=_fenced(text, "python", name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Has the list of the examples, and links to pages of the site."""
    uri = page.file.src_uri
    source = next((source for source, made in PAGES.items() if made == uri), f"docs/{uri}")
    if uri == _TUTORIALS:
        source, markdown = f"docs/{uri}", markdown.replace(_LIST_HERE, _list_of_examples())
    return _linked(markdown, source, uri)


def on_page_content(html: str, **_: Any) -> str:
    """Takes the roles out of docstrings, which are Sphinx's."""
    return _ROLE.sub("", html)


def _linked(markdown: str, source: str, uri: str) -> str:
    """Links of the file ``source`` as links of the page ``uri``."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        page = _page_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if page is None:
            return found[0]
        return f"{text}({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(link, markdown)


def _page_of(path: str) -> str | None:
    """The page of the site that a file of the repository is; None where it is none."""
    folder, _, name = path.partition("/")
    if path in PAGES:
        return PAGES[path]
    if folder == "examples" and name in EXAMPLES:
        return f"examples/{name[:-3]}.md"
    return name if folder == "docs" else None


def _list_of_examples() -> str:
    """``examples/README.md`` without its title; a list of the files where there is none."""
    listed = ROOT / "examples" / "README.md"
    if listed.exists():
        return _linked(listed.read_text().partition("\n")[2], "examples/README.md", _TUTORIALS)
    rows = []
    for name in EXAMPLES:
        said = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())) or ""
        first = " ".join(said.partition("\n\n")[0].split())
        rows.append(f"- [{name}](examples/{name[:-3]}.md): {first}")
    return "\n".join(rows)


def _fenced(text: str, language: str, title: str) -> str:
    """A file shown as it is, with the room that its lines need."""
    return f"---\nhide: [toc]\n---\n# {title}\n\n````{language}\n{text}\n````\n"
