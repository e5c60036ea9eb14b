"""A plain loop over an untouched module, with the update written here from its definition."""

import math
import struct

import numpy as np
import pytest
import torch
import xxhash

from offload.runs.data import open_text
from offload.runs.model import build_model

F32 = np.float32


class Oracle:
    """AdamW in NumPy fp32, one rounding each; masters are fp32, parameters round half away."""

    def __init__(self, model, *, lr, betas, eps, weight_decay):
        self.options = (lr, betas, eps, weight_decay)
        self.model = model
        self.step_count = 0
        self.master = {n: p.detach().float().numpy().copy() for n, p in model.named_parameters()}
        self.m = {n: np.zeros_like(w) for n, w in self.master.items()}
        self.v = {n: np.zeros_like(w) for n, w in self.master.items()}

    def step(self, lr, max_norm):
        _, (beta1, beta2), eps, decay = self.options
        self.step_count += 1
        t = self.step_count
        c1, c2, b2 = F32(1 - beta1), F32(1 - beta2), F32(beta2)
        q, e = F32(1 - lr * decay), F32(eps)
        u, r = F32(-(lr / (1 - beta1**t))), F32(1 / (1 - beta2**t) ** 0.5)
        factor = self.clip_factor(max_norm)
        for name, parameter in self.model.named_parameters():
            g = parameter.grad.float().numpy()
            if factor != 1:
                g = g * factor
            m, v, p = self.m[name], self.v[name], self.master[name]
            p = p * q
            m = m + c1 * (g - m)
            v = b2 * v + (c2 * g) * g
            d = np.sqrt(v) * r + e
            p = p + (u * m) / d
            self.m[name], self.v[name], self.master[name] = m, v, p
            bits = (p.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)
            with torch.no_grad():
                parameter.copy_(
                    torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
                )
            parameter.grad = None

    def norm(self):
        total = 0.0
        for _, parameter in sorted(self.model.named_parameters()):
            values = parameter.grad.double().flatten().numpy()
            # A last block that is not full is filled with zeros, which change no sum.
            values = np.pad(values, (0, -len(values) % 4096)).reshape(-1, 256, 16)
            lanes = np.zeros((len(values), 16))
            for row in range(256):
                lanes += values[:, row] * values[:, row]
            for half in (8, 4, 2, 1):
                lanes = lanes[:, :half] + lanes[:, half : 2 * half]
            of_parameter = 0.0
            for of_block in lanes[:, 0]:
                of_parameter += of_block
            total += of_parameter
        return F32(math.sqrt(total))

    def clip_factor(self, max_norm):
        if not max_norm:
            return F32(1)
        return min(F32(1) / (self.norm() + F32(1e-6)) * F32(max_norm), F32(1))

    def digest(self):
        found = xxhash.xxh3_128()
        for name, parameter in sorted(self.model.named_parameters()):
            found.update(name.encode() + b"\0BF16\0" + struct.pack("<I", parameter.dim()))
            found.update(struct.pack(f"<{parameter.dim()}Q", *parameter.shape))
            found.update(parameter.detach().view(torch.int16).numpy().tobytes())
            found.update(struct.pack("<Q", self.step_count) + self.master[name].tobytes())
            found.update(b"exp_avg\0" + self.m[name].tobytes())
            found.update(b"exp_avg_sq\0" + self.v[name].tobytes())
        found.update(struct.pack("<Q", self.step_count))
        return found.hexdigest()


def train_by_hand(config):
    torch.manual_seed(config.train.seed)
    model = build_model(config.model)
    text = open_text("files", files=config.data.files, validation_fraction=0.05)
    options = config.optimizer
    oracle = Oracle(
        model,
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    losses = []
    context = config.model.context
    for step in range(config.train.steps):
        loss_of_step = 0.0
        for micro_step in range(config.train.micro_steps):
            starts = np.random.default_rng([config.train.seed, step, micro_step]).integers(
                0, len(text.train) - context, size=config.train.batch
            )
            windows = torch.tensor(
                np.stack([text.train[s : s + context + 1] for s in starts]).astype(np.int64)
            )
            loss = model(windows[:, :-1], windows[:, 1:]) / config.train.micro_steps
            loss.backward()
            loss_of_step += loss.item()
        losses.append(loss_of_step)
        lr = options.lr * min(1, (step + 1) / options.warmup_steps)
        oracle.step(lr, config.train.max_grad_norm)
    return losses, oracle.digest()


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
@pytest.mark.parametrize("offload", [True, False])
def test_a_run_equals_the_loop_written_by_hand(
    tmp_path, small_config, train, offload, max_grad_norm
):
    config = small_config(
        train__steps=8, train__micro_steps=2, train__max_grad_norm=max_grad_norm, offload=offload
    )

    result = train(config, run_dir=tmp_path / "run")

    losses, digest = train_by_hand(config)
    assert result.losses == losses
    assert result.state_digest == digest
