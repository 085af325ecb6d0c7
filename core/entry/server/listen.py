"""Where a server listens: an address or a path, with TLS or without; and how it speaks HTTP."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.core.config import ConfigError
from octavo.core.entry.server.errors import bad_request


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    listener.setblocking(False)
    return listener


def listen_at(path: str) -> socket.socket:
    """A listening Unix socket. One that a dead server left behind is replaced, a living one never.

    Raises:
        ConfigError: the path cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path)
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at --uds {path}: {error}") from None
    listener.setblocking(False)
    return listener


def _remove_dead(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if is_socket:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                return
    raise OSError(errno.EADDRINUSE, "something else is there")


def leave(path: str | None) -> None:
    """Takes the Unix socket away again."""
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def check_tls(certfile: str | None, keyfile: str | None) -> None:
    """Tries the certificate before anything is loaded.

    Raises:
        ConfigError: it cannot be used.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        key = f" with --ssl-keyfile {keyfile}" if keyfile else ""
        raise ConfigError(f"--ssl-certfile {certfile}{key} cannot be used: {error}") from None


class Protocol(HttpToolsProtocol):
    """uvicorn's, but what is no HTTP gets an error in the API's form too."""

    def send_400_response(self, msg: str) -> None:
        """Answers and hangs up."""
        body = bad_request(None, "this is no valid HTTP request", "invalid_http").body()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
