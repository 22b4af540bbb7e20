"""How many KV pages there are, and their tensors. Knows memory; nothing of who uses a page.

Page 0 is the dummy page of padded rows: it exists beside the pages that are counted here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from minserve.config import Config
from minserve.errors import DoesNotFit, UsageError
from minserve.kernels.interface import AttentionShape, dtype_bytes, kv_page_shape

_MEBIBYTE = 1 << 20


class KVPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the cache and what it allows."""

    num_pages: int
    page_size: int
    page_bytes: int
    """Of one page in all layers."""
    max_model_len: int
    limited_by: str
    """What decided `num_pages`, for a person."""
    memory_bytes: int = 0
    """That the cache could have had, where somebody asked."""

    @property
    def num_bytes(self) -> int:
        """The dummy page included."""
        return (self.num_pages + 1) * self.page_bytes


def page_bytes(shape: AttentionShape, num_layers: int, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page in all layers."""
    return num_layers * int(np.prod(kv_page_shape(shape, page_size))) * dtype_bytes(dtype)


def plan(config: Config, *, bytes_per_page: int, memory_bytes: int, memory_name: str, max_positions: int) -> KVPlan:
    """Size the cache to `memory_bytes` (called `memory_name` in messages), or to --num-pages when that is given.

    `max_positions`: the longest context that the model knows. Raises DoesNotFit with the numbers, UsageError for a context
    that the model does not have.
    """
    page_size, wanted_len = config.page_size, config.max_model_len
    if wanted_len is not None and wanted_len > max_positions:
        raise UsageError(f"--max-model-len {wanted_len} is more than the model's max_position_embeddings of {max_positions}")
    longest = wanted_len or max_positions
    affordable = memory_bytes // bytes_per_page - 1
    most_useful = config.max_num_seqs * -(-longest // page_size)
    if config.num_pages is not None:
        num_pages, limited_by = config.num_pages, "--num-pages"
        if num_pages > affordable:
            raise DoesNotFit(
                f"--num-pages {num_pages} needs {_size((num_pages + 1) * bytes_per_page)} for the KV cache, and {memory_name} "
                f"leaves {_size(memory_bytes)}; at most {max(0, affordable)} pages fit"
            )
    elif affordable < most_useful:
        num_pages, limited_by = affordable, memory_name
    else:
        num_pages, limited_by = most_useful, "--max-num-seqs requests of the longest context"
    if num_pages < 1:
        raise DoesNotFit(
            f"the KV cache needs at least two pages of {_size(bytes_per_page)}, and {memory_name} leaves {_size(memory_bytes)}"
        )
    if wanted_len is not None and wanted_len > num_pages * page_size:
        raise DoesNotFit(
            f"--max-model-len {wanted_len} needs {-(-wanted_len // page_size)} KV pages of {page_size} tokens, and there are "
            f"{num_pages} ({limited_by}): {num_pages * page_size} tokens is the most"
        )
    max_model_len = min(longest, num_pages * page_size)
    if max_model_len < 2:
        raise DoesNotFit(f"the KV cache holds {max_model_len} token, and a request needs two")
    return KVPlan(
        num_pages=num_pages,
        page_size=page_size,
        page_bytes=bytes_per_page,
        max_model_len=max_model_len,
        limited_by=limited_by,
        memory_bytes=memory_bytes,
    )


def allocate(size: KVPlan, shape: AttentionShape, num_layers: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The cache, zeroed: one tensor a layer, [num_pages + 1, *kv_page_shape]. Raises DoesNotFit when memory is refused."""
    dims = (size.num_pages + 1, *kv_page_shape(shape, size.page_size))
    with refusal_of_memory(f"a KV cache of {_size(size.num_bytes)} ({size.num_pages} pages)"):
        if device.type == "cpu":
            return [_lazy_zeros(dims, dtype) for _ in range(num_layers)]
        return [torch.zeros(dims, dtype=dtype, device=device) for _ in range(num_layers)]


def _lazy_zeros(dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """numpy asks for zeroed pages instead of writing zeros: what is never used never takes memory, and starting takes no time."""
    count = int(np.prod(dims)) * dtype_bytes(dtype)
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(dims)


@contextlib.contextmanager
def refusal_of_memory(what: str) -> Iterator[None]:
    """Turns an allocator's refusal into DoesNotFit: `what` could not be had."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DoesNotFit(f"no memory for {what}: {_first_line(error)}") from error
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        raise DoesNotFit(f"no memory for {what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def host_memory_available() -> int:
    """Bytes that this process may still take: the machine's available memory or what the container's limit leaves."""
    available = 1 << 62
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        reclaimable = [
            int(line.split()[1]) for line in _read("/sys/fs/cgroup/memory.stat").splitlines() if "inactive_file" in line
        ]
        available = min(available, max(0, int(limit) - int(used) + sum(reclaimable)))
    return available


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _size(count: int) -> str:
    """Bytes for a person, in the unit that tells most."""
    return f"{count / _MEBIBYTE:,.1f} MiB"
