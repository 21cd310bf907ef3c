"""Load on a running server, and what it did to it (spec/serving.md 7.1)."""
