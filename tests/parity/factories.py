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
