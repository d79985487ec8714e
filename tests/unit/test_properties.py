"""The promises of docs/invariants.md on random models: a few here, every model of the kinds of tests/property_cases.py
by `make soak`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import headprune
import properties
import property_cases
from headprune.errors import HeadpruneError

FEW = (
    ("classifier", "bert"),
    ("classifier", "deberta-v2"),
    ("classifier", "falcon"),
    ("decoder", "gpt2"),
    ("decoder", "llama"),
    ("decoder", "qwen3"),
    ("image", "vit"),
    ("seq2seq", "t5"),
    ("seq2seq", "bart"),
    ("seq2seq", "blenderbot"),
)
SEED = os.environ.get("HEADPRUNE_SOAK")  # all types, with this seed
CASES = (
    FEW
    if SEED is None
    else [(kind, name) for kind in property_cases.MAPPINGS for name in property_cases.model_types(kind)]
)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> property_cases.Case:
    try:
        case = property_cases.build_case(*request.param, seed=int(SEED or 0))
        finite = bool(case.outputs(case.batch(range(property_cases.SAMPLES))).isfinite().all())
    except Exception as error:
        if SEED is None:
            raise
        pytest.skip(f"a small random model cannot be built: {type(error).__name__}: {error}")
    if not finite:
        pytest.skip("the random model gives NaN or Inf on padded texts")
    try:
        headprune.resolve(case.model)
    except HeadpruneError as error:
        if SEED is None:
            raise
        pytest.skip(f"refused: {error}")
    return case


@pytest.mark.parametrize("promise", properties.PROMISES, ids=lambda promise: promise.__name__)
def test_promise(case: property_cases.Case, promise: Callable[..., None], tmp_path: Path) -> None:
    promise(case, tmp_path)


@pytest.mark.skipif(SEED is not None, reason="other models may take one side or form alone")
@pytest.mark.parametrize("case", [pair for pair in FEW if pair[0] != "image"], ids="-".join, indirect=True)
def test_sides_and_forms_are_varied(case: property_cases.Case) -> None:
    """T5 and decoders get every side and form; BERT, BART and Blenderbot number the tokens from the left, DeBERTa looks
    padding up by its number."""
    every = {(side, form) for side in property_cases.SIDES for form in property_cases.FORMS}
    tokens = {(side, "tokens") for side in property_cases.SIDES}
    right = {("right", form) for form in property_cases.FORMS}
    expected = {"bert": right, "bart": right, "blenderbot": right, "deberta-v2": tokens & right, "falcon": tokens}
    assert {variant for variant in every if case.takes(*variant)} == expected.get(case.model.config.model_type, every)
