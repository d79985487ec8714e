"""Pruned models as GGUF files, for llama.cpp."""

from headprune.export.gguf.run import GgufRunner
from headprune.export.gguf.runtime import Gguf

__all__ = ["Gguf", "GgufRunner"]
