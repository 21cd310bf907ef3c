"""What the protocols' requests have in common: types of fields, checks, and the few tables behind them.

Types and ranges of single fields stand in pydantic annotations, so that they are checked at the door and shown in the
OpenAPI description; what concerns several fields is checked by the functions below. All of it ends as a RequestError
that names the field as the client spelled it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deepinfer.codec.body import Body as Body
from deepinfer.codec.body import Part as Part
from deepinfer.codec.body import ignored_fields as ignored_fields
from deepinfer.codec.body import parse as parse
from deepinfer.codec.body import short as short
from deepinfer.codec.body import validation_error as validation_error
from deepinfer.codec.conversation import Format, Image, Tool, ToolChoice
from deepinfer.codec.errors import RequestError
from deepinfer.codec.spellings import IMAGE

MAX_MESSAGES = 10_000  # spec/codec.md 10.3
MAX_STOPS = 16
MAX_TOOLS = 128
MAX_TOOL_NAME = 64
MAX_N = 8
MAX_STOP_IDS = 4096
MAX_BIASES = 1 << 18  # more than any vocabulary has
MAX_WORDS = 1024
MAX_TOP_LOGPROBS = 20

SAMPLING: tuple[str, ...] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
SAMPLING += ("min_tokens", "stop_token_ids", "ignore_eos")  # named alike in the protocols and in SamplingParams

DEFAULT_EFFORT = 75
EFFORTS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100, "ultra": 100}  # spec/codec.md 2

ImageDetail = Literal["low", "high", "original", "auto"]
EffortName = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
Effort = EffortName | Annotated[int, Field(ge=1, le=100)]


def _finite(low: float, high: float, *, open_low: bool = False) -> Any:
    # Python's JSON reader lets NaN and Infinity in
    return Field(gt=low if open_low else None, ge=None if open_low else low, le=high, allow_inf_nan=False)


Temperature = Annotated[float, _finite(0, 2)]
TopP = Annotated[float, _finite(0, 1, open_low=True)]
MinP = Annotated[float, _finite(0, 1)]
Penalty = Annotated[float, _finite(-2, 2)]
RepetitionPenalty = Annotated[float, _finite(0.01, 10)]  # logits over much less are infinite in float32
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Bias = Annotated[float, _finite(-100, 100)]


def _first_wrong(biases: Any) -> Any:
    """The first bias that is no number alone, where there is one: pydantic makes an error of each."""
    if not isinstance(biases, Mapping):
        return biases
    if len(biases) > MAX_BIASES:
        raise RequestError(f"logit_bias: may have at most {MAX_BIASES} entries", param="logit_bias")
    wrong = (token for token, bias in biases.items() if type(bias) not in (int, float))
    return biases if (token := next(wrong, None)) is None else {token: biases[token]}


Biases = Annotated[dict[str, Bias], BeforeValidator(_first_wrong)]


class ThinkingFields(Part):
    type: Literal["enabled", "disabled", "adaptive"]


class StructuredOutputs(Part):
    """What the content must be, in the spelling of vLLM's clients; exactly one of these."""

    json_schema: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingExtensions(Part):
    """Fields that our protocols take beside their own, in the spelling that other engines' clients use."""

    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_WORDS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_.:-]+$")] | None = None


def sampling(body: Any) -> dict[str, Any]:
    """GenerationRequest.sampling: what `body` gives of it. A field that the body's class lacks counts as not given."""
    given = {name: getattr(body, name, None) for name in SAMPLING}
    given["seq_seed"] = getattr(body, "seed", None)
    if getattr(body, "logit_bias", None) is not None:
        given["logit_bias"] = token_biases("logit_bias", body.logit_bias)
    return {name: value for name, value in given.items() if value is not None}


def common(body: Any, max_tokens: int | None) -> dict[str, Any]:
    """Arguments of GenerationRequest that mean the same in all protocols: model, n, stream, sampling, max_tokens, stop
    strings, allowed and forbidden words, service tier, priority, share of the prefix cache, request id."""
    min_tokens = getattr(body, "min_tokens", None)
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        message = f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that the answer may have"
        raise RequestError(message, param="min_tokens")
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(body, name, None) == []:
            raise RequestError(f"{name}: is empty; leave it out", param=name)
    if any(not word for word in getattr(body, "bad_words", None) or ()):
        raise RequestError("bad_words: an empty string cannot be forbidden", param="bad_words")
    names = ("allowed_token_ids", "service_tier", "priority", "request_id")
    return {name: getattr(body, name, None) for name in names} | {
        "model": body.model,
        "n": getattr(body, "n", None) or 1,
        "stream": bool(body.stream),
        "max_tokens": max_tokens,
        "sampling": sampling(body),
        "bad_words": tuple(getattr(body, "bad_words", None) or ()),
        "stop": stop_strings("stop", getattr(body, "stop", None)),
        "include_stop": bool(getattr(body, "include_stop_str_in_output", None)),
        "cache_salt": getattr(body, "cache_salt", None) or getattr(body, "prompt_cache_key", None) or "",
    }


