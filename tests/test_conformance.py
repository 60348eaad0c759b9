"""The runner of other projects' tests: what it counts, and how it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.slow
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
    assert job.run("ours:eager").tests == ours.tests
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


_COMPARES = """
import pytest, torch, unittest
from torch._dynamo import compiled_autograd
from torch.testing._internal.common_mkldnn import bf32_on_and_off  # a name that is gone

def _grad():
    x = torch.ones(2, requires_grad=True)
    x.sin().sum().backward()
    yield x.grad.tolist()

class TestThem(unittest.TestCase):
    def check_output_and_recompiles(self, function, count=1):
        raise AssertionError("counts captures of PyTorch's")

    def test_compared(self):
        self.check_output_and_recompiles(_grad, count=[1, 2])

    def test_turns_it_on(self):
        list(_grad())
        with compiled_autograd._enable(lambda module: module):
            list(_grad())
"""


@pytest.mark.slow
def test_pytorchs_tests_of_compiled_autograd_turn_the_engine_on(tmp_path: Path) -> None:
    """Each runs two backwards, of which one is in the engine."""
    (tmp_path / "test_compiled_autograd.py").write_text(_COMPARES)
    job = Job(tmp_path, "test_compiled_autograd.py", 60, [], tmp_path / "kept")
    eager, ours = run_all(job, ["eager", "ours:eager"], eager_last=False)
    names = set(eager.tests)
    assert eager.passed(names) == ours.passed(names) == names and len(names) == 2
    assert [record["backwards"] for record in ours.tests.values()] == [1, 1]
    assert ours.bypasses(names) == {}
