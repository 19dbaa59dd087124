"""``python -m fshard.cli``: the command line where the console script is not installed."""

import sys

from fshard.cli.main import main

sys.exit(main())
