"""Attention probabilities are those that the model computes, whatever its attention implementation, or are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen2_vl import modeling_qwen2_vl

import headprune
from headprune.errors import UnsupportedModelError
from headprune.hooks.attention_probabilities import probabilities
from score_helpers import labelled
from zoo import VOCAB, ZOO

SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1}
DECODER = {**SIZES, "intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 6}
TOWER = {**SIZES, "intermediate_size": 16, "max_position_embeddings": 32}


def built(kind: Any, config: Any, attention: str) -> Any:
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so large that attention is far from uniform
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def falcon(attention: str, *, alibi: bool = False) -> Any:
    config = transformers.FalconConfig(**SIZES, alibi=alibi)
    return built(transformers.FalconForCausalLM, config, attention)


def deepseek(attention: str) -> Any:
    """Each query attends to two keys, which an indexer selects."""
    config = transformers.DeepseekV32Config(
        **SIZES,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        index_topk=2,
        index_n_heads=2,
        index_head_dim=8,
    )
    return built(transformers.DeepseekV32ForCausalLM, config, attention)


def gpt_oss(attention: str) -> Any:
    config = transformers.GptOssConfig(**DECODER, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    return built(transformers.GptOssForCausalLM, config, attention)


def gemma2(attention: str) -> Any:
    config = transformers.Gemma2Config(**DECODER, attn_logit_softcapping=0.5, sliding_window=4)
    return built(transformers.Gemma2ForCausalLM, config, attention)


def align_text(attention: str) -> Any:
    return built(transformers.AlignTextModel, transformers.AlignTextConfig(**TOWER), attention)


def clap_text(attention: str) -> Any:
    return built(transformers.ClapTextModel, transformers.ClapTextConfig(**TOWER), attention)


MODELS: dict[str, Callable[[str], Any]] = {
    "falcon": falcon,
    "falcon-alibi": functools.partial(falcon, alibi=True),
    "deepseek": deepseek,
    "gpt-oss": gpt_oss,
    "gemma2": gemma2,
    "align-text": align_text,
    "clap-text": clap_text,
}


def texts(*, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 5:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def returned_entropies(eager: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[sites x heads]: the mean entropy of the rows of real tokens in `output_attentions`, averaged over the texts."""
    with torch.no_grad():
        attentions = eager(**batch, output_attentions=True).attentions
    real = batch["attention_mask"].double()
    rows = torch.stack(
        [torch.special.entr(weights.double()).sum(-1) for weights in attentions]
    )  # [.., texts, heads, T]
    return ((rows * real[:, None]).sum(-1) / real.sum(-1)[:, None]).mean(1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "eager") for name in MODELS),
        *((name, "sdpa") for name in ("falcon", "deepseek")),
    ],
)
def test_entropies_are_those_of_output_attentions(name: str, attention: str, padded: bool) -> None:
    eager, model, batch = MODELS[name]("eager"), MODELS[name](attention), texts(padded=padded)
    result = headprune.score(model, [batch], criterion="entropy(variant=A)")
    expected = returned_entropies(eager, batch)
    assert expected.min() > 1e-3
    assert torch.allclose(-result.scores.double(), expected, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == attention


def test_a_model_that_computes_something_else_with_eager_attention_is_refused() -> None:
    """Falcon adds ALiBi twice with eager attention, and only with that it returns probabilities."""
    model, batch = MODELS["falcon-alibi"]("sdpa"), texts(padded=False)
    with torch.no_grad():
        logits, others = model(**batch).logits, MODELS["falcon-alibi"]("eager")(**batch).logits
    difference = (logits - others).abs().max().item()
    refusal = rf"outputs of FalconForCausalLM \(attention implementation 'sdpa'\) differ by up to {difference:.3g}"
    with pytest.raises(UnsupportedModelError, match=refusal):
        headprune.score(model, [batch], criterion="hies")


class TableAttention(FalconAttention):
    """Takes its attention function out of transformers' table by name, as the code of Qwen2.5-Omni's vocoder does."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return super().forward(hidden_states, *args, **kwargs)


def test_code_without_eager_attention_is_refused() -> None:
    """It ended in a bare KeyError, as that table has no eager attention."""
    model = falcon("sdpa")
    sites = headprune.resolve(model)
    for block in model.transformer.h:
        block.self_attention.__class__ = TableAttention
    refusal = pytest.raises(UnsupportedModelError, match=r"TableAttention.* its code has no eager attention; use a")
    with refusal, probabilities(model, sites, lambda site, rows: None):
        model(**texts(padded=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("criterion", ["entropy", "hies"])
def test_half_precision_does_not_hide_another_model(criterion: str, dtype: torch.dtype) -> None:
    """The logits of Falcon with ALiBi differed by less than half precision allows, and its entropies were accepted."""
    batch = texts(padded=False)
    refusal = r"in half precision .* load the model with attn_implementation='eager', or in float32, or use"
    with pytest.raises(UnsupportedModelError, match=refusal):
        headprune.score(MODELS["falcon-alibi"]("sdpa").to(dtype), [batch], criterion=criterion)
    for name in ("gemma2", "falcon-alibi"):
        eager = MODELS[name]("eager").to(dtype)
        result = headprune.score(eager, [batch], criterion="entropy(variant=A)")
        expected = returned_entropies(eager, batch)
        assert torch.allclose(-result.scores.double(), expected, rtol=1e-2, atol=1e-2)


def test_sparse_attention_stays_sparse_while_it_is_read() -> None:
    """The model drops keys only where its implementation is called eager or sdpa."""
    model, batch = deepseek("sdpa"), texts(padded=False)
    with torch.no_grad():
        logits = model(**batch).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    assert headprune.score(model, [batch], criterion="hies").loss == pytest.approx(loss.item(), rel=1e-5)


@contextmanager
def registered(function: Callable[..., Any], mask: str = "eager") -> Iterator[str]:
    """An attention implementation with the masks of another one."""
    name = "attention_of_a_test"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[mask])
    try:
        yield name
    finally:
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


@pytest.mark.parametrize(("name", "family"), [("gpt-oss", modeling_gpt_oss), ("gemma2", modeling_gemma2)])
def test_a_registered_function_is_the_one_that_runs(name: str, family: Any) -> None:
    calls = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return family.eager_attention_forward(*args, **kwargs)[0], None

    model, batch = MODELS[name]("eager"), texts(padded=True)
    expected = returned_entropies(model, batch)
    with registered(attend) as implementation:
        model.set_attn_implementation(implementation)
        result = headprune.score(model, [batch], criterion="entropy(variant=A)")
    assert len(calls) == 2 * 2  # of two layers, without and with reading
    assert torch.allclose(-result.scores.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_registered_function_that_computes_something_else_is_refused() -> None:
    def without_sinks(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        key, value = (states.repeat_interleave(2, dim=1) for states in (key, value))
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attention_mask)
        return output.transpose(1, 2), None

    model = gpt_oss("eager")
    with registered(without_sinks) as implementation:
        model.set_attn_implementation(implementation)
        refusal = "layers.0.self_attn.*'attention_of_a_test'.*its output differs.*attn_implementation='eager'"
        with pytest.raises(UnsupportedModelError, match=refusal):
            headprune.score(model, [texts(padded=True)], criterion="hies")


def test_masks_of_another_form_are_refused() -> None:
    """Flash attention takes the padding of each text instead of a mask of queries and keys."""
    model = gemma2("eager")
    with registered(lambda module, query, *args, **options: (query.transpose(1, 2), None), "flash_attention_2") as name:
        model.set_attn_implementation(name)
        with pytest.raises(UnsupportedModelError, match=r"masks have another form.*attn_implementation='eager'"):
            headprune.score(model, [texts(padded=True)], criterion="entropy")


def replaced_forward(module: Any, change: Callable[[Any, bool], Any]) -> None:
    """Change what a module returns, given that and whether it was asked for its attention."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs), bool(kwargs.get("output_attentions")))

    module.forward = run


def test_logits_that_change_while_probabilities_are_read_are_refused() -> None:
    model, batch = ZOO["mpnet"].build(), labelled(ZOO["mpnet"], 0)
    module = model.mpnet.encoder.layer[1].attention.attn
    replaced_forward(module, lambda output, asked: (output[0] * (1.5 if asked else 1), *output[1:]))
    for criterion in ("entropy", "deficit", "hies"):
        with pytest.raises(UnsupportedModelError, match=r"outputs of MPNetForSequenceClassification \(.*'eager'\)"):
            headprune.score(model, [batch], criterion=criterion)
    headprune.score(model, [batch], criterion="his")


def test_a_site_without_probabilities_is_refused() -> None:
    model, batch = ZOO["mpnet"].build(), labelled(ZOO["mpnet"], 0)
    replaced_forward(model.mpnet.encoder.layer[1].attention.attn, lambda output, asked: (output[0], None))
    for criterion in ("entropy", "deficit", "hies", "attribution(steps=2)"):
        with pytest.raises(UnsupportedModelError, match=r"encoder.layer.1.attention.attn \(.*does not return them"):
            headprune.score(model, [batch], criterion=criterion)
    headprune.score(model, [batch], criterion="his")


def test_a_site_without_probabilities_is_refused_where_its_function_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager function that keeps its probabilities to itself."""
    eager = modeling_gemma2.eager_attention_forward
    monkeypatch.setattr(
        modeling_gemma2, "eager_attention_forward", lambda *args, **options: (eager(*args, **options)[0], None)
    )
    with pytest.raises(UnsupportedModelError, match=r"layers.0.self_attn \(Gemma2Attention.*does not return them"):
        headprune.score(gemma2("eager"), [texts(padded=False)], criterion="entropy")


def test_the_model_and_transformers_are_as_before_after_a_refusal() -> None:
    model, before = falcon("sdpa"), AttentionInterface.get_interface
    replaced_forward(model.transformer.h[0].self_attention, lambda output, asked: (output[0], None))
    with pytest.raises(UnsupportedModelError):
        headprune.score(model, [texts(padded=False)], criterion="entropy")
    assert model.config._attn_implementation == "sdpa"
    assert AttentionInterface.get_interface is before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_model_that_draws_random_numbers_is_compared_on_the_same_ones() -> None:
    """Its outputs with and without eager attention are compared, which other noise would make different."""
    model, batch = falcon("sdpa"), texts(padded=True)
    drawn: list[torch.Tensor] = []

    def noisy(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.randn_like(output))
        return output + drawn[-1]

    model.transformer.word_embeddings.register_forward_hook(noisy)
    scores = headprune.score(model, [batch], criterion="entropy(variant=A)").scores.double()
    assert len(drawn) > 1
    assert all(torch.equal(noise, drawn[0]) for noise in drawn)
    eager = falcon("eager")
    eager.transformer.word_embeddings.register_forward_hook(lambda module, args, output: output + drawn[0])
    assert torch.allclose(-scores, returned_entropies(eager, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_windows_of_an_image_count_for_its_sample(size: int) -> None:
    """Swin attends within windows, which are rows of their own: 16 per image in the first layer, 4 in the second."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2, num_labels=2
    )
    model = built(transformers.SwinForImageClassification, config, "eager")
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attentions = model(images, output_attentions=True).attentions
    expected = torch.stack([torch.special.entr(weights.double()).sum(-1).mean((0, 2)) for weights in attentions])
    batches = [{"pixel_values": part} for part in images.split(size)]
    result = headprune.score(model, batches, criterion="entropy(variant=A)")
    assert [len(weights) for weights in attentions] == [4 * 16, 4 * 4]
    assert torch.allclose(-result.scores.double(), expected, rtol=1e-4, atol=0)


