"""The training step, and validation: the same program offloaded and all in memory."""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.config import Config
from offload.runs.data import NUM_VALIDATION_WINDOWS, Batch, Text
from offload.runs.loss_contract import require_loss
from offload.runs.phases import StepClock
from offload.runs.schedule import learning_rate
from offload.runs.user_code import calling_user_code

_LOG = logging.getLogger("offload.runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step computed."""

    loss: float
    lr: float
    grad_norm: float
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """Runs single steps of a model on a text."""

    config: Config
    model: nn.Module
    optimizer: Optimizer
    text: Text
    device: torch.device
    """Of the model's inputs."""
    accumulating: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context for all micro-steps but the last."""

    def run_step(self, step: int, clock: StepClock) -> StepOutcome:
        """Runs step `step` (from 1): its micro-steps, the clip and the update.

        A step whose gradient norm is not finite leaves the state and its step counts untouched.
        """
        lr = self._set_learning_rate(step)
        loss = self._accumulate(step, clock)
        grad_norm = self._clip()
        is_finite = math.isfinite(grad_norm)
        with clock.update():
            if is_finite:
                self.optimizer.step()
            self.optimizer.zero_grad()
        if not is_finite:
            _LOG.warning("step %d is skipped: its gradient norm is %s", step, grad_norm)
        return StepOutcome(loss=loss, lr=lr, grad_norm=grad_norm, skipped=not is_finite)

    def validate(self) -> float:
        """Returns the mean loss over the windows of validation, in nats per token."""
        config = self.config
        was_training = self.model.training
        self.model.eval()
        total = 0.0
        with torch.no_grad():
            for batch in self.text.validation_batches(
                batch=config.train.batch, context=config.model.context
            ):
                loss = self._loss_of(batch).item()
                total += loss * len(batch.inputs)
        self.model.train(was_training)
        return total / NUM_VALIDATION_WINDOWS

    def _set_learning_rate(self, step: int) -> float:
        optimizer = self.config.optimizer
        lr = learning_rate(lr=optimizer.lr, warmup_steps=optimizer.warmup_steps, step=step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _accumulate(self, step: int, clock: StepClock) -> float:
        train = self.config.train
        total = 0.0
        for micro_step in range(train.micro_steps):
            batch = self.text.train_batch(
                seed=train.seed,
                step=step - 1,
                micro_step=micro_step,
                batch=train.batch,
                context=self.config.model.context,
            )
            with clock.forward():
                loss = self._loss_of(batch) / train.micro_steps
            is_last = micro_step == train.micro_steps - 1
            with (
                clock.backward(),
                nullcontext() if is_last else self.accumulating(),
                calling_user_code("`backward` of the model's loss"),
            ):
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def _loss_of(self, batch: Batch) -> Tensor:
        inputs, targets = batch.inputs.to(self.device), batch.targets.to(self.device)
        with calling_user_code("the model's `forward`"):
            loss = self.model(inputs, targets)
        return require_loss(self.config.model.factory, loss, is_trained=torch.is_grad_enabled())

    def _clip(self) -> float:
        max_norm = self.config.train.max_grad_norm
        # Without a limit the factor is exactly 1, which leaves every gradient as it is.
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), max_norm if max_norm > 0 else math.inf
        )
        return float(norm)
