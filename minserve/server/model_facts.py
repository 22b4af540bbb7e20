"""What the edge knows about the model that it serves, once an engine is ready. Knows nothing of requests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The numbers and names that requests are checked against."""

    names: tuple[str, ...]
    """Served names; the first is the default."""
    root: str
    """What `--model` said."""
    created: int
    """Unix seconds."""
    vocab_size: int
    context_length: int
    """Most tokens of a prompt and its answer together."""
    stop_token_ids: tuple[int, ...]
    """The union of the EOS ids of config, generation_config and tokenizer."""

    @property
    def name(self) -> str:
        return self.names[0]
