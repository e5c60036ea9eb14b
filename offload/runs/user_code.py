"""What the user's code raised in a run: where in it, and what that leaves."""

import site
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.errors import ModelError, OffloadError

_OWN = Path(__file__).parents[1]
_LIBRARIES = tuple(
    Path(path).resolve()
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
    )
)


@contextmanager
def calling_user_code(what: str) -> Iterator[None]:
    """Turns what the user's code inside raises into a ModelError that says where.

    Args:
        what: Is called, such as "the model's `forward`".

    Raises:
        ModelError: It raised; the exception is its cause. What our own code raises stays as it is.
    """
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        raise ModelError(f"{what} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Returns type and message, and the innermost line of the user's code that led there."""
    text = str(error).strip()
    named = type(error).__name__ + (f": {text}" if text else "")
    if isinstance(error, SyntaxError):  # whose text says where
        return named
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame)]
    if not own:
        return named
    return f"{named}, at `{own[-1].filename}`, line {own[-1].lineno}, in `{own[-1].name}`"


def _is_ours(error: BaseException) -> bool:
    """Returns whether our code raised it: a fault of ours, whose traceback is wanted."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(_OWN) and not any(map(_is_users, frames))


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Returns whether a frame's file is neither ours nor a library's, nor made up."""
    file = Path(frame.filename)
    if not file.is_absolute():  # such as `<string>` or `<frozen importlib>`
        return False
    return not any(file.resolve().is_relative_to(library) for library in (_OWN, *_LIBRARIES))
