"""Pictures of the tutorials: one SVG or Mermaid drawing for an example in ``examples/``, made while it runs.

A timeline has the backwards of the example's longest session, read from ``session.trace``. matplotlib draws it, which
``pip install -e '.[examples]'`` installs. A tape is the Mermaid drawing of the first backward by ``ca.inspect``.
"""

from __future__ import annotations

import json
import re
import runpy
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

# The page's fonts, text as text, and ids that do not change: small files, of which a new run changes little.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tutorials", "font.size": 10, "path.simplify_threshold": 1.0}
_TRACK = 1  # of the backwards, in a trace
_KINDS = {"hit": ("hits", "#2e8b57", "o"), "miss": ("misses", "#c8552b", "D"), "bypass": ("on eager", "#7d6bb0", "s")}
"""Label, colour and marker by outcome; the colours are those of the report."""
_DRAWS = ("<path", "<use", "C ", "L ", "M ", "Q ")
_MORE_DECIMALS = re.compile(r"(?<=\d\.\d)\d+")
_DARK = """
@media (prefers-color-scheme: dark) {
text { fill: #dfe4ec !important; }
[style*="fill: #ffffff"] { fill: #14171c !important; }
[style*="stroke: #000000"] { stroke: #98a2b3 !important; }
[style*="stroke: #e1e4e8"] { stroke: #2b313b !important; }
}
"""


class Backwards(NamedTuple):
    """Successive backwards with one outcome: the number of the last one, their count, and milliseconds of each."""

    last: int
    count: int
    outcome: str
    milliseconds: float


def timeline(example: Path, title: str) -> str:
    """Run an example, and return an SVG of the backwards of the session that had most.

    Raises:
        SystemExit: the example has no session with two timed backwards.
    """
    with _sessions() as sessions:
        _run(example)
    longest = max(sessions, key=lambda session: session.stats().backwards, default=None)
    backwards = [] if longest is None else _backwards(longest)
    if len(backwards) < 2:
        raise SystemExit(f"{example.name} has no session with two backwards in this process: there is nothing to draw.")
    import matplotlib

    with matplotlib.rc_context(_STYLE), tempfile.TemporaryDirectory() as folder:
        _draw(backwards, title, file := Path(folder) / "timeline.svg")
        return _small(file.read_text(encoding="utf-8"), said_of(backwards))


def own_picture(example: Path, says: str) -> str:
    """Run an example that draws a picture itself, with ``--picture``, and return its SVG."""
    import matplotlib

    with matplotlib.rc_context(_STYLE), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "own.svg"
        _run(example, "--picture", str(file))
        return _small(file.read_text(encoding="utf-8"), says)


def tape(example: Path) -> str:
    """Run an example, and return the tape of its first backward, node by node, as Mermaid.

    Raises:
        SystemExit: the example ran no backward.
    """
    import torch

    import compiled_autograd as ca

    drawn: list[str] = []

    def drawing(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not drawn:
                drawn.append(ca.inspect(tensors).to_mermaid("node"))
            return original(tensors, *args, **kwargs)

        return backward

    originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
    try:
        for name, original in originals.items():
            setattr(torch.autograd, name, drawing(original))
        _run(example)
    finally:
        for name, original in originals.items():
            setattr(torch.autograd, name, original)
    if not drawn:
        raise SystemExit(f"{example.name} ran no backward in this process: there is nothing to draw.")
    return drawn[0]


def said_of(backwards: list[Backwards]) -> str:
    """Return a sentence for those who do not see the timeline."""
    parts = []
    for kind, (label, _, _) in _KINDS.items():
        found = [each for each in backwards if each.outcome == kind]
        if found:
            median = statistics.median(each.milliseconds for each in found for _ in range(each.count))
            amount = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
            parts.append(f"{label}: {sum(each.count for each in found):,}, median {amount} ms")
    return f"Milliseconds of each backward. {'; '.join(parts).capitalize()}."


@contextmanager
def _sessions() -> Iterator[list[Any]]:
    """All sessions that are made in the meantime."""
    from compiled_autograd.engine.session import Session

    found, original = [], Session.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        found.append(self)

    Session.__init__ = init  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Session.__init__ = original  # type: ignore[method-assign]


def _run(example: Path, *options: str) -> None:
    """Run an example in this process, as its command would.

    Raises:
        SystemExit: the example failed.
    """
    before = sys.argv, [*sys.path]
    sys.argv, sys.path[:0] = [str(example), *options], [str(example.parent)]
    try:
        runpy.run_path(str(example), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.argv, sys.path[:] = before


def _backwards(session: Any) -> list[Backwards]:
    """The backwards of a session whose time is known, in order."""
    with tempfile.TemporaryDirectory() as folder:
        events = json.loads(session.trace(Path(folder) / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    found = []
    for event in events:
        facts = event.get("args", {})
        if event["tid"] != _TRACK or "backward" not in facts:
            continue
        timed = facts.get("timed", 1)
        seconds = facts["seconds"] / max(timed, 1) if "count" in facts else event["dur"] / 1e6
        outcome = next((kind for kind in _KINDS if kind in event["name"].partition(":")[0]), "bypass")
        if seconds:
            found.append(Backwards(facts["backward"], facts.get("count", 1), outcome, 1e3 * seconds))
    return sorted(found)


def _draw(backwards: list[Backwards], title: str, file: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    many = len(backwards) > 60
    for kind, (label, colour, marker) in _KINDS.items():
        found = [each for each in backwards if each.outcome == kind]
        if not found:
            continue
        single = [each for each in found if each.count == 1]
        numbers, times = [each.last for each in single], [each.milliseconds for each in single]
        name = f"{label}: {sum(each.count for each in found):,}"
        axes.plot(numbers, times, marker, color=colour, markersize=3 if many and kind == "hit" else 6, label=name)
        for each in found:
            if each.count > 1:
                axes.plot([each.last - each.count + 1, each.last], [each.milliseconds] * 2, color=colour, linewidth=4)
    axes.set_yscale("log")
    axes.set(xlabel="backward", ylabel="milliseconds", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#e1e4e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(_KINDS), frameon=False)
    figure.savefig(file, metadata={"Date": None})


def _small(svg: str, says: str) -> str:
    """An SVG with one decimal, in dark colours for a dark page, and with a title for those who do not see it."""
    lines = (line.strip() for line in svg.splitlines())
    rounded = (_MORE_DECIMALS.sub("", line) if line.startswith(_DRAWS) else line for line in lines)
    head, opened, rest = "\n".join(rounded).partition("<svg ")
    tag, _, body = rest.partition(">")
    title = f"<title>{escape(says, quote=False)}</title>"
    return f"{head}{opened}{tag}>\n{title}\n<style>{_DARK}</style>{body}\n"
