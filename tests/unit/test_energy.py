"""Energy by counters that are made up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headprune.measure import energy
from headprune.measure.energy import counters, energy_per_thousand
from headprune.measure.savings import savings
from run_helpers import bert
from zoo import text_batch

CPU = torch.device("cpu")


def zone(root: Path, name: str, called: str, microjoules: int, most: int = 1_000_000_000) -> Path:
    folder = root / name
    folder.mkdir()
    for file, value in (("name", called), ("energy_uj", microjoules), ("max_energy_range_uj", most)):
        (folder / file).write_text(f"{value}\n")
    return folder / "energy_uj"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    return tmp_path


def spending(counter: Path, microjoules: int, most: int = 1_000_000_000) -> None:
    counter.write_text(str((int(counter.read_text()) + microjoules) % most))


def test_packages_are_added_and_nothing_is_counted_twice(root: Path) -> None:
    first, second = zone(root, "intel-rapl:0", "package-0", 5), zone(root, "intel-rapl:1", "package-1", 7)
    zone(root, "intel-rapl:0:0", "core", 3)
    zone(root, "intel-rapl:2", "psys", 3)
    (root / "dtpm").mkdir()
    assert len(counters(CPU)) == 2

    def small() -> None:
        spending(first, 1_000_000)

    def large() -> None:
        spending(first, 2_000_000)
        spending(second, 3_000_000)

    assert energy_per_thousand({"large": large, "small": small}, 4, CPU) == pytest.approx({"large": 1250, "small": 250})


def test_a_counter_that_starts_again(root: Path) -> None:
    counter = zone(root, "intel-rapl:0", "package-0", 9_500_000, most=10_000_000)
    actual = energy_per_thousand({"run": lambda: spending(counter, 2_000_000, 10_000_000)}, 1, CPU)
    assert actual == pytest.approx({"run": 2000})


def test_silent_where_nothing_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert energy_per_thousand({"run": lambda: None}, 1, CPU) is None
    counter = zone(root, "intel-rapl:0", "package-0", 5)
    assert energy_per_thousand({"run": lambda: None}, 1, CPU) is None  # it does not move
    real = Path.read_text

    def refused(path: Path, *args: str, **options: str) -> str:
        if path == counter:
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    assert counters(CPU) == []
    monkeypatch.undo()
    monkeypatch.setattr(energy, "POWERCAP", root)
    assert energy_per_thousand({"run": lambda: counter.unlink(missing_ok=True)}, 1, CPU) is None
    monkeypatch.setattr(energy, "POWERCAP", root / "nowhere")
    assert counters(CPU) == []


def test_the_card_of_the_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter(range(0, 100_000, 500))
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"card {index}",
        nvmlDeviceGetTotalEnergyConsumption=lambda card: next(spent) if card == "card 1" else None,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    actual = energy_per_thousand({"run": lambda: None}, 10, torch.device("cuda", 1))
    assert actual == pytest.approx({"run": 50})
    assert counters(CPU) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert counters(torch.device("cuda", 1)) == []


def test_savings_have_it(root: Path) -> None:
    counter = zone(root, "intel-rapl:0", "package-0", 0)
    dense, pruned = bert(), bert()
    dense.register_forward_hook(lambda *_: spending(counter, 8_000_000))
    pruned.register_forward_hook(lambda *_: spending(counter, 4_000_000))
    batch = {**text_batch(0, size=4), "labels": torch.zeros(4, dtype=torch.long)}
    actual = savings(dense, pruned, batch)
    assert (actual["dense"]["joules_per_1000"], actual["pruned"]["joules_per_1000"]) == (2000, 1000)
    assert actual["shares"].keys() == {"parameters", "flops", "latency"}
    assert (actual["shares"]["parameters"], actual["shares"]["flops"]) == (1, 1)
