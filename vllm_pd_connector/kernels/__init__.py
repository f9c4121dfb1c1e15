"""What is compiled, each with an equivalent that needs no compiler: layer words, the bell, the poller, CUDA kernels.

The sources are in csrc/; the extension is built when the package is installed on a machine with a C++ compiler.
"""
