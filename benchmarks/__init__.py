"""End-to-end and micro benchmarks: `python -m benchmarks`. Never imports vLLM itself, except in `benchmarks.micro`.

sessions   which servers are up together and what is measured on them
client     one streamed request, timed
ttft, interference, idle   the measurements: each writes raw records
summary    raw records to figures (pure)
report     figures to summary.md and summary.json (pure)
"""
