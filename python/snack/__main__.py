"""``python -m snack`` is ``snack``."""

import sys

from snack.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
