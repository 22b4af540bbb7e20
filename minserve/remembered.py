"""What earlier starts found out on this machine, kept as small JSON files, each under all that its answer depends on.

Knows neither questions nor answers. A folder that cannot be written only means that the next start asks again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any


class Remembered:
    """One folder of answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, question: str, key: object) -> Any | None:
        """The answer that was kept, in plain JSON values; None when there is none that can be read."""
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(self._path(question, key).read_text())
            return kept.get("answer") if isinstance(kept, dict) else None
        return None

    def keep(self, question: str, key: object, answer: object) -> None:
        """Replace the answer, whole or not at all. Key and answer are plain JSON values."""
        path = self._path(question, key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps({"key": key, "answer": answer}, indent=1))
            written.replace(path)

    def forget(self, question: str, key: object) -> None:
        with contextlib.suppress(OSError):
            self._path(question, key).unlink(missing_ok=True)

    def _path(self, question: str, key: object) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{question}-{digest[:20]}.json"
