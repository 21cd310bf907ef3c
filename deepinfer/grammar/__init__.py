"""Structured output: what may follow. A leaf: it imports nothing of ours and knows no engine."""
