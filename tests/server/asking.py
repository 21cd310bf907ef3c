"""What the tests ask nano: questions that it answers alike every time, and tools that it knows how to call."""

from __future__ import annotations

from typing import Any

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
TWO_CITIES = "What is the weather in Paris? What is the weather in Rome?"  # nano calls a tool for each
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DESCRIPTION = "Get the current weather of a city"
REPORTS = {"Paris": '{"temperature": 21, "condition": "sunny"}', "Rome": '{"temperature": 9, "condition": "rainy"}'}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STORY = "Tell me a story."


def chat_tool(name: str = "get_weather", **more: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": DESCRIPTION, "parameters": WEATHER, **more},
    }


def responses_tool(name: str = "get_weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": DESCRIPTION, "parameters": WEATHER, **more}


def messages_tool(name: str = "get_weather", **more: Any) -> dict[str, Any]:
    return {"name": name, "description": DESCRIPTION, "input_schema": WEATHER, **more}
