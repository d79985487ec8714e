"""Parameters after removal: what arithmetic on the config says, and what was published for four models."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

import headprune
from closed_forms import UNIT_PARAMETERS
from helpers import SHARED, VARIANTS, Heads, all_units, families, flat
from zoo import ZOO, Entry

MASKS = SHARED / "reference" / "greedy-gnorm" / "published_final_masks.json"


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def dense_count(model: Any) -> int:
    """From the config alone: the class builds itself without memory."""
    settings = {k: v for k, v in model.config.to_dict().items() if k != "pruned_heads"}
    with torch.device("meta"):
        return count(type(model)(type(model.config).from_dict(settings)))


def check(entry: Entry, heads: Heads) -> None:
    model = entry.build()
    per_unit = UNIT_PARAMETERS[entry.name](model.config)
    assert len(per_unit) == entry.sites
    headprune.remove(model, heads)
    group = entry.heads // entry.kv_heads
    removed = sum(per_unit[site] * number // group for site, number in Counter(site for site, _ in heads).items())
    assert removed > 0
    assert count(model) == dense_count(model) - removed


def test_every_family_has_a_closed_form() -> None:
    assert UNIT_PARAMETERS.keys() == ZOO.keys()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("entry", families())
def test_closed_form(entry: Entry, variant: str) -> None:
    """Sliced sites, and a whole site, of which only the output bias stays."""
    check(entry, VARIANTS[variant](headprune.resolve(entry.build())))


@pytest.mark.parametrize("entry", families())
def test_closed_form_of_everything_but_one_unit(entry: Entry) -> None:
    units = all_units(headprune.resolve(entry.build()))
    random.Random(entry.name).shuffle(units)
    check(entry, flat(units[1:]))


@dataclass(frozen=True)
class Published:
    """One row of the published tables: integers, total and per module, before and after."""

    build: tuple[str, dict[str, Any]]
    mask: str
    removed: int
    total: tuple[int, int]
    encoder: tuple[int, int]
    others: dict[str, int]
    megabytes: tuple[float, float]


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TABLES = {
    "BERT-base": Published(
        ("Bert", {"vocab_size": 21128, "num_labels": 3}),
        "BERT",
        117,
        (102_269_955, 79_244_355),
        (85_054_464, 62_028_864),
        {"embeddings": 16_622_592, "pooler": 590_592, "classifier": 2_307},
        (390.13, 302.29),
    ),
    "ALBERT-base-v2": Published(
        (
            "Albert",
            {
                "vocab_size": 30000,
                "embedding_size": 128,
                "hidden_size": 768,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
                "num_labels": 3,
            },
        ),
        "ALBERT",
        3,
        (11_685_891, 11_095_491),
        (7_186_944, 6_596_544),
        {"embeddings": 3_906_048, "pooler": 590_592, "classifier": 2_307},
        (44.58, 42.33),
    ),
    "RoBERTa-large": Published(
        (
            "Roberta",
            {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "num_labels": 2, **LARGE},
        ),
        "ROBERTA",
        245,
        (355_361_794, 291_089_474),
        (302_309_376, 238_037_056),
        {"embeddings": 52_000_768, "classifier": 1_051_650},
        (1355.60, 1110.42),
    ),
    "XLM-RoBERTa-base": Published(
        (
            "XLMRoberta",
            {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1, "num_labels": 20},
        ),
        "XLM_ROBERTA",
        105,
        (278_059_028, 257_395_028),
        (85_054_464, 64_390_464),
        {"embeddings": 192_398_592, "classifier": 605_972},
        (1060.71, 981.88),
    ),
}


def build(row: Published) -> Any:
    """Shapes only: hundreds of millions of parameters, and no memory."""
    name, settings = row.build
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForSequenceClassification")(
            getattr(transformers, f"{name}Config")(**settings)
        )


def assert_published(model: Any, row: Published, moment: int) -> None:
    seen = headprune.inspect(model)
    modules = dict(seen.modules)
    assert modules["encoder"] == row.encoder[moment]
    for name, number in row.others.items():
        assert modules[name] == number
    assert seen.parameters == count(model) == row.total[moment]
    assert round(seen.parameters * 4 / 2**20, 2) == pytest.approx(row.megabytes[moment], abs=0.006)
    assert sum(modules.values()) == seen.parameters
    assert row.encoder[moment] + sum(row.others.values()) == row.total[moment]


def assert_table(row: Published, heads: Heads) -> None:
    model = build(row)
    assert_published(model, row, 0)
    assert len(heads) == row.removed
    headprune.remove(model, heads)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert_published(model, row, 1)


@pytest.mark.parametrize("row", TABLES.values(), ids=TABLES)
def test_published_table_by_the_number_of_heads(row: Published) -> None:
    """Which heads go does not matter for the count, not even where whole sites go."""
    sites = headprune.resolve(build(row))
    heads = flat(all_units(sites))
    assert_table(row, random.Random(3).sample(heads, row.removed))
    assert_table(row, heads[: row.removed])


@pytest.mark.skipif(not MASKS.is_file(), reason="the published masks of ../shared/reference are not here")
@pytest.mark.parametrize("row", TABLES.values(), ids=TABLES)
def test_published_table_by_the_published_mask(row: Published) -> None:
    mask = json.loads(MASKS.read_text())[row.mask]
    heads = [(site, head) for site, kept in enumerate(mask) for head, bit in enumerate(kept) if not bit]
    assert_table(row, heads)
