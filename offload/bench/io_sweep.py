"""Finds the best block size, queue depth and backend of a path."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from offload.bench.io_options import IoOptions
from offload.bench.io_path import OnSample, lay_out, measure_path, open_stream
from offload.bench.io_report import Rates, Trial, median
from offload.errors import StorageError
from offload.sizes import KIB, MIB
from offload.storage.engine import Engine, PathSettings
from offload.storage.file import StorageFile
from offload.storage.paths import BACKENDS

_BLOCKS = (128 * KIB, 512 * KIB, MIB, 4 * MIB, 8 * MIB)
_DEPTHS = (1, 4, 8, 16, 32, 64)
_TRIAL_BYTES = 128 * MIB
_MAX_IN_FLIGHT_BYTES = 256 * MIB
"""Larger products of both are left out: they only cost memory."""
_NUM_FINALISTS = 3
_FINAL_ROUNDS = 3
_AS_GOOD = 1.03
"""Less than rates differ from one moment to the next."""


def sweep(
    file: StorageFile,
    settings: PathSettings,
    options: IoOptions,
    *,
    on_sample: OnSample,
) -> tuple[PathSettings, list[Trial]]:
    """Returns the best settings, and every trial.

    All block sizes and depths are tried once with the first backend, then the best few with every
    backend, several times in turn, since rates drift. The best has the least time for a byte
    written, a byte read, and one each way at the same time.
    """
    backends = _backends(settings, options)
    grid = [
        replace(settings, backend=backends[0], block_bytes=block, queue_depth=depth)
        for block, depth in product(options.block_bytes or _BLOCKS, options.queue_depths or _DEPTHS)
        if block % file.alignment == 0
        and (block * depth <= _MAX_IN_FLIGHT_BYTES or len(options.queue_depths) == 1)
    ]
    num_bytes = min(options.size_bytes, _TRIAL_BYTES)
    with Engine(paths=[settings]) as engine:
        lay_out(open_stream(engine, file, settings, size_bytes=num_bytes), on_sample)
    trials = [_try(file, each, options, num_bytes, on_sample) for each in grid]
    best = sorted(trials, key=_cost)[:_NUM_FINALISTS]
    finalists = [replace(trial, backend=name) for trial in best for name in backends]
    rounds = [
        [_try(file, _settings(settings, each), options, num_bytes, on_sample) for each in finalists]
        for _ in range(_FINAL_ROUNDS)
    ]
    finals = [
        replace(each, rates=_median_rates([each_round[i].rates for each_round in rounds]))
        for i, each in enumerate(finalists)
    ]
    return _settings(settings, _choose(finals)), [*trials, *finals]


def _choose(finals: Sequence[Trial]) -> Trial:
    """The cheapest in memory of those that are as good as the best; then the first backend."""
    limit = min(map(_cost, finals)) * _AS_GOOD
    good = [trial for trial in finals if _cost(trial) <= limit]
    return min(good, key=lambda trial: trial.block_bytes * trial.queue_depth)


def _try(
    file: StorageFile,
    settings: PathSettings,
    options: IoOptions,
    num_bytes: int,
    on_sample: OnSample,
) -> Trial:
    with Engine(paths=[settings]) as engine:
        stream = open_stream(engine, file, settings, size_bytes=num_bytes)
        measured = measure_path(
            stream,
            options.patterns,
            num_bytes=num_bytes,
            cold=not file.is_direct,
            on_sample=on_sample,
        )
    return Trial(
        backend=settings.backend,
        block_bytes=settings.block_bytes,
        queue_depth=settings.queue_depth,
        rates=measured.rates,
    )


def _backends(settings: PathSettings, options: IoOptions) -> list[str]:
    """Those asked for that this machine has; with `auto`, all compiled ones."""
    wanted: Sequence[str] = options.backends
    if wanted == ("auto",):
        wanted = BACKENDS[:-1] if options.tune else (_default_backend(settings),)
    found = [name for name in wanted if _opens(replace(settings, backend=name))]
    return found or [_default_backend(settings)]


def _default_backend(settings: PathSettings) -> str:
    with Engine(paths=[settings]) as engine:
        return engine.name


def _opens(settings: PathSettings) -> bool:
    try:
        with Engine(paths=[settings]):
            return True
    except StorageError:
        return False


def _settings(settings: PathSettings, trial: Trial) -> PathSettings:
    return replace(
        settings,
        backend=trial.backend,
        block_bytes=trial.block_bytes,
        queue_depth=trial.queue_depth,
    )


def _cost(trial: Trial) -> float:
    rates = trial.rates
    mixed = None
    if rates.mixed_read is not None and rates.mixed_write is not None:
        mixed = (rates.mixed_read + rates.mixed_write) / 2
    return sum(1 / rate for rate in (rates.read, rates.write, mixed) if rate is not None)


def _median_rates(rates: Sequence[Rates]) -> Rates:
    names = ("read", "write", "mixed_read", "mixed_write", "cpu_s_per_gib")
    return Rates(**{name: median([getattr(each, name) for each in rates]) for name in names})
