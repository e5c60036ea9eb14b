"""What training gives without any offloading: plain autograd, and an update written from the rules.

Nothing here comes from the package: arithmetic, norm, clip factor and digest are written from
`docs/numerics.md`, in NumPy, one fp32 operation at a time.
"""

import struct

import numpy as np
import torch
import xxhash

BLOCK_ELEMENTS = 4096
LANES = 16
CODES = {torch.bfloat16: b"BF16", torch.float16: b"F16", torch.float32: b"F32"}


class Reference:
    """An untouched module in memory, and AdamW over it.

    Attributes:
        parameters: By the code-point smallest name of each, in code-point order.
        scale: The clip factor of this step; it is applied to the unrounded gradient.
    """

    def __init__(self, model, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.model = model
        self.options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.lr_of = {}
        self.parameters = _by_smallest_name(model)
        self.trainable = {n: p for n, p in self.parameters.items() if p.requires_grad}
        self.masters = {n: to_fp32(p) for n, p in self.trainable.items()}
        self.exp_avg = {n: np.zeros_like(m) for n, m in self.masters.items()}
        self.exp_avg_sq = {n: np.zeros_like(m) for n, m in self.masters.items()}
        self.steps = dict.fromkeys(self.trainable, 0)
        self.completed_steps = 0
        self.scale = None

    def norm(self):
        """Returns n: the norm of all gradients that there are."""
        total = 0.0
        for parameter in self.trainable.values():
            if parameter.grad is not None:
                total += sum_of_squares(to_fp32(parameter.grad))
        return np.float32(np.sqrt(np.float64(total)))

    def clip(self, max_norm):
        norm = self.norm()
        factor = np.float32(1) / (norm + np.float32(1e-6))
        factor = factor * np.float32(max_norm)
        self.scale = factor if factor < 1 or np.isnan(factor) else np.float32(1)
        return norm

    def step(self):
        for name, parameter in self.trainable.items():
            if parameter.grad is not None:
                self._update(name, parameter)
        self.completed_steps += 1
        self.scale = None

    def edited(self, name):
        """The user changed the parameter: it is the master again."""
        self.masters[name] = to_fp32(self.trainable[name])

    def digest(self):
        digest = xxhash.xxh3_128()
        for name, parameter in self.parameters.items():
            shape = tuple(parameter.shape)
            digest.update(name.encode() + b"\0" + CODES[parameter.dtype] + b"\0")
            digest.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy())
            if name in self.trainable:
                digest.update(struct.pack("<Q", self.steps[name]))
                digest.update(self.masters[name].tobytes())
                digest.update(b"exp_avg\0" + self.exp_avg[name].tobytes())
                digest.update(b"exp_avg_sq\0" + self.exp_avg_sq[name].tobytes())
        digest.update(struct.pack("<Q", self.completed_steps))
        return digest.hexdigest()

    def _update(self, name, parameter):
        self.steps[name] += 1
        gradient = to_fp32(parameter.grad)
        if self.scale is not None and self.scale != 1:
            gradient = gradient * self.scale
        options = {**self.options, "lr": self.lr_of.get(name, self.options["lr"])}
        self.masters[name], self.exp_avg[name], self.exp_avg_sq[name] = adamw(
            self.masters[name],
            gradient,
            self.exp_avg[name],
            self.exp_avg_sq[name],
            step=self.steps[name],
            **options,
        )
        with torch.no_grad():
            values = from_master(self.masters[name], parameter.dtype)
            parameter.copy_(values.view(parameter.shape))


def adamw(p, g, m, v, *, lr, betas, eps, weight_decay, step):
    """Returns the next master, exp_avg and exp_avg_sq."""
    beta1, beta2 = betas
    c1, c2, b2 = np.float32(1 - beta1), np.float32(1 - beta2), np.float32(beta2)
    q, e = np.float32(1 - lr * weight_decay), np.float32(eps)
    u = np.float32(-(lr / (1 - beta1**step)))
    r = np.float32(1 / (1 - beta2**step) ** 0.5)
    p = p * q
    m = m + c1 * (g - m) if c1 < 0.5 else g - (g - m) * (np.float32(1) - c1)
    v = b2 * v + (c2 * g) * g
    d = np.sqrt(v) * r + e
    return p + (u * m) / d, m, v


def sum_of_squares(gradient):
    """Returns the float64 sum over blocks of 4,096 elements, each in 16 lanes."""
    flat = gradient.reshape(-1)
    num_blocks = -(-len(flat) // BLOCK_ELEMENTS)
    padded = np.zeros(num_blocks * BLOCK_ELEMENTS, dtype=np.float64)  # adding +0.0 changes nothing
    padded[: len(flat)] = flat
    rows = (padded * padded).reshape(num_blocks, BLOCK_ELEMENTS // LANES, LANES)
    lanes = np.zeros((num_blocks, LANES))
    for row in range(BLOCK_ELEMENTS // LANES):
        lanes += rows[:, row]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half:]
    total = 0.0
    for block in lanes[:, 0]:
        total += float(block)
    return total


def from_master(master, dtype):
    """Returns the parameter that a master rounds to: bf16 with ties away from zero."""
    if dtype is torch.float32:
        return torch.from_numpy(master.copy())
    assert dtype is torch.bfloat16
    bits = master.view(np.uint32)
    high = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return torch.from_numpy(high.view(np.int16).copy()).view(torch.bfloat16)


def to_fp32(tensor):
    return tensor.detach().to(torch.float32).contiguous().view(-1).numpy().copy()


def same_bits(a, b):
    """Returns whether two tensors are equal bit for bit: signs of zeros and NaNs too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)


def _by_smallest_name(model):
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    smallest = {min(candidates): parameter for parameter, candidates in names.items()}
    return dict(sorted(smallest.items()))
