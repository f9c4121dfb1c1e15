"""Try releases of NIXL: scripts/nixl-releases [VERSION ...]. Without any: every supported one that can be had."""

import argparse
import re
import subprocess
import sys

from nixl_releases.release import Release
from vllm_pd_connector.doctor.finding import State
from vllm_pd_connector.transport.nixl import MIN_NIXL

INDEX_S = 120


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def supported() -> list[str]:
    """Every release that the package index has for this Python, from the floor on, the oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "nixl-cu12"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=INDEX_S, check=True).stdout
    found = re.search(r"Available versions: (.+)", listed)
    assert found is not None, listed
    return sorted((v for v in found[1].split(", ") if numbers(v) >= MIN_NIXL), key=numbers)


def examine(release: Release, installed: Release) -> tuple[list[str], bool]:
    """A row of the table, and whether all is well. Native posting may be off: then Python posts."""
    try:
        release.install()
    except RuntimeError as error:
        return [release.version, f"not installed: {error}", "", "", ""], False
    found = release.found()
    native = release.native_posting()
    is_native = native.state is State.OK
    passed, bad = release.contract(is_native=is_native)
    there, back = release.writes_to(installed), installed.writes_to(release)
    contract = f"{passed} passed" + (f", {len(bad)} failed: {bad[0]}, …" if bad else "")
    row = [found, contract, "works" if is_native else f"off: {native.seen}", there, back]
    return row, found == (release.version or found) and passed > 0 and not bad and (there, back) == ("ok", "ok")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/nixl-releases", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="such as 1.4.1")
    versions = parser.parse_args().versions or supported()
    installed = Release()
    here = installed.found()
    print(f"| NIXL | transport contract | native posting | writes to {here} | is written by {here} |")
    print("|---|---|---|---|---|", flush=True)
    is_well = True
    for version in versions:
        row, is_fine = examine(Release("" if version == here else version), installed)
        print(f"| {' | '.join(row)} |", flush=True)
        is_well &= is_fine
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
