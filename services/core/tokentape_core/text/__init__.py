"""Text and tokens: tokenizers, chat templates, and the prompts that extend recorded tokens."""
