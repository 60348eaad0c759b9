"""Train a small character-level GPT twice, on eager autograd and on compiled_autograd, and compare the two.

The model is plain eager PyTorch. The text is the source code of Python's own standard library, so nothing has to be
downloaded. Both trainings start from the same weights and see the same batches, in turn; the only difference between
them is the context around `loss.backward()`.

    python examples/train_gpt.py
    python examples/train_gpt.py --steps 50 --backend eager
"""

import argparse
import contextlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

CORPUS_CHARACTERS = 2_000_000
SAMPLE_CHARACTERS = 200
CURVE_ROWS = 8


class Block(nn.Module):
    """One transformer layer: causal self-attention and an MLP, each behind a LayerNorm and a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        """Mix the positions of `x` [batch, time, width], each with those before it; same shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] float -> the same."""
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        hidden = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer over `vocabulary` symbols, at most `block_size` of them at a time."""

    def __init__(
        self, vocabulary: int, block_size: int, layers: int, width: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}: choose one that is")
        self.block_size = block_size
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` [batch, time] int64 -> logits [batch, time, vocabulary] float."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: `codes` [characters] int64, each an index into `alphabet`."""

    codes: Tensor
    alphabet: list[str]

    @classmethod
    def standard_library(cls) -> "Corpus":
        """The first CORPUS_CHARACTERS of the standard library's top-level modules, in order of name."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = ""
        for path in sorted(folder.glob("*.py")):
            text += path.read_text(encoding="utf-8", errors="ignore")
            if len(text) >= CORPUS_CHARACTERS:
                break
        if not text:
            raise SystemExit(f"No Python source was found in {folder}: this Python keeps its library elsewhere.")
        text = text[:CORPUS_CHARACTERS]
        alphabet = sorted(set(text))
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
    """A GPT in training, and what its steps left behind: losses, and seconds of whole steps and of their backwards."""

    def __init__(self, args: argparse.Namespace, corpus: Corpus, around: contextlib.AbstractContextManager) -> None:
        torch.manual_seed(args.seed)
        model = GPT(len(corpus.alphabet), args.block_size, args.layers, args.width, args.heads, args.dropout)
        self.model = model.to(args.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        self.around = around
        self.losses: list[float] = []
        self.steps: list[float] = []
        self.backwards: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Train on one batch: `tokens` and `targets` are [batch, time] int64."""
        started = wait_for(tokens.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        before = wait_for(tokens.device)
        with self.around:
            loss.backward()
        self.backwards.append(wait_for(tokens.device) - before)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.steps.append(wait_for(tokens.device) - started)


def wait_for(device: torch.device) -> float:
    """The time in seconds, after everything that was sent to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(eager: Run, compiled: Run, args: argparse.Namespace, corpus: Corpus, console: Console) -> None:
    """Train both on the same batches, step by step in turn, so that whatever else the computer does slows both."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    # A bar that redraws itself is noise in a log file; there, a line now and then says as much.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=args.steps)
        for step, (tokens, targets) in enumerate(corpus.batches(args)):
            # Who comes second finds warmer caches, so they take turns at that too.
            for run in (eager, compiled) if step % 2 else (compiled, eager):
                # Dropout has to draw the same for both.
                torch.manual_seed(args.seed + step)
                run.step(tokens, targets)
            said = f"loss {eager.losses[-1]:.4f} eager, {compiled.losses[-1]:.4f} compiled"
            progress.update(task, advance=1, description=said)
            if not console.is_terminal and step % max(1, args.steps // 10) == 0:
                console.print(f"step {step} of {args.steps}: {said}")


@torch.no_grad()
def generate(model: GPT, corpus: Corpus, args: argparse.Namespace, prompt: str = "def ") -> str:
    """`prompt` and SAMPLE_CHARACTERS more, drawn one at a time at `args.temperature`."""
    model.eval()
    generator = torch.Generator(args.device).manual_seed(args.seed)
    codes = torch.tensor([[corpus.alphabet.index(character) for character in prompt]], device=args.device)
    for _ in range(SAMPLE_CHARACTERS):
        logits = model(codes[:, -model.block_size :])[:, -1] / args.temperature
        codes = torch.cat([codes, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return "".join(corpus.alphabet[code] for code in codes[0].tolist())


def largest_difference(eager: Run, compiled: Run) -> float:
    """The largest absolute difference between the two loss curves; infinite when either holds a NaN."""
    pairs = zip(eager.losses, compiled.losses, strict=True)
    differences = torch.tensor([abs(a - b) for a, b in pairs], dtype=torch.float64)
    return differences.nan_to_num(nan=float("inf")).max().item()


def print_curves(eager: Run, compiled: Run, console: Console) -> None:
    """At most CURVE_ROWS rows of both loss curves, the first and the last step among them."""
    table = Table("step", "eager loss", "compiled loss", "difference", title="Loss curves")
    last = len(eager.losses) - 1
    for step in sorted({round(row * last / (CURVE_ROWS - 1)) for row in range(CURVE_ROWS)}):
        a, b = eager.losses[step], compiled.losses[step]
        table.add_row(str(step), f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}")
    console.print(table)


def print_speed(eager: Run, compiled: Run, args: argparse.Namespace, console: Console) -> None:
    """Speeds, by the median step: the steps that compiled show in the whole time only."""
    table = Table("", "eager", "compiled", "compiled / eager", title="Speed")
    tokens = args.batch_size * args.block_size
    rates = [tokens / statistics.median(run.steps) for run in (eager, compiled)]
    backwards = [1e3 * statistics.median(run.backwards) for run in (eager, compiled)]
    # Of neighbouring steps, which met the same conditions.
    ratio = statistics.median(b / a for a, b in zip(eager.backwards, compiled.backwards, strict=True))
    whole = [sum(run.steps) for run in (eager, compiled)]
    table.add_row("tokens a second (median step)", *(f"{rate:,.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}")
    table.add_row("backward ms (median)", *(f"{ms:.2f}" for ms in backwards), f"{ratio:.2f}")
    table.add_row("whole training s", *(f"{seconds:.1f}" for seconds in whole), f"{whole[1] / whole[0]:.2f}")
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="training steps of each run")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=128, help="characters a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--backend", default="inductor", help="what compiles the backward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the text sampled at the end")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="how far the loss curves may lie apart")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least one step is needed")
    return args


def main() -> int:
    # Here, not at the top: the benchmarks borrow GPT and must be able to run it with compiled_autograd never imported.
    import compiled_autograd as ca

    args = parse_arguments()
    console = Console()
    corpus = Corpus.standard_library()
    console.print(f"{len(corpus.codes):,} characters of Python, {len(corpus.alphabet)} different ones")

    session = ca.enable(backend=args.backend)
    eager, compiled = Run(args, corpus, contextlib.nullcontext()), Run(args, corpus, session)
    train(eager, compiled, args, corpus, console)
    stats = session.stats()

    print_curves(eager, compiled, console)
    print_speed(eager, compiled, args, console)
    console.print(f"compile seconds {stats.compile_seconds:.1f}, captures {stats.captures}, hits {stats.hits}")
    console.print(f"bypasses {dict(stats.bypasses) or 'none'}")
    difference = largest_difference(eager, compiled)
    console.print(f"largest difference of the loss curves {difference:.1e}")
    console.print("\nA sample of the compiled-trained model:")
    console.print(generate(compiled.model, corpus, args), markup=False, highlight=False)

    if stats.backwards == sum(stats.bypasses.values()):
        console.print(f"FAILED: no backward was compiled, all {stats.backwards} ran on eager: {dict(stats.bypasses)}")
        return 1
    if difference > args.tolerance:
        console.print(f"FAILED: the loss curves differ by {difference:.1e}, more than --tolerance {args.tolerance:g}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
