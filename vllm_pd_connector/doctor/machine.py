"""Checks of this machine, from values that others have read. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm_pd_connector.doctor.finding import Finding, failed, ok, warning
from vllm_pd_connector.topology.device import Nic, PciDevice
from vllm_pd_connector.topology.placement import place
from vllm_pd_connector.topology.table import table

NodeCpus = Mapping[int, frozenset[int]]
UCX_NAMES = ("UCX_TLS", "UCX_NET_DEVICES")


def check_topology(gpus: Sequence[PciDevice], nics: Sequence[Nic], node_cpus: NodeCpus) -> list[Finding]:
    """The table, and each GPU that would be better off if a link were up, or that has no port near it."""
    findings = [ok("topology", table(gpus, nics, node_cpus))]
    if_all_were_up = [replace(nic, is_active=True) for nic in nics]
    down = {nic.ucx_name for nic in nics if not nic.is_active}
    for index, gpu in enumerate(gpus):
        lost = [nic.ucx_name for nic in place(gpu, if_all_were_up, node_cpus).nics if nic.ucx_name in down]
        given = [nic.ucx_name for nic in place(gpu, nics, node_cpus).nics]
        if lost:
            findings.append(
                warning(
                    f"GPU {index}",
                    f"its nearest port {', '.join(lost)} has no link; it is given {', '.join(given) or 'none'}",
                    "Look at the cable and the switch port (`ibstat`, `rdma link`).",
                )
            )
        elif nics and not given:
            findings.append(
                warning(f"GPU {index}", "no port on its NUMA node", "The transport chooses; set UCX_NET_DEVICES.")
            )
    return findings


def port_sets(gpus: Sequence[PciDevice], nics: Sequence[Nic], node_cpus: NodeCpus) -> list[tuple[str, ...]]:
    """What the ranks of this machine are given as UCX's devices, each set once; one empty set without GPUs."""
    sets = [tuple(nic.ucx_name for nic in place(gpu, nics, node_cpus).nics) for gpu in gpus]
    return list(dict.fromkeys(sets)) or [()]


def check_locked_memory(limit_bytes: int | None, nics: Sequence[Nic]) -> Finding:
    """Args:
    limit_bytes: RLIMIT_MEMLOCK; None: unlimited.
    nics: of the machine.
    """
    name = "locked memory"
    seen = "unlimited" if limit_bytes is None else f"{limit_bytes >> 10} KiB"
    if limit_bytes is None or not nics:
        return ok(name, seen if nics else f"{seen}; no RDMA port needs it")
    return warning(
        name,
        f"{seen}: RDMA ports register all KV memory",
        "`ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd) or --ulimit memlock=-1 (docker) for the servers.",
    )


def check_extension(description: str, *, is_built: bool, has_cuda: bool, has_gpu: bool) -> Finding:
    """`description`: as `kernels.native` words it."""
    name = "extension"
    if not is_built:
        return warning(
            name, description, "Works without, in Python. For native_posting install again with a C++20 compiler."
        )
    if has_gpu and not has_cuda:
        return warning(name, description, "For full_cuda_graphs install again with nvcc at hand, or the cupy extra.")
    return ok(name, description)


def check_versions(found: Mapping[str, str | None]) -> Finding:
    """`found`: version by distribution, None where it is not installed."""
    seen = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    if missing := [name for name, version in found.items() if version is None]:
        return failed("versions", seen, f"Install {', '.join(missing)} into this environment (`make setup`).")
    return ok("versions", seen)


def check_environment(environment: Mapping[str, str]) -> Finding:
    """What UCX is told from outside; servers read it from their own environment."""
    told = [f"{name}={environment[name]}" for name in UCX_NAMES if name in environment]
    return ok("UCX environment", ", ".join(told) or f"{' and '.join(UCX_NAMES)} are not set: UCX chooses")


def check_path(name: str, path: str, nics: Sequence[Nic]) -> list[Finding]:
    """Whether a write that left the machine would use its RDMA ports.

    Args:
        name: of the trial.
        path: transports and devices as UCX names them; empty if it named none.
        nics: of the machine.
    """
    up = [nic for nic in nics if nic.is_active]
    if not path or not up or any(nic.name in path for nic in up):
        return []
    seen = f"goes over {path}, although {', '.join(nic.ucx_name for nic in up)} are up"
    advice = "Look at UCX_TLS, UCX_NET_DEVICES, the locked-memory limit, and whether /dev/infiniband is visible here."
    return [warning(name, seen, advice)]
