"""The promises of docs/invariants.md on random models: a few here, every text model of transformers by `make soak`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import headprune
import properties
from headprune.errors import HeadpruneError

FEW = (
    ("classifier", "bert"),
    ("classifier", "deberta-v2"),
    ("classifier", "falcon"),
    ("decoder", "gpt2"),
    ("decoder", "llama"),
    ("decoder", "qwen3"),
)
SEED = os.environ.get("HEADPRUNE_SOAK")  # all types, with this seed
CASES = FEW if SEED is None else [(kind, name) for kind in properties.MAPPINGS for name in properties.model_types(kind)]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> properties.Case:
    try:
        case = properties.build_case(*request.param, seed=int(SEED or 0))
        finite = bool(properties.logits(case.model, case.batch(range(properties.SAMPLES))).isfinite().all())
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
def test_promise(case: properties.Case, promise: Callable[..., None], tmp_path: Path) -> None:
    promise(case, tmp_path)


@pytest.mark.skipif(SEED is not None, reason="other models may take one side or form alone")
def test_sides_and_forms_are_varied(case: properties.Case) -> None:
    """Decoders get every side and form; a classifier reads its first token, or looks padding up by its number."""
    every = {(side, form) for side in properties.SIDES for form in properties.FORMS}
    tokens = {(side, "tokens") for side in properties.SIDES}
    right = {("right", form) for form in properties.FORMS}
    expected = {"bert": right, "deberta-v2": tokens & right, "falcon": tokens}
    assert {variant for variant in every if case.takes(*variant)} == expected.get(case.model.config.model_type, every)
