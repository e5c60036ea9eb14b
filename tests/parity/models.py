"""Small models with every kind of use of a parameter."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

VOCABULARY = 61


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # (batch, heads, length, -)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """A decoder whose flat shards span several subgroups of 4,096 elements."""

    def __init__(self, *, width=32, layers=3, tie=None):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = None if tie == "functional" else nn.Linear(width, VOCABULARY, bias=False)
        if tie == "identity":
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return functional.linear(x, self.tokens.weight) if self.head is None else self.head(x)


class MLPBlock(nn.Module):
    def __init__(self, width, *, checkpoints_inside=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.checkpoints_inside = checkpoints_inside

    def mlp(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        if self.checkpoints_inside is None:
            return x + self.mlp(x)
        return x + checkpoint(self.mlp, x, use_reentrant=self.checkpoints_inside)


class CheckpointedModel(nn.Module):
    """Five blocks under activation checkpoints of one form; `form` None has none."""

    def __init__(self, *, form, reentrant, tie=None, width=16):
        super().__init__()
        inside = reentrant if form == "inside" else None
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(MLPBlock(width, checkpoints_inside=inside) for _ in range(5))
        self.head = nn.Linear(width, VOCABULARY)
        if tie == "identity":
            self.head.weight = self.tokens.weight
        self.form = form
        self.reentrant = reentrant
        self.is_tied_by_function = tie == "functional"

    def forward(self, tokens):
        x = self.tokens(tokens)
        if self.form == "with_head":
            return self._checkpoint(lambda h: self.head(self._run(h, 0, 5)), x)
        return self._head(self._body(x))

    def _body(self, x):
        if self.form == "each":
            for index in range(5):
                x = self._checkpoint(self.blocks[index], x)
            return x
        if self.form == "segments":
            x = self._checkpoint(lambda h: self._run(h, 0, 3), x)
            return self._checkpoint(lambda h: self._run(h, 3, 5), x)
        if self.form == "nested":
            return self._checkpoint(self._nested, x)
        if self.form == "sequential":
            return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=self.reentrant)
        return self._run(x, 0, 5)

    def _nested(self, x):
        for index in range(4):
            x = self._checkpoint(self.blocks[index], x)
        return self.blocks[4](x)

    def _head(self, x):
        if self.is_tied_by_function:
            return functional.linear(x, self.tokens.weight)
        return self.head(x)

    def _run(self, x, first, last):
        for index in range(first, last):
            x = self.blocks[index](x)
        return x

    def _checkpoint(self, run, x):
        return checkpoint(run, x, use_reentrant=self.reentrant)


def build(factory, *, dtype=torch.bfloat16, seed=0, **options):
    """Returns the same model for the same arguments, every time."""
    torch.manual_seed(seed)
    model = factory(**options)
    return model if dtype is None else model.to(dtype)


def batch(index, *, size=2, length=16):
    """Returns the inputs and targets number `index`."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, index):
    inputs, targets = batch(index)
    return functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
