"""Text: captions that stand beside samples, and prompts that were given. UTF-8 in, a Python string in the middle, .txt out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.media.errors import Unreadable


@dataclass(frozen=True)
class Text:
    words: str

    @classmethod
    def load(cls, path: str | Path) -> Text:
        """A text file as it is, line ends included. Raises Unreadable with the file and the reason."""
        try:
            return cls(Path(path).read_bytes().decode("utf-8-sig"))
        except OSError as error:
            raise Unreadable(f"{path}: the file cannot be opened ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise Unreadable(f"{path}: it is no UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error

    def save(self, stem: str | Path) -> Path:
        path = Path(f"{stem}.txt")  # not with_suffix, which would eat the end of "guidance-1.5"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A prompt typed in a terminal of another encoding holds halves of characters, which UTF-8 cannot write.
        path.write_bytes(self.words.encode("utf-8", "backslashreplace"))
        return path

    @classmethod
    def sheet(cls, items: Sequence[Text]) -> Text:
        """One line for each text, numbered like the files that samples are saved as."""
        if not items:
            raise ValueError("a sheet of no texts was asked for: give at least one")
        lines = [f"{number:04d}  {' '.join(item.words.split())}".rstrip() for number, item in enumerate(items)]
        return cls("\n".join(lines) + "\n")
