"""Networks as tutorials write them, small enough for two CPU cores."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def encoder(width: int, heads: int, layers: int, dropout: float, norm_first: bool) -> nn.TransformerEncoder:
    """Layers of PyTorch's own class, four times as wide inside."""
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class ViT(nn.Module):
    """Patches of 8 by 8 pixels and a class token through a pre-norm encoder."""

    def __init__(self, size: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // 8) ** 2 + 1, width))
        self.encoder = encoder(width, heads, layers, dropout=0.0, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """f32[batch, 3, size, size] -> logits f32[batch, classes]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])


class BERT(nn.Module):
    """A post-norm encoder with dropout and a mask of padding, and the head of a masked language model."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.encoder = encoder(width, heads, layers, dropout=0.1, norm_first=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """i64[batch, length], 0 where it is padded -> logits f32[batch, length, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.tokens(tokens) + self.positions(positions)))
        return self.head(self.encoder(x, src_key_padding_mask=tokens == 0))


class Residual(nn.Module):
    """Two convolutions behind group norm and SiLU, with the time of the noise added between them."""

    def __init__(self, before: int, after: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(times, after)
        self.norm2, self.conv2 = nn.GroupNorm(8, after), nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """f32[batch, before, height, width], f32[batch, times] -> f32[batch, after, height, width]."""
        inner = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(inner)))


class UNet(nn.Module):
    """Down twice and up again, with the features of the way down beside those of the way up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        times = 4 * channels
        self.time = nn.Sequential(nn.Linear(channels, times), nn.SiLU(), nn.Linear(times, times))
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        widths = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(Residual(max(channels, width // 2), width, times) for width in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for width in widths[:-1])
        self.middle = Residual(widths[-1], widths[-1], times)
        self.up = nn.ModuleList(Residual(3 * width, width, times) for width in widths[-2::-1])
        self.last = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """f32[batch, 3, size, size], i64[batch] -> the noise, of the shape of `x`."""
        half = self.channels // 2
        frequencies = torch.exp(-math.log(10_000) / half * torch.arange(half, device=x.device))
        angles = times[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, kept = self.first(x), []
        for block, shrink in zip(self.down, [*self.shrink, nn.Identity()], strict=True):
            kept.append(x := block(x, time))
            x = shrink(x)
        x = self.middle(x, time)
        for block, beside in zip(self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), beside], dim=1), time)
        return self.last(x)


class Generator(nn.Module):
    """DCGAN's, to images of 32 by 32."""

    def __init__(self, latent: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent, 4 * channels, 4, bias=False)]
        for before in (4 * channels, 2 * channels):
            layers += [nn.BatchNorm2d(before), nn.ReLU(True)]
            layers.append(nn.ConvTranspose2d(before, before // 2, 4, stride=2, padding=1, bias=False))
        layers += [nn.BatchNorm2d(channels), nn.ReLU(True), nn.ConvTranspose2d(channels, 3, 4, stride=2, padding=1)]
        self.main = nn.Sequential(*layers, nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        """f32[batch, latent, 1, 1] -> f32[batch, 3, 32, 32]."""
        return self.main(noise)


class Discriminator(nn.Module):
    """DCGAN's, of images of 32 by 32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 4, stride=2, padding=1), nn.LeakyReLU(0.2, True)]
        for before in (channels, 2 * channels):
            layers.append(nn.Conv2d(before, 2 * before, 4, stride=2, padding=1, bias=False))
            layers += [nn.BatchNorm2d(2 * before), nn.LeakyReLU(0.2, True)]
        self.main = nn.Sequential(*layers, nn.Conv2d(4 * channels, 1, 4), nn.Flatten(0))

    def forward(self, images: Tensor) -> Tensor:
        """f32[batch, 3, 32, 32] -> logits f32[batch]."""
        return self.main(images)


class ActorCritic(nn.Module):
    """Two heads on a small network: the logits of actions, and the value of a state."""

    def __init__(self, features: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.actor, self.critic = nn.Linear(hidden, actions), nn.Linear(hidden, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """f32[n, features] -> (f32[n, actions], f32[n])."""
        x = self.body(states)
        return self.actor(x), self.critic(x).squeeze(-1)
