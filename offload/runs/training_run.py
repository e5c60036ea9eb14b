"""One process's part of a run: from its open session to the last commit."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from offload.config import Config
from offload.errors import ModelError, OffloadError
from offload.plan.machine import Machine
from offload.plan.run_plan import RunPlan
from offload.runs.activations import ActivationMeter
from offload.runs.busy import CpuTime, others_cpu_share
from offload.runs.commits import commit_metadata, restore
from offload.runs.data import Text
from offload.runs.interrupt import StopRequest
from offload.runs.intervals import Interval
from offload.runs.loop import TrainingLoop
from offload.runs.metrics import MetricsFile, StepMetrics, truncate_metrics
from offload.runs.model import build_model
from offload.runs.optimizer import make_optimizer
from offload.runs.phases import StepClock
from offload.runs.planning import tokens_per_step
from offload.runs.recorder import StepFacts, StepRecorder
from offload.runs.rss import RssMeter
from offload.runs.run_directory import RunDirectory
from offload.session import Session, SessionStats

Progress = Callable[[StepMetrics], None]

_LOG = logging.getLogger("offload.runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a process did of a run."""

    first_step: int
    done: int
    """Steps done in all."""
    stopped_by: str | None
    loss_before: float | None
    """None where nothing was validated."""
    loss_after: float | None
    digest: str
    stats: SessionStats
    rss_baseline_bytes: int
    rss_peak_bytes: int
    is_rss_peak_exact: bool
    """Whether the kernel counted it."""
    activation_bytes: int
    recorder: StepRecorder
    commit_s: float | None
    """Median time of a commit; None where there was none."""
    recovery_s: float
    """From the start of this process's part to its first step."""
    write_shares: tuple[float, ...]
    """The part of all written bytes that went to each path."""
    others_cpu_share: float | None
    """The part of the cores' time that other processes took during the steps."""
    torch_threads: int
    """On which the passes computed."""


