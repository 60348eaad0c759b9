"""The runner of other projects' tests: what it counts, and how it goes on."""

from __future__ import annotations

from pathlib import Path

from .conformance.plugin import read
from .conformance.run import Job, run_all

_TESTS = """
import os, pytest, torch

def _grad():
    x = torch.ones(2, requires_grad=True)
    x.sin().sum().backward()
    return x.grad

def test_passes(): assert _grad() is not None
def test_fails_everywhere(): assert _grad() is None
def test_fails_when_captured(): assert os.environ["CONFORMANCE_ENGINE"] == "eager"
def test_skipped(): pytest.skip("why not")
"""


def _lines(*outcomes: tuple[str, str]) -> str:
    return "".join(f'{{"test": "{name}", "outcome": "{outcome}"}}\n' for name, outcome in outcomes)


def test_eager_runs_only_what_does_not_pass_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS)
    kept = tmp_path / "kept"
    kept.mkdir()
    records = kept / "test_some.ours-eager.jsonl"
    records.write_text(_lines(("test_ran_before", "crashed"), ("test_ran_before", "passed")))
    job = Job(tmp_path, "test_some.py", 60, [], kept)
    eager, ours = run_all(job, ["eager", "ours:eager"], eager_last=True)
    names = set(ours.tests)
    assert ours.passed(names) == {"test_passes", "test_ran_before"}
    assert eager.passed(names) == {"test_passes", "test_ran_before", "test_fails_when_captured"}
    assert set(read(kept / "test_some.eager.jsonl")) == {"test_fails_everywhere", "test_fails_when_captured"}
    before = records.read_text()
    assert run_all(job, ["eager", "ours:eager"], eager_last=True)[1].tests == ours.tests
    assert records.read_text() == before  # every test has its record


def test_a_test_that_did_not_end_is_begun_twice(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.write_text(
        _lines(("one", "crashed"), ("two", "crashed"), ("two", "crashed"), ("three", "crashed"), ("three", "passed"))
    )
    assert {name: (each["outcome"], each["started"]) for name, each in read(records).items()} == {
        "one": ("crashed", 1),
        "two": ("crashed", 2),
        "three": ("passed", 1),
    }
