"""One GPU, two processes, torch and the NIXL wheel; no vLLM. Without a GPU the CPU parts run, the rest says why not."""
