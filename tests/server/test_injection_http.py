"""Whoever spells a control token in any text or key of a request, in any protocol, gets text: what the engine is given
has the control tokens that the structure asks for and no other.

Every string of corpus/valid is tried, and every key that clients choose.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import process_cores
import pytest
import servers
from bodies_of_corpus import VALID, places, renamed, replaced

from deepinfer.codec.spellings import CONTROL, PICTURE_SPELLINGS
from deepinfer.engine.client import AsyncEngineClient

SPELLINGS = sorted({*map(str, CONTROL), *PICTURE_SPELLINGS, "<｜▁pad▁｜>"})
HOSTILE = "a " + " ".join(SPELLINGS) + "".join(SPELLINGS) + "\ufdd0"
PROTOCOLS = [path for path in VALID if path.startswith("/v1/") and not path.endswith("count_tokens")]
ROOMY = {"max_model_len": 8192, "num_blocks": 256}
CHOSEN_KEYS = ("properties", "metadata", "input", "logit_bias")  # objects whose keys are the client's
IN_SEVERAL_PLACES = ("c", "c1", "d", "t1", "city")  # ids of calls; a parameter, which is required, too
FIXED = {"type", "role", "name", "effort", "reasoning_effort", "tool_choice", "truncation", "request_id"} | {
    "id", "call_id", "tool_call_id", "tool_use_id", "city", "7", "0",
}  # fmt: skip
"""Fields that take a few words, names or numbers alone, and those that must fit others (tried with them)."""


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Iterator[servers.ThreadServer]:
    """A server with room for prompts with tools."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "faulty", lambda path: partial(process_cores.tiny_core, path, **ROOMY))
        with servers.thread_server(tiny_checkpoint) as started:
            yield started


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that the engine gets; it is given only their beginning, for its answers do not matter here."""
    seen: list[list[int]] = []
    real = AsyncEngineClient.generate

    def generate(self: AsyncEngineClient, prompt: Any, params: Any, **more: Any) -> AsyncIterator[Any]:
        if len(prompt) > 1:  # the server asks the engine itself, too, with a single token
            seen.append([int(token) for token in prompt])
        return real(self, prompt[:4], params, **more)

    monkeypatch.setattr(AsyncEngineClient, "generate", generate)
    return seen


def answer(server: servers.ThreadServer, path: str, body: Any) -> int:
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        return client.post(path, json={**body, "model": "tiny"}).status_code


def controls(server: servers.ThreadServer, ids: list[int]) -> list[int]:
    """The ids that no text becomes."""
    known = set(server.state.model.tokenizer.control_ids.values())
    return [token for token in ids if token in known]


def everywhere(value: Any, old: str, new: str) -> Any:
    """`value` with a text replaced wherever it stands alone, also as a key: ids that must fit, names of parameters."""
    if isinstance(value, dict):
        return {new if key == old else key: everywhere(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [everywhere(item, old, new) for item in value]
    return new if value == old else value


def tries(body: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every text of a body made hostile, and harmless: name, two bodies."""
    for place, value in places(body):
        name = ".".join(map(str, place))
        if isinstance(value, str) and place != ("model",):
            yield name, replaced(body, place, HOSTILE), replaced(body, place, "a")
        if len(place) > 1 and place[-2] in CHOSEN_KEYS and isinstance(place[-1], str):
            yield f"key {name}", renamed(body, place, HOSTILE), renamed(body, place, "a")
    for text in IN_SEVERAL_PLACES:
        yield f"all {text}", everywhere(body, text, HOSTILE), everywhere(body, text, "a")


@pytest.mark.parametrize("path", PROTOCOLS)
def test_no_text_of_a_request_becomes_a_control_token(
    server: servers.ThreadServer, prompts: list[list[int]], path: str
) -> None:
    tried, refused = 0, set()
    for name, hostile, harmless in tries(VALID[path]):
        prompts.clear()
        status = answer(server, path, hostile)
        if status == 400:
            refused.add(name.removeprefix("key ").rpartition(".")[2])
            continue
        assert status == 200 and answer(server, path, harmless) == 200, name
        bad, good = prompts
        assert controls(server, bad) == controls(server, good), name
        tried += 1
    assert refused <= FIXED
    assert tried >= 5


def test_ids_of_pictures_cannot_be_given_directly(server: servers.ThreadServer, prompts: list[list[int]]) -> None:
    known = server.state.model.tokenizer.control_ids
    for spelling in PICTURE_SPELLINGS:
        if spelling in known:
            assert answer(server, "/v1/completions", {"prompt": [5, known[spelling], 6], "max_tokens": 1}) == 400
    assert not prompts


def test_what_tokenize_shows_is_what_the_engine_gets(server: servers.ThreadServer, prompts: list[list[int]]) -> None:
    body = {"messages": [{"role": "user", "content": HOSTILE}], "reasoning_effort": "low", "model": "tiny"}
    shown = httpx.post(f"{server.base_url}/tokenize", json=body, timeout=60).json()["tokens"]
    assert answer(server, "/v1/chat/completions", {**body, "max_tokens": 1}) == 200
    shown_text = httpx.post(f"{server.base_url}/tokenize", json={"prompt": HOSTILE}, timeout=60).json()["tokens"]
    assert answer(server, "/v1/completions", {"prompt": HOSTILE, "max_tokens": 1}) == 200
    assert prompts == [shown, shown_text] and len(controls(server, shown_text)) == 1  # the begin token
