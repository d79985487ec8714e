"""Importing this registers every runtime."""

from headprune.runtimes import gguf, onnx, openvino, torch_program  # noqa: F401
