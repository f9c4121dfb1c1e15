"""The pool's CURVE key: whoever has the file belongs to the pool, everybody else is refused (law 13)."""

import os
from dataclasses import dataclass
from pathlib import Path

import zmq

from vllm_pd_connector.errors import ConfigError

Z85_LENGTH = 40


@dataclass(frozen=True, slots=True)
class ControlKey:
    """One CURVE key pair, Z85; servers and clients of a pool share it."""

    public: bytes
    secret: bytes

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket accept this pool's clients only; needs a running authenticator on its context."""
        socket.curve_server = True
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret

    def secure_client(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket talk to this pool's servers only."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP credentials check: the client must hold the pool's own key."""
        return key == self.public


def load_key(path: str | None) -> ControlKey | None:
    """The key in a file made by `write_key`, None without a path.

    Raises:
        ConfigError: unreadable, or not a key file.
    """
    if path is None:
        return None
    try:
        words = Path(path).read_bytes().split()
    except OSError as error:
        raise ConfigError(
            f"control_key_file {path}: {error.strerror}. Make one with `vllm-pd keygen {path}`."
        ) from None
    if len(words) != 2 or any(len(word) != Z85_LENGTH for word in words):
        raise ConfigError(f"control_key_file {path}: it must hold a public and a secret key, 40 characters each")
    try:
        if zmq.curve_public(words[1]) == words[0]:
            return ControlKey(*words)
    except (ValueError, zmq.ZMQError):
        pass  # not Z85
    raise ConfigError(f"control_key_file {path}: the two keys do not belong together. Make new ones: `vllm-pd keygen`.")


def write_key(path: str) -> None:
    """Make a new key file, readable by its owner only.

    Raises:
        FileExistsError: never overwrites a key.
    """
    public, secret = zmq.curve_keypair()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(public + b"\n" + secret + b"\n")
