"""OpenTelemetry traces, if the environment asks for them and the extra `[otel]` is installed.

A trace crosses processes as W3C Trace Context: the headers `traceparent` and `tracestate`.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, Literal, Protocol

from tokentape_contracts.errors import TokentapeError
from tokentape_core import logs

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Either of these variables switches tracing on."""

Kind = Literal["server", "client", "consumer", "internal"]

log = logging.getLogger("tokentape.tracing")


class Tracing(Protocol):
    """Where spans go."""

    def span(
        self,
        name: str,
        kind: Kind = "internal",
        carrier: Mapping[str, str] | None = None,
        **attributes: str,
    ) -> AbstractContextManager[None]:
        """A span around the block.

        Args:
            name: one of few.
            carrier: headers of another process, whose trace is continued; None stays below the span around
                this one.
        """

    def annotate(self, **attributes: str | float) -> None:
        """Adds attributes to the span that this runs in."""

    def headers(self) -> dict[str, str]:
        """What continues the trace in another process; empty if there is none."""

    def continued(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """A request's headers, for the process that it is passed on to."""
        return {**dict(headers.items()), **own} if (own := self.headers()) else headers

    def close(self) -> None:
        """Sends what is not sent yet. Blocks, for seconds if nobody receives it."""


class NoTracing(Tracing):
    """Traces nothing, at no cost."""

    def span(self, *_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()

    def annotate(self, **_: object) -> None:
        pass

    def headers(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


class OpenTelemetry(Tracing):
    """Traces into a provider of the SDK.

    An exception marks the span as failed and gives its code, not its text, which may quote a payload.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tokentape")
        self._propagator = TraceContextTextMapPropagator()
        self._api = trace

    def span(
        self,
        name: str,
        kind: Kind = "internal",
        carrier: Mapping[str, str] | None = None,
        **attributes: str,
    ) -> AbstractContextManager[None]:
        if carrier is None and not self._api.get_current_span().is_recording():
            return nullcontext()  # below one that was not sampled
        return self._span(name, kind, carrier, attributes)

    @contextmanager
    def _span(
        self, name: str, kind: Kind, carrier: Mapping[str, str] | None, attributes: Mapping[str, str]
    ) -> Iterator[None]:
        with self._tracer.start_as_current_span(
            name,
            None if carrier is None else self._propagator.extract(carrier),
            self._api.SpanKind[kind.upper()],
            {f"tokentape.{key}": value for key, value in attributes.items()},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            if carrier is not None:
                logs.note(trace=f"{span.get_span_context().trace_id:032x}")
            try:
                yield
            except BaseException as error:
                ours = error.code if isinstance(error, TokentapeError) else None
                span.set_attribute("error.type", ours or type(error).__name__)
                span.set_status(self._api.StatusCode.ERROR)
                raise

    def annotate(self, **attributes: str | float) -> None:
        self._api.get_current_span().set_attributes(
            {f"tokentape.{key}": value for key, value in attributes.items()}
        )

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    def close(self) -> None:
        self._provider.shutdown()


def from_environment(service: str, environment: Mapping[str, str] = os.environ) -> Tracing:
    """What OpenTelemetry's standard variables ask for; they configure it too.

    Args:
        service: the service's name, unless `OTEL_SERVICE_NAME` gives another.
    """
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    )
    if is_off or not any(environment.get(name) for name in ENDPOINTS):
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning(
            "nothing is traced: pip install '.[otel]' in a clone of Tokentape, or unset %s",
            " and ".join(ENDPOINTS),
        )
        return NoTracing()
    name = environment.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetry(provider)
