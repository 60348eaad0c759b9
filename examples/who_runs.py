"""Which node of the tape runs now, and which line of the forward made it? Asked by a dispatch mode, and by a hook.

A `TorchDispatchMode` sees each operator of a backward. In there, PyTorch tells the node that is running, and after a
forward in anomaly mode the node knows its line. Compiled code has no operators to be seen one by one, so a backward
under a mode is left to the eager engine, and counted as such. Without the mode it is compiled; the captured graph names
the same nodes and lines, and a hook that asks which node runs gets the same answer.

    python examples/who_runs.py
"""

import linecache
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_autograd as ca

_FRAME = re.compile(r'File "(.+)", line (\d+), in (\w+)')


def source_of(node: Any) -> str | None:
    """`file:line in function` of the forward that made a node, where anomaly mode recorded it; the innermost."""
    frames = _FRAME.findall("".join(node.metadata.get("traceback_", ())))
    own = [f"{file}:{line} in {function}" for file, line, function in frames if file == __file__]
    return own[-1] if own else None


class WhoRuns(TorchDispatchMode):
    """Notes each operator of a backward, with the name of the node that runs it and the line of the node's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, str | None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()  # None outside of a backward
        if node is not None:
            self.seen.append((str(function), node.name(), source_of(node)))
        return function(*args, **(kwargs or {}))


def forward(x: Tensor, w: Tensor, asked: list[str]) -> Tensor:
    """x [8, 4], w [4, 4], float32 -> a loss. A hook appends to `asked` which node runs when a gradient passes it."""
    hidden = torch.tanh(x @ w)
    hidden.register_hook(lambda grad: asked.append(torch._C._current_autograd_node().name()))
    gate = hidden.sigmoid()
    return (hidden * gate).square().mean()


def main() -> None:
    """The same backward on eager, under the mode, and compiled."""
    torch.manual_seed(0)
    x, w, asked = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True), []
    session = ca.enable(backend="eager", on_miss="compile", cache_dir=False)

    def make_loss() -> Tensor:
        # Anomaly mode records the lines. With `check_nan=False` it does no more than that.
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return forward(x, w, asked)

    (wanted,) = torch.autograd.grad(make_loss(), w)

    # Under the mode: eager, with a reason, and everything is seen.
    loss = make_loss()
    with session, WhoRuns() as mode:
        (found,) = torch.autograd.grad(loss, w)
    assert torch.equal(found, wanted) and session.stats().bypasses == {"dispatch_mode": 1}
    print(f"under a mode: {session.last.outcome}, {session.last.reasons[0]}")
    for operator, name, source in mode.seen:
        file, line = source.split(" in ")[0].rsplit(":", 1)
        print(f"  {operator:29} {name:17} line {line}: {linecache.getline(file, int(line)).strip()}")

    # Without it: compiled, at first and again.
    for outcome in ("structure_miss", "hit"):
        loss = make_loss()
        with session:
            (found,) = torch.autograd.grad(loss, w)
        assert torch.equal(found, wanted) and session.last.outcome == outcome
    print(f"without: {session.stats().structure_misses} miss, {session.stats().hits} hit")

    # The captured graph has the nodes and the lines that the mode has seen. `ca.inspect(loss)` has them before.
    nodes = session.last.graph.to_networkx().nodes.values()
    assert {(name, source) for _, name, source in mode.seen} <= {(node["name"], node["source"]) for node in nodes}

    # While compiled code runs, the engine itself is not in a backward. A hook is answered all the same.
    assert asked == ["TanhBackward0"] * 4  # eager, under the mode, and twice compiled
    print(f"the hook of `hidden` runs in {asked[-1]}, as in eager")


if __name__ == "__main__":
    main()
