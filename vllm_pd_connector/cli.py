"""The `vllm-pd` command."""

import argparse
import sys

from vllm_pd_connector import __version__
from vllm_pd_connector.config import explain, parse
from vllm_pd_connector.errors import ConfigError, PDConnectorError


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; the exit status is 2 for an error the operator can mend."""
    parser = argparse.ArgumentParser(prog="vllm-pd", description="Disaggregated prefill and decode on vLLM.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="configuration keys of kv_connector_extra_config")
    config.add_argument("--explain", action="store_true", required=True, help="every key, its default, range and unit")
    keygen = commands.add_parser("keygen", help="make a key file for the control channel")
    keygen.add_argument("file")
    commands.add_parser("demo", help="a prefiller, a decoder and the proxy on this machine, compared with one server")
    commands.add_parser("topology", help="which RDMA ports and CPU cores each GPU of this machine is given")
    doctor = commands.add_parser(
        "doctor", help="check this machine, a configuration and running servers before traffic"
    )
    doctor.add_argument("--config", metavar="JSON|FILE", help="what --kv-transfer-config of a server here is given")
    doctor.add_argument("--prefiller", metavar="URL", action="append", default=[], type=_base_url)
    doctor.add_argument("--decoder", metavar="URL", action="append", default=[], type=_base_url)
    doctor.add_argument("--api-key-file", metavar="FILE", help="key that the servers want, unless --config names one")
    doctor.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=10.0, help="for one question")
    simulate = commands.add_parser("simulate", help="whole pools on virtual time, with faults by seed (a self-test)")
    simulate.add_argument("--seeds", type=_positive, default=100, help="runs; each seed is another scenario")
    simulate.add_argument("--requests", type=_positive, default=100, help="client requests in each run")
    simulate.add_argument("--first-seed", type=int, default=0, help="seeds count up from here")
    simulate.add_argument("--jobs", type=_positive, default=1, help="processes")
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except (PDConnectorError, OSError) as error:
        print(f"vllm-pd: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.command == "config":
        print(explain())
    elif args.command == "keygen":
        from vllm_pd_connector.control.keys import write_key

        write_key(args.file)
        print(f"wrote {args.file}; copy it to every server of the pool and name it as control_key_file")
    elif args.command == "topology":
        from vllm_pd_connector.topology.table import describe

        print(describe())
    elif args.command == "doctor":
        from vllm_pd_connector.doctor.run import doctor

        return doctor(
            config=args.config,
            prefillers=args.prefiller,
            decoders=args.decoder,
            api_key_file=args.api_key_file,
            limit_s=args.timeout,
            tell=lambda text: print(text, flush=True),
        )
    elif args.command == "demo":
        from vllm_pd_connector.demo.run import demo

        return demo()
    elif args.command == "simulate":
        from vllm_pd_connector.testing.simulation.many import simulate

        return simulate(
            args.seeds,
            args.requests,
            first_seed=args.first_seed,
            jobs=args.jobs,
            tell=lambda line: print(line, flush=True),
        )
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 1 on")
    return number


def _base_url(text: str) -> str:
    try:
        return parse({"prefillers": [text]}).prefillers[0]
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text!r}: a base URL such as http://10.0.0.7:8100") from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: seconds, above 0 and at most 3600")
    return seconds
