"""What the routes use, composed once per process."""

from asyncio import Event
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokentape_api.collect import Collector
from tokentape_api.engine import Engine
from tokentape_api.http.bodies import Bodies
from tokentape_api.recording.cache import Sessions
from tokentape_api.recording.recorder import Recorder
from tokentape_api.settings import ApiSettings
from tokentape_api.telemetry import Telemetry
from tokentape_api.work import Workers
from tokentape_core.domain.match import Matcher
from tokentape_core.store import Store
from tokentape_core.text.render import ChatRenderer


@dataclass(frozen=True, slots=True)
class Services:
    """The process's parts, reached through `request.app.state.services`.

    Attributes:
        engine_passed: set once the engine was healthy and had passed the probe.
    """

    settings: ApiSettings
    store: Store
    sessions: Sessions
    engine: Engine
    renderer: ChatRenderer
    matchers: Mapping[str, Matcher]
    recorder: Recorder
    collector: Collector
    telemetry: Telemetry
    workers: Workers
    bodies: Bodies
    engine_passed: Event = field(default_factory=Event)
