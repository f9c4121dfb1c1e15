"""`vllm-pd demo`: a prefiller, a decoder and the proxy on this machine, compared with one ordinary server.

Owns: `./demo-output/`. Must not import vLLM.
"""
