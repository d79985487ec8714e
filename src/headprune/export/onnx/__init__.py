"""ONNX files, written by PyTorch's own exporter, run and quantised by ONNX Runtime."""
