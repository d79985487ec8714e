"""The command line, as `headprune` and as `python -m headprune`."""

from __future__ import annotations

import logging
import sys

from headprune.errors import MissingPackageError
from headprune.extras import require


def main() -> None:
    """Run the command line; without the packages it is made of, one sentence and exit code 2."""
    try:
        with require("cli", "The command line needs"):
            import rich  # noqa: F401  # needed by every table
            import typer  # noqa: F401
    except MissingPackageError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    from headprune.cli.main import main as run

    _quiet_torchao()
    run()


def _quiet_torchao() -> None:
    """transformers imports torchao where it is installed, which then warns of kernels for other processors."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
