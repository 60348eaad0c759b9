"""Libraries that look into a model: at gradients of its inputs and activations, of single samples, or at curvature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.client_programs.plain import batch
from benchmarks.client_programs.training import Training


def train_captum() -> Training:
    """A classifier whose integrated gradients and saliency are looked at after each step."""
    from captum.attr import IntegratedGradients, Saliency

    model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, target = batch(rows=16)
    integrated, saliency = IntegratedGradients(model), Saliency(model)
    seen = torch.zeros_like(x)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        shares = integrated.attribute(x, target=target, n_steps=8)
        seen.copy_(shares + saliency.attribute(x, target=target))
        return loss + shares.sum().detach()

    return Training(step, lambda: [*model.parameters(), seen])


def train_backpack_for_pytorch() -> Training:
    """An optimizer that divides by the diagonal of the generalised Gauss-Newton matrix, with gradients of samples."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad, DiagGGNMC

    model = extend(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10)))
    loss_of = extend(nn.CrossEntropyLoss())
    x, target = batch()

    def step() -> Tensor:
        model.zero_grad()
        loss = loss_of(model(x), target)
        with backpack(DiagGGNMC(), BatchGrad()):
            loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                curved: Any = parameter
                parameter -= 0.05 * curved.grad_batch.sum(0) / (curved.diag_ggn_mc + 1.0)
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_transformer_lens() -> Training:
    """A transformer with hooks on activations and on their gradients: attribution patching, while it is trained."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 16, "d_head": 8, "n_heads": 4, "d_vocab": 50, "d_mlp": 64}
    config = TransformerBridgeConfig(act_fn="gelu", seed=0, device="cpu", architecture="TransformerLensNative", **sizes)
    model: Any = TransformerBridge.boot_native(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(50, (8, 16))
    seen: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        seen[hook.name] = value.detach()

    def keep_gradient(value: Tensor, hook: Any) -> None:
        seen[f"{hook.name} gradient"] = value.detach()

    def is_looked_at(name: str) -> bool:
        return name.endswith(("hook_resid_pre", "hook_z"))

    def step() -> Tensor:
        optimizer.zero_grad()
        with model.hooks(fwd_hooks=[(is_looked_at, keep)], bwd_hooks=[(is_looked_at, keep_gradient)]):
            loss = model(tokens, return_type="loss")
            loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_nnsight() -> Training:
    """Gradients of activations read and changed inside `with loss.backward():`, which replaces `torch.Tensor.grad`."""
    import nnsight

    layers = {"first": nn.Linear(64, 64), "act": nn.Tanh(), "second": nn.Linear(64, 64), "last": nn.Linear(64, 10)}
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    model: Any = nnsight.NNsight(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x, target = batch()
    seen = torch.zeros(64, 64)

    def step() -> Tensor:
        optimizer.zero_grad()
        with model.trace(x):
            early = model.first.output
            late = model.second.output
            loss = nn.functional.cross_entropy(model.last.output, target)
            with loss.backward():
                late.grad = late.grad * 0.5
                gradient = early.grad.save()
            value = loss.detach().save()
        seen.copy_(gradient)
        optimizer.step()
        return value

    return Training(step, lambda: [*net.parameters(), seen])
