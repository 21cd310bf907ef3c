"""From a request to what the engine is given: budgets, policies, and what is enforced."""

from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deepinfer.codec.conversation import Conversation, Format, Image, Tool, ToolChoice, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.spellings import IMAGE
from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.settings import Settings, resolve_settings
from deepinfer.grammar.structure import Grammar, ToolGrammar
from deepinfer.model.hub import resolve_model
from deepinfer.server.models import ServedModel
from deepinfer.server.prepare import Job, prepare
from deepinfer.server.settings import ServerSettings

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool(name="look", parameters=SCHEMA, strict=True), Tool(name="go", parameters=SCHEMA))
CONTEXT = 200_000


@pytest.fixture(scope="module")
def engine_settings() -> Settings:
    return resolve_settings(EngineArguments(device="cpu"), environ={})


@pytest.fixture(scope="module")
def nano(engine_settings: Settings) -> ServedModel:
    return ServedModel.load(resolve_model("nano"), engine_settings)


def conversation(**fields: Any) -> Conversation:
    return Conversation(**{"turns": (Turn(role="user", text="Hello"),), "thinking": False, **fields})


def job(model: ServedModel, context: int = CONTEXT, settings: dict[str, Any] | None = None, **fields: Any) -> Job:
    if "prompts" not in fields:
        fields.setdefault("conversation", conversation())
    generation = GenerationRequest(model="nano", **fields)
    with ThreadPoolExecutor(1) as threads:
        return asyncio.run(
            prepare(generation, model, ServerSettings(**settings or {}), context=context, threads=threads)
        )


def test_an_answer_without_a_budget_has_the_vendors_and_never_more_than_the_context(nano: ServedModel) -> None:
    assert job(nano).params.max_tokens == 8192
    assert job(nano, conversation=conversation(thinking=True)).params.max_tokens == 65536
    assert job(nano, conversation=conversation(thinking=True, effort=100)).params.max_tokens == 131072
    assert job(nano, 100).params.max_tokens == 100 - job(nano).prompt_tokens
    assert job(nano, prompts=["x"]).params.max_tokens == 8192


def test_a_budget_that_does_not_fit_is_refused_unless_the_protocol_lowers_it(nano: ServedModel) -> None:
    room = 100 - job(nano).prompt_tokens
    assert job(nano, 100, max_tokens=room).params.max_tokens == room
    with pytest.raises(RequestError, match=f"this adds {room + 1}") as caught:
        job(nano, 100, max_tokens=room + 1)
    assert caught.value.code == "context_length_exceeded"
    assert job(nano, 100, max_tokens=room + 1, clip_max_tokens=True).params.max_tokens == room
    for long in (conversation(turns=(Turn(role="user", text="word " * 200),)), conversation()):
        with pytest.raises(RequestError) as caught:
            job(nano, 5, conversation=long, clip_max_tokens=True)
        assert caught.value.code == "context_length_exceeded"


def test_what_a_request_leaves_open_the_checkpoint_says(nano: ServedModel) -> None:
    params = job(nano).params
    assert (params.temperature, params.top_p) == (0.7, 0.95)  # models/nano/generation_config.json
    params = job(nano, sampling={"temperature": 0.2, "top_k": 5, "seq_seed": 3}).params
    assert (params.temperature, params.top_p, params.top_k, params.seq_seed) == (0.2, 0.95, 5, 3)


def test_the_hosted_policy_replaces_what_the_vendors_service_replaces(nano: ServedModel) -> None:
    hosted = {"sampling_policy": "hosted"}
    asked = {"temperature": 0.1, "top_p": 0.5, "presence_penalty": 1.0}
    params = job(nano, settings=hosted, sampling=asked, conversation=conversation(thinking=True)).params
    assert (params.temperature, params.top_p, params.presence_penalty) == (1.0, 0.95, 1.0)
    params = job(nano, settings=hosted, sampling=asked).params
    assert (params.temperature, params.top_p) == (0.1, 1.0)


