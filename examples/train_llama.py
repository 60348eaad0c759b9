"""Train a small Llama-style decoder from one seed on eager autograd and on compiled_autograd, and compare the two.

The model is plain eager PyTorch: RMSNorm, rotary positions and SwiGLU, each written out. The text is the source code of
Python's own standard library, so nothing is downloaded. All trainings start from the same weights and see the same
batches, step by step in turn; what differs is the context around `loss.backward()`. `_side_by_side.py`, beside this
file, prints the results. The exit status is 0 where compiled code served and the loss curves agree, 130 after Ctrl-C
(which prints the results so far), else 1.

    python examples/train_llama.py
    python examples/train_llama.py --also torch.compile
    python examples/train_llama.py --steps 100 --on-miss compile --picture curves.png
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

# Outside of the training Ctrl-C ends the program at once, without a traceback: also while PyTorch is imported.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

if TYPE_CHECKING:
    import compiled_autograd as ca

CORPUS_CHARACTERS = 2_000_000
FEW_STEPS = 20
"""Compiled steps that say little about their speed: the first ones are compared with eager's operators."""


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
        """Pairs of (input, target) without end, each [batch, block] int64; the same ones for the same seed."""
        generator = torch.Generator().manual_seed(args.seed)
        window = torch.arange(args.block_size + 1)
        while True:
            starts = torch.randint(len(self.codes) - args.block_size, (args.batch_size, 1), generator=generator)
            piece = self.codes[starts + window].to(args.device)
            yield piece[:, :-1], piece[:, 1:]


class Step(NamedTuple):
    """A step's loss, the seconds of its backward and those of the whole step."""

    loss: float
    backward: float
    whole: float


class Run:
    """One training, its steps so far, and for each step what became of its backward: empty where no session is."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        symbols: int,
        around: contextlib.AbstractContextManager[object],
        session: ca.Session | None = None,
    ) -> None:
        torch.manual_seed(args.seed)
        model = Llama(symbols, args.layers, args.width, args.heads).to(args.device)
        self.name = name
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        self.model = torch.compile(model) if name == "torch.compile" else model
        self.around = around
        self.session = session
        self.steps: list[Step] = []
        self.outcomes: list[str] = []
        self.waited = 0.0  # seconds in which all trainings waited for this one's compiler

    def step(self, tokens: Tensor, targets: Tensor) -> Step:
        """Train on one batch: `tokens` and `targets` are [batch, time] int64."""
        started = now(tokens.device)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        before = now(tokens.device)
        with self.around:
            loss.backward()
        backward = now(tokens.device) - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(loss.item(), backward, now(tokens.device) - started)

    def record(self, step: Step) -> None:
        """Keep a step of the training. A backward on eager is named by its reason, such as "compiling"."""
        last = None if self.session is None else self.session.last
        if last is not None:
            self.outcomes.append(last.reasons[0].label if last.outcome == "bypass" else last.outcome)
        self.steps.append(step)


def now(device: torch.device) -> float:
    """The time in seconds, after everything that was sent to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def choose_threads(args: argparse.Namespace) -> str:
    """Leave a core each to the compiler in the background and to other programs, and say so.

    PyTorch's threads wait for one another at each operator. Where one of them has to wait for a core, all do, and a
    step takes many times as long as on one thread.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    free = cores - (args.on_miss == "background") - round(load)
    threads = max(1, min(torch.get_num_threads(), free))
    torch.set_num_threads(threads)
    beside = "one is for the compiler, and " if args.on_miss == "background" else ""
    return f"All trainings use {threads} of {cores} cores: {beside}other programs keep {load:.1f} busy (load average)."


def train(runs: Sequence[Run], args: argparse.Namespace, corpus: Corpus, console: Console) -> bool:
    """Train all on the same batches, step by step in turn, so that whatever else the computer does slows each.

    Returns whether Ctrl-C ended it. A step that some have not ended by then is none's.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        if before is signal.SIG_DFL:  # else it is the user's choice, such as to ignore it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        take_turns(runs, args, corpus, console)
    except KeyboardInterrupt:
        whole = min(len(run.steps) for run in runs)  # it may come while a turn is recorded
        for run in runs:
            del run.steps[whole:], run.outcomes[whole:]
        return True
    finally:
        signal.signal(signal.SIGINT, before)
    return False


