"""llama.cpp inside this process, by the package xllamacpp: one model, one text at a time."""

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

# Some requests go to the loopback address, past any proxy.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

TIMEOUT = 600  # seconds


class Llama:
    """A file that is open in llama.cpp, with a KV cache in float32 and without flash attention: float16, the default of
    both, changes log-probabilities by some thousandths."""

    def __init__(self, file: Path, *, context: int, threads: int | None = None) -> None:
        with require("gguf", "Running GGUF files needs"):
            import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = context
        params.n_parallel = 1
        params.warmup = False
        params.fit_params = False  # an error where the context does not fit
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
        self._request("slots")  # waits for its loop: closing a server whose loop has not started would never return
        properties = self._request("v1/models")["data"][0]["meta"]
        self.vocabulary, self.context = int(properties["n_vocab"]), int(properties["n_ctx"])  # at most that of the file

    def next(self, prompt: list[int], *, candidates: int) -> list[tuple[int, float]]:
        """(id, log-probability) of the best candidates after a prompt, the most probable first.

        The token that the server then samples is not used; but where it ends the text, or is part of a character, the
        response has no candidates. So a neutral token is forced, which changes no probability.
        """
        request = {
            "prompt": prompt,
            "max_tokens": 1,
            "logprobs": candidates,
            "temperature": 0,
            "logit_bias": [[self._neutral_token, 1e6]],
            "cache_prompt": True,
        }
        with _without_gc():
            response = self._server.handle_completions(request)
        if "choices" not in response:
            raise ExportError(f"llama.cpp does not answer: {response.get('message', response)}.")
        [token] = response["choices"][0]["logprobs"]["content"]
        return [(entry["id"], entry["logprob"]) for entry in token["top_logprobs"]]

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that llama.cpp adds."""
        return list(self._request("tokenize", content=text, add_special=True, parse_special=True)["tokens"])

    @functools.cached_property
    def _neutral_token(self) -> int:
        """A token that is a single letter."""
        for letter in "aeinrstodlABCDE0123":
            number = self._request("tokenize", content=letter)["tokens"][-1:]
            if number and self._request("detokenize", tokens=number)["content"].strip() == letter:
                return int(number[0])
        return 0

    def _request(self, path: str, **body: Any) -> Any:
        """Send a request to the HTTP address of the server, for what the package has no function for."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"{self._server.listening_address}/{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with _direct.open(request, timeout=TIMEOUT) as response:
                return json.load(response)
        except OSError as error:
            raise ExportError(f"llama.cpp does not answer ({error}); try again on a quieter machine.") from None

    def close(self) -> None:
        """Stop its threads and free its memory."""
        self._server = None


@contextmanager
def _without_gc() -> Iterator[None]:
    """A response has as many objects as the vocabulary has tokens; garbage collection among them takes half the
    time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
