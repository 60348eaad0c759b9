"""Figures in the documentation: each is written from a JSON file in ``docs/figures/`` that a benchmark has measured.

A page marks a figure by its file, model, runner and name, and a table by its file and name:

    the MLP takes <!-- =backward/mlp/ours-inductor/ratio -->0.19<!-- / --> of eager's

    python docs/figures.py                                       write every marked figure anew
    python docs/figures.py backward.json --commit 1234abc        take over a new measurement, and write them
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.ordinary import figures as ordinary  # noqa: E402
from benchmarks.tables import number  # noqa: E402
from benchmarks.targets import MODELS, geometric_means, rows  # noqa: E402

MEASURED = ROOT / "docs" / "figures"
PAGES = ("README.md", "docs/*.md", "docs/decisions/*.md", "docs/internals/*.md")
_MARK = re.compile(r"<!-- =(?P<name>[^>]+?) -->(?:(?!<!-- =).)*?<!-- / -->", re.DOTALL)
_COLUMNS = (
    ("first backward s", "first_backward_seconds", ".1f", 1),
    ("eager ms", "beside_ms", ".1f", 1),
    ("runner ms", "runner_ms", ".1f", 1),
    ("ratio", "ratio", ".2f", 1),
    ("`here`", "ratio_here", ".2f", 1),
    ("floor", "floor", ".2f", 1),
    ("hit ms", "hit_ms", ".2f", 1),
    ("hit us/node", "hit_us_per_node", ".1f", 1),
    ("by static's", "hit_to_reference", ".2f", 1),
    ("allocated MB, eager", "eager_allocated_bytes", ".2f", 1e-6),
    ("allocated MB", "runner_allocated_bytes", ".2f", 1e-6),
    ("gradients", "gradient_difference", ".0e", 1),
)


def measured(name: str) -> dict[str, Any]:
    """The measurement ``docs/figures/NAME.json``: its results, and on what they were measured."""
    found: dict[str, Any] = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def figure(name: str) -> str:
    """The text of a mark: a figure, a table between line breaks, or what a measurement was made with.

    Raises:
        FileNotFoundError, KeyError, ValueError: no measurement has it.
    """
    file, *rest = name.split("/")
    content = measured(file)
    if len(rest) == 1:
        return f"\n\n{_TABLES[rest[0]](content)}\n"
    model, runner, column = rest
    matching = [each for each in content["results"] if (each["model"], each["runner"]) == (model, runner)]
    if not matching or column not in matching[0]:
        raise ValueError(f"docs/figures/{file}.json has no figure {name!r}: measure it, or change the mark")
    return number(matching[0], column, ".2f")


def _backward(content: dict[str, Any]) -> str:
    found = [result | row for result, row in zip(content["results"], rows(content["results"]), strict=True)]
    found.sort(key=lambda each: MODELS.index(each["model"]) if each["model"] in MODELS else len(MODELS))
    body = [[each["model"], each["runner"], *(number(each, *column[1:]) for column in _COLUMNS)] for each in found]
    return ordinary.as_markdown(["model", "runner", *(column[0] for column in _COLUMNS)], body)


def _means(content: dict[str, Any]) -> str:
    found = [each for each in rows(content["results"]) if each["model"] in MODELS]
    runners = list(dict.fromkeys(each["runner"] for each in found))
    means = [geometric_means(found, runner) for runner in runners]
    names = {
        "ratio": "ratio",
        "first backward by PyTorch's own": "first_to_reference",
        "empty hit by PyTorch's own": "hit_to_reference",
    }
    body = [[said, *(number(mean, name, ".2f") for mean in means)] for said, name in names.items()]
    return ordinary.as_markdown(["geometric mean of the five models", *(f"`{runner}`" for runner in runners)], body)


def _said(content: dict[str, Any]) -> str:
    on, by = content["environment"], content["measured"]
    torch = next(result["torch"] for result in content["results"] if "torch" in result)
    return f"Commit {by['commit']}, {by['machine']}, Python {on['python']}, torch {torch}:\n\n    {by['command']}\n"


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "said": _said,
    "table": _backward,
    "means": _means,
    "helps": lambda content: ordinary.as_markdown(*ordinary.helps(content["results"], content["options"]["steps"])),
}


def written(text: str) -> str:
    """The text of a page with every marked figure as it was measured."""
    return _MARK.sub(lambda found: f"<!-- ={found['name']} -->{figure(found['name'])}<!-- / -->", text)


def pages() -> list[Path]:
    """The pages that may have marked figures."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def take_over(file: Path, commit: str, command: str, machine: str) -> None:
    """Keep a measurement without the single samples, as ``docs/figures/NAME.json``."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["measured"] = {"commit": commit, "command": command, "machine": machine}
    for result in content["results"]:
        for name in [name for name, value in result.items() if isinstance(value, list) or name == "rounds"]:
            del result[name]
    MEASURED.mkdir(exist_ok=True)
    (MEASURED / file.name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", nargs="?", type=Path, help="JSON file of a benchmark")
    for name in ("commit", "command", "machine"):
        parser.add_argument(f"--{name}", help=f"its {name}")
    args = parser.parse_args()
    if args.measurement:
        if not (args.commit and args.command and args.machine):
            parser.error("a measurement needs --commit, --command and --machine")
        take_over(args.measurement, args.commit, args.command, args.machine)
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := written(before)) != before:
            page.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{page.relative_to(ROOT)}: written anew\n")


if __name__ == "__main__":
    main()
