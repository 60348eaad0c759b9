"""The backward of PyTorch's own sample inputs: a sample of operators and modules here, all of them as slow tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .opinfo import Verdict, check_all, check_module, check_operator, modules, operator_name, operators

_EVERY_OPERATOR, _EVERY_MODULE = 12, 8
_AT_LEAST_COMPILED = 0.97
_ONLY_STATIC = {"linalg.householder_product"}
"""Their backward takes no symbols for sizes, which counts as a failure: each set of shapes is compiled by itself.
Which operators the sample has differs with the version of PyTorch, whose list it is.
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", operators()[::_EVERY_OPERATOR], ids=operator_name)
def test_a_sample_of_operators(op: Any) -> None:
    verdict = check_operator(op, limit=2)
    assert verdict.compiled or op.name in _ONLY_STATIC
    assert not verdict.mismatches


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", modules()[::_EVERY_MODULE], ids=lambda info: info.name)
def test_a_sample_of_modules(info: Any) -> None:
    verdict = check_module(info, limit=2)
    assert verdict.backwards and verdict.compiled
    assert not verdict.mismatches


def test_the_sample_is_compiled() -> None:
    """Of a few operators that certainly can be, every one is, and something ran."""
    wanted = {"add", "mul", "exp", "matmul", "softmax", "nn.functional.gelu", "cumsum", "index_select"}
    verdicts = [check_operator(op, limit=2) for op in operators() if op.name in wanted and not op.variant_test_name]
    assert {verdict.name for verdict in verdicts} >= wanted - {"softmax"}
    for verdict in verdicts:
        assert verdict.backwards > 0 and verdict.compiled and not verdict.mismatches, verdict


def _report(verdicts: Sequence[Verdict], say: Callable[[str], None]) -> None:
    ran = [verdict for verdict in verdicts if verdict.backwards]
    left = [verdict for verdict in ran if not verdict.compiled]
    say(f"\n{len(ran)} with a backward, {sum(v.backwards for v in ran)} backwards, {len(left)} not compiled:")
    for verdict in left:
        say(f"  {verdict.name}: {'; '.join([*verdict.bypasses, *sorted(verdict.failures)])}")
    untraced = [verdict for verdict in ran if verdict.untraced]
    say(f"{len(untraced)} with calls that stay opaque:")
    for verdict in untraced:
        say(f"  {verdict.name}: {'; '.join(sorted(verdict.untraced))}")


def _judge(verdicts: Sequence[Verdict], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        _report(verdicts, print)
    assert [f"{v.name}: {v.mismatches}" for v in verdicts if v.mismatches] == []
    ran = [verdict for verdict in verdicts if verdict.backwards]
    share = sum(verdict.compiled for verdict in ran) / len(ran)
    assert share >= _AT_LEAST_COMPILED, f"only {share:.1%} were compiled"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_operators(capsys: pytest.CaptureFixture[str]) -> None:
    _judge(list(check_all([(check_operator, op) for op in operators()])), capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_modules(capsys: pytest.CaptureFixture[str]) -> None:
    _judge(list(check_all([(check_module, info) for info in modules()])), capsys)
