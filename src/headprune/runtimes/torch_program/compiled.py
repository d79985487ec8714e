"""Programs as machine code: AOTInductor's, for the kind of processor it is compiled on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from headprune.runtimes.onnx.write import quiet

SETTINGS: dict[str, Any] = {
    "aot_inductor.compile_wrapper_opt_level": "O0",  # code that only calls kernels, which are optimised all the same
    "cpp.dynamic_threads": True,  # as many as where it runs, and not as where it was compiled
}


def compiler() -> str | None:
    """The C++ compiler that PyTorch would use; None where there is none."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return get_cpp_compiler()
    except (ImportError, RuntimeError):
        return None


def compile_program(program: ExportedProgram, file: Path) -> bool:
    """Write the compiled program. One that cannot be compiled still runs as it was exported, so that is a warning."""
    if compiler() is None:
        return False
    try:
        with quiet():
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=SETTINGS)
    except Exception as error:  # of the tracer, the code generator or the compiler
        file.unlink(missing_ok=True)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        warnings.warn(f"{file.name} was not written, since PyTorch cannot compile this model ({reason}).", stacklevel=2)
        return False
    return True
