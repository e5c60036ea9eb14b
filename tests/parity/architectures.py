"""Small models of many shapes: what streams, in which order, how often, and what is never used."""

from dataclasses import dataclass

import torch
from parity.models import VOCABULARY, Block, SmallGPT, batch
from torch import nn
from torch.nn import functional

WIDTH = 16


class EncoderDecoder(nn.Module):
    """One embedding for source, target and output; the decoder looks at the encoder's end."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.cross = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens):
        memory = self.shared(tokens.flip(1))
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(tokens)
        for block, cross in zip(self.decoder, self.cross, strict=True):
            x = block(x)
            x = x + torch.softmax(cross(x) @ memory.transpose(1, 2), -1) @ memory
        return self.head(x)


class MixtureOfExperts(nn.Module):
    """Each token goes to the expert that the gate prefers; some experts get none."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.gate = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens[:, :3])  # few, so that experts stay without any
        weights, chosen = torch.softmax(self.gate(x), -1).max(-1)
        mixed = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            mask = chosen == index
            mixed[mask] = self.experts[index](x[mask]) * weights[mask].unsqueeze(-1)
        return self.head(x + mixed)


class Convolutional(nn.Module):
    """Convolutions and running statistics, in sequences and not in lists."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, groups=2),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 7)

    def forward(self, images):
        return self.head(self.features(images).mean((2, 3)))


class Recurrent(nn.Module):
    """One cell, used five times, and torch's own GRU, whose weights are called `weight_ih_l0`."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())])
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        state = x.new_zeros(x.shape[0], WIDTH)
        states = []
        for position in range(5):
            state = self.cells[0](torch.cat([x[:, position], state], -1))
            states.append(state)
        mixed, _ = self.gru(torch.stack(states, 1))
        return self.head(mixed)


class VisionTransformer(nn.Module):
    """Patches by a convolution; a class token and positions that belong to the root."""

    def __init__(self):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x):
        return self.base(x) + functional.linear(functional.linear(x, self.down), self.up)


class LowRank(SmallGPT):
    """A frozen base; only the corrections are trained."""

    def __init__(self):
        super().__init__(width=WIDTH, layers=3)
        self.requires_grad_(False)
        for block in self.blocks:
            block.up = Adapted(block.up)
            block.attention.qkv = Adapted(block.attention.qkv)


class RandomDepth(nn.Module):
    """A tower whose layers are left out by chance in training."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = block(x)
        return self.head(x)


class NestedLists(nn.Module):
    """Lists in lists in a dict, beside parameters of the stages' own."""

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.layers = nn.ModuleList(
                nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2)
            )

        def forward(self, x):
            for pair in self.layers:
                x = x * self.scale + pair[1](functional.gelu(pair[0](x)))
            return x

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.ModuleDict({"first": self.Stage(), "second": self.Stage()})
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for name in ("second", "first", "second"):
            x = self.stages[name](x)
        return self.head(x)


class BesideCalls(nn.Module):
    """Parameters of modules that nobody calls: lists of them, and what attention has inside it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.low_rank = nn.ModuleList(
            nn.ParameterList([torch.randn(WIDTH, 2) / 4, torch.randn(2, WIDTH) / 4])
            for _ in range(3)
        )
        self.mixes = nn.ParameterDict({"a": torch.ones(WIDTH), "b": torch.ones(WIDTH)})
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) * self.mixes["a"]
        for attention in (self.first, self.second):
            x = x + attention(x, x, x, need_weights=False)[0]
        for block, (down, up) in zip(self.blocks, self.low_rank, strict=True):
            x = block(x) + x @ down @ up
        return self.head(x * self.mixes["b"])


class TwoHeads(nn.Module):
    """Two losses over one trunk."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.next = nn.Linear(WIDTH, VOCABULARY)
        self.parity = nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.next(x), self.parity(x)


class OneParameter(nn.Module):
    """A model of one number."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens):
        return tokens.to(self.value.dtype) * self.value


@dataclass(frozen=True)
class Architecture:
    """A model and its losses, in the order in which they are propagated."""

    factory: object
    losses: object
    options: tuple = ()

    def build(self, dtype=torch.bfloat16):
        torch.manual_seed(0)
        return self.factory(**dict(self.options)).to(dtype)


def next_token(model, index):
    torch.manual_seed(index)  # the same layers are left out in both models
    inputs, targets = batch(index)
    logits = model(inputs).float()
    targets = targets[:, : logits.shape[1]]
    return [functional.cross_entropy(logits.flatten(0, 1), targets.flatten())]


def picture_class(model, index):
    generator = torch.Generator().manual_seed(index)
    images = torch.randn(3, 3, 8, 8, generator=generator)
    images = images.to(next(model.parameters()).dtype)
    return [functional.cross_entropy(model(images).float(), torch.tensor([1, 6, 0]))]


def both_heads(model, index):
    inputs, targets = batch(index)
    following, parity = (logits.float().flatten(0, 1) for logits in model(inputs))
    return [
        functional.cross_entropy(following, targets.flatten()),
        functional.cross_entropy(parity, targets.flatten() % 2),
    ]


def one_sum(model, index):
    return [model(batch(index)[0]).float().mean()]


ARCHITECTURES = {
    "gpt_with_tied_head": Architecture(
        SmallGPT, next_token, (("width", WIDTH), ("tie", "identity"))
    ),
    "encoder_decoder": Architecture(EncoderDecoder, next_token),
    "mixture_of_experts": Architecture(MixtureOfExperts, next_token),
    "convolutional": Architecture(Convolutional, picture_class),
    "recurrent": Architecture(Recurrent, next_token),
    "vision_transformer": Architecture(VisionTransformer, picture_class),
    "low_rank": Architecture(LowRank, next_token),
    "random_depth": Architecture(RandomDepth, next_token),
    "nested_lists": Architecture(NestedLists, next_token),
    "tied_by_function": Architecture(
        SmallGPT, next_token, (("width", WIDTH), ("tie", "functional"))
    ),
    "beside_calls": Architecture(BesideCalls, next_token),
    "two_heads": Architecture(TwoHeads, both_heads),
    "one_parameter": Architecture(OneParameter, one_sum),
}
