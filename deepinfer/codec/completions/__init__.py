"""The older Completions protocol: plain prompts in, plain text out."""
