"""Scores do not depend on how samples are batched, whatever the axes of an activation: windows of all images as its
first axis, patches of all images in one row, images of one sample and none of another."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from benchmarks import small_models

import headprune
from headprune.batches import batch_size
from headprune.errors import DataError
from headprune.signals.row_samples import NotPerSampleError, RowSamples, UnverifiedRowsError
from headprune.tasks import task_of
from headprune.tasks.packed import packed_rows
from oracles import Oracle, relative_differences
from zoo import LABELS, VOCAB, spread

Sample = dict[str, torch.Tensor]
IMAGE, VISION_START, PAD = 50, 51, 1  # token ids
PATCH = 24  # features of a patch: 3 colours x 2 frames x 2 x 2 pixels


def images(size: int, *, labels: bool = True) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(6, 3, size, size, generator=generator, dtype=torch.float64)
    samples = [{"pixel_values": pixels[row : row + 1]} for row in range(6)]
    return [
        {**sample, **({"labels": torch.tensor([row % LABELS])} if labels else {})} for row, sample in enumerate(samples)
    ]


def questions() -> list[Sample]:
    """Texts of several lengths, with one image of several sizes, with two, or with none."""
    generator = torch.Generator().manual_seed(0)
    grids = [[(1, 4, 4)], [(1, 2, 4)], [(1, 4, 4), (1, 2, 2)], [], [(1, 2, 4)], [(1, 6, 4)]]
    samples = []
    for number, sizes in enumerate(grids):
        text = torch.randint(5, IMAGE, (4 + number % 3,), generator=generator).tolist()
        ids = [token for t, h, w in sizes for token in (VISION_START, *[IMAGE] * (t * h * w // 4))] + text
        sample = {"input_ids": torch.tensor([ids])}
        if sizes:
            patches = sum(t * h * w for t, h, w in sizes)
            sample["pixel_values"] = torch.randn(patches, PATCH, generator=generator, dtype=torch.float64)
            sample["image_grid_thw"] = torch.tensor(sizes)
        samples.append(sample)
    return samples


def together(samples: Sequence[Sample]) -> Sample:
    """One batch, its texts padded on the left, its images one after the other."""
    batch: Sample = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        if name == "input_ids":
            length = max(value.shape[1] for value in values)
            rows = [torch.nn.functional.pad(value, (length - value.shape[1], 0), value=PAD) for value in values]
            batch["attention_mask"] = (torch.cat(rows) != PAD).long()
            values = rows
        batch[name] = torch.cat(values)
    if "input_ids" in batch:  # as the processor of the model says
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch


def swin(kind: str) -> Any:
    settings = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 3]}
    config = getattr(tf, f"{kind}Config")(**settings, window_size=4, mlp_ratio=2.0, num_labels=LABELS)
    return getattr(tf, f"{kind}ForImageClassification")._from_config(config)


def mobilevit() -> Any:
    config = tf.MobileViTConfig(
        image_size=32,
        hidden_sizes=[12, 12, 12],
        neck_hidden_sizes=[4, 4, 4, 4, 4, 4, 8],
        num_attention_heads=3,
        mlp_ratio=2.0,
        patch_size=2,
        num_labels=LABELS,
    )
    return tf.MobileViTForImageClassification._from_config(config)


def sam() -> Any:
    config = tf.SamVisionConfig(
        hidden_size=24,
        output_channels=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=24,
        patch_size=4,
        window_size=4,
        global_attn_indexes=[1],
        mlp_dim=20,
    )
    return tf.SamVisionModel._from_config(config, attn_implementation="eager")  # by which it chooses its classes


def pixtral() -> Any:
    config = tf.PixtralVisionConfig(
        hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    return tf.PixtralVisionModel._from_config(config)


def qwen() -> Any:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4},
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2}
    config = tf.Qwen2VLConfig(
        text_config=text,
        vision_config={**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        video_token_id=52,
        vision_end_token_id=53,
    )
    return tf.Qwen2VLForConditionalGeneration._from_config(config)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], list[Sample]]]] = {
    "swin": (lambda: swin("Swin"), lambda: images(32)),
    "donut-swin": (lambda: swin("DonutSwin"), lambda: images(32)),
    "mobilevit": (mobilevit, lambda: images(32)),
    "sam": (sam, lambda: images(24, labels=False)),
    "pixtral": (pixtral, lambda: images(16, labels=False)),
    "qwen2-vl": (qwen, questions),
}


def fresh(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    spread(model)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # else all images become the same
            torch.nn.init.ones_(module.weight)
    return model.double().eval()


model_of = functools.cache(fresh)


class SampleOracle(Oracle):
    """The truth on samples that are there one by one."""

    def __init__(self, model: Any, samples: Sequence[Sample]) -> None:
        super().__init__(model, [], next_token="input_ids" in samples[0])
        singles = [together([sample]) for sample in samples]
        self.samples = [{k: v for k, v in single.items() if k != "attention_mask"} for single in singles]
        self.batches = [[sample] for sample in self.samples]

    def logits(self, sample: Sample) -> torch.Tensor:
        logits = super().logits(sample)
        return logits.flatten() if logits.dim() == 3 else logits  # feature maps


@functools.cache
def expected(name: str) -> dict[str, torch.Tensor]:
    samples = MODELS[name][1]()
    oracle = SampleOracle(model_of(name), samples)
    scores = {"gnorm": oracle.gnorm(), "residual-gradient": oracle.repair()}
    if name not in ("sam", "pixtral"):  # which have no labels
        scores["his"] = oracle.his()
    return scores


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_single_samples(name: str, size: int) -> None:
    samples = MODELS[name][1]()
    batches = [together(samples[first : first + size]) for first in range(0, len(samples), size)]
    truth = expected(name)
    scores = headprune.score(model_of(name), batches, criteria=list(truth)).scores
    for criterion, values in truth.items():
        assert float(relative_differences(scores[criterion], values).max()) < 1e-5, criterion


def runs(model: Any, batches: Sequence[Sample], **options: Any) -> list[int]:
    """The number of samples of every pass of the model through these batches."""
    sizes: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        sizes.append(batch_size(kwargs))

    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        headprune.score(model, batches, **options)
    finally:
        handle.remove()
    return sizes


@pytest.mark.parametrize("name", ["swin", "mobilevit", "qwen2-vl"])
def test_batches_stay_whole_where_rows_are_those_of_the_samples(name: str) -> None:
    """One pass is given up at the first windows or patches, then a batch and one of its samples are compared."""
    model, samples = fresh(name), MODELS[name][1]()
    batches = [together(samples[first : first + 3]) for first in (0, 3)]
    assert runs(model, batches, criterion="gnorm") == [3, 1, 3, 3]
    assert runs(model, batches, criterion="gnorm") == [3, 3]


def test_samples_run_alone_where_outputs_are_not_by_sample() -> None:
    sizes = runs(fresh("pixtral"), [together(MODELS["pixtral"][1]()[:3])], criterion="gnorm")
    assert sizes == [3, 1, 3, 1, 1, 1]


def test_equal_images_do_not_tell_how_rows_are_ordered() -> None:
    """With other labels each of them has another gradient."""
    samples = [{**MODELS["swin"][1]()[0], "labels": torch.tensor([label])} for label in range(3)]
    model = fresh("swin")
    assert runs(model, [together(samples)], criterion="his") == [3, 1, 1, 1, 1]
    scores = headprune.score(model, [together(samples)], criterion="his").scores
    assert float(relative_differences(scores, SampleOracle(model, samples).his()).max()) < 1e-5


def test_entropies_are_those_of_the_attentions_that_the_model_returns() -> None:
    """The mean over the windows of an image and the queries in them; the model returns the last block of a stage."""
    samples = MODELS["swin"][1]()
    model = fresh("swin")
    model.set_attn_implementation("eager")
    expected = []
    with torch.no_grad():
        for sample in samples:
            maps = model(pixel_values=sample["pixel_values"], output_attentions=True).attentions
            expected.append([torch.special.entr(weights).sum(-1).mean(dim=(0, 2)) for weights in maps])
    for size in (1, 3):
        batches = [together(samples[first : first + size]) for first in range(0, len(samples), size)]
        scores = headprune.score(model, batches, criterion="entropy", variant="A").scores
        for stage, site in enumerate((1, 2)):
            mean = torch.stack([maps[stage] for maps in expected]).mean(0)
            assert torch.allclose(-scores[site, : len(mean)], mean, rtol=1e-6)


def test_attribution_of_windows_does_not_depend_on_the_batch() -> None:
    samples = MODELS["swin"][1]()[:4]
    model = model_of("swin")
    alone, both = (
        headprune.score(model, batches, criterion="attribution", steps=2).scores
        for batches in ([together([sample]) for sample in samples], [together(samples[:2]), together(samples[2:])])
    )
    assert float(relative_differences(both, alone).max()) < 1e-6


class TimeFirst(torch.nn.Module):
    """Tokens as the first axis and samples as the second, as many of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"o": torch.nn.Linear(4, 4)})])

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        return self.layers[0]["o"](inputs_embeds.transpose(0, 1)).transpose(0, 1)  # type: ignore[index]