class TrainingRun:
    """Trains from the first step, or the last commit, until done or asked to stop."""

    def __init__(
        self,
        *,
        config: Config,
        directory: RunDirectory,
        plan: RunPlan,
        machine: Machine | None,
        text: Text,
        progress: Progress | None,
        is_kept: bool = True,
    ) -> None:
        self._is_kept = is_kept
        self._config = config
        self._directory = directory
        self._text = text
        self._progress = progress
        self._path_rates = _round_trip_rates(machine)
        self._commits = config.offload and config.tiers.storage.durability == "commit"
        self._committed: int | None = None
        self._done = 0
        self._updated = 0
        """As `_done`, steps done in all, but before a step has its line."""
        self._commit_interval = Interval(config.tiers.storage.commit_every)
        self._save_interval = Interval(config.checkpoint.save_every)
        self._commit_s: list[float] = []
        self._recovery_s = 0.0
        self._activations = ActivationMeter()
        self._rss = RssMeter()
        self._recorder = StepRecorder(
            tokens_per_step=tokens_per_step(config),
            traffic=plan.traffic,
            num_parameters=plan.layout.trainable_elements,
            machine=machine,
            overlap=config.policy.overlap if config.offload else "none",
            prefetched_bytes=_prefetched_bytes(config, plan),
            link=plan.link,
            shares_cores=config.shares_cores,
        )

    def execute(self) -> RunSummary:
        """Runs to the end and closes the session."""
        self._rss.start()
        if not self._rss.is_exact:
            _LOG.warning("the RSS peak cannot be reset by this process: it is sampled")
        rss_baseline_bytes = self._rss.sample()
        started_s = time.perf_counter()
        with (
            StopRequest() as stop,
            self._session() as session,
            self._keeping_steps(session),
        ):
            loop = self._build(session)
            first_step = self._restore(session) + 1
            self._recovery_s = time.perf_counter() - started_s
            loss_before = loop.validate() if self._is_kept else None
            cpu_time = CpuTime.now()
            done = self._run_steps(first_step, loop, session, stop)
            others_share = others_cpu_share(cpu_time, CpuTime.now())
            loss_after = loss_before
            if done >= first_step and self._is_kept:
                loss_after = loop.validate()
            if self._commits and self._committed != done:
                self._commit(done, session)
            if done < self._config.train.steps:
                self._report_stop(done, stop.signal_name)
            else:  # one that was asked to stop does not wait: the next start goes on with it
                session.wait_drained()
            return RunSummary(
                first_step=first_step,
                done=done,
                stopped_by=stop.signal_name if done < self._config.train.steps else None,
                loss_before=loss_before,
                loss_after=loss_after,
                digest=session.state_digest(),
                stats=session.stats(),
                rss_baseline_bytes=rss_baseline_bytes,
                rss_peak_bytes=self._rss.peak_bytes,
                is_rss_peak_exact=self._rss.is_exact,
                activation_bytes=self._activations.peak_bytes,
                recorder=self._recorder,
                commit_s=statistics.median(self._commit_s) if self._commit_s else None,
                recovery_s=self._recovery_s,
                write_shares=_shares([path.write_bytes for path in session.stats().paths]),
                others_cpu_share=others_share,
                torch_threads=torch.get_num_threads(),
            )

    def _session(self) -> Session:
        if not self._config.offload:
            return Session(self._config)
        return Session(
            self._config,
            store=self._directory.stores,
            resume=self._directory.is_resumed,
            path_rates=self._path_rates,
        )

    def _build(self, session: Session) -> TrainingLoop:
        torch.manual_seed(self._config.train.seed)
        with session.building():
            model = build_model(self._config.model)
        model = session.wrap(model)
        model.train()
        optimizer = make_optimizer(session, model, self._config.optimizer)
        return TrainingLoop(
            config=self._config,
            model=model,
            optimizer=optimizer,
            text=self._text,
            device=session.device,
            accumulating=session.accumulating,
        )

    def _restore(self, session: Session) -> int:
        if not self._directory.is_resumed:
            return 0
        done = restore(session.metadata)
        truncate_metrics(self._directory.metrics, step=done)
        self._committed = self._done = self._updated = done
        return done

    def _run_steps(
        self, first_step: int, loop: TrainingLoop, session: Session, stop: StopRequest
    ) -> int:
        with self._lines() as lines:
            for step in range(first_step, self._config.train.steps + 1):
                if stop.is_set:
                    break
                metrics = self._run_step(step, loop, session)
                if lines is not None:
                    # Before the commit: a resume finds a line for every committed step.
                    lines.append(metrics)
                if self._progress is not None:
                    self._progress(metrics)
                self._done = step
                if self._save_interval.is_due(step) and self._commits:
                    self._save(step, session)
                elif self._is_commit_due(step):
                    self._commit(step, session)
        return self._done

    def _lines(self) -> AbstractContextManager[MetricsFile | None]:
        return MetricsFile(self._directory.metrics) if self._is_kept else nullcontext()

    @contextmanager
    def _keeping_steps(self, session: Session) -> Iterator[None]:
        """Commits the steps before one in which the user's code raises, and says what is left."""
        try:
            yield
        except ModelError as error:
            try:
                if self._commits and self._done and self._committed != self._done == self._updated:
                    self._commit(self._done, session)
                left = self._what_is_left()
            except OffloadError as failure:
                left = f"{self._what_is_left()}; the commit of later steps failed: {failure}"
            raise ModelError(
                f"the run ended {self._when()}: expected a loss and its gradients, found that "
                f"{error}; correct that, {left}. `offload --verbose train` shows the traceback"
            ) from error.__cause__

    def _when(self) -> str:
        """Returns how far the run is; what is gone on with may not have been restored yet."""
        if not self._updated:
            return "before its first step"
        return f"after step {self._updated} of {self._config.train.steps}"

    def _what_is_left(self) -> str:
        """Returns where a run goes on that an error ended, and which steps it does not keep."""
        if not self._is_kept:
            return "and measure again"
        resume = f"`{self._directory.resume_options}`"
        if self._directory.is_resumed and self._committed is None:
            return f"and go on with {resume} after its last commit"
        if not self._committed:
            lost = f"; {self._updated} steps were not committed" if self._updated else ""
            return f"and start anew with {resume}{lost}"
        lost_steps = self._updated - self._committed
        lost = f"; {lost_steps} later ones are lost" if lost_steps else ": no step is lost"
        return f"and go on with {resume} after step {self._committed}, which is committed{lost}"

    def _run_step(self, step: int, loop: TrainingLoop, session: Session) -> StepMetrics:
        before = session.stats()
        with self._counting_activations(loop):
            clock = StepClock(
                read_io_wait_s=lambda: session.stats().io_wait_s,
                read_update_wait_s=lambda: _update_waits(session.stats()),
            )
            outcome = loop.run_step(step, clock)
            times = clock.stop()
        self._updated = step
        after = session.stats()
        rss_bytes = self._rss.sample()
        validation_loss = loop.validate() if self._is_validation_due(step) else None
        return self._recorder.record(
            StepFacts(
                step=step,
                outcome=outcome,
                times=times,
                before=before,
                after=after,
                validated=session.stats(),
                rss_bytes=rss_bytes,
                committed=self._committed,
                validation_loss=validation_loss,
            )
        )

    def _counting_activations(self, loop: TrainingLoop) -> AbstractContextManager[None]:
        # One step shows the peak; in the others autograd runs without our hooks below.
        if self._recorder.steps:
            return nullcontext()
        return self._activations.counting(without=loop.model.parameters())

    def _is_validation_due(self, step: int) -> bool:
        every = self._config.train.eval_every
        return every > 0 and step % every == 0

    def _is_commit_due(self, step: int) -> bool:
        return self._commits and self._commit_interval.is_due(step)

    def _commit(self, step: int, session: Session) -> None:
        started_s = time.perf_counter()
        session.commit(commit_metadata(step=step))
        self._committed_now(step, started_s)

    def _save(self, step: int, session: Session) -> None:
        started_s = time.perf_counter()
        session.save(f"step-{step:06d}", commit_metadata(step=step))
        self._committed_now(step, started_s)
        self._save_interval.happened()

    def _committed_now(self, step: int, started_s: float) -> None:
        self._commit_s.append(time.perf_counter() - started_s)
        self._committed = step
        self._commit_interval.happened()

    def _report_stop(self, done: int, signal_name: str | None) -> None:
        _LOG.warning(
            "stopped by %s after step %d of %d; %s",
            signal_name,
            done,
            self._config.train.steps,
            f"committed: go on with `{self._directory.resume_options}`"
            if self._commits
            else "nothing was committed",
        )


def _prefetched_bytes(config: Config, plan: RunPlan) -> int:
    is_read_ahead = plan.host is not None and config.policy.overlap == "forward"
    return plan.host.prefetched_bytes if is_read_ahead and plan.host else 0


def _update_waits(stats: SessionStats) -> tuple[float, float]:
    return stats.update_wait_s, stats.update_io_wait_s


def _shares(amounts: Sequence[int]) -> tuple[float, ...]:
    total = sum(amounts)
    return tuple(amount / total for amount in amounts) if total else ()


def _round_trip_rates(machine: Machine | None) -> tuple[float, ...]:
    return () if machine is None else tuple(path.mixed_bytes_per_s for path in machine.paths)
