"""`python -m cupyattn` is the `cupyattn` command."""

import sys

from cupyattn.cli import main

sys.exit(main())
