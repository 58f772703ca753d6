"""Opens COUNT streams at ADDRESS, says so when each has a token, and reads on until it is killed."""

import sys

from follow import follow, script

streams = follow(sys.argv[1], int(sys.argv[2]), script(repeat=["w ", 3000], delay_ms=50))
print("streaming", flush=True)
for stream in streams:
    stream.wait(600)
