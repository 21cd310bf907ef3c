"""The output of a chat: thinking, content and calls, from ids (spec/codec.md 1, 3, 11)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from deepinfer.codec.conversation import Tool
from deepinfer.codec.events import Content, Event, Reasoning, merged
from deepinfer.codec.generation import Finish
from deepinfer.codec.parsing.calls import BlockReader, CallRules, fragments_of
from deepinfer.codec.parsing.channel import Channel
from deepinfer.codec.parsing.characters import Characters, Fragment, Signal, TokenSource, token_texts
from deepinfer.codec.parsing.stopping import StopText
from deepinfer.codec.parsing.tags import Lexeme, Tag, TagFinder
from deepinfer.codec.spellings import DSML

OPENER = " calls>"  # behind the control id


def opens_calls(lexeme: Lexeme) -> bool:
    """Whether it is the full opener of a block."""
    return isinstance(lexeme, Tag) and lexeme.opens("calls")


class OutputParser:
    """One output, token by token. The events do not depend on how it is cut into pieces, if adjacent ones are merged.

    `<think>` and `</think>` divide thinking from content; each counts only where it can, elsewhere it leaves no text.
    Markup of calls begins with the control id of DSML; text that spells it is text. Only a block that holds a call of
    a declared tool is one, also inside thinking, which it ends; anything else stays text. What follows a block is
    dropped.

    stopped: the stop string that ended the content, or None. done: nothing that follows matters (a stop string, the
    end of a block, enough calls), so the sequence may be aborted. result: how the completion ended, once `finish` was
    called.
    """

    def __init__(
        self,
        tokenizer: TokenSource,
        *,
        starts: Literal["thinking", "content"],
        tools: Sequence[Tool] | None,
        make_id: Callable[[], str],
        stop: StopText | None = None,
        min_tokens: int = 0,
        promote_unterminated: bool = False,
        max_calls: int | None = None,
        drop_calls: bool = False,
    ) -> None:
        """starts: where the prompt ends. tools: that may be called. make_id: of the next call. stop: finds stop
        strings in the content, not among the first `min_tokens` tokens. promote_unterminated: thinking that the model
        ended without `</think>` is the content, too. max_calls: what follows them is dropped. drop_calls: calls of
        any tool are read and leave nothing (tool_choice "none")."""
        self._texts = token_texts(tokenizer)
        self._characters = Characters(self._texts)
        self._rules = CallRules({tool.name: tool for tool in tools or ()}, make_id, max_calls, drop_calls)
        self._has_markup = bool(tools) or drop_calls
        self._tags = TagFinder()
        self._reasoning = Channel(Reasoning, before_calls=self._has_markup)
        self._content = Channel(Content, before_calls=self._has_markup, stop=stop)
        self._min_tokens = min_tokens
        self._thinking = starts == "thinking"
        self._thoughts: list[str] | None = [] if promote_unterminated and self._thinking else None
        self._block: BlockReader | None = None
        self._num_marks = 0  # control ids of DSML in the content, without those that were dropped
        self._calm_texts = self._texts_without_care()
        self._text_ended = False  # by a block of calls
        self._place = 0  # of the token that is being read
        self._out: list[Event] = []
        self.stopped: str | None = None
        self.done = False
        self.num_read = 0  # tokens, without those behind the one that made it `done`
        self.result: Finish | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens whose text is in the thinking that was released."""
        return self._reasoning.num_tokens

    def push(self, token_ids: Sequence[int]) -> list[Event]:
        """Adds tokens of the output, in any pieces."""
        first, at, end = self._place, 0, len(token_ids)
        while at < end and not self.done:
            at = self._calm_run(token_ids, at)
            if at < end and not self.done:
                self._place = first + at
                self._token(token_ids[at])
                at += 1
                self._place = first + at
        self.num_read += at
        self._place = first + end
        return self._take()

    def finish(self, reason: str) -> list[Event]:
        """The output has ended. reason: the engine's ("stop", "length", "abort", "deadline", "error")."""
        if not self.done:
            self._flush_characters()
            rest = self._tags.finish()
            if reason != "stop" and self._is_cut_head(rest):
                self._drop()
            else:
                self._lexemes(rest)
            if self._block is not None:
                if self._block.finish():
                    self._after_block(self._block)
                else:
                    self._release(self._block)
        if not self.done and self._block is None:
            self._channel.finish(self._out, self._may_stop)
            self._look_for_stop()
        events = self._take()
        if self._thoughts and self._thinking and reason == "stop":
            events.append(Content("".join(self._thoughts)))
        self.result = self._result(reason)
        return events

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _calm_run(self, token_ids: Sequence[int], at: int) -> int:
        """Takes the tokens from `at` on that are nothing but text, all at once; returns the place behind them."""
        texts = self._calm_texts
        if texts is None:
            return at
        end = len(token_ids)
        run: list[str] = []
        while at < end and (text := texts[token_ids[at]]) is not None:
            run.append(text)
            at += 1
        if run and self._block is not None:
            self._block.calm("".join(run))
            self._out += self._block.take()
        elif run:
            self._channel.calm(run, self._place, self._out, self._min_tokens)
            self._look_for_stop()
        return at

    def _token(self, token_id: int) -> None:
        signal = self._texts.signals.get(token_id)
        if signal is None:
            fragment = self._characters.push(token_id, self._place)
            if fragment is not None:
                self._text(fragment)
        elif signal is not Signal.SILENT:
            self._flush_characters()
            if signal is not Signal.DSML:
                self._think(signal)
            elif self._has_markup:
                self._num_marks += not self._thinking
                self._lexemes(self._tags.control(self._place))
            else:
                self._channel_text(Fragment(str(DSML), (self._place,)))
        self._calm_texts = self._texts_without_care()

    def _texts_without_care(self) -> Mapping[int, str | None] | None:
        """The texts that change nothing but the text that goes out, in the present state."""
        if not (self._characters.idle and self._tags.idle):
            return None
        if self._block is not None:
            return self._texts.calm if self._block.streams else None
        if not self._channel.idle:
            return None
        return self._texts.calm if self._has_markup else self._texts.whole

    def _flush_characters(self) -> None:
        fragment = self._characters.flush()
        if fragment is not None:
            self._text(fragment)

    def _text(self, fragment: Fragment) -> None:
        if self._has_markup:
            self._lexemes(self._tags.text(fragment))
        else:
            self._channel_text(fragment)

    def _think(self, signal: Signal) -> None:
        """`<think>` or `</think>`."""
        self._lexemes(self._tags.interrupt())
        block = self._block
        if block is not None and block.reads_value:
            self._lexeme(Fragment(signal.value, (self._place,)))
            return
        if block is not None and not block.believed:
            self._release(block)
        if self._block is not None or self.done:
            return
        if signal is Signal.THINK:
            self._thinking = self._thinking or self._content.empty
        elif self._thinking:
            self._reasoning.finish(self._out)
            self._thinking = False

    # -- lexemes -------------------------------------------------------------------------------------------------------

    def _lexemes(self, lexemes: Iterable[Lexeme]) -> None:
        for lexeme in lexemes:
            self._lexeme(lexeme)

    def _lexeme(self, lexeme: Lexeme) -> None:
        if self.done:
            return
        block = self._block
        if block is not None:
            if block.feed(lexeme):
                self._after_block(block)
                return
            self._release(block)
        if isinstance(lexeme, Fragment):
            self._channel_text(lexeme)
        elif self._may_begin_block(lexeme):
            self._block = BlockReader(lexeme, self._rules)
        elif self._is_orphan(lexeme):
            self._num_marks -= 1
        else:
            self._show(lexeme)

    def _may_begin_block(self, tag: Tag) -> bool:
        """In thinking only the full opener counts; in content also a misspelled one, and a call without any."""
        if self._thinking:
            return tag.opens("calls")
        return self._rules.is_opener(tag) or self._rules.declares(tag)

    def _is_orphan(self, tag: Tag) -> bool:
        """A closer that closes nothing, for no markup in front of it became text."""
        return not self._thinking and tag.closing and tag.word != "" and self._num_marks == 1

    def _show(self, lexeme: Lexeme) -> None:
        """A lexeme that is text."""
        for fragment in fragments_of(lexeme):
            self._channel_text(fragment)

    def _release(self, block: BlockReader) -> None:
        """What looked like a block is text."""
        self._block = None
        for lexeme in block.source:
            self._show(lexeme)

    def _drop(self) -> None:
        """What began as a block is no text that anybody should read, nor is the separator in front of it."""
        self._block = None
        if not self._text_ended:
            self._channel.calls_follow(self._out, self._may_stop)
            self._text_ended = True
            self._look_for_stop()

    def _is_cut_head(self, rest: Sequence[Lexeme]) -> bool:
        """Whether an output that was cut ends in a full opener, or in the beginning of one, before anything shows that
        it is one. rest: what was held back at its end."""
        if self._block is not None:
            return not self._block.believed and opens_calls(self._block.source[0])
        if not rest or not isinstance(rest[-1], Tag) or rest[-1].closing:
            return False
        mark, dsml, spelled = "".join(fragment.text for fragment in rest[-1].source).partition(DSML)
        return mark == "<" and dsml != "" and OPENER.startswith(spelled)

    def _after_block(self, block: BlockReader) -> None:
        """Takes what a block gave, if it is one; the first time the text in front of it ends."""
        if not block.believed:
            return
        if not self._text_ended:
            self._channel.calls_follow(self._out, self._may_stop)
            self._text_ended = True
            self._thinking = False
            self._look_for_stop()
        if not self.done:
            self._out += block.take()
            self.done = block.done

    # -- texts ---------------------------------------------------------------------------------------------------------

    @property
    def _channel(self) -> Channel:
        return self._reasoning if self._thinking else self._content

    @property
    def _may_stop(self) -> bool:
        return self._place >= self._min_tokens

    def _channel_text(self, fragment: Fragment) -> None:
        if not self.done:
            self._channel.push(fragment, self._out, self._may_stop)
            self._look_for_stop()

    def _look_for_stop(self) -> None:
        self.stopped = self._content.stopped
        self.done = self.done or self.stopped is not None

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        events = merged(out)
        if self._thoughts is not None:
            self._thoughts += [event.text for event in events if isinstance(event, Reasoning)]
        return events

    def _result(self, reason: str) -> Finish:
        if self.stopped is not None:
            return Finish("stop", self.stopped)
        if self.done:  # whoever ended the sequence, for the answer was complete
            reason = "stop"
        calls = 0 if self._block is None or self._rules.drop else self._block.num_calls
        return Finish("tool_calls" if reason == "stop" and calls else reason)
