"""Every bound has an explanation, a use, and tests at its edge and beyond."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from tokentape_contracts import limits

ROOT = Path(__file__).parents[2]
SOURCE = Path(str(limits.__file__)).read_text()
NAMES = [name for name in vars(limits) if name.isupper()]


def _docstrings() -> dict[str, str]:
    body = ast.parse(SOURCE).body
    return {
        node.target.id: after.value.value
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def _used_names() -> set[str]:
    folders = ("contracts", "services", "driver")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "limits.py"]
    return set(re.findall(r"\b[A-Z][A-Z_]+\b", "\n".join(path.read_text() for path in files)))


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_says_what_it_bounds(name: str) -> None:
    """It has a docstring, and its value is above 0."""
    assert len(_docstrings()[name]) > 20
    assert getattr(limits, name) > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_is_used(name: str) -> None:
    """A bound that no code reads would be a promise that nobody keeps."""
    assert name in _used_names()


def test_limits_fit_each_other() -> None:
    """The default deadline is allowed and lets existing drivers wait, and results outlive a repeat."""
    assert limits.COLLECT_DEADLINE_S < 120 < limits.COLLECT_DEADLINE_MAX_S
    assert limits.SMALL_BODY_BYTES <= limits.CHAT_BODY_BYTES
    assert limits.COLLECT_DEADLINE_S < limits.RESULT_TTL_S
    assert limits.SESSION_IDLE_S <= limits.RETENTION_MIN_S <= limits.RETENTION_S <= limits.RETENTION_MAX_S
    longest_s = limits.COLLECT_DEADLINE_MAX_S + limits.ASSEMBLY_TIMEOUT_S + limits.STORE_RETRY_S
    assert longest_s < limits.RETENTION_MIN_S
    assert (
        limits.ARCHIVE_AFTER_S + 10 * (limits.ARCHIVE_RETRY_S + limits.ARCHIVE_LEASE_S)
        < limits.RETENTION_MIN_S
    )


A, S, W, D, C = "tests/api/", "tests/store_contract/", "tests/assembler/", "tests/driver/", "tests/contracts/"
U = "tests/unit/"
TESTS: dict[str, tuple[str, str]] = {
    "CHAT_BODY_BYTES": (f"{A}test_refusals.py::test_oversized_body",) * 2,
    "SMALL_BODY_BYTES": (f"{A}test_limits.py::test_small_bodies",) * 2,
    "PROXY_BODY_BYTES": (f"{A}test_limits.py::test_forwarded_bodies",) * 2,
    "PROXY_TARGET_CHARS": (f"{A}test_limits.py::test_forwarded_targets",) * 2,
    "HEAD_BYTES": ("tests/fuzz/test_proxy.py::test_heads",) * 2,
    "REQUEST_HEAD_S": (
        f"{A}test_limits.py::test_a_head_in_time",
        f"{A}test_limits.py::test_a_head_that_does_not_end",
    ),
    "REQUEST_BODY_S": (
        f"{A}test_limits.py::test_a_body_in_time",
        f"{A}test_limits.py::test_a_body_that_does_not_go_on",
    ),
    "REPLY_STALL_S": (
        f"{A}test_limits.py::test_a_reply_that_is_read_slowly",
        f"{A}test_limits.py::test_a_reply_that_is_not_read",
    ),
    "JSON_DEPTH": (
        f"{C}test_http.py::test_a_body_may_nest_up_to_the_limit",
        f"{C}test_http.py::test_a_body_that_is_no_object_is_refused",
    ),
    "JSON_VALUES": (f"{C}test_http.py::test_values_of_a_body",) * 2,
    "BODIES_BYTES": (f"{A}test_limits.py::test_all_bodies_of_a_process",) * 2,
    "PROMPT_TEXT_BYTES": (f"{A}test_limits.py::test_the_text_of_a_prompt",) * 2,
    "PROMPT_TOKENS": (f"{A}test_limits.py::test_the_tokens_of_a_prompt",) * 2,
    "SESSION_BYTES": (f"{A}test_limits.py::test_the_bytes_of_a_session",) * 2,
    "VIEW_TOKENS": (f"{A}test_limits.py::test_the_tokens_of_a_view",) * 2,
    "SESSION_ID_CHARS": (f"{A}test_limits.py::test_session_ids",) * 2,
    "TURNS_PER_SESSION": (f"{A}test_refusals.py::test_session_full",) * 2,
    "SESSION_IDLE_S": (
        f"{S}test_limits.py::test_the_defaults_are_the_limits",
        f"{S}test_limits.py::test_an_idle_session_is_gone_after_its_time",
    ),
    "RETENTION_S": (
        f"{S}test_limits.py::test_the_defaults_are_the_limits",
        f"{S}test_limits.py::test_a_deleted_session_is_gone_after_the_retention",
    ),
    "RETENTION_MIN_S": (f"{U}test_settings.py::test_retention",) * 2,
    "RETENTION_MAX_S": (f"{U}test_settings.py::test_retention",) * 2,
    "SESSIONS_PER_TENANT": (f"{S}test_tenants.py::test_as_many_as_the_limit",) * 2,
    "TOKENS": (f"{A}test_auth.py::test_file_limits",) * 2,
    "TOKENS_FILE_BYTES": (f"{A}test_auth.py::test_file_limits",) * 2,
    "TENANT_CHARS": (f"{A}test_auth.py::test_file_limits",) * 2,
    "TOKENS_RELOAD_S": (f"{A}test_auth.py::test_a_changed_file_counts_after_a_moment",) * 2,
    "SESSION_CACHE_BYTES": (f"{A}test_limits.py::test_the_cache_of_sessions",) * 2,
    "ENGINE_TIMEOUT_S": (
        f"{A}test_limits.py::test_the_default_of_a_generation",
        f"{A}test_limits.py::test_a_generation",
    ),
    "ENGINE_REPLY_BYTES": (
        f"{A}test_limits.py::test_an_answer_of_the_engine",
        f"{A}test_limits.py::test_a_refusal_of_the_engine",
    ),
    "REPLAY_BYTES": (f"{A}test_payload.py::test_too_large_a_payload_is_not_decoded",) * 2,
    "ENGINE_CONNECTIONS": (f"{A}test_limits.py::test_connections_to_the_engine",) * 2,
    "ENGINE_CONNECT_S": (f"{A}test_limits.py::test_connecting_to_the_engine",) * 2,
    "ENGINE_KEEP_ALIVE_S": (f"{A}test_limits.py::test_idle_connections_to_the_engine",) * 2,
    "API_KEEP_ALIVE_S": (
        f"{A}test_limits.py::test_a_new_connection",
        "tests/integration/test_limits.py::test_idle_connections",
    ),
    "DRAIN_S": ("tests/integration/test_limits.py::test_draining",) * 2,
    "LAST_REQUEST_S": ("tests/integration/test_limits.py::test_a_request_on_its_way",) * 2,
    "STORE_RETRY_S": (
        f"{S}test_faults.py::test_a_command_waits_for_a_server_that_comes_back",
        f"{S}test_limits.py::test_connections",
    ),
    "STORE_CONNECTIONS": (f"{S}test_limits.py::test_connections",) * 2,
    "STORE_VALUE_BYTES": (f"{A}test_collector.py::test_all_parts_in_order",) * 2,
    "QUOTED_VALUE_CHARS": ("tests/unit/test_position.py::test_a_long_value_is_quoted_in_part",) * 2,
    "LOGPROB_MAX": (
        "tests/unit/test_decide.py::test_a_log_prob_may_be_rounded_up",
        "tests/unit/test_decide.py::test_a_generation_that_cannot_be_trained_on_is_refused",
    ),
    "WORK_INLINE_BYTES": (f"{A}test_limits.py::test_text_that_is_rendered_inline",) * 2,
    "WORK_QUEUE": (f"{A}test_work.py::test_a_full_queue",) * 2,
    "WORK_WAIT_S": (f"{A}test_work.py::test_a_wait_that_ends", f"{A}test_work.py::test_a_wait_too_long"),
    "OVERLOADED_RETRY_AFTER_S": (f"{A}test_limits.py::test_all_bodies_of_a_process",) * 2,
    "READY_TIMEOUT_S": (f"{A}test_limits.py::test_readiness",) * 2,
    "PROBE_TIMEOUT_S": (f"{A}test_limits.py::test_the_probe",) * 2,
    "SAMPLE_VALUES": (f"{C}test_samples.py::test_the_values_of_a_field",) * 2,
    "COLLECT_DEADLINE_S": (
        f"{A}test_limits.py::test_deadlines_of_a_collect",
        f"{A}test_refusals.py::test_deadline",
    ),
    "COLLECT_DEADLINE_MAX_S": (f"{C}test_http.py::test_the_longest_deadline",) * 2,
    "QUEUE_DEPTH": (f"{A}test_limits.py::test_the_queue",) * 2,
    "RESULT_TTL_S": (f"{W}test_limits.py::test_a_result_expires",) * 2,
    "ASSEMBLY_TIMEOUT_S": (f"{W}test_limits.py::test_one_assembly",) * 2,
    "WAIT_SLICE_S": (f"{A}test_limits.py::test_a_waiting_collect_looks_again",) * 2,
    "LEASE_S": (
        f"{W}test_worker.py::test_a_lease_is_renewed",
        f"{W}test_process.py::test_a_worker_is_killed",
    ),
    "REPLY_STREAM_LENGTH": (
        f"{W}test_limits.py::test_a_few_announcements_are_all_kept",
        f"{W}test_limits.py::test_announcements_are_bounded",
    ),
    "REPLY_STREAM_S": (f"{W}test_limits.py::test_announcements_are_bounded",) * 2,
    "JOB_TRIES": (f"{W}test_limits.py::test_tries",) * 2,
    "QUEUE_READ": (f"{W}test_limits.py::test_entries_of_the_queue",) * 2,
    "CHILD_START_S": (f"{W}test_limits.py::test_the_start_of_a_child",) * 2,
    "WORKER_HEAD_S": (f"{W}test_limits.py::test_heads_of_probes",) * 2,
    "WORKER_HEAD_BYTES": (f"{W}test_limits.py::test_heads_of_probes",) * 2,
    "AUDIT_ENTRIES": (
        f"{W}test_limits.py::test_the_audit_keeps_its_entries",
        f"{W}test_audit.py::test_the_audit_is_bounded",
    ),
    "ARCHIVE_EVERY_S": (f"{W}test_limits.py::test_the_archiver_comes_round",) * 2,
    "ARCHIVE_SESSIONS": (f"{W}test_archive.py::test_a_round_is_bounded",) * 2,
    "ARCHIVE_AFTER_S": (f"{W}test_archive.py::test_a_session_waits_for_its_last_collects",) * 2,
    "ARCHIVE_RETRY_S": (f"{W}test_archive.py::test_a_session_is_tried_again_soon",) * 2,
    "ARCHIVE_LEASE_S": (
        f"{W}test_archive.py::test_sealed_sessions_are_archived",
        f"{W}test_archive.py::test_an_archive_that_hangs",
    ),
    "DRIVER_OPEN_S": (f"{D}test_limits.py::test_opening",) * 2,
    "DRIVER_COLLECT_S": (
        f"{D}test_collect.py::test_default_deadlines_fit",
        f"{D}test_limits.py::test_collecting",
    ),
    "DRIVER_HEAD_START": (f"{D}test_limits.py::test_the_servers_head_start",) * 2,
    "DRIVER_HEAD_START_MAX_S": (f"{D}test_limits.py::test_the_servers_head_start",) * 2,
    "DRIVER_DELETE_S": (f"{D}test_limits.py::test_deleting",) * 2,
    "DRIVER_KEEP_ALIVE_S": (f"{D}test_limits.py::test_idle_connections",) * 2,
    "DRIVER_QUOTED_BODY_CHARS": (f"{D}test_limits.py::test_a_quoted_body",) * 2,
    "DRIVER_AGENT_ERROR_CHARS": (f"{D}test_limits.py::test_an_agents_error",) * 2,
}
"""Bound → the test at its edge, where all is well, and the test beyond it. Often they are one."""

SENT: dict[str, str] = {
    "QUEUE_RETRY_AFTER_S": f"{A}test_limits.py::test_a_full_queue_says_when_to_come_again",
    "SESSIONS_RETRY_AFTER_S": f"{A}test_limits.py::test_sessions_of_a_tenant",
}
"""Numbers that are only said to somebody, and so have no edge."""


def test_every_limit_has_tests() -> None:
    """A new bound needs tests, or a reason why there can be none."""
    assert TESTS.keys() | SENT.keys() == set(NAMES)
    assert not TESTS.keys() & SENT.keys()


def test_the_tests_of_the_limits_are_there() -> None:
    """Each test that a bound names exists."""
    named = {test for pair in TESTS.values() for test in pair} | set(SENT.values())
    for path in sorted({test.partition("::")[0] for test in named}):
        body = ast.parse((ROOT / path).read_text()).body
        functions = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert {test.partition("::")[2] for test in named if test.startswith(path)} <= functions, path
