import sys

from voltriton.doctor import main

sys.exit(main(sys.argv[1:]))
