"""Which path takes a step's experts: measured tables before the rule."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from minserve.kernels import expert_choices
from minserve.kernels.expert_choices import Choice, ExpertChoices, ExpertShape, by_rule
from minserve.kernels.expert_tiles import OWN_TILES_TOKENS, Block, TileSizes
from minserve.remembered import Remembered

SHAPE = ExpertShape("fp8_block", 128, 2048, 768, 8)
FAST = Choice("masked", TileSizes(16, Block(64, 128, 4, 3), Block(32, 128, 2, 4), 8))
SLOW = Choice("tiles", TileSizes(32, Block(128, 128, 8, 3), Block(128, 128, 8, 3)))


def test_without_a_measurement_the_rule_decides() -> None:
    choices = ExpertChoices("a GPU that nobody measured")
    for shape in (SHAPE, dataclasses.replace(SHAPE, format="plain"), dataclasses.replace(SHAPE, format="int4_group")):
        for tokens in (0, 1, 8, 9, 100, 5000):
            assert choices.of(tokens, shape) == by_rule(tokens, shape)
    assert by_rule(1, SHAPE).path == "vector"
    assert by_rule(9, SHAPE).path == "tiles"
    assert [by_rule(tokens, SHAPE).path for tokens in (200, 5000)] == ["tiles", "contiguous"]
    plain = dataclasses.replace(SHAPE, format="plain")
    assert [by_rule(tokens, plain).path for tokens in (8192, 9000)] == ["tiles", "contiguous"]
    assert by_rule(9000, dataclasses.replace(SHAPE, format="int4_group")).path == "tiles"


def test_the_next_measured_number_of_tokens_decides(tmp_path: Path) -> None:
    choices = ExpertChoices("gpu", Remembered(tmp_path))
    choices.keep(SHAPE, [(64, SLOW), (16, FAST)])
    later = ExpertChoices("gpu", Remembered(tmp_path))
    for known in (choices, later):
        assert [known.of(tokens, SHAPE) for tokens in (1, 16, 17, 64)] == [FAST, FAST, SLOW, SLOW]
        assert known.of(65, SHAPE) == by_rule(65, SHAPE)
        assert known.of(16, dataclasses.replace(SHAPE, top_k=6)) == by_rule(16, dataclasses.replace(SHAPE, top_k=6))
    assert ExpertChoices("another gpu", Remembered(tmp_path)).of(16, SHAPE) == by_rule(16, SHAPE)


def test_own_measurements_go_before_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_choices, "_SHIPPED", tmp_path)
    (tmp_path / "some-gpu.json").write_text(json.dumps({str(SHAPE): [[16, SLOW.to_json()]]}))
    assert ExpertChoices("Some GPU").of(3, SHAPE) == SLOW
    choices = ExpertChoices("Some GPU", Remembered(tmp_path / "remembered"))
    choices.keep(SHAPE, [(16, FAST)])
    assert choices.of(3, SHAPE) == FAST


def test_shipped_tables_can_be_launched() -> None:
    files = list((Path(expert_choices.__file__).parent / "tuned").glob("*.json"))
    assert files
    for name, table in ((name, table) for file in files for name, table in json.loads(file.read_text()).items()):
        most = [tokens for tokens, _ in table]
        assert most == sorted(most), name
        for tokens, values in table:
            choice = Choice.from_json(values)
            assert choice.to_json() == values, (name, tokens)
            kind = name.partition(" ")[0]
            assert kind != "int4_group" or choice.path == "tiles", (name, tokens)
            assert tokens > OWN_TILES_TOKENS or choice.sizes.rows == OWN_TILES_TOKENS, (name, tokens)
            for block in (choice.sizes.up, choice.sizes.down):
                assert block.n & (block.n - 1) == block.k & (block.k - 1) == 0, (name, tokens)
                assert kind != "fp8_block" or (block.n <= 128 and block.k % 128 == 0), (name, tokens)
