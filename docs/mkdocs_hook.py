"""Pages of the site beside those of docs/: README, CONTRIBUTING, the changes, the license, and the tutorials.

Links are written for the repository, where GitHub follows them. Here they become links between pages. Links to files
that are no pages become links to the repository, at ``REPOSITORY_URL``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import tutorial_pages
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
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc):(?=<code>|`)")
_LIST_HERE = "<!-- the site puts the list of the examples here -->"
_BUTTONS = "<!-- the site makes these links buttons -->"
_repository = ""


def on_config(config: Any) -> Any:
    """Has the tutorials in the navigation."""
    global _repository
    _repository = config.repo_url or ""
    pages = [{tutorial_pages.title(name): f"examples/{name}.md"} for name in tutorial_pages.NAMES]
    config.nav = [
        {"Tutorials": [_TUTORIALS, *pages]} if entry == {"Tutorials": _TUTORIALS} else entry for entry in config.nav
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made of files outside of docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text() if (ROOT / source).exists() else ""
        if source == "LICENSE":
            text = _fenced(text, "text", "License")
        if page != _TUTORIALS:
            files.append(File.generated(config, page, content=text))
    for name in tutorial_pages.NAMES:
        files.append(File.generated(config, f"examples/{name}.md", content=tutorial_pages.page(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Has the list of the examples, and links to pages of the site."""
    uri = page.file.src_uri
    source = next((source for source, made in PAGES.items() if made == uri), f"docs/{uri}")
    if uri == _TUTORIALS:
        source, markdown = f"docs/{uri}", markdown.replace(_LIST_HERE, _list_of_examples())
    return _with_buttons(_linked(markdown, source, uri))


def _with_buttons(markdown: str) -> str:
    """Make buttons of the links in the line after the mark, the first one primary. A link that has no page is left out
    (the sources, without ``REPOSITORY_URL``)."""
    before, found, after = markdown.partition(f"{_BUTTONS}\n")
    line, end, rest = after.partition("\n")
    buttons = " ".join(f"{link[0]}{{ .md-button }}" for link in _LINK.finditer(line))
    return (
        f"{before}{buttons.replace('.md-button', '.md-button .md-button--primary', 1)}{end}{rest}" if found else before
    )


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles from docstrings, since they are Sphinx's."""
    return _ROLE.sub("", html)


def _linked(markdown: str, source: str, uri: str) -> str:
    """Links of the file ``source`` as links of the page ``uri``."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = _page_of(path)
        if page is None and (ROOT / path).exists():
            return f"{text}({_repository.rstrip('/')}/blob/HEAD/{path}{anchor})" if _repository else text[1:-1]
        if page is None:
            return found[0]
        return f"{text}({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(link, markdown)


def _page_of(path: str) -> str | None:
    """The page of the site that a file of the repository is; None where it is none."""
    folder, _, name = path.partition("/")
    if path in PAGES:
        return PAGES[path]
    if folder == "examples" and name.removesuffix(".py") in tutorial_pages.NAMES:
        return f"examples/{name[:-3]}.md"
    return name if folder == "docs" else None


def _list_of_examples() -> str:
    """A line for each example, in the order of ``examples/README.md``."""
    listed = re.findall(r"^## \[`(\w+)\.py`\]", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    rows = [f"- [{tutorial_pages.title(name)}](examples/{name}.md): {_in_a_line(name)}" for name in listed]
    return "\n".join(rows)


def _in_a_line(name: str) -> str:
    return " ".join(tutorial_pages.kept(name)[0].split())


def _fenced(text: str, language: str, title: str) -> str:
    """A file shown as it is, with the room that its lines need."""
    return f"---\nhide: [toc]\n---\n# {title}\n\n````{language}\n{text}\n````\n"