def test_an_axis_of_tokens_is_not_taken_for_that_of_samples() -> None:
    torch.manual_seed(0)
    model: Any = TimeFirst()
    site: Any = SimpleNamespace(o="layers.0.o", path="layers.0", maps=(), kept=(0, 1))
    task: Any = SimpleNamespace(
        rows=lambda batch: 1,
        packed_rows=lambda batch: {},
        inputs=dict,
        select=lambda batch, rows: {name: value[rows] for name, value in batch.items()},
    )
    rows = RowSamples(model, task, {"inputs_embeds": torch.randn(3, 3, 4)})
    with pytest.raises(UnverifiedRowsError):
        rows.counts("layers.0.o", torch.Size((3, 3, 4)))
    rows.verify([site])
    with pytest.raises(NotPerSampleError):
        rows.counts("layers.0.o", torch.Size((3, 3, 4)))


# --- batches with the images of all samples in one row ---


def test_samples_keep_their_images() -> None:
    samples = questions()
    batch = together(samples)
    task = task_of(model_of("qwen2-vl"))
    for row, sample in enumerate(samples):
        chosen = task.select(batch, slice(row, row + 1))
        assert ("pixel_values" in chosen) == ("pixel_values" in sample)
        for name in ("pixel_values", "image_grid_thw"):
            assert name not in sample or torch.equal(chosen[name], sample[name])
    two = task.select(batch, slice(1, 3))
    assert torch.equal(two["pixel_values"], torch.cat([samples[1]["pixel_values"], samples[2]["pixel_values"]]))


