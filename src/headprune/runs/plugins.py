"""Imports plugins: user code that registers criteria, methods and families."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from headprune.checkpoint.atomic_files import path_exists
from headprune.errors import HeadpruneError, RegistrationError


def import_plugins(names: Sequence[str] | None) -> None:
    """Import Python files or modules that register criteria or families."""
    for name in names or ():
        path_exists(name, RegistrationError)
        try:
            if name.endswith(".py"):
                spec = importlib.util.spec_from_file_location(Path(name).stem, name)
                if spec is None or spec.loader is None or not Path(name).is_file():
                    raise ImportError("there is no such file")
                module = importlib.util.module_from_spec(spec)
                sys.modules[Path(name).stem] = module
                spec.loader.exec_module(module)
            else:
                importlib.import_module(name)
        except HeadpruneError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            raise RegistrationError(f"The plugin {name} cannot be imported: {reason}.") from error
