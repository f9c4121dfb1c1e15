"""Has vLLM load its plugins and find the connector, as its servers do; reads a `--kv-transfer-config` from stdin.

python -m vllm_pd_connector.doctor.plugin
"""

import json
import sys

from vllm_pd_connector.doctor.finding import failed, ok
from vllm_pd_connector.doctor.probe import VLLM, report
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.plugin import MODULE, NAME


def main(transfer_config: str) -> None:
    from vllm_pd_connector.engine import vllm_compat

    try:
        report(ok(VLLM, f"{vllm_compat.check_version()} is supported"))
    except UnsupportedEngine as error:
        report(failed(VLLM, str(error), "Install a supported vLLM; `make setup` does."))
        return
    try:
        found = vllm_compat.registered_connector(NAME)
        report(ok("plugin", f"vLLM finds {NAME} as {found.__module__}.{found.__qualname__}"))
    except ValueError as error:
        advice = f"Install this package beside vLLM; VLLM_PLUGINS must not leave it out; or set module path {MODULE}."
        report(failed("plugin", str(error), advice))
    if transfer_config:
        try:
            vllm_compat.check_transfer_config(json.loads(transfer_config))
        except (TypeError, ValueError) as error:
            seen = " ".join(str(error).split(" [type=")[0].split())
            report(failed("kv-transfer-config", f"vLLM refuses it: {seen}", "Mend the key that is named."))


if __name__ == "__main__":
    main(sys.stdin.read())
