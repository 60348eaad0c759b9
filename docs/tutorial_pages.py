"""Pages of the tutorials, made of the programs in ``examples/`` and of what ``examples/README.md`` keeps of them.

The docstring of a program, those of its functions and classes, and its comments are prose; the rest is code between.
``examples/README.md`` keeps its output, and ``tests/test_as_users.py`` compares that with the current output.

    python docs/tutorial_pages.py hooks who_runs     run examples, and keep what they print now
    python docs/tutorial_pages.py --picture hooks    run an example, and keep its picture in docs/tutorials/
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))
PICTURES = Path(__file__).resolve().parent / "tutorials"
_KEPT = EXAMPLES / "README.md"
_TITLES = {
    "pinn": "A PINN",
    "train_llama": "Train a Llama both ways",
    "who_runs": "Who runs now?",
    "with_torch_compile": "With torch.compile",
}
_HEADING = re.compile(r"^# -{2,} (.+?) -{2,}$")
_ANY_NUMBER = re.compile(r"\d[\d.,]*")
_TAPES = ("custom_functions", "who_runs")
"""Examples whose picture is the tape of their first backward. The others show the times of their backwards."""
_DRAWN = "The picture shows one run on two busy CPU cores, another one than the text below."
_NOTE = "Times and ratios are those of one run on two CPU cores with other work beside it."


def title(name: str) -> str:
    """The title of an example's page."""
    return _TITLES.get(name) or name.replace("_", " ").capitalize()


def kept(name: str) -> tuple[str, str]:
    """Return the text of ``examples/README.md`` on an example, and its kept output; empty if nothing is kept."""
    text = _KEPT.read_text()
    found = re.search(rf"^## \[`{name}\.py`\].*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    said, _, printed = (found[1] if found else "").partition("\n```\n")
    return said.strip(), printed.partition("\n```")[0]


def is_as_kept(name: str, printed: str) -> bool:
    """Return whether an example's output equals the kept one up to the first number of each line. Without kept output,
    True. Lines that begin in the same way may be more or fewer."""
    return not kept(name)[1] or _beginnings(kept(name)[1]) == _beginnings(printed)


def _beginnings(printed: str) -> list[str]:
    named = printed.replace("UnsafeViewBackward", "ViewBackward")  # since 2.15, for some of them
    found = [_ANY_NUMBER.split(line)[0].rstrip() for line in named.splitlines() if line.strip()]
    return [each for at, each in enumerate(found) if at == 0 or each != found[at - 1]]


def page(name: str) -> str:
    """The page of an example, in Markdown."""
    text = (EXAMPLES / f"{name}.py").read_text()
    module = ast.parse(text)
    prose, command = _without_command(ast.get_docstring(module) or "")
    parts = [
        f"# {title(name)}",
        prose,
        f"```sh\n{command or f'python examples/{name}.py'}\n```",
        _picture(name),
        *_parts(module, text),
    ]
    printed = kept(name)[1]
    if printed:
        parts += ["## What it prints", _NOTE, f"````text\n{printed}\n````"]
    return "\n\n".join(filter(None, parts)) + "\n"


def _picture(name: str) -> str:
    """The kept picture of an example, in Markdown; empty where there is none."""
    drawing, tape = PICTURES / f"{name}.svg", PICTURES / f"{name}.mmd"
    if tape.exists():
        return f"The tape of the first backward:\n\n```mermaid\n{tape.read_text()}```"
    if not drawing.exists():
        return ""
    says = re.search("<title>(.*?)</title>", drawing.read_text(), re.DOTALL)
    return f"![{unescape(says[1]) if says else title(name)}](../tutorials/{drawing.name})\n\n{_DRAWN}"


def _without_command(said: str) -> tuple[str, str]:
    """A docstring in two: its prose, and the lines of the command that runs the program."""
    command = [line.strip() for line in said.splitlines() if line.startswith("    python ")]
    rest = "\n".join(line for line in said.splitlines() if not line.startswith("    python "))
    return rest.strip(), "\n".join(command)


def _parts(module: ast.Module, text: str) -> Iterator[str]:
    """Prose and code in turn."""
    lines = text.splitlines()
    at = module.body[0].end_lineno or 0 if ast.get_docstring(module) is not None else 0
    code: list[str] = []
    for statement in module.body[1 if at else 0 :]:
        decorators = getattr(statement, "decorator_list", [])
        begins = min([statement.lineno, *(each.lineno for each in decorators)]) - 1
        ends = statement.end_lineno or begins + 1
        prose = [*_comments(lines[at:begins]), *_docstring(statement)]
        if prose:
            yield _code(code)
            yield from prose
            code = []
        else:
            code += lines[at:begins]
        code += _without_docstring(statement, lines, begins, ends)
        at = ends
    yield _code([*code, *lines[at:]])


def _comments(lines: list[str]) -> Iterator[str]:
    """Comments before a statement: headings and paragraphs."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        heading = _HEADING.match(line)
        if line.startswith("# ") and not heading:
            paragraph.append(line[2:])
            continue
        if paragraph:
            yield "\n".join(paragraph)
            paragraph = []
        if heading:
            yield f"## {heading[1]}"


def _docstring(statement: ast.stmt) -> list[str]:
    if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return []
    said = ast.get_docstring(statement)
    return [f"**`{statement.name}`**: {said}"] if said and "\n    " not in said else []


def _without_docstring(statement: ast.stmt, lines: list[str], begins: int, ends: int) -> list[str]:
    if not _docstring(statement):
        return lines[begins:ends]
    assert isinstance(statement, ast.FunctionDef | ast.ClassDef)
    first = statement.body[0]
    rest = lines[first.end_lineno : ends]
    while rest and not rest[0].strip():
        rest = rest[1:]
    return [*lines[begins : first.lineno - 1], *(rest or lines[first.lineno - 1 : ends])]


def _code(lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return f"````python\n{text}\n````" if text.strip() else ""


def _keep(name: str) -> None:
    """Run an example, and have what it prints in ``examples/README.md``."""
    ran = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], stdout=subprocess.PIPE, text=True, check=True)
    before = kept(name)[1]
    text = _KEPT.read_text()
    assert before and text.count(before) == 1, f"{_KEPT} has no block of what {name} prints"
    _KEPT.write_text(text.replace(before, ran.stdout.rstrip("\n")))


def _keep_picture(name: str) -> None:
    """Run an example, and have its picture in ``docs/tutorials/``."""
    import tutorial_pictures

    example = EXAMPLES / f"{name}.py"
    if name in _TAPES:
        (PICTURES / f"{name}.mmd").write_text(tutorial_pictures.tape(example))
        return
    if name == "train_llama":
        drawn = tutorial_pictures.own_picture(example, "Loss, and milliseconds of each step, on eager and compiled.")
    else:
        drawn = tutorial_pictures.timeline(example, f"{title(name)}: the time of each backward")
    (PICTURES / f"{name}.svg").write_text(drawn)


if __name__ == "__main__":
    keep = _keep_picture if sys.argv[1:2] == ["--picture"] else _keep
    for each in sys.argv[1 + (keep is _keep_picture) :]:
        keep(each)
