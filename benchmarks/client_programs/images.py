"""Models of images, and of their distances."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.client_programs.plain import batch, classifier
from benchmarks.client_programs.training import Training


def train_diffusers() -> Training:
    """The noise in an image is predicted by a small U-Net."""
    from diffusers import DDPMScheduler, UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        **blocks,
    )
    schedule = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(4, 1, 16, 16)

    def step() -> Tensor:
        noise, times = torch.randn_like(images), torch.randint(100, (4,))
        loss = nn.functional.mse_loss(model(schedule.add_noise(images, noise, times), times).sample, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_kornia() -> Training:
    """One image is laid on another: the homography between them is what is trained."""
    from kornia.geometry.transform import HomographyWarper, get_perspective_transform

    ramp = torch.linspace(0, 6.0, 48)
    image = (ramp.sin()[:, None] * ramp.cos()[None]).expand(1, 3, 48, 48).contiguous()
    corners = torch.tensor([[[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]])
    other = HomographyWarper(48, 48)(image, get_perspective_transform(corners, corners + 0.1 * torch.randn(1, 4, 2)))
    homography = nn.Parameter(torch.eye(3)[None])
    optimizer = torch.optim.SGD([homography], lr=1e-2)
    warper = HomographyWarper(48, 48)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(warper(image, homography / homography[:, -1:, -1:]), other)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [homography])


def train_monai() -> Training:
    """Segmentation of small volumes."""
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16), strides=(2,), num_res_units=1)
    loss_of = DiceLoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    volumes, labels = torch.randn(2, 1, 16, 16, 16), torch.randint(2, (2, 1, 16, 16, 16))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(volumes), labels)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_pytorch_metric_learning() -> Training:
    """A triplet loss over those triplets that are hard: their number changes from step to step."""
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    model = classifier(classes=16)
    loss_of, miner = TripletMarginLoss(), MultiSimilarityMiner()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, labels = batch(32, classes=4)

    def step() -> Tensor:
        optimizer.zero_grad()
        embeddings = model(x)
        loss = loss_of(embeddings, labels, miner(embeddings, labels))
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])
