"""How many cases a fuzzer tries: seconds' worth in the default suite, `pytest tests/fuzz --budget N` for a long run."""

from hypothesis import HealthCheck, settings

chosen: int | None = None  # the value of --budget, set by tests/conftest.py before any test is imported


def cases(default: int) -> int:
    """Number of cases of one fuzzer, `default` unless --budget says otherwise."""
    return default if chosen is None else chosen


def fuzz(default: int) -> settings:
    """Settings of a hypothesis fuzzer. A long run draws cases of its own each time; the default suite repeats its."""
    if chosen is None:
        return settings(max_examples=default)
    return settings(max_examples=chosen, derandomize=False, suppress_health_check=list(HealthCheck))
