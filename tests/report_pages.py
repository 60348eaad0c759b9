"""Pages of reports: read back as data, and made of as many nodes as wanted."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import compiled_autograd as ca
from shadow_cache import Miss
from shadow_cache.entries import Call
from shadow_cache.report import data
from shadow_cache.report.from_store import nodes_of, reason_of
from shadow_cache.report.texts import code_lines, tape_lines

MARKUP = "<img src=x onerror=ran=1></script><script>ran=1</script>\u2028&amp;\udcff"
"""What somebody may call a module; a point cannot be in it."""
CLASS_NAME = MARKUP[:-1]
"""What somebody may call a class: it must be UTF-8."""


class Page(HTMLParser):
    """A page as a browser reads it: its elements, their attributes, its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.shown: list[str] = []
        self._script = ""
        self.feed(text)
        self.close()

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._script = dict(attrs).get("id") or "script" if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._script = ""

    def handle_data(self, text: str) -> None:
        if self._script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + text
        else:
            self.shown.append(text)

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.scripts["report-data"])

    @property
    def graphs(self) -> list[dict[str, Any]]:
        names = [name for name in self.scripts if name.startswith("graph-data-")]
        return [json.loads(self.scripts[name]) for name in names]


class Halved(torch.autograd.Function):
    """A Python function, whose backward runs as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


class Net(nn.Module):
    """Two layers with a Python function between them, which halves what it is given."""

    def __init__(self, name: str = "first") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(4, 3))
        self.last = nn.Linear(3, 1)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Halved.apply(torch.tanh(getattr(self, self.name)(x))))


def trained(model: nn.Module, steps: int, **settings: Any) -> ca.Session:
    """A session of so many steps, whose gradients are not kept from one to the next."""
    x, y = torch.randn(5, 4), torch.randn(5, 1)
    with ca.enable(**{"backend": "eager", "cache_dir": False, "tune": False, **settings}) as session:
        for _ in range(steps):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
    return session


def report_of(layers: int) -> data.Report:
    """A report of a chain of layers that was never run, with ten nodes for each of them."""
    calls = [Call("GraphRoot", ("GraphRoot",), edges=(1,))]
    tape, aten, links = ["tape graph"], ["def forward(self, saved0_1):"], [()]
    tape.append("#0 GraphRoot")
    for layer in reversed(range(layers)):
        for place in range(8):
            index = len(calls)
            edges = (index + 1, index + 2, index + 3) if place == 3 else (index + 1,)
            name = "AddmmBackward0" if place == 3 else "TanhBackward0"
            if place == 3:
                parameters = (f"model.layers.{layer}.linear.bias", f"model.layers.{layer}.linear.weight")
                leaves = [Call("AccumulateGrad", ("AccumulateGrad",), parameter) for parameter in parameters]
                calls += [Call(name, (name,), edges=(index + 3, index + 1, index + 2)), *leaves]
            else:
                calls.append(Call(name, (name,), None, f"model.py:{place} in forward", edges))
            links.append((len(tape),))
            tape += [
                f"#{index} {name}",
                f"  %{index} = ops.{name}([%{index - 1}], [True], input_{index}, [size_{index}])",
            ]
            aten.append(f"    mul_{index} = aten.mul.Tensor(saved0_1, saved0_1)  # f32[32, 128]")
    calls[-1] = Call("TanhBackward0", ("TanhBackward0",))
    tape_stage = data.Stage("tape", "Tape graph", "", tuple(tape_lines("\n".join(tape))))
    lines = tuple(data.Line(text, link) for text, link in zip(aten, links, strict=True))
    region = data.Step("region", "region 0", "AddmmBackward0, TanhBackward0", len(aten), len(calls), 0.25, 0.2, 3)
    whole = data.Block(0, 0, len(aten))
    graph = data.Graph(
        id="g0",
        title=f"MseLossBackward0 of Chain, {len(calls)} nodes",
        facts=(("nodes", f"{len(calls):,}"),),
        nodes=nodes_of(calls, dict.fromkeys(range(len(calls)), 0)),
        steps=(region,),
        stages=(
            tape_stage,
            data.Stage("aten", "ATen", "", lines, (whole,)),
            data.Stage(
                "code", "Backend's code", "", tuple(code_lines("\n".join(aten), list(enumerate(aten)))), (whole,)
            ),
        ),
        memory=data.Memory(tuple((800 - each, each, each + 1) for each in range(800)), (0,), "made up"),
        variants=(data.Variant("variant 0: static, eager", (("backend", "eager"),), 2.0, 1.0, 7),),
    )
    missed = data.Event(
        1, 1, "structure_miss", graph.title, "g0", 2.5, {"compile": 2.5}, 1, 0, 0.0, (reason_of(Miss("first_seen")),)
    )
    timeline = data.Timeline((missed,), 1_000, hits_between=True)
    return data.Report(
        "session", "Chain", "2024-05-01 12:30 UTC", (data.Figure("backwards", "1,000"),), timeline, (), (graph,)
    )
