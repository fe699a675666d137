"""The whole of a third party's plugin: one hook, one class, one health check."""

from vllm_graft.api import Health, entries, hookimpl


class FirstNodesPolicy:
    """A stand-in for a policy; tests only check that it is chosen."""


@hookimpl
def graft_tree_policies() -> list[entries.TreePolicy]:
    """Take the place of vllm-graft's own policy, as it has the same name."""
    return [entries.TreePolicy("dynamic", "graft_sample:FirstNodesPolicy", "keeps the first nodes")]


@hookimpl
def graft_health_checks() -> list[entries.HealthCheck]:
    """Tell ``vllm-graft doctor`` that all is well."""

    def check() -> Health:
        return Health(True, "policy is ready")

    return [entries.HealthCheck("sample", lambda: check, "is it ready?")]
