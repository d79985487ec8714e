"""Executes notebooks and stores their outputs in them, without progress bars, which are widgets if ipywidgets is
installed:

python examples/execute.py examples/classifier.ipynb examples/language_model.ipynb
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(notebook: Any, folder: Path, env: Mapping[str, str] = os.environ) -> None:
    """Run all cells with `folder` as the working directory; if a cell raises, this raises CellExecutionError."""
    client = NotebookClient(
        notebook, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=dict(env))


def drop_progress_bars(notebook: Any) -> None:
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute notebooks and store their outputs in them.")
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, help="working directory of the notebooks; a temporary one by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for file in arguments.notebooks:
            notebook = nbformat.read(file, as_version=4)
            execute(notebook, folder)
            drop_progress_bars(notebook)
            nbformat.write(notebook, file)


if __name__ == "__main__":
    main()
