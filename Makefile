.PHONY: setup demo test test-fast check bench faults fuzz clean

setup:      ## .venv with vLLM, NIXL and this plugin (seconds when nothing changed)
	@python3 scripts/setup.py

demo: setup ## a prefiller, a decoder and a router on this machine
	.venv/bin/vllm-pd demo

test: setup ## lint, types, fast tests, then tests with real vLLM servers
	scripts/test

test-fast: setup
	scripts/test --fast

check: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

bench: setup      ## every figure with its bar, 30 minutes
	.venv/bin/python -m benchmarks

faults: setup ## real servers under faults, half an hour
	scripts/faults

fuzz: setup ## hostile input, one minute
	scripts/fuzz --minutes 1

clean:
	rm -rf .venv .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
