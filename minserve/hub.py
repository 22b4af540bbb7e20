"""Finds a model of the Hugging Face Hub by its name: in the local cache, or online. Knows nothing of what is in it.

huggingface_hub is an extra; nothing else here needs it.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from minserve.errors import CheckpointError, EnvironmentFault

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FACTS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors",)
_NEVER = ("consolidated*", "original/*", "metal/*", "onnx/*")


def is_repo_id(name: str) -> bool:
    """Could `org/name` be meant? Directories are looked for first."""
    return _REPO_ID.fullmatch(name) is not None


def snapshot(repo_id: str, *, weights: bool = True) -> Path:
    """The repository's folder, from the local cache when that is whole, else fetched; HF_HUB_OFFLINE forbids to fetch.

    Raises EnvironmentFault without huggingface_hub, CheckpointError when the repository cannot be had.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise EnvironmentFault(
            f"{repo_id!r} is no directory; to find it on the Hugging Face Hub: pip install 'minserve[hub]'"
        ) from error
    cached: Path | None = None
    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(repo_id, local_files_only=True))
    if cached is not None and (constants.HF_HUB_OFFLINE or _is_whole(cached, weights)):
        return cached  # what an offline cache lacks is named by the proof of load
    if constants.HF_HUB_OFFLINE:
        where = constants.HF_HUB_CACHE
        raise CheckpointError(f"{repo_id!r} is no directory and not in the cache {where}, and HF_HUB_OFFLINE is set")
    patterns = [*_FACTS, *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=list(_NEVER)))
    except Exception as error:  # whatever the library's transport raises
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{repo_id!r} is no directory and cannot be had from the Hugging Face Hub: {said}") from error


def _is_whole(folder: Path, weights: bool) -> bool:
    """Are config.json and, with `weights`, all weight files there? Their contents are proven when they are loaded."""
    index, files = folder / "model.safetensors.index.json", {"config.json"}
    if weights and index.is_file():
        try:
            files |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False
    elif weights:
        files.add("model.safetensors")
    return all((folder / str(file)).is_file() for file in files)
