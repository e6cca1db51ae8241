"""One bounded profile: no deadline for a single example, as the machine may be busy."""

import hypothesis

hypothesis.settings.register_profile(
    "bounded",
    deadline=None,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("bounded")
