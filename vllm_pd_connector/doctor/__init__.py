"""Checks a deployment before traffic does: this machine, a configuration, servers that run. `vllm-pd doctor`."""
