"""All that exists once a model is ready: tokenizer, facts and metrics together. Knows nothing of requests."""

from __future__ import annotations

import dataclasses

from minserve.messages import Ready
from minserve.server.answer_format import ModelFormats
from minserve.server.metrics import Metrics
from minserve.server.model_facts import ModelFacts
from minserve.server.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    tokenizer: Tokenizer
    facts: ModelFacts
    metrics: Metrics
    formats: ModelFormats
    ranks: tuple[Ready, ...]
    """What each engine said when it became ready."""
