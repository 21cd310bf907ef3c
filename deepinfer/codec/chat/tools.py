"""Tools and the choice among them, as Chat Completions spells them; the older `functions` included."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.codec.chat.models import ChatRequest, FunctionDefinition, NamedFunction, ToolChoiceObject, ToolParam
from deepinfer.codec.conversation import FREE_CHOICE, Tool, ToolChoice
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import check_choice, check_tools, short


def uses_functions(body: ChatRequest) -> bool:
    """The client speaks the protocol of before tools: at most one call, answered as `function_call`."""
    return bool(body.functions)


def tools_of(body: ChatRequest) -> tuple[Tool, ...]:
    """All tools that the model may know. Those of a system message count as the request's."""
    if body.functions and body.tools:
        raise RequestError("functions: give tools or functions, not both", param="functions")
    tools, params = [], []
    for path, given in _lists(body):
        for i, param in enumerate(given):
            function, place = _function(param, f"{path}.{i}")
            tools.append(_tool(function))
            params.append(f"{place}.name")
    return check_tools(tools, params)


def _lists(body: ChatRequest) -> list[tuple[str, Sequence[ToolParam | FunctionDefinition]]]:
    lists: list[tuple[str, Sequence[ToolParam | FunctionDefinition]]] = []
    lists += [("tools", body.tools or ()), ("functions", body.functions or ())]
    for i, message in enumerate(body.messages):
        if message.tools:
            if message.role not in ("system", "developer"):
                param = f"messages.{i}.tools"
                raise RequestError(f"{param}: belongs to the request or to a system message", param=param)
            lists.append((f"messages.{i}.tools", message.tools))
    return lists


def _function(given: ToolParam | FunctionDefinition, param: str) -> tuple[FunctionDefinition, str]:
    """The definition and where it stands."""
    if isinstance(given, FunctionDefinition):
        return given, param
    if given.type != "function":
        text = f"{param}.type: only function tools are supported, got {short(given.type)}"
        raise RequestError(text, param=f"{param}.type")
    if given.function is None:
        raise RequestError(f"{param}.function: is required", param=f"{param}.function")
    return given.function, f"{param}.function"


def _tool(function: FunctionDefinition) -> Tool:
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
    )


def choice_of(body: ChatRequest, tools: Sequence[Tool]) -> ToolChoice:
    """tool_choice, or function_call. RequestError if the tools do not allow it."""
    given, param = body.tool_choice, "tool_choice"
    if body.function_call is not None:
        if given is not None:
            raise RequestError("function_call: give tool_choice or function_call, not both", param="function_call")
        if isinstance(body.function_call, str):
            return ToolChoice(body.function_call)
        return check_choice(ToolChoice("required", (body.function_call.name,)), tools, "function_call.name")
    if given is None:
        return FREE_CHOICE
    if isinstance(given, str):
        return check_choice(ToolChoice(given), tools, param)
    choice, param = _chosen(given, param)
    return check_choice(choice, tools, param)


def _chosen(given: ToolChoiceObject, param: str) -> tuple[ToolChoice, str]:
    if given.type == "function":
        if given.function is None:
            raise RequestError(f"{param}.function: is required", param=f"{param}.function")
        return ToolChoice("required", (given.function.name,)), f"{param}.function.name"
    if given.type == "allowed_tools":
        if given.allowed_tools is None:
            raise RequestError(f"{param}.allowed_tools: is required", param=f"{param}.allowed_tools")
        path = f"{param}.allowed_tools.tools"
        names = tuple(_allowed(tool, f"{path}.{i}") for i, tool in enumerate(given.allowed_tools.tools))
        if not names:
            raise RequestError(f"{path}: needs at least one tool; tool_choice none allows no calls", param=path)
        return ToolChoice(given.allowed_tools.mode, tuple(dict.fromkeys(names))), path
    text = f"{param}.type: must be function or allowed_tools, got {short(given.type)}"
    raise RequestError(text, param=f"{param}.type")


def _allowed(tool: NamedFunction, param: str) -> str:
    if tool.type != "function" or tool.function is None:
        raise RequestError(f"{param}: must name a function", param=param)
    return tool.function.name
