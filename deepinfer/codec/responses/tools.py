"""Tools of a response: what the client declares, under which name the model knows it, and what a call is called again.

Functions of a namespace are `namespace::function` to the model (spec/codec.md 3). Two kinds of tool that are no
functions are offered as functions: the custom tool `apply_patch`, whose free text is the argument `input`, and a
search for tools that the client carries out. Deferred tools are offered at once: the server searches nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag

from deepinfer.codec.body import Part, short
from deepinfer.codec.conversation import FREE_CHOICE, Tool, ToolChoice
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import check_choice, check_tools

APPLY_PATCH = "apply_patch"
TOOL_SEARCH = "tool_search"
SEPARATOR = "::"

Kind = Literal["function", "custom", "search"]


class FunctionTool(Part):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: Any = None
    allowed_callers: Any = None


class CustomTool(Part):
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Any = None
    defer_loading: bool | None = None
    allowed_callers: Any = None


class SearchTool(Part):
    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OtherTool(Part):
    """Refused by its type's name; a search of the web is left out and named as ignored."""

    type: str


class NamespaceTool(Part):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[NamespacedFields]


def kind_of(value: Any) -> str | None:
    """The `type` of an object before or after it was read."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def _tag(tool: Any) -> str:
    kind = kind_of(tool)
    return kind if kind in ("function", "custom", "tool_search", "namespace") else "another tool"


NamespacedFields = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[SearchTool, Tag("tool_search")]
    | Annotated[OtherTool, Tag("another tool")],
    Discriminator(lambda tool: "another tool" if _tag(tool) == "namespace" else _tag(tool)),
]
NamespaceTool.model_rebuild()
ToolFields = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[SearchTool, Tag("tool_search")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("another tool")],
    Discriminator(_tag),
]


class NamedChoice(Part):
    type: Literal["function", "custom", "tool_search", "apply_patch"]
    name: str | None = None
    namespace: str | None = None


class AllowedTools(Part):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedChoice]


class OtherChoice(Part):
    """Refused by its type's name."""

    type: str


def _choice_tag(choice: Any) -> str:
    if isinstance(choice, str):
        return "a mode"
    kind = kind_of(choice)
    if kind in ("function", "custom", "tool_search", "apply_patch"):
        return "a name"
    return "allowed tools" if kind == "allowed_tools" else "another choice"


ChoiceFields = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a mode")]
    | Annotated[NamedChoice, Tag("a name")]
    | Annotated[AllowedTools, Tag("allowed tools")]
    | Annotated[OtherChoice, Tag("another choice")],
    Discriminator(_choice_tag),
]


class ClientName(NamedTuple):
    """What the client calls a tool."""

    kind: Kind
    name: str
    namespace: str | None = None


class Offered(NamedTuple):
    """tools: as the model sees them. params: the field of each one's name. names: by the model's name."""

    tools: tuple[Tool, ...]
    names: dict[str, ClientName]
    ignored: tuple[str, ...]


def read_tools(declared: Sequence[tuple[str, Sequence[Any]]]) -> Offered:
    """declared: lists of tools with the fields that they came in ("tools", "input.3.tools"). A tool that a later list
    has again, as the result of a search has, is one tool. Raises RequestError."""
    tools: list[Tool] = []
    params: list[str] = []
    names: dict[str, ClientName] = {}
    ignored: list[str] = []
    for number, (param, fields) in enumerate(declared):
        earlier = set(names) if number else set()
        for place, field in enumerate(fields):
            where = f"{param}.{place}"
            if isinstance(field, OtherTool) and field.type.startswith("web_search"):
                ignored.append("tools.web_search")
                continue
            for tool, name, tool_param in _tools_of(field, where):
                if tool.name not in earlier:
                    tools.append(tool)
                    params.append(f"{tool_param}.name")
                    names[tool.name] = name
    return Offered(check_tools(tools, params, namespaced=True), names, tuple(ignored))


