"""Importing this registers every runtime."""

from headprune.export import onnx, openvino  # noqa: F401
