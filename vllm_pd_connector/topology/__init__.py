"""What is near what in this machine: GPUs, RDMA devices, NUMA nodes. `sysfs` reads; the rest is pure."""