def _tools_of(field: Any, param: str) -> Iterator[tuple[Tool, ClientName, str]]:
    if isinstance(field, FunctionTool):
        yield _function(field, field.name, field.description), ClientName("function", field.name), param
    elif isinstance(field, NamespaceTool):
        for place, inner in enumerate(field.tools):
            where = f"{param}.tools.{place}"
            if not isinstance(inner, FunctionTool):
                raise RequestError(f"{where}.type: a namespace may hold functions only", param=f"{where}.type")
            description = inner.description
            if field.description is not None:
                description = f"{field.description}\n{description or ''}"  # as the vendor's package joins them
            tool = _function(inner, f"{field.name}{SEPARATOR}{inner.name}", description)
            yield tool, ClientName("function", inner.name, field.name), where
    elif isinstance(field, SearchTool):
        if field.execution == "client":
            tool = Tool(name=TOOL_SEARCH, description=field.description, parameters=field.parameters)
            yield tool, ClientName("search", TOOL_SEARCH), param
    elif isinstance(field, CustomTool) and field.name == APPLY_PATCH:
        yield _apply_patch(), ClientName("custom", APPLY_PATCH), param
    elif isinstance(field, CustomTool):
        message = f"{param}.name: of the custom tools only {APPLY_PATCH} is supported; declare a function instead"
        raise RequestError(message, param=f"{param}.name")
    else:
        message = f"{param}.type: tools of type {short(field.type)} are not supported"
        raise RequestError(message, param=f"{param}.type")


def _function(field: FunctionTool, name: str, description: str | None) -> Tool:
    return Tool(name=name, description=description, parameters=field.parameters, strict=bool(field.strict))


@functools.cache
def _apply_patch() -> Tool:
    """The vendor's own description of the tool, which the model was trained with, out of the vendor's package. Strict:
    a patch is the argument `input` and nothing else, or there is no free text to hand on."""
    import deepseek_recipe  # when first used: 45 ms that the command line need not wait for

    options = deepseek_recipe.ConversionOptions()
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "input": "-",
        "tools": [{"type": "custom", "name": APPLY_PATCH}],
    }
    tool = deepseek_recipe.ResponsesRequest(body).convert(options).conversation.tools[0]
    return Tool(name=APPLY_PATCH, description=tool.description, parameters=tool.parameters, strict=True)


def read_choice(fields: Any, offered: Offered) -> ToolChoice:
    """Raises RequestError naming tool_choice."""
    if fields is None:
        return FREE_CHOICE
    if isinstance(fields, str):
        choice = ToolChoice(fields)  # type: ignore[arg-type]  # the field's own type has checked it
    elif isinstance(fields, AllowedTools):
        names = [_resolve(one, offered, f"tool_choice.tools.{i}") for i, one in enumerate(fields.tools)]
        if not names:
            raise RequestError("tool_choice.tools: is empty; say none instead", param="tool_choice.tools")
        choice = ToolChoice(fields.mode, tuple(names))
    elif isinstance(fields, NamedChoice):
        choice = ToolChoice("required", (_resolve(fields, offered, "tool_choice"),))
    else:
        message = f"tool_choice.type: {short(fields.type)} is not supported"
        raise RequestError(message, param="tool_choice.type")
    return check_choice(choice, offered.tools, "tool_choice")


def _resolve(named: NamedChoice, offered: Offered, param: str) -> str:
    """The model's name of a tool. A function of a namespace may be named by its own name alone, if that is clear."""
    wanted = {"tool_search": TOOL_SEARCH, "apply_patch": APPLY_PATCH}.get(named.type, named.name)
    if wanted is None:
        raise RequestError(f"{param}.name: is required", param=f"{param}.name")
    if named.namespace is not None:
        wanted = f"{named.namespace}{SEPARATOR}{wanted}"
    if wanted in offered.names:
        return wanted
    alike = [full for full, name in offered.names.items() if name.name == wanted]
    if len(alike) == 1:
        return alike[0]
    problem = "is in several namespaces; name one" if alike else "is not one of the tools"
    raise RequestError(f"{param}.name: {short(wanted)} {problem}", param=f"{param}.name")


def model_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


DeclaredTools = Annotated[list[ToolFields] | None, Field(description="Functions, namespaces, apply_patch.")]
