"""The page of `/metrics` of an engine in this process."""


def metrics_page() -> str:
    """Prometheus text of the engine that was built last; it needs ``disable_log_stats=False``."""
    from prometheus_client import REGISTRY, generate_latest

    return generate_latest(REGISTRY).decode()
