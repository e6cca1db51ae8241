"""The pure model of a recorded session: no clock, no randomness, no I/O.

    events ──fold──▶ SessionState ──┬─ position, draft_turn ─▶ record_turn ─▶ a new event    (`decide`)
                                    ├─ assemble ─▶ training samples                         (`assemble`)
                                    └─ records, session_metadata ─▶ GET                     (`view`)

A session is a forest of turns. A turn's prompt is a part of its parent's tokens and a suffix of its own, so
that a stored token is stored once (INV-6) and never tokenised again (INV-2). `linear` sessions use one path
of the forest: the one to the newest turn. `tree` sessions use every leaf that a hook keeps (`tree`).
"""
