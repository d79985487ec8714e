"""A checkpoint carries the layout of its model: loading it needs neither the table of families nor an experiment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import checkpoint_process
import headprune
from headprune.surgery.remove_units import remove_units
from headprune.units import all_sites
from helpers import identical, kept_heads, outputs
from neuron_helpers import kept_units, with_heads
from run_helpers import environment
from zoo import ZOO

NAMES = ("granite", "camembert", "dinov2", "bert")  # by experiment but for the last, which is in the table
# Importing any of discovery is an error, and the table is empty.
LOAD = """
import sys
sys.modules["headprune.discovery"] = None
from pathlib import Path
from safetensors.torch import load_file, save_file
import torch
import headprune
from headprune.units import families
families.FAMILIES.clear()
for case in Path(sys.argv[1]).glob("*/*"):
    model = headprune.load(case / "checkpoint" / case.name).eval()
    with torch.no_grad():
        result = model(**load_file(case / "batch.safetensors"))
    expected = load_file(case / "outputs.safetensors")
    assert expected and all(torch.equal(result[name], expected[name]) for name in expected), case.name
    print(f"{case.parent.name}/{case.name}")
assert not [name for name in sys.modules if name.startswith("headprune.discovery.")]
"""


def written(folder: Path, *, portable: bool) -> None:
    """Checkpoints of models without a whole attention, a whole feed-forward layer, and some of the others."""
    for name in NAMES:
        model = ZOO[name].build()
        remove_units(model, with_heads(model))
        assert any(not site.kept for site in all_sites(model) if site.kind == "heads")
        checkpoint_process.write_model(folder / name, model, ZOO[name].batch(4), portable=portable)
        config = json.loads((folder / name / "checkpoint" / name / "config.json").read_text())
        assert ("auto_map" in config) == portable


@pytest.mark.slow
def test_loading_neither_experiments_nor_reads_the_table(tmp_path: Path) -> None:
    forms = {"portable": True, "for-headprune": False}
    for form, portable in forms.items():
        written(tmp_path / form, portable=portable)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(
        f"{kind}/{name}" for kind in ("portable", "for-headprune") for name in NAMES
    )


def test_plain_transformers_gives_the_same(tmp_path: Path) -> None:
    written(tmp_path / "portable", portable=True)
    (tmp_path / "plain").mkdir()
    assert checkpoint_process.load_all(tmp_path)["portable"] == {name: [] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("portable", [True, False], ids=["portable", "for-headprune"])
def test_a_checkpoint_of_an_earlier_version_still_loads(name: str, portable: bool, tmp_path: Path) -> None:
    model, batch = ZOO[name].build(), ZOO[name].batch(1)
    remove_units(model, with_heads(model))
    path = headprune.save(model, tmp_path / "model", portable=portable)
    settings = json.loads((path / "config.json").read_text())
    del settings["headprune"]["layout"]
    (path / "config.json").write_text(json.dumps(settings))
    (path / "headprune.json").unlink()
    loaded = headprune.load(path)
    assert identical(outputs(loaded, batch), outputs(model, batch))
    assert kept_units(loaded) == kept_units(model)


def test_another_class_is_built_from_the_same_layout(tmp_path: Path) -> None:
    """The part of a model below its head."""
    model = ZOO["bert"].build()
    remove_units(model, with_heads(model))
    path = headprune.save(model, tmp_path / "bert")
    part = headprune.load(path, model_class=transformers.BertModel)
    assert type(part) is transformers.BertModel
    weights = load_file(path / "model.safetensors")
    assert all(
        torch.equal(value, weights[f"bert.{name}"])
        for name, value in part.encoder.state_dict(prefix="encoder.").items()
    )
    assert kept_heads(part) == kept_heads(model)


def test_what_is_removed_later_makes_an_old_layout_void(tmp_path: Path) -> None:
    """transformers itself saves a model that it loaded with its layout, and that has lost more since."""
    entry = ZOO["granite"]
    model: Any = entry.build()
    first, second = headprune.resolve(model)[0].units()[:2]
    headprune.remove(model, first)
    headprune.save(model, tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    assert again.config.headprune["layout"]
    headprune.remove(again, second)
    again.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match=r"^More units were removed from this model .*headprune\.load"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    loaded = headprune.load(tmp_path / "again")
    assert kept_heads(loaded) == kept_heads(again)
    assert identical(outputs(loaded, entry.batch(0)), outputs(again, entry.batch(0)))


@pytest.mark.parametrize("portable", [True, False])
def test_a_config_with_an_infinity_is_saved_and_read(portable: bool, tmp_path: Path) -> None:
    """JSON has no infinity: transformers writes a tag for it."""
    model = ZOO["t5"].build()
    model.config.initializer_factor = float("inf")  # a number that a trained model does not use
    width = next(site.original for site in all_sites(model) if site.kind == "neurons")
    neurons = [(site.index, number) for site in all_sites(model) if site.kind == "neurons" for number in (1, width - 1)]
    headprune.remove(model, neurons=neurons)
    headprune.save(model, tmp_path / "pruned", portable=portable)
    settings = json.loads((tmp_path / "pruned" / "config.json").read_text(), parse_constant=pytest.fail)
    assert settings["initializer_factor"] == {"__float__": "Infinity"}
    again = headprune.load(tmp_path / "pruned")
    assert again.config.initializer_factor == float("inf")
    batch = ZOO["t5"].batch(4)
    assert identical(outputs(again, batch), outputs(model, batch))


@pytest.mark.slow
def test_a_hybrid_with_mamba_is_saved_and_loaded(tmp_path: Path) -> None:
    """Its time_step_limit is (0, inf)."""
    torch.manual_seed(0)
    config = transformers.FalconH1Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1,
        mamba_chunk_size=4, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.FalconH1ForCausalLM(config).eval()
    (layer,) = [site.index for site in all_sites(model) if site.kind == "neurons"]
    headprune.remove(model, neurons=[(layer, 1), (layer, 3)])
    headprune.save(model, tmp_path / "pruned")
    again = headprune.load(tmp_path / "pruned")
    assert again.config.time_step_limit == (0.0, float("inf"))
    batch = {"input_ids": torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))}
    assert identical(outputs(again, batch), outputs(model, batch))
