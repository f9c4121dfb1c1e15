"""Tools for tests, examples and the demo that are of use outside this repository too. Never imports vLLM."""