def test_positions_of_three_axes_are_those_of_the_samples() -> None:
    batch = {"input_ids": torch.zeros(3, 5, dtype=torch.long), "position_ids": torch.arange(45).view(3, 3, 5)}
    chosen = task_of(model_of("qwen2-vl")).select(batch, slice(1, 2))
    assert torch.equal(chosen["position_ids"], batch["position_ids"][:, 1:2])


LLAVA = SimpleNamespace(image_token_index=9)


@pytest.mark.parametrize(
    ("texts", "images", "sizes", "expected"),
    [
        ([[9, 9, 1, 1], [9, 9, 1, 1]], 2, None, [1, 1]),
        ([[9, 9, 9, 9], [1, 1, 1, 1]], 2, None, [2, 0]),  # as many images as samples, both of the first
        ([[9, 9, 9, 9], [9, 9, 1, 1]], 3, None, [2, 1]),
        ([[9, 9, 9, 1], [9, 1, 1, 1]], 2, [[8, 8], [4, 4]], [1, 1]),
        ([[9, 9, 1, 9], [9, 1, 1, 1]], 3, [[8, 8], [4, 4], [4, 4]], [2, 1]),  # one image after the other
    ],
)
def test_images_belong_to_the_texts_with_their_placeholders(
    texts: list[list[int]], images: int, sizes: list[list[int]] | None, expected: list[int]
) -> None:
    batch = {"input_ids": torch.tensor(texts), "pixel_values": torch.zeros(images, 3, 8, 8)}
    if sizes is not None:
        batch["image_sizes"] = torch.tensor(sizes)
    assert packed_rows(batch, LLAVA)["pixel_values"] == expected


def test_images_of_unknown_samples_are_refused() -> None:
    batch = {
        "input_ids": torch.tensor([[9, 9, 9, 9], [9, 9, 1, 1]]),
        "pixel_values": torch.zeros(3, 3, 8, 8),
        "image_sizes": torch.tensor([[8, 8], [4, 4], [4, 4]]),
    }
    with pytest.raises(DataError, match="which of the 3 rows of pixel_values belong to which sample"):
        packed_rows(batch, LLAVA)
    grid = {"pixel_values": torch.zeros(12, 24), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 2]])}
    ids = torch.tensor([[9, 9, 1], [9, 1, 1]])
    with pytest.raises(DataError, match="do not fit the placeholder tokens"):
        packed_rows({"input_ids": ids, **grid}, LLAVA)
    assert packed_rows({"input_ids": ids.flip(0), **grid}, LLAVA) == {
        "pixel_values": [4, 8],
        "image_grid_thw": [1, 1],
    }


def test_a_tower_of_patches_has_images_as_samples() -> None:
    grid = {"hidden_states": torch.zeros(12, 24), "grid_thw": torch.tensor([[1, 2, 2], [1, 4, 2]])}
    assert batch_size(grid) == 2
    assert packed_rows(grid, SimpleNamespace()) == {"hidden_states": [4, 8]}


@pytest.mark.parametrize("options", [{"keep": 0.5}, {"keep_flops": 0.8, "rounds": 2}])
def test_image_text_models_are_pruned_by_the_defaults(options: dict[str, Any]) -> None:
    """Removals are verified on two of the three samples of a batch, with their images."""
    model = copy.deepcopy(model_of("qwen2-vl"))
    batches = [together(questions()[first : first + 3]) for first in (0, 3)]
    result = headprune.prune(model, batches, **options)
    assert len(result.trajectory) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paddleocr_vl_vision", "qwen2_5_omni_audio_encoder"])
def test_batches_whose_samples_do_not_run_alone_are_refused(name: str) -> None:
    """Towers without a text, whose images or sounds lie in one entry in a way that is not known."""
    model, runs = small_models.build(name)
    batch = next(run.inputs for run in runs if not run.path)
    with pytest.raises(DataError, match=r"does not run on one of its samples alone .*give batches of one sample"):
        headprune.prune(model, [batch], keep_flops=0.8, rounds=2)