def take_turns(runs: Sequence[Run], args: argparse.Namespace, corpus: Corpus, console: Console) -> None:
    """Train for `args.steps` steps each; where there is no such number, until the time for all of them is up.

    If few steps ran compiled by then, all wait for the compiler, which has the cores to itself, and then train on.
    """
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    # A bar that redraws itself is noise in a log file; there, a line now and then says as much.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task, said = progress.add_task("step 0", total=1.0), 0.0
        began = time.perf_counter()
        for step, batch in enumerate(corpus.batches(args)):
            turn = step % len(runs)  # who comes second finds warmer caches, so they take turns at that too
            ended = {run: run.step(*batch) for run in (*runs[turn:], *runs[:turn])}
            for run, measured in ended.items():
                run.record(measured)
            if step == 0:  # torch.compile compiles in it, which is no training
                began += sum(run.steps[0].whole for run in runs[2:])
            spent = time.perf_counter() - began
            part = (step + 1) / args.steps if args.steps else spent / (args.seconds * len(runs))
            losses = f"step {step}: loss " + ", ".join(f"{run.steps[-1].loss:.4f} {run.name}" for run in runs)
            progress.update(task, completed=part, description=losses)
            if news := news_of_compiling(runs[1], args):
                console.print(f"step {step}, after {spent:.0f} s: {news}", soft_wrap=True)
            if not console.is_terminal and part >= said:
                console.print(losses, soft_wrap=True)
                said = part + 0.1
            if part >= 1:
                if args.steps or runs[1].waited or not is_compiling(runs[1]):
                    return
                if runs[1].outcomes[-1] == "compiling":
                    waits = f"all wait for the compiler, {args.seconds:.0f} s at most"
                    console.print(f"step {step}: {waits}", soft_wrap=True)
                runs[1].waited = wait_for_compiler(runs[1], args.seconds)
                began += runs[1].waited + args.seconds / 2


def is_compiling(run: Run) -> bool:
    """Whether the first compile in the background has begun, and has not ended FEW_STEPS ago."""
    return "compiling" in run.outcomes and set(run.outcomes[:-FEW_STEPS]) <= {"not_yet", "structure_miss", "compiling"}


def wait_for_compiler(run: Run, most: float) -> float:
    """Wait for `most` seconds or less; returns how many it took."""
    began = time.perf_counter()
    assert run.session is not None
    run.session.wait(most)
    return time.perf_counter() - began


def news_of_compiling(run: Run, args: argparse.Namespace) -> str:
    """What to say when the step that ran last was the first that began to compile, or that ran compiled code."""
    assert run.session is not None
    if run.outcomes[-1] == "hit" and run.outcomes.count("hit") == 1:
        stats = run.session.stats()
        how = f"compiled in {stats.compile_seconds:.1f} s" if stats.compiles else "loaded from disk"
        return f"compiled code takes over, {how}"
    if args.on_miss == "compile" or run.outcomes[-1] != "structure_miss" or run.outcomes.count("structure_miss") > 1:
        return ""
    elsewhere = args.device == "cpu" and args.backend == "inductor"
    where = "a worker process of lower priority" if elsewhere else "a thread of this process"
    return f"compiling begins in {where}; until it ends, backwards run on eager"