def check_stream_options(body: Any) -> None:
    """RequestError for options of a stream that was not asked for."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: needs stream to be true", param="stream_options")


def token_biases(param: str, biases: Mapping[str, float]) -> dict[int, float]:
    """Keys of JSON objects are texts; these must be token ids."""
    result = {}
    for key, value in biases.items():
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise RequestError(f"{param}: keys must be token ids, got {short(key)}", param=param)
        result[int(key)] = float(value)
    return result


def stop_strings(param: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """At most 16 texts, none of them empty."""
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{param}: at most {MAX_STOPS} strings, got {len(stops)}", param=param)
    for stop in stops:
        if not stop:
            raise RequestError(f"{param}: an empty string would stop every answer; leave it out", param=param)
    return stops


def thinking_and_effort(effort: str | int | None, thinking: str | None = None) -> tuple[bool, int]:
    """Conversation.thinking and .effort of the names in spec/codec.md 2. thinking: the `type`; "disabled" wins."""
    if thinking == "disabled" or effort == "none":
        return False, DEFAULT_EFFORT
    if effort is None:
        return True, DEFAULT_EFFORT
    return True, EFFORTS[effort] if isinstance(effort, str) else effort


def json_schema_format(schema: Any, param: str, *, shown: bool = True) -> Format:
    """Content that matches a JSON schema."""
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param}: must be a JSON schema (an object), got {short(schema)}", param=param)
    return Format("json_schema", schema, shown, param)


def structured_formats(body: SamplingExtensions) -> list[Format]:
    """What `structured_outputs` and the guided_* fields ask for."""
    outputs = body.structured_outputs or StructuredOutputs()
    given = [
        ("json_schema", outputs.json_schema, "structured_outputs.json"),
        ("regex", outputs.regex, "structured_outputs.regex"),
        ("choice", outputs.choice, "structured_outputs.choice"),
        ("ebnf", outputs.grammar, "structured_outputs.grammar"),
        ("json_object", outputs.json_object or None, "structured_outputs.json_object"),
        ("json_schema", body.guided_json, "guided_json"),
        ("regex", body.guided_regex, "guided_regex"),
        ("choice", body.guided_choice, "guided_choice"),
        ("ebnf", body.guided_grammar, "guided_grammar"),
    ]
    formats = [_structured(kind, value, param) for kind, value, param in given if value is not None]
    if body.structured_outputs is not None and not any(f.param.startswith("structured") for f in formats):
        message = "structured_outputs: give exactly one of json, regex, choice, grammar, json_object"
        raise RequestError(message, param="structured_outputs")
    return formats


def _structured(kind: Any, value: Any, param: str) -> Format:
    if kind == "json_schema":
        if isinstance(value, str):
            value = _json_of(value, param)
        return json_schema_format(value, param, shown=False)
    if kind == "choice" and not value:
        raise RequestError(f"{param}: needs at least one text to choose from", param=param)
    return Format(kind, None if kind == "json_object" else value, False, param)


def _json_of(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param}: is a text that holds no JSON ({error})", param=param) from None


def one_format(formats: Sequence[Format]) -> Format | None:
    """The only format, or None; RequestError for two that contend."""
    if len(formats) > 1:
        first, second = formats[0].param, formats[1].param
        raise RequestError(f"{second}: {first} says already what the content must be; give one", param=second)
    return formats[0] if formats else None


def check_tools(tools: Sequence[Tool], params: Sequence[str], namespaced: bool = False) -> tuple[Tool, ...]:
    """The tools, if they can be offered. params: the field of each tool's name. namespaced: "ns::name" is allowed."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    pattern = r"[a-zA-Z0-9_-]+(::[a-zA-Z0-9_-]+)?" if namespaced else r"[a-zA-Z0-9_-]+"
    seen = set()
    for tool, param in zip(tools, params, strict=True):
        if len(tool.name) > MAX_TOOL_NAME or not re.fullmatch(pattern, tool.name):
            rule = f"1 to {MAX_TOOL_NAME} letters, digits, _ or -"
            raise RequestError(f"{param}: must be {rule}, got {short(tool.name)}", param=param)
        if tool.name in seen:
            raise RequestError(f"{param}: two tools are called {tool.name!r}", param=param)
        seen.add(tool.name)
        if tool.parameters is not None and tool.parameters.get("type", "object") != "object":
            param = param.removesuffix("name") + "parameters"
            message = f"{param}: must be the schema of an object, got type {short(tool.parameters['type'])}"
            raise RequestError(message, param=param)
    return tuple(tools)


def check_choice(choice: ToolChoice, tools: Sequence[Tool], param: str) -> ToolChoice:
    """The choice, if the tools allow it."""
    if choice.mode == "required" and not tools:
        raise RequestError(f"{param}: asks for a call, but no tools are given", param=param)
    names = {tool.name for tool in tools}
    for name in choice.names or ():
        if name not in names:
            raise RequestError(f"{param}: {short(name)} is not one of the tools", param=param)
    return choice


def image(url: str, detail: str | None, param: str) -> Image:
    """A picture by its http(s) or data URL; what is behind it is looked at later."""
    if not re.match(r"(https?|data):", url, re.IGNORECASE):
        raise RequestError(f"{param}: must be an http, https or data URL, got {short(url)}", param=param)
    return Image(url, detail or "auto", param)  # type: ignore[arg-type]  # the field's own type has checked it


def joined(parts: Sequence[str | Image], param: str) -> tuple[str, tuple[Image, ...]]:
    """Turn.text and Turn.images of a message's parts: a blank line between them (spec/codec.md 1.3)."""
    images = tuple(part for part in parts if isinstance(part, Image))
    if images and any(IMAGE in part for part in parts if isinstance(part, str)):
        # it would take the picture's place
        raise RequestError(f"{param}: U+FDD0 is no character of a text and cannot stand beside an image", param=param)
    return "\n\n".join(IMAGE if isinstance(part, Image) else part for part in parts), images


def refuse(
    body: Any,
    name: str,
    advice: str,
    *,
    harmless: Sequence[Any] = (False, "", []),
    path: str = "",
    code: str | None = None,
) -> None:
    """RequestError if `body` has a field `name`, known or unknown, whose value is neither null nor harmless.

    path: what stands in front of the name ("messages.0."). The harmless values are compared with their types: 1 is not
    True. code: of the error.
    """
    value = getattr(body, name, None)
    if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
        raise RequestError(f"{path}{name}: {advice}", param=path + name, code=code)
