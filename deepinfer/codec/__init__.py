"""Text <-> token ids. A leaf: it imports nothing of ours and knows no engine."""
