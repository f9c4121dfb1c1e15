"""Entry point of the `vllm.general_plugins` group: makes the connector known by name. Cheap, and safe to call twice."""

NAME = "PDConnector"
MODULE = "vllm_pd_connector.engine.connector"


def register() -> None:
    """Register `PDConnector` with vLLM's factory, which imports it only when it is named."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
