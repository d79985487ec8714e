"""Exports pruned models to GGUF files, for llama.cpp."""

from headprune.exports.gguf.run import GgufRunner
from headprune.exports.gguf.runtime import Gguf

__all__ = ["Gguf", "GgufRunner"]
