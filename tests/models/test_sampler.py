"""The sampler: exact where it is greedy, right on average where it draws, and the same at any place in any batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minserve.models.logits_rules import lowest_kept
from minserve.models.sampler import (
    LEAST_LOGPROB,
    ROWS_AT_ONCE,
    SamplerState,
    gather_logprobs,
    needs_general,
    sample,
    sample_again,
    take_back,
)
from minserve.models.sampling_noise import log_exponential, row_keys, seed_key, token_id_steps
from minserve.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

torch.set_num_threads(1)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 0, **values})


def greedy(**values: Any) -> SamplingParams:
    return params(temperature=0.0, **values)


def one(logits: Sequence[float], rules: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> int:
    """The token of a batch of one."""
    state = SamplerState(1, len(logits), torch.device("cpu"))
    state.set_slot(0, rules, prompt, output)
    return int(sample(torch.tensor([logits]), torch.tensor([0]), state, "general"))


def run(state: SamplerState, logits: Tensor, slots: Sequence[int], steps: int) -> list[list[int]]:
    """Tokens by row; the same logits at every step."""
    index = torch.tensor(slots, device=state.device)
    return torch.stack([sample(logits, index, state, "general") for _ in range(steps)], dim=1).tolist()


# Greedy


@pytest.mark.parametrize("variant", ["argmax", "general"])
def test_greedy_is_the_first_argmax(device: torch.device, variant: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (70, 300), generator=generator).float()  # many ties
    state = SamplerState(70, 300, device)
    before = logits.clone()
    tokens = sample(logits.to(device), torch.arange(70, device=device), state, variant)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(logits, before)
    assert state.last_tokens.tolist() == [*tokens.tolist(), 0]


def test_greedy_rows_beside_drawn_ones_stay_exact(device: torch.device) -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(1)).to(device)
    state = SamplerState(40, 500, device)
    for slot in range(40):
        state.set_slot(slot, greedy(top_k=3, top_p=0.1, min_p=0.5) if slot % 2 else params(seed=slot, temperature=2.0), [], [])
    tokens = sample(logits, torch.arange(40, device=device), state, "general")
    assert torch.equal(tokens[1::2], logits.argmax(-1)[1::2])
    assert not torch.equal(tokens[::2], logits.argmax(-1)[::2])


# Draws follow the probabilities


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How many standard deviations the statistic lies over its mean; within about +-4 for a fair sampler."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5  # too few to count alone
    if rare.any():
        expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
        counts = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.numel() - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


LOGITS = [1.0, 0.0, 2.0, -1.0, 1.0, 0.5, -2.0, 3.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_one_request_over_many_steps(device: torch.device, temperature: float) -> None:
    state = SamplerState(64, 8, device)
    for slot in range(64):
        state.set_slot(slot, params(seed=1000 + slot, temperature=temperature), [], [])
    drawn = torch.tensor(run(state, torch.tensor([LOGITS] * 64, device=device), range(64), 400))
    expected = torch.softmax(torch.tensor(LOGITS).double() / temperature, -1)
    assert abs(chi_square(torch.bincount(drawn.flatten(), minlength=8), expected)) < 4
    # Each token tells nothing of the next one, nor of a neighbouring seed's token at the same step.
    pairs = torch.outer(expected, expected).flatten()
    if temperature > 1:
        assert abs(chi_square(torch.bincount((drawn[:, :-1] * 8 + drawn[:, 1:]).flatten(), minlength=64), pairs)) < 4
        assert abs(chi_square(torch.bincount((drawn[:-1] * 8 + drawn[1:]).flatten(), minlength=64), pairs)) < 4


def test_many_seeds_at_the_first_step(device: torch.device) -> None:
    state = SamplerState(5000, 8, device)
    for slot in range(5000):
        state.set_slot(slot, params(seed=slot), [], [])
    tokens = sample(torch.tensor([LOGITS] * 5000, device=device), torch.arange(5000, device=device), state, "general")
    assert abs(chi_square(torch.bincount(tokens.cpu(), minlength=8), torch.softmax(torch.tensor(LOGITS), -1))) < 4


def test_a_large_vocabulary_with_rare_tokens(device: torch.device) -> None:
    """4096 ids share 10% of the probability; the sampler must give them that share and spread it evenly."""
    vocab_size = 4097
    logits = torch.zeros(vocab_size)
    logits[0] = math.log(9 * 4096)
    state = SamplerState(64, vocab_size, device)
    for slot in range(64):
        state.set_slot(slot, params(seed=slot), [], [])
    drawn = torch.tensor(run(state, logits.repeat(64, 1).to(device), range(64), 60))
    quarter = torch.where(drawn == 0, 0, 1 + (drawn - 1) // 1024)
    counts = torch.bincount(quarter.flatten(), minlength=5)
    assert abs(chi_square(counts, torch.tensor([0.9, 0.025, 0.025, 0.025, 0.025]))) < 4


@pytest.mark.parametrize(
    ("rules", "kept"),
    [({"top_k": 3}, [7, 2, 0, 4]), ({"top_p": 0.7}, [7, 2]), ({"min_p": 0.13}, [7, 2, 0, 4]), ({"top_k": 2, "top_p": 0.72}, [7])],
)
def test_draws_among_the_kept(rules: dict[str, Any], kept: list[int]) -> None:
    """What is left keeps its proportions. Ids 0 and 4 are equal, so that top_k=3 keeps both."""
    state = SamplerState(2000, 8, torch.device("cpu"))
    for slot in range(2000):
        state.set_slot(slot, params(seed=slot, **rules), [], [])
    tokens = torch.tensor(run(state, torch.tensor([LOGITS] * 2000), range(2000), 2)).flatten()
    assert set(tokens.tolist()) == set(kept)
    expected = torch.softmax(torch.tensor([LOGITS[token_id] for token_id in kept]).double(), -1)
    counts = torch.bincount(tokens, minlength=8)[kept]
    assert len(kept) == 1 or abs(chi_square(counts, expected)) < 4


# The same numbers anywhere


def tokens_alone(logits: Tensor, rules: SamplingParams, steps: int) -> list[int]:
    state = SamplerState(1, logits.shape[-1], logits.device)
    state.set_slot(0, rules, [1, 2], [])
    return run(state, logits.unsqueeze(0), [0], steps)[0]


@pytest.mark.parametrize("batch", [1, 2, 7, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 130])
def test_a_seed_gives_the_same_tokens_at_any_row_and_batch_size(device: torch.device, batch: int) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(2)).to(device)
    rules = params(seed=77, top_p=0.9, top_k=200, repetition_penalty=1.2, frequency_penalty=0.3)
    alone = tokens_alone(logits, rules, 6)
    assert len(set(alone)) > 1
    state = SamplerState(batch, 1000, device)
    for row in {0, batch // 2, batch - 1}:
        slots = [(slot + 3) % batch for slot in range(batch)]
        for slot in range(batch):
            state.set_slot(slot, params(seed=slot), [5], [])
        state.set_slot(slots[row], rules, [1, 2], [])
        strangers = torch.randn(batch, 1000, generator=torch.Generator().manual_seed(row)).to(device)
        strangers[row] = logits
        assert run(state, strangers, slots, 6)[row] == alone


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(device: torch.device, cut: int) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)).to(device)
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    rules = params(seed=5, temperature=1.5, min_tokens=4, stop_token_ids=(2, 3), **penalties)
    whole = tokens_alone(logits, rules, 8)
    state = SamplerState(3, 50, device)
    state.set_slot(2, greedy(repetition_penalty=2.0), [9], [8, 8])
    state.clear_slot(2)
    state.set_slot(2, rules, [1, 2], whole[:cut])
    assert run(state, logits.unsqueeze(0), [2], 8 - cut)[0] == whole[cut:]


def test_seeded_and_unseeded_requests_in_one_batch_and_swapped() -> None:
    """The front gives unseeded requests a seed each; a seeded one must not notice its mates, equal seeds must agree."""
    logits = torch.zeros(3, 100)
    outcomes = []
    for order in ([0, 1, 2], [2, 0, 1]):
        state = SamplerState(3, 100, torch.device("cpu"))
        for slot, seed in enumerate([42, 123456789, 42]):
            state.set_slot(slot, params(seed=seed), [], [])
        by_row = run(state, logits, order, 12)
        outcomes.append({slot: by_row[row] for row, slot in enumerate(order)})
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == outcomes[0][2] != outcomes[0][1]


@settings(max_examples=50, deadline=None)
@given(seeds=st.lists(st.integers(-(2**63), 2**64), min_size=2, max_size=2, unique_by=lambda seed: seed % 2**64))
def test_different_seeds_differ(seeds: list[int]) -> None:
    first, second = (tokens_alone(torch.zeros(1000), params(seed=seed), 8) for seed in seeds)
    assert first != second


# The random numbers


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def test_splitmix64_as_published() -> None:
    golden = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert seed_key(0) == signed(published[0])
    words = torch.tensor([signed(golden * count % 2**64) for count in (1, 2, 3)])
    assert row_keys(words, torch.tensor([0, 0, 0])).tolist() == [signed(word) for word in published]
    assert row_keys(torch.tensor([0, 0, 0]), torch.tensor([1, 2, 3])).tolist() == [signed(word) for word in published]


def splitmix64(state: int) -> int:
    word = state % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def test_tokens_follow_from_seed_index_and_id_alone(device: torch.device) -> None:
    """With equal logits the winner is the id with the smallest random word: a seed's tokens are the same in every release."""
    golden, vocab_size = 0x9E3779B97F4A7C15, 500
    state = SamplerState(1, vocab_size, device)
    state.set_slot(0, params(seed=-7), [], [0] * 5)
    expected = []
    for index in range(5, 11):
        key = splitmix64(splitmix64(-7 + golden) + index * golden)
        words = [splitmix64(key + token_id * golden) for token_id in range(vocab_size)]
        expected.append(words.index(min(words)))
    assert run(state, torch.zeros(1, vocab_size, device=device), [0], 6)[0] == expected


