"""Draw the results that `benchmarks.backward --json` wrote: ratios with their floors, and first backwards.

    python -m benchmarks.picture results.json results.svg

The ending of the second file says what is written: .svg or .png. matplotlib draws, which is not needed to measure:
`pip install '.[benchmarks]'`. torch is not imported.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.targets import Result, rows

ENDINGS = (".svg", ".png")
# Told apart also by those who see few colours, and on grey paper.
COLOURS = {
    "eager": "#9a9a9a",
    "ours-eager": "#a6cee3",
    "ours-inductor": "#1f5fa8",
    "torch-ca-dynamic": "#f6c27a",
    "torch-ca-static": "#d9731a",
    "aot": "#6b4c9a",
}


class PictureError(Exception):
    """The picture cannot be drawn; the message says what to do."""


def check(file: Path) -> None:
    """Raises PictureError if `file` cannot become a picture here: to be asked before an hour of measuring."""
    if file.suffix.lower() not in ENDINGS:
        raise PictureError(f"{file}: a picture's name ends in {' or '.join(ENDINGS)}")
    if not file.absolute().parent.is_dir():
        raise PictureError(f"{file}: there is no folder {file.absolute().parent}")
    if not _has_matplotlib():
        raise PictureError(
            "matplotlib, which draws the picture, is not installed: pip install '.[benchmarks]', or "
            "write --json now and draw later with python -m benchmarks.picture"
        )


def read(file: Path) -> list[Result]:
    """The results in a JSON file of `benchmarks.backward`, also of one that was written while it still measured."""
    try:
        results = json.loads(file.read_text(encoding="utf-8"))["results"]
        cells = [(result["model"], result["runner"]) for result in results]
    except OSError as error:
        raise PictureError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PictureError(f"{file}: not a file that `python -m benchmarks.backward --json` wrote") from error
    if not cells:
        raise PictureError(f"{file}: it has no results")
    return results


def draw(results: list[Result], file: Path) -> None:
    """Write the picture of `results`; the same results give the same bytes of SVG.

    Raises PictureError if there is no matplotlib or the name ends in something else than .svg or .png.
    """
    check(file)
    import matplotlib
    from matplotlib.figure import Figure

    found = rows(results)
    models = list(dict.fromkeys(row["model"] for row in found))
    runners = list(dict.fromkeys(row["runner"] for row in found))
    # Text as text, so that the picture is small and can be searched; ids that do not change.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 9}):
        height = 1.6 + 0.22 * len(models) * (len(runners) + 1)
        # Of processes that compiled together there are no first backwards.
        has_first = any(row["first_backward_seconds"] is not None for row in found)
        figure = Figure(figsize=(11 if has_first else 8, height), layout="constrained")
        widths = (3, 2) if has_first else (1,)
        ratios, *first = figure.subplots(1, len(widths), sharey=True, width_ratios=widths, squeeze=False)[0]
        by_cell = {(row["model"], row["runner"]): row for row in found}
        _ratios(ratios, by_cell, models, runners)
        for axes in first:
            _first_backwards(axes, by_cell, models, runners)
        ratios.set_yticks(range(len(models)), models)
        ratios.invert_yaxis()
        handles, labels = ratios.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) if has_first else 3, frameon=False)
        metadata = {"Date": None} if file.suffix.lower() == ".svg" else {}
        figure.savefig(file, dpi=150, metadata=metadata)


def _ratios(axes: Any, by_cell: dict[tuple[str, str], Result], models: list[str], runners: list[str]) -> None:
    label: str | None = "floor: the part of eager in products"
    for row, place, height in _bars(axes, by_cell, models, runners, "ratio", "{:.2f}", beyond="floor"):
        if row.get("floor") is not None:
            ends = place - 0.5 * height, place + 0.5 * height
            axes.plot([row["floor"]] * 2, ends, color="black", linewidth=2, solid_capstyle="butt", label=label)
            label = None
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_title("backward by eager's (dashed: eager)")


def _first_backwards(axes: Any, by_cell: dict[tuple[str, str], Result], models: list[str], runners: list[str]) -> None:
    _bars(axes, by_cell, models, runners, "first_backward_seconds", "{:.1f}")
    axes.set_title("first backward, seconds")


def _bars(
    axes: Any,
    by_cell: dict[tuple[str, str], Result],
    models: list[str],
    runners: list[str],
    name: str,
    form: str,
    beyond: str | None = None,
) -> list[tuple[Result, float, float]]:
    """A group of bars for each model, their values written beside them; gives (row, place, height) of each.

    Args:
        beyond: what else of a row its value is written to the right of.
    """
    height = 0.8 / len(runners)
    bars = []
    for index, runner in enumerate(runners):
        places = [number - 0.4 + (index + 0.5) * height for number in range(len(models))]
        cells = [by_cell.get((model, runner), {}) for model in models]
        lengths = [row.get(name) or 0.0 for row in cells]
        axes.barh(places, lengths, 0.9 * height, color=COLOURS.get(runner), label=runner)
        for row, place, length in zip(cells, places, lengths, strict=True):
            text = "-" if row.get(name) is None else form.format(row[name])
            right = max(length, row.get(beyond) or 0.0) if beyond else length
            axes.annotate(
                text, (right, place), (3, 0), textcoords="offset points", verticalalignment="center", fontsize=7
            )
            bars.append((row, place, height))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.margins(x=0.12, y=0.02)
    return bars


def _has_matplotlib() -> bool:
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # what find_spec says of a module that was put aside in sys.modules
        return False


def main() -> int:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what `python -m benchmarks.backward --json` wrote")
    parser.add_argument("picture", type=Path, help="a file that ends in .svg or .png")
    options = parser.parse_args()
    try:
        draw(read(options.results), options.picture)
    except PictureError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
