"""Ctrl-C at a chosen line of the project's code."""

import contextlib
import dis
import functools
import itertools
import sys
from pathlib import Path

import pytest

import offload

_ROOT = str(Path(offload.__file__).parent)
_FINALIZERS = "weakref.py"
"""What ends in a finalizer is no interrupt: Python prints it and goes on."""
_OUR_FINALIZERS = ("__del__", "_take_back", "_end_request")
"""Functions that are finalizers themselves."""
_ENTRIES = ("BEFORE_WITH", "LOAD_SPECIAL")
"""Operations that enter a `with` block, by versions of Python."""


def interrupted_at(number, call, *, file=""):
    """Calls `call`, interrupted before it runs line `number` of the project in this thread.

    Args:
        number: Of the line, from 1.
        call: Takes nothing.
        file: Ends the name of those whose lines are counted; all by default.

    Returns:
        Where that was; None where fewer lines ran.
    """
    lines, where = itertools.count(1), []

    def enter(frame, event, _):
        name = frame.f_code.co_filename
        is_ours = name.startswith(_ROOT) and name.endswith(file)
        return follow if event == "call" and is_ours and not _is_finalizer(frame) else None

    def follow(frame, event, _):
        if event == "line" and not _leaves_block(frame) and next(lines) == number:
            sys.settrace(None)
            code = frame.f_code
            where.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
            raise KeyboardInterrupt
        return follow

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return where[0] if where else None


@contextlib.contextmanager
def ended_by(error, owner, name, *, after):
    """Raises `error` in what runs in this context, as a method's call number `after` ends."""
    plain, counter = getattr(owner, name), itertools.count(1)

    def call(*args, **options):
        result = plain(*args, **options)
        if next(counter) == after:
            raise error
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        with pytest.raises(error):
            yield


def num_lines(call, *, file=""):
    """Returns how many lines of the project, or of its `file`, `call` runs in this thread."""
    lines = itertools.count()
    assert interrupted_at(_Never(lines), call, file=file) is None
    return next(lines)


class _Never:
    """Compares as no line, and counts them."""

    def __init__(self, lines):
        self._lines = lines

    def __eq__(self, _):
        next(self._lines)
        return False

    __hash__ = None


def _leaves_block(frame):
    """Whether a `with` block is about to be left, which comes as one more event of its line.

    Python handles no signal there: what is raised by a trace function would skip `__exit__`.
    """
    return frame.f_lasti in _ends_of_blocks(frame.f_code)


@functools.cache
def _ends_of_blocks(code):
    """Returns the offsets at which a line of `code` begins again to leave a `with` block."""
    entries = {}
    for each in dis.get_instructions(code):
        if each.opname in _ENTRIES and each.positions is not None:
            entries.setdefault(each.positions.lineno, each.offset)
    starts = dis.findlinestarts(code)
    return {offset for offset, line in starts if offset > entries.get(line, offset)}


def _is_finalizer(frame):
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_FINALIZERS) or code.co_name in _OUR_FINALIZERS:
            return True
        frame = frame.f_back
    return False
