"""`python -m lehr`: the command line."""

import sys

from lehr.cli import main

sys.exit(main())
