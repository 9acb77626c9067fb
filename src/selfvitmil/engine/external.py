"""Workers of a dask scheduler that is already running. They are only used, never started or stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from selfvitmil.engine.workers import Workers, first_line
from selfvitmil.errors import ConfigError, EngineError
from selfvitmil.settings import EngineSettings

_CONNECT_S = 8


def check_address(settings: EngineSettings) -> None:
    """Raise ConfigError if the scheduler's address or its TLS files are invalid."""
    address = settings.cluster
    if address is None:
        return
    if address.startswith("tls://"):
        files = {"tls_ca": settings.tls_ca, "tls_cert": settings.tls_cert, "tls_key": settings.tls_key}
        missing = [name for name, path in files.items() if path is None]
        if missing:
            raise ConfigError(
                f"engine.{', engine.'.join(missing)} missing",
                f"the scheduler at {address} requires mutual TLS authentication",
                "Give the certificate files provided by its administrator",
                code="tls-files-missing",
            )
        for name, path in files.items():
            if path is not None and not path.is_file():
                raise ConfigError(
                    f"{path.name}: no such file", f"set in engine.{name}", "Correct the path", code="tls-file-not-found"
                )
    elif not address.startswith("tcp://"):
        raise ConfigError(
            f"engine.cluster = {address!r} is not a scheduler address",
            how="Use tls://host:port",
            code="invalid-scheduler-address",
        )
    elif not settings.insecure:
        raise ConfigError(
            f"engine.cluster = {address!r} is not encrypted",
            "anyone who can reach that port can run code as you",
            "Use a scheduler with TLS (tls://host:port), or pass --insecure in a trusted network",
            code="insecure-scheduler",
        )


@contextmanager
def external_workers(settings: EngineSettings) -> Iterator[Workers]:
    """Yield the workers at `settings.cluster`; they keep running afterwards."""
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
            "Check that it is running, that its port is reachable and that the certificates match",
            code="scheduler-unreachable",
        ) from None
    try:
        yield Workers(client)
    finally:
        client.close()
