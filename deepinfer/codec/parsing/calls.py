"""One block of calls: `<｜DSML｜ calls>` with what the model makes of it (spec/codec.md 3, repairs of section 11).

A block is believed once its first call cannot be anything else: with the full opener, when the first parameter (or the
end of the call) follows the name of a declared tool; without it, or with a misspelled one, only when a call is
complete. Until then the source is kept, and if it turns out to be no block it is text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deepinfer.codec.conversation import Tool
from deepinfer.codec.events import Content, Event, ToolArguments, ToolEnd, ToolStart
from deepinfer.codec.parsing.arguments import Arguments
from deepinfer.codec.parsing.body import Body
from deepinfer.codec.parsing.characters import Fragment
from deepinfer.codec.parsing.tags import Lexeme, Tag


class CallRules:
    """What an output may call."""

    def __init__(
        self, tools: Mapping[str, Tool], make_id: Callable[[], str], max_calls: int | None = None, drop: bool = False
    ) -> None:
        """tools: by name. make_id: of the next call. max_calls: what follows them is dropped. drop: calls of any name
        are read and leave nothing."""
        self.tools = tools
        self.make_id = make_id
        self.max_calls = max_calls
        self.drop = drop

    def declares(self, tag: Tag) -> bool:
        """Is the tag the beginning of a call that may be made?"""
        return tag.opens("invoke") and (self.drop or tag.name in self.tools)

    def is_opener(self, tag: Tag) -> bool:
        """Does the tag open a block, spelled well or not?"""
        return not tag.closing and tag.word not in ("", "invoke", "parameter")


class _Call:
    """A call that is being read."""

    def __init__(self, number: int, name: str, rules: CallRules) -> None:
        self.number = number
        self.name = name
        self.arguments = Arguments(rules.tools.get(name))
        self.body = Body()
        self.pieces: list[str] = []  # of the arguments' JSON
        self.sure = False  # cannot be text any more
        self.events: list[Event] = []  # until it is sure


class BlockReader:
    """Takes the lexemes behind an opener; `take` gives the events."""

    def __init__(self, opener: Tag, rules: CallRules) -> None:
        """opener: of a block (see `CallRules.is_opener`), or of a call without one."""
        self._rules = rules
        self._full = opener.opens("calls")
        self._out: list[Event] = []
        self._call: _Call | None = None
        self._read: Callable[[Lexeme], bool] = self._opened  # the state
        self.believed = False
        self.num_calls = 0  # complete ones
        self._num_started = 0
        self.done = False  # nothing that follows matters
        if rules.declares(opener):
            self._begin(opener)
        self.source: list[Lexeme] = [opener]
        """What was read and may still turn out to be text."""

    @property
    def streams(self) -> bool:
        """A text goes straight into the arguments of a call that is sure."""
        call = self._call
        return call is not None and call.sure and self._read == self._in_value and call.arguments.streams

    @property
    def reads_value(self) -> bool:
        """Control ids other than DSML are data now."""
        return self._read in (self._in_value, self._in_body)

    def take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def feed(self, lexeme: Lexeme) -> bool:
        """False: this is no block. `source` is text, and the lexeme was not read."""
        if self._read(lexeme):
            if not (self.believed if self._call is None else self._call.sure):
                self.source.append(lexeme)
            return True
        if not self.believed:
            return False
        is_over = any(isinstance(one, Tag) and one.closes("invoke") for one in self.source)
        broken_at = self._current.body.broken_at
        self._quote_source()
        self._read = self._between if is_over else self._in_quote
        if is_over and broken_at and isinstance(lexeme, Fragment):
            self._quote(Fragment(lexeme.text[:broken_at], lexeme.places))  # so that cuts do not matter
        return self.feed(lexeme)

    def calm(self, text: str) -> None:
        """Adds text to the arguments, where `streams`."""
        self._piece(self._current, self._current.arguments.push(text))

    def finish(self) -> bool:
        """The output has ended. False: this is no block, `source` is text."""
        call = self._call
        if call is not None and self._full:
            if not call.sure:  # cut off behind its name, or in a body
                self._start(call)
                self._piece(call, call.body.text)
            self._end(call, complete=False)
        elif self.believed:
            self._quote_source()
        return self.believed

    # -- states: each reads a lexeme and says whether it fits ----------------------------------------------------------

    def _opened(self, lexeme: Lexeme) -> bool:
        """Behind the opener of a block."""
        if isinstance(lexeme, Fragment):
            return lexeme.text.isspace()
        if not self._rules.declares(lexeme):
            return False
        self._begin(lexeme)
        return True

    def _named(self, lexeme: Lexeme) -> bool:
        """Behind the name of a declared tool."""
        call = self._current
        if isinstance(lexeme, Fragment):
            if lexeme.text.isspace():
                return True
            if not lexeme.text.lstrip().startswith("{"):
                return False
            self._read = self._in_body
            return self._in_body(lexeme)
        if lexeme.closes("invoke"):
            self._start(call)
            self._end(call)
        elif lexeme.opens("parameter"):
            self._start(call)
            self._open_parameter(call, lexeme)
        else:
            return lexeme.word == ""
        return True

    def _in_value(self, lexeme: Lexeme) -> bool:
        """In a parameter's value: only its own closer ends it."""
        call = self._current
        if isinstance(lexeme, Fragment):
            self._piece(call, call.arguments.push(lexeme.text))
        elif lexeme.closes("parameter"):
            self._piece(call, call.arguments.close())
            self._read = self._in_call
        elif lexeme.word:
            self._piece(call, call.arguments.push(_text(lexeme)))
        return True

    def _in_call(self, lexeme: Lexeme) -> bool:
        """Behind a parameter. A call without its closer ends where the next one begins, or the block ends."""
        call = self._current
        if isinstance(lexeme, Fragment):
            if lexeme.text.isspace():
                return True
        elif lexeme.opens("parameter"):
            self._open_parameter(call, lexeme)
            return True
        elif lexeme.closes("invoke"):
            self._end(call)
            return True
        elif lexeme.word == "" or lexeme.closes("parameter"):
            return True
        elif call.sure and (lexeme.opens("invoke") or _closes_block(lexeme)):
            self._end(call)
            return self.done or self._between(lexeme)
        if not call.sure:
            return False
        # Part of a value, or a parameter that cannot be read: without it the call is not what the model meant.
        self._end(call, complete=False)
        self._read = self._in_quote
        return self._in_quote(Fragment(lexeme.text.lstrip(), lexeme.places) if isinstance(lexeme, Fragment) else lexeme)

    def _in_body(self, lexeme: Lexeme) -> bool:
        """In an object that stands where parameters should."""
        call = self._current
        body = call.body
        if isinstance(lexeme, Fragment) or body.in_string:
            body.push(_text(lexeme))
            return body.broken_at is None
        if not (lexeme.closes("invoke") and body.is_object):
            return lexeme.word == ""
        self._start(call)
        self._piece(call, body.text)
        self._finish_call(call)
        return True

    def _between(self, lexeme: Lexeme) -> bool:
        """Behind a call. Text does not belong here, nor do closers of what is closed."""
        if isinstance(lexeme, Fragment):
            return True
        if self._rules.declares(lexeme):
            self._begin(lexeme)
        elif lexeme.opens("invoke"):
            self._read = self._in_quote
            self._quote(lexeme)
        elif _closes_block(lexeme):
            self.done = True
        return True

    def _in_quote(self, lexeme: Lexeme) -> bool:
        """In a call, behind others, that may not be made or is none: it is shown as text."""
        if isinstance(lexeme, Tag) and (lexeme.opens("invoke") or _closes_block(lexeme)):
            return self._between(lexeme)
        self._quote(lexeme)
        if isinstance(lexeme, Tag) and lexeme.closes("invoke"):
            self._read = self._between
        return True

    # -- what the states do --------------------------------------------------------------------------------------------

    @property
    def _current(self) -> _Call:
        assert self._call is not None
        return self._call

    def _begin(self, tag: Tag) -> None:
        assert tag.name is not None
        self._call = _Call(self._num_started, tag.name, self._rules)
        self._read = self._named

    def _open_parameter(self, call: _Call, tag: Tag) -> None:
        assert tag.name is not None
        self._piece(call, call.arguments.open(tag.name, tag.string))
        self._read = self._in_value

    def _start(self, call: _Call) -> None:
        self._emit(call, ToolStart(call.number, "", call.name))  # its id comes when it is sure
        if self._full:
            self._believe(call)

    def _piece(self, call: _Call, text: str) -> None:
        if text:
            call.pieces.append(text)
            self._emit(call, ToolArguments(call.number, text))

    def _end(self, call: _Call, complete: bool = True) -> None:
        """Ends a call that has parameters, or none."""
        if complete:
            self._piece(call, call.arguments.end())
        self._finish_call(call, complete)

    def _finish_call(self, call: _Call, complete: bool = True) -> None:
        self._believe(call)
        self._emit(call, ToolEnd(call.number, "".join(call.pieces), complete))
        self._call = None
        self._read = self._between
        self.num_calls += complete
        self.done = self.num_calls == self._rules.max_calls

    def _emit(self, call: _Call, event: Event) -> None:
        if not self._rules.drop:
            (self._out if call.sure else call.events).append(event)

    def _believe(self, call: _Call) -> None:
        if not call.sure:
            self._num_started += 1
        self.believed = call.sure = True
        for event in call.events:
            self._out.append(event._replace(id=self._rules.make_id()) if isinstance(event, ToolStart) else event)
        call.events = []
        self.source = []

    def _quote_source(self) -> None:
        for lexeme in self.source:
            self._quote(lexeme)
        self.source = []
        self._call = None

    def _quote(self, lexeme: Lexeme) -> None:
        if not self._rules.drop:
            self._out += [Content(*fragment) for fragment in fragments_of(lexeme)]


def fragments_of(lexeme: Lexeme) -> tuple[Fragment, ...]:
    """A lexeme as the text that it was."""
    return (lexeme,) if isinstance(lexeme, Fragment) else lexeme.source


def _text(lexeme: Lexeme) -> str:
    return "".join(fragment.text for fragment in fragments_of(lexeme))


def _closes_block(tag: Tag) -> bool:
    """Closers of blocks are known by not being those of calls and parameters, so that misspelled ones close too."""
    return tag.closing and tag.word not in ("", "invoke", "parameter")
