"""What the log shows of a compiled backward is what ``TORCH_LOGS="+autograd"`` shows of the same on eager: the same
nodes with the same incoming gradients."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd.diagnostics import reporting
from compiled_autograd.diagnostics.reporting import level_in
from shadow_cache import Failure

from .helpers import Squares, in_subprocess, mlp

_OF_EAGER = re.compile(r"Executing: <(?:\w+\.)*(\w+) object at .*> with grad_outputs: \[(.*)\]")
_OURS = re.compile(r"^(?:Executing:|  )? ?#\d+ (\w+).* with grad_outputs: \[(.*)\]$", re.MULTILINE)


class Kept(logging.Handler):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What is logged at DEBUG."""
    handler, before = Kept(), reporting._log.level
    reporting._log.addHandler(handler)
    reporting._log.setLevel(logging.DEBUG)
    yield handler
    reporting._log.removeHandler(handler)
    reporting._log.setLevel(before)


def _eager_nodes(backward: Callable[[], Any]) -> Counter[tuple[str, str]]:
    log, handler = logging.getLogger("torch.autograd.graph"), Kept()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        backward()
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    found = [_OF_EAGER.fullmatch(message) for message in handler.messages]
    assert all(found)
    return Counter((match[1], match[2].replace(" ", "")) for match in found if match)


def _nodes(kept: Kept) -> Counter[tuple[str, str]]:
    return Counter((name, grads.replace(" ", "")) for name, grads in _OURS.findall("\n".join(kept.messages)))


def _shared() -> torch.Tensor:
    x = torch.randn(3, 4, requires_grad=True)
    return (x * x.sin() + x.t().t()).sum()


def _function() -> torch.Tensor:
    x = torch.randn(3, requires_grad=True)
    return Squares.apply(x.exp()).sum()


