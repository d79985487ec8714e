"""Pruned models as GGUF files, for llama.cpp."""

from headprune.runtimes.gguf.run import GgufRunner
from headprune.runtimes.gguf.runtime import Gguf

__all__ = ["Gguf", "GgufRunner"]
