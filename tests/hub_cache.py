"""Lays a model out as huggingface_hub's cache does: blobs named by their checksums, snapshots of links, a ref to a commit."""

from __future__ import annotations

import hashlib
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_cache(cache: Path, repo_id: str, source: Path, lfs: tuple[str, ...] = (".safetensors",)) -> Path:
    """The snapshot's folder. Files with the endings of `lfs` are LFS blobs (sha256), the rest git's (sha1)."""
    root = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot, blobs = root / "snapshots" / COMMIT, root / "blobs"
    for folder in (snapshot, blobs, root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for file in source.iterdir():
        body = file.read_bytes()
        large = file.suffix in lfs
        name = hashlib.sha256(body).hexdigest() if large else hashlib.sha1(f"blob {len(body)}\0".encode() + body).hexdigest()
        (blobs / name).write_bytes(body)
        (snapshot / file.name).symlink_to(Path("../../blobs") / name)
    return snapshot
