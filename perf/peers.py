#!/usr/bin/env python3
"""Ours and its peers under the same load: the in-process engine, vLLM's OpenAI server, voltriton over gRPC, HTTP and
its gateway, interleaved in one run, with ratios.

    perf/peers.py --rounds 5 --streams 1 4 16 32 64 --out perf/results/peers.json

By default behind each stands vLLM with tests/bench/fake_executor.py (5 ms a step, no model CPU), which is the regime
of a GPU server; --real takes the CPU engine.
"""

import sys

from voltriton_perf.peers import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
