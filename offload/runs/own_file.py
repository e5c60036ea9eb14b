"""A file that a command writes anew: as a whole, and only where none was, or one of ours."""

import os
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ConfigError

_FIRST_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """A file that is ours by a mark in its first bytes."""

    path: Path
    what: str
    """As messages name it, such as `the plan to`."""
    mark: str
    """That no file of others has in its first 4 KiB."""
    remedy: str
    """What to do where it cannot be written."""
    makes_directory: bool = False

    def require_writable(self) -> None:
        """Makes sure that `write` can write the file, which stays as it is.

        Raises:
            ConfigError: It could not.
        """
        self.read()
        self._replace(None)

    def read(self) -> str | None:
        """Returns the text of the file; None where there is none.

        Raises:
            ConfigError: It is not one that `write` wrote, or cannot be read.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            if self.path.is_symlink():
                raise self._refused("a link to nothing") from None
            return None
        except OSError as error:
            raise self._refused(str(error.strerror)) from error
        if self.mark.encode() not in text[:_FIRST_BYTES]:
            raise self._refused("another one")
        return text.decode(errors="replace")

    def write(self, text: str) -> None:
        """Puts `text` in the file's place.

        Raises:
            ConfigError: The file is not one that this wrote, or cannot be written.
        """
        self.read()
        self._replace(text)

    def _replace(self, text: str | None) -> None:
        """Writes `text`, which has the mark; None: only tries what can be tried."""
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            if self.makes_directory:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                new.write_text(text or "", encoding="utf-8")
                if text is not None:
                    new.replace(self.path)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            raise self._refused(f"{error.strerror} in `{self.path.parent}`") from error

    def _refused(self, found: str) -> ConfigError:
        return ConfigError(
            f"cannot write {self.what} `{self.path}`: expected a place for a new file, or one with "
            f"`{self.mark}` at its beginning, found {found}; {self.remedy}"
        )
