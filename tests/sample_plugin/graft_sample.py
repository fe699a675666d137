"""The whole of a third party's plugin: one hook, one class, one health check."""

from __future__ import annotations

from vllm_graft import hookimpl
from vllm_graft.hooks.entries import Health, HealthCheck, TreePolicy


class FirstNodesPolicy:
    """Stands for a policy; only its being chosen is tested."""


@hookimpl
def graft_tree_policies() -> list[TreePolicy]:
    """Take the place of vllm-graft's own policy, as it has the same name."""
    return [TreePolicy("dynamic", "graft_sample:FirstNodesPolicy", "keeps the first nodes")]


@hookimpl
def graft_health_checks() -> list[HealthCheck]:
    """Tell ``vllm-graft doctor`` that all is well."""
    return [HealthCheck("sample", lambda: lambda: Health(True, "policy is ready"), "is it ready?")]
