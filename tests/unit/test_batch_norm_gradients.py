"""Gradients through batch norm of one sample, which torch computes wrongly for permuted gradients."""

from __future__ import annotations

import pytest
import torch
import transformers

import headprune
from headprune.hooks.outputs import evaluating


@pytest.mark.parametrize("size", [1, 2])
def test_the_gradient_is_that_of_the_affine_map(size: int) -> None:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(6).double()
    with torch.no_grad():
        norm.running_var.uniform_(0.5, 2)
        norm.weight.normal_()
    images = torch.randn(size, 6, 5, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(size, 25, 6, dtype=torch.float64)  # tokens x channels
    with evaluating(norm):
        tokens = norm(images).flatten(2).transpose(1, 2)
        (gradient,) = torch.autograd.grad((tokens * weights).sum(), images)
    slope = norm.weight / (norm.running_var + norm.eps).sqrt()
    expected = weights.transpose(1, 2).reshape(images.shape) * slope[:, None, None]
    assert torch.allclose(gradient, expected)
    assert not norm._forward_hooks


def test_scores_of_cvt_do_not_depend_on_the_batch() -> None:
    """They differed by up to 96 %."""
    torch.manual_seed(0)
    config = transformers.CvtConfig(
        image_size=16, embed_dim=[8, 12], num_heads=[2, 3], depth=[1, 2], patch_sizes=[3, 3], patch_stride=[2, 2],
        patch_padding=[1, 1], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.0], qkv_bias=[True, True], cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2],
        padding_q=[1, 1], stride_q=[1, 1], num_labels=3,
    )  # fmt: skip
    model = transformers.CvtForImageClassification(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    images, labels = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 2])
    both = [{"pixel_values": images, "labels": labels}]
    alone = [{"pixel_values": images[row : row + 1], "labels": labels[row : row + 1]} for row in range(2)]
    for criterion in ("his", "residual-gradient"):
        expected, actual = (headprune.score(model, data, criterion=criterion).scores for data in (both, alone))
        known = ~expected.isnan()  # layers have two heads or three
        assert known.sum() == 8
        assert torch.allclose(actual[known], expected[known], rtol=1e-9, atol=1e-12), criterion
