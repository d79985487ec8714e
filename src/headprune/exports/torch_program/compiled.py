"""Compiles programs with AOTInductor, for the kind of processor of this machine."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from headprune.exports.quiet import quiet, reason

SETTINGS: dict[str, Any] = {
    "aot_inductor.compile_wrapper_opt_level": "O0",  # of the code that calls kernels; kernels are optimised anyway
    "cpp.dynamic_threads": True,  # by the machine that runs it, not by this one
}


def compiler() -> str | None:
    """The C++ compiler that PyTorch would use; None where there is none."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return get_cpp_compiler()
    except (ImportError, RuntimeError):
        return None


@contextmanager
def _temporary_cache() -> Iterator[None]:
    """A temporary cache folder for the compiler, whose files are megabytes per program."""
    name, before = "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def compile_program(program: ExportedProgram, file: Path) -> bool:
    """Write the compiled program. A failure is a warning, as the exported program still runs."""
    if compiler() is None:
        return False
    try:
        with quiet(), _temporary_cache():
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=SETTINGS)
    except Exception as error:  # from the tracer, the code generator or the compiler
        file.unlink(missing_ok=True)
        why = f"since PyTorch cannot compile this model ({reason(error)})"
        warnings.warn(f"{file.name} was not written, {why}.", stacklevel=2)
        return False
    return True