def key_whose_word_is(word: int) -> int:
    """Undoes the finaliser, for the extreme outcomes that no test would meet by chance."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        undone = word
        for _ in range(3):
            undone = word ^ (undone >> shift)
        word = undone * pow(factor, -1, 2**64) % 2**64
    return signed(word)


def test_extreme_random_words_give_finite_noise(device: torch.device) -> None:
    words = [0, 1, 2**24, 2**63, 2**64 - 2**39, 2**64 - 1]
    keys = torch.tensor([key_whose_word_is(word) for word in words], device=device)
    noise = log_exponential(keys, token_id_steps(1, device)).squeeze(1).cpu()
    assert noise.isfinite().all()
    assert noise.diff().min() >= 0
    assert noise[0] == pytest.approx(-41 * math.log(2))
    assert noise[-1] == pytest.approx(math.log(24 * math.log(2)))
    assert noise[3] == pytest.approx(math.log(math.log(2)))


def test_no_row_of_noise_repeats_another() -> None:
    keys = row_keys(torch.tensor([seed_key(seed) for seed in range(50)]).repeat_interleave(50), torch.arange(50).repeat(50))
    noise = log_exponential(keys, token_id_steps(200, torch.device("cpu")))
    correlation = torch.corrcoef(noise[:400])
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(200)
    assert noise.flatten().unique().numel() > 0.98 * noise.numel()


# Filters against brute force


@dataclasses.dataclass
class Kept:
    """Which ids the rules keep, told id by id."""

    logits: list[float]

    def ids(self, top_k: int, top_p: float, min_p: float) -> set[int]:
        kept = set(range(len(self.logits)))
        if top_k > 0:
            kept = {i for i in kept if sum(other > self.logits[i] for other in self.logits) < top_k}
        mass = {i: math.exp(self.logits[i] - max(self.logits)) for i in kept}
        if top_p < 1:
            likelier = {i: sum(mass[j] for j in kept if self.logits[j] > self.logits[i]) for i in kept}
            kept = {i for i in kept if likelier[i] < top_p * sum(mass.values())}
        return {i for i in kept if mass[i] >= min_p}


@settings(max_examples=400, deadline=None)
@given(
    logits=st.lists(st.one_of(st.integers(-3, 3), st.floats(-50, 50, width=32)), min_size=1, max_size=12),
    top_k=st.integers(-1, 14),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
def test_filters_against_brute_force(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    row = torch.tensor([logits], dtype=torch.float32)
    threshold = lowest_kept(row, torch.tensor([[top_k]]), torch.tensor([[top_p]]), torch.tensor([[min_p]]))
    kept = set((row >= threshold)[0].nonzero().flatten().tolist())
    oracle = Kept(row[0].tolist())
    # Only ids within rounding of a limit may differ.
    assert oracle.ids(top_k, top_p - 1e-6, min_p + 1e-6) <= kept | oracle_edge(oracle, min_p)
    assert kept <= oracle.ids(top_k, top_p + 1e-6 if top_p < 1 else 1.0, min_p - 1e-6)
    assert logits.index(max(logits)) in kept


def oracle_edge(oracle: Kept, min_p: float) -> set[int]:
    """With min_p beyond 1 by the tolerance even the likeliest id would go."""
    return {i for i, logit in enumerate(oracle.logits) if logit == max(oracle.logits)} if min_p + 1e-6 > 1 else set()


def test_top_p_one_keeps_ids_whose_probability_rounds_to_nothing() -> None:
    row = torch.tensor([[0.0, -200.0, -1e30]])
    off, whole, none = torch.tensor([[0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]])
    assert lowest_kept(row, off, whole, none).item() == torch.tensor(-1e30).item()
    assert lowest_kept(row, off, torch.tensor([[0.999999]]), none).item() == 0.0


def test_top_p_drops_an_id_when_the_likelier_hold_exactly_top_p() -> None:
    half = next(x for x in torch.linspace(-0.693148, -0.693146, 60) if x.exp() == 0.5)
    row = torch.stack([torch.tensor(0.0), half, half]).unsqueeze(0)
    off, none = torch.tensor([[0]]), torch.tensor([[0.0]])
    assert lowest_kept(row, off, torch.tensor([[0.5]]), none).item() == 0.0
    assert lowest_kept(row, off, torch.tensor([[0.51]]), none).item() == half.item()


def test_a_rows_filters_do_not_depend_on_the_other_rows(device: torch.device) -> None:
    rows = torch.randn(64, 3001, generator=torch.Generator().manual_seed(4)).mul_(3).to(device)

    def thresholds(values: Tensor) -> Tensor:
        shape = (values.shape[0], 1)
        full = [torch.full(shape, value, device=device) for value in (2000, 0.95, 0.0001)]
        return lowest_kept(values, *full)

    assert torch.equal(thresholds(rows), torch.cat([thresholds(row.unsqueeze(0)) for row in rows]))


# Rules on the logits


VOCABULARY = 10


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-64, 64).map(lambda sixteenths: sixteenths / 16), min_size=VOCABULARY, max_size=VOCABULARY),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
    output=st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
    repetition=st.sampled_from([1.0, 0.5, 2.0]),
    frequency=st.sampled_from([0.0, 0.5, -1.0]),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.integers(-8, 8).map(float), max_size=4),
    stops=st.lists(st.integers(0, VOCABULARY + 2), max_size=3, unique=True),
    min_tokens=st.integers(0, 7),
)
def test_penalties_biases_and_bans_against_brute_force(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
    stops: list[int],
    min_tokens: int,
) -> None:
    """All values are exact in fp32, so the greedy token must be the very same."""
    expected = []
    for token_id, logit in enumerate(logits):
        value = logit + bias.get(token_id, 0.0)
        if token_id in stops and len(output) < min_tokens:
            value = -math.inf
        if token_id in prompt or token_id in output:
            value = value / repetition if value > 0 else value * repetition
        expected.append(value - output.count(token_id) * frequency - (token_id in output) * presence)
    rules = greedy(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
        stop_token_ids=tuple(stops),
        min_tokens=min_tokens,
    )
    assert one(logits, rules, prompt, output) == expected.index(max(expected))


def test_penalties_see_what_was_sampled_just_now() -> None:
    state = SamplerState(1, 4, torch.device("cpu"))
    state.set_slot(0, greedy(frequency_penalty=1.0), [3], [])
    logits = torch.tensor([[2.5, 2.0, 0.0, 0.0]])
    assert run(state, logits, [0], 5) == [[0, 1, 0, 1, 0]]
    assert state.token_counts[0].tolist() == [3, 2, 0, 0]


def test_stop_ids_are_free_again_after_min_tokens() -> None:
    state = SamplerState(1, 4, torch.device("cpu"))
    state.set_slot(0, greedy(min_tokens=2, stop_token_ids=(1, 2)), [], [])
    assert run(state, torch.tensor([[0.0, 9.0, 8.0, 0.5]]), [0], 4) == [[3, 3, 1, 1]]


def test_full_tables_of_biases_and_stop_ids() -> None:
    vocab_size = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + 1
    bias = {token_id: -float(token_id % 7 + 1) for token_id in range(MAX_LOGIT_BIAS)}
    stops = tuple(range(MAX_LOGIT_BIAS, vocab_size - 1))
    rules = greedy(logit_bias=bias, stop_token_ids=stops, min_tokens=1)
    assert one([0.0] * (vocab_size - 1) + [-0.5], rules) == vocab_size - 1
    assert one([0.0] * vocab_size, greedy(logit_bias=bias)) == MAX_LOGIT_BIAS
    state = SamplerState(1, vocab_size, torch.device("cpu"))
    with pytest.raises(ValueError, match="at most"):
        state.set_slot(0, greedy(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)), [], [])
    with pytest.raises(ValueError, match="at most"):
        state.set_slot(0, greedy(stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1)), min_tokens=1), [], [])
    with pytest.raises(IndexError):
        state.set_slot(1, greedy(), [], [])


def test_temperature_and_bias_at_their_limits_stay_finite() -> None:
    for seed in range(20):
        assert one([0.0, 30.0, 29.0], params(seed=seed, temperature=1e-5)) == 1
        assert one([0.0, 30.0, 29.0], params(seed=seed, logit_bias={0: 100.0})) == 0
        assert one([0.0, 30.0, 29.0], params(seed=seed, logit_bias={1: -100.0, 2: -100.0})) == 0


# Slots


@pytest.mark.parametrize("variant", ["argmax", "general"])
def test_both_variants_leave_the_same_state(device: torch.device, variant: Any) -> None:
    state = SamplerState(3, 5, device)
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0], [0.0, 7.0, 0.0, 0.0, 0.0]], device=device)
    for _ in range(2):
        sample(logits, torch.tensor([2, 0], device=device), state, variant)
    assert state.last_tokens.tolist() == [1, 0, 2, 0]
    assert state.output_index.tolist() == [2, 0, 2, 0]
    assert state.token_counts.tolist() == [[0, 2, 0, 0, 0], [0] * 5, [0, 0, 2, 0, 0], [0] * 5]


def test_what_is_taken_back_was_never_there(device: torch.device) -> None:
    """The same tokens, and the same state for those that follow."""
    logits = torch.randn(70, 300, generator=torch.Generator().manual_seed(21)).to(device)
    slots = torch.arange(70, device=device).clamp(max=66)  # some rows are padding, which shares a slot
    outcomes = []
    for way in ("at once", "instead of the argmax"):
        state, drawn = SamplerState(66, 300, device), []
        rules = {"temperature": 2.0, "frequency_penalty": 0.4, "min_tokens": 2, "stop_token_ids": (7,)}
        for slot in range(66):
            state.set_slot(slot, params(seed=slot, **rules), [], [])
        for _ in range(3):
            if way != "at once":
                take_back(slots, sample(logits, slots, state, "argmax"), state)
            drawn.append(sample(logits, slots, state, "general"))
        outcomes.append((*drawn, state.output_index, state.token_counts, state.last_tokens))
    assert all(torch.equal(first, second) for first, second in zip(*outcomes, strict=True))
    assert outcomes[0][0].tolist() != logits.argmax(-1).tolist()


def test_a_slots_next_request_inherits_nothing() -> None:
    state = SamplerState(1, 6, torch.device("cpu"))
    heavy = params(top_k=1, repetition_penalty=9.0, presence_penalty=2.0, logit_bias={1: 99.0}, min_tokens=9, stop_token_ids=(2,))
    state.set_slot(0, heavy, [0, 4], [4, 4])
    run(state, torch.randn(1, 6), [0], 3)
    logits = torch.tensor([[1.0, 0.5, 0.0, 2.0, 2.2, 0.0]])
    state.clear_slot(0)
    assert run(state, logits, [0], 1) == [[4]]
    state.set_slot(0, heavy, [0, 4], [4, 4, 4])
    state.set_slot(0, greedy(presence_penalty=0.5), [4, 3], [])
    assert run(state, logits, [0], 1) == [[4]]
    state.set_slot(0, greedy(repetition_penalty=2.0), [1], [])
    assert run(state, logits, [0], 1) == [[4]]


def test_padding_rows_share_the_scratch_slot(device: torch.device) -> None:
    state = SamplerState(2, 50, device)
    state.set_slot(1, params(seed=9), [], [])
    alone = SamplerState(2, 50, device)
    alone.set_slot(1, params(seed=9), [], [])
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(5)).to(device)
    logits[3:] = torch.nan
    for _ in range(4):
        padded = sample(logits, torch.tensor([0, 1, 2, 2, 2, 2, 2, 2], device=device), state, "general")
        assert padded[:2].tolist() == sample(logits[:2], torch.tensor([0, 1], device=device), alone, "general").tolist()
    assert state.nan_rows.item() == 0
    assert torch.equal(state.token_counts[:2], alone.token_counts[:2])


@pytest.mark.parametrize("variant", ["argmax", "general"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_broken_row_is_counted_and_harms_no_other(device: torch.device, variant: Any, poison: float) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(6)).to(device)
    outcomes = []
    for broken in (False, True):
        state = SamplerState(5, 40, device)
        for slot in range(5):
            state.set_slot(slot, params(seed=slot, top_p=0.9, top_k=7, min_p=0.01), [], [])
        if broken:
            logits[2, 17] = poison
            logits[4] = poison
        outcomes.append(sample(logits, torch.arange(5, device=device), state, variant).tolist())
        assert state.nan_rows.item() == (2 if broken else 0)
    assert [outcomes[0][row] for row in (0, 1, 3)] == [outcomes[1][row] for row in (0, 1, 3)]
    assert outcomes[1][2] == outcomes[1][4] == 0


def test_a_vocabulary_of_one_broken_logit(device: torch.device) -> None:
    state = SamplerState(1, 1, device)
    state.set_slot(0, params(top_p=0.5), [], [])
    assert run(state, torch.full((1, 1), math.nan, device=device), [0], 1) == [[0]]
    assert state.nan_rows.item() == 1


def test_no_rows_at_all(device: torch.device) -> None:
    state = SamplerState(2, 9, device)
    for variant in ("argmax", "general"):
        tokens = sample(torch.empty(0, 9, device=device), torch.empty(0, dtype=torch.int64, device=device), state, variant)
        assert tokens.shape == (0,)


@pytest.mark.parametrize("variant", ["argmax", "general"])
@pytest.mark.parametrize("rows", [3, ROWS_AT_ONCE + 5])
def test_nothing_is_read_back_and_no_shape_depends_on_values(variant: Any, rows: int) -> None:
    """Fake tensors have shapes and no values: reading one, or a shape that depends on one, raises."""
    with FakeTensorMode():
        state = SamplerState(rows, 30, torch.device("cpu"))
        tokens = sample(torch.randn(rows, 30), torch.arange(rows), state, variant)
    assert tokens.shape == (rows,)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (greedy(), False),
        (greedy(top_k=5, top_p=0.5, min_p=0.1, stop_token_ids=(1,)), False),
        (greedy(min_tokens=3), False),
        (greedy(min_tokens=3, stop_token_ids=(1,)), True),
        (greedy(logit_bias={1: 1.0}), True),
        (greedy(repetition_penalty=1.1), True),
        (greedy(presence_penalty=0.1), True),
        (greedy(frequency_penalty=0.1), True),
        (params(), True),
    ],
)
def test_which_requests_need_the_general_variant(rules: SamplingParams, expected: bool) -> None:
    assert needs_general(rules) is expected


# Logits of 16 bits


@pytest.mark.parametrize("variant", ["argmax", "general"])
@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE + 3])
def test_logits_of_16_bits_are_drawn_from_as_their_fp32_values(device: torch.device, variant: Any, rows: int) -> None:
    logits = torch.randn(rows, 700, generator=torch.Generator().manual_seed(11)).mul_(4).bfloat16().to(device)
    rules = [greedy(), params(), params(top_p=0.9, top_k=50), params(repetition_penalty=1.3, logit_bias={3: 2.5, 4: -1.0})]
    outcomes = []
    for values in (logits, logits.float()):
        state, before = SamplerState(rows, 700, device), values.clone()
        for slot in range(rows):
            state.set_slot(slot, msgspec.structs.replace(rules[slot % 4], seed=slot), [1, 2], [5])
        slots = torch.arange(rows, device=device)
        drawn = [sample(values, slots, state, variant) for _ in range(3)]
        allowed = torch.randint(-(2**31), 2**31, (rows, 22), generator=torch.Generator().manual_seed(12)).int().to(device)
        drawn.append(sample_again(values, slots, drawn[-1], allowed, state, variant))
        outcomes.append((torch.stack(drawn), state.last_tokens, state.output_index, state.token_counts, state.broken_rows))
        assert torch.equal(values, before)
    assert all(torch.equal(first, second) for first, second in zip(*outcomes, strict=True))
    if variant == "argmax":
        assert outcomes[0][0][0].tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("rows", [0, 1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 3])
def test_logprobs_of_16_bits_and_in_pieces(device: torch.device, rows: int) -> None:
    """The same numbers as from fp32, and as from each row alone."""
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(13)).mul_(4).bfloat16().to(device)
    tokens = torch.arange(rows, device=device) % 300
    result, wide = gather_logprobs(logits, tokens, 4), gather_logprobs(logits.float(), tokens, 4)
    assert all(torch.equal(first, second) for first, second in zip(result, wide, strict=True))
    assert result.logprobs.shape == result.ranks.shape == (rows,)
    assert result.top_ids.shape == result.top_logprobs.shape == (rows, 4)
    assert result.logprobs.dtype == result.top_logprobs.dtype == torch.float32
    for row in range(rows):
        alone = gather_logprobs(logits[row : row + 1], tokens[row : row + 1], 4)
        assert alone.logprobs.item() == result.logprobs[row].item()
        assert alone.ranks.item() == result.ranks[row].item()
        assert torch.equal(alone.top_logprobs[0], result.top_logprobs[row])


# Log-probabilities


def test_logprobs_ranks_and_top_lists(device: torch.device) -> None:
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(7)).mul_(4).to(device)
    tokens = torch.arange(6, device=device) * 13
    exact = torch.log_softmax(logits.double().cpu(), -1)
    result = gather_logprobs(logits, tokens, 20)
    for row, token in enumerate(tokens.tolist()):
        assert result.logprobs[row].item() == pytest.approx(exact[row, token].item(), abs=1e-5)
        order = exact[row].argsort(descending=True).tolist()
        assert result.ranks[row].item() == order.index(token) + 1
        assert result.top_ids[row].tolist() == order[:20]
        assert result.top_logprobs[row].tolist() == pytest.approx(exact[row, order[:20]].tolist(), abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), num_top=st.integers(0, 12), ties=st.booleans())
def test_a_tokens_value_is_the_same_float_in_the_top_list(seed: int, num_top: int, ties: bool) -> None:
    logits = torch.randn(8, 9, generator=torch.Generator().manual_seed(seed)).mul_(20)
    logits = logits.round() if ties else logits
    result = gather_logprobs(logits, torch.arange(8), num_top)
    assert result.top_ids.shape == result.top_logprobs.shape == (8, min(num_top, 9))
    for row in range(8):
        listed = dict(zip(result.top_ids[row].tolist(), result.top_logprobs[row].tolist(), strict=True))
        assert listed.get(row, result.logprobs[row].item()) == result.logprobs[row].item()
        assert (row in listed) >= (result.ranks[row].item() <= num_top and not ties)


def test_what_json_cannot_carry_is_replaced() -> None:
    logits = torch.tensor([[0.0, -math.inf], [math.nan, 1.0]])
    result = gather_logprobs(logits, torch.tensor([1, 1]), 2)
    assert result.logprobs.tolist() == [LEAST_LOGPROB, LEAST_LOGPROB]
    assert result.top_logprobs[0].tolist() == [0.0, LEAST_LOGPROB]
    assert result.top_logprobs.isfinite().all()


if torch.cuda.is_available():

    @pytest.mark.gpu
    @pytest.mark.parametrize("variant", ["argmax", "general"])
    @pytest.mark.parametrize("rows", [1, 8, 100])
    def test_a_captured_graph_samples_what_eager_does(variant: Any, rows: int) -> None:
        device, vocab_size = torch.device("cuda"), 5000
        logits = torch.randn(rows, vocab_size, device=device)
        slots = torch.arange(rows, device=device)
        captured, eager = (SamplerState(rows, vocab_size, device) for _ in range(2))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            sample(logits, slots, captured, variant)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = sample(logits, slots, captured, variant)
        for round_number in range(3):
            for slot in range(rows):
                rules = params(seed=slot + round_number, top_p=0.9, repetition_penalty=1.1, min_tokens=2, stop_token_ids=(3,))
                for state in (captured, eager):
                    state.set_slot(slot, rules, [slot, 7], [1, 2])
            for _ in range(5):
                logits.normal_()
                graph.replay()
                assert torch.equal(tokens, sample(logits, slots, eager, variant))
                assert torch.equal(captured.last_tokens, eager.last_tokens)