def positive(text: str) -> int:
    """A number of 1 or more from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small: at least 1 is needed")
    return number


def least_memory(args: argparse.Namespace) -> int:
    """Return a lower bound of the bytes that the trainings need."""
    of_weights = 2 * 4 * 12 * args.width  # two trainings, each with weights, gradients and two moments of AdamW
    return 4 * args.layers * args.width * (of_weights + 10 * args.batch_size * args.block_size)


def memory_of(device: str) -> float:
    """Return the bytes of memory of a device; infinity where the system does not tell."""
    if device == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=float, default=60.0, help="time of each training, by the clock; they take turns"
    )
    length.add_argument("--steps", type=positive, help="number of steps of each training, whatever time they take")
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--block-size", type=positive, default=128, help="characters a sequence")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--backend", default="inductor", help="what compiles the backward")
    parser.add_argument("--on-miss", choices=("background", "compile"), default="background")
    parser.add_argument("--also", choices=("torch.compile",), help="a third training, to compare with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--picture", type=Path, default=Path("train_llama.svg"), help="where the curves are drawn")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="how far the loss curves may lie apart")
    parser.set_defaults(refuse=parser.error)
    args = parser.parse_args()
    if not args.seconds > 0:
        parser.error(f"--seconds {args.seconds:g}: some time is needed")
    if not args.tolerance >= 0:
        parser.error(f"--tolerance {args.tolerance:g}: a number of 0 or more is needed")
    if args.width % (2 * args.heads):
        parser.error(f"--width {args.width} is not a multiple of twice --heads {args.heads}: choose one that is")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device here")
    if not 0 <= args.lr < math.inf:
        parser.error(f"--lr {args.lr:g}: a finite number of 0 or more is needed")
    if not -(2**63) <= args.seed < 2**64:
        parser.error(f"--seed {args.seed}: PyTorch takes numbers from -2**63 to 2**64 - 1")
    if args.block_size >= CORPUS_CHARACTERS:
        parser.error(
            f"--block-size {args.block_size}: at most {CORPUS_CHARACTERS - 1} are possible, the text ends there"
        )
    folders = [os.path.isdir(each) for each in (args.picture, args.picture.parent)]  # noqa: PTH112  Path.is_dir may raise
    if folders != [False, True]:
        parser.error(f"--picture {args.picture}: a file in a folder that exists is needed, such as curves.png")
    if (needed := least_memory(args)) > (there := memory_of(args.device)):
        sizes = "make --batch-size, --block-size, --layers or --width smaller"
        parser.error(f"at least {needed >> 30:,} GiB of memory are needed, and there are {there / 2**30:.0f}: {sizes}")
    return args


def main() -> int:
    # Here, not at the top: the benchmarks borrow the model, and must be able to run it without compiled_autograd.
    from _side_by_side import conclusion, draw, memory_of_a_step, print_curves, print_speeds

    import compiled_autograd as ca

    args = parse_arguments()
    try:
        session = ca.enable(backend=args.backend, on_miss=args.on_miss)
    except (ca.CompiledAutogradError, LookupError) as error:  # also for a variable in the environment
        args.refuse(str(error))
    console = Console()
    console.print(choose_threads(args), soft_wrap=True)
    corpus = Corpus.standard_library()
    console.print(f"{len(corpus.codes):,} characters of Python, {len(corpus.alphabet)} different ones")

    symbols = len(corpus.alphabet)
    # Eager stays eager where the environment (COMPILED_AUTOGRAD=1) turned a session on around the whole program.
    runs = [Run("eager", args, symbols, ca.disable()), Run("compiled", args, symbols, session, session)]
    if args.also:
        runs.append(Run(args.also, args, symbols, ca.disable()))
    if args.on_miss == "compile":
        console.print("step 0 compiles in this process and waits for it, unless the code is on disk")
    stopped = train(runs, args, corpus, console)

    if runs[0].steps:
        print_curves(runs, console)
        batch = next(corpus.batches(args))
        print_speeds(runs, [None if stopped else memory_of_a_step(run, batch) for run in runs], args, console)
        for text in (str(session.summary()), draw(runs, args.picture)):
            console.print(text, markup=False, soft_wrap=True)
    sentence, good = conclusion(runs, session, args, stopped)
    console.print(sentence, markup=False, soft_wrap=True)
    return 130 if stopped else 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
