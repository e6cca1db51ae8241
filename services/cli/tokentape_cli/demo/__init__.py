"""`tokentape demo`: live agents on the reference engine, recorded, collected and verified."""
