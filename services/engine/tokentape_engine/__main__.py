"""`python -m tokentape_engine`."""

import sys

from tokentape_engine.server import main

if __name__ == "__main__":
    sys.exit(main())
