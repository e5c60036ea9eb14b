"""What fio moves on a path: the rates of a bound."""

import contextlib
from itertools import product

from fio import FioSetting, run_fio

from offload.plan.machine import PathRates

BLOCKS = ("512k", "1m", "4m")
DEPTHS = (8, 16, 64)
ENGINES = ("libaio", "io_uring")
SWEEP_MS = 400
MEASURE_MS = 600


def best_setting(directory, *, size):
    """Returns the setting that moves most both ways at once: the best four again three times."""
    settings = [
        FioSetting(engine=engine, block=block, depth=depth)
        for engine, block, depth in product(ENGINES, BLOCKS, DEPTHS)
    ]
    with laid_out(directory, size=size) as file:
        found = {each: _rate(file, "rw", each, size=size, ms=SWEEP_MS) for each in settings}
        finalists = sorted(settings, key=found.__getitem__, reverse=True)[:4]
        for _, setting in product(range(3), finalists):
            rate = _rate(file, "rw", setting, size=size, ms=SWEEP_MS)
            found[setting] = max(found[setting], rate)
    return max(finalists, key=found.__getitem__)


def fio_rates(file, *, setting, size, ms=MEASURE_MS):
    """Returns the rates of the path of a file that is laid out, now: each measured for `ms`."""
    read, write, mixed = (
        _rate(file, kind, setting, size=size, ms=ms) for kind in ("read", "write", "rw")
    )
    return PathRates(
        path=str(file.parent),
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        mixed_bytes_per_s=mixed / 2,
    )


@contextlib.contextmanager
def laid_out(directory, *, size):
    """Yields a file whose blocks were written, and removes it."""
    file = directory / "fio"
    try:
        run_fio(file, "write", FioSetting(), size=size)
        yield file
    finally:
        file.unlink(missing_ok=True)


def _rate(file, rw, setting, *, size, ms):
    """Returns the bytes/s of both directions together, for `ms`."""
    options = ("--time_based", f"--runtime={ms}ms")
    job = run_fio(file, rw, setting, size=size, options=options)
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])
