"""The models that the benchmarks run: different enough to stress different things, and, but for one that is there for
GPUs, small enough for two CPU cores.

Each factory draws its weights and its batch from PyTorch's generator and returns (module, make_loss);
`make_loss(module)` runs the forward and returns the loss, a float scalar. Built twice from one seed, the two modules
have the same weights, and either make_loss serves both. A factory's defaults are the sizes on a CPU; `ON_CUDA` has
those of a GPU.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_llama import Llama

MakeLoss = Callable[[nn.Module], Tensor]
Factory = Callable[..., tuple[nn.Module, MakeLoss]]


class ResidualMLP(nn.Module):
    """Many tiny blocks, about 8 tape nodes each: what it costs is mostly overhead, hardly arithmetic."""

    def __init__(self, blocks: int = 50, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        for layer in self.layers:
            x = x + 0.5 * F.gelu(layer(F.layer_norm(x, (self.width,))))
        return x


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a residual, as in ResNet-18."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, before, height, width] -> [batch, after, height / stride, width / stride]."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 with `channels` in its first stage, where the original has 64, and its first layer not strided."""

    def __init__(self, channels: int, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
        for stage in range(4):
            after = channels << stage
            layers += [BasicBlock(before, after, 2 if stage else 1), BasicBlock(after, after, 1)]
            before = after
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] -> logits [batch, classes]."""
        return self.head(self.features(x).mean((2, 3)))


class GPTBlock(nn.Module):
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
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
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


class UnrolledLSTM(nn.Module):
    """An LSTM cell called once a time step from Python: a long, narrow tape whose parameters are used at each step."""

    def __init__(self, features: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTMCell(features, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[time, batch, features] -> [batch, 1], read off the last hidden state."""
        h = c = x.new_zeros(x.shape[1], self.hidden)
        for step in x.unbind(0):
            h, c = self.cell(step, (h, c))
        return self.head(h)


def tanh_network(*widths: int) -> nn.Sequential:
    """Linear layers between these widths, with tanh between them."""
    layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class PairEnergies(nn.Module):
    """The energy of atoms, as the sum over their pairs of a network of the distance: no messages between atoms."""

    centres: Tensor

    def __init__(self, width: int, centres: int = 16, farthest: float = 4.0) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, farthest, centres))
        self.network = tanh_network(centres, width, width, 1)

    def forward(self, positions: Tensor) -> Tensor:
        """[batch, atoms, 3] -> energies [batch]."""
        same = torch.eye(positions.shape[1], device=positions.device)
        apart = positions[:, :, None] - positions[:, None]
        distances = (apart.square().sum(-1) + same).sqrt()  # an atom is at no distance from itself: the root's slope
        energies = self.network(torch.exp(-(distances[..., None] - self.centres).square())).squeeze(-1)
        return ((1 - same) * energies / distances).sum((1, 2))


def mlp() -> tuple[nn.Module, MakeLoss]:
    x = torch.randn(32, 32)
    return ResidualMLP(), lambda module: module(x).square().mean()


def next_token(vocabulary: int, batch: int, length: int) -> MakeLoss:
    """The loss of a language model on random text, computed in float32."""
    tokens, targets = (torch.randint(vocabulary, (batch, length)) for _ in range(2))
    return lambda module: F.cross_entropy(module(tokens).flatten(0, 1).float(), targets.flatten())


def gpt(
    vocabulary: int = 96, batch: int = 8, length: int = 128, layers: int = 4, width: int = 128, heads: int = 4
) -> tuple[nn.Module, MakeLoss]:
    make_loss = next_token(vocabulary, batch, length)
    return GPT(vocabulary, length, layers, width, heads), make_loss


def resnet(channels: int = 16, batch: int = 8, size: int = 64) -> tuple[nn.Module, MakeLoss]:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return ResNet(channels), lambda module: F.cross_entropy(module(images), labels)


def lstm() -> tuple[nn.Module, MakeLoss]:
    x, y = torch.randn(64, 16, 32), torch.randn(16, 1)
    return UnrolledLSTM(), lambda module: F.mse_loss(module(x), y)


def pinn(points: int = 16384, width: int = 128) -> tuple[nn.Module, MakeLoss]:
    """A tanh network fitted to a known function of points (x, t); no derivative of the network itself is taken."""
    xt = torch.rand(points, 2)
    solution = torch.sin(math.pi * xt[:, :1]) * torch.exp(-xt[:, 1:])
    return tanh_network(2, *[width] * 4, 1), lambda module: F.mse_loss(module(xt), solution)


def llama(
    vocabulary: int = 96, batch: int = 8, length: int = 128, layers: int = 4, width: int = 64, heads: int = 4
) -> tuple[nn.Module, MakeLoss]:
    """The example's decoder: norms, gates and rotary positions written out, so that much of it is pointwise."""
    make_loss = next_token(vocabulary, batch, length)
    return Llama(vocabulary, layers, width, heads), make_loss


def gpt_100m() -> tuple[nn.Module, MakeLoss]:
    """A GPT of 111 million parameters in bfloat16, as large as a GPU is trained on: minutes for each step of a CPU."""
    make_loss = next_token(16384, 8, 1024)
    return GPT(vocabulary=16384, block_size=1024, layers=12, width=768, heads=12).to(torch.bfloat16), make_loss


def force_matching(batch: int = 4, atoms: int = 16, width: int = 64) -> tuple[nn.Module, MakeLoss]:
    """Energies and forces fitted to given ones: forces are gradients of the energy, so the loss has gradients of
    gradients. What gives the forces runs with the forward; the loss's backward differentiates it again."""
    positions, forces, energies = torch.randn(batch, atoms, 3), torch.randn(batch, atoms, 3), torch.randn(batch)

    def make_loss(module: nn.Module) -> Tensor:
        moved = positions.detach().requires_grad_()
        found = module(moved)
        (slope,) = torch.autograd.grad(found.sum(), moved, create_graph=True)
        return F.mse_loss(-slope, forces) + F.mse_loss(found, energies)

    return PairEnergies(width), make_loss


FACTORIES: dict[str, Factory] = {
    "mlp": mlp,
    "gpt": gpt,
    "resnet": resnet,
    "lstm": lstm,
    "pinn": pinn,
    "llama": llama,
    "gpt-100m": gpt_100m,
    "force-matching": force_matching,
}
# What a GPU needs to be busy. MLP and LSTM stay as they are: many small kernels, which is what they are there for.
ON_CUDA: dict[str, dict[str, int]] = {
    "gpt": {"vocabulary": 8192, "batch": 16, "length": 512, "width": 512, "heads": 8},
    "resnet": {"channels": 64, "batch": 32, "size": 128},
    "pinn": {"points": 262_144, "width": 256},
    "llama": {"vocabulary": 8192, "length": 512, "layers": 8, "width": 512, "heads": 8},
    "force-matching": {"batch": 32, "atoms": 32, "width": 128},
}


def build(name: str, seed: int, device: str) -> tuple[nn.Module, MakeLoss]:
    """The model `name`, weights and batch made from `seed` on `device`, in the sizes of that device."""
    torch.manual_seed(seed)
    with torch.device(device):
        return FACTORIES[name](**(ON_CUDA.get(name, {}) if device == "cuda" else {}))