def qwen2_vl() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config={**DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}},
        vision_config={
            "embed_dim": 32, "hidden_size": 24, "depth": 2, "num_heads": 4, "patch_size": 2, "mlp_ratio": 1
        },
        image_token_id=2,
        video_token_id=3,
        vision_start_token_id=4,
    )  # fmt: skip
    return built(transformers.Qwen2VLForConditionalGeneration, config, "sdpa")


def images(count: int, *, per_sample: int) -> dict[str, torch.Tensor]:
    """Texts with images of 4 x 4 patches, of which 2 x 2 are a token; the patches of all are in one row."""
    text = torch.randint(5, VOCAB, (count // per_sample, 3), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([text, torch.tensor([4, 2, 2, 2, 2] * per_sample).expand(len(text), -1)], dim=1)
    patches = torch.randn(count * 16, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(0))
    grids = torch.tensor([[1, 4, 4]] * count)
    types = (ids == 2).long()
    return {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": types}


def test_images_in_one_row_are_read_one_at_a_time_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = qwen2_vl(), images(1, per_sample=1)
    sites = headprune.resolve(model)
    scores = headprune.score(model, [batch], criterion="entropy(variant=A)").scores
    maps, eager = [], modeling_qwen2_vl.eager_attention_forward

    def kept(*args: Any, **options: Any) -> Any:
        result = eager(*args, **options)
        maps.append(result[1].double())
        return result

    monkeypatch.setattr(modeling_qwen2_vl, "eager_attention_forward", kept)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(**batch)
    in_order = sorted(sites, key=lambda site: site.stack != "vision")  # the images first
    assert [weights.shape[-1] for weights in maps] == [16, 16, 8, 8]
    for site, weights in zip(in_order, maps, strict=True):
        expected = torch.special.entr(weights).sum(-1).mean((0, 2))
        assert torch.allclose(-scores[site.index].double(), expected, rtol=1e-4, atol=1e-5)
    several = images(2, per_sample=1)
    parts = [{name: value.chunk(2)[place] for name, value in several.items()} for place in range(2)]
    together, apart = (headprune.score(model, data, criterion="entropy").scores for data in ([several], parts))
    assert torch.allclose(together, apart, rtol=1e-6, atol=1e-9)
    with pytest.raises(UnsupportedModelError, match=r"visual\.blocks\.0\.attn.*give batches of one image"):
        headprune.score(model, [images(2, per_sample=2)], criterion="hies")


def test_only_modules_with_code_of_their_own_run_with_eager_attention() -> None:
    """The pooling head of SigLIP is an nn.MultiheadAttention, the layers before it use the interface."""
    model, names = ZOO["siglip-vision"].build(), []
    record = lambda module, args, output: names.append(model.config._attn_implementation)  # noqa: E731
    handles = [layer.register_forward_hook(record) for layer in model.encoder.layers]
    result = headprune.score(model, [labelled(ZOO["siglip-vision"], 0)], criterion="entropy")
    assert len(names) == 2 * len(handles)
    assert set(names) == {"sdpa"}
    assert result.scores[-1].max() < 0