def test_no_answer_goes_on_behind_a_role_unless_it_ignores_the_end(nano: ServedModel) -> None:
    stops = set(job(nano, sampling={"stop_token_ids": [9]}).params.stop_token_ids)
    assert stops == {9, *nano.role_ids} and nano.tokenizer.control_id("<｜User｜>") in stops
    assert job(nano, sampling={"ignore_eos": True}).params.stop_token_ids == ()


def test_tiers_are_priorities_and_nobody_is_before_the_best_one(nano: ServedModel) -> None:
    tiers = [job(nano, service_tier=tier).params.priority for tier in ("priority", None, "default", "flex", "batch")]
    assert tiers == sorted(tiers) and tiers[1] == tiers[2] == 0 and tiers[0] < 0 < tiers[3] < tiers[4]
    assert job(nano, priority=-(10**6)).params.priority == tiers[0]
    assert job(nano, priority=7, service_tier="batch").params.priority == 7


def test_tokens_are_banned_as_asked(nano: ServedModel) -> None:
    size = nano.vocab_size
    bias = job(nano, allowed_token_ids=[5, 7]).params.logit_bias
    assert len(bias) == size - 2 and set(bias.values()) == {-math.inf} and not {5, 7} & set(bias)
    (word,) = nano.tokenizer.encode_text(" the")
    assert job(nano, bad_words=("the",), sampling={"logit_bias": {9: 1.0}}).params.logit_bias[word] == -math.inf
    for fields, field in (
        ({"allowed_token_ids": [size]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": ("antidisestablishmentarianism",)}, "bad_words"),
    ):
        with pytest.raises(RequestError) as caught:
            job(nano, **fields)
        assert caught.value.param == field
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        job(nano, sampling={"min_tokens": 9}, max_tokens=3)


def test_pictures_are_refused_and_not_dropped(nano: ServedModel) -> None:
    turn = Turn(role="user", text=f"{IMAGE}\n\nWhat is this?", images=(Image("https://a/b.png", param="messages.0"),))
    with pytest.raises(RequestError, match="pictures") as caught:
        job(nano, conversation=conversation(turns=(turn,)))
    assert caught.value.param == "messages.0"


def test_prompts_of_completions_hold_no_control_token_but_the_first(nano: ServedModel) -> None:
    bos = nano.tokenizer.bos_token_id
    made = job(nano, prompts=["<｜User｜>Hi<｜Assistant｜></think>", [5, 6, 7]], n=2)
    first, second = (prompt.tolist() for prompt in made.prompts)
    assert first[0] == bos and not set(first[1:]) & set(nano.tokenizer.control_ids.values())
    assert second == [5, 6, 7] and made.starts == "content" and made.tools is None
    with pytest.raises(RequestError, match="prompt"):
        job(nano, prompts=[[nano.vocab_size]])


# -- what is enforced -------------------------------------------------------------------------------------------------


def test_nothing_is_enforced_on_an_answer_that_asks_for_nothing(nano: ServedModel) -> None:
    assert job(nano).structure is None
    assert job(nano, conversation=conversation(thinking=True)).structure is None


def test_a_format_is_enforced_behind_the_thinking_and_the_prefix(nano: ServedModel) -> None:
    regex = Format("regex", "[a-z]+", False, "guided_regex")
    structure = job(nano, format=regex, conversation=conversation(thinking=True), thinking_budget=9).structure
    assert structure is not None and structure.content == Grammar("regex", "[a-z]+")
    assert structure.thinking and structure.thinking_budget == 9 and structure.tool_mode == "none"
    begun = conversation(turns=(Turn(role="user", text="x"), Turn(role="assistant", text="ab", prefix=True)))
    structure = job(nano, format=regex, conversation=begun, thinking_budget=9).structure
    assert structure is not None and structure.prefix == "ab"
    assert not structure.thinking and structure.thinking_budget is None
    for kind, value, source in (
        ("json_object", None, ""),
        ("json_schema", {"type": "string", "const": "ä"}, '{"type": "string", "const": "ä"}'),
        ("choice", ["a", "b"], '["a", "b"]'),
        ("ebnf", 'root ::= "a"', 'root ::= "a"'),
    ):
        structure = job(nano, format=Format(kind, value), prompts=["x"]).structure  # type: ignore[arg-type]
        assert structure is not None and structure.content == Grammar(kind, source)  # type: ignore[arg-type]


def test_tools_that_must_be_called_are_the_only_output_and_strict_ones_keep_their_schema(nano: ServedModel) -> None:
    made = job(nano, conversation=conversation(tools=TOOLS, tool_choice=ToolChoice("required"), thinking=True))
    assert made.structure is not None and made.structure.tool_mode == "required" and made.structure.thinking
    look, go = made.structure.tools
    assert look == ToolGrammar("look", json.dumps(SCHEMA), True) and go == ToolGrammar("go")
    assert made.tools == list(TOOLS) and not made.hides_calls
    made = job(nano, conversation=conversation(tools=TOOLS, tool_choice=ToolChoice("required", ("go",))))
    assert made.structure is not None and made.structure.tools == (ToolGrammar("go"),)
    assert made.tools == [TOOLS[1]]


def test_calls_are_held_to_their_form_also_where_the_model_may_choose(nano: ServedModel) -> None:
    free = conversation(tools=TOOLS[1:])
    made = job(nano, conversation=free)
    assert made.structure is not None and made.structure.tool_mode == "auto" and made.max_calls is None
    assert job(nano, conversation=free, settings={"tool_grammar": False}).structure is None
    for fields in ({"tools": TOOLS}, {"parallel_tool_calls": False}):  # the request asks for it itself
        asking = conversation(**{"tools": TOOLS[1:], **fields})
        structure = job(nano, conversation=asking, settings={"tool_grammar": False}).structure
        assert structure is not None and structure.tool_mode == "auto"
    assert job(nano, conversation=free, sampling={"ignore_eos": True}).structure is None
    single = job(nano, conversation=conversation(tools=TOOLS, parallel_tool_calls=False))
    assert single.max_calls == 1 and single.structure is not None and not single.structure.parallel_calls
    both = job(nano, conversation=free, format=Format("json_object")).structure
    assert both is not None and both.tool_mode == "auto" and both.content == Grammar("json_object")


def test_tools_that_must_not_be_called_cannot_begin(nano: ServedModel) -> None:
    made = job(nano, conversation=conversation(tools=TOOLS, tool_choice=ToolChoice("none")))
    assert made.structure is None and made.tools is None and made.hides_calls
    assert made.params.logit_bias == {nano.call_id: -math.inf}


# -- the model --------------------------------------------------------------------------------------------------------


def test_a_model_answers_to_its_names_only(nano: ServedModel, engine_settings: Settings) -> None:
    nano.check_name("nano")
    with pytest.raises(RequestError) as caught:
        nano.check_name("gpt-4")
    assert (caught.value.status, caught.value.param) == (404, "model")
    renamed = ServedModel.load(nano.path, engine_settings, ("a", "b"))
    renamed.check_name("b")
    assert renamed.name == "a" and renamed.fingerprint == nano.fingerprint
    with pytest.raises(RequestError):
        renamed.check_name("nano")
    anything = ServedModel.load(nano.path, engine_settings, ("*",))
    anything.check_name("claude-x")
    assert anything.names == ("nano",)


def test_sampling_defaults_that_are_none_are_refused_by_name(tmp_path, engine_settings: Settings, nano) -> None:  # type: ignore[no-untyped-def]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((nano.path / name).read_bytes())
    file = tmp_path / "generation_config.json"
    assert ServedModel.load(tmp_path, engine_settings).defaults == {}
    file.write_text('{"do_sample": false, "temperature": 0.5}')
    assert ServedModel.load(tmp_path, engine_settings).defaults == {"temperature": 0.0}
    for wrong in ("[]", "{", '{"top_p": "high"}', '{"temperature": true}'):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="generation_config"):
            ServedModel.load(tmp_path, engine_settings)
