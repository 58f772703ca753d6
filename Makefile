# Two commands do all the set-up: `make demo` and `make test`.
MODEL ?= smollm2
PORT ?= 8000

.PHONY: demo serve setup test check help

help:            ## this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

demo: setup      ## install, prepare the model (MODEL=smollm2|qwen0.5b|PATH), serve it, stream one answer, stop
	@scripts/demo --model "$(MODEL)" --port $(PORT)

serve: setup     ## the same, but the server stays up until Ctrl-C
	@scripts/demo --model "$(MODEL)" --port $(PORT) --serve

setup:           ## .venv and .voltriton
	@scripts/setup

check: setup     ## format, lint, types, patch structure
	@scripts/check

test: setup      ## check, then unit tests, tests with a real tritonserver, tests with a real engine
	@scripts/test
