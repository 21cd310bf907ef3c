"""Bodies of Chat Completions requests for tests."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.codec.chat.request import ChatRequest, to_generation
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import parse
from deepinfer.codec.generation import GenerationRequest

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}}
TIME = {"type": "function", "function": {"name": "get_time"}}


def generation(**fields: Any) -> GenerationRequest:
    body = {"model": "flash", "messages": [{"role": "user", "content": "Hello"}]} | fields
    return to_generation(parse(ChatRequest, body))


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        generation(**fields)
    assert caught.value.status == 400
    assert caught.value.param is None or caught.value.param in caught.value.message
    return caught.value
