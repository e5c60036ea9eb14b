"""Models of runs whose passes use a unit more than once: a call gives the loss."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(functional.gelu(self.up(hidden)))


class TiedAtBothEnds(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight

    def hidden(self, inputs):
        hidden = self.tokens(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def logits(self, hidden):
        return self.head(hidden)

    def forward(self, inputs, targets):
        logits = self.logits(self.hidden(inputs))
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Untied(TiedAtBothEnds):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.head = nn.Linear(width, 256, bias=False)


class TiedInCode(TiedAtBothEnds):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        del self.head

    def logits(self, hidden):
        return functional.linear(hidden, self.tokens.weight)


class EncoderAndDecoder(TiedAtBothEnds):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.decoder_tokens = nn.Embedding(256, width)
        self.decoder_tokens.weight = self.tokens.weight
        self.decoder = nn.ModuleList(Layer(width) for _ in range(depth // 2))

    def hidden(self, inputs):
        hidden = super().hidden(inputs) + self.decoder_tokens(inputs)
        for layer in self.decoder:
            hidden = layer(hidden)
        return hidden


class UsedTwice(TiedAtBothEnds):
    """The first two layers are called again before the head."""

    def hidden(self, inputs):
        hidden = super().hidden(inputs)
        for layer in self.layers[:2]:
            hidden = layer(hidden)
        return hidden


class UsedBackwards(Untied):
    """Layers are called from the last to the first, and one of them never."""

    def hidden(self, inputs):
        hidden = self.tokens(inputs)
        for layer in reversed(self.layers[1:]):
            hidden = layer(hidden)
        return hidden


class NeedsValues(TiedAtBothEnds):
    """Its passes cannot run on the meta device."""

    def forward(self, inputs, targets):
        assert torch.isfinite(self.head.weight).all().item()
        return super().forward(inputs, targets)


class UsedInTurns(Untied):
    """Layers are called in an order of their own, most of them twice."""

    def hidden(self, inputs):
        hidden = self.tokens(inputs)
        for index in (0, 3, 1, 3, 4, 0, 2, 5, 2, 1, 5):
            hidden = self.layers[index](hidden)
        return hidden


class OwnedByRoot(Untied):
    """The model has parameters of its own, and uses them at both ends of its call."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.positions = nn.Parameter(torch.zeros(1024, width))
        self.scale = nn.Parameter(torch.ones(width))

    def hidden(self, inputs):
        hidden = self.tokens(inputs) + self.positions[: inputs.shape[-1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden * self.scale


class SharedInLayers(Untied):
    """A layer that has a weight of another one, so that its call needs two units."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.layers[3].up.weight = self.layers[0].up.weight


class OverGraph(Untied):
    """A layer mixes what lies at the ends of edges, which are sparse."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        places = torch.arange(width).repeat(2, 1)
        edges = torch.sparse_coo_tensor(
            places, torch.ones(width), (width, width), check_invariants=False
        )
        self.register_buffer("edges", edges, persistent=False)

    def hidden(self, inputs):
        hidden = super().hidden(inputs)
        return torch.sparse.mm(self.edges, hidden.flatten(0, -2).t()).t().view_as(hidden)


class TiedByFunctions(nn.Module):
    """No module's call has the table, which is used at both ends."""

    def __init__(self, width, depth):
        super().__init__()
        self.table = nn.ParameterList([nn.Parameter(torch.randn(256, width))])
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, inputs, targets):
        hidden = functional.embedding(inputs, self.table[0])
        for layer in self.layers:
            hidden = layer(hidden)
        logits = functional.linear(hidden, self.table[0])
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class AskedForLast(nn.Module):
    """The first layer's input needs a gradient: backward asks for its weights last."""

    def __init__(self, width, depth):
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, inputs, targets):
        hidden = functional.one_hot(inputs, self.width).to(self.head.weight.dtype)
        hidden.requires_grad_()
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
