"""Models of text, and layers for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.client_programs.training import Training

VOCABULARY = 128


def _on_texts(model: nn.Module, rows: int = 4, length: int = 32) -> Training:
    """A causal language model of transformers, on one batch."""
    tokens = torch.randint(VOCABULARY, (rows, length))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model.train()

    def step() -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(step, lambda: trained)


def train_transformers() -> Training:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _on_texts(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)))


def train_peft() -> Training:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    return _on_texts(get_peft_model(model, lora))


def train_sentence_transformers() -> Training:
    """Pairs of sentences, pulled together against the others of the batch."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    class Words(nn.Module):
        """The part of a model that knows words: an embedding of them, averaged."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 64)

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**features, "sentence_embedding": self.embedding(features["input_ids"]).mean(1)}

    from sentence_transformers.models import Dense, Normalize

    model = SentenceTransformer(modules=[Words(), Dense(64, 64), Normalize()], device="cpu")
    loss_of = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pairs = [{"input_ids": torch.randint(VOCABULARY, (16, 12))} for _ in range(2)]

    def step() -> Tensor:
        loss = loss_of(pairs, torch.empty(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_x_transformers() -> Training:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True, use_rmsnorm=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (4, 33))

    def step() -> Tensor:
        loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_pytorch_crf() -> Training:
    """Tags of a sequence: an LSTM below a conditional random field, over rows of different lengths."""
    from torchcrf import CRF

    embedding, lstm, emissions = nn.Embedding(VOCABULARY, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 5)
    crf = CRF(5, batch_first=True)
    model = nn.ModuleList([embedding, lstm, emissions, crf])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens, tags = torch.randint(VOCABULARY, (8, 20)), torch.randint(5, (8, 20))
    mask = torch.arange(20) < torch.randint(10, 21, (8, 1))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = -crf(emissions(lstm(embedding(tokens))[0]), tags, mask=mask, reduction="mean")
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_entmax() -> Training:
    """Attention and a loss that are sparse: both functions have backwards of their own."""
    from entmax import Entmax15Loss, entmax15

    embedding, query, out = nn.Embedding(VOCABULARY, 64), nn.Linear(64, 64), nn.Linear(64, 10)
    model = nn.ModuleList([embedding, query, out])
    optimizer, loss_of = torch.optim.Adam(model.parameters(), lr=1e-3), Entmax15Loss(reduction="elementwise_mean")
    tokens, target = torch.randint(VOCABULARY, (16, 24)), torch.randint(10, (16,))

    def step() -> Tensor:
        optimizer.zero_grad()
        values = embedding(tokens)
        attended = entmax15(query(values) @ values.mT / 8, dim=-1) @ values
        loss = loss_of(out(attended.mean(1)), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])
