"""Output of the model -> events: thinking, content, calls. Markup begins with control ids, never with text that spells
them; what only looks like markup stays text."""

from deepinfer.codec.parsing.output import OutputParser
from deepinfer.codec.parsing.plain import PlainParser
from deepinfer.codec.parsing.stopping import StopText

__all__ = ["OutputParser", "PlainParser", "StopText"]
