"""Train a small Llama-style decoder from one seed on eager autograd and on compiled_autograd, and compare the two.

The model is plain eager PyTorch: RMSNorm, rotary positions and SwiGLU, each written out. The text is the source code of
Python's own standard library, so nothing is downloaded. All trainings start from the same weights and see the same
batches, step by step in turn; what differs is the context around `loss.backward()`.

    python examples/train_llama.py
    python examples/train_llama.py --also torch.compile
    python examples/train_llama.py --steps 100 --on-miss compile --picture curves.png
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

if TYPE_CHECKING:
    import compiled_autograd as ca

CORPUS_CHARACTERS = 2_000_000
CURVE_ROWS = 6


class RMSNorm(nn.Module):
    """Scales the last dimension to a root mean square of one, then by a learnt weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] float -> the same."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: turn pairs of features of `x` [batch, heads, time, size] by `angles` [time, size / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    """One decoder layer: causal self-attention and a SwiGLU, each behind an RMSNorm and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        hidden = 8 * width // 3
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        """Mix the positions of `x` [batch, time, width], each with those before it; same shape."""
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """[batch, time, width] float -> the same."""
        x = x + self.attention(self.attention_norm(x), angles)
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A decoder-only transformer over `vocabulary` symbols."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width {width} is not a multiple of twice the heads ({heads}): choose one that is")
        self.register_buffer("frequencies", 10_000.0 ** -torch.linspace(0, 1, width // heads // 2))
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` [batch, time] int64 -> logits [batch, time, vocabulary] float."""
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.frequencies
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


class Corpus(NamedTuple):
    """A text as numbers: `codes` [characters] int64, each an index into `alphabet`."""

    codes: Tensor
    alphabet: list[str]

    @classmethod
    def standard_library(cls) -> Corpus:
        """The first CORPUS_CHARACTERS of the standard library's top-level modules, in order of name."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))
        if not text:
            raise SystemExit(f"No Python source was found in {folder}: this Python keeps its library elsewhere.")
        alphabet = sorted(set(text := text[:CORPUS_CHARACTERS]))
        index = {character: code for code, character in enumerate(alphabet)}
        return cls(torch.tensor([index[character] for character in text]), alphabet)

    def batches(self, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
        """`args.steps` pairs of (input, target), each [batch, block] int64; the same ones for the same seed."""
        generator = torch.Generator().manual_seed(args.seed)
        window = torch.arange(args.block_size + 1)
        for _ in range(args.steps):
            starts = torch.randint(len(self.codes) - args.block_size, (args.batch_size, 1), generator=generator)
            piece = self.codes[starts + window].to(args.device)
            yield piece[:, :-1], piece[:, 1:]


class Run:
    """One training, and what its steps left behind: losses, and seconds of whole steps and of their backwards."""

    def __init__(
        self, name: str, args: argparse.Namespace, symbols: int, around: contextlib.AbstractContextManager
    ) -> None:
        torch.manual_seed(args.seed)
        model = Llama(symbols, args.layers, args.width, args.heads).to(args.device)
        self.name = name
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        self.model = torch.compile(model) if name == "torch.compile" else model
        self.around = around
        self.losses: list[float] = []
        self.steps: list[float] = []
        self.backwards: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[float, float, float]:
        """Train on one batch: `tokens` and `targets` are [batch, time] int64.

        Gives the loss, the seconds of the backward and those of the whole step.
        """
        started = now(tokens.device)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        before = now(tokens.device)
        with self.around:
            loss.backward()
        backward = now(tokens.device) - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), backward, now(tokens.device) - started

    def record(self, loss: float, backward: float, whole: float) -> None:
        """Keep what a step of the training gave."""
        self.losses.append(loss)
        self.backwards.append(backward)
        self.steps.append(whole)


def now(device: torch.device) -> float:
    """The time in seconds, after everything that was sent to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(runs: Sequence[Run], args: argparse.Namespace, corpus: Corpus, console: Console) -> None:
    """Train all on the same batches, step by step in turn, so that whatever else the computer does slows each."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    # A bar that redraws itself is noise in a log file; there, a line now and then says as much.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("first step", total=args.steps)
        for step, (tokens, targets) in enumerate(corpus.batches(args)):
            turn = step % len(runs)  # who comes second finds warmer caches, so they take turns at that too
            for run in (*runs[turn:], *runs[:turn]):
                run.record(*run.step(tokens, targets))
            said = "loss " + ", ".join(f"{run.losses[-1]:.4f} {run.name}" for run in runs)
            progress.update(task, advance=1, description=said)
            if not console.is_terminal and step % max(1, args.steps // 10) == 0:
                console.print(f"step {step} of {args.steps}: {said}")


def earned_back(eager: Run, other: Run) -> int | None:
    """The first step from which on the training so far took less time than eager's; None where there is none."""
    ahead = 0.0
    since: int | None = None
    for step, (a, b) in enumerate(zip(eager.steps, other.steps, strict=True)):
        ahead += a - b
        since = (step if since is None else since) if ahead > 0 else None
    return since


def memory_of_a_step(run: Run, batch: tuple[Tensor, Tensor]) -> float | None:
    """MB by which memory grows at its highest during one more step: allocated on CUDA, resident elsewhere.

    None where the system does not tell (only Linux does).
    """
    if batch[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.step(*batch)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free, but not given back yet, would hide the growth
        reset.write_text("5")  # the highest is what there is now
    except (OSError, AttributeError):
        return None

    def resident(key: str) -> float:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status.read_text().splitlines() if key in line)

    before = resident("VmRSS")
    run.step(*batch)
    return resident("VmHWM") - before


def print_summary(
    runs: Sequence[Run], memory: Sequence[float | None], args: argparse.Namespace, console: Console
) -> None:
    """Speeds by the median step: the steps that compiled show in the times of the whole training only."""
    eager = runs[0]
    table = Table("", *(run.name for run in runs), *(f"{run.name} / eager" for run in runs[1:]), title="Speed")
    table.caption = "In rows with (median), the last column is the median over the steps of each step's ratio."

    def row(name: str, values: Sequence[float | None], form: str, ratios: Sequence[float | None] = ()) -> None:
        cells = ["-" if value is None else format(value, form) for value in values]
        found = ratios or [None if None in (value, values[0]) else value / values[0] for value in values[1:]]
        table.add_row(name, *cells, *("-" if ratio is None else f"{ratio:.2f}" for ratio in found))

    def by_eager(name: str) -> list[float]:
        """Ratios of steps that stand beside each other, which met the same conditions."""
        mine = getattr(eager, name)
        return [statistics.median(b / a for a, b in zip(mine, getattr(run, name), strict=True)) for run in runs[1:]]

    for name, what in (("step ms", "steps"), ("backward ms", "backwards")):
        row(f"{name} (median)", [1e3 * statistics.median(getattr(run, what)) for run in runs], ".1f", by_eager(what))
    tokens = args.batch_size * args.block_size
    row("tokens a second", [tokens / statistics.median(run.steps) for run in runs], ",.0f")
    row("whole training s", [sum(run.steps) for run in runs], ".1f")
    row("memory of a step MB", memory, ".0f")
    console.print(table)


def draw(runs: Sequence[Run], file: Path) -> str:
    """Draw the loss and the time of each step of all runs to `file`; says where, or what that needs."""
    try:
        import matplotlib
    except ImportError:
        return "No picture of the curves: matplotlib draws it, which `pip install -e '.[examples]'` installs."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, times) = pyplot.subplots(2, sharex=True, figsize=(8, 7), layout="constrained")
    for run, style in zip(runs, ("-", "--", ":"), strict=False):
        curves.plot(run.losses, style, label=run.name)
        times.plot([1e3 * seconds for seconds in run.steps], style, label=run.name, linewidth=0.8)
    curves.set(ylabel="loss", title="Loss, and milliseconds of each step")
    times.set(ylabel="step ms", xlabel="step", yscale="log")
    curves.legend()
    figure.savefig(file)
    pyplot.close(figure)
    return f"Losses and step times are drawn in {file}."


def sentences(runs: Sequence[Run], session: ca.Session) -> Iterator[str]:
    """What the table does not say: compiling, the way of each backward, and whether it was worth it."""
    eager, compiled = runs[:2]
    stats = session.stats()
    if stats.loads:
        yield f"Found in the cache on disk, where an earlier run had left it: {plural(stats.loads, 'region')}."
    step = earned_back(eager, compiled)
    spent = f"Compiling {plural(stats.compiles, 'region')} took {stats.compile_seconds:.1f} s"
    if step is not None:
        yield f"{spent}; from step {step} on the training so far had taken less time than eager's."
    else:
        yield f"{spent}, which {len(eager.steps)} steps did not earn back. {why_not(stats)}"
    ways = {"hits": stats.hits, "misses": stats.structure_misses + stats.shape_misses, **stats.bypasses}
    yield f"Of {stats.backwards} backwards: {', '.join(f'{count} {way}' for way, count in ways.items())}."


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def why_not(stats: ca.Stats) -> str:
    """Why compiling did not pay, as far as the counts tell."""
    if stats.bypasses.get("not_worth_it"):
        return "Timed against eager, the compiled backward was slower here and was left (setting `tune`)."
    return "The table says how much a step gained since: a longer training earns back what a faster step saves."


def largest_difference(runs: Sequence[Run]) -> float:
    """The largest absolute difference of the two first loss curves; infinite when either holds a NaN."""
    eager, compiled = (torch.tensor(run.losses, dtype=torch.float64) for run in runs[:2])
    return (eager - compiled).abs().nan_to_num(nan=float("inf")).max().item()


def verdict(runs: Sequence[Run], stats: ca.Stats, args: argparse.Namespace, console: Console) -> int:
    """0 where compiled code served and the loss curves agree, else 1."""
    difference = largest_difference(runs)
    console.print(f"Largest difference of the two loss curves: {difference:.1e}.")
    if stats.backwards == sum(stats.bypasses.values()):
        console.print(f"FAILED: no backward was compiled, all {stats.backwards} ran on eager.")
        return 1
    if difference > args.tolerance:
        console.print(f"FAILED: the loss curves differ by more than --tolerance {args.tolerance:g}.")
        return 1
    return 0


def print_curves(runs: Sequence[Run], console: Console) -> None:
    """At most CURVE_ROWS rows of the loss curves, the first and the last step among them."""
    table = Table("step", *(run.name for run in runs), "difference of the first two", title="Loss")
    last = len(runs[0].losses) - 1
    for step in sorted({round(row * last / (CURVE_ROWS - 1)) for row in range(CURVE_ROWS)}):
        losses = [run.losses[step] for run in runs]
        table.add_row(str(step), *(f"{loss:.5f}" for loss in losses), f"{abs(losses[0] - losses[1]):.1e}")
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="training steps of each run")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=128, help="characters a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--backend", default="inductor", help="what compiles the backward")
    parser.add_argument("--on-miss", choices=("background", "compile"), default="background")
    parser.add_argument("--also", choices=("torch.compile",), help="a third training, to compare with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--picture", type=Path, default=Path("train_llama.svg"), help="where the curves are drawn")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="how far the loss curves may lie apart")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least one step is needed")
    return args


def main() -> int:
    # Here, not at the top: the benchmarks borrow the model, and must be able to run it without compiled_autograd.
    import compiled_autograd as ca

    args = parse_arguments()
    console = Console()
    corpus = Corpus.standard_library()
    console.print(f"{len(corpus.codes):,} characters of Python, {len(corpus.alphabet)} different ones")

    session = ca.enable(backend=args.backend, on_miss=args.on_miss)
    around = {"eager": contextlib.nullcontext(), "compiled": session}
    if args.also:
        around[args.also] = contextlib.nullcontext()
    runs = [Run(name, args, len(corpus.alphabet), context) for name, context in around.items()]
    train(runs, args, corpus, console)

    print_curves(runs, console)
    memory = [memory_of_a_step(run, next(corpus.batches(args))) for run in runs]
    print_summary(runs, memory, args, console)
    for sentence in (*sentences(runs, session), draw(runs, args.picture)):
        console.print(sentence, markup=False)
    return verdict(runs, session.stats(), args, console)


if __name__ == "__main__":
    sys.exit(main())
