"""The doctor's checks, in their order."""

from __future__ import annotations

from aiomooncake.cli import cluster_checks as cluster
from aiomooncake.cli import host_checks as host
from aiomooncake.cli.doctor import Check

__all__ = ["checks"]

_IMPORT_TIME = 20.0
"""Seconds; a first import from a slow disk takes a few."""


def checks(timeout: float) -> tuple[Check, ...]:
    """Return all checks.

    Args:
        timeout: Seconds for the trial.
    """
    settings, running = ("settings",), ("settings", "master")
    native, any_kind = ("master", "local"), ("master", "local", "memory")
    return (
        Check("settings", host.check_settings, kinds=any_kind),
        Check("engine", host.check_engine, kinds=native, seconds=_IMPORT_TIME),
        Check("gil", host.check_gil, ("engine",), native),
        Check("address", host.check_address, settings),
        Check("devices", host.check_devices, settings),
        Check("memory", host.check_memory, settings),
        Check("client", cluster.check_client, settings),
        Check("metadata", cluster.check_coordinators, settings),
        Check("master", cluster.check_master, settings),
        Check("health", cluster.check_health, running),
        Check("versions", cluster.check_versions, ("engine", *running)),
        Check("segments", cluster.check_segments, (*running, "health")),
        Check("peers", cluster.check_peers, (*running, "segments")),
        Check(
            "trial",
            cluster.check_trial,
            ("engine", *running, "address", "devices", "client", "metadata", "health", "segments"),
            any_kind,
            seconds=timeout + cluster.TRIAL_GRACE,
        ),
    )
