"""Exports pruned models to ONNX Runtime, OpenVINO, llama.cpp and torch.export, and compares their outputs."""
