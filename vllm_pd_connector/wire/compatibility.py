"""Everything two engines must agree on before a byte may move, and the report of what differs. Pure."""

from typing import Literal

import msgspec

from vllm_pd_connector.errors import ConfigError
from vllm_pd_connector.geometry.cache_geometry import BlockSize, CacheGeometry, Planes, Ranks, Size, mismatches


class CacheShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine's KV pages look like and what computed them. Values are compared field by field, never as a hash.

    Attributes:
        protocol: `wire.version.PROTOCOL_VERSION`.
        architecture: model class names of the configuration.
        model_config: the numbers that shape the computation, as sorted JSON (sizes, RoPE, norms).
        quantization: weight quantisation method, "none" without.
        dtype: activations.
        cache_dtype: KV elements.
        attention: backend and, on CPU, instruction set: pages are packed for it.
        layout: vLLM's layout name; LBHNC is HND.
        block_size: tokens per page.
        slot_bytes: bytes of one head of one token, K and V together.
        planes: (rows, bytes per token) of each part of a head's KV; empty when pages are packed in a way of their own.
        kernel_blocks: parts the attention kernel cuts a page into.
        num_kv_heads: over all ranks.
        layers: names in order, joined, each with "@group" if there are several; KV-sharing aliases left out.
        groups: kind and window of each cache group, joined.
        speculative: drafter method, "none" without.
        tensor_parallel_size: ranks.
        pipeline_parallel_size: stages.
    """

    protocol: int
    architecture: str
    model_config: str
    quantization: str
    dtype: str
    cache_dtype: str
    attention: str
    layout: Literal["LBHNC", "LBNHC"]
    block_size: BlockSize
    slot_bytes: Size
    planes: Planes
    kernel_blocks: Size
    num_kv_heads: Size
    layers: str
    groups: str
    speculative: str
    tensor_parallel_size: Ranks
    pipeline_parallel_size: Ranks

    def geometry(self) -> CacheGeometry:
        """The part that decides where bytes lie."""
        return CacheGeometry(
            tp_size=self.tensor_parallel_size,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            slot_bytes=self.slot_bytes,
            layout=self.layout,
            planes=self.planes,
            kernel_blocks=self.kernel_blocks,
        )


MAY_DIFFER = ("layout", "block_size", "kernel_blocks", "tensor_parallel_size", "pipeline_parallel_size")
"""Pages are cut and put together between these, where the rest of the geometry allows it."""


def differences(local: CacheShape, remote: CacheShape) -> list[tuple[str, str, str]]:
    """The (field, local value, remote value) triples that keep pages from being exchanged; none if they can be."""
    names = [field.name for field in msgspec.structs.fields(CacheShape)]
    differing = {name for name in names if getattr(local, name) != getattr(remote, name)}
    refused = differing - set(MAY_DIFFER)
    try:
        refused |= set(mismatches(remote.geometry(), local.geometry()))
    except ConfigError:  # its own server would not have started
        refused |= differing & {"tensor_parallel_size", "num_kv_heads"}
    found: list[tuple[str, str, str]] = []
    for name in names:
        if name in refused:
            found += _numbers(local, remote) if name == "model_config" else [(name, *_values(local, remote, name))]
    return found


def _values(local: CacheShape, remote: CacheShape, name: str) -> tuple[str, str]:
    here, there = getattr(local, name), getattr(remote, name)
    if name == "layers":
        mine, theirs = here.split(), there.split()
        only = [[n for n in one if n not in set(other)] for one, other in ((mine, theirs), (theirs, mine))]
        if any(only):
            return f"{len(mine)} names, own {only[0]}", f"{len(theirs)} names, own {only[1]}"
    if name == "block_size" and not local.planes:
        return str(here), f"{there}; unequal blocks need a packing that is known, and that of {local.attention} is not"
    return str(here), str(there)


def _numbers(local: CacheShape, remote: CacheShape) -> list[tuple[str, str, str]]:
    """The entries of the model's configuration that differ."""
    try:
        here, there = msgspec.json.decode(local.model_config), msgspec.json.decode(remote.model_config)
        keys = sorted(key for key in {*here, *there} if here.get(key, "none") != there.get(key, "none"))
    except (msgspec.DecodeError, AttributeError, TypeError, RecursionError):
        keys = []
    if not keys:
        return [("model_config", local.model_config, remote.model_config)]
    return [(f"model_config.{key}", str(here.get(key, "none")), str(there.get(key, "none"))) for key in keys]
