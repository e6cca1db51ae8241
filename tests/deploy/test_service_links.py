"""The variables that Kubernetes sets in pods for Services, which look like settings where a Service is called
`tokentape…`."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.deploy.rendered import of_kind
from tokentape_cli import options

SERVICES = ["tokentape", "tokentape-metrics", *(m["metadata"]["name"] for m in of_kind("dev", "Service"))]
TOKENTAPE = Path(sys.executable).parent / "tokentape"


def links(service: str, address: str = "10.0.0.1", port: int = 8080, protocol: str = "tcp") -> dict[str, str]:
    """What Kubernetes sets for a Service with one port, which is called `http`."""
    name = service.upper().replace("-", "_")
    url = f"{protocol}://{address}:{port}"
    each = f"{name}_PORT_{port}_{protocol.upper()}"
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_HTTP": str(port),
        f"{name}_PORT": url,
        each: url,
        f"{each}_PROTO": protocol,
        f"{each}_PORT": str(port),
        f"{each}_ADDR": address,
    }


def resolved(**environment: str) -> dict[str, options.Setting]:
    return options.resolve(Namespace(), options.ALL, environment)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("address", ["10.0.0.1", "[fd00::1]"])
@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_service_links_are_no_settings(service: str, address: str, protocol: str) -> None:
    """None is refused as unknown, and none is taken for an option: TOKENTAPE_PORT, TOKENTAPE_METRICS_PORT."""
    assert resolved(**links(service, address, protocol=protocol)) == resolved()


def test_settings_beside_service_links_count() -> None:
    """A pod's own variables win over Kubernetes', of which the others are still there."""
    found = resolved(**links("tokentape") | {"TOKENTAPE_PORT": "9000", "TOKENTAPE_METRICS_PORT": "9100"})
    assert found["port"] == options.Setting(9000, "environment")
    assert found["metrics-port"] == options.Setting(9100, "environment")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENTAPE_API_PORT", "8080"),
        ("TOKENTAPE_METRIC_PORT", "9100"),
        ("TOKENTAPE_PORT_8080", "tcp://10.0.0.1:8080"),
        ("TOKENTAPE_SERVICE_PORT", "http"),
        ("TOKENTAPE_SERVICE", "tokentape"),
        ("TOKENTAPE_ENGINE_URI", "tcp://10.0.0.1:8080"),
    ],
)
def test_a_misspelt_setting_is_no_service_link(name: str, value: str) -> None:
    """What Kubernetes would not have set is refused as before."""
    with pytest.raises(options.UsageError, match=f"the environment variable {name} is unknown"):
        resolved(**{name: value})


def test_a_port_that_is_no_service_link_is_refused() -> None:
    """Only `tcp://…` and its like are Kubernetes'; another wrong port is the user's."""
    with pytest.raises(options.UsageError, match="TOKENTAPE_PORT"):
        resolved(TOKENTAPE_PORT="http://10.0.0.1:8080")


def test_the_command_in_such_a_pod() -> None:
    """A process with all these variables runs, on the ports that it has without them."""
    foreign = {key: value for key, value in os.environ.items() if not key.startswith(options.PREFIX)}
    surrounded = foreign | {key: value for service in SERVICES for key, value in links(service).items()}
    plain, linked = (
        subprocess.run(
            [TOKENTAPE, "config"], env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for environment in (foreign, surrounded)
    )
    assert linked == plain
    assert "8080" in linked
