"""`voltriton gateway`: OpenAI's HTTP API in front of one or more tritonservers."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import re
import signal
import socket
import sys

from voltriton_client.channel import MIB, Tls
from voltriton_client.commands.common import command, positive, read_text, seconds
from voltriton_client.errors import InvalidArgument
from voltriton_client.gateway.settings import Alias, Settings

LEAST_HEALTH_S = 0.1


@command("gateway", main_thread=True)
def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    _check(args)
    try:
        import uvicorn

        from voltriton_client.gateway.app import create_app
    except ImportError as error:
        raise InvalidArgument(f"{error.name} is not installed: pip install 'voltriton[gateway]'") from error
    app = create_app(_settings(args))
    listener = _listen(args.host, args.port)
    logging.basicConfig(format="voltriton gateway: %(message)s")
    logging.getLogger("voltriton.gateway").setLevel(logging.INFO)
    print(f"voltriton gateway: {_url(listener, args.host)} -> {', '.join(args.server)}", file=sys.stderr)
    config = uvicorn.Config(
        app,
        log_level="info" if args.verbose else "warning",
        access_log=args.verbose,
        proxy_headers=bool(args.trusted_proxy),
        forwarded_allow_ips=args.trusted_proxy or [],
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=args.grace,
    )
    # When all has ended well, uvicorn sends the signal once more: stopped as asked is status 0.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with listener:
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="voltriton gateway", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; default: %(default)s")
    parser.add_argument("--port", type=int, default=9000, help="default: %(default)s; 0: any free one")
    parser.add_argument("--verbose", "-v", action="store_true", help="a line for each request")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--server",
        action="append",
        metavar="HOST:PORT",
        help="gRPC address; several: least busy. Default: 127.0.0.1:8001",
    )
    servers.add_argument("--tls", action="store_true", help="TLS to the servers")
    servers.add_argument("--tls-ca", metavar="FILE")
    servers.add_argument("--tls-cert", metavar="FILE")
    servers.add_argument("--tls-key", metavar="FILE")
    servers.add_argument("--upstream-key-file", metavar="FILE", help="key to send to the servers (a proxy's)")
    servers.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="show only these models"
    )
    servers.add_argument(
        "--alias", action="append", default=[], metavar="NAME=MODEL[:ADAPTER]", help="public name"
    )
    servers.add_argument("--health-interval", type=seconds, default=2.0, metavar="S")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--api-keys", metavar="FILE", help="one a line: KEY, or NAME KEY; # begins a comment")
    limits.add_argument("--allow-anonymous", action="store_true", help="listen on the network without keys")
    limits.add_argument("--rate-per-key", type=positive, metavar="N", help="requests a minute for a key")
    limits.add_argument("--rate-per-ip", type=positive, metavar="N", help="requests a minute for an address")
    limits.add_argument("--max-body-mib", type=positive, default=16, metavar="N", help="default: %(default)s")
    limits.add_argument(
        "--body-timeout", type=seconds, default=30.0, metavar="S", help="default: %(default)s"
    )
    limits.add_argument(
        "--request-timeout", type=seconds, default=600.0, metavar="S", help="default: %(default)s"
    )
    limits.add_argument(
        "--max-open", type=positive, default=256, metavar="N", help="requests at a time; default: %(default)s"
    )
    limits.add_argument(
        "--grace", type=positive, default=30, metavar="S", help="for open requests at the end"
    )
    limits.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="default: none")
    limits.add_argument("--trusted-proxy", action="append", metavar="IP", help="believe its X-Forwarded-For")
    return parser


def _check(args: argparse.Namespace) -> None:
    args.server = args.server or ["127.0.0.1:8001"]
    if args.rate_per_key and not args.api_keys:
        raise InvalidArgument(
            "--rate-per-key counts by key and there are none: give --api-keys FILE, or --rate-per-ip"
        )
    for proxy in args.trusted_proxy or []:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError:
            if proxy != "*":
                raise InvalidArgument(
                    f"--trusted-proxy: got {proxy!r}, allowed: an IP address or network"
                ) from None
    for origin in args.cors_origin:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise InvalidArgument(
                f"--cors-origin: got {origin!r}, allowed: * or an origin like https://example.org:8080"
            )
    if args.health_interval < LEAST_HEALTH_S:
        raise InvalidArgument(
            f"--health-interval: got {args.health_interval:g}, allowed: {LEAST_HEALTH_S:g} or more"
        )
    if args.api_keys or args.allow_anonymous or _is_loopback(args.host):
        return
    raise InvalidArgument(
        f"--host {args.host} lets others in and there are no keys: give --api-keys FILE, or --allow-anonymous"
    )


def _url(listener: socket.socket, host: str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _settings(args: argparse.Namespace) -> Settings:
    uses_tls = args.tls or args.tls_ca or args.tls_cert or args.tls_key
    return Settings(
        servers=tuple(args.server),
        tls=Tls(args.tls_ca, args.tls_cert, args.tls_key) if uses_tls else None,
        upstream_key=read_text(args.upstream_key_file).strip() if args.upstream_key_file else None,
        models=tuple(args.model),
        aliases=tuple(Alias.parse(text) for text in args.alias),
        api_keys_file=args.api_keys,
        requests_per_minute_per_key=args.rate_per_key,
        requests_per_minute_per_ip=args.rate_per_ip,
        max_body_bytes=args.max_body_mib * MIB,
        body_timeout_s=args.body_timeout,
        request_timeout_s=args.request_timeout,
        max_open_requests=args.max_open,
        health_interval_s=args.health_interval,
        cors_origins=tuple(args.cors_origin),
    )


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything else is said. InvalidArgument: the port is taken, or no such address is here."""
    if not 0 <= port < 65536:
        raise InvalidArgument(f"--port: got {port}, allowed: 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidArgument(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from error
