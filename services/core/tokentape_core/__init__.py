"""What the API and the assembler share.

- `domain`  the pure model of a session: fold, decide, assemble, view
- `store`   the port to the event store, and its implementations
- `text`    tokenizers and chat templates
"""
