import sys

from voltriton_client.gateway import main

sys.exit(main(sys.argv[1:]))
