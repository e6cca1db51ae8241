"""`python -m tokentape_cli`, by which the command starts its own child processes."""

import sys

from tokentape_cli.main import main

sys.exit(main())
