"""A GPT decoder over bytes: the model of the quickstart."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.errors import ConfigError

_INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """The sizes and the element type of a GPT."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"cannot build a GPT: `model.{name}` must be at least 1, "
                    f"found {getattr(self, name)}; raise it"
                )
        if self.width % self.heads:
            raise ConfigError(
                f"cannot build a GPT: `model.width` must be a multiple of `model.heads`, "
                f"found {self.width} and {self.heads}; change one of them"
            )


class GPT(nn.Module):
    """Pre-norm decoder with learned positions and an untied head; a call gives the loss."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width, dtype=shape.dtype)
        self.positions = nn.Embedding(shape.context, shape.width, dtype=shape.dtype)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, eps=1e-5, dtype=shape.dtype)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False, dtype=shape.dtype)
        self._initialise(shape.layers)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of `targets`, in nats.

        Args:
            inputs: Token indices, (batch, length) with length at most `context`.
            targets: The tokens that follow, (batch, length).
        """
        return cross_entropy(self.logits(inputs), targets)

    def logits(self, inputs: Tensor) -> Tensor:
        """Returns the scores of the next token, (batch, length, vocabulary)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.tokens(inputs) + self.positions(positions)  # (batch, length, width)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _initialise(self, layers: int) -> None:
        residual_std = _INITIAL_STD / (2 * layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_residual = name.endswith(("attention.out", "mlp.down"))
                nn.init.normal_(module.weight, 0.0, residual_std if is_residual else _INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class Block(nn.Module):
    """One decoder layer: attention and an MLP, each added to its normed input."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=1e-5, dtype=shape.dtype)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width, eps=1e-5, dtype=shape.dtype)
        self.mlp = MLP(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the layer's output, (batch, length, width) as its input."""
        hidden = hidden + self.attention(self.norm1(hidden))
        out: Tensor = hidden + self.mlp(self.norm2(hidden))
        return out


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, dtype=shape.dtype)
        self.out = nn.Linear(shape.width, shape.width, dtype=shape.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the attended values, (batch, length, width) as its input."""
        batch, length, width = hidden.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(hidden).split(width, dim=-1)
        )  # each (batch, heads, length, width / heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two projections with a tanh GELU between them."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width, dtype=shape.dtype)
        self.down = nn.Linear(4 * shape.width, shape.width, dtype=shape.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the transformed activations, (batch, length, width) as its input."""
        out: Tensor = self.down(functional.gelu(self.up(hidden), approximate="tanh"))
        return out


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats, computed in fp32."""
    return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def logits_workspace_bytes(shape: GPTShape, *, batch: int, length: int) -> int:
    """Returns the bytes of the logits and their fp32 copy, which autograd does not save."""
    return batch * length * shape.vocabulary * (shape.dtype.itemsize + 4)
