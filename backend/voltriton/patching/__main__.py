"""`python -m voltriton.patching`: what `voltriton patch` does, for scripts."""

import sys

from voltriton.patching import main

sys.exit(main(sys.argv[1:]))
