"""The reference engine: a small, honest inference server, for demos and tests.

It answers the chat and generate shapes of SGLang with real sampling and real log-probs from a tiny model,
which it trains in seconds. It shares no code with the rest of Tokentape: what it confirms, it confirms as a
stranger. Start it with `tokentape engine`, or with `python -m tokentape_engine`.

This package imports nothing by itself: `server` brings torch, `dialogues` and `options` need nothing.
"""
