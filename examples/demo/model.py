"""A small byte-level transformer whose feed-forward layers are mixtures of experts.

Shapes: B sequences, S bytes, T = B * S tokens of this rank, H hidden, I intermediate, E experts in
all, K experts per token, R expert-parallel ranks. A rank owns E / R experts.

Parameters are FP32; products take BF16 operands, accumulate in FP32 and round once to BF16; the
residual stream, the norms, the router and the loss are FP32.
"""

from dataclasses import dataclass

import mok
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from plain_moe import PlainMoE, linear_bf16


@dataclass(frozen=True)
class ModelConfig:
    layer: str = "mok"  # or "plain"
    hidden: int = 128
    intermediate: int = 256
    blocks: int = 2
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    length: int = 128
    vocabulary: int = 256
    max_tokens: int = 1024  # the most tokens a rank passes to a layer in one call
    emulate_bf16: bool = False  # FP32 products of BF16-rounded values, for CPUs without BF16 units


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.emulate_bf16 = config.emulate_bf16
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x_BSH.shape
        qkv = linear_bf16(x_BSH, self.qkv.weight, self.emulate_bf16)
        # [B, S, 3 * H] -> three of [B, heads, S, H / heads]
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.emulate_bf16:
            q, k, v = q.float(), k.float(), v.float()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).bfloat16()
        y_BSH = y.transpose(1, 2).reshape(batch, length, hidden)
        return linear_bf16(y_BSH, self.out.weight, self.emulate_bf16)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden)
        sizes = (config.hidden, config.intermediate, config.experts, config.top_k)
        if config.layer == "mok":
            self.moe = mok.MoELayer(
                *sizes,
                group=group,
                max_tokens=config.max_tokens,
                save="gate_up",
                dtype=torch.float32,
            )
        else:
            self.moe = PlainMoE(*sizes, group=group, emulate_bf16=config.emulate_bf16)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH).bfloat16())
        return x_BSH + self.moe(self.moe_norm(x_BSH).bfloat16())


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.length, config.hidden)
        self.blocks = nn.ModuleList(Block(config, group) for _ in range(config.blocks))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, bytes_BS: torch.Tensor) -> torch.Tensor:
        """Returns the FP32 logits [B, S, vocabulary] of the next byte at every position."""
        position = torch.arange(bytes_BS.shape[1], device=bytes_BS.device)
        x_BSH = self.embedding(bytes_BS) + self.position(position)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        x_BSH = self.norm(x_BSH).bfloat16()
        return linear_bf16(x_BSH, self.head.weight, self.config.emulate_bf16).float()

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy, in nats per byte, of windows [B, S + 1]."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def is_expert(name: str) -> bool:
    """Says whether the parameter of that name holds this rank's experts (first dimension E / R)."""
    return ".experts." in name


@torch.no_grad()
def initialize(model: nn.Module, seed: int, rank: int, world: int) -> None:
    """Draws every parameter from `seed`, the same for every layer kind and number of ranks.

    Experts are drawn for all ranks at once and a rank keeps its slice: expert e has the same
    weights whichever rank owns it.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, param in sorted(model.named_parameters()):
        if "norm" in name:
            param.fill_(1.0)
            continue
        copies = world if is_expert(name) else 1
        full = torch.randn(copies * param.shape[0], *param.shape[1:], generator=generator)
        std = 0.02 if "embedding" in name or "position" in name else param.shape[-1] ** -0.5
        own = full.chunk(world)[rank] if is_expert(name) else full
        param.copy_(std * own)


@torch.no_grad()
def generate(model: Transformer, prompt: bytes, num_bytes: int, seed: int) -> bytes:
    """Continues `prompt` by sampling; all ranks of an expert-parallel group must call it together.

    Every forward pass reaches experts of all ranks, so the ranks call it equally often, each with
    a prompt of its own if it likes.
    """
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        window = torch.tensor([text[-model.config.length :]], device=device)
        logits = model(window)[0, -1].cpu()
        text.append(int(torch.multinomial(F.softmax(logits / 0.8, -1), 1, generator=generator)))
    return bytes(text)
