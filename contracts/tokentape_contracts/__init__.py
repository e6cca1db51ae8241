"""The public contracts of Tokentape: what crosses a process boundary, and nothing else.

Every other package imports these modules, and they import none of ours. They are pure: no clock, no
randomness, no I/O. One module a subject:

- `errors`   the tree and the table of errors
- `events`   the session events, their versions and their bytes
- `http`     request bodies and headers
- `keys`     the names of Redis keys
- `limits`   every bound
- `samples`  the samples wire format
"""
