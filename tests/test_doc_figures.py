"""Figures in the documentation are those that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import figures

from .helpers import ROOT


@pytest.mark.parametrize("page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in figures.pages()])
def test_figures_are_those_that_were_measured(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.written(text) == text, "python docs/figures.py writes them anew"


def test_a_new_measurement_changes_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MEASURED", tmp_path)
    for ratio, before in ((0.5, "?"), (0.25, "0.50")):
        new = tmp_path / "new" / "some.json"
        new.parent.mkdir(exist_ok=True)
        result = {"model": "mlp", "runner": "ours", "ratio": ratio, "rounds": {"step": [1.0]}, "samples": [1, 2]}
        new.write_text(json.dumps({"environment": {}, "options": {}, "results": [result]}))
        figures.take_over(new, "1234abc", "python -m some", "two cores")
        assert "samples" not in (tmp_path / "some.json").read_text()
        text = figures.written(f"takes <!-- =some/mlp/ours/ratio -->{before}<!-- / --> of eager's")
        assert text == f"takes <!-- =some/mlp/ours/ratio -->{ratio:.2f}<!-- / --> of eager's"


def test_a_figure_that_nobody_measured_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        figures.written("<!-- =nothing/mlp/ours/ratio --><!-- / -->")
    for name in ("backward/mlp/ours/ratio", "backward/mlp/aot/width"):
        with pytest.raises(ValueError, match="no figure"):
            figures.written(f"<!-- ={name} -->0.1<!-- / -->")


def test_an_unclosed_mark_takes_nothing_with_it() -> None:
    mark = "<!-- =backward/mlp/aot/ratio -->"
    assert (
        figures.written(f"A {mark}0.1 many words {mark}0.2<!-- / --> C")
        == f"A {mark}0.1 many words {mark}0.35<!-- / --> C"
    )
