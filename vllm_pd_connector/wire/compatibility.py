"""Everything two engines must agree on before a byte may move, and the report of what differs. Pure."""

import msgspec


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
        num_kv_heads: over all ranks.
        layers: names in order, joined; KV-sharing aliases left out.
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
    layout: str
    block_size: int
    slot_bytes: int
    num_kv_heads: int
    layers: str
    speculative: str
    tensor_parallel_size: int
    pipeline_parallel_size: int


def differences(local: CacheShape, remote: CacheShape) -> list[tuple[str, str, str]]:
    """The (field, local value, remote value) triples that must be equal and are not."""
    names = [field.name for field in msgspec.structs.fields(CacheShape)]
    pairs = [(name, str(getattr(local, name)), str(getattr(remote, name))) for name in names]
    return [(name, here, there) for name, here, there in pairs if here != there]
