"""Tool-call chats: declared tools, a request, a DSML call, its result and an answer; also requests that need no tool."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.synth import facts, pick
from training.synth import words as w
from training.synth.render import Chat, Phrases, render_json

Maker = Callable[[random.Random], Any]


def city(rng: random.Random) -> str:
    return rng.choice(w.CITIES)


def full_name(rng: random.Random) -> str:
    return f"{rng.choice(w.FIRST)} {rng.choice(w.LAST)}"


def first_name(rng: random.Random) -> str:
    return rng.choice(w.FIRST)


def phrase(rng: random.Random) -> str:
    return f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.NOUNS)}"


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.choice([0, 15, 30, 45]):02d}"


def date(rng: random.Random) -> str:
    return f"20{rng.randrange(20, 40)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def number(low: int, high: int) -> Maker:
    return lambda rng: rng.randrange(low, high)


def among(*options: str) -> Maker:
    return lambda rng: rng.choice(options)


def expression(rng: random.Random) -> str:
    return f"{rng.randrange(2, 1000)} {rng.choice('+-*/')} {rng.randrange(2, 1000)}"


def address(rng: random.Random) -> str:
    return f"{rng.choice(w.FIRST).lower()}@{rng.choice(w.NOUNS)}.com"


def file_name(rng: random.Random) -> str:
    return f"{rng.choice(w.NOUNS)}.{rng.choice(['txt', 'py', 'md', 'csv', 'json'])}"


@dataclass(frozen=True)
class Tool:
    """A tool, ways to ask for it, what it returns and how the answer reads."""

    name: str
    description: str
    parameters: dict[str, Maker]
    requests: tuple[str, ...]
    result: str
    answer: str


def _tool(name: str, description: str, parameters: dict[str, Maker], requests: str, result: str, answer: str) -> Tool:
    return Tool(name, description, parameters, tuple(requests.split("|")), result, answer)


TOOLS = (
    _tool("get_weather", "Get the current weather of a city", {"city": city},
          "What is the weather in {city}?|How's the weather in {city} today?|Tell me the weather in {city}.|Is it raining in {city}?|weather in {city}|Do I need an umbrella in {city}?|What's it like outside in {city}?|I travel to {city}. How is the weather there?",
          '{{"temperature": {n}, "condition": "{c}"}}', "In {city} it is {c} at {n} degrees."),
    _tool("get_forecast", "Get the weather forecast for some days", {"city": city, "days": number(1, 11)},
          "What will the weather be in {city} for the next {days} days?|Give me a {days}-day forecast for {city}.|Forecast for {city}, {days} days.|How will the weather in {city} develop over {days} days?|I need the weather forecast of {city} for {days} days.|Show the next {days} days of weather in {city}.",
          '{{"days": {days}, "summary": "{c}"}}', "The forecast for {city} over {days} days: {c}."),
    _tool("get_time", "Get the local time of a city", {"city": city},
          "What time is it in {city}?|Current time in {city}?|Tell me the time in {city}.|What's the local time in {city}?|How late is it in {city} now?|Which time do they have in {city}?",
          '{{"time": "{t}"}}', "It is {t} in {city}."),
    _tool("calculate", "Evaluate an arithmetic expression", {"expression": expression},
          "Calculate {expression}.|What is {expression}?|Please compute {expression}.|Use the calculator for {expression}.|How much is {expression}?|Evaluate {expression} for me.",
          "{n}", "The result is {n}."),
    _tool("send_email", "Send an email", {"to": address, "subject": phrase, "body": among("See you soon.", "Please call me back.", "The meeting is cancelled.", "Thank you for your help.", "I will be late today.")},
          "Send an email to {to} with the subject {subject} saying: {body}|Write to {to}, subject {subject}: {body}|Email {to} about {subject} with the text: {body}|Please mail {to}. Subject: {subject}. Text: {body}|Compose an email to {to} titled {subject}: {body}|Mail {to} the following under the subject {subject}: {body}",
          '{{"status": "sent"}}', "The email to {to} was sent."),
    _tool("set_timer", "Start a countdown timer", {"minutes": number(1, 120)},
          "Set a timer for {minutes} minutes.|Start a {minutes}-minute timer.|Timer, {minutes} minutes please.|Wake me in {minutes} minutes.|Count down {minutes} minutes.|Remind me when {minutes} minutes are over.",
          '{{"status": "started"}}', "The timer runs for {minutes} minutes."),
    _tool("set_alarm", "Set an alarm", {"time": clock, "label": phrase},
          "Set an alarm at {time} called {label}.|Wake me at {time} with the label {label}.|Alarm for {time}, name it {label}.|Please set the alarm {label} to {time}.|I need an alarm named {label} at {time}.|Make the {label} alarm ring at {time}.",
          '{{"status": "ok"}}', "The alarm {label} is set to {time}."),
    _tool("search_web", "Search the web", {"query": phrase},
          "Search the web for {query}.|Look up {query} online.|Find web pages about {query}.|Google {query} for me.|What does the internet say about {query}?|Do a web search on {query}.",
          '{{"results": ["{p}"]}}', "The search for {query} found: {p}."),
    _tool("convert_currency", "Convert an amount between currencies", {"amount": number(1, 5000), "from": among("USD", "EUR", "GBP", "JPY"), "to": among("CHF", "CAD", "AUD", "INR")},
          "Convert {amount} {from} to {to}.|How much is {amount} {from} in {to}?|Change {amount} {from} into {to}.|What are {amount} {from} worth in {to}?|I have {amount} {from}. How many {to} is that?|Exchange {amount} {from} for {to}.",
          '{{"value": {n}}}', "{amount} {from} are {n} {to}."),
    _tool("create_event", "Add an event to the calendar", {"title": phrase, "date": date, "time": clock},
          "Add {title} to my calendar on {date} at {time}.|Create an event {title} on {date}, {time}.|Schedule {title} for {date} at {time}.|Put {title} in the calendar: {date} {time}.|Book {title} on {date} at {time} in my calendar.|New calendar entry: {title}, {date}, {time}.",
          '{{"status": "created"}}', "The event {title} is in your calendar on {date} at {time}."),
    _tool("play_music", "Play music", {"artist": full_name},
          "Play music by {artist}.|I want to hear {artist}.|Put on some {artist}.|Start playing {artist}.|Let me listen to songs of {artist}.|Some {artist}, please.",
          '{{"status": "playing"}}', "Now playing {artist}."),
    _tool("read_file", "Read a file", {"path": file_name},
          "Read the file {path}.|Show me the content of {path}.|What is in {path}?|Open {path}.|Print {path} for me.|Let me see what {path} contains.",
          "{p}", "The file {path} contains: {p}"),
    _tool("write_file", "Write text to a file", {"path": file_name, "text": phrase},
          "Write {text} to the file {path}.|Save {text} in {path}.|Create {path} with the content {text}.|Put {text} into {path}.|Store the text {text} as {path}.|Fill {path} with {text}.",
          '{{"status": "written"}}', "The text is saved in {path}."),
    _tool("translate", "Translate a text", {"text": phrase, "language": among("French", "German", "Spanish", "Italian", "Japanese", "Chinese")},
          "Translate {text} into {language}.|How do you say {text} in {language}?|What is {text} in {language}?|Give me the {language} translation of {text}.|Put {text} into {language}.|I need {text} in {language}.",
          '"{p}"', "In {language}: {p}"),
    _tool("book_flight", "Book a flight", {"from": city, "to": city, "date": date},
          "Book a flight from {from} to {to} on {date}.|I want to fly from {from} to {to} on {date}.|Get me a plane ticket {from} to {to}, {date}.|Reserve a flight on {date} from {from} to {to}.|Fly me from {from} to {to} on {date}.|I need a flight on {date}: {from} to {to}.",
          '{{"booking": "{n}"}}', "Your flight from {from} to {to} on {date} is booked under number {n}."),
    _tool("find_restaurant", "Find a restaurant", {"city": city, "cuisine": among("Italian", "Indian", "Thai", "Greek", "French", "Mexican")},
          "Find a {cuisine} restaurant in {city}.|Where can I eat {cuisine} food in {city}?|Recommend a {cuisine} place in {city}.|I am hungry for {cuisine} food in {city}.|Look for {cuisine} restaurants in {city}.|Any good {cuisine} restaurant in {city}?",
          '{{"name": "{p}"}}', "In {city} you can try {p}."),
    _tool("get_stock_price", "Get the price of a stock", {"symbol": among("AAPL", "MSFT", "GOOG", "TSLA", "NVDA", "IBM", "INTC", "ORCL")},
          "What is the price of {symbol}?|How is {symbol} doing?|Give me the stock price of {symbol}.|Check {symbol} stock.|How much is one share of {symbol}?|Quote for {symbol}, please.",
          '{{"price": {n}}}', "{symbol} stands at {n} dollars."),
    _tool("turn_on_light", "Switch the light in a room", {"room": among("kitchen", "bedroom", "bathroom", "hall", "garage", "office"), "on": lambda rng: True},
          "Turn on the light in the {room}.|Lights on in the {room}.|Switch on the {room} light.|Make the {room} bright.|It is dark in the {room}, turn the light on.|Please light up the {room}.",
          '{{"status": "on"}}', "The light in the {room} is on."),
    _tool("set_temperature", "Set the heating of a room", {"room": among("kitchen", "bedroom", "bathroom", "hall", "office"), "degrees": number(15, 28)},
          "Set the {room} to {degrees} degrees.|Heat the {room} to {degrees} degrees.|I want {degrees} degrees in the {room}.|Make it {degrees} degrees in the {room}.|Change the temperature of the {room} to {degrees}.|{room}: {degrees} degrees, please.",
          '{{"status": "ok"}}', "The {room} is set to {degrees} degrees."),
    _tool("add_contact", "Save a contact", {"name": full_name, "phone": lambda rng: f"555-{rng.randrange(1000, 9999)}"},
          "Add {name} with the number {phone} to my contacts.|Save the contact {name}, {phone}.|New contact: {name}, phone {phone}.|Store {phone} as the number of {name}.|Remember that {name} has the number {phone}.|Put {name} ({phone}) in my address book.",
          '{{"status": "saved"}}', "{name} is saved with the number {phone}."),
    _tool("run_sql", "Run a database query", {"query": lambda rng: f"SELECT {rng.choice(['name', 'id', 'price', '*'])} FROM {rng.choice(w.NOUNS)}s"},
          "Run this query: {query}|Execute {query}|Query the database with {query}|What does {query} return?|Send {query} to the database.|Please evaluate the SQL {query}",
          '{{"rows": {n}}}', "The query returned {n} rows."),
    _tool("track_package", "Track a package", {"number": lambda rng: f"{rng.choice('ABCDEF')}{rng.randrange(10000, 99999)}"},
          "Where is my package {number}?|Track the parcel {number}.|Status of shipment {number}?|Follow package {number} for me.|Has {number} been delivered?|Check the delivery {number}.",
          '{{"status": "in {city2}"}}', "Your package {number} is in {city2}."),
    _tool("roll_dice", "Roll dice", {"count": number(1, 6), "sides": number(4, 21)},
          "Roll {count} dice with {sides} sides.|Throw {count} {sides}-sided dice.|Please roll {count}d{sides}.|I need {count} dice of {sides} sides rolled.|Dice: {count} times, {sides} sides.|Let {count} dice with {sides} sides roll.",
          '{{"total": {n}}}', "The dice show {n} in total."),
)  # fmt: skip
HELD_TOOLS = (
    _tool("get_population", "Get the number of inhabitants of a city", {"city": city},
          "How many people live in {city}?|What is the population of {city}?", '{{"population": {n}}}', "{city} has {n} inhabitants."),
    _tool("order_pizza", "Order a pizza", {"size": among("small", "medium", "large"), "count": number(1, 9)},
          "Order {count} {size} pizzas.|I would like {count} {size} pizzas, please.", '{{"status": "ordered"}}', "{count} {size} pizzas are on the way."),
    _tool("lock_door", "Lock a door", {"door": among("front", "back", "garage", "cellar")},
          "Lock the {door} door.|Please make sure the {door} door is locked.", '{{"status": "locked"}}', "The {door} door is locked."),
    _tool("create_note", "Create a note", {"title": phrase, "text": phrase},
          "Create a note titled {title} with the text {text}.|Note down {text} under the title {title}.", '{{"status": "saved"}}', "The note {title} is saved."),
    _tool("find_hotel", "Find a hotel", {"city": city, "nights": number(1, 14)},
          "Find a hotel in {city} for {nights} nights.|I need a room in {city}, {nights} nights.", '{{"name": "{p}"}}', "In {city} you can stay at {p}."),
)  # fmt: skip
VERBS = (
    "get find create update delete check start stop list count open close rename copy move publish cancel show print "
    "archive assign approve measure repair install test compare sort paint clean fill load merge export"
).split()
THINGS = (
    "user order invoice ticket project task server report device account job message image table playlist room printer "
    "camera window garden recipe lesson shipment sensor folder meeting survey budget contract map photo robot bicycle "
    "engine letter song plant shelf backup branch session badge"
).split()


def schema(tool: Tool, rng: random.Random) -> dict[str, Any]:
    """The JSON line that declares a tool; types come from sampled values."""
    types = {str: "string", int: "integer", bool: "boolean", float: "number"}
    properties = {key: {"type": types[type(make(rng))]} for key, make in tool.parameters.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def made_up(rng: random.Random) -> Tool:
    """A tool of random name and parameters, so that names and keys must be read from the declaration."""
    verb, thing = rng.choice(VERBS), rng.choice(THINGS)
    makers: dict[str, Maker] = {
        "name": first_name, "id": number(1, 10000), "city": city, "date": date, "color": among(*w.COLORS), "title": phrase,
        "limit": number(1, 100), "owner": full_name, "email": address, "path": file_name, "label": among(*w.NOUNS),
        "priority": among("low", "normal", "high"), "topic": among(*w.TOPICS), "count": number(1, 50), "time": clock,
    }  # fmt: skip
    keys = rng.sample(list(makers), rng.randrange(1, 4))
    shown = [", ".join(f"{key} {{{key}}}" for key in keys), " and ".join(f"{{{key}}} as {key}" for key in keys)]
    shown.append(", ".join(f"{key}: {{{key}}}" for key in keys))
    style = rng.choice(shown)
    requests = (
        f"{verb.title()} the {thing} with {style}.", f"Please {verb} a {thing}, {style}.", f"I want to {verb} the {thing} ({style}).",
        f"Can you {verb} a {thing} with {style}?", f"{verb} {thing}: {style}", f"Use {verb}_{thing} with {style}.",
        f"Could you {verb} the {thing} having {style}?", f"It is time to {verb} this {thing}: {style}.",
    )  # fmt: skip
    return Tool(
        f"{verb}_{thing}", f"{verb.title()} a {thing}", {key: makers[key] for key in keys}, requests,
        '{{"status": "{s}", "value": {n}}}', f"The {thing} request returned {{s}} with the value {{n}}.",
    )  # fmt: skip


def _fillers(rng: random.Random) -> dict[str, Any]:
    conditions = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear"]
    return {
        "n": rng.randrange(1, 1000), "c": rng.choice(conditions), "t": clock(rng), "p": phrase(rng), "city2": city(rng),
        "s": rng.choice(["ok", "done", "pending", "failed"]),
    }  # fmt: skip


def offer(rng: random.Random, split: str) -> tuple[list[Tool], Tool]:
    """Declared tools (1 to 4, distinct names) and the one that the user needs."""
    others = rng.sample(HELD_TOOLS, 2) if split == "valid" else [made_up(rng) for _ in range(3)]
    pool = [*rng.sample(TOOLS, 3), *others]
    tools = list({tool.name: tool for tool in rng.sample(pool, rng.randrange(1, 5))}.values())
    return tools, rng.choice(tools)


def request(rng: random.Random, tool: Tool, split: str) -> tuple[str, dict[str, Any]]:
    """(user text, arguments)."""
    values = {key: make(rng) for key, make in tool.parameters.items()}
    wording = rng.choice(tool.requests) if tool in HELD_TOOLS else pick(rng, tool.requests, split)
    return wording.format(**values), values


def tool_chat(rng: random.Random, phrases: Phrases, split: str, calls_only: bool = False) -> Chat:
    """One chat; `calls_only` stops behind the first call turn and always has one call (for evaluation)."""
    tools, chosen = offer(rng, split)
    thinking = rng.random() < 0.5
    system = rng.choice(
        ["", "", "You are a helpful assistant.", "You are a helpful assistant with tools.", "Be brief."]
    )
    chat = Chat(
        phrases, thinking, rng.choice([50, 75, 75, 100, rng.randrange(1, 101)]), system, [schema(t, rng) for t in tools]
    )
    if not calls_only and rng.random() < 0.15:  # no tool needed
        question, reasoning, answer = facts.ask_fact(rng, split)
        chat.user(question).assistant(answer, f"No tool is needed. {reasoning}")
        if rng.random() < 0.5:
            return chat
    text, values = request(rng, chosen, split)
    reasoning = f"The user wants {chosen.name} with " + ", ".join(f"{k} {v}" for k, v in values.items()) + "."
    calls, texts, fillers = [(chosen.name, values)], [text], [_fillers(rng)]
    if not calls_only and rng.random() < 0.2:  # a second call of the same turn
        other = rng.choice(tools)
        more, more_values = request(rng, other, split)
        texts.append(more)
        calls.append((other.name, more_values))
        fillers.append(_fillers(rng))
        reasoning = f"Two calls are needed: {chosen.name} and {other.name}."
    else:
        other = chosen
    content = rng.choice(["", "", "", "Let me check.", "I will do that.", "One moment."]) if not calls_only else ""
    chat.user(" ".join(texts)).assistant(content, reasoning, calls)
    if calls_only or rng.random() < 0.3:
        return chat
    results, answers = [], []
    for tool, (_, arguments), filler in zip((chosen, other), calls, fillers, strict=False):
        results.append(tool.result.format(**(filler | arguments)))
        answers.append(tool.answer.format(**(filler | arguments)))
    chat.results(results).assistant(" ".join(answers), "The tool has answered. I report its result.")
    if rng.random() < 0.25:
        chat.user("Thank you!").assistant("You are welcome!", "The user says thanks.")
    return chat


def valid_call(text: str, tools: list[dict[str, Any]]) -> bool:
    """True if an answer ends in one well-formed DSML block whose calls fit the declared tools."""
    from training.synth.render import render_calls  # the grammar in one place: parse, print again, compare

    at = text.find(render_calls([]).split("\n")[0])
    if at < 0:
        return False
    calls = parse_calls(text[at:])
    if not calls or render_calls(calls) != text[at:]:
        return False
    known = {tool["name"]: tool["parameters"] for tool in tools}
    kinds = {"string": str, "integer": int, "boolean": bool, "number": float}
    for name, arguments in calls:
        if name not in known or set(arguments) != set(known[name]["required"]):
            return False
        if any(type(v) is not kinds[known[name]["properties"][k]["type"]] for k, v in arguments.items()):
            return False
    return True


def parse_calls(block: str) -> list[tuple[str, dict[str, Any]]]:
    """Calls of a DSML block; [] if a value is not JSON where it should be."""
    import json
    import re

    calls = []
    for name, body in re.findall(r'<｜DSML｜ invoke name="([^"]*)">\n(.*?)</｜DSML｜ invoke>', block, re.S):
        arguments: dict[str, Any] = {}
        pattern = r'<｜DSML｜ parameter name="([^"]*)" string="(true|false)">(.*?)</｜DSML｜ parameter>'
        for key, plain, value in re.findall(pattern, body, re.S):
            try:
                arguments[key] = value if plain == "true" else json.loads(value)
            except ValueError:
                return []
        calls.append((name, arguments))
    return calls


__all__ = ["render_json", "tool_chat", "valid_call"]
