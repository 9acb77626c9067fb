"""The workers of a dask scheduler that somebody else has started: we are its guest and change nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from selfvitmil.engine.workers import Workers, first_line
from selfvitmil.errors import ConfigError, EngineError
from selfvitmil.settings import EngineSettings

_CONNECT_S = 8


def check_address(settings: EngineSettings) -> None:
    """Raise where the scheduler's address, or what it asks for, cannot be meant."""
    address = settings.cluster
    if address is None:
        return
    if address.startswith("tls://"):
        files = {"tls_ca": settings.tls_ca, "tls_cert": settings.tls_cert, "tls_key": settings.tls_key}
        missing = [name for name, path in files.items() if path is None]
        if missing:
            raise ConfigError(
                f"engine.{', engine.'.join(missing)} missing",
                f"the scheduler at {address} and we must prove to each other who we are",
                "Give the files that its administrator made for you",
            )
        for name, path in files.items():
            if path is not None and not path.is_file():
                raise ConfigError(f"{path.name}: no such file", f"engine.{name} names it", "Correct the path")
    elif not address.startswith("tcp://"):
        raise ConfigError(f"engine.cluster = {address!r} is no address of a scheduler", how="Write tls://host:port")
    elif not settings.insecure:
        raise ConfigError(
            f"engine.cluster = {address!r} is not encrypted",
            "whoever reaches such a port can run any code as you",
            "Use a scheduler with TLS (tls://host:port), or pass --insecure in a network where all are trusted",
        )


@contextmanager
def external_workers(settings: EngineSettings) -> Iterator[Workers]:
    """Those at `settings.cluster`; they stay when we leave."""
    from distributed import Client
    from distributed.security import Security

    address = str(settings.cluster)
    security = None
    if address.startswith("tls://"):
        security = Security(
            require_encryption=True,
            tls_ca_file=str(settings.tls_ca),
            tls_client_cert=str(settings.tls_cert),
            tls_client_key=str(settings.tls_key),
        )
    try:
        client = Client(address, security=security, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"the scheduler at {address} cannot be reached",
            first_line(error),
            "Check that it runs, that its port is open from here and that the certificates are its own",
        ) from None
    try:
        yield Workers(client)
    finally:
        client.close()
