"""`python -m cai_apps` is `cai`."""

import sys

from cai_apps.cli import main

if __name__ == "__main__":
    sys.exit(main())
