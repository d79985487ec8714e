"""Linear maps: one interface to `nn.Linear` [out, in] and GPT-2's `Conv1D` [in, out]."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from headprune.errors import UnsupportedModelError

PLAIN = (nn.Linear, Conv1D)


def is_plain(module: nn.Module) -> bool:
    """Whether this is a Linear, a Conv1D, or a subclass of Linear in torch or transformers, which discovery verifies.

    Other subclasses (quantised, adapter) store or compute something else.
    """
    kind = type(module)
    subclass = kind.__module__.startswith(("torch.nn.modules.", "transformers.models."))
    return kind in PLAIN or (isinstance(module, nn.Linear) and subclass)


def refuse_computed(module: nn.Module, path: str, name: str = "weight") -> None:
    """Refuse a tensor that hooks or a parametrization compute before each forward: slicing it would have no effect."""
    if name in module._parameters or name in module._buffers:
        return
    parts = {*module._parameters, *module._buffers, *module._modules}
    functions = {
        "parametrizations": "parametrize.remove_parametrizations",
        f"{name}_mask": "prune.remove",
        f"{name}_g": "remove_weight_norm",
        f"{name}_u": "remove_spectral_norm",
    }
    function = next((functions[part] for part in functions if part in parts), None)
    if function is not None:
        raise UnsupportedModelError(
            f"Stopped at {path}: its {name} is computed from other tensors before each forward; call "
            f"torch.nn.utils.{function}(module, {name!r}) first."
        )
    if is_plain(module):
        raise UnsupportedModelError(f"Stopped at {path}: its {name} is no parameter; make it one first.")


def is_transposed(module: nn.Module) -> bool:
    return isinstance(module, Conv1D)


def out_features(module: Any) -> int:
    return int(module.weight.shape[1 if is_transposed(module) else 0])


def in_features(module: Any) -> int:
    return int(module.weight.shape[0 if is_transposed(module) else 1])


def is_quantized(tensor: Any) -> bool:
    """Whether this is a tensor of torchao: integers and scales behind a floating-point interface."""
    return type(tensor).__module__.partition(".")[0] == "torchao"


def refuse_quantized(model: nn.Module, what: str) -> None:
    """Quantised weights cannot be sliced, trained or quantised again, so quantisation comes last."""
    if any(is_quantized(parameter) for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"The weights of this model are quantised, so it cannot be {what}; do that before headprune.quantize."
        )


def refuse_inference_weights(model: nn.Module) -> None:
    """Weights that were made under torch.inference_mode have no gradients behind them, and stay so outside of it."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UnsupportedModelError(
            "The weights of this model were made under torch.inference_mode(), so no gradient passes them; load the "
            "model outside of it."
        )


def drop_gguf_quantizer(model: Any) -> None:
    """Remove the quantiser from a model whose weights transformers has dequantised when it read them from a GGUF file:
    as long as the model names one, transformers neither saves nor trains it."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        return
    if all(parameter.is_floating_point() for parameter in model.parameters()):
        quantizer.remove_quantization_config(model)
