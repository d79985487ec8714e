"""llama.cpp within this process, as the package xllamacpp carries it: one model, one text at a time."""

from __future__ import annotations

import functools
import gc
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headprune.errors import ExportError
from headprune.extras import require

# Some questions go over the loopback address, which no proxy may get hold of.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

PATIENCE = 600  # seconds: a machine may be busy


class Llama:
    """A file that is open in llama.cpp, with a cache in float32 and without flash attention: float16, which both use
    otherwise, costs some thousandths in log-probabilities."""

    def __init__(self, file: Path, *, context: int, threads: int | None = None) -> None:
        with require("gguf", "Running GGUF files needs"):
            import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = context
        params.n_parallel = 1
        params.warmup = False
        params.fit_params = False  # the context is what was asked for, or an error
        params.verbosity = 0
        params.n_gpu_layers = 0
        if threads is not None:
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        try:
            self._server: Any = xllamacpp.Server(params)
        except RuntimeError as error:
            raise ExportError(f"llama.cpp does not load {file.name} ({error}).") from None
        self._ask("slots")  # answered by its loop: to close a server whose loop has not begun would wait for ever
        facts = self._ask("v1/models")["data"][0]["meta"]
        self.vocabulary, self.context = int(facts["n_vocab"]), int(facts["n_ctx"])  # not over what the file is for

    def next(self, prompt: list[int], *, candidates: int) -> list[tuple[int, float]]:
        """(id, log-probability) of the best candidates after a prompt, the most probable first.

        Which token the server then takes is not of interest: where it ends the text, or is a part of a letter only,
        nothing is said of the candidates. So a harmless one is taken, which changes no probability.
        """
        question = {
            "prompt": prompt,
            "max_tokens": 1,
            "logprobs": candidates,
            "temperature": 0,
            "logit_bias": [[self._harmless, 1e6]],
            "cache_prompt": True,
        }
        with _uncollected():
            answer = self._server.handle_completions(question)
        if "choices" not in answer:
            raise ExportError(f"llama.cpp does not answer: {answer.get('message', answer)}.")
        [token] = answer["choices"][0]["logprobs"]["content"]
        return [(entry["id"], entry["logprob"]) for entry in token["top_logprobs"]]

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, with what llama.cpp puts before and after it."""
        return list(self._ask("tokenize", content=text, add_special=True, parse_special=True)["tokens"])

    @functools.cached_property
    def _harmless(self) -> int:
        """A token that is a letter, and so ends nothing and lacks nothing."""
        for letter in "aeinrstodlABCDE0123":
            number = self._ask("tokenize", content=letter)["tokens"][-1:]
            if number and self._ask("detokenize", tokens=number)["content"].strip() == letter:
                return int(number[0])
        return 0

    def _ask(self, what: str, **body: Any) -> Any:
        """What only its address tells, and no function of the package."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"{self._server.listening_address}/{what}", data, {"Content-Type": "application/json"}
        )
        try:
            with _direct.open(request, timeout=PATIENCE) as answer:
                return json.load(answer)
        except OSError as error:
            raise ExportError(f"llama.cpp does not answer ({error}); try again on a quieter machine.") from None

    def close(self) -> None:
        """Stop its threads and free its memory."""
        self._server = None


@contextmanager
def _uncollected() -> Iterator[None]:
    """An answer has as many objects as a vocabulary has tokens; to look for garbage among them takes half the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
