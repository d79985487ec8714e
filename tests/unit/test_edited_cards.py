"""The model card of a run is written anew when the run continues or starts again, unless somebody edited it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from run_helpers import headprune, material, prune_command


def prune(out: Path, keep: int, *more: str) -> str:
    done = headprune(
        *prune_command(material().bert, material().data_csv, out, "--keep", str(keep), "--criterion", "gnorm", *more)
    )
    assert done.code == 0, done.err
    return (out / "model" / "README.md").read_text()


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_an_edited_card_stays(more: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was deleted, and written anew."""
    out = tmp_path / "run"
    card = out / "model" / "README.md"
    assert "3 of 12 attention heads removed" in prune(out, 9)
    with caplog.at_level(logging.WARNING):
        edited = prune(out, 8, *more) + "My notes.\n"
    assert "4 of 12 attention heads removed" in edited  # nobody had edited it
    assert "was edited" not in caplog.text
    card.write_text(edited)
    with caplog.at_level(logging.WARNING):
        assert prune(out, 7, *more) == edited
    assert f"{card} was edited, so it stays as it is" in caplog.text
    card.unlink()
    assert "5 of 12 attention heads removed" in prune(out, 7)


def test_the_card_of_an_earlier_version_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It stored no hash of what it wrote."""
    out = tmp_path / "run"
    prune(out, 9)
    (out / ".card").unlink()
    with caplog.at_level(logging.WARNING):
        assert "4 of 12 attention heads removed" in prune(out, 8)
    assert "was edited" not in caplog.text
