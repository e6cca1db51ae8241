"""`tokentape demo`: living agents on the reference engine, recorded, collected and verified."""
