"""DSpark: draft tokens, decide how many to verify, verify them so that the target's law is kept (spec/dspark.md)."""
