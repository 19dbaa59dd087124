"""``python -m fshard``: the command line."""

import sys

from fshard.cli.main import main

sys.exit(main())
