"""Run pieces of Python, one after the other, and say what each printed: run_snippets.py FILE [MISSING...]."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path


def printed(snippet: str) -> dict[str, str | None]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(snippet, "snippet", "exec"), {"__name__": "__main__"})
    except Exception:
        return {"out": out.getvalue(), "error": traceback.format_exc()[-1500:]}
    return {"out": out.getvalue(), "error": None}


if __name__ == "__main__":
    for missing in sys.argv[2:]:
        sys.modules[missing] = None  # type: ignore[assignment]  # as if it were not installed
    snippets = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: printed(text) for name, text in snippets.items()}))
