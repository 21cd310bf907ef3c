"""Chat Completions: requests in (spec/codec.md 7.1), streams and complete answers out."""
