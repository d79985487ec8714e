"""Mutations of files: of their bytes, of the values in JSON, and of the header of safetensors."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

# Values of all types, among them paths that lead out of a folder, and what YAML could make an object of.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -2.5, 1e308, 2**40, "", "x", "0", "-1", "1e9", "nan", "\u00e4\U0001f600"),
    *("../outside/canary.txt", "/nowhere/at/all", "a/../../b", "\x00", "self", "None", "0-3,7", "bits:eA==", "9" * 40),
    *([], {}, [None], [[]], [0, "x"], {"x": None}, {"0": [0]}, {"": ""}, float("nan"), float("inf")),
)
# Numbers of layers in a config: what is larger builds that many modules, in transformers as well.
SMALL: tuple[Any, ...] = tuple(value for value in VALUES if not isinstance(value, (int, float)) or abs(value) < 10)
SNIPPETS = (
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n",
        b"\n\n",
        b"\t",
        b'"',
        b"'",
        b",",
        b";",
        b"{",
        b"}",
        b"[",
        b"]",
    ),
    *(b":", b"- ", b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ", b"NaN", b"-Infinity", b"null", b"\\u0000"),
    *(b"\xc3\x28", b"9" * 30, b"[" * 300, b"../outside/canary.txt", b"%s", b"=1+1", b"# "),
)

Mutate = Callable[[bytes, random.Random], bytes]


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, slices, lines, an end that is missing, snippets that mean something to a parser."""
    for _ in range(rng.randint(1, 4)):
        content = rng.choice(BYTE_CHANGES)(content, rng)
    return content


def _flip(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def _delete(content: bytes, rng: random.Random) -> bytes:
    start, end = _slice(content, rng)
    return content[:start] + content[end:]


def _double(content: bytes, rng: random.Random) -> bytes:
    start, end = _slice(content, rng)
    return content[:end] + content[start:end] + content[end:]


def _truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(SNIPPETS) + content[at:]


def _lines(content: bytes, rng: random.Random) -> bytes:
    """Lines without one, or in another order."""
    lines = content.splitlines(keepends=True)
    if rng.random() < 0.5 and lines:
        del lines[rng.randrange(len(lines))]
    else:
        rng.shuffle(lines)
    return b"".join(lines)


def _slice(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 2, 8, 64, 1000)))


BYTE_CHANGES: Sequence[Mutate] = (_flip, _delete, _double, _truncate, _insert, _lines)


# --- values ---


def mutate_value(value: Any, rng: random.Random, values: Sequence[Any] = VALUES) -> Any:
    """The same JSON value with one part of it replaced, missing, renamed or added."""
    spots = _spots(value)
    if not spots:
        return rng.choice(values)
    holder, key = rng.choice(spots)
    change = rng.choice(("replace", "replace", "replace", "delete", "rename", "add"))
    if change == "replace":
        holder[key] = rng.choice(values)
    elif change == "delete":
        del holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice(("x", "", "0", "-1", "../x", "format"))] = holder.pop(key) if change == "rename" else 0
    else:
        holder.insert(rng.randrange(len(holder) + 1), rng.choice(values))
    return value


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as its container and key."""
    spots: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        holder = stack.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, part in list(items):
            spots.append((holder, key))
            stack.append(part)
    return spots


def mutate_json(content: bytes, rng: random.Random, values: Sequence[Any] = VALUES) -> bytes:
    """One to three values of the JSON in a file changed; at times its bytes."""
    if rng.random() < 0.25:
        return mutate_bytes(content, rng)
    value = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        value = mutate_value(value, rng, values)
    return json.dumps(value).encode()


def mutate_config(content: bytes, rng: random.Random) -> bytes:
    """JSON without numbers of which a model has that many layers."""
    return mutate_json(content, rng, SMALL)


def mutate_jsonl(content: bytes, rng: random.Random) -> bytes:
    """One line as JSON, or the bytes of the file."""
    lines = content.splitlines(keepends=True)
    if rng.random() < 0.3 or not lines:
        return mutate_bytes(content, rng)
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(lines[at], rng).replace(b"\n", b" ") + b"\n"
    return b"".join(lines)


def mutate_yaml(content: bytes, rng: random.Random) -> bytes:
    """One to three values of a YAML file changed; at times its bytes."""
    import yaml

    if rng.random() < 0.4:
        return mutate_bytes(content, rng)
    value = yaml.safe_load(content)
    for _ in range(rng.randint(1, 3)):
        value = mutate_value(value, rng)
    return yaml.safe_dump(value).encode()


def inside_gzip(mutate: Mutate) -> Mutate:
    """Mutates the content of a gzip file; at times the bytes of the file itself."""

    def mutate_gzip(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutate_bytes(content, rng)
        return gzip.compress(mutate(gzip.decompress(content), rng))

    return mutate_gzip


def mutate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """The header of a safetensors file as JSON, its length, bits of the weights, or any bytes."""
    length = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + length], content[8 + length :]
    if rng.random() < 0.2:
        return content[: 8 + length] + _flip(rest, rng)
    if rng.random() < 0.5:
        header = mutate_json(header, rng)
        return len(header).to_bytes(8, "little") + header + rest
    if rng.random() < 0.3:
        return rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63)).to_bytes(8, "little") + header + rest
    return mutate_bytes(content, rng)
