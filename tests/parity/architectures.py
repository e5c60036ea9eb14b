"""Small models of many shapes; a call with an index gives the loss of that batch."""

import torch
from parity.models import VOCABULARY, Block, SmallGPT, loss_of
from torch import nn
from torch.nn import functional

WIDTH = 16


def _generator(index):
    return torch.Generator().manual_seed(index)


def _tokens(index, *, length=9):
    return torch.randint(0, VOCABULARY, (2, length), generator=_generator(index))


def _values(index, *shape, like):
    return torch.randn(shape, generator=_generator(index)).to(like.dtype)


def _cross_entropy(logits, targets):
    return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


class TiedGPT(SmallGPT):
    def __init__(self):
        super().__init__(width=WIDTH, layers=2, tie="identity")

    def loss(self, index):
        return loss_of(self, index)


class FunctionallyTiedGPT(SmallGPT):
    def __init__(self):
        super().__init__(width=WIDTH, layers=2, tie="functional")

    def loss(self, index):
        return loss_of(self, index)


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, memory):
        attended = functional.scaled_dot_product_attention(
            self.query(x), self.key(memory), self.value(memory)
        )
        return x + attended


class EncoderDecoder(nn.Module):
    """Encoder, decoder and head share one embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.cross = nn.ModuleList(CrossAttention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def loss(self, index):
        source, target = _tokens(index), _tokens(index + 100)
        memory = self.tokens(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.tokens(target[:, :-1])
        for block, cross in zip(self.decoder, self.cross, strict=True):
            x = cross(block(x), memory)
        return _cross_entropy(self.head(x), target[:, 1:])


class Experts(nn.Module):
    """Each token goes to the expert that its own values choose; some experts get none."""

    def __init__(self, num_experts=6):
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num_experts)
        )

    def forward(self, x):
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + out.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, index):
        tokens = _tokens(index)
        x = self.tokens(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return _cross_entropy(self.head(x), tokens[:, 1:])


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def loss(self, index):
        x = self.stem(_values(index, 4, 3, 8, 8, like=self.head.bias))
        for stage in self.stages:
            x = x + stage(x)
        logits = self.head(x.mean((2, 3)))
        return _cross_entropy(logits, torch.arange(4))


class Recurrent(nn.Module):
    """One cell, called five times, beside an LSTM of torch's own."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def loss(self, index):
        x = _values(index, 3, 5, WIDTH, like=self.head.bias)
        state = torch.zeros(3, WIDTH, dtype=x.dtype)
        for position in range(5):
            state = self.cell(x[:, position], state)
        out, _ = self.lstm(x)
        return _cross_entropy(self.head(state + out[:, -1]), torch.arange(3))


class VisionTransformer(nn.Module):
    """Parameters of the root: a class token and positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH) / 4)
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) / 4)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7)

    def loss(self, index):
        return self(_values(index, 2, 3, 8, 8, like=self.positions))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return _cross_entropy(self.head(self.norm(x)[:, 0]), torch.arange(2))


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two narrow ones beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Adapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)

    def loss(self, index):
        tokens = _tokens(index)
        x = self.tokens(tokens[:, :-1])
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return _cross_entropy(self.head(x), tokens[:, 1:])


class RandomDepth(nn.Module):
    """Each layer is left out at random, in another way at each call."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, index):
        tokens = _tokens(index)
        x = self.tokens(tokens[:, :-1])
        for is_kept, layer in zip(
            torch.rand(4, generator=_generator(index)) < 0.6, self.layers, strict=True
        ):
            if is_kept:
                x = layer(x)
        return _cross_entropy(self.head(x), tokens[:, 1:])


class NestedLists(nn.Module):
    """Lists in lists and dicts, and one block in two of them."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.stages = nn.ModuleList(
            nn.ModuleDict(
                {
                    "layers": nn.ModuleList([nn.Linear(WIDTH, WIDTH), shared]),
                    "norm": nn.LayerNorm(WIDTH),
                }
            )
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)

    def loss(self, index):
        x = _values(index, 3, WIDTH, like=self.head.bias)
        for stage in self.stages:
            for layer in stage["layers"]:
                x = x + functional.gelu(layer(stage["norm"](x)))
        return _cross_entropy(self.head(x), torch.arange(3))


class TwoHeads(nn.Module):
    """Two losses of one trunk; of every third batch one head has no part."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.one = nn.Linear(WIDTH, 3)
        self.other = nn.Linear(WIDTH, 1)

    def loss(self, index):
        x = _values(index, 3, WIDTH, like=self.one.bias)
        for layer in self.trunk:
            x = functional.silu(layer(x))
        loss = _cross_entropy(self.one(x), torch.arange(3))
        if index % 3 != 2:
            loss = loss + self.other(x).float().square().mean()
        return loss


class OneParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def loss(self, index):
        return (self.weight * _values(index, 4, like=self.weight)).float().square().sum()


class KeptWeight(torch.autograd.Function):
    """Keeps the weight on the context itself, past all hooks for saved tensors."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class CustomLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        return KeptWeight.apply(x, self.weight)


class CustomFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CustomLinear() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def loss(self, index):
        x = _values(index, 3, WIDTH, like=self.head.bias)
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return _cross_entropy(self.head(x), torch.arange(3))


ARCHITECTURES = [
    TiedGPT,
    FunctionallyTiedGPT,
    EncoderDecoder,
    MixtureOfExperts,
    ConvNet,
    Recurrent,
    VisionTransformer,
    Adapters,
    RandomDepth,
    NestedLists,
    TwoHeads,
    OneParameter,
]