class _Two(torch.autograd.Function):
    """Of two outputs, each with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y + 1

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return one * 2, other


def _function_of_which_one_output_is_used() -> torch.Tensor:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    return _Two.apply(x.exp(), y.exp())[0].sum()


def _hooks() -> torch.Tensor:
    x = torch.randn(3, 2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda grad: grad * 2)
    z = y.cos()
    z.grad_fn.register_prehook(lambda grads: (grads[0] + 1,))
    z.grad_fn.register_hook(lambda entered, left: None)
    return z.sum()


def _undefined() -> torch.Tensor:
    x = torch.randn(6, 4, requires_grad=True)
    first, _ = x.exp().topk(2)
    one, *_ = first.unbind(0)
    return one.sum() + torch.var_mean(x.sin())[1]


def _in_place() -> torch.Tensor:
    x = torch.randn(4, 4, requires_grad=True)
    y = x * 3
    y[1:3].mul_(2)
    return y.cos().sum()


def _mixed() -> torch.Tensor:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().sum()


def _complex() -> torch.Tensor:
    x = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    return (x * x).abs().double().sum()


def _attention() -> torch.Tensor:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return layer(torch.randn(2, 5, 8)).sum()


def _convolution() -> torch.Tensor:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return model(torch.randn(2, 2, 8, 8)).square().mean()


def _sparse() -> torch.Tensor:
    return nn.Embedding(10, 4, sparse=True)(torch.tensor([1, 2, 2])).sum()


def _lstm() -> torch.Tensor:
    return nn.LSTM(4, 3)(torch.randn(5, 2, 4))[0].sum()


def _checkpoints() -> torch.Tensor:
    model = mlp()
    return checkpoint(model, torch.randn(2, 8), use_reentrant=False).sum()


_MODELS = [
    lambda: mlp()(torch.randn(2, 8)).mean(),
    *(
        _shared,
        _function,
        _function_of_which_one_output_is_used,
        _hooks,
        _undefined,
        _in_place,
        _mixed,
        _complex,
        _attention,
        _convolution,
        _sparse,
        _lstm,
    ),
    _checkpoints,
]


@pytest.mark.parametrize("make", _MODELS, ids=lambda make: make.__name__)
def test_nodes_and_gradients_are_those_of_eager(make: Callable[[], torch.Tensor], kept: Kept) -> None:
    expected = _eager_nodes(make().backward)
    session = ca.enable(backend="eager", cache_dir=False)
    for outcome in ("structure_miss", "hit"):
        kept.messages.clear()
        loss = make()
        with session:
            loss.backward()
        assert session.last is not None and session.last.outcome == outcome
        assert _nodes(kept) == expected
    assert not session.stats().failures


def test_shapes_are_those_of_the_step(kept: Kept) -> None:
    model, session = mlp(), ca.enable(backend="eager", cache_dir=False, dynamic=True)
    for rows in (2, 5, 3):
        expected = _eager_nodes(model(torch.randn(rows, 8)).sum().backward)
        model.zero_grad()
        loss = model(torch.randn(rows, 8)).sum()
        kept.messages.clear()
        with session:
            loss.backward()
        model.zero_grad()
        assert _nodes(kept) == expected
    assert session.stats().compiles == 1 and session.stats().hits == 2


def test_gradients_that_are_asked_for(kept: Kept) -> None:
    x = torch.randn(3, requires_grad=True)

    def backward() -> None:
        torch.autograd.grad([x.exp().sum(), x.sin()], x, [None, torch.ones(3)])

    expected = _eager_nodes(backward)
    with ca.enable(backend="eager", cache_dir=False) as session:
        backward()
    assert _nodes(kept) == expected and session.stats().structure_misses == 1


@pytest.mark.parametrize("on_miss", ["compile", "background"])
def test_the_rest_after_a_late_hook_is_shown_too(on_miss: str, kept: Kept) -> None:
    x = torch.randn(3, requires_grad=True)

    def make() -> torch.Tensor:
        def unpack(packed: torch.Tensor) -> torch.Tensor:
            node = torch._C._current_autograd_node()
            node.register_hook(lambda entered, left: None)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = x.exp()
        return y.cos().sum()

    expected = _eager_nodes(make().backward)
    loss = make()
    with ca.enable(backend="eager", cache_dir=False, on_miss=on_miss) as session:
        loss.backward()
    session.wait()
    assert _nodes(kept) == expected and session.last is not None
    assert [failure.kind for failure in session.last.reasons if isinstance(failure, Failure)] == ["late_hook"]


def test_a_region_is_a_block(kept: Kept) -> None:
    w = torch.randn(4, 3, requires_grad=True)
    with ca.enable(backend="eager", cache_dir=False):
        (torch.randn(5, 4) @ w).tanh().sum().backward()
    lines = "\n".join(kept.messages).splitlines()
    assert lines[:6] == [
        "backward of SumBackward0, 5 nodes",
        "region 1, compiled by eager: 3 nodes, 15 calls",
        "  #1 SumBackward0 with grad_outputs: [f32[]]",
        "  #2 TanhBackward0 with grad_outputs: [f32[5,3]]",
        "  #3 MmBackward0 with grad_outputs: [f32[5,3]]",
        "Executing: #4 AccumulateGrad with grad_outputs: [f32[4,3]]",
    ]
    assert lines[6].startswith("structure_miss: first_seen at SumBackward0, 5 nodes, ") and len(lines) == 7


def test_users_code_is_shown_where_it_runs(kept: Kept) -> None:
    with ca.enable(backend="eager", cache_dir=False):
        _hooks().backward()
    of_users = [
        line.split(" with ")[0] for line in kept.messages if line.startswith("Executing") and "Grad" not in line
    ]
    assert of_users == [
        "Executing: pre_hook of #2 CosBackward0",
        "Executing: post_hook of #2 CosBackward0",
        "Executing: tensor_hook of #3 ExpBackward0",
    ]


def test_at_info_there_are_misses_alone(kept: Kept) -> None:
    reporting._log.setLevel(logging.INFO)
    for _ in range(2):
        with ca.enable(backend="eager", cache_dir=False):
            _shared().backward()
    (line,) = kept.messages
    assert line.startswith("structure_miss: first_seen")


def test_what_is_left_to_eager_is_told_once_a_backward(kept: Kept) -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager", cache_dir=False):
        x.exp().sum().backward(create_graph=True)
    (line,) = kept.messages
    assert line.startswith("bypass: create_graph")


def test_names_of_users_are_harmless(kept: Kept) -> None:
    model = nn.Module()
    model.add_module("a\x1b[2Jb", nn.Linear(2, 2))
    with ca.enable(backend="eager", cache_dir=False):
        getattr(model, "a\x1b[2Jb")(torch.randn(1, 2)).sum().backward()
    assert not any("\x1b" in message for message in kept.messages)
    assert any(r"a\x1b[2Jb.weight" in message for message in kept.messages)


@pytest.mark.parametrize(
    ("setting", "level"),
    [
        ("", None),
        ("+dynamo,inductor", None),
        ("compiled_autograd", logging.INFO),
        ("+compiled_autograd", logging.DEBUG),
        ("-compiled_autograd", logging.ERROR),
        ("+dynamo, +compiled_autograd,aot", logging.DEBUG),
        ("compiled_autograd_verbose", None),
        ("+torch._dynamo.compiled_autograd", None),
        ("+compiled_autograd.engine", None),
        ("'+compiled_autograd'", logging.DEBUG),
        ("compiled_autograd,+compiled_autograd", logging.DEBUG),
    ],
)
def test_what_torch_logs_asks_for(setting: str, level: int | None) -> None:
    assert level_in(setting) == level


_STEPS = """
import torch, compiled_autograd as ca
with ca.enable(backend="eager"):
    for _ in range(2):
        (torch.randn(3, requires_grad=True) ** 2).sum().backward()
"""


def test_torch_logs_has_it_in_torchs_own_format_and_file(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    ran = in_subprocess(_STEPS, TORCH_LOGS="compiled_autograd", TORCH_LOGS_OUT=str(file))
    (line,) = ran.stderr.splitlines()
    assert re.match(r"I\d{4} [\d:.]+ \d+ .*\.py:\d+\] \[__compiled_autograd\] structure_miss: first_seen", line)
    assert file.read_text().splitlines() == [line]
