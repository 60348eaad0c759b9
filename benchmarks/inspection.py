"""What it costs to look at a tape, and to note the lines of a forward.

    python -m benchmarks.inspection                   # a minute
    python -m benchmarks.inspection --nodes 1000000   # a longer chain

Milliseconds of the thread's time for `ca.inspect`, `print`, a notebook's HTML and `.memory()`, of the tape of a
ResNet-50 and of a chain of 100,000 nodes. The first inspection of a model looks for its parameters' names among all
living objects, so it stands apart. Then the forwards of three models with `ca.trace_sources()` and in anomaly mode, as
ratios to the plain one: medians of interleaved runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import compiled_autograd as ca

from .models import gpt, mlp
from .scale import chain

RUNS = 9
PAIRS = 15


class Bottleneck(nn.Module):
    """Three convolutions beside a short way."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or channels != out
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """Of 25.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        channels = 64
        for number, blocks in enumerate((3, 4, 6, 3)):
            layer = nn.Sequential()
            for block in range(blocks):
                layer.append(Bottleneck(channels, 64 << number, 2 if number and not block else 1))
                channels = 256 << number
            self.add_module(f"layer{number + 1}", layer)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for number in range(4):
            x = getattr(self, f"layer{number + 1}")(x)
        return self.fc(x.mean((2, 3)))


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    call()
    return clock() - started


def median(call: Callable[[], object]) -> float:
    return statistics.median(seconds(call, time.thread_time) for _ in range(RUNS))


def resnet50(side: int = 64) -> Callable[[], torch.Tensor]:
    model, x, y = ResNet50(), torch.randn(2, 3, side, side), torch.randint(1000, (2,))
    return lambda: F.cross_entropy(model(x), y)


def of_tapes(nodes: int) -> Table:
    table = Table("tape", "nodes", "first ms", "inspect ms", "print ms", "HTML ms", "memory ms", title="ca.inspect")
    leaf = torch.randn(4, requires_grad=True)
    forward = resnet50()  # the model lives on: else it has no names
    for name, loss in (("ResNet-50", forward()), (f"chain of {nodes:,}", chain(leaf, nodes))):
        first = seconds(lambda loss=loss: ca.inspect(loss), time.thread_time)
        view = ca.inspect(loss)
        figures = [first]
        figures.append(median(lambda loss=loss: ca.inspect(loss)))
        figures += [median(call) for call in (view.__str__, view._repr_html_, view.memory)]
        table.add_row(name, f"{len(view.nodes):,}", *(f"{1e3 * each:,.1f}" for each in figures))
    return table


def of_forwards() -> Table:
    table = Table("forward", "plain ms", "trace_sources", "anomaly mode", title="noting the lines of a forward")
    for name, model in (("mlp", forward_of(mlp)), ("gpt", forward_of(gpt)), ("ResNet-50", resnet50())):
        modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "plain": nullcontext,
            "trace_sources": ca.trace_sources,
            "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
        }
        took: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(PAIRS + 1):
            for mode, enter in modes.items():
                with enter():
                    took[mode].append(seconds(model))
        plain, *others = (statistics.median(each[1:]) for each in took.values())
        table.add_row(name, f"{1e3 * plain:.2f}", *(f"{each / plain:.2f}" for each in others))
    return table


def forward_of(build: Callable[[], tuple[nn.Module, Callable[..., torch.Tensor]]]) -> Callable[[], torch.Tensor]:
    model, make_loss = build()
    return lambda: make_loss(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000, help="of the chain")
    arguments = parser.parse_args()
    console = Console(width=110)
    console.print(of_tapes(arguments.nodes))
    console.print(of_forwards())


if __name__ == "__main__":
    main()
